"""Which forward problems decode computes, in which kernels, and what it is expected to take."""

import random

import pytest

from hopper_attention import few_queries, selection, ways
from hopper_attention.choice import slower
from hopper_attention.kernels import calls_decode
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import DECODE
from hopper_attention.precompile import FEW_QUERIES, jobs_of
from hopper_attention.ways import Kind, Way


def made_up(chance: random.Random) -> Problem:
    kv_heads, group = chance.choice((1, 2, 8)), chance.choice((1, 3, 4, 8, 16))
    queries, keys = chance.choice((1, 2, 5, 16, 64, 128)), chance.choice((129, 1000, 4096, 32768))
    return Problem(
        chance.choice((1, 2, 9)), kv_heads * group, kv_heads, queries, keys, chance.choice((64, 128, 256)),
        chance.random() < 0.5, chance.choice(("bfloat16", "float16")), scaled=chance.random() < 0.5,
    )  # fmt: skip


def test_every_kernel_is_on_the_list_and_every_one_listed_is_reached() -> None:
    chance = random.Random(0)
    listed = {repr(kernel) for kernel in few_queries.kernels()}
    reached = {repr(few_queries.kernel_of(made_up(chance))) for _ in range(3000)}
    assert reached == listed and len(listed) == 72
    assert {name for name, *_ in jobs_of(FEW_QUERIES)} == {DECODE}
    assert {repr((what, options)) for _, what, options in jobs_of(FEW_QUERIES)} == listed
    assert listed <= {repr(kernel) for kernel in calls_decode.kernels()}


def test_what_is_taken() -> None:
    few = Problem(1, 32, 8, 4, 4096, 128, True)
    assert few_queries.takes(few) and few_queries.takes(few.with_(seqlen_q=128, scaled=True))
    for other in (
        {"seqlen_q": 129}, {"seqlen_q": 0}, {"seqlen_kv": 4}, {"seqlen_kv": 0}, {"head_dim": 72},
        {"value_dim": 64}, {"top_left": True}, {"window": (10, 0), "causal": False}, {"softcap": 5.0},
        {"sink": True}, {"direction": "bwd"}, {"batch": 0}, {"heads": 0, "kv_heads": 0},
    ):  # fmt: skip
        assert not few_queries.takes(few.with_(**other)), other
    assert not few_queries.takes(few.with_(seqlen_q=1, top_left=True)), "it sees the first key alone"


@pytest.mark.parametrize("lengths", [(0, 128), (0, 0), (128, 0), (1, 0)])
def test_problems_without_queries_or_keys_have_a_way(lengths: tuple[int, int]) -> None:
    for head_dim in (64, 80, 128, 192, 256):
        problem = Problem(2, 32, 8, *lengths, head_dim, False)
        assert ways.way_of(problem).kind is Kind.TILES
        assert (slower(problem) is not None) == (lengths == (0, 128))  # no query fills no tile


def test_its_time_grows_with_the_keys_and_with_what_computes_them() -> None:
    us = few_queries.decode_us
    for head_dim in (64, 128, 256):
        for queries in (1, 4, 8, 16, 32, 128):
            problem = Problem(2, 32, 8, queries, 1024, head_dim, False)
            times = [us(problem.with_(seqlen_kv=keys)) for keys in (1024, 8192, 65536)]
            assert times == sorted(times) and times[-1] > 2 * times[0]
            assert us(problem.with_(seqlen_q=queries + 1)) >= us(problem)
            assert us(problem, 60) >= us(problem)


@pytest.mark.parametrize(
    ("problem", "way"),
    [
        (Problem(1, 32, 8, 1, 32768, 128, False), Way(8, Kind.DECODE)),
        (Problem(8, 32, 8, 32, 32768, 128, True), Way(128, Kind.GROUPS)),
        (Problem(1, 32, 8, 64, 32768, 128, True), Way(128, Kind.GROUPS)),
        (Problem(1, 8, 1, 8, 32768, 128, True), Way(64, Kind.GROUPS)),
        (Problem(1, 32, 8, 8, 32768, 128, True), Way(32, Kind.DECODE)),
        (Problem(1, 12, 12, 4, 4096, 64, True), Way(8, Kind.DECODE)),
        (Problem(1, 8, 1, 64, 32768, 128, True), Way(128, Kind.GROUPS)),
        (Problem(1, 32, 8, 64, 2048, 128, True), Way(64, Kind.SLICES)),
        (Problem(1, 32, 8, 1, 77, 128, False), Way(64)),
    ],
)
def test_the_way_that_was_measured_to_be_the_fastest(problem: Problem, way: Way) -> None:
    assert ways.way_of(problem) == way
    assert way in ways.ways_of(problem)


@pytest.mark.parametrize("keys", [64, 4096])
def test_a_mask_at_the_top_left_has_whole_tiles(keys: int) -> None:
    """Of equal lengths too: a piece that begins behind the first key would hide what is seen."""
    problem = Problem(1, 32, 8, 64, keys, 128, True, top_left=True)
    assert {way.kind for way in ways.ways_of(problem)} == {Kind.TILES}
    others = [way for way in ways.ways_of(problem.with_(top_left=False)) if way.kind is not Kind.TILES]
    assert {way.kind for way in others} >= {Kind.SLICES, Kind.GROUPS}
    for way in others:
        with pytest.raises(ValueError, match="a mask at the top left"):
            selection.forward_stage(problem, way)


def test_tiles_of_a_group_are_for_few_queries_of_grouped_heads() -> None:
    has_groups = lambda problem: Kind.GROUPS in {way.kind for way in ways.ways_of(problem)}
    grouped = Problem(1, 7, 1, 128, 4096, 64, False)
    assert has_groups(grouped)
    assert not has_groups(grouped.with_(seqlen_q=129)) and not has_groups(grouped.with_(kv_heads=7))


def test_slices_that_read_keys_again_are_told_from_tiles_that_read_them_together() -> None:
    """Keys that L2 holds cost a slice nothing; others it reads for each head, and each tile, by itself."""
    small, large = (Problem(8, 32, 8, 64, keys, 128, True) for keys in (256, 32768))
    sliced, whole = Way(64, Kind.SLICES), Way(64)
    gained = lambda problem: ways.memory_us(problem, sliced) - ways.memory_us(problem, whole)
    assert abs(gained(small)) < ways.JOIN[Kind.SLICES][128][64] + 1
    assert gained(large) > ways.memory_us(large, whole)
