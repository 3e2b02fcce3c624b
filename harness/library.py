"""What was measured of the library, from results/<gpu>/library: tables, and a figure.

host.json       `python -m harness.host`: what a call costs the host
parts.json      `python -m harness.parts`: backward passes with few key heads
training.json   `examples/train_gpt.py --save`: a GPT trained with one attention or another
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness import plots
from harness.host import BOTH, FORWARD, OURS, PLAIN
from harness.markdown import table
from harness.results import PEER_LABELS, PUBLIC_CALLS, Results
from harness.sweep import SEQLENS
from hopper_attention.kernels.calls import parts_of
from hopper_attention.kernels.contract import Problem

Rows = list[dict[str, Any]]
HOPPER, SDPA = "hopper_attention", "sdpa"
TRAINED_WITH = {HOPPER: HOPPER, SDPA: "SDPA"} | {x: PEER_LABELS[x] for x in ("cudnn", "fa2", "fa3", "fa4")}
HOW = {"eager": "eager", "model compiled": "torch.compile", "blocks compiled": "torch.compile, by layer"}
HOW |= {"graphs compiled": "torch.compile, CUDA graphs"}
NOTHING = "Nothing is measured yet."


def load(folder: Path, name: str) -> Rows:
    """The rows of a GPU's file; none where there is no file. Raises ValueError that names the file."""
    path = folder / "library" / f"{name}.json"
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = data if isinstance(data, list) else data["rows"]
        numbers = [x for row in rows for x in _numbers(row)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error!r}") from None
    if not rows or not all(math.isfinite(x) and x > 0 for x in numbers):
        raise ValueError(f"{path}: holds no rows, or a number that is not positive")
    return rows


def _numbers(row: Mapping[str, Any]) -> Iterable[float]:
    for value in row.values():
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list):
            yield from value
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


# ---- few key heads ----------------------------------------------------------------------------------------


def problem_of(row: Mapping[str, Any]) -> Problem:
    return Problem(**{name: value for name, value in row.items() if name != "us"}, direction="bwd")


def choice_of(row: Mapping[str, Any]) -> tuple[int, float, float]:
    """(parts, what they cost over the best choice, ratio to the best peer) of what `parts_of` chooses."""
    us = row["us"]
    parts = parts_of(problem_of(row))
    ours = {name: x for name, x in us.items() if name.startswith("parts ")}
    peers = [x for name, x in us.items() if name not in ours]
    chosen = ours[f"parts {parts}"]
    return parts, chosen / min(ours.values()), min(peers) / chosen


def parts_table(rows: Rows) -> str:
    """Undivided, as chosen, and the best peer."""
    if not rows:
        return NOTHING
    lines = []
    for row in rows:
        us, (parts, regret, ratio) = row["us"], choice_of(row)
        peers = {name: x for name, x in us.items() if not name.startswith("parts ")}
        best = min(peers, key=peers.get)
        problem = str(problem_of(row)).removesuffix(" bfloat16")
        cells = [f"{us['parts 1']:.0f}", str(parts), f"{us[f'parts {parts}']:.0f}", f"{regret:.3f}"]
        lines.append([problem, *cells, f"{peers[best]:.0f} {PEER_LABELS[best]}", f"**{ratio:.3f}**"])
    header = "problem", "bwd4, µs", "parts", "µs", "over the best", "best peer, µs", "its time over ours"
    return table(header, lines, "lrrrrlr")


# ---- training ---------------------------------------------------------------------------------------------


def runs(rows: Rows) -> dict[tuple[str, int, str], Rows]:
    """Rows that took turns, by model, length and how."""
    found: dict[tuple[str, int, str], Rows] = {}
    for row in rows:
        found.setdefault((row["model"], row["seqlen"], row["how"]), []).append(row)
    return found


def spread(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """The largest difference between two losses of one step."""
    return max(abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True))


def training_table(rows: Rows) -> str:
    """Tokens a second with ours, and as multiples of what the others reach; losses beside SDPA's."""
    if not rows:
        return NOTHING
    lines = []
    for (model, seqlen, how), together in runs(rows).items():
        by_name: dict[str, Rows] = {}
        for row in together:
            by_name.setdefault(row["attention"], []).append(row)
        ours, plain = by_name[HOPPER][0], by_name[SDPA]
        best = {name: max(x["tokens_per_s"] for x in found) for name, found in by_name.items()}
        cells = [
            f"{ours['tokens_per_s'] / best[x]:.3f}" if x in best else "" for x in TRAINED_WITH if x != HOPPER
        ]
        losses = f"{spread(ours, plain[0]):.3f} / {spread(*plain[:2]):.3f}" if len(plain) > 1 else ""
        rate = f"**{ours['tokens_per_s']:,.0f}**"
        lines.append([f"{model}, {seqlen}", HOW[how], rate, f"{ours['tflops']:.0f}", *cells, losses])
    others = [f"× {label}" for name, label in TRAINED_WITH.items() if name != HOPPER]
    header = ["model, seqlen", "how", "tokens/s", "TFLOP/s", *others, "losses apart: ours / SDPA's own"]
    return table(header, lines, "llrr" + "r" * (len(others) + 1))


def plot_training(rows: Rows, path: Path | str) -> None:
    """Draw tokens a second as multiples of plain SDPA's, a group of bars for each run."""
    groups = runs(rows)
    colours = {HOPPER: plots.STAGE_COLOUR, SDPA: plots.OTHER_COLOUR} | plots.PEER_COLOURS
    with plots.style():
        figure = Figure(figsize=(11, 4.2))
        axes = figure.subplots()
        width = 0.86 / len(TRAINED_WITH)
        for at, together in enumerate(groups.values()):
            best: dict[str, float] = {}
            for row in together:
                best[row["attention"]] = max(best.get(row["attention"], 0.0), row["tokens_per_s"])
            for i, name in enumerate(TRAINED_WITH):
                if name in best:
                    x, height = at + (i - (len(TRAINED_WITH) - 1) / 2) * width, best[name] / best[SDPA]
                    axes.bar(x, height, width * 0.92, color=colours[name])
                    weight = "bold" if name == HOPPER else "normal"
                    text = {"ha": "center", "va": "bottom", "fontsize": 7, "fontweight": weight}
                    axes.text(x, height + 0.006, f"{height:.2f}", rotation=90, **text)
        lines = [(f"{model}, {n // 1024}k", *HOW[how].split(", ")) for model, n, how in groups]
        names = ["\n".join(line) for line in lines]
        axes.set_xticks(range(len(groups)), names, fontsize=8)
        axes.set_ylim(0, 1.25)
        axes.set_ylabel("tokens/s, × plain SDPA")
        handles = [Patch(color=colours[name], label=label) for name, label in TRAINED_WITH.items()]
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.05, 0.93), ncols=len(TRAINED_WITH))
        gpu = " and ".join(dict.fromkeys(row["gpu"] for row in rows))
        plots.heading(figure, "Training a GPT with one attention or another", f"{gpu}, bf16, causal")
        figure.subplots_adjust(left=0.06, right=0.99, top=0.82, bottom=0.18)
        plots.save(figure, path)


# ---- for `harness.report` ---------------------------------------------------------------------------------


def blocks(folder: Path, measured: Mapping[str, Results]) -> dict[str, str]:
    """The blocks of one GPU."""
    return {
        "host": host_table(load(folder, "host")),
        "public-calls": calls_table(measured),
        "parts": parts_table(load(folder, "parts")),
        "training": training_table(load(folder, "training")),
    }


def figures(folder: Path) -> dict[str, Callable[[Path], None]]:
    rows = load(folder, "training")
    return {"training.png": partial(plot_training, rows)} if rows else {}
