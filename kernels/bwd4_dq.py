"""BWD4 for heads of 256, the second of two kernels: dQ.

The idea          dQ stays in registers, and nothing is added in memory: this kernel computes S and dP again,
                  for 128 queries, with keys passing by.
What changes      against bwd4_dkv's KeyGradients: queries are rows, 64 a consumer, so dS stays in its
                  registers as operand A of dQ, and nothing crosses over from one consumer to the other. A
                  kernel like k6, with dP beside the exponentials and dS in place of P.
What does not     who loads, persistent CTAs; the order of tiles and the mask are k6's.
Supports          tiles of 256 and 192 columns, these also with V's of 128, and what bwd4.py does.
Where to read     notes/bwd4.md, "Heads of 256", has the schedule of both kernels, drawn.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .device.constants import SMS, WARP, WARPGROUP
from .device.fragments import Coordinates, Product, coordinates
from .device.key_tiles import CONSUMER_WARPS, CONSUMERS, ROWS, THREADS
from .device.leftward import TilesOfQueries
from .device.limits import SECTION_BYTES, TILE_Q
from .device.masks import Mask
from .device.rings import CONSUMER, PRODUCER, put, tma_rings
from .device.tile_order import fetch, hear_place, message_ring, tell
from .device.tma import allocate_tiles, load_atom, partition_tma, store_atom
from .device.wgmma import by_row, exchanged, operand_a, round_fragment

STAGES = 2  # of K: S of the next tile needs one while dQ reads the other; V is left earlier


class Barrier(IntEnum):
    """Named barriers: the first number of each kind. `QueryGradient` has the table of who comes."""

    CTA = 0
    OWN = 1  # + consumer


@dataclass(frozen=True)
class Shared:
    """Shared memory. Tiles of 16-bit elements lie as the TMA's 128-byte swizzle puts them."""

    Q: cute.Tensor  # (query, head_dim, consumer)
    dO: cute.Tensor  # (query, value_dim, consumer)
    K: cute.Tensor  # (key, head_dim, stage)
    V: cute.Tensor  # (key, value_dim, stage)
    tile: cute.Tensor  # (4,) int32: valid, and the place of a tile of queries; of packed ones (8,)


@dataclass(frozen=True)
class Rings:
    """Barriers in shared memory. `QueryGradient` has the table of who comes."""

    q: pipeline.PipelineTmaAsync  # Q and dO; a stage is a consumer's own
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    tile: pipeline.PipelineAsync  # which tile of queries is next


@dataclass(frozen=True)
class Consumer:
    """What a step needs. A thread has two rows, that is queries, of the 64×64 scores."""

    S: Product  # S = Q·Kᵀ; A's last mode has been sliced, K's is the stage
    dP: Product  # dP = dO·Vᵀ; A's last mode has been sliced, V's is the stage
    dQ: Product  # dQ += dS·K; dS in registers, K's last mode the stage
    scores: cute.Tensor  # S.acc as (query, key) = ((2, 1), (2, 8)): S, then P
    dscores: cute.Tensor  # the same of dP.acc: dP, then dS
    words: cute.Tensor  # (16,) int32: dS rounded, two values a word; dQ.A is a view of it
    places: Coordinates  # of the scores
    rLSE: cute.Tensor  # (2,) fp32: LSE·log₂e of the thread's two rows, +∞ past the end
    rD: cute.Tensor  # (2,) fp32
    rings: Rings


class QueryGradient(TilesOfQueries):
    """dQ. The CTA: two consumers of 64 queries each, then a warp that loads; keys from right to left.

    mbarriers                   arrivals that complete a phase       who waits
    q, stage c    full          the producer's, and the bytes        consumer c
                  empty         4, a lane of each of its warps; of   the producer
                                the first when dQ has left from Q
    k, v          full          the producer's, and the bytes        both consumers
                  empty         8, a lane of each consumer warp      the producer
    tile          full          32, the producer's lanes             both consumers
                  empty         256, all of their threads            the producer

    named barriers              who arrives                          who waits                       threads
    OWN + c                     c: dQ is in shared memory            c, whose first warp stores it   128

    What compute-sanitizer does not see: nothing is reported here. Threads write nothing to shared memory but
    the tile's four numbers and dQ, each consumer over its own rows of Q, which only its finished products
    have read; `fence.proxy.async` before OWN orders dQ for the TMA, q's phases what comes after it.
    """

    registers = (40, 232)  # of a producer's thread, of a consumer's; a causal producer spills with 24

    def __init__(
        self, head_dim: int, mask: Mask, dtype: type, sms: int = SMS, value_dim: int | None = None,
        **policies: bool,
    ):  # fmt: skip
        super().__init__(head_dim, mask, TILE_Q[head_dim], ROWS, **policies)
        self.dtype, self.sms = dtype, sms
        self.value_dim = value_dim or head_dim  # columns of V and dO
        self.v_stages = 1 if head_dim == 256 else 2  # where there is room

    def section_bytes(self, seqlen_kv):
        return SECTION_BYTES

    @property
    def smem_bytes(self) -> int:
        columns = (CONSUMERS + STAGES) * self.head_dim  # of Q and K
        columns += (CONSUMERS + self.v_stages) * self.value_dim  # of dO and V
        tiles = ROWS * columns * 2
        barriers = 2 * (CONSUMERS + STAGES + self.v_stages + 1) * 8
        return tiles + 4 * (1 + self.batch.words) + barriers

    @cute.jit
    def launch(self, mQ, mK, mV, mDO, mDQ, mStats, mCounter, stream, numbers, mList=None):
        batch, heads, seqlen_q, _ = mQ.shape
        mQ, mDO, mK, mV, mDQ = [self.batch.view(mX) for mX in (mQ, mDO, mK, mV, mDQ)]
        tma = []
        of_keys, of_values = self.head_dim, self.value_dim
        for mX, columns in ((mQ, of_keys), (mDO, of_values), (mK, of_keys), (mV, of_values)):
            tma += load_atom(mX, ROWS, columns)
        source, K, MN = warpgroup.OperandSource, OperandMajorMode.K, OperandMajorMode.MN
        mma_s, mma_q = [
            make_trivial_tiled_mma(self.dtype, self.dtype, K, b, Float32, (1, 1, 1), (ROWS, n), place)
            for b, n, place in (
                (K, ROWS, source.SMEM),  # S = Q·Kᵀ, dP = dO·Vᵀ
                (MN, self.head_dim, source.RMEM),  # dQ = dS·K
            )
        ]
        tiles = cute.ceil_div(seqlen_q, self.tile_q) * heads * batch
        if const_expr(self.packed):
            tiles = (mList.shape[0] - 1) * heads  # at most
        store = store_atom(mDQ, ROWS, self.head_dim)
        self.kernel(mma_s, mma_q, *tma, *store, mStats, mCounter, tiles, numbers, mList).launch(
            grid=(cutlass.min(tiles, self.sms), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,  # the registers of an SM are all for one CTA
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mma_s, mma_q, load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV, store_dQ, mDQ, mStats, mCounter,
        tiles, numbers, mList,
    ):  # fmt: skip
        """mQ, mDO, mK, mV, mDQ are (seqlen, head_dim, heads, batch), as TMA descriptors see them."""
        # 1. shared memory, rings, and who is who
        self.take(numbers)
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        lengths = mQ.shape[0], mK.shape[0]
        of_keys, of_values = self.head_dim, self.value_dim
        smem = SmemAllocator()
        sQ, sdO = [allocate_tiles(smem, self.dtype, ROWS, d, CONSUMERS) for d in (of_keys, of_values)]
        sK = allocate_tiles(smem, self.dtype, ROWS, of_keys, STAGES)
        sV = allocate_tiles(smem, self.dtype, ROWS, of_values, self.v_stages)
        sTile = smem.allocate_tensor(Int32, cute.make_layout(1 + self.batch.words), 16)
        shared = Shared(sQ, sdO, sK, sV, sTile)
        key_bytes, value_bytes = ROWS * of_keys * 2, ROWS * of_values * 2
        load_rings = tma_rings(
            smem,
            (CONSUMERS, key_bytes + value_bytes, WARPGROUP // WARP),  # a consumer's own rows of Q and dO
            (STAGES, key_bytes, CONSUMER_WARPS),
            (self.v_stages, value_bytes, CONSUMER_WARPS),
        )
        rings = Rings(*load_rings, message_ring(smem, WARPGROUP * CONSUMERS))
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_idx >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_idx == CONSUMER_WARPS:
                loads = load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV
                self.produce(rings, shared, loads, mCounter, tiles, lengths, mList)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(rings, shared, mma_s, mma_q, store_dQ, mDQ, mStats, mQ, tidx, lengths)

    @cute.jit
    def produce(self, rings, shared, loads, mCounter, tiles, extents, mList):
        """2. The producer warp, to the end:

        while there is a tile of queries that nobody has taken:
            tell the consumers which
            load Q and dO of consumer 0, the last tile of keys that it or the other sees (K, then V)
            load Q and dO of consumer 1
            load the other tiles of keys, from right to left
        tell them that there is none
        """
        load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV = loads
        q_ring, k_ring, v_ring, tile_ring = rings.q, rings.k, rings.v, rings.tile
        q_put = pipeline.make_pipeline_state(PRODUCER, CONSUMERS)
        k_put = pipeline.make_pipeline_state(PRODUCER, STAGES)
        v_put = pipeline.make_pipeline_state(PRODUCER, self.v_stages)
        tile_put = pipeline.make_pipeline_state(PRODUCER, 1)
        tile, _, _ = cute.arch.block_idx()
        if const_expr(self.packed):
            cute.arch.griddepcontrol_wait()  # for the list
            tiles = mList[0, 0] * mQ.shape[2]
        while tile < tiles:
            place = self.place_of(tile, mQ, mK, mList)
            tell(tile_ring, tile_put, shared.tile, (1, *place))
            tile_put.advance()
            q_block, head = place[0], place[1]
            kv_head = head // (mQ.shape[2] // mK.shape[2])
            # (TMA, block of 64 rows) and (TMA, consumer), (TMA, stage) or (TMA, 1)
            tQgQ, tQsQ = partition_tma(load_Q, self.batch.queries(mQ, head, place), shared.Q)
            tOgO, tOsO = partition_tma(load_dO, self.batch.queries(mDO, head, place), shared.dO)
            tKgK, tKsK = partition_tma(load_K, self.batch.keys(mK, kv_head, place), shared.K)
            tVgV, tVsV = partition_tma(load_V, self.batch.keys(mV, kv_head, place), shared.V)
            lengths = self.batch.lengths(place, extents)
            last = self.kv_blocks(q_block * self.tile_q + self.tile_q, *lengths) - 1
            for i in range_constexpr(CONSUMERS):
                at = q_block * CONSUMERS + i
                put(q_ring, q_put, load_Q, tQgQ[None, at], tQsQ)
                barrier = q_ring.producer_get_barrier(q_put)
                cute.copy(load_dO, tOgO[None, at], tOsO[None, q_put.index], tma_bar_ptr=barrier)
                q_put.advance()
                if const_expr(i == 0):
                    put(k_ring, k_put, load_K, tKgK[None, last], tKsK)
                    put(v_ring, v_put, load_V, tVgV[None, last], tVsV)
                    k_put.advance()
                    v_put.advance()
            others = last
            if const_expr(self.mask.hides_first):
                others = last - self.first_of_tile(q_block, *lengths)
            for i in range(others, unroll=1):
                put(k_ring, k_put, load_K, tKgK[None, last - 1 - i], tKsK)
                put(v_ring, v_put, load_V, tVgV[None, last - 1 - i], tVsV)
                k_put.advance()
                v_put.advance()
            tile = fetch(mCounter, tiles)
        tell(tile_ring, tile_put, shared.tile, [0] * (1 + self.batch.words))

    @cute.jit
    def consume(self, rings, shared, mma_s, mma_q, store_dQ, mDQ, mStats, mQ, tidx, extents):
        """A consumer, to the end:

        while there is a tile of queries:
            leave the tiles of keys that only the other consumer sees
            S of the last tile of keys
            step of each tile of keys with a hidden pair, then of the others, then of the first
            dQ through the place of Q to global memory
        """
        # 3. a consumer's prologue
        q_ring, k_ring, tile_ring = rings.q, rings.k, rings.tile
        consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        thread = tidx % WARPGROUP
        q_get = pipeline.PipelineState(CONSUMERS, Int32(0), consumer, Int32(0))
        k_get, k_next = [pipeline.make_pipeline_state(CONSUMER, STAGES) for _ in range(2)]
        k_next.advance()
        v_get = pipeline.make_pipeline_state(CONSUMER, self.v_stages)
        tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
        x = self.fragments(rings, shared, mma_s, mma_q, consumer, thread)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy_dQ = cute.make_tiled_copy_C(stmatrix, mma_q).get_slice(thread)
        # Until KeyGradients has ended, which waited for the preprocess: LSE and D are there. Without it this
        # kernel could also end, and the stream go on, before dK and dV are there.
        cute.arch.griddepcontrol_wait()

        valid, place = hear_place(tile_ring, tile_get, shared.tile)
        tile_get.advance()
        while valid != 0:
            q_block, lengths = place[0], self.batch.lengths(place, extents)
            # 4. what this consumer sees: its rows, LSE, D and the first S
            first_row = q_block * self.tile_q + consumer * ROWS
            kv_blocks = self.kv_blocks(q_block * self.tile_q + self.tile_q, *lengths)
            # Tiles that only rows of the other consumer can see, or all of them past the last query.
            own_blocks = self.own_blocks(first_row, *lengths)
            first, left, edge = Int32(0), None, None
            if const_expr(self.mask.hides_first):
                span = first_row, kv_blocks, own_blocks, None
                (_, _, own_blocks, _), (left, first, edge) = self.begin(span, q_block, *lengths)
            k_get, k_next, v_get = self.leave(rings, k_get, k_next, v_get, kv_blocks - own_blocks)
            # (LSE or D, query)
            scratch_row = self.batch.scratch_row(place, place[1], mQ.shape[2])
            mOwnStats = self.batch.scratch(mStats, place)
            stats = mOwnStats[scratch_row, q_block * CONSUMERS + consumer, None, None]
            for r in range_constexpr(2):
                row = x.places.own[r, 0][0]
                x.rLSE[r], x.rD[r] = stats[0, row], stats[1, row]
            x.dQ.acc.fill(0.0)
            q_ring.consumer_wait(q_get)
            k_ring.consumer_wait(k_get)
            x.S.of(None, k_get.index).issue(False)
            warpgroup.wait_group(0)

            # 5. main loop: tiles of keys with a hidden pair, then the others, with a window again some with a
            # hidden pair. The last one is apart, since no S follows it, and masked in any case.
            masked = own_blocks - self.visible_blocks(first_row, own_blocks, *lengths)
            for begin, end, hides in self.runs(masked, own_blocks, first, edge):
                for i in range(begin, end, unroll=1):
                    where = first_row, own_blocks - 1 - i, lengths
                    self.step(x, k_get, k_next, v_get, *where, masked=hides, final=False)
                    k_get.advance()
                    k_next.advance()
                    v_get.advance()
            self.step(x, k_get, k_next, v_get, first_row, first, lengths, masked=True, final=True)
            k_get.advance()
            k_next.advance()
            v_get.advance()
            if const_expr(self.mask.hides_first):
                k_get, k_next, v_get = self.leave(rings, k_get, k_next, v_get, left)

            # 6. epilogue: dQ through its consumer's rows of Q
            rdQ16 = cute.make_rmem_tensor(x.dQ.acc.layout, self.dtype)  # ((2, 2, d/8), 1, 1)
            rdQ16.store((x.dQ.acc.load() * self.scale).to(self.dtype))
            tRsQ = copy_dQ.partition_D(shared.Q)  # (CPY, CPY_M, CPY_N, consumer)
            cute.copy(copy_dQ, copy_dQ.retile(rdQ16), tRsQ[None, None, None, consumer])
            cute.arch.fence_view_async_shared()  # written by threads, read by the TMA
            cute.arch.barrier(barrier_id=Barrier.OWN + consumer, number_of_threads=WARPGROUP)
            if cute.arch.make_warp_uniform(tidx // WARP) == WARPGROUP // WARP * consumer:  # its first warp
                tQgQ, tQsQ = partition_tma(store_dQ, self.batch.queries(mDQ, place[1], place), shared.Q)
                cute.copy(store_dQ, tQsQ[None, consumer], tQgQ[None, q_block * CONSUMERS + consumer])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            q_ring.consumer_release(q_get)
            for _ in range_constexpr(CONSUMERS):
                q_get.advance()
            valid, place = hear_place(tile_ring, tile_get, shared.tile)
            tile_get.advance()

    @cute.jit
    def leave(self, rings, k_get, k_next, v_get, tiles):
        """Wait for so many tiles of keys, which only the other consumer sees, and release them unread; the
        rings' states behind them."""
        for _ in range(tiles, unroll=1):
            for ring, state in ((rings.k, k_get), (rings.v, v_get)):
                ring.consumer_wait(state)
                ring.consumer_release(state)
            k_get.advance()
            k_next.advance()
            v_get.advance()
        return k_get, k_next, v_get

    def fragments(self, rings, shared, mma_s, mma_q, consumer, thread) -> Consumer:
        """What a consumer's thread holds, and its operands."""
        thr_s, thr_q = mma_s.get_slice(0), mma_q.get_slice(0)
        rS, rdP = [
            cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, ROWS)), Float32) for _ in range(2)
        ]  # ((2, 2, 8), 1, 1)
        rdQ = cute.make_rmem_tensor(
            mma_q.partition_shape_C((ROWS, self.head_dim)), Float32
        )  # ((2, 2, d/8), 1, 1)
        words = cute.make_rmem_tensor(cute.make_layout(cute.size(rS) // 2), Int32)  # (16,)
        tdS = cute.make_tensor(
            cute.recast_ptr(words.iterator, None, self.dtype), operand_a(rS.layout)
        )  # (MMA, MMA_M, MMA_K) = ((2, 2, 2), 1, 4)
        rLSE, rD = [cute.make_rmem_tensor(cute.make_layout(2), Float32) for _ in range(2)]  # (2,)
        tSQ, tPdO = [
            mma_s.make_fragment_A(thr_s.partition_A(sX))[None, None, None, consumer]
            for sX in (shared.Q, shared.dO)
        ]  # (MMA, 1, d/16)
        tSK, tPV = [
            mma_s.make_fragment_B(thr_s.partition_B(sX)) for sX in (shared.K, shared.V)
        ]  # (MMA, 1, d/16, stage or 1)
        tQK = mma_q.make_fragment_B(thr_q.partition_B(exchanged(shared.K)))  # (MMA, 1, 64/16, stage)
        return Consumer(
            S=Product(mma_s, rS, tSQ, tSK),
            dP=Product(mma_s, rdP, tPdO, tPV),
            dQ=Product(mma_q, rdQ, tdS, tQK),
            places=coordinates(mma_s, (ROWS, ROWS), thread),
            scores=by_row(rS),
            dscores=by_row(rdP),
            words=words,
            rLSE=rLSE,
            rD=rD,
            rings=rings,
        )

    def step(self, x: Consumer, k_get, k_next, v_get, first_row, kv_block, lengths, masked, final):
        """A tile of keys; its S is there already. `masked` and `final` are Python's.

            products                  meanwhile, or with the result
            issue dP                  P = exp2(S·c − LSE), 0 where the mask hides
            wait for dP; leave V      dS = P∘(dP − D), rounded
            issue dQ
            issue the next tile's S, unless `final`
            wait for dQ; leave K
            wait for S

        Nothing is in flight at either end: across a loop's back edge ptxas would serialise every WGMMA of the
        kernel. Nor is dQ ever in flight with dP, for the number of registers that are live (notes/bwd4.md,
        "What the assembler takes" and "Heads of 256").
        """
        x.rings.v.consumer_wait(v_get)
        x.dP.of(None, v_get.index if self.v_stages > 1 else 0).issue(False)
        self.exponentials(x.scores, x.rLSE)
        if masked:
            hides = x.places.own, x.places.first, first_row, kv_block, *lengths
            self.hide(x.scores, Float32(0.0), *hides, both_edges=self.mask.hides_first)
        warpgroup.wait_group(0)
        x.rings.v.consumer_release(v_get)
        for r in range(2):
            x.dscores[r, None].store(x.scores[r, None].load() * (x.dscores[r, None].load() - x.rD[r]))
        round_fragment(x.dP.acc, x.words, self.dtype)
        x.dQ.of(None, k_get.index).issue(True)
        if not final:
            x.rings.k.consumer_wait(k_next)
            x.S.of(None, k_next.index).issue(False)
        warpgroup.wait_group(0 if final else 1)
        x.rings.k.consumer_release(k_get)
        warpgroup.wait_group(0)
