"""The production kernels on torch tensors: inputs of one kind are checked, and their kernel compiled or
loaded, once; after that a call costs a look-up, its outputs and a launch."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

from . import tuned
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
from .kernels import calls, division
from .kernels.calls import UNDIVIDED, Parts
from .kernels.contract import Problem, Scratch
from .kernels.device.constants import GRID_YZ_MAX
from .kernels.device.limits import TILE_KV, has_own_kernel, tile_dim
from .launch import (
    BACKWARD,
    DETERMINISTIC,
    DETERMINISTIC_IN_PARTS,
    FORWARD,
    FORWARD_IN_ROWS,
    IN_PARTS,
    kernel_for,
    least_of,
    sms_option,
)

KINDS_MAX = 4096  # remembered before all are forgotten
COUNTERS_MAX = 256
# So long may causal sequences be for turns to cost less than zeros: 0.83 to 0.98 of the time, at 1024 as much
# (the sweep). With grouped heads and three tiles for each SM longer: 0.90 and 0.93 at 1024 and 2048.
TURNS_SEQLEN, TURNS_GROUPED, TURNS_TILES = 512, 2048, 3

Launch = Callable[..., None]
Place = tuple[slice, slice]  # of batches and of heads
WHOLE: Place = slice(None), slice(None)
Dense = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # what is allocated: shape, strides and type
Kept = TypeVar("Kept")
# Of the stages that have some; known here, so that a call whose kernels are compiled imports no kernel file.
OPTIONS: dict[str, dict[str, object]] = {
    DETERMINISTIC: calls.DETERMINISTIC,
    DETERMINISTIC_IN_PARTS: calls.DETERMINISTIC,
    **{stage_id: {"rows": rows} for rows, stage_id in FORWARD_IN_ROWS.items()},
}


class Plan(NamedTuple):
    """What inputs of one kind are computed with. `launch` is None where there is nothing to compute."""

    launch: Launch | None
    outputs: tuple[Dense, ...]
    parts: tuple["Part", ...]  # a launch each
    given: tuple[float, ...]  # of a scaled problem: its scale
    unreadable: bool = False  # whether do or o lies as no kernel reads it, and is copied


class Part(NamedTuple):
    """A launch: where in q and what is shaped like it, and in k, its batches and heads lie; its scratch."""

    at_q: Place
    at_kv: Place
    floats: tuple[Dense, ...]
    counters: tuple[Dense, ...]  # int32: after the floats among a launch's arguments


_plans: dict[tuple[object, ...], Plan] = {}
_reasons: dict[tuple[object, ...], str | None] = {}
_counters: dict[tuple[object, ...], list[torch.Tensor]] = {}
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse on PyTorch's current stream; o is dense, its dimensions in memory in the order of q's.

    Raises TypeError or ValueError before anything is launched.
    """
    # What a plan follows from. The rest of what it asks of its inputs (that v is like k, types, devices,
    # alignment) the launch itself checks, in less time than reading it here takes.
    device = q.device
    options = softmax_scale, causal, top_left
    kind = q.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, device, options, margin()
    plan = _plans.get(kind)
    if plan is None:
        plan = _plan_forward(q, k, v, *options)
        if plan.launch is None:
            return tuple(torch.empty_strided(*x[:2], dtype=x[2], device=device) for x in plan.outputs)
        _keep(_plans, KINDS_MAX, kind, plan)
    try:
        if device.index == current_device():
            return _forward(plan, q, k, v, device)
        with torch.cuda.device(device):
            return _forward(plan, q, k, v, device)
    except Exception:
        _plan_forward(q, k, v, *options)  # raises with the name of what is wrong
        raise


def _forward(plan: Plan, q, k, v, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = (empty(*x) for x in plan.outputs)
    scratch = _scratch(plan.parts[0], device)
    calls.launch_forward(plan.launch, q, k, v, o, lse, scratch, plan.given)
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
    device = q.device
    options = softmax_scale, causal, top_left, deterministic
    strides = q.stride(), k.stride(), v.stride(), o.stride(), do.stride(), lse.stride()
    kind = q.shape, v.shape, strides, q.dtype, device, dlse is None, options, margin()
    plan = _plans.get(kind)
    if plan is None:
        plan = _plan_backward(do, q, k, v, o, lse, dlse, *options)
        if plan.launch is None:  # no query or no key: no output that an input could have changed
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        _keep(_plans, KINDS_MAX, kind, plan)
    try:
        with NOTHING if device.index == current_device() else torch.cuda.device(device):
            return _backward(plan, do, q, k, v, o, lse, dlse, device)
    except Exception:
        _plan_backward(do, q, k, v, o, lse, dlse, *options)  # raises with the name of what is wrong
        raise


def _backward(plan: Plan, do, q, k, v, o, lse, dlse, device: torch.device):
    # What autograd hands back may be an expanded scalar or lie anywhere; what hooks have kept, too.
    if plan.unreadable or (do.data_ptr() | o.data_ptr()) % VECTOR_BYTES:
        do, o = _readable(do), _readable(o)
    dq, dk, dv = (empty(*x) for x in plan.outputs)
    given = plan.given if dlse is None else (*plan.given, dlse.contiguous())
    if len(plan.parts) == 1:
        scratch = _scratch(plan.parts[0], device)
        with _several_kernels:
            calls.launch_backward(plan.launch, q, k, v, o, lse, do, dq, dk, dv, scratch, given)
        return dq, dk, dv
    for part in plan.parts:
        q_, o_, lse_, do_, dq_ = (x[part.at_q] for x in (q, o, lse, do, dq))
        k_, v_, dk_, dv_ = (x[part.at_kv] for x in (k, v, dk, dv))
        given = plan.given if dlse is None else (*plan.given, dlse[part.at_q].contiguous())
        scratch = _scratch(part, device)
        with _several_kernels:
            calls.launch_backward(plan.launch, q_, k_, v_, o_, lse_, do_, dq_, dk_, dv_, scratch, given)
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


def _plan_forward(
    q, k, v, softmax_scale: float | None, causal: bool, top_left: bool, rows: int | None = None
) -> Plan:
    """`rows` are for who measures: otherwise what `division` chooses."""
    problem, given = _scaled(problem_of(q, k, v, causal, top_left), softmax_scale)
    _check_inputs(FORWARD, problem, q=q, k=k, v=v)
    whole = _part(WHOLE, WHOLE, calls.forward_scratch(problem))
    outputs = _dense_like(q, v.shape[3]), _dense(q.shape[:3], torch.float32)
    if not q.numel():
        return Plan(None, outputs, (whole,), given)
    gpu = tuned.gpu(q.device)
    return Plan(_launch(forward_stage(problem, rows, gpu), problem, gpu), outputs, (whole,), given)


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
        return Plan(None, (), (), given)
    gpu = tuned.gpu(q.device)
    stage_id, in_parts = backward_stage(problem, deterministic, parts, gpu)
    deterministic = stage_id in (DETERMINISTIC, DETERMINISTIC_IN_PARTS)
    launches = [
        _part(at_q, at_kv, calls.backward_scratch(part, deterministic, in_parts))
        for at_q, at_kv, part in _split(problem)
    ]
    outputs = tuple(map(_dense_like, (q, k, v)))
    unreadable = not all(x is _readable(x) for x in (do, o))
    return Plan(_launch(stage_id, problem, gpu), outputs, tuple(launches), given, unreadable)


def forward_stage(problem: Problem, rows: int | None = None, gpu: tuned.Gpu = tuned.H200) -> str:
    """The stage that computes O of a problem that FORWARD takes, by default in tiles of as many rows as
    `division` chooses."""
    rows = rows or division.rows_of(problem, *gpu)
    return FORWARD if rows == next(iter(division.TILES[tile_dim(problem)])) else FORWARD_IN_ROWS[rows]


def backward_stage(
    problem: Problem, deterministic: bool, parts: Parts | None = None, gpu: tuned.Gpu = tuned.H200
) -> tuple[str, Parts | None]:
    """The stage that computes the gradients of a problem that BACKWARD takes, and its parts, if it has any:
    by default those that `division` chooses."""
    # Where a query's gradient comes from one tile of keys, nobody waits for a turn, and no zeros are needed.
    columns = tile_dim(problem)
    alone = problem.sequences is None and problem.seqlen_kv <= TILE_KV[columns]
    deterministic |= columns <= 128 and (alone or _takes_turns(problem, gpu.sms))
    if problem.policies:  # which the stages in parts do not take
        parts = UNDIVIDED
    if parts is None:
        one_launch = max(problem.batch, problem.heads) <= GRID_YZ_MAX
        parts = division.parts_of(problem, gpu.sms, deterministic) if one_launch else UNDIVIDED
    if parts == UNDIVIDED:
        # Of few tiles under a causal mask turns cost less than zeros.
        short = problem.causal and problem.seqlen_q == problem.seqlen_kv <= TURNS_SEQLEN
        deterministic |= columns <= 128 and not problem.policies and short
        return DETERMINISTIC if deterministic else BACKWARD, None
    return DETERMINISTIC_IN_PARTS if deterministic else IN_PARTS, parts


def _takes_turns(problem: Problem, sms: int) -> bool:
    """Whether a group's gradients come sooner with turns at dQ than with zeros."""
    if problem.policies or not problem.causal or problem.heads == problem.kv_heads:
        return False
    short = problem.seqlen_q == problem.seqlen_kv <= TURNS_GROUPED and tile_dim(problem) == 128
    tiles = -(-problem.seqlen_kv // TILE_KV[tile_dim(problem)]) * problem.batch * problem.kv_heads
    return short and tiles >= TURNS_TILES * sms


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
        launches = _split(problem) if problem.seqlen_q and problem.seqlen_kv else ()
        reason = next(filter(None, (calls.refuse_backward(part) for *_, part in launches)), None)
    if reason:
        raise ValueError(f"{stage_id} {reason}")
    check_device(stage_id, inputs["q"])
    check_layouts(**inputs)


def _launch(stage_id: str, problem: Problem, gpu: tuned.Gpu) -> Launch:
    return kernel_for(stage_id, least_of(problem), OPTIONS.get(stage_id, {}) | sms_option(gpu.sms)).launch


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


# ---- memory -----------------------------------------------------------------------------------------------


def _dense(shape: torch.Size, dtype: torch.dtype) -> Dense:
    return tuple(shape), torch.empty(shape, device="meta").stride(), dtype


def _dense_like(x: torch.Tensor, columns: int | None = None) -> Dense:
    """As `torch.empty_like` allocates it, its dimensions in memory in the order of those of x; but for the
    last, if `columns` are given."""
    shape = *x.shape[:-1], x.shape[-1] if columns is None else columns
    like = torch.empty_strided(shape, x.stride(), dtype=x.dtype, device="meta")
    return shape, torch.empty_like(like).stride(), x.dtype


def _part(at_q: Place, at_kv: Place, scratch: Scratch) -> Part:
    every = [_dense(shape, getattr(torch, dtype)) for shape, dtype in scratch.values()]
    floats = tuple(x for x in every if x[2] is not torch.int32)
    return Part(at_q, at_kv, floats, tuple(every[len(floats) :]))


def _scratch(part: Part, device: torch.device) -> list[torch.Tensor]:
    """Scratch for a launch, which may hold anything; but counters start at zero, and every launch leaves them
    there.

    Counters are kept for the current stream, in which launches come one after another, and for the part: two
    of one shape must not be one. What a CUDA graph captures has its own: its replays may run beside anything.
    """
    floats = [empty(*dense) for dense in part.floats]
    if is_capturing():
        return [*floats, *(empty(*dense).zero_() for dense in part.counters)]
    place = current_stream(device.index), device.index, part.counters
    counters = _counters.get(place)
    if counters is None:
        counters = _keep(_counters, COUNTERS_MAX, place, _zeros_to_keep(part.counters, device))
    return floats + counters


def _zeros_to_keep(wanted: tuple[Dense, ...], device: torch.device) -> list[torch.Tensor]:
    return to_keep(lambda: [empty(*dense).zero_() for dense in wanted], device)


def to_keep(make: Callable[[], Kept], device: torch.device) -> Kept:
    """What `make` allocates on the current stream, from another thread: `torch.compile`, with
    mode="reduce-overhead", has this one allocate in a CUDA graph's memory while it warms up, and nothing that
    stays may lie there."""
    stream = torch.cuda.current_stream(device)

    def run() -> Kept:
        with torch.cuda.stream(stream):  # and its device
            return make()

    with ThreadPoolExecutor(1) as another:
        return another.submit(run).result()


# ---- small matters ----------------------------------------------------------------------------------------

NOTHING = contextlib.nullcontext()
margin = tuned.margin.get  # SMs that this thread's calls leave free
# What PyTorch's own compiler emits for the same: their public forms take two to four times as long.
empty = torch._C._dynamo.guards._empty_strided_cuda  # of shape, strides and type, on the current device
current_device = getattr(torch._C, "_cuda_getDevice", None)  # None: PyTorch without CUDA, asked for nothing
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def plan_of(
    plans: dict[tuple[object, ...], Kept], kind: tuple[object, ...], make: Callable[[], Kept]
) -> Kept:
    """The plan for inputs of a kind, made for the first of them."""
    plan = plans.get(kind)
    return _keep(plans, KINDS_MAX, kind, make()) if plan is None else plan


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


def _keep(known: dict[tuple[object, ...], Kept], most: int, key: tuple[object, ...], value: Kept) -> Kept:
    """Remember a value; of too many, none but this one."""
    if len(known) >= most:
        known.clear()
    known[key] = value
    return value


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
