"""k6_slices: which pieces of which tiles CTAs take, and who waits for whom; the kernel's own arithmetic on
plain integers."""

import functools
import math
import random
from types import SimpleNamespace

import pytest
from untraced import Divisor, kernels

from hopper_attention import ways
from hopper_attention.kernels.calls_slices import rows_of_group
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.constants import SMS
from hopper_attention.ways import Kind, Way

k6_slices, k6_groups, key_slices = kernels("k6_slices"), kernels("k6_groups"), kernels("device.key_slices")
group_rows = kernels("device.group_rows")
key_slices.Int32 = int
key_slices.divisor = Divisor
LEAVES = key_slices.LEAVES
RNG = random.Random(0)
SHAPES = [  # batch, heads, queries, keys
    (1, 12, 1500, 1500),
    (1, 8, 512, 8192),
    (1, 1, 1, 131072),
    (1, 24, 4608, 4608),
    (3, 5, 65, 64),
    (40, 16, 100, 100),
    (1, 132, 192, 640),
    *((RNG.randint(1, 4), RNG.randint(1, 40), RNG.randint(1, 3000), RNG.randint(1, 9000)) for _ in range(20)),
]


def pieces_of(
    problem: Problem, rows: int | None, sms: int, file: object = k6_slices
) -> tuple[object, list[list[tuple[int, ...]]]]:
    """The kernel, and what each slice has, in the order of its producer."""
    kernel = file.kernel_for(problem, rows, sms)
    kernel.kv_blocks = functools.cache(kernel.kv_blocks)  # asked of each head's tiles anew
    slots = file.workspace(problem, rows, sms)["states"][0][0]
    states = SimpleNamespace(shape=(slots,))
    lengths = problem.seqlen_q, problem.seqlen_kv
    q, k = [
        SimpleNamespace(shape=(problem.batch, heads, n, 0))
        for heads, n in zip((problem.heads, problem.kv_heads), lengths)
    ]
    members, ctas = kernel.slices_of(states, None, q, k, None)
    assert 1 <= ctas <= sms * kernel.config.ctas <= slots
    kernel.slices = key_slices.Slices(*members)
    expected = check_model(problem, kernel, ctas)
    assert bool(kernel.slices.parts) == expected.shared
    mQ, mK = in_kernel(problem)
    found = []
    for number in range(int(ctas)):
        at, pieces = kernel.first_piece(number, mQ, mK), []
        while (tile := at[0]) < (tiles := at[1]):
            *place, word = map(int, kernel.locate_piece(number, tile, tiles, mQ, mK))
            assert word < 2**31
            pieces.append((*place, *key_slices.from_one_word(word)))
            at = kernel.next_piece((tile + pieces[-1][4], *at[1:]), mQ, mK)
        found.append(pieces)
    assert max(piece[-2] for pieces in found for piece in pieces) < slots
    assert expected.steps >= max(sum(piece[4] for piece in pieces) for pieces in found)
    return kernel, found


def in_kernel(problem: Problem) -> list[SimpleNamespace]:
    """Stand-ins for Q and K as the kernel sees them."""
    extents = (problem.seqlen_q, problem.heads), (problem.seqlen_kv, problem.kv_heads)
    return [SimpleNamespace(shape=(n, 0, heads, problem.batch)) for n, heads in extents]


def check_model(problem: Problem, kernel: object, ctas: int) -> ways.Slices:
    """`ways`, which chooses, has the kernel's numbers."""
    grouped = isinstance(kernel, k6_groups.FlashAttentionGroups)
    way = Way(kernel.tile_q, Kind.GROUPS if grouped else Kind.SLICES)
    steps = [math.ceil(keys / kernel.tile_kv) for keys in ways.seen_by_tiles(problem, way)]
    rows, heads = ways.rows_of_heads(problem, way)
    assert (rows, heads) == kernel.rows_of(problem.seqlen_q, problem.heads, problem.kv_heads)
    assert len(steps) == -(-rows // kernel.tile_q)
    as_counted = problem.with_(heads=heads)
    of_kernel, ours = kernel.slices, ways.slices_of(as_counted, steps, kernel.sms, kernel.config.ctas)
    assert (of_kernel.divided, of_kernel.share, of_kernel.whole) == ours[:3]
    assert ctas == max(ours.count, min(ours.whole, kernel.sms))
    return ours


@pytest.mark.parametrize("sms", [SMS, 20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rows"), [(64, None), (128, None), (256, None), (64, 192), (64, 64), (128, 64)]
)
def test_every_step_is_some_slice_s_and_nobody_waits_for_a_later_one(
    head_dim: int, rows: int | None, causal: bool, sms: int
) -> None:
    for batch, heads, queries, keys in SHAPES:
        problem = Problem(batch, heads, heads, queries, keys, head_dim, causal)
        check_pieces(*pieces_of(problem, rows, sms), problem)


def check_pieces(kernel: object, slices: list[list[tuple[int, ...]]], problem: Problem) -> None:
    """Every step is some slice's, and every piece that is left is added: by who has the tile's end, who waits
    for first pieces of slices fetched before, or in parts, behind all slices."""
    taken: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    parts, slots = kernel.slices.parts, set()
    for number, pieces in enumerate(slices):
        assert pieces, "a CTA without work"
        for i, (block, head, at, first, count, slot, adds) in enumerate(pieces):
            assert count > 0 and (parts or slot == number)
            if adds == LEAVES:
                assert parts or i == 0, "what others wait for comes first"
                assert slot not in slots, "two pieces in one place"
                slots.add(slot)
            assert adds <= 0 or (i == len(pieces) - 1 and not parts), "who waits has done all else"
            taken.setdefault((at, head, block), []).append((first, count, slot, adds))
    rows, heads = kernel.rows_of(problem.seqlen_q, problem.heads, problem.kv_heads)
    assert len(taken) == problem.batch * heads * -(-rows // kernel.tile_q)
    sums = sums_of(kernel, problem)
    for (at, head, block), of_tile in taken.items():
        blocks = int(kernel.kv_blocks((block + 1) * kernel.tile_q, rows, problem.seqlen_kv))
        of_tile.sort()
        ends = [first + count for first, count, *_ in of_tile]
        assert [first for first, *_ in of_tile] == [0, *ends[:-1]] and ends[-1] == blocks
        *left, (*_, slot, adds) = of_tile
        assert all(x[-1] == LEAVES for x in left)
        assert [x[-2] for x in of_tile] == list(range(slot - len(left), slot + 1))
        if parts and left:
            assert adds == LEAVES
            assert sums.pop((block, head, at)) == [
                (part, len(of_tile), of_tile[0][-2]) for part in range(parts)
            ]
        else:
            assert adds == len(left)
    assert all(pieces == 1 for of_tile in sums.values() for _, pieces, _ in of_tile)


def sums_of(kernel: object, problem: Problem) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """By tile, its parts of a sum as the producers find them."""
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    mQ, mK = in_kernel(problem)
    for part in range(kernel.slices.sums):
        *tile, which, pieces, slot = map(int, kernel.locate_part(part, mQ, mK))
        found.setdefault(tuple(tile), []).append((which, pieces, slot))
    return found


@pytest.mark.parametrize("begun", [1, 5, 31, 63, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_sums_are_made_once(begun: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some CTAs begin when others have ended; and the next launch finds the counters at zero."""
    problem = Problem(1, 8, 1, 8, 32768, 128, causal)
    kernel, slices = pieces_of(problem, 64, SMS, k6_groups)
    memory, ctas, sums = {"counter": 0, "ended": 0}, len(slices), kernel.slices.sums
    assert (ctas, sums) == (64, 16)

    def atomic_add(place: str, value: int) -> int:
        memory[place] += value
        return memory[place] - value

    class Counter:
        iterator = SimpleNamespace(llvm_ptr="counter")
        __setitem__ = lambda _, at, value: memory.update(counter=value)

    arch = SimpleNamespace(
        grid_dim=lambda: (ctas, 1, 1),
        lane_idx=lambda: 0,
        load=lambda place, *_, **__: memory[place],
        store=lambda place, value, **_: memory.update({place: value}),
        atomic_add=atomic_add,
        shuffle_sync=lambda value, lane: value,
    )
    monkeypatch.setattr(key_slices.cute, "arch", arch)
    monkeypatch.setattr(kernel, "left", lambda *_: "ended", raising=False)
    mQ, mK = in_kernel(problem)
    for _ in range(2):  # launches
        taken, parts = [], []
        for together in (begun, ctas - begun):
            own = [atomic_add("counter", 1) for _ in range(together)]
            for number in own:
                tile, tiles, *_ = kernel.own_slice(number, mQ, mK)[1]
                assert tile < tiles, "consumers wait for a first tile"
            taken += own
            for _ in own:
                while (part := kernel.next_part(Counter())) < sums:
                    assert len(taken) == ctas, "who waits does so for slices that are taken"
                    parts.append(part)
                kernel.end_launch(Counter())
        assert taken == list(range(ctas)) and parts == list(range(sums))
        assert memory == {"counter": 0, "ended": 0}


def test_sums_are_shared_where_tiles_have_many_pieces() -> None:
    shared = lambda *shape: pieces_of(Problem(*shape), None, SMS)[0].slices.parts
    assert shared(1, 8, 8, 1, 70000, 128, False) == 16
    assert shared(1, 16, 16, 64, 8192, 256, True) == 8
    assert shared(1, 8, 8, 512, 8192, 128, True) == 0  # five pieces
    assert shared(1, 136, 136, 192, 6400, 128, False) == 16  # of four tiles, beside 132 whole ones


@pytest.mark.parametrize("sms", [SMS, 20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "rows"), [(64, None), (128, None), (256, 64), (64, 64), (128, 64)])
def test_the_same_of_tiles_of_a_group(head_dim: int, rows: int | None, causal: bool, sms: int) -> None:
    for i, (batch, heads, queries, keys) in enumerate(SHAPES[:15]):
        problem = Problem(batch, heads * (3, 8, 1)[i % 3], heads, min(queries, 130), keys, head_dim, causal)
        check_pieces(*pieces_of(problem, rows, sms, k6_groups), problem)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("queries", [1, 8, 13, 100])
def test_rows_of_a_group_are_its_queries(queries: int, group: int) -> None:
    """Each once, and a causal mask hides of each row what it hides of its query."""
    rows, keys = rows_of_group(queries, group), 50
    kernel = k6_groups.kernel_for(Problem(1, group, 1, queries, keys, 128, True))
    found = []
    for row in range(rows):
        block, head = group_rows.octet_at(row // group_rows.OCTET, group)  # where it is loaded from
        query = group_rows.OCTET * block + row % group_rows.OCTET
        assert group_rows.query_of(row, group) == query
        assert kernel.mask.last_key(row, rows, keys) == query + keys - queries
        found += [(head, query)] * (query < queries)
    assert sorted(found) == [(head, query) for head in range(group) for query in range(queries)]
    last_keys = [kernel.mask.last_key(row, rows, keys) for row in range(rows)]
    for first in range(0, rows, 64):  # a consumer's rows: what all of them see, and what any up to them does
        assert kernel.seen_before(first + 1, rows, keys) == 1 + min(last_keys[first:])
        if first + 64 <= rows:
            assert kernel.seen_before(first + 64, rows, keys) == 1 + max(last_keys[: first + 64])


def test_all_slices_end_together_where_nothing_is_kept_whole() -> None:
    _, slices = pieces_of(Problem(1, 8, 8, 512, 8192, 128, True), None, SMS)
    steps = [sum(piece[4] for piece in pieces) for pieces in slices]
    assert max(steps) == steps[0] and min(steps[:-1]) == steps[0]


def test_tiles_of_which_each_sm_has_as_many_are_kept_whole() -> None:
    """25 heads of 4608 tokens: 600 tiles are four for each SM, and 72 that all of them share."""
    problem = Problem(1, 25, 25, 4608, 4608, 128, False)
    _, slices = pieces_of(problem, None, SMS)
    is_whole = lambda piece: piece[3:5] == (0, 72) and piece[6] == 0
    whole = [sum(map(is_whole, pieces)) for pieces in slices]
    assert min(whole) == 4 and sum(whole) <= 600


def test_a_mask_at_the_top_left_is_refused_at_unequal_lengths() -> None:
    problem = Problem(1, 1, 1, 5, 9, 64, True, top_left=True)
    assert k6_slices.supports(problem) == "aligns a causal mask at the bottom right"
    assert k6_slices.supports(problem.with_(seqlen_q=9)) is None
    assert "steps" in k6_slices.supports(Problem(1, 1, 1, 2**20, 2**30, 64, False))
