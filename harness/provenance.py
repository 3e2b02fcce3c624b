"""What determines the machine code of a stage, as one digest: its sources, its options, its compiler."""

import ast
import hashlib
import json
from pathlib import Path

from harness.diff import code_lines
from hopper_attention import cache
from hopper_attention.kernels import ladder


def sources_of(file: str) -> list[Path]:
    """A kernel file and every file of the project that it imports, directly or not; paths in `kernels/`."""
    found: list[Path] = []
    waiting = [cache.KERNELS / f"{file}.py"]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1]
                # `from .a import b` names a file a.py, or, of a folder a, one for each name
                named = folder.joinpath(*(node.module or "").split("."))
                modules = [named / x.name for x in node.names] if named.is_dir() else [named]
                waiting += [module.with_suffix(".py") for module in modules]
    return sorted(found)


def digest(stage_id: str) -> str:
    """The sha256 of a stage's code, without comments and docstrings, its options and the compiler's version.

    While it stays, so does the machine code: the compiler is deterministic.
    """
    stage, _ = ladder.load(stage_id)
    code = {
        str(path.relative_to(cache.KERNELS)): code_lines(path.read_text(encoding="utf-8"))
        for path in sources_of(ladder.FILES[stage_id])
    }
    options = repr(sorted(stage.options.items()))
    everything = {"code": code, "options": options, "compiler": cache.compiler()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()
