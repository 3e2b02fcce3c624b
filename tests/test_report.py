"""The tables made of results, the blocks that hold them in documents, and the command that writes and checks
both.

Every number here is made up, and lives in a temporary folder.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from made_up_results import (
    ENVIRONMENT,
    FOLDER,
    SHA,
    backward_sample,
    block,
    make_results,
    make_row,
    sample,
    small_repository,
    sweep_problem,
)

from harness import claims, markdown, plots, report, stage_tables
from harness.hardware import H100_SXM
from harness.results import PUBLIC_CALLS, Results, gpu_folder
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Stage

STAGES = [Stage(id, id.upper(), f"what {id} adds", None) for id in ladder.LADDER]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return small_repository(tmp_path)


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
    results.rows = [row for row in results.rows if not row.causal]
    assert stage_tables.ablation_table(results, ["a", "b"]) == full


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
    other.environment["peers"]["cudnn"] = "9.1, front end 2"
    assert "cuDNN 9.1, front end 2" in stage_tables.environment_line({"k1": other, "k2": sample()})
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


def test_the_lead_is_over_peers_and_not_over_the_public_call() -> None:
    problem = sweep_problem()
    results = Results("k6", ENVIRONMENT, [make_row("k6", 700.0), make_row("fa2", 350.0)])
    results.rows.append(replace(make_row("k6", 710.0), provider=PUBLIC_CALLS["k6"]))
    assert results.best_peer(problem).provider == "fa2"
    text = claims.lead({"k6": results})
    assert "2.000–2.000" in text
    assert "Peers: FlashAttention-2, those that take" in text


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


def test_the_gpu_of_most_stages_stands_first_then_the_newest(three: Path) -> None:
    assert list(report.load_ladder(three)) == ["h100-c", "h100-b", "h100-a"]
    (three / "results" / "h100-c" / "k2.json").unlink()
    assert list(report.load_ladder(three)) == ["h100-b", "h100-a", "h100-c"]
    few = make_results("k1", make_row("k1", 100.0), gpu="NVIDIA H100 D", date="2000-01-09")
    few.save(three / "results" / gpu_folder("NVIDIA H100 D") / "k1.json")
    assert list(report.load_ladder(three)) == ["h100-b", "h100-a", "h100-d", "h100-c"]


def test_the_first_gpu_is_the_one_of_the_ladder(three: Path) -> None:
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
