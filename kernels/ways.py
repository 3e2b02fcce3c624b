"""In what way the forward pass goes through a problem: in whole tiles of queries, of how many `division`
says, or in equal slices of all their steps (k6_slices). Imports no compiler.
"""

import math
from typing import NamedTuple

from .calls_slices import KEPT_BYTES, refuse_steps
from .contract import Problem
from .device.constants import SMS
from .device.limits import tile_dim
from .division import CLEARLY, TILES, Tiles, _keys_seen, forward_us, rows_of

# What a slice of the steps costs beside its steps and tiles (k6_slices), by columns and rows: that a piece is
# left, and another is added to its own; and each further piece that is added. notes/k6_slices.md.
JOIN = {
    64: {256: 3.0, 64: 4.0},
    96: {192: 10.0, 64: 2.5},
    128: {192: 10.0, 64: 2.5},
    192: {128: 8.0, 64: 8.0},
    256: {128: 8.0, 64: 8.0},
}
ADD = 1.0
FEW_SLICED = 5  # tiles for each SM, up to which slices were measured


class Way(NamedTuple):
    """How the forward pass goes through a problem."""

    rows: int  # queries of a tile
    sliced: bool = False  # tiles in equal slices of all steps: k6_slices


def ways_of(problem: Problem) -> list[Way]:
    """Every way to compute the forward pass of a problem without policies."""
    whole = [Way(rows) for rows in TILES[tile_dim(problem)]]
    return whole + ([] if problem.top_left else [Way(rows, True) for rows in JOIN[tile_dim(problem)]])


def way_of(problem: Problem, sms: int = SMS, tiles: Tiles = TILES) -> Way:
    """The way with the least time. Packed sequences count as equally long."""
    whole, us = rows_of(problem, sms, tiles), {}
    if not (problem.policies or problem.top_left or refuse_steps(problem)):
        heads = problem.batch * problem.heads
        few = [x for x in JOIN[tile_dim(problem)] if heads * -(-problem.seqlen_q // x) <= FEW_SLICED * sms]
        us = {rows: slices_us(problem, rows, sms, tiles) for rows in few}
    best = min(us, key=us.get, default=whole)
    sliced = us and us[best] < CLEARLY * forward_us(problem, whole, sms, tiles)
    return Way(best, True) if sliced else Way(whole)


def way_us(problem: Problem, way: Way, sms: int = SMS, tiles: Tiles = TILES) -> float:
    """The time that a way is expected to take, in µs of the GPU whose costs `tiles` are."""
    return (slices_us if way.sliced else forward_us)(problem, way.rows, sms, tiles)


def slices_us(problem: Problem, rows: int, sms: int = SMS, tiles: Tiles = TILES) -> float:
    """The time of a forward pass in equal slices of the steps of such tiles."""
    columns = tile_dim(problem)
    tile = tiles[columns][rows]
    steps = [math.ceil(keys / tile.keys) for keys in _keys_seen(problem, rows)]
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
    if not problem.causal and ctas == 1 and key_rows > KEPT_BYTES // (4 * tile_dim(problem)):
        whole = heads * len(steps) // sms * sms
    divided = heads * sum(steps) - whole * longest
    share = max(-(-divided // (sms * ctas)), math.isqrt(longest - 1) + 1)
    return Slices(divided, share, whole, -(-divided // share), share + whole // sms * longest)
