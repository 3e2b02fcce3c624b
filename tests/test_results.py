"""Results on disk: what a file holds and refuses, and how new results join old ones.

Every number here is made up, and lives in a temporary folder.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up_results import (
    ENVIRONMENT,
    FOLDER,
    make_results,
    make_row,
    sample,
    small_repository,
    sweep_problem,
)

from harness.hardware import H100_SXM, peak_of
from harness.results import Results, Row, bound_gpu, gpu_folder, load_all, merge
from hopper_attention.kernels.contract import Problem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return small_repository(tmp_path)


# Files


def test_round_trip_is_stable(tmp_path: Path) -> None:
    path, results = tmp_path / "new" / "k2.json", sample()
    results.save(path)
    loaded = Results.load(path)
    assert loaded.environment == results.environment
    assert {row.key: row for row in loaded.rows} == {row.key: row for row in results.rows}
    first = path.read_bytes()
    Results(loaded.stage, loaded.environment, loaded.rows[::-1]).save(path)
    assert path.read_bytes() == first
    assert sum(line.startswith('  {"provider"') for line in first.decode().splitlines()) == len(results.rows)
    assert json.loads(first)["schema"] == 2
    assert [file.name for file in path.parent.iterdir()] == ["k2.json"]


def test_row_knows_its_problem() -> None:
    problem = Problem(2, 8, 4, 100, 200, 64, True, "float16", "bwd")
    for top_left in (False, True):
        aligned = problem.with_(top_left=top_left)
        assert make_row("fa2", 1.0, aligned).problem == aligned
        assert Row.on(aligned, "fa2").problem == aligned


def test_a_row_is_of_a_plain_problem() -> None:
    with pytest.raises(ValueError, match="of plain problems"):
        Row.on(sweep_problem().with_(sink=True), "k6")


def test_alignment_is_written_where_it_is_not_the_usual_one(tmp_path: Path) -> None:
    path, problem = tmp_path / "k2.json", Problem(2, 8, 4, 100, 200, 64, True)
    rows = [make_row("cudnn", 1.0, problem.with_(top_left=top_left)) for top_left in (True, False)]
    make_results("k2", *rows).save(path)
    usual, top_left = json.loads(path.read_text())["rows"]
    assert "top_left" not in usual
    assert top_left["top_left"] is True
    assert {*top_left} == {*usual, "top_left"}
    assert [row.problem.top_left for row in Results.load(path).rows] == [False, True]


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_failing_save_leaves_the_old_file(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k2.json"
    sample().save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        sample(rate=9.0).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["k2.json"]


def test_save_refuses_what_load_would(tmp_path: Path) -> None:
    path = tmp_path / "k2.json"
    sample().save(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"without a passed check, .*; nothing was written"):
        make_results("k2", make_row("k2", 9.0, check=None)).save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema=1), "schema 1; this code reads 2"),
        (lambda d: d.pop("schema"), "schema None"),
        (lambda d: d.pop("environment"), "the file lacks environment"),
        (lambda d: d.update(extra=1), "the file has unknown extra"),
        (lambda d: d.update(rows={}), "rows is not a list"),
        (lambda d: d["rows"].append(3), "row 3 is not an object"),
        (lambda d: d["environment"].pop("driver"), "does not name driver"),
        (lambda d: d["rows"][1].pop("power_w"), "row 2 lacks power_w"),
        (lambda d: d["rows"][1].update(speed=1), "row 2 has unknown speed"),
        (lambda d: d["rows"][0].update(check=None), "row 1 .*a time without a passed check"),
        (lambda d: d["rows"][0].update(check="fail"), "check is 'fail'"),
        (lambda d: d["rows"][0].update(cubin_sha256=None), "without the cubin_sha256"),
        (lambda d: d["rows"][0].update(cubin_sha256="abc"), "without the cubin_sha256"),
        (lambda d: d["rows"][0].update(tflops="8"), "tflops is '8'"),
        (lambda d: d["rows"][0].update(tflops=float("nan")), "tflops is nan"),
        (lambda d: d["rows"][0].update(tflops=True), "tflops is True"),
        (lambda d: d["rows"][0].update(tflops=16.0), "which is not its FLOPs over ms_median"),
        (lambda d: d["rows"][1].update(ms_median=1.0), "row 2 .*which is not its FLOPs over ms_median"),
        (lambda d: d["rows"][0].update(ms_iqr=None), "ms_median is .* and ms_iqr None"),
        (lambda d: d["rows"][0].update(max_error=None), "a time without a passed check, and the max_error"),
        (lambda d: d["rows"][0].update(provider="a variant", check=None), "a time without a passed check"),
        (lambda d: d["rows"][0].update(provider="a variant", cubin_sha256=None), "without the cubin_sha256"),
        (lambda d: d["rows"][1].update(check="pass"), "row 2 .*a peer's row with a check"),
        (lambda d: d["environment"].update(peers=["fa2"]), "the environment's peers is"),
        (lambda d: d["environment"].update(host_us={"k2": "fast"}), "the environment's host_us is"),
        (lambda d: d["environment"].update(power_cap_w="700 W"), "the environment's power_cap_w is"),
        (lambda d: d["environment"].update(torch=2.11), "the environment's torch is 2.11"),
        (lambda d: d["rows"][0].update(causal=0), "causal is 0"),
        (lambda d: d["rows"][0].update(batch=None), "batch is None"),
        (lambda d: d["rows"][0].update(top_left=1), "top_left is 1"),
        (lambda d: d["rows"][0].update(top_left=True), "has top_left without causal"),
        (lambda d: d["rows"][0].update(direction="up"), "direction is 'up'"),
        (
            lambda d: d["rows"][1].update(error="OOM: needs 1 GB"),
            "has an error and ms_median, ms_iqr, tflops",
        ),
        (lambda d: d["rows"][1].update(ms_median=None), "has no ms_median and tflops, and no error"),
        (lambda d: d["rows"].append(d["rows"][0]), "k2 has two rows for b4 h16 n4096"),
    ],
)
def test_load_names_the_file_and_the_defect(edit: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "k2.json"
    make_results("k2", make_row("k2", 8.0), make_row("cudnn", 500.0)).save(path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"k2.json: .*{message}"):
        Results.load(path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_load_refuses_other_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "k2.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"k2\.json: "):
        Results.load(path)


def test_load_all(root: Path) -> None:
    everything = load_all(root / "results")
    assert list(everything) == [FOLDER]
    assert list(everything[FOLDER]) == ["k1", "k2"]
    assert load_all(root / "nowhere") == {}
    sample("k2").save(root / "results" / FOLDER / "k1.json")
    with pytest.raises(ValueError, match=r"k1\.json: holds results of k2"):
        load_all(root / "results")


def test_gpu_folder() -> None:
    assert gpu_folder("NVIDIA H100 80GB HBM3") == FOLDER
    assert gpu_folder("NVIDIA GeForce RTX™ 4090 (x)") == "geforce-rtx-4090-x"
    with pytest.raises(ValueError, match="NVIDIA"):
        gpu_folder("NVIDIA")
    assert bound_gpu({"gpu": "NVIDIA H100 80GB HBM3"}) is H100_SXM
    assert bound_gpu({"gpu": "NVIDIA H100 PCIe"}) is None
    assert bound_gpu({"gpu": "NVIDIA A100-SXM4-80GB"}) is None


def test_a_gpu_without_published_rates_is_held_to_its_drivers() -> None:
    """Of an H100 SXM those are the published ones."""
    properties = {"clock_rate": 1_980_000, "memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
    peak = peak_of(SimpleNamespace(multi_processor_count=132, **properties))
    found = bound_gpu({"gpu": "NVIDIA H20", "peak": peak})
    assert (found.name, found.sms) == ("NVIDIA H20", 132)
    assert found.tensor_flops == pytest.approx(H100_SXM.tensor_flops)
    assert found.hbm_bytes_per_s == pytest.approx(H100_SXM.hbm_bytes_per_s, rel=0.01)
    assert peak_of(SimpleNamespace(multi_processor_count=132, clock_rate=1)) is None


# Merging


def test_merge_replaces_and_keeps() -> None:
    short = sweep_problem(512)
    old = make_results("k2", make_row("k2", 8.0), make_row("k2", 6.0, short), make_row("cudnn", 200.0))
    new = make_results(
        "k2", make_row("k2", 9.0), make_row("fa2", 300.0), date="2000-01-02", host_us={"k2": 8.0}
    )
    merged = merge(old, new)
    assert [(row.provider, row.tflops) for row in merged.rows] == [
        ("k2", 9.0),
        ("k2", 6.0),
        ("cudnn", 200.0),
        ("fa2", 300.0),
    ]
    assert merged.environment == ENVIRONMENT | {"date": "2000-01-02", "host_us": {"k2": 8.0}}
    assert old.rows[0].tflops == 8.0


def test_a_ratio_to_the_fastest_peer_is_of_one_run() -> None:
    """A stage's row stays beside the peer that was fastest, unless that one, or a faster, comes with it."""
    old = make_results("k2", make_row("k2", 8.0), make_row("cudnn", 500.0), make_row("math", 1.0))
    rates = lambda *rows: {x.provider: x.tflops for x in merge(old, make_results("k2", *rows)).rows}
    without = make_row("k2", 9.0), make_row("fa2", 300.0)
    failed = make_row("k2", 9.0), make_row("cudnn", None, error="OOM: needs 2 GB")
    assert rates(*without) == {"k2": 8.0, "cudnn": 500.0, "math": 1.0, "fa2": 300.0}
    assert rates(*failed) == {"k2": 8.0, "cudnn": 500.0, "math": 1.0}
    assert rates(make_row("k2", 9.0), make_row("cudnn", 400.0))["k2"] == 9.0
    assert rates(make_row("k2", 9.0), make_row("fa2", 600.0))["k2"] == 9.0


def test_merge_never_loses_a_time_to_a_failure() -> None:
    old = make_results("k2", make_row("k2", 8.0), make_row("math", None, error="OOM: needs 2 GB"))
    new = make_results(
        "k2", make_row("k2", None, error="check failed"), make_row("math", None, error="OOM: needs 3 GB")
    )
    merged = merge(old, new)
    assert merged.rows[0] == old.rows[0]
    assert merged.rows[1].error == "OOM: needs 3 GB"


@pytest.mark.parametrize("key", ["gpu", "driver", "torch", "cutlass_dsl"])
def test_merge_refuses_another_environment(key: str) -> None:
    other = make_results("k2", make_row("k2", 9.0), **{key: "other"})
    with pytest.raises(ValueError, match=f"{key} was .* and is 'other'.*measure the whole sweep again"):
        merge(sample(), other)


def test_merge_refuses_to_mix_versions_of_a_peer() -> None:
    peers = {"fa2": "3.0", "cudnn": "9.1"}
    with pytest.raises(ValueError, match=r"peers\.fa2 was '2\.0' and is '3\.0'"):
        merge(sample(), make_results("k2", make_row("k2", 9.0), peers=peers))
    old = make_results("k2", make_row("fa2", 300.0))
    assert merge(old, make_results("k2", make_row("fa2", 310.0), peers=peers)).environment["peers"] == peers


def test_merge_refuses_another_stage() -> None:
    with pytest.raises(ValueError, match="results of k1 into those of k2"):
        merge(sample("k2"), sample("k1"))
