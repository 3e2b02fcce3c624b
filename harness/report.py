"""The generated parts of README.md and notes/*.md, and the figures, from the committed results alone.

`python -m harness.report` rewrites what stands between `<!-- results:begin NAME -->` and
`<!-- results:end NAME -->`, each on a line of its own, and draws every figure. With `--check` it writes
nothing and exits 1, with a line for each stale item. Of a figure it checks only that the file exists: its
bytes depend on the versions of matplotlib and its font renderer, so comparing them would fail where nothing
is wrong.

Blocks: `ladder`, `environment`, `sustained`, `published`, those of `harness.library` and, for production
stages, `claim-<id>`, of the GPU measured last; `stage-<id>` for every stage and `ablation-<file>` for every
kernel file, of every GPU that has their rows; `worth-<file>` for those of `harness.worth`.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from harness import edits, library, plots, policy_tables, published, worth
from harness.figures import drawable
from harness.markdown import table
from harness.plots import format_rate, label
from harness.results import DIRECTION_WORDS, PEER_LABELS, Results, Row, bound_gpu, load_all, repository
from harness.sweep import HEAD_DIMS, HIDDEN_SIZE, LENGTHS, SEQLENS, TOTAL_TOKENS, sweep_problem
from hopper_attention.cache import write_atomically
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Stage

MARKER = re.compile(r"^<!-- results:(begin|end) (\S+) -->[ \t]*$", re.MULTILINE)
LADDER_HEAD_DIM, LADDER_SEQLEN = 128, 4096
NOT_MEASURED = "not measured"
NOTHING = "Nothing is measured yet."
PRODUCTION = {"k6": "The forward pass", "k7": "The forward pass in FP8", "bwd4": "The backward pass"}


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
    where = _join(dict.fromkeys(results.gpu for results in measured.values()))
    parts.append(f"Measured at {point} on {where}. {_bound_sentence(measured)}" if measured else NOTHING)
    return "\n\n".join(parts)


def _ladder_line(stage: Stage, measured: Mapping[str, Results], file: str, notes: str) -> list[str]:
    results = measured.get(stage.id)
    cells = [f"[`{stage.id}`]({notes}{file}.md)", _cell(stage.adds)]
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
    peers = sorted({row.provider for row in rows} & set(PEER_LABELS), key=_peer_order)
    behind = _join_lists(_behind(found) for of in ratios.values() for _, found in sorted(of.items()))
    header = ["against the best peer", *(f"head_dim {d}" for d in head_dims)]
    gpus = _join(dict.fromkeys(measured[stage].gpu for stage in PRODUCTION if stage in measured))
    sentence = (
        f"Least and greatest ratio to the fastest of {', '.join(map(label, peers))}, of those that take the "
        f"problem and ran, each row in one run, and the geometric mean: bf16, {TOTAL_TOKENS} tokens, hidden "
        f"size {HIDDEN_SIZE}, N from {SEQLENS[0]} to {SEQLENS[-1]}, full and causal, launches with rests "
        f"between them, on {gpus}. "
        f"Below 1.000: {behind}."
    )
    return f"{table(header, lines, 'l' + 'r' * len(head_dims))}\n\n{sentence}"


def _join_lists(lists: Iterable[str]) -> str:
    return ", ".join(found for found in lists if found != "none") or "none"


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


def environment_line(measured: Mapping[str, Results]) -> str:
    """What the results were measured on and with, in one line; where stages differ, every value."""
    if not measured:
        return NOTHING
    environments = [results.environment for results in measured.values()]

    def values(key: str, unit: str = "") -> str:
        found = dict.fromkeys(e[key] for e in environments if e.get(key) is not None)
        return _join(f"{value:g}{unit}" if unit else str(value) for value in found) or "not recorded"

    versions: dict[str, list[str]] = {}  # providers that share a version share a mention
    for peer in sorted({peer for e in environments for peer in e.get("peers") or {}}, key=_peer_order):
        found = dict.fromkeys(str(e["peers"][peer]) for e in environments if peer in (e.get("peers") or {}))
        versions.setdefault(_join(found), []).append(label(peer))
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
    return _cell(" · ".join(parts))


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
        peers = sorted({row.provider for stage, row in timed if row.provider != stage}, key=_peer_order)
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
    """`variants` of one kernel file side by side: TFLOP/s, and in brackets the ratio to the first of them."""
    problems = sorted({row.problem for row in results.rows}, key=lambda p: (p.head_dim, p.causal, p.seqlen_q))
    parts = []
    for head_dim in sorted({p.head_dim for p in problems}):
        for causal in (False, True):
            columns = [p for p in problems if (p.head_dim, p.causal) == (head_dim, causal)]
            lines = []
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


def replace_blocks(text: str, blocks: Mapping[str, str], where: str) -> str:
    """A document with the content of its marked blocks replaced.

    Raises ValueError, naming the document and the block, for a block that is not in `blocks` and for markers
    that do not pair up.
    """
    pieces, done = [], 0
    for name, start, end in _marked(text, blocks, where):
        pieces += [text[done:start], _framed(blocks[name])]
        done = end
    return "".join(pieces) + text[done:]


def stale_blocks(text: str, blocks: Mapping[str, str], where: str) -> list[str]:
    """The names of a document's blocks whose content `replace_blocks` would change."""
    marked = _marked(text, blocks, where)
    return [name for name, start, end in marked if text[start:end] != _framed(blocks[name])]


def make_blocks(
    stages: Sequence[Stage],
    everything: Mapping[str, Mapping[str, Results]],
    files: Mapping[str, str],
    notes: str = "notes/",
    ablations: Mapping[str, str] | None = None,
    counters: str = "",
    of_library: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Every block's content. `everything` holds each GPU's results in the ladder's order, newest first,
    `ablations` what is known of kernel files' variants, by file, `counters` is the table of profiles and
    `of_library` what `harness.library` has."""
    measured = next(iter(everything.values()), {})
    blocks = {
        "ladder": ladder_table(stages, measured, files, notes),
        "lead": lead(measured),
        "environment": environment_line(measured),
        "sustained": sustained_table(measured),
        "counters": counters,
        **(of_library or {}),
    }
    blocks["published"] = published.block(measured)
    blocks |= {f"claim-{stage}": claim(measured, stage) for stage in PRODUCTION}
    for stage in stages:
        found = [results[stage.id] for results in everything.values() if stage.id in results]
        known = [results for results in found if any(row.provider == stage.id for row in results.rows)]
        tables = "\n\n".join(_on_gpu(results, stage_table(results)) for results in known)
        blocks[f"stage-{stage.id}"] = tables or f"`{stage.id}` is {NOT_MEASURED}."
    for file in files.values():
        unmeasured = f"The variants of `{file}` are {NOT_MEASURED}."
        blocks[f"ablation-{file}"] = (ablations or {}).get(file, unmeasured)
    return blocks


def _on_gpu(results: Results, table: str) -> str:
    return f"**{_cell(results.gpu)}**\n\n{table}"


def documents(root: Path) -> Iterator[tuple[Path, str]]:
    """The files that may hold blocks, each with the path from its folder to the notes."""
    if (root / "README.md").exists():
        yield root / "README.md", "notes/"
    for path in sorted((root / "notes").glob("*.md")):
        yield path, ""


def figures(
    root: Path, everything: Mapping[str, Mapping[str, Results]]
) -> dict[Path, Callable[[Path], None]]:
    """Every figure's path, and what draws it there. Stages without a row of the sweep have no figure."""
    found: dict[Path, Callable[[Path], None]] = {}
    for folder, measured in everything.items():
        swept = {stage: results for stage, results in measured.items() if results.sweep_rows()}
        for stage, results in swept.items():
            found[root / "results" / folder / f"{stage}.png"] = partial(plots.plot_stage, results)
        directions = {row.direction for results in swept.values() for row in results.sweep_rows()}
        for direction, name in (("fwd", "progress.png"), ("bwd", "progress_bwd.png")):
            if direction in directions:
                draw = partial(plots.plot_progress, swept, direction=direction)
                found[root / "results" / folder / name] = draw
        own = root / "results" / folder
        drawn = drawable(swept) | library.figures(own) | policy_tables.figures(own)
        for name, draw in drawn.items():
            found[own / name] = draw
    return found


def load_ladder(root: Path) -> dict[str, dict[str, Results]]:
    """Every GPU's results in the ladder's order, the GPU measured last first; of one day, the last by name
    first. Raises ValueError for a stage the ladder lacks."""
    everything = load_all(root / "results")
    for folder, measured in everything.items():
        for stage in measured:
            if stage not in ladder.LADDER:
                raise ValueError(f"{root / 'results' / folder / stage}.json: the ladder has no stage {stage}")
        everything[folder] = {stage: measured[stage] for stage in ladder.LADDER if stage in measured}

    def measured_last(folder: str) -> tuple[str, str]:
        return max(results.environment.get("date") or "" for results in everything[folder].values()), folder

    return {folder: everything[folder] for folder in sorted(everything, key=measured_last, reverse=True)}


def ablation_tables(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """The tables of the GPUs' measured variants, in the folders' order, by kernel file."""
    tables: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted((root / "results" / folder / "ablations").glob("*.json")):
            results = Results.load(path)
            variants = ablation_table(results, edits.labels(results.stage))
            tables.setdefault(path.stem, []).append(_on_gpu(results, variants))
    return {file: "\n\n".join(found) for file, found in tables.items()}


def ablations_of(root: Path, folders: Iterable[str], file: str) -> dict[str, Results]:
    """The GPUs' measured variants of a kernel file, in the folders' order."""
    paths = {folder: root / "results" / folder / "ablations" / f"{file}.json" for folder in folders}
    return {folder: Results.load(path) for folder, path in paths.items() if path.exists()}


def _blocks_of(root: Path, everything: Mapping[str, dict[str, Results]], stages: Sequence[Stage], notes: str):
    newest = root / "results" / next(iter(everything), "")
    counters = counters_table(newest / "profiles", [stage.id for stage in stages])
    tables = ablation_tables(root, everything)
    of_library = library.blocks(newest, next(iter(everything.values()), {})) | policy_tables.blocks(newest)
    of_library |= {
        f"worth-{file}": worth.block(file, ablations_of(root, everything, file)) for file in worth.LACKING
    }
    return make_blocks(stages, everything, ladder.LADDER, notes, tables, counters, of_library)


def find_stale(root: Path, stages: Sequence[Stage]) -> list[str]:
    """A line for each block that regenerating would change, and for each figure that does not exist."""
    everything = load_ladder(root)
    blocks_with = {notes: _blocks_of(root, everything, stages, notes) for notes in ("notes/", "")}
    lines = []
    for path, notes in documents(root):
        name = str(path.relative_to(root))
        blocks = blocks_with[notes]
        stale = stale_blocks(path.read_text(encoding="utf-8"), blocks, name)
        lines += [f"{name}: block {block} is not what the results say" for block in stale]
    missing = [path for path in figures(root, everything) if not path.exists()]
    return lines + [f"{path.relative_to(root)}: not drawn" for path in missing]


def regenerate(root: Path, stages: Sequence[Stage]) -> list[str]:
    """Rewrite every document whose blocks changed and draw every figure; a line for each file written."""
    everything = load_ladder(root)
    blocks_with = {notes: _blocks_of(root, everything, stages, notes) for notes in ("notes/", "")}
    new_texts = {}
    for path, notes in documents(root):
        text = path.read_text(encoding="utf-8")
        blocks = blocks_with[notes]
        new_text = replace_blocks(text, blocks, str(path.relative_to(root)))
        if new_text != text:
            new_texts[path] = new_text
    for path, text in new_texts.items():  # only now: a fault in one document leaves all as they were
        write_atomically(path, text.encode())
    drawn = figures(root, everything)
    for path, draw in drawn.items():
        draw(path)
    return [f"wrote {path.relative_to(root)}" for path in (*new_texts, *drawn)]


def main(
    argv: Sequence[str] | None = None, root: Path | None = None, stages: Sequence[Stage] | None = None
) -> int:
    """Regenerate, or with --check compare. Returns 1 when something is stale, 2 when an input is at fault."""
    parser = argparse.ArgumentParser(prog="python -m harness.report", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is stale")
    check, root = parser.parse_args(argv).check, root or repository()
    try:
        stages = stages or [ladder.load(stage_id)[0] for stage_id in ladder.LADDER]
        lines = find_stale(root, stages) if check else regenerate(root, stages)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines) or "everything generated is up to date")
    return 1 if check and lines else 0


def _marked(text: str, known: Iterable[str], where: str) -> list[tuple[str, int, int]]:
    """The blocks of a document: name, and start and end of what stands between the markers."""
    found, opened = [], None
    for marker in MARKER.finditer(text):
        kind, name = marker.groups()
        if name not in known:
            raise ValueError(f"{where}: unknown block {name}; there are {', '.join(known)}")
        if kind == "begin":
            if opened:
                raise ValueError(f"{where}: block {name} begins inside block {opened[0]}")
            opened = name, marker.end()
        elif opened is None or opened[0] != name:
            raise ValueError(f"{where}: block {name} ends without a begin")
        else:
            found.append((*opened, marker.start()))
            opened = None
    if opened:
        raise ValueError(f"{where}: block {opened[0]} has no end")
    return found


def _framed(content: str) -> str:
    return f"\n\n{content}\n\n"  # without the empty lines a table after a comment is not a table


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
    return NOT_MEASURED if row is None else _cell(row.error or NOT_MEASURED)


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


def _cell(text: str) -> str:
    """Text that cannot break out of its table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _join(values: Iterable[str]) -> str:
    return " and ".join(values)


def _peer_order(peer: str) -> tuple[int, str]:
    order = list(PEER_LABELS)
    return (order.index(peer) if peer in order else len(order), peer)


if __name__ == "__main__":
    sys.exit(main())
