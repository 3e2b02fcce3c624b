"""Files of rows that are not a stage's: what the library's calls and the suites of models, packed batches and
windows measured, each with the environment of all its rows."""

import json
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

from harness import results
from harness.command import as_usage
from hopper_attention.cache import write_atomically


def save(
    name: str,
    rows: list[dict[str, Any]],
    environment: dict[str, Any],
    folder: Path | None = None,
    place: str = "library",
) -> Path:
    """Write results/<gpu>/<place>/<name>.json, a row a line; `harness.library` reads those of "library".
    `folder` stands for results/."""
    path = path_of(folder, name, environment, place)
    write = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    lines = ",\n  ".join(map(write, rows))
    text = f'{{"environment": {write(environment)},\n"rows": [\n  {lines}\n]}}\n'
    write_atomically(path, text.encode())
    return path


def rows_to_join(
    folder: Path | None, name: str, environment: dict[str, Any], place: str = "library"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows that `save` wrote there, which new ones may join, and the environment of both. Raises
    ValueError where they were measured in another one, or beside a peer that new ones would lack."""
    path = path_of(folder, name, environment, place)
    if not path.exists():
        return [], environment
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        was, rows, peers = dict(data["environment"]), list(data["rows"]), environment.get("peers", {})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of rows: {type(error).__name__}: {error}") from None
    lacking = [f"{peer} is not there" for peer in was.get("peers", {}) if peer not in peers]
    if differing := "; ".join(filter(None, (results.differing_in(was, environment, peers), *lacking))):
        raise ValueError(
            f"{path} was measured in another environment: {differing}. Go back to that one, or remove the "
            f"file and measure the whole suite again"
        )
    return rows, results.joined(was, environment)


def refuse(name: str, environment: dict[str, Any], folder: Path, place: str = "library") -> None:
    """Raise Usage where rows of this environment could not be added there, before they are measured."""
    with as_usage(ValueError, OSError):
        rows_to_join(folder, name, environment, place)
        results.probe(path_of(folder, name, environment, place))


def add(
    row: dict[str, Any],
    key_of: Callable[[dict[str, Any]], Hashable],
    order: Iterable[Hashable],
    name: str,
    environment: dict[str, Any],
    folder: Path,
    place: str = "library",
) -> None:
    """Put a row in the place of the one with its key, or among the others, which keep this order of keys.
    Rows that other processes add meanwhile stay. Raises ValueError as `rows_to_join`, and where the row that
    is there has the time of a peer that this one lacks."""
    with results.alone_with(path_of(folder, name, environment, place)):
        kept, joined = rows_to_join(folder, name, environment, place)
        rows = {key_of(x): x for x in kept}
        timed = rows.get(key_of(row), {}).get("us", {})
        if lost := [peer for peer in results.PEER_LABELS if peer in timed and peer not in row["us"]]:
            raise ValueError(f"the row that is there stays: it has a time of {', '.join(lost)}")
        rows[key_of(row)] = row
        save(name, [rows[key] for key in order if key in rows], joined, folder, place)


def path_of(folder: Path | None, name: str, environment: dict[str, Any], place: str) -> Path:
    """Where `save` writes."""
    return (folder or results.results_dir()) / results.gpu_folder(environment["gpu"]) / place / f"{name}.json"
