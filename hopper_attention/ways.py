"""In what way the forward pass goes through a problem: in whole tiles of queries, of how many `division`
says; in equal slices of all their steps (k6_slices), also of tiles with all heads of a group (k6_groups); or,
few queries, in equal slices of all keys by the kernel of decoding. Imports no compiler.
"""

import math
from bisect import bisect
from enum import Enum, IntEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from . import few_queries
from .kernels.calls_decode import rows_of as decode_rows
from .kernels.calls_slices import (
    CACHED_BYTES,
    OCTET,
    least_steps,
    refuse_groups,
    refuse_slices,
    rows_of_group,
    slots_of,
    sums_are_shared,
)
from .kernels.contract import Problem
from .kernels.device.constants import SMS
from .kernels.device.limits import BLOCK, L2_BYTES, tile_dim
from .kernels.division import CLEARLY, FEW_ROUNDS, TILES, Tiles, as_batch, forward_us, keys_seen, rows_of


class Kind(Enum):
    """How a way goes through a problem."""

    TILES = "whole tiles of queries"  # k6, k6_rows
    SLICES = "tiles in equal slices of all steps"  # k6_slices
    GROUPS = "tiles of all heads of a group, in equal slices of all steps"  # k6_groups
    DECODE = "all heads of a group at once, in equal slices of all keys"  # decode


# What a slice of the steps costs beside its steps and tiles, by columns and rows: that a piece is left, and
# another is added to its own. notes/k6_slices.md.
JOIN = {
    Kind.SLICES: {
        64: {256: 4.0, 192: 1.6, 64: 4.9},
        96: {192: 4.5, 64: 3.3},
        128: {192: 4.5, 64: 3.3},
        192: {128: 8.0, 64: 8.0},
        256: {128: 4.0, 64: 1.4},
    },
    Kind.GROUPS: {
        64: {128: 2.6, 64: 9.6},
        96: {128: 4.5, 64: 5.6},
        128: {128: 4.5, 64: 5.6},
        192: {128: 8.0, 64: 9.0},
        256: {128: 11.2, 64: 5.8},
    },
}
ADD, ADD_BYTES = 0.1, 1e5  # of a further piece, and its bytes in a µs
SHARED, SHARED_PIECE = 3.0, 0.05  # of sums that all CTAs make, and of each piece
# Up to so many tiles for each SM slices are as fast as expected. Of more they are taken of full masks alone,
# in the kernel's own tiles, where they are expected to take less than this of whole tiles' time.
FEW_SLICED, MORE_CLEARLY = 5, 0.955
# Of what slices read, where L2 does not hold all keys: the rest another has just read.
READ_AGAIN = {Kind.SLICES: 0.75, Kind.GROUPS: 0.55}
# Packed sequences are equally long if each counted as the longest gives no more than AT_MOST times the rows
# that there are: others are empty tiles. And if those are no more than AT_LEAST times what it gives.
AT_LEAST, AT_MOST = 2.0, 1.1
# So long may the sequence be to which the mean query belongs for tiles of BLOCK queries to be the fastest, if
# an SM has several of them at once: in any case, and under a mask (notes/k6_rows.md, "Which height").
SHORT_MOST, MASKED_MOST = 700, 1100
READS_SLOWLY = 1.2  # than other tiles a whole one of BLOCK rows, whose loads are fewer


class Way(NamedTuple):
    """How the forward pass goes through a problem."""

    rows: int  # of a tile: queries of a head, or of all heads of a group
    kind: Kind = Kind.TILES


class Lengths(IntEnum):
    """What is known of packed sequences' lengths beside their mean."""

    ANY = 0  # nothing, or that many queries may be those of long ones
    EQUAL = 1
    SHORT_IF_MASKED = 2
    SHORT = 3
    TWO_BLOCKS = 4  # short, and most have more queries than one block, none more than two


def ways_of(problem: Problem) -> list[Way]:
    """Every way to compute the forward pass of a problem without policies."""
    ways = [Way(rows) for rows in TILES[tile_dim(problem)]]
    kinds = []
    if not (problem.top_left or refuse_slices(problem)):
        kinds.append(Kind.SLICES)
        few = OCTET <= problem.seqlen_q <= few_queries.QUERIES  # others were not measured
        if few and problem.heads > problem.kv_heads and not refuse_groups(problem):
            kinds.append(Kind.GROUPS)
    ways += [Way(rows, kind) for kind in kinds for rows in JOIN[kind][tile_dim(problem)]]
    return ways + [Way(decode_rows(problem), Kind.DECODE)] * few_queries.takes(problem)


def way_of(problem: Problem, sms: int = SMS, tiles: Tiles = TILES, lengths: Lengths = Lengths.ANY) -> Way:
    """The way with the least time; `lengths` of packed sequences."""
    best = Way(_rows_of_lengths(problem, sms, tiles, lengths))
    if problem.policies or not problem.seqlen_q:
        return best
    whole = way_us(problem, best, sms, tiles)
    bounds = {way: _clearly(problem, way, sms, tiles) * whole for way in ways_of(problem)}
    us = {way: way_us(problem, way, sms, tiles) for way, bound in bounds.items() if bound}
    return min((way for way in us if us[way] < bounds[way]), key=us.get, default=best)


def _rows_of_lengths(problem: Problem, sms: int, tiles: Tiles, lengths: Lengths) -> int:
    """`division.rows_of`, where more is known of packed sequences."""
    if lengths is Lengths.EQUAL and not shares_heads(problem, sms, tiles):
        problem = as_batch(problem)
    rows, shapes = rows_of(problem, sms, tiles), tiles[tile_dim(problem)]
    # Where sequences are few, tiles are short in any case; under a window the list knows how many there are;
    # and what is known of short ones is of as many keys as queries.
    listed = problem.window is not None and problem.window[0] >= 0
    other = listed or rows != next(iter(shapes)) or problem.seqlen_kv != problem.seqlen_q
    masked = problem.causal or problem.window is not None
    if other or lengths < (Lengths.SHORT_IF_MASKED if masked else Lengths.SHORT):
        return rows
    if shapes[BLOCK].ctas > 1:
        return BLOCK
    return 2 * BLOCK if lengths is Lengths.TWO_BLOCKS and 2 * BLOCK in shapes else rows


@lru_cache(maxsize=64)  # a model's layers ask one after the other
def known_of(total: int, sequences: int, longest: int) -> Lengths:
    """What is known of the lengths of so many packed sequences with so many rows in all, if the longest has
    so many (0: nobody says)."""
    if not (total and sequences and longest):
        return Lengths.ANY
    if are_equal(total, sequences, longest):
        return Lengths.EQUAL
    longest = min(longest, total)
    # Lengths are taken for longest·u^k, u being uniform between 0 and 1: their mean is longest/(k + 1), that
    # of their squares longest²/(2k + 1), and the quotient of both is the length that the mean query meets.
    mean = min(total / sequences, longest)
    met = longest * longest / (2 * longest - mean)
    if met > SHORT_MOST:
        return Lengths.SHORT_IF_MASKED if met <= MASKED_MOST else Lengths.ANY
    return Lengths.TWO_BLOCKS if longest <= 2 * BLOCK and mean > BLOCK else Lengths.SHORT


def are_equal(total: int, sequences: int, longest: int) -> bool:
    """Whether packed sequences with so many rows in all are about equally long, if the longest has so
    many."""
    rows = sequences * longest
    return total > 0 and total / AT_LEAST <= rows <= AT_MOST * total


def shares_heads(problem: Problem, sms: int = SMS, tiles: Tiles = TILES) -> bool:
    """Whether packed sequences that are equally long are so short, and so many, that heads are to share tall
    tiles, which a list says (`device.shared_tiles`): where a tile takes three of them or more, and of tiles
    of BLOCK queries an SM has only one at once."""
    if not problem.sequences:
        return False
    shapes, one = tiles[tile_dim(problem)], as_batch(problem)
    tall = shapes[BLOCK].ctas == 1 and next(iter(shapes)) >= 3 * BLOCK
    return tall and one.seqlen_q <= BLOCK and one.batch * one.heads > FEW_ROUNDS * sms


def _clearly(problem: Problem, way: Way, sms: int, tiles: Tiles) -> float:
    """Of the time of whole tiles: less must be expected of a way for it to be taken; 0 where it never is."""
    if way.kind is Kind.TILES:
        return 0.0
    if way.kind is Kind.DECODE or tiles_of(problem, way) <= FEW_SLICED * sms:
        return CLEARLY
    own = next(iter(tiles[tile_dim(problem)]))
    return MORE_CLEARLY if way == Way(own, Kind.SLICES) and not problem.causal else 0.0


def way_us(problem: Problem, way: Way, sms: int = SMS, tiles: Tiles = TILES) -> float:
    """The time that a way is expected to take, in µs of the GPU whose costs `tiles` are."""
    if way.kind is Kind.DECODE:
        return few_queries.decode_us(problem, sms)
    if way.kind is Kind.TILES:
        us = forward_us(problem, way.rows, sms, tiles)
    else:
        us = slices_us(problem, way, sms, tiles)
    return max(us, memory_us(problem, way, tiles))


def rows_of_heads(problem: Problem, way: Way) -> tuple[int, int]:
    """(rows, heads): how many rows there are of what a tile is of, and of how many such a batch consists."""
    if way.kind is not Kind.GROUPS:
        return problem.seqlen_q, problem.heads
    group = problem.heads // max(1, problem.kv_heads)
    return rows_of_group(problem.seqlen_q, group), problem.kv_heads


def tiles_of(problem: Problem, way: Way) -> int:
    rows, heads = rows_of_heads(problem, way)
    return problem.batch * heads * -(-rows // way.rows)


def memory_us(problem: Problem, way: Way, tiles: Tiles = TILES) -> float:
    """The time of a forward pass that waits for its keys: tiles of a group read them together, slices each
    for itself."""
    kv_bytes, tile = few_queries.kv_bytes(problem), tiles[tile_dim(problem)][way.rows]
    us, again = tile.call + tile.tile, READS_SLOWLY if way.rows == BLOCK else 1.0
    if way.kind is not Kind.TILES:
        again = 1.0
        us += JOIN[way.kind][tile_dim(problem)][way.rows]
        if kv_bytes > L2_BYTES:
            readers = tiles_of(problem, way) / max(1, problem.batch * problem.kv_heads)
            again = max(1.0, READ_AGAIN[way.kind] * readers)
    return us + kv_bytes * again / few_queries.MEMORY_BYTES


def slices_us(problem: Problem, way: Way, sms: int = SMS, tiles: Tiles = TILES) -> float:
    """The time of a forward pass in equal slices of the steps of such tiles."""
    columns = tile_dim(problem)
    tile = tiles[columns][way.rows]
    steps = [math.ceil(keys / tile.keys) for keys in seen_by_tiles(problem, way)]
    slices = slices_of(problem.with_(heads=rows_of_heads(problem, way)[1]), steps, sms, tile.ctas)
    beside = min(tile.ctas, slices.count / sms)  # CTAs that an SM has at once
    step = max(tile.alone, tile.step * beside)
    heads, rest = divmod(slices.steps, sum(steps))
    # A slice of the shortest tiles has most of them: under a mask those of a head's first queries.
    most = heads * len(steps) + bisect(list(accumulate(sorted(steps))), rest)
    joining, pieces = JOIN[way.kind][columns][way.rows], pieces_of(steps, slices.share)
    if slices.divided:
        further = (ADD + way.rows * columns * 4 / ADD_BYTES) * max(0, pieces - 2)
        joining += SHARED + SHARED_PIECE * pieces if slices.shared else further
    return tile.call + slices.steps * step + tile.tile * (1 + most) + joining


def pieces_of(steps: list[int], share: int) -> int:
    """Into how many a tile is cut at most: slices begin within tiles unless tiles are whole slices."""
    if all(x % share == 0 for x in steps):
        return max(steps) // share
    return 1 + math.ceil((max(steps) - 1) / share)


def seen_by_tiles(problem: Problem, way: Way) -> list[int]:
    """How many keys each tile of a way sees."""
    if way.kind is not Kind.GROUPS:
        return keys_seen(problem, way.rows)
    rows, _ = rows_of_heads(problem, way)
    octets = rows // OCTET // max(1, -(-problem.seqlen_q // OCTET))  # of the same queries
    # Of the last queries that a tile has; what lies past the end sees no more than there is.
    queries = [-(-end // (OCTET * octets)) * OCTET for end in range(way.rows, rows + way.rows, way.rows)]
    if not problem.causal:
        return [problem.seqlen_kv for _ in queries]
    offset = problem.seqlen_kv - problem.seqlen_q
    return [max(1, min(problem.seqlen_kv, x + offset)) for x in queries]


class Slices(NamedTuple):
    """Equal slices of all steps of a forward pass: the kernel has the same numbers (`device.key_slices`)."""

    divided: int  # steps that are
    share: int  # of them, of a slice
    whole: int  # tiles behind them, of which each SM has as many
    count: int  # of slices, and of the CTAs
    steps: int  # of the busiest of them
    shared: bool  # whether all CTAs make the sums of pieces


def slices_of(problem: Problem, steps: list[int], sms: int, ctas: int) -> Slices:
    """For the steps of each tile of a head, on a GPU with so many SMs that have `ctas` CTAs each."""
    heads, longest, whole = problem.batch * problem.heads, max(steps), 0
    key_rows = problem.batch * problem.kv_heads * problem.seqlen_kv
    if not problem.causal and ctas == 1 and key_rows > CACHED_BYTES // (4 * tile_dim(problem)):
        whole = heads * len(steps) // sms * sms
    divided = heads * sum(steps) - whole * longest
    share = max(least_steps(longest), -(-divided // (sms * ctas)))
    count, busiest = -(-divided // share), min(share, divided) + whole // sms * longest
    tiles, slots = heads * len(steps) - whole, slots_of(sms * ctas)
    return Slices(divided, share, whole, count, busiest, sums_are_shared(longest, share, count, tiles, slots))
