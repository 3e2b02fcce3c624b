"""How records of what passed on a GPU are kept: JSON with a kernel a line, which is read whole or not at
all."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from hopper_attention.cache import write_atomically

SCHEMA = 1
T = TypeVar("T")


def write(path: Path, fields: dict[str, Any], kernels: Iterable[dict[str, Any]]) -> Path:
    """Write a record of these fields and kernels."""
    text = lambda x: json.dumps(x, ensure_ascii=False)
    head = ",\n".join(f"{text(key)}: {text(x)}" for key, x in ({"schema": SCHEMA} | fields).items())
    lines = ",\n  ".join(map(text, kernels))
    write_atomically(path, f'{{\n{head},\n"kernels": [\n  {lines}\n]\n}}\n'.encode())
    return path


def read(path: Path, record_of: Callable[[dict[str, Any]], T], missing: Callable[[T], str | None]) -> T:
    """The record that `record_of` makes of what was written, without the schema. Raises ValueError that names
    the file and what is wrong with it, or `missing` in it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != SCHEMA:
            raise ValueError(f"not of schema {SCHEMA}")
        record = record_of(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error!r}") from None
    if gap := missing(record):
        raise ValueError(f"{path}: lacks {gap}")
    return record
