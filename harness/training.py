"""A GPT trained with one attention or another (`examples/train_gpt.py --save`): tables of its rates and
losses, and a figure."""

from itertools import combinations, product
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


def runs_of_steps(rows: Rows) -> dict[tuple[str, int, str, int], Rows]:
    """The same, by their steps too."""
    found: dict[tuple[str, int, str, int], Rows] = {}
    for how, together in runs(rows).items():
        for row in together:
            found.setdefault((*how, len(row["losses"])), []).append(row)
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
        furthest = [[max(apart(row, first)) for row in by_name.get(name, ())] for name in TRAINED_WITH]
        cells = [f"{max(xs):.4f}" if xs else "" for xs in furthest]
        lines.append([f"{model}, {seqlen}", HOW[how], *steps, *cells])
    return table(
        ["model, seqlen", "how", "steps", "last loss", *TRAINED_WITH.values()],
        lines,
        "llrr" + "r" * len(TRAINED_WITH),
    )


def apart(row: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """By how much the losses of two runs differ, step by step."""
    return [abs(x - y) for x, y in zip(row["losses"], other["losses"], strict=True)]


def pairs_apart(by_name: dict[str, Rows], name: str, origin: str) -> list[list[float]]:
    """`apart`, for each two runs of a seed, one with one attention and one with another."""
    rows, origins = by_name.get(name, []), by_name.get(origin, [])
    pairs = combinations(rows, 2) if name == origin else product(rows, origins)
    return [apart(x, y) for x, y in pairs]


def of_seeds(rows: Rows) -> list[dict[str, Rows]]:
    """`by_attention` of each seed's; cuDNN's runs are SDPA's, which takes cuDNN here."""
    named = [row | {"attention": SDPA} if row["attention"] == "cudnn" else row for row in rows]
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return [by_attention([row for row in named if row["seed"] == seed]) for seed in seeds]


def apart_table(rows: Rows) -> str:
    """How far losses lie from those of SDPA's runs and of attention in fp32: the largest difference between
    two runs of a seed, in the mean over its pairs of runs and then over seeds, and the largest of all."""
    if not rows:
        return NOTHING
    columns = {x: label for x, label in TRAINED_WITH.items() if x != "cudnn"} | {FP32: "in fp32"}
    lines = []
    for (model, seqlen, how, steps), together in runs_of_steps(rows).items():
        seeds = of_seeds(together)
        for origin in (SDPA, FP32):
            if not any(origin in by_name for by_name in seeds):
                continue
            cells = []
            for name in columns:
                found = [[max(x) for x in pairs_apart(by_name, name, origin)] for by_name in seeds]
                found = [pairs for pairs in found if pairs]
                most = max(map(max, found), default=0.0)
                cells.append(f"{mean(map(mean, found)):.5f}, {most:.5f}" if found else "")
            count = sum(origin in by_name for by_name in seeds)
            lines.append([f"{model}, {seqlen}, {HOW[how]}", f"{steps}", columns[origin], f"{count}", *cells])
    return table(
        ["model, seqlen", "steps", "from", "seeds", *columns.values()], lines, "lrlr" + "r" * len(columns)
    )


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


LONG, WINDOW = 60, 10  # steps: a curve has as many or more, of whose differences this many are averaged


def plot_losses(rows: Rows, path: Path | str) -> None:
    """Draw the losses of long runs, a column for each model and length, and below by how much two runs of a
    seed differ: with SDPA both, and with another attention and SDPA. Raises ValueError if none is long."""
    groups = {key: of_seeds(x) for key, x in runs_of_steps(rows).items() if key[-1] >= LONG}
    if not groups:
        raise ValueError(f"no run of {LONG} steps or more")
    colours = {HOPPER: plots.STAGE_COLOUR, SDPA: plots.INK} | plots.PEER_COLOURS
    found = {name for seeds in groups.values() for by_name in seeds for name in by_name}
    drawn = [x for x in TRAINED_WITH if x in found]
    with plots.style():
        figure = Figure(figsize=(11, 5.2))
        axes = figure.subplots(2, len(groups), sharex="col", sharey="row", squeeze=False)
        for (above, below), ((model, seqlen, how, _), seeds) in zip(axes.T, groups.items(), strict=True):
            title = f"{model}, {seqlen // 1024}k, {HOW[how]}"
            above.set_title(
                title if len(seeds) == 1 else f"{title}, {len(seeds)} seeds", fontsize=9, loc="left"
            )
            for name in reversed(drawn):  # ours on top
                for row in (row for by_name in seeds for row in by_name.get(name, ())):
                    above.plot(row["losses"], color=colours[name], linewidth=0.8)
                if pairs := [x for by_name in seeds for x in pairs_apart(by_name, name, SDPA)]:
                    step = [mean(x) for x in zip(*pairs, strict=True)]
                    curve = [mean(step[at : at + WINDOW]) for at in range(len(step) - WINDOW + 1)]
                    steps = range(WINDOW // 2, WINDOW // 2 + len(curve))
                    below.plot(steps, curve, color=colours[name], linewidth=2 if name == HOPPER else 1.3)
            above.set_ylim(top=min(6.0, above.get_ylim()[1]))
            below.set_yscale("log")
            below.set_xlabel("step")
        axes[0, 0].set_ylabel("loss")
        axes[1, 0].set_ylabel(f"from SDPA's, mean of {WINDOW} steps")
        handles = [Patch(color=colours[x], label=TRAINED_WITH[x]) for x in drawn]
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.05, 0.94), ncols=len(drawn))
        gpu = " and ".join(dict.fromkeys(row["gpu"] for row in rows))
        plots.heading(figure, "Losses with one attention or another", f"{gpu}, bf16, causal")
        figure.subplots_adjust(left=0.07, right=0.99, top=0.81, bottom=0.09, wspace=0.06, hspace=0.12)
        plots.save(figure, path)
