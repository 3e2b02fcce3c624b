"""What `harness.policy_suite` measured, for the notes: a table of each suite and direction, and a figure of
time against the window."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness import plots
from harness.library import Rows, load_rows
from harness.markdown import table
from harness.plots import PEER_COLOURS, STAGE_COLOUR, format_rate, label
from harness.policy_suite import DIRECTIONS, OURS, PEERS, SUITES
from harness.results import DIRECTION_WORDS
from hopper_attention.kernels.contract import Problem

STAGES = {direction: stage_id for stage_id, direction in DIRECTIONS.items()}
DRAWN = {"heads": 16, "kv_heads": 16, "head_dim": 128}
BEST_PEER = "fa3"  # in the figure
MARKERS = ("o", "s", "^", "D")  # by length


def load(folder: Path, suite: str, direction: str) -> Rows:
    """A suite's rows, none where there is no file. Raises ValueError that names the file."""
    return load_rows(folder / suite / f"{direction}.json")


def suite_table(rows: Rows) -> str:
    """Rates, the best peer, and how far ahead of it the library's call is: its time over ours; where there
    is one, dense's time over ours too."""
    dense = any("dense" in row["us"] for row in rows)
    lines = []
    for row in rows:
        us, rate = row["us"], lambda name: format_rate(row["flops"] / row["us"][name] * 1e-6)
        best = min((name for name in us if name in PEERS), key=us.get, default=None)
        line = [row["name"], row["problem"], f"{us[OURS]:.1f}", rate(OURS)]
        line += [label(best), f"**{us[best] / us[OURS]:.3f}**"] if best else ["", ""]
        lines.append([*line, *([f"{us['dense'] / us[OURS]:.3f}" if "dense" in us else ""] if dense else [])])
    header = ["lengths or window", "problem", "µs", "TFLOP/s", "best peer", "ahead"]
    return table(header + ["of dense"] * dense, lines, "llrrlr" + "r" * dense)


def blocks(folder: Path) -> dict[str, str]:
    """The tables of one GPU by the names of their places in the notes."""
    return {
        f"{suite}-{direction}": suite_table(rows) if (rows := load(folder, suite, direction)) else ""
        for suite in SUITES
        for direction in DIRECTIONS.values()
    }


# ---- the figure -------------------------------------------------------------------------------------------


def times_by_length(rows: Rows, provider: str) -> dict[int, dict[int, float]]:
    """Nanoseconds of a query of all heads by its window in keys, by the length: those of DRAWN."""
    found: dict[int, dict[int, float]] = {}
    problems: Mapping[str, Problem] = {str(named.problem): named.problem for named in SUITES["window"]}
    for row in rows:
        problem = problems.get(row["problem"])
        plain = problem is not None and problem.policies == ("window",) and problem.window[1] == 0
        if plain and all(getattr(problem, key) == x for key, x in DRAWN.items()) and provider in row["us"]:
            time = row["us"][provider] * 1e3 / problem.seqlen_q
            found.setdefault(problem.seqlen_q, {})[problem.window[0] + 1] = time
    return dict(sorted(found.items()))


def plot_window(rows: Mapping[str, Rows], gpu: str, path: Path | str) -> None:
    """Draw time against the window, a panel for each direction's rows, a line for each length: where they lie
    on each other, time does not depend on the length."""
    with plots.style():
        figure = Figure(figsize=(1.0 + 5.5 * len(rows), 4.8))
        for axes, direction in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows):
            for provider, colour in ((BEST_PEER, PEER_COLOURS[BEST_PEER]), (OURS, STAGE_COLOUR)):
                _draw(axes, times_by_length(rows[direction], provider), provider, direction, colour)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(lambda keys, _: f"{keys:g}")
            axes.yaxis.set_major_formatter(lambda ns, _: f"{ns:g}")
            axes.yaxis.set_minor_formatter(lambda ns, _: f"{ns:g}")
            axes.set_xlabel("window, keys")
            axes.set_title(DIRECTION_WORDS[direction], fontsize=10, loc="left")
            axes.legend(loc="upper left")
        figure.axes[0].set_ylabel("ns for each query of all heads")
        plots.heading(figure, "Time grows with the window, not with the length", f"{gpu} · 16 heads of 128")
        figure.subplots_adjust(left=0.07, right=0.98, bottom=0.11, top=0.87, wspace=0.15)
        plots.save(figure, path)


def _draw(
    axes: Axes, times: Mapping[int, Mapping[int, float]], provider: str, direction: str, colour: str
) -> None:
    name = STAGES[direction] if provider == OURS else label(provider)
    for marker, (length, by_window) in zip(MARKERS, times.items()):
        windows = sorted(by_window)
        strokes = {"color": colour, "marker": marker, "markerfacecolor": "none", "linewidth": 1.0}
        axes.plot(windows, [by_window[x] for x in windows], label=f"{name}, {length} tokens", **strokes)


def figures(folder: Path) -> dict[str, Callable[[Path], None]]:
    """The figure of one GPU by its file's name, if there are rows for it."""
    rows = {direction: load(folder, "window", direction) for direction in STAGES}
    rows = {direction: x for direction, x in rows.items() if len(times_by_length(x, OURS)) > 1}
    return {"window.png": partial(plot_window, rows, folder.name.upper())} if rows else {}
