"""The launches of a backward pass: every head in one of them, and two only where less time is expected."""

import math
import random

import pytest

from hopper_attention import rounds, selection, turns
from hopper_attention.kernels import calls_split, division
from hopper_attention.kernels.calls import UNDIVIDED, Parts
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.limits import TILE_KV
from hopper_attention.tuned import Gpu

# Timed on an H200, notes/bwd4_parts.md, "Heads that are left over": (batch, heads, key heads, N, head_dim,
# and keys if not N), what the first launch has, and how much faster two are, by default and with turns.
TIMED = [
    ((1, 24, 24, 1536, 128), (1, 22), 0.964, 1.077),
    ((1, 16, 16, 2304, 128), (1, 14), 0.953, 1.096),
    ((1, 33, 33, 2048, 128), (1, 32), 0.924, 1.062),
    ((1, 17, 17, 2048, 128), (1, 16), 0.989, 1.145),
    ((1, 9, 9, 1920, 128), (1, 8), 1.194, 1.186),
    ((1, 7, 7, 2756, 96), (1, 6), 1.161, 1.269),
    ((1, 68, 17, 2048, 128), (1, 16), 1.165, 1.173),
    ((1, 52, 13, 1590, 64), (1, 10), 1.042, 1.225),
    ((1, 17, 17, 4096, 64), (1, 16), 1.096, 1.067),
    ((2, 56, 7, 1200, 64), (2, 6), 1.052, 1.337),
    ((3, 4, 2, 1830, 128, 3660), (2, 2), 1.039, 1.096),
    ((1, 24, 24, 4608, 128), (1, 22), 0.995, 0.986),
    ((8, 10, 10, 4096, 64), (8, 9), 0.992, 0.990),
    ((4, 20, 20, 1500, 64), (4, 19), 0.998, 0.921),
]


def problem_of(
    batch: int, heads: int, kv_heads: int, seqlen: int, head_dim: int, keys: int | None = None
) -> Problem:
    square = Problem.square(batch, heads, seqlen, head_dim, False, direction="bwd")
    return square.with_(kv_heads=kv_heads, seqlen_kv=keys or seqlen)


def made_up(chance: random.Random) -> Problem:
    group = chance.choice((1, 1, 1, 4, 8))
    kv_heads = chance.randint(1, 40 // group)
    shape = chance.randint(1, 4), kv_heads * group, kv_heads, chance.randint(1, 3000)
    return problem_of(*shape, chance.choice((64, 96, 128)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("timed", TIMED, ids=str)
def test_the_choice_is_what_was_timed(timed: tuple, deterministic: bool) -> None:
    shape, first, *ratios = timed
    problem, ratio = problem_of(*shape), ratios[deterministic]
    wanted = first if ratio > 1 else (problem.batch, problem.kv_heads)
    assert rounds.together(problem, deterministic) == wanted


@pytest.mark.parametrize("deterministic", [False, True])
def test_launches(deterministic: bool) -> None:
    """Each head of each batch is in one launch, which `backward_stage` chooses the stage of; the first of two
    is whole rounds, the second less than it, and both are expected to take less than one."""
    chance, two = random.Random(0), 0
    while two < 12:
        problem, sms = made_up(chance), chance.choice((132, 132, 114))
        found = list(selection.backward_launches(problem, deterministic, gpu=Gpu(sms)))
        places = [(x.batches.start, x.kv_heads.start) for x in found]
        assert sum(x.problem.batch * x.problem.kv_heads for x in found) == problem.batch * problem.kv_heads
        assert len(set(places)) == len(found) <= 2
        for x in found:
            extents = x.batches.stop - x.batches.start, x.kv_heads.stop - x.kv_heads.start
            assert extents == (x.problem.batch, x.problem.kv_heads)
            assert x.problem.heads * problem.kv_heads == x.problem.kv_heads * problem.heads
            chosen = selection.backward_stage(x.problem, deterministic, gpu=Gpu(sms))
            assert chosen == (x.stage_id, x.parts)
        if len(found) == 1:
            assert found[0].problem == problem
            continue
        two += 1
        first, left = (x.problem for x in found)
        assert first.batch * first.kv_heads >= left.batch * left.kv_heads
        key_tiles = math.ceil(problem.seqlen_kv / TILE_KV[problem.head_dim])
        ctas = turns.ctas_of(problem, key_tiles, sms) if deterministic else sms
        tiles = [key_tiles * x.batch * x.kv_heads for x in (first, problem)]
        assert math.ceil(tiles[0] / ctas) == tiles[1] // ctas
        one, *both = (rounds.expected_us(x, deterministic, sms) for x in (problem, first, left))
        assert one >= max(rounds.HOST_US, sum(both))


def test_one_launch_where_nothing_is_left_over_or_known() -> None:
    """Under a mask and policies, of one tile of keys, of wide heads, of many rounds, of so short a pass that
    the GPU would wait for the host; and of who says which parts."""
    flux = problem_of(1, 24, 24, 1536, 128)
    for other in (
        flux.with_(causal=True),
        flux.with_(softcap=1.0),
        flux.with_(seqlen_kv=100),
        flux.with_(head_dim=256),
        flux.with_(seqlen_q=0),
        flux.with_(batch=8),
        flux.with_(heads=22, kv_heads=22),
        problem_of(1, 12, 12, 1500, 64),
    ):
        assert rounds.together(other, True) == (other.batch, other.kv_heads), other
    for parts in (UNDIVIDED, Parts(queries=2)):
        (launch,) = selection.backward_launches(flux, True, parts)
        assert launch.problem == flux
    both = [(x.stage_id, x.problem.heads, x.parts) for x in selection.backward_launches(flux, True)]
    assert both == [("bwd4_det", 22, None), ("bwd4_parts_det", 2, Parts(queries=4))]


def test_steps_without_turns() -> None:
    """Of whole tiles they are those of `division`, but for its steps of a head; of split ones fewer than
    those of whole ones."""
    for problem in (problem_of(1, 12, 12, 1500, 64), problem_of(1, 17, 17, 4096, 64)):
        tiles = math.ceil(problem.seqlen_kv / 128) * problem.heads
        own = calls_split.steps_of(problem, (1, 1)) + math.ceil(tiles / 132) * division.HEAD_STEPS
        assert own == pytest.approx(division.steps_of(problem, UNDIVIDED))
    split = problem_of(1, 24, 24, 1536, 128)
    ways = (calls_split.split_for(split), (1, 1))
    assert calls_split.steps_of(split, ways[0]) < calls_split.steps_of(split, ways[1])


def test_expected_time_with_turns() -> None:
    """Of a short pass the simulation's; otherwise in rounds, or as `division` has its parts."""
    short = problem_of(1, 9, 9, 1920, 128)
    ways = tuple(division.divisions(short))
    assert turns.expected_us(short) == turns.pass_us(short, *turns.fastest(short, ways))
    rounds_of_tiles = problem_of(1, 24, 24, 1536, 128)  # three, of 24 tiles of queries
    assert turns.expected_us(rounds_of_tiles) == turns.CALL + 3 * (turns.TILE + 24 * turns.STEP[128][False])
    grouped = problem_of(1, 68, 17, 2048, 128)
    parts = turns.parts_of(grouped)
    steps = division.steps_of(grouped, parts)
    assert parts != UNDIVIDED
    assert turns.expected_us(grouped) == turns.CALL + turns.STEP[128][False] * steps
