"""BWD4 for heads of 256: one kernel for dK and dV, one for dQ, and no sum in memory.

The idea          At this head_dim the additions to dQ's sums are the limit: with 64 keys a CTA (more have no
                  room for their gradients) each step sends as many bytes to L2 as it loads. A second kernel
                  that computes S and dP again keeps dQ in registers instead: seven products for five, and
                  still less time. With nothing to add there is no order to add in: the gradients are
                  bit-identical from run to run.
What changes      against bwd4's Backward: `KeyGradients` has tiles of 64 keys, and a consumer has a gradient
                  instead of half of the keys, since dK and dV of 64 keys are 256 registers a thread. P
                  crosses over through shared memory, in fp32; nobody takes turns, one consumer being behind
                  by its wait for P. `QueryGradient` has 64 queries a consumer; dS stays in its registers.
What does not     who loads, persistent CTAs, the preprocess; order of tiles and masks are bwd4's in
                  KeyGradients, k6's in QueryGradient.
"""

import math
from enum import IntEnum
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .contract import Problem
from .device.constants import LOG2_E, WARP, WARPGROUP
from .device.key_tiles import (
    CONSUMER_WARPS,
    CONSUMERS,
    REGISTERS,
    ROWS,
    SECTION_BYTES,
    SMS,
    THREADS,
    Tiles,
)
from .device.masks import Mask
from .device.products import coordinates
from .device.query_tiles import QueryTiles
from .device.tile_order import fetch, hear, message_ring, tell
from .device.tma import (
    CONSUMER,
    PRODUCER,
    allocate_tiles,
    load_atom,
    partition_tma,
    put,
    store_atom,
    tma_rings,
)
from .device.wgmma import by_row, exchanged, multiply, operand_a, round_fragment

STAGES = 2  # of Q and dO for KeyGradients, of K for QueryGradient
OF_P, OF_DS = range(CONSUMERS)  # the consumers of KeyGradients


class Barrier(IntEnum):
    """Named barriers. OWN is a consumer's, + consumer; P_READY + stage."""

    CTA = 0
    OWN = 1
    P_READY = 3


class KeyGradients(Tiles):
    """dK and dV. The CTA: a consumer for P and dV, one for dS and dK, then a warp that loads."""

    column_bytes = 4  # of a query's column in Q and dO: there is no sum

    def __init__(self, head_dim: int, mask: Mask, dtype: type):
        super().__init__(head_dim, mask, dtype, False, tile_q=ROWS, tile_kv=ROWS)

    @property
    def smem_bytes(self) -> int:
        tiles = (2 + 2 * STAGES) * ROWS * self.head_dim * 2  # K, V, Q and dO
        p = STAGES * ROWS * ROWS * 4
        stats = STAGES * 2 * ROWS * 4
        barriers = 2 * (2 * STAGES + 3) * 8
        return tiles + p + stats + 16 + barriers

    @cute.jit
    def launch(self, mQ, mK, mV, mDO, mDK, mDV, mStats, mCounter, stream):
        batch, kv_heads, seqlen_kv, _ = mK.shape
        tma = []
        for mX in (mQ, mDO, mK, mV):
            tma += load_atom(mX, ROWS)
        for mX in (mDK, mDV):
            tma += store_atom(mX, ROWS)
        source, K, MN = warpgroup.OperandSource, OperandMajorMode.K, OperandMajorMode.MN
        mma_s, mma_kv = [
            make_trivial_tiled_mma(self.dtype, self.dtype, K, b, Float32, (1, 1, 1), (ROWS, n), place)
            for b, n, place in (
                (K, ROWS, source.SMEM),  # Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ
                (MN, self.head_dim, source.RMEM),  # dV = Pᵀ·dO, dK = dSᵀ·Q
            )
        ]
        tiles = cute.ceil_div(seqlen_kv, ROWS) * kv_heads * batch
        self.kernel(mma_s, mma_kv, *tma, mStats, mCounter, tiles).launch(
            grid=(cutlass.min(tiles, SMS), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,  # without it the compiler drops setmaxnreg, silently
            use_pdl=True,  # K, V, Q and dO are loaded while the preprocess ends
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mma_s, mma_kv, load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV, store_dK, mDK, store_dV, mDV,
        mStats, mCounter, tiles,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen_q, seqlen_kv = mQ.shape[0], mK.shape[0]
        group = mQ.shape[2] // mK.shape[2]  # query heads of a key head
        d = self.head_dim

        smem = SmemAllocator()
        sK, sV = [allocate_tiles(smem, self.dtype, ROWS, d, 1) for _ in range(2)]  # (key, head_dim, 1)
        sQ, sdO = [allocate_tiles(smem, self.dtype, ROWS, d, STAGES) for _ in range(2)]
        # P as the threads of both consumers hold it: (register, thread, quad, stage)
        sP = smem.allocate_tensor(Float32, cute.make_layout((4, WARPGROUP, 8, STAGES)), 128)
        sStats = smem.allocate_tensor(
            Float32, cute.make_layout((ROWS, 2, 1, STAGES)), 128
        )  # (query, LSE or D, block, stage)
        sTile = smem.allocate_tensor(Int32, cute.make_layout(4), 16)  # valid, kv_block, kv_head, batch

        tile_bytes = ROWS * d * 2
        q_ring, do_ring, k_ring, v_ring = tma_rings(
            smem,
            (STAGES, tile_bytes + 2 * ROWS * 4, CONSUMER_WARPS),  # Q and its queries' LSE and D
            (STAGES, tile_bytes, CONSUMER_WARPS),
            (1, tile_bytes, 1),  # the warp that saw dV or dK leave
            (1, tile_bytes, 1),
        )
        tile_ring = message_ring(smem, WARPGROUP * CONSUMERS)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_idx >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == CONSUMER_WARPS:
                # 1. the producer: fetch a tile of keys, tell the others, load it and the queries that see it
                q_put = pipeline.make_pipeline_state(PRODUCER, STAGES)
                kv_put, tile_put = [pipeline.make_pipeline_state(PRODUCER, 1) for _ in range(2)]
                tile, _, _ = cute.arch.block_idx()
                waited = cutlass.Boolean(False)
                while tile < tiles:
                    kv_block, kv_head, batch = self.locate(tile, mQ, mK)
                    tell(tile_ring, tile_put, sTile, (1, kv_block, kv_head, batch))
                    tile_put.advance()
                    first, _, last = self.q_tiles(kv_block, seqlen_q, seqlen_kv)
                    tKgK, tKsK = partition_tma(load_K, mK[None, None, kv_head, batch], sK)
                    tVgV, tVsV = partition_tma(load_V, mV[None, None, kv_head, batch], sV)
                    for g in range(group, unroll=1):
                        head = kv_head * group + g
                        tQgQ, tQsQ = partition_tma(load_Q, mQ[None, None, head, batch], sQ)
                        tOgO, tOsO = partition_tma(load_dO, mDO[None, None, head, batch], sdO)
                        for i in range(first, last, unroll=1):
                            put(q_ring, q_put, load_Q, tQgQ[None, i], tQsQ)
                            if not waited:
                                cute.arch.griddepcontrol_wait()
                                cute.arch.griddepcontrol_launch_dependents()
                                waited = cutlass.Boolean(True)
                            head_index = batch * mQ.shape[2] + head
                            self.put_stats(q_ring, q_put, mStats, sStats, head_index, i)
                            put(do_ring, q_put, load_dO, tOgO[None, i], tOsO)
                            q_put.advance()
                            if g == 0 and i == first:  # dK and dV before may still leave: not before Q
                                put(k_ring, kv_put, load_K, tKgK[None, kv_block], tKsK)
                                put(v_ring, kv_put, load_V, tVgV[None, kv_block], tVsV)
                    if first == last:
                        put(k_ring, kv_put, load_K, tKgK[None, kv_block], tKsK)
                        put(v_ring, kv_put, load_V, tVgV[None, kv_block], tVsV)
                    kv_put.advance()
                    tile = fetch(mCounter, tiles)
                tell(tile_ring, tile_put, sTile, (0, 0, 0, 0))
        else:
            # 2. a consumer's prologue
            cute.arch.setmaxregister_increase(REGISTERS[1])
            consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
            thread = tidx % WARPGROUP
            q_get, q_next = [pipeline.make_pipeline_state(CONSUMER, STAGES) for _ in range(2)]
            q_next.advance()
            kv_get, tile_get = [pipeline.make_pipeline_state(CONSUMER, 1) for _ in range(2)]
            thr_s, thr_kv = [mma.get_slice(0) for mma in (mma_s, mma_kv)]
            rS = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, ROWS)), Float32)  # or dP
            rSum = cute.make_rmem_tensor(mma_kv.partition_shape_C((ROWS, d)), Float32)  # dV or dK
            rP = cute.make_rmem_tensor(cute.make_layout(cute.size(rS) // 2), Int32)  # or dS: 16-bit pairs
            tP = cute.make_tensor(cute.recast_ptr(rP.iterator, None, self.dtype), operand_a(rS.layout))
            # Operands in shared memory are descriptors, with a stage as their last mode.
            tSK, tSV = [mma_s.make_fragment_A(thr_s.partition_A(sX)) for sX in (sK, sV)]
            tSQ, tSdO = [mma_s.make_fragment_B(thr_s.partition_B(sX)) for sX in (sQ, sdO)]
            tKQ, tVdO = [mma_kv.make_fragment_B(thr_kv.partition_B(exchanged(sX))) for sX in (sQ, sdO)]
            places = coordinates(mma_s, (ROWS, ROWS), thread)
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            copy_KV = cute.make_tiled_copy_C(stmatrix, mma_kv).get_slice(thread)
            for role in range_constexpr(CONSUMERS):
                if consumer == role:
                    # What a step needs; never an argument of a jit function, which would rebind its members.
                    x = SimpleNamespace(
                        rS=rS, S=by_row(rS), rSum=rSum, rP=rP, tP=tP, tA=(tSK, tSV)[role],
                        tB=(tSQ, tSdO)[role], ring=(q_ring, do_ring)[role], tC=(tVdO, tKQ)[role],
                        other_ring=(do_ring, q_ring)[role], places=places, sP=sP,
                        sStats=sStats, mma_s=mma_s, mma_kv=mma_kv, thread=thread, seqlen_q=seqlen_q,
                        seqlen_kv=seqlen_kv,
                    )  # fmt: skip
                    own_ring, sX = ((k_ring, sK), (v_ring, sV))[role]  # what its gradient leaves through
                    store, mX = ((store_dV, mDV), (store_dK, mDK))[role]
                    factor = (1.0, self.scale)[role]

                    valid, kv_block, kv_head, batch = hear(tile_ring, tile_get, sTile)
                    tile_get.advance()
                    while valid != 0:
                        first, masked, last = self.q_tiles(kv_block, seqlen_q, seqlen_kv)
                        rSum.fill(0.0)
                        own_ring.consumer_wait(kv_get)
                        heads = group if first < last else 0
                        for _ in range(heads, unroll=1):
                            # 3. main loop: tiles with a hidden pair, then the others; the last one apart
                            x.ring.consumer_wait(q_get)
                            self.first_product(x, q_get.index)
                            warpgroup.wait_group(0)
                            split = cutlass.min(masked, last - 1)
                            for i in range(first, split, unroll=1):
                                self.step(x, role, q_get, q_next, kv_block, i, masked=True, final=False)
                                q_get.advance()
                                q_next.advance()
                            for i in range(cutlass.max(first, split), last - 1, unroll=1):
                                self.step(x, role, q_get, q_next, kv_block, i, masked=False, final=False)
                                q_get.advance()
                                q_next.advance()
                            self.step(x, role, q_get, q_next, kv_block, last - 1, masked=True, final=True)
                            q_get.advance()
                            q_next.advance()

                        # 4. epilogue: dV through K and dK through V, which only its own consumer reads
                        rX16 = cute.make_rmem_tensor(rSum.layout, self.dtype)
                        rX16.store((rSum.load() * factor).to(self.dtype))
                        cute.copy(copy_KV, copy_KV.retile(rX16), copy_KV.partition_D(sX)[None, None, None, 0])
                        cute.arch.fence_view_async_shared()  # written by threads, read by the TMA
                        self.sync(Barrier.OWN, role, WARPGROUP)
                        if warp_idx == WARPGROUP // WARP * role:
                            tXgX, tXsX = partition_tma(store, mX[None, None, kv_head, batch], sX)
                            cute.copy(store, tXsX[None, 0], tXgX[None, kv_block])
                            cute.arch.cp_async_bulk_commit_group()
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                            own_ring.consumer_release(kv_get)
                        kv_get.advance()
                        valid, kv_block, kv_head, batch = hear(tile_ring, tile_get, sTile)
                        tile_get.advance()

    def first_product(self, x, stage):
        """Issue Sᵀ = K·Qᵀ or dPᵀ = V·dOᵀ of a tile of queries."""
        multiply(x.mma_s, x.rS, x.tA[None, None, None, 0], x.tB[None, None, None, stage], False)

    def step(self, x, role, q_get, q_next, kv_block, q_tile, masked: bool, final: bool):
        """A consumer's products of a tile of queries; the first is there already, that of the next tile comes
        with it. Nothing is in flight at either end: across a loop's back edge ptxas would serialise every
        WGMMA of the kernel.

        P's buffer is its stage's, and free when Q and dO have come: they come when both consumers have left.
        """
        stage = q_get.index
        x.other_ring.consumer_wait(q_get)
        if role == OF_P:
            hides = x.places, kv_block * ROWS, q_tile * ROWS, x.seqlen_q, x.seqlen_kv
            self.exponentials(x.S, x.sStats[None, 0, None, stage], *hides, masked)
            quads = cute.make_tensor(x.rS.iterator, cute.make_layout((4, 8)))
            for i in range(8):
                cute.autovec_copy(quads[None, i], x.sP[None, x.thread, i, stage])
            self.sync(Barrier.P_READY, stage, 2 * WARPGROUP, arrive=True)
        else:
            self.sync(Barrier.P_READY, stage, 2 * WARPGROUP)
            theirs = cute.make_rmem_tensor(x.rS.layout, Float32)
            quads = cute.make_tensor(theirs.iterator, cute.make_layout((4, 8)))
            for i in range(8):
                cute.autovec_copy(x.sP[None, x.thread, i, stage], quads[None, i])
            self.gradients(by_row(theirs), x.S, x.sStats[None, 1, None, stage], x.places)
        round_fragment(x.rS, x.rP, self.dtype)
        multiply(x.mma_kv, x.rSum, x.tP, x.tC[None, None, None, stage], True)
        if not final:
            x.ring.consumer_wait(q_next)
            self.first_product(x, q_next.index)
        warpgroup.wait_group(0 if final else 1)
        x.ring.consumer_release(q_get)
        x.other_ring.consumer_release(q_get)
        warpgroup.wait_group(0)


class QueryGradient(QueryTiles):
    """dQ. The CTA: two consumers of 64 queries each, then a warp that loads; keys from right to left."""

    registers = (40, 232)  # the producer of a causal mask needs more than 24

    def __init__(self, head_dim: int, mask: Mask, dtype: type):
        super().__init__(head_dim, mask, ROWS * CONSUMERS, ROWS)
        self.dtype = dtype
        self.scale = 1.0 / math.sqrt(head_dim)
        self.scale_log2 = self.scale * LOG2_E

    def section_bytes(self, seqlen_kv):
        return SECTION_BYTES

    @property
    def smem_bytes(self) -> int:
        tiles = (2 * CONSUMERS + STAGES + 1) * ROWS * self.head_dim * 2  # Q, dO, K and V
        barriers = 2 * (CONSUMERS + STAGES + 2) * 8
        return tiles + 16 + barriers

    @cute.jit
    def launch(self, mQ, mK, mV, mDO, mDQ, mStats, mCounter, stream):
        batch, heads, seqlen_q, _ = mQ.shape
        tma = []
        for mX in (mQ, mDO, mK, mV):
            tma += load_atom(mX, ROWS)
        source, K, MN = warpgroup.OperandSource, OperandMajorMode.K, OperandMajorMode.MN
        mma_s, mma_q = [
            make_trivial_tiled_mma(self.dtype, self.dtype, K, b, Float32, (1, 1, 1), (ROWS, n), place)
            for b, n, place in (
                (K, ROWS, source.SMEM),  # S = Q·Kᵀ, dP = dO·Vᵀ
                (MN, self.head_dim, source.RMEM),  # dQ = dS·K
            )
        ]
        tiles = cute.ceil_div(seqlen_q, self.tile_q) * heads * batch
        self.kernel(mma_s, mma_q, *tma, *store_atom(mDQ, ROWS), mStats, mCounter, tiles).launch(
            grid=(cutlass.min(tiles, SMS), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,  # without it the compiler drops setmaxnreg, silently
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mma_s, mma_q, load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV, store_dQ, mDQ, mStats, mCounter,
        tiles,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen_q, seqlen_kv = mQ.shape[0], mK.shape[0]
        d = self.head_dim

        smem = SmemAllocator()
        sQ, sdO = [allocate_tiles(smem, self.dtype, ROWS, d, CONSUMERS) for _ in range(2)]
        sK = allocate_tiles(smem, self.dtype, ROWS, d, STAGES)  # (key, head_dim, stage)
        sV = allocate_tiles(smem, self.dtype, ROWS, d, 1)
        sTile = smem.allocate_tensor(Int32, cute.make_layout(4), 16)  # valid, q_block, head, batch

        tile_bytes = ROWS * d * 2
        q_ring, k_ring, v_ring = tma_rings(
            smem,
            (CONSUMERS, 2 * tile_bytes, WARPGROUP // WARP),  # a consumer's own rows of Q and dO
            (STAGES, tile_bytes, CONSUMER_WARPS),
            (1, tile_bytes, CONSUMER_WARPS),
        )
        tile_ring = message_ring(smem, WARPGROUP * CONSUMERS)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_idx >= CONSUMER_WARPS:
            # 1. the producer: fetch a tile of queries, tell the consumers, load it and the keys it sees
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_idx == CONSUMER_WARPS:
                q_put = pipeline.make_pipeline_state(PRODUCER, CONSUMERS)
                k_put = pipeline.make_pipeline_state(PRODUCER, STAGES)
                v_put, tile_put = [pipeline.make_pipeline_state(PRODUCER, 1) for _ in range(2)]
                tile, _, _ = cute.arch.block_idx()
                while tile < tiles:
                    q_block, head, batch = self.locate(tile, mQ, mK)
                    tell(tile_ring, tile_put, sTile, (1, q_block, head, batch))
                    tile_put.advance()
                    kv_head = head // (mQ.shape[2] // mK.shape[2])
                    tQgQ, tQsQ = partition_tma(load_Q, mQ[None, None, head, batch], sQ)
                    tOgO, tOsO = partition_tma(load_dO, mDO[None, None, head, batch], sdO)
                    tKgK, tKsK = partition_tma(load_K, mK[None, None, kv_head, batch], sK)
                    tVgV, tVsV = partition_tma(load_V, mV[None, None, kv_head, batch], sV)
                    last = self.kv_blocks(q_block * self.tile_q + self.tile_q, seqlen_q, seqlen_kv) - 1
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
                    for i in range(last, unroll=1):
                        put(k_ring, k_put, load_K, tKgK[None, last - 1 - i], tKsK)
                        put(v_ring, v_put, load_V, tVgV[None, last - 1 - i], tVsV)
                        k_put.advance()
                        v_put.advance()
                    tile = fetch(mCounter, tiles)
                tell(tile_ring, tile_put, sTile, (0, 0, 0, 0))
        else:
            # 2. a consumer's prologue
            cute.arch.setmaxregister_increase(self.registers[1])
            consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
            thread = tidx % WARPGROUP
            q_get = pipeline.PipelineState(CONSUMERS, Int32(0), consumer, Int32(0))
            k_get, k_next = [pipeline.make_pipeline_state(CONSUMER, STAGES) for _ in range(2)]
            k_next.advance()
            v_get, tile_get = [pipeline.make_pipeline_state(CONSUMER, 1) for _ in range(2)]
            thr_s, thr_q = mma_s.get_slice(0), mma_q.get_slice(0)
            rS, rdP = [
                cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, ROWS)), Float32) for _ in range(2)
            ]
            rdQ = cute.make_rmem_tensor(mma_q.partition_shape_C((ROWS, d)), Float32)
            rdS = cute.make_rmem_tensor(cute.make_layout(cute.size(rS) // 2), Int32)  # pairs of 16-bit values
            tdS = cute.make_tensor(cute.recast_ptr(rdS.iterator, None, self.dtype), operand_a(rS.layout))
            rLSE, rD = [cute.make_rmem_tensor(cute.make_layout(2), Float32) for _ in range(2)]
            # Operands in shared memory are descriptors, with a stage as their last mode.
            tSQ, tPdO = [
                mma_s.make_fragment_A(thr_s.partition_A(sX))[None, None, None, consumer] for sX in (sQ, sdO)
            ]
            tSK, tPV = [mma_s.make_fragment_B(thr_s.partition_B(sX)) for sX in (sK, sV)]
            tQK = mma_q.make_fragment_B(thr_q.partition_B(exchanged(sK)))
            places = coordinates(mma_s, (ROWS, ROWS), thread)
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            copy_dQ = cute.make_tiled_copy_C(stmatrix, mma_q).get_slice(thread)
            # What a step needs; never an argument of a jit function, which would rebind its members.
            x = SimpleNamespace(
                rS=rS, rdP=rdP, rdQ=rdQ, rdS=rdS, tdS=tdS, S=by_row(rS), dP=by_row(rdP), rLSE=rLSE, rD=rD,
                tSQ=tSQ, tPdO=tPdO, tSK=tSK, tPV=tPV, tQK=tQK, places=places,
                mma_s=mma_s, mma_q=mma_q, k_ring=k_ring, v_ring=v_ring, seqlen_q=seqlen_q,
                seqlen_kv=seqlen_kv,
            )  # fmt: skip
            # For LSE and D. It also waits for all of KeyGradients: without that this kernel could end, and
            # the stream go on, before dK and dV are there.
            cute.arch.griddepcontrol_wait()

            valid, q_block, head, batch = hear(tile_ring, tile_get, sTile)
            tile_get.advance()
            while valid != 0:
                first_row = q_block * self.tile_q + consumer * ROWS
                kv_blocks = self.kv_blocks(q_block * self.tile_q + self.tile_q, seqlen_q, seqlen_kv)
                # Tiles that only rows of the other consumer can see, or all of them past the last query.
                own_blocks = self.own_blocks(first_row, seqlen_q, seqlen_kv)
                for _ in range(kv_blocks - own_blocks, unroll=1):
                    for ring, state in ((k_ring, k_get), (v_ring, v_get)):
                        ring.consumer_wait(state)
                        ring.consumer_release(state)
                    k_get.advance()
                    k_next.advance()
                    v_get.advance()
                stats = mStats[batch * mQ.shape[2] + head, q_block * CONSUMERS + consumer, None, None]
                for r in range_constexpr(2):
                    rLSE[r], rD[r] = stats[0, places.own[r, 0][0]], stats[1, places.own[r, 0][0]]
                rdQ.fill(0.0)
                q_ring.consumer_wait(q_get)
                k_ring.consumer_wait(k_get)
                multiply(mma_s, rS, tSQ, tSK[None, None, None, k_get.index], False)
                warpgroup.wait_group(0)

                # 3. main loop: tiles with a hidden pair, then the others; the last one apart
                masked = own_blocks - self.visible_blocks(first_row, own_blocks, seqlen_q, seqlen_kv)
                split = cutlass.min(masked, own_blocks - 1)
                for i in range(0, split, unroll=1):
                    self.step(
                        x, k_get, k_next, v_get, first_row, own_blocks - 1 - i, masked=True, final=False
                    )
                    k_get.advance()
                    k_next.advance()
                    v_get.advance()
                for i in range(split, own_blocks - 1, unroll=1):
                    self.step(
                        x, k_get, k_next, v_get, first_row, own_blocks - 1 - i, masked=False, final=False
                    )
                    k_get.advance()
                    k_next.advance()
                    v_get.advance()
                self.step(x, k_get, k_next, v_get, first_row, Int32(0), masked=True, final=True)
                k_get.advance()
                k_next.advance()
                v_get.advance()

                # 4. epilogue: dQ through its consumer's rows of Q
                rdQ16 = cute.make_rmem_tensor(rdQ.layout, self.dtype)
                rdQ16.store((rdQ.load() * self.scale).to(self.dtype))
                cute.copy(copy_dQ, copy_dQ.retile(rdQ16), copy_dQ.partition_D(sQ)[None, None, None, consumer])
                cute.arch.fence_view_async_shared()  # written by threads, read by the TMA
                cute.arch.barrier(barrier_id=Barrier.OWN + consumer, number_of_threads=WARPGROUP)
                if warp_idx == WARPGROUP // WARP * consumer:
                    tQgQ, tQsQ = partition_tma(store_dQ, mDQ[None, None, head, batch], sQ)
                    cute.copy(store_dQ, tQsQ[None, consumer], tQgQ[None, q_block * CONSUMERS + consumer])
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                q_ring.consumer_release(q_get)
                for _ in range_constexpr(CONSUMERS):
                    q_get.advance()
                valid, q_block, head, batch = hear(tile_ring, tile_get, sTile)
                tile_get.advance()

    def step(self, x, k_get, k_next, v_get, first_row, kv_block, masked: bool, final: bool):
        """The products of a tile of keys; its S is there already, that of the next tile comes with it. The
        exponentials are beside dP. Nothing is in flight at either end, as above."""
        x.v_ring.consumer_wait(v_get)
        multiply(x.mma_s, x.rdP, x.tPdO, x.tPV[None, None, None, 0], False)
        self.exponentials(x.S, x.rLSE)
        if masked:
            hides = x.places.own, x.places.first, first_row, kv_block, x.seqlen_q, x.seqlen_kv
            self.hide(x.S, Float32(0.0), *hides)
        warpgroup.wait_group(0)
        x.v_ring.consumer_release(v_get)
        for r in range(2):
            x.dP[r, None].store(x.S[r, None].load() * (x.dP[r, None].load() - x.rD[r]))
        round_fragment(x.rdP, x.rdS, self.dtype)
        multiply(x.mma_q, x.rdQ, x.tdS, x.tQK[None, None, None, k_get.index], True)
        if not final:
            x.k_ring.consumer_wait(k_next)
            multiply(x.mma_s, x.rS, x.tSQ, x.tSK[None, None, None, k_next.index], False)
        warpgroup.wait_group(0 if final else 1)
        x.k_ring.consumer_release(k_get)
        warpgroup.wait_group(0)

    @cute.jit
    def exponentials(self, S, rLSE):
        """S (query, key) becomes P = exp(S·scale − LSE); rLSE is LSE·log2 e, +∞ past the end."""
        for r in range_constexpr(2):
            p = S[r, None].load() * self.scale_log2 - rLSE[r]
            S[r, None].store(cute.math.exp2(p, fastmath=True))

    def trips(self, problem: Problem) -> tuple[int, float, float]:
        """How many tiles of queries there are, and how many of keys, masked and not, a consumer meets on
        average in the main loop, in which the last one is not."""
        tiles = math.ceil(problem.seqlen_q / self.tile_q)
        masked = unmasked = 0
        for blocks, visible in self.blocks_of(problem):
            split = min(blocks - visible, blocks - 1)
            masked += split
            unmasked += blocks - 1 - split
        rows = tiles * CONSUMERS
        return tiles * problem.batch * problem.heads, masked / rows, unmasked / rows
