"""How far the production stages are ahead of the best peer: what the README and their notes begin with."""

import math
from collections.abc import Iterable, Mapping, Sequence

from harness.markdown import NOT_MEASURED, NOTHING, table
from harness.plots import format_rate, label
from harness.results import PEER_LABELS, Results, peer_order
from harness.sweep import HIDDEN_SIZE, SEQLENS, TOTAL_TOKENS
from hopper_attention.kernels.contract import Problem

PRODUCTION = {"k6": "The forward pass", "k7": "The forward pass in FP8", "bwd4": "The backward pass"}


def lead(measured: Mapping[str, Results]) -> str:
    """How far the production stages are ahead of the best peer, by head_dim, and where they are not."""
    ratios = {stage: _ahead(measured, stage) for stage in PRODUCTION}
    head_dims = sorted({d for of_stage in ratios.values() for d in of_stage})
    if not head_dims:
        return NOTHING
    lines = []
    for stage, words in PRODUCTION.items():
        cells = [_spread(ratios[stage][d]) if d in ratios[stage] else NOT_MEASURED for d in head_dims]
        lines.append([f"{words}, `{stage}`", *cells])
    rows = [row for stage in PRODUCTION if stage in measured for row in measured[stage].rows]
    peers = sorted({row.provider for row in rows} & set(PEER_LABELS), key=peer_order)
    behind = _join_lists(_behind(found) for of in ratios.values() for _, found in sorted(of.items()))
    header = ["against the best peer", *(f"head_dim {d}" for d in head_dims)]
    gpus = " and ".join(dict.fromkeys(measured[stage].gpu for stage in PRODUCTION if stage in measured))
    sentence = (
        f"Our rate over the fastest peer's: least, greatest and geometric mean. Peers: "
        f"{', '.join(map(label, peers))}, those that take the problem; a row and its fastest peer are of one "
        f"run. bf16, {TOTAL_TOKENS} tokens, hidden size {HIDDEN_SIZE}, N from {SEQLENS[0]} to {SEQLENS[-1]}, "
        f"full and causal, launches with rests between them, on {gpus}. Below 1.000: {behind}."
    )
    return f"{table(header, lines, 'l' + 'r' * len(head_dims))}\n\n{sentence}"


def claim(measured: Mapping[str, Results], stage: str) -> str:
    """What `lead` says of one stage, in a sentence for its note."""
    ratios = _ahead(measured, stage)
    if not ratios:
        return f"`{stage}` is {NOT_MEASURED}."
    each = "; ".join(f"{_spread(found)} at head_dim {d}" for d, found in sorted(ratios.items()))
    behind = _join_lists(_behind(found) for _, found in sorted(ratios.items()))
    most = max(row.tflops for row in measured[stage].rows if row.provider == stage and row.tflops)
    return (
        f"**`{stage}` against the fastest peer of each problem, on {measured[stage].gpu}: {each}.** Of the "
        f"papers' sweep, N from {SEQLENS[0]} to {SEQLENS[-1]}, full and causal. Below 1.000: {behind}. "
        f"At most {format_rate(most)} TFLOP/s."
    )


def _ahead(measured: Mapping[str, Results], stage: str) -> dict[int, list[tuple[float, Problem]]]:
    """By head_dim, a stage's ratios to the best peer of each problem of the papers' sweep."""
    ratios: dict[int, list[tuple[float, Problem]]] = {}
    for row in measured[stage].rows if stage in measured else ():
        peer = measured[stage].best_peer(row.problem) if row.provider == stage and row.tflops else None
        if peer is not None and row.dtype == "bfloat16" and row.seqlen_q in SEQLENS:
            ratios.setdefault(row.head_dim, []).append((row.tflops / peer.tflops, row.problem))
    return ratios


def _spread(found: Sequence[tuple[float, Problem]]) -> str:
    """Least and greatest ratio, and the geometric mean."""
    least, greatest = min(x for x, _ in found), max(x for x, _ in found)
    return f"{least:.3f}–{greatest:.3f}, mean {math.exp(sum(math.log(x) for x, _ in found) / len(found)):.3f}"


def _behind(found: Iterable[tuple[float, Problem]]) -> str:
    return ", ".join(f"{problem} ({x:.3f})" for x, problem in sorted(found) if x < 1) or "none"


def _join_lists(lists: Iterable[str]) -> str:
    return ", ".join(found for found in lists if found != "none") or "none"
