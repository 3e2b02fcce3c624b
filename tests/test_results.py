"""Results on disk, the tables and figures made of them, and the check that the tables are current.

Every number here is made up, and lives in a temporary folder.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest

from harness import claims, markdown, plots, report, stage_tables
from harness.hardware import H100_SXM, peak_of
from harness.results import PUBLIC_CALLS, Results, Row, bound_gpu, gpu_folder, load_all, merge
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Stage

ENVIRONMENT = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "power_cap_w": 700.0,
    "driver": "1.2.3",
    "cuda": "12.9",
    "torch": "2.0",
    "cutlass_dsl": "4.0",
    "python": "3.11",
    "cudnn": "9.1",
    "peers": {"fa2": "2.0", "cudnn": "9.1"},
    "host_us": {"k2": 9.5},
    "date": "2000-01-01",
}
FOLDER = "h100-80gb-hbm3"
SHA = "0123456789abcdef" * 4
STAGES = [Stage(id, id.upper(), f"what {id} adds", None) for id in ladder.LADDER]


def sweep_problem(seqlen: int = 4096, head_dim: int = 128, causal: bool = False) -> Problem:
    return Problem.square(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, causal)


def make_row(provider: str, tflops: float | None, problem: Problem | None = None, **changes: object) -> Row:
    row = Row.on(problem or sweep_problem(), provider)
    if tflops is not None:
        row = replace(row, tflops=tflops, ms_median=row.problem.flops / tflops / 1e9, ms_iqr=0.01)
        if provider in ladder.LADDER:
            row = replace(row, check="pass", max_error=0.002, cubin_sha256=SHA)
    return replace(row, **changes)


def make_results(stage: str = "k2", *rows: Row, **environment: object) -> Results:
    return Results(stage, ENVIRONMENT | environment, list(rows))


def sample(stage: str = "k2", rate: float = 8.0) -> Results:
    rows = [
        make_row(provider, tflops, sweep_problem(n, d, causal))
        for d in (64, 128)
        for causal in (False, True)
        for n in (512, 4096)
        for provider, tflops in ((stage, rate), ("fa2", 300.0), ("cudnn", 500.0))
    ]
    rows.append(make_row("math", None, error="OOM: needs 34.4 GB"))
    return make_results(stage, *rows)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository in small: results of two stages, and documents with every block."""
    for stage, rate in (("k1", 0.5), ("k2", 8.0)):
        sample(stage, rate).save(tmp_path / "results" / FOLDER / f"{stage}.json")
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").write_text(
        f"# Top\n{block('ladder')}{block('environment')}{block('sustained')}Bottom\n"
    )
    (tmp_path / "notes" / "k2.md").write_text(f"{block('stage-k2')}between\n{block('ladder')}")
    return tmp_path


def block(name: str) -> str:
    return f"<!-- results:begin {name} -->\n<!-- results:end {name} -->\n"


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
    old = make_results("k2", make_row("k2", 8.0), make_row("k2", 6.0, short), make_row("cudnn", 500.0))
    new = make_results(
        "k2", make_row("k2", 9.0), make_row("fa2", 300.0), date="2000-01-02", host_us={"k2": 8.0}
    )
    merged = merge(old, new)
    assert [(row.provider, row.tflops) for row in merged.rows] == [
        ("k2", 9.0),
        ("k2", 6.0),
        ("cudnn", 500.0),
        ("fa2", 300.0),
    ]
    assert merged.environment == ENVIRONMENT | {"date": "2000-01-02", "host_us": {"k2": 8.0}}
    assert old.rows[0].tflops == 8.0


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


# Tables


def cells(table: str, start: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ladder_table() -> None:
    results = sample()
    results.rows = [row for row in results.rows if not row.causal]
    results.rows.append(make_row("k2", None, sweep_problem(causal=True), error="OOM: needs 9 GB"))
    table = stage_tables.ladder_table(STAGES, {"k2": results}, ladder.LADDER)
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| [")] == list(
        ladder.LADDER
    )
    bound = 100 * H100_SXM.roofline_seconds(sweep_problem()) / (sweep_problem().flops / 8e12)
    assert cells(table, "[`k2`]") == [
        "[`k2`](notes/k2.md)",
        "what k2 adds",
        "**8.00**",
        f"{bound:.2f}%",
        "",
        "0.016× cuDNN",
        "OOM: needs 9 GB",
        "",
        "",
        "",
    ]
    assert cells(table, "[`k1`]")[2:] == ["not measured", "", "", ""] * 2
    assert "N = 4096 on NVIDIA H100 80GB HBM3" in table
    assert "](k2.md)" in stage_tables.ladder_table(STAGES, {}, ladder.LADDER, notes="")


def test_ladder_table_compares_with_the_stage_before() -> None:
    """On the same problem, for each mask by itself; the ratio names what lacks."""
    chain = (("k1", None), ("fa1", "k1"), ("k2", "fa1"), ("k4", "k2"), ("k5", "k4"), ("k6", "k5"))
    stages = [Stage(id, "", "", before) for id, before in chain]
    full, causal = (sweep_problem(causal=mask) for mask in (False, True))
    measured = {
        "k1": make_results("k1", make_row("k1", 2.0), make_row("k1", 5.0, causal), make_row("fa2", 99.0)),
        "fa1": make_results("fa1", make_row("fa1", 7.0), make_row("fa1", 4.0, causal)),
        "k2": make_results("k2", make_row("k2", 91.0, full), make_row("k2", 3.0, sweep_problem(8192))),
        "k4": make_results("k4", make_row("k4", 100.1), make_row("k4", 44.0, causal)),
        "k5": make_results("k5", make_row("k5", None, error="OOM: 3 GB"), make_row("k5", 46.2, causal)),
        "k6": make_results("k6", make_row("k6", 400.0), make_row("k6", 231.0, causal, dtype="float16")),
    }
    table = stage_tables.ladder_table(stages, measured, {stage.id: stage.id for stage in stages})
    assert [cell for cell in cells(table, "forward") if "before" in cell] == [
        "full: × before",
        "causal: × before",
    ]
    assert {stage.id: cells(table, f"[`{stage.id}`]")[4::4] for stage in stages} == {
        "k1": ["", ""],
        "fa1": ["3.50×", "0.80×"],
        "k2": ["13×", ""],
        "k4": ["1.10×", "not measured"],
        "k5": ["", "1.05×"],
        "k6": ["OOM: 3 GB", "not measured"],  # another dtype is another problem
    }


def test_ablation_table() -> None:
    short, causal = sweep_problem(512), sweep_problem(causal=True)
    results = make_results(
        "k2",
        make_row("a", 100.0, short),
        make_row("b", 125.0, short),
        make_row("b", 60.0),
        make_row("a", None, causal, error="OOM: 3 GB"),
        make_row("b", 70.0, causal),
    )
    full, masked = stage_tables.ablation_table(results, ["a", "b"]).split("\n\n")
    assert cells(full, "a") == ["a", "100 (1.00×)", "not measured"]
    assert cells(full, "b") == ["b", "125 (1.25×)", "60"]
    assert cells(masked, "a") == ["a", "OOM: 3 GB"]
    assert cells(masked, "b") == ["b", "70"]


def backward_sample(stage: str = "bwd1", rate: float = 4.0) -> Results:
    rows = []
    for n, sustained in ((4096, None), (16384, 0.9 * rate)):
        problem = sweep_problem(n).with_(direction="bwd")
        passed = {"check": "pass", "cubin_sha256": SHA, "tflops_sustained": sustained}
        rows += [make_row(stage, rate, problem, **passed), make_row("fa2", 200.0, problem)]
    return make_results(stage, *rows)


def test_backward_stages_have_a_table_of_their_own() -> None:
    stages = [Stage("k2", "", "forward things", None), Stage("bwd1", "", "backward things", None, "bwd")]
    files = {"k2": "k2", "bwd1": "bwd1"}
    measured = {"k2": sample(), "bwd1": backward_sample()}
    table = stage_tables.ladder_table(stages, measured, files)
    forward, backward, caption = table.split("\n\n")
    assert cells(forward, "forward")[1] == cells(backward, "backward")[1] == "adds"
    assert cells(forward, "[`k2`]")[5] == "0.016× cuDNN"
    assert "bwd1" not in forward
    assert cells(backward, "[`bwd1`]")[2:] == [
        "**4.00**",
        "0.37%",
        "",
        "0.02× FlashAttention-2",
        "not measured",
        "",
        "",
        "",
    ]
    assert caption.startswith("Measured at head_dim 128")
    assert "head_dim, bwd" in stage_tables.stage_table(measured["bwd1"])
    sustained = stage_tables.sustained_table(measured)
    assert "Attention backward at N = 16384" in sustained
    assert cells(sustained, "bwd1")[3] == "4.00 → 3.60 (−10%)"


def test_backward_figures(tmp_path: Path) -> None:
    measured = {"k2": sample(), "bwd1": backward_sample(), "bwd2": backward_sample("bwd2", 8.0)}
    drawn = report.figures(tmp_path, {FOLDER: measured})
    names = {path.name for path in drawn}
    assert names == {"k2.png", "bwd1.png", "bwd2.png", "progress.png", "progress_bwd.png"}
    for path, draw in drawn.items():
        draw(path)
        assert path.stat().st_size > 10_000


def test_stage_table() -> None:
    results = sample()
    grouped = Problem(1, 32, 8, 777, 777, 128, True)
    results.rows.append(make_row("k2", 7.0, grouped))
    table = stage_tables.stage_table(results)
    assert cells(table, "head_dim, fwd") == ["head_dim, fwd", "512", "4096"]
    assert cells(table, "**128**, causal")[2].split("<br>")[::2] == ["**8.00**", "0.016× cuDNN (500)"]
    assert cells(table, str(grouped))[1].endswith("<br>no peer")
    assert "driver 1.2.3" in table
    assert {line.count("|") for line in table.splitlines() if line.startswith("| **")} == {4}


def test_bound_is_left_out_for_an_unknown_gpu() -> None:
    results = make_results("k2", make_row("k2", 8.0), gpu="NVIDIA X1")
    table = stage_tables.stage_table(results)
    assert "**8.00**<br>–<br>no peer" in table
    assert "bound is left out" in table


def test_environment_line() -> None:
    other = sample("k1")
    other.environment["driver"] = "4.5"
    line = stage_tables.environment_line({"k1": other, "k2": sample()})
    assert "\n" not in line
    for part in (
        "power cap 700 W",
        "driver 4.5 and 1.2.3",
        "CuTe DSL 4.0",
        "FlashAttention-2 2.0",
        "cuDNN 9.1",
    ):
        assert part in line
    assert stage_tables.environment_line({}) == "Nothing is measured yet."


def test_sustained_table() -> None:
    long = sweep_problem(16384)
    results = make_results(
        "k2",
        make_row("k2", 10.0, long, tflops_sustained=9.0),
        make_row("cudnn", 600.0, long, tflops_sustained=540.0),
        make_row("math", None, long, error="OOM: needs 2 GB"),
        make_row("cudnn", 500.0, sweep_problem(8192), tflops_sustained=499.0),
    )
    table = stage_tables.sustained_table({"k2": results})
    assert cells(table, "k2") == ["k2", "not measured", "not measured", "10.0 → 9.00 (−10%)", "not measured"]
    assert cells(table, "cuDNN")[3] == "600 → 540 (−10%)"
    assert "forward at N = 16384" in table
    assert stage_tables.sustained_table({"k2": sample()}) == "No sustained rate is measured yet."


def test_error_text_stays_in_its_cell() -> None:
    results = make_results("k2", make_row("k2", None, error="unsupported: a|b\nc"))
    assert r"unsupported: a\|b c" in stage_tables.stage_table(results)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (block("typo"), "notes/x.md: unknown block typo"),
        ("<!-- results:begin a -->\n", "block a has no end"),
        ("<!-- results:end a -->\n", "block a ends without a begin"),
        ("<!-- results:begin a -->\n<!-- results:begin b -->\n", "block b begins inside block a"),
        ("<!-- results:begin a -->\n<!-- results:end b -->\n", "block b ends without a begin"),
    ],
)
def test_markers_must_pair_up(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        markdown.replace_blocks(text, {"a": "A", "b": "B"}, "notes/x.md")


def test_replace_blocks_touches_only_the_blocks() -> None:
    text = f"one\n{block('a')}two `<!-- results:begin x -->`\n{block('b')}"
    once = markdown.replace_blocks(text, {"a": "A", "b": "B"}, "x.md")
    assert once.startswith("one\n<!-- results:begin a -->\n\nA\n\n<!-- results:end a -->\ntwo `<!--")
    assert markdown.replace_blocks(once, {"a": "A", "b": "B"}, "x.md") == once
    assert markdown.stale_blocks(once, {"a": "A", "b": "C"}, "x.md") == ["b"]


# Several GPUs


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A repository with results of three GPUs, no two rates alike; the one measured last is not the first by
    name, nor is every file of its folder the newest."""
    rates = iter(range(101, 999, 7))
    for gpu, dates in (
        ("NVIDIA H100 A", {"k1": "2000-01-03", "k2": "2000-01-03"}),
        ("NVIDIA H100 B", {"k1": "2000-01-04", "k2": "2000-01-02"}),
        ("NVIDIA H100 C", {"k1": "2000-01-01", "k2": "2000-01-04"}),
    ):
        folder = tmp_path / "results" / gpu_folder(gpu)
        for stage, date in dates.items():
            rows = [make_row(name, float(next(rates))) for name in (stage, "fa2")]
            if (gpu[-1], stage) == ("B", "k2"):  # of the stage itself nothing
                rows = rows[1:]
            make_results(stage, *rows, gpu=gpu, date=date).save(folder / f"{stage}.json")
        for stage in ("k4",) if gpu[-1] != "B" else ():
            _, file = ladder.load(stage)
            passed = {"check": "pass", "max_error": 0.1, "cubin_sha256": SHA}
            rows = [make_row(name, float(next(rates)), **passed) for name in file.VARIANTS]
            path = folder / "ablations" / "k4.json"
            make_results(stage, *rows, gpu=gpu, date="2000-01-01").save(path)
    names = ("ladder", "environment", "stage-k1", "stage-k2", "stage-k4", "ablation-k4", "ablation-k6")
    (tmp_path / "README.md").write_text("".join(f"\n## {name}\n{block(name)}" for name in names))
    return tmp_path


def rate_of(root: Path, folder: str, stage: str, provider: str | None = None) -> str:
    results = Results.load(root / "results" / folder / f"{stage}.json")
    return plots.format_rate(results.find(provider or results.stage, sweep_problem()).tflops)


def test_gpus_stand_newest_first(three: Path) -> None:
    assert list(report.load_ladder(three)) == ["h100-c", "h100-b", "h100-a"]


def test_the_gpu_measured_last_is_the_one_of_the_ladder(three: Path) -> None:
    assert report.main([], three, STAGES) == 0
    sections = dict(part.split("\n", 1) for part in (three / "README.md").read_text().split("\n## ")[1:])
    assert "on NVIDIA H100 C." in sections["ladder"]
    for stage in ("k1", "k2"):
        assert cells(sections["ladder"], f"[`{stage}`]")[2] == f"**{rate_of(three, 'h100-c', stage)}**"
    assert sections["environment"].count("NVIDIA") == 1
    assert "NVIDIA H100 C" in sections["environment"]


def test_a_stages_block_has_a_table_of_each_gpu(three: Path) -> None:
    assert report.main([], three, STAGES) == 0
    sections = dict(part.split("\n", 1) for part in (three / "README.md").read_text().split("\n## ")[1:])

    def tables(name: str) -> dict[str, str]:
        parts = sections[name].split("\n**NVIDIA H100 ")[1:]
        return {part[0]: part[1:] for part in parts}

    assert list(tables("stage-k1")) == ["C", "B", "A"]
    assert list(tables("stage-k2")) == ["C", "A"]
    for stage in ("k1", "k2"):
        for letter, table in tables(f"stage-{stage}").items():
            assert table.startswith("**\n\n| ")
            cell = cells(table, "**128**, full")[1]
            assert cell.startswith(f"**{rate_of(three, f'h100-{letter.lower()}', stage)}**<br>")
            peer = rate_of(three, f"h100-{letter.lower()}", stage, "fa2")
            assert cell.endswith(f"FlashAttention-2 ({peer})")
            assert cells(table, "**64**, full")[1] == "not measured"
            assert f"NVIDIA H100 {letter} · power cap" in table
    assert "`k4` is not measured." in sections["stage-k4"]

    assert list(tables("ablation-k4")) == ["C", "A"]
    for letter, table in tables("ablation-k4").items():
        for variant in ladder.load("k4")[1].VARIANTS:
            rate = rate_of(three, f"h100-{letter.lower()}/ablations", "k4", variant)
            assert cells(table, f"{variant} |")[1].startswith(f"{rate} (")
    assert "The variants of `k6` are not measured." in sections["ablation-k6"]


# The command


def test_report_regenerates_and_checks(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme, figures = root / "README.md", root / "results" / FOLDER
    assert report.main(["--check"], root, STAGES) == 1
    out = capsys.readouterr().out.splitlines()
    assert "README.md: block ladder is not what the results say" in out
    assert f"results/{FOLDER}/progress.png: not drawn" in out
    assert len(out) == 5 + 3

    assert report.main([], root, STAGES) == 0
    assert report.main(["--check"], root, STAGES) == 0
    assert {path.name for path in figures.glob("*.png")} == {"k1.png", "k2.png", "progress.png"}
    assert "](notes/k2.md)" in readme.read_text()
    assert "](k2.md)" in (root / "notes" / "k2.md").read_text()
    capsys.readouterr()

    generated = readme.read_text()
    readme.write_text(generated.replace("**8.00**", "**9.00**", 1))
    (figures / "k1.png").unlink()
    assert report.main(["--check"], root, STAGES) == 1
    assert capsys.readouterr().out.splitlines() == [
        "README.md: block ladder is not what the results say",
        f"results/{FOLDER}/k1.png: not drawn",
    ]
    assert not (figures / "k1.png").exists()
    readme.write_text(generated)

    sample("k2", 8.5).save(figures / "k2.json")
    assert report.main(["--check"], root, STAGES) == 1


def test_report_changes_nothing_when_a_document_is_at_fault(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (root / "README.md").read_text()
    (root / "notes" / "z.md").write_text(block("stage-k99"))
    for argv in ([], ["--check"]):
        assert report.main(argv, root, STAGES) == 2
        assert "notes/z.md: unknown block stage-k99" in capsys.readouterr().err
    assert (root / "README.md").read_text() == before
    assert not list((root / "results").glob("*/*.png"))


def test_report_refuses_results_of_no_stage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_results("k99", make_row("cudnn", 500.0)).save(root / "results" / FOLDER / "k99.json")
    assert report.main(["--check"], root, STAGES) == 2
    assert "k99.json: the ladder has no stage k99" in capsys.readouterr().err


def test_report_without_results(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(block("ladder") + block("environment") + block("stage-k2"))
    assert report.main([], tmp_path, STAGES) == 0
    assert report.main(["--check"], tmp_path, STAGES) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.count("not measured") == 2 * len(STAGES) + 1
    assert "Nothing is measured yet." in text


# Figures


def test_figures_are_deterministic(tmp_path: Path) -> None:
    ladder = {stage: sample(stage, rate) for stage, rate in (("k1", 0.5), ("k2", 8.0))}
    for name, draw in (
        ("stage", lambda path: plots.plot_stage(ladder["k2"], path)),
        ("progress", lambda path: plots.plot_progress(ladder, path)),
    ):
        first, second = tmp_path / f"{name}1.png", tmp_path / f"{name}2.png"
        draw(first)
        draw(second)
        assert first.read_bytes().startswith(b"\x89PNG")
        assert len(first.read_bytes()) > 10_000
        assert first.read_bytes() == second.read_bytes()
        assert b"Software" not in first.read_bytes()


def test_figures_ignore_the_users_settings(tmp_path: Path) -> None:
    plots.plot_progress({"k2": sample()}, tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "figure.dpi": 50}):
        plots.plot_progress({"k2": sample()}, tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 20
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_figures_need_something_to_draw(tmp_path: Path) -> None:
    odd = make_results("k2", make_row("k2", 7.0, Problem.square(1, 3, 77, 64, False)))
    with pytest.raises(ValueError, match="k2 hold no row of the sweep"):
        plots.plot_stage(odd, tmp_path / "a.png")
    with pytest.raises(ValueError, match="no bwd results"):
        plots.plot_progress({"k2": sample()}, tmp_path / "a.png", direction="bwd")
    assert list(tmp_path.iterdir()) == []


def test_progress_falls_back_to_the_longest_common_length() -> None:
    def results(stage: str, *seqlens: int) -> Results:
        return make_results(stage, *(make_row(stage, 1.0, sweep_problem(n)) for n in seqlens))

    at = plots.progress_problem
    assert at([results("k1", 512, 4096, 8192), results("k2", 4096, 8192)], 128, "fwd").seqlen_q == 4096
    assert at([results("k1", 512, 1024), results("k2", 512, 1024, 4096)], 128, "fwd").seqlen_q == 1024
    assert at([results("k1", 512), results("k2", 1024)], 128, "fwd").seqlen_q == 4096


def test_rates_are_written_at_the_precision_worth_reading() -> None:
    written = {612.4: "612", 99.96: "100", 48.25: "48.2", 9.999: "10.0", 4.131: "4.13", 0.0521: "0.052"}
    assert {rate: plots.format_rate(rate) for rate in written} == written


def test_the_lead_is_over_peers_and_not_over_the_public_call() -> None:
    problem = sweep_problem()
    results = Results("k6", ENVIRONMENT, [make_row("k6", 700.0), make_row("fa2", 350.0)])
    results.rows.append(replace(make_row("k6", 710.0), provider=PUBLIC_CALLS["k6"]))
    assert results.best_peer(problem).provider == "fa2"
    text = claims.lead({"k6": results})
    assert "2.000–2.000" in text
    assert "fastest of FlashAttention-2, of those" in text


def test_a_row_is_of_a_plain_problem() -> None:
    with pytest.raises(ValueError, match="of plain problems"):
        Row.on(sweep_problem().with_(sink=True), "k6")
