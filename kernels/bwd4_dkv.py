"""BWD4 for heads of 256, the first of two kernels: dK and dV.

The idea          At this head_dim the additions to dQ's sums are the limit: with 64 keys a CTA (more have no
                  room for their gradients) each step sends as many bytes to L2 as it loads. A second kernel
                  that computes S and dP again (bwd4_dq.py) keeps dQ in registers instead: seven products for
                  five, and still less time. With nothing to add there is no order to add in: the gradients
                  are bit-identical from run to run.
What changes      against bwd4's Backward: tiles of 64 keys, and a consumer has a gradient instead of half of
                  the keys, since dK and dV of 64 keys are 256 registers a thread. P crosses over through
                  shared memory, in fp32; nobody takes turns, one consumer being behind by its wait for P.
What does not     who loads, persistent CTAs, the preprocess; the order of tiles and the mask.
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
from .device.key_parts import halves, leave_part
from .device.key_tiles import BOTH, CONSUMER_WARPS, CONSUMERS, REGISTERS, ROWS, THREADS, Rings, Tiles
from .device.masks import Mask
from .device.rings import CONSUMER, PRODUCER, put, tma_rings
from .device.tile_order import fetch, hear_place, message_ring, tell
from .device.tma import allocate_tiles, load_atom, partition_tma, store_atom, tiles_at
from .device.wgmma import by_row, exchanged, operand_a, round_fragment

STAGES = 2  # of Q, dO and P; of 256 columns less than 2 KiB are left
OF_P, OF_DS = range(CONSUMERS)  # the consumers


class Barrier(IntEnum):
    """Named barriers: the first number of each kind. `KeyGradients` has the table of who comes."""

    CTA = 0
    OWN = 1  # + consumer
    P_READY = 3  # + stage


@dataclass(frozen=True)
class Shared:
    """Shared memory. Tiles of 16-bit elements lie as the TMA's 128-byte swizzle puts them."""

    K: cute.Tensor  # (key, head_dim, 1)
    V: cute.Tensor  # (key, value_dim, 1)
    Q: cute.Tensor  # (query, head_dim, stage)
    dO: cute.Tensor  # (query, value_dim, stage)
    P: cute.Tensor  # (register, thread, quad, stage) fp32: as the threads of both consumers hold it
    stats: cute.Tensor  # (query, LSE or D, block of 64 queries: 1, stage) fp32
    tile: cute.Tensor  # (1 + words,) int32: valid, and the place of a tile of keys


@dataclass(frozen=True)
class Consumer:
    """What a step needs. A thread has two rows, that is keys, of the 64×64 scores."""

    first: Product  # OF_P: Sᵀ = K·Qᵀ. OF_DS: dPᵀ = V·dOᵀ. Last modes: 1 and the stage
    gradient: Product  # OF_P: dV += Pᵀ·dO. OF_DS: dK += dSᵀ·Q. A is in registers, B's last mode the stage
    scores: cute.Tensor  # first.acc as (key, query) = ((2, 1), (2, 8)): S, then P; or dP, then dS
    words: cute.Tensor  # (16,) int32: P or dS rounded, two values a word; gradient.A is a view of it
    places: Coordinates  # of the scores
    ring: pipeline.PipelineTmaAsync  # of first.B
    other_ring: pipeline.PipelineTmaAsync  # of gradient.B
    thread: Int32
    shared: Shared


class KeyGradients(Tiles):
    """dK and dV. The CTA: a consumer for P and dV (OF_P, c = 0), one for dS and dK (OF_DS, c = 1), then a
    warp that loads.

    mbarriers                   arrivals that complete a phase       who waits
    q, do         full          the producer's, and the bytes        both consumers
                  empty         8, a lane of each consumer warp      the producer
    k, v          full          the producer's, and the bytes        k: OF_P; v: OF_DS
                  empty         1: that consumer's first warp, when  the producer
                                its gradient has left from there
    tile          full          32, the producer's lanes             both consumers
                  empty         256, all of their threads            the producer

    named barriers              who arrives                          who waits                       threads
    OWN + c                     c: its gradient is in shared memory  c, whose first warp stores it   128
    P_READY + stage             OF_P: P is in the stage's buffer     OF_DS, before dS                256

    P's buffers have no barrier that says they are free. A buffer belongs to a stage of Q and dO, and OF_P
    writes it when both have come: they come when both consumers have left that stage, OF_DS after it had
    read P. So OF_P gets at most two tiles ahead, and OF_DS waits at P_READY of its own. No cycle: P of a tile
    waits for nothing but that both left the tile two before.

    What compute-sanitizer does not see: racecheck reports P's buffers. It would have to follow two ways. P is
    read after it has been written: P_READY, where OF_P only arrives. And it is written after it has been
    read: OF_DS reads P into registers, multiplies with what it makes of them, waits for that product, arrives
    at `empty` of Q's ring and of dO's; the producer waits there and issues the loads, whose bytes complete
    `full`, for which OF_P waits. Ordered by mbarriers and the async proxy, that is, and by no barrier where
    the two consumers meet. The same phases order what TMA writes and WGMMA reads, and `fence.proxy.async`
    before OWN a gradient's way from threads to the TMA.
    """

    def __init__(
        self, head_dim: int, mask: Mask, dtype: type, divides: bool = False, sms: int = SMS,
        value_dim: int | None = None, **policies: bool,
    ):  # fmt: skip
        # Not `deterministic`: that is taking turns at dQ's sums, of which there are none.
        super().__init__(head_dim, mask, dtype, False, ROWS, ROWS, divides, sms, **policies)
        self.value_dim = value_dim or head_dim  # columns of V and dO

    def product_of_scores(self) -> cute.TiledMma:
        """Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ."""
        return self._product(OperandMajorMode.K, ROWS, warpgroup.OperandSource.SMEM)

    def product_of_sums(self, columns: int) -> cute.TiledMma:
        """dV = Pᵀ·dO, dK = dSᵀ·Q."""
        return self._product(OperandMajorMode.MN, columns, warpgroup.OperandSource.RMEM)

    def _product(self, major, columns: int, source) -> cute.TiledMma:
        kinds = self.dtype, self.dtype, OperandMajorMode.K, major, Float32
        return make_trivial_tiled_mma(*kinds, (1, 1, 1), (ROWS, columns), source)

    @property
    def smem_bytes(self) -> int:
        tiles = ROWS * ((2 + STAGES) * self.head_dim + STAGES * self.value_dim) * 2  # K, V's place and Q; dO
        p = STAGES * ROWS * ROWS * 4
        stats = STAGES * 2 * ROWS * 4
        barriers = 2 * (2 * STAGES + 3) * 8
        return tiles + p + stats + 4 * (1 + self.words) + barriers

    @cute.jit
    def launch(
        self, mQ, mK, mV, mDO, mDK, mDV, mStats, mCounter, stream, numbers, mTiled=None, mParts=None,
        mList=None,
    ):  # fmt: skip
        """`numbers` are `policies.Numbers`'. Divided, dK and dV are left in mParts, and mDK and mDV are
        not there."""
        batch, kv_heads, seqlen_kv, _ = mK.shape
        mQ, mDO, mK, mV, mDK, mDV = [self.batch.view(mX) for mX in (mQ, mDO, mK, mV, mDK, mDV)]
        tma = []
        of_keys, of_values = self.head_dim, self.value_dim
        for mX, columns in ((mQ, of_keys), (mDO, of_values), (mK, of_keys), (mV, of_values)):
            tma += load_atom(mX, ROWS, columns)
        if const_expr(self.divides):
            key_parts, value_parts = halves(mParts)
            tma += [None, key_parts, None, value_parts]
            seqlen_kv, kv_heads = mTiled.shape[0], mTiled.shape[2]
        else:
            for mX, columns in ((mDK, of_keys), (mDV, of_values)):
                tma += store_atom(mX, ROWS, columns)
        mma_s, mma_k = self.product_of_scores(), self.product_of_sums(of_keys)
        tiles = cute.ceil_div(seqlen_kv, ROWS) * kv_heads * batch
        if const_expr(self.packed):
            tiles = self.most_tiles(mList) * kv_heads
        self.kernel(mma_s, mma_k, *tma, mStats, mCounter, tiles, numbers, mTiled, mList).launch(
            grid=(cutlass.min(tiles, self.sms), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,  # the registers of an SM are all for one CTA
            use_pdl=True,  # the first Q is loaded while the preprocess ends
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mma_s, mma_k, load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV, store_dK, mDK, store_dV,
        mDV, mStats, mCounter, tiles, numbers, mTiled, mList,
    ):  # fmt: skip
        """mQ, mDO, mK, mV, mDK, mDV are (seqlen, head_dim, heads, batch), as TMA descriptors see them;
        divided, mDK and mDV are mParts' halves. mTiled and mParts: `key_parts`."""
        # 1. shared memory, rings, and who is who
        self.take(numbers)
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen_q, seqlen_kv = mQ.shape[0], mK.shape[0]
        mTiled = self.count_parts(mK, mTiled)
        lengths = seqlen_q, seqlen_kv, mQ.shape[2] // mTiled.shape[2]  # the last: query heads of a key head
        of_keys, of_values = self.head_dim, self.value_dim
        smem = SmemAllocator()
        sK, sV = [allocate_tiles(smem, self.dtype, ROWS, of_keys, 1) for _ in range(2)]
        if const_expr(of_values != of_keys):  # in a place where dK has room
            sV = tiles_at(sV.iterator, self.dtype, ROWS, of_values, 1)
        sQ, sdO = [allocate_tiles(smem, self.dtype, ROWS, d, STAGES) for d in (of_keys, of_values)]
        sP = smem.allocate_tensor(Float32, cute.make_layout((4, WARPGROUP, 8, STAGES)), 128)
        sStats = smem.allocate_tensor(Float32, cute.make_layout((ROWS, 2, 1, STAGES)), 128)
        sTile = smem.allocate_tensor(Int32, cute.make_layout(1 + self.words), 16)
        shared = Shared(sK, sV, sQ, sdO, sP, sStats, sTile)
        key_bytes, value_bytes = ROWS * of_keys * 2, ROWS * of_values * 2
        load_rings = tma_rings(
            smem,
            (STAGES, key_bytes + 2 * ROWS * 4, CONSUMER_WARPS),  # Q and its queries' LSE and D
            (STAGES, value_bytes, CONSUMER_WARPS),
            (1, key_bytes, 1),  # the warp that saw dV or dK leave
            (1, value_bytes, 1),
        )
        rings = Rings(*load_rings, message_ring(smem, WARPGROUP * CONSUMERS))
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_idx >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == CONSUMER_WARPS:
                loads = load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV
                self.produce(rings, shared, loads, mStats, mCounter, tiles, lengths, mTiled, mList)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            stores = store_dK, mDK, store_dV, mDV
            self.consume(rings, shared, mma_s, mma_k, stores, tidx, lengths, mTiled)

    @cute.jit
    def produce(self, rings, shared, loads, mStats, mCounter, tiles, lengths, mTiled, mList):
        """2. The producer warp, to the end:

        while there is a tile of keys that nobody has taken:
            tell the consumers which
            for each query head of the key head, and tile of queries that sees the keys:
                load Q, its LSE and D           LSE and D not before the preprocess has ended
                load dO
                load K and V, the first time    one stage each: dV and dK of the tile before may still leave
                                                from there, and this tile's first Q shall not wait for that
        tell them that there is none
        """
        load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV = loads
        *extents, group = lengths
        q_ring, do_ring, k_ring, v_ring, tile_ring = rings.q, rings.do, rings.k, rings.v, rings.tile
        q_put = pipeline.make_pipeline_state(PRODUCER, STAGES)
        kv_put, tile_put = [pipeline.make_pipeline_state(PRODUCER, 1) for _ in range(2)]
        tile, _, _ = cute.arch.block_idx()
        waited = cutlass.Boolean(False)
        if const_expr(self.packed):
            cute.arch.griddepcontrol_wait()  # for the list, too
            cute.arch.griddepcontrol_launch_dependents()
            tiles, waited = mList[0, 0] * mTiled.shape[2], cutlass.Boolean(True)
        while tile < tiles:
            place = self.place_of(tile, mQ, mTiled, mList)
            tell(tile_ring, tile_put, shared.tile, (1, *place))
            tile_put.advance()
            kv_block, kv_head, *_ = place
            first, _, _, last = self.work_on(place, *self.batch.lengths(place, extents))
            mOwnStats = self.batch.scratch(mStats, place)
            # (TMA, tile of keys) and (TMA, 1)
            own_head = kv_head
            if const_expr(self.divides):
                own_head = kv_head // (mTiled.shape[2] // mK.shape[2])
            tKgK, tKsK = partition_tma(load_K, self.batch.keys(mK, own_head, place), shared.K)
            tVgV, tVsV = partition_tma(load_V, self.batch.keys(mV, own_head, place), shared.V)
            for g in range(group, unroll=1):
                head = kv_head * group + g
                # (TMA, tile of queries) and (TMA, stage)
                tQgQ, tQsQ = partition_tma(load_Q, self.batch.queries(mQ, head, place), shared.Q)
                tOgO, tOsO = partition_tma(load_dO, self.batch.queries(mDO, head, place), shared.dO)
                for step in range(first, last, unroll=1):
                    i = self.of_part(step, place)
                    put(q_ring, q_put, load_Q, tQgQ[None, i], tQsQ)
                    if not waited:
                        cute.arch.griddepcontrol_wait()
                        cute.arch.griddepcontrol_launch_dependents()
                        waited = cutlass.Boolean(True)
                    head_index = self.batch.scratch_row(place, head, mQ.shape[2])
                    self.put_stats(q_ring, q_put, mOwnStats, shared.stats, head_index, i)
                    put(do_ring, q_put, load_dO, tOgO[None, i], tOsO)
                    q_put.advance()
                    if g == 0 and step == first:
                        put(k_ring, kv_put, load_K, tKgK[None, kv_block], tKsK)
                        put(v_ring, kv_put, load_V, tVgV[None, kv_block], tVsV)
            if first == last:
                put(k_ring, kv_put, load_K, tKgK[None, kv_block], tKsK)
                put(v_ring, kv_put, load_V, tVgV[None, kv_block], tVsV)
            kv_put.advance()
            tile = fetch(mCounter, tiles)
        tell(tile_ring, tile_put, shared.tile, [0] * (1 + self.words))

    @cute.jit
    def consume(self, rings, shared, mma_s, mma_k, stores, tidx, lengths, mTiled):
        """A consumer: its fragments, then `accumulate` to the end."""
        # 3. a consumer's prologue; both have the same registers, and each the operands of its role
        consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        thread = tidx % WARPGROUP
        q_get, q_next = [pipeline.make_pipeline_state(CONSUMER, STAGES) for _ in range(2)]
        q_next.advance()
        kv_get, tile_get = [pipeline.make_pipeline_state(CONSUMER, 1) for _ in range(2)]
        mma_v = mma_k if self.value_dim == self.head_dim else self.product_of_sums(self.value_dim)
        thr_s, thr_v, thr_k = [mma.get_slice(0) for mma in (mma_s, mma_v, mma_k)]
        rS = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, ROWS)), Float32)  # ((2, 2, 8), 1, 1)
        rSum = cute.make_rmem_tensor(
            mma_k.partition_shape_C((ROWS, self.head_dim)), Float32
        )  # ((2, 2, d/8), 1, 1)
        rV = rSum
        if const_expr(self.value_dim != self.head_dim):
            of_values = mma_v.partition_shape_C((ROWS, self.value_dim))
            rV = cute.make_tensor(rSum.iterator, cute.make_layout(of_values))
        words = cute.make_rmem_tensor(cute.make_layout(cute.size(rS) // 2), Int32)  # (16,)
        tP = cute.make_tensor(
            cute.recast_ptr(words.iterator, None, self.dtype), operand_a(rS.layout)
        )  # (MMA, MMA_M, MMA_K) = ((2, 2, 2), 1, 4)
        tSK, tSV = [
            mma_s.make_fragment_A(thr_s.partition_A(sX)) for sX in (shared.K, shared.V)
        ]  # (MMA, 1, d/16, 1)
        tSQ, tSdO = [
            mma_s.make_fragment_B(thr_s.partition_B(sX)) for sX in (shared.Q, shared.dO)
        ]  # (MMA, 1, d/16, stage)
        tKQ, tVdO = [
            mma.make_fragment_B(thr.partition_B(exchanged(sX)))
            for mma, thr, sX in ((mma_k, thr_k, shared.Q), (mma_v, thr_v, shared.dO))
        ]  # (MMA, 1, 64/16, stage)
        places = coordinates(mma_s, (ROWS, ROWS), thread)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copies = [cute.make_tiled_copy_C(stmatrix, mma).get_slice(thread) for mma in (mma_v, mma_k)]
        for role in range_constexpr(CONSUMERS):
            if consumer == role:
                x = Consumer(
                    first=Product(mma_s, rS, (tSK, tSV)[role], (tSQ, tSdO)[role]),
                    gradient=Product((mma_v, mma_k)[role], (rV, rSum)[role], tP, (tVdO, tKQ)[role]),
                    scores=by_row(rS),
                    words=words,
                    places=places,
                    ring=(rings.q, rings.do)[role],
                    other_ring=(rings.do, rings.q)[role],
                    thread=thread,
                    shared=shared,
                )
                # The branch gives back the states that it advanced, in the order it advances them. Nobody
                # needs them, but without, or in another order, LLVM finds other machine code.
                tile_get, q_get, q_next, kv_get = self.accumulate(
                    x, role, rings, stores, copies, tidx, lengths, mTiled, tile_get, q_get, q_next, kv_get
                )

    @cute.jit
    def accumulate(
        self, x, role: cutlass.Constexpr, rings, stores, copies, tidx, lengths, mTiled,
        tile_get, q_get, q_next, kv_get,
    ):  # fmt: skip
        """One of the consumers, to the end:

        while there is a tile of keys:
            wait for K (OF_P) or V (OF_DS)
            for each query head of the key head:
                Sᵀ or dPᵀ of the first tile of queries
                step of each tile of queries with a hidden pair, then of the others, then of the last
            the gradient through the place of K or V to global memory
        """
        store_dK, mDK, store_dV, mDV = stores
        *extents, group = lengths
        # What its gradient leaves through, which only this consumer reads
        own_ring, sX = ((rings.k, x.shared.K), (rings.v, x.shared.V))[role]
        if const_expr(self.value_dim != self.head_dim):
            sX = tiles_at(sX.iterator, self.dtype, ROWS, (self.value_dim, self.head_dim)[role], 1)
        store, mX = ((store_dV, mDV), (store_dK, mDK))[role]
        copy_sum = copies[role]
        factor = (1.0, self.scale)[role]
        tile_ring, ring = rings.tile, x.ring

        valid, place = hear_place(tile_ring, tile_get, x.shared.tile)
        tile_get.advance()
        while valid != 0:
            seqlens = self.batch.lengths(place, extents)
            first, masked, whole, last = self.work_on(place, *seqlens)
            x.gradient.acc.fill(0.0)
            own_ring.consumer_wait(kv_get)

            # 4. main loop: tiles of queries with a hidden pair, then the others, with a window again some
            # with a hidden pair. The last one is apart, since no product follows it, and masked in any case.
            heads = group if first < last else 0
            for _ in range(heads, unroll=1):
                ring.consumer_wait(q_get)
                x.first.of(0, q_get.index).issue(False)
                warpgroup.wait_group(0)
                for begin, end, hides in self.runs(first, masked, whole, last):
                    for i in range(begin, end, unroll=1):
                        self.step(x, role, q_get, q_next, place, i, seqlens, masked=hides, final=False)
                        q_get.advance()
                        q_next.advance()
                self.step(x, role, q_get, q_next, place, last - 1, seqlens, masked=True, final=True)
                q_get.advance()
                q_next.advance()

            # 5. epilogue: dV through the place of K, dK through that of V
            is_first_warp = cute.arch.make_warp_uniform(tidx // WARP) == WARPGROUP // WARP * role
            if const_expr(self.divides):
                part = self.place_of_part(place, mTiled.shape[2])
                leave_part(x.gradient.acc, mX[part, place[0], None, None], x.thread)
                self.sync(Barrier.OWN, role, WARPGROUP)  # K or V is the whole consumer's
                if is_first_warp:
                    own_ring.consumer_release(kv_get)
            else:
                rX16 = cute.make_rmem_tensor(x.gradient.acc.layout, self.dtype)  # ((2, 2, d/8), 1, 1)
                rX16.store((x.gradient.acc.load() * factor).to(self.dtype))
                cute.copy(copy_sum, copy_sum.retile(rX16), copy_sum.partition_D(sX)[None, None, None, 0])
                cute.arch.fence_view_async_shared()  # written by threads, read by the TMA
                self.sync(Barrier.OWN, role, WARPGROUP)
                if is_first_warp:
                    tXgX, tXsX = partition_tma(store, self.batch.keys(mX, place[1], place), sX)
                    cute.copy(store, tXsX[None, 0], tXgX[None, place[0]])
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    own_ring.consumer_release(kv_get)
            kv_get.advance()
            valid, place = hear_place(tile_ring, tile_get, x.shared.tile)
            tile_get.advance()
        return tile_get, q_get, q_next, kv_get

    def step(self, x: Consumer, role: int, q_get, q_next, place, i, seqlens, masked: bool, final: bool):
        """The i-th tile of queries; its Sᵀ or dPᵀ is there. `role`, `masked` and `final` are Python's.

            OF_P                                       OF_DS
            P = exp2(Sᵀ·c − LSE), to shared memory
            tell that P is there               ──▶     wait for it; dS = P∘(dPᵀ − D)
            round; issue dV                            round; issue dK
            issue the next tile's Sᵀ                   issue the next tile's dPᵀ          (unless `final`)
            wait for dV; leave Q and dO                wait for dK; leave Q and dO
            wait for Sᵀ                                wait for dPᵀ

        Nothing is in flight at either end: across a loop's back edge ptxas would serialise every WGMMA of the
        kernel (notes/bwd4.md, "What the assembler takes"). OF_P waits for dO before it writes P, early for
        dV but in time for P's buffer, which is free when both Q and dO have come.
        """
        stage, sP, sStats = q_get.index, x.shared.P, x.shared.stats
        # OF_P: for dO, with which P's buffer is free. OF_DS: for Q, with which D comes.
        x.other_ring.consumer_wait(q_get)
        if role == OF_P:
            hides = x.places, place[0] * ROWS, self.of_part(i, place) * ROWS, *seqlens
            self.exponentials(x.scores, x.words, sStats[None, 0, None, stage], *hides, masked)
            quads = cute.make_tensor(x.first.acc.iterator, cute.make_layout((4, 8)))  # (register, quad)
            for quad in range(8):
                cute.autovec_copy(quads[None, quad], sP[None, x.thread, quad, stage])
            self.sync(Barrier.P_READY, stage, BOTH, arrive=True)
        else:
            self.sync(Barrier.P_READY, stage, BOTH)
            rP = cute.make_rmem_tensor(x.first.acc.layout, Float32)  # ((2, 2, 8), 1, 1)
            quads = cute.make_tensor(rP.iterator, cute.make_layout((4, 8)))  # (register, quad)
            for quad in range(8):
                cute.autovec_copy(sP[None, x.thread, quad, stage], quads[None, quad])
            self.gradients(by_row(rP), x.scores, sStats[None, 1, None, stage], x.places)
        if role == OF_P:
            self.round_P(x.first.acc, x.words)
        else:
            round_fragment(x.first.acc, x.words, self.dtype)
        x.gradient.of(None, stage).issue(True)
        if not final:
            x.ring.consumer_wait(q_next)
            x.first.of(0, q_next.index).issue(False)
        warpgroup.wait_group(0 if final else 1)
        x.ring.consumer_release(q_get)
        x.other_ring.consumer_release(q_get)
        warpgroup.wait_group(0)
