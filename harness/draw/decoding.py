"""Where a decoding step's time goes, by how much it reads: from the committed results."""

import json

from harness.draw.canvas import Canvas
from harness.results import repository

ONE_QUERY = [(1, 2048), (1, 8192), (1, 32768), (1, 131072), (8, 32768), (64, 8192)]  # (batch, keys) of 32:8


def time() -> Canvas:
    """Of each call what memory takes for K and V at the best rate of all rows, and the rest."""
    path = repository() / "results" / "h200" / "decode" / "bench.json"
    even = [
        x
        for x in json.loads(path.read_text(encoding="utf-8"))["rows"]
        if not (x["page"] or x["ragged"] or x["eight_bits"]) and x["head_dim"] == 128
    ]
    us = lambda x: x["us"]["hopper_attention"]
    best = max(x["bytes"] / us(x) for x in even)  # bytes a µs
    picture = Canvas(
        76 + 34 * len(ONE_QUERY),
        "What decides how long decode takes",
        "Bars of a call's time, by the size of K and V: the part that memory takes for them at the best rate "
        "measured, and the rest: launch, first load, the end.",
    )
    picture.text(16, 24, "A call's time: K and V from memory, and all the rest", 14, bold=True)
    picture.text(
        16, 45, f"32 heads on 8, one query; memory at {best / 1e6:.2f} TB/s, the best of all rows.", 12,
        paint="soft",
    )  # fmt: skip
    left, wide, y = 150, 540, 58
    for batch, keys in ONE_QUERY:
        shape = {"batch": batch, "heads": 32, "kv_heads": 8, "queries": 1, "keys": keys}
        row = next(x for x in even if shape.items() <= x.items())
        size, total, memory = row["bytes"], us(row), row["bytes"] / best
        name = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
        picture.text(left - 10, y + 17, f"{name}: {total:.1f} µs", 12, "end")
        picture.rect(left, y, wide * memory / total, 24, "a", "line")
        picture.rect(left + wide * memory / total, y, wide * (1 - memory / total), 24, "b2", "line")
        if memory > 0.2 * total:
            picture.text(left + wide * memory / total / 2, y + 17, f"memory {memory:.1f}", 11, "middle")
        picture.text(left + wide + 8, y + 17, f"rest {max(0.0, total - memory):.1f} µs", 11)
        y += 34
    return picture
