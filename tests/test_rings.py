"""Who waits for whom in k6: its producer and consumers as generators, on rings of counters, with the kernel's
own arithmetic of tiles. What would hang a GPU stops here, and so does a consumer that takes a wrong tile.

The order of puts, waits and releases is written down a second time: change both together.
"""

import random
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
from untraced import kernels

from harness.sweep import HEAD_DIMS
from hopper_attention.kernels.calls_slices import NOWHERE
from hopper_attention.kernels.contract import Problem

k6, SHORT = kernels("k6"), kernels("k6_rows").SHORT
Causal, ROWS = kernels("device.masks").Causal, kernels("device.query_tiles").ROWS
key_slices = kernels("device.key_slices")
LEAVES, in_one_word = key_slices.LEAVES, key_slices.in_one_word
k6_slices = kernels("k6_slices")

LENGTHS = (
    (64, 64),
    (203, 203),
    (513, 513),
    (1, 700),
    (100, 1000),
    (1000, 100),
    (385, 65),
    (65, 385),
    (193, 577),
)
MASKS = ((False, False), (True, False), (True, True))
PATIENCE = 2000  # turns in which nothing happens: with a handful of actors, all of them have had theirs


class Ring:
    """`stages` places, of which one is put again when all its listeners have left it. Places are counted on
    and never wrap, so that a wrong one is seen, and one that was put again is gone."""

    def __init__(self, stages: int, listeners: int):
        self.stages, self.listeners = stages, listeners
        self.content: dict[int, object] = {}
        self.puts, self.left = 0, Counter()

    def put(self, place: int, content: object) -> Iterator[None]:
        while place >= self.stages and self.left[place - self.stages] < self.listeners:
            yield
        self.content.pop(place - self.stages, None)
        self.content[place] = content
        self.puts = place + 1

    def wait(self, place: int) -> Iterator[None]:
        while place not in self.content:
            yield

    def leave(self, place: int) -> None:
        assert place in self.content, "left before it was put"
        self.left[place] += 1
        assert self.left[place] <= self.listeners, "left twice"

    def skip(self, place: int) -> Iterator[None]:
        yield from self.wait(place)
        self.leave(place)

    def happened(self) -> int:
        return self.puts + self.left.total()


Tile = tuple[int, tuple[int, int]] | tuple[int, tuple[int, int], tuple[int, ...]]


class Cta:
    """One CTA of `kernel`, at these tiles: (which one of the queries, (queries, keys) of its sequence), and
    of one that heads share (its first head, how many there are, how many have a key head), of a piece of one
    (its first tile of keys, how many, `in_one_word`)."""

    def __init__(self, kernel: k6.FlashAttentionForward, tiles: list[Tile]):
        self.kernel, self.tiles = kernel, tiles
        everyone = kernel.consumers
        self.q = [Ring(kernel.q_stages, 1) for _ in range(everyone)]
        self.k, self.v = Ring(kernel.stages, everyone), Ring(kernel.stages, everyone)
        self.message = Ring(1, everyone)
        self.begun = [False] * everyone

    def place(self, tile: Tile | None) -> tuple[int, ...]:
        """As it is told to the consumers."""
        if self.kernel.sliced:
            q_block, _, piece = tile or (NOWHERE, (0, 0), (0, 0, 0))
            return q_block, 0, 0, *piece
        q_block, lengths, *heads = tile or (NOWHERE, (0, 0))
        sharing = [int(self.kernel.batch.sharing(*heads[0]) if heads else 0)] * self.kernel.batch.shares
        head = heads[0][0] if heads else 0
        return (
            (q_block, head, 0, lengths[0], 0, lengths[1], *sharing) if self.kernel.packed else (q_block, 0, 0)
        )

    def span(self, tile: Tile | None, index: int) -> tuple[int, ...]:
        """Of a consumer: whether its rows lie past the end; the CTA's tiles of keys end; its own end; how
        many of those hide no pair; those of the CTA before its first; its first; the one behind those that
        may hide a row's first key."""
        lengths = tile[1] if tile else (0, 0)
        place = self.kernel.batch.of_consumer(self.place(tile), index)
        first_row, *span, begin = self.kernel.span_of(place, index, lengths)
        past_the_end = first_row >= self.kernel.batch.lengths(place, lengths)[0]
        return bool(past_the_end), *map(int, (*span, *begin))

    def producer(self) -> Iterator[None]:
        place = 0
        for tile, (q_block, extents, *_) in enumerate(self.tiles):
            yield from self.message.put(tile, self.tiles[tile])
            told = self.place(self.tiles[tile])
            lengths = self.kernel.batch.lengths(told, extents)
            first = int(self.kernel.first_of_tile(q_block, *lengths))
            at = lambda block: (tile, *map(int, self.kernel.batch.keys_at(told, block)[1:]))
            for consumer, q in enumerate(self.q):
                yield from q.put(tile, tile)
                if consumer == 0:
                    yield from self.k.put(place, at(first))
            yield from self.v.put(place, at(first))
            place += 1
            for block in range(first + 1, int(self.kernel.tiles_loaded(told, lengths))):
                yield from self.k.put(place, at(block))
                yield from self.v.put(place, at(block))
                place += 1
        yield from self.message.put(len(self.tiles), None)

    def own(self, work: Tile, tile: int, index: int, block: int) -> tuple[int, ...]:
        """What a consumer is to find of the block-th tile of its keys."""
        if self.kernel.sliced:
            return tile, work[2][0] + block
        if not self.kernel.batch.shares:
            return tile, block
        if len(work) == 2:
            return tile, block, 0
        head, _, group = work[2]
        return tile, block, (head + index) // group - head // group

    def consumer(self, index: int) -> Iterator[None]:
        kernel, q, k, v = self.kernel, self.q[index], self.k, self.v
        at_k = at_v = tile = 0
        work = yield from self.hear(0)
        past_the_end, kv_blocks, own, visible, before, first, edge = self.span(work, index)
        for _ in range(before):
            yield from k.skip(at_k)
            at_k += 1
        if work is not None:
            yield from q.wait(0)
            yield from k.wait(at_k)
        while kernel.config.in_turn and index > 0 and not self.begun[index - 1]:
            yield
        self.begun[index] = True
        while work is not None:
            assert q.content[tile] == tile
            assert past_the_end or k.content[at_k] == self.own(work, tile, index, first)
            k.leave(at_k)
            at_k += 1
            for _ in range(before):
                yield from v.skip(at_v)
                at_v += 1
            if kernel.o_over_q and kernel.q_stages == 2 and tile > 0:
                q.leave(tile - 1)
            for block in (*range(first + 1, edge), *range(edge, visible), *range(max(edge, visible), own)):
                yield from k.wait(at_k)
                yield from v.wait(at_v)
                yield
                assert (q.content[tile], k.content[at_k]) == (tile, self.own(work, tile, index, block))
                assert at_k == at_v + 1, "V's next place would not be K's of now"
                k.leave(at_k)
                yield
                assert v.content[at_v] == self.own(work, tile, index, block - 1)
                v.leave(at_v)
                at_k, at_v = at_k + 1, at_v + 1
            hidden, last, was_past = kv_blocks - own, own - 1, past_the_end
            if past_the_end:
                for _ in range(hidden):
                    yield from v.skip(at_v)
                    yield from k.skip(at_k)
                    at_k, at_v = at_k + 1, at_v + 1
                hidden = 0
            if not kernel.o_over_q:
                q.leave(tile)
            yield from v.wait(at_v)
            assert was_past or v.content[at_v] == self.own(work, tile, index, last)
            work = yield from self.hear(tile + 1)
            past_the_end, kv_blocks, own, visible, before, first, edge = self.span(work, index)
            for overlapping in (True, False):
                if overlapping == (kernel.q_stages == 2):  # the next tile's first Q·Kᵀ, before or after O
                    for _ in range(hidden + before):
                        yield from k.skip(at_k)
                        at_k += 1
                    if work is not None:
                        yield from q.wait(tile + 1)
                        yield from k.wait(at_k)
                if overlapping:
                    yield
                    for _ in range(1 + hidden):
                        yield from v.skip(at_v)
                        at_v += 1
                    assert not kernel.o_over_q or tile in q.content, "O would take the place of another Q"
                    if kernel.q_stages == 1:
                        q.leave(tile)
            tile += 1

    def hear(self, tile: int) -> Generator[None, None, tuple[int, tuple[int, int]] | None]:
        yield from self.message.wait(tile)
        work = self.message.content[tile]
        self.message.leave(tile)
        return work

    def run(self, seed: int) -> bool:
        """Whether everyone comes to an end, taking turns at random, and leaves every K, V and message."""
        turns = random.Random(seed)
        actors = [self.producer(), *(self.consumer(i) for i in range(self.kernel.consumers))]
        rings = [*self.q, self.k, self.v, self.message]
        idle, before = 0, -1
        while actors and idle < PATIENCE:
            actor = turns.choice(actors)
            if next(actor, "done") == "done":
                actors.remove(actor)
            now = sum(ring.happened() for ring in rings) - len(actors)
            idle, before = (idle + 1 if now == before else 0), now
        return not actors and all(
            ring.left.total() == ring.puts * self.kernel.consumers for ring in (self.k, self.v, self.message)
        )


def ctas(kernel: k6.FlashAttentionForward) -> Iterator[Cta]:
    for number, lengths in enumerate(LENGTHS):
        q_blocks = range(-(-lengths[0] // kernel.tile_q))
        yield Cta(kernel, [(x, lengths) for x in random.Random(number).choices(q_blocks, k=4)])


@pytest.mark.parametrize(("causal", "top_left"), MASKS)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 96, 192, 256])
def test_nobody_waits_forever(head_dim: int, causal: bool, top_left: bool) -> None:
    mask = Problem.square(1, 1, 1, head_dim, causal, top_left=top_left)
    for chosen in [{}, *(k6.VARIANTS[label] for label in k6.variants_for(mask))]:
        kernel = k6.kernel_for(mask, **chosen)
        for seed, cta in enumerate(ctas(kernel)):
            assert cta.run(seed), f"{cta.tiles}: they wait for each other"


WINDOWS = ((0, 0), (63, 0), (64, 0), (127, 0), (130, 70), (-1, 10), (10, -1), (500, 3))


@pytest.mark.parametrize("rows", [None, *SHORT])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 256])
def test_nobody_waits_forever_of_windows_and_packed_sequences(head_dim: int, rows: int | None) -> None:
    """Tiles of sequences of any lengths, some empty, in one CTA; a window's consumers begin and end at
    different keys."""
    for number, window in enumerate([None, *WINDOWS] * 3):
        choose = random.Random(number)
        problem = Problem.square(1, 1, 1, head_dim, window is None and number % 2 == 0, window=window)
        packed = problem.with_(sequences=((1, 1),)) if number % 3 else problem
        config = {"config": SHORT[rows][head_dim]} if rows else {}
        kernel = k6.kernel_for(packed, **config)
        for seed in range(4):
            # Of one tensor all heads have the same lengths, of packed sequences each has its own.
            lengths = [
                (choose.randint(1, 700), choose.randint(0 if number % 3 else 1, 700)) for _ in range(6)
            ]
            lengths = lengths if number % 3 else lengths[:1] * 6
            tiles = [(choose.randrange(-(-x[0] // kernel.tile_q)), x) for x in lengths]
            assert Cta(kernel, tiles).run(seed), f"{window} {tiles}: they wait for each other"


@pytest.mark.parametrize("rows", [None, *SHORT])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 256])
def test_nobody_waits_forever_of_tiles_that_heads_share(head_dim: int, rows: int | None) -> None:
    """Among tiles that one head has, under every mask; each consumer multiplies its own head's keys."""
    config = {"config": SHORT[rows][head_dim]} if rows else {}
    for number, window in enumerate([None, None, *WINDOWS]):
        choose = random.Random(number)
        problem = Problem.square(1, 1, 1, head_dim, number == 1, window=window)
        kernel = k6.kernel_for(problem.with_(sequences=((1, 1),)), **config)
        if not kernel.batch.shares:
            assert kernel.consumers == 1
            return

        def some_tile() -> Tile:
            if choose.random() < 0.3:  # of one head
                lengths = choose.randint(1, 700), choose.randint(0, 700)
                return choose.randrange(-(-lengths[0] // kernel.tile_q)), lengths
            group = choose.choice((1, 1, 2, 3, 4, 5, 8))
            heads = group * choose.randint(1, 5)
            head = choose.randrange(0, heads, kernel.consumers)
            lengths = choose.randint(1, ROWS), choose.randint(0, kernel.tile_kv)
            return 0, lengths, (head, heads, group)

        for seed in range(12):
            tiles = [some_tile() for _ in range(8)]
            assert Cta(kernel, tiles).run(seed), f"{window} {tiles}: they wait for each other"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [None, 192, 64])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 96, 192, 256])
def test_nobody_waits_forever_of_pieces_of_tiles(
    head_dim: int, rows: int | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any run of the keys that a tile sees, of which some of its consumers may see none."""
    monkeypatch.setattr("cutlass.cute.arch.make_warp_uniform", int)
    kernel = k6_slices.kernel_for(Problem.square(1, 1, 1, head_dim, causal), rows)
    for seed in range(60):
        choose = random.Random(seed)
        lengths, tiles = choose.choice(LENGTHS), []
        for slice_ in range(6):
            q_block = choose.randrange(-(-lengths[0] // kernel.tile_q))
            blocks = int(kernel.kv_blocks((q_block + 1) * kernel.tile_q, *lengths))
            first = choose.randrange(blocks)
            count = choose.randint(1, blocks - first)
            word = in_one_word(slice_, 0 if first + count == blocks else LEAVES)
            tiles.append((q_block, lengths, (first, count, word)))
        assert Cta(kernel, tiles).run(seed), f"{tiles}: they wait for each other"


@pytest.mark.parametrize("wrong", ["tiles_of_keys", "keys_at"])
def test_keys_of_another_piece_are_seen(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """A producer that loads all that the tile sees, or the tile's first keys."""
    monkeypatch.setattr("cutlass.cute.arch.make_warp_uniform", int)
    kernel = k6_slices.kernel_for(Problem.square(1, 1, 1, 128, True))
    left, whole = in_one_word(0, LEAVES), in_one_word(0, 0)
    tiles = [(2, (600, 600), (3, 2, left)), (1, (600, 600), (0, 6, whole))]
    assert Cta(kernel, tiles).run(0)
    faults = {"tiles_of_keys": lambda self, place, tiles: tiles, "keys_at": lambda self, place, x: (None, x)}
    monkeypatch.setattr(type(kernel.batch), wrong, faults[wrong])
    try:
        ended = Cta(kernel, tiles).run(0)
    except AssertionError:  # of what a consumer found in a place
        ended = False
    assert not ended


@pytest.mark.parametrize("wrong", ["before", "behind"])
def test_a_consumer_that_takes_another_heads_keys_is_seen(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    kernel = k6.kernel_for(Problem.square(1, 1, 1, 128, True).with_(sequences=((1, 1),)))
    tiles = [(0, (30, 40), (head, 16, 1)) for head in range(0, 16, kernel.consumers)]
    assert Cta(kernel, tiles).run(0)
    right = getattr(kernel.batch, wrong)
    # The producer, which asks the first consumer's `behind`, goes on loading them.
    short = lambda self, place, consumer: right(place, consumer) if consumer == 0 else 0
    monkeypatch.setattr(type(kernel.batch), wrong, short)
    try:
        ended = Cta(kernel, tiles).run(0)
    except AssertionError:  # of what it found in a place
        ended = False
    assert not ended


def test_a_wait_that_has_no_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = k6.FlashAttentionForward(128, Causal(), "bfloat16")
    monkeypatch.setattr(kernel, "stages", 2)  # too few for the keys that only others see
    assert not all(cta.run(seed) for seed, cta in enumerate(ctas(kernel)))


def test_too_few_stages_are_refused() -> None:
    with pytest.raises(AssertionError):
        k6.FlashAttentionForward(128, Causal(), "bfloat16", k6.Config(3, 64, 2, (32, 160)))


def test_parts_that_leave_keys_over_are_refused() -> None:
    with pytest.raises(AssertionError, match="groups of 8 columns"):
        k6.FlashAttentionForward(128, Causal(), "bfloat16", k6.Config(3, 80, 3, (32, 160), parts=4))
