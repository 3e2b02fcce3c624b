"""In what way the forward pass goes through a problem: in whole tiles of queries, of how many `division`
says; in equal slices of all their steps (k6_slices); or, few queries, in equal slices of all keys, which are
read once for all heads of a group (decode). Imports no compiler.
"""

import math
from typing import NamedTuple

from . import few_queries
from .kernels.calls_decode import rows_of as rows_of_group
from .kernels.calls_slices import CACHED_BYTES, refuse_steps
from .kernels.contract import Problem
from .kernels.device.constants import SMS
from .kernels.device.limits import BLOCK, L2_BYTES, tile_dim
from .kernels.division import CLEARLY, TILES, Tiles, forward_us, keys_seen, rows_of

# What a slice of the steps costs beside its steps and tiles (k6_slices), by columns and rows: that a piece is
# left, and another is added to its own; and each further piece that is added. notes/k6_slices.md.
JOIN = {
    64: {256: 3.0, 64: 4.0},
    96: {192: 10.0, 64: 2.5},
    128: {192: 10.0, 64: 2.5},
    192: {128: 8.0, 64: 8.0},
    256: {128: 8.0, 64: 4.0},
}
ADD = 1.0
FEW_SLICED = 5  # tiles for each SM, up to which slices were measured
READ_AGAIN = 0.75  # of what slices read, where L2 does not hold all keys: the rest another has just read
READS_SLOWLY = 1.13  # than other tiles a whole one of BLOCK rows, whose loads are fewer


class Way(NamedTuple):
    """How the forward pass goes through a problem."""

    rows: int  # queries of a tile; if grouped, of all heads of a group
    sliced: bool = False  # tiles in equal slices of all steps: k6_slices
    grouped: bool = False  # heads of a group in a tile, keys in equal slices: decode


def ways_of(problem: Problem) -> list[Way]:
    """Every way to compute the forward pass of a problem without policies."""
    ways = [Way(rows) for rows in TILES[tile_dim(problem)]]
    if not (problem.top_left or refuse_steps(problem)):
        ways += [Way(rows, sliced=True) for rows in JOIN[tile_dim(problem)]]
    return ways + [Way(rows_of_group(problem), grouped=True)] * few_queries.takes(problem)


def way_of(problem: Problem, sms: int = SMS, tiles: Tiles = TILES) -> Way:
    """The way with the least time. Packed sequences count as equally long."""
    best = Way(rows_of(problem, sms, tiles))
    if problem.policies:
        return best
    tiles_of = lambda way: problem.batch * problem.heads * -(-problem.seqlen_q // way.rows)
    measured = lambda way: way.grouped or (way.sliced and tiles_of(way) <= FEW_SLICED * sms)
    us = {way: way_us(problem, way, sms, tiles) for way in ways_of(problem) if measured(way)}
    other = min(us, key=us.get, default=best)
    return other if us and us[other] < CLEARLY * way_us(problem, best, sms, tiles) else best


def way_us(problem: Problem, way: Way, sms: int = SMS, tiles: Tiles = TILES) -> float:
    """The time that a way is expected to take, in µs of the GPU whose costs `tiles` are."""
    if way.grouped:
        return few_queries.decode_us(problem, sms)
    us = (slices_us if way.sliced else forward_us)(problem, way.rows, sms, tiles)
    return max(us, memory_us(problem, way, tiles))


def memory_us(problem: Problem, way: Way, tiles: Tiles = TILES) -> float:
    """The time of a forward pass that waits for its keys: tiles of a group read them together, slices each
    for itself."""
    kv_bytes, tile = few_queries.kv_bytes(problem), tiles[tile_dim(problem)][way.rows]
    us, again = tile.call + tile.tile, READS_SLOWLY if way.rows == BLOCK else 1.0
    if way.sliced:
        again = 1.0
        us += JOIN[tile_dim(problem)][way.rows]
        if kv_bytes > L2_BYTES:
            readers = problem.heads // max(1, problem.kv_heads) * -(-problem.seqlen_q // way.rows)
            again = max(1.0, READ_AGAIN * readers)
    return us + kv_bytes * again / few_queries.MEMORY_BYTES


def slices_us(problem: Problem, rows: int, sms: int = SMS, tiles: Tiles = TILES) -> float:
    """The time of a forward pass in equal slices of the steps of such tiles."""
    columns = tile_dim(problem)
    tile = tiles[columns][rows]
    steps = [math.ceil(keys / tile.keys) for keys in keys_seen(problem, rows)]
    slices = slices_of(problem, steps, sms, tile.ctas)
    beside = min(tile.ctas, slices.count / sms)  # CTAs that an SM has at once
    step = max(tile.alone, tile.step * beside)
    of_tile = slices.steps * len(steps) / sum(steps)
    pieces = math.ceil(max(steps) / slices.share) if slices.divided else 1
    further = max(0, pieces - 2)
    return tile.call + slices.steps * step + tile.tile * (1 + of_tile) + JOIN[columns][rows] + ADD * further


class Slices(NamedTuple):
    """Equal slices of all steps of a forward pass: the kernel has the same numbers (`device.key_slices`)."""

    divided: int  # steps that are
    share: int  # of them, of a slice
    whole: int  # tiles behind them, of which each SM has as many
    count: int  # of slices, and of the CTAs
    steps: int  # of the busiest of them


def slices_of(problem: Problem, steps: list[int], sms: int, ctas: int) -> Slices:
    """For the steps of each tile of a head, on a GPU with so many SMs that have `ctas` CTAs each."""
    heads, longest, whole = problem.batch * problem.heads, max(steps), 0
    key_rows = problem.batch * problem.kv_heads * problem.seqlen_kv
    if not problem.causal and ctas == 1 and key_rows > CACHED_BYTES // (4 * tile_dim(problem)):
        whole = heads * len(steps) // sms * sms
    divided = heads * sum(steps) - whole * longest
    share = max(-(-divided // (sms * ctas)), math.isqrt(longest - 1) + 1)
    return Slices(divided, share, whole, -(-divided // share), share + whole // sms * longest)
