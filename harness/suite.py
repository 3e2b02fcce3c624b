"""The library on what models ask of it (`suites.MODELS`): every way it could choose, its call, and the peers.

    python bench.py k6 --suite models            forward: measure and print
    python bench.py k6 bwd4 --suite models --save    both, and write results/<gpu>/library/models_*.json

A row is a problem: its shape, and µs by provider. Ours are `attention` or `attention_backward`, the library's
call, which takes the way that it chooses; that with `deterministic=True`; and each way by itself, its kernels
alone (`way_of`). What the library chooses is not measured here but looked up, in the tables and the tests: an
edit of `division` is held against what is committed. Calls are judged before and after the timing by the pass
rule, in a problem beyond JUDGED_WHOLE on one key head and its query heads; ways must agree with the call.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness import judging, peers, reference, row_files, timing
from harness.command import Usage
from harness.inputs import random_inputs, returned_to_poisoned_memory
from harness.measuring import chosen_stage, job_of
from harness.results import PUBLIC_CALLS
from harness.suites import SUITES
from hopper_attention import attention, attention_backward, production, selection, tuned
from hopper_attention import ways as forward_ways
from hopper_attention.kernels import division, ladder
from hopper_attention.kernels.calls import UNDIVIDED, Parts
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.limits import tile_dim
from hopper_attention.launch import (
    BACKWARD,
    DECODE,
    DETERMINISTIC,
    FORWARD,
    IN_GROUPS,
    IN_PARTS,
    IN_SLICES,
    ONE_TILE,
    ONE_TILE_IN_PARTS,
)
from hopper_attention.precompile import Job, ahead
from hopper_attention.ways import Kind, Way

PEERS = ("fa2", "cudnn", "fa3", "fa4")
DIRECTIONS = {FORWARD: "fwd", BACKWARD: "bwd"}  # by the stage that a user names
SECONDS = 0.06  # of each call
AGREE = 0.02  # of the largest element: by how much a way may differ from the call
JUDGED_WHOLE = 2e11  # FLOPs
WAYS = 6  # of a backward pass that are timed: those that `division` expects to take least
IDENTITY = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_kv", "head_dim", "causal")

Call = Callable[[], tuple[torch.Tensor, ...]]


class Launches(NamedTuple):
    """A backward pass in more than one launch."""

    each: tuple[tuple[Problem, Parts], ...]


Choice = Way | Parts | Launches


def way_of(choice: Choice, problem: Problem) -> str:
    """The name of a way: of the forward pass, or parts or launches of a backward one."""
    if isinstance(choice, Way) and choice.kind is Kind.DECODE:
        return DECODE
    if isinstance(choice, Parts):
        one_tile = division.one_tile_pays(problem)
        whole, in_parts = (ONE_TILE, ONE_TILE_IN_PARTS) if one_tile else (BACKWARD, IN_PARTS)
        return whole if choice == UNDIVIDED else f"{in_parts} {choice.heads}×{choice.queries}"
    if isinstance(choice, Launches):
        return " and ".join(way_of(parts, of_launch) for of_launch, parts in choice.each)
    if choice.kind is Kind.GROUPS:
        return f"{IN_GROUPS} {choice.rows} rows"
    name = IN_SLICES if choice.kind is Kind.SLICES else FORWARD
    first = next(iter(division.TILES[tile_dim(problem)]))
    return name if choice.rows == first else f"{name} {choice.rows} rows"


def choice_of(problem: Problem) -> Choice:
    """The way, parts or launches that the library takes."""
    gpu = tuned.gpu()
    if problem.direction == "fwd":
        return forward_ways.way_of(problem, *gpu)
    launches = selection.backward_launches(problem, False, gpu=gpu)
    each = tuple((x.problem, x.parts or UNDIVIDED) for x in launches)
    return Launches(each) if len(each) > 1 else each[0][1]


def chosen(problem: Problem) -> str:
    """The way that the library takes."""
    return way_of(choice_of(problem), problem)


def ways(problem: Problem) -> list[Choice]:
    """The ways to compute a problem that are timed; the one that the library takes is among them."""
    if problem.direction == "fwd":
        return forward_ways.ways_of(problem)
    by_steps = sorted(division.divisions(problem), key=lambda parts: division.steps_of(problem, parts))
    return list(dict.fromkeys((UNDIVIDED, choice_of(problem), division.parts_of(problem), *by_steps[:WAYS])))


def problem_of(row: dict[str, Any], direction: str) -> Problem:
    return Problem(**{name: row[name] for name in IDENTITY}, direction=direction)


class _One:
    """One problem: its inputs, its calls, and who judges them."""

    def __init__(self, problem: Problem):
        self.problem, self.backward = problem, problem.direction == "bwd"
        self.q, self.k, self.v, *self.do = random_inputs(problem)
        whole = problem.flops <= JUDGED_WHOLE
        group = problem.heads // problem.kv_heads
        self.at_q = (slice(None),) * 2 if whole else (slice(-1, None), slice(-group, None))
        self.at_kv = (slice(None),) * 2 if whole else (slice(-1, None), slice(-1, None))
        judged = [self.q[self.at_q], self.k[self.at_kv], self.v[self.at_kv]]
        self.expected = judging.Expected(*judged, problem.causal, *(x[self.at_q] for x in self.do))
        if self.backward:
            self.o, self.lse = attention(self.q, self.k, self.v, causal=problem.causal, return_lse=True)
            for x, exact in zip((self.o, self.lse), self.expected.saved):
                x[self.at_q] = exact

    def call(self, **options: bool) -> tuple[torch.Tensor, ...]:
        """The library's call."""
        if not self.backward:
            return attention(self.q, self.k, self.v, causal=self.problem.causal, return_lse=True)
        inputs = *self.do, self.q, self.k, self.v, self.o, self.lse
        return attention_backward(*inputs, causal=self.problem.causal, **options)

    def way(self, choice: Choice) -> Call:
        """A way by itself: one launch after another of a plan that is made already."""
        if not self.backward:
            inputs, options = (self.q, self.k, self.v), (None, self.problem.causal, False)
            plan = production._plan_forward(*inputs, *options, choice)
            return lambda: production.forward(*inputs, *options, plan=plan)
        inputs = *self.do, self.q, self.k, self.v, self.o, self.lse, None
        parts = choice if isinstance(choice, Parts) else None  # launches are the library's
        plan = production._plan_backward(*inputs, None, self.problem.causal, False, False, parts)
        return lambda: production._backward(plan, *inputs, self.q.device)

    def judge(self, found: tuple[torch.Tensor, ...], stage_id: str) -> None:
        """Raise RuntimeError where outputs break the pass rule."""
        names = ("dq", "dk", "dv") if self.backward else ("o", "lse")
        places = (self.at_q, self.at_kv, self.at_kv) if self.backward else (self.at_q, self.at_q)
        outputs = {name: x[at] for name, x, at in zip(names, found, places)}
        stage, file = ladder.load(stage_id)
        rounding = reference.rounding_of(stage, file, self.problem, **stage.options)
        verdict = self.expected.judge(outputs, rounding)
        if not verdict.passed:
            raise RuntimeError(f"{self.problem}: {stage_id}: {'; '.join(verdict.failures)}")


def kernels(problem: Problem) -> list[Job]:
    """Those of ours that `measure` runs."""
    found = [selection.forward_stage(problem, way) for way in ways(problem.with_(direction="fwd"))]
    if problem.direction == "bwd":
        parts = [x for x in ways(problem) if isinstance(x, Parts)]
        found += [selection.backward_stage(problem, False, x)[0] for x in parts]
        for deterministic in (False, True):
            found += [x.stage_id for x in selection.backward_launches(problem, deterministic)]
    return [job_of(stage_id, problem) for stage_id in dict.fromkeys(found)]


def measure(problem: Problem, peer_names: list[str]) -> dict[str, float]:
    """µs by provider. Raises RuntimeError where an output is wrong."""
    one = _One(problem)
    stage_id = chosen_stage(problem)
    calls: dict[str, Callable[[], object]] = {PUBLIC_CALLS[FORWARD]: one.call}
    if one.backward:
        calls = {PUBLIC_CALLS[BACKWARD]: one.call}
        calls[PUBLIC_CALLS[DETERMINISTIC]] = lambda: one.call(deterministic=True)
    judged = dict(calls)
    for call in judged.values():
        found = returned_to_poisoned_memory(call)
        one.judge(found, stage_id)
    for choice in ways(problem):
        name = way_of(choice, problem)
        calls[name] = one.way(choice)
        for x, y in zip(calls[name](), found):
            if not (x - y).abs().max() <= AGREE * y.abs().max():
                raise RuntimeError(f"{problem}: {name} does not agree with the call")
    del found
    for name in peer_names:
        try:
            call = peers.PEERS[name].build(problem, one.q, one.k, one.v, *one.do)
            call()
        except Exception as error:
            print(f"{problem}: {name}: {error!s:.80}", flush=True)
        else:
            calls[name] = call
    times = timing.interleaved(calls, SECONDS)
    for call in judged.values():
        one.judge(returned_to_poisoned_memory(call), stage_id)
    return {name: round(1e3 * time.ms_median, 2) for name, time in times.items()}


def run(
    suite: str, stage_ids: list[str], folder: Path | None, peer_names: list[str],
    wanted: Callable[[Problem], bool],
) -> bool:  # fmt: skip
    """Measure the problems of a suite that are `wanted` in the directions of the stages, short ones first,
    print, and with a folder write after each: rows of the others stay. Returns whether every output was right
    and every row has a peer.

    Raises Usage before anything is measured: where none is wanted, where rows that are kept are of another
    environment, and where `tune` has changed what the library chooses.
    """
    if tuned.gpu().tiles is not division.TILES:
        raise Usage(
            "this GPU is tuned: its choices are not the published ones; `hopper_attention.tune --forget`"
        )
    found = peers.versions([name for name in peer_names if name in PEERS])
    environment, passed = timing.environment(found), True
    models = {model.problem: model for model in SUITES[suite] if wanted(model.problem)}
    if not models:
        raise Usage(f"no problem of the suite {suite!r} is of these lengths, head dims and masks")
    for stage_id in stage_ids if folder else ():
        row_files.refuse(f"{suite}_{DIRECTIONS[stage_id]}", environment, folder)
    asked = [x.with_(direction=DIRECTIONS[stage_id]) for stage_id in stage_ids for x in models]
    ahead(job for problem in asked for job in kernels(problem))
    for stage_id in stage_ids:
        direction = DIRECTIONS[stage_id]
        every = [model.problem.with_(direction=direction) for model in SUITES[suite]]
        key_of = lambda row, direction=direction: problem_of(row, direction)
        for model in sorted(models.values(), key=lambda model: model.problem.flops):
            problem = model.problem.with_(direction=direction)
            shape = {name: asdict(problem)[name] for name in IDENTITY}
            try:
                us = measure(problem, list(found))
                if not {*us} & {*PEERS}:
                    raise RuntimeError("no peer took it")
                row = {"family": model.family, "name": model.name, **shape, "us": us}
                print(line_of(row, direction), flush=True)
                if folder:
                    row_files.add(row, key_of, every, f"{suite}_{direction}", environment, folder)
            except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
                print(f"{problem}: {error}", flush=True)
                passed = False
            torch.cuda.empty_cache()
    return passed


def line_of(row: dict[str, Any], direction: str) -> str:
    """A row for the terminal."""
    us, problem = row["us"], problem_of(row, direction)
    best = min((name for name in us if name in PEERS), key=us.get)
    ours = us[PUBLIC_CALLS[FORWARD if direction == "fwd" else BACKWARD]]
    return f"{row['family']}, {row['name']}: {problem}: {ours:.1f} µs, {us[best] / ours:.3f} × {best}  {us}"
