"""K1: attention as its definition reads, three kernels with S in global memory.

The idea          S = Q·Kᵀ/√d, P = softmax(S), O = P·V, one kernel each and one thread per result.
What changes      nothing comes before: this is the baseline whose bytes every later stage sets out to save.
What does not     fp32 accumulation, fp32 softmax, bf16 in and out: the same in every stage up to FP8.
Supports          bf16, head_dim 64 and 128, any length that S (fp32, batch·heads·N²) leaves room for; no GQA.
"""

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr

from .contract import Problem, Stage, Tensors, Work
from .device.compiling import compile_for_torch, fake_fp32, fake_qkvo, refuse_unless_plain
from .device.constants import GRID_YZ_MAX, LN_2, LOG2_E

STAGES = (
    Stage(
        id="k1",
        title="naive: three kernels, S in global memory",
        adds="the definition of attention, one thread per score, per row and per output",
        before=None,
        model="safe_softmax_attention",
    ),
)

BLOCK = 16  # score and output kernels: 16×16 threads, one result each
ROW_THREADS = 256  # softmax kernel: one row each
UNROLL = 8  # loop iterations the compiler may have in flight; naive does not mean one load at a time


class NaiveAttention:
    def __init__(self, head_dim: int, causal: bool, block: int = BLOCK, row_threads: int = ROW_THREADS):
        self.head_dim, self.causal, self.block, self.row_threads = head_dim, causal, block, row_threads
        self.scale = 1.0 / math.sqrt(head_dim)

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, mS, stream):
        batch, heads, seqlen, head_dim = mQ.shape
        blocks = cute.ceil_div(seqlen, self.block)
        row_blocks = cute.ceil_div(batch * heads * seqlen, self.row_threads)
        square = (self.block, self.block, 1)
        self.score(mQ, mK, mS).launch(grid=(blocks, blocks, batch * heads), block=square, stream=stream)
        self.softmax(mS, mLSE).launch(grid=(row_blocks, 1, 1), block=(self.row_threads, 1, 1), stream=stream)
        self.output(mS, mV, mO).launch(
            grid=(head_dim // self.block, blocks, batch * heads), block=square, stream=stream
        )

    # 1. S = Q·Kᵀ/√d, −∞ where the mask hides
    @cute.kernel
    def score(self, mQ, mK, mS):
        tx, ty, _ = cute.arch.thread_idx()
        bx, by, bz = cute.arch.block_idx()
        batch, head = bz // mQ.shape[1], bz % mQ.shape[1]
        i, j = by * self.block + ty, bx * self.block + tx
        if i < mQ.shape[2] and j < mK.shape[2]:
            q, k = mQ[batch, head, i, None], mK[batch, head, j, None]  # (head_dim,)
            dot = Float32(0.0)
            for x in range(self.head_dim, unroll=UNROLL):
                dot += q[x].to(Float32) * k[x].to(Float32)
            score = dot * self.scale
            if const_expr(self.causal):
                if j > i:
                    score = -Float32.inf
            mS[batch, head, i, j] = score

    # 2. P = softmax(S), in place: three passes over the row
    @cute.kernel
    def softmax(self, mS, mLSE):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        batches, heads, seqlen, _ = mS.shape
        row = bidx * self.row_threads + tidx
        if row < batches * heads * seqlen:
            head_index, i = row // seqlen, row % seqlen
            batch, head = head_index // heads, head_index % heads
            s = mS[batch, head, i, None]  # (seqlen,)
            row_max = -Float32.inf
            for j in range(seqlen, unroll=UNROLL):
                row_max = cute.arch.fmax(row_max, s[j])
            row_sum = Float32(0.0)
            for j in range(seqlen, unroll=UNROLL):
                row_sum += cute.math.exp2((s[j] - row_max) * LOG2_E, fastmath=True)
            inverse = cute.arch.rcp_approx(row_sum)
            for j in range(seqlen, unroll=UNROLL):
                s[j] = cute.math.exp2((s[j] - row_max) * LOG2_E, fastmath=True) * inverse
            mLSE[batch, head, i] = row_max + cute.math.log2(row_sum, fastmath=True) * LN_2

    # 3. O = P·V
    @cute.kernel
    def output(self, mS, mV, mO):
        tx, ty, _ = cute.arch.thread_idx()
        bx, by, bz = cute.arch.block_idx()
        batch, head = bz // mV.shape[1], bz % mV.shape[1]
        i, x = by * self.block + ty, bx * self.block + tx
        if i < mO.shape[2]:
            p, v = mS[batch, head, i, None], mV[batch, head, None, x]  # (seqlen,)
            out = Float32(0.0)
            for j in range(mV.shape[2], unroll=UNROLL):
                out += p[j] * v[j].to(Float32)
            mO[batch, head, i, x] = out.to(mO.element_type)


def supports(problem: Problem) -> str | None:
    if problem.batch * problem.heads > GRID_YZ_MAX:
        return f"takes at most {GRID_YZ_MAX} batch·heads: they are grid dimension z"
    if problem.seqlen_q > GRID_YZ_MAX * BLOCK:
        return f"takes sequences of at most {GRID_YZ_MAX * BLOCK}: their blocks are grid dimension y"
    return refuse_unless_plain(problem)


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"S": ((problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_kv), "float32")}


def work(problem: Problem) -> list[Work]:
    kernel = NaiveAttention(problem.head_dim, problem.causal)
    n, d, block, rows = problem.seqlen_q, problem.head_dim, kernel.block, kernel.row_threads
    heads, blocks = problem.batch * problem.heads, math.ceil(n / kernel.block)
    row_ctas = math.ceil(heads * n / rows)
    fp32 = 4
    return [
        Work(
            kernel="score",
            unit=f"{block}×{block} block of S",
            threads=block * block,
            ctas=heads * blocks * blocks,
            passes=heads * blocks * blocks,
            trips=(d // UNROLL,),
            ffma=d,
            hbm_bytes=block * block * fp32,
        ),
        Work(
            kernel="softmax",
            unit=f"{UNROLL} columns of {rows} rows, one of three passes",
            threads=rows,
            ctas=row_ctas,
            passes=row_ctas * 3 * n // UNROLL,
            trips=(1,),
            ffma=0,
            hbm_bytes=rows * UNROLL * fp32 * 4 / 3,  # three reads and one write in three passes
        ),
        Work(
            kernel="output",
            unit=f"{UNROLL} keys of a {block}×{block} block of O",
            threads=block * block,
            ctas=heads * blocks * d // block,
            passes=heads * blocks * (d // block) * n // UNROLL,
            trips=(1,),
            ffma=UNROLL,
            hbm_bytes=block * UNROLL * fp32 * block / d,  # the d/16 blocks of a row share P through L2
        ),
    ]


def compile_kernel(problem: Problem, **options: object) -> object:
    q, k, v, o = fake_qkvo(problem.head_dim)
    kernel = NaiveAttention(problem.head_dim, problem.causal, **options)
    return compile_for_torch(kernel, q, k, v, o, fake_fp32(q), fake_fp32(q, q.shape[2]))


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.o.numel():
        compiled(t.q, t.k, t.v, t.o, t.lse, t.workspace["S"])
