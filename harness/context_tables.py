"""Tables of what was measured of a sequence on several GPUs, from results/<gpu>/context_parallel.

bench.json      `python bench.py context_parallel --save`
training.json   `examples/train_long.py --save`
"""

from typing import Any

from harness.markdown import table

Rows = list[dict[str, Any]]
NOTHING = "Nothing is measured yet."
DIRECTIONS = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
COMMUNICATOR = "communicator"  # messages by NCCL; "…, margin m": with kernels that leave it m SMs
CALLS = {  # of harness.context_parallel, and how the table's columns call them
    "alone": "one GPU, 1/P of the work",
    COMMUNICATOR: "messages by NCCL",
    "fa3 ring": "FlashAttention-3 in this ring",
    "torch, cudnn": "PyTorch's ring, cuDNN",
    "torch, enable()": "PyTorch's ring, `enable()`",
}


def blocks(bench: Rows, training: Rows) -> dict[str, str]:
    """The blocks of one GPU."""
    makers = {
        "context-parallel": (bench_table, bench),
        "context-margins": (margins_table, bench),
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


def margins_table(rows: Rows) -> str:
    """TFLOP/s of a GPU with messages by NCCL, for which kernels leave some SMs, beside those by copy
    engines."""
    prefix = f"{COMMUNICATOR}, margin "
    named = {name for row in rows for direction in DIRECTIONS for name in row.get(direction, ())}
    margins = sorted(int(name.removeprefix(prefix)) for name in named if name.startswith(prefix))
    lines = []
    for row in rows:
        for direction, words in DIRECTIONS.items():
            times = row.get(direction, {})
            if any(name.startswith(prefix) for name in times):
                names = ["ours", COMMUNICATOR, *(f"{prefix}{m}" for m in margins)]
                rates = [f"{times[x]['tflops']:.0f}" if x in times else "" for x in names]
                lines.append([size_of(row), words, *rates])
    header = ["tokens of a GPU, heads", "", "copy engines", "NCCL", *(f"{m} SMs left" for m in margins)]
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
