"""K6: the production forward.

The idea          The CTAs stay and fetch tiles, longest first: loads of the next tile hide the end of this
                  one. O is rescaled only when a row's maximum has grown by more than the row has room for
                  (`first_room`), at most 2⁸: asked of three exponents at a time, as integers
                  (`arithmetic.largest_positive`), by a warp's vote before the wait for P·V; at head_dim 64
                  of half a tile while the other half is exponentiated.
What changes      against k6_2: persistent CTAs and a tile counter; a tile's last P·V beside the next one's
                  first Q·Kᵀ, up to head_dim 128; hidden keys in a loop of their own; lazy rescaling; O by
                  TMA; a tile shape by head_dim; fp16, GQA, unequal lengths, head_dim 256; no more turns.
What does not     rings, warp specialisation, the half-tile lag of P·V behind Q·Kᵀ.
Supports          bf16 and fp16; head_dim 64, 128, 256, and multiples of 8 between in wider tiles, V's and
                  O's its own (notes/head_dims.md); lengths ≥ 1; GQA and MQA. Under a causal mask query i sees
                  keys up to i + seqlen_kv − seqlen_q (aligned at the bottom right), or with top_left up to i;
                  one that sees none gives O = 0 and LSE = −∞.
Note              notes/k6.md: the schedule drawn, what each idea is worth, what lost.
"""

import math
from dataclasses import replace
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from .calls import forward_scratch, refuse_forward, run_forward
from .contract import LazyMaximum, Problem, Stage, Work
from .device.compiling import ELEMENTS, compile_for_torch, fake_fp32, fake_gqa
from .device.constants import LN_2, LOG2_E, SMEM_MAX, SMS, WARP, WARPGROUP
from .device.lazy import raise_maximum
from .device.limits import NARROW_VALUES, has_own_kernel, tile_dims
from .device.masks import Mask, mask_of
from .device.products import Products, Rows, attention_mmas, multiply_pv, multiply_qk
from .device.query_tiles import ROWS, Config, QueryTiles, work_on_query_tiles
from .device.rings import CONSUMER, PRODUCER, OwnStages, put, skip, tma_rings
from .device.rows import OWN_ROWS, finite, largest_of_row, sum_of_row
from .device.stores import WARP_ROWS, WARPS, WarpStores, await_stores, rounded, store_of_rows, store_warp_rows
from .device.tile_order import fetch, hear, message_ring, tell
from .device.tma import allocate_tiles, load_atom, partition_tma, store_atom
from .device.wgmma import exchanged, round_fragment

STAGES = (
    Stage(
        "k6",
        "the production forward",
        "persistent CTAs, lazy rescaling, masked tiles apart, TMA store, a tile shape by head_dim",
        "k6_2",
        model="flash_attention_lazy",
        rounds_p=True,
    ),
)

CONFIGS = {  # by columns of a tile, `limits.tile_dims`; registers of a producer's thread and of a consumer's
    64: Config(consumers=4, tile_kv=64, stages=8, registers=(24, 112), parts=2),
    96: Config(consumers=3, tile_kv=96, stages=3, registers=(32, 160)),
    128: Config(consumers=3, tile_kv=64, stages=4, registers=(32, 160)),
    192: Config(consumers=2, tile_kv=80, stages=2, registers=(24, 240)),
    256: Config(consumers=2, tile_kv=64, stages=2, registers=(24, 240)),
    NARROW_VALUES: Config(consumers=2, tile_kv=96, stages=2, registers=(24, 240)),
}
END, FIRST, FOLLOWS = range(3)  # how a CTA's tiles are announced
# How far a row's maximum may rise before O is rescaled. A term 2^(s − max) that has become a maximum is 1 and
# exact; one above 1 is rounded, and its row with it if it makes up much of the row's sum.
GROWTH = 8.0  # in powers of two; at most
SHARE = 2.0  # of a row's first tile's sum: the term for which there is room, at most (`first_room`)


class Barrier(IntEnum):
    """Named barriers; the second is a consumer's own, + its number."""

    CTA = 0
    Q_READ = 1


class FlashAttentionForward(QueryTiles):
    """The CTA: C = `consumers` warpgroups, then a warpgroup of which one warp, the producer, loads.

    barrier, how often         who arrives, how many                     who waits
    Q full, C·q_stages         the producer, 1, and the TMA's bytes      the consumer whose 64 rows they are
    Q empty, C·q_stages        that consumer's warps, 4                  the producer
    K, V full, stages each     the producer, 1, and the TMA's bytes      all consumers
    K, V empty, stages each    all consumers' warps, 4·C                 the producer
    tile told, 1               the producer's lanes, 32                  all consumers
    tile heard, 1              all consumers' threads, 128·C             the producer
    Barrier.CTA                everyone, once: the rings are there       everyone
    Barrier.Q_READ + c, C      consumer c's threads, 128, done with Q    the same, where O takes Q's place
    """

    def __init__(
        self, head_dim: int, mask: Mask, dtype: str, config: Config | None = None, sms: int = SMS,
        share: float = SHARE, exact: bool = False, value_dim: int | None = None,
    ):  # fmt: skip
        """`share` 0 leaves GROWTH alone to decide; `exact` follows the maximum in every tile, as an eager
        softmax does."""
        assert share >= 0.0, "a share of a sum"
        self.share, self.growth = (0.0, 0.0) if exact else (share, GROWTH)
        self.value_dim = value_dim or head_dim  # columns of V and O
        config = config or CONFIGS[head_dim]
        super().__init__(head_dim, mask, ROWS * config.consumers, config.tile_kv)
        self.dtype, self.config, self.sms = ELEMENTS[dtype], config, sms
        self.consumers, self.stages = config.consumers, config.stages
        self.threads = WARPGROUP * (self.consumers + 1)
        assert self.tile_kv % (8 * config.parts) == 0, "a part is some of the tile's groups of 8 columns"
        self.scale_log2 = LOG2_E / math.sqrt(head_dim)
        # 3 tiles of queries (head_dim 64): two of Q, one of O; 2 (128): O over its own Q; 1 (256): for both.
        self.q_and_o = max(n for n in (1, 2, 3) if self.tile_bytes(n) <= SMEM_MAX // config.ctas - 1024)
        self.q_stages, self.o_over_q = min(self.q_and_o, 2), self.q_and_o < 3
        # The tiles that only other consumers see must fit beside one stage of V: see `leave_hidden`.
        assert math.ceil((self.tile_q - ROWS) / self.tile_kv) < self.stages

    def section_bytes(self, seqlen_kv):
        return cutlass.min(seqlen_kv, 2048) * 4096  # the same heads up to 2048 keys, then 8 MiB

    def tile_bytes(self, q_and_o: int) -> int:
        q = (q_and_o * self.head_dim if q_and_o < 3 else 2 * self.head_dim + self.value_dim) * self.tile_q
        return (q + self.stages * self.tile_kv * (self.head_dim + self.value_dim)) * 2

    @property
    def smem_bytes(self) -> int:
        barriers = 2 * (self.q_stages * self.consumers + 2 * self.stages + 1)
        return self.tile_bytes(self.q_and_o) + 16 + barriers * 8

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, mCounter, stream):
        self.launch(mQ, mK, mV, mO, mLSE, mCounter, None, stream)

    @cute.jit
    def scaled(self, mQ, mK, mV, mO, mLSE, mCounter, scale, stream):
        self.launch(mQ, mK, mV, mO, mLSE, mCounter, scale, stream)

    @cute.jit
    def launch(self, mQ, mK, mV, mO, mLSE, mCounter, scale, stream):
        batch, heads, seqlen_q, _ = mQ.shape
        columns, of_values = self.head_dim, self.value_dim
        loads = *load_atom(mQ, ROWS, columns), *load_atom(mK, self.tile_kv, columns)
        loads = *loads, *load_atom(mV, self.tile_kv, of_values)
        store_O = store_atom(mO, WARP_ROWS, of_values)
        mmas = attention_mmas(self.dtype, self.tile_kv, of_values)
        tiles = cute.ceil_div(seqlen_q, self.tile_q) * heads * batch
        self.kernel(*mmas, *loads, *store_O, mLSE, mCounter, tiles, scale).launch(
            grid=(cutlass.min(tiles, self.sms * self.config.ctas), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.ctas,  # without it the compiler drops setmaxnreg, silently
            preferred_smem_carveout=None if self.config.ctas == 1 else 100,  # or the compiler asks the driver
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mma_qk, mma_pv, load_Q, mQ, load_K, mK, load_V, mV, store_O, mO, mLSE, mCounter, tiles, scale,
    ):  # fmt: skip
        if const_expr(scale is not None):
            self.scale_log2 = scale * LOG2_E
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen_q, seqlen_kv = mQ.shape[0], mK.shape[0]
        consumer_warps = WARPS * self.consumers

        smem = SmemAllocator()
        q_places = self.q_stages * self.consumers  # of Q; a consumer's are its number, and that + consumers
        sO = sQ = allocate_tiles(smem, self.dtype, ROWS, self.head_dim, q_places)  # (row, head_dim, place)
        if const_expr(not self.o_over_q):
            sO = allocate_tiles(smem, self.dtype, ROWS, self.value_dim, self.consumers)
        elif const_expr(self.value_dim < self.head_dim):
            sO = cute.local_tile(sQ, (ROWS, self.value_dim, q_places), (0, 0, 0))
        sK, sV = [  # (key, column, stage)
            allocate_tiles(smem, self.dtype, self.tile_kv, columns, self.stages)
            for columns in (self.head_dim, self.value_dim)
        ]
        sVt = exchanged(sV)  # (head_dim, key, stage): the same bytes, as operand B of P·V takes them
        sTile = smem.allocate_tensor(Int32, cute.make_layout(4), 16)  # announced, q_block, head, batch
        own_bytes = ROWS * self.head_dim * 2
        k_bytes, v_bytes = (self.tile_kv * columns * 2 for columns in (self.head_dim, self.value_dim))
        q_ring, k_ring, v_ring = tma_rings(
            smem,
            (q_places, own_bytes, WARPS),  # every consumer waits for its own rows of Q
            (self.stages, k_bytes, consumer_warps),
            (self.stages, v_bytes, consumer_warps),
            # From a shuffle it stays in a register (notes/gotchas.md, "A loop's bound may be computed anew").
            lane=cute.arch.shuffle_sync(cute.arch.lane_idx(), cute.arch.lane_idx()),
        )
        tile_ring = message_ring(smem, WARPGROUP * self.consumers)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()  # Barrier.CTA

        if warp_idx >= consumer_warps:
            # 1. the producer: runs ahead as far as the rings have room, across the ends of tiles
            #     for each tile of queries: tell the consumers where it lies · load Q of consumer 0, K₀, Q of
            #         the others, V₀ · load Kⱼ and Vⱼ for j = 1, 2, …, from left to right · fetch the next
            #     tell the consumers that there are no more
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
                    kv_head = head // (mQ.shape[2] // mK.shape[2])
                    # (TMA, block of rows) in global memory, (TMA, place or stage) in shared
                    tQgQ, tQsQ = partition_tma(load_Q, mQ[None, None, head, batch], sQ)
                    tKgK, tKsK = partition_tma(load_K, mK[None, None, kv_head, batch], sK)
                    tVgV, tVsV = partition_tma(load_V, mV[None, None, kv_head, batch], sV)
                    for i in range_constexpr(self.consumers):
                        put(q_ring, q_put, load_Q, tQgQ[None, q_block * self.consumers + i], tQsQ)
                        q_put.advance()
                        if const_expr(i == 0):
                            put(k_ring, kv_put, load_K, tKgK[None, 0], tKsK)
                    put(v_ring, kv_put, load_V, tVgV[None, 0], tVsV)
                    kv_put.advance()
                    kv_blocks = self.kv_blocks(q_block * self.tile_q + self.tile_q, seqlen_q, seqlen_kv)
                    for block in range(1, kv_blocks, unroll=1):
                        put(k_ring, kv_put, load_K, tKgK[None, block], tKsK)
                        put(v_ring, kv_put, load_V, tVgV[None, block], tVsV)
                        kv_put.advance()
                    tile = fetch(mCounter, tiles)
                    announced = Int32(FOLLOWS)
                tell(tile_ring, tile_put, sTile, (END, 0, 0, 0))
        else:
            # 2. a consumer's prologue, up to the first tile's S
            #     issue S = Q·K₀ᵀ
            #     for each tile of queries:
            #         wait for S · P = softmax of S                                                  (2.)
            #         for each tile of keys j = 1, 2, …:   `step`                                    (3.)
            #             issue S = Q·Kⱼᵀ and O += P·Vⱼ₋₁ · wait for S · the exponents of P · wait for O · P
            #         issue the last O += P·V · hear of the next tile · issue its S = Q·K₀ᵀ          (4.)
            #         wait for O · O / row sums to shared memory, from there by TMA · LSE
            cute.arch.setmaxregister_increase(self.config.registers[1])
            consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
            thread = tidx % WARPGROUP
            q_get = OwnStages(q_places, self.consumers, consumer)
            k_get, v_get = [pipeline.make_pipeline_state(CONSUMER, self.stages) for _ in range(2)]
            tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
            x = Products(mma_qk, mma_pv, sQ, sK, sVt, k_ring, v_ring)
            rows = Rows(x, self.config.parts, thread, seqlen_q, seqlen_kv)
            S, O, row_max, row_sum = rows.S, rows.O, rows.max, rows.sum
            room = cute.make_rmem_tensor(cute.make_layout(OWN_ROWS), Float32)  # (row): see `first_room`
            room.fill(self.growth)
            o_stores = WarpStores(mma_pv, sO, store_O, mO, thread, warp_idx, consumer_warps)

            announced, q_block, head, batch = hear(tile_ring, tile_get, sTile)
            tile_get.advance()
            q_ring.consumer_wait(q_get)
            k_ring.consumer_wait(k_get)
            multiply_qk(x, q_get, k_get)
            first_row, kv_blocks, own_blocks, visible = self.span(q_block, consumer, seqlen_q, seqlen_kv)
            warpgroup.wait_group(0)
            while announced != END:
                # The first S is there, waited for above or at the loop's end. K runs one tile ahead of V now.
                k_ring.consumer_release(k_get)
                k_get.advance()
                row_max.fill(-Float32.inf)
                row_sum.fill(0.0)
                if visible == 0:
                    self.hide(S, -Float32.inf, *rows.limits, first_row, 0, *rows.lengths)
                self.first_softmax(S, row_max, row_sum)
                round_fragment(x.rS, x.rP, self.dtype)
                if const_expr(self.share > 0.0):
                    for r in range_constexpr(OWN_ROWS):
                        room[r] = self.first_room(sum_of_row(row_sum[r]), own_blocks, seqlen_kv)
                if const_expr(self.o_over_q and self.q_stages == 2):
                    # Leave the place of the Q before, when this warp's part of O has been read from there.
                    if announced == FOLLOWS:
                        await_stores()
                        q_ring.consumer_release(q_get.other)

                # 3. main loop: the tiles that are seen whole, those with hidden keys, those all hidden
                for block in range(1, visible, unroll=1):
                    self.step(x, rows, room, first_row, block, q_get, k_get, v_get, masked=False)
                    # V's next stage is K's of now: 2 instructions less than to advance it, below 20 more.
                    v_get = k_get.clone()
                    k_get.advance()
                for block in range(cutlass.max(1, visible), own_blocks, unroll=1):
                    self.step(x, rows, room, first_row, block, q_get, k_get, v_get, masked=True)
                    k_get.advance()
                    v_get.advance()
                hidden, past_the_end = kv_blocks - own_blocks, first_row >= seqlen_q
                hidden, k_get, v_get = self.leave_hidden(hidden, past_the_end, k_ring, v_ring, k_get, v_get)
                if const_expr(not self.o_over_q):
                    q_ring.consumer_release(q_get)

                # 4. the last P·V (if Q has two stages, beside the next tile's first Q·Kᵀ); then O and LSE
                q_left = q_get.this
                o_place = q_left.index if const_expr(self.o_over_q) else consumer
                this_tile, this_row = (q_block, head, batch), first_row
                v_ring.consumer_wait(v_get)
                multiply_pv(x, v_get, own_blocks)  # of the tile before `own_blocks`, the last
                inverse, lse = [None, None], [None, None]
                for r in range_constexpr(OWN_ROWS):
                    total = sum_of_row(row_sum[r])
                    inverse[r] = 0.0 if total == 0.0 else cute.arch.rcp_approx(total)
                    lse[r] = (row_max[r] + cute.math.log2(total, fastmath=True)) * LN_2
                announced, q_block, head, batch = hear(tile_ring, tile_get, sTile)
                tile_get.advance()
                q_get.advance()
                if const_expr(self.q_stages == 2):
                    k_get = await_next(q_ring, k_ring, q_get, k_get, hidden, announced)
                    # Without a next tile, of what lies there; nobody looks at it.
                    multiply_qk(x, q_get, k_get)
                # Here, beside products, what the next tile's start would wait for.
                first_row, kv_blocks, own_blocks, visible = self.span(q_block, consumer, seqlen_q, seqlen_kv)
                warpgroup.wait_group(self.q_stages - 1)  # P·V; the next Q·Kᵀ, if it is issued, may go on
                v_ring.consumer_release(v_get)
                v_get.advance()
                v_get = skip(v_ring, v_get, hidden)
                for r in range_constexpr(OWN_ROWS):
                    O[r, None].store(O[r, None].load() * inverse[r])
                rO16 = rounded(x.rO, self.dtype)
                # A warp stores its own 16 rows of O: over Q, when all are done with it, or over its last O.
                if const_expr(self.o_over_q):
                    cute.arch.barrier(barrier_id=Barrier.Q_READ + consumer, number_of_threads=WARPGROUP)
                else:
                    await_stores()
                store_warp_rows(o_stores, rO16, o_place, this_tile)
                if const_expr(self.q_stages == 1):
                    await_stores()
                # After O: the fence of its store would wait for this one (notes/k6.md, "Fewer instructions").
                store_of_rows(mLSE[this_tile[2], this_tile[1], None], this_row, seqlen_q, rows.where_S, lse)
                if const_expr(self.q_stages == 1):
                    q_ring.consumer_release(q_left)
                    k_get = await_next(q_ring, k_ring, q_get, k_get, hidden, announced)
                    multiply_qk(x, q_get, k_get)
                warpgroup.wait_group(0)

            await_stores()

    @cute.jit
    def leave_hidden(self, hidden, past_the_end, k_ring, v_ring, k_get, v_get):
        """The tiles of keys that only rows of other consumers see: how many are still to be released.

        Each consumer must release every stage, or the producer waits for its warps when the ring comes
        round. It releases their K while it waits for the next tile (`await_next`), their V after its own last
        one. Hazard: until then it holds that stage of V, and the producer puts V beside K, so they must all
        fit into the other stages (the assertion in `__init__`), or all wait forever. Rows past the end have
        no such bound and release theirs here, K and V in turn; their last P·V, which is not stored, is of
        another V. `tests/test_rings.py` runs this schedule."""
        if past_the_end:
            for _ in range(hidden, unroll=1):
                v_get = skip(v_ring, v_get, 1)
                k_get = skip(k_ring, k_get, 1)
            hidden = Int32(0)
        if const_expr(not self.mask.hides):
            hidden = 0  # others have none anyway, which the compiler does not know
        return hidden, k_get, v_get

    def step(self, x, rows, room, first_row, kv_block, q_get, k_get, v_get, masked: bool):
        """Q·Kᵀ of one tile beside P·V of the tile before, and the softmax of the one, part by part: while a
        part is subtracted and asked for its growth, the part before it is exponentiated."""
        x.k_ring.consumer_wait(k_get)
        multiply_qk(x, q_get, k_get)
        x.v_ring.consumer_wait(v_get)
        multiply_pv(x, v_get, kv_block)
        warpgroup.wait_group(1)
        x.k_ring.consumer_release(k_get)
        if masked:
            self.hide(rows.S, -Float32.inf, *rows.limits, first_row, kv_block, *rows.lengths)
        for p, part in enumerate(rows.parts):
            self.subtract(part, rows.max)
            if p > 0:
                exponentiate(rows.parts[p - 1], rows.sum)
            raise_maximum(part, [*rows.parts[:p], rows.O], rows.max, rows.sum, room, self.share > 0.0)
        warpgroup.wait_group(0)
        x.v_ring.consumer_release(v_get)
        exponentiate(rows.parts[-1], rows.sum)
        round_fragment(x.rS, x.rP, self.dtype)

    def first_softmax(self, S, row_max, row_sum):
        """S of a row's first keys becomes P; row_max is scaled, in powers of two."""
        for r in range(OWN_ROWS):
            tile_max = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            # A row that sees any key sees the first one: only of rows that see none is it not finite.
            row_max[r] = finite(largest_of_row(Float32(tile_max))) * self.scale_log2
        self.subtract(S, row_max)
        exponentiate(S, row_sum)

    def first_room(self, total, own_blocks, seqlen_kv):
        """In powers of two, how far a row's maximum may rise from its first tile's: log₂ of `share` times the
        tile's sum, which is about what each tile adds to the row; between 0 and GROWTH. Of rows that see a
        part of all keys only that part of it: their terms weigh more, and they are soon done."""
        part = self.share
        if self.mask.hides:
            blocks = Float32(cute.ceil_div(seqlen_kv, self.tile_kv))
            part = self.share * Float32(own_blocks) * cute.arch.rcp_approx(blocks)
        share_log2 = cute.math.log2(total * part, fastmath=True)
        return cute.arch.fmin(cute.arch.fmax(share_log2, 0.0), self.growth)

    def subtract(self, S, row_max):
        """Scores become exponents, relative to row_max."""
        for r in range(OWN_ROWS):
            S[r, None].store(S[r, None].load() * self.scale_log2 - row_max[r])


@cute.jit
def await_next(q_ring, k_ring, q_get, k_get, hidden, announced):
    """Release the K of `hidden` tiles, then wait for the next tile's Q and first K, if there is one."""
    k_get = skip(k_ring, k_get, hidden)
    if announced != END:
        q_ring.consumer_wait(q_get)
        k_ring.consumer_wait(k_get)
    return k_get


def exponentiate(S, row_sum):
    """Exponents become P, and row_sum follows."""
    for r in range(OWN_ROWS):
        p = cute.math.exp2(S[r, None].load(), fastmath=True)
        S[r, None].store(p)
        row_sum[r] = p.reduce(cute.ReductionOp.ADD, row_sum[r], 0)


supports = refuse_forward
run_kernel = run_forward


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    return forward_scratch(problem)


def config_of(problem: Problem, configs: dict[object, Config] = CONFIGS) -> Config:
    columns, of_values = tile_dims(problem)
    return configs[columns if columns == of_values else (columns, of_values)]


def kernel_for(problem: Problem, config: Config | None = None, **options: object) -> FlashAttentionForward:
    (columns, of_values), config = tile_dims(problem), config or config_of(problem)
    kind = columns, mask_of(problem), problem.dtype, config
    return FlashAttentionForward(*kind, value_dim=of_values, **options)


def work(problem: Problem, **options: object) -> list[Work]:
    return [work_on_query_tiles(kernel_for(problem, **options), problem)]


def lazy_maximum(problem: Problem, **options: object) -> LazyMaximum:
    kernel = kernel_for(problem, **options)
    return LazyMaximum(kernel.tile_kv, kernel.config.parts, kernel.growth, kernel.share)


def compile_kernel(problem: Problem, **options: object) -> object:
    q, k, v, o = fake_gqa(problem.head_dim if has_own_kernel(problem) else None, problem.dtype)
    kernel = kernel_for(problem, **options)
    counter = make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
    if problem.scaled or not has_own_kernel(problem):
        return compile_for_torch(kernel.scaled, q, k, v, o, fake_fp32(q), counter, Float32(1.0))
    return compile_for_torch(kernel, q, k, v, o, fake_fp32(q), counter)


CANDIDATES = {  # what CONFIGS were chosen from, for `python -m harness.ablation k6`
    64: [replace(CONFIGS[64], parts=parts) for parts in (2, 1, 4)]
    + [Config(3, 96, 5, (32, 160), parts=2), Config(3, 128, 3, (32, 160), parts=4)],
    128: [replace(CONFIGS[128], parts=parts) for parts in (1, 2)]
    + [Config(3, 80, 3, (32, 160)), Config(2, 128, 2, (24, 240))],
}
MAXIMA = {"share 0.6": {"share": 0.6}, "growth 8 alone": {"share": 0.0}, "exact": {"exact": True}}
VARIANTS = {str(config): {"config": config} for configs in CANDIDATES.values() for config in configs} | MAXIMA


def variants_for(problem: Problem) -> list[str]:
    """The labels in VARIANTS that are candidates at the problem's head_dim."""
    return [*map(str, CANDIDATES.get(problem.head_dim, ())), *MAXIMA]
