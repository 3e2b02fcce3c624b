"""BWD2: FlashAttention-2's backward, fused, on CUDA cores.

The idea          One CTA owns 64 keys and walks the queries in tiles of 64. P is computed again from the
                  scores and the LSE, so that neither P nor dS leaves the SM: dK and dV are sums in registers,
                  dQ, to which every CTA of the head contributes, is summed by atomic additions in fp32.
What changes      against bwd1: one kernel instead of five, between one that forms D and clears dQ's sum and
                  one that rounds it. Nothing of size N² is in global memory.
What does not     the arithmetic: fp32 FMA on widened bf16, fp32 P and dS, loads that everyone waits for.
Supports          bf16, head_dim 64 and 128, any length, equal for queries and keys; no GQA.
"""

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .contract import Problem, Stage, Tensors, Work
from .device.compiling import (
    compile_for_torch,
    fake_backward,
    fake_fp32,
    refuse_unless_plain,
)
from .device.constants import LOG2_E, VECTOR
from .device.cuda_cores import load_tile, swizzle, tile_layout, widen
from .device.limits import refuse_heads_on_grid

STAGES = (
    Stage(
        id="bwd2",
        title="FlashAttention-2's backward on CUDA cores",
        adds="one fused kernel: P recomputed from the LSE, dK and dV in registers, dQ by atomic additions",
        before="bwd1",
        direction="bwd",
        model="flash_attention_2_backward",
        atomics=True,
    ),
)

TILE = 64  # B_r = B_c: keys of a CTA, query rows of a tile
GROUPS = 16  # a tile's rows or keys fall into 16 groups of 4: group g has g, g + 16, g + 32 and g + 48
QUAD = TILE // GROUPS


class FlashAttention2Backward:
    def __init__(self, head_dim: int, causal: bool):
        self.head_dim, self.causal = head_dim, causal
        self.chunks = head_dim // VECTOR
        # A thread owns a quad of rows × 8 columns of each gradient, and of S some rows × a quad of keys.
        self.threads = GROUPS * self.chunks
        self.rows_per_thread = TILE * GROUPS // self.threads
        self.row_stride = self.threads // GROUPS
        self.scale = 1.0 / math.sqrt(head_dim)

    @property
    def smem_bytes(self) -> int:
        return 4 * TILE * self.head_dim * 2 + 2 * TILE * TILE * 4  # K, V, Q, dO; P, dS

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mdO, mdQ, mdK, mdV, mLSE, mD, mdQ_sum, stream):
        batch, heads, seqlen, _ = mQ.shape
        grid = (cute.ceil_div(seqlen, TILE), heads, batch)
        launch = {"grid": grid, "block": (self.threads, 1, 1), "stream": stream}
        self.preprocess(mO, mdO, mD, mdQ_sum).launch(**launch)
        self.backward(mQ, mK, mV, mdO, mdK, mdV, mLSE, mD, mdQ_sum).launch(**launch)
        self.postprocess(mdQ_sum, mdQ).launch(**launch)

    @cute.kernel
    def preprocess(self, mO, mdO, mD, mdQ_sum):
        """D = rowsum(dO∘O), and zeros for dQ's sum."""
        tidx, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        group, chunk = tidx // self.chunks, tidx % self.chunks
        for i in range_constexpr(QUAD):
            row = block * TILE + group + GROUPS * i
            dot = Float32(0.0)
            if row < mO.shape[2]:
                gO, gdO = [
                    cute.local_tile(mX[batch, head, row, None], (VECTOR,), (chunk,)) for mX in (mO, mdO)
                ]
                o, do = widen(gO.load()), widen(gdO.load())
                for x in range_constexpr(VECTOR):
                    dot += o[x] * do[x]
            # Every lane takes part, also one whose row is past the end: its warp's other rows may not be.
            dot = cute.arch.warp_reduction_sum(dot, threads_in_group=self.chunks)
            if row < mO.shape[2]:
                mdQ_sum[batch, head, row, None, chunk].fill(0.0)
                if chunk == 0:
                    mD[batch, head, row] = dot

    @cute.kernel
    def backward(self, mQ, mK, mV, mdO, mdK, mdV, mLSE, mD, mdQ_sum):
        tidx, _, _ = cute.arch.thread_idx()
        kv_block, head, batch = cute.arch.block_idx()
        # Of S and dP a thread owns rows first_row, first_row + row_stride, … and the keys of quad `quad`; of
        # dQ, dK and dV the rows or keys of group `group` and the 16-byte chunk `chunk` of columns. Lanes that
        # share a shared-memory access differ in quad or chunk only: `swizzle` spreads those over the banks.
        first_row, quad = tidx // GROUPS, tidx % GROUPS
        group, chunk = tidx // self.chunks, tidx % self.chunks
        seqlen = mQ.shape[2]
        # (seqlen, head_dim)
        mQ, mK, mV, mdO, mdK, mdV = [mX[batch, head, None, None] for mX in (mQ, mK, mV, mdO, mdK, mdV)]
        mLSE, mD = mLSE[batch, head, None], mD[batch, head, None]  # (seqlen,)

        smem = SmemAllocator()
        tile = tile_layout(TILE, self.head_dim)
        # (row, chunk, 8)
        sK, sV, sQ, sdO = [smem.allocate_tensor(mQ.element_type, tile, 16) for _ in range(4)]
        # (row, quad, element): element i of quad g is key g + 16·i, so that a thread's four are one access
        scores = cute.make_layout((TILE, GROUPS, QUAD), stride=(TILE, QUAD, 1))
        sP, sdS = [smem.allocate_tensor(Float32, scores, 16) for _ in range(2)]

        # 1. load K and V
        load_tile(mK, sK, kv_block, self.threads)
        load_tile(mV, sV, kv_block, self.threads)

        # 2. prologue
        patch, gradient = cute.make_layout((QUAD, self.rows_per_thread)), cute.make_layout((VECTOR, QUAD))
        rS, rdP = [cute.make_rmem_tensor(patch, Float32) for _ in range(2)]  # (key, row); then P and dS
        rdQ, rdK, rdV = [cute.make_rmem_tensor(gradient, Float32) for _ in range(3)]  # (column, row or key)
        rdK.fill(0.0)
        rdV.fill(0.0)
        first_block = kv_block if const_expr(self.causal) else 0  # no query before the block sees its keys

        # 3. main loop
        for q_block in range(first_block, cute.ceil_div(seqlen, TILE), unroll=1):
            cute.arch.sync_threads()  # Q, dO and dS of the tile before are read by slower warps
            load_tile(mQ, sQ, q_block, self.threads)
            load_tile(mdO, sdO, q_block, self.threads)
            cute.arch.sync_threads()

            # S = Q·Kᵀ and dP = dO·Vᵀ
            self.multiply_rows(sQ, sK, rS, first_row, quad)
            self.multiply_rows(sdO, sV, rdP, first_row, quad)

            # P = exp(S/√d − LSE) and dS = P∘(dP − D)
            for r in range_constexpr(self.rows_per_thread):
                row = first_row + self.row_stride * r
                q_row = q_block * TILE + row
                # With an LSE of ∞ a row past the end has P = 0 and dS = 0, whatever the keys.
                lse, row_dot = Float32.inf, Float32(0.0)
                if q_row < seqlen:
                    lse, row_dot = mLSE[q_row], mD[q_row]
                for i in range_constexpr(QUAD):
                    key = kv_block * TILE + quad + GROUPS * i
                    # Selected, not multiplied: the exponential of a hidden score may be ∞.
                    seen = key <= q_row if const_expr(self.causal) else key < seqlen
                    probability = cute.math.exp2((rS[i, r] * self.scale - lse) * LOG2_E, fastmath=True)
                    rS[i, r] = probability if seen else Float32(0.0)
                    rdP[i, r] = rS[i, r] * (rdP[i, r] - row_dot)
                cute.autovec_copy(rS[None, r], sP[row, quad, None])
                cute.autovec_copy(rdP[None, r], sdS[row, quad, None])
            cute.arch.sync_threads()  # P and dS are complete

            # dV += Pᵀ·dO and dK += dSᵀ·Q
            for rows in range(TILE // VECTOR, unroll=1):
                for r in range_constexpr(VECTOR):
                    row = rows * VECTOR + r
                    p, ds = sP[row, group, None].load(), sdS[row, group, None].load()
                    do, q = [widen(sX[row, chunk ^ r, None].load()) for sX in (sdO, sQ)]
                    for i in range_constexpr(QUAD):
                        for x in range_constexpr(VECTOR):
                            rdV[x, i] += p[i] * do[x]
                            rdK[x, i] += ds[i] * q[x]

            # dQ += dS·K
            rdQ.fill(0.0)
            for g in range(GROUPS, unroll=1):
                ds = [sdS[group + GROUPS * r, g, None].load() for r in range(QUAD)]
                for i in range_constexpr(QUAD):
                    k = widen(sK[g + GROUPS * i, swizzle(g, chunk), None].load())
                    for r in range_constexpr(QUAD):
                        for x in range_constexpr(VECTOR):
                            rdQ[x, r] += ds[r][i] * k[x]
            for r in range_constexpr(QUAD):
                q_row = q_block * TILE + group + GROUPS * r
                if q_row < seqlen:
                    for x in range_constexpr(VECTOR):
                        lanes = mdQ_sum[batch, head, q_row, x, None]  # (chunk,)
                        cute.arch.atomic_add((lanes.iterator + chunk).llvm_ptr, rdQ[x, r])

        # 4. epilogue
        for i in range_constexpr(QUAD):
            key = kv_block * TILE + group + GROUPS * i
            if key < seqlen:
                gdK, gdV = [cute.local_tile(mX[key, None], (VECTOR,), (chunk,)) for mX in (mdK, mdV)]
                gdK.store((rdK[None, i].load() * self.scale).to(mdK.element_type))
                gdV.store(rdV[None, i].load().to(mdV.element_type))

    @cute.jit
    def multiply_rows(self, sA, sB, rC, first_row, quad):
        """rC (key, row) = A·Bᵀ for this thread's rows of sA and its quad of keys of sB (row, chunk, 8)."""
        rC.fill(0.0)
        for chunk in range(self.chunks, unroll=1):
            # A group's members are 16 apart and a thread's rows a multiple of 8: each shares one swizzle.
            b = [widen(sB[quad + GROUPS * i, swizzle(quad, chunk), None].load()) for i in range(QUAD)]
            for r in range_constexpr(self.rows_per_thread):
                row = first_row + self.row_stride * r
                a = widen(sA[row, swizzle(first_row, chunk), None].load())
                for i in range_constexpr(QUAD):
                    for x in range_constexpr(VECTOR):
                        rC[i, r] += a[x] * b[i][x]

    @cute.kernel
    def postprocess(self, mdQ_sum, mdQ):
        """dQ = sum/√d, rounded."""
        tidx, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        group, chunk = tidx // self.chunks, tidx % self.chunks
        for i in range_constexpr(QUAD):
            row = block * TILE + group + GROUPS * i
            if row < mdQ.shape[2]:
                total = mdQ_sum[batch, head, row, None, chunk].load()  # (8,)
                gdQ = cute.local_tile(mdQ[batch, head, row, None], (VECTOR,), (chunk,))
                gdQ.store((total * self.scale).to(mdQ.element_type))


def supports(problem: Problem) -> str | None:
    return refuse_heads_on_grid(problem) or refuse_unless_plain(problem, "bwd")


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    # dQ's sum is (8, head_dim/8) within a row: lanes, which hold 8 columns each, add to neighbours.
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    return {"D": (rows, "float32"), "dQ_sum": ((*rows, VECTOR, problem.head_dim // VECTOR), "float32")}


def work(problem: Problem) -> list[Work]:
    kernel, d = FlashAttention2Backward(problem.head_dim, problem.causal), problem.head_dim
    blocks, heads = math.ceil(problem.seqlen_q / TILE), problem.batch * problem.heads
    return [
        Work(
            kernel="backward",
            unit=f"{TILE}×{TILE} tile",
            threads=kernel.threads,
            ctas=blocks * heads,
            passes=heads * (blocks * (blocks + 1) // 2 if problem.causal else blocks * blocks),
            trips=(d // VECTOR, d // VECTOR, TILE // VECTOR, GROUPS),
            ffma=5 * TILE * TILE * d // kernel.threads,
            hbm_bytes=problem.min_bytes / (heads * blocks * blocks),
            smem_bytes=kernel.smem_bytes,
        )
    ]


def compile_kernel(problem: Problem, **options: object) -> object:
    q, *others = fake_backward(problem.head_dim)
    kernel = FlashAttention2Backward(problem.head_dim, problem.causal, **options)
    scratch = (fake_fp32(q), fake_fp32(q, VECTOR, problem.head_dim // VECTOR))
    return compile_for_torch(kernel, q, *others, fake_fp32(q), *scratch)


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.dq.numel():
        scratch = (t.workspace["D"], t.workspace["dQ_sum"])
        compiled(t.q, t.k, t.v, t.o, t.do, t.dq, t.dk, t.dv, t.lse, *scratch)
