"""What a caller of k6_slices must know to launch it, beside what `calls` says of k6. Imports no compiler."""

from .calls import forward_scratch
from .contract import Problem, Scratch
from .device.constants import WARP, WARPGROUP
from .device.limits import BLOCK, tile_dims

QUAD = 4  # fp32 in one 16-byte access
CACHED_BYTES = 24 * 2**20  # of K and V of all heads, which stay in the L2: CTAs may read any at once


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
