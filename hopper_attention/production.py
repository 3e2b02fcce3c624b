"""The production kernels on torch tensors: inputs of one kind are checked, and their kernel compiled or
loaded, once; after that a call costs a look-up, its outputs and a launch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .checks import VECTOR_BYTES, check_device, check_layout, check_like, check_lse, check_scale, problem_of
from .kernels import calls
from .kernels.contract import Problem, Scratch, Tensors
from .kernels.device.constants import GRID_YZ_MAX
from .kernels.device.limits import HEAD_DIMS
from .launch import BACKWARD, DETERMINISTIC, FORWARD, kernel_for

KINDS_MAX = 4096  # remembered before all are forgotten
ZEROS_MAX = 256

Launch = Callable[..., None]


class Plan(NamedTuple):
    """What inputs of one kind are computed with. `launch` is None where there is nothing to compute."""

    launch: Launch | None
    scale: float | None  # of a scaled problem
    parts: tuple["Part", ...]  # a launch each


class Part(NamedTuple):
    """Where in q and what is shaped like it, and in k, the batches and heads of a launch lie."""

    at_q: tuple[slice, slice]
    at_kv: tuple[slice, slice]
    problem: Problem
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
        plan = _remember(kind, _plan_forward(q, k, v, softmax_scale, causal, top_left))
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % VECTOR_BYTES:
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
    do, o = (x if _can_be_read(x) else x.clone(memory_format=torch.contiguous_format) for x in (do, o))
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
        _remember(kind, plan)
    if any(x.data_ptr() % VECTOR_BYTES for x in inputs):
        check_layouts(q=q, k=k, v=v, o=o, do=do)
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
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % VECTOR_BYTES:
            return f"q, k or v is not aligned to {VECTOR_BYTES} bytes"
    kind = (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype),
        *(q.device, k.device, v.device, softmax_scale, causal, top_left, direction, also),
    )
    if kind not in _reasons:
        if len(_reasons) >= KINDS_MAX:
            _reasons.clear()
        try:
            problem = problem_of(q, k, v, causal, top_left).with_(direction=direction)
            scaled = check_scale(softmax_scale, problem.head_dim) is not None
            problem = problem.with_(scaled=scaled)
            _check_inputs(FORWARD if direction == "fwd" else BACKWARD, problem, q=q, k=k, v=v)
            _reasons[kind] = also(problem)
        except (TypeError, ValueError) as error:
            _reasons[kind] = str(error)
    return _reasons[kind]


def check_layouts(**tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        check_layout(name, x)


# ---- plans ------------------------------------------------------------------------------------------------


def _plan_forward(q, k, v, softmax_scale: float | None, causal: bool, top_left: bool) -> Plan:
    problem = problem_of(q, k, v, causal, top_left)
    scale = check_scale(softmax_scale, problem.head_dim)
    problem = problem.with_(scaled=scale is not None)
    _check_inputs(FORWARD, problem, q=q, k=k, v=v)
    whole = Part((slice(None),) * 2, (slice(None),) * 2, problem, calls.forward_scratch(problem))
    return Plan(_launch(FORWARD, problem) if q.numel() else None, scale, (whole,))


def _plan_backward(
    do, q, k, v, o, lse, dlse, softmax_scale: float | None, causal: bool, top_left: bool, deterministic: bool
) -> Plan:
    problem = problem_of(q, k, v, causal, top_left).with_(direction="bwd")
    check_like("o", o, "q", q)
    check_like("do", do, "q", q)
    check_lse("lse", lse, q)
    if dlse is not None:
        check_lse("dlse", dlse, q)
    scale = check_scale(softmax_scale, problem.head_dim)
    if dlse is not None and scale is None:
        scale = problem.head_dim**-0.5
    stage_id = DETERMINISTIC if deterministic else BACKWARD
    problem = problem.with_(scaled=scale is not None, lse_grad=dlse is not None)
    _check_inputs(stage_id, problem, q=q, k=k, v=v, o=o, do=do)
    if not (q.numel() and k.numel()):
        return Plan(None, scale, ())
    return Plan(_launch(stage_id, problem), scale, tuple(_parts(problem, deterministic)))


def _check_inputs(stage_id: str, problem: Problem, **inputs: torch.Tensor) -> None:
    """Raise ValueError for a problem, a device or layouts that the stage does not take."""
    if problem.direction == "fwd":
        reason = calls.refuse_forward(problem)
    else:  # without a query or a key there is nothing to launch
        parts = _parts(problem) if problem.seqlen_q and problem.seqlen_kv else ()
        reason = next(filter(None, (calls.refuse_backward(part.problem) for part in parts)), None)
    if reason:
        raise ValueError(f"{stage_id} {reason}")
    check_device(stage_id, inputs["q"])
    check_layouts(**inputs)


def _launch(stage_id: str, problem: Problem) -> Launch:
    least = problem.with_(batch=1, heads=1, kv_heads=1, seqlen_q=1, seqlen_kv=1)
    return kernel_for(stage_id, least, calls.DETERMINISTIC if stage_id == DETERMINISTIC else {}).launch


def _remember(kind: tuple[object, ...], plan: Plan) -> Plan:
    if len(_plans) >= KINDS_MAX:
        _plans.clear()
    _plans[kind] = plan
    return plan


def _parts(problem: Problem, deterministic: bool = False) -> Iterator[Part]:
    """A backward problem in launches: batches and heads are dimensions of a grid, which has so many."""
    group = problem.heads // max(1, problem.kv_heads)
    most = max(1, GRID_YZ_MAX // max(1, group))  # key heads
    for batch in range(0, problem.batch, GRID_YZ_MAX):
        batches = slice(batch, min(batch + GRID_YZ_MAX, problem.batch))
        for head in range(0, problem.kv_heads, most):
            end = min(head + most, problem.kv_heads)
            extents = {"batch": batches.stop - batch, "heads": (end - head) * group, "kv_heads": end - head}
            part, at = problem.with_(**extents), (slice(head * group, end * group), slice(head, end))
            scratch = calls.backward_scratch(part, deterministic) if part.head_dim in HEAD_DIMS else {}
            yield Part((batches, at[0]), (batches, at[1]), part, scratch)


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
        if len(_zeros) >= ZEROS_MAX:
            _zeros.clear()
        _zeros[place] = found = torch.zeros(shape, dtype=torch.int32, device=device)
    return found


# ---- small matters ----------------------------------------------------------------------------------------


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """With `device` as PyTorch's current one: its stream is the one that is launched on."""
    return NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Without its part in autograd's graph, which a launch does not take."""
    return x.detach() if x.requires_grad else x


def _can_be_read(x: torch.Tensor) -> bool:
    try:
        check_layout("x", x)
    except ValueError:
        return False
    return True


NOTHING = contextlib.nullcontext()
