"""Tiles that heads of short packed sequences share: the kernel's own look-up and arithmetic on plain
integers."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
from untraced import kernels

from harness import policy_models
from hopper_attention.kernels.contract import Problem

k6, SHORT = kernels("k6"), kernels("k6_rows").SHORT
FAR, tile_list = kernels("device.packed").FAR, kernels("device.tile_list")
CLASSES, SHARED_QUERIES = tile_list.CLASSES, tile_list.SHARED_QUERIES
ROWS = kernels("device.query_tiles").ROWS
packed_tiles = kernels("device.shared_tiles").packed_tiles

HEADS = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (5, 1), (6, 3), (8, 2), (16, 16), (32, 8), (24, 3), (14, 2))
LENGTHS = (
    (64, 64), (65, 64), (64, 65), (1, 0), (0, 7), (0, 0), (300, 300), (7, 7), (1, 1), (500, 3), (3, 500),
    (64, 0), (1000, 1000), (64, 64), (80, 0), (40, 33),
)  # fmt: skip


class List:
    """What `tile_list.ListTiles` writes, by the model of it; numbers of no tile where it writes nothing."""

    def __init__(self, lengths: tuple[tuple[int, int], ...], kernel: k6.FlashAttentionForward):
        shared_keys = kernel.tile_kv if kernel.batch.shares else 0
        starts = [tuple(map(sum, zip((0, 0), *lengths[:i]))) for i in range(len(lengths))]
        tiles = policy_models.tile_list(lengths, kernel.tile_q, shared_keys=shared_keys)
        alone = sum(not policy_models.is_shared(lengths[i], shared_keys) for i, _, _ in tiles)
        self.rows = [[len(tiles), alone if shared_keys else len(tiles)]]
        for i, first, blocks in tiles:
            at_q, at_kv = starts[i]
            self.rows.append([i, first, blocks, at_q, lengths[i][0], at_kv, lengths[i][1], 0])
        self.starts, self.shape = starts, (len(self.rows) + 9, 8)

    def __getitem__(self, at: tuple[int, int]) -> int:
        row, i = at
        return self.rows[row][i] if row < len(self.rows) else -(10**9)


def kernel_of(head_dim: int, causal: bool, rows: int | None = None, window=None) -> k6.FlashAttentionForward:
    problem = Problem.square(1, 1, 1, head_dim, causal, window=window).with_(sequences=((1, 1),))
    return k6.kernel_for(problem, **({"config": SHORT[rows][head_dim]} if rows else {}))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rows"), [(64, None), (128, None), (256, None), (128, 128), (64, 64), (128, 64)]
)
def test_every_row_of_every_head_is_some_consumers(
    head_dim: int, rows: int | None, causal: bool, heads: int, kv_heads: int
) -> None:
    """And is of its own keys: through the list, the look-up, and what a consumer makes of a place."""
    kernel = kernel_of(head_dim, causal, rows)
    tiles_of = List(LENGTHS, kernel)
    mQ, mK = (SimpleNamespace(shape=(0, 0, n, 1)) for n in (heads, kv_heads))
    tiles, alone = kernel.batch.listed_tiles(tiles_of, heads)
    group, found, shared_tiles = heads // kv_heads, Counter(), 0
    for tile in range(int(tiles)):
        place = tuple(map(int, kernel.locate_listed(tile, alone, mQ, mK, tiles_of)))
        shared = kernel.batch.shares and place[6] != 0
        shared_tiles += shared
        loaded = int(kernel.tiles_loaded(place, (place[3], place[5])))
        keys = [tuple(map(int, kernel.batch.keys_at(place, i)[1:])) for i in range(loaded)]
        assert len(set(keys)) == loaded
        for consumer in range(kernel.consumers):
            own = tuple(map(int, kernel.batch.of_consumer(place, consumer)))
            first_row, end, own_blocks, visible, begin = kernel.span_of(own, consumer, None)
            assert own[1] < heads, "a sink of no head"
            if first_row >= own[3]:
                # What it would store lies behind the end.
                assert own[2] + own[3] == place[2] + place[3]
                continue
            _, block, *more = kernel.queries_at(place, consumer)
            # Where the TMA loads from, clipped behind the sequence, is where O and LSE go.
            loads_at = FAR - place[3] + ROWS * int(block)
            assert loads_at == FAR - own[3] + first_row
            assert own[2] + own[3] == place[2] + place[3]
            assert place[1] + int(more[0] if more else 0) == own[1]
            real = int(first_row + own[2] - place[2])  # of the sequence
            found[place[2], place[3], place[4], place[5], own[1], real] += 1
            if shared:
                assert place[3] <= SHARED_QUERIES and place[5] <= kernel.tile_kv
                before = int(begin[0])
                assert keys[before] == (0, own[1] // group - place[1] // group)
                assert (int(own_blocks), int(end)) == (1, loaded - before)
                alike = kernel.span(0, 0, place[3], place[5])  # as the first consumer of a tile of its own
                assert (int(visible), int(own_blocks)) == (int(alike[3]), int(alike[2]))
    wanted = Counter(
        (*(x for pair in zip(start, n) for x in pair), head, row)
        for start, n in zip(tiles_of.starts, LENGTHS)
        for head in range(heads)
        for row in range(0, n[0], ROWS)
    )
    assert found == wanted
    short = sum(policy_models.is_shared(n, kernel.tile_kv) and n[0] > 0 for n in LENGTHS)
    assert shared_tiles == (short * -(-heads // kernel.consumers) if kernel.batch.shares else 0)


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (63, 2), (-1, 3), (70, -1), (9, 70)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_consumers_rows_see_what_they_would_see_alone(head_dim: int, window: tuple[int, int]) -> None:
    """Masks, moved by 64·c queries: of each row its first and last key."""
    kernel = kernel_of(head_dim, False, window=window)
    sharing = int(kernel.batch.sharing(0, 100, 1))
    most = kernel.tile_kv
    for queries, keys in itertools.product((1, 2, 33, 63, 64), (0, 1, 31, most - 1, most)):
        place = (0, 0, 1000, queries, 2000, keys, sharing)
        (_, *alone), begin = kernel.begin(kernel.span(0, 0, queries, keys), 0, queries, keys)
        for consumer in range(kernel.consumers):
            own = tuple(map(int, kernel.batch.of_consumer(place, consumer)))
            first_row, _, *span, (_, first, edge) = kernel.span_of(own, consumer, None)
            assert tuple(map(int, (*span, first, edge))) == tuple(map(int, (*alone[1:], *begin[1:])))
            for row in range(queries):
                lengths = own[3], keys
                for key_of in (kernel.mask.first_key, kernel.mask.last_key):
                    assert key_of(first_row + row, *lengths) == key_of(row, queries, keys)


def test_sharing_says_who_has_which_head() -> None:
    for consumers in (2, 3, 4):
        batch = packed_tiles(consumers)
        for heads, kv_heads in HEADS:
            group = heads // kv_heads
            for head in range(0, heads, consumers):
                sharing = int(batch.sharing(head, heads, group))
                assert 0 < sharing < 2**31
                place = (0, head, 0, 5, 0, 5, sharing)
                own = [x // group for x in range(head, min(head + consumers, heads))]
                assert int(batch.tiles_of_keys(place, 1)) == len(set(own))
                for consumer in range(consumers):
                    there = consumer < len(own)
                    before = own[consumer] - own[0] if there else 0
                    assert int(batch.before(place, consumer)) == before
                    assert int(batch.behind(place, consumer)) == len(set(own)) - 1 - before
                    rows = batch.of_consumer(place, consumer)
                    assert (int(rows[3]) > ROWS * consumer) == there
                    assert int(rows[1]) == head + min(consumer, len(own) - 1)


def test_one_consumer_shares_nothing() -> None:
    assert not packed_tiles(1).shares and packed_tiles(2).shares


def test_classes_leave_room_for_the_shared_ones() -> None:
    """`ListTiles.class_of` moves the others by one."""
    assert min(policy_models.class_of(n) for n in (2**28, 2**29 - 1)) >= 1
    assert policy_models.class_of(0) == CLASSES - 1
