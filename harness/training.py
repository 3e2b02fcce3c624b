"""A GPT trained with one attention or another (`examples/train_gpt.py --save`): tables of its rates and
losses, and a figure."""

from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness import plots
from harness.markdown import NOTHING, table
from harness.results import PEER_LABELS

Rows = list[dict[str, Any]]
HOPPER, SDPA = "hopper_attention", "sdpa"
TRAINED_WITH = {HOPPER: HOPPER, SDPA: "SDPA"} | {x: PEER_LABELS[x] for x in ("cudnn", "fa2", "fa3", "fa4")}
FP32 = "fp32"  # attention computed in fp32: `trained_peers`
HOW = {"eager": "eager", "model compiled": "torch.compile", "blocks compiled": "torch.compile, by layer"}
HOW |= {"graphs compiled": "torch.compile, CUDA graphs"}


def runs(rows: Rows) -> dict[tuple[str, int, str], Rows]:
    """Rows that took turns, by model, length and how."""
    found: dict[tuple[str, int, str], Rows] = {}
    for row in rows:
        found.setdefault((row["model"], row["seqlen"], row["how"]), []).append(row)
    return found


def by_attention(rows: Rows) -> dict[str, Rows]:
    """Rows that took turns, by whose attention they had."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row["attention"], []).append(row)
    return found


def training_table(rows: Rows) -> str:
    """Tokens a second with ours, and as multiples of what the others reach."""
    if not rows:
        return NOTHING
    lines = []
    for (model, seqlen, how), together in runs(rows).items():
        by_name = by_attention(together)
        ours = by_name[HOPPER][0]
        best = {name: max(x["tokens_per_s"] for x in found) for name, found in by_name.items()}
        cells = [
            f"{ours['tokens_per_s'] / best[x]:.3f}" if x in best else "" for x in TRAINED_WITH if x != HOPPER
        ]
        rate = f"**{ours['tokens_per_s']:,.0f}**"
        lines.append([f"{model}, {seqlen}", HOW[how], rate, f"{ours['tflops']:.0f}", *cells])
    others = [f"× {label}" for name, label in TRAINED_WITH.items() if name != HOPPER]
    return table(["model, seqlen", "how", "tokens/s", "TFLOP/s", *others], lines, "llrr" + "r" * len(others))


def losses_table(rows: Rows) -> str:
    """The largest difference between a loss of a run and that step's of the first run with SDPA: of all runs
    with an attention, SDPA's others among them."""
    if not rows:
        return NOTHING
    lines = []
    for (model, seqlen, how), together in runs(rows).items():
        by_name = by_attention(together)
        first, *by_name[SDPA] = by_name[SDPA]
        steps = [f"{len(first['losses'])}", f"{first['losses'][-1]:.4f}"]
        apart = [[furthest(row, first) for row in by_name.get(name, ())] for name in TRAINED_WITH]
        cells = [f"{max(xs):.4f}" if xs else "" for xs in apart]
        lines.append([f"{model}, {seqlen}", HOW[how], *steps, *cells])
    return table(
        ["model, seqlen", "how", "steps", "last loss", *TRAINED_WITH.values()],
        lines,
        "llrr" + "r" * len(TRAINED_WITH),
    )


def furthest(row: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between the losses of a step of two runs."""
    return max(abs(x - y) for x, y in zip(row["losses"], other["losses"], strict=True))


def apart_table(rows: Rows) -> str:
    """How far losses lie from those of SDPA's runs and of attention in fp32: `furthest` of two runs of a
    seed, in the mean over the pairs of a seed and then over seeds, and the largest of all. SDPA takes cuDNN
    here, so that is a run of it too."""
    if not rows:
        return NOTHING
    columns = {x: label for x, label in TRAINED_WITH.items() if x != "cudnn"} | {FP32: "in fp32"}
    lines = []
    for (model, seqlen, how), together in runs(rows).items():
        named = [row | {"attention": SDPA} if row["attention"] == "cudnn" else row for row in together]
        of_seed = lambda seed, named=named: [row for row in named if row["seed"] == seed]
        seeds = [by_attention(of_seed(seed)) for seed in dict.fromkeys(row["seed"] for row in named)]
        for origin in (SDPA, FP32):
            cells = []
            for name in columns:
                found = [
                    [furthest(x, y) for x, y in product(by_name[name], by_name[origin]) if x is not y]
                    for by_name in seeds
                    if name in by_name and origin in by_name
                ]
                found = [pairs for pairs in found if pairs]
                most = max(map(max, found), default=0.0)
                cells.append(f"{mean(map(mean, found)):.5f}, {most:.5f}" if found else "")
            count = sum(origin in by_name for by_name in seeds)
            lines.append([f"{model}, {seqlen}, {HOW[how]}", columns[origin], f"{count}", *cells])
    return table(["model, seqlen", "from", "seeds", *columns.values()], lines, "llr" + "r" * len(columns))


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
