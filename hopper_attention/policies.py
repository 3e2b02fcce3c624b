"""Attention with a window, a soft cap or a sink, or of packed sequences, on torch tensors: inputs of one kind
are checked and their kernel compiled or loaded once, as in `production`, with which it shares the scratch
that streams keep for the backward pass.

Lengths are not read on the host, unless `lengths` is asked to look, and no plan follows from them: where
sequences begin and end, the kernels read themselves, so that a call does not wait for the GPU and a CUDA
graph that captured one serves all lengths.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import lengths, memory, production, tuned, ways
from .checks import (
    VECTOR_BYTES,
    check_gradients,
    check_packing,
    check_scale,
    check_sink,
    check_softcap,
    check_window,
    like_o,
)
from .checks import general_problem_of as problem_of
from .kernels import calls, division
from .kernels.contract import Problem
from .kernels.device.limits import bounds, has_own_kernel
from .launch import BACKWARD, FORWARD
from .layouts import dense, dense_like, readable
from .memory import WHOLE, part_of, scratch_of
from .plans import Plans
from .production import Plan, planned_launches, run_on
from .selection import are_short, forward_launch, forward_scratch

# What the longest sequence has at most, as compiled graphs are told: few, since PyTorch compiles a function
# anew for each, and no more than 8 times.
TOLD_IN_GRAPHS = (division.ONE_TILE_KEYS, 256, 512, 1024)
NAMES = ("cu_q", "cu_kv", "used_q", "used_kv")  # of what says where packed sequences lie


class Made(NamedTuple):
    """A plan for inputs of a kind, which has no parts where there is no query, or no key."""

    plan: Plan
    numbers: tuple[float | int, ...]  # that its kernels are given before tensors: scale, window, soft cap
    rows: int = 0  # of a tile, where sequences are about equally long and their tiles are not listed


_plans: Plans[Made] = Plans()


class Tensors(NamedTuple):
    """What a call may have beside q, k and v."""

    sink: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    cu_kv: torch.Tensor | None = None
    used_q: torch.Tensor | None = None
    used_kv: torch.Tensor | None = None

    @property
    def given(self) -> tuple[object, ...]:
        """As a launch is given them, in its order."""
        given = () if self.sink is None else (self.sink,)
        if self.cu_q is None:
            return given
        which = (self.used_q is not None) + 2 * (self.used_kv is not None)
        used_q = self.cu_q if self.used_q is None else self.used_q
        used_kv = self.cu_kv if self.used_kv is None else self.used_kv
        return *given, self.cu_q, self.cu_kv, used_q, used_kv, which


NOTHING_MORE = Tensors()


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    more: Tensors,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    window: tuple[int, int],
    softcap: float,
    longest: int = 0,
    longest_kv: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse on PyTorch's current stream, of q (batch, heads, seqlen, head_dim), or of packed sequences
    (total, heads, head_dim) with lse (heads, total). `longest` is how many queries a sequence has at most, or
    0: a hint, which only time depends on; lengths that are checked are checked against `longest_kv`.

    Raises TypeError or ValueError before anything is launched.
    """
    options = softmax_scale, causal, top_left, window, softcap
    # What the hint says of lengths is part of a plan's kind, the hint itself is not.
    packed, known = more.cu_q is not None, ways.Lengths.ANY
    if packed and q.dim() == 3:
        known = ways.known_of(q.shape[0], more.cu_q.numel() - 1, longest)
    plan_anew = lambda: _plan_forward(q, k, v, more, *options, known=known)
    plan, numbers, rows = _made(("fwd", *options, known), (q, k, v), more, plan_anew)
    if lengths.CHECKED and packed:
        lengths.look_at_packing(q, k, *more[1:], longest_kv)
    device = q.device
    if not plan.parts:
        return _of_no_key(q, v, more)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = [memory.empty(*x) for x in plan.outputs]
        if more.used_q is not None:  # there are rows of no sequence, which no kernel writes
            o.zero_(), lse.zero_()
        (part,) = plan.parts
        scratch = scratch_of(part, device)
        given = *numbers, *more.given
        if not packed:
            calls.launch_forward(part.launch, q, k, v, o, lse, scratch, given)
        else:
            each = -(-longest // rows) if rows else 0
            tensors = [as_batch(x) for x in (q, k, v, o)]
            with production._several_kernels:  # one lists the tiles
                calls.launch_forward(part.launch, *tensors, lse.unsqueeze(0), scratch, (*given, each))
        return o, lse

    return run_on(device, run, plan_anew)


def backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    more: Tensors,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    window: tuple[int, int],
    softcap: float,
    deterministic: bool,
    longest_kv: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv and the sink's gradient (heads,), without a sink (0,), on PyTorch's current stream.
    `longest_kv` is how many keys a packed sequence has at most, or 0: of one that has more gradients may be
    NaN.

    Raises TypeError or ValueError before anything is launched.
    """
    options = softmax_scale, causal, top_left, window, softcap, deterministic
    short = more.cu_q is not None and are_short(longest_kv)
    plan_anew = lambda: _plan_backward(do, q, k, v, o, lse, dlse, more, *options, short=short)
    kind = "bwd", *options, dlse is None, short
    plan, numbers, _ = _made(kind, (do, q, k, v, o, lse), more, plan_anew)
    if lengths.CHECKED and more.cu_q is not None:
        lengths.look_at_packing(q, k, *more[1:], longest_kv)
    device = q.device
    if not plan.parts:
        return *map(torch.zeros_like, (q, k, v)), _sink_of_no_key(q, dlse, more)

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        do_, o_ = do, o
        if plan.unreadable or (do.data_ptr() | o.data_ptr()) % VECTOR_BYTES:
            do_, o_ = readable(do), readable(o)
        dq, dk, dv = gradients = [memory.empty(*x) for x in plan.outputs]
        if more.used_q is not None or more.used_kv is not None:
            for x in gradients:
                x.zero_()
        whole = len(plan.parts) == 1
        dsink = q.new_empty(0, dtype=torch.float32)
        if more.sink is not None:
            dsink = (torch.empty_like if whole else torch.zeros_like)(more.sink)
        tensors = q, k, v, o_, lse, do_, dq, dk, dv
        slope = None if dlse is None else dlse.contiguous()
        if more.cu_q is not None:
            q_, k_, v_, o_, lse_, *rest = (x.unsqueeze(0) if x is lse else as_batch(x) for x in tensors)
            tensors = q_, k_, v_, o_, lse_, *rest
            slope = None if slope is None else slope.unsqueeze(0)
        for part in plan.parts:
            at = [part.at_q] * 9
            for of_keys in (1, 2, 7, 8):
                at[of_keys] = part.at_kv
            own = tensors if whole else [x[place] for x, place in zip(tensors, at)]
            of_heads = lambda x, part=part: x if whole else x[part.at_q[1]]
            sinks = more if more.sink is None else more._replace(sink=of_heads(more.sink))
            given = [*numbers, *sinks.given]
            if slope is not None:
                given.append(slope if whole else slope[part.at_q].contiguous())
            own_dsink = dsink if whole else torch.empty_like(of_heads(dsink))
            if more.sink is not None:
                given.append(own_dsink)
            scratch = scratch_of(part, device)
            with production._several_kernels:
                calls.launch_backward(part.launch, *own, scratch, given)
            if more.sink is not None and not whole:  # parts of other batches have these heads too
                of_heads(dsink).add_(own_dsink)
        return dq, dk, dv, dsink

    return run_on(device, run, plan_anew)


def reason_against(
    direction: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *options: object,
    also: Callable[[Problem], str | None],
    more: Tensors = NOTHING_MORE,
) -> str | None:
    """Why `forward`, or with "bwd" `backward`, would refuse these inputs, or None; or what `also` has against
    the problem. The options are theirs."""
    try:
        problem, _ = _problem_of(direction, q, k, v, more, *options)
        return also(problem)
    except (TypeError, ValueError) as error:
        return str(error)


def told(longest: object) -> int:
    """How many rows a packed sequence has at most, as the caller says, or 0: only of a number. A graph that
    is being compiled is told the first of TOLD_IN_GRAPHS that is enough, so that it serves all numbers up to
    there, and nothing of a number that only data have."""
    if type(longest) is not int:
        return 0
    if not torch.compiler.is_compiling():
        return max(0, min(longest, 2**63 - 1))  # an operator's number has no more bits
    # Half a second to import, but for who compiles a graph.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if guard_or_false(longest > 0):
        for enough in TOLD_IN_GRAPHS:
            if guard_or_false(longest <= enough):
                return enough
    return 0


def as_batch(x: torch.Tensor) -> torch.Tensor:
    """(total, heads, head_dim) as (1, heads, total, head_dim)."""
    return x.transpose(0, 1).unsqueeze(0)


# ---- plans ------------------------------------------------------------------------------------------------


def _made(
    options: tuple[object, ...], tensors: tuple[torch.Tensor, ...], more: Tensors, make: Callable[[], Made]
) -> Made:
    """What was made for inputs of this kind, or is now."""
    options = *options, *[x is None for x in more], production.margin()
    tensors = *tensors, *[x for x in more if x is not None]
    made = _plans.find(options, *tensors)
    return _plans.keep(options, tensors, make()) if made is None else made


def _problem_of(
    direction: str, q, k, v, more: Tensors, softmax_scale, causal, top_left, window, softcap
) -> tuple[Problem, tuple[float | int, ...]]:
    """The problem, in which sequences stand for themselves without their lengths, and the numbers that its
    kernels are given. Raises as `forward`."""
    check_window(window, causal, top_left)
    packed = more.cu_q is not None or more.cu_kv is not None
    if not packed and (more.used_q is not None or more.used_kv is not None):
        raise ValueError("seqused_q and seqused_k are of packed sequences, which have their cu_seqlens")
    if packed and top_left:  # heads that share a tile of one short sequence would hide other keys
        raise ValueError("packed sequences have their causal masks at the bottom right, not top_left")
    problem = problem_of(q, k, v, causal, top_left, packed).with_(direction=direction)
    window = window if window != (-1, -1) else None
    problem = without_idle_window(problem.with_(window=window, softcap=check_softcap(softcap)))
    if more.sink is not None:
        check_sink(more.sink, q, problem.heads)
        problem = problem.with_(sink=True)
    if packed:
        sequences = check_packing(q, **{name: getattr(more, name) for name in NAMES})
        problem = problem.with_(sequences=((0, 0),) * sequences)
    scale = check_scale(softmax_scale, problem.head_dim)
    given = scale is not None or bool(problem.policies) or not has_own_kernel(problem)
    problem = problem.with_(scaled=given)
    numbers = (scale or problem.head_dim**-0.5,) if problem.scaled else ()
    if problem.window is not None:
        numbers = *numbers, *bounds(problem.window)
    if problem.softcap:
        numbers = *numbers, problem.softcap
    rows = [as_batch(x) if packed else x for x in (q, k, v)]
    stage_id, asked = FORWARD if direction == "fwd" else BACKWARD, problem
    if packed:  # of which there may be none, without rows; else they are as others
        extents = {"seqlen_q": max(1, problem.seqlen_q), "seqlen_kv": max(1, problem.seqlen_kv)}
        asked = problem.with_(**extents, sequences=problem.sequences or ((0, 0),))
    production._check_inputs(stage_id, asked, **dict(zip("qkv", rows)))
    return problem, numbers


def without_idle_window(problem: Problem) -> Problem:
    """The problem without a window, or the side of one, that is too wide to hide anything; what is left may
    be the causal mask, whose kernel is faster."""
    if problem.window is None:
        return problem
    left, right = problem.window
    left = -1 if left >= problem.seqlen_kv - 1 else left
    right = -1 if right >= max(1, problem.seqlen_q - 1) else right
    if (left, right) == (-1, 0):
        return problem.with_(window=None, causal=True)
    return problem.with_(window=None if (left, right) == (-1, -1) else (left, right))


def _plan_forward(q, k, v, more: Tensors, *options: object, known: ways.Lengths) -> Made:
    problem, numbers = _problem_of("fwd", q, k, v, more, *options)
    lse_shape = q.shape[:3] if more.cu_q is None else (q.shape[1], q.shape[0])
    outputs = dense_like(q, v.shape[-1]), dense(lse_shape, torch.float32)
    if not q.numel() or not k.numel() or problem.sequences == ():
        return Made(Plan(outputs, (), ()), numbers)
    gpu = tuned.gpu(q.device)
    way = ways.way_of(problem, *gpu, known)
    part = part_of(forward_launch(problem, way, gpu), WHOLE, WHOLE, forward_scratch(problem, way, gpu.sms))
    unlisted = known is ways.Lengths.EQUAL and not ways.shares_heads(problem, *gpu)
    plan = Plan(outputs, (part,), ())
    return Made(plan, numbers, way.rows if unlisted else 0)


def _plan_backward(
    do, q, k, v, o, lse, dlse, more: Tensors, *options: object, parts: calls.Parts | None = None,
    short: bool = False,
) -> Made:  # fmt: skip
    *options, deterministic = options
    problem, numbers = _problem_of("bwd", q, k, v, more, *options)
    check_gradients(do, q, v, o, lse, dlse, packed=more.cu_q is not None)
    if dlse is not None:
        numbers = numbers or (problem.head_dim**-0.5,)
        problem = problem.with_(scaled=True, lse_grad=True)
    if not (q.numel() and k.numel()) or problem.sequences == ():
        return Made(Plan((), (), ()), numbers)
    gpu = tuned.gpu(q.device)
    launches = planned_launches(problem, deterministic, parts, gpu, short)
    outputs = tuple(map(dense_like, (q, k, v)))
    unreadable = not all(x is readable(x) for x in (do, o))
    return Made(Plan(outputs, launches, (), unreadable), numbers)


# ---- without a key ----------------------------------------------------------------------------------------


def _of_no_key(q: torch.Tensor, v: torch.Tensor, more: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse where there is no key at all: 0, and −∞ or the sink."""
    packed = more.cu_q is not None
    shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    if more.sink is not None:
        lse = more.sink.view(-1, 1).expand(shape).clone(memory_format=torch.contiguous_format)
    return torch.zeros_like(like_o(q, v)), lse


def _sink_of_no_key(q: torch.Tensor, dlse: torch.Tensor | None, more: Tensors) -> torch.Tensor:
    """The sink's gradient there: that of the lse, which is the sink, of queries that belong to a sequence."""
    if more.sink is None:
        return q.new_zeros(0, dtype=torch.float32)
    if dlse is None:
        return torch.zeros_like(more.sink)
    if more.cu_q is None:
        return dlse.sum((0, 2))
    ends = more.cu_q[1:] if more.used_q is None else more.cu_q[:-1] + more.used_q
    edges = torch.zeros(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    for sign, at in ((1, more.cu_q[:-1]), (-1, ends)):
        edges.index_add_(0, at.long(), torch.full_like(at, sign))
    own = edges.cumsum(0)[:-1] > 0
    return torch.where(own, dlse, 0.0).sum(1)
