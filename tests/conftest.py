"""Settings every test shares."""

import atexit
import os
import shutil
import tempfile

import pytest

# One thread a worker, subprocesses included: the workers already take the cores, and torch's threads spin
# while they wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What bench.py reads besides its command line; a test that wants one sets it.
for name in ("CHECK", "SEQLEN", "HEADDIM", "CAUSAL"):
    os.environ.pop(name, None)
# A cache of compiled kernels for this run alone: what the tests look at was compiled by them, once, whichever
# worker or command of theirs comes first. Who names a folder has filled it (on a GPU machine, `precompile`).
if "PYTEST_XDIST_WORKER" not in os.environ and "HOPPER_ATTENTION_CACHE" not in os.environ:
    folder = tempfile.mkdtemp(prefix="hopper_attention_")
    os.environ["HOPPER_ATTENTION_CACHE"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `gpu` runs on a Hopper GPU alone."""
    from harness.inputs import hopper_gpu  # torch, when the threads are set

    if not hopper_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no Hopper GPU here: no kernel can be executed"))
