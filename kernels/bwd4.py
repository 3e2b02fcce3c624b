"""BWD4: the production backward.

The idea          Two warpgroups take turns. One issues the products of a step that need no thread (dK, dQ,
                  the next Sᵀ) while the other exponentiates; without turns both do the same at the same
                  time, and the tensor cores wait for the exponentials of both.
What changes      against bwd3: persistent CTAs and a tile counter; a warp that loads and two that add dQ to
                  its sum by bulk reduction; dV overlaps dS, the next Sᵀ overlaps dQ's way to shared memory;
                  masked and unmasked loops apart; the next tile's K is loaded while this one is worked on,
                  dK and dV leave while the next begins; a warp writes the zeros that dQ is added to when
                  they are about to be needed; fp16, GQA without an fp32 round trip, unequal lengths;
                  head_dim 256 (bwd4_d256.py). `bwd4_det` adds to dQ in one order, whatever order the CTAs
                  arrive in.
What does not     preprocess and postprocess, who owns what, which products take registers.
Supports          bf16 and fp16; head_dim 64, 128 and 256; seqlen_q and seqlen_kv ≥ 1; GQA and MQA. A causal
                  mask is aligned at the bottom right or, with top_left, there, as k6's; a query that sees no
                  key, and a key that no query sees, gives and gets no gradient.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .bwd4_d256 import KeyGradients, WideFlashAttentionBackward
from .contract import Problem, Stage, Tensors, Work
from .device.backward_ends import Postprocess, Preprocess, fake_scratch, scratch_shapes
from .device.compiling import ELEMENTS, compile_for_torch, fake_fp32, fake_gqa_backward, refuse_heads_on_grid
from .device.constants import ROWS_MAX, WARP, WARPGROUP
from .device.key_tiles import (
    CONSUMERS,
    PART,
    REGISTERS,
    ROWS,
    SECTION_BYTES_MAX,
    THREADS,
    Tiles,
    add_to_sum,
    await_value,
    pass_turn,
    work_of,
)
from .device.masks import Mask, mask_of
from .device.tile_order import fetch, hear, message_ring, tell
from .device.tma import (
    CONSUMER,
    PRODUCER,
    allocate_tiles,
    load_atom,
    partition_tma,
    put,
    store_atom,
    swizzled_tiles,
    tma_rings,
)
from .device.wgmma import by_row, exchanged, multiply, operand_a, round_fragment

STAGES = (
    Stage(
        "bwd4",
        "the production backward",
        "warp specialisation, turns, overlap inside a warpgroup, dQ by bulk reduction, persistent CTAs",
        "bwd3",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        atomics=True,
    ),
    Stage(
        "bwd4_det",
        "the production backward, deterministic",
        "dQ added in one order, so that every run gives the same bits",
        "bwd4",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        options={"deterministic": True},
    ),
)

TILE_KV = ROWS * CONSUMERS


class Barrier(IntEnum):
    """Named barriers. A consumer has its own of each kind but the last: + consumer; where a slower warp may
    still wait for the step before, + 2 · parity of the step."""

    CTA = 0
    DS_READY = 1
    TURN = 5
    DQ_FULL = 7
    DQ_EMPTY = 11
    K_READ = 15


@dataclass(frozen=True)
class Config:
    """What a head_dim allows."""

    tile_q: int
    early_dV: bool  # dV beside dS, where registers allow
    keep_V: bool  # in registers, for the same reason
    stages: int = 2  # of Q and dO
    k_stages: int = 2


CONFIGS = {64: Config(128, False, True), 128: Config(64, True, False)}


class Backward(Tiles):
    """The CTA: two consumers of 64 keys each, then a warpgroup of which one warp loads, two add dQ
    to its sum and one writes the zeros it is added to."""

    def __init__(self, head_dim: int, mask: Mask, dtype: type, deterministic: bool, config: Config):
        super().__init__(head_dim, mask, dtype, deterministic, config.tile_q, TILE_KV)
        self.stages, self.k_stages = config.stages, config.k_stages
        self.early_dV, self.keep_V = config.early_dV, config.keep_V
        self.columns = head_dim // 64  # blocks of 64 columns: what the swizzle permutes

    @property
    def smem_bytes(self) -> int:
        rows = TILE_KV * (self.k_stages + 1) + 2 * self.stages * self.tile_q  # K, V, Q and dO
        ds = 2 * TILE_KV * self.tile_q * 2
        dq = TILE_KV * 64 * 4
        stats = 2 * self.stages * self.tile_q * 4
        barriers = 2 * (2 * self.stages + self.k_stages + 2) * 8 + CONSUMERS * 8
        return rows * self.head_dim * 2 + ds + dq + stats + 16 + barriers

    @cute.jit
    def launch(self, mQ, mK, mV, mDO, mDK, mDV, mStats, mDQ_sum, mZeroed, mOrder, mCounter, stream):
        batch, kv_heads, seqlen_kv, _ = mK.shape
        tma = []
        for mX, rows in ((mQ, self.tile_q), (mDO, self.tile_q), (mK, ROWS), (mV, ROWS)):
            tma += load_atom(mX, rows)
        for mX in (mDK, mDV):
            tma += store_atom(mX, ROWS)
        source, K, MN = warpgroup.OperandSource, OperandMajorMode.K, OperandMajorMode.MN
        mma_s, mma_p, mma_kv, mma_q = [
            make_trivial_tiled_mma(self.dtype, self.dtype, a, b, Float32, (1, 1, 1), (ROWS, n), place)
            for a, b, n, place in (
                (K, K, self.tile_q, source.SMEM),  # Sᵀ = K·Qᵀ
                (K, K, self.tile_q, source.RMEM if self.keep_V else source.SMEM),  # dPᵀ = V·dOᵀ
                (K, MN, self.head_dim, source.RMEM),  # dV = Pᵀ·dO, dK = dSᵀ·Q
                (MN, MN, 64, source.SMEM),  # dQ = dS·K
            )
        ]
        kv_blocks = cute.ceil_div(seqlen_kv, TILE_KV)
        tiles = kv_blocks * kv_heads * batch
        self.kernel(
            mma_s, mma_p, mma_kv, mma_q, *tma, mStats, mDQ_sum, mZeroed, mOrder, mCounter, tiles
        ).launch(
            grid=(self.ctas(tiles, kv_blocks), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,  # without it the compiler drops setmaxnreg, silently
            use_pdl=True,  # K, V, Q and dO are loaded while the preprocess ends
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mma_s, mma_p, mma_kv, mma_q, load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV,
        store_dK, mDK, store_dV, mDV, mStats, mDQ_sum, mZeroed, mOrder, mCounter, tiles,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen_q, seqlen_kv = mQ.shape[0], mK.shape[0]
        group = mQ.shape[2] // mK.shape[2]  # query heads of a key head
        consumer_warps = WARPGROUP // WARP * CONSUMERS
        d, tile_q = self.head_dim, self.tile_q

        smem = SmemAllocator()
        sK = allocate_tiles(smem, self.dtype, ROWS, d, CONSUMERS * self.k_stages)
        sV = allocate_tiles(smem, self.dtype, ROWS, d, CONSUMERS)  # (key, head_dim, consumer)
        sQ, sdO = [allocate_tiles(smem, self.dtype, self.tile_q, d, self.stages) for _ in range(2)]
        # (key, query, consumer + 2·parity)
        sdS = allocate_tiles(smem, self.dtype, ROWS, tile_q, CONSUMERS * 2)
        sdQ = smem.allocate_tensor(
            Float32, cute.make_layout((4, WARPGROUP, 8, CONSUMERS)), 1024
        )  # (register, thread, quad, consumer)
        sStats = smem.allocate_tensor(
            Float32, cute.make_layout((ROWS, 2, self.blocks, self.stages)), 128
        )  # (query, LSE or D, block, stage)
        sTile = smem.allocate_tensor(Int32, cute.make_layout(4), 16)  # valid, kv_block, kv_head, batch

        q_bytes = self.tile_q * d * 2
        q_ring, do_ring, k_ring, v_ring = tma_rings(
            smem,
            # Q and its queries' LSE and D
            (self.stages, q_bytes + 2 * self.tile_q * 4, consumer_warps),
            (self.stages, q_bytes, consumer_warps),
            (self.k_stages, TILE_KV * d * 2, consumer_warps),
            (1, TILE_KV * d * 2, consumer_warps),
        )
        # all but the producer; the warp that writes zeros has nothing to do where the first stores
        tile_ring = message_ring(smem, THREADS - (2 if self.deterministic else 1) * WARP)
        own_ready = smem.allocate_array(Int64, CONSUMERS)  # a consumer's dK and dV are in shared memory
        if tidx == 0:
            for c in range_constexpr(CONSUMERS):
                cute.arch.mbarrier_init(own_ready + c, WARPGROUP)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_idx >= consumer_warps:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == consumer_warps:
                # 1. the producer: fetch a tile of keys, tell the others, load it and the queries that see it
                q_put = pipeline.make_pipeline_state(PRODUCER, self.stages)
                k_put = pipeline.make_pipeline_state(PRODUCER, self.k_stages)
                v_put, tile_put = [pipeline.make_pipeline_state(PRODUCER, 1) for _ in range(2)]
                tile = fetch(mCounter, tiles, own_first=False)
                waited = cutlass.Boolean(False)
                while tile < tiles:
                    kv_block, kv_head, batch = self.locate(tile, mQ, mK)
                    tell(tile_ring, tile_put, sTile, (1, kv_block, kv_head, batch))
                    tile_put.advance()
                    first, _, last = self.q_tiles(kv_block, seqlen_q, seqlen_kv)
                    tKgK, tKsK = partition_tma(load_K, mK[None, None, kv_head, batch], sK)
                    tVgV, tVsV = partition_tma(load_V, mV[None, None, kv_head, batch], sV)
                    k_ring.producer_acquire(k_put)
                    for c in range_constexpr(CONSUMERS):
                        gK, at = tKgK[None, kv_block * CONSUMERS + c], k_put.index * CONSUMERS + c
                        cute.copy(load_K, gK, tKsK[None, at], tma_bar_ptr=k_ring.producer_get_barrier(k_put))
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
                            if g == 0 and i == first:  # the tile before may still need V: not before Q
                                self.put_V(v_ring, v_put, load_V, tVgV, tVsV, kv_block)
                            put(do_ring, q_put, load_dO, tOgO[None, i], tOsO)
                            q_put.advance()
                    if first == last:
                        self.put_V(v_ring, v_put, load_V, tVgV, tVsV, kv_block)
                    k_put.advance()
                    v_put.advance()
                    tile = fetch(mCounter, tiles, own_first=False)
                tell(tile_ring, tile_put, sTile, (0, 0, 0, 0))
            elif warp_idx <= consumer_warps + CONSUMERS:
                # 2. two warps, a tile of queries each: add the consumers' dQ to its sum
                cute.arch.griddepcontrol_wait()  # for the preprocess's zeros, if it writes some
                cute.arch.griddepcontrol_launch_dependents()
                mine, step = warp_idx - consumer_warps - 1, Int32(0)
                zeroed = self.left_to_zero(mQ, mK)
                tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
                self.sync(Barrier.DQ_EMPTY, mine, WARPGROUP + WARP, arrive=True)
                valid, kv_block, kv_head, batch = hear(tile_ring, tile_get, sTile)
                tile_get.advance()
                while valid != 0:
                    first, _, last = self.q_tiles(kv_block, seqlen_q, seqlen_kv)
                    if const_expr(not self.deterministic):
                        self.await_zeros(mZeroed, mK, kv_head, batch, *zeroed)
                    for g in range(group, unroll=1):
                        head_index = batch * mQ.shape[2] + kv_head * group + g
                        for i in range(first, last, unroll=1):
                            if step % 2 == mine:
                                at, turn, final = self.turn_of(kv_block, i, seqlen_q, seqlen_kv)
                                order = mOrder[head_index, None].iterator + (i * self.sums + at)
                                if const_expr(self.deterministic):
                                    await_value(order, turn)
                                else:
                                    turn = None
                                for c in range_constexpr(CONSUMERS):
                                    self.sync(Barrier.DQ_FULL, CONSUMERS * mine + c, WARPGROUP + WARP)
                                    gDQ_sum = mDQ_sum[
                                        head_index * self.sums + at, i * self.blocks, 0, None
                                    ].iterator
                                    source = sdQ[None, None, None, c].iterator
                                    add_to_sum(gDQ_sum + c * PART, source, PART * 4, turn)
                                    self.sync(Barrier.DQ_EMPTY, c, WARPGROUP + WARP, arrive=True)
                                if const_expr(self.deterministic):
                                    pass_turn(order, turn, final)
                            step += 1
                    valid, kv_block, kv_head, batch = hear(tile_ring, tile_get, sTile)
                    tile_get.advance()
            elif const_expr(not self.deterministic):
                # 3. the last warp: zeros for the next heads' sums
                cute.arch.griddepcontrol_wait()  # zeros beside the preprocess's reads may leave L2
                tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
                self.write_zeros(tile_ring, tile_get, sTile, mQ, mK, mDQ_sum, mZeroed)
        else:
            # 4. a consumer's prologue
            cute.arch.setmaxregister_increase(REGISTERS[1])
            consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
            other, thread = consumer ^ 1, tidx % WARPGROUP
            q_get, q_next = [pipeline.make_pipeline_state(CONSUMER, self.stages) for _ in range(2)]
            q_next.advance()
            k_get = pipeline.make_pipeline_state(CONSUMER, self.k_stages)
            v_get, tile_get = [pipeline.make_pipeline_state(CONSUMER, 1) for _ in range(2)]
            thr_s, thr_p, thr_kv, thr_q = [mma.get_slice(0) for mma in (mma_s, mma_p, mma_kv, mma_q)]
            rS, rdP = [
                cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, tile_q)), Float32) for _ in range(2)
            ]
            rdK, rdV = [cute.make_rmem_tensor(mma_kv.partition_shape_C((ROWS, d)), Float32) for _ in range(2)]
            rdQ = cute.make_rmem_tensor(mma_q.partition_shape_C((ROWS, 64)), Float32)
            rP, rdS = [
                cute.make_rmem_tensor(cute.make_layout(cute.size(rS) // 2), Int32) for _ in range(2)
            ]  # pairs of 16-bit values
            S, dP = by_row(rS), by_row(rdP)  # (key, query) of this thread
            tP, tdS = [
                cute.make_tensor(cute.recast_ptr(x.iterator, None, self.dtype), operand_a(rS.layout))
                for x in (rP, rdS)
            ]
            rdS16 = cute.make_tensor(tdS.iterator, rS.layout)
            # Operands in shared memory are descriptors, with a stage as their last mode.
            tSK = mma_s.make_fragment_A(thr_s.partition_A(sK))
            tSQ = mma_s.make_fragment_B(thr_s.partition_B(sQ))
            tPdO = mma_p.make_fragment_B(thr_p.partition_B(sdO))
            if const_expr(self.keep_V):
                tPV = mma_p.make_fragment_A(mma_p.partition_shape_A((ROWS, d)))
                ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
                copy_V = cute.make_tiled_copy_A(ldmatrix, mma_p).get_slice(thread)
            else:
                tPV = mma_p.make_fragment_A(thr_p.partition_A(sV))[None, None, None, consumer]
            tKQ, tVdO = [mma_kv.make_fragment_B(thr_kv.partition_B(exchanged(sX))) for sX in (sQ, sdO)]
            # dS and K again, as tiles of 64 columns: so dQ is split between the consumers
            parts = self.blocks * CONSUMERS * 2
            sdSc = cute.make_tensor(sdS.iterator, swizzled_tiles(self.dtype, ROWS, 64, parts).outer)
            tQdS = mma_q.make_fragment_A(thr_q.partition_A(exchanged(sdSc)))
            parts = self.columns * CONSUMERS * self.k_stages
            sKc = cute.make_tensor(sK.iterator, swizzled_tiles(self.dtype, ROWS, 64, parts).outer)
            tQK = mma_q.make_fragment_B(thr_q.partition_B(exchanged(sKc)))
            where = cute.make_identity_tensor((ROWS, tile_q))
            where_S, first_S = [by_row(mma_s.get_slice(t).partition_C(where)) for t in (thread, 0)]
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            copy_S, copy_KV = [
                cute.make_tiled_copy_C(stmatrix, mma).get_slice(thread) for mma in (mma_s, mma_kv)
            ]
            # What a step needs; never an argument of a jit function, which would rebind its members.
            x = SimpleNamespace(
                rS=rS, rdP=rdP, rdQ=rdQ, rdK=rdK, rdV=rdV, rP=rP, rdS=rdS, S=S, dP=dP, tP=tP, tdS=tdS,
                rdS16=rdS16, tSK=tSK, tPV=tPV, tSQ=tSQ, tPdO=tPdO, tKQ=tKQ, tVdO=tVdO, tQdS=tQdS, tQK=tQK,
                where_S=where_S, first_S=first_S, copy_S=copy_S, tSsdS=copy_S.partition_D(sdS), sdQ=sdQ,
                sStats=sStats, mma_s=mma_s, mma_p=mma_p, mma_kv=mma_kv, mma_q=mma_q, q_ring=q_ring,
                do_ring=do_ring, consumer=consumer, other=other, thread=thread, seqlen_q=seqlen_q,
                seqlen_kv=seqlen_kv,
            )  # fmt: skip
            stores = warp_idx == WARPGROUP // WARP * consumer
            parity, stored = Int32(0), cutlass.Boolean(False)
            own_phase = Int32(0)
            # The tile of K that the last stores still read
            k_left = pipeline.make_pipeline_state(CONSUMER, self.k_stages)
            if consumer == 1:
                self.sync(Barrier.TURN, 0, 2 * WARPGROUP, arrive=True)  # the first turn

            valid, kv_block, kv_head, batch = hear(tile_ring, tile_get, sTile)
            tile_get.advance()
            while valid != 0:
                first, masked, last = self.q_tiles(kv_block, seqlen_q, seqlen_kv)
                rdK.fill(0.0)
                rdV.fill(0.0)
                k_ring.consumer_wait(k_get)
                if stored:  # dV and dK of the tile before have left shared memory, or do so now
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    self.sync(Barrier.DQ_EMPTY, consumer, WARPGROUP + WARP, arrive=True)
                    k_ring.consumer_release(k_left)
                    k_left.advance()
                heads = group if first < last else 0
                for _ in range(heads, unroll=1):
                    # 5. main loop: tiles of queries with a hidden pair, then the others; the last one apart
                    q_ring.consumer_wait(q_get)
                    self.scores(x, k_get.index, q_get.index)
                    warpgroup.wait_group(0)
                    v_ring.consumer_wait(v_get)
                    if const_expr(self.keep_V):
                        tVsV = copy_V.partition_S(sV)[None, None, None, consumer]
                        cute.copy(copy_V, tVsV, copy_V.retile(tPV))
                    split = cutlass.min(masked, last - 1)
                    for i in range(first, split, unroll=1):
                        self.step(x, k_get, q_get, q_next, parity, kv_block, i, masked=True, final=False)
                        parity ^= 1
                        q_get.advance()
                        q_next.advance()
                    for i in range(cutlass.max(first, split), last - 1, unroll=1):
                        self.step(x, k_get, q_get, q_next, parity, kv_block, i, masked=False, final=False)
                        parity ^= 1
                        q_get.advance()
                        q_next.advance()
                    self.step(x, k_get, q_get, q_next, parity, kv_block, last - 1, masked=True, final=True)
                    parity ^= 1
                    q_get.advance()
                    q_next.advance()
                if first == last:
                    v_ring.consumer_wait(v_get)
                v_ring.consumer_release(v_get)
                v_get.advance()

                # 6. epilogue: dV through the consumer's tile of K, dK through its part of dQ
                self.sync(Barrier.DQ_EMPTY, consumer, WARPGROUP + WARP)
                self.sync(Barrier.K_READ, 0, 2 * WARPGROUP)  # the other's dQ is done with this tile
                at = k_get.index * CONSUMERS + consumer
                layout = swizzled_tiles(self.dtype, ROWS, d, 1)
                own_sdQ = cute.recast_ptr(sdQ[None, None, None, consumer].iterator, layout.inner, self.dtype)
                sdK = cute.make_tensor(own_sdQ, layout.outer)  # (key, head_dim, 1)
                for rX, sX, stage, factor in ((rdV, sK, at, 1.0), (rdK, sdK, 0, self.scale)):
                    rX16 = cute.make_rmem_tensor(rX.layout, self.dtype)
                    rX16.store((rX.load() * factor).to(self.dtype))
                    cute.copy(copy_KV, copy_KV.retile(rX16), copy_KV.partition_D(sX)[None, None, None, stage])
                cute.arch.fence_view_async_shared()  # written by threads, read by the TMA
                cute.arch.mbarrier_arrive(own_ready + consumer)
                if stores:
                    cute.arch.mbarrier_wait(own_ready + consumer, own_phase)
                    for store, mX, sX, stage in ((store_dV, mDV, sK, at), (store_dK, mDK, sdK, 0)):
                        tXgX, tXsX = partition_tma(store, mX[None, None, kv_head, batch], sX)
                        cute.copy(store, tXsX[None, stage], tXgX[None, kv_block * CONSUMERS + consumer])
                    cute.arch.cp_async_bulk_commit_group()
                else:
                    k_ring.consumer_release(k_get)  # which is not free until the storing warp says so too
                stored, own_phase = stores, own_phase ^ 1
                k_get.advance()
                valid, kv_block, kv_head, batch = hear(tile_ring, tile_get, sTile)
                tile_get.advance()

            # The last arrivals at a barrier must not stay behind.
            if stored:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.sync(Barrier.DQ_EMPTY, consumer, WARPGROUP + WARP, arrive=True)
            self.sync(Barrier.DQ_EMPTY, consumer, WARPGROUP + WARP)
            if consumer == 0:
                self.sync(Barrier.TURN, 0, 2 * WARPGROUP)

    def scores(self, x, k_stage, q_stage):
        """Issue Sᵀ = K·Qᵀ of a tile of queries."""
        tSK = x.tSK[None, None, None, k_stage * CONSUMERS + x.consumer]
        multiply(x.mma_s, x.rS, tSK, x.tSQ[None, None, None, q_stage], False)

    def step(self, x, k_get, q_get, q_next, parity, kv_block, q_tile, masked: bool, final: bool):
        """The products of a tile of queries; its Sᵀ is there already, that of the next tile comes with it.

        Nothing is in flight at either end: across a loop's back edge ptxas would serialise every WGMMA of the
        kernel.
        """
        stage = q_get.index
        dV = x.mma_kv, x.rdV, x.tP, x.tVdO[None, None, None, stage], True
        x.do_ring.consumer_wait(q_get)
        multiply(x.mma_p, x.rdP, x.tPV, x.tPdO[None, None, None, stage], False)
        first_key, first_query = kv_block * TILE_KV + x.consumer * ROWS, q_tile * self.tile_q
        hides = x.where_S, x.first_S, first_key, first_query, x.seqlen_q, x.seqlen_kv
        self.exponentials(x.S, x.sStats[None, 0, None, stage], *hides, masked)
        round_fragment(x.rS, x.rP, self.dtype)
        if self.early_dV:
            multiply(*dV)
        warpgroup.wait_group(1 if self.early_dV else 0)  # dP
        self.gradients(x.S, x.dP, x.sStats[None, 1, None, stage], x.where_S)
        round_fragment(x.rdP, x.rdS, self.dtype)
        part = x.tSsdS[None, None, None, x.consumer + CONSUMERS * parity]
        cute.copy(x.copy_S, x.copy_S.retile(x.rdS16), part)
        cute.arch.fence_view_async_shared()  # written by threads, read by WGMMA
        self.sync(Barrier.DS_READY, 2 * parity + x.other, 2 * WARPGROUP, arrive=True)

        self.sync(Barrier.TURN, x.consumer, 2 * WARPGROUP)
        if not self.early_dV:
            multiply(*dV)
        multiply(x.mma_kv, x.rdK, x.tdS, x.tKQ[None, None, None, stage], True)
        self.sync(Barrier.DS_READY, 2 * parity + x.consumer, 2 * WARPGROUP)
        self.queries(x, k_get.index, parity)
        warpgroup.wait_group(1)  # dV and dK: the registers of P and dS are needed
        if not final:
            x.q_ring.consumer_wait(q_next)
            self.scores(x, k_get.index, q_next.index)
        self.sync(Barrier.TURN, x.other, 2 * WARPGROUP, arrive=True)
        warpgroup.wait_group(0 if final else 1)  # dQ
        x.q_ring.consumer_release(q_get)
        x.do_ring.consumer_release(q_get)
        self.sync(Barrier.DQ_EMPTY, x.consumer, WARPGROUP + WARP)
        for quad in range(8):
            registers = cute.make_tensor(x.rdQ.iterator + 4 * quad, cute.make_layout(4))
            cute.autovec_copy(registers, x.sdQ[None, x.thread, quad, x.consumer])
        cute.arch.fence_view_async_shared()  # written by threads, read by the bulk reduction
        self.sync(Barrier.DQ_FULL, CONSUMERS * parity + x.consumer, WARPGROUP + WARP, arrive=True)
        warpgroup.wait_group(0)

    def queries(self, x, k_stage, parity):
        """Issue dQ = dS·K over the CTA's keys: 64 columns of the tile's queries, or all 64 of its own half of
        them."""
        warpgroup.fence()
        atom = cute.make_mma_atom(x.mma_q.op)
        own_block, own_column = (x.consumer, 0) if self.blocks == CONSUMERS else (0, x.consumer)
        for c in range(CONSUMERS):
            part = own_block + self.blocks * (c + CONSUMERS * parity)
            column = own_column + self.columns * (c + CONSUMERS * k_stage)
            for k in range(ROWS // 16):
                atom.set(warpgroup.Field.ACCUMULATE, c > 0 or k > 0)
                cute.gemm(atom, x.rdQ, x.tQdS[None, None, k, part], x.tQK[None, None, k, column], x.rdQ)
        warpgroup.commit_group()

    @cute.jit
    def put_V(self, ring, state, atom, tVgV, tVsV, kv_block):
        ring.producer_acquire(state)
        for c in range_constexpr(CONSUMERS):
            gV = tVgV[None, kv_block * CONSUMERS + c]
            cute.copy(atom, gV, tVsV[None, c], tma_bar_ptr=ring.producer_get_barrier(state))


class FlashAttentionBackward:
    """Preprocess, main kernel, postprocess."""

    def __init__(
        self,
        head_dim: int,
        mask: Mask,
        dtype: str,
        deterministic: bool = False,
        config: Config | None = None,
    ):
        options = head_dim, mask, ELEMENTS[dtype], deterministic
        self.main = Backward(*options, config or CONFIGS[head_dim])
        self.preprocess = Preprocess(head_dim)
        self.postprocess = Postprocess(head_dim, self.main if deterministic else None)

    @cute.jit
    def __call__(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter, stream
    ):
        if const_expr(self.main.deterministic):
            self.preprocess(mO, mDO, mLSE, mStats, None, stream)
        else:
            as_tiles = [
                cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0])) for x in (mQ, mK)
            ]
            theirs = mK.shape[1], *self.main.left_to_zero(*as_tiles)
            self.preprocess(mO, mDO, mLSE, mStats, mDQ_sum, stream, theirs)
        self.main.launch(mQ, mK, mV, mDO, mDK, mDV, mStats, mDQ_sum, mZeroed, mOrder, mCounter, stream)
        if const_expr(self.main.deterministic):
            self.postprocess(mDQ_sum, mDQ, stream, None, mK.shape[2])
        else:
            self.postprocess(mDQ_sum, mDQ, stream, mZeroed)

    def workspace(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        heads, tiles = problem.batch * problem.heads, math.ceil(problem.seqlen_q / self.main.tile_q)
        return scratch_shapes(problem, self.main.tile_q, self.main.sums) | {
            # how many shares of a key head's dQ_sum are zero
            "zeroed": ((problem.batch * problem.kv_heads,), "int32"),
            "order": ((heads, tiles * self.main.sums), "int32"),  # whose turn it is to add to dQ_sum
            "counter": ((1,), "int32"),  # of tiles taken; two launches at once must not share any of these
        }

    def fake_workspace(self) -> tuple[object, ...]:
        """Stand-ins for `workspace`'s."""
        order = (cute.sym_int(), cute.sym_int())
        return (
            *fake_scratch(self.main.head_dim, self.main.sums),
            make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4),
            make_fake_tensor(Int32, order, (cute.sym_int64(), 1), assumed_align=4),
            make_fake_tensor(Int32, (1,), (1,), assumed_align=4),
        )

    def work(self, problem: Problem) -> list[Work]:
        return [work_of(self.main, problem, 5, f"{self.main.tile_kv} keys of a query head")]


def kernel_for(problem: Problem, **options: object) -> FlashAttentionBackward | WideFlashAttentionBackward:
    """The kernels of the problem's head_dim, mask and type."""
    of_head_dim = WideFlashAttentionBackward if problem.head_dim == 256 else FlashAttentionBackward
    return of_head_dim(problem.head_dim, mask_of(problem), problem.dtype, **options)


def supports(problem: Problem) -> str | None:
    if problem.direction != "bwd":
        return f"computes the backward pass, not {problem.direction!r}"
    if problem.head_dim not in (64, 128, 256):
        return f"takes head_dim 64, 128 or 256, not {problem.head_dim}"
    if (problem.seqlen_q == 0) != (problem.seqlen_kv == 0):
        return "takes at least one query and one key"
    if max(problem.seqlen_q, problem.seqlen_kv) * problem.batch * problem.heads > ROWS_MAX:
        return f"takes at most {ROWS_MAX} rows (batch·heads·seqlen), its row index being 32-bit"
    if problem.causal:
        tiles = KeyGradients if problem.head_dim == 256 else Backward
        head_bytes = tiles.column_bytes * problem.head_dim * problem.seqlen_q
        head_bytes *= problem.heads // max(1, problem.kv_heads)
        if head_bytes > SECTION_BYTES_MAX:
            return (
                f"takes at most {SECTION_BYTES_MAX} bytes of a key head's queries (Q, dO, sums) under a "
                f"causal mask, not {head_bytes}: the order of tiles is computed from them, in 32 bits"
            )
    return refuse_heads_on_grid(problem)


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    return kernel_for(problem, **options).workspace(problem)


def work(problem: Problem, **options: object) -> list[Work]:
    return kernel_for(problem, **options).work(problem)


def compile_kernel(problem: Problem, **options: object) -> object:
    kernel = kernel_for(problem, **options)
    q, *rest = fake_gqa_backward(problem.head_dim, problem.dtype)
    return compile_for_torch(kernel, q, *rest, fake_fp32(q), *kernel.fake_workspace())


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.dq.numel() or t.dk.numel():
        compiled(t.q, t.k, t.v, t.o, t.do, t.dq, t.dk, t.dv, t.lse, *t.workspace.values())
