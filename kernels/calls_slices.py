"""What a caller of k6_slices and k6_groups must know to launch them, beside what `calls` says of k6. Imports
no compiler."""

import math

from .calls import forward_scratch, refuse_forward
from .contract import Problem, Scratch
from .device.constants import WARP, WARPGROUP
from .device.limits import BLOCK, refuse_policies, tile_dims

LEAST_STEPS = 4  # of a slice
ALONE = 8  # pieces of a tile up to which each is added to the last
QUAD = 4  # fp32 in one 16-byte access
OCTET = 8  # queries of a head that k6_groups has beside each other
NOWHERE = 2**20  # a tile of queries behind those of any sequence
GROUP_ROWS = NOWHERE * BLOCK  # rows of a group before that
CACHED_BYTES = 24 * 2**20  # of K and V of all heads, which stay in the L2: CTAs may read any at once


def least_steps(longest: int) -> int:
    """Of a slice, of tiles of up to `longest` steps: of ALONE² steps at most a tile has ALONE pieces at most,
    also where a slice begins within it; a longer one as many as there are pieces in ALONE sums, or one more.
    What it takes to leave a piece and add it is about as long as LEAST_STEPS."""
    least = -(-longest // ALONE)
    if longest > ALONE**2:
        least = -(-longest // ALONE**2)
    elif longest % least:
        least = -(-(longest - 1) // (ALONE - 1))
    return max(LEAST_STEPS, least)


def together_of(pieces: int) -> int:
    """How many pieces of a tile that has so many are added to one sum, before the sums are."""
    return ALONE if pieces <= ALONE else math.isqrt(pieces - 1) + 1


def refuse_slices(problem: Problem) -> str | None:
    """Why k6_slices refuses a problem, or None."""
    if reason := refuse_forward(problem) or refuse_policies(problem):
        return reason
    if problem.top_left and problem.seqlen_q != problem.seqlen_kv:
        return "aligns a causal mask at the bottom right"
    return refuse_steps(problem)


def refuse_groups(problem: Problem) -> str | None:
    """Why k6_groups refuses a problem, or None."""
    if reason := refuse_slices(problem):
        return reason
    rows = -(-problem.seqlen_q // OCTET) * OCTET * (problem.heads // max(1, problem.kv_heads))
    return f"takes fewer rows of a group than {GROUP_ROWS}, not {rows}" if rows >= GROUP_ROWS else None


def refuse_steps(problem: Problem) -> str | None:
    """Why k6_slices refuses a problem that k6 takes, or None: steps are counted in 32 bits."""
    steps = problem.batch * problem.heads * -(-problem.seqlen_q // BLOCK) * -(-problem.seqlen_kv // BLOCK)
    return f"takes fewer steps than {steps}" if steps >= 2**31 else None


def slices_scratch(problem: Problem, rows: int, slices: int) -> Scratch:
    """For at most so many `slices` of tiles of `rows` queries: `device.key_slices`. No two launches at once
    may share it."""
    warpgroups, of_values = rows // BLOCK, tile_dims(problem)[1]
    quads = of_values * BLOCK // WARPGROUP // QUAD + 1  # of a thread's O; and its rows' maxima and sums
    return {
        "states": ((slices, quads, WARPGROUP * warpgroups, QUAD), "float32"),
        "left": ((slices * warpgroups * WARPGROUP // WARP,), "int32"),
        **forward_scratch(problem),
    }
