"""Packed sequences of one tile of keys, which a kernel of their own has in a call of bwd4: that between the
two kernels nobody is left out and nobody comes twice, on plain integers."""

import math
import random
from collections import Counter
from itertools import accumulate
from types import SimpleNamespace

import pytest
import test_shared_tiles
from simulated_warp import simulated
from test_turns import alone  # noqa: F401  a fixture of every test here, too
from untraced import kernels

from harness import policy_models
from hopper_attention.kernels import calls
from hopper_attention.kernels.contract import Problem

bwd4, tile_list = kernels("bwd4"), kernels("device.tile_list")
listed_apart = kernels("device.short_sequences").ListBothApart
CLASSES, KV_HEADS, GROUP = tile_list.CLASSES, 3, 2
RNG = random.Random(0)
BATCHES = (
    ((300, 300), (128, 128), (129, 129), (0, 0), (5, 0), (0, 7), (1, 1), (700, 64), (64, 700), (203, 129)),
    ((64, 64),) * 40,
    ((129, 129),) * 5,
    ((5, 0),) * 3,
    tuple((RNG.randint(0, 300), RNG.randint(0, 300)) for _ in range(60)),
)
MASKS = ({}, {"causal": True}, {"window": (37, 0)}, {"window": (20, 11)})
every_batch = pytest.mark.parametrize("lengths", BATCHES, ids=lambda x: f"{len(x)}")
every_head_dim = pytest.mark.parametrize("head_dim", [64, 96, 128])


def problem_of(lengths, head_dim: int, **fields: object) -> Problem:
    queries, keys = (sum(x) for x in zip(*lengths))
    plain = {"causal": False, "direction": "bwd", "scaled": True, "sequences": tuple(lengths)}
    return Problem(1, KV_HEADS * GROUP, KV_HEADS, queries, keys, head_dim, **plain | fields)


def class_of(lister: object, lengths: tuple[int, int]) -> int:
    with simulated(tile_list) as warp:
        return int(warp.run(lambda: lister.class_of((0, lengths[0], 0, lengths[1])))[0])


class List(test_shared_tiles.List):
    """What `short_sequences.ListBothApart` lists of keys; numbers of no tile where it writes nothing."""

    def __init__(self, lengths: tuple[tuple[int, int], ...], tile_q: int, tile_kv: int):
        lister = listed_apart(tile_q, tile_kv).of_keys
        classes = [class_of(lister, n) for n in lengths]
        starts = [tuple(map(sum, zip((0, 0), *lengths[:i]))) for i in range(len(lengths))]
        tiles: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=classes.__getitem__):
            (at_q, at_kv), (queries, keys) = starts[i], lengths[i]
            blocks, place = math.ceil(keys / tile_kv), (at_q + i * tile_q) // tile_q
            tiles += [[i, len(tiles), blocks, at_q, queries, at_kv, keys, place]] * blocks
        before = sum(math.ceil(keys / tile_kv) for _, keys in lengths if keys > tile_kv)
        self.rows, self.shape = [[before, len(tiles)], *tiles], (len(tiles) + 9, 8)


@pytest.mark.parametrize("keys", [128, 64])
def test_sequences_of_one_tile_are_in_the_class_behind_all_others(keys: int) -> None:
    lister = listed_apart(128, keys).of_keys
    for lengths in ((q, kv) for q in (0, 1, 64, 65, 5000, 2**28) for kv in (0, 1, keys, keys + 1, 2**28)):
        found = class_of(lister, lengths)
        assert (found == CLASSES - 1) == (lengths[1] <= keys)
        assert lengths[1] <= keys or found == policy_models.class_of(lengths[0]) - 1 >= 0


@every_batch
@every_head_dim
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_tile_of_keys_is_one_kernels(head_dim: int, deterministic: bool, mask, lengths) -> None:
    """And whoever has all keys of a head visits all of its queries, whose dQ nobody else writes."""
    problem = problem_of(lengths, head_dim, **mask)
    both = bwd4.kernel_for(problem, deterministic=deterministic)
    tiles = List(lengths, both.main.tile_q, both.main.tile_kv)
    mQ, mK = (SimpleNamespace(shape=(0, 0, heads, 1)) for heads in (KV_HEADS * GROUP, KV_HEADS))
    found: Counter[tuple[int, ...]] = Counter()
    for kernel in (both.main, both.left_over):
        _, own = kernel.own_tiles(tiles)
        for tile in range(own * KV_HEADS):
            place = tuple(map(int, kernel.place_of(tile, mQ, mK, tiles)))
            assert len(place) == kernel.words
            start_q, seqlen_q, start_kv, seqlen_kv = place[2:6]
            found[start_q, start_kv, place[1], place[0]] += 1
            assert (seqlen_kv <= kernel.tile_kv) == (kernel is both.left_over)
            if kernel is both.left_over:
                first, masked, whole, last = map(int, kernel.work_on(place, seqlen_q, seqlen_kv))
                visited = [
                    i for begin, end, _ in kernel.runs(first, masked, whole, last) for i in range(begin, end)
                ]
                visited += [last - 1] * (first < last)
                assert sorted(visited) == list(range(math.ceil(seqlen_q / kernel.tile_q)))
    starts = [(0, *accumulate(n[side] for n in lengths)) for side in (0, 1)]
    expected = Counter(
        (starts[0][i], starts[1][i], head, block)
        for i, (_, keys) in enumerate(lengths)
        for head in range(KV_HEADS)
        for block in range(math.ceil(keys / both.main.tile_kv))
    )
    assert found == expected


@every_head_dim
@pytest.mark.parametrize("deterministic", [False, True])
def test_who_writes_dq(head_dim: int, deterministic: bool) -> None:
    """Of up to a tile of keys the kernel that has it, of more, and of none, the postprocess. Each kernel
    counts its tiles by itself."""
    problem = problem_of(((5, 5),), head_dim)
    both = bwd4.kernel_for(problem, deterministic=deterministic)
    assert both.postprocess.apart == both.left_over.tile_kv == both.main.tile_kv
    assert both.left_over.one_tile and not both.left_over.deterministic and not both.main.one_tile
    assert calls.backward_scratch(problem, deterministic)["counter"] == ((2,), "int32")
    plain = Problem.square(1, 4, 300, head_dim, False, direction="bwd")
    dense = bwd4.kernel_for(plain, deterministic=deterministic)
    assert dense.left_over is None and dense.postprocess.apart is None
    assert calls.backward_scratch(plain, deterministic)["counter"] == ((1,), "int32")
