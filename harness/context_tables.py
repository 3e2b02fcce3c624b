"""Tables of what was measured of a sequence on several GPUs, from results/<gpu>/context_parallel.

bench.json      `python bench.py context_parallel --save`
training.json   `examples/train_long.py --save`
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from harness import context_model, plots
from harness.markdown import NOTHING, table

Rows = list[dict[str, Any]]
DIRECTIONS = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
COMMUNICATOR = "communicator"  # messages by NCCL; "…, margin m": with kernels that leave it m SMs
CALLS = {  # of harness.context_parallel, and how the table's columns call them
    "alone": "one GPU, 1/P of the work",
    COMMUNICATOR: "messages by NCCL",
    "all-gather": "all keys gathered first",
    "fa3 ring": "FlashAttention-3 in this ring",
    "torch, cudnn": "PyTorch's ring, cuDNN",
    "torch, enable()": "PyTorch's ring, `enable()`",
}


def blocks(bench: Rows, training: Rows) -> dict[str, str]:
    """The blocks of one GPU."""
    makers = {
        "context-parallel": (bench_table, bench),
        "context-checks": (checks_table, bench),
        "context-margins": (margins_table, bench),
        "context-model": (model_table, bench),
        "context-training": (training_table, training),
    }
    return {name: make(rows) if rows else NOTHING for name, (make, rows) in makers.items()}


def size_of(row: dict[str, Any]) -> str:
    size = row["size"]
    full = "" if size["causal"] else ", full"
    return f"{size['tokens'] // 1024}k, {size['heads']}:{size['kv_heads']}{full}"


def bench_table(rows: Rows) -> str:
    """TFLOP/s of a GPU of a sequence on several, beside one GPU with as much work and the other rings."""
    lines = []
    for row in rows:
        for direction, words in DIRECTIONS.items():
            if direction not in row:
                continue
            times = row[direction]
            rate = lambda x: f"{times[x]['tflops']:.0f}" if x in times else ""
            share = f"{times['alone']['ms'] / times['ours']['ms']:.1%}" if "alone" in times else ""
            overlap = "" if times["overlap"] is None else f"{times['overlap']:.0%}"
            others = [rate(x) for x in CALLS]
            lines.append([size_of(row), words, f"**{rate('ours')}**", share, overlap, *others])
    header = ["tokens of a GPU, heads", "", "TFLOP/s", "of one GPU", "overlap", *CALLS.values()]
    return table(header, lines, "ll" + "r" * (len(header) - 2))


def checks_table(rows: Rows) -> str:
    """What the pass rule says of each size on each number of GPUs: of several verdicts the worst."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((size_of(row), row["ranks"]), []).append(row["checks"])
    lines = []
    for (size, ranks), checks in found.items():
        cells = []
        for direction in ("forward", "backward"):
            verdicts = [x for of_row in checks for name, x in of_row.items() if name.startswith(direction)]
            worst = max((x["rms_ratio"] for x in verdicts), default=0.0)
            passed = "passes" if verdicts and all(x["passed"] for x in verdicts) else "**fails**"
            cells.append(f"{passed}, {worst:.2f}")
        lines.append([size, str(ranks), *cells])
    header = ["tokens of a GPU, heads", "GPUs", "O and LSE", "dQ, dK and dV"]
    return table(header, lines, "lrll")


MODELLED = ((4096, 32, 32), (4096, 32, 8), (8192, 32, 8), (16384, 32, 8), (65536, 32, 8))
MANY = (8, 16, 64, 1024)


def model_table(rows: Rows) -> str:
    """`context_model`'s milliseconds of a causal forward and backward pass beside the measured ones, and what
    part of the time kernels take on more GPUs."""
    both = {size_of(x): x["both"]["ours"]["ms"] for x in rows if "both" in x and x["size"]["causal"]}
    lines = []
    for tokens, heads, kv_heads in MODELLED:
        predict = lambda ranks, of=(tokens, heads, kv_heads): context_model.predict(
            *of, 128, ranks, context_model.H200, context_model.NVLINK, True
        )
        name = f"{tokens // 1024}k, {heads}:{kv_heads}"
        measured = f"{both[name]:.3g}" if name in both else ""
        parts = [f"{predict(ranks).efficiency:.0%}" for ranks in MANY]
        lines.append([name, measured, f"{predict(2).seconds * 1e3:.3g}", *parts])
    header = ["tokens of a GPU, heads", "two GPUs, measured, ms", "expected", *(f"{x} GPUs" for x in MANY)]
    return table(header, lines, "l" + "r" * (len(header) - 1))


def margins(times: dict[str, Any]) -> dict[int, float]:
    """TFLOP/s by the SMs left free."""
    prefix = f"{COMMUNICATOR}, margin "
    found = {int(x.removeprefix(prefix)): times[x]["tflops"] for x in times if x.startswith(prefix)}
    return ({0: times[COMMUNICATOR]["tflops"]} | dict(sorted(found.items()))) if found else {}


MARKERS = "os^Dv"


def plot_margins(rows: Rows, gpu: str, path: Path | str) -> None:
    """What leaving SMs to the communicator does to the rate of forward and backward together, beside what
    copy engines reach."""
    with plots.style():
        figure = Figure(figsize=(6.4, 3.6))
        axes = figure.subplots()
        for marker, row in zip(MARKERS, rows):
            found, ours = margins(row["both"]), row["both"]["ours"]["tflops"]
            shares = [x / ours for x in found.values()]
            axes.plot(list(found), shares, marker=marker, linewidth=1.0, label=size_of(row))
        axes.axhline(1.0, color=plots.STAGE_COLOUR, linewidth=1.2)
        axes.text(0.0, 1.008, "copy engines, no SM left", fontsize=8, color=plots.STAGE_COLOUR)
        axes.set_ylim(0.5, 1.05)
        axes.set_xticks(sorted({x for row in rows for x in margins(row["both"])}))
        axes.set_xlabel("SMs left to NCCL")
        axes.set_ylabel("rate, of that with copy engines")
        title = "tokens of a GPU, heads"
        axes.legend(title=title, loc="lower center", ncols=3, fontsize=8, title_fontsize=8, frameon=False)
        plots.heading(figure, "SMs left free, forward + backward", f"{gpu}, two of a host")
        figure.subplots_adjust(left=0.11, right=0.98, bottom=0.13, top=0.84)
        plots.save(figure, path)


def figures(rows: Rows, gpu: str) -> dict[str, Callable[[Path], None]]:
    """The figure of the margins by its file's name, if they were measured."""
    rows = [x for x in rows if margins(x.get("both", {}))]
    return {"context_margins.png": partial(plot_margins, rows, gpu)} if rows else {}


def margins_table(rows: Rows) -> str:
    """TFLOP/s of a GPU with messages by NCCL, for which kernels leave some SMs, beside those by copy
    engines."""
    found = [
        (size_of(row), words, row[direction]["ours"]["tflops"], margins(row[direction]))
        for row in rows for direction, words in DIRECTIONS.items() if margins(row.get(direction, {}))
    ]  # fmt: skip
    left = sorted({m for *_, rates in found for m in rates if m})
    lines = [
        [size, words, f"{ours:.0f}", *(f"{rates[m]:.0f}" if m in rates else "" for m in (0, *left))]
        for size, words, ours, rates in found
    ]
    header = ["tokens of a GPU, heads", "", "copy engines", "NCCL", *(f"{m} SMs left" for m in left)]
    return table(header, lines, "ll" + "r" * (len(header) - 2))


def training_table(rows: Rows) -> str:
    """Each run of `examples/train_long.py`."""
    lines = [
        [
            f"{row['model']}, {row['seqlen'] // 1024}k",
            str(row["gpus"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tflops_per_gpu']:.0f}",
            f"{row['gib']:.0f}",
            " ".join(f"{x:.4f}" for x in row["losses"]),
        ]
        for row in rows
    ]
    header = ["model, tokens", "GPUs", "tokens/s", "TFLOP/s a GPU", "GiB a GPU", "losses, step by step"]
    return table(header, lines, "l" + "r" * (len(header) - 2) + "l")
