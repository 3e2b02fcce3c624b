"""What is too much to recompile in every run of the tests: some of it, other some for each commit."""

import random
import subprocess
from collections.abc import Sequence
from typing import TypeVar

from harness.results import repository

T = TypeVar("T")


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository(), capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


def sample(everything: Sequence[T], size: int) -> list[T]:
    return random.Random(commit()).sample(everything, min(size, len(everything)))
