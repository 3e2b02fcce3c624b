"""What waiting for turns costs a deterministic backward pass (kernels/device/dq_sums.py, "turns"): its
schedule, and a simulation of who waits for whom. In how many parts the queries of a tile of keys are divided,
and how many sums of dQ there are, is chosen by it where the pass is short. Imports no compiler.

A tile of keys goes to whoever is free, in the order of turns. It takes its steps one after the other; each
adds to dQ of a tile of queries when the tile of keys before it has, and the next may add LINK later. Steps go
on meanwhile, until the buffer of dQ is needed again.
"""

import functools
import heapq
import math
from collections import defaultdict
from typing import NamedTuple

from .kernels import division
from .kernels.calls import UNDIVIDED, Parts
from .kernels.contract import Problem
from .kernels.device.constants import SMS
from .kernels.device.limits import (
    COLUMN_BYTES,
    FINAL_SECTIONS,
    L2_BYTES,
    ROTATED_BYTES,
    SECTION_BYTES,
    TILE_KV,
    TILE_Q,
    tile_dim,
)
from .kernels.device.spread import ROUNDS_APART, begin_behind, begins_at

# In µs on an H200, fitted to measured schedules (notes/bwd4_det.md, "How many sums").
STEP = {64: (2.2, 2.1), 96: (1.75, 1.62), 128: (1.94, 1.94)}  # of the main loop: without a mask, causal
LINK = {64: 2.8, 96: 3.1, 128: 3.1}  # from one addition to a sum to the next
AHEAD = 0.5  # how much a step's addition may be late before the next step is
TILE = 1.0  # of a tile of keys beside its steps
SUM_MB = {64: 0.4, 96: 0.3, 128: 0.3}  # for a megabyte of sums of dQ
PART_MB = 0.485  # for a megabyte of parts of dK and dV
CALL = 7.4  # of everything else
ROUNDING = 1e-6  # more than sums of the same times differ by
SUMS = (1, 2, 3, 4, 6, 8, 12, 16)
SHORT = 6000  # steps of all tiles: so many are simulated in tens of milliseconds, once for a shape


class KeyTile(NamedTuple):
    """A tile of keys, or a part of one: of which head (of parts), the tiles of queries it takes, and with
    which query head of its group it begins."""

    block: int
    head: int
    mirrored: bool
    queries: range | list[int]
    first_head: int


def is_simulated(problem: Problem) -> bool:
    """Whether a backward pass is so short that its schedule is simulated."""
    columns = tile_dim(problem)
    if problem.policies or problem.top_left or columns > 128:
        return False
    tiles = key_blocks_of(problem)
    steps = problem.batch * problem.heads * tiles * math.ceil(problem.seqlen_q / TILE_Q[columns])
    return tiles > 1 and 0 < steps <= SHORT


def sums_of(problem: Problem, parts: Parts, sms: int = SMS) -> int | None:
    """How many sums of dQ take turns, or None for `calls.sums_for`: by the simulation, or one where the
    kernel, which asks whether tiles of keys may begin with different queries of two, would count in 32 bits
    what these take (`dq_sums.is_rotated`)."""
    if is_simulated(problem):
        return fastest(problem, (parts,), sms)[1]
    columns = tile_dim(problem)
    return 1 if problem.seqlen_q * (COLUMN_BYTES[columns] + 4) * columns >= 2**31 else None


def parts_of(problem: Problem, sms: int = SMS) -> Parts:
    """How to divide a deterministic backward pass: by the simulation; where tiles of keys are few and may
    begin with different heads, into as many parts of the queries as fill the SMs; or `division.parts_of`."""
    if is_simulated(problem):
        return _fastest_of_all(problem, sms)[0]
    columns, most = tile_dim(problem), ROUNDS_APART * sms
    key_blocks = key_blocks_of(problem)
    tiles = key_blocks * problem.batch * problem.kv_heads
    if key_blocks > 1 and columns <= 128 and not problem.top_left and _are_alike(problem):
        if tiles <= most and problem.heads > problem.kv_heads:
            q_tiles = math.ceil(problem.seqlen_q / TILE_Q[columns])
            counts = [n for n in division.QUERY_PARTS if n == 1 or (2 * n <= q_tiles and n * tiles <= most)]
            return Parts(queries=min(counts, key=lambda n: math.ceil(n * tiles / sms) / n))
        if tiles > most and problem.seqlen_kv > 2 * problem.seqlen_q:
            return UNDIVIDED  # parts would only wait for each other
    return division.parts_of(problem, sms, deterministic=True)


def expected_us(problem: Problem, sms: int = SMS) -> float:
    """How long a pass without a mask is expected to take, divided as `parts_of` has it: by the simulation, or
    if nobody waited."""
    if is_simulated(problem):
        return pass_us(problem, *_fastest_of_all(problem, sms), sms)
    parts, columns, key_blocks = parts_of(problem, sms), tile_dim(problem), key_blocks_of(problem)
    step = STEP[columns][False]
    if parts != UNDIVIDED:
        return CALL + step * division.steps_of(problem, parts, sms)
    rounds = math.ceil(key_blocks * problem.batch * problem.kv_heads / ctas_of(problem, key_blocks, sms))
    of_tile = TILE + step * _group(problem, parts) * math.ceil(problem.seqlen_q / TILE_Q[columns])
    return CALL + rounds * of_tile


def _fastest_of_all(problem: Problem, sms: int) -> tuple[Parts, int]:
    return fastest(problem, tuple(division.divisions(problem, sms)), sms)


@functools.lru_cache(maxsize=4096)
def fastest(problem: Problem, ways: tuple[Parts, ...], sms: int = SMS) -> tuple[Parts, int]:
    """In which of these ways to divide it, and with how many sums of dQ, a pass is expected to take least."""
    tried = [(parts, sums) for parts in ways for sums in SUMS if sums <= key_blocks_of(problem)]
    best, least = tried[0], math.inf
    for bound, choice in sorted((least_us(problem, *x, sms), x) for x in tried):
        if bound >= least:  # and so are those of all others
            break
        if (us := pass_us(problem, *choice, sms, most=least)) < least:
            best, least = choice, us
    return best


def pass_us(problem: Problem, parts: Parts, sums: int, sms: int = SMS, most: float = math.inf) -> float:
    """How long a pass is expected to take; infinity if that is certain to be more than `most`."""
    others = CALL + bytes_us(problem, parts, sums)
    return others + waited(problem, parts, sums, sms, most=most - others)


def least_us(problem: Problem, parts: Parts, sums: int, sms: int = SMS) -> float:
    """The same if nobody waited and each SM had as many steps."""
    step, group = STEP[tile_dim(problem)][problem.causal], _group(problem, parts)
    seen = _key_blocks_seen(problem)
    mean = problem.batch * problem.heads * sum(seen) / sms
    longest = group * math.ceil(sum(x > 0 for x in seen) / parts.queries)
    alone = TILE + step * max(mean, longest) + LINK[tile_dim(problem)]
    return CALL + bytes_us(problem, parts, sums) + alone


def bytes_us(problem: Problem, parts: Parts, sums: int) -> float:
    """What the sums of dQ and the parts of dK and dV cost, which are written, and read again."""
    megabyte = tile_dim(problem) * 4e-6  # of a row
    us = SUM_MB[tile_dim(problem)] * megabyte * sums * problem.batch * problem.heads * problem.seqlen_q
    if parts.count > 1:
        us += PART_MB * megabyte * 2 * parts.count * problem.batch * problem.kv_heads * problem.seqlen_kv
    return us


class Visit(NamedTuple):
    """A step: of which of the tiles that are simulated, for which query head of its group, from when and
    until when it computes, in µs."""

    tile: int
    head: int
    start: float
    done: float


def waited(
    problem: Problem,
    parts: Parts,
    sums: int,
    sms: int = SMS,
    visits: list[Visit] | None = None,
    most: float = math.inf,
) -> float:
    """The time until the last addition, in µs, or infinity as soon as that is certain to be more than `most`;
    its steps are added to `visits`."""
    step, link = STEP[tile_dim(problem)][problem.causal], LINK[tile_dim(problem)]
    group = _group(problem, parts)
    tiles, ctas = schedule(problem, parts, sums, sms)
    if len(tiles) <= ctas:  # all begin at once: each head is as another one
        alike: dict[bool, int] = {}
        tiles = [x for x in tiles if alike.setdefault(x.mirrored, x.head) == x.head]
    heads, queries, chains = _spread(problem, parts, sums, sms)
    seen = _key_blocks_seen(problem)
    late = [_late_turns(problem, seen, g, heads, queries) for g in range(group)]
    # Of a head, when a sum's turn is the next one's: (query head of the group, tile of queries, sum)
    passed = defaultdict(lambda: [0.0] * (group * len(seen) * 2 * chains))
    free, end = [0.0] * ctas, 0.0
    taken, to_do = 0.0, sum(TILE + step * group * len(x.queries) for x in tiles)  # of all CTAs
    for number, tile in enumerate(tiles):
        if max(end, (taken + to_do) / ctas) + link > most + ROUNDING:  # even if nobody waits any more
            return math.inf
        begun = free[0]
        time = begun + TILE
        to_do -= TILE + step * group * len(tile.queries)
        turn_of, leftward = passed[tile.head], problem.causal and not tile.mirrored
        for nth in range(group):
            g = (tile.first_head + nth) % group
            late_turns, first = late[g], g * len(seen)
            for q in tile.queries:
                turn = seen[q] - 1 - tile.block if leftward else tile.block
                lag = turn - late_turns[q]
                at = (first + q) * 2 * chains + (lag % chains if lag >= 0 else chains + turn % chains)
                done = time + step
                own = turn_of[at]
                if own < done:
                    own = done
                turn_of[at] = own + link
                if visits is not None:
                    visits.append(Visit(number, g, time, done))
                time = own - AHEAD
                if time < done:
                    time = done
        heapq.heapreplace(free, time)
        taken += time - begun
        end = max(end, time)
    return end + link


def schedule(problem: Problem, parts: Parts, sums: int, sms: int = SMS) -> tuple[list[KeyTile], int]:
    """The tiles of keys in the order in which they are fetched (`key_tiles.Tiles.locate`), and among how many
    CTAs."""
    columns = tile_dim(problem)
    tile_q, tile_kv = TILE_Q[columns], TILE_KV[columns]
    key_blocks, q_tiles = key_blocks_of(problem), math.ceil(problem.seqlen_q / tile_q)
    blocks, all_heads = key_blocks * parts.queries, problem.batch * problem.kv_heads * parts.heads
    waves = _in_waves(problem)
    if problem.causal:
        head_bytes = problem.seqlen_q * COLUMN_BYTES[columns] * columns * _group(problem, parts)
        section = max(tile_q // 64, 2 * SECTION_BYTES // head_bytes)
        section = max(1, min(all_heads // 2, section))
    else:
        section = max(1, min(all_heads, sms // blocks))
    final = all_heads // section * section
    if not waves:
        final = max(0, all_heads - FINAL_SECTIONS * section) // section * section
    if problem.causal:
        final = max(final, (all_heads + 1) // 2 // section * section)
    keys = problem.seqlen_kv if parts == UNDIVIDED else blocks * tile_kv  # parts of queries count as keys
    may_mirror = problem.causal and keys <= 2 * problem.seqlen_q
    all_mirrored = problem.seqlen_q * COLUMN_BYTES[columns] * columns > L2_BYTES
    heads, queries, _ = _spread(problem, parts, sums, sms)
    seen_by_all = _seen_by_all(problem)
    fetched = lambda block, tiles: tiles - 1 - block if problem.causal else block
    found, offset = [], problem.seqlen_kv - problem.seqlen_q
    for tile in range(blocks * all_heads):
        first, together = tile // (section * blocks) * section, section
        if first >= final:
            first, together = final, all_heads - final
        inside = tile - first * blocks
        block, head = inside // together, first + inside % together
        mirrored = may_mirror and (all_mirrored or head >= final)
        if problem.causal and not mirrored:
            block = blocks - 1 - block
        key_block, part = divmod(block, parts.queries)
        begin = min(q_tiles, max(0, key_block * tile_kv - offset) // tile_q) if problem.causal else 0
        own = range(begin + (part - begin) % parts.queries, q_tiles, parts.queries)
        if mirrored:
            own = own[::-1]
        elif queries and key_block < seen_by_all:
            turn = begins_at(fetched(key_block, seen_by_all), seen_by_all, q_tiles)
            own = [*own[turn:], *own[:turn]]
        first_head = begins_at(fetched(key_block, key_blocks), key_blocks, heads)
        found.append(KeyTile(key_block, head, mirrored, own, first_head))
    return found, min(len(found), ctas_of(problem, blocks, sms))


def _in_waves(problem: Problem) -> bool:
    """Whether CTAs go from their tile to that of the same keys and a later head."""
    return TILE_Q[tile_dim(problem)] == 64 and not problem.causal


def ctas_of(problem: Problem, blocks: int, sms: int = SMS) -> int:
    """How many CTAs take tiles, `blocks` of each head, where there are more than SMs."""
    section = sms // blocks * blocks
    return section if _in_waves(problem) and section > sms * 9 // 10 else sms


def _spread(problem: Problem, parts: Parts, sums: int, sms: int) -> tuple[int, bool, int]:
    """`dq_sums.SummedTiles.spread_of`: with how many different heads of their group tiles of keys begin,
    whether with different queries, and how many chains of turns there are."""
    columns, group = tile_dim(problem), _group(problem, parts)
    tiles = key_blocks_of(problem) * problem.batch * problem.kv_heads * parts.count
    apart = _are_alike(problem) and tiles <= ROUNDS_APART * sms and sums % 2 == 0
    small = problem.seqlen_q * (COLUMN_BYTES[columns] + 4) * columns <= ROTATED_BYTES
    in_waves = _in_waves(problem) and sums == 2 and small
    queries = parts == UNDIVIDED and (in_waves or (apart and group == 1))
    heads = group if apart and not queries else 1
    return heads, queries, sums // 2 if queries or heads > 1 else sums


def _are_alike(problem: Problem) -> bool:
    """Whether tiles of keys are about as long, and none is mirrored."""
    return not problem.causal or problem.seqlen_kv > 2 * problem.seqlen_q


def _late_turns(problem: Problem, seen: list[int], g: int, heads: int, queries: bool) -> list[int]:
    """`dq_sums.SummedTiles.late_turns` of each tile of queries of a group's g-th head."""
    tiles = _seen_by_all(problem) if queries else key_blocks_of(problem)
    at = lambda q: (q, tiles, len(seen)) if queries else (g, tiles, heads)
    return [max(0, begin_behind(*at(q)) + turns - tiles) for q, turns in enumerate(seen)]


def _seen_by_all(problem: Problem) -> int:
    """How many tiles of keys all queries see; they are the first."""
    if not problem.causal:
        return key_blocks_of(problem)
    return max(0, problem.seqlen_kv - problem.seqlen_q + 1) // TILE_KV[tile_dim(problem)]


def _group(problem: Problem, parts: Parts) -> int:
    """How many query heads a tile of keys, or a part of one, has."""
    return problem.heads // problem.kv_heads // parts.heads


def key_blocks_of(problem: Problem) -> int:
    """How many tiles of keys a head has."""
    return math.ceil(problem.seqlen_kv / TILE_KV[tile_dim(problem)])


def _key_blocks_seen(problem: Problem) -> list[int]:
    """How many tiles of keys each tile of queries sees."""
    tile_q, tile_kv = TILE_Q[tile_dim(problem)], TILE_KV[tile_dim(problem)]
    offset = problem.seqlen_kv - problem.seqlen_q
    seen = lambda end: min(problem.seqlen_kv, max(0, end + offset)) if problem.causal else problem.seqlen_kv
    ends = range(tile_q, problem.seqlen_q + tile_q, tile_q)
    return [math.ceil(seen(end) / tile_kv) for end in ends]
