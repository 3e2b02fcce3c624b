"""`production`, in FP8: a call costs a look-up, its outputs and one launch, or two where V comes in rows."""

import functools
import random
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from . import production, tuned
from .checks import (
    E4M3,
    VECTOR_BYTES,
    check_descale,
    check_device,
    check_layouts,
    check_scale,
    fp8_problem_of,
    quantized_problem_of,
    quantizing_problem_of,
)
from .kernels import calls_fp8
from .kernels.contract import Problem
from .kernels.device.constants import GRID_YZ_MAX
from .kernels.device.fp8 import quantized_shapes
from .launch import FP8, QUANTIZE, kernel_for, sms_option
from .production import WHOLE, Dense, Launch, Part

Result = TypeVar("Result")
Pair = tuple[torch.Tensor, torch.Tensor]


class Plan(NamedTuple):
    """What inputs of one kind are computed with. `launch` is None where there is nothing to compute."""

    launch: Launch | None
    outputs: tuple[Dense, ...]  # o and lse
    part: Part  # its scratch
    softmax_scale: float
    relayout: Launch | None = None  # of V in rows
    relaid: tuple[Dense, ...] = ()  # Vt8, and the scales of q, k and v


class QuantizingPlan(NamedTuple):
    """The same for `quantize`."""

    launch: Launch | None
    takes_q: bool
    takes_kv: bool
    outputs: tuple[Dense, ...]  # of q: codes and scales; then of k; then of v
    signs: torch.Tensor | None


_plans: dict[tuple[object, ...], Plan | QuantizingPlan] = {}
_ones: dict[tuple[int, int], torch.Tensor] = {}


def quantize(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    seed: int | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Codes and scales of q, of k and of v, of those that are there, on PyTorch's current stream. Q and K are
    rotated by the signs of `seed`, if there is one.

    Raises TypeError or ValueError before anything is launched.
    """
    given = q, k, v, cos, sin
    kinds = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given)
    plan = _plans.get((kinds, seed))
    if plan is None:
        plan = _plan_quantize(*given, seed)
        production._keep(_plans, production.KINDS_MAX, (kinds, seed), plan)
    device = (k if q is None else q).device
    return _on(device, lambda: _quantize(plan, *given), lambda: _plan_quantize(*given, seed))


def _quantize(plan: QuantizingPlan, q, k, v, cos, sin) -> list[torch.Tensor]:
    outputs = [production.empty(*x) for x in plan.outputs]
    if plan.launch is None:
        return outputs
    q8, q_scale = outputs[:2] if q is not None else (None, None)
    k8, k_scale, vt8, v_exponent = outputs[-4:] if k is not None else (None,) * 4
    if not plan.takes_q:
        q = q8 = q_scale = None
    if not plan.takes_kv:
        k = v = k8 = k_scale = vt8 = v_exponent = None
    plan.launch(q, k, v, q8, k8, vt8, q_scale, k_scale, v_exponent, plan.signs, cos, sin)
    return outputs


def forward_quantized(
    q8: torch.Tensor,
    k8: torch.Tensor,
    vt8: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_exponent: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    dtype: torch.dtype,
) -> Pair:
    """o and lse of what `quantize` gave, on PyTorch's current stream.

    Raises TypeError or ValueError before anything is launched.
    """
    # Of the rest (types, devices, alignment) the launch makes sure.
    scales = q_scale, k_scale, v_exponent
    options = softmax_scale, causal, top_left, dtype
    device = q8.device
    kind = (
        *(q8.shape, k8.shape, vt8.shape, q_scale.shape, k_scale.shape, v_exponent.shape),
        *(q8.stride(), k8.stride(), vt8.stride(), device, options),
    )
    plan_anew = lambda: _plan_quantized(q8, k8, vt8, *scales, *options)
    plan = _plans.get(kind)
    if plan is None:
        plan = production._keep(_plans, production.KINDS_MAX, kind, plan_anew())
    return _on(device, lambda: _attend(plan, q8, k8, vt8, scales, device), plan_anew)


def forward_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    dtype: torch.dtype,
) -> Pair:
    """o and lse of e4m3 tensors in rows, on PyTorch's current stream: V is laid out anew first.

    Raises TypeError or ValueError before anything is launched.
    """
    # Two launches: the second must not find what the first cannot.
    descales = q_descale, k_descale, v_descale
    options = softmax_scale, causal, top_left, dtype
    device = q.device
    kind = (
        *((x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v)),
        *(None if x is None else (x.shape, x.dtype, x.device) for x in descales),
        options,
    )
    plan_anew = lambda: _plan_rows(q, k, v, *descales, *options)
    plan = _plans.get(kind)
    if plan is None or (q.data_ptr() | k.data_ptr()) % VECTOR_BYTES:
        plan = production._keep(_plans, production.KINDS_MAX, kind, plan_anew())
    return _on(device, lambda: _lay_and_attend(plan, q, k, v, descales, device), plan_anew)


def _lay_and_attend(plan: Plan, q, k, v, descales, device: torch.device) -> Pair:
    if plan.launch is None:
        return _attend(plan, q, k, None, (), device)
    vt8, scales = (production.empty(*x) for x in plan.relaid)
    heads = k.shape[:2]
    given = ((_one(device) if x is None else x).expand(heads) for x in descales)
    plan.relayout(v, vt8, *given, scales)
    return _attend(plan, q, k, vt8, scales.unbind(), device)


def _attend(plan: Plan, q8, k8, vt8, scales, device: torch.device) -> Pair:
    o, lse = (production.empty(*x) for x in plan.outputs)
    if plan.launch is not None:
        scratch = production._scratch(plan.part, device)
        calls_fp8.launch_fp8(plan.launch, q8, k8, vt8, o, lse, scratch, scales, plan.softmax_scale)
    return o, lse


def _on(device: torch.device, run: Callable[[], Result], plan_anew: Callable[[], object]) -> Result:
    """`run()` with the device current. What a launch refuses, `plan_anew` names."""
    try:
        if device.index == production.current_device():
            return run()
        with torch.cuda.device(device):
            return run()
    except Exception:
        plan_anew()
        raise


# ---- plans ------------------------------------------------------------------------------------------------


def _plan_quantize(q, k, v, cos, sin, seed: int | None) -> QuantizingPlan:
    problem = quantizing_problem_of(q, k, v, cos, sin)
    named = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    parts = "".join(name for name, x in named.items() if x.numel())
    if reason := calls_fp8.refuse_quantize("".join(named), problem):
        raise ValueError(f"{QUANTIZE} {reason}")
    first = next(iter(named.values()))
    check_device(QUANTIZE, first)
    check_layouts(**named)
    shapes = quantized_shapes(problem)
    outputs: list[Dense] = []
    for name, scale in (("q", "q_scale"), ("k", "k_scale"), ("v", "v_exponent")):
        if name in named:
            codes = _dense("vt8", shapes) if name == "v" else _dense_like(named[name], E4M3)
            outputs += [codes, _dense(scale, shapes)]
    launch = own_signs = None
    if parts:
        options = calls_fp8.quantize_options(parts, seed is not None, cos is not None)
        launch = kernel_for(QUANTIZE, _least(problem), options).launch
        if seed is not None:
            own_signs = signs_on(first.device, problem.head_dim, seed)
    return QuantizingPlan(launch, "q" in parts, "k" in parts, tuple(outputs), own_signs)


def _plan_quantized(q8, k8, vt8, q_scale, k_scale, v_exponent, softmax_scale, *options) -> Plan:
    problem = quantized_problem_of(q8, k8, vt8, q_scale, k_scale, v_exponent, *options)
    return _plan(problem, softmax_scale, calls_fp8.BLOCK_SCALES, q8=q8, k8=k8, vt8=vt8)


def _plan_rows(q, k, v, q_descale, k_descale, v_descale, softmax_scale, *options) -> Plan:
    problem = fp8_problem_of(q, k, v, *options)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    for name, x in descales.items():
        check_descale(name, x, problem, q.device)
    if max(problem.batch, problem.kv_heads) > GRID_YZ_MAX:
        raise ValueError(f"{FP8} takes at most {GRID_YZ_MAX} batches and key/value heads of V in rows")
    plan = _plan(problem, softmax_scale, {}, q=q, k=k, v=v)
    if plan.launch is None:
        return plan
    relayout = kernel_for(QUANTIZE, _least(problem, dtype="bfloat16"), calls_fp8.RELAYOUT).launch
    shapes = quantized_shapes(problem)
    scales = production._dense(torch.Size((3, problem.batch, problem.kv_heads, 1)), torch.float32)
    return plan._replace(relayout=relayout, relaid=(_dense("vt8", shapes), scales))


def _plan(
    problem: Problem, softmax_scale: float | None, options: dict[str, object], **inputs: torch.Tensor
) -> Plan:
    scale = check_scale(softmax_scale, problem.head_dim) or problem.head_dim**-0.5
    if reason := calls_fp8.refuse_fp8(problem):
        raise ValueError(f"{FP8} {reason}")
    q = next(iter(inputs.values()))
    check_device(FP8, q)
    check_layouts(**{name: x for name, x in inputs.items() if x.numel()})
    outputs = (
        _dense_like(q, getattr(torch, problem.dtype)),
        production._dense(q.shape[:3], torch.float32),
    )
    sms = tuned.gpu(q.device).sms
    part = production._part(WHOLE, WHOLE, calls_fp8.fp8_scratch(problem, sms))
    launch = None
    if q.numel():
        least = _least(problem, causal=problem.causal, top_left=problem.top_left)
        launch = kernel_for(FP8, least, options | sms_option(sms)).launch
    return Plan(launch, outputs, part, scale)


def _least(problem: Problem, **more: object) -> Problem:
    """What of a problem is compiled in."""
    least = Problem.square(1, 1, 1, problem.head_dim, False, dtype=problem.dtype, direction="fp8")
    return least.with_(**more)


# ---- memory -----------------------------------------------------------------------------------------------


def _dense(name: str, shapes: dict[str, tuple[tuple[int, ...], str]]) -> Dense:
    shape, dtype = shapes[name]
    return production._dense(torch.Size(shape), getattr(torch, dtype))


def _dense_like(x: torch.Tensor, dtype: torch.dtype) -> Dense:
    return (*production._dense_like(x)[:2], dtype)


def _one(device: torch.device) -> torch.Tensor:
    """The scale of what has none. As `production._scratch`'s counters, it is of the stream, or of the CUDA
    graph."""
    make = lambda: production.empty((1,), (1,), torch.float32).fill_(1.0)
    if production.is_capturing():
        return make()
    place = production.current_stream(device.index), device.index
    one = _ones.get(place)
    if one is None:
        one = production._keep(_ones, production.COUNTERS_MAX, place, production.to_keep(make, device))
    return one


def signs(head_dim: int, seed: int = 0) -> torch.Tensor:
    """The signs that Q and K are multiplied by before the Walsh–Hadamard transform: fp32 ±1 (head_dim,), −1
    where Python's `random.Random(seed).getrandbits(head_dim)` has a one, bit 0 first."""
    bits = random.Random(seed).getrandbits(head_dim)
    return torch.tensor([1.0 - 2.0 * (bits >> i & 1) for i in range(head_dim)], device="cpu")


@functools.cache
def signs_on(device: torch.device, head_dim: int, seed: int) -> torch.Tensor:
    """`signs` on a device: copied once, before the first launch that reads them, on whatever stream."""
    if production.is_capturing():
        raise RuntimeError(
            "quantize: make the first call with this head_dim and seed before a graph's capture"
        )
    return production.to_keep(lambda: signs(head_dim, seed).to(device), device)
