"""K8: FP8 with incoherent processing.

The idea          A product of two outliers of one channel is most of its score, and has the rounding of two
                  codes. Signs drawn at random and a Walsh–Hadamard transform over head_dim spread both over
                  their rows: the score is then a sum of head_dim products whose roundings average out. They
                  are orthogonal, so Q·Kᵀ stays what it was.
What changes      against k7: 16-bit Q, K and V come in. The kernel that quantises them rotates Q and K,
                  finds a scale for every 64 rows and lays V out as P·V reads it, in one pass over memory.
What does not     k7's kernel, with a scale for every 64 queries and 64 keys.
Supports          as k7; any 16-bit inputs.
Where to read     quantize.py; `device.block_scales.BlockScales.put`.
Note              notes/k8.md: what the rotation is worth, and on which inputs.
"""

import cutlass.cute as cute
from cutlass import Float32, const_expr

from . import k7
from .calls_fp8 import of_cast, refuse_fp8_cast, run_fp8
from .contract import Compiled, LazyMaximum, Problem, Scratch, Stage, Tensors, Work
from .device.compiling import compile_for_torch, fake_fp32, fake_gqa, fake_rows
from .device.fp8 import E4M3_MAX, LARGEST_IN_HALF, ROTATED, UNROTATED
from .quantize import quantizer
from .quantize_rows import Casting

STAGES = (
    Stage(
        "k8",
        "FP8 with incoherent processing",
        "random signs and a Hadamard transform of Q and K, a scale for 64 rows, in one quantising pass",
        "k7",
        direction="fp8_cast",
        model="flash_attention_lazy",
        rounds_p=True,
    ),
)


class IncoherentForward:
    """Two launches: the quantising kernel, then `k7.FP8Forward` on what it wrote.

    mQ, mK, mV, mO   (batch, heads, seqlen, head_dim), one 16-bit type
    mQ8 … mVe        scratch, as `fp8.quantized_shapes` lists it
    mSigns           ±1 in fp32 (head_dim,), read if Q and K are rotated
    """

    def __init__(self, problem: Problem, rotate: bool = True, **options: object):
        self.attention = k7.kernel_for(problem, block_scales=True, **options)
        codes = LARGEST_IN_HALF[problem.head_dim] if options.get("in_half") else E4M3_MAX
        casting = Casting(rotate=rotate, largest_code=codes)
        self.quantize = quantizer(problem.head_dim, self.attention.dtype, casting)

    @cute.jit
    def __call__(
        self, mQ, mK, mV, mO, mLSE, mQ8, mK8, mVt8, mQs, mKs, mVe, mFlushed, mCounter, mSigns, scale, stream
    ):  # fmt: skip
        signs = mSigns if const_expr(self.quantize.rotate) else None
        self.quantize(mQ, mK, mV, mQ8, mK8, mVt8, mQs, mKs, mVe, signs, None, None, stream)
        self.attention(mQ8, mK8, mVt8, mO, mLSE, mFlushed, mCounter, mQs, mKs, mVe, scale, stream)


supports = refuse_fp8_cast


def workspace(problem: Problem, rotate: bool = True, **options: object) -> Scratch:
    return of_cast(problem) | k7.workspace(problem, **options)


def work(problem: Problem, rotate: bool = True, **options: object) -> list[Work]:
    return k7.work(problem, block_scales=True, **options)


def lazy_maximum(problem: Problem, rotate: bool = True, **options: object) -> LazyMaximum:
    quantized = ROTATED if rotate else UNROTATED
    return k7.lazy_maximum(problem, **options)._replace(quantized=quantized)


def compile_kernel(problem: Problem, rotate: bool = True, **options: object) -> object:
    kernel, d = IncoherentForward(problem, rotate, **options), problem.head_dim
    q, k, v, o = fake_gqa(d, problem.dtype)
    codes = k7.fake_operands(q, k)
    scales = [fake_fp32(x, last=cute.sym_int()) for x in (q, k, k)]
    given = *scales, *k7.fake_scratch(d), fake_rows(Float32, (d,)), Float32(1.0)
    return compile_for_torch(kernel, q, k, v, o, fake_fp32(q), *codes, *given)


def run_kernel(compiled: Compiled, t: Tensors) -> None:
    run_fp8(compiled, t, (t.signs,))


VARIANTS = {"rotated": {}, "not rotated": {"rotate": False}}
