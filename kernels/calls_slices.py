"""What a caller of k6_slices and k6_groups must know to launch them, beside what `calls` says of k6. Imports
no compiler."""

from .calls import forward_scratch, refuse_forward
from .contract import Problem, Scratch
from .device.constants import WARP, WARPGROUP
from .device.limits import BLOCK, refuse_policies, tile_dims

LEAST_STEPS = 4  # of a slice
MOST_PIECES = 64  # of a tile, or one more
ALONE = 6  # slices that a tile may be as long as, for one CTA to add its pieces
QUAD = 4  # fp32 in one 16-byte access
OCTET = 8  # queries of a head that k6_groups has beside each other
NOWHERE = 2**20  # a tile of queries behind those of any sequence
GROUP_ROWS = NOWHERE * BLOCK  # rows of a group before that
CACHED_BYTES = 24 * 2**20  # of K and V of all heads, which stay in the L2: CTAs may read any at once


def least_steps(longest: int) -> int:
    """Of a slice, of tiles of up to `longest` steps. To leave a piece and add it takes about as long as
    LEAST_STEPS."""
    return max(LEAST_STEPS, -(-longest // MOST_PIECES))


def slots_of(slices: int) -> int:
    """For how many pieces there is scratch: of so many slices, of tiles of more than ALONE pieces."""
    return slices + slices // ALONE


def sums_are_shared(longest: int, share: int, slices: int, tiles: int, slots: int) -> bool:
    """Whether all CTAs make the sums of tiles' pieces, of `tiles` of up to `longest` steps in slices of
    `share`, and not those who have tiles' ends."""
    return (longest > ALONE * share) & (slices + tiles <= slots)


def rows_of_group(queries: int, group: int) -> int:
    """How many rows of tiles the queries of a group of heads are, of k6_groups: in whole octets."""
    return (queries + OCTET - 1) // OCTET * OCTET * group


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
    rows = rows_of_group(problem.seqlen_q, problem.heads // max(1, problem.kv_heads))
    return f"takes fewer rows of a group than {GROUP_ROWS}, not {rows}" if rows >= GROUP_ROWS else None


def refuse_steps(problem: Problem) -> str | None:
    """Why k6_slices refuses a problem that k6 takes, or None: steps are counted in 32 bits."""
    steps = problem.batch * problem.heads * -(-problem.seqlen_q // BLOCK) * -(-problem.seqlen_kv // BLOCK)
    return f"takes fewer steps than {steps}" if steps >= 2**31 else None


def slices_scratch(problem: Problem, rows: int, slices: int) -> Scratch:
    """For at most so many `slices` of tiles of `rows` queries: `device.key_slices`. No two launches at once
    may share it."""
    slots = slots_of(slices)
    warpgroups, of_values = rows // BLOCK, tile_dims(problem)[1]
    quads = of_values * BLOCK // WARPGROUP // QUAD + 1  # of a thread's O; and its rows' maxima and sums
    return {
        "states": ((slots, quads, WARPGROUP * warpgroups, QUAD), "float32"),
        "left": ((slots * warpgroups * WARPGROUP // WARP + 1,), "int32"),  # the last: CTAs that have ended
        **forward_scratch(problem),
    }
