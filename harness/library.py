"""What was measured of the library, from results/<gpu>/library: tables, and a figure.

host.json       `python -m harness.host`: what a call costs the host
models_*.json   `python bench.py k6 bwd4 --suite models --save`: what models ask, forward and backward
training.json   `examples/train_gpt.py --save`: a GPT trained with one attention or another
losses.json     the same, of several seeds, and with attention in fp32, beside which rates are not compared
logits.json     `python -m harness.logits --save`: Hugging Face models, beside SDPA
accuracy.json   `python -m harness.accuracy --save`: how far FP8 is from float64
quantizing.json `python -m harness.quantizing --save`: the kernels that quantise, beside a copy
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from harness import choices, context_tables, plots, suite, training
from harness.decoding_tables import decode_table
from harness.host import BOTH, FORWARD, OURS, PLAIN
from harness.markdown import NOTHING, table
from harness.results import DIRECTION_WORDS, PEER_LABELS, PUBLIC_CALLS, Results
from harness.rotation import plot_rotation
from harness.sweep import SEQLENS
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import BACKWARD as BACKWARD_STAGE
from hopper_attention.launch import DETERMINISTIC
from hopper_attention.launch import FORWARD as FORWARD_STAGE

Rows = list[dict[str, Any]]


def load(folder: Path, name: str, zeros: bool = False) -> Rows:
    """The rows of a GPU's file; none where there is no file. Numbers are positive, or may be zero. Raises
    ValueError that names the file."""
    return load_rows(folder / "library" / f"{name}.json", zeros)


def load_rows(path: Path, zeros: bool = False) -> Rows:
    """`load`, of any such file."""
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = data if isinstance(data, list) else data["rows"]
        numbers = [x for row in rows for x in _numbers(row)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error!r}") from None
    if not rows or not all(math.isfinite(x) and (x > 0 or (zeros and x == 0)) for x in numbers):
        raise ValueError(f"{path}: holds no rows, or a number that is not positive")
    return rows


def _numbers(row: Mapping[str, Any]) -> Iterable[float]:
    for name, value in row.items():
        if name in ("errors", "seed"):  # why a peer has none; and a name
            continue
        yield from _numbers_in(value)


def _numbers_in(value: object) -> Iterable[float]:
    if isinstance(value, Mapping):
        yield from _numbers(value)
    elif isinstance(value, list):
        for x in value:
            yield from _numbers_in(x)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


# ---- host time --------------------------------------------------------------------------------------------


def host_table(rows: Rows) -> str:
    """µs of a call by shape: ours, and SDPA's."""
    if not rows:
        return NOTHING
    us = {(tuple(row["shape"]), row["what"], row["provider"]): row["us"] for row in rows}
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    lines = []
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        for what in (FORWARD, BOTH):
            times = [us[shape, what, name] for name in providers]
            ratio = us[shape, what, OURS] / us[shape, what, PLAIN]
            lines.append([" × ".join(map(str, shape)), what, *(f"{x:.1f}" for x in times), f"{ratio:.2f}"])
    header = ["batch × heads × seqlen × head_dim", "µs of host time", *providers, f"{OURS} / {PLAIN}"]
    return table(header, lines, "ll" + "r" * (len(providers) + 1))


def calls_table(measured: Mapping[str, Results]) -> str:
    """The GPU's time of a public call as a multiple of its kernel's, by length."""
    lines = []
    for stage, call in PUBLIC_CALLS.items():
        rows = measured[stage].rows if stage in measured else []
        ratios: dict[int, list[float]] = {}
        for row in rows:
            if row.provider == call and row.ms_median and row.seqlen_q in SEQLENS:
                kernel = measured[stage].find(stage, row.problem)
                if kernel is not None and kernel.ms_median:
                    ratios.setdefault(row.seqlen_q, []).append(row.ms_median / kernel.ms_median)
        if ratios:
            cells = [f"{min(ratios[n]):.3f}–{max(ratios[n]):.3f}" if n in ratios else "" for n in SEQLENS]
            lines.append([f"`{call}` / `{stage}`", *cells])
    return table(["N", *map(str, SEQLENS)], lines, "l" + "r" * len(SEQLENS)) if lines else NOTHING


# ---- models' shapes ---------------------------------------------------------------------------------------


class Model(NamedTuple):
    """What a row of the models' suite says of the library."""

    family: str
    name: str
    problem: Problem
    way: str  # that the library takes
    us: float  # its call's
    regret: float | None  # its way's time over the best way's; None if it is newer than the row
    best: str  # peer
    ratio: float  # that peer's time over the call's
    deterministic: float | None  # the call's time over the deterministic one's, of a backward pass


def models(rows: Rows, direction: str) -> list[Model]:
    """What the rows of models_<direction>.json say, with the way that the library takes."""
    found = []
    for row in rows:
        us, problem = row["us"], suite.problem_of(row, direction)
        call = us[PUBLIC_CALLS[FORWARD_STAGE if direction == "fwd" else BACKWARD_STAGE]]
        peers = {name: x for name, x in us.items() if name in suite.PEERS}
        ways = [x for name, x in us.items() if name not in peers and name not in PUBLIC_CALLS.values()]
        way, best = suite.chosen(problem), min(peers, key=peers.get)
        steady = us.get(PUBLIC_CALLS[DETERMINISTIC])
        deterministic = call / steady if steady else None
        regret, ratio = us[way] / min(ways) if way in us else None, peers[best] / call
        found.append(
            Model(row["family"], row["name"], problem, way, call, regret, best, ratio, deterministic)
        )
    return found


def means_of_families(found: list[Model]) -> dict[str, float]:
    """Of each family the geometric mean of its ratios to the best peer."""
    names = dict.fromkeys(x.family for x in found)
    return {name: geometric_mean(x.ratio for x in found if x.family == name) for name in names}


def models_table(rows: Rows, direction: str) -> str:
    """A line for each problem, and what they come to."""
    if not rows:
        return NOTHING
    found = models(rows, direction)
    backward = direction == "bwd"
    lines = []
    for x in found:
        rate = x.problem.flops / x.us / 1e6
        cells = [
            f"{x.us:.0f}" if x.us >= 100 else f"{x.us:.1f}",
            f"{rate:.0f}",
            f"`{x.way}`",
            f"{x.regret:.3f}" if x.regret else "not timed",
        ]
        steady = [f"{x.deterministic:.2f}"] if x.deterministic else []
        problem = str(x.problem).removesuffix(" bfloat16")
        lines.append(
            [f"{x.family}: {x.name}", problem, *cells, PEER_LABELS[x.best], f"**{x.ratio:.3f}**", *steady]
        )
    header = ["model", "problem", "µs", "TFLOP/s", "way", "over the best way", "best peer", "ahead"]
    header += ["deterministic"] * backward
    least, greatest = (of(found, key=lambda x: x.ratio) for of in (min, max))
    behind = [f"{x.problem} ({x.ratio:.3f})" for x in found if x.ratio < 1]
    mean = geometric_mean(means_of_families(found).values())
    sentence = (
        f"{len(found)} problems, {least.ratio:.3f} to {greatest.ratio:.3f} × the best peer; mean of the "
        f"families' geometric means {mean:.3f}. Below 1.000: {'; '.join(behind) or 'none'}. Of the ways "
        f"timed a wrong choice costs at most {max(x.regret or 1 for x in found) - 1:.1%}."
    )
    return f"{table(header, lines, 'llrrlrlr' + 'r' * backward)}\n\n{sentence}"


def plot_models(folder: Path, path: Path | str) -> None:
    """Draw how far the library's call is ahead of the best peer, problem by problem, forward and backward."""
    found = {
        direction: models(load(folder, f"models_{direction}"), direction) for direction in ("fwd", "bwd")
    }
    names = list(dict.fromkeys((x.family, x.name) for rows in found.values() for x in rows))
    with plots.style():
        figure = Figure(figsize=(10, 0.19 * len(names) + 1.6))
        for axes, (direction, rows) in zip(figure.subplots(1, 2, sharey=True), found.items()):
            colours = [plots.STAGE_COLOUR if x.ratio >= 1 else plots.OTHER_COLOUR for x in rows]
            places = [names.index((x.family, x.name)) for x in rows]
            axes.barh(places, [x.ratio - 1 for x in rows], left=1, color=colours, height=0.72)
            for y, x in zip(places, rows):
                axes.text(max(x.ratio, 1) + 0.015, y, f"{x.ratio:.2f}", va="center", fontsize=6.5)
            axes.axvline(1, color=plots.INK, linewidth=0.8)
            axes.set_xlim(0.8, max(x.ratio for x in rows) * 1.08)
            mean = geometric_mean(means_of_families(rows).values())
            kind = DIRECTION_WORDS[direction]
            axes.set_title(f"{kind}, mean of families {mean:.2f}", fontsize=9, loc="left")
            axes.set_xlabel("speed, × the best of cuDNN, FlashAttention-2, -3 and -4", fontsize=8)
        axes.set_yticks(range(len(names)), [f"{family}: {name}" for family, name in names], fontsize=6.5)
        axes.set_ylim(len(names) - 0.4, -0.6)
        plots.heading(
            figure, "Models' attention beside the best peer", f"{folder.name.upper()}, the public call"
        )
        figure.subplots_adjust(
            left=0.29, right=0.985, top=1 - 0.9 / figure.get_figheight(), bottom=0.045, wspace=0.05
        )
        plots.save(figure, path)


# ---- Hugging Face ------------------------------------------------------------------------------------------


def logits_table(rows: Rows) -> str:
    """Errors of logits, and tokens, of models with ours and with SDPA."""
    if not rows:
        return NOTHING
    lines = []
    for row in rows:
        largest, mean = (f"{row[f'our_{x}']:.2g} / {row[f'sdpa_{x}']:.2g}" for x in ("error", "mean_error"))
        tokens = f"{row['same']} of {row['sure']}, of {row['positions']}"
        lines.append([row["model"], row["way"], largest, mean, tokens])
    header = [
        "model",
        "way",
        "largest error of a logit: ours / SDPA's",
        "mean",
        "same token, where SDPA is sure",
    ]
    return table(header, lines, "llrrr")


# ---- FP8 --------------------------------------------------------------------------------------------------


def quantizing_table(rows: Rows) -> str:
    """What the quantising kernels take, and their share of a copy's rate."""
    if not rows:
        return NOTHING
    head_dims = sorted({row["head_dim"] for row in rows})
    cells = {(row["way"], row["head_dim"]): f"{row['us']:.1f}, {row['of_copy']:.2f}" for row in rows}
    lines = [[way, *(cells[way, d] for d in head_dims)] for way in dict.fromkeys(row["way"] for row in rows)]
    return table(["µs, share of a copy's rate", *(f"d = {d}" for d in head_dims)], lines, "lrrr")


INPUTS = {
    "normal": "N(0, 1)",
    "rare_outliers": "N(0, 1) + N(0, 100)·Bernoulli(0.001)",
    "outlier_channels": "N(0, 1), four channels of K × 50",
    "shifted_keys": "N(0, 1), and to every k of a head one vector of N(0, 100)",
    "one_sided": r"weights nearly equal, V = \|N(0, 1)\|",
}


def accuracy_tables(rows: Rows) -> dict[str, str]:
    """The questions of `harness.accuracy`."""
    asked = lambda question: [row for row in rows if row["question"] == question]
    error = lambda row: f"{row['rmse']:.3g} ± {row['spread']:.1g}"
    relative = lambda row: f"{row['relative_rmse']:.2%}"
    found = lambda row: f"{row['found']:.0%}"
    drawn = lambda row: INPUTS[row["inputs"]]
    keys = lambda row: f"{row['keys']} keys"
    of_inputs = lambda name: [row for row in asked("long sums") if row["inputs"] == name]
    return {
        "accuracy-options": _contenders_table(asked("options"), drawn, error),
        "accuracy-outliers": _contenders_table(asked("outliers"), drawn, error),
        "accuracy-normal": _contenders_table(of_inputs("normal"), keys, relative),
        "accuracy-one-sided": _contenders_table(of_inputs("one_sided"), keys, relative),
        "accuracy-needles": _contenders_table(asked("needles"), keys, found),
    }


def _contenders_table(rows: Rows, column: Callable[[dict], str], cell: Callable[[dict], str]) -> str:
    """A line for each contender."""
    if not rows:
        return NOTHING
    columns = list(dict.fromkeys(map(column, rows)))
    cells = {(row["contender"], column(row)): cell(row) for row in rows}
    lines = [
        [PEER_LABELS.get(name, name), *(cells.get((name, x), "") for x in columns)]
        for name in dict.fromkeys(row["contender"] for row in rows)
    ]
    return table(["", *columns], lines, "l" + "r" * len(columns))


def blocks(folder: Path, measured: Mapping[str, Results]) -> dict[str, str]:
    """The blocks of one GPU."""
    return {
        "host": host_table(load(folder, "host")),
        "public-calls": calls_table(measured),
        "models-fwd": models_table(load(folder, "models_fwd"), "fwd"),
        "few-fwd": models_table(load(folder, "few_fwd"), "fwd"),
        "models-bwd": models_table(load(folder, "models_bwd"), "bwd"),
        "training": training.training_table(load(folder, "training")),
        "losses": training.losses_table(load(folder, "training")),
        "losses-apart": training.apart_table(load(folder, "losses")),
        "logits": logits_table(load(folder, "logits")),
        "quantizing": quantizing_table(load(folder, "quantizing")),
        "decode": decode_table(load_rows(folder / "decode" / "bench.json", zeros=True)),
        **context_tables.blocks(
            *(load_rows(folder / "context_parallel" / f"{x}.json", zeros=True) for x in ("bench", "training"))
        ),
        **accuracy_tables(load(folder, "accuracy", zeros=True)),
    }


def figures(folder: Path) -> dict[str, Callable[[Path], None]]:
    found: dict[str, Callable[[Path], None]] = {}
    if rows := load(folder, "training"):
        found["training.png"] = partial(training.plot_training, rows)
    if rows := load(folder, "losses"):
        found["losses.png"] = partial(training.plot_losses, rows)
    if load(folder, "models_fwd") and load(folder, "models_bwd"):
        found["models.png"] = partial(plot_models, folder)
        of = {x: load(folder, f"models_{x}") + load(folder, f"sweep_{x}") for x in ("fwd", "bwd")}
        found["choices.png"] = partial(choices.plot_choices, of)
    if load(folder, "accuracy", zeros=True):
        found["rotation.png"] = plot_rotation
    bench = load_rows(folder / "context_parallel" / "bench.json", zeros=True)
    return found | context_tables.figures(bench, folder.name.upper())
