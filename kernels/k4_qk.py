"""K4.1: Q·Kᵀ on the tensor cores, and what their accumulator's order of elements costs.

The idea          A warpgroup asks the tensor cores for a whole 64-row product at once; its operands are
                  descriptors of shared memory, in the swizzle that the TMA wrote them with.
What changes      against k3: one warpgroup; S = Q·Kᵀ is four or eight instructions instead of a loop. The
                  accumulator lies in registers in WGMMA's order: every thread writes what it holds to a flat
                  S tile, asking an identity tensor where each element belongs, and reads its row back.
What does not     TMA ring, masking, softmax, P·V on CUDA cores; two threads now share a row instead of four.
Supports          bf16, head_dim 64 and 128, any length, equal for queries and keys; no GQA.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import Agent, CooperativeGroup, PipelineTmaAsync
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .contract import Problem, Stage, Tensors, Work
from .device.compiling import (
    compile_for_torch,
    fake_fp32,
    fake_qkvo,
    refuse_unless_plain,
)
from .device.constants import LN_2, LOG2_E, VECTOR, WARP
from .device.cuda_cores import swizzle, widen
from .device.limits import refuse_heads_on_grid
from .device.rings import PRODUCER_CONSUMER
from .device.tma import allocate_tiles, load_atom, partition_tma, swizzled_chunks

STAGES = (
    Stage(
        "k4_qk",
        "WGMMA for Q·Kᵀ",
        "Q·Kᵀ on the tensor cores, S through shared memory to the softmax",
        "k3_3",
        options={"stages": 2},
    ),
)

TILE = 64  # B_r = B_c: query rows of a CTA, keys of a tile
LANES = 2  # threads that share a query row; they sit in one warp


class FlashAttention2WgmmaQK:
    def __init__(self, head_dim: int, causal: bool, stages: int, tile: int = TILE):
        self.head_dim, self.causal, self.stages, self.tile = head_dim, causal, stages, tile
        self.threads = tile * LANES
        # Thread `lane` of a row owns keys lane, lane + 4, ... and 16-byte output chunks lane, lane + 4, ...
        self.keys_per_thread = tile // LANES
        self.chunks_per_thread = head_dim // VECTOR // LANES
        self.scale = 1.0 / math.sqrt(head_dim)

    @property
    def smem_bytes(self) -> int:
        tile_bytes = self.tile * self.head_dim * 2
        barriers = 2 * (1 + self.stages) * 8
        tiles = (1 + 2 * self.stages) * tile_bytes + self.tile * self.tile * 4  # Q, stages of K and V, S
        return tiles + barriers

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, stream):
        batch, heads, seqlen, _ = mQ.shape
        loads = []
        for mX in (mQ, mK, mV):  # a descriptor each, over (seqlen, head_dim, heads, batch)
            loads += load_atom(mX, self.tile)
        K_major, from_smem = OperandMajorMode.K, warpgroup.OperandSource.SMEM
        mma = make_trivial_tiled_mma(
            BFloat16, BFloat16, K_major, K_major, Float32, (1, 1, 1), (64, self.tile), from_smem
        )
        self.kernel(mma, *loads, mO, mLSE).launch(
            grid=(cute.ceil_div(seqlen, self.tile), heads, batch), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mma, load_Q, mQ, load_K, mK, load_V, mV, mO, mLSE):
        tidx, _, _ = cute.arch.thread_idx()
        q_block, head, batch = cute.arch.block_idx()
        row, lane = tidx // LANES, tidx % LANES
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen = mO.shape[2]
        q_row = q_block * self.tile + row
        mQ, mK, mV = [mX[None, None, head, batch] for mX in (mQ, mK, mV)]  # (seqlen, head_dim)
        mO = mO[batch, head, None, None]  # (seqlen, head_dim)

        smem = SmemAllocator()
        sQ = allocate_tiles(smem, BFloat16, self.tile, self.head_dim, 1)  # (row, head_dim, 1)
        sK, sV = [
            allocate_tiles(smem, BFloat16, self.tile, self.head_dim, self.stages) for _ in range(2)
        ]  # (key, head_dim, stage)
        sS_layout = cute.make_layout((self.tile, self.tile // LANES, LANES), stride=(self.tile, LANES, 1))
        sS = smem.allocate_tensor(Float32, sS_layout, 16)  # (row, key // 2, key % 2): S, then P
        tQgQ, tQsQ = partition_tma(load_Q, mQ, sQ)
        tKgK, tKsK = partition_tma(load_K, mK, sK)
        tVgV, tVsV = partition_tma(load_V, mV, sV)
        V_chunks = cute.recast_ptr(sV.iterator, cute.make_swizzle(0, 4, 3), BFloat16)  # swizzled by hand
        V_chunks = cute.make_tensor(
            V_chunks, swizzled_chunks(self.tile, self.head_dim, self.stages)
        )  # (key, chunk, 8, stage)

        # A full barrier waits for one arrival and the tile's bytes, an empty one for every warp's arrival.
        tile_bytes = self.tile * self.head_dim * 2
        groups = {
            "producer_group": CooperativeGroup(Agent.Thread),
            "consumer_group": CooperativeGroup(Agent.Thread, self.threads // WARP),
        }
        q_pipeline, kv_pipeline = [
            PipelineTmaAsync.create(
                num_stages=stages,
                tx_count=bytes_expected,
                barrier_storage=smem.allocate_array(Int64, 2 * stages),
                **groups,
            )
            for stages, bytes_expected in ((1, tile_bytes), (self.stages, 2 * tile_bytes))
        ]
        q_put, q_get = [pipeline.make_pipeline_state(user, 1) for user in PRODUCER_CONSUMER]
        kv_put, kv_get = [pipeline.make_pipeline_state(user, self.stages) for user in PRODUCER_CONSUMER]

        kv_blocks = cute.ceil_div(seqlen, self.tile)
        if const_expr(self.causal):
            kv_blocks = q_block + 1  # every later tile is masked for every row of this CTA

        # 1. load Q, and as many tiles of K and V as there are stages
        if warp == 0:
            q_pipeline.producer_acquire(q_put)
            cute.copy(
                load_Q, tQgQ[None, q_block], tQsQ[None, 0], tma_bar_ptr=q_pipeline.producer_get_barrier(q_put)
            )
            for kv_block in range(cutlass.min(kv_blocks, self.stages), unroll=1):
                self.load_kv(kv_pipeline, kv_put, load_K, tKgK, tKsK, load_V, tVgV, tVsV, kv_block)
                kv_put.advance()

        # 2. prologue: operands in shared memory are descriptors, one for each 16 of head_dim
        thr_mma = mma.get_slice(tidx)
        tSrQ = mma.make_fragment_A(thr_mma.partition_A(sQ))  # (MMA, MMA_M, MMA_K, 1)
        tSrK = mma.make_fragment_B(thr_mma.partition_B(sK))  # (MMA, MMA_N, MMA_K, stage)
        acc_S = cute.make_rmem_tensor(mma.partition_shape_C((self.tile, self.tile)), Float32)
        where_S = thr_mma.partition_C(cute.make_identity_tensor((self.tile, self.tile)))  # (row, key) of each
        rS = cute.make_rmem_tensor(cute.make_layout(self.keys_per_thread), Float32)  # S, then P
        rO = cute.make_rmem_tensor(cute.make_layout((VECTOR, self.chunks_per_thread)), Float32)
        rO.fill(0.0)
        row_max, row_sum = -Float32.inf, Float32(0.0)
        q_pipeline.consumer_wait(q_get)

        # 3. main loop
        for kv_block in range(kv_blocks, unroll=1):
            # Refill the stage of the tile before, only now: the other warps had a tile's time to leave it.
            if warp == 0 and kv_block > 0 and kv_block - 1 + self.stages < kv_blocks:
                next_block = kv_block - 1 + self.stages
                self.load_kv(kv_pipeline, kv_put, load_K, tKgK, tKsK, load_V, tVgV, tVsV, next_block)
                kv_put.advance()
            kv_pipeline.consumer_wait(kv_get)
            stage = kv_get.index
            warpgroup.fence()
            for k in range_constexpr(cute.size(tSrK, mode=[2])):
                mma.set(warpgroup.Field.ACCUMULATE, k > 0)
                cute.gemm(mma, acc_S, tSrQ[None, None, k, 0], tSrK[None, None, k, stage], acc_S)
            warpgroup.commit_group()
            warpgroup.wait_group(0)

            cute.arch.sync_warp()  # a warp's 16 rows are its own; it has read P of the tile before
            for i in range_constexpr(cute.size(acc_S)):
                s_row, s_key = where_S[i]
                sS[s_row, swizzle(s_row, s_key // LANES), s_key % LANES] = acc_S[i]
            cute.arch.sync_warp()
            for i in range_constexpr(self.keys_per_thread):
                rS[i] = sS[row, swizzle(row, i), lane]
            # Only in the last tile do the sequence's end and the diagonal fall inside a tile.
            if kv_block == kv_blocks - 1:
                for i in range_constexpr(self.keys_per_thread):
                    key = kv_block * self.tile + lane + LANES * i
                    hidden = key > q_row if const_expr(self.causal) else key >= seqlen
                    if hidden:
                        rS[i] = -Float32.inf

            tile_max = row_max
            for i in range_constexpr(self.keys_per_thread):
                tile_max = cute.arch.fmax(tile_max, rS[i])
            tile_max = cute.arch.warp_reduction_max(tile_max, threads_in_group=LANES)
            rescale = cute.math.exp2((row_max - tile_max) * (self.scale * LOG2_E), fastmath=True)
            row_max = tile_max
            tile_sum = Float32(0.0)
            for i in range_constexpr(self.keys_per_thread):
                rS[i] = cute.math.exp2((rS[i] - row_max) * (self.scale * LOG2_E), fastmath=True)
                tile_sum += rS[i]
                sS[row, swizzle(row, i), lane] = rS[i]
            row_sum = row_sum * rescale + cute.arch.warp_reduction_sum(tile_sum, threads_in_group=LANES)
            for x in range_constexpr(cute.size(rO)):
                rO[x] *= rescale

            cute.arch.sync_warp()  # the row's P comes from two lanes of one warp
            for keys in range(self.tile // VECTOR, unroll=1):
                for pair in range_constexpr(VECTOR // LANES):
                    p = sS[row, swizzle(row, keys * (VECTOR // LANES) + pair), None].load()
                    for i in range_constexpr(LANES):
                        key = keys * VECTOR + pair * LANES + i
                        for c in range_constexpr(self.chunks_per_thread):
                            v = widen(
                                V_chunks[key, (lane + LANES * c) ^ (pair * LANES + i), None, stage].load()
                            )
                            for x in range_constexpr(VECTOR):
                                rO[x, c] += p[i] * v[x]

            kv_pipeline.consumer_release(kv_get)
            kv_get.advance()

        # 4. epilogue
        if q_row < seqlen:
            inverse = cute.arch.rcp_approx(row_sum)
            for c in range_constexpr(self.chunks_per_thread):
                gO = cute.local_tile(mO[q_row, None], (VECTOR,), (lane + LANES * c,))
                gO.store((rO[None, c].load() * inverse).to(mO.element_type))
            if lane == 0:
                mLSE[batch, head, q_row] = (
                    row_max * self.scale + cute.math.log2(row_sum, fastmath=True) * LN_2
                )

    @cute.jit
    def load_kv(self, kv_pipeline, kv_put, load_K, tKgK, tKsK, load_V, tVgV, tVsV, kv_block):
        """One warp: wait until every warp has left the stage, expect both tiles' bytes, start both copies."""
        kv_pipeline.producer_acquire(kv_put)
        barrier = kv_pipeline.producer_get_barrier(kv_put)
        cute.copy(load_K, tKgK[None, kv_block], tKsK[None, kv_put.index], tma_bar_ptr=barrier)
        cute.copy(load_V, tVgV[None, kv_block], tVsV[None, kv_put.index], tma_bar_ptr=barrier)


def supports(problem: Problem) -> str | None:
    return refuse_heads_on_grid(problem) or refuse_unless_plain(problem)


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    return {}


def work(problem: Problem, stages: int) -> list[Work]:
    kernel = FlashAttention2WgmmaQK(problem.head_dim, problem.causal, stages)
    tile, d = kernel.tile, problem.head_dim
    blocks, heads = math.ceil(problem.seqlen_q / tile), problem.batch * problem.heads
    return [
        Work(
            kernel="FlashAttention2WgmmaQK",
            unit=f"{tile}×{tile} tile",
            threads=kernel.threads,
            ctas=blocks * heads,
            passes=heads * (blocks * (blocks + 1) // 2 if problem.causal else blocks * blocks),
            trips=(tile // VECTOR,),
            ffma=tile * tile * d // kernel.threads,
            hbm_bytes=problem.min_bytes / (heads * blocks * blocks),
            smem_bytes=kernel.smem_bytes,
            tensor_flops=2 * tile * tile * d,
        )
    ]


def compile_kernel(problem: Problem, **options: object) -> object:
    q, k, v, o = fake_qkvo(problem.head_dim)
    kernel = FlashAttention2WgmmaQK(problem.head_dim, problem.causal, **options)
    return compile_for_torch(kernel, q, k, v, o, fake_fp32(q))


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.o.numel():
        compiled(t.q, t.k, t.v, t.o, t.lse)
