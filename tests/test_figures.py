"""The figures of a GPU as a whole show the rows' numbers: bars, lines, points and words are read back.

Every time is another one, so that nothing can stand in another's place.
"""

from dataclasses import replace
from pathlib import Path

import matplotlib.colors
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness import figures, plots, report
from harness.hardware import H200_SXM
from harness.results import PEER_LABELS, Results, Row
from harness.sweep import HEAD_DIMS, SEQLENS, sweep, sweep_problem
from hopper_attention.kernels.contract import Problem

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "1",
    "torch": "2",
    "cutlass_dsl": "4",
    "gemm_tflops": 700.0,
    "copy_tb_per_s": 4.0,
}
SHAPES = [(64, False), (64, True), (128, False), (128, True)]
TITLES = ["head_dim 64, full", "head_dim 64, causal", "head_dim 128, full", "head_dim 128, causal"]
BEST = {
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
}
PASSED = {"check": "pass", "max_error": 0.1, "cubin_sha256": "a" * 64}
MIB = 2**20


def timed(provider: str, problem: Problem, tflops: float, **fields: object) -> Row:
    passed = {} if provider in PEER_LABELS else PASSED
    ms = problem.flops / tflops / 1e9
    return Row.on(problem, provider, ms_median=ms, ms_iqr=0.1, tflops=tflops, **passed, **fields)


def stage_results(stage: str, direction: str, shift: int, **environment: object) -> Results:
    """A stage and every peer over the sweep, no two rates alike and in no order."""
    rows, given = [], shift
    for problem in sweep(direction):
        for provider in (stage, *PEER_LABELS):
            given += 1
            rows.append(timed(provider, problem, 150 + 37 * given % 499 + given / 1024))
    assert len({row.tflops for row in rows}) == len(rows)
    return Results(stage, ENVIRONMENT | environment, rows)


@pytest.fixture
def measured() -> dict[str, Results]:
    return {"k6": stage_results("k6", "fwd", 0), "bwd4": stage_results("bwd4", "bwd", 200)}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures by the names they would be saved under."""
    found: dict[str, Figure] = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: found.update({Path(path).name: figure}))
    return found


def draw(name: str, measured: dict[str, Results], drawn: dict[str, Figure]) -> Figure:
    figures.drawable(measured)[name](Path(name))
    return drawn[name]


def colour(artist: object) -> str:
    how = artist.get_facecolor if hasattr(artist, "get_facecolor") else artist.get_color
    return matplotlib.colors.to_hex(how())


def legend(figure: Figure) -> dict[str, str]:
    """Labels by colour, in order."""
    (found,) = figure.legends
    texts = [text.get_text() for text in found.get_texts()]
    handles = [*found.get_patches()] or [*found.get_lines()]
    return dict(zip(map(colour, handles), texts, strict=True))


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def change(results: Results, provider: str, problem: Problem, **fields: object) -> None:
    (at,) = (i for i, row in enumerate(results.rows) if row.key == (provider, problem))
    results.rows[at] = replace(results.rows[at], **fields)


def remove(results: Results, provider: str, problem: Problem) -> None:
    results.rows = [row for row in results.rows if row.key != (provider, problem)]


FAILED = {"ms_median": None, "ms_iqr": None, "tflops": None}


# Bars


def bars(axes: Axes, labels: dict[str, str]) -> dict[tuple[str, int], float]:
    """Heights by label and length; they stand on zero, side by side, in the legend's order."""
    found: dict[tuple[str, int], float] = {}
    lengths = [int(tick.label1.get_text()) for tick in axes.xaxis.get_major_ticks()]
    right, order = -1.0, []
    for bar in sorted(axes.patches, key=lambda bar: bar.get_x()):
        assert bar.get_y() == 0
        assert bar.get_x() > right
        right = bar.get_x() + bar.get_width()
        group = round(bar.get_x() + bar.get_width() / 2)
        order.append((group, [*labels].index(colour(bar))))
        place = labels[colour(bar)], lengths[group]
        assert place not in found
        found[place] = bar.get_height()
        assert bar.get_height() < axes.get_ylim()[1]
    assert order == sorted(order)
    return found


def words(axes: Axes) -> dict[int, list[str]]:
    """What is written over each length."""
    found: dict[int, list[str]] = {}
    for text in axes.texts:
        x = text.xy[0] if hasattr(text, "xy") else text.get_position()[0]
        found.setdefault(SEQLENS[round(x)], []).append(text.get_text().strip())
    return found


def test_the_headline_is_the_sweep(measured: dict[str, Results], drawn: dict[str, Figure]) -> None:
    figure = draw("headline.png", measured, drawn)
    labels = legend(figure)
    assert [*labels.values()] == ["k6 (forward), bwd4 (backward)", *BEST.values()]
    assert [*labels] == [plots.STAGE_COLOUR, *(plots.PEER_COLOURS[peer] for peer in BEST)]
    assert titles(figure) == [f"{kind}, {title}" for kind in ("forward", "backward") for title in TITLES]
    panels = [
        (stage, direction, *shape)
        for stage, direction in (("k6", "fwd"), ("bwd4", "bwd"))
        for shape in SHAPES
    ]
    drawn_bars = 0
    for axes, (stage, direction, head_dim, causal) in zip(figure.axes, panels, strict=True):
        at = lambda provider, n: (
            measured[stage].find(provider, sweep_problem(n, head_dim, causal, direction)).tflops
        )
        ours = labels[plots.STAGE_COLOUR]
        expected = {(ours, n): at(stage, n) for n in SEQLENS}
        expected |= {(BEST[peer], n): at(peer, n) for peer in BEST for n in SEQLENS}
        found = bars(axes, labels)
        assert found == {place: pytest.approx(rate) for place, rate in expected.items()}
        assert words(axes) == {n: [plots.format_rate(at(stage, n))] for n in SEQLENS}
        assert axes.get_yscale() == "linear"
        assert axes.get_ylim()[0] == 0
        drawn_bars += len(found)
    assert drawn_bars == 2 * 24 * 5
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert figure.texts[1].get_text() == "NVIDIA H200"


def test_the_headline_says_what_lacks(measured: dict[str, Results], drawn: dict[str, Figure]) -> None:
    """A failed row gives its reason, a stage's missing one too; a peer nobody measured has no place."""
    problem = sweep_problem(512, 64, True)
    change(measured["k6"], "cudnn", problem, **FAILED, error="unsupported: no such mask")
    remove(measured["k6"], "k6", problem)
    remove(measured["k6"], "fa2", problem)
    for results in measured.values():
        results.rows = [row for row in results.rows if row.provider != "fa3"]
    figure = draw("headline.png", measured, drawn)
    assert [*legend(figure).values()][1:] == ["cuDNN", "FlashAttention-2", "FlashAttention-4"]
    axes = figure.axes[1]
    assert words(axes)[512] == ["not measured", "unsupported"]
    assert [place for place in bars(axes, legend(figure)) if place[1] == 512] == [("FlashAttention-4", 512)]


def test_forward_and_backward_are_added(measured: dict[str, Results], drawn: dict[str, Figure]) -> None:
    change(measured["bwd4"], "math", sweep_problem(16384, 64, False, "bwd"), **FAILED, error="OOM: 9 GB")
    remove(measured["k6"], "flex", sweep_problem(512, 64, False))
    figure = draw("forward_backward.png", measured, drawn)
    labels = legend(figure)
    assert [*labels.values()] == ["k6 + bwd4", *PEER_LABELS.values()]
    assert titles(figure) == TITLES
    for axes, shape in zip(figure.axes, SHAPES, strict=True):
        expected = {}
        for n in SEQLENS:
            forward, backward = (sweep_problem(n, *shape, direction) for direction in ("fwd", "bwd"))
            for provider, name in (("", "k6 + bwd4"), *PEER_LABELS.items()):
                one = measured["k6"].find(provider or "k6", forward)
                other = measured["bwd4"].find(provider or "bwd4", backward)
                if one and one.ms_median and other.ms_median:
                    total = 3.5 * forward.flops / (one.ms_median + other.ms_median) / 1e9
                    expected[name, n] = total
        assert bars(axes, labels) == {place: pytest.approx(rate) for place, rate in expected.items()}
        values = {n: [plots.format_rate(expected["k6 + bwd4", n])] for n in SEQLENS}
        if shape == (64, False):
            values[16384].append("OOM")
            assert len(expected) == 48 - 2
        assert words(axes) == values


# Memory


def test_memory_is_that_of_the_rows(measured: dict[str, Results], drawn: dict[str, Figure]) -> None:
    """Of one shape in each direction; where the number cannot be, it is named instead."""
    held: dict[str, dict[str, dict[int, int]]] = {"fwd": {}, "bwd": {}}
    for results, direction in ((measured["k6"], "fwd"), (measured["bwd4"], "bwd")):
        for i, row in enumerate(results.rows):
            row.peak_bytes = (200 + i) * MIB
            if (row.head_dim, row.causal) == (128, False):
                held[direction].setdefault(row.provider, {})[row.seqlen_q] = row.peak_bytes
    change(measured["bwd4"], "bwd4", sweep_problem(4096, 128, False, "bwd"), peak_bytes=192 * MIB - 1)
    change(measured["bwd4"], "fa2", sweep_problem(512, 128, False, "bwd"), peak_bytes=192 * MIB)
    change(measured["k6"], "flex", sweep_problem(512, 128, False), peak_bytes=64 * MIB - 1)
    change(
        measured["k6"], "math", sweep_problem(16384, 128, False), **FAILED, error="OOM: 3 GB", peak_bytes=None
    )
    del held["bwd"]["bwd4"][4096], held["fwd"]["flex"][512], held["fwd"]["math"][16384]
    held["bwd"]["fa2"][512] = 192 * MIB

    figure = draw("memory.png", measured, drawn)
    assert titles(figure) == ["forward, head_dim 128, full", "backward, head_dim 128, full"]
    for axes, direction, stage, inputs in zip(
        figure.axes, ("fwd", "bwd"), ("k6", "bwd4"), ("Q, K, V: 192 MiB", "Q, K, V, O, dO: 320 MiB")
    ):
        assert axes.get_xscale() == axes.get_yscale() == "log"
        *lines, reference = axes.lines
        assert {*reference.get_ydata()} == {float(inputs.split()[-2]) * MIB}
        by_colour = {plots.PEER_COLOURS[peer]: peer for peer in PEER_LABELS} | {plots.STAGE_COLOUR: stage}
        found = {}
        for line in lines:
            lengths = [min(SEQLENS, key=lambda n: abs(n / x - 1)) for x in line.get_xdata()]
            found[by_colour[colour(line)]] = dict(zip(lengths, line.get_ydata(), strict=True))
        assert found == held[direction]
        written = {text.get_text() for text in axes.texts}
        ends = {p: figures.format_bytes(sizes[max(sizes)]) for p, sizes in found.items()}
        assert written == {f"{plots.label(p)}  {size}" for p, size in ends.items()} | {f"the inputs {inputs}"}
    note = figure.texts[-1].get_text()
    assert note.endswith(
        "less than what the call returns: FlexAttention forward at N = 512; bwd4 backward at N = 4096."
    )


def test_sizes_are_written_at_the_precision_worth_reading() -> None:
    written = {64 * MIB: "64 MiB", 1023 * MIB: "1023 MiB", 1024 * MIB: "1 GiB", 37376 * MIB: "36.5 GiB"}
    assert {size: figures.format_bytes(size) for size in written} == written


# The causal mask


def test_the_masks_speed_up_is_of_times(measured: dict[str, Results], drawn: dict[str, Figure]) -> None:
    remove(measured["bwd4"], "fa4", sweep_problem(2048, 128, True, "bwd"))
    figure = draw("causal.png", measured, drawn)
    assert [*legend(figure).values()][:5] == ["k6, bwd4", *BEST.values()]
    panels = [(stage, d) for stage in ("k6", "bwd4") for d in HEAD_DIMS]
    assert titles(figure) == [f"{kind}, head_dim {d}" for kind in ("forward", "backward") for d in HEAD_DIMS]
    for axes, (stage, head_dim) in zip(figure.axes, panels, strict=True):
        ideal, tiled, *lines = axes.lines
        assert {*ideal.get_ydata()} == {2}
        # 128 rows of queries see, of whole tiles, 128, 256, … keys.
        assert [*tiled.get_ydata()] == pytest.approx(
            [n * n / sum(128 * (i + 1) * 128 for i in range(n // 128)) for n in SEQLENS]
        )
        direction = "fwd" if stage == "k6" else "bwd"
        ms = {row.key: row.ms_median for row in measured[stage].rows}
        names = {plots.PEER_COLOURS[peer]: peer for peer in BEST} | {plots.STAGE_COLOUR: stage}
        found = {names[colour(line)]: dict(zip(*line.get_data())) for line in lines}
        expected: dict[str, dict[int, float]] = {}
        for provider in (*BEST, stage):
            for n in SEQLENS:
                full, causal = (
                    ms.get((provider, sweep_problem(n, head_dim, c, direction))) for c in (False, True)
                )
                if causal:
                    expected.setdefault(provider, {})[n] = pytest.approx(full / causal)
        assert found == expected


# The roofline


def test_the_roofs_are_the_gpus_and_points_the_rows(
    measured: dict[str, Results], drawn: dict[str, Figure]
) -> None:
    measured["bwd4"].environment |= {"gemm_tflops": 710.0, "copy_tb_per_s": 3.9}
    rates = {"k1": 1.5, "k4": 570.0, "bwd1": 2.5}
    for stage, rate in rates.items():
        problem = sweep_problem(4096, 128, False, "bwd" if stage == "bwd1" else "fwd")
        others = [timed(stage, problem.with_(causal=True), rate / 2), timed("fa2", problem, 300.0)]
        measured[stage] = Results(stage, ENVIRONMENT, [timed(stage, problem, rate), *others])
    measured["k5"] = Results("k5", ENVIRONMENT, [timed("k5", sweep_problem(512, 128, False), 9.0)])
    figure = draw("roofline.png", measured, drawn)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[2:] == ["peak: 1071 TFLOP/s, 4.8 TB/s", "measured: GEMM 710 TFLOP/s, copy 4 TB/s"]
    for axes, direction, stage in zip(figure.axes, ("fwd", "bwd"), ("k6", "bwd4"), strict=True):
        peak, own, points, lengths = axes.lines
        for line, tflops, tb_per_s in ((peak, H200_SXM.tensor_flops / 1e12, 4.8), (own, 710.0, 4.0)):
            left, right = axes.get_xlim()
            assert [*line.get_xdata()] == pytest.approx([left, tflops / tb_per_s, right])
            assert [*line.get_ydata()] == pytest.approx([left * tb_per_s, tflops, tflops])
        assert (peak.get_linestyle(), own.get_linestyle()) == ("-", "--")
        problem = sweep_problem(4096, 128, False, direction)
        of_stages = {s: rate for s, rate in rates.items() if (s == "bwd1") == (direction == "bwd")}
        of_stages[stage] = measured[stage].find(stage, problem).tflops
        assert {*points.get_xdata()} == {problem.flops / problem.min_bytes}
        assert sorted(points.get_ydata()) == sorted(of_stages.values())
        sweep = [sweep_problem(n, 128, False, direction) for n in SEQLENS]
        assert [*lengths.get_xdata()] == pytest.approx([p.flops / p.min_bytes for p in sweep])
        assert [*lengths.get_ydata()] == [measured[stage].find(stage, p).tflops for p in sweep]
        notes = [note for note in axes.texts if note.get_text().split()[0] in of_stages]
        assert {note.get_text(): note.xy[1] for note in notes} == {
            f"{s}  {plots.format_rate(rate)}": rate for s, rate in of_stages.items()
        }
        heights = [note.xyann[1] for note in sorted(notes, key=lambda note: note.xy[1])]
        assert heights == sorted(heights)
        others = {note.get_text(): note.xy for note in axes.texts if note not in notes}
        assert others == {str(n): xy for n, xy in zip(SEQLENS, zip(*lengths.get_data())) if n != 4096}


def test_without_own_rates_the_peak_alone_is_drawn(
    measured: dict[str, Results], drawn: dict[str, Figure]
) -> None:
    for results in measured.values():
        results.environment = {k: v for k, v in results.environment.items() if k != "copy_tb_per_s"}
    figure = draw("roofline.png", measured, drawn)
    assert len(figure.legends[0].get_texts()) == 3
    assert [len(axes.lines) for axes in figure.axes] == [3, 3]


# All of them


NAMES = {"headline.png", "forward_backward.png", "memory.png", "causal.png", "roofline.png"}


def test_what_can_be_drawn_is(measured: dict[str, Results]) -> None:
    assert {*figures.drawable(measured)} == NAMES - {"memory.png"}
    measured["k6"].rows[16].peak_bytes = 70 * MIB
    assert {*figures.drawable(measured)} == NAMES - {"memory.png"}  # of another shape
    row = measured["k6"].find("cudnn", sweep_problem(512, 128, False))
    row.peak_bytes = 70 * MIB
    assert {*figures.drawable(measured)} == NAMES
    for results in measured.values():
        results.environment["gpu"] = "NVIDIA X1"
    assert {*figures.drawable(measured)} == NAMES - {"roofline.png"}
    assert figures.drawable({"k6": measured["k6"]}) == {}
    assert figures.drawable({}) == {}
    measured["bwd4"].rows = [row for row in measured["bwd4"].rows if row.provider != "bwd4"]
    assert figures.drawable(measured) == {}


def test_figures_are_drawn_and_missed(
    measured: dict[str, Results], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the report, the same bytes each time, whatever the rows do not have."""
    folder = tmp_path / "results" / "h200"
    measured["k6"].find("fa2", sweep_problem(512, 128, False)).peak_bytes = 70 * MIB
    for stage, results in measured.items():
        results.save(folder / f"{stage}.json")
    assert report.main([], tmp_path) == 0
    first = {name: (folder / name).read_bytes() for name in NAMES}
    assert report.main([], tmp_path) == 0
    assert first == {name: (folder / name).read_bytes() for name in NAMES}
    (folder / "causal.png").unlink()
    capsys.readouterr()
    assert report.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out == "results/h200/causal.png: not drawn\n"
