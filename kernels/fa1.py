"""FA1: FlashAttention-1's schedule on CUDA cores, with its three properties as switches.

The idea          Tiles of S live in shared memory and registers only; O, the row maxima and the row sums are
                  corrected tile by tile. As FlashAttention-1 arranged it:
                    one CTA per (batch, head), keys in the outer loop, so O travels through global memory;
                    split-K: each warp takes 8 of the tile's 64 keys and all of its rows, and the eight
                    partial products are combined through shared memory;
                    O is normalised at every step.
What changes      against k1: S is gone from global memory, one kernel instead of three.
What does not     fp32 FMA on widened bf16, everyone waits for every load.
Supports          bf16, head_dim 64 and 128, any length, equal for queries and keys; no GQA.

`row_parallel`, `split_q` and `deferred` switch the three properties to FlashAttention-2's, one at a time;
with all three this is k2, but for K and V having a buffer each.
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
        id="fa1",
        title="FlashAttention-1's schedule",
        adds="tiling with an online softmax: S never reaches global memory",
        before="k1",
        model="flash_attention_1",
    ),
)

# FlashAttention-2's three changes, one at a time: what `python -m harness.ablation fa1` measures.
VARIANTS: dict[str, dict[str, bool]] = {
    "FlashAttention-1": {},
    "normalise once": {"deferred": True},
    "row blocks on all SMs": {"row_parallel": True},
    "split-Q": {"split_q": True},
    "row blocks + split-Q": {"row_parallel": True, "split_q": True},
    "all three: FlashAttention-2": {"row_parallel": True, "split_q": True, "deferred": True},
}

TILE = 64  # B_r = B_c: query rows and keys of a tile
LANES = 4  # threads that own a query row's output
WARP = 32
SLAB = 32  # split-K: output columns the warps combine at once


class FlashAttention1:
    def __init__(
        self,
        head_dim: int,
        causal: bool,
        tile: int = TILE,
        row_parallel: bool = False,
        split_q: bool = False,
        deferred: bool = False,
    ):
        self.head_dim, self.causal, self.tile = head_dim, causal, tile
        self.row_parallel, self.split_q, self.deferred = row_parallel, split_q, deferred
        self.threads = tile * LANES
        self.warps = self.threads // WARP
        self.chunks_per_thread = head_dim // VECTOR // LANES
        self.exp_scale = LOG2_E / math.sqrt(head_dim)

    @property
    def smem_bytes(self) -> int:
        tiles = 3 * self.tile * self.head_dim * 2  # Q, K, V
        if self.split_q:
            return tiles + self.tile * self.tile * 4  # P
        return tiles + self.warps * self.tile * (SLAB + 2) * 4  # partial O, each warp's row maxima and sums

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, mAcc, mStats, stream):
        batch, heads, seqlen, _ = mQ.shape
        row_ctas = cute.ceil_div(seqlen, self.tile) if const_expr(self.row_parallel) else 1
        self.kernel(mQ, mK, mV, mO, mLSE, mAcc, mStats).launch(
            grid=(row_ctas, heads, batch), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mQ, mK, mV, mO, mLSE, mAcc, mStats):
        tidx, _, _ = cute.arch.thread_idx()
        row_cta, head, batch = cute.arch.block_idx()
        row, lane = tidx // LANES, tidx % LANES
        seqlen = mQ.shape[2]
        # (seqlen, head_dim), but for mStats: (seqlen, 2) and mLSE: (seqlen,)
        mQ, mK, mV, mO, mAcc, mStats = [mX[batch, head, None, None] for mX in (mQ, mK, mV, mO, mAcc, mStats)]
        mLSE = mLSE[batch, head, None]

        smem = SmemAllocator()
        layout = tile_layout(self.tile, self.head_dim)
        sQ, sK, sV = [smem.allocate_tensor(mQ.element_type, layout, 16) for _ in range(3)]  # (row, chunk, 8)
        if const_expr(self.split_q):
            sP_layout = cute.make_layout((self.tile, self.tile // LANES, LANES), stride=(self.tile, LANES, 1))
            exchange = [smem.allocate_tensor(Float32, sP_layout, 16)]  # P: (row, key // 4, key % 4)
        else:
            slab = cute.make_layout((self.warps, self.tile, 8, 4), stride=(self.tile * SLAB, SLAB, 4, 1))
            stats = cute.make_layout((self.warps, self.tile), stride=(self.tile, 1))
            # partial O: (warp, row, column // 4, column % 4); maxima and sums: (warp, row)
            exchange = [smem.allocate_tensor(Float32, layout, 16) for layout in (slab, stats, stats)]
        rO = cute.make_rmem_tensor(cute.make_layout((VECTOR, self.chunks_per_thread)), Float32)
        row_stats = cute.make_rmem_tensor(cute.make_layout(2), Float32)  # running maximum (unscaled) and sum
        blocks = cute.ceil_div(seqlen, self.tile)

        if const_expr(self.row_parallel):
            # queries outside, keys inside: O and its statistics stay in registers
            load_tile(mQ, sQ, row_cta, self.threads)
            self.start_row(rO, row_stats)
            kv_blocks = row_cta + 1 if const_expr(self.causal) else blocks
            for kv_block in range(kv_blocks, unroll=1):
                cute.arch.sync_threads()  # the tile before is read by slower warps
                load_tile(mK, sK, kv_block, self.threads)
                load_tile(mV, sV, kv_block, self.threads)
                cute.arch.sync_threads()
                last = kv_block == kv_blocks - 1
                self.step(sQ, sK, sV, exchange, rO, row_stats, row_cta, kv_block, last, seqlen)
            self.finish_row(mO, mLSE, rO, row_stats, row_cta * self.tile + row, lane, seqlen)
        else:
            # keys outside, queries inside: O and its statistics pass through global memory at every step
            for kv_block in range(blocks, unroll=1):
                cute.arch.sync_threads()
                load_tile(mK, sK, kv_block, self.threads)
                load_tile(mV, sV, kv_block, self.threads)
                first_row_block = kv_block if const_expr(self.causal) else 0
                for row_block in range(first_row_block, blocks, unroll=1):
                    q_row = row_block * self.tile + row
                    cute.arch.sync_threads()  # the Q before is read by slower warps
                    load_tile(mQ, sQ, row_block, self.threads)
                    self.start_row(rO, row_stats)
                    if kv_block > 0 and q_row < seqlen:
                        cute.autovec_copy(mStats[q_row, None], row_stats)
                        for c in range_constexpr(self.chunks_per_thread):
                            cute.autovec_copy(self.chunk_of(mAcc, q_row, lane, c), rO[None, c])
                    cute.arch.sync_threads()
                    last = kv_block == (row_block if const_expr(self.causal) else blocks - 1)
                    self.step(sQ, sK, sV, exchange, rO, row_stats, row_block, kv_block, last, seqlen)
                    if last:
                        self.finish_row(mO, mLSE, rO, row_stats, q_row, lane, seqlen)
                    elif q_row < seqlen:
                        for c in range_constexpr(self.chunks_per_thread):
                            cute.autovec_copy(rO[None, c], self.chunk_of(mAcc, q_row, lane, c))
                        if lane == 0:
                            cute.autovec_copy(row_stats, mStats[q_row, None])

    @cute.jit
    def chunk_of(self, mX, q_row, lane, c):
        """The c-th of the chunks of row q_row that thread `lane` of the row owns."""
        return cute.local_tile(mX[q_row, None], (VECTOR,), (lane + LANES * c,))

    @cute.jit
    def start_row(self, rO, row_stats):
        rO.fill(0.0)
        row_stats[0], row_stats[1] = -Float32.inf, Float32(0.0)

    @cute.jit
    def finish_row(self, mO, mLSE, rO, row_stats, q_row, lane, seqlen):
        if q_row < seqlen:
            inverse = cute.arch.rcp_approx(row_stats[1]) if const_expr(self.deferred) else Float32(1.0)
            for c in range_constexpr(self.chunks_per_thread):
                gO = self.chunk_of(mO, q_row, lane, c)
                gO.store((rO[None, c].load() * inverse).to(mO.element_type))
            if lane == 0:
                lse_log2 = row_stats[0] * self.exp_scale + cute.math.log2(row_stats[1], fastmath=True)
                mLSE[q_row] = lse_log2 * LN_2

    @cute.jit
    def step(self, sQ, sK, sV, exchange, rO, row_stats, row_block, kv_block, last, seqlen):
        if const_expr(self.split_q):
            self.step_split_q(sQ, sK, sV, exchange[0], rO, row_stats, row_block, kv_block, last, seqlen)
        else:
            self.step_split_k(sQ, sK, sV, exchange, rO, row_stats, row_block, kv_block, last, seqlen)

    @cute.jit
    def update(self, rO, row_stats, new_max, new_sum):
        """Bring O and the statistics to the new maximum; returns the factor the tile's P still needs."""
        rescale = cute.math.exp2((row_stats[0] - new_max) * self.exp_scale, fastmath=True)
        total = row_stats[1] * rescale + new_sum
        p_factor = Float32(1.0)
        if const_expr(not self.deferred):
            p_factor = cute.arch.rcp_approx(total)
            rescale = rescale * row_stats[1] * p_factor
        for x in range_constexpr(cute.size(rO)):
            rO[x] *= rescale
        row_stats[0], row_stats[1] = new_max, total
        return p_factor

    @cute.jit
    def scores(self, sQ, sK, rS, rows, keys):
        """rS[r, i] = Q[rows[r]] · K[keys[i]]."""
        rS.fill(0.0)
        for chunk in range(self.head_dim // VECTOR, unroll=1):
            q = [widen(sQ[r, swizzle(r, chunk), None].load()) for r in rows]
            for i in range_constexpr(len(keys)):
                k = widen(sK[keys[i], swizzle(keys[i], chunk), None].load())
                for r in range_constexpr(len(rows)):
                    for x in range_constexpr(VECTOR):
                        rS[r, i] += q[r][x] * k[x]

    @cute.jit
    def mask(self, rS, rows, keys, row_block, kv_block, seqlen):
        for r in range_constexpr(len(rows)):
            for i in range_constexpr(len(keys)):
                key, q_row = kv_block * self.tile + keys[i], row_block * self.tile + rows[r]
                hidden = key > q_row if const_expr(self.causal) else key >= seqlen
                if hidden:
                    rS[r, i] = -Float32.inf

    @cute.jit
    def step_split_q(self, sQ, sK, sV, sP, rO, row_stats, row_block, kv_block, last, seqlen):
        """A warp owns 8 rows and sees all keys: statistics by shuffles among the four lanes of a row."""
        tidx, _, _ = cute.arch.thread_idx()
        row, lane = tidx // LANES, tidx % LANES
        keys = [lane + LANES * i for i in range(self.tile // LANES)]
        rS = cute.make_rmem_tensor(cute.make_layout((1, len(keys))), Float32)
        self.scores(sQ, sK, rS, [row], keys)
        if last:
            self.mask(rS, [row], keys, row_block, kv_block, seqlen)

        new_max = row_stats[0]
        for i in range_constexpr(len(keys)):
            new_max = cute.arch.fmax(new_max, rS[i])
        new_max = cute.arch.warp_reduction_max(new_max, threads_in_group=LANES)
        new_sum = Float32(0.0)
        for i in range_constexpr(len(keys)):
            rS[i] = cute.math.exp2((rS[i] - new_max) * self.exp_scale, fastmath=True)
            new_sum += rS[i]
        new_sum = cute.arch.warp_reduction_sum(new_sum, threads_in_group=LANES)
        p_factor = self.update(rO, row_stats, new_max, new_sum)
        for i in range_constexpr(len(keys)):
            sP[row, swizzle(row, i), lane] = rS[i] * p_factor

        cute.arch.sync_warp()  # the row's P comes from four lanes of one warp
        for octet in range(self.tile // VECTOR, unroll=1):
            for quad in range_constexpr(VECTOR // LANES):
                p = sP[row, swizzle(row, octet * (VECTOR // LANES) + quad), None].load()
                for i in range_constexpr(LANES):
                    key = octet * VECTOR + quad * LANES + i
                    for c in range_constexpr(self.chunks_per_thread):
                        v = widen(sV[key, (lane + LANES * c) ^ (quad * LANES + i), None].load())
                        for x in range_constexpr(VECTOR):
                            rO[x, c] += p[i] * v[x]

    @cute.jit
    def step_split_k(self, sQ, sK, sV, exchange, rO, row_stats, row_block, kv_block, last, seqlen):
        """A warp owns 8 keys and sees all rows: maxima, sums and products all combine through shared
        memory."""
        sSlab, sMax, sSum = exchange
        tidx, _, _ = cute.arch.thread_idx()
        row, lane = tidx // LANES, tidx % LANES
        warp, warp_lane = tidx // WARP, tidx % WARP
        keys_per_warp = self.tile // self.warps
        rows = [warp_lane + WARP * r for r in range(self.tile // WARP)]
        keys = [warp * keys_per_warp + i for i in range(keys_per_warp)]
        rS = cute.make_rmem_tensor(cute.make_layout((len(rows), len(keys))), Float32)
        self.scores(sQ, sK, rS, rows, keys)
        if last:
            self.mask(rS, rows, keys, row_block, kv_block, seqlen)

        for r in range_constexpr(len(rows)):
            partial = rS[r, 0]
            for i in range_constexpr(1, len(keys)):
                partial = cute.arch.fmax(partial, rS[r, i])
            sMax[warp, rows[r]] = partial
        cute.arch.sync_threads()
        for r in range_constexpr(len(rows)):
            # Relative to the tile's maximum, which every warp can see; the running one is its owner's.
            tile_max = sMax[0, rows[r]]
            for w in range_constexpr(1, self.warps):
                tile_max = cute.arch.fmax(tile_max, sMax[w, rows[r]])
            partial = Float32(0.0)
            for i in range_constexpr(len(keys)):
                rS[r, i] = cute.math.exp2((rS[r, i] - tile_max) * self.exp_scale, fastmath=True)
                partial += rS[r, i]
            sSum[warp, rows[r]] = partial
        cute.arch.sync_threads()
        tile_max, tile_sum = sMax[0, row], sSum[0, row]
        for w in range_constexpr(1, self.warps):
            tile_max = cute.arch.fmax(tile_max, sMax[w, row])
            tile_sum += sSum[w, row]
        new_max = cute.arch.fmax(row_stats[0], tile_max)
        to_new_max = cute.math.exp2((tile_max - new_max) * self.exp_scale, fastmath=True)
        p_factor = self.update(rO, row_stats, new_max, tile_sum * to_new_max) * to_new_max

        for slab in range_constexpr(self.head_dim // SLAB):
            rPart = cute.make_rmem_tensor(cute.make_layout((4, SLAB // 4, len(rows))), Float32)
            rPart.fill(0.0)
            for i in range_constexpr(len(keys)):
                for c in range_constexpr(SLAB // VECTOR):
                    v = widen(sV[keys[i], swizzle(i, slab * (SLAB // VECTOR) + c), None].load())
                    for r in range_constexpr(len(rows)):
                        for x in range_constexpr(VECTOR):
                            rPart[x % 4, 2 * c + x // 4, r] += rS[r, i] * v[x]
            for r in range_constexpr(len(rows)):
                for q in range_constexpr(SLAB // 4):
                    cute.autovec_copy(rPart[None, q, r], sSlab[warp, rows[r], swizzle(rows[r], q), None])
            cute.arch.sync_threads()
            for half in range_constexpr(2):
                total = sSlab[0, row, swizzle(row, 2 * lane + half), None].load()
                for w in range_constexpr(1, self.warps):
                    total = total + sSlab[w, row, swizzle(row, 2 * lane + half), None].load()
                for x in range_constexpr(4):
                    rO[4 * half + x, slab] += total[x] * p_factor
            cute.arch.sync_threads()  # the slab is read before the next one overwrites it


def supports(problem: Problem) -> str | None:
    return refuse_heads_on_grid(problem) or refuse_unless_plain(problem)


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    return {"acc": ((*rows, problem.head_dim), "float32"), "stats": ((*rows, 2), "float32")}


def work(problem: Problem) -> list[Work]:
    kernel = FlashAttention1(problem.head_dim, problem.causal)
    tile, d = kernel.tile, problem.head_dim
    blocks, heads = math.ceil(problem.seqlen_q / tile), problem.batch * problem.heads
    return [
        Work(
            kernel="FlashAttention1",
            unit=f"{tile}×{tile} tile",
            threads=kernel.threads,
            ctas=heads,
            passes=heads * (blocks * (blocks + 1) // 2 if problem.causal else blocks * blocks),
            trips=(d // VECTOR,),
            ffma=2 * tile * tile * d // kernel.threads,
            hbm_bytes=2 * tile * d * 4,  # O goes and comes back in fp32; all heads' O together outgrow L2
            smem_bytes=kernel.smem_bytes,
        )
    ]


def compile_kernel(problem: Problem, **options: object) -> object:
    q, k, v, o = fake_qkvo(problem.head_dim)
    kernel = FlashAttention1(problem.head_dim, problem.causal, **options)
    scratch = (fake_fp32(q, problem.head_dim, vector=4), fake_fp32(q, 2, vector=2))
    return compile_for_torch(kernel, q, k, v, o, fake_fp32(q), *scratch)


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.o.numel():
        compiled(t.q, t.k, t.v, t.o, t.lse, t.workspace["acc"], t.workspace["stats"])
