"""What kernels refuse, and the scratch of a backward pass: plain integers. Imports no compiler."""

import math

from ..contract import Problem, Scratch
from .constants import GRID_YZ_MAX, ROWS_MAX, VECTOR

HEAD_DIMS = (64, 128, 256)  # of the production kernels; compiled in
# Columns of a tile, for these head dims and all others: `tile_dims`. A kernel for the others is compiled once
# for a tile, and told the head_dim by the tensors.
TILE_DIMS = {"fwd": (64, 96, 128, 192, 256), "bwd": (64, 96, 128, 192, 256)}
NARROW_VALUES = (192, 128)  # columns of Q and K, and of V and O, in tiles of their own
BLOCK = 64  # query rows of a block of scratch, and columns of a column block: M and N of dQ's product
# By `tile_dim`, of bwd4: queries in a tile, to which scratch is padded; keys in one; bytes of a query's
# column in Q and dO, up to head_dim 128 in dQ_sum too.
TILE_Q = {64: 128, 96: 64, 128: 64, 192: 128, 256: 128}
TILE_KV = {64: 128, 96: 128, 128: 128, 192: 64, 256: 64}
COLUMN_BYTES = {64: 8, 96: 8, 128: 8, 192: 4, 256: 4}
SECTION_BYTES = 4 * 2**20  # of what is read and added to: heads that are worked on together and stay in L2
FINAL_SECTIONS = 4  # of them, at the end, worked on as one: what is fetched last is then short
L2_BYTES = 48 * 2**20
ROTATED_BYTES = 32 * 2**20  # of a head's queries, with both sums of dQ: what CTAs read at many places at once
FORWARD_ROWS = {64: 256, 96: 192, 128: 192, 192: 128, 256: 128}  # queries in a tile of k6, by `tile_dim`
FOLDED_WORDS = 4  # of 32 bits, a query's LSE and D in statistics that the tensor cores subtract (`folds`)
UNBOUNDED = 2**30  # keys that a window reaches back or ahead if it has no bound there
FINAL_LISTED = 64  # tiles of a head at most that are listed one by one, at the end
LISTED = 8  # numbers that `tile_list.ListTiles` says of a tile
SECTION_BYTES_MAX = 2**31 - 1  # what `key_tiles.Tiles.section` can count


def bounds(window: tuple[int, int]) -> tuple[int, int]:
    """(left, right) as kernels take them: −1, no bound, is one further away than any key."""
    return tuple(UNBOUNDED if bound < 0 else min(bound, UNBOUNDED) for bound in window)


def refuse_heads_on_grid(problem: Problem) -> str | None:
    """Why a stage whose grid is (row blocks, heads, batch) refuses `problem`, or None."""
    if max(problem.batch, problem.heads) > GRID_YZ_MAX:
        return f"takes at most {GRID_YZ_MAX} batches and heads: they are grid dimensions y and z"
    return None


COMPUTES = {
    "fwd": "forward pass",
    "fp8": "forward pass in FP8",
    "fp8_rows": "forward pass in FP8, of rows",
    "fp8_cast": "forward pass in FP8, of 16 bits",
    "bwd": "backward pass",
}


def has_own_kernel(problem: Problem) -> bool:
    """Whether the problem's head_dim is compiled into a kernel of its own. That of another has tiles of
    `tile_dims` and is told the head_dim and the scale. What of a tile lies past the head_dim the TMA loads as
    zeros, which add nothing, and does not store."""
    return is_own(*problem.dims)


def is_own(head_dim: int, value_dim: int) -> bool:
    return head_dim == value_dim and head_dim in HEAD_DIMS


def tile_dims(problem: Problem) -> tuple[int, int]:
    """Columns of Q and K, and of V and O, in the tiles of the production kernel for a 16-bit problem."""
    of_keys, of_values = problem.dims
    columns = min(x for x in TILE_DIMS[problem.direction] if max(of_keys, of_values) <= x)
    if columns == NARROW_VALUES[0] and of_values <= NARROW_VALUES[1]:
        return NARROW_VALUES
    return columns, columns


def tile_dim(problem: Problem) -> int:
    """The first of `tile_dims`: what configurations are chosen by."""
    return tile_dims(problem)[0]


def compiled_dims(problem: Problem) -> dict[str, object]:
    """What stands in a problem for every other of the same kernel."""
    if has_own_kernel(problem):
        return {}
    return _one_of(*tile_dims(problem))


def other_dims(direction: str) -> list[dict[str, object]]:
    """`compiled_dims` of all head dims without a kernel of their own: a closed list."""
    equal = [_one_of(columns, columns) for columns in TILE_DIMS.get(direction, ())]
    return [*equal, _one_of(*NARROW_VALUES)] if direction in TILE_DIMS else equal


def _one_of(columns: int, of_values: int) -> dict[str, object]:
    head_dim = columns - VECTOR if is_own(columns, of_values) else columns
    return {"head_dim": head_dim, "value_dim": of_values if of_values < columns else None, "scaled": True}


def _refuse_dims(problem: Problem) -> str | None:
    """Why kernels for every multiple of 8, or those of other directions for HEAD_DIMS, refuse `problem`."""
    if problem.direction not in TILE_DIMS:
        if problem.head_dim not in HEAD_DIMS:
            return f"takes head_dim 64, 128 or 256, not {problem.head_dim}"
        return _refuse_other_values(problem)
    for name, columns in zip(("head_dim", "value_dim"), problem.dims):
        if columns % VECTOR or not 0 < columns <= HEAD_DIMS[-1]:
            return f"takes {name} in multiples of {VECTOR} up to {HEAD_DIMS[-1]}, not {columns}"
    if problem.policies and not has_own_kernel(problem):  # which nobody has run
        with_what = ", ".join(problem.policies)
        return f"takes head_dim 64, 128 or 256 with {with_what}, not {':'.join(map(str, problem.dims))}"
    return None


def refuse_unless_gqa(problem: Problem, direction: str = "fwd") -> str | None:
    """Why a stage with grouped heads, unequal lengths, both 16-bit types and many head dims refuses
    `problem`, or None."""
    if problem.direction != direction:
        return f"computes the {COMPUTES[direction]}, not {problem.direction!r}"
    if reason := _refuse_dims(problem):
        return reason
    if direction != "bwd" and problem.seqlen_q > 0 and problem.seqlen_kv == 0:
        return "takes at least one key"
    no_pair = (problem.seqlen_q == 0) != (problem.seqlen_kv == 0)
    if direction == "bwd" and no_pair and problem.sequences is None:
        return "takes at least one query and one key"
    if max(problem.seqlen_q, problem.seqlen_kv) * problem.batch * problem.heads > ROWS_MAX:
        return f"takes at most {ROWS_MAX} rows (batch·heads·seqlen), its row index being 32-bit"
    return None


POLICIES = {
    "window": "a window",
    "softcap": "a soft cap",
    "sink": "a sink",
    "sequences": "packed sequences",
}


def refuse_policies(problem: Problem, takes: tuple[str, ...] = ()) -> str | None:
    """Why a stage refuses a window, a soft cap, a sink or packed sequences, but those it takes, or None."""
    if refused := [POLICIES[name] for name in problem.policies if name not in takes]:
        return f"does not take {' or '.join(refused)}"
    return None


def refuse_options(problem: Problem) -> str | None:
    """Why a stage without options of the softmax refuses `problem`, or None."""
    if reason := refuse_policies(problem):
        return reason
    if problem.lse_grad:
        return "takes no gradient of the LSE"
    if problem.scaled:
        return "scales scores by 1/√head_dim, and takes no other softmax_scale"
    return _refuse_other_values(problem)


def _refuse_other_values(problem: Problem) -> str | None:
    return None if problem.value_dim is None else f"takes values of head_dim, not of {problem.value_dim}"


def refuse_long_heads(problem: Problem, column_bytes: int) -> str | None:
    """Why `key_tiles.Tiles.section` cannot count the bytes of a head, of which a query's column takes
    `column_bytes`, or None."""
    head_bytes = column_bytes * tile_dim(problem) * problem.seqlen_q
    head_bytes *= problem.heads // max(1, problem.kv_heads)
    masked = problem.causal or problem.window is not None
    if masked and problem.sequences is None and head_bytes > SECTION_BYTES_MAX:
        return (
            f"takes at most {SECTION_BYTES_MAX} bytes of a key head's queries (Q, dO, sums) under a "
            f"causal mask, not {head_bytes}: the order of tiles is computed from them, in 32 bits"
        )
    return None


def column_blocks(columns: int) -> int:
    """Blocks of scratch beside each other that so many columns take."""
    return math.ceil(columns / BLOCK)


def listed_tiles(total: int, sequences: int, rows: int) -> int:
    """How many tiles of `rows` rows so many sequences have at most, that together have `total` rows."""
    return total // rows + sequences


def list_shape(total: int, sequences: int, rows: int) -> tuple[int, int]:
    """Of the list that `tile_list.ListTiles` writes."""
    return 1 + listed_tiles(total, sequences, rows), LISTED


def folds(columns: int, capped: bool) -> bool:
    """Whether LSE and D are folded into bwd4's products (`folded`) in tiles of so many columns. Not where a
    soft cap comes between scores and LSE; of 64 columns registers do not suffice, of 96 nobody has tried."""
    return columns == 128 and not capped


def stats_shape(folded: bool) -> tuple[int, int]:
    """Of a block of 64 queries, in fp32: `backward_ends`, or `folded`."""
    return (BLOCK, FOLDED_WORDS) if folded else (2, BLOCK)


def scratch_shapes(problem: Problem, tile_q: int, sums: int = 1, folded: bool = False) -> Scratch:
    """stats and dQ_sum (`backward_ends`, `folded`) for kernels with tiles of up to `tile_q` queries and so
    many sums of dQ."""
    tiles = math.ceil(problem.seqlen_q / tile_q)
    if problem.sequences is not None:
        tiles = listed_tiles(problem.seqlen_q, len(problem.sequences), tile_q)
    blocks = tiles * tile_q // BLOCK
    heads, columns = problem.batch * problem.heads, column_blocks(tile_dim(problem))
    return {
        "stats": ((heads, blocks, *stats_shape(folded)), "float32"),
        "dQ_sum": ((heads * sums, blocks, columns, BLOCK * BLOCK), "float32"),
    }


def sums_of_dq(deterministic: bool, hides: bool) -> int:
    """How many sums of dQ bwd4 has. Deterministic, every other tile of keys adds to one of its own, which
    halves the chain of those that wait for each other. (With a mask it cost more in L2 than it saved.)"""
    return 2 if deterministic and not hides else 1
