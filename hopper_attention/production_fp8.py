"""`production`, in FP8: a call costs a look-up, its outputs and a launch, of two kernels where V must be laid
out or everything quantised first."""

import functools
import random
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import memory, tuned
from .checks import (
    E4M3,
    check_descale,
    check_device,
    check_layouts,
    check_scale,
    problem_of,
    quantized_problem_of,
    quantizing_problem_of,
    rows_problem_of,
)
from .kernels import calls_fp8
from .kernels.contract import Problem, Scratch
from .kernels.device.fp8 import quantized_shapes
from .launch import FP8, FP8_CAST, FP8_ROWS, QUANTIZE, kernel_for, sms_option
from .layouts import Dense, dense, dense_like
from .memory import WHOLE, Launch, Part, part_of, scratch_of
from .plans import keep, plan_of
from .production import margin, run_on

Pair = tuple[torch.Tensor, torch.Tensor]


class Plan(NamedTuple):
    """What inputs of one kind are computed with. `part` is None where there is nothing to compute."""

    outputs: tuple[Dense, ...]  # o and lse
    part: Part | None
    softmax_scale: float
    given: tuple[torch.Tensor, ...] = ()  # the signs, of 16-bit inputs


class QuantizingPlan(NamedTuple):
    """What `quantize` has for inputs of one kind."""

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
    kinds = (None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given)
    plan_anew = lambda: _plan_quantize(*given, seed)
    plan = plan_of(_plans, (QUANTIZE, *kinds, seed), plan_anew)
    return run_on((k if q is None else q).device, lambda: _quantize(plan, *given), plan_anew)


def _quantize(plan: QuantizingPlan, q, k, v, cos, sin) -> list[torch.Tensor]:
    outputs = [memory.empty(*x) for x in plan.outputs]
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


def forward(
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
    # Of the rest (types, devices, alignment) the launch makes sure, here and below.
    tensors = q8, k8, vt8, q_scale, k_scale, v_exponent
    options = softmax_scale, causal, top_left, dtype
    shapes = q8.shape, k8.shape, vt8.shape, q_scale.shape, k_scale.shape, v_exponent.shape
    kind = FP8, *shapes, q8.stride(), k8.stride(), vt8.stride(), q8.device, options, margin()
    plan_anew = lambda: _plan_forward(*tensors, *options)
    plan = plan_of(_plans, kind, plan_anew)
    return run_on(q8.device, lambda: _attend(plan, q8, k8, vt8, tensors[3:]), plan_anew)


def forward_rows(
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
    """o and lse of e4m3 tensors in rows, on PyTorch's current stream. What is no scale makes its head NaN.

    Raises TypeError or ValueError before anything is launched.
    """
    descales = q_descale, k_descale, v_descale
    options = softmax_scale, causal, top_left, dtype
    shapes = q.shape, k.shape, *(None if x is None else x.shape for x in descales)
    kind = FP8_ROWS, *shapes, q.stride(), k.stride(), v.stride(), q.dtype, q.device, options, margin()
    plan_anew = lambda: _plan_rows(q, k, v, *descales, *options)
    plan = plan_of(_plans, kind, plan_anew)

    def run() -> Pair:
        return _attend(plan, q, k, v, [_of_heads(x, k) for x in descales] if plan.part else ())

    return run_on(q.device, run, plan_anew)


def forward_cast(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
) -> Pair:
    """o, of q's type, and lse of 16-bit tensors, quantised as `quantize` does it with seed 0, on PyTorch's
    current stream.

    Raises TypeError or ValueError before anything is launched.
    """
    options = softmax_scale, causal, top_left
    shapes = q.shape, k.shape, q.stride(), k.stride(), v.stride()
    kind = FP8_CAST, *shapes, q.dtype, q.device, options, margin()
    plan_anew = lambda: _plan_cast(q, k, v, *options)
    plan = plan_of(_plans, kind, plan_anew)
    return run_on(q.device, lambda: _attend(plan, q, k, v, plan.given), plan_anew)


def _attend(plan: Plan, q, k, v, given) -> Pair:
    o, lse = (memory.empty(*x) for x in plan.outputs)
    if plan.part is not None:
        scratch = scratch_of(plan.part, q.device)
        calls_fp8.launch_fp8(plan.part.launch, q, k, v, o, lse, scratch, given, plan.softmax_scale)
    return o, lse


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


def _plan_forward(q8, k8, vt8, q_scale, k_scale, v_exponent, softmax_scale, *options) -> Plan:
    problem = quantized_problem_of(q8, k8, vt8, q_scale, k_scale, v_exponent, *options)
    inputs = {"q8": q8, "k8": k8, "vt8": vt8}
    return _plan(FP8, problem, softmax_scale, inputs, {}, calls_fp8.refuse_fp8, calls_fp8.BLOCK_SCALES)


def _plan_rows(q, k, v, q_descale, k_descale, v_descale, softmax_scale, *options) -> Plan:
    problem = rows_problem_of(q, k, v, *options)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    for name, x in descales.items():
        check_descale(name, x, problem, q.device)
    scratch, refuse = calls_fp8.of_rows(problem), calls_fp8.refuse_fp8_rows
    inputs = {"q": q, "k": k, "v": v}
    return _plan(FP8_ROWS, problem, softmax_scale, inputs, scratch, refuse, {})


def _plan_cast(q, k, v, softmax_scale, causal: bool, top_left: bool) -> Plan:
    problem = problem_of(q, k, v, causal, top_left).with_(direction="fp8_cast")
    inputs = {"q": q, "k": k, "v": v}
    scratch, refuse = calls_fp8.of_cast(problem), calls_fp8.refuse_fp8_cast
    plan = _plan(FP8_CAST, problem, softmax_scale, inputs, scratch, refuse, {})
    return plan if plan.part is None else plan._replace(given=(signs_on(q.device, problem.head_dim, 0),))


def _plan(
    stage_id: str,
    problem: Problem,
    softmax_scale: float | None,
    inputs: dict[str, torch.Tensor],
    scratch: Scratch,
    refuse: Callable[[Problem], str | None],
    options: dict[str, object],
) -> Plan:
    """`scratch` is what the stage needs besides k7's."""
    scale = check_scale(softmax_scale, problem.head_dim) or problem.head_dim**-0.5
    if reason := refuse(problem):
        raise ValueError(f"{stage_id} {reason}")
    q = next(iter(inputs.values()))
    check_device(stage_id, q)
    check_layouts(**{name: x for name, x in inputs.items() if x.numel()})
    outputs = (
        _dense_like(q, getattr(torch, problem.dtype)),
        dense(q.shape[:3], torch.float32),
    )
    sms = tuned.gpu(q.device).sms
    part = None
    if q.numel():
        least = _least(problem, causal=problem.causal, top_left=problem.top_left)
        launch = kernel_for(stage_id, least, options | sms_option(sms)).launch
        part = part_of(launch, WHOLE, WHOLE, scratch | calls_fp8.fp8_scratch(problem, sms))
    return Plan(outputs, part, scale)


def _least(problem: Problem, **more: object) -> Problem:
    """What of a problem is compiled in."""
    extents = 1, 1, 1, problem.head_dim, False
    return Problem.square(*extents, dtype=problem.dtype, direction=problem.direction).with_(**more)


# ---- memory -----------------------------------------------------------------------------------------------


def _dense(name: str, shapes: dict[str, tuple[tuple[int, ...], str]]) -> Dense:
    shape, dtype = shapes[name]
    return dense(torch.Size(shape), getattr(torch, dtype))


def _dense_like(x: torch.Tensor, dtype: torch.dtype) -> Dense:
    return (*dense_like(x)[:2], dtype)


def _of_heads(descale: torch.Tensor | None, k: torch.Tensor) -> torch.Tensor:
    """A scale of each (batch, kv_head), without a copy."""
    x = _one(k.device) if descale is None else descale
    return x if x.shape == k.shape[:2] else x.expand(k.shape[:2])


def _one(device: torch.device) -> torch.Tensor:
    """The scale of what has none. As `memory.scratch_of`'s counters, it is of the stream, or of the CUDA
    graph."""
    make = lambda: memory.empty((1,), (1,), torch.float32).fill_(1.0)
    if memory.is_capturing():
        return make()
    place = memory.current_stream(device.index), device.index
    one = _ones.get(place)
    if one is None:
        one = keep(_ones, memory.COUNTERS_MAX, place, memory.to_keep(make, device))
    return one


def signs(head_dim: int, seed: int = 0) -> torch.Tensor:
    """The signs that Q and K are multiplied by before the Walsh–Hadamard transform: fp32 ±1 (head_dim,), −1
    where Python's `random.Random(seed).getrandbits(head_dim)` has a one, bit 0 first."""
    bits = random.Random(seed).getrandbits(head_dim)
    of_bits = [1.0 - 2.0 * (bits >> i & 1) for i in range(head_dim)]
    return torch.tensor(of_bits, dtype=torch.float32, device="cpu")


@functools.cache
def signs_on(device: torch.device, head_dim: int, seed: int) -> torch.Tensor:
    """`signs` on a device: copied once, before the first launch that reads them, on whatever stream."""
    if memory.is_capturing():
        raise RuntimeError(
            "quantize: make the first call with this head_dim and seed before a graph's capture"
        )
    return memory.to_keep(lambda: signs(head_dim, seed).to(device), device)
