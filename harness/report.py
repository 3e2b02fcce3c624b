"""The generated parts of README.md and notes/*.md, and the figures, from the committed results alone.

`python -m harness.report` rewrites what stands between `<!-- results:begin NAME -->` and
`<!-- results:end NAME -->`, each on a line of its own, and draws every figure. With `--check` it writes
nothing and exits 1, with a line for each stale item. Of a figure it checks only that the file exists: its
bytes depend on the versions of matplotlib and its font renderer, so comparing them would fail where nothing
is wrong.

Blocks: `ladder`, `environment`, `sustained`, `published`, those of `harness.library` and, for production
stages, `claim-<id>`, of the GPU measured most; `stage-<id>` for every stage and `ablation-<file>` for every
kernel file, of every GPU that has their rows; `worth-<file>` for those of `harness.worth`.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from harness import claims, edits, library, plots, policy_tables, published, stage_tables, worth
from harness.figures import drawable
from harness.markdown import NOT_MEASURED, cell, replace_blocks, stale_blocks
from harness.results import Results, load_all, repository
from hopper_attention.cache import write_atomically
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Stage


def make_blocks(
    stages: Sequence[Stage],
    everything: Mapping[str, Mapping[str, Results]],
    files: Mapping[str, str],
    notes: str = "notes/",
    ablations: Mapping[str, str] | None = None,
    counters: str = "",
    of_library: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Every block's content. `everything` holds each GPU's results as `load_ladder` does,
    `ablations` what is known of kernel files' variants, by file, `counters` is the table of profiles and
    `of_library` what `harness.library` has."""
    measured = next(iter(everything.values()), {})
    blocks = {
        "ladder": stage_tables.ladder_table(stages, measured, files, notes),
        "lead": claims.lead(measured),
        "environment": stage_tables.environment_line(measured),
        "sustained": stage_tables.sustained_table(measured),
        "counters": counters,
        **(of_library or {}),
    }
    blocks["published"] = published.block(measured)
    blocks |= {f"claim-{stage}": claims.claim(measured, stage) for stage in claims.PRODUCTION}
    for stage in stages:
        found = [results[stage.id] for results in everything.values() if stage.id in results]
        known = [results for results in found if any(row.provider == stage.id for row in results.rows)]
        tables = "\n\n".join(_on_gpu(results, stage_tables.stage_table(results)) for results in known)
        blocks[f"stage-{stage.id}"] = tables or f"`{stage.id}` is {NOT_MEASURED}."
    for file in files.values():
        unmeasured = f"The variants of `{file}` are {NOT_MEASURED}."
        blocks[f"ablation-{file}"] = (ablations or {}).get(file, unmeasured)
    return blocks


def _on_gpu(results: Results, table: str) -> str:
    return f"**{cell(results.gpu)}**\n\n{table}"


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
    """Every GPU's results in the ladder's order. First the GPU of most stages, so that a few new rows of
    another do not change whom the notes speak of; of as many the one measured last; of one day, the last by
    name. Raises ValueError for a stage the ladder lacks."""
    everything = load_all(root / "results")
    for folder, measured in everything.items():
        for stage in measured:
            if stage not in ladder.LADDER:
                raise ValueError(f"{root / 'results' / folder / stage}.json: the ladder has no stage {stage}")
        everything[folder] = {stage: measured[stage] for stage in ladder.LADDER if stage in measured}

    def measured_most(folder: str) -> tuple[int, str, str]:
        dates = [results.environment.get("date") or "" for results in everything[folder].values()]
        return len(dates), max(dates), folder

    return {folder: everything[folder] for folder in sorted(everything, key=measured_most, reverse=True)}


def ablation_tables(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """The tables of the GPUs' measured variants, in the folders' order, by kernel file."""
    tables: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted((root / "results" / folder / "ablations").glob("*.json")):
            results = Results.load(path)
            variants = stage_tables.ablation_table(results, edits.labels(results.stage))
            tables.setdefault(path.stem, []).append(_on_gpu(results, variants))
    return {file: "\n\n".join(found) for file, found in tables.items()}


def ablations_of(root: Path, folders: Iterable[str], file: str) -> dict[str, Results]:
    """The GPUs' measured variants of a kernel file, in the folders' order."""
    paths = {folder: root / "results" / folder / "ablations" / f"{file}.json" for folder in folders}
    return {folder: Results.load(path) for folder, path in paths.items() if path.exists()}


def _blocks_of(root: Path, everything: Mapping[str, dict[str, Results]], stages: Sequence[Stage], notes: str):
    first = root / "results" / next(iter(everything), "")
    counters = stage_tables.counters_table(first / "profiles", [stage.id for stage in stages])
    tables = ablation_tables(root, everything)
    of_library = library.blocks(first, next(iter(everything.values()), {})) | policy_tables.blocks(first)
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


if __name__ == "__main__":
    sys.exit(main())
