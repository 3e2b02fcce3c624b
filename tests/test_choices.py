"""The library's choices held against committed rows: the model's expectations by name, and the figure."""

import json
from pathlib import Path

import pytest

from harness import choices, library, suite
from harness.results import gpu_folder, results_dir
from harness.suites import SUITES
from hopper_attention.kernels import calls, division
from hopper_attention.kernels.contract import Problem

FOLDER = results_dir() / gpu_folder("NVIDIA H200")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_every_way_that_is_timed_has_an_expected_time(direction: str) -> None:
    for model in SUITES["models"]:
        problem = model.problem.with_(direction=direction)
        expected = choices.expected_times(problem)
        assert {suite.way_of(x, problem) for x in suite.ways(problem)} <= {*expected}
        assert all(time > 0 for time in expected.values())


def test_a_pass_in_two_launches_is_a_way() -> None:
    """With a name, an expected time and kernels of its own; not one that a caller can ask for as parts."""
    problem = Problem.square(1, 17, 4096, 64, False, direction="bwd")
    taken, (first, left) = suite.choice_of(problem), suite.choice_of(problem).each
    assert suite.chosen(problem) == "bwd4 and bwd4_parts 1×4"
    assert (first[0].heads, left[0].heads) == (16, 1)
    assert taken in suite.ways(problem)
    expected = choices.expected_times(problem)
    assert expected["bwd4 and bwd4_parts 1×4"] < expected["bwd4"]
    assert {"bwd4", "bwd4_parts"} <= {stage_id for stage_id, *_ in suite.kernels(problem)}


def test_ways_are_held_against_the_one_taken() -> None:
    rows = library.load(FOLDER, "models_fwd")
    found = choices.other_ways(rows, "fwd")
    assert len(found) == sum(len(suite.ways(suite.problem_of(row, "fwd"))) - 1 for row in rows)
    wrong = {x.problem for x in found if x.measured < 1}
    assert wrong == {x.problem for x in library.models(rows, "fwd") if x.regret > 1}
    row = json.loads(json.dumps(rows[0]))
    taken = suite.chosen(suite.problem_of(row, "fwd"))
    del row["us"][taken]
    assert choices.other_ways([row], "fwd") == [], "the way taken was not timed"


def test_the_figure_of_the_choices(tmp_path: Path) -> None:
    library.figures(FOLDER)["choices.png"](tmp_path / "choices.png")
    assert (tmp_path / "choices.png").stat().st_size > 10_000
    choices.plot_choices({"fwd": [], "bwd": []}, tmp_path / "none.png")


def test_tiles_that_wait_for_turns_have_no_parts_of_queries() -> None:
    """Those of one part of the queries would all begin with the same; on one tile of keys nobody waits."""
    for model in SUITES["models"]:
        problem = model.problem.with_(direction="bwd")
        ways = division.divisions(problem, deterministic=True)
        alone = problem.seqlen_kv <= 64 * (1 + (problem.head_dim < 256))
        assert alone or all(parts.queries == 1 for parts in ways)
        assert division.parts_of(problem, deterministic=True) in [*ways, calls.UNDIVIDED]
