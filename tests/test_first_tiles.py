"""A CTA's first tile of packed sequences, found from the lengths while the list is made: the kernel's own
look-up, in a simulated warp, beside the list's."""

import random
from types import SimpleNamespace

import pytest
from simulated_warp import WARP, simulated
from test_shared_tiles import LENGTHS, List, kernel_of, tile_list

from harness import policy_models

LISTING_ENDS = 3  # final tiles of each head
RNG = random.Random(0)
BATCHES = (
    ((1024, 1024),) * 16,
    ((64, 64),) * 20,
    LENGTHS,
    ((0, 0),) * 5,
    ((0, 9), (300, 300), (0, 0)),
    ((40, 40), (64, 10), (2048, 2048)),
    ((1, 1),) * WARP,
    ((200, 200), *((5, 5),) * 20),
    ((1024, 1024),) * (WARP + 1),
    tuple((n, n) for n in RNG.choices(range(2049), k=16)),
    tuple((RNG.randint(0, 400), RNG.randint(0, 3000)) for _ in range(WARP)),
)


class Integers(list):
    """A tensor of integers."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


def look_up(kernel, tile: int, lengths, heads: int, kv_heads: int):
    """(whether it is known, the place) of a tile, as every lane of a warp finds it."""
    starts = [Integers([0]), Integers([0])]
    for pair in lengths:
        for side in (0, 1):
            starts[side].append(starts[side][-1] + pair[side])
    given = (*starts, *starts, 0, starts[0][-1], starts[1][-1])  # nothing of `seqused` counts
    with simulated(tile_list) as warp:
        together = int(kernel.batch.ctas_for(heads))
        found = warp.run(lambda: kernel.lists.look_up(tile, heads, together, given, LISTING_ENDS))
    assert len({tuple(map(int, x)) for x in found}) == 1, "lanes disagree"
    known, shared, inside, blocks, *sequence = found[0]
    block, head = kernel.locate_in_sequence(int(inside), max(1, int(blocks)), heads, int(sequence[3]))
    place = kernel.batch.place(block, head, sequence, bool(shared), int(inside), heads, kv_heads)
    return bool(known), tuple(map(int, place))


def class_of(kernel, lengths: tuple[int, int]) -> int:
    """The class of a sequence; that of those whose heads share tiles is behind all others."""
    shares = kernel.batch.shares and policy_models.is_shared(lengths, kernel.tile_kv)
    return tile_list.CLASSES if shares else policy_models.class_of(lengths[1])


@pytest.mark.parametrize("lengths", BATCHES, ids=lambda x: f"{len(x)} of {max(max(n) for n in x)}")
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (6, 3), (1, 1)])
@pytest.mark.parametrize(
    ("head_dim", "rows", "causal"), [(128, None, True), (64, None, False), (64, 64, True), (256, None, True)]
)
def test_a_tile_that_is_known_ahead_is_the_lists(
    head_dim: int, rows: int | None, causal: bool, heads: int, kv_heads: int, lengths
) -> None:
    kernel = kernel_of(head_dim, causal, rows)
    tiles_of = List(lengths, kernel)
    mQ, mK = (SimpleNamespace(shape=(0, 0, n, 1)) for n in (heads, kv_heads))
    tiles, alone = (int(x) for x in kernel.batch.listed_tiles(tiles_of, heads))
    alone_rows = alone if kernel.batch.shares else tiles // heads
    classes = [class_of(kernel, n) for n in lengths]
    first_class = min((c for c, (queries, _) in zip(classes, lengths) if queries), default=None)
    taken_first = min(tiles, 132)
    for tile in {0, 1, heads, taken_first // 2, max(0, taken_first - 1), max(0, tiles - 1), tiles, tiles + 5}:
        known, place = look_up(kernel, tile, lengths, heads, kv_heads)
        wanted = False
        if tile < tiles and len(lengths) <= WARP:
            here = tuple(map(int, kernel.locate_listed(tile, alone, mQ, mK, tiles_of)))
            row, shared = tile // heads, kernel.batch.shares and here[6] != 0
            if shared:
                row = alone + (tile - alone * heads) // int(kernel.batch.ctas_for(heads))
            sequence, first, _ = (tiles_of[1 + row, i] for i in range(3))
            wanted = classes[sequence] == first_class and (shared or first < alone_rows - LISTING_ENDS)
            assert not wanted or place == here
        assert known == wanted
