"""What a caller of k7 and of the kernels that quantise must know to launch them: what they take, the scratch
they need, the order of their arguments. Imports no compiler, as `calls`."""

from .contract import Compiled, Problem, Scratch
from .device.constants import GRID_YZ_MAX, SMS
from .device.limits import HEAD_DIMS, refuse_unless_gqa

CONSUMERS = {64: 3, 128: 2, 256: 2}  # warpgroups of 64 queries of a CTA of k7, by head_dim
QUERIES = 64
BLOCK_SCALES = {"block_scales": True}  # k7's option for what the quantising kernel writes
RELAYOUT = {"relayout": True, "descales": True}  # quantize's, for e4m3 V in rows
PARTS = ("qkv", "q", "kv")  # of a launch of the quantising kernel, of those that it can


def refuse_fp8(problem: Problem) -> str | None:
    """Why k7 refuses the problem, or None."""
    return refuse_unless_gqa(problem, "fp8")


def quantize_options(parts: str, rotate: bool, rope: bool) -> dict[str, object]:
    """quantize's, for these parts."""
    return {"parts": parts, "rotate": rotate, "rope": rope}


def refuse_quantize(parts: str, problem: Problem) -> str | None:
    """Why the quantising kernel refuses these parts of a problem, or None."""
    if problem.head_dim not in HEAD_DIMS:
        return f"takes head_dim 64, 128 or 256, not {problem.head_dim}"
    heads = problem.heads * parts.count("q") + problem.kv_heads * (parts.count("k") + parts.count("v"))
    if max(problem.batch, heads) > GRID_YZ_MAX:
        return f"takes at most {GRID_YZ_MAX} batches, and heads of {', '.join(parts)} together"
    return None


def fp8_scratch(problem: Problem, ctas: int = SMS, consumers: int | None = None) -> Scratch:
    """Of a launch of so many CTAs of so many consumers, at most. No two launches at once may share any of
    it."""
    consumers = consumers or CONSUMERS[problem.head_dim]
    return {
        "flushed": ((ctas * consumers, QUERIES * problem.head_dim), "float32"),
        "counter": ((1,), "int32"),  # of tiles taken, 0 again after each launch
    }


def launch_fp8(compiled: Compiled, q8, k8, vt8, o, lse, scratch, scales, softmax_scale: float) -> None:
    """`scratch` as `fp8_scratch` lists it; `scales` of q, k and v as `k7.FP8Forward` has them."""
    compiled(q8, k8, vt8, o, lse, *scratch, *scales, softmax_scale)
