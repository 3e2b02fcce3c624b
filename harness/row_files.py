"""Files of rows that are not a stage's: what the library's calls and the suites of models, packed batches and
windows measured, each with the environment of all its rows."""

import json
from pathlib import Path
from typing import Any

from harness import results
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
    data = json.loads(path.read_text(encoding="utf-8"))
    was, peers = data["environment"], environment.get("peers", {})
    lacking = [f"{peer} is not there" for peer in was.get("peers", {}) if peer not in peers]
    if differing := "; ".join(filter(None, (results.differing_in(was, environment, peers), *lacking))):
        raise ValueError(
            f"{path} was measured in another environment: {differing}. Go back to that one, or remove the "
            f"file and measure the whole suite again"
        )
    return data["rows"], results.joined(was, environment)


def path_of(folder: Path | None, name: str, environment: dict[str, Any], place: str) -> Path:
    """Where `save` writes."""
    return (folder or results.results_dir()) / results.gpu_folder(environment["gpu"]) / place / f"{name}.json"
