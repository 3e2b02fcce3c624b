"""BWD1: the backward pass as its formulas read, six kernels with P and dS in global memory.

The idea          P = exp(Q·Kᵀ/√d − LSE), dV = Pᵀ·dO, dS = P∘(dO·Vᵀ − D), dQ = dS·K/√d, dK = dSᵀ·Q/√d: one
                  kernel for each of the five products, one for D = rowsum(dO∘O), one thread per result.
What changes      nothing comes before: this is the baseline of the backward stages, as k1 is of the forward
                  ones. No softmax is left in it: the forward pass's LSE turns a score into its probability.
What does not     fp32 accumulation, fp32 P and dS, bf16 in and out; the loops, blocks and threads are k1's.
Supports          bf16, head_dim 64 and 128, any length that P (fp32, batch·heads·N²) leaves room for; no GQA.
"""

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr

from .contract import Problem, Stage, Tensors, Work
from .device.compiling import compile_for_torch, fake_backward, fake_fp32, refuse_unless_plain
from .device.constants import GRID_YZ_MAX, LOG2_E

STAGES = (
    Stage(
        id="bwd1",
        title="naive: six kernels, P and dS in global memory",
        adds="the gradients' formulas, one thread per probability, per dS and per gradient",
        before=None,
        direction="bwd",
        model="flash_attention_2_backward",
    ),
)

BLOCK = 16  # all kernels but row_dot: 16×16 threads, one result each
ROW_THREADS = 256  # row_dot: one row each
UNROLL = 8  # loop iterations the compiler may have in flight, as in k1


@cute.jit
def dot(x: cute.Tensor, y: cute.Tensor):
    """Σ x[i]·y[i] in fp32; x and y are (length,), bf16 or fp32, with any stride."""
    total = Float32(0.0)
    for i in range(cute.size(x), unroll=UNROLL):
        total += x[i].to(Float32) * y[i].to(Float32)
    return total


class NaiveBackward:
    def __init__(self, head_dim: int, causal: bool, block: int = BLOCK, row_threads: int = ROW_THREADS):
        self.head_dim, self.causal, self.block, self.row_threads = head_dim, causal, block, row_threads
        self.scale = 1.0 / math.sqrt(head_dim)

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mdO, mdQ, mdK, mdV, mLSE, mD, mP, stream):
        batch, heads, seqlen, head_dim = mQ.shape
        blocks = cute.ceil_div(seqlen, self.block)
        row_blocks = cute.ceil_div(batch * heads * seqlen, self.row_threads)
        square = (self.block, self.block, 1)
        rows = {"grid": (row_blocks, 1, 1), "block": (self.row_threads, 1, 1), "stream": stream}
        scores = {"grid": (blocks, blocks, batch * heads), "block": square, "stream": stream}
        outputs = {**scores, "grid": (head_dim // self.block, blocks, batch * heads)}
        self.row_dot(mdO, mO, mD).launch(**rows)
        self.probability(mQ, mK, mLSE, mP).launch(**scores)
        self.grad_v(mP, mdO, mdV).launch(**outputs)
        self.grad_score(mdO, mV, mD, mP).launch(**scores)  # P is not needed any more: dS takes its place
        self.grad_q(mP, mK, mdQ).launch(**outputs)
        self.grad_k(mP, mQ, mdK).launch(**outputs)

    @cute.jit
    def my_place(self, heads):
        """(batch, head, row, column) of this thread's result."""
        tx, ty, _ = cute.arch.thread_idx()
        bx, by, bz = cute.arch.block_idx()
        return bz // heads, bz % heads, by * self.block + ty, bx * self.block + tx

    # 1. D = rowsum(dO∘O)
    @cute.kernel
    def row_dot(self, mdO, mO, mD):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        batches, heads, seqlen, _ = mO.shape
        row = bidx * self.row_threads + tidx
        if row < batches * heads * seqlen:
            head_index, i = row // seqlen, row % seqlen
            batch, head = head_index // heads, head_index % heads
            mD[batch, head, i] = dot(mdO[batch, head, i, None], mO[batch, head, i, None])

    # 2. P = exp(Q·Kᵀ/√d − LSE), 0 where the mask hides
    @cute.kernel
    def probability(self, mQ, mK, mLSE, mP):
        batch, head, i, j = self.my_place(mQ.shape[1])
        if i < mQ.shape[2] and j < mK.shape[2]:
            score = dot(mQ[batch, head, i, None], mK[batch, head, j, None]) * self.scale
            p = cute.math.exp2((score - mLSE[batch, head, i]) * LOG2_E, fastmath=True)
            if const_expr(self.causal):
                if j > i:
                    p = Float32(0.0)  # selected, not multiplied: a hidden score's exponential may be ∞
            mP[batch, head, i, j] = p

    # 3. dV = Pᵀ·dO
    @cute.kernel
    def grad_v(self, mP, mdO, mdV):
        batch, head, j, x = self.my_place(mdV.shape[1])
        if j < mdV.shape[2]:
            out = dot(mP[batch, head, None, j], mdO[batch, head, None, x])
            mdV[batch, head, j, x] = out.to(mdV.element_type)

    # 4. dS = P∘(dO·Vᵀ − D), in P's place
    @cute.kernel
    def grad_score(self, mdO, mV, mD, mP):
        batch, head, i, j = self.my_place(mdO.shape[1])
        if i < mdO.shape[2] and j < mV.shape[2]:
            dp = dot(mdO[batch, head, i, None], mV[batch, head, j, None])
            mP[batch, head, i, j] = mP[batch, head, i, j] * (dp - mD[batch, head, i])

    # 5. dQ = dS·K/√d
    @cute.kernel
    def grad_q(self, mdS, mK, mdQ):
        batch, head, i, x = self.my_place(mdQ.shape[1])
        if i < mdQ.shape[2]:
            out = dot(mdS[batch, head, i, None], mK[batch, head, None, x]) * self.scale
            mdQ[batch, head, i, x] = out.to(mdQ.element_type)

    # 6. dK = dSᵀ·Q/√d
    @cute.kernel
    def grad_k(self, mdS, mQ, mdK):
        batch, head, j, x = self.my_place(mdK.shape[1])
        if j < mdK.shape[2]:
            out = dot(mdS[batch, head, None, j], mQ[batch, head, None, x]) * self.scale
            mdK[batch, head, j, x] = out.to(mdK.element_type)


def supports(problem: Problem) -> str | None:
    if problem.batch * problem.heads > GRID_YZ_MAX:
        return f"takes at most {GRID_YZ_MAX} batch·heads: they are grid dimension z"
    if problem.seqlen_q > GRID_YZ_MAX * BLOCK:
        return f"takes sequences of at most {GRID_YZ_MAX * BLOCK}: their blocks are grid dimension y"
    return refuse_unless_plain(problem, "bwd")


def workspace(problem: Problem, **options: object) -> dict[str, tuple[tuple[int, ...], str]]:
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    return {"D": (rows, "float32"), "P": ((*rows, problem.seqlen_kv), "float32")}


def work(problem: Problem) -> list[Work]:
    kernel = NaiveBackward(problem.head_dim, problem.causal)
    n, d, block = problem.seqlen_q, problem.head_dim, kernel.block
    heads, blocks = problem.batch * problem.heads, math.ceil(n / kernel.block)
    fp32 = 4

    def scores(name: str, accesses: int) -> Work:
        return Work(
            kernel=name,
            unit=f"{block}×{block} block of {'P' if name == 'probability' else 'dS'}",
            threads=block * block,
            ctas=heads * blocks * blocks,
            passes=heads * blocks * blocks,
            trips=(d // UNROLL,),
            ffma=d,
            hbm_bytes=block * block * fp32 * accesses,
        )

    def outputs(name: str) -> Work:
        return Work(
            kernel=name,
            unit=f"{UNROLL} terms of a {block}×{block} block of d{name[-1].upper()}",
            threads=block * block,
            ctas=heads * blocks * d // block,
            passes=heads * blocks * (d // block) * n // UNROLL,
            trips=(1,),
            ffma=UNROLL,
            hbm_bytes=block * UNROLL * fp32 * block / d,  # the d/16 blocks of a row share P or dS through L2
        )

    # row_dot is left out: it is 1/N of a product.
    return [
        scores("probability", 1),
        outputs("grad_v"),
        scores("grad_score", 2),
        outputs("grad_q"),
        outputs("grad_k"),
    ]


def compile_kernel(problem: Problem, **options: object) -> object:
    tensors = fake_backward(problem.head_dim)
    q = tensors[0]
    kernel = NaiveBackward(problem.head_dim, problem.causal, **options)
    return compile_for_torch(kernel, *tensors, fake_fp32(q), fake_fp32(q), fake_fp32(q, q.shape[2]))


def run_kernel(compiled: object, t: Tensors) -> None:
    if t.dq.numel():
        scratch = (t.workspace["D"], t.workspace["P"])
        compiled(t.q, t.k, t.v, t.o, t.do, t.dq, t.dk, t.dv, t.lse, *scratch)
