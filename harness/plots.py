"""Figures drawn from results: one per stage beside its peers, and the ladder as a whole.

Everything that shapes a picture is set here: the same results and the same matplotlib give the same bytes.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from harness.results import DIRECTION_WORDS, PEER_LABELS, PUBLIC_CALLS, Results, Row
from harness.sweep import HEAD_DIMS, HIDDEN_SIZE, LENGTHS, SEQLENS, TOTAL_TOKENS, sweep_problem
from hopper_attention.cache import write_atomically
from hopper_attention.kernels.contract import Problem

STAGE_COLOUR = "#c8102e"
PEER_COLOURS = {
    "math": "#c4c4c4",
    "efficient": "#a99bc9",
    "flex": "#e3a857",
    "fa2": "#7fb2dd",
    "cudnn": "#6aa84f",
    "fa3": "#3f7fb5",
    "fa4": "#1f4e79",
}
OTHER_COLOUR = "#8c8c8c"
INK, MUTED, GRID = "#222222", "#666666", "#e4e4e4"

MOST_NUMBERED = 5  # providers: of more, only the stage's bars and the fastest peer's have numbers
PROGRESS_SEQLEN = 4096
PROGRESS_PEERS = ("cudnn", "fa4", "fa3", "fa2")
PROGRESS_HEAD_DIMS = (128, 64)

STYLE = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.family": "DejaVu Sans",  # shipped with matplotlib
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
}


def format_rate(tflops: float) -> str:
    """A rate at the precision worth reading: 612, 48.3, 4.13, 0.052."""
    for at_least, digits in ((100, 0), (10, 1), (0.1, 2)):
        if round(tflops, digits) >= at_least:
            return f"{tflops:.{digits}f}"
    return f"{tflops:.2g}"


def label(provider: str) -> str:
    """A provider's name for humans: the peer's, or a stage's id."""
    return PEER_LABELS.get(provider, provider)


def plot_stage(results: Results, path: Path | str) -> None:
    """Draw a stage beside its peers: a panel per head_dim and mask, a group of bars per sequence length.

    The axis is logarithmic, for slow stages stand beside peers a hundred times faster; every bar carries its
    value, a missing one the reason, and the stage's place "not measured" where it has no row. Raises
    ValueError when no row belongs to the benchmark's sweep.
    """
    rows = [row for row in results.sweep_rows() if row.provider not in PUBLIC_CALLS.values()]
    if not rows:
        raise ValueError(f"results of {results.stage} hold no row of the sweep to draw")
    present = {row.provider for row in rows}
    peers = [p for p in PEER_LABELS if p in present] + sorted(present - set(PEER_LABELS) - {results.stage})
    providers = [results.stage] * (results.stage in present) + peers
    seqlens = [n for n in LENGTHS if any(row.seqlen_kv == n for row in rows)]
    bottom, top = _log_limits(row.tflops for row in rows)

    with style():
        figure = Figure(figsize=(13, 8.6))
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for line, head_dim in zip(panels, HEAD_DIMS, strict=True):
            for axes, causal in zip(line, (False, True), strict=True):
                here = [row for row in rows if (row.head_dim, row.causal) == (head_dim, causal)]
                _log_axis(axes, bottom, top)
                _draw_groups(axes, here, providers, seqlens, results.stage, bottom)
                mask = "causal" if causal else "full"
                axes.set_title(f"head_dim {head_dim}, {mask}", fontsize=10, loc="left")
        for axes in panels[:, 0]:
            axes.set_ylabel("TFLOP/s (log)")
        for axes in panels[1]:
            axes.set_xlabel("sequence length")
        handles = [Patch(color=_colour(p, results.stage), label=label(p)) for p in providers]
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.05, 0.955), ncols=len(providers))
        kind = DIRECTION_WORDS[rows[0].direction]
        dtypes = ", ".join(sorted({row.dtype for row in rows}))
        heading(
            figure,
            f"{results.stage}: attention {kind} beside its peers",
            f"{results.gpu} · {dtypes} · {TOTAL_TOKENS} tokens, hidden size {HIDDEN_SIZE}",
        )
        figure.subplots_adjust(left=0.055, right=0.99, bottom=0.06, top=0.88, wspace=0.03, hspace=0.13)
        save(figure, path)


def plot_progress(all_stage_results: Mapping[str, Results], path: Path | str, direction: str = "fwd") -> None:
    """Draw the ladder: one bar per stage, in the mapping's order, and a line per peer it is climbing towards.

    Full attention at N = 4096, or at the longest N that every stage has a time for. A peer is measured anew
    beside every stage; its line is at the fastest of those. Raises ValueError if no row has this direction.
    """

    def belongs(results: Results) -> bool:
        return any(row.direction == direction for row in results.sweep_rows())

    of_direction = [results for results in all_stage_results.values() if belongs(results)]
    if not of_direction:
        raise ValueError(f"no {direction} results to draw")
    with style():
        figure = Figure(figsize=(max(8.0, 3.0 + 0.55 * len(of_direction)), 7.2))
        for axes, head_dim in zip(figure.subplots(2, 1), PROGRESS_HEAD_DIMS, strict=True):
            problem = progress_problem(of_direction, head_dim, direction)
            _draw_ladder(axes, of_direction, problem)
            axes.set_title(f"head_dim {head_dim}, full, N = {problem.seqlen_q}", fontsize=10, loc="left")
        kind = DIRECTION_WORDS[direction]
        gpus = ", ".join(dict.fromkeys(results.gpu for results in of_direction))
        heading(figure, f"The ladder: attention {kind}", f"{gpus} · dashed: peers, at their fastest")
        figure.subplots_adjust(left=0.1, right=0.77, bottom=0.045, top=0.9, hspace=0.22)
        save(figure, path)


def _draw_groups(
    axes: Axes, rows: list[Row], providers: list[str], seqlens: list[int], stage: str, bottom: float
) -> None:
    width = 0.86 / len(providers)
    found = {(row.provider, row.seqlen_kv): row for row in rows}
    fastest: dict[int, float] = {}  # rate of the fastest peer, by length
    for (provider, n), row in found.items():
        if provider != stage and row.tflops is not None:
            fastest[n] = max(row.tflops, fastest.get(n, 0.0))
    for i, provider in enumerate(providers):
        for group, n in enumerate(seqlens):
            row, x = found.get((provider, n)), group + (i - (len(providers) - 1) / 2) * width
            if row is None and provider != stage:
                continue
            text = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 7}
            text |= {"fontweight": "bold", "color": STAGE_COLOUR} if provider == stage else {"color": INK}
            if row is None or row.tflops is None:
                reason = "not measured" if row is None else short_error(row.error)
                axes.text(x, bottom * 1.08, reason, **text)
                continue
            axes.bar(x, row.tflops - bottom, width * 0.9, bottom=bottom, color=_colour(provider, stage))
            if provider == stage or len(providers) <= MOST_NUMBERED or row.tflops == fastest[n]:
                axes.text(x, row.tflops * 1.06, format_rate(row.tflops), **text)
    axes.set_xticks(range(len(seqlens)), [str(n) for n in seqlens])
    axes.set_xlim(-0.5, len(seqlens) - 0.5)


def _draw_ladder(axes: Axes, ladder: list[Results], problem: Problem) -> None:
    rows = [results.at(problem) for results in ladder]
    peers = {
        name: [row for results in ladder if (row := results.find(name, problem))] for name in PROGRESS_PEERS
    }
    rates = {name: [row.tflops for row in found if row.tflops is not None] for name, found in peers.items()}
    lines = {name: max(known) for name, known in rates.items() if known}
    bottom, top = _log_limits([row.tflops for row in rows if row] + list(lines.values()))
    _log_axis(axes, bottom, top)
    axes.set_ylabel("TFLOP/s (log)")
    for x, row in enumerate(rows):
        if row is None or row.tflops is None:
            reason = "not measured" if row is None else short_error(row.error)
            axes.text(x, bottom * 1.1, reason, ha="center", va="bottom", rotation=90, fontsize=8, color=MUTED)
            continue
        axes.bar(x, row.tflops - bottom, 0.72, bottom=bottom, color=STAGE_COLOUR)
        boxed = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
        value = format_rate(row.tflops)
        axes.text(
            x, row.tflops * 1.1, value, ha="center", va="bottom", fontsize=9, fontweight="bold", bbox=boxed
        )
    axes.set_xticks(range(len(ladder)), [results.stage for results in ladder])
    axes.set_xlim(-0.6, len(ladder) - 0.4)
    to_axes = axes.transData - axes.transAxes
    heights = spread({name: to_axes.transform((0, rate))[1] for name, rate in lines.items()})
    for name, rate in lines.items():
        axes.axhline(rate, color=PEER_COLOURS[name], linewidth=1.4, linestyle=(0, (5, 2)), zorder=0.9)
        axes.annotate(
            f"{label(name)}  {format_rate(rate)}",
            xy=(1, rate),
            xycoords=("axes fraction", "data"),
            xytext=(1.04, heights[name]),
            textcoords="axes fraction",
            va="center",
            color=PEER_COLOURS[name],
            arrowprops={
                "arrowstyle": "-",
                "color": PEER_COLOURS[name],
                "shrinkA": 2,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def progress_problem(ladder: list[Results], head_dim: int, direction: str) -> Problem:
    """Where `plot_progress` compares: N = 4096, or else the longest N that every stage has a time for."""

    def at(n: int) -> Problem:
        return sweep_problem(n, head_dim, False, direction)

    def timed_by_all(n: int) -> bool:
        return all((row := results.at(at(n))) and row.tflops is not None for results in ladder)

    for n in (PROGRESS_SEQLEN, *sorted(SEQLENS, reverse=True)):
        if timed_by_all(n):
            return at(n)
    return at(PROGRESS_SEQLEN)


def spread(heights: Mapping[str, float], gap: float = 0.065) -> dict[str, float]:
    """Heights of labels, moved up where needed so that no two are closer than `gap`."""
    placed: dict[str, float] = {}
    lowest = -1.0
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        placed[name] = lowest = max(height, lowest + gap)
    return placed


def short_error(error: str | None) -> str:
    """The word an error begins with ("OOM", "unsupported"): what fits on a bar."""
    word = (error or "").split(":")[0].strip()
    return word if 0 < len(word) <= 12 else "no result"


def _colour(provider: str, stage: str) -> str:
    return STAGE_COLOUR if provider == stage else PEER_COLOURS.get(provider, OTHER_COLOUR)


def _log_limits(rates: Iterable[float | None]) -> tuple[float, float]:
    """Limits that leave the lowest bar some height and the highest one room for its value."""
    known = [rate for rate in rates if rate is not None and rate > 0] or [1.0, 1000.0]
    return min(known) / 2.0, max(known) * 3.0


def _log_axis(axes: Axes, bottom: float, top: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def heading(figure: Figure, title: str, subtitle: str) -> None:
    figure.text(0.055, 0.985, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.99, 0.982, subtitle, fontsize=9, color=MUTED, va="top", ha="right")


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults with STYLE on top, whatever the user's own settings; undone on leaving."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def save(figure: Figure, path: Path | str) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})  # no version, no date
    write_atomically(Path(path), content.getvalue())
