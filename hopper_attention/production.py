"""The production kernels on torch tensors: inputs of one kind are checked, and their kernel compiled or
loaded, once; after that a call costs a look-up, its outputs and a launch."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from . import tuned
from .checks import (
    VECTOR_BYTES,
    check_device,
    check_layouts,
    check_lse,
    check_scale,
    gradient_problem_of,
    problem_of,
)
from .kernels import calls, calls_slices, division, ways
from .kernels.calls import UNDIVIDED, Parts
from .kernels.contract import Problem, Scratch
from .kernels.device.constants import GRID_YZ_MAX
from .kernels.device.limits import has_own_kernel, tile_dim
from .kernels.ways import Way
from .launch import (
    BACKWARD,
    DETERMINISTIC,
    DETERMINISTIC_IN_PARTS,
    FORWARD,
    FORWARD_IN_ROWS,
    IN_PARTS,
    IN_SLICES,
    IN_SLICES_OF_ROWS,
    ONE_TILE,
    ONE_TILE_IN_PARTS,
    kernel_for,
    least_of,
    sms_option,
)
from .layouts import Dense, as_argument
from .layouts import aligned as _aligned
from .layouts import dense as _dense
from .layouts import dense_like as _dense_like
from .layouts import readable as _readable
from .plans import KINDS_MAX, Kept, Plans
from .plans import keep as _keep
from .plans import plan_of as plan_of

COUNTERS_MAX = 256
# A launch's scratch of up to so many bytes its stream keeps, with what was too small before it: allocating
# takes longer than so short a kernel. Of the forward pass it is the LSE that nobody asked for.
KEPT_BYTES = {"fwd": 2**18, "bwd": 2**24}

Launch = Callable[..., None]
Place = tuple[slice, slice]  # of batches and of heads
WHOLE: Place = slice(None), slice(None)
# Of the stages that have some; known here, so that a call whose kernels are compiled imports no kernel file.
OPTIONS: dict[str, dict[str, object]] = {
    DETERMINISTIC: calls.DETERMINISTIC,
    DETERMINISTIC_IN_PARTS: calls.DETERMINISTIC,
    ONE_TILE_IN_PARTS: calls.DIVIDED,
    **{x: {"rows": rows} for of in (FORWARD_IN_ROWS, IN_SLICES_OF_ROWS) for rows, x in of.items()},
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
    direction: str = ""  # of what is kept: no forward launch shares it with a backward pass
    kept: dict[int, list[object]] | None = None  # by stream; None of what is not kept


plans: Plans[Plan] = Plans()
_reasons: dict[tuple[object, ...], str | None] = {}
_counters: dict[tuple[object, ...], list[torch.Tensor]] = {}
_memory: dict[tuple[object, ...], torch.Tensor] = {}  # what streams keep, by stream, device, direction, type
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
        if plan.launch is None:
            o, lse = (torch.empty_strided(*x[:2], dtype=x[2], device=device) for x in plan.outputs)
            return o, lse
        plans.keep(options, (q, k, v), plan)
    if device.index != current_device():
        with torch.cuda.device(device):
            return forward(q, k, v, softmax_scale, causal, top_left, with_lse, plan)
    try:
        o, scratch = empty(*plan.outputs[0]), _scratch(plan.parts[0], device)
        if not with_lse:  # the first of the scratch
            plan.launch(q, k, v, o, *scratch, *plan.given)
            return o, None
        lse = empty(*plan.outputs[1])
        plan.launch(q, k, v, o, lse, *scratch, *plan.given)
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
        if plan.launch is None:  # no query or no key: no output that an input could have changed
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
        do, o = _readable(do), _readable(o)
    of_q, of_k, of_v = plan.outputs
    dq, dk, dv = empty(*of_q), empty(*of_k), empty(*of_v)
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
    q, k, v, softmax_scale: float | None, causal: bool, top_left: bool, way: Way | None = None,
    with_lse: bool = True,
) -> Plan:  # fmt: skip
    """`way` is for who measures: otherwise what `ways` chooses."""
    problem, given = _scaled(problem_of(q, k, v, causal, top_left), softmax_scale)
    _check_inputs(FORWARD, problem, q=q, k=k, v=v)
    outputs = _dense_like(q, v.shape[3]), _dense(q.shape[:3], torch.float32)
    lse = {} if with_lse else {"lse": (q.shape[:3], "float32")}
    if not q.numel():
        return Plan(None, outputs, (), given)
    gpu = tuned.gpu(q.device)
    way = way or ways.way_of(problem, *gpu)
    whole = _part(WHOLE, WHOLE, lse | forward_scratch(problem, way, gpu.sms), "fwd")
    launch = _launch(forward_stage(problem, way, gpu), problem, gpu)
    return Plan(launch, outputs[: 2 if with_lse else 1], (whole,), given)


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
    launches = [
        _part(at_q, at_kv, backward_scratch(stage_id, part, in_parts), "bwd")
        for at_q, at_kv, part in _split(problem)
    ]
    outputs = tuple(map(_dense_like, (q, k, v)))
    unreadable = not all(x is _readable(x) for x in (do, o))
    return Plan(_launch(stage_id, problem, gpu), outputs, tuple(launches), given, unreadable)


def forward_stage(problem: Problem, way: Way | None = None, gpu: tuned.Gpu = tuned.H200) -> str:
    """The stage that computes O of a problem that FORWARD takes, by default in the way that `ways` chooses.
    Raises ValueError for rows that no tile of this head_dim has."""
    way = way or ways.way_of(problem, *gpu)
    own, *others = division.TILES[tile_dim(problem)]
    if way.rows not in (own, *others):
        raise ValueError(f"tiles of head_dim {problem.head_dim} have {own} or {others} rows, not {way.rows}")
    whole, in_rows = (IN_SLICES, IN_SLICES_OF_ROWS) if way.sliced else (FORWARD, FORWARD_IN_ROWS)
    return whole if way.rows == own else in_rows[way.rows]


def forward_scratch(problem: Problem, way: Way, sms: int) -> Scratch:
    """What a launch of a way needs beside its tensors."""
    if not way.sliced:
        return calls.forward_scratch(problem, way.rows)
    ctas = division.TILES[tile_dim(problem)][way.rows].ctas
    return calls_slices.slices_scratch(problem, way.rows, sms * ctas)


def backward_stage(
    problem: Problem, deterministic: bool, parts: Parts | None = None, gpu: tuned.Gpu = tuned.H200
) -> tuple[str, Parts | None]:
    """The stage that computes the gradients of a problem that BACKWARD takes, and its parts, if it has any:
    by default those that `division` chooses."""
    # On one tile of keys nobody waits for a turn, and turns spare zeros: for where a sum cannot be spared.
    deterministic |= division.has_one_tile(problem)
    deterministic |= parts is None and division.turns_pay(problem, gpu.sms)
    stages = (DETERMINISTIC, DETERMINISTIC_IN_PARTS) if deterministic else (BACKWARD, IN_PARTS)
    if problem.policies:  # which the stages in parts do not take, nor those of one tile
        return stages[0], None
    if division.one_tile_pays(problem):
        stages = ONE_TILE, ONE_TILE_IN_PARTS
    if parts is None:
        one_launch = max(problem.batch, problem.heads) <= GRID_YZ_MAX
        parts = division.parts_of(problem, gpu.sms, deterministic) if one_launch else UNDIVIDED
    return (stages[0], None) if parts == UNDIVIDED else (stages[1], parts)


def backward_scratch(stage_id: str, problem: Problem, parts: Parts | None) -> Scratch:
    """What a launch of the stage that `backward_stage` gave needs beside its tensors."""
    turns = stage_id in (DETERMINISTIC, DETERMINISTIC_IN_PARTS)
    return calls.backward_scratch(problem, turns, parts, stage_id in (ONE_TILE, ONE_TILE_IN_PARTS))


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


def _part(at_q: Place, at_kv: Place, scratch: Scratch, direction: str = "") -> Part:
    """With a direction, its scratch may be kept: that of "bwd" is for launches under `_several_kernels`."""
    every = [_dense(shape, getattr(torch, dtype)) for shape, dtype in scratch.values()]
    floats = tuple(x for x in every if x[2] is not torch.int32)
    small = sum(4 * math.prod(shape) for shape, _ in scratch.values()) <= KEPT_BYTES.get(direction, -1)
    return Part(at_q, at_kv, floats, tuple(every[len(floats) :]), direction, {} if small else None)


def _scratch(part: Part, device: torch.device) -> list[object]:
    """Scratch for a launch, which may hold anything; but counters start at zero, and every launch leaves them
    there.

    Counters, and what is small, are kept for the current stream, in which launches come one after another.
    What a CUDA graph captures has its own: its replays may run beside anything.
    """
    stream = current_stream(device.index)
    if stream and is_capturing():  # 0 is the default stream, which cannot be captured
        return [empty(*x) for x in part.floats] + [empty(*x).zero_() for x in part.counters]
    if part.kept is not None:
        kept = part.kept.get(stream)
        return _of_stream(part, stream, device) if kept is None else kept
    place = stream, device.index, part.counters
    counters = _counters.get(place)
    if counters is None:
        counters = _keep(_counters, COUNTERS_MAX, place, _zeros_to_keep(part.counters, device))
    return [empty(*x) for x in part.floats] + counters


def _of_stream(part: Part, stream: int, device: torch.device) -> list[object]:
    """Scratch for launches of one direction on a stream: places in memory that all of them share."""
    found = []
    for wanted in (part.floats, part.counters):
        sizes = [-(-math.prod(shape) // 32) * 32 for shape, *_ in wanted]  # to 128 bytes
        place = stream, device.index, part.direction, wanted is part.floats
        memory = _memory.get(place)
        if memory is None or memory.numel() < sum(sizes):  # smaller ones serve whoever has a part of them
            grown = 0 if memory is None else min(2 * memory.numel(), KEPT_BYTES[part.direction] // 4)
            size = max(sum(sizes), grown)
            dense = _dense((size,), torch.float32 if wanted is part.floats else torch.int32)
            (memory,) = _zeros_to_keep((dense,), device)
            _keep(_memory, COUNTERS_MAX, place, memory)
        places = memory[: sum(sizes)].split(sizes)
        found += [as_argument(x[: math.prod(y[0])].view(y[0])) for x, y in zip(places, wanted)]
    part.kept[stream] = found
    return found


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

are_deterministic = torch._C._get_deterministic_algorithms
margin = tuned.margin.get  # SMs that this thread's calls leave free
# What PyTorch's own compiler emits for the same: their public forms take two to four times as long.
empty = torch._C._dynamo.guards._empty_strided_cuda  # of shape, strides and type, on the current device
current_device = getattr(torch._C, "_cuda_getDevice", None)  # None: PyTorch without CUDA, asked for nothing
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


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
