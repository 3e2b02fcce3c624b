"""Tiles of keys that are left over by a round of the SMs, and taken in parts; and in which order queries come
to a tile. The kernels' own arithmetic, on plain integers."""

import heapq
import math
import random
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
from untraced import kernels

from hopper_attention import selection
from hopper_attention.kernels import calls, calls_split
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.constants import SMS

bwd4, split_tiles, key_tiles = kernels("bwd4"), kernels("device.split_tiles"), kernels("device.key_tiles")
RNG = random.Random(0)


def random_problem(head_dim: int, causal: bool) -> Problem:
    group, kv_heads, batch = RNG.choice((1, 1, 2, 4)), RNG.randint(1, 12), RNG.randint(1, 12)
    lengths = [RNG.choice((1, 64, 127, 500, 1024, 1500, 2111)) + RNG.randint(0, 64) for _ in range(2)]
    return Problem(batch, group * kv_heads, kv_heads, *lengths, head_dim, causal, direction="bwd")


def is_split(problem: Problem) -> bool:
    return calls_split.splits(problem) and calls_split.split_for(problem)[1] > 1


PROBLEMS = [
    random_problem(head_dim, causal) for head_dim in (64, 96, 128) for causal in (0, 1) for _ in range(6)
]
PROBLEMS += [
    problem
    for head_dim in (96, 128)
    for problem in [x for x in (random_problem(head_dim, False) for _ in range(400)) if is_split(x)][:8]
]
MANY = Problem.square(1, 18, 4096, 128, False, direction="bwd")  # 576 tiles: 48 are left over
LEFT_OVER = (MANY, MANY.with_(heads=17, kv_heads=17, seqlen_q=2600, head_dim=96), MANY.with_(seqlen_q=16384))


def taken(problem: Problem, split: int = 1, parts: int = 1) -> list[tuple[tuple[int, ...], list[int]]]:
    """The places of what is taken, in order, and the tiles of queries of each in the order they come."""
    kernel = bwd4.kernel_for(problem).main
    lengths = problem.seqlen_q, problem.seqlen_kv
    mQ, mK = (
        SimpleNamespace(shape=(n, problem.head_dim, heads, problem.batch))
        for n, heads in zip(lengths, (problem.heads, problem.kv_heads))
    )
    mSplit = SimpleNamespace(shape=(2, split, parts))
    kernel.count_parts(mK, None, mSplit)
    tiles = math.ceil(problem.seqlen_kv / kernel.tile_kv) * problem.kv_heads * problem.batch
    places = []
    for i in range(split_tiles.count_taken(tiles, mSplit) if kernel.splits else tiles):
        place = tuple(map(int, kernel.place_of(i, mQ, mK, None)))
        assert len(place) == kernel.words
        first, _, _, last = map(int, kernel.work_on(place, *lengths))
        steps = [int(kernel.q_tile_at(i, first, last, place, *lengths)) for i in range(first, last)]
        assert sorted(steps) == list(range(first, last))
        places.append((place, steps))
    return places


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_query_comes_to_every_tile_once(problem: Problem) -> None:
    kernel = bwd4.kernel_for(problem).main
    assert kernel.splits == calls_split.splits(problem)
    split = calls_split.split_for(problem) if kernel.splits else (1, 1)
    seen = Counter((place[:3], q_tile) for place, steps in taken(problem, *split) for q_tile in steps)
    q_tiles = math.ceil(problem.seqlen_q / kernel.tile_q)
    expected = set()
    for kv_block in range(math.ceil(problem.seqlen_kv / kernel.tile_kv)):
        first, _, _, last = map(int, kernel.q_tiles(kv_block, problem.seqlen_q, problem.seqlen_kv))
        heads = product(range(problem.kv_heads), range(problem.batch))
        expected |= {((kv_block, *head), q_tile) for head, q_tile in product(heads, range(first, last))}
    assert q_tiles and set(seen) == expected and set(seen.values()) <= {1}


@pytest.mark.parametrize("parts", [2, 3, 7, 16])
@pytest.mark.parametrize("problem", LEFT_OVER, ids=str)
def test_a_tile_that_is_left_over_is_all_its_parts(problem: Problem, parts: int) -> None:
    tiles = math.ceil(problem.seqlen_kv / 128) * problem.kv_heads
    split = tiles % SMS
    places = taken(problem, split, parts)
    whole, rest = places[: tiles - split], places[tiles - split :]
    assert all(place[3] == 0 for place, _ in whole) and len(rest) == split * parts
    q_tiles, numbers = math.ceil(problem.seqlen_q / 64), []
    for tile in range(split):
        own = rest[tile * parts : (tile + 1) * parts]
        assert len({place[:3] for place, _ in own}) == 1, "parts of a tile are taken one after the other"
        assert [x for _, steps in own for x in steps] == list(range(q_tiles))
        assert min(len(steps) for _, steps in own) >= q_tiles // parts
        numbers += [((place[3] - 1) // parts, (place[3] - 1) % parts) for place, _ in own]
    assert numbers == [(tile, part) for tile in range(split) for part in range(parts)]
    assert len({place[:3] for place, _ in places}) == tiles


def ends(problem: Problem, split: int, parts: int) -> float:
    """When the last SM is done, each taking what is next, in steps: without what putting together costs."""
    free = [0.0] * SMS
    for _, steps in taken(problem, split, parts):
        heapq.heapreplace(free, free[0] + len(steps) + 3.0)
    return max(free)


@pytest.mark.parametrize("problem", LEFT_OVER, ids=str)
def test_what_is_chosen_ends_sooner(problem: Problem) -> None:
    split, parts = calls_split.split_for(problem)
    assert 1 < parts <= calls_split.MOST_PARTS
    assert split * parts <= calls_split.MOST_ROUNDS * SMS
    least = calls_split.TOGETHER_STEPS + calls_split.LEAST_GAIN * ends(problem, 1, 1)
    assert ends(problem, split, parts) < ends(problem, 1, 1) - least


def test_nothing_is_split_that_would_end_as_late() -> None:
    for problem in (
        MANY.with_(seqlen_q=16384, seqlen_kv=256),  # no more tiles than SMs
        MANY.with_(heads=33, kv_heads=33),  # eight rounds, and nothing left over
        MANY.with_(seqlen_q=1024, seqlen_kv=1024, batch=16),  # parts that are short for what they cost
        MANY.with_(heads=1, kv_heads=1, seqlen_kv=25600),  # no room for counters
        MANY.with_(batch=6, heads=28, kv_heads=28, seqlen_q=32768, seqlen_kv=32768),  # 0.03 % of the call
    ):
        assert calls_split.split_for(problem) == (1, 1), problem
    assert calls_split.split_for(MANY.with_(heads=33, kv_heads=33), sms=114)[1] > 1


def test_their_scratch() -> None:
    """Behind the other floats, as the launch takes it; counters where bwd4_det has its turns."""
    for problem in LEFT_OVER:
        split, parts = calls_split.split_for(problem)
        scratch = bwd4.workspace(problem)
        assert scratch == selection.backward_scratch("bwd4", problem, None)
        assert list(scratch) == ["stats", "dQ_sum", "split", "zeroed", "order", "counter"]
        blocks = math.ceil(problem.head_dim / 64)
        assert scratch["split"] == ((2, split, parts, 2, blocks, 4096), "float32")
        assert math.prod(scratch["order"][0]) >= 2 * split
        deterministic = bwd4.workspace(problem, deterministic=True)
        assert "split" not in deterministic and deterministic == calls.backward_scratch(problem, True)
    for other in (MANY.with_(causal=True), MANY.with_(head_dim=64), MANY.with_(head_dim=256)):
        assert "split" not in bwd4.workspace(other) and not bwd4.kernel_for(other).main.splits


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_queries_of_every_other_head_come_from_the_last(head_dim: int) -> None:
    for seqlen, reverses in ((key_tiles.ONE_WAY, False), (key_tiles.ONE_WAY + 1, True)):
        problem = Problem.square(2, 3, seqlen, head_dim, True, direction="bwd")
        kernel = bwd4.kernel_for(problem).main
        for place, steps in taken(problem):
            reverse = reverses and (place[2] * 3 + place[1]) % 2 == 0
            assert steps == sorted(steps, reverse=reverse), place
        assert kernel.reversed_share(problem) == (0.5 if reverses else 0.0)
