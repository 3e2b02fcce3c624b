"""What is too much to recompile in every run of the tests: some of it, other some for each commit.

Why some suffices: a stage whose record is current (`harness.records`) compiles to what passed on a GPU and
was inspected before, since the digest of its sources, options and compiler is the same. Where it is not
current, all is recompiled.
"""

import functools
import random
import subprocess
from collections.abc import Sequence
from typing import TypeVar

from harness import records
from harness.results import repository
from hopper_attention.kernels.contract import Problem

T = TypeVar("T")


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository(), capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


def sample(everything: Sequence[T], size: int, of: str = "") -> list[T]:
    """The same for everyone at one commit; `of` tells samples of the like apart."""
    return random.Random(commit() + of).sample(everything, min(size, len(everything)))


@functools.cache
def recorded(stage_id: str) -> dict[Problem, str]:
    """The identity of each kernel of a stage by its current record; nothing where that is not current."""
    current = (x for x in records.committed()[stage_id] if records.stale(x) is None)
    return next(({x.kernel: x.cubin_sha256 for x in record.kernels} for record in current), {})


def some(stage_id: str, everything: Sequence[T], size: int = 1) -> list[T]:
    """A sample of what there is to inspect of a stage, or all of it."""
    return sample(everything, size, stage_id) if recorded(stage_id) else list(everything)
