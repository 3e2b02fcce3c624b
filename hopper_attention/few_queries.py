"""Forward problems of a few queries as decode computes them: K and V are the cache, and all their keys count.
Which those are, in what kernel, and for how long. Imports no compiler.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from .kernels import calls_decode
from .kernels.contract import DTYPES, Problem
from .kernels.device.constants import SMS
from .kernels.device.limits import HEAD_DIMS, has_own_kernel
from .launch import least_of

QUERIES = 128  # up to which it was measured

# What it costs in µs, besides bringing keys from memory: a call, by head_dim and rows; a chunk of keys where
# 128 rows take longer than memory; a piece of a sequence that its last CTA adds, by bytes. notes/decode.md.
CALL = {
    64: {8: 8.3, 16: 9.0, 32: 10.5, 64: 15.0, 128: 20.0},
    128: {8: 9.0, 16: 9.7, 32: 12.5, 64: 21.5, 128: 27.0},
    256: {8: 11.0, 16: 12.5, 32: 18.0, 64: 26.5, 128: 45.0},
}
CHUNK = {8: 0.0, 16: 0.0, 32: 0.0, 64: 0.8, 128: 1.55}
PIECE_BYTES = 1.0e5  # in a µs
PIECES = 16  # of a sequence, up to which nothing was seen of them
MEMORY_BYTES = 4.1e6  # of K and V that come from memory in a µs


@functools.lru_cache(maxsize=16)  # asked for several times in a row, and each step of a model is another
def as_decode(problem: Problem) -> Problem:
    """The problem as decode's `Problem`."""
    causal = problem.causal and problem.seqlen_q > 1  # one query sees every key in any case
    return problem.with_(direction="decode", causal=causal, scaled=False)


def takes(problem: Problem) -> bool:
    """Whether it computes a forward problem."""
    few = problem.direction == "fwd" and 0 < problem.seqlen_q <= min(QUERIES, problem.seqlen_kv - 1)
    if not few or problem.top_left or not problem.batch * problem.heads:
        return False
    return has_own_kernel(problem) and calls_decode.refuse_decode(as_decode(problem)) is None


def kernel_of(problem: Problem) -> tuple[Problem, dict[str, Any]]:
    """The kernel that takes a forward problem, as `launch.kernel_for` takes it."""
    asked = as_decode(problem)
    return least_of(asked), calls_decode.options_of(asked, False, 0, False, False, False, False)


def kernels() -> Iterator[tuple[Problem, dict[str, Any]]]:
    """Everything that a forward problem can have compiled, as `kernel_of` gives it: a closed list."""
    for head_dim, dtype, rows in itertools.product(HEAD_DIMS, DTYPES, calls_decode.ROWS):
        for queries, causal in ((1, False), (2, True)):
            for batch in (1, calls_decode.FEW + 1) if rows == calls_decode.ROWS[0] else (1,):
                shape = batch, rows // queries, 1, queries, 2 * queries
                yield kernel_of(Problem(*shape, head_dim, causal, dtype))


def decode_us(problem: Problem, sms: int = SMS) -> float:
    """The time that it is expected to take, in µs on an H200."""
    asked = as_decode(problem)
    rows, cluster = calls_decode.rows_of(asked), calls_decode.cluster_of(asked)
    columns = asked.batch * calls_decode.columns_of(asked)
    chunks = math.ceil(asked.seqlen_kv / calls_decode.chunk_of(asked.head_dim, False))
    share = math.ceil(columns * chunks / (sms // cluster))  # of a CTA, or cluster
    pieces = math.ceil(chunks / share)
    adding = max(0, pieces - PIECES) * rows * asked.head_dim * 4 / PIECE_BYTES if cluster == 1 else 0.0
    memory = kv_bytes(asked) / MEMORY_BYTES
    return CALL[asked.head_dim][rows] + max(memory, share * CHUNK[rows]) + adding


def kv_bytes(problem: Problem) -> int:
    """Of K and V."""
    return problem.batch * problem.kv_heads * problem.seqlen_kv * sum(problem.dims) * 2
