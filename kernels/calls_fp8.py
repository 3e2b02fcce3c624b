"""What a caller of k7, k7_rows, k8 and the kernel that quantises must know to launch them: what they take,
the scratch they need, the order of their arguments. Imports no compiler, as `calls`."""

import math
from collections.abc import Sequence

import torch

from .contract import Compiled, Problem, Scratch, Tensors
from .device.constants import GRID_YZ_MAX, SMS
from .device.fp8 import quantized_shapes
from .device.limits import HEAD_DIMS, refuse_policies, refuse_unless_gqa

CONSUMERS = {64: 3, 128: 2, 256: 2}  # warpgroups of 64 queries of a CTA of k7, by head_dim
QUERIES = 64
BLOCK_SCALES = {"block_scales": True}  # k7's option for what the quantising kernel writes
PARTS = ("qkv", "q", "kv")  # of a launch of the quantising kernel, of those that it can


def quantize_options(parts: str, rotate: bool, rope: bool) -> dict[str, object]:
    """quantize's, for these parts."""
    return {"parts": parts, "rotate": rotate, "rope": rope}


def refuse_fp8(problem: Problem) -> str | None:
    """Why k7 refuses the problem, or None."""
    return refuse_unless_gqa(problem, "fp8") or refuse_policies(problem)


def refuse_fp8_rows(problem: Problem) -> str | None:
    """Why k7_rows refuses the problem, or None."""
    refused = refuse_unless_gqa(problem, "fp8_rows") or refuse_policies(problem)
    if refused is None and max(problem.batch, problem.kv_heads) > GRID_YZ_MAX:
        return f"takes at most {GRID_YZ_MAX} batches and key heads: they are grid dimensions y and z"
    return refused


def refuse_fp8_cast(problem: Problem) -> str | None:
    """Why k8 refuses the problem, or None."""
    return (
        refuse_unless_gqa(problem, "fp8_cast") or refuse_policies(problem) or refuse_quantize("qkv", problem)
    )


def refuse_quantize(parts: str, problem: Problem) -> str | None:
    """Why the quantising kernel refuses these parts of a problem, or None."""
    if problem.head_dim not in HEAD_DIMS:
        return f"takes head_dim 64, 128 or 256, not {problem.head_dim}"
    heads = problem.heads * parts.count("q") + problem.kv_heads * (parts.count("k") + parts.count("v"))
    if max(problem.batch, heads) > GRID_YZ_MAX:
        return f"takes at most {GRID_YZ_MAX} batches, and as many heads of {', '.join(parts)} together"
    return None


def fp8_scratch(problem: Problem, ctas: int = SMS, consumers: int | None = None) -> Scratch:
    """k7's, of a launch of so many CTAs of so many consumers, at most. No two launches at once may share any
    of it."""
    consumers = consumers or CONSUMERS[problem.head_dim]
    return {
        "flushed": ((ctas * consumers, QUERIES * problem.head_dim), "float32"),
        "counter": ((1,), "int32"),  # of tiles taken, 0 again after each launch
    }


def of_rows(problem: Problem) -> Scratch:
    """k7_rows' besides, before k7's."""
    scales = (3, problem.batch, problem.kv_heads, 1), "float32"
    return {"vt8": quantized_shapes(problem)["vt8"], "scales": scales}


def of_cast(problem: Problem) -> Scratch:
    """k8's besides, before k7's."""
    return quantized_shapes(problem)


def launch_fp8(compiled: Compiled, q, k, v, o, lse, scratch, given, softmax_scale: float) -> None:
    """`scratch` as listed here. `given` are the scales of q, k and v, as `k7.FP8Forward` has them or, of
    k7_rows, fp32 (batch, kv_heads); of k8 the signs, fp32 (head_dim,)."""
    compiled(q, k, v, o, lse, *scratch, *given, softmax_scale)


def run_fp8(compiled: Compiled, t: Tensors, given: Sequence[torch.Tensor]) -> None:
    """`launch_fp8` of a stage's tensors."""
    if t.o.numel():
        scale = 1.0 / math.sqrt(t.q.shape[3]) if t.softmax_scale is None else t.softmax_scale
        launch_fp8(compiled, t.q, t.k, t.v, t.o, t.lse, t.workspace.values(), given, scale)
