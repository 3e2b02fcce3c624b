"""The production kernels on torch tensors: inputs of one kind are checked, and their kernel compiled or
loaded, once; after that a call costs a look-up, its outputs and a launch."""

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import memory, tuned, ways
from .checks import (
    VECTOR_BYTES,
    check_device,
    check_layouts,
    check_lse,
    check_scale,
    gradient_problem_of,
    problem_of,
)
from .kernels import calls
from .kernels.calls import Parts
from .kernels.contract import Problem
from .kernels.device.limits import has_own_kernel
from .launch import BACKWARD, DETERMINISTIC, FORWARD
from .layouts import Dense, aligned, dense, dense_like, readable
from .memory import WHOLE, Part, part_of, scratch_of
from .plans import KINDS_MAX, Kept, Plans, keep
from .rounds import in_launches
from .selection import (
    backward_launches,
    backward_scratch,
    forward_launch,
    forward_scratch,
    launch_of,
)
from .ways import Way


class Plan(NamedTuple):
    """What inputs of one kind are computed with. There are no parts where there is nothing to compute."""

    outputs: tuple[Dense, ...]
    parts: tuple[Part, ...]  # a launch each
    given: tuple[float, ...]  # of a scaled problem: its scale
    unreadable: bool = False  # whether do or o lies as no kernel reads it, and is copied


plans: Plans[Plan] = Plans()
_reasons: dict[tuple[object, ...], str | None] = {}
# A backward pass is several launches, which share counters with that of another thread on the same stream:
# one thread's must not come between another's. The launching code runs without Python's lock.
_several_kernels = threading.Lock()


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    with_lse: bool = True,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o and lse, or None in its place, on PyTorch's current stream; o is dense, its dimensions in memory in
    the order of q's. `plan` is one made already, with this `with_lse`: what `recent_forward` found.

    Raises TypeError or ValueError before anything is launched.
    """
    device = q.device
    if plan is None:
        options = "fwd", softmax_scale, causal, top_left, with_lse, margin()
        plan = plans.find(options, q, k, v)
    if plan is None:
        plan = _plan_forward(q, k, v, softmax_scale, causal, top_left, with_lse=with_lse)
        if not plan.parts:
            o, lse = (torch.empty_strided(*x[:2], dtype=x[2], device=device) for x in plan.outputs)
            return o, lse
        plans.keep(options, (q, k, v), plan)
    if device.index != current_device():
        with torch.cuda.device(device):
            return forward(q, k, v, softmax_scale, causal, top_left, with_lse, plan)
    try:
        (part,) = plan.parts
        o, scratch = memory.empty(*plan.outputs[0]), scratch_of(part, device)
        if not with_lse:  # the first of the scratch
            part.launch(q, k, v, o, *scratch, *plan.given)
            return o, None
        lse = memory.empty(*plan.outputs[1])
        part.launch(q, k, v, o, lse, *scratch, *plan.given)
        return o, lse
    except Exception:
        _plan_forward(q, k, v, softmax_scale, causal, top_left)  # raises with the name of what is wrong
        raise


def recent_forward(q, k, v, softmax_scale, causal: bool, top_left: bool, with_lse: bool) -> Plan | None:
    """The plan of a call like this, if there was one of late and PyTorch would dispatch it alike."""
    return plans.recently(("fwd", softmax_scale, causal, top_left, with_lse, margin()), q, k, v)


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
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv on PyTorch's current stream, each dense, in the order of its input's dimensions. `plan`
    is one that `recent_backward` found.

    Raises TypeError or ValueError before anything is launched.
    """
    device = q.device
    if plan is None:
        options = "bwd", softmax_scale, causal, top_left, deterministic, dlse is None, margin()
        plan = plans.find(options, do, q, k, v, o, lse)
    if plan is None:
        plan = _plan_backward(do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic)
        if not plan.parts:  # no query or no key: no output that an input could have changed
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        plans.keep(options, (do, q, k, v, o, lse), plan)
    try:
        if device.index == current_device():
            return _backward(plan, do, q, k, v, o, lse, dlse, device)
        with torch.cuda.device(device):
            return _backward(plan, do, q, k, v, o, lse, dlse, device)
    except Exception:
        inputs = do, q, k, v, o, lse, dlse
        _plan_backward(*inputs, softmax_scale, causal, top_left, deterministic)  # names what is wrong
        raise


def recent_backward(
    do, q, k, v, o, lse, softmax_scale, causal: bool, top_left: bool, deterministic: bool
) -> Plan | None:
    """As `recent_forward`, of a call without a gradient of the lse."""
    deterministic = deterministic or are_deterministic()
    options = "bwd", softmax_scale, causal, top_left, deterministic, True, margin()
    return plans.recently(options, do, q, k, v, o, lse)


def _backward(plan: Plan, do, q, k, v, o, lse, dlse, device: torch.device):
    # What autograd hands back may be an expanded scalar or lie anywhere; what hooks have kept, too.
    if plan.unreadable or (do.data_ptr() | o.data_ptr()) % VECTOR_BYTES:
        do, o = readable(do), readable(o)
    of_q, of_k, of_v = plan.outputs
    dq, dk, dv = memory.empty(*of_q), memory.empty(*of_k), memory.empty(*of_v)
    given = plan.given if dlse is None else (*plan.given, dlse.contiguous())
    if len(plan.parts) == 1:
        (part,) = plan.parts
        scratch = scratch_of(part, device)
        with _several_kernels:
            calls.launch_backward(part.launch, q, k, v, o, lse, do, dq, dk, dv, scratch, given)
        return dq, dk, dv
    for part in plan.parts:
        q_, o_, lse_, do_, dq_ = (x[part.at_q] for x in (q, o, lse, do, dq))
        k_, v_, dk_, dv_ = (x[part.at_kv] for x in (k, v, dk, dv))
        given = plan.given if dlse is None else (*plan.given, dlse[part.at_q].contiguous())
        scratch = scratch_of(part, device)
        with _several_kernels:
            calls.launch_backward(part.launch, q_, k_, v_, o_, lse_, do_, dq_, dk_, dv_, scratch, given)
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
        if not aligned(q, k, v):
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
        keep(_reasons, KINDS_MAX, kind, reason)
    return _reasons[kind]


# ---- plans ------------------------------------------------------------------------------------------------


def _plan_forward(
    q, k, v, softmax_scale: float | None, causal: bool, top_left: bool, way: Way | None = None,
    with_lse: bool = True,
) -> Plan:  # fmt: skip
    """`way` is for who measures: otherwise what `ways` chooses."""
    problem, given = _scaled(problem_of(q, k, v, causal, top_left), softmax_scale)
    _check_inputs(FORWARD, problem, q=q, k=k, v=v)
    outputs = dense_like(q, v.shape[3]), dense(q.shape[:3], torch.float32)
    lse = {} if with_lse else {"lse": (q.shape[:3], "float32")}
    if not q.numel():
        return Plan(outputs, (), given)
    gpu = tuned.gpu(q.device)
    way = way or ways.way_of(problem, *gpu)
    scratch = lse | forward_scratch(problem, way, gpu.sms)
    whole = part_of(forward_launch(problem, way, gpu), WHOLE, WHOLE, scratch, "fwd")
    return Plan(outputs[: 2 if with_lse else 1], (whole,), given)


def _plan_backward(
    do, q, k, v, o, lse, dlse, softmax_scale: float | None, causal: bool, top_left: bool, deterministic: bool,
    parts: Parts | None = None,
) -> Plan:  # fmt: skip
    """`parts` are for who measures: otherwise what `division` chooses."""
    problem, given = _scaled(gradient_problem_of(do, q, k, v, o, lse, causal, top_left), softmax_scale)
    if dlse is not None:  # whose kernels are given their scale
        check_lse("dlse", dlse, q)
        given = given or (problem.head_dim**-0.5,)
        problem = problem.with_(scaled=True, lse_grad=True)
    _check_inputs(DETERMINISTIC if deterministic else BACKWARD, problem, q=q, k=k, v=v)
    if not (q.numel() and k.numel()):
        return Plan((), (), given)
    gpu = tuned.gpu(q.device)
    launches = planned_launches(problem, deterministic, parts, gpu)
    outputs = tuple(map(dense_like, (q, k, v)))
    unreadable = not all(x is readable(x) for x in (do, o))
    return Plan(outputs, launches, given, unreadable)


def _scaled(problem: Problem, softmax_scale: float | None) -> tuple[Problem, tuple[float, ...]]:
    """The problem with that scale, and what its kernel is given: the scale, unless it has it as a
    constant."""
    scale = check_scale(softmax_scale, problem.head_dim)
    if scale is None and not has_own_kernel(problem):
        scale = problem.head_dim**-0.5
    return problem.with_(scaled=scale is not None), () if scale is None else (scale,)


def _check_inputs(stage_id: str, problem: Problem, **inputs: torch.Tensor) -> None:
    """Raise ValueError for a problem, a device or layouts that the stage does not take."""
    if problem.direction == "fwd":
        reason = calls.refuse_forward(problem)
    else:  # without a query or a key there is nothing to launch
        most = problem.batch, problem.kv_heads
        launches = in_launches(problem, most) if problem.seqlen_q and problem.seqlen_kv else ()
        reason = next(filter(None, (calls.refuse_backward(part) for *_, part in launches)), None)
    if reason:
        raise ValueError(f"{stage_id} {reason}")
    check_device(stage_id, inputs["q"])
    check_layouts(**inputs)


def planned_launches(
    problem: Problem, deterministic: bool, parts: Parts | None, gpu: tuned.Gpu, short: bool = False
) -> tuple[Part, ...]:
    """The launches that `selection.backward_launches` gives, of a plan."""
    group, found = problem.heads // max(1, problem.kv_heads), []
    launches = backward_launches(problem, deterministic, parts, gpu, short)
    for batches, kv_heads, part, stage_id, own in launches:
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        scratch = backward_scratch(stage_id, part, own, gpu)
        launch = launch_of(stage_id, part, gpu)
        found.append(part_of(launch, (batches, heads), (batches, kv_heads), scratch, "bwd"))
    return tuple(found)


# ---- small matters ----------------------------------------------------------------------------------------

are_deterministic = torch._C._get_deterministic_algorithms
margin = tuned.margin.get  # SMs that this thread's calls leave free
current_device = getattr(torch._C, "_cuda_getDevice", None)  # None: PyTorch without CUDA


def run_on(device: torch.device, run: Callable[[], Kept], plan_anew: Callable[[], object]) -> Kept:
    """`run()` with the device current. What a launch refuses, `plan_anew` names."""
    try:
        if device.index == current_device():
            return run()
        with torch.cuda.device(device):
            return run()
    except Exception:
        plan_anew()
        raise
