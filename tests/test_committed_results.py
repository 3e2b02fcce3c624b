"""Committed measurements belong to the source beside them: the same machine code, the same tables."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rotating import recorded, sample

from harness import ablation, edits, machine_code, report
from harness.measuring import chosen_stage
from harness.results import PUBLIC_CALLS, Results, Row, load_all, repository, stale_rows
from harness.stages import refuse
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import compile_stage, compiled_for

everything = functools.cache(load_all)  # half a second a time; no test changes what it gives
FILES = [(folder, stage_id) for folder, stages in everything().items() for stage_id in stages]
every_file = pytest.mark.parametrize(
    ("folder", "stage_id"),
    FILES or [pytest.param("", "", marks=pytest.mark.skip(reason="no results are committed yet"))],
)


def committed(folder: str, stage_id: str) -> Results:
    return everything()[folder][stage_id]


def ran_by(stage_id: str, row: Row) -> tuple[str, Problem]:
    """The stage that computed a row of a stage's file, and the problem as it takes it."""
    if row.provider == PUBLIC_CALLS.get(stage_id):
        return chosen_stage(row.problem, bool(ladder.load(stage_id)[0].options)), row.problem
    if row.provider == stage_id:
        return stage_id, row.problem
    # another stage, of a problem of its own direction
    return row.provider, row.problem.with_(direction=ladder.load(row.provider)[0].direction)


def sha_of_source(stage_id: str) -> Callable[[Row], str]:
    """What the stage's source compiles to for a row's problem, which it must still support: by its current
    record, of which tests/test_machine_code_identity.py recompiles some."""

    def sha_of(row: Row) -> str:
        ran, problem = ran_by(stage_id, row)
        refuse(ran, problem)
        known = recorded(ran).get(compiled_for(ran, problem))
        return known or machine_code.identity(compile_stage(ran, problem))

    return sha_of


# What is committed


@every_file
def test_rows_belong_to_the_source(folder: str, stage_id: str) -> None:
    results = committed(folder, stage_id)
    assert any(row.provider == stage_id and row.ms_median is not None for row in results.rows)
    assert stale_rows(results, sha_of_source(stage_id)) == []


@every_file
def test_rows_passed_their_check(folder: str, stage_id: str) -> None:
    """`Results.load` refuses a time without a check; the only other reason for no time is memory."""
    results = committed(folder, stage_id)
    for row in results.rows:
        if row.provider in (stage_id, PUBLIC_CALLS.get(stage_id), *results.other_stages()):
            assert row.check == "pass" or row.error.startswith("OOM: "), row
        else:
            assert row.check is None, row


@every_file
def test_files_are_as_written(folder: str, stage_id: str, tmp_path: Path) -> None:
    """Nothing was typed by hand: a file is byte for byte what saving it gives."""
    committed(folder, stage_id).save(tmp_path / "again.json")
    path = repository() / "results" / folder / f"{stage_id}.json"
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_tables_and_figures_are_current() -> None:
    stages = [ladder.load(stage_id)[0] for stage_id in ladder.LADDER]
    assert report.find_stale(repository(), stages) == []


ABLATIONS = sorted((repository() / "results").glob("*/ablations/*.json"))
NOT_YET = [pytest.param(None, marks=pytest.mark.skip(reason="no variants are measured yet"))]


@pytest.mark.parametrize("path", ABLATIONS or NOT_YET, ids=str)
def test_every_variant_is_measured(path: Path) -> None:
    results = Results.load(path)
    assert {row.provider for row in results.rows} == set(edits.labels(results.stage))
    assert all(row.ms_median for row in results.rows)


@pytest.mark.parametrize("path", sample(ABLATIONS, 1, "ablations") or NOT_YET, ids=str)
def test_variants_belong_to_the_source(path: Path) -> None:
    """Of one file a variant, another one for each commit, at its least head_dim: all of them would take
    minutes, and they share every line of source."""
    results = Results.load(path)
    (label,) = sample(edits.labels(results.stage), 1)
    least = min(row.head_dim for row in results.rows if row.provider == label)
    results.rows = [row for row in results.rows if (row.provider, row.head_dim) == (label, least)]

    def sha_of(row: Row) -> str:
        return machine_code.identity(ablation.variant(results.stage, row.provider).compile(row.problem))

    assert stale_rows(results, sha_of) == []


# Made-up results: that staleness is seen


def made_up(sha: str, problem: Problem) -> Results:
    environment = {"gpu": "NVIDIA H100", "driver": "1", "torch": "2", "cutlass_dsl": "4"}
    timed = {"ms_median": 1.0, "ms_iqr": 0.1, "tflops": problem.flops / 1e9}
    rows = [
        Row.on(problem, "k2", **timed, check="pass", max_error=0.01, cubin_sha256=sha),
        Row.on(problem.with_(batch=2), "k2", error="OOM: needs 9 GB"),
        Row.on(problem, "cudnn", **timed),
    ]
    return Results("k2", environment, rows)


def test_stale_rows() -> None:
    problem = Problem.square(1, 1, 512, 64, False)
    results = made_up("a" * 64, problem)
    assert stale_rows(results, lambda row: "a" * 64) == []
    assert stale_rows(results, lambda row: "b" * 64) == [
        f"k2 {problem}: measured on aaaaaaaaaaaa, the source compiles to bbbbbbbbbbbb"
    ]
    other = replace(results.rows[0], causal=True)
    results.rows.append(other)
    by_mask = stale_rows(results, lambda row: ("b" if row.causal else "a") * 64)
    assert by_mask == [f"k2 {other.problem}: measured on aaaaaaaaaaaa, the source compiles to bbbbbbbbbbbb"]


def test_an_edited_tile_makes_rows_stale(tmp_path: Path) -> None:
    """The same function, on results saved and loaded, when k2's tile constant is another."""
    problem = Problem.square(32, 32, 512, 64, False)
    module = ladder.load("k2")[1]
    made_up(machine_code.identity(compile_stage("k2", problem)), problem).save(tmp_path / "k2.json")
    results = Results.load(tmp_path / "k2.json")
    assert stale_rows(results, sha_of_source("k2")) == []
    edited = lambda row: machine_code.identity(module.compile_kernel(row.problem, tile=module.TILE // 2))
    (line,) = stale_rows(results, edited)
    assert line.startswith(f"k2 {problem}: measured on ")


def test_rows_of_a_problem_no_longer_supported_are_an_error() -> None:
    results = made_up("a" * 64, Problem.square(1, 1, 512, 96, False))
    with pytest.raises(ValueError, match="k2 takes head_dim 64 or 128, not 96"):
        stale_rows(results, sha_of_source("k2"))
