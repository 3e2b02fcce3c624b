"""Commands as a user types them, on a machine without a GPU."""

import os
import re
import shlex
import subprocess
import sys

from harness.results import repository

ROOT = repository()


def run(command: str, **environment: str) -> subprocess.CompletedProcess:
    """A shell line `[NAME=value ...] python ...` from the repository's root, with no GPU in sight."""
    words = shlex.split(command)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    env |= {"CUDA_VISIBLE_DEVICES": ""} | environment
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, env[name] = words.pop(0).partition("=")
    assert words[0] == "python"
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400
    )
