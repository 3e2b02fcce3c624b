"""K2: FlashAttention-2's forward, fused, on CUDA cores.

The idea          One CTA owns 64 query rows and walks the keys in tiles of 64. S never leaves the SM: a
                  running maximum and sum per row make the softmax a single pass; O is normalised once, last.
What changes      against fa1: rows are spread over CTAs, each warp owns 8 whole rows (split-Q: nothing to
                  combine across warps), and the division by the row sum leaves the loop.
What does not     the arithmetic: fp32 FMA on widened bf16, four threads a row, loads that everyone waits for.
Supports          bf16, head_dim 64 and 128, any length, equal for queries and keys; no GQA.
"""

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .contract import Problem, Stage, Tensors, Work
from .device.compiling import (
    compile_for_torch,
    fake_fp32,
    fake_qkvo,
    refuse_unless_plain,
)
from .device.constants import LN_2, LOG2_E, VECTOR
from .device.cuda_cores import load_tile, swizzle, tile_layout, widen
from .device.limits import refuse_heads_on_grid

STAGES = (
    Stage(
        id="k2",
        title="FlashAttention-2 on CUDA cores",
        adds="one fused kernel: online softmax, deferred normalisation, row-block parallelism, split-Q",
        before="fa1",
        model="flash_attention_2",
    ),
)

TILE = 64  # B_r = B_c: query rows of a CTA, keys of a tile
LANES = 4  # threads that share a query row; they sit in one warp


class FlashAttention2:
    def __init__(self, head_dim: int, causal: bool, tile: int = TILE):
        self.head_dim, self.causal, self.tile = head_dim, causal, tile
        self.threads = tile * LANES
        # Thread `lane` of a row owns keys lane, lane + 4, ... and 16-byte output chunks lane, lane + 4, ...
        self.keys_per_thread = tile // LANES
        self.chunks_per_thread = head_dim // VECTOR // LANES
        self.scale = 1.0 / math.sqrt(head_dim)

    @property
    def smem_bytes(self) -> int:
        return 2 * self.tile * self.head_dim * 2 + self.tile * self.tile * 4  # Q, K or V, P

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, stream):
        batch, heads, seqlen, _ = mQ.shape
        self.kernel(mQ, mK, mV, mO, mLSE).launch(
            grid=(cute.ceil_div(seqlen, self.tile), heads, batch), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mQ, mK, mV, mO, mLSE):
        tidx, _, _ = cute.arch.thread_idx()
        q_block, head, batch = cute.arch.block_idx()
        row, lane = tidx // LANES, tidx % LANES
        seqlen = mQ.shape[2]
        q_row = q_block * self.tile + row
        mQ, mK, mV, mO = [mX[batch, head, None, None] for mX in (mQ, mK, mV, mO)]  # (seqlen, head_dim)

        smem = SmemAllocator()
        sQ = smem.allocate_tensor(
            mQ.element_type, tile_layout(self.tile, self.head_dim), 16
        )  # (row, chunk, 8)
        sKV = smem.allocate_tensor(
            mK.element_type, tile_layout(self.tile, self.head_dim), 16
        )  # (key, chunk, 8)
        sP_layout = cute.make_layout((self.tile, self.tile // LANES, LANES), stride=(self.tile, LANES, 1))
        sP = smem.allocate_tensor(Float32, sP_layout, 16)  # (row, key // 4, key % 4)

        # 1. load Q
        load_tile(mQ, sQ, q_block, self.threads)

        # 2. prologue
        rS = cute.make_rmem_tensor(cute.make_layout(self.keys_per_thread), Float32)  # S, then P
        rO = cute.make_rmem_tensor(cute.make_layout((VECTOR, self.chunks_per_thread)), Float32)
        rO.fill(0.0)
        row_max, row_sum = -Float32.inf, Float32(0.0)
        kv_blocks = cute.ceil_div(seqlen, self.tile)
        if const_expr(self.causal):
            kv_blocks = q_block + 1  # every later tile is masked for every row of this CTA

        # 3. main loop
        for kv_block in range(kv_blocks, unroll=1):
            cute.arch.sync_threads()  # V of the tile before is read by slower warps
            load_tile(mK, sKV, kv_block, self.threads)
            cute.arch.sync_threads()
            rS.fill(0.0)
            for chunk in range(self.head_dim // VECTOR, unroll=1):
                q = widen(sQ[row, swizzle(row, chunk), None].load())
                for i in range_constexpr(self.keys_per_thread):
                    key = lane + LANES * i
                    k = widen(sKV[key, swizzle(key, chunk), None].load())
                    for x in range_constexpr(VECTOR):
                        rS[i] += q[x] * k[x]
            cute.arch.sync_threads()  # K is read by slower warps
            load_tile(mV, sKV, kv_block, self.threads)

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

            cute.arch.sync_threads()  # V has arrived, and with it this row's P from the other three lanes
            for keys in range(self.tile // VECTOR, unroll=1):
                for quad in range_constexpr(VECTOR // LANES):
                    p = sP[row, swizzle(row, keys * (VECTOR // LANES) + quad), None].load()
                    for i in range_constexpr(LANES):
                        key = keys * VECTOR + quad * LANES + i
                        for c in range_constexpr(self.chunks_per_thread):
                            v = widen(sKV[key, (lane + LANES * c) ^ (quad * LANES + i), None].load())
                            for x in range_constexpr(VECTOR):
                                rO[x, c] += p[i] * v[x]

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


def supports(problem: Problem) -> str | None:
    return refuse_heads_on_grid(problem) or refuse_unless_plain(problem)


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    return {}


def work(problem: Problem) -> list[Work]:
    kernel = FlashAttention2(problem.head_dim, problem.causal)
    tile, d = kernel.tile, problem.head_dim
    blocks, heads = math.ceil(problem.seqlen_q / tile), problem.batch * problem.heads
    return [
        Work(
            kernel="FlashAttention2",
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
    kernel = FlashAttention2(problem.head_dim, problem.causal, **options)
    return compile_for_torch(kernel, q, k, v, o, fake_fp32(q))


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.o.numel():
        compiled(t.q, t.k, t.v, t.o, t.lse)
