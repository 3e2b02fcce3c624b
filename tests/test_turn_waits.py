"""The simulation that chooses parts and sums of a short deterministic backward pass: its schedule is the
kernels' own, and who waits for whom follows from it."""

import math
import random
from types import SimpleNamespace

import pytest
from test_turns import count_sums, kernel_of

from hopper_attention import selection, turns
from hopper_attention.kernels import calls, division
from hopper_attention.kernels.calls import UNDIVIDED, Parts
from hopper_attention.kernels.contract import Problem


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has nobody to tell that its numbers are everyone's."""
    monkeypatch.setattr("cutlass.cute.arch.make_warp_uniform", int)


def short_problems(count: int) -> list[Problem]:
    rng, found = random.Random(7), []
    while len(found) < count:
        kv_heads, group = rng.choice((1, 2, 3, 8, 12)), rng.choice((1, 1, 2, 4))
        queries = rng.choice((49, 130, 384, 512, 1000, 2048))
        keys = queries if rng.random() < 0.6 else rng.choice((200, 700, 1500, 4096))
        head_dim, causal = rng.choice((64, 80, 96, 128)), rng.random() < 0.6
        one = Problem(
            rng.choice((1, 1, 2)),
            kv_heads * group,
            kv_heads,
            queries,
            keys,
            head_dim,
            causal,
            direction="bwd",
        )
        if turns.is_simulated(one):
            found.append(one)
    return found


@pytest.mark.parametrize("problem", short_problems(40), ids=str)
def test_the_schedule_is_the_kernels(problem: Problem) -> None:
    columns, group = division.tile_dim(problem), problem.heads // problem.kv_heads
    for heads in (1, group):
        for queries in (1, 2, 3):
            parts = None if heads * queries == 1 else (heads, queries)
            kernel = kernel_of(columns, problem.causal, parts)
            for sums in (1, 2):
                extents = problem.kv_heads * heads, problem.batch
                keys = -(-problem.seqlen_kv // kernel.tile_kv) * kernel.tile_kv * queries
                lengths = problem.seqlen_q, problem.seqlen_kv
                mQ = SimpleNamespace(shape=(problem.seqlen_q, columns, problem.heads, problem.batch))
                mTiled = SimpleNamespace(
                    shape=(problem.seqlen_kv if parts is None else keys, columns, *extents, queries)
                )
                kernel.count_parts(None, mTiled)
                found, ctas = turns.schedule(problem, Parts(heads, queries), sums)
                blocks = -(-mTiled.shape[0] // kernel.tile_kv)
                assert len(found) == blocks * extents[0] * extents[1]
                assert ctas == int(kernel.ctas(len(found), blocks))
                own = group // heads
                count_sums(kernel, sums, lengths, own, extents[0] * extents[1], len(found))
                for number, tile in enumerate(found):
                    place = tuple(map(int, kernel.locate(number, mQ, mTiled)))
                    first, _, _, last = map(int, kernel.work_on(place, *lengths))
                    at = place[2] * extents[0] + place[1]
                    assert (tile.block, tile.head) == (place[0], at)
                    assert tile.first_head == int(kernel.head_at(0, own, place, lengths[1]))
                    visited = [
                        int(kernel.q_tile_at(i, first, last, place, *lengths)) for i in range(first, last)
                    ]
                    assert visited == list(tile.queries)
                    assert tile.mirrored == (kernel.mirrors and place[-1] != 0)


def test_whoever_waits_is_late() -> None:
    """Of queries that all begin with the same tile one sum lets one CTA in after the other."""
    problem = Problem(1, 1, 1, 128, 9 * 128, 128, False, direction="bwd")
    link, step = turns.LINK[128], turns.STEP[128][0]
    one, nine = (turns.waited(problem, UNDIVIDED, sums) for sums in (1, 9))
    assert nine == pytest.approx(turns.TILE + 2 * step + link)
    # The last of nine adds its first step eight links after the first, and its second one when it has ended.
    assert one >= turns.TILE + step + 8 * link - turns.AHEAD + step + link
    assert turns.pass_us(problem, UNDIVIDED, 9) - turns.CALL > nine, "sums are not for nothing"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "lengths", "causal", "parts", "sums"),
    [
        (8, 1, (512, 8192), True, Parts(queries=2), 8),
        (8, 1, (2048, 2048), False, Parts(queries=8), 2),
        (2, 2, (1024, 8192), True, UNDIVIDED, 12),
    ],
)
def test_who_begins_apart_waits_for_few(
    heads: int, kv_heads: int, lengths: tuple[int, int], causal: bool, parts: Parts, sums: int
) -> None:
    """With other heads, or other queries: where each comes to its first tile of queries before those that
    come around to it."""
    problem = Problem(1, heads, kv_heads, *lengths, 128, causal, direction="bwd")
    us, alone = (find(problem, parts, sums) for find in (turns.pass_us, turns.least_us))
    assert us < alone + 4 * turns.LINK[128]
    assert turns.pass_us(problem, parts, sums + 1) > us + 2 * turns.LINK[128], "an odd number: together"


@pytest.mark.parametrize("problem", short_problems(40), ids=str)
def test_what_is_not_simulated_would_take_longer(problem: Problem) -> None:
    """Where nobody waits a pass takes `least_us`: what takes longer than the best so far is left out."""
    ways = division.divisions(problem)
    sums = [x for x in turns.SUMS if x <= -(-problem.seqlen_kv // turns.TILE_KV[division.tile_dim(problem)])]
    us = {(parts, x): turns.pass_us(problem, parts, x) for parts in ways for x in sums}
    assert all(turns.least_us(problem, *x) <= us[x] + 1e-9 for x in us)
    assert us[turns.fastest(problem, tuple(ways))] == pytest.approx(min(us.values()))


def test_a_walk_is_given_up_only_where_it_would_take_longer() -> None:
    given_up = walks = 0
    for problem in short_problems(40):
        for parts in division.divisions(problem):
            us = turns.pass_us(problem, parts, 1)
            assert turns.pass_us(problem, parts, 1, most=us) == us
            shorter = turns.pass_us(problem, parts, 1, most=us / 2)
            assert shorter in (us, math.inf)
            given_up, walks = given_up + (shorter == math.inf), walks + 1
    assert given_up > 0.9 * walks


def chosen(problem: Problem) -> tuple[tuple[int, int], int]:
    """Parts, of heads and of queries, and sums, as the library takes them."""
    stage_id, parts = selection.backward_stage(problem, True)
    scratch = selection.backward_scratch(stage_id, problem, parts)
    sums = scratch["dQ_sum"][0][0] // (problem.batch * problem.heads)
    if problem.sequences is None:
        assert scratch["order"][0][1] == sums * -(-problem.seqlen_q // turns.TILE_Q[problem.head_dim])
    assert (*scratch,)[:2] == ("stats", "dQ_sum"), "arguments of a launch have an order"
    return parts or UNDIVIDED, sums


def test_what_is_chosen() -> None:
    """Measured, µs, of the default and of these: 23.7, 24.6; 34.6, 36.8; 64.5, 68.0; 31.0, 30.7."""
    square = lambda heads, kv_heads, n: Problem(1, heads, kv_heads, n, n, 128, True, direction="bwd")
    assert chosen(square(8, 8, 512)) == chosen(square(8, 8, 1024)) == ((1, 2), 2)
    assert chosen(square(8, 1, 2048)) == ((8, 2), 2)
    assert chosen(square(16, 16, 512)) == ((1, 1), 1)
    long = square(8, 8, 8192)
    assert not turns.is_simulated(long) and chosen(long) == ((1, 1), 1)
    # Tiles of many keys that all begin with the same few queries are not divided where they fill the SMs.
    prefill = Problem(1, 32, 8, 2048, 8192, 128, True, direction="bwd")
    assert not turns.is_simulated(prefill) and chosen(prefill) == ((1, 1), 2)
    # Few tiles begin with different heads, and what sees them is divided until it fills the SMs.
    assert chosen(prefill.with_(kv_heads=1)) == ((1, 2), 2)
    assert chosen(prefill.with_(kv_heads=4)) == ((1, 1), 2)
    assert chosen(square(8, 1, 4096).with_(causal=False)) == ((1, 4), 2)
    for other in (prefill.with_(heads=4, kv_heads=4, seqlen_q=3000), square(32, 4, 4096)):
        assert not turns.is_simulated(other)
        assert turns.parts_of(other) == division.parts_of(other, deterministic=True)


@pytest.mark.parametrize(
    "fields",
    [{"softcap": 9.0}, {"window": (64, 0)}, {"sink": True}, {"sequences": ((512, 512),)}, {"top_left": True}],
    ids=str,
)
def test_others_are_chosen_as_before(fields: dict[str, object]) -> None:
    problem = Problem(1, 8, 8, 512, 512, 128, "window" not in fields, direction="bwd").with_(**fields)
    assert not turns.is_simulated(problem)
    assert chosen(problem)[1] == calls.sums_for(problem, True)
    assert not turns.is_simulated(problem.with_(head_dim=256))
    # One tile of keys: nobody waits.
    assert not turns.is_simulated(Problem(1, 8, 8, 512, 128, 128, False, direction="bwd"))
