"""Packed sequences that count as equally long: the kernel's own walk through their tiles, which nothing
lists, on plain integers, and when the library asks for it."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
from test_first_tiles import Integers
from test_shared_tiles import LENGTHS, kernel_of
from untraced import Divisor, kernels

from hopper_attention import ways
from hopper_attention.kernels import division
from hopper_attention.kernels.contract import Problem

equal_tiles = kernels("device.equal_tiles")
sizes_of = kernels("device.prepared_order").sizes_of
BATCHES = (
    ((256, 256),) * 5,
    LENGTHS,
    ((0, 0),) * 3,
    ((0, 9), (300, 300), (0, 0)),
    ((2000, 2000), *(((7, 7),) * 40)),
    ((1, 1),),
)


def starts_of(lengths) -> list[Integers]:
    return [Integers([0, *itertools.accumulate(n[side] for n in lengths)]) for side in (0, 1)]


def walked(
    kernel, lengths, each: int, heads: int, kv_heads: int, ctas: int, monkeypatch
) -> list[tuple[int, ...]]:
    """The places that all CTAs take, one CTA after the other, as its producer goes from one to the next."""
    starts, sequences = starts_of(lengths), len(lengths)
    totals = starts[0][-1], starts[1][-1]
    section = kernel.section(max(1, totals[1] // sequences)) if kernel.mask.hides else 0
    monkeypatch.setattr(kernels("device.prepared_order"), "divisor", Divisor)
    sizes = sizes_of(kernel.order, each, heads, sequences, section)
    listing = None, 3, each, sizes, *starts, *starts, 0, *totals  # nothing of `seqused` counts
    mQ, mK = (SimpleNamespace(shape=(0, 0, n, 1)) for n in (heads, kv_heads))
    tiles = max(1, each * sequences * heads)
    ctas = min(ctas, tiles)
    numbers = itertools.count()
    monkeypatch.setattr(equal_tiles, "ask", lambda counter: next(numbers))
    monkeypatch.setattr(equal_tiles, "fetched", lambda asked, counter, tiles: asked + ctas)
    monkeypatch.setattr(equal_tiles.cute.arch, "griddepcontrol_wait", lambda: None)
    read = lambda index, given: kernel.lists.read(index, sequences, given)[0]
    monkeypatch.setattr(equal_tiles, "read_together", read)  # whose lanes have no numbers here
    places = []
    for cta in range(ctas):
        inputs = tiles, None, mQ, mK, listing
        tile, place, found, alone = kernel.first_tile(cta, *inputs)
        assert (found, alone) == (tiles, 0)
        while tile < tiles:
            places.append(tuple(map(int, place)))
            assert kernel.once_told(len(places) == 1, tiles, alone, mQ, listing) == (tiles, 0)
            goes_on = kernel.goes_on(place, listing)
            then = place, goes_on, None if goes_on else next(numbers)
            tile, place = kernel.next_tile(tile, then, tiles, alone, None, mQ, mK, listing)
    assert next(numbers) == tiles, "the last fetch has another number: the counter is not left at zero"
    return places


@pytest.mark.parametrize("lengths", BATCHES, ids=lambda x: f"{len(x)} of {max(max(n) for n in x)}")
@pytest.mark.parametrize("each", [1, 2, 3, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "ctas"), [(6, 3, 132), (16, 16, 5), (1, 1, 1)])
@pytest.mark.parametrize(
    ("head_dim", "rows", "causal"), [(128, None, True), (64, None, False), (64, 64, True)]
)
def test_every_tile_is_taken_once_however_many_a_sequence_counts_as(
    head_dim: int, rows: int | None, causal: bool, heads: int, kv_heads: int, ctas: int, each: int, lengths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel = kernel_of(head_dim, causal, rows)
    places = walked(kernel, lengths, each, heads, kv_heads, ctas, monkeypatch)
    at_q, at_kv = starts_of(lengths)
    nobody_shares = [0] * (kernel.batch.words - 6)
    wanted = Counter(
        (block, head, start_q, n, start_kv, keys, *nobody_shares)
        for start_q, start_kv, (n, keys) in zip(at_q, at_kv, lengths)
        for head in range(heads)
        for block in range(-(-n // kernel.tile_q))
    )
    assert Counter(places) == wanted


def test_equal_sequences_come_as_a_batch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for head_dim, causal in itertools.product((64, 128, 256), (False, True)):
        kernel = kernel_of(head_dim, causal)
        heads, count, length = 6, 5, 1000
        each = -(-length // kernel.tile_q)
        places = walked(kernel, ((length, length),) * count, each, heads, 3, 1, monkeypatch)
        section = kernel.section(length)
        for tile, (block, head, start, *_) in enumerate(places):
            found = kernel.order.locate(tile, each, heads * count, section)
            assert (block, start // length * heads + head) == tuple(map(int, found))


@pytest.mark.parametrize(
    ("total", "sequences", "longest", "equal"),
    [
        (16384, 16, 1024, True),
        (16384, 16, 1100, True),
        (16384, 16, 1200, False),  # more empty tiles than the list costs
        (16384, 16, 600, True),  # half of the rows are of no sequence, or the hint is wrong
        (16384, 16, 500, False),
        (16384, 1, 16384, True),
        (16384, 0, 16384, False),
        (0, 5, 1, False),
    ],
)
def test_when_sequences_count_as_equal(total: int, sequences: int, longest: int, equal: bool) -> None:
    assert ways.are_equal(total, sequences, longest) == equal


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("count", "length"), [(256, 64), (512, 32), (16, 1024), (4, 4096), (1, 300)])
def test_equal_sequences_have_the_tiles_of_a_batch(head_dim: int, count: int, length: int) -> None:
    total = count * length
    packed = Problem(1, 8, 8, total, total, head_dim, True, sequences=((0, 0),) * count)
    dense = Problem(count, 8, 8, length, length, head_dim, True)
    shared = length <= 64 and head_dim in (96, 128)
    assert ways.shares_heads(packed) == shared
    rows = ways.way_of(packed, lengths=ways.Lengths.EQUAL).rows
    assert rows == division.rows_of(packed if shared else dense)
