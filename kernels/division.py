"""How a problem is divided among CTAs, by what it will cost: how many queries a tile of the forward pass has,
and in how many parts the work on a tile of keys is of the backward pass. Imports no compiler.

Both are chosen by lists of tiles: tiles go in their order to whoever is free, a tile takes as long as its
steps and a constant, and what ends last is the time. notes/k6_rows.md and notes/bwd4_parts.md have the
measured times that the constants are fitted to, and what wrong choices cost.
"""

import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

from .calls import UNDIVIDED, Parts
from .contract import Problem
from .device.constants import SMS
from .device.limits import BLOCK, COLUMN_BYTES, FINAL_SECTIONS, L2_BYTES, SECTION_BYTES, TILE_KV, tile_dim

# ---- forward: queries of a tile ----------------------------------------------------------------------------


class Tile(NamedTuple):
    """A tile shape of k6 and what it costs, in µs on an H200 (`rows_of`)."""

    keys: int  # of a step
    ctas: int  # of an SM
    step: float  # of an SM that has as many CTAs as it can
    alone: float  # the step of a CTA that has its SM to itself
    tile: float  # beside its steps
    call: float


Tiles = dict[int, dict[int, Tile]]
"""Tile shapes by columns (`limits.tile_dim`) and rows; the first is k6's own, the others k6_rows'."""

TILES: Tiles = {
    64: {
        256: Tile(64, 1, 0.909, 0.909, 0.993, 6.650),
        192: Tile(96, 1, 1.040, 1.040, 0.971, 7.126),
        128: Tile(64, 1, 0.556, 0.556, 0.793, 6.508),
        64: Tile(64, 3, 0.238, 0.440, 0.612, 5.752),
    },
    96: {
        192: Tile(96, 1, 1.197, 1.197, 2.247, 6.137),
        128: Tile(128, 1, 1.230, 1.230, 1.593, 6.644),
        64: Tile(128, 1, 0.857, 0.857, 1.223, 5.958),
    },
    128: {
        192: Tile(64, 1, 0.925, 0.925, 2.229, 6.136),
        128: Tile(128, 1, 1.288, 1.288, 2.196, 6.476),
        64: Tile(128, 1, 0.888, 0.888, 1.441, 6.043),
    },
    192: {128: Tile(80, 1, 1.189, 1.189, 2.139, 8.45), 64: Tile(64, 1, 0.705, 0.705, 1.227, 7.87)},
    256: {128: Tile(64, 1, 1.256, 1.256, 4.389, 5.210), 64: Tile(64, 1, 0.856, 0.856, 2.112, 6.186)},
}
CLEARLY = 0.99  # of k6's own tiles' time, since the list is not exact
ALONE = 0.35  # of a step's time, which it takes however few of its queries there are
FEW_ROUNDS = 3  # of CTAs of BLOCK queries, up to which packed sequences are the fastest in such tiles
MANY_TILES = 10  # for each SM: from there on the mean load and half of a tile are as good as the list


def rows_of(problem: Problem, sms: int = SMS, tiles: Tiles = TILES) -> int:
    """Of how many queries a tile of the forward pass has: the number with the least time. Packed sequences
    count as equally long: of their lengths nobody but the GPU knows more. A list of their tiles would be
    exact for lengths that they do not have, so without a window it is the count that decides."""
    shapes, count = tiles[tile_dim(problem)], len(problem.sequences or ())
    own, problem = next(iter(shapes)), as_batch(problem)
    if count > 1 and not _is_narrow(problem):
        blocks = problem.batch * problem.heads * math.ceil(problem.seqlen_q / BLOCK)
        return BLOCK if blocks <= FEW_ROUNDS * sms * shapes[BLOCK].ctas else own
    us = {rows: forward_us(problem, rows, sms, tiles) for rows in shapes}
    best = min(us, key=us.get)
    return best if us[best] < CLEARLY * us[own] else own


def as_batch(problem: Problem) -> Problem:
    """Packed sequences as a batch of their mean length."""
    count = len(problem.sequences or ())
    if not count:
        return problem
    mean = {"seqlen_q": -(-problem.seqlen_q // count), "seqlen_kv": -(-problem.seqlen_kv // count)}
    return problem.with_(sequences=None, batch=count, **mean)


def _is_narrow(problem: Problem) -> bool:
    """Whether a window hides keys on the left."""
    return problem.window is not None and 0 <= problem.window[0] < problem.seqlen_kv - 1


def forward_us(problem: Problem, rows: int, sms: int = SMS, tiles: Tiles = TILES) -> float:
    """The time of a forward pass in tiles of so many queries, in µs of the GPU whose costs `tiles` are."""
    tile = tiles[tile_dim(problem)][rows]
    heads = problem.batch * problem.heads
    steps: list[float] = [math.ceil(keys / tile.keys) for keys in keys_seen(problem, rows)]
    if steps:  # the last tile's warpgroups without a query do nothing
        used = math.ceil((problem.seqlen_q - rows * (len(steps) - 1)) / BLOCK) * BLOCK / rows
        steps[-1] *= ALONE + (1 - ALONE) * used
    count = len(steps) * heads
    if count > MANY_TILES * sms:
        mean = heads * (sum(steps) * tile.step + len(steps) * tile.tile) / sms
        return mean + max(steps) * tile.step / 2 + tile.call
    costs = lambda step: (x * step + tile.tile for x in sorted(steps, reverse=True) for _ in range(heads))
    # An SM takes its tiles' steps one after the other, and each of its CTAs takes longer for one than the SM.
    busiest = max(_loads(costs(tile.step), sms))
    if tile.ctas > 1:
        busiest = max(busiest, *_loads(costs(tile.alone), sms * tile.ctas))
    return busiest + tile.call


def keys_seen(problem: Problem, rows: int) -> list[int]:
    """How many keys each tile of `rows` queries of a head sees, at least one."""
    offset = 0 if problem.top_left else problem.seqlen_kv - problem.seqlen_q
    ends = range(rows, problem.seqlen_q + rows, rows)
    if problem.window is not None:
        left, right = (problem.seqlen_q + problem.seqlen_kv if x < 0 else x for x in problem.window)
        spans = ((end - rows + offset - left, end + offset + right) for end in ends)
        return [max(1, min(problem.seqlen_kv, last) - max(0, first)) for first, last in spans]
    if not problem.causal:
        return [problem.seqlen_kv for _ in ends]
    return [max(1, min(problem.seqlen_kv, end + offset)) for end in ends]


def _loads(costs: Iterable[float], workers: int) -> list[float]:
    """What each worker has to do when costs go, one after the other, to whoever is free first."""
    loads = [0.0] * workers
    for cost in costs:
        heapq.heapreplace(loads, loads[0] + cost)
    return loads


# ---- backward: parts of the work on a tile of keys ---------------------------------------------------------

STEP_Q = {64: 128, 96: 64, 128: 64, 192: 64, 256: 64}  # queries of a step on a tile of keys, by `tile_dim`

# What `parts_of` reckons with, in steps of bwd4's main loop: a tile of queries on a tile of keys. Fitted to
# the measured times of notes/bwd4_parts.md, "How to divide".
TILE_STEPS = {64: 1.75, 96: 3.0, 128: 3.0, 192: 3.0, 256: 3.0}  # of a tile of keys beside its steps
HEAD_STEPS = 0.175  # of each of its query heads beside its steps: no other product is beside the first
ADDING_STEPS = 0.5  # of adding parts, beside their bytes
LAUNCH_STEPS = 1.3  # more, of one tile of keys: nothing else is rounded, and it is a launch of its own
BYTES_PER_STEP = 11e6  # of parts
BEYOND_L2 = 0.75  # how much longer those bytes take that do not stay in L2
UNDIVIDED_CAUSAL = 1.12  # how much longer a step takes under a mask where a group of heads is not divided
TOGETHER = 0.02  # and for each head more of a group that stays together, divided or not
FEW_TILES = 8  # for each SM: with more of them dividing gains nothing, but of LONG sequences
LONG = 32768
QUERY_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
BLIND = 3  # queries for each key, `one_tile_pays`
ONE_TILE_KEYS = min(keys for columns, keys in TILE_KV.items() if columns <= 128)

# So long may causal sequences be for turns at dQ to cost less than zeros (notes/bwd4_det.md, "By default"):
TURNS_SHORT = 512  # up to head_dim 128, with undivided tiles
TURNS_SEQLEN = 8192  # at 128, with so many tiles for each SM that nobody ends late
TURNS_TILES = 3
# So long may packed sequences be in the mean, at 128; where heads are grouped the shorter (bwd4_policies.md):
TURNS_PACKED, TURNS_GROUPED = 4096, 2048


def has_one_tile(problem: Problem) -> bool:
    """Whether a query's gradient comes from one tile of keys, in tiles that otherwise add to sums of dQ; of
    packed sequences, whether it would if they were equally long."""
    columns, count = tile_dim(problem), len(problem.sequences or (None,))
    return columns <= 128 and problem.seqlen_kv <= count * TILE_KV[columns]


def one_tile_pays(problem: Problem) -> bool:
    """Whether bwd4_one, which has no sums of dQ, computes the gradients."""
    return not problem.policies and has_one_tile(problem) and not _is_blind(problem)


def short_ones_pay(problem: Problem) -> bool:
    """The same of packed sequences none of which has more than ONE_TILE_KEYS keys."""
    return problem.policies == ("sequences",) and tile_dim(problem) <= 128 and not _is_blind(problem)


def _is_blind(problem: Problem) -> bool:
    """Whether so many queries see no key that they cost more than they gain: bwd4_one visits them, where
    bwd4_det, but for packed sequences of one tile, only writes zeros."""
    return problem.causal and not problem.top_left and problem.seqlen_q > BLIND * problem.seqlen_kv


def parts_of(problem: Problem, sms: int = SMS, deterministic: bool = False) -> Parts:
    """How to divide a backward pass: with the least time, by what the busiest SM has to do and what parts
    cost."""
    tiles = math.ceil(problem.seqlen_kv / TILE_KV[tile_dim(problem)]) * problem.batch * problem.kv_heads
    if tiles >= FEW_TILES * sms:
        # Too many for the list, and the longer they are the more a group gains by being divided once.
        if min(problem.seqlen_q, problem.seqlen_kv) < LONG or not _is_grouped(problem):
            return UNDIVIDED
        group = problem.heads // problem.kv_heads
        parts = Parts(heads=next(x for x in range(2, group + 1) if group % x == 0))
        of_parts = 2 * parts.count * problem.kv_heads * problem.seqlen_kv  # rows, of dK and of dV
        return parts if of_parts <= problem.heads * problem.seqlen_q else UNDIVIDED  # rows of dQ's sums
    if not tiles:
        return UNDIVIDED
    ways = divisions(problem, sms, deterministic)
    return min(ways, key=lambda parts: steps_of(problem, parts, sms, deterministic))


def parts_to_try(problem: Problem, sms: int = SMS) -> Parts:
    """`parts_of`, and where that has what is undivided as faster, as few parts as there can be: for who tries
    the kernels that divide."""
    parts = parts_of(problem, sms)
    if parts == UNDIVIDED and len(ways := divisions(problem, sms)) > 1:
        parts = min(ways[1:], key=lambda parts: parts.count)
    return parts


def turns_pay(problem: Problem, sms: int = SMS) -> bool:
    """Whether gradients come sooner with turns at dQ, where who comes first stores, than with zeros."""
    columns, equal = tile_dim(problem), problem.seqlen_q == problem.seqlen_kv
    if problem.policies == ("sequences",) and problem.causal and equal:
        longest = TURNS_GROUPED if _is_grouped(problem) else TURNS_PACKED
        return columns == 128 and problem.seqlen_kv <= longest * len(problem.sequences)
    if problem.policies or not (problem.causal and equal and problem.seqlen_kv) or columns > 128:
        return False
    if problem.seqlen_kv <= TURNS_SHORT and parts_of(problem, sms) == UNDIVIDED:
        return True
    if columns < 128 or problem.seqlen_kv > TURNS_SEQLEN:
        return False
    key_tiles = math.ceil(problem.seqlen_kv / TILE_KV[columns]) * problem.batch * problem.kv_heads
    return key_tiles * parts_of(problem, sms, deterministic=True).heads >= TURNS_TILES * sms


def _is_grouped(problem: Problem) -> bool:
    """Whether a step takes longer where the heads of a group stay together."""
    return problem.causal and problem.heads > problem.kv_heads and tile_dim(problem) <= 128


def divisions(problem: Problem, sms: int = SMS, deterministic: bool = False) -> list[Parts]:
    """The ways to divide a backward pass that may gain anything: heads by any divisor of their group, 1
    among them, and queries too while a part has two steps and tiles are no more than four for each SM. Not
    if tiles of keys wait for each other's turn, which `steps_of` knows nothing of: whoever simulates them
    asks for all."""
    group = problem.heads // max(1, problem.kv_heads)
    key_tiles = math.ceil(problem.seqlen_kv / TILE_KV[tile_dim(problem)])
    tiles = key_tiles * problem.batch * problem.kv_heads
    q_tiles = math.ceil(problem.seqlen_q / STEP_Q[tile_dim(problem)])
    found, waits = [], deterministic and key_tiles > 1
    for heads in (x for x in range(1, group + 1) if group % x == 0):
        for queries in QUERY_PARTS:
            more = heads * queries * tiles
            if queries == 1 or (2 * queries <= q_tiles and more <= 4 * sms and not waits):
                found.append(Parts(heads, queries))
    return found


def steps_of(problem: Problem, parts: Parts, sms: int = SMS, deterministic: bool = False) -> float:
    """The time of a backward pass, in steps of its main loop."""
    busiest = max(loads_of(problem, parts, sms))
    # Where tiles wait for turns and all begin with the same queries, more heads of a group part them.
    waits = deterministic and not has_one_tile(problem) and problem.seqlen_kv > 2 * problem.seqlen_q
    if _is_grouped(problem):
        busiest *= 1 + TOGETHER * (problem.heads // problem.kv_heads // parts.heads - 1)
        busiest *= UNDIVIDED_CAUSAL if parts == UNDIVIDED and not waits else 1.0
    if parts == UNDIVIDED:
        return busiest
    keys = problem.batch * problem.kv_heads * parts.count * problem.seqlen_kv
    part_bytes = 2 * keys * tile_dim(problem) * 4  # of dK and dV, which are written, and read again
    part_bytes += BEYOND_L2 * max(0, part_bytes - L2_BYTES)
    adding = ADDING_STEPS + (LAUNCH_STEPS if one_tile_pays(problem) else 0.0)
    return busiest + adding + 2 * part_bytes / BYTES_PER_STEP


def loads_of(problem: Problem, parts: Parts, sms: int = SMS) -> list[float]:
    """The steps of each SM, when tiles of keys go in their order (`Tiles.locate`), one after the other, to
    whoever is free."""
    tile_q, tile_kv = STEP_Q[tile_dim(problem)], TILE_KV[tile_dim(problem)]
    heads = problem.batch * problem.kv_heads * parts.heads
    query_heads = problem.heads // problem.kv_heads // parts.heads
    section = heads
    if problem.causal:
        head_bytes = problem.seqlen_q * COLUMN_BYTES[tile_dim(problem)] * tile_dim(problem) * query_heads
        section = max(1, min(heads, SECTION_BYTES // max(1, head_bytes)))
    final = max(0, heads - FINAL_SECTIONS * section) // section * section
    offset = 0 if problem.top_left else problem.seqlen_kv - problem.seqlen_q
    if one_tile_pays(problem):
        offset = 0  # who has all keys visits the queries that see none, too: bwd4_one
    steps = []
    for first_key in range(0, problem.seqlen_kv, tile_kv):
        unseen = max(0, first_key - offset) // tile_q if problem.causal else 0
        tiles = math.ceil(problem.seqlen_q / tile_q)
        for part in range(parts.queries):
            first = unseen + (part - unseen) % parts.queries
            own = len(range(first, tiles, parts.queries))
            steps.append(query_heads * (own + HEAD_STEPS * (own > 0)) + TILE_STEPS[tile_dim(problem)])
    sections = [section] * (final // section) + [heads - final]
    return _loads((tile for n in sections for tile in steps for _ in range(n)), sms)
