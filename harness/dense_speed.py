"""What packed sequences would take at the speed of dense batches of their lengths: by that packing is judged.

Equal sequences are one batch. Of others each counts as long as a sequence of its length takes in a batch of
as many tokens as all of them have. Few lengths are timed each; of many the ends are, and the powers of two
between them, of whole tiles, where a dense batch is fastest. Between these log time follows log length.
"""

from collections.abc import Mapping

import numpy as np

from hopper_attention.kernels.contract import Problem

MOST = 4  # lengths that are timed each


def batches(problem: Problem) -> dict[int, Problem]:
    """The dense batches to time, by their length: none of a problem that is not packed, has a window, whose
    tiles a dense batch counts otherwise, or a sequence with other keys than queries."""
    lengths = sorted({pair for pair in problem.sequences or () if pair != (0, 0)})
    if not lengths or problem.window or any(queries != keys for queries, keys in lengths):
        return {}
    grid = [queries for queries, _ in lengths]
    if len(grid) > MOST:
        shortest, longest = grid[0], grid[-1]
        grid = sorted({shortest, longest, *(2**i for i in range(1, 31) if shortest < 2**i < longest)})
    tokens = sum(queries for queries, _ in problem.sequences)
    plain = problem.with_(sequences=None, scaled=False)
    return {n: plain.with_(batch=max(1, tokens // n), seqlen_q=n, seqlen_kv=n) for n in grid}


def together(problem: Problem, each: Mapping[int, float]) -> float:
    """The time of all sequences, where one of a length takes `each` of it."""
    grid = sorted(each)
    logs = np.log(grid), np.log([each[n] for n in grid])
    lengths = [queries for queries, _ in problem.sequences if queries]
    return float(np.exp(np.interp(np.log(lengths), *logs)).sum())
