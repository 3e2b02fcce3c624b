"""Tables of decode beside its peers, from results/<gpu>/decode: `python bench.py decode --save`."""

from statistics import geometric_mean
from typing import Any

from harness.markdown import NOTHING, table
from harness.results import PEER_LABELS

Rows = list[dict[str, Any]]
OURS = "hopper_attention"
PEERS = {x: PEER_LABELS[x] for x in ("cudnn", "fa2", "fa3")}
PEERS |= {"flashinfer": "FlashInfer", "xqa": "FlashInfer's XQA"}


def decode_table(rows: Rows) -> str:
    """µs of attention to a cache beside the peers', and what it reads in a second."""
    if not rows:
        return NOTHING
    lines, ratios = [], []
    peers = [name for name in PEERS if any(name in row["us"] for row in rows)]
    for row in rows:
        us = row["us"]
        if (ours := us.get(OURS)) is None:  # which failed; its row says why
            continue
        remarks = {
            "e4m3": row["eight_bits"],
            f"pages of {row['page']}": row["page"],
            "ragged": row["ragged"],
            "equal lengths, given": row.get("on_device", False),
            f"d = {row['head_dim']}": row["head_dim"] != 128,
        }
        kind = [remark for remark, made in remarks.items() if made]
        heads = f"{row['heads']}:{row['kv_heads']}"
        shape = f"{row['batch']}, {heads}, {row['queries']}, {row['keys']}"
        theirs = [f"{us[x]:.1f}" if x in us else "" for x in peers]
        best = min((us[x] for x in peers if x in us), default=None)
        if best is not None and not kind:
            ratios.append((best / ours, shape))
        size, rate = row["bytes"] / 1e6, row["bytes"] / ours / 1e6
        size = f"{size:.0f} MB" if size < 1e3 else f"{size / 1e3:.2f} GB"
        ahead = f"{best / ours:.2f}" if best else ""
        plain = f"{row['without_pdl_us']:.1f}" if row.get("without_pdl_us") else ""
        loads = f"{row['reads_us'] / ours:.3f}" if "reads_us" in row else ""
        of_ours = f"**{ours:.1f}**", plain, loads
        lines.append([shape, ", ".join(kind), size, *of_ours, *theirs, ahead, f"{rate:.2f}"])
    header = ["batch, heads, queries, keys", "", "K and V", "`decode`, µs", "without PDL", "loads alone"]
    header += [*(PEERS[x] for x in peers), "ahead", "TB/s"]
    behind = [f"{shape} ({ratio:.3f})" for ratio, shape in ratios if ratio < 1]
    sentence = (
        "µs of a call in a CUDA graph, caches rotating through more than a gigabyte; heads are query heads "
        "and key heads. Without PDL (programmatic dependent launch) the kernel starts when the one before "
        "has ended. Loads alone: what a kernel takes that only has the same loads, as a share of "
        "`decode`'s time; above 1 it was the slower of the two."
    )
    if ratios:
        sentence += (
            f" The {len(ratios)} rows without a remark: {min(ratios)[0]:.3f} to {max(ratios)[0]:.3f} × the "
            f"best peer, geometric mean {geometric_mean(ratio for ratio, _ in ratios):.3f}; below 1.000: "
            f"{'; '.join(behind) or 'none'}."
        )
    return f"{table(header, lines, 'llrrrr' + 'r' * len(peers) + 'rr')}\n\n{sentence}"
