"""BWD3: TMA loads, and the five products on the tensor cores.

The idea          S and dP are computed transposed, keys along M: their accumulators are then Pᵀ and dSᵀ as
                  operand A of dV += Pᵀ·dO and dK += dSᵀ·Q, in the registers where they lie. dQ = dS·K sums
                  over the keys, which the warpgroups have divided among them: only for it dS goes through
                  shared memory.
What changes      against bwd2: the products are WGMMA, P and dS bf16; 128 keys a CTA, 64 a warpgroup; Q, dO,
                  LSE and D come by TMA, a tile ahead; dQ is added 16 bytes at a time, in the order in which
                  the accumulator holds it; dK and dV leave by TMA.
What does not     one CTA for a block of keys, queries in the loop; everybody loads, multiplies, exponentiates
                  and adds in turn.
Supports          bf16, head_dim 64 and 128, any length, equal for queries and keys; no GQA.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import Agent, CooperativeGroup, PipelineTmaAsync
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .contract import Problem, Stage, Tensors, Work
from .device.backward_ends import QUAD, Postprocess, Preprocess, fake_scratch
from .device.compiling import (
    compile_for_torch,
    fake_backward,
    fake_fp32,
    refuse_unless_plain,
)
from .device.constants import LOG2_E, WARP, WARPGROUP
from .device.limits import BLOCK, refuse_heads_on_grid, scratch_shapes
from .device.rings import PRODUCER_CONSUMER
from .device.tma import allocate_tiles, load_atom, partition_tma, store_atom
from .device.wgmma import by_row, exchanged, multiply, operand_a, round_fragment

STAGES = (
    Stage(
        id="bwd3",
        title="TMA and WGMMA",
        adds="the five products on the tensor cores: P and dS in registers for dV and dK, dS in shared "
        "memory for dQ",
        before="bwd2",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        atomics=True,
    ),
)
TILES = {64: (128, 128, 2), 128: (128, 64, 2)}  # by head_dim: tile_kv (64 keys a warpgroup), tile_q, stages
VARIANTS = {
    f"{tile_kv} keys × {tile_q} queries, {stages} stage{'s' * (stages > 1)}": {
        "tiles": (tile_kv, tile_q, stages)
    }
    for tile_kv, tile_q, stages in ((64, 64, 1), (64, 64, 2), (128, 64, 1), (128, 64, 2), (128, 128, 2))
}
BUFFERS = 2  # of dS: one barrier a tile, as only a tile later does a warpgroup know that the others read it


def variants_for(problem: Problem) -> list[str]:
    # At d = 64, 128 keys × 64 queries have one block of dQ for two warpgroups; at d = 128, 128 queries need
    # more registers than there are.
    fits = {64: [(64, 64), (128, 128)], 128: [(64, 64), (128, 64)]}[problem.head_dim]
    return [label for label, options in VARIANTS.items() if options["tiles"][:2] in fits]


def add_quad(address: Int64, quad: tuple[Float32, ...]) -> None:
    """Add four fp32 to the 16 bytes of global memory at `address`; nothing comes back."""
    ptx = "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(ptx, read_only_args=[Int64(address), *quad])


class FlashAttention2BackwardWgmma:
    def __init__(self, head_dim: int, causal: bool, tiles: tuple[int, int, int] | None = None):
        self.head_dim, self.causal = head_dim, causal
        self.tile_kv, self.tile_q, self.stages = tiles or TILES[head_dim]
        self.warpgroups = self.tile_kv // 64
        self.threads = WARPGROUP * self.warpgroups
        # dQ's tile falls into blocks of 64 × 64, which the warpgroups share out: at d = 128 halves of the
        # columns, at d = 64 halves of the rows.
        self.columns = head_dim // BLOCK
        self.dq_blocks = self.tile_q // BLOCK * self.columns
        if self.dq_blocks % self.warpgroups:
            raise ValueError(f"{self.dq_blocks} blocks of dQ for {self.warpgroups} warpgroups")
        self.scale = 1.0 / math.sqrt(head_dim)

    @property
    def smem_bytes(self) -> int:
        q_stage = 2 * self.tile_q * self.head_dim * 2 + 2 * self.tile_q * 4  # Q, dO; LSE, D
        kv, ds = 2 * self.tile_kv * self.head_dim * 2, BUFFERS * self.tile_kv * self.tile_q * 2
        return kv + self.stages * q_stage + ds + 2 * (1 + self.stages) * 8

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, stream):
        batch, heads, seqlen, _ = mQ.shape
        atoms = []
        for mX, rows in ((mQ, self.tile_q), (mDO, self.tile_q), (mK, self.tile_kv), (mV, self.tile_kv)):
            atoms += load_atom(mX, rows)
        for mX in (mDK, mDV):
            atoms += store_atom(mX, self.tile_kv)
        source, K, MN = warpgroup.OperandSource, OperandMajorMode.K, OperandMajorMode.MN
        split, one = (self.warpgroups, 1, 1), (1, 1, 1)  # warpgroups along (M, N, K)
        mmas = [
            make_trivial_tiled_mma(BFloat16, BFloat16, a, b, Float32, warpgroups, (64, n), place)
            for a, b, warpgroups, n, place in (
                (K, K, split, self.tile_q, source.SMEM),  # Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ
                (K, MN, split, self.head_dim, source.RMEM),  # dV += Pᵀ·dO, dK += dSᵀ·Q
                (MN, MN, one, BLOCK, source.SMEM),  # dQ = dS·K
            )
        ]
        Preprocess(self.head_dim)(mO, mDO, mLSE, mStats, mDQ_sum, stream)
        self.backward(*mmas, *atoms, mStats, mDQ_sum).launch(
            grid=(cute.ceil_div(seqlen, self.tile_kv), heads, batch),
            block=(self.threads, 1, 1),
            stream=stream,
        )
        Postprocess(self.head_dim)(mDQ_sum, mDQ, stream)

    @cute.kernel
    def backward(
        self, mma_s, mma_kv, mma_dq, load_Q, mQ, load_DO, mDO, load_K, mK, load_V, mV,
        store_DK, mDK, store_DV, mDV, mStats, mDQ_sum,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        kv_block, head, batch = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        warpgroup_idx = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        seqlen, _, heads, _ = mQ.shape
        # (seqlen, head_dim)
        mQ, mDO, mK, mV, mDK, mDV = [mX[None, None, head, batch] for mX in (mQ, mDO, mK, mV, mDK, mDV)]
        mStats = mStats[batch * heads + head, None, None, None]  # (block, 2, 64)
        mDQ_sum = mDQ_sum[batch * heads + head, None, None, None]  # (block, column block, 64 · 64)

        smem = SmemAllocator()
        sK, sV = [
            allocate_tiles(smem, BFloat16, self.tile_kv, self.head_dim, 1) for _ in range(2)
        ]  # (key, head_dim, 1)
        sQ, sDO = [
            allocate_tiles(smem, BFloat16, self.tile_q, self.head_dim, self.stages) for _ in range(2)
        ]  # (query, head_dim, stage)
        sDS = allocate_tiles(smem, BFloat16, self.tile_kv, self.tile_q, BUFFERS)  # (key, query, buffer)
        stats = cute.make_layout((2 * self.tile_q, self.stages))
        sStats = smem.allocate_tensor(Float32, stats, 128)  # (64 of LSE, 64 of D, of every block; stage)
        tQgQ, tQsQ = partition_tma(load_Q, mQ, sQ)
        tDOgDO, tDOsDO = partition_tma(load_DO, mDO, sDO)
        tKgK, tKsK = partition_tma(load_K, mK, sK)
        tVgV, tVsV = partition_tma(load_V, mV, sV)

        # A full barrier waits for one arrival and the tiles' bytes, an empty one for every warp's arrival.
        groups = {
            "producer_group": CooperativeGroup(Agent.Thread),
            "consumer_group": CooperativeGroup(Agent.Thread, self.threads // WARP),
        }
        row_bytes = self.head_dim * 2
        kv_ring, q_ring = [
            PipelineTmaAsync.create(
                num_stages=stages,
                tx_count=bytes_expected,
                barrier_storage=smem.allocate_array(Int64, 2 * stages),
                **groups,
            )
            for stages, bytes_expected in (
                (1, 2 * self.tile_kv * row_bytes),
                (self.stages, 2 * self.tile_q * (row_bytes + 4)),
            )
        ]
        kv_put, kv_get = [pipeline.make_pipeline_state(user, 1) for user in PRODUCER_CONSUMER]
        q_put, q_get = [pipeline.make_pipeline_state(user, self.stages) for user in PRODUCER_CONSUMER]

        first_key = kv_block * self.tile_kv
        last = cute.ceil_div(seqlen, self.tile_q)
        if const_expr(self.causal):  # from the diagonal on; from first_whole on every query sees every key
            first = first_key // self.tile_q
            first_whole = cute.ceil_div(first_key + self.tile_kv - 1, self.tile_q)
        else:
            first = Int32(0)
            first_whole = last if first_key + self.tile_kv > seqlen else first

        # 1. load K and V, and as many tiles of Q and dO as there are stages
        q_load = (q_ring, load_Q, tQgQ, tQsQ, load_DO, tDOgDO, tDOsDO, mStats, sStats)
        if warp_idx == 0:
            kv_ring.producer_acquire(kv_put)
            barrier = kv_ring.producer_get_barrier(kv_put)
            cute.copy(load_K, tKgK[None, kv_block], tKsK[None, 0], tma_bar_ptr=barrier)
            cute.copy(load_V, tVgV[None, kv_block], tVsV[None, 0], tma_bar_ptr=barrier)
            for q_block in range(first, cutlass.min(last, first + self.stages), unroll=1):
                self.load_q(q_put, *q_load, q_block)
                q_put.advance()

        # 2. prologue: operands in shared memory are descriptors; P, dS and accumulators registers
        first_thread = warpgroup_idx * WARPGROUP
        wg_s, wg_kv = [mma.get_slice(first_thread) for mma in (mma_s, mma_kv)]
        wg_dq = mma_dq.get_slice(0)
        tSrK, tSrV = [
            mma_s.make_fragment_A(wg_s.partition_A(sX)) for sX in (sK, sV)
        ]  # (MMA, MMA_M, MMA_K, 1)
        tSrQ, tSrDO = [
            mma_s.make_fragment_B(wg_s.partition_B(sX)) for sX in (sQ, sDO)
        ]  # (MMA, MMA_N, MMA_K, stage)
        tKVrQ, tKVrDO = [
            mma_kv.make_fragment_B(wg_kv.partition_B(exchanged(sX))) for sX in (sQ, sDO)
        ]  # (MMA, MMA_N, MMA_K, stage)
        # Blocks of 64 queries of dS, and of 64 columns of K, times all keys of the tile.
        sDS_blocks, sK_blocks = [
            cute.local_tile(exchanged(sX), (BLOCK, self.tile_kv), (None, 0, None)) for sX in (sDS, sK)
        ]  # (64, key, block, buffer or 1)
        tDQrDS = mma_dq.make_fragment_A(wg_dq.partition_A(sDS_blocks))  # (MMA, MMA_M, MMA_K, block, buffer)
        tDQrK = mma_dq.make_fragment_B(wg_dq.partition_B(sK_blocks))  # (MMA, MMA_N, MMA_K, block, 1)
        s_shape = mma_s.partition_shape_C((self.tile_kv, self.tile_q))
        kv_shape = mma_kv.partition_shape_C((self.tile_kv, self.head_dim))
        rS, rDP = [cute.make_rmem_tensor(s_shape, Float32) for _ in range(2)]  # then P and dS
        rDK, rDV = [cute.make_rmem_tensor(kv_shape, Float32) for _ in range(2)]
        rDQ = cute.make_rmem_tensor(mma_dq.partition_shape_C((BLOCK, BLOCK)), Float32)
        quads = cute.make_tensor(rDQ.iterator, cute.make_layout((QUAD, BLOCK // 8)))  # (register, g)
        # P and dS in bf16: two to a word
        words_P, words_DS = [
            cute.make_rmem_tensor(cute.make_layout(cute.size(rS) // 2), Int32) for _ in range(2)
        ]
        rP, rDS = [
            cute.make_tensor(cute.recast_ptr(words.iterator, dtype=BFloat16), rS.layout)
            for words in (words_P, words_DS)
        ]
        tKVrP, tKVrDS = [cute.make_tensor(r.iterator, operand_a(r.layout)) for r in (rP, rDS)]
        S, DP = by_row(rS), by_row(rDP)  # (key, query) of this thread
        cS = cute.make_identity_tensor((self.tile_kv, self.tile_q))
        where_S, first_S = [by_row(mma_s.get_slice(t).partition_C(cS)) for t in (tidx, 0)]
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
        copy_S, copy_KV = [cute.make_tiled_copy_C(stmatrix, mma).get_slice(tidx) for mma in (mma_s, mma_kv)]
        tSsDS = copy_S.partition_D(sDS)  # (CPY, CPY_M, CPY_N, buffer)
        rDK.fill(0.0)
        rDV.fill(0.0)
        buffer = Int32(0)
        kv_ring.consumer_wait(kv_get)

        # 3. main loop
        for q_block in range(first, last, unroll=1):
            # Refill the stage of the tile before, only now: the other warps had a tile's time to leave it.
            if warp_idx == 0 and q_block > first and q_block - 1 + self.stages < last:
                self.load_q(q_put, *q_load, q_block - 1 + self.stages)
                q_put.advance()
            q_ring.consumer_wait(q_get)
            stage = q_get.index

            multiply(mma_s, rS, tSrK[None, None, None, 0], tSrQ[None, None, None, stage], False)
            multiply(mma_s, rDP, tSrV[None, None, None, 0], tSrDO[None, None, None, stage], False)
            warpgroup.wait_group(0)

            _, query = where_S[0, 0]  # of the thread's first column; the rest are at static distances
            if q_block < first_whole:
                for r in range_constexpr(2):
                    key = first_key + where_S[r, 0][0]
                    if const_expr(self.causal):
                        hidden = key - q_block * self.tile_q - query  # columns before this one
                    else:
                        hidden = Int32(self.tile_q if key >= seqlen else 0)
                    for c in range_constexpr(cute.size(S, mode=[1])):
                        S[r, c] = S[r, c] if first_S[0, c][1] >= hidden else -Float32.inf

            # P = exp2(S·log₂e/√d − LSE·log₂e) and dS = P∘(dP − D)
            pairs = cute.make_layout(
                (2, BLOCK // 8, 2, self.tile_q // BLOCK), stride=(1, 8, BLOCK, 2 * BLOCK)
            )
            tSsStats = cute.make_tensor(sStats[None, stage].iterator + query, pairs)
            for g in range_constexpr(self.tile_q // 8):
                lse, row_dot = [tSsStats[None, g % 8, i, g // 8].load() for i in range(2)]
                for r in range_constexpr(2):
                    p = S[r, (None, g)].load() * (self.scale * LOG2_E) - lse
                    p = cute.math.exp2(p, fastmath=True)
                    DP[r, (None, g)].store(p * (DP[r, (None, g)].load() - row_dot))
                    S[r, (None, g)].store(p)
            round_fragment(rS, words_P, BFloat16)
            round_fragment(rDP, words_DS, BFloat16)
            cute.copy(stmatrix, copy_S.retile(rDS), tSsDS[None, None, None, buffer])
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()  # dS is complete

            multiply(mma_kv, rDV, tKVrP, tKVrDO[None, None, None, stage], True)
            multiply(mma_kv, rDK, tKVrDS, tKVrQ[None, None, None, stage], True)
            for n in range_constexpr(self.dq_blocks // self.warpgroups):
                dq_block = warpgroup_idx + self.warpgroups * n
                rows, column = dq_block // self.columns, dq_block % self.columns
                tA, tB = tDQrDS[None, None, None, rows, buffer], tDQrK[None, None, None, column, 0]
                multiply(mma_dq, rDQ, tA, tB, False)
                warpgroup.wait_group(0)
                gDQ_sum = mDQ_sum[q_block * (self.tile_q // BLOCK) + rows, column, None]
                address = (gDQ_sum.iterator + tidx % WARPGROUP * QUAD).toint()
                for g in range_constexpr(BLOCK // 8):
                    add_quad(address + g * WARPGROUP * QUAD * 4, [quads[j, g] for j in range(QUAD)])
            q_ring.consumer_release(q_get)
            q_get.advance()
            buffer ^= 1

        # 4. epilogue: dK and dV leave through the tiles of K and V
        cute.arch.sync_threads()  # K and V have been read
        for rX, sX, factor in ((rDK, sK, self.scale), (rDV, sV, 1.0)):
            rX16 = cute.make_rmem_tensor(rX.layout, BFloat16)
            rX16.store((rX.load() * factor).to(BFloat16))
            cute.copy(stmatrix, copy_KV.retile(rX16), copy_KV.partition_D(sX)[None, None, None, 0])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if warp_idx == 0:
            for store, mX, sX in ((store_DK, mDK, sK), (store_DV, mDV, sV)):
                tXgX, tXsX = partition_tma(store, mX, sX)
                cute.copy(store, tXsX[None, 0], tXgX[None, kv_block])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory goes with the CTA

    @cute.jit
    def load_q(self, put, ring, load_Q, tQgQ, tQsQ, load_DO, tDOgDO, tDOsDO, mStats, sStats, q_block):
        """One warp: wait until every warp has left the stage, expect all bytes, start the copies of Q, dO and
        their statistics."""
        ring.producer_acquire(put)
        barrier = ring.producer_get_barrier(put)
        cute.copy(load_Q, tQgQ[None, q_block], tQsQ[None, put.index], tma_bar_ptr=barrier)
        cute.copy(load_DO, tDOgDO[None, q_block], tDOsDO[None, put.index], tma_bar_ptr=barrier)
        gStats = mStats[q_block * (self.tile_q // BLOCK), None, None].iterator
        gStats = cute.make_tensor(gStats, cute.make_layout(2 * self.tile_q))
        parts = [cute.group_modes(x, 0, 1) for x in (gStats, sStats[None, put.index])]
        with cute.arch.elect_one():
            cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), *parts, mbar_ptr=barrier)


def supports(problem: Problem) -> str | None:
    return refuse_heads_on_grid(problem) or refuse_unless_plain(problem, "bwd")


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    return scratch_shapes(problem, TILES[problem.head_dim][1])  # enough for every variant


def work(problem: Problem, **options: object) -> list[Work]:
    kernel = FlashAttention2BackwardWgmma(problem.head_dim, problem.causal, **options)
    kv_blocks, heads = math.ceil(problem.seqlen_kv / kernel.tile_kv), problem.batch * problem.heads
    q_blocks = math.ceil(problem.seqlen_q / kernel.tile_q)
    hidden = [kv_block * kernel.tile_kv // kernel.tile_q * problem.causal for kv_block in range(kv_blocks)]
    passes = heads * sum(q_blocks - blocks for blocks in hidden)
    return [
        Work(
            kernel="FlashAttention2BackwardWgmma",
            unit=f"{kernel.tile_q}×{kernel.tile_kv} tile",
            threads=kernel.threads,
            ctas=kv_blocks * heads,
            passes=passes,
            trips=(1,),
            ffma=0,
            hbm_bytes=problem.min_bytes / passes,
            smem_bytes=kernel.smem_bytes,
            tensor_flops=10 * kernel.tile_q * kernel.tile_kv * problem.head_dim,
        )
    ]


def compile_kernel(problem: Problem, **options: object) -> object:
    q, *others = fake_backward(problem.head_dim)
    kernel = FlashAttention2BackwardWgmma(problem.head_dim, problem.causal, **options)
    return compile_for_torch(kernel, q, *others, fake_fp32(q), *fake_scratch(problem.head_dim))


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.dq.numel():
        scratch = (t.workspace["stats"], t.workspace["dQ_sum"])
        compiled(t.q, t.k, t.v, t.o, t.do, t.dq, t.dk, t.dv, t.lse, *scratch)
