"""K7: the forward in FP8.

The idea          e4m3 operands: the tensor cores take 8 bits at twice the rate of 16, and memory half the
                  bytes. V comes transposed, its tokens in the order in which P lies in registers, so that P
                  needs no shuffle; behind its columns come eight of ones, and P·V gives the row sums of P as
                  it was rounded.
What changes      against k6: the operands and what scales them; P is rounded to e4m3, whose range a lazy
                  maximum must stay within; no sum of P on CUDA cores; sums of the tensor cores, which keep
                  13 bits, are moved to fp32 in time; O has a place of its own.
What does not     persistent CTAs, rings, warp specialisation, the lag of P·V behind Q·Kᵀ, hidden keys apart.
Supports          bf16 and fp16 output; head_dim 64, 128, 256; lengths ≥ 1; GQA and MQA; masks as k6. Operands
                  as `device.fp8` has them; softmax_scale is given at each launch.
Note              notes/k7.md: why V lies as it does, what the accumulator keeps, what lost.
"""

import math
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .calls_fp8 import fp8_scratch, refuse_fp8, run_fp8
from .contract import Compiled, LazyMaximum, Problem, Scratch, Stage, Tensors, Work
from .device.block_scales import BlockScales, HeadScales
from .device.compiling import ELEMENTS, compile_for_torch, fake_fp32, fake_gqa, fake_rows
from .device.constants import LN_2, LOG2_E, SMEM_MAX, SMS, WARP, WARPGROUP
from .device.flushed import add_flushed, flush, own_quads, zeroed_here
from .device.fp8 import ONES_ROWS
from .device.half_scores import ScoresInHalf
from .device.masks import Mask, mask_of
from .device.p_codes import LIMIT, OFFSET, ScoresInFp32
from .device.products import Products, Rows, multiply_qk
from .device.query_tiles import ROWS, Config, QueryTiles, work_on_query_tiles
from .device.rings import CONSUMER, PRODUCER, OwnStages, await_next, leave_hidden, put, skip, tma_rings
from .device.rows import OWN_ROWS
from .device.stores import WARP_ROWS, WARPS, WarpStores, await_stores, rounded, store_of_rows, store_warp_rows
from .device.tile_order import fetch, hear, message_ring, tell
from .device.tma import allocate_tiles, load_atom, partition_tma, row_slices, store_atom
from .device.wgmma import by_row, multiply
from .k6 import END, FIRST, FOLLOWS

STAGES = (
    Stage(
        "k7",
        "FP8",
        "e4m3 operands, V transposed and permuted, row sums by the tensor cores, O flushed to fp32",
        "k6",
        direction="fp8",
        model="flash_attention_lazy",
        rounds_p=True,
    ),
)

E4M3 = cutlass.Float8E4M3FN
PV_COLUMNS = {64: 72, 128: 136, 256: 88}  # of an instruction of P·V, by head_dim: all, or a third of 264

CONFIGS = {  # by head_dim; registers of a producer's thread and of a consumer's, stages of K and of V
    64: Config(consumers=3, tile_kv=128, stages=6, registers=(32, 160), parts=2),
    128: Config(consumers=2, tile_kv=128, stages=4, registers=(24, 240), parts=2),
    256: Config(consumers=2, tile_kv=128, stages=2, registers=(24, 240), parts=2),
}
FLUSH_KEYS = 4096  # after so many O is added to a sum in fp32


class FP8Forward(QueryTiles):
    """The CTA: C = `consumers` warpgroups and a producer warp, barriers as `k6.FlashAttentionForward`'s but
    for Barrier.Q_READ, since O has shared memory of its own.

    mQ, mK      (batch, heads, seqlen, head_dim) e4m3
    mVt         (batch, kv_heads, head_dim + 8, tokens) e4m3, as `device.fp8` has Vt8
    mFlushed    (consumer of the launch, 64·head_dim) fp32 scratch
    mQs…mVs     fp32 (batch, kv_heads, 1): what codes of Q, K and V are multiplied by. With `block_scales`
                those of Q are (batch, heads, blocks of 64 queries), those of K (batch, kv_heads, blocks of 64
                keys), and in V's place are the exponents of its blocks: V = V8 · 2^e.

    O goes to fp32 after every `flush_keys`; the last `direct_keys` of a tile have codes of P without
    exponentials, and with `in_half` scores in fp16 (`device.p_codes`, `device.half_scores`).
    """

    def __init__(
        self,
        head_dim: int,
        mask: Mask,
        dtype: str,
        config: Config | None = None,
        sms: int = SMS,
        block_scales: bool = False,
        flush_keys: int = FLUSH_KEYS,
        direct_keys: int = 0,
        in_half: bool = False,
    ):
        config = config or CONFIGS[head_dim]
        super().__init__(head_dim, mask, ROWS * config.consumers, config.tile_kv)
        self.dtype, self.config, self.sms, self.block_scales = ELEMENTS[dtype], config, sms, block_scales
        self.consumers, self.stages = config.consumers, config.stages
        self.columns = head_dim + ONES_ROWS
        self.scales = (BlockScales if block_scales else HeadScales)(config.tile_kv, config.stages)
        if in_half:
            self.softmax = ScoresInHalf(config.tile_kv, direct_keys)
        else:
            self.softmax = ScoresInFp32(config.tile_kv, config.parts, direct_keys)
        self.chunk = flush_keys // config.tile_kv  # tiles of keys between two flushes
        self.threads = WARPGROUP * (self.consumers + 1)
        self.q_stages = 2 if self.tile_bytes(2) <= SMEM_MAX // config.ctas - 1024 else 1
        # The tiles that only other consumers see must fit beside one stage of V: `rings.leave_hidden`.
        assert math.ceil((self.tile_q - ROWS) / self.tile_kv) < self.stages

    def section_bytes(self, seqlen_kv):
        return cutlass.min(seqlen_kv, 2048) * 4096  # the same heads up to 2048 keys, then 4 MiB

    def tile_bytes(self, q_stages: int) -> int:
        q_and_o = (q_stages + 2) * self.tile_q * self.head_dim
        return q_and_o + self.stages * self.tile_kv * (self.head_dim + self.columns)

    @property
    def smem_bytes(self) -> int:
        barriers = 2 * (self.q_stages * self.consumers + 2 * self.stages + 1)
        return self.tile_bytes(self.q_stages) + self.scales.bytes + 16 + barriers * 8

    @cute.jit
    def __call__(self, mQ, mK, mVt, mO, mLSE, mFlushed, mCounter, mQs, mKs, mVs, scale, stream):
        batch, heads, seqlen_q, _ = mQ.shape
        loads = *load_atom(mQ, ROWS), *load_atom(mK, self.tile_kv)
        loads = *loads, *load_atom(mVt, self.columns // self.v_boxes, self.tile_kv)
        K = OperandMajorMode.K
        source = warpgroup.OperandSource
        mmas = [
            make_trivial_tiled_mma(E4M3, E4M3, K, K, sums, (1, 1, 1), (ROWS, n), place)
            for n, place, sums in (
                (self.tile_kv, source.SMEM, self.softmax.accumulator),
                (PV_COLUMNS[self.head_dim], source.RMEM, Float32),
            )
        ]
        # O's accumulator without the sums, as a product of 16 bits has it
        mma_o = make_trivial_tiled_mma(
            self.dtype, self.dtype, K, K, Float32, (1, 1, 1), (ROWS, self.head_dim)
        )
        tiles = cute.ceil_div(seqlen_q, self.tile_q) * heads * batch
        scratch_and_scales = mFlushed, mCounter, mQs, mKs, mVs
        self.kernel(
            *mmas, mma_o, *loads, *store_atom(mO, WARP_ROWS), mLSE, *scratch_and_scales, tiles, scale
        ).launch(
            grid=(cutlass.min(tiles, self.sms * self.config.ctas), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.ctas,  # who share the registers of an SM
            preferred_smem_carveout=None if self.config.ctas == 1 else 100,
            stream=stream,
        )

    @property
    def v_boxes(self) -> int:
        """In how many parts a tile of V comes: a TMA's box has at most 256 rows."""
        return self.columns // PV_COLUMNS[self.head_dim]

    @cute.kernel
    def kernel(
        self, mma_qk, mma_pv, mma_o, load_Q, mQ, load_K, mK, load_V, mVt, store_O, mO, mLSE, mFlushed,
        mCounter, mQs, mKs, mVs, tiles, scale,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen_q, seqlen_kv = mQ.shape[0], mK.shape[0]
        consumer_warps = WARPS * self.consumers
        scale_log2, given_scales = scale * LOG2_E, (mQs, mKs, mVs)

        smem = SmemAllocator()
        q_places = self.q_stages * self.consumers  # of Q; a consumer's are its number, and that + consumers
        sQ = allocate_tiles(smem, E4M3, ROWS, self.head_dim, q_places)  # (row, head_dim, place)
        sO = allocate_tiles(smem, self.dtype, ROWS, self.head_dim, self.consumers)
        sK = allocate_tiles(smem, E4M3, self.tile_kv, self.head_dim, self.stages)  # (key, head_dim, stage)
        sVt = allocate_tiles(smem, E4M3, self.columns, self.tile_kv, self.stages)  # (column, key, stage)
        sV_boxes = row_slices(sVt, self.columns // self.v_boxes)  # (column, key, box of a stage)
        sScales = self.scales.allocate(smem)
        sTile = smem.allocate_tensor(Int32, cute.make_layout(4), 16)  # announced, q_block, head, batch
        q_bytes, k_bytes = ROWS * self.head_dim, self.tile_kv * self.head_dim
        q_ring, k_ring, v_ring = tma_rings(
            smem,
            (q_places, q_bytes, WARPS),  # every consumer waits for its own rows of Q
            (self.stages, k_bytes, consumer_warps),
            (self.stages, self.tile_kv * self.columns, consumer_warps),
            lane=cute.arch.shuffle_sync(cute.arch.lane_idx(), cute.arch.lane_idx()),
        )
        tile_ring = message_ring(smem, WARPGROUP * self.consumers)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()  # named barrier 0, of everyone
        group = mQ.shape[2] // mK.shape[2]

        if warp_idx >= consumer_warps:
            # 1. the producer, as k6's
            cute.arch.setmaxregister_decrease(self.config.registers[0])
            if warp_idx == consumer_warps:
                q_put = pipeline.make_pipeline_state(PRODUCER, q_places)
                kv_put = pipeline.make_pipeline_state(PRODUCER, self.stages)
                tile_put = pipeline.make_pipeline_state(PRODUCER, 1)
                tile, _, _ = cute.arch.block_idx()
                announced = Int32(FIRST)
                while tile < tiles:
                    q_block, head, batch = self.locate(tile, mQ, mK)
                    tell(tile_ring, tile_put, sTile, (announced, q_block, head, batch))
                    tile_put.advance()
                    kv_head = head // group
                    # (TMA, block of rows) in global memory, (TMA, place or stage) in shared
                    tQgQ, tQsQ = partition_tma(load_Q, mQ[None, None, head, batch], sQ)
                    tKgK, tKsK = partition_tma(load_K, mK[None, None, kv_head, batch], sK)
                    # of V a block's columns, which are rows here, in boxes: (TMA, box, block of keys)
                    tVgV, tVsV = partition_tma(
                        load_V, mVt[None, None, kv_head, batch], sV_boxes, (None, None)
                    )
                    of_kv = sScales, mKs[batch, kv_head, None], mVs[batch, kv_head, None]
                    for i in range_constexpr(self.consumers):
                        put(q_ring, q_put, load_Q, tQgQ[None, q_block * self.consumers + i], tQsQ)
                        q_put.advance()
                        if const_expr(i == 0):
                            self.scales.put(k_ring, kv_put, of_kv, 0)
                            put(k_ring, kv_put, load_K, tKgK[None, 0], tKsK)
                    self.put_v(v_ring, kv_put, load_V, tVgV[None, None, 0], tVsV)
                    kv_put.advance()
                    kv_blocks = self.kv_blocks(q_block * self.tile_q + self.tile_q, seqlen_q, seqlen_kv)
                    for block in range(1, kv_blocks, unroll=1):
                        self.scales.put(k_ring, kv_put, of_kv, block)
                        put(k_ring, kv_put, load_K, tKgK[None, block], tKsK)
                        self.put_v(v_ring, kv_put, load_V, tVgV[None, None, block], tVsV)
                        kv_put.advance()
                    tile = fetch(mCounter, tiles)
                    announced = Int32(FOLLOWS)
                tell(tile_ring, tile_put, sTile, (END, 0, 0, 0))
        else:
            # 2. a consumer, as k6's
            cute.arch.setmaxregister_increase(self.config.registers[1])
            consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
            thread = tidx % WARPGROUP
            q_get = OwnStages(q_places, self.consumers, consumer)
            k_get, v_get = [pipeline.make_pipeline_state(CONSUMER, self.stages) for _ in range(2)]
            tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
            x = Products(mma_qk, mma_pv, sQ, sK, sVt, k_ring, v_ring, self.softmax.accumulator)
            rows = Rows(x, self.config.parts, thread, seqlen_q, seqlen_kv)
            rO, sums = self.o_and_sums(x.rO)
            O, row_max, row_sum = by_row(rO), rows.max, rows.sum
            flushed = own_quads(mFlushed, cta * self.consumers + consumer, thread, self.head_dim)
            base = cute.make_rmem_tensor(OWN_ROWS, Float32)
            o_stores = WarpStores(mma_o, sO, store_O, mO, thread, warp_idx, consumer_warps)

            announced, q_block, head, batch = hear(tile_ring, tile_get, sTile)
            tile_get.advance()
            q_ring.consumer_wait(q_get)
            k_ring.consumer_wait(k_get)
            multiply_qk(x, q_get, k_get)
            first_row, kv_blocks, own_blocks, visible = self.span(q_block, consumer, seqlen_q, seqlen_kv)
            qk_scale, v_scale = self.scales.of_tile(given_scales, scale_log2, batch, head, first_row, group)
            warpgroup.wait_group(0)
            while announced != END:
                factors = self.scales.factors(qk_scale, sScales, k_get)
                k_ring.consumer_release(k_get)
                k_get.advance()
                if visible == 0:
                    self.softmax.hide(self, x, rows, first_row, 0)
                row_sum.fill(0.0)
                self.softmax.first(x, rows, factors)

                # 3. main loop: the tiles that are seen whole, those with hidden keys, those all hidden
                scales = qk_scale, sScales
                # After each `chunk` of the first O goes to its sum in fp32, and begins anew with `begun`.
                begun = Int32(0)
                for first in range(1, visible, self.chunk, unroll=1):
                    end = cutlass.min(visible, first + self.chunk)
                    for block in range(first, end, unroll=1):
                        self.step(x, rows, sums, scales, first_row, block, begun, q_get, k_get, v_get, False)
                        v_get = k_get.clone()
                        k_get.advance()
                    if end == first + self.chunk:
                        flush(rO, flushed, base, row_max, begun == 0)
                        begun = end - 1
                for block in range(cutlass.max(1, visible), own_blocks, unroll=1):
                    self.step(x, rows, sums, scales, first_row, block, begun, q_get, k_get, v_get, True)
                    k_get.advance()
                    v_get.advance()
                hidden, past_the_end = kv_blocks - own_blocks, first_row >= seqlen_q
                hidden, k_get, v_get = leave_hidden(
                    hidden, past_the_end, k_ring, v_ring, k_get, v_get, self.mask.hides
                )
                q_ring.consumer_release(q_get)

                # 4. the last P·V (if Q has two stages, beside the next tile's first Q·Kᵀ); then O and LSE
                this_tile, this_row, this_v_scale = (q_block, head, batch), first_row, v_scale
                v_ring.consumer_wait(v_get)
                multiply_pv(x, v_get, own_blocks, begun)  # of the tile before `own_blocks`, the last
                announced, q_block, head, batch = hear(tile_ring, tile_get, sTile)
                tile_get.advance()
                q_get.advance()
                if const_expr(self.q_stages == 2):
                    k_get = await_next(q_ring, k_ring, q_get, k_get, hidden, announced != END)
                    multiply_qk(x, q_get, k_get)
                first_row, kv_blocks, own_blocks, visible = self.span(q_block, consumer, seqlen_q, seqlen_kv)
                qk_scale, v_scale = self.scales.of_tile(
                    given_scales, scale_log2, batch, head, first_row, group
                )
                warpgroup.wait_group(self.q_stages - 1)  # P·V; the next Q·Kᵀ, if it is issued, may go on
                v_ring.consumer_release(v_get)
                v_get.advance()
                v_get = skip(v_ring, v_get, hidden)
                if begun > 0:
                    add_flushed(rO, flushed, base, row_max)
                lse = [None, None]
                for r in range_constexpr(OWN_ROWS):
                    total = row_sum[r] + sums[r]
                    inverse = 0.0 if total == 0.0 else this_v_scale * cute.arch.rcp_approx(total)
                    lse[r] = (row_max[r] + cute.math.log2(total, fastmath=True)) * LN_2
                    O[r, None].store(O[r, None].load() * inverse)
                rO16 = rounded(rO, self.dtype)
                await_stores()
                store_warp_rows(o_stores, rO16, consumer, this_tile)
                store_of_rows(mLSE[this_tile[2], this_tile[1], None], this_row, seqlen_q, rows.where_S, lse)
                if const_expr(self.q_stages == 1):
                    k_get = await_next(q_ring, k_ring, q_get, k_get, hidden, announced != END)
                    multiply_qk(x, q_get, k_get)
                warpgroup.wait_group(0)

            await_stores()

    @cute.jit
    def put_v(self, ring, state, atom, source, destination):
        """`put`, of a tile in boxes: (TMA, box) to (TMA, box of a stage)."""
        ring.producer_acquire(state)
        for box in range_constexpr(self.v_boxes):
            there = destination[None, state.index * self.v_boxes + box]
            cute.copy(atom, source[None, box], there, tma_bar_ptr=ring.producer_get_barrier(state))

    def o_and_sums(self, rO):
        """O without the sums, as one instruction's accumulator ((2, 2, d/8), 1, 1), and the sums of this
        thread's rows."""
        layout = cute.make_layout(((2, 2, self.head_dim // 8), 1, 1))
        sums = cute.make_tensor(rO.iterator + cute.size(layout), cute.make_layout(OWN_ROWS, stride=2))
        return cute.make_tensor(rO.iterator, layout), sums

    def step(self, x, rows, sums, scales, first_row, kv_block, begun, q_get, k_get, v_get, masked: bool):
        """Q·Kᵀ of one tile beside P·V of the tile before, and the softmax of the one."""
        x.k_ring.consumer_wait(k_get)
        multiply_qk(x, q_get, k_get)
        factors = self.scales.factors(*scales, k_get)
        x.v_ring.consumer_wait(v_get)
        multiply_pv(x, v_get, kv_block, begun)
        warpgroup.wait_group(1)
        x.k_ring.consumer_release(k_get)
        if masked:
            self.softmax.hide(self, x, rows, first_row, kv_block)
        self.softmax.exponents(x, rows, factors)
        warpgroup.wait_group(0)
        x.v_ring.consumer_release(v_get)
        self.softmax.codes(x)
        for r in range(OWN_ROWS):
            rows.sum[r] += sums[r]
            sums[r] = zeroed_here(sums[r])


def multiply_pv(x: Products, v_get, kv_block, begun) -> None:
    """`products.multiply_pv`, for an O that begins with tile `begun`."""
    multiply(x.mma_pv, x.rO, x.tOrP, x.tOrV[None, None, None, v_get.index], kv_block - 1 != begun)


supports = refuse_fp8


def workspace(problem: Problem, **options: object) -> Scratch:
    kernel = kernel_for(problem, **options)
    return fp8_scratch(problem, kernel.sms * kernel.config.ctas, kernel.consumers)


def kernel_for(problem: Problem, **options: object) -> FP8Forward:
    return FP8Forward(problem.head_dim, mask_of(problem), problem.dtype, **options)


def work(problem: Problem, **options: object) -> list[Work]:
    kernel = kernel_for(problem, **options)
    work = work_on_query_tiles(kernel, problem)
    columns = problem.head_dim + kernel.columns  # of both products, with the ones behind V
    return [replace(work, tensor_flops=work.tensor_flops * columns / (2 * problem.head_dim))]


def lazy_maximum(problem: Problem, **options: object) -> LazyMaximum:
    kernel = kernel_for(problem, **options)
    return LazyMaximum(kernel.tile_kv, kernel.config.parts, LIMIT - OFFSET, e4m3=OFFSET)


def compile_kernel(problem: Problem, **options: object) -> object:
    kernel, d = kernel_for(problem, **options), problem.head_dim
    q, k, _, o = fake_gqa(d, problem.dtype)
    scales = [fake_fp32(x, last=cute.sym_int()) for x in (q if kernel.block_scales else k, k, k)]
    given = *fake_scratch(d), *scales, Float32(1.0)
    return compile_for_torch(kernel, *fake_operands(q, k), o, fake_fp32(q), *given)


def fake_operands(q: object, k: object) -> tuple[object, object, object]:
    """Stand-ins for Q8, K8 and Vt8, of 16-bit ones."""
    batch, kv_heads, _, head_dim = k.shape
    vt8 = batch, kv_heads, head_dim + ONES_ROWS, cute.sym_int()
    return tuple(fake_rows(E4M3, shape) for shape in (q.shape, k.shape, vt8))


def fake_scratch(head_dim: int) -> tuple[object, object]:
    """Stand-ins for what `workspace` lists."""
    row = ROWS * head_dim
    flushed = make_fake_tensor(Float32, (cute.sym_int(), row), (row, 1), assumed_align=128)
    return flushed, make_fake_tensor(Int32, (1,), (1,), assumed_align=4)


def run_kernel(compiled: Compiled, t: Tensors) -> None:
    run_fp8(compiled, t, t.scales)


NEVER = 2**30  # keys
VARIANTS = {f"flush after {keys}": {"flush_keys": keys} for keys in (4096, 2048, 1024)}
VARIANTS |= {"flush never": {"flush_keys": NEVER}}
VARIANTS |= {f"{keys} of 128 keys without exponentials": {"direct_keys": keys} for keys in (32, 64, 128)}
VARIANTS |= {"128, and scores in fp16": {"direct_keys": 128, "in_half": True}}
