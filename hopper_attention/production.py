"""The production kernels on torch tensors: inputs of one kind are checked, and their kernel compiled or
loaded, once; after that a call costs a look-up, its outputs and a launch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

from .checks import (
    VECTOR_BYTES,
    check_device,
    check_layout,
    check_layouts,
    check_lse,
    check_scale,
    gradient_problem_of,
    problem_of,
)
from .kernels import calls
from .kernels.contract import Problem, Scratch, Tensors
from .kernels.device.constants import GRID_YZ_MAX
from .launch import BACKWARD, DETERMINISTIC, FORWARD, kernel_for

KINDS_MAX = 4096  # remembered before all are forgotten
ZEROS_MAX = 256

Launch = Callable[..., None]
Place = tuple[slice, slice]  # of batches and of heads
WHOLE: Place = slice(None), slice(None)
Kept = TypeVar("Kept")


class Plan(NamedTuple):
    """What inputs of one kind are computed with. `launch` is None where there is nothing to compute."""

    launch: Launch | None
    scale: float | None  # of a scaled problem
    parts: tuple["Part", ...]  # a launch each


class Part(NamedTuple):
    """A launch: where in q and what is shaped like it, and in k, its batches and heads lie; its scratch."""

    at_q: Place
    at_kv: Place
    scratch: Scratch


_plans: dict[tuple[object, ...], Plan] = {}
_reasons: dict[tuple[object, ...], str | None] = {}
_zeros: dict[tuple[object, ...], torch.Tensor] = {}


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse on PyTorch's current stream; o is dense, its dimensions in memory in the order of q's.

    Raises TypeError or ValueError before anything is launched.
    """
    kind = (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, softmax_scale, causal, top_left),
    )
    plan = _plans.get(kind)
    if plan is None:
        plan = _keep(_plans, KINDS_MAX, kind, _plan_forward(q, k, v, softmax_scale, causal, top_left))
    if not _aligned(q, k, v):
        check_layouts(q=q, k=k, v=v)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if plan.launch is not None:
        with _current(q.device):
            workspace = _workspace(plan.parts[0].scratch, q.device)
            calls.run_forward(
                plan.launch, Tensors(*map(_plain, (q, k, v)), o, lse, workspace, softmax_scale=plan.scale)
            )
    return o, lse


def backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv on PyTorch's current stream, each dense, in the order of its input's dimensions.

    Raises TypeError or ValueError before anything is launched.
    """
    # What autograd hands back may be an expanded scalar or lie anywhere; what hooks have kept, too.
    do, o = _readable(do), _readable(o)
    inputs = q, k, v, o, do
    kind = (
        *(x.shape for x in inputs),
        *(x.stride() for x in (*inputs, lse)),
        *(x.dtype for x in inputs),
        *(x.device for x in inputs),
        *(x if x is None else (x.shape, x.dtype, x.device) for x in (lse, dlse)),
        *(softmax_scale, causal, top_left, deterministic),
    )
    plan = _plans.get(kind)
    if plan is None:
        plan = _plan_backward(do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic)
        _keep(_plans, KINDS_MAX, kind, plan)
    if not _aligned(q, k, v):
        check_layouts(q=q, k=k, v=v)
    if plan.launch is None:  # no query or no key: no output that an input could have changed
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    of_q = [_plain(x) for x in (q, o, lse, do, dq)]
    of_kv = [_plain(x) for x in (k, v, dk, dv)]
    dlse = None if dlse is None else _plain(dlse).contiguous()
    with _current(q.device):
        for part in plan.parts:
            there, there_kv, dlse_there = of_q, of_kv, dlse
            if len(plan.parts) > 1:
                there, there_kv = [x[part.at_q] for x in of_q], [x[part.at_kv] for x in of_kv]
                dlse_there = None if dlse is None else dlse[part.at_q].contiguous()
            (q_, o_, lse_, do_, dq_), (k_, v_, dk_, dv_) = there, there_kv
            workspace = _workspace(part.scratch, q.device)
            gradients = do_, dq_, dk_, dv_, dlse_there
            calls.run_backward(plan.launch, Tensors(q_, k_, v_, o_, lse_, workspace, *gradients, plan.scale))
    return dq, dk, dv


def reason_against(
    direction: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    also: Callable[[Problem], str | None] = lambda problem: None,
) -> str | None:
    """Why `forward`, or with "bwd" `backward`, would refuse these inputs, or None; or what `also` has against
    the problem. Asked once for inputs of a kind."""
    with contextlib.suppress(RuntimeError):  # inside `torch.func` a tensor has no address
        if not _aligned(q, k, v):
            return f"q, k or v is not aligned to {VECTOR_BYTES} bytes"
    kind = (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype),
        *(q.device, k.device, v.device, softmax_scale, causal, top_left, direction, also),
    )
    if kind not in _reasons:
        try:
            problem = problem_of(q, k, v, causal, top_left).with_(direction=direction)
            problem, _ = _scaled(problem, softmax_scale)
            _check_inputs(FORWARD if direction == "fwd" else BACKWARD, problem, q=q, k=k, v=v)
            reason = also(problem)
        except (TypeError, ValueError) as error:
            reason = str(error)
        _keep(_reasons, KINDS_MAX, kind, reason)
    return _reasons[kind]


# ---- plans ------------------------------------------------------------------------------------------------


def _plan_forward(q, k, v, softmax_scale: float | None, causal: bool, top_left: bool) -> Plan:
    problem, scale = _scaled(problem_of(q, k, v, causal, top_left), softmax_scale)
    _check_inputs(FORWARD, problem, q=q, k=k, v=v)
    whole = Part(WHOLE, WHOLE, calls.forward_scratch(problem))
    return Plan(_launch(FORWARD, problem) if q.numel() else None, scale, (whole,))


def _plan_backward(
    do, q, k, v, o, lse, dlse, softmax_scale: float | None, causal: bool, top_left: bool, deterministic: bool
) -> Plan:
    problem, scale = _scaled(gradient_problem_of(do, q, k, v, o, lse, causal, top_left), softmax_scale)
    if dlse is not None:  # whose kernels are given their scale
        check_lse("dlse", dlse, q)
        scale = scale or problem.head_dim**-0.5
        problem = problem.with_(scaled=True, lse_grad=True)
    stage_id = DETERMINISTIC if deterministic else BACKWARD
    _check_inputs(stage_id, problem, q=q, k=k, v=v, o=o, do=do)
    if not (q.numel() and k.numel()):
        return Plan(None, scale, ())
    parts = [
        Part(at_q, at_kv, calls.backward_scratch(part, deterministic))
        for at_q, at_kv, part in _split(problem)
    ]
    return Plan(_launch(stage_id, problem), scale, tuple(parts))


def _scaled(problem: Problem, softmax_scale: float | None) -> tuple[Problem, float | None]:
    """The problem with that scale, and the scale to give its kernel, None where it has it as a constant."""
    scale = check_scale(softmax_scale, problem.head_dim)
    return problem.with_(scaled=scale is not None), scale


def _check_inputs(stage_id: str, problem: Problem, **inputs: torch.Tensor) -> None:
    """Raise ValueError for a problem, a device or layouts that the stage does not take."""
    if problem.direction == "fwd":
        reason = calls.refuse_forward(problem)
    else:  # without a query or a key there is nothing to launch
        launches = _split(problem) if problem.seqlen_q and problem.seqlen_kv else ()
        reason = next(filter(None, (calls.refuse_backward(part) for *_, part in launches)), None)
    if reason:
        raise ValueError(f"{stage_id} {reason}")
    check_device(stage_id, inputs["q"])
    check_layouts(**inputs)


def _launch(stage_id: str, problem: Problem) -> Launch:
    least = problem.with_(batch=1, heads=1, kv_heads=1, seqlen_q=1, seqlen_kv=1)
    return kernel_for(stage_id, least, calls.DETERMINISTIC if stage_id == DETERMINISTIC else {}).launch


def _split(problem: Problem) -> Iterator[tuple[Place, Place, Problem]]:
    """A backward problem in launches: batches and heads are dimensions of a grid, which has so many."""
    group = problem.heads // max(1, problem.kv_heads)
    most = max(1, GRID_YZ_MAX // max(1, group))  # key heads
    for batch in range(0, problem.batch, GRID_YZ_MAX):
        batches = slice(batch, min(batch + GRID_YZ_MAX, problem.batch))
        for head in range(0, problem.kv_heads, most):
            end = min(head + most, problem.kv_heads)
            extents = {"batch": batches.stop - batch, "heads": (end - head) * group, "kv_heads": end - head}
            at_q, at_kv = (batches, slice(head * group, end * group)), (batches, slice(head, end))
            yield at_q, at_kv, problem.with_(**extents)


# ---- scratch ----------------------------------------------------------------------------------------------


def _workspace(spec: Scratch, device: torch.device) -> dict[str, torch.Tensor]:
    """Scratch for a launch: integers start at zero, which every launch leaves there, the rest may hold
    anything."""
    return {
        name: _zero_integers(name, shape, device)
        if dtype == "int32"
        else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for name, (shape, dtype) in spec.items()
    }


def _zero_integers(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Kept for the current stream, in which launches come one after another. What a CUDA graph captures has
    its own: its replays may run beside anything. A launch's tensors differ in name, if not in shape."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(shape, dtype=torch.int32, device=device)
    place = torch._C._cuda_getCurrentRawStream(device.index), device.index, name, shape
    found = _zeros.get(place)
    if found is None:
        found = _keep(_zeros, ZEROS_MAX, place, torch.zeros(shape, dtype=torch.int32, device=device))
    return found


# ---- small matters ----------------------------------------------------------------------------------------

NOTHING = contextlib.nullcontext()


def _keep(known: dict[tuple[object, ...], Kept], most: int, key: tuple[object, ...], value: Kept) -> Kept:
    """Remember a value; of too many, none but this one."""
    if len(known) >= most:
        known.clear()
    known[key] = value
    return value


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """With `device` as PyTorch's current one: its stream is the one that is launched on."""
    return NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Without its part in autograd's graph, which a launch does not take."""
    return x.detach() if x.requires_grad else x


def _aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """What inputs of one kind may still differ in."""
    return not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % VECTOR_BYTES


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x, or where a kernel cannot read it a copy."""
    try:
        check_layout("x", x)
    except ValueError:
        return x.clone(memory_format=torch.contiguous_format)
    return x
