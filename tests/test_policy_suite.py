"""The suites of packed sequences and windows: their problems, and who is timed, on a CPU with stand-ins."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from harness import dense_speed, peers, policy_models, policy_suite, policy_tables, timing
from harness.command import Usage
from harness.policies import Given
from harness.policy_suite import Named
from harness.results import results_dir
from hopper_attention import launch, policies
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

SMALL = [
    Named("packed", Problem(1, 4, 2, 150, 150, 64, True, sequences=((100, 100), (50, 50)))),
    Named("equal", Problem(1, 4, 2, 128, 128, 64, True, sequences=((64, 64), (64, 64)))),
    Named("window", Problem(1, 4, 2, 128, 128, 64, False, window=(31, 0))),
    Named("sink", Problem(1, 4, 2, 128, 128, 64, True, sink=True)),
]


@pytest.mark.parametrize("suite", policy_suite.SUITES)
def test_the_problems(suite: str) -> None:
    """Each once, taken by the library's stages, and with the FLOPs of the pairs that are seen."""
    problems = [named.problem for named in policy_suite.SUITES[suite]]
    assert len({x.name + str(x.problem) for x in policy_suite.SUITES[suite]}) == len(problems)
    for problem in problems:
        assert problem.policies
        assert ladder.load("k6")[1].supports(problem) is None
        if problem.window and not problem.sequences and problem.window[1] == 0:
            n, width = problem.seqlen_q, problem.window[0] + 1
            assert problem.pairs == width * (width + 1) // 2 + (n - width) * width


def test_equal_sequences_are_also_a_batch() -> None:
    (dense,) = dense_speed.batches(SMALL[1].problem).values()
    assert dense == Problem(2, 4, 2, 64, 64, 64, True)
    assert dense.flops == SMALL[1].problem.flops
    assert dense_speed.batches(packed(64, 0, 64)) == {64: dense}  # empty ones take nothing
    others = SMALL[1].problem.with_(seqlen_kv=160, sequences=((64, 80), (64, 80)))
    for problem in (others, SMALL[2].problem, SMALL[3].problem):  # other keys, a window, not packed
        assert dense_speed.batches(problem) == {}


def packed(*lengths: int) -> Problem:
    total = sum(lengths)
    return Problem(1, 4, 2, total, total, 64, True, sequences=tuple((n, n) for n in lengths))


def test_each_sequence_in_a_dense_batch() -> None:
    """Few lengths are timed each, of many both ends and powers of two, in batches of about as many tokens.
    Where time is a power of the length that leaves no error."""
    few, many = packed(100, 7, 100, 3), packed(*range(8, 1001))
    assert {n: x.batch for n, x in dense_speed.batches(few).items()} == {3: 70, 7: 30, 100: 2}
    each = {3: 1.0, 7: 2.0, 100: 5.0}
    assert math.isclose(dense_speed.together(few, each), 13.0)
    found = dense_speed.batches(many)
    assert sorted(found) == [8, 16, 32, 64, 128, 256, 512, 1000]
    for n, dense in found.items():
        assert (dense.seqlen_q, dense.seqlen_kv) == (n, n) and dense.sequences is None
        assert 0.9 <= dense.batch * n / many.seqlen_q <= 1
    time = dense_speed.together(many, {n: 0.01 * n**1.5 for n in found})
    assert math.isclose(time, sum(0.01 * n**1.5 for n in range(8, 1001)))


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str | None]]:
    """The library computes by the models of what it is given, and times are made up."""
    found: dict[str, str | None] = {"wrong": None}
    seen: list[Given] = []
    make = policy_suite.random_given

    def on_cpu(problem: Problem) -> Given:
        seen.append(make(problem, device="cpu"))
        return seen[-1]

    def call(direction: str, *inputs: torch.Tensor, longest: int = 0, longest_kv: int = 0):
        packed = inputs[0].dim() == 3
        given = [x for x in seen if (x.problem.sequences is not None) == packed][-1]
        given = dataclasses.replace(given, problem=given.problem.with_(direction=direction))
        outputs = policy_models.outputs(given, found["wrong"])
        rows = lambda name, x: x[0] if name == "lse" else x[0].transpose(0, 1)
        result = [rows(name, x) if packed and name != "dsink" else x for name, x in outputs.items()]
        return (*result, None) if len(result) == 3 else tuple(result)

    monkeypatch.setattr(policy_suite, "random_given", on_cpu)
    monkeypatch.setattr(policies, "forward", functools.partial(call, "fwd"))
    monkeypatch.setattr(policies, "backward", functools.partial(call, "bwd"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(policy_suite, "SUITES", {"packed": SMALL, "window": SMALL[2:]})
    monkeypatch.setattr(policy_suite, "ahead", list)
    monkeypatch.setattr(peers, "versions", lambda names: dict.fromkeys(names, "1"))
    environment = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "cutlass_dsl": "4", "peers": {}}
    monkeypatch.setattr(timing, "environment", lambda found: environment | {"peers": found})

    def interleaved(calls: dict[str, Callable[[], object]], seconds: float):
        for one in calls.values():
            one()
        return {name: timing.Timing(0.1 * (i + 1), 0.0, None, None) for i, name in enumerate(calls)}

    monkeypatch.setattr(timing, "interleaved", interleaved)

    def refuses(rows: policy_suite.Rows):
        raise NotImplementedError("not today")

    def takes(rows: policy_suite.Rows):
        return (lambda: rows.q), (lambda: rows.q)

    monkeypatch.setattr(policy_suite, "BUILDS", dict.fromkeys(policy_suite.PEERS, refuses) | {"fa3": takes})
    yield found


def test_what_is_written(wrong: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert policy_suite.run("window", ["k6", "bwd4"], tmp_path, ["fa3", "flex"])
    for direction in ("fwd", "bwd"):
        rows = json.loads((tmp_path / "h200" / "window" / f"{direction}.json").read_text())["rows"]
        assert [row["name"] for row in rows] == ["window", "sink"]
        assert all({*row["us"]} == {"hopper_attention", "fa3"} for row in rows)
        assert rows[0]["flops"] == SMALL[2].problem.with_(direction=direction).flops
    out = capsys.readouterr().out
    assert "flex: not today" in out and "× fa3" in out


def test_a_wrong_output_has_no_time(wrong: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong["wrong"] = "left edge a key short"
    assert not policy_suite.run("window", ["k6"], tmp_path, [])
    rows = json.loads((tmp_path / "h200" / "window" / "fwd.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["sink"]
    assert "exceeds" in capsys.readouterr().out


def test_packed_ones_stand_beside_their_batches(wrong: dict, capsys: pytest.CaptureFixture[str]) -> None:
    assert policy_suite.run("packed", ["k6"], None, ["fa3"])
    lines = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "× dense" in lines["equal"] and "× dense" in lines["packed"]


def test_a_suite_without_a_wanted_problem() -> None:
    with pytest.raises(Usage, match="no problem of the suite 'packed'"):
        policy_suite.run("packed", ["k6"], None, [], lambda problem: False)


def test_peers_that_lack_a_policy_say_so() -> None:
    rows = policy_suite.Rows(policy_suite.random_given(SMALL[3].problem, device="cpu"))
    for name in ("fa2", "fa3"):
        with pytest.raises(NotImplementedError, match="has no sink"):
            policy_suite.BUILDS[name](rows)
    assert rows.window == (-1, 0)
    assert launch.FORWARD == "k6"


# ---- the tables and the figure ----------------------------------------------------------------------------


def rows_of(*windows: tuple[int, int]) -> list[dict[str, object]]:
    """Rows of the suite's problems of DRAWN, (window, length) each, no two times alike."""
    found = []
    for i, (window, n) in enumerate(windows):
        problem = Problem(1, 16, 16, n, n, 128, False, window=(window - 1, 0))
        us = {"hopper_attention": 100.0 + i, "fa3": 150.0 + 3 * i, "fa2": 400.0}
        row = {"name": f"{window} of {n}", "problem": str(problem), "flops": problem.flops, "us": us}
        found.append(row)
    return found


def test_the_table_names_the_best_peer() -> None:
    row, _ = rows_of((128, 8192), (1024, 8192))
    row["us"] |= {"fa3": 90.0, "dense": 95.0}
    lines = policy_tables.suite_table([row]).splitlines()
    assert "b1 h16 n8192 d128 window 127:0 bfloat16 | 100.0 |" in lines[2]
    assert lines[2].endswith("| FlashAttention-3 | **0.900** | 0.950 |")
    del row["us"]["fa3"], row["us"]["fa2"], row["us"]["dense"]
    assert policy_tables.suite_table([row]).splitlines()[2].endswith("|  |  |")


def test_the_figure_has_a_line_for_each_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of((1024, 8192), (128, 8192), (128, 32768), (1024, 32768), (4096, 131072))
    rows += [row | {"problem": row["problem"].replace("h16", "h32:8")} for row in rows[:1]]
    assert policy_tables.times_by_length(rows, "fa3") == {
        8192: {1024: 150e3 / 8192, 128: 153e3 / 8192},
        32768: {128: 156e3 / 32768, 1024: 159e3 / 32768},
        131072: {4096: 162e3 / 131072},
    }
    drawn = []
    monkeypatch.setattr(policy_tables.plots, "save", lambda figure, path: drawn.append(figure))
    policy_tables.plot_window({"fwd": rows, "bwd": rows[:2]}, "H200", tmp_path / "window.png")
    lines = {x.get_label(): list(zip(*x.get_data())) for x in drawn[0].axes[0].get_lines()}
    assert "bwd4, 8192 tokens" in [x.get_label() for x in drawn[0].axes[1].get_lines()]
    assert set(lines) == {
        f"{name}, {n} tokens" for name in ("k6", "FlashAttention-3") for n in (8192, 32768, 131072)
    }
    assert lines["k6, 8192 tokens"] == [(128, 101e3 / 8192), (1024, 100e3 / 8192)]


def test_what_is_committed_has_its_tables_and_its_figure() -> None:
    for folder in sorted(results_dir().glob("h*")):
        tables = policy_tables.blocks(folder)
        assert set(tables) == {f"{x}-{y}" for x in ("packed", "window") for y in ("fwd", "bwd")}
        for name, text in tables.items():
            suite, direction = name.split("-")
            assert bool(text) == (folder / suite / f"{direction}.json").exists()
        assert set(policy_tables.figures(folder)) <= {"window.png"}
