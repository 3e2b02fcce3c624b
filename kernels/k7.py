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
from cutlass import Float16, Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .calls_fp8 import fp8_scratch, refuse_fp8, run_fp8
from .contract import Compiled, LazyMaximum, Problem, Scratch, Stage, Tensors, Work
from .device.arithmetic import largest_positive
from .device.compiling import ELEMENTS, compile_for_torch, fake_fp32, fake_gqa, fake_rows
from .device.constants import LN_2, LOG2_E, SMEM_MAX, SMS, WARP, WARPGROUP
from .device.e4m3 import eighths_to_codes, round_to_codes
from .device.flushed import add_flushed, flush, own_quads, zeroed_here
from .device.fp8 import BLOCK, ONES_ROWS
from .device.half_scores import (
    HIDDEN_PAIR,
    larger_of,
    largest_pair,
    largest_score,
    lower_of,
    pair_of_eighths,
    pairs_of_row,
    pairs_to_codes,
    twice,
)
from .device.masks import Mask, mask_of
from .device.products import Products, Rows, multiply_qk
from .device.query_tiles import ROWS, Config, QueryTiles, work_on_query_tiles
from .device.rings import CONSUMER, PRODUCER, OwnStages, await_next, leave_hidden, put, skip, tma_rings
from .device.rows import OWN_ROWS, finite, in_parts, largest_of_row
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
OFFSET = 6.0  # log₂ of P where a score is its row's maximum, when that has been brought up to date
# In eighths of a power of two, and so much higher, an exponent is nearly its P's code: e4m3 has 8 codes for
# each power, from 2⁻⁷ on (were those not subnormal); 0.457 less, so that P is right on average.
EIGHTHS, FIRST_CODE = 8.0, 8.0 * 7 - 0.457
LIMIT = 8.75  # log₂ of P beyond which the maximum is brought up to date: the largest code is 448 = 2^8.81
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
        self.blocks = config.tile_kv // BLOCK  # of a tile of keys
        # Of a tile's keys the last so many have codes of P without exponentials, but in a row's first tile.
        if direct_keys % 16 or not 0 <= direct_keys <= config.tile_kv:
            raise ValueError(
                f"direct_keys must be a multiple of 16 up to {config.tile_kv}, not {direct_keys}"
            )
        if in_half and direct_keys < config.tile_kv:
            raise ValueError("scores in fp16 become codes without exponentials: direct_keys must be all")
        self.exact_keys = config.tile_kv - direct_keys
        cuts = {*range(0, config.tile_kv + 1, config.tile_kv // config.parts), self.exact_keys}
        self.parts = list(zip(sorted(cuts), sorted(cuts)[1:]))  # (first key, behind the last)
        self.scores = Float16 if in_half else Float32
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
        scales = 8 * self.blocks * self.stages if self.block_scales else 0
        return self.tile_bytes(self.q_stages) + scales + 16 + barriers * 8

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
                (self.tile_kv, source.SMEM, self.scores),
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
            min_blocks_per_mp=self.config.ctas,  # without it the compiler drops setmaxnreg, silently
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
        scale_log2 = scale * LOG2_E

        smem = SmemAllocator()
        q_places = self.q_stages * self.consumers  # of Q; a consumer's are its number, and that + consumers
        sQ = allocate_tiles(smem, E4M3, ROWS, self.head_dim, q_places)  # (row, head_dim, place)
        sO = allocate_tiles(smem, self.dtype, ROWS, self.head_dim, self.consumers)
        sK = allocate_tiles(smem, E4M3, self.tile_kv, self.head_dim, self.stages)  # (key, head_dim, stage)
        sVt = allocate_tiles(smem, E4M3, self.columns, self.tile_kv, self.stages)  # (column, key, stage)
        sV_boxes = row_slices(sVt, self.columns // self.v_boxes)  # (column, key, box of a stage)
        of_blocks = cute.make_layout((2 * self.blocks, self.stages))  # K's scales and V's exponents, by stage
        sScales = smem.allocate_tensor(Float32, of_blocks, 16) if const_expr(self.block_scales) else None
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
                            self.put_scales(k_ring, kv_put, of_kv, 0)
                            put(k_ring, kv_put, load_K, tKgK[None, 0], tKsK)
                    self.put_v(v_ring, kv_put, load_V, tVgV[None, None, 0], tVsV)
                    kv_put.advance()
                    kv_blocks = self.kv_blocks(q_block * self.tile_q + self.tile_q, seqlen_q, seqlen_kv)
                    for block in range(1, kv_blocks, unroll=1):
                        self.put_scales(k_ring, kv_put, of_kv, block)
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
            x = Products(mma_qk, mma_pv, sQ, sK, sVt, k_ring, v_ring, self.scores)
            rows = Rows(x, self.config.parts, thread, seqlen_q, seqlen_kv)
            rO, sums = self.o_and_sums(x.rO)
            S, O, row_max, row_sum = rows.S, by_row(rO), rows.max, rows.sum
            flushed = own_quads(mFlushed, cta * self.consumers + consumer, thread, self.head_dim)
            base = cute.make_rmem_tensor(OWN_ROWS, Float32)
            o_stores = WarpStores(mma_o, sO, store_O, mO, thread, warp_idx, consumer_warps)

            announced, q_block, head, batch = hear(tile_ring, tile_get, sTile)
            tile_get.advance()
            q_ring.consumer_wait(q_get)
            k_ring.consumer_wait(k_get)
            multiply_qk(x, q_get, k_get)
            first_row, kv_blocks, own_blocks, visible = self.span(q_block, consumer, seqlen_q, seqlen_kv)
            qk_scale, v_scale = self.scales(mQs, mKs, mVs, scale_log2, batch, head, first_row, group)
            warpgroup.wait_group(0)
            while announced != END:
                factors = self.factors(qk_scale, sScales, k_get)
                k_ring.consumer_release(k_get)
                k_get.advance()
                if visible == 0:
                    if const_expr(self.scores is Float16):
                        self.hide_pairs(x.rS, *rows.limits, first_row, 0, *rows.lengths)
                    else:
                        self.hide(S, -Float32.inf, *rows.limits, first_row, 0, *rows.lengths)
                row_sum.fill(0.0)
                if const_expr(self.scores is Float16):
                    self.first_half_softmax(x.rS, x.rP, row_max, factors)
                else:
                    self.first_softmax(x.rS, row_max, factors)
                    round_to_codes(x.rS, x.rP)

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
                qk_scale, v_scale = self.scales(mQs, mKs, mVs, scale_log2, batch, head, first_row, group)
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

    @cute.jit
    def put_scales(self, k_ring, state, of_kv, kv_block):
        """Those of a tile of keys to the stage that `put` fills next. Consumers see them as they see the
        keys: what `put` arrives with at the stage's barrier releases them, for every lane has written
        them."""
        sScales, mKs, mVs = of_kv
        if const_expr(self.block_scales):
            found = cute.make_rmem_tensor(2 * self.blocks, Float32)
            for i in range_constexpr(self.blocks):
                block = cutlass.min(kv_block * self.blocks + i, mKs.shape[0] - 1)
                found[i], found[self.blocks + i] = mKs[block], mVs[block]
            k_ring.sync_object_empty.wait(state.index, state.phase)  # the reads are under way
            cute.autovec_copy(found, sScales[None, state.index])

    def o_and_sums(self, rO):
        """O without the sums, as one instruction's accumulator ((2, 2, d/8), 1, 1), and the sums of this
        thread's rows."""
        layout = cute.make_layout(((2, 2, self.head_dim // 8), 1, 1))
        sums = cute.make_tensor(rO.iterator + cute.size(layout), cute.make_layout(OWN_ROWS, stride=2))
        return cute.make_tensor(rO.iterator, layout), sums

    @cute.jit
    def scales(self, mQs, mKs, mVs, scale_log2, batch, head, first_row, group):
        """What a score of this consumer's tile is multiplied by, but for its block's scale of K, and what O
        is."""
        kv_head = head // group
        if const_expr(self.block_scales):
            block = cutlass.min(first_row // BLOCK, mQs.shape[2] - 1)
            return scale_log2 * mQs[batch, head, block], Float32(1.0)
        else:
            return scale_log2 * mQs[batch, kv_head, 0] * mKs[batch, kv_head, 0], mVs[batch, kv_head, 0]

    def step(self, x, rows, sums, scales, first_row, kv_block, begun, q_get, k_get, v_get, masked: bool):
        """Q·Kᵀ of one tile beside P·V of the tile before, and the softmax of the one."""
        x.k_ring.consumer_wait(k_get)
        multiply_qk(x, q_get, k_get)
        factors = self.factors(*scales, k_get)
        x.v_ring.consumer_wait(v_get)
        multiply_pv(x, v_get, kv_block, begun)
        warpgroup.wait_group(1)
        x.k_ring.consumer_release(k_get)
        where = *rows.limits, first_row, kv_block, *rows.lengths
        if masked and self.scores is Float32:
            self.hide(rows.S, -Float32.inf, *where)
        if self.scores is Float16:
            if masked:
                self.hide_pairs(x.rS, *where)
            self.half_softmax(x, rows, factors)
            warpgroup.wait_group(0)
            x.v_ring.consumer_release(v_get)
            pairs_to_codes(cute.recast_tensor(x.rS, Int32), x.rP)
        else:
            self.softmax(x, rows, factors, v_get)
        for r in range(OWN_ROWS):
            rows.sum[r] += sums[r]
            sums[r] = zeroed_here(sums[r])

    def softmax(self, x, rows, factors, v_get):
        """Of one tile, beside P·V of the one before, for which it waits."""
        fragments = [keys_of(x.rS, *part) for part in self.parts]
        by_rows = [by_row(fragment) for fragment in fragments]
        exact = sum(end <= self.exact_keys for _, end in self.parts)
        for p, (part, fragment) in enumerate(zip(by_rows, fragments)):
            start, end = (keys * len(factors) // self.tile_kv for keys in self.parts[p])
            self.subtract(fragment, rows.max, factors[start : max(end, start + 1)], p >= exact)
            if 0 < p <= exact:
                exponentiate(by_rows[p - 1])
            relative = [*by_rows[: min(p, exact)], rows.O]
            self.raise_maximum(part, relative, by_rows[exact:p], rows.max, rows.sum, p >= exact)
        warpgroup.wait_group(0)
        x.v_ring.consumer_release(v_get)
        if exact == len(self.parts):
            exponentiate(by_rows[-1])
            round_to_codes(x.rS, x.rP)
        else:
            self.round_parts(x.rS, x.rP)

    def round_parts(self, rS, rP):
        """S, of which the first `exact_keys` columns are P and the others exponents, to codes."""
        words = cute.size(rP) * self.exact_keys // self.tile_kv
        for first, end, to_codes in ((0, words, round_to_codes), (words, cute.size(rP), eighths_to_codes)):
            if first < end:
                keys = (i * self.tile_kv // cute.size(rP) for i in (first, end))
                of_part = cute.make_tensor(rP.iterator + first, cute.make_layout(end - first))
                to_codes(keys_of(rS, *keys), of_part)

    def factors(self, qk_scale, sScales, k_get):
        """For each block of keys in a stage: what its scores are multiplied by, and the exponent of its V."""
        if not self.block_scales:
            return [(qk_scale, None)]
        rScales = cute.make_rmem_tensor(2 * self.blocks, Float32)
        cute.autovec_copy(sScales[None, k_get.index], rScales)
        return [(qk_scale * rScales[i], rScales[self.blocks + i]) for i in range(self.blocks)]

    def first_softmax(self, rS, row_max, factors):
        """S of a row's first keys becomes P; row_max is scaled, in powers of two, less OFFSET."""
        for r in range(OWN_ROWS):
            largest = None
            for part, (factor, exponent) in zip(in_parts(rS, len(factors)), factors):
                of_part = by_row(part)[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0) * factor
                of_part = of_part if exponent is None else of_part + exponent
                largest = of_part if largest is None else cute.arch.fmax(largest, of_part)
            # A row that sees any key sees the first one: only of rows that see none is it not finite.
            row_max[r] = finite(largest_of_row(Float32(largest))) - OFFSET
        self.subtract(rS, row_max, factors)
        exponentiate(by_row(rS))

    @cute.jit
    def hide_pairs(self, rS, where_S, first_S, first_row, kv_block, seqlen_q, seqlen_kv):
        """`hide` of scores in fp16, in words: of halves LLVM would read accumulators that are under way."""
        words = cute.recast_tensor(rS, Int32)
        for r in range_constexpr(OWN_ROWS):
            row, key = where_S[r, 0]
            last_key = seqlen_kv - 1
            if const_expr(self.mask.hides):
                last_key = cutlass.min(last_key, self.mask.last_key(first_row + row, seqlen_q, seqlen_kv))
            visible = last_key - (kv_block * self.tile_kv + key)
            for i in range_constexpr(cute.size(words) // OWN_ROWS):
                low, high = (first_S[0, 2 * i + half][1] <= visible for half in range(2))
                kept = (Int32(0xFFFF) if low else Int32(0)) | (Int32(-0x10000) if high else Int32(0))
                word = OWN_ROWS * i + r
                words[word] = (words[word] & kept) | (HIDDEN_PAIR & ~kept)

    def half_softmax(self, x, rows, factors):
        """Scores in fp16 become exponents in eighths."""
        words = cute.recast_tensor(x.rS, Int32)
        self.half_exponents(words, rows.max, factors)
        self.raise_half_maximum(words, rows.O, rows.max, rows.sum)

    def first_half_softmax(self, rS, rP, row_max, factors):
        words = cute.recast_tensor(rS, Int32)
        of_factor = cute.size(words) // len(factors)
        for r in range(OWN_ROWS):
            largest = None
            for i, (factor, exponent) in enumerate(factors):
                own = [words[j] for j in range(of_factor * i + r, of_factor * (i + 1), OWN_ROWS)]
                of_part = largest_score(own) * factor
                of_part = of_part if exponent is None else of_part + exponent
                largest = of_part if largest is None else cute.arch.fmax(largest, of_part)
            row_max[r] = as_half_base(finite(largest_of_row(Float32(largest))) - OFFSET)
        self.half_exponents(words, row_max, factors)
        pairs_to_codes(words, rP)

    def half_exponents(self, words, row_max, factors):
        """`subtract` of scores in fp16, in eighths."""
        of_factor = cute.size(words) // len(factors)
        for i, (factor, exponent) in enumerate(factors):
            by = twice(factor * EIGHTHS)
            for r in range(OWN_ROWS):
                base = row_max[r] if exponent is None else row_max[r] - exponent
                shift = twice(FIRST_CODE - base * EIGHTHS)
                for j in range(of_factor * i + r, of_factor * (i + 1), OWN_ROWS):
                    words[j] = pair_of_eighths(words[j], by, shift)

    @cute.jit
    def raise_half_maximum(self, words, O, row_max, row_sum):
        """`raise_maximum` for exponents of a whole tile, in fp16 and eighths."""
        limit, offset = LIMIT * EIGHTHS + FIRST_CODE, OFFSET * EIGHTHS + FIRST_CODE
        own = [pairs_of_row(words, r) for r in range(OWN_ROWS)]
        pairs = [largest_pair([words[j] for j in of_row]) for of_row in own]
        # Row by row: NaN of one must not hide what the other is ahead.
        ahead = [larger_of(pair) for pair in pairs]
        if cute.arch.vote_any_sync((ahead[0] > limit) | (ahead[1] > limit)):
            warpgroup.wait_group(0)  # P·V still adds to O
            for r in range_constexpr(OWN_ROWS):
                largest = largest_of_row(ahead[r])
                new_max = as_half_base(row_max[r] + (largest - offset) * (1.0 / EIGHTHS))
                new_max = new_max if largest > limit else row_max[r]
                growth = new_max - row_max[r]
                row_max[r] = new_max
                one, less = twice(Float32(1.0)), twice(growth * -EIGHTHS)
                for j in own[r]:
                    words[j] = pair_of_eighths(words[j], one, less)
                factor = cute.math.exp2(-growth, fastmath=True)
                O[r, None].store(O[r, None].load() * factor)
                row_sum[r] *= factor

    @cute.jit
    def raise_maximum(self, part, relative, exponents, row_max, row_sum, in_eighths: cutlass.Constexpr):
        """Where an exponent of `part` is larger than LIMIT, raise the row's maximum until it is OFFSET, and
        rescale what is relative to it (k6's `raise_maximum`, which says why so). `exponents` are the parts
        before that are not P yet, in eighths, as `part` may be."""
        unit, first = (EIGHTHS, FIRST_CODE) if const_expr(in_eighths) else (1.0, 0.0)
        limit, offset = LIMIT * unit + first, OFFSET * unit + first
        keys = range(cute.size(part, mode=[1]))
        ahead = [largest_positive([part[r, c] for c in keys]) for r in range(OWN_ROWS)]
        if cute.arch.vote_any_sync(cute.arch.fmax(ahead[0], ahead[1]) > limit):
            warpgroup.wait_group(0)  # P·V still adds to O
            for r in range_constexpr(OWN_ROWS):
                largest = largest_of_row(ahead[r])
                ahead_of_offset = largest - offset
                if const_expr(in_eighths):
                    ahead_of_offset = ahead_of_offset * (1.0 / unit)
                new_max = row_max[r] + (ahead_of_offset if largest > limit else 0.0)
                growth = new_max - row_max[r]
                row_max[r] = new_max
                grown = growth * unit if const_expr(in_eighths) else growth
                for values in (part, *exponents):
                    values[r, None].store(values[r, None].load() - grown)
                factor = cute.math.exp2(-growth, fastmath=True)
                for values in relative:
                    values[r, None].store(values[r, None].load() * factor)
                row_sum[r] *= factor

    def subtract(self, rS, row_max, factors, in_eighths: bool = False):
        """Scores become exponents, relative to row_max; or `in_eighths` of a power of two, from FIRST_CODE
        on."""
        for part, (factor, exponent) in zip(in_parts(rS, len(factors)), factors):
            S = by_row(part)
            for r in range(OWN_ROWS):
                base = row_max[r] if exponent is None else row_max[r] - exponent
                by = factor
                if in_eighths:
                    base, by = base * EIGHTHS - FIRST_CODE, factor * EIGHTHS
                S[r, None].store(S[r, None].load() * by - base)


def multiply_pv(x: Products, v_get, kv_block, begun) -> None:
    """`products.multiply_pv`, for an O that begins with tile `begun`."""
    multiply(x.mma_pv, x.rO, x.tOrP, x.tOrV[None, None, None, v_get.index], kv_block - 1 != begun)


def as_half_base(maximum: Float32) -> Float32:
    """A maximum near `maximum` that exponents in fp16 are relative to exactly."""
    base = lower_of(twice(FIRST_CODE - maximum * EIGHTHS))
    return (FIRST_CODE - base) * (1.0 / EIGHTHS)


def keys_of(accumulator, first: int, end: int):
    """Columns of an accumulator fragment ((2, 2, N/8), M/64, 1), multiples of 8."""
    (pair, half, _), blocks, one = accumulator.shape
    layout = cute.make_layout(((pair, half, (end - first) // 8), blocks, one), stride=accumulator.stride)
    return cute.make_tensor(accumulator.iterator + first // 8 * pair * half, layout)


def exponentiate(S):
    """Exponents become P."""
    for r in range(OWN_ROWS):
        S[r, None].store(cute.math.exp2(S[r, None].load(), fastmath=True))


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
VARIANTS = {f"flush after {keys}": {"flush_keys": keys} for keys in (1024, 2048, 4096)}
VARIANTS |= {"flush never": {"flush_keys": NEVER}}
