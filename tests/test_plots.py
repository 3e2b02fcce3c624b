"""Figures show the rows' numbers: what is drawn is read back from each figure, bar by bar and line by line.

Every rate is another one, so that no bar, line, label or colour can stand in another's place.
"""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from harness import plots, report
from harness.results import Results, Row
from harness.sweep import sweep_problem
from hopper_attention.kernels.contract import Problem

LABELS = {  # what a reader knows each peer by
    "math": "PyTorch math",
    "efficient": "CUTLASS memory-efficient",
    "flex": "FlexAttention",
    "fa2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
}
LINES = ("cudnn", "fa4", "fa3", "fa2")
PANELS = {
    "head_dim 64, full": (64, False),
    "head_dim 64, causal": (64, True),
    "head_dim 128, full": (128, False),
    "head_dim 128, causal": (128, True),
}
ENVIRONMENT = {"gpu": "NVIDIA H100 80GB HBM3", "peers": {}, "host_us": {}}
Place = tuple[str, str, str]  # of a panel by its title, of a tick and of a colour by their labels


class Rates:
    """Rates of which no two are written alike, in no order."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self) -> float:
        self.given += 1
        return 5.0 * 1.01 ** (37 * self.given % 499)


def row(provider: str, problem: Problem, tflops: float | None, error: str | None = None) -> Row:
    return Row.on(problem, provider, tflops=tflops, error=error)


def stage_results(stage: str, direction: str, rates: Rates) -> Results:
    """A stage, every peer and another provider at three lengths; some rows fail, one is not there."""
    rows = []
    for n in (512, 4096, 16384):
        for d, causal in PANELS.values():
            problem = sweep_problem(n, d, causal, direction)
            for provider in ("other", *sorted(LABELS), stage):
                if (provider, n) == ("math", 16384):
                    rows.append(row(provider, problem, None, "OOM: needs at least 97.9 GiB"))
                elif (provider, n, d) == ("cudnn", 512, 64):
                    rows.append(row(provider, problem, None, "unsupported: no such mask"))
                elif (provider, n, d, causal) != ("flex", 4096, 128, True):
                    rows.append(row(provider, problem, rates()))
    return Results(stage, ENVIRONMENT, rows)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures by the names they would be saved under."""
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.update({Path(path).name: figure}))
    return figures


def ticks(axes: Axes) -> dict[int, str]:
    """Labels by position; those of the upper panels, which are not shown, too."""
    labels = [tick.label1.get_text() for tick in axes.xaxis.get_major_ticks()]
    return dict(zip(map(int, axes.get_xticks()), labels, strict=True))


def bars(axes: Axes) -> list[tuple[float, float, str]]:
    """(middle, rate, colour) of each bar; they stand on the axis and side by side."""
    found, right = [], -1.0
    for bar in sorted(axes.patches, key=lambda bar: bar.get_x()):
        assert bar.get_y() == axes.get_ylim()[0]
        assert bar.get_x() >= right
        right = bar.get_x() + bar.get_width()
        middle = bar.get_x() + bar.get_width() / 2
        found.append((middle, bar.get_y() + bar.get_height(), to_hex(bar.get_facecolor())))
        assert found[-1][1] < axes.get_ylim()[1]
    return found


def legend(figure: Figure) -> dict[str, str]:
    """Labels by colour, in order."""
    (found,) = figure.legends
    labels = [text.get_text() for text in found.get_texts()]
    return dict(zip((to_hex(patch.get_facecolor()) for patch in found.get_patches()), labels, strict=True))


def title(axes: Axes) -> str:
    return axes.get_title(loc="left")


def read(figure: Figure) -> tuple[dict[Place, float], dict[Place, str]]:
    """Where the bars are, and where the texts are: by their places among the bars of another group."""
    labels = legend(figure)
    rates: dict[Place, float] = {}
    texts: dict[Place, str] = {}
    for axes in figure.axes:
        at = ticks(axes)
        found = bars(axes)
        slots = {round(x - round(x), 6): labels[colour] for x, _, colour in found}
        assert len(slots) == len(labels)  # a provider has one place in each group
        assert [slots[x] for x in sorted(slots)] == [*labels.values()]
        for x, rate, colour in found:
            place = (title(axes), at[round(x)], labels[colour])
            assert place not in rates
            rates[place] = rate
        for text in axes.texts:
            x, y = text.get_position()
            place = (title(axes), at[round(x)], slots[round(x - round(x), 6)])
            assert place not in texts
            texts[place] = text.get_text()
            below = rates.get(place, axes.get_ylim()[0])
            assert below < y < 1.2 * below
    return rates, texts


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_stages_bars_are_its_rows(direction: str, drawn: dict[str, Figure]) -> None:
    results = stage_results("k2", direction, Rates())
    plots.plot_stage(results, "k2.png")
    figure = drawn["k2.png"]
    place = lambda row: (
        next(title for title, panel in PANELS.items() if panel == (row.head_dim, row.causal)),
        str(row.seqlen_q),
        LABELS.get(row.provider, row.provider),
    )
    rates, texts = read(figure)
    expected = {place(row): row.tflops for row in results.rows if row.tflops is not None}
    assert rates == {where: pytest.approx(rate, rel=1e-12) for where, rate in expected.items()}
    numbered = {of for of in expected if of[2] == "k2"}  # and of each group's peers the fastest
    for group in {of[:2] for of in expected}:
        numbered.add(max((of for of in expected if of[:2] == group and of[2] != "k2"), key=expected.get))
    written = {where: plots.format_rate(rate) for where, rate in expected.items() if where in numbered}
    errors = {place(row): row.error.partition(":")[0] for row in results.rows if row.error}
    assert texts == written | errors
    assert len(set(written.values())) == len(written)
    assert [title(axes) for axes in figure.axes] == [*PANELS]
    for axes in figure.axes:
        assert list(ticks(axes).values()) == ["512", "4096", "16384"]
        assert axes.get_yscale() == "log"


def test_a_stages_legend_names_each_colour(drawn: dict[str, Figure]) -> None:
    plots.plot_stage(stage_results("k2", "fwd", Rates()), "k2.png")
    assert [*legend(drawn["k2.png"]).values()] == ["k2", *LABELS.values(), "other"]
    colours = [plots.STAGE_COLOUR, *plots.PEER_COLOURS.values(), plots.OTHER_COLOUR]
    assert {*legend(drawn["k2.png"])} == {*colours}
    assert len({*colours}) == len(colours)


def test_a_stage_says_where_it_was_not_measured(drawn: dict[str, Figure]) -> None:
    results = stage_results("k2", "fwd", Rates())
    missing = sweep_problem(4096, 64, True, "fwd")
    results.rows = [row for row in results.rows if row.key != ("k2", missing)]
    plots.plot_stage(results, "k2.png")
    rates, texts = read(drawn["k2.png"])
    place = ("head_dim 64, causal", "4096", "k2")
    assert place not in rates
    assert [where for where, text in texts.items() if text == "not measured"] == [place]


def ladder_results(rates: Rates) -> dict[str, Results]:
    """Stages of both directions; one has failed at d = 64, one was not measured there."""
    found = {}
    for stage, direction in (("k1", "fwd"), ("b1", "bwd"), ("k2", "fwd"), ("k3", "fwd"), ("b2", "bwd")):
        rows = []
        for n in (512, 4096, 8192):
            for d, causal in PANELS.values():
                problem = sweep_problem(n, d, causal, direction)
                rows += [row(name, problem, rates()) for name in LABELS]
                if (stage, d) == ("k2", 64):
                    rows.append(row(stage, problem, None, "OOM: needs 9 GB"))
                elif (stage, d) != ("k3", 64):
                    rows.append(row(stage, problem, rates()))
        found[stage] = Results(stage, ENVIRONMENT, rows)
    return found


def lines(axes: Axes) -> dict[str, float]:
    """The dashed lines' rates by the labels in their colour."""
    notes, heights = {}, {}
    for note in axes.texts:
        if hasattr(note, "xy"):
            name, _, rate = note.get_text().rpartition("  ")
            notes[to_hex(note.get_color())] = (name, rate, note.xy)
            heights[name] = note.xyann[1]
    found = {}
    for line in axes.lines:
        (rate,) = {*line.get_ydata()}
        name, written, tip = notes.pop(to_hex(line.get_color()))
        assert written == plots.format_rate(rate)
        assert tip == (1, rate)
        assert line.get_linestyle() == "--"
        found[name] = rate
    assert notes == {}
    assert sorted(heights, key=heights.get) == sorted(found, key=found.get)
    return found


def written_over_bars(axes: Axes) -> dict[str, str]:
    return {
        ticks(axes)[text.get_position()[0]]: text.get_text() for text in axes.texts if not hasattr(text, "xy")
    }


@pytest.mark.parametrize(("direction", "stages"), [("fwd", ["k1", "k2", "k3"]), ("bwd", ["b1", "b2"])])
def test_the_ladders_bars_and_lines_are_its_rows(
    direction: str, stages: list[str], drawn: dict[str, Figure]
) -> None:
    everything = ladder_results(Rates())
    plots.plot_progress(everything, "progress.png", direction)
    wide, narrow = drawn["progress.png"].axes
    # Of d = 64 no length has every forward stage's time: then it is 4096 all the same.
    for axes, d in ((wide, 128), (narrow, 64)):
        problem = sweep_problem(4096, d, False, direction)
        assert title(axes) == f"head_dim {d}, full, N = 4096"
        assert list(ticks(axes).values()) == stages
        own = {stage: everything[stage].find(stage, problem) for stage in stages}
        timed = {stage: row.tflops for stage, row in own.items() if row and row.tflops}
        found = {ticks(axes)[round(x)]: rate for x, rate, _ in bars(axes)}
        assert found == {stage: pytest.approx(rate, rel=1e-12) for stage, rate in timed.items()}
        assert all(x == pytest.approx(round(x)) for x, _, _ in bars(axes))
        assert {colour for _, _, colour in bars(axes)} == {plots.STAGE_COLOUR}
        reasons = {"k2": "OOM", "k3": "not measured"}
        assert written_over_bars(axes) == {
            stage: plots.format_rate(timed[stage]) if stage in timed else reasons[stage] for stage in stages
        }
        assert lines(axes) == {
            LABELS[name]: max(everything[stage].find(name, problem).tflops for stage in stages)
            for name in LINES
        }
        assert {to_hex(line.get_color()) for line in axes.lines} == {
            plots.PEER_COLOURS[name] for name in LINES
        }


def test_the_ladders_lines_are_of_the_length_that_is_drawn(drawn: dict[str, Figure]) -> None:
    everything = ladder_results(Rates())
    for results in everything.values():
        results.rows = [row for row in results.rows if row.seqlen_q != 4096 or row.provider in LABELS]
    plots.plot_progress(everything, "progress.png", "bwd")
    for axes, d in zip(drawn["progress.png"].axes, (128, 64)):
        problem = sweep_problem(8192, d, False, "bwd")
        assert title(axes) == f"head_dim {d}, full, N = 8192"
        found = [rate for _, rate, _ in bars(axes)]
        assert found == [
            pytest.approx(everything[stage].find(stage, problem).tflops) for stage in ("b1", "b2")
        ]
        assert lines(axes)["cuDNN"] == max(
            everything[stage].find("cudnn", problem).tflops for stage in ("b1", "b2")
        )


def headings(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def test_every_file_has_its_own_figure(drawn: dict[str, Figure]) -> None:
    everything = ladder_results(Rates())
    for path, draw in report.figures(Path(), {"h100": everything}).items():
        draw(path)
    kinds = {"fwd": "forward", "bwd": "backward"}
    for stage, results in everything.items():
        heading, below = headings(drawn.pop(f"{stage}.png"))
        assert heading == f"{stage}: attention {kinds[results.rows[0].direction]} beside its peers"
        assert below == "NVIDIA H100 80GB HBM3 · bfloat16 · 16384 tokens, hidden size 2048"
    for name, kind, stages in (
        ("progress", "forward", ["k1", "k2", "k3"]),
        ("progress_bwd", "backward", ["b1", "b2"]),
    ):
        figure = drawn.pop(f"{name}.png")
        assert headings(figure)[0] == f"The ladder: attention {kind}"
        assert list(ticks(figure.axes[0]).values()) == stages
    assert drawn == {}
