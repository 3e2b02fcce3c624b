"""K3: K2's arithmetic, its loads by the Tensor Memory Accelerator through a ring of stages.

The idea          A load becomes a message: (tensor, tile, destination, barrier). The memory accelerator does
                  what 256 threads did in k2, addresses, swizzle and the zeros behind the last row, and says
                  on an mbarrier how many bytes have come. Whoever needs a tile waits for that barrier alone,
                  and a ring of stages lets tiles be asked for before they are needed.
What changes      against k2: K and V each have a region of `stages` tiles and share one pipeline, whose
                  barrier expects the bytes of both; the CTA's four barriers per tile become one full and
                  one empty mbarrier.
What does not     tiles, threads, softmax, products. The TMA's 128-byte swizzle is the one k2 makes by hand.
Supports          bf16, head_dim 64 and 128, any length, equal for queries and keys; no GQA.

k3_1 has one stage (the protocol alone), k3_2 two (the first overlap), k3_3 five (the depth K4 inherits).
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, const_expr, pipeline, range_constexpr
from cutlass.memory import SmemAllocator
from cutlass.pipeline import Agent, CooperativeGroup, PipelineTmaAsync

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
from .device.tma import SWIZZLE_BYTES, load_atom, partition_tma, swizzled_chunks, swizzled_tiles


def ring(stage_id: str, before: str, stages: int, adds: str) -> Stage:
    title = f"TMA loads, {stages} pipeline stage{'s' * (stages > 1)}"
    return Stage(stage_id, title, adds, before, model="flash_attention_2", options={"stages": stages})


STAGES = (
    ring("k3_1", "k2", 1, "TMA loads and mbarriers, one stage: the protocol alone"),
    ring("k3_2", "k3_1", 2, "a second pipeline stage: the next tile travels while this one is worked on"),
    ring("k3_3", "k3_2", 5, "five pipeline stages, the depth that shared memory allows"),
)

TILE = 64  # B_r = B_c: query rows of a CTA, keys of a tile
LANES = 4  # threads that share a query row; they sit in one warp


class FlashAttention2Tma:
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
        tiles = (1 + 2 * self.stages) * tile_bytes + self.tile * self.tile * 4  # Q, stages of K and V, P
        return tiles + barriers

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, stream):
        batch, heads, seqlen, _ = mQ.shape
        loads = []
        for mX in (mQ, mK, mV):  # a descriptor each, over (seqlen, head_dim, heads, batch)
            loads += load_atom(mX, self.tile)
        self.kernel(*loads, mO, mLSE).launch(
            grid=(cute.ceil_div(seqlen, self.tile), heads, batch), block=(self.threads, 1, 1), stream=stream
        )

    @cute.jit
    def partition(self, atom, mX, sX, stages):
        """(TMA, block) in global memory, (TMA, stage) in shared memory: what one copy moves."""
        layout = swizzled_tiles(BFloat16, self.tile, self.head_dim, stages)
        sX = cute.make_tensor(cute.recast_ptr(sX.iterator, layout.inner, BFloat16), layout.outer)
        return partition_tma(atom, mX, sX)

    @cute.kernel
    def kernel(self, load_Q, mQ, load_K, mK, load_V, mV, mO, mLSE):
        tidx, _, _ = cute.arch.thread_idx()
        q_block, head, batch = cute.arch.block_idx()
        row, lane = tidx // LANES, tidx % LANES
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen = mO.shape[2]
        q_row = q_block * self.tile + row
        mQ, mK, mV = [mX[None, None, head, batch] for mX in (mQ, mK, mV)]  # (seqlen, head_dim)
        mO = mO[batch, head, None, None]  # (seqlen, head_dim)

        smem = SmemAllocator()
        sQ, sK, sV = [
            smem.allocate_tensor(BFloat16, swizzled_chunks(self.tile, self.head_dim, stages), SWIZZLE_BYTES)
            for stages in (1, self.stages, self.stages)
        ]  # (row, chunk, 8, stage)
        sP_layout = cute.make_layout((self.tile, self.tile // LANES, LANES), stride=(self.tile, LANES, 1))
        sP = smem.allocate_tensor(Float32, sP_layout, 16)  # (row, key // 4, key % 4)
        tQgQ, tQsQ = self.partition(load_Q, mQ, sQ, 1)
        tKgK, tKsK = self.partition(load_K, mK, sK, self.stages)
        tVgV, tVsV = self.partition(load_V, mV, sV, self.stages)

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

        # 2. prologue
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
            rS.fill(0.0)
            for chunk in range(self.head_dim // VECTOR, unroll=1):
                q = widen(sQ[row, swizzle(row, chunk), None, 0].load())
                for i in range_constexpr(self.keys_per_thread):
                    key = lane + LANES * i
                    k = widen(sK[key, swizzle(key, chunk), None, stage].load())
                    for x in range_constexpr(VECTOR):
                        rS[i] += q[x] * k[x]
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
                sP[row, swizzle(row, i), lane] = rS[i]
            row_sum = row_sum * rescale + cute.arch.warp_reduction_sum(tile_sum, threads_in_group=LANES)
            for x in range_constexpr(cute.size(rO)):
                rO[x] *= rescale

            cute.arch.sync_warp()  # the row's P comes from four lanes of one warp
            for keys in range(self.tile // VECTOR, unroll=1):
                for quad in range_constexpr(VECTOR // LANES):
                    p = sP[row, swizzle(row, keys * (VECTOR // LANES) + quad), None].load()
                    for i in range_constexpr(LANES):
                        key = keys * VECTOR + quad * LANES + i
                        for c in range_constexpr(self.chunks_per_thread):
                            v = widen(sV[key, (lane + LANES * c) ^ (quad * LANES + i), None, stage].load())
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
    kernel = FlashAttention2Tma(problem.head_dim, problem.causal, stages)
    tile, d = kernel.tile, problem.head_dim
    blocks, heads = math.ceil(problem.seqlen_q / tile), problem.batch * problem.heads
    return [
        Work(
            kernel="FlashAttention2Tma",
            unit=f"{tile}×{tile} tile",
            threads=kernel.threads,
            ctas=blocks * heads,
            passes=heads * (blocks * (blocks + 1) // 2 if problem.causal else blocks * blocks),
            trips=(d // VECTOR, tile // VECTOR),
            ffma=2 * tile * tile * d // kernel.threads,
            hbm_bytes=problem.min_bytes / (heads * blocks * blocks),
            smem_bytes=kernel.smem_bytes,
        )
    ]


def compile_kernel(problem: Problem, **options: object) -> object:
    q, k, v, o = fake_qkvo(problem.head_dim)
    kernel = FlashAttention2Tma(problem.head_dim, problem.causal, **options)
    return compile_for_torch(kernel, q, k, v, o, fake_fp32(q))


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.o.numel():
        compiled(t.q, t.k, t.v, t.o, t.lse)
