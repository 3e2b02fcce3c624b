"""K7 for e4m3 V in rows, as other libraries keep it.

The idea          none of its own: what the transposed V of k7 costs a caller whose V is not.
What changes      against k7: V is transposed, permuted and given its rows of ones by a launch before, which
                  also looks at the scales.
What does not     k7.py, line for line.
Supports          as k7.
Where to read     `quantize_rows.RelayoutAndCheck`.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor

from . import k7
from .calls_fp8 import of_rows, refuse_fp8_rows, run_fp8
from .contract import Compiled, Problem, Scratch, Stage, Tensors
from .device.compiling import compile_for_torch, fake_fp32, fake_gqa, fake_rows
from .quantize_rows import RelayoutAndCheck

STAGES = (
    Stage(
        "k7_rows",
        "FP8, of V in rows",
        "V is transposed and permuted, and scales are looked at, by a launch before",
        "k7",
        direction="fp8_rows",
        model="flash_attention_lazy",
        rounds_p=True,
    ),
)


class ForwardOfRows:
    """Two launches: `RelayoutAndCheck` of mV8 (batch, kv_heads, seqlen, head_dim) into the scratch mVt8, and
    of scales that nobody has looked at, fp32 (batch, kv_heads) with any strides, into mScales (3, batch,
    kv_heads, 1), where what is no scale is NaN; then `k7.FP8Forward`."""

    def __init__(self, problem: Problem, **options: object):
        self.attention = k7.kernel_for(problem, **options)
        self.relayout = RelayoutAndCheck(problem.head_dim)

    @cute.jit
    def __call__(
        self, mQ8, mK8, mV8, mO, mLSE, mVt8, mScales, mFlushed, mCounter, mQs, mKs, mVs, scale, stream
    ):  # fmt: skip
        self.relayout(mV8, mVt8, mQs, mKs, mVs, mScales, stream)
        scales = [mScales[i, None, None, None] for i in range(3)]
        self.attention(mQ8, mK8, mVt8, mO, mLSE, mFlushed, mCounter, *scales, scale, stream)


supports = refuse_fp8_rows
work, lazy_maximum = k7.work, k7.lazy_maximum


def workspace(problem: Problem, **options: object) -> Scratch:
    return of_rows(problem) | k7.workspace(problem, **options)


def compile_kernel(problem: Problem, **options: object) -> object:
    kernel = ForwardOfRows(problem, **options)
    q, k, _, o = fake_gqa(problem.head_dim, problem.dtype)
    q8, k8, vt8 = k7.fake_operands(q, k)
    v8 = fake_rows(k8.element_type, k8.shape)
    heads = k.shape[:2]
    scratch = vt8, fake_rows(Float32, (3, *heads, 1), 1), *k7.fake_scratch(problem.head_dim)
    strides = [(cute.sym_int64(), cute.sym_int64()) for _ in range(3)]
    scales = [make_fake_tensor(Float32, heads, x, assumed_align=4) for x in strides]
    return compile_for_torch(kernel, q8, k8, v8, o, fake_fp32(q), *scratch, *scales, Float32(1.0))


def run_kernel(compiled: Compiled, t: Tensors) -> None:
    run_fp8(compiled, t, [x[..., 0] for x in t.scales])
