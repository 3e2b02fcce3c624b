"""The library's choices held against what is committed: what `division` expects of each way to compute a
problem beside what it took, as a figure."""

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness import plots, suite
from harness.results import DIRECTION_WORDS
from hopper_attention import rounds, ways
from hopper_attention.kernels import division
from hopper_attention.kernels.contract import Problem

Rows = list[dict[str, Any]]
TICKS = {4.0: (0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0), math.inf: (1.0, 1.5, 2.0, 3.0, 5.0, 8.0)}  # up to
MARGIN = 1.12  # beyond the outermost points


class Way(NamedTuple):
    """A way to compute a problem that was timed, and the library does not take."""

    problem: Problem
    name: str
    expected: float  # its time over that of the way taken, as the model has it
    measured: float  # the same as it was timed


def other_ways(rows: Rows, direction: str) -> list[Way]:
    """Of rows of a suite, every way that was timed beside the one that the library takes today."""
    found = []
    for row in rows:
        problem, us = suite.problem_of(row, direction), row["us"]
        taken, expected = suite.chosen(problem), expected_times(problem)
        timed = [name for name in us if name in expected and name != taken]
        if taken in us and taken in expected:
            found += [
                Way(problem, x, expected[x] / expected[taken], us[x] / us[taken]) for x in timed
            ]  # fmt: skip
    return found


def expected_times(problem: Problem) -> dict[str, float]:
    """What the model expects of every way, by its name: µs of a forward pass, steps of a backward one."""
    if problem.direction == "fwd":
        choices, time = ways.ways_of(problem), partial(ways.way_us, problem)
    else:
        choices, time = division.divisions(problem), partial(division.steps_of, problem)
    expected = {suite.way_of(x, problem): time(x) for x in choices}
    if isinstance(launches := suite.choice_of(problem), suite.Launches):
        steps = sum(rounds.expected_steps(x) for x, _ in launches.each)
        expected[suite.chosen(problem)] = steps - rounds.LAUNCH_STEPS  # the one that all ways have
    return expected


def plot_choices(found: dict[str, Rows], path: Path | str) -> None:
    """Draw, for each direction's rows, every way not taken: expected to take how many times as long as the
    one taken, and how long it took. A point below 1 is a choice that was wrong, by so much."""
    with plots.style():
        figure = Figure(figsize=(10, 5.4))
        for axes, (direction, rows) in zip(figure.subplots(1, 2), found.items()):
            _draw(axes, other_ways(rows, direction), direction, len(rows))
        plots.heading(
            figure,
            "The choice among ways to compute a problem",
            "time of each way not taken, over that of the way taken",
        )
        figure.subplots_adjust(left=0.06, right=0.99, top=0.87, bottom=0.1, wspace=0.14)
        plots.save(figure, path)


def _draw(axes: Axes, ways: list[Way], direction: str, problems: int) -> None:
    for wrong, colour, order in ((False, plots.OTHER_COLOUR, 2), (True, plots.STAGE_COLOUR, 3)):
        points = [x for x in ways if (x.measured < 1) == wrong]
        places = [x.expected for x in points], [x.measured for x in points]
        axes.scatter(*places, s=14, color=colour, linewidths=0, zorder=order)
    both = [*(x.expected for x in ways), *(x.measured for x in ways), 1.0]
    low, high = min(both) / MARGIN, max(both) * MARGIN
    axes.plot((low, high), (low, high), color=plots.MUTED, linewidth=0.8, zorder=1)
    axes.axhline(1, color=plots.INK, linewidth=0.8, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = next(ticks for most, ticks in TICKS.items() if high < most)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([x for x in ticks if low <= x <= high]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    least = min((x.measured for x in ways), default=1.0)
    wrong = len({x.problem for x in ways if x.measured < 1})
    cost = max(0.0, 1 / least - 1)
    title = f"{DIRECTION_WORDS[direction]}: {problems} problems, {wrong} wrong, by at most {cost:.1%}"
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("expected", fontsize=8)
    axes.set_ylabel("measured", fontsize=8)
