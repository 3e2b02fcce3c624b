"""Figures of one GPU's results as a whole: the production stages, forward and backward, beside the peers.

In the style of `harness.plots`, and as deterministic. Every figure is of the benchmark's sweep.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from harness import plots
from harness.plots import INK, MUTED, PEER_COLOURS, STAGE_COLOUR, format_rate, label
from harness.results import DIRECTION_WORDS, PEER_LABELS, Results, bound_gpu, output_bytes
from harness.sweep import HEAD_DIMS, SEQLENS, sweep_problem
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import BACKWARD, FORWARD

STAGES = {"fwd": FORWARD, "bwd": BACKWARD}
BOTH = f"{FORWARD} + {BACKWARD}"
BEST_PEERS = ("cudnn", "fa2", "fa3", "fa4")
PANELS = tuple(product(HEAD_DIMS, (False, True)))
HEAD_DIM, LADDER_SEQLEN = 128, 4096  # of the figures that show one shape
DIAGONAL_TILE = 128
DASHED, DOTTED = (0, (5, 2)), (0, (1, 1.5))

Measured = Mapping[str, Results]
Cells = Mapping[
    tuple[str, int], float | str
]  # by provider and length: a rate, or the word of why there is none


def drawable(measured: Measured) -> dict[str, Callable[[Path], None]]:
    """The figures for which one GPU's results have the rows: by file name, what draws each."""
    if not all(stage in measured and _timed(measured[stage], stage) for stage in STAGES.values()):
        return {}
    found: dict[str, Callable[[Measured, Path], None]] = {
        "headline.png": plot_headline,
        "forward_backward.png": plot_forward_backward,
        "causal.png": plot_causal,
    }
    if any(_peaks(measured[stage], direction) for direction, stage in STAGES.items()):
        found["memory.png"] = plot_memory
    if bound_gpu(measured[FORWARD].environment):
        found["roofline.png"] = plot_roofline
    return {name: partial(draw, measured) for name, draw in found.items()}


def plot_headline(measured: Measured, path: Path | str) -> None:
    """Draw the production stages beside the best peers over the whole sweep: a line of panels a direction.

    The axis is linear and starts at zero, so a bar twice as high is twice as fast.
    """
    with plots.style():
        figure = Figure(figsize=(10, 5.8))
        present: set[str] = set()
        for line, (direction, stage) in zip(figure.subplots(2, 4, sharex=True, sharey=True), STAGES.items()):
            results = measured[stage]
            providers = [stage, *(peer for peer in BEST_PEERS if _timed(results, peer))]
            present |= {*providers}
            for axes, (head_dim, causal) in zip(line, PANELS):
                _draw_bars(axes, _rates(results, providers, head_dim, causal, direction), providers, stage)
                axes.set_title(
                    f"{DIRECTION_WORDS[direction]}, {_panel(head_dim, causal)}",
                    fontsize=8.5,
                    loc="left",
                    pad=4,
                )
            line[0].set_ylabel("TFLOP/s")
        figure.axes[0].set_ylim(0, 1.1 * _highest(figure.axes))
        _legend_of_bars(figure, f"{FORWARD} (forward), {BACKWARD} (backward)", _in_order(present, BEST_PEERS))
        plots.heading(figure, "Attention beside the best peers, by sequence length", _gpu(measured))
        figure.subplots_adjust(left=0.06, right=0.993, bottom=0.045, top=0.855, wspace=0.04, hspace=0.2)
        plots.save(figure, path)


def plot_forward_backward(measured: Measured, path: Path | str) -> None:
    """Draw forward and backward together, as training runs them: FLOPs of both over time of both."""
    with plots.style():
        figure = Figure(figsize=(10, 6.4))
        cells = {panel: together(measured, *panel) for panel in PANELS}
        timed = {p for found in cells.values() for (p, _), cell in found.items() if isinstance(cell, float)}
        providers = _in_order(timed, (BOTH, *PEER_LABELS))
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes, (panel, found) in zip(panels.flat, cells.items()):
            _draw_bars(axes, {key: cell for key, cell in found.items() if key[0] in timed}, providers, BOTH)
            axes.set_title(_panel(*panel), fontsize=9, loc="left", pad=4)
        panels[0, 0].set_ylim(0, 1.1 * _highest(panels.flat))
        for axes in panels[:, 0]:
            axes.set_ylabel("TFLOP/s")
        _legend_of_bars(figure, BOTH, _in_order(timed, PEER_LABELS))
        subtitle = f"{_gpu(measured)} · FLOPs of both over time of both, by sequence length"
        plots.heading(figure, "Forward and backward together", subtitle)
        figure.subplots_adjust(left=0.06, right=0.993, bottom=0.045, top=0.865, wspace=0.03, hspace=0.14)
        plots.save(figure, path)


def together(measured: Measured, head_dim: int, causal: bool) -> dict[tuple[str, int], float | str]:
    """TFLOP/s of forward and backward pass as one, by provider and length, `BOTH` being the production
    stages; where one of the two failed, the word why. Nothing where a row lacks."""
    found: dict[tuple[str, int], float | str] = {}
    for provider, n in product((BOTH, *PEER_LABELS), SEQLENS):
        rows = [
            measured[stage].find(
                stage if provider == BOTH else provider, sweep_problem(n, head_dim, causal, direction)
            )
            for direction, stage in STAGES.items()
        ]
        if None in rows:
            continue
        failed = [row for row in rows if row.tflops is None]
        milliseconds = sum(row.ms_median for row in rows if row.ms_median)
        rate = sum(row.problem.flops for row in rows) / milliseconds / 1e9 if not failed else 0.0
        found[provider, n] = plots.short_error(failed[0].error) if failed else rate
    return found


def plot_memory(measured: Measured, path: Path | str) -> None:
    """Draw what a call of each provider holds of device memory beside its inputs, and the inputs' own size.

    A number that cannot be, less than what the call returns, is not drawn but named below.
    """
    with plots.style():
        figure = Figure(figsize=(12, 5.6))
        left_out = []
        for axes, (direction, stage) in zip(figure.subplots(1, 2, sharey=True), STAGES.items()):
            peaks = _peaks(measured[stage], direction)
            peaks = {p: peaks[p] for p in _in_order(peaks, (*PEER_LABELS, stage))}
            returned = output_bytes(sweep_problem(LADDER_SEQLEN, HEAD_DIM, False, direction))
            for provider, held in peaks.items():
                if short := [n for n, size in held.items() if size < returned]:
                    lengths = " and ".join(map(str, short))
                    left_out.append(f"{label(provider)} {DIRECTION_WORDS[direction]} at N = {lengths}")
            known = {
                p: {n: size for n, size in held.items() if size >= returned} for p, held in peaks.items()
            }
            _draw_memory(axes, {p: held for p, held in known.items() if held}, stage)
            names = {"fwd": "Q, K, V", "bwd": "Q, K, V, O, dO"}[direction]
            inputs = len(names.split(", ")) * output_bytes(sweep_problem(LADDER_SEQLEN, HEAD_DIM, False))
            axes.axhline(inputs, color=INK, linewidth=1, linestyle=DASHED, zorder=0.9)
            axes.text(
                SEQLENS[0] * 0.8,
                inputs / 1.12,
                f"the inputs {names}: {format_bytes(inputs)}",
                fontsize=8,
                va="top",
            )
            axes.set_title(
                f"{DIRECTION_WORDS[direction]}, {_panel(HEAD_DIM, False)}", fontsize=10, loc="left"
            )
            axes.set_xlabel("sequence length")
        plots.heading(
            figure, "Memory that a call holds beside its inputs", f"{_gpu(measured)} · at most, log scale"
        )
        notes = (
            "FlashAttention-3 and -4 also hold copies of the inputs in the layout they take; backward, peers "
        )
        notes += "also hold O and LSE of their forward pass."
        if left_out:
            notes += f"\nNot drawn, for less than what the call returns: {'; '.join(left_out)}."
        figure.text(0.055, 0.02, notes, fontsize=7.5, color=MUTED, va="bottom")
        figure.subplots_adjust(left=0.07, right=0.8, bottom=0.165, top=0.88, wspace=0.68)
        plots.save(figure, path)


def _draw_memory(axes: Axes, known: Mapping[str, Mapping[int, int]], stage: str) -> None:
    _length_axis(axes)
    axes.set_yscale("log", base=2)
    axes.set_yticks([2**k for k in range(26, 37, 2)])
    axes.yaxis.set_major_formatter(lambda size, _: format_bytes(size))
    axes.set_ylim(40 * 2**20, 160 * 2**30)
    to_axes = axes.transData - axes.transAxes
    ends = {p: to_axes.transform((1, [*held.values()][-1]))[1] for p, held in known.items()}
    heights = plots.spread(ends, 0.05)
    for i, (provider, held) in enumerate(known.items()):
        # A little apart, since many hold as much as each other and would lie on one line.
        x = [n * 2 ** (0.09 * (i - (len(known) - 1) / 2)) for n in held]
        colour = _colour(provider, stage)
        axes.plot(x, [*held.values()], color=colour, linewidth=1.1, marker="o", markersize=4)
        axes.annotate(
            f"{label(provider)}  {format_bytes([*held.values()][-1])}",
            xy=(x[-1], [*held.values()][-1]),
            xytext=(1.05, heights[provider]),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            fontweight="bold" if provider == stage else "normal",
            color=colour if provider != "math" else MUTED,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5)},
        )


def plot_causal(measured: Measured, path: Path | str) -> None:
    """Draw how many times faster a causal mask is than none: it hides half of the scores, but those hidden in
    a tile on the diagonal are computed all the same."""
    with plots.style():
        figure = Figure(figsize=(10, 6.4))
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        present: set[str] = set()
        for line, (direction, stage) in zip(panels, STAGES.items()):
            for axes, head_dim in zip(line, HEAD_DIMS):
                axes.axhline(2, color=INK, linewidth=1, linestyle=DASHED, zorder=0.9)
                tiled = [2 / (1 + DIAGONAL_TILE / n) for n in SEQLENS]
                axes.plot(SEQLENS, tiled, color=INK, linewidth=1, linestyle=DOTTED, zorder=0.9)
                for provider in (*BEST_PEERS, stage):
                    found = causal_speedups(measured[stage], provider, head_dim, direction)
                    present |= {provider} if found else set()
                    axes.plot(
                        [*found],
                        [*found.values()],
                        color=_colour(provider, stage),
                        **_strokes(provider == stage),
                    )
                _length_axis(axes)
                axes.set_title(
                    f"{DIRECTION_WORDS[direction]}, head_dim {head_dim}", fontsize=9, loc="left", pad=4
                )
            line[0].set_ylabel("time full / time causal")
        for axes in panels[1]:
            axes.set_xlabel("sequence length")
        line = lambda text, **how: Line2D([], [], label=text, **how)
        handles = [line(f"{FORWARD}, {BACKWARD}", color=STAGE_COLOUR, **_strokes(True))]
        for peer in _in_order(present, BEST_PEERS):
            handles.append(line(label(peer), color=PEER_COLOURS[peer], **_strokes(False)))
        handles.append(line("half the scores", color=INK, linewidth=1, linestyle=DASHED))
        whole = f"with whole tiles of {DIAGONAL_TILE}² on the diagonal"
        handles.append(line(whole, color=INK, linewidth=1, linestyle=DOTTED))
        _legend(figure, handles, 0.95)
        plots.heading(
            figure, "What a causal mask saves", f"{_gpu(measured)} · time without a mask over time with it"
        )
        figure.subplots_adjust(left=0.06, right=0.985, bottom=0.075, top=0.865, wspace=0.03, hspace=0.14)
        plots.save(figure, path)


def causal_speedups(results: Results, provider: str, head_dim: int, direction: str) -> dict[int, float]:
    """By length, a provider's time without a mask over its time with a causal one."""
    found = {}
    for n in SEQLENS:
        full, causal = (
            results.find(provider, sweep_problem(n, head_dim, c, direction)) for c in (False, True)
        )
        if full and causal and full.ms_median and causal.ms_median:
            found[n] = full.ms_median / causal.ms_median
    return found


def _strokes(ours: bool) -> dict[str, object]:
    return {"linewidth": 2.2 if ours else 1.3, "marker": "o", "markersize": 5 if ours else 3.5}


def plot_roofline(measured: Measured, path: Path | str) -> None:
    """Draw rates against FLOPs per least byte, below the GPU's roof: every stage at N = 4096, and the
    production stages at every length.

    The solid roof is that of the peak rates, the dashed one that of the fastest GEMM and copy measured beside
    the stages.
    """
    gpu = bound_gpu(measured[FORWARD].environment)
    roofs = [(gpu.tensor_flops / 1e12, gpu.hbm_bytes_per_s / 1e12, "peak: {} TFLOP/s, {} TB/s", "solid")]
    gemm, copy = (_most(measured, key) for key in ("gemm_tflops", "copy_tb_per_s"))
    if gemm and copy:
        roofs.append((gemm, copy, "measured: GEMM {} TFLOP/s, copy {} TB/s", DASHED))
    with plots.style():
        figure = Figure(figsize=(11, 6.4))
        for axes, (direction, stage) in zip(figure.subplots(1, 2, sharex=True, sharey=True), STAGES.items()):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlim(20, 40000)
            axes.set_ylim(0.5, 3000)
            axes.grid(axis="x")
            for tflops, tb_per_s, _, line in roofs:
                _draw_roof(axes, tflops, tb_per_s, line)
            _draw_ladder(axes, measured, direction)
            _draw_lengths(axes, measured[stage], direction)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.set_minor_locator(NullLocator())
            axes.set_title(
                f"{DIRECTION_WORDS[direction]}, {_panel(HEAD_DIM, False)}", fontsize=10, loc="left"
            )
            axes.set_xlabel("FLOPs per byte that has to move (log)")
        figure.axes[0].set_ylabel("TFLOP/s (log)")
        lengths = f"{FORWARD} (forward), {BACKWARD} (backward) by N"
        handles = [
            Line2D([], [], label=lengths, color=STAGE_COLOUR, **_strokes(True)),
            Line2D([], [], label=f"every stage at N = {LADDER_SEQLEN}", color=MUTED, marker="o", linewidth=0),
        ]
        for tflops, tb_per_s, words, line in roofs:
            text = words.format(f"{tflops:.0f}", f"{tb_per_s:g}")
            handles.append(Line2D([], [], label=text, color=INK, linewidth=1.2, linestyle=line))
        _legend(figure, handles, 0.95)
        plots.heading(figure, "Rates below the roof of the GPU", _gpu(measured))
        figure.subplots_adjust(left=0.06, right=0.985, bottom=0.08, top=0.865, wspace=0.03)
        plots.save(figure, path)


def _most(measured: Measured, key: str) -> float | None:
    """The highest value that the stages' environments have for a key."""
    values = [results.environment.get(key) for results in measured.values()]
    return max((value for value in values if value is not None), default=None)


def _draw_roof(axes: Axes, tflops: float, tb_per_s: float, line: object) -> None:
    """As high as memory lets it be, then as the tensor cores do."""
    left, right = axes.get_xlim()
    reach = [left, tflops / tb_per_s, right]
    axes.plot(reach, [left * tb_per_s, tflops, tflops], color=INK, linewidth=1.2, linestyle=line)


def _draw_ladder(axes: Axes, measured: Measured, direction: str) -> None:
    """Every stage of a direction at one length, its name and rate at the side."""
    problem = sweep_problem(LADDER_SEQLEN, HEAD_DIM, False, direction)
    rows = {stage: results.find(stage, problem) for stage, results in measured.items()}
    rates = {stage: row.tflops for stage, row in rows.items() if row and row.tflops}
    x = intensity(problem)
    axes.plot([x] * len(rates), [*rates.values()], color=MUTED, marker="o", markersize=4, linewidth=0)
    to_axes = axes.transData - axes.transAxes
    # From the top down, and from below the lengths that stand under the production stage's line.
    depths = {stage: max(0.28, 1 - to_axes.transform((1, rate))[1]) for stage, rate in rates.items()}
    for stage, depth in plots.spread(
        dict(sorted(depths.items(), key=lambda item: -rates[item[0]])), 0.038
    ).items():
        axes.annotate(
            f"{stage}  {format_rate(rates[stage])}",
            xy=(x, rates[stage]),
            xytext=(0.8, 1 - depth),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            arrowprops={
                "arrowstyle": "-",
                "color": MUTED,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkB": 2,
            },
        )


def _draw_lengths(axes: Axes, results: Results, direction: str) -> None:
    """The production stage at every length, named below but where the ladder stands."""
    problems = {n: sweep_problem(n, HEAD_DIM, False, direction) for n in SEQLENS}
    rows = {n: results.find(results.stage, problem) for n, problem in problems.items()}
    points = {n: (intensity(problems[n]), row.tflops) for n, row in rows.items() if row and row.tflops}
    axes.plot(*zip(*points.values()), color=STAGE_COLOUR, **_strokes(True))
    for n, point in points.items():
        if n != LADDER_SEQLEN:
            text = {"ha": "center", "va": "top", "fontsize": 7, "color": STAGE_COLOUR}
            axes.annotate(str(n), point, (0, -5), textcoords="offset points", **text)


def intensity(problem: Problem) -> float:
    """FLOPs per byte that has to move."""
    return problem.flops / problem.min_bytes


def _timed(results: Results, provider: str) -> bool:
    return any(row.provider == provider and row.tflops is not None for row in results.sweep_rows())


def _in_order(providers: Iterable[str], order: Iterable[str]) -> list[str]:
    present = {*providers}
    return [provider for provider in order if provider in present]


def _gpu(measured: Measured) -> str:
    return measured[FORWARD].gpu


def _panel(head_dim: int, causal: bool) -> str:
    return f"head_dim {head_dim}, {'causal' if causal else 'full'}"


def _colour(provider: str, ours: str) -> str:
    return STAGE_COLOUR if provider == ours else PEER_COLOURS[provider]


def _rates(
    results: Results, providers: Sequence[str], head_dim: int, causal: bool, direction: str
) -> dict[tuple[str, int], float | str]:
    """The rates of one panel's rows, or the word why there is none; of a stage also where a row lacks."""
    found: dict[tuple[str, int], float | str] = {}
    for provider, n in product(providers, SEQLENS):
        row = results.find(provider, sweep_problem(n, head_dim, causal, direction))
        if row is not None:
            found[provider, n] = plots.short_error(row.error) if row.tflops is None else row.tflops
        elif provider == results.stage:
            found[provider, n] = "not measured"
    return found


def _draw_bars(axes: Axes, cells: Cells, providers: Sequence[str], ours: str) -> None:
    """A group of bars for each length; the first is ours and carries its value."""
    width = 0.86 / len(providers)
    for (provider, n), cell in cells.items():
        x = SEQLENS.index(n) + (providers.index(provider) - (len(providers) - 1) / 2) * width
        if isinstance(cell, str):
            axes.text(x, 0, f" {cell}", rotation=90, ha="center", va="bottom", fontsize=6, color=MUTED)
            continue
        axes.bar(x, cell, width * 0.92, color=_colour(provider, ours))
        if provider == ours:
            text = {"ha": "center", "va": "bottom", "fontsize": 7, "fontweight": "bold"}
            axes.annotate(format_rate(cell), (x, cell), (0, 1.5), textcoords="offset points", **text)
    axes.set_xticks(range(len(SEQLENS)), [str(n) for n in SEQLENS], fontsize=7)
    axes.set_xlim(-0.62, len(SEQLENS) - 0.5)  # the first value stands over the left end of its group


def _highest(panels: Iterable[Axes]) -> float:
    return max((bar.get_height() for axes in panels for bar in axes.patches), default=1.0)


def _legend(figure: Figure, handles: Sequence[Artist], y: float) -> None:
    """One line of it, below the title."""
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.05, y),
        ncols=len(handles),
        fontsize=8,
        columnspacing=1.1,
        handlelength=1.5,
        handletextpad=0.4,
    )


def _legend_of_bars(figure: Figure, ours: str, peers: Iterable[str]) -> None:
    handles = [Patch(color=STAGE_COLOUR, label=ours)]
    _legend(figure, handles + [Patch(color=PEER_COLOURS[p], label=label(p)) for p in peers], 0.95)


def _length_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(SEQLENS, [str(n) for n in SEQLENS])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(SEQLENS[0] * 0.75, SEQLENS[-1] / 0.75)


# Memory


def _peaks(results: Results, direction: str) -> dict[str, dict[int, int]]:
    """By provider and length, the bytes held at the problems that are drawn."""
    found: dict[str, dict[int, int]] = {}
    for n in SEQLENS:
        problem = sweep_problem(n, HEAD_DIM, False, direction)
        for row in results.rows:
            if row.problem == problem and row.peak_bytes:
                found.setdefault(row.provider, {})[n] = row.peak_bytes
    return found


def format_bytes(size: float) -> str:
    """A size in MiB, or from one on in GiB, at the precision worth reading."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.3g} GiB"
