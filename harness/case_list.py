"""Which cases of `harness.cases` a stage has, and running them; without a GPU, its NumPy model in their
place."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from harness import cases, judging, models, policy_cases, reference  # noqa: F401  cases registers them
from harness.inputs import random_inputs
from harness.registry import CASES
from harness.sweep import HEAD_DIMS
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import LazyMaximum, Problem
from hopper_attention.launch import LIBRARY


def run_model(stage_id: str) -> list[str]:
    """The stage's NumPy model in float64 against the reference: what can be checked without a GPU."""
    stage, module = ladder.load(stage_id)
    by_name = models.BACKWARD_MODELS if stage.direction == "bwd" else models.MODELS
    model, failures = by_name[stage.model], []
    square = Problem.square(1, 1, 1, 64, False, direction=stage.direction)
    problems = [
        square.with_(seqlen_q=n, seqlen_kv=n, head_dim=d, causal=causal)
        for n in (1, 3, 64, 65, 203, 512)
        for d in HEAD_DIMS
        for causal in (False, True)
    ]
    top_left = square.with_(causal=True, top_left=True)
    unequal = [top_left.with_(seqlen_q=n, seqlen_kv=m) for n, m in ((65, 203), (203, 65), (1, 3), (3, 1))]
    problems += [problem for problem in unequal if module.supports(problem) is None]
    for problem in problems:
        mask = {"causal": problem.causal, "top_left": problem.top_left}
        q, k, v, *do = (x.double() for x in random_inputs(problem, "cpu", seed=problem.seqlen_q))
        rounding, lazy = reference.rounding_of(stage, module, problem, **stage.options), {}
        if isinstance(rounding, LazyMaximum):
            lazy = rounding.behind
            q *= 32  # as they are, hardly a score is 2⁸ ahead of its row's first tile
        expected = judging.Expected(q, k, v, do=do[0] if do else None, **mask)
        inputs, exact = (q, k, v), expected.forward
        if do:
            inputs, exact = (q, k, v, *expected.forward, *do), expected.gradients
        found = model(*(x[0, 0].numpy() for x in inputs), **mask, **lazy)
        off = max(abs(x - ref[0, 0].numpy()).max() for x, ref in zip(found, exact))
        if not off <= 1e-12:
            failures.append(f"{problem}: {stage.model} is {off:.3g} away from the reference")
    return failures


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    name: str
    failures: list[str]
    seconds: float


def chosen(stage_id: str, only: str | None = None) -> list[str]:
    """The cases of a stage's direction, by name; with `only` those whose name contains it."""
    stage, _ = ladder.load(stage_id)
    kinds = (
        None,
        "bwd" if stage.direction == "bwd" else "fwd",
        "library" if stage_id in LIBRARY else None,
        stage_id,
    )
    takes = {None, *policy_cases.policies_of(stage_id)}
    return [
        name
        for name, (of, _, policy) in CASES.items()
        if of in kinds and policy in takes and (only or "") in name
    ]


def run_cases(stage_id: str, args: object) -> Iterator[Outcome]:
    """Run a stage's cases, one after the other."""
    for name in chosen(stage_id, args.only):
        begin = time.perf_counter()
        try:
            failures = list(CASES[name][1](stage_id, args))
        except Exception as error:  # a case that breaks is a case that fails; the others still run
            failures = [f"{type(error).__name__}: {error}"]
        yield Outcome(name, failures, time.perf_counter() - begin)
