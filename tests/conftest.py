"""Settings every test shares."""

import os

# One thread a worker, subprocesses included: the workers already take the cores, and torch's threads spin
# while they wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What bench.py reads besides its command line; a test that wants one sets it.
for name in ("CHECK", "SEQLEN", "HEADDIM", "CAUSAL"):
    os.environ.pop(name, None)
