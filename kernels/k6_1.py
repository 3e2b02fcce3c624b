"""K6.1: ping-pong: the consumers take turns at the tensor cores.

The idea          While one warpgroup exponentiates, another multiplies. Chance arranges that only partly; a
                  named barrier for each consumer makes it so: who has issued its Q·Kᵀ passes the turn, and
                  waits for it again before P·V and the next Q·Kᵀ, which it issues back to back.
What changes      against k5: two waits and two arrivals.
What does not     everything else.
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
from .device.constants import LN_2, LOG2_E, WARP, WARPGROUP
from .device.limits import refuse_heads_on_grid
from .device.rings import CONSUMER, PRODUCER, put
from .device.tma import allocate_tiles, load_atom, partition_tma
from .device.wgmma import by_row, exchanged, operand_a, work_on_wgmma

STAGES = (
    Stage(
        "k6_1",
        "ping-pong scheduling",
        "consumers take turns at the tensor cores: one multiplies while another exponentiates",
        "k5",
        rounds_p=True,
    ),
)
TILES = {64: (192, 128, 2), 128: (128, 128, 2)}  # by head_dim: tile_q (64 rows a consumer), tile_kv, stages
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}  # by consumers: of a producer's thread, a consumer's
TURN = 1  # named barrier of the first consumer, the others' follow; 0 is the CTA's own
LANES = 4  # threads that share a query row of the accumulator; they sit in one warp


class FlashAttention2PingPong:
    def __init__(self, head_dim: int, causal: bool, tiles: tuple[int, int, int] | None = None):
        self.head_dim, self.causal = head_dim, causal
        self.tile_q, self.tile_kv, self.stages = tiles or TILES[head_dim]
        self.consumers = self.tile_q // 64  # warpgroups
        self.threads = WARPGROUP * (1 + self.consumers)
        self.scale = 1.0 / math.sqrt(head_dim)

    @property
    def smem_bytes(self) -> int:
        rows = self.tile_q + 2 * self.stages * self.tile_kv  # Q, stages of K and V
        return rows * self.head_dim * 2 + 2 * (1 + 2 * self.stages) * 8

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, stream):
        batch, heads, seqlen, _ = mQ.shape
        loads = []
        for mX, rows in ((mQ, self.tile_q), (mK, self.tile_kv), (mV, self.tile_kv)):
            loads += load_atom(mX, rows)
        source, K, MN = warpgroup.OperandSource, OperandMajorMode.K, OperandMajorMode.MN
        split = (self.consumers, 1, 1)  # warpgroups along (M, N, K)
        mma_qk = make_trivial_tiled_mma(
            BFloat16, BFloat16, K, K, Float32, split, (64, self.tile_kv), source.SMEM
        )
        mma_pv = make_trivial_tiled_mma(
            BFloat16, BFloat16, K, MN, Float32, split, (64, self.head_dim), source.RMEM
        )
        self.kernel(mma_qk, mma_pv, *loads, mO, mLSE).launch(
            grid=(cute.ceil_div(seqlen, self.tile_q), heads, batch),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,  # the registers of an SM are all for one CTA
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mma_qk, mma_pv, load_Q, mQ, load_K, mK, load_V, mV, mO, mLSE):
        tidx, _, _ = cute.arch.thread_idx()
        q_block, head, batch = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen = mO.shape[2]
        mQ, mK, mV = [mX[None, None, head, batch] for mX in (mQ, mK, mV)]  # (seqlen, head_dim)
        mO = mO[batch, head, None, None]  # (seqlen, head_dim)

        smem = SmemAllocator()
        sQ = allocate_tiles(smem, BFloat16, self.tile_q, self.head_dim, 1)  # (row, head_dim, 1)
        sK, sV = [
            allocate_tiles(smem, BFloat16, self.tile_kv, self.head_dim, self.stages) for _ in range(2)
        ]  # (key, head_dim, stage)
        # V as operand B is (N, K) = (head_dim, key): the same bytes, modes exchanged.
        sVt = exchanged(sV)  # (head_dim, key, stage)
        tQgQ, tQsQ = partition_tma(load_Q, mQ, sQ)
        tKgK, tKsK = partition_tma(load_K, mK, sK)
        tVgV, tVsV = partition_tma(load_V, mV, sV)

        # A full barrier waits for one arrival and the tile's bytes, an empty one for every consumer warp's.
        groups = {
            "producer_group": CooperativeGroup(Agent.Thread),
            "consumer_group": CooperativeGroup(Agent.Thread, self.consumers * WARPGROUP // WARP),
        }
        q_pipeline, k_pipeline, v_pipeline = [
            PipelineTmaAsync.create(
                num_stages=stages,
                tx_count=rows * self.head_dim * 2,
                barrier_storage=smem.allocate_array(Int64, 2 * stages),
                **groups,
            )
            for stages, rows in ((1, self.tile_q), (self.stages, self.tile_kv), (self.stages, self.tile_kv))
        ]

        keys = cutlass.min(seqlen, (q_block + 1) * self.tile_q) if const_expr(self.causal) else seqlen
        kv_blocks = cute.ceil_div(keys, self.tile_kv)  # every later tile is masked for every row of this CTA
        # Tiles from this one on hold a key that some row must not see.
        first_masked = (q_block * self.tile_q if const_expr(self.causal) else seqlen) // self.tile_kv

        producer_registers, consumer_registers = REGISTERS[self.consumers]
        if warp < WARPGROUP // WARP:
            # 1. the producer: load Q, then K and V as the rings empty
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                q_put, kv_put = [pipeline.make_pipeline_state(PRODUCER, n) for n in (1, self.stages)]
                put(q_pipeline, q_put, load_Q, tQgQ[None, q_block], tQsQ)
                for kv_block in range(kv_blocks, unroll=1):
                    put(k_pipeline, kv_put, load_K, tKgK[None, kv_block], tKsK)
                    put(v_pipeline, kv_put, load_V, tVgV[None, kv_block], tVsV)
                    kv_put.advance()
        else:
            # 2. a consumer's prologue: operands in shared memory are descriptors, the rest registers
            cute.arch.setmaxregister_increase(consumer_registers)
            q_get, kv_get = [pipeline.make_pipeline_state(CONSUMER, n) for n in (1, self.stages)]
            consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP) - 1
            wg_qk, wg_pv = [mma.get_slice(consumer * WARPGROUP) for mma in (mma_qk, mma_pv)]
            thr_pv = mma_pv.get_slice(tidx - WARPGROUP)
            tSrQ = mma_qk.make_fragment_A(wg_qk.partition_A(sQ))  # (MMA, MMA_M, MMA_K, 1)
            tSrK = mma_qk.make_fragment_B(wg_qk.partition_B(sK))  # (MMA, MMA_N, MMA_K, stage)
            tOrV = mma_pv.make_fragment_B(wg_pv.partition_B(sVt))  # (MMA, MMA_N, MMA_K, stage)
            rS = cute.make_rmem_tensor(mma_qk.partition_shape_C((self.tile_q, self.tile_kv)), Float32)
            rO = cute.make_rmem_tensor(mma_pv.partition_shape_C((self.tile_q, self.head_dim)), Float32)
            rP = cute.make_rmem_tensor(rS.layout, BFloat16)
            tOrP = cute.make_tensor(rP.iterator, operand_a(rP.layout))  # (MMA, MMA_M, MMA_K)
            S, acc = by_row(rS), by_row(rO)  # (row, column) of this thread
            cS = cute.make_identity_tensor((self.tile_q, self.tile_kv))
            where_S, first_S = [by_row(mma_qk.get_slice(t).partition_C(cS)) for t in (tidx - WARPGROUP, 0)]
            where_O = by_row(thr_pv.partition_C(cute.make_identity_tensor((self.tile_q, self.head_dim))))
            rows, columns = cute.size(S, mode=[0]), cute.size(S, mode=[1])
            row_max, row_sum = [cute.make_rmem_tensor(cute.make_layout(rows), Float32) for _ in range(2)]
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            rO.fill(0.0)
            # Whoever arrives at a consumer's barrier gives it the turn; the first has it to begin with.
            last = self.consumers - 1
            my_turn, next_turn = TURN + consumer, TURN + (consumer + 1) % self.consumers
            q_pipeline.consumer_wait(q_get)
            if consumer == last:
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)
            cute.arch.barrier(barrier_id=my_turn, number_of_threads=2 * WARPGROUP)

            # 3. main loop
            for kv_block in range(kv_blocks, unroll=1):
                k_pipeline.consumer_wait(kv_get)
                stage = kv_get.index
                warpgroup.fence()
                for k in range_constexpr(cute.size(tSrK, mode=[2])):
                    mma_qk.set(warpgroup.Field.ACCUMULATE, k > 0)
                    cute.gemm(mma_qk, rS, tSrQ[None, None, k, 0], tSrK[None, None, k, stage], rS)
                warpgroup.commit_group()
                cute.arch.barrier_arrive(barrier_id=next_turn, number_of_threads=2 * WARPGROUP)
                warpgroup.wait_group(0)
                k_pipeline.consumer_release(kv_get)

                if kv_block >= first_masked:
                    for r in range_constexpr(rows):
                        row, key = where_S[r, 0]  # of the thread's first column; the rest are static
                        last_key = q_block * self.tile_q + row if const_expr(self.causal) else seqlen - 1
                        visible = last_key - (kv_block * self.tile_kv + key)
                        for c in range_constexpr(columns):
                            S[r, c] = S[r, c] if first_S[0, c][1] <= visible else -Float32.inf

                for r in range_constexpr(rows):
                    tile_max = S[r, None].load().reduce(cute.ReductionOp.MAX, row_max[r], 0)
                    tile_max = cute.arch.warp_reduction_max(tile_max, threads_in_group=LANES)
                    rescale = cute.math.exp2((row_max[r] - tile_max) * (self.scale * LOG2_E), fastmath=True)
                    row_max[r] = tile_max
                    p = S[r, None].load() * (self.scale * LOG2_E) - tile_max * (self.scale * LOG2_E)
                    p = cute.math.exp2(p, fastmath=True)
                    S[r, None].store(p)
                    row_sum[r] = p.reduce(cute.ReductionOp.ADD, row_sum[r] * rescale, 0)
                    acc[r, None].store(acc[r, None].load() * rescale)
                rP.store(rS.load().to(BFloat16))

                v_pipeline.consumer_wait(kv_get)
                cute.arch.barrier(barrier_id=my_turn, number_of_threads=2 * WARPGROUP)
                warpgroup.fence()
                mma_pv.set(warpgroup.Field.ACCUMULATE, True)
                for k in range_constexpr(cute.size(tOrV, mode=[2])):
                    cute.gemm(mma_pv, rO, tOrP[None, None, k], tOrV[None, None, k, stage], rO)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                v_pipeline.consumer_release(kv_get)
                kv_get.advance()

            # The last consumer's turn ends the tile: an arrival that nobody waits for would stay behind.
            if consumer < last:
                cute.arch.barrier_arrive(barrier_id=next_turn, number_of_threads=2 * WARPGROUP)

            # 4. epilogue
            for r in range_constexpr(rows):
                total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=LANES)
                acc[r, None].store(acc[r, None].load() * cute.arch.rcp_approx(total))
                row, column = where_O[r, 0]
                q_row = q_block * self.tile_q + row
                if q_row < seqlen:
                    gO = cute.local_tile(mO[q_row, None], (2,), (None,))  # (2, head_dim / 2)
                    for c in range_constexpr(self.head_dim // 8):
                        pair = cute.make_rmem_tensor(cute.make_layout(2), BFloat16)
                        pair.store(acc[r, (None, c)].load().to(BFloat16))
                        cute.autovec_copy(pair, gO[None, column // 2 + LANES * c])
                    if column == 0:
                        lse = row_max[r] * self.scale + cute.math.log2(total, fastmath=True) * LN_2
                        mLSE[batch, head, q_row] = lse


def supports(problem: Problem) -> str | None:
    return refuse_heads_on_grid(problem) or refuse_unless_plain(problem)


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    return {}


def work(problem: Problem, **options: object) -> list[Work]:
    return [work_on_wgmma(problem, FlashAttention2PingPong(problem.head_dim, problem.causal, **options))]


def compile_kernel(problem: Problem, **options: object) -> object:
    q, k, v, o = fake_qkvo(problem.head_dim)
    kernel = FlashAttention2PingPong(problem.head_dim, problem.causal, **options)
    return compile_for_torch(kernel, q, k, v, o, fake_fp32(q))


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.o.numel():
        compiled(t.q, t.k, t.v, t.o, t.lse)
