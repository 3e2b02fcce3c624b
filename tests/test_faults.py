"""What the checks stand on: how far an LSE may be off, and which cases a stage must pass."""

import inspect

import pytest

from harness import (
    call_cases,
    case_list,
    cases,
    head_dims,
    judging,
    needles,
    policy_cases,
    reference,
    registry,
    score_cases,
    split_cases,
)
from harness.inputs import random_inputs
from hopper_attention.kernels.contract import Problem

# The LSE

OFF = [(0.0, True), (5e-6, True), (1.5e-5, False), (3e-5, False), (9e-5, False), (1e-3, False)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("row", [0, 1, 100, 202])
@pytest.mark.parametrize(("off", "passes"), OFF)
def test_an_lse_may_be_off_by_round_off(off: float, passes: bool, row: int, sign: int) -> None:
    """In one row of one head, relative to max(1, |lse|); the round-off of fp32 is some 1e-7."""
    q, k, v = random_inputs(Problem.square(2, 3, 203, 64, True), "cpu")
    expected = judging.Expected(4 * q, k, v, True)  # × 4: an LSE of 1 in some rows, of 15 in others
    lse = expected.forward[1].clone()
    lse[1, 2, row] += sign * off * max(1.0, lse[1, 2, row].abs().item())
    yard = reference.yardstick(4 * q, k, v, True, rounds_p=True)
    verdict = expected.judge({"o": yard, "lse": lse.float()}, True)
    assert verdict.passed == passes
    assert verdict.lse_error == pytest.approx(off, abs=2e-7)
    assert all(text.startswith("LSE off by") and f"(1, 2, {row})" in text for text in verdict.failures)


@pytest.mark.parametrize(("off", "passes"), OFF)
def test_needles_have_an_lse_too(off: float, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.square(1, 2, 65, 64, True)
    q, k, v, target = needles.needle_inputs(problem, "cpu")
    lse = reference.reference(q, k, v, True)[1]
    lse[0, 1, 40] *= 1 + off
    found = {"o": v[:, :, target], "lse": lse.float()}
    monkeypatch.setattr(needles, "needle_inputs", lambda problem, device, amplitude: (q, k, v, target))
    monkeypatch.setattr(cases, "run_poisoned", lambda *_, **__: found)
    messages = list(cases.needle_in("k6", problem))
    assert (messages == []) == passes
    assert all("LSE off by" in text for text in messages)


# The cases

BOTH = {
    "lengths",
    "output inside a larger allocation",
    "inputs inside nan",
    "other shapes",
    "top left mask",
    "every kernel",
    "strided views",
    "wrong input",
    "empty",
    "side stream with a pending producer",
    "cuda graph",
    "repeats",
    "beside memory traffic",
    "sanitizer",
}
HEAD_DIMS = {"head dims between", "needles of head dims between", "other head dims are refused"}
POLICIES = {  # for stages that take them
    "policies alone",
    "policies together",
    "edges of windows",
    "far below zero",
    "scores about the cap",
    "nan that some rows do not see",
    "packed sequences",
    "short sequences of many heads",
    "padding between sequences",
    "many sequences",
    "sequences in another order",
    "a graph of other lengths",
}
FORWARD_POLICIES = POLICIES | {
    "scores far in some tiles",
    "scores at ends of the cap",
    "equal keys far from zero",
    "keys behind those at the lower end",
    "an lse about zero",
    "many equal keys beside a larger one",
    "rows of few large scores",
    "small rows beside nan",
}
FORWARD = BOTH | {
    "needle",
    "constant values",
    "causality",
    "extreme logits",
    "long sequence",
    "rising scores",
}
BACKWARD = BOTH | {
    "gradient needle",
    "gradients that vanish",
    "after the forward stage",
    "causality of gradients",
    "gradients at extreme logits",
    "wrong input of the backward pass",
}

SPLIT_TILES = {"tiles left over by a round", "parts put together in one order", "split tiles in a graph"}


@pytest.mark.parametrize(
    ("stage_id", "expected"),
    [
        ("k6", FORWARD | HEAD_DIMS | FORWARD_POLICIES),
        ("k7", FORWARD),
        ("bwd4", BACKWARD | HEAD_DIMS | POLICIES | SPLIT_TILES),
        ("bwd3", BACKWARD),
    ],
)
def test_no_case_is_left_out(stage_id: str, expected: set[str]) -> None:
    """A case that goes, or a new one, is written down here as well."""
    assert set(case_list.chosen(stage_id)) == expected
    assert len(case_list.chosen(stage_id)) == len(expected)


def test_every_case_is_registered() -> None:
    def is_case(function: object, module: object) -> bool:
        own = inspect.isfunction(function) and function.__module__ == module.__name__
        return own and [*inspect.signature(function).parameters] == ["stage_id", "args"]

    written = {
        function
        for module in (cases, call_cases, head_dims, policy_cases, score_cases, split_cases)
        for function in vars(module).values()
        if is_case(function, module)
    }
    assert written == {function for _, function, _ in registry.CASES.values()}
    assert {
        function.__name__.replace("_", " ") for function in written
    } == FORWARD | BACKWARD | HEAD_DIMS | FORWARD_POLICIES | SPLIT_TILES
    assert all(inspect.isgeneratorfunction(function) for function in written)
