"""BWD4 for heads of 256: a consumer has a gradient, not half of the keys.

The idea          dK and dV of 64 keys are 256 registers a thread of one warpgroup, more than there are. Here
                  one warpgroup has P and dV, the other dS and dK, 128 registers each.
What changes      against bwd4's Backward: tiles of 64 keys; P crosses over through shared memory, in fp32;
                  dQ leaves through the stage of Q or dO that its warpgroup was the last to read, so that it
                  needs no shared memory of its own; nobody takes turns, since one warpgroup waits for the
                  other's P and is behind by that.
What does not     who loads, who adds dQ to its sum, who writes zeros; the order of tiles, masks, both ends.
"""

from enum import IntEnum
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync, PipelineTmaAsync
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from kernels.bwd_tiles import (
    CONSUMERS,
    REGISTERS,
    ROWS,
    THREADS,
    Tiles,
    add_to_sum,
    await_value,
    pass_turn,
)
from kernels.common import (
    CONSUMER,
    PRODUCER,
    WARP,
    WARPGROUP,
    allocate_tiles,
    by_row,
    exchanged,
    fetch,
    hear,
    load_atom,
    multiply,
    operand_a,
    partition_tma,
    put,
    round_fragment,
    store_atom,
    swizzled_tiles,
    tell,
)

STAGES = 2  # of Q and dO
HALF = 128  # columns of dQ that a consumer has
OF_P, OF_DS = range(CONSUMERS)  # the consumers


class Barrier(IntEnum):
    """Named barriers. OWN is a consumer's, + consumer; DQ_FULL + 2 · stage + consumer."""

    CTA = 0
    P_READY = 1
    DS_READY = 2
    OWN = 3
    K_READ = 5
    DQ_FULL = 6


class WideBackward(Tiles):
    """The CTA: a consumer for P and dV, one for dS and dK, each with half of dQ's columns; then bwd4's
    warpgroup of one warp that loads, two that add dQ to its sum and one that writes zeros."""

    roles = CONSUMERS
    turns = CONSUMERS

    def __init__(self, head_dim: int, causal: bool, top_left: bool, dtype: type, deterministic: bool):
        super().__init__(head_dim, causal, top_left, dtype, deterministic, tile_q=ROWS, tile_kv=ROWS)

    @property
    def smem_bytes(self) -> int:
        tiles = (2 + 2 * STAGES) * ROWS * self.head_dim * 2  # K, V, Q and dO
        p = ROWS * ROWS * 4 + 2 * ROWS * ROWS * 2  # and dS
        stats = STAGES * 2 * ROWS * 4
        barriers = 2 * (2 * STAGES + 3) * 8
        return tiles + p + stats + 16 + barriers

    @cute.jit
    def launch(self, mQ, mK, mV, mDO, mDK, mDV, mStats, mDQ_sum, mZeroed, mOrder, mCounter, stream):
        batch, kv_heads, seqlen_kv, _ = mK.shape
        tma = []
        for mX in (mQ, mDO, mK, mV):
            tma += load_atom(mX, ROWS)
        for mX in (mDK, mDV):
            tma += store_atom(mX, ROWS)
        source, K, MN = warpgroup.OperandSource, OperandMajorMode.K, OperandMajorMode.MN
        mma_s, mma_kv, mma_q = [
            make_trivial_tiled_mma(self.dtype, self.dtype, a, b, Float32, (1, 1, 1), (ROWS, n), place)
            for a, b, n, place in (
                (K, K, ROWS, source.SMEM),  # Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ
                (K, MN, self.head_dim, source.RMEM),  # dV = Pᵀ·dO, dK = dSᵀ·Q
                (MN, MN, HALF, source.SMEM),  # dQ = dS·K
            )
        ]
        kv_blocks = cute.ceil_div(seqlen_kv, ROWS)
        tiles = kv_blocks * kv_heads * batch
        self.kernel(mma_s, mma_kv, mma_q, *tma, mStats, mDQ_sum, mZeroed, mOrder, mCounter, tiles).launch(
            grid=(self.ctas(tiles, kv_blocks), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,  # without it the compiler drops setmaxnreg, silently
            use_pdl=True,  # K, V, Q and dO are loaded while the preprocess ends
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mma_s, mma_kv, mma_q, load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV,
        store_dK, mDK, store_dV, mDV, mStats, mDQ_sum, mZeroed, mOrder, mCounter, tiles,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen_q, seqlen_kv = mQ.shape[0], mK.shape[0]
        group = mQ.shape[2] // mK.shape[2]  # query heads of a key head
        consumer_warps = WARPGROUP // WARP * CONSUMERS
        d = self.head_dim

        smem = SmemAllocator()
        sK, sV = [allocate_tiles(smem, self.dtype, ROWS, d, 1) for _ in range(2)]  # (key, head_dim, 1)
        # (register, thread, quad, 64 columns, stage, consumer): half of dQ where dO was, half where Q was
        sdQ = smem.allocate_tensor(
            Float32, cute.make_layout((4, WARPGROUP, 8, HALF // 64, STAGES, CONSUMERS)), 1024
        )
        layout = swizzled_tiles(self.dtype, ROWS, d, STAGES)
        sdO, sQ = [
            cute.make_tensor(cute.recast_ptr(part.iterator, layout.inner, self.dtype), layout.outer)
            for part in (sdQ[None, None, None, None, None, c] for c in (OF_P, OF_DS))
        ]  # (query, head_dim, stage)
        sdS = allocate_tiles(smem, self.dtype, ROWS, ROWS, 2)  # (key, query, parity of the step)
        # P as the threads of both consumers hold it
        sP = smem.allocate_tensor(
            Float32, cute.make_layout((4, WARPGROUP, 8)), 128
        )  # (register, thread, quad)
        sStats = smem.allocate_tensor(
            Float32, cute.make_layout((ROWS, 2, 1, STAGES)), 128
        )  # (query, LSE or D, block, stage)
        sTile = smem.allocate_tensor(Int32, cute.make_layout(4), 16)  # valid, kv_block, kv_head, batch

        tile_bytes = ROWS * d * 2
        q_ring, do_ring, k_ring, v_ring = [
            PipelineTmaAsync.create(
                num_stages=stages,
                tx_count=tx_count,
                barrier_storage=smem.allocate_array(Int64, 2 * stages),
                producer_group=CooperativeGroup(Agent.Thread),
                consumer_group=CooperativeGroup(Agent.Thread, 1),  # the warp that saw it leave
                defer_sync=True,
            )
            for stages, tx_count in (
                (STAGES, tile_bytes + 2 * ROWS * 4),  # Q and its queries' LSE and D
                (STAGES, tile_bytes),
                (1, tile_bytes),
                (1, tile_bytes),
            )
        ]
        tile_ring = PipelineAsync.create(
            num_stages=1,
            barrier_storage=smem.allocate_array(Int64, 2),
            producer_group=CooperativeGroup(Agent.Thread, WARP),
            consumer_group=CooperativeGroup(Agent.Thread, THREADS - WARP),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_idx >= consumer_warps:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == consumer_warps:
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
            elif warp_idx <= consumer_warps + CONSUMERS:
                # 2. two warps, a consumer each: add dQ to its sum, then free the stage that it left from
                cute.arch.griddepcontrol_wait()  # for the zeros to add to
                cute.arch.griddepcontrol_launch_dependents()
                mine = warp_idx - consumer_warps - 1
                zeroed = self.left_to_zero(mQ, mK)
                q_get = pipeline.make_pipeline_state(CONSUMER, STAGES)
                tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
                valid, kv_block, kv_head, batch = hear(tile_ring, tile_get, sTile)
                tile_get.advance()
                while valid != 0:
                    first, _, last = self.q_tiles(kv_block, seqlen_q, seqlen_kv)
                    self.await_zeros(mZeroed, mK, kv_head, batch, *zeroed)
                    for g in range(group, unroll=1):
                        head_index = batch * mQ.shape[2] + kv_head * group + g
                        for i in range(first, last, unroll=1):
                            turn, final = self.turn_of(kv_block, i, seqlen_q, seqlen_kv)
                            order = mOrder[head_index, None].iterator + CONSUMERS * i + mine
                            if const_expr(self.deterministic):
                                await_value(order, turn)
                            self.sync(Barrier.DQ_FULL, CONSUMERS * q_get.index + mine, WARPGROUP + WARP)
                            target = mDQ_sum[head_index, i, HALF // 64 * mine, None].iterator
                            source = sdQ[None, None, None, None, q_get.index, mine].iterator
                            add_to_sum(target, source, ROWS * HALF * 4)
                            if mine == OF_P:
                                do_ring.consumer_release(q_get)
                            else:
                                q_ring.consumer_release(q_get)
                            if const_expr(self.deterministic):
                                pass_turn(order, turn, final)
                            q_get.advance()
                    valid, kv_block, kv_head, batch = hear(tile_ring, tile_get, sTile)
                    tile_get.advance()
            else:
                # 3. the last warp: zeros for the next heads' sums
                cute.arch.griddepcontrol_wait()  # zeros beside the preprocess's reads may leave L2
                tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
                self.write_zeros(tile_ring, tile_get, sTile, mQ, mK, mDQ_sum, mZeroed)
        else:
            # 4. a consumer's prologue
            cute.arch.setmaxregister_increase(REGISTERS[1])
            consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
            thread = tidx % WARPGROUP
            q_get, q_next = [pipeline.make_pipeline_state(CONSUMER, STAGES) for _ in range(2)]
            q_next.advance()
            kv_get, tile_get = [pipeline.make_pipeline_state(CONSUMER, 1) for _ in range(2)]
            thr_s, thr_kv, thr_q = [mma.get_slice(0) for mma in (mma_s, mma_kv, mma_q)]
            rS = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, ROWS)), Float32)  # or dP
            rSum = cute.make_rmem_tensor(mma_kv.partition_shape_C((ROWS, d)), Float32)  # dV or dK
            rdQ = cute.make_rmem_tensor(mma_q.partition_shape_C((ROWS, HALF)), Float32)
            words = cute.make_layout(cute.size(rS) // 2)  # of two 16-bit values
            rP = cute.make_rmem_tensor(words, Int32)  # or dS
            tP = cute.make_tensor(cute.recast_ptr(rP.iterator, None, self.dtype), operand_a(rS.layout))
            # Operands in shared memory are descriptors, with a stage as their last mode.
            tSK, tSV = [mma_s.make_fragment_A(thr_s.partition_A(sX)) for sX in (sK, sV)]
            tSQ, tSdO = [mma_s.make_fragment_B(thr_s.partition_B(sX)) for sX in (sQ, sdO)]
            tKQ, tVdO = [mma_kv.make_fragment_B(thr_kv.partition_B(exchanged(sX))) for sX in (sQ, sdO)]
            tQdS = mma_q.make_fragment_A(thr_q.partition_A(exchanged(sdS)))
            halves = swizzled_tiles(self.dtype, ROWS, HALF, d // HALF).outer
            sKc = cute.make_tensor(sK.iterator, halves)  # a consumer's columns each
            tQK = mma_q.make_fragment_B(thr_q.partition_B(exchanged(sKc)))
            where = cute.make_identity_tensor((ROWS, ROWS))
            where_S, first_S = [by_row(mma_s.get_slice(t).partition_C(where)) for t in (thread, 0)]
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            copy_S, copy_KV = [
                cute.make_tiled_copy_C(stmatrix, mma).get_slice(thread) for mma in (mma_s, mma_kv)
            ]
            for role in range_constexpr(CONSUMERS):
                if consumer == role:
                    # What a step needs; never an argument of a jit function, which would rebind its members.
                    x = SimpleNamespace(
                        rS=rS, S=by_row(rS), rSum=rSum, rdQ=rdQ, rP=rP, tP=tP,
                        rdS16=cute.make_tensor(tP.iterator, rS.layout), tA=(tSK, tSV)[role],
                        tB=(tSQ, tSdO)[role], ring=(q_ring, do_ring)[role], tC=(tVdO, tKQ)[role],
                        other_ring=(do_ring, q_ring)[role], tQdS=tQdS, tQK=tQK, where_S=where_S,
                        first_S=first_S, copy_S=copy_S, tSsdS=copy_S.partition_D(sdS), sP=sP, sdQ=sdQ,
                        sStats=sStats, mma_s=mma_s, mma_kv=mma_kv, mma_q=mma_q, thread=thread,
                        seqlen_q=seqlen_q, seqlen_kv=seqlen_kv,
                    )  # fmt: skip
                    own_ring, sX = ((k_ring, sK), (v_ring, sV))[role]  # what its gradient leaves through
                    store, mX = ((store_dV, mDV), (store_dK, mDK))[role]
                    factor = (1.0, self.scale)[role]
                    parity = Int32(0)

                    valid, kv_block, kv_head, batch = hear(tile_ring, tile_get, sTile)
                    tile_get.advance()
                    while valid != 0:
                        first, masked, last = self.q_tiles(kv_block, seqlen_q, seqlen_kv)
                        rSum.fill(0.0)
                        k_ring.consumer_wait(kv_get)
                        if const_expr(role == OF_DS):
                            v_ring.consumer_wait(kv_get)
                        heads = group if first < last else 0
                        for _ in range(heads, unroll=1):
                            # 5. main loop: tiles with a hidden pair, then the others; the last one apart
                            x.ring.consumer_wait(q_get)
                            self.first_product(x, q_get.index)
                            warpgroup.wait_group(0)
                            split = cutlass.min(masked, last - 1)
                            for i in range(first, split, unroll=1):
                                self.step(x, role, q_get, q_next, parity, kv_block, i, True, final=False)
                                parity ^= 1
                                q_get.advance()
                                q_next.advance()
                            for i in range(cutlass.max(first, split), last - 1, unroll=1):
                                self.step(x, role, q_get, q_next, parity, kv_block, i, False, final=False)
                                parity ^= 1
                                q_get.advance()
                                q_next.advance()
                            self.step(x, role, q_get, q_next, parity, kv_block, last - 1, True, final=True)
                            parity ^= 1
                            q_get.advance()
                            q_next.advance()

                        # 6. epilogue: dK through V, which only its consumer reads; dV through K, which the
                        # other's dQ must be done with
                        self.sync(Barrier.K_READ, 0, 2 * WARPGROUP, arrive=role == OF_DS)
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

    def step(self, x, role, q_get, q_next, parity, kv_block, q_tile, masked: bool, final: bool):
        """A consumer's products of a tile of queries; the first is there already, that of the next tile comes
        with it. Nothing is in flight at either end, as in bwd4.

        P's buffer is free when dS of the step before is there; dS's, since then both consumers were done with
        dQ of the step before that.
        """
        stage = q_get.index
        x.other_ring.consumer_wait(q_get)
        if role == OF_P:
            hides = x.where_S, x.first_S, kv_block * ROWS, q_tile * ROWS, x.seqlen_q, x.seqlen_kv
            self.exponentials(x.S, x.sStats[None, 0, None, stage], *hides, masked)
            quads = cute.make_tensor(x.rS.iterator, cute.make_layout((4, 8)))
            for i in range(8):
                cute.autovec_copy(quads[None, i], x.sP[None, x.thread, i])
            self.sync(Barrier.P_READY, 0, 2 * WARPGROUP, arrive=True)
            round_fragment(x.rS, x.rP, self.dtype)
        else:
            self.sync(Barrier.P_READY, 0, 2 * WARPGROUP)
            theirs = cute.make_rmem_tensor(x.rS.layout, Float32)
            quads = cute.make_tensor(theirs.iterator, cute.make_layout((4, 8)))
            for i in range(8):
                cute.autovec_copy(x.sP[None, x.thread, i], quads[None, i])
            self.gradients(by_row(theirs), x.S, x.sStats[None, 1, None, stage], x.where_S)
            round_fragment(x.rS, x.rP, self.dtype)
            cute.copy(x.copy_S, x.copy_S.retile(x.rdS16), x.tSsdS[None, None, None, parity])
            cute.arch.fence_view_async_shared()  # written by threads, read by WGMMA
            self.sync(Barrier.DS_READY, 0, 2 * WARPGROUP, arrive=True)
        multiply(x.mma_kv, x.rSum, x.tP, x.tC[None, None, None, stage], True)

        if role == OF_P:
            self.sync(Barrier.DS_READY, 0, 2 * WARPGROUP)
        else:
            self.sync(Barrier.OWN, OF_DS, WARPGROUP)
        multiply(x.mma_q, x.rdQ, x.tQdS[None, None, None, parity], x.tQK[None, None, None, role], False)
        warpgroup.wait_group(0)
        for column in range(HALF // 64):
            for quad in range(8):
                registers = cute.make_tensor(x.rdQ.iterator + 32 * column + 4 * quad, cute.make_layout(4))
                cute.autovec_copy(registers, x.sdQ[None, x.thread, quad, column, stage, role])
        if not final:  # after dQ has left its registers, which it takes
            x.ring.consumer_wait(q_next)
            self.first_product(x, q_next.index)
        cute.arch.fence_view_async_shared()  # written by threads, read by the bulk reduction
        self.sync(Barrier.DQ_FULL, CONSUMERS * stage + role, WARPGROUP + WARP, arrive=True)
        warpgroup.wait_group(0)
