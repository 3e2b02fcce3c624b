"""Gradients of a rank's rows, summed over blocks of scores: what `context_parallel`'s backward pass adds up.

`Sums` has the kernels of `kernels/bwd4_blocks.py`, which keep sums in fp32 where they were added. `OneByOne`
has an operator that gives a block's gradients by itself: at other head dims than 64 and 128, deterministic,
and where other kernels are measured.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from .. import ops, production, tuned
from ..checks import check_lse, gradient_problem_of
from ..kernels.contract import DTYPES, Problem
from ..kernels.device.constants import GRID_YZ_MAX
from ..kernels.device.limits import BLOCK, column_blocks, folds, stats_shape
from ..launch import BACKWARD, kernel_for, sms_option
from ..layouts import readable
from .zigzag import SEQUENCE, Rows, Step, Turn

Gradient = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # dq, dk, dv


class Inputs(NamedTuple):
    """Of a backward pass: a rank's rows, o and lse over all keys, and their gradients."""

    do: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None = None
    softmax_scale: float | None = None
    deterministic: bool = False

    def query_heads(self, heads: slice) -> slice:
        """Those of some key heads."""
        group = self.q.shape[1] // max(1, self.k.shape[1])
        return slice(heads.start * group, heads.stop * group)


class Gradients(Protocol):
    """Made of `Inputs`, the turns of a backward pass, and how many messages come for each half of the
    keys."""

    def __init__(self, inputs: Inputs, turns: list[Turn], arrivals: dict[Rows, int]) -> None: ...

    def add_own(self, turn: Turn) -> None:
        """Add a block with the rank's own keys."""

    def add_foreign(self, step: Step, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Add a block with keys from elsewhere to dq; what is to be sent to who holds them."""

    def shapes(self, keys: Rows) -> list[torch.Size]:
        """Of what `add_foreign` gives for these of a rank's keys."""

    def add_arrived(self, keys: Rows, found: list[torch.Tensor]) -> None:
        """Add what came from elsewhere for these of the rank's own keys; not read after the next one."""

    def finish(self) -> Gradient:
        """dq, dk and dv, once everything has been added."""


def gradients_of(inputs: Inputs, turns: list[Turn], arrivals: dict[Rows, int]) -> Gradients:
    """By the kernels that add, where there are some for these inputs."""
    batch, heads, _, head_dim = inputs.q.shape
    adds = head_dim in HEAD_DIMS and not inputs.deterministic
    adds = adds and max(2 * batch, heads) <= GRID_YZ_MAX  # halves of keys are a grid's third dimension too
    return (Sums if adds else OneByOne)(inputs, turns, arrivals)


# ---- kernels that add -------------------------------------------------------------------------------------

FILE = "bwd4_blocks"
HEAD_DIMS = (64, 128)
WHOLE_ROWS = 128  # a block of scratch ends where a tile does, of queries and of keys


class Launches(NamedTuple):
    """Of bwd4_blocks: its pieces, `block` by whether it is causal, `keys` by whether there are others."""

    begin: Callable[..., None]
    block: dict[bool, Callable[..., None]]
    queries: Callable[..., None]
    keys: dict[bool, Callable[..., None]]


def kernels_of(problem: Problem, sms: int) -> dict[str, tuple[str, Problem, dict[str, object]]]:
    """What a backward problem's `Launches` are made of, as `kernel_for` takes it."""
    least = Problem.square(1, 1, 1, problem.head_dim, False, dtype=problem.dtype, direction="bwd")
    scaled = least.with_(scaled=problem.scaled)
    begins = least.with_(scaled=True, lse_grad=True) if problem.lse_grad else scaled
    options = sms_option(sms)
    return {
        "begin": (FILE, begins, {"piece": "begin"}),
        "block": (FILE, scaled, {"piece": "block"} | options),
        "causal block": (FILE, scaled.with_(causal=True), {"piece": "block"} | options),
        "queries": (FILE, scaled, {"piece": "queries"}),
        "keys": (FILE, scaled, {"piece": "keys"}),
        "keys and others": (FILE, scaled, {"piece": "keys", "others": True}),
    }


def reachable() -> list[tuple[str, Problem, dict[str, object]]]:
    """Everything that `Sums` can have compiled: a closed list."""
    found = []
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            least = Problem.square(1, 1, 1, head_dim, False, dtype=dtype, direction="bwd")
            for problem in (least, least.with_(scaled=True), least.with_(scaled=True, lse_grad=True)):
                found += [x for x in kernels_of(problem, tuned.H200.sms).values() if x not in found]
    return found


_launches: dict[tuple[Problem, int], Launches] = {}


def launches_of(problem: Problem, device: torch.device) -> Launches:
    """Those of a backward problem's head_dim, type, scale and gradient of the LSE."""
    least = Problem.square(1, 1, 1, problem.head_dim, False, dtype=problem.dtype, direction="bwd")
    least = least.with_(scaled=problem.scaled, lse_grad=problem.lse_grad)
    what = least, tuned.gpu(device).sms
    if what not in _launches:
        found = {name: kernel_for(*x).launch for name, x in kernels_of(*what).items()}
        block = {False: found["block"], True: found["causal block"]}
        keys = {False: found["keys"], True: found["keys and others"]}
        _launches[what] = Launches(found["begin"], block, found["queries"], keys)
    return _launches[what]


class Sums:
    """dQ stays the sum that the kernels add to, and dK and dV the accumulators that they leave, until
    `finish`. Scratch (`device.backward_ends`, `device.key_parts`) is in blocks of 64 rows, and a half of the
    rows begins with a block: where a chunk is no multiple of WHOLE_ROWS, halves are computed one by one."""

    def __init__(self, inputs: Inputs, turns: list[Turn], arrivals: dict[Rows, int]):
        do, q, k, v, o, lse, dlse, softmax_scale, _ = inputs
        problem, self.scale = production._scaled(gradient_problem_of(do, q, k, v, o, lse), softmax_scale)
        if dlse is not None:  # whose kernels are given their scale
            check_lse("dlse", dlse, q)
            self.scale = self.scale or (problem.head_dim**-0.5,)
            problem = problem.with_(scaled=True, lse_grad=True)
        production._check_inputs(BACKWARD, problem, q=q, k=k, v=v)
        do, o = readable(do), readable(o)
        self.inputs, self.arrivals = inputs._replace(do=do, o=o), dict(arrivals)
        self.launches = launches_of(problem, q.device)
        chunk = q.shape[SEQUENCE] // 2
        self.whole = chunk % WHOLE_ROWS == 0
        self.blocks = math.ceil(chunk / WHOLE_ROWS) * (WHOLE_ROWS // BLOCK)  # of a half
        batch, heads = q.shape[:2]
        self.tile = column_blocks(problem.head_dim), BLOCK * BLOCK
        empty = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)
        of_block = stats_shape(folds(problem.head_dim, capped=False))
        self.stats = empty(batch * heads, 2 * self.blocks, *of_block)
        self.dq_sum = empty(batch * heads, 2 * self.blocks, *self.tile)
        self.own = empty(*self.shapes(Rows.BOTH)[0])
        self.others: dict[Rows, torch.Tensor | None] = dict.fromkeys(Rows.BOTH.halves)
        # A launch may begin while the one before ends: each counts tiles in a place of its own.
        launches = sum(len(list(self.pieces(turn.step))) for turn in turns)
        self.counters = iter(torch.zeros(launches, dtype=torch.int32, device=q.device).split(1))
        for rows in self.spans:
            given = [rows.of(x) for x in (o, do)] + [rows.of(lse)]
            given += [rows.of(x, 1) for x in (self.stats, self.dq_sum)]
            of_lse = [] if dlse is None else [rows.of(dlse.contiguous())]
            self.launches.begin(*given, *of_lse, *self.scale)

    @property
    def spans(self) -> tuple[Rows, ...]:
        """Rows that are one behind the other in scratch as they are in tensors."""
        return (Rows.BOTH,) if self.whole else Rows.BOTH.halves

    def pieces(self, step: Step) -> Iterator[tuple[Rows, Rows, bool]]:
        """(queries, keys, causal) of the launches of a step."""
        if self.whole:
            yield step.queries, step.keys, step.causal
            return
        for queries in step.queries.halves:
            for keys in step.keys.halves:
                if not step.causal or keys <= queries:
                    yield queries, keys, step.causal and queries == keys

    def add(self, step: Step, heads: slice, k: torch.Tensor, v: torch.Tensor, parts: torch.Tensor) -> None:
        """Launch a step for some key heads; its dK and dV into `parts`. k, v and parts hold those heads' and
        the step's keys only."""
        of_q = self.inputs.query_heads(heads)
        do, q = self.inputs.do[:, of_q], self.inputs.q[:, of_q]
        # A slice of the heads is one of scratch's rows, of one batch; of more, `turns` have all heads.
        rows = of_q if q.shape[0] == 1 else slice(None)
        written = set()
        for queries, keys, causal in self.pieces(step):
            pick = keys if step.keys is Rows.BOTH else Rows.BOTH  # of what holds the step's keys
            into = here = pick.of(parts, 3)
            if keys in written:
                into = torch.empty_like(here, memory_format=torch.contiguous_format)
            scratch = [queries.of(x[rows], 1) for x in (self.stats, self.dq_sum)]
            tensors = queries.of(q), pick.of(k), pick.of(v), queries.of(do)
            self.launches.block[causal](*tensors, *scratch, into, next(self.counters), *self.scale)
            if keys in written:
                here.add_(into)
            written.add(keys)

    def add_own(self, turn: Turn) -> None:
        heads = turn.heads
        rows = heads if self.inputs.k.shape[0] == 1 else slice(None)
        k, v = self.inputs.k[:, heads], self.inputs.v[:, heads]
        self.add(turn.step, heads, k, v, self.own[:, rows])

    def add_foreign(self, step: Step, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        parts = self.own.new_empty(self.shapes(step.keys)[0])
        self.add(step, slice(0, k.shape[1]), k, v, parts)
        return [parts]

    def shapes(self, keys: Rows) -> list[torch.Size]:
        heads = self.inputs.k.shape[0] * self.inputs.k.shape[1]
        return [torch.Size((2, heads, 1, len(keys.halves) * self.blocks, *self.tile))]

    def add_arrived(self, keys: Rows, found: list[torch.Tensor]) -> None:
        for half in keys.halves:
            x = half.of(found[0], 3) if keys is Rows.BOTH else found[0]
            self.arrivals[half] -= 1
            if self.others[half] is not None:
                self.others[half].add_(x)
            else:  # of a single one there is nothing to add: it is read where it came
                self.others[half] = x.clone() if self.arrivals[half] else x

    def finish(self) -> Gradient:
        dq, dk, dv = found = tuple(torch.empty_like(x) for x in self.inputs[1:4])
        for rows in self.spans:
            self.launches.queries(rows.of(self.dq_sum, 1), rows.of(dq), *self.scale)
        for half in Rows.BOTH.halves:
            others = [] if self.others[half] is None else [self.others[half]]
            parts = half.of(self.own, 3), *others
            self.launches.keys[bool(others)](*parts, half.of(dk), half.of(dv), *self.scale)
        return found


# ---- an operator for each block ---------------------------------------------------------------------------


class OneByOne:
    """Sums of what an operator gives for each block, rounded once if that is fp32."""

    def __init__(
        self,
        inputs: Inputs,
        turns: list[Turn],
        arrivals: dict[Rows, int],
        backward: Callable[..., Gradient] = ops.backward,
    ):
        """`backward` has the arguments of `ops.backward`."""
        self.inputs, self.backward = inputs, backward
        self.found = tuple(torch.empty_like(x) for x in inputs[1:4])
        own = {turn.step for turn in turns if turn.heads.stop - turn.heads.start < inputs.k.shape[1]}
        self.parts = [turn.heads for turn in turns if turn.step in own] or [turns[0].heads]
        steps = {turn.step for turn in turns}
        self.sums: dict[tuple[int, Rows, int], Sum] = {}
        for half in Rows.BOTH.halves:
            terms = sum(half in step.queries.halves for step in steps), *[1 + arrivals[half]] * 2
            for i, (gradient, count) in enumerate(zip(self.found, terms)):
                for part, heads in enumerate(self.parts):
                    target = half.of(gradient)[:, self.heads_of(i, heads)]
                    self.sums[i, half, part] = Sum(target, count)
        # Made once: a half's rows of every tensor, and of the LSE, which kernels want contiguous, a copy.
        rows = inputs.do, inputs.q, inputs.o
        lses = inputs.lse, inputs.dlse
        self.rows = {
            which: [which.of(x) for x in rows]
            + [None if x is None else which.of(x).contiguous() for x in lses]
            for which in {step.queries for step in steps}
        }

    def heads_of(self, gradient: int, heads: slice) -> slice:
        """Of dq's, those of some key heads."""
        return self.inputs.query_heads(heads) if gradient == 0 else heads

    def add(
        self, gradient: int, rows: Rows, x: torch.Tensor, heads: slice | None = None, lent: bool = False
    ) -> None:
        """Of all heads, or of one of `parts`; `lent` as in `Sum`."""
        for half in rows.halves:
            mine = half.of(x) if rows is Rows.BOTH else x
            for part, of_part in enumerate(self.parts):
                if heads is None:
                    self.sums[gradient, half, part].add(mine[:, self.heads_of(gradient, of_part)], lent)
                elif heads == of_part:
                    self.sums[gradient, half, part].add(mine, lent)

    def block(self, step: Step, heads: slice, k: torch.Tensor, v: torch.Tensor) -> Gradient:
        do, q, o, lse, dlse = self.rows[step.queries]
        of_q = self.inputs.query_heads(heads)
        lses = [x if x is None else x[:, of_q].contiguous() for x in (lse, dlse)]
        options = self.inputs.softmax_scale, step.causal, False, self.inputs.deterministic
        return self.backward(do[:, of_q], q[:, of_q], k, v, o[:, of_q], *lses, *options)

    def add_own(self, turn: Turn) -> None:
        k, v = self.inputs.k[:, turn.heads], self.inputs.v[:, turn.heads]
        found = self.block(turn.step, turn.heads, k, v)
        for i, x in enumerate(found):
            self.add(i, Rows.BOTH, x, turn.heads)

    def add_foreign(self, step: Step, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        dq, dk, dv = self.block(step, slice(0, k.shape[1]), k, v)
        self.add(0, step.queries, dq)
        return [packed(x) for x in (dk, dv)]

    def shapes(self, keys: Rows) -> list[torch.Size]:
        return [packed_shape(x, keys) for x in (self.inputs.k, self.inputs.v)]

    def add_arrived(self, keys: Rows, found: list[torch.Tensor]) -> None:
        for i, x in enumerate(found, 1):
            self.add(i, keys, x.transpose(1, 2), lent=True)

    def finish(self) -> Gradient:
        return self.found


class Sum:
    """A gradient of some rows, a sum of `terms` parts into `target`, in fp32 between the first and the
    last."""

    def __init__(self, target: torch.Tensor, terms: int):
        self.target, self.left = target, terms
        self.running: torch.Tensor | None = None

    def add(self, x: torch.Tensor, lent: bool = False) -> None:
        """x may be kept and added to, unless it is only `lent`."""
        self.left -= 1
        if self.running is None:
            if self.left == 0:
                self.target.copy_(x)
            else:
                self.running = x.clone() if lent else x
        elif self.left == 0:  # computed in fp32, and rounded once
            torch.add(self.running, x, out=self.target)
        elif self.running.dtype == torch.float32:
            self.running.add_(x)
        else:
            self.running = self.running.to(torch.float32).add_(x)


# ---- what travels -----------------------------------------------------------------------------------------


def packed(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, head_dim) as it travels: (batch, rows, heads, head_dim), contiguous. A copy only
    where memory does not hold it so."""
    return x.transpose(1, 2).contiguous()


def packed_shape(x: torch.Tensor, rows: Rows) -> torch.Size:
    batch, heads, seqlen, head_dim = x.shape
    return torch.Size((batch, seqlen if rows is Rows.BOTH else seqlen // 2, heads, head_dim))
