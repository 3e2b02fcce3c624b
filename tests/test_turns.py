"""Whose turn it is at which sum of dQ, in what order tiles of keys are fetched, and with which queries each
begins, where additions have one order: the kernels' own arithmetic on plain integers (bwd4_det,
bwd4_parts_det)."""

import itertools
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
from untraced import kernels

from hopper_attention import selection, turns
from hopper_attention.kernels.calls import UNDIVIDED
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import DETERMINISTIC

bwd4, bwd4_parts, calls = map(kernels, ("bwd4", "bwd4_parts", "calls"))

LENGTHS = ((1, 1), (65, 300), (300, 65), (513, 513), (257, 1100))
HEADS = ((1, 1, 2), (1, 3, 1), (1, 2, 6), (2, 5, 4))  # batch, key heads, query heads of each
SUMS = (1, 2, 3, 4)
PARTS = (None, (1, 1), (2, 1), (2, 3))  # of heads and of queries; None: bwd4_det
GROUP = 2  # query heads of a key head of packed sequences


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has nobody to tell that its numbers are everyone's."""
    monkeypatch.setattr("cutlass.cute.arch.make_warp_uniform", int)


def kernel_of(head_dim: int, causal: bool, parts: tuple[int, int] | None, top_left: bool = False) -> object:
    mask = Problem.square(1, 1, 1, head_dim, causal, top_left=top_left, direction="bwd")
    return (bwd4 if parts is None else bwd4_parts).kernel_for(mask, deterministic=True).main


def count_sums(
    kernel: object, sums: int, lengths: tuple[int, int], group: int, key_heads: int = 1, tiles: int = 1
) -> None:
    """As the kernel counts them at its beginning."""
    heads = key_heads * group
    kernel.count_sums(SimpleNamespace(shape=(heads * sums,)), heads, tiles, *lengths, group)


def tiles_of(
    kernel: object,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    parts: tuple[int, int] | None,
    sums: int = 1,
):
    """(place, (first, masked, whole, last)) of every tile of keys, as they are fetched; the kernel has
    counted so many sums."""
    (batch, kv_heads, group), (seqlen_q, seqlen_kv) = heads, lengths
    head_parts, query_parts = parts or (1, 1)
    keys = seqlen_kv
    if parts is not None:
        keys = math.ceil(seqlen_kv / kernel.tile_kv) * kernel.tile_kv * query_parts
    mQ = SimpleNamespace(shape=(seqlen_q, kernel.head_dim, kv_heads * group, batch))
    mTiled = SimpleNamespace(shape=(keys, kernel.head_dim, kv_heads * head_parts, batch, query_parts))
    kernel.count_parts(None, mTiled)
    key_heads = kv_heads * head_parts * batch
    tiles = math.ceil(keys / kernel.tile_kv) * key_heads
    count_sums(kernel, sums, lengths, group // head_parts, key_heads, tiles)
    for tile in range(tiles):
        place = tuple(map(int, kernel.locate(tile, mQ, mTiled)))
        assert len(place) == kernel.words
        yield place, tuple(map(int, kernel.work_on(place, *lengths)))


def sees_a_key(lengths: tuple[int, int], causal: bool, top_left: bool, query: int) -> bool:
    return not causal or top_left or query + lengths[1] - lengths[0] >= 0


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("causal", "top_left"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_every_visit_has_a_turn_in_the_order_tiles_are_fetched(
    head_dim: int, causal: bool, top_left: bool, parts: tuple[int, int] | None, sums: int
) -> None:
    """At each sum of a tile of queries turns are 0, 1, …, in the order in which tiles of keys are fetched, so
    that nobody waits for one who has not begun, and the last one leaves the counter at zero: a gap would have
    a CTA wait forever. The postprocess reads the sums that were written, and no other. Each tile of keys is
    fetched once, and visits each tile of queries that it should once."""
    head_parts, of_parts = parts or (1, 1)
    for heads in (x for x in HEADS if x[2] % head_parts == 0):
        group = heads[2] // head_parts
        for lengths in LENGTHS:
            kernel = kernel_of(head_dim, causal, parts, top_left)
            turns, fetched, visits = defaultdict(list), defaultdict(set), defaultdict(list)
            for place, (first, _, _, last) in tiles_of(kernel, heads, lengths, parts, sums):
                assert (kernel.sums, kernel.group) == (sums, group)
                kv_block, part = place[0], place[3] if kernel.divides else 0
                visited = [int(kernel.q_tile_at(i, first, last, place, *lengths)) for i in range(first, last)]
                assert all(q_tile % of_parts == part for q_tile in visited)
                visits[place[1:3], kv_block] += visited
                of_group = [int(kernel.head_at(nth, group, place, lengths[1])) for nth in range(group)]
                assert sorted(of_group) == list(range(group))
                for g, q_tile in itertools.product(of_group, visited):
                    at, turn, final = kernel.turn_of(kv_block, q_tile, *lengths, place, g)
                    turns[place[1:3], g, q_tile, int(at)].append((int(turn), bool(final)))
                assert (kv_block, part) not in fetched[place[1:3]], "a tile of keys is fetched twice"
                fetched[place[1:3]].add((kv_block, part))
            blocks = math.ceil(lengths[1] / kernel.tile_kv)
            every = {(kv_block, part) for kv_block in range(blocks) for part in range(of_parts)}
            assert all(found == every for found in fetched.values())
            for (_, kv_block), visited in visits.items():
                first, _, _, last = map(int, kernel.q_tiles(kv_block, *lengths))
                assert sorted(visited) == list(range(first, last))
            assert len(fetched) == heads[0] * heads[1] * head_parts
            for found in turns.values():
                assert found == [(turn, turn == len(found) - 1) for turn in range(len(found))]
            for g, q_tile in itertools.product(range(group), range(math.ceil(lengths[0] / kernel.tile_q))):
                came = int(kernel.sums_at(q_tile, *lengths, g))
                last_query = (q_tile + 1) * kernel.tile_q - 1
                assert (came > 0) == sees_a_key(lengths, causal, top_left, last_query)
                for head in fetched:
                    assert {at for at in range(sums) if (head, g, q_tile, at) in turns} == set(range(came))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_mirrored_head_masks_what_is_hidden(
    head_dim: int, top_left: bool, parts: tuple[int, int] | None
) -> None:
    """The loops take every tile of queries but the last in their order, which is masked in any case; those
    that are not masked see all keys of the tile."""
    mirrored = set()
    for lengths in LENGTHS:
        kernel = kernel_of(head_dim, True, parts, top_left)
        for place, (first, masked, whole, last) in tiles_of(kernel, (3, 5, 2), lengths, parts):
            mirrored.add(place[-1])
            if first == last:
                continue
            steps, unmasked = [], []
            for begin, end, hides in kernel.runs(first, masked, whole, last, place):
                steps += range(begin, end)
                unmasked += [] if hides else range(begin, end)
            assert steps == list(range(first, last - 1))
            seen = {kernel.q_tile_at(i, first, last, place, *lengths) for i in unmasked}
            own_first, need, _, end = map(int, kernel.q_tiles(place[0], *lengths))
            need = max(own_first, min(need, end))
            assert all(q_tile >= need for q_tile in seen), "a hidden pair is not masked"
            alone = kernel.q_tile_at(last - 1, first, last, place, *lengths)
            unhidden = {kernel.of_part(i, place) for i in range(first, last)} & set(range(need, end))
            assert seen | {alone} >= unhidden, "a tile is masked that sees all keys"
            assert (place[0] + 1) * kernel.tile_kv <= lengths[1] or not seen
    assert mirrored == {0, 1}


def test_heads_longer_than_l2_are_all_mirrored() -> None:
    """With turns in the order in which tiles are fetched. None is where keys are twice as many, and more."""
    for lengths, expected in (((50_000, 50_000), {1}), ((40_000, 40_000), {0, 1}), ((50_000, 100_200), {0})):
        kernel = kernel_of(128, True, None)
        found, before = set(), {}
        for place, (first, _, _, last) in tiles_of(kernel, (1, 2, 2), lengths, None):
            found.add(place[3])
            for q_tile in (x for x in range(0, last, 97) if x >= first):
                at, turn, _ = map(int, kernel.turn_of(place[0], q_tile, *lengths, place))
                assert (at, turn) == (0, before.get((place[1], q_tile), -1) + 1)
                before[place[1], q_tile] = turn
        assert found == expected


class List:
    """What `tile_list.ListTiles` lists of sequences in this order."""

    def __init__(self, lengths: list[tuple[int, int]], tile_kv: int):
        self.rows: list[tuple[int, ...]] = []
        start_q = start_kv = 0
        for i, (seqlen_q, seqlen_kv) in enumerate(lengths):
            first, blocks = len(self.rows), math.ceil(seqlen_kv / tile_kv)
            self.rows += [(i, first, blocks, start_q, seqlen_q, start_kv, seqlen_kv, 0)] * blocks
            start_q, start_kv = start_q + seqlen_q, start_kv + seqlen_kv

    def __getitem__(self, at: tuple[int, int]) -> int:
        row, i = at
        return self.rows[row - 1][i] if row else len(self.rows)


@pytest.mark.parametrize(
    "lengths",
    [
        [(1024, 1024)],
        [(1024, 1024)] * 4,
        [(2048, 2048), (300, 300), (65, 300), (300, 65)],
        [(50_000, 50_000), (700, 700)],
        [(257, 1100)],
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 5, 16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_packed_tiles_come_in_the_order_of_their_turns(
    head_dim: int, kv_heads: int, lengths: list[tuple[int, int]]
) -> None:
    """Each tile of keys once, and nobody before those it waits for. Beyond head_dim 64 heads of the last
    sequence are mirrored, and of one that does not stay in L2."""
    total_q, total_kv = map(sum, zip(*lengths))
    problem = Problem(
        1, kv_heads * GROUP, kv_heads, total_q, total_kv, head_dim, True,
        direction="bwd", scaled=True, sequences=tuple(lengths),
    )  # fmt: skip
    kernel = bwd4.kernel_for(problem, deterministic=True).main
    mList = List(lengths, kernel.tile_kv)
    mQ, mK = (
        SimpleNamespace(shape=(x, head_dim, heads, 1))
        for x, heads in ((total_q, kv_heads * GROUP), (total_kv, kv_heads))
    )
    before, mirrored, seen = {}, defaultdict(set), set()
    for tile in range(mList[0, 0] * kv_heads):
        kv_block, head, *of_sequence = place = tuple(map(int, kernel.locate_in_list(tile, mQ, mK, mList)))
        assert len(place) == kernel.words
        own = kernel.batch.lengths(place, None)
        start = of_sequence[0]
        seen.add((start, head, kv_block))
        if kernel.mirrors:
            mirrored[start].add(place[-1])
        first, _, _, last = map(int, kernel.work_on(place, *own))
        short = own[0] < 4096  # of the long sequence not everything: it has a thousand tiles of queries
        if short or tile % 13 == 0:
            visited = [int(kernel.q_tile_at(i, first, last, place, *own)) for i in range(first, last)]
            assert sorted(visited) == list(range(first, last))
        for q_tile in (x for x in range(first, last) if x % 29 == 0 or short):
            at, turn, _ = map(int, kernel.turn_of(kv_block, q_tile, *own, place))
            assert (at, turn) == (0, before.get((start, head, q_tile), -1) + 1)
            before[start, head, q_tile] = turn
    assert len(seen) == mList[0, 0] * kv_heads, "a tile of keys is fetched twice"
    assert kernel.mirrors == (head_dim > 64)
    if kernel.mirrors:
        starts = [sum(x for x, _ in lengths[:i]) for i in range(len(lengths))]
        for start, (seqlen_q, seqlen_kv) in zip(starts, lengths):
            expected = seqlen_kv <= 2 * seqlen_q and (len(lengths) > 1 or kv_heads > 1)
            if start != starts[-1]:
                expected = seqlen_q * kernel.column_bytes * head_dim > 48 * 2**20
            assert (1 in mirrored[start]) == expected


def test_one_sum_where_32_bits_would_count_too_many_bytes() -> None:
    """Of two sums the kernel asks how much memory queries and sums take, in 32 bits."""
    of = lambda n: Problem(1, 1, 1, n, n, 128, False, direction="bwd")
    assert [turns.sums_of(of(n), UNDIVIDED) for n in (2**20, 2**21, 2**22)] == [None, 1, 1]
    scratch = lambda n: selection.backward_scratch(DETERMINISTIC, of(n), None)
    assert [scratch(n)["dQ_sum"][0][0] for n in (2**20, 2**22)] == [2, 1]


def test_how_many_sums_there_are() -> None:
    """As the note has it; whoever has a window, a soft cap or packed sequences has a fixed number."""
    plain = Problem(1, 24, 24, 4096, 4096, 128, False, direction="bwd")
    for changes, sums in (
        ({}, 2),
        ({"causal": True}, 1),
        ({"seqlen_q": 512, "seqlen_kv": 512, "batch": 8}, 1),
        ({"seqlen_q": 512, "seqlen_kv": 512}, 2),  # few tiles: each wait counts
        ({"seqlen_q": 512, "seqlen_kv": 8192, "heads": 8, "kv_heads": 1, "causal": True}, 8),
        ({"seqlen_q": 2048, "seqlen_kv": 32768, "causal": True}, 2),
        ({"seqlen_q": 512, "seqlen_kv": 512, "batch": 8, "softcap": 30.0, "scaled": True}, 2),
        ({"window": (100, 0), "scaled": True}, 1),
        ({"sink": True, "causal": True, "scaled": True}, 1),
    ):
        problem = plain.with_(**changes)
        assert calls.sums_for(problem, True) == sums, changes
        assert calls.sums_for(problem, False) == 1


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_few_queries_begin_with_different_heads(causal: bool) -> None:
    """Those that are fetched first with the last head: then whoever comes to a head later was fetched later.
    Not where they begin one after the other anyway, or with one sum for who comes before and after."""
    lengths = 512, 2048  # 16 tiles of keys
    kernel = kernel_of(128, causal, None)
    for sums, tiles, group, begins in (
        (8, 16, 4, [3] * 4 + [2] * 4 + [1] * 4 + [0] * 4),
        (3, 16, 4, [0] * 16),
        (8, 265, 4, [0] * 16),
        (8, 16, 1, [0] * 16),
    ):
        count_sums(kernel, sums, lengths, group, tiles=tiles)
        fetched = range(15, -1, -1) if causal else range(16)
        assert [int(kernel.head_at(0, group, (block,), lengths[1])) for block in fetched] == begins
    # Under a mask tiles of so many queries are of unequal length, and heads are mirrored.
    count_sums(kernel, 8, (1024, 2048), 4, tiles=16)
    assert int(kernel.head_at(0, 4, (15 if causal else 0,), 2048)) == (0 if causal else 3)


def test_a_rotated_head_begins_everywhere() -> None:
    """At head_dim 128 without a mask: tiles of keys that are fetched together begin two tiles of queries
    apart, unless there is one sum or too much to stay in L2."""
    kernel = kernel_of(128, False, None)
    for sums, lengths, begins in (
        (2, (4096, 4096), list(range(62, -1, -2))),
        (1, (4096, 4096), [0] * 32),
        (2, (2**20, 4096), [0] * 32),
    ):
        count_sums(kernel, sums, lengths, group=2, tiles=1000)
        last = math.ceil(lengths[0] / kernel.tile_q)
        assert [int(kernel.q_tile_at(0, 0, last, (i,), *lengths)) for i in range(32)] == begins


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_few_queries_begin_with_different_ones(causal: bool, head_dim: int) -> None:
    """Of a head that has its key head for itself. Under a mask those tiles of keys that all queries see."""
    kernel, lengths = kernel_of(head_dim, causal, None), (512, 4096)
    last = 512 // kernel.tile_q
    for sums, tiles, spread in ((4, 32, True), (3, 32, False), (4, 265, False)):
        count_sums(kernel, sums, lengths, group=1, tiles=tiles)
        fetched = [(block, 0, 0, 0) for block in (range(27, -1, -1) if causal else range(32))]
        begins = [int(kernel.q_tile_at(0, 0, last, place, *lengths)) for place in fetched]
        assert begins == sorted(begins, reverse=True)
        assert set(begins) == (set(range(last)) if spread else {0})
        if causal:
            own = [int(kernel.q_tile_at(3, 3, last, (block, 0, 0, 0), *lengths)) for block in range(28, 32)]
            assert own == [3] * 4
