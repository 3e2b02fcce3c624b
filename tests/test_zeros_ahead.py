"""Zeros for dQ's sums of packed sequences, which tiles of keys write ahead of those that add there: each sum
is zeroed once, by tiles that are fetched before any that adds to it, and who waits for them waits for as many
as are written. The kernel's own arithmetic, run in Python."""

import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from test_turns import List
from untraced import kernels

from hopper_attention.kernels.contract import Problem

bwd4 = kernels("bwd4")
MASKS = ({"causal": False}, {"causal": True}, {"causal": False, "window": (50, 0)})
MASKS += ({"causal": False, "window": (-1, 10)}, {"causal": False, "window": (0, -1)})


class Shuffled(List):
    """Sequences in any order, as a list has them that is sorted by something else, and of each the tile of
    queries with which it begins."""

    def __init__(self, lengths: list[tuple[int, int]], kernel: SimpleNamespace, random_: random.Random):
        super().__init__(lengths, kernel.tile_kv)
        groups = [[row for row in self.rows if row[0] == i] for i in range(len(lengths))]
        random_.shuffle(groups)
        self.rows = []
        for group in groups:
            first = len(self.rows)
            for i, _, blocks, start_q, *rest, _ in group:
                place = (start_q + i * kernel.tile_q) // kernel.tile_q
                self.rows.append((i, first, blocks, start_q, *rest, place))
        self.shape = (len(self.rows) + 1, 8)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has nobody to tell that its numbers are everyone's."""
    monkeypatch.setattr("cutlass.cute.arch.make_warp_uniform", int)


@pytest.mark.parametrize("seed", range(40))
def test_sums_are_zero_before_anybody_adds(seed: int) -> None:
    random_ = random.Random(seed)
    count = random_.choice((1, 2, 3, 5, 9))
    of_q, of_kv = (0, 1, 63, 64, 65, 128, 200, 500, 1500), (0, 1, 127, 128, 129, 300, 1000, 2500)
    lengths = [(random_.choice(of_q), random_.choice(of_kv)) for _ in range(count)] + [(200, 300)]
    head_dim, kv_heads, group = (random_.choice(x) for x in ((64, 128), (1, 2, 5, 16, 33), (1, 3, 7)))
    total_q, total_kv = map(sum, zip(*lengths))
    problem = Problem(
        1, kv_heads * group, kv_heads, total_q, total_kv, head_dim, direction="bwd", scaled=True,
        sequences=tuple(lengths), **random_.choice(MASKS),
    )  # fmt: skip
    kernel = bwd4.kernel_for(problem).main
    mList, columns = Shuffled(lengths, kernel, random_), head_dim // 64
    mQ = SimpleNamespace(shape=(total_q, head_dim, kv_heads * group, 1))
    mK = SimpleNamespace(shape=(total_kv, head_dim, kv_heads, 1))
    sums = SimpleNamespace(shape=(kv_heads * group, 0, columns, 4096))

    def wanted(first: int, blocks: int, seqlen_q: int, head: int) -> tuple[int, ...]:
        return tuple(map(int, kernel.zeros_wanted(first, blocks, seqlen_q, head, mQ, mK, sums, mList[0, 0])))

    def sums_of(head: int, block: int, seqlen_q: int) -> list[tuple[int, int, int]]:
        blocks = math.ceil(seqlen_q / kernel.tile_q) * kernel.blocks
        return [(head, block + i, c) for i in range(blocks) for c in range(columns)]

    # By the preprocess: sequences without a key, and the first section of the first one in the list
    zeroed, written = set(), Counter()
    _, _, blocks, _, first_q, _, _, first_place = mList.rows[0]
    _, together, _ = wanted(0, blocks, first_q, 0)
    start = 0
    for i, (seqlen_q, seqlen_kv) in enumerate(lengths):
        place = (start + i * kernel.tile_q) // kernel.tile_q
        for head in range(kv_heads * group):
            if not seqlen_kv or (place == first_place and head // group < together):
                zeroed.update(sums_of(head, place * kernel.blocks, seqlen_q))
        start += seqlen_q

    seen = set()
    for tile in range(mList[0, 0] * kv_heads):
        located = map(int, kernel.locate_in_list(tile, mQ, mK, mList))
        kv_block, head, _, seqlen_q, _, seqlen_kv, block, first = located
        seen.add((first, head, kv_block))
        blocks = math.ceil(seqlen_kv / kernel.tile_kv)
        own, together, rows = wanted(first, blocks, seqlen_q, head)
        if section := first * kv_heads + own:  # who is not of the first one waits for so many
            assert written[section] == together * rows
        for query_head in range(head * group, (head + 1) * group):
            assert zeroed.issuperset(sums_of(query_head, block, seqlen_q))
        # Its share of what comes next: as `write_listed_zeros`
        mine, tiles = (head - own) * blocks + kv_block, together * blocks
        head, ahead = own + together, first
        if head == kv_heads:
            head, ahead = 0, first + blocks
        if ahead < mList[0, 0]:
            _, _, blocks, _, seqlen_q, _, _, place = mList.rows[ahead]
            _, together, rows = wanted(ahead, blocks, seqlen_q, head)
            share, every = math.ceil(together * rows / tiles), together * rows
            for i in range(mine * share, min(every, (mine + 1) * share)):
                nth, at = divmod(i, rows // group)
                one = head * group + nth, place * kernel.blocks + at // columns, at % columns
                assert one not in zeroed
                zeroed.add(one)
                written[ahead * kv_heads + head] += 1
            assert ahead * kv_heads + head < kv_heads * (total_kv // kernel.tile_kv + len(lengths))
    assert len(seen) == mList[0, 0] * kv_heads
