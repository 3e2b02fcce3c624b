"""Tables of stages' results: the ladder, a stage's sweep, sustained rates, ablations, counters; and what they
were measured on."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.markdown import NOT_MEASURED, NOTHING, cell, table
from harness.plots import format_rate, label
from harness.results import DIRECTION_WORDS, Results, Row, bound_gpu, peer_order
from harness.sweep import HEAD_DIMS, HIDDEN_SIZE, LENGTHS, TOTAL_TOKENS, sweep_problem
from hopper_attention.kernels.contract import Stage

LADDER_HEAD_DIM, LADDER_SEQLEN = 128, 4096
COUNTERS = {  # columns of the table, and what harness.profile calls them
    "µs": "time, µs",
    "MHz": "SM clock, MHz",
    "issue slots": "issue slots, %",
    "tensor": "tensor pipe, %",
    "MUFU": "MUFU (XU) pipe, %",
    "FMA": "FMA pipe, %",
    "ALU": "ALU pipe, %",
    "L1, shared": "L1 and shared data pipe, %",
    "device memory": "device memory, %",
    "warps": "warps resident, %",
}


def ladder_table(
    stages: Sequence[Stage], measured: Mapping[str, Results], files: Mapping[str, str], notes: str = "notes/"
) -> str:
    """A table for each direction, one row per stage, in order: what it adds, and its rate at d = 128, N =
    4096, full and causal, also as a multiple of the rate of the stage that it builds on.

    `files` maps a stage id to the name of its kernel file, which is also its note's; `notes` is the path from
    the document to the notes.
    """
    columns = ["TFLOP/s", "of bound", "× before", "to best peer"]
    rates = [f"{mask}: {name}" for mask in ("full", "causal") for name in columns]
    parts = []
    for direction in dict.fromkeys(stage.direction for stage in stages):
        of_direction = [stage for stage in stages if stage.direction == direction]
        lines = [_ladder_line(stage, measured, files[stage.id], notes) for stage in of_direction]
        parts.append(table([DIRECTION_WORDS[direction], "adds", *rates], lines, "llrrrlrrrl"))
    point = f"head_dim {LADDER_HEAD_DIM}, N = {LADDER_SEQLEN}"
    where = " and ".join(dict.fromkeys(results.gpu for results in measured.values()))
    parts.append(f"Measured at {point} on {where}. {_bound_sentence(measured)}" if measured else NOTHING)
    return "\n\n".join(parts)


def _ladder_line(stage: Stage, measured: Mapping[str, Results], file: str, notes: str) -> list[str]:
    results = measured.get(stage.id)
    cells = [f"[`{stage.id}`]({notes}{file}.md)", cell(stage.adds)]
    for causal in (False, True):
        problem = sweep_problem(LADDER_SEQLEN, LADDER_HEAD_DIM, causal, stage.direction)
        row = results.at(problem) if results else None
        if row is None or row.tflops is None:
            cells += [_reason(row), "", "", ""]
        else:
            rate = f"**{format_rate(row.tflops)}**"
            before = _times_before(row, stage, measured)
            cells += [rate, _percent_of_bound(row, results), before, _ratio(row, results)]
    return cells


def _times_before(row: Row, stage: Stage, measured: Mapping[str, Results]) -> str:
    """The row's rate over that of the stage before on the same problem; nothing where no stage is before."""
    if stage.before is None:
        return ""
    results = measured.get(stage.before)
    before = None
    if results is not None and results.rows:
        before = results.find(stage.before, row.problem.with_(direction=results.rows[0].direction))
    if before is None or before.tflops is None:
        return _reason(before)
    return f"{_digits(row.tflops / before.tflops)}×"


def stage_table(results: Results) -> str:
    """One stage's sweep: head_dim and mask by sequence length; then, if any, its rows outside the sweep."""
    own = [row for row in results.rows if row.provider == results.stage]
    swept = [row for row in results.sweep_rows() if row.provider == results.stage]
    parts = []
    for direction in dict.fromkeys(row.direction for row in swept):
        lines = []
        seqlens = [n for n in LENGTHS if any(row.seqlen_q == n for row in swept)]
        for head_dim in HEAD_DIMS:
            for causal in (False, True):
                name = f"**{head_dim}**, {'causal' if causal else 'full'}"
                problems = [sweep_problem(n, head_dim, causal, direction) for n in seqlens]
                lines.append([name, *(_stage_cell(results.at(problem), results) for problem in problems)])
        parts.append(table([f"head_dim, {direction}", *map(str, seqlens)], lines, "l" + "r" * len(seqlens)))
    others = [row for row in own if row not in swept]
    if others:
        lines = [[str(row.problem), _stage_cell(row, results)] for row in others]
        parts.append(table(["problem", results.stage], lines, "lr"))
    if not own:
        return NOTHING
    columns = f"A column is a sequence length, at {TOTAL_TOKENS} tokens and hidden size {HIDDEN_SIZE}. "
    parts.append(
        f"In a cell: TFLOP/s, share of the hardware bound, ratio to the fastest peer and its TFLOP/s. "
        f"{columns if swept else ''}{_bound_sentence({results.stage: results})}"
    )
    parts.append(environment_line({results.stage: results}))
    return "\n\n".join(parts)


def sustained_table(measured: Mapping[str, Results]) -> str:
    """Burst and sustained rates per provider, at the longest sequence that has sustained ones.

    Stages in the mapping's order, then peers, each as measured beside the last stage that ran it.
    """
    parts = []
    for direction, kind in DIRECTION_WORDS.items():
        swept = [
            (results.stage, row)
            for results in measured.values()
            for row in results.sweep_rows()
            if row.direction == direction
        ]
        timed = [(stage, row) for stage, row in swept if row.tflops_sustained is not None]
        if not timed:
            continue
        seqlen = max(row.seqlen_q for _, row in timed)
        points = [sweep_problem(seqlen, d, causal, direction) for d in HEAD_DIMS for causal in (False, True)]
        latest = {row.key: row for _, row in swept}
        stages = dict.fromkeys(stage for stage, row in timed if row.provider == stage)
        peers = sorted({row.provider for stage, row in timed if row.provider != stage}, key=peer_order)
        lines = [
            [label(p), *(_sustained_cell(latest.get((p, at))) for at in points)] for p in [*stages, *peers]
        ]
        header = ["provider", *(f"d={at.head_dim}, {'causal' if at.causal else 'full'}" for at in points)]
        parts.append(table(header, lines, "lrrrr"))
        parts.append(
            f"Attention {kind} at N = {seqlen}, TFLOP/s: one launch at a time → launches back to back for "
            f"seconds, where the power limit sets the clock."
        )
    return "\n\n".join(parts) or "No sustained rate is measured yet."


def ablation_table(results: Results, variants: Sequence[str]) -> str:
    """`variants` of one kernel file side by side: TFLOP/s, and in brackets the ratio to the first of them. A
    table for each head_dim and mask that has rows."""
    problems = sorted({row.problem for row in results.rows}, key=lambda p: (p.head_dim, p.causal, p.seqlen_q))
    parts = []
    for (head_dim, causal), group in itertools.groupby(problems, lambda p: (p.head_dim, p.causal)):
        columns, lines = list(group), []
        here = [v for v in variants if any(results.find(v, problem) for problem in columns)]
        for variant in here:
            cells = []
            for problem in columns:
                row, first = results.find(variant, problem), results.find(here[0], problem)
                cells.append(_ablation_cell(row, first))
            lines.append([variant, *cells])
        header = [
            f"d = {head_dim}, {'causal' if causal else 'full'}",
            *(f"N = {p.seqlen_q}" for p in columns),
        ]
        parts.append(table(header, lines, "l" + "r" * len(columns)))
    return "\n\n".join(parts)


def counters_table(folder: Path, stages: Iterable[str]) -> str:
    """Of each stage that was profiled, the counters of the kernel that takes longest."""
    lines = []
    for stage in stages:
        if (path := folder / f"{stage}.json").exists():
            kernels = json.loads(path.read_text(encoding="utf-8"))
            longest = max(kernels, key=lambda kernel: kernel["time, µs"])
            share = f" ({100 * longest['time, µs'] / sum(kernel['time, µs'] for kernel in kernels):.0f}%)"
            cells = [f"{longest[name]:.0f}" for name in COUNTERS.values()]
            lines.append([f"`{stage}`{share if len(kernels) > 1 else ''}", *cells])
    if not lines:
        return f"The counters are {NOT_MEASURED}."
    return table(["stage", *COUNTERS], lines, "l" + "r" * len(COUNTERS))


def environment_line(measured: Mapping[str, Results]) -> str:
    """What the results were measured on and with, in one line; where stages differ, every value."""
    if not measured:
        return NOTHING
    environments = [results.environment for results in measured.values()]

    def values(key: str, unit: str = "") -> str:
        found = dict.fromkeys(e[key] for e in environments if e.get(key) is not None)
        found = sorted(found) if key == "date" else found
        *others, last = [f"{value:g}{unit}" if unit else str(value) for value in found] or ["not recorded"]
        return f"{', '.join(others)} and {last}" if others else last

    versions: dict[str, list[str]] = {}  # providers that share a version share a mention
    for peer in sorted({peer for e in environments for peer in e.get("peers") or {}}, key=peer_order):
        found = dict.fromkeys(str(e["peers"][peer]) for e in environments if peer in (e.get("peers") or {}))
        whole = [x for x in found if not any(y != x and y.startswith(f"{x},") for y in found)]
        versions.setdefault(" or ".join(whole), []).append(label(peer))
    peers = "; ".join(f"{', '.join(names)} {version}" for version, names in versions.items())
    parts = [
        values("gpu"),
        f"power cap {values('power_cap_w', ' W')}",
        f"driver {values('driver')}",
        f"CUDA {values('cuda')}",
        f"PyTorch {values('torch')}",
        f"CuTe DSL {values('cutlass_dsl')}",
        f"Python {values('python')}",
        f"cuDNN {values('cudnn')}",
        f"peers: {peers or 'none'}",
        f"measured {values('date')}",
    ]
    return cell(" · ".join(parts))


def _stage_cell(row: Row | None, results: Results) -> str:
    if row is None or row.tflops is None:
        return _reason(row)
    cells = [f"**{format_rate(row.tflops)}**", _percent_of_bound(row, results), _ratio(row, results, True)]
    for stage in results.other_stages():
        other = results.find(stage, row.problem)
        if other is not None and other.tflops is not None:
            cells.append(f"{_digits(row.tflops / other.tflops)}× `{stage}`")
    return "<br>".join(cells)


def _ablation_cell(row: Row | None, first: Row | None) -> str:
    if row is None or row.tflops is None:
        return _reason(row)
    if first is None or first.tflops is None:
        return _digits(row.tflops)
    return f"{_digits(row.tflops)} ({row.tflops / first.tflops:.2f}×)"


def _sustained_cell(row: Row | None) -> str:
    if row is None or row.tflops_sustained is None:
        return _reason(row)
    change = 100 * (row.tflops_sustained / row.tflops - 1)
    return f"{format_rate(row.tflops)} → {format_rate(row.tflops_sustained)} ({change:+.0f}%)".replace(
        "-", "−"
    )


def _reason(row: Row | None) -> str:
    return NOT_MEASURED if row is None else cell(row.error or NOT_MEASURED)


def _percent_of_bound(row: Row, results: Results) -> str:
    gpu = bound_gpu(results.environment)
    if gpu is None:
        return "–"
    return f"{_digits(100 * gpu.roofline_seconds(row.problem) / (row.ms_median * 1e-3))}%"


def _ratio(row: Row, results: Results, with_rate: bool = False) -> str:
    peer = results.best_peer(row.problem)
    if peer is None:
        return "no peer"
    rate = f" ({format_rate(peer.tflops)})" if with_rate else ""
    return f"{_digits(row.tflops / peer.tflops)}× {label(peer.provider)}{rate}"


def _digits(value: float) -> str:
    """Ratios and percentages: two decimals near one, two significant digits when small, none from ten on."""
    if value >= 9.95:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _bound_sentence(measured: Mapping[str, Results]) -> str:
    gpu = bound_gpu(next(iter(measured.values())).environment)
    if gpu is None:
        return "The hardware bound is left out: this GPU's peak rates are not known here."
    in_fp8 = any(row.problem.in_fp8 for found in measured.values() for row in found.rows)
    return (
        f"The hardware bound is the longer of the FLOPs at {gpu.tensor_flops / 1e12:.0f} TFLOP/s "
        f"({gpu.sms} SMs, {gpu.clock_ghz} GHz){', in FP8 at twice that,' * in_fp8} and the least bytes at "
        f"{gpu.hbm_bytes_per_s / 1e12} TB/s."
    )
