"""K7 for e4m3 V in rows, as other libraries keep it.

The idea          none of its own: what the transposed V of k7 costs a caller whose V is not.
What changes      against k7: V is transposed, permuted and given its rows of ones by a launch before.
What does not     k7.py, line for line.
Supports          as k7.
Where to read     `quantize.Relayout`.
"""

import math

import cutlass.cute as cute
from cutlass import Float32

from . import k7
from .contract import Compiled, LazyMaximum, Problem, Scratch, Stage, Tensors, Work
from .device.compiling import compile_for_torch, fake_fp32, fake_gqa, fake_rows
from .device.constants import GRID_YZ_MAX
from .device.fp8 import quantized_shapes
from .device.limits import refuse_unless_gqa
from .quantize import Relayout

STAGES = (
    Stage(
        "k7_rows",
        "FP8, of V in rows",
        "V is transposed and permuted by a launch before",
        "k7",
        direction="fp8_rows",
        model="flash_attention_lazy",
        rounds_p=True,
    ),
)


class ForwardOfRows:
    """Two launches: `Relayout` of mV8 (batch, kv_heads, seqlen, head_dim) into the scratch mVt8, and
    `k7.FP8Forward`."""

    def __init__(self, problem: Problem, **options: object):
        self.attention = k7.kernel_for(problem, **options)
        self.relayout = Relayout(problem.head_dim)

    @cute.jit
    def __call__(self, mQ8, mK8, mV8, mO, mLSE, mVt8, mFlushed, mCounter, mQs, mKs, mVs, scale, stream):
        self.relayout(mV8, mVt8, stream)
        self.attention(mQ8, mK8, mVt8, mO, mLSE, mFlushed, mCounter, mQs, mKs, mVs, scale, stream)


def supports(problem: Problem) -> str | None:
    refused = refuse_unless_gqa(problem, "fp8_rows")
    if refused is None and max(problem.batch, problem.kv_heads) > GRID_YZ_MAX:
        return f"takes at most {GRID_YZ_MAX} batches and key heads: they are grid dimensions y and z"
    return refused


def workspace(problem: Problem, **options: object) -> Scratch:
    return {"vt8": quantized_shapes(problem)["vt8"]} | k7.workspace(problem, **options)


def work(problem: Problem, **options: object) -> list[Work]:
    return k7.work(problem, **options)


def lazy_maximum(problem: Problem, **options: object) -> LazyMaximum:
    return k7.lazy_maximum(problem, **options)


def compile_kernel(problem: Problem, **options: object) -> object:
    kernel = ForwardOfRows(problem, **options)
    q, k, _, o = fake_gqa(problem.head_dim, problem.dtype)
    q8, k8, vt8 = k7.fake_operands(q, k)
    v8 = fake_rows(k8.element_type, k8.shape)
    scratch = vt8, *k7.fake_scratch(problem.head_dim)
    scales = [fake_fp32(k, last=cute.sym_int()) for _ in range(3)]
    return compile_for_torch(kernel, q8, k8, v8, o, fake_fp32(q), *scratch, *scales, Float32(1.0))


def run_kernel(compiled: Compiled, t: Tensors) -> None:
    if t.o.numel():
        scale = 1.0 / math.sqrt(t.q.shape[3]) if t.softmax_scale is None else t.softmax_scale
        compiled(t.q, t.k, t.v, t.o, t.lse, *t.workspace.values(), *t.scales, scale)
