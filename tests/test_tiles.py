"""Which tiles k6 and bwd4 visit, and which they mask: the kernels' own arithmetic on plain integers, against
the mask itself."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
from untraced import Divisor, kernels

from harness.sweep import HEAD_DIMS
from hopper_attention.kernels.contract import Problem

k6, bwd4, calls, limits = map(kernels, ("k6", "bwd4", "calls", "device.limits"))
division = kernels("division")
find, count_taken = kernels("device.prepared_order").find, kernels("device.split_tiles").count_taken
ROWS, CONSUMERS = kernels("device.query_tiles").ROWS, kernels("device.key_tiles").CONSUMERS

# Beside the ends of tiles of 64 to 256; differences of 62 and 126, where a tile hides a single pair.
LENGTHS = (1, 63, 64, 65, 128, 129, 203, 256, 257, 265, 514, 640)
MASKS = ((False, False), (True, False), (True, True))
every_mask = pytest.mark.parametrize(
    ("head_dim", "causal", "top_left"), [(d, *mask) for d in HEAD_DIMS for mask in MASKS]
)
every_mask_and_256 = pytest.mark.parametrize(
    ("head_dim", "causal", "top_left"), [(d, *mask) for d in (*HEAD_DIMS, 256) for mask in MASKS]
)


def problems(head_dim: int, causal: bool, top_left: bool, direction: str) -> list[Problem]:
    plain = Problem.square(1, 1, 1, head_dim, causal, direction=direction, top_left=top_left)
    return [plain.with_(seqlen_q=n, seqlen_kv=m) for n in LENGTHS for m in LENGTHS]


def keys_seen(problem: Problem, query: int) -> int:
    """How many keys a query sees, by the mask's definition; they are the first."""
    if not problem.causal:
        return problem.seqlen_kv
    last = query if problem.top_left else query + problem.seqlen_kv - problem.seqlen_q
    return min(problem.seqlen_kv, max(0, last + 1))


@pytest.mark.parametrize("deterministic", [False, True])
@every_mask_and_256
def test_scratch_is_padded_to_the_tiles_of_the_kernels(
    head_dim: int, causal: bool, top_left: bool, deterministic: bool
) -> None:
    """`calls` knows the kernels' tiles without importing them."""
    for problem in problems(head_dim, causal, top_left, "bwd"):
        kernel = bwd4.kernel_for(problem, deterministic)
        wide = head_dim == 256
        tile_q = kernel.queries.tile_q if wide else kernel.main.tile_q
        assert tile_q == limits.TILE_Q[head_dim]
        assert tile_q % kernel.main.tile_q == 0
        problem = problem.with_(batch=2, heads=6, kv_heads=3)
        tiles = math.ceil(problem.seqlen_q / tile_q)
        scratch = calls.backward_scratch(problem, deterministic)
        shapes = {name: shape for name, (shape, _) in scratch.items()}
        blocks = tiles * tile_q // limits.BLOCK
        assert shapes["stats"][:2] == (12, blocks)
        assert ("dQ_sum" in shapes) != wide
        if not wide:
            sums = calls.sums_for(problem, deterministic)
            assert kernel.main.counts_sums == deterministic
            assert sums == kernel.main.sums or deterministic, "sums are counted"
            assert shapes["dQ_sum"][:2] == (12 * sums, blocks)
            assert (shapes["order"], shapes["zeroed"]) == ((12, tiles * sums), (6,))


def visits_of(kernel: object, problem: Problem) -> int:
    """How many tiles of keys the consumers of `kernel` multiply; that they are those which are seen."""
    lengths = problem.seqlen_q, problem.seqlen_kv
    visits = 0
    for rows in range(ROWS, problem.seqlen_q + ROWS, ROWS):
        seen = keys_seen(problem, rows - 1)  # of rows past the end too, as if queries went on
        assert kernel.kv_blocks(rows, *lengths) == max(1, math.ceil(seen / kernel.tile_kv))
        visits += kernel.kv_blocks(rows, *lengths)
    for query in range(problem.seqlen_q if problem.causal else 0):
        last_key = min(problem.seqlen_kv - 1, kernel.mask.last_key(query, *lengths))
        assert max(0, last_key + 1) == keys_seen(problem, query)
    return visits + -math.ceil(problem.seqlen_q / ROWS) % (kernel.tile_q // ROWS)  # past the end, one


@every_mask_and_256
def test_k6_visits_the_tiles_that_are_seen(head_dim: int, causal: bool, top_left: bool) -> None:
    kernel = k6.kernel_for(Problem.square(1, 1, 1, head_dim, causal, top_left=top_left))
    for problem in problems(head_dim, causal, top_left, "fwd"):
        (work,) = k6.work(problem)
        consumers = work.passes * kernel.consumers
        visits = visits_of(kernel, problem)
        assert math.isclose((sum(work.trips) + 1) * consumers, visits), "work counts other tiles"


@pytest.mark.parametrize(
    ("head_dim", "heads"),  # of a section: with 512, 2048, 4096, 8192 and 16384 keys
    [(64, (16, 16, 8, 4, 2)), (128, (8, 8, 4, 2, 1)), (256, (4, 4, 4, 2, 1))],
)
def test_sections_of_k6(head_dim: int, heads: tuple[int, ...]) -> None:
    """At head_dim 256 of twice the bytes, where nothing but a scale is asked for beside the mask."""
    mask = Problem.square(1, 1, 1, head_dim, True)
    lengths = 512, 2048, 4096, 8192, 16384
    for problem in (mask, mask.with_(top_left=True), mask.with_(scaled=True)):
        assert tuple(map(k6.kernel_for(problem).section, lengths)) == heads
    plain = tuple(max(1, section // (2 if n > 2048 else 1)) for n, section in zip(lengths, heads))
    for policy in ({"softcap": 1.0}, {"sink": True}, {"causal": False, "window": (0, 0)}):
        found = map(k6.kernel_for(mask.with_(scaled=True, **policy)).section, lengths)
        assert tuple(max(1, x) for x in found) == (plain if head_dim == 256 else heads)


@pytest.mark.parametrize(("heads", "n"), [(8, 8192), (16, 4096), (32, 4096), (16, 8192), (8, 16384)])
def test_tiles_of_256_columns_end_together(heads: int, n: int) -> None:
    """As `division`'s costs have it, in the order in which k6 fetches them; and each is fetched once."""
    kernel, tile = k6.kernel_for(Problem.square(1, 1, 1, 256, True)), division.TILES[256][128]
    blocks, found = math.ceil(n / kernel.tile_q), []
    for i in range(blocks * heads):
        block, head = kernel.order.locate(i, blocks, heads, kernel.section(n))
        found.append((int(block), int(head)))
    assert len({*found}) == blocks * heads == len(found)
    steps = (kernel.kv_blocks((block + 1) * kernel.tile_q, n, n) for block, _ in found)
    loads = division._loads([x * tile.step + tile.tile for x in steps], kernel.sms)
    assert sum(loads) / kernel.sms / max(loads) > 0.98


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 256])
@pytest.mark.parametrize("mask", [{"causal": False}, {"causal": True}, {"causal": False, "window": (64, 0)}])
def test_k6_finds_every_tile_once(
    head_dim: int, mask: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what its host prepares, in the order that is computed without; and each with its key head."""
    for module in ("k6_loads", "device.prepared_order"):
        monkeypatch.setattr(kernels(module), "divisor", Divisor)
    for batch, kv_heads, group, n in ((1, 1, 1, 1), (3, 2, 1, 700), (2, 3, 4, 1025), (1, 5, 8, 4096)):
        problem = Problem(batch, kv_heads * group, kv_heads, n, n, head_dim, **mask)
        kernel, heads = k6.kernel_for(problem), batch * problem.heads
        mQ, mK = (SimpleNamespace(shape=(n, head_dim, x, batch)) for x in (problem.heads, kv_heads))
        *sizes, of_group = kernel.sizes(mQ, mK)
        blocks, places = math.ceil(n / kernel.tile_q), []
        for tile in range(blocks * heads):
            block, head, at = map(int, find(kernel.order, tile, sizes))
            assert kernel.kv_head_of(head, of_group) == head // group
            places.append((block, at * problem.heads + head))
        assert places == [
            tuple(map(int, kernel.order.locate(tile, blocks, heads, kernel.section(n))))
            for tile in range(blocks * heads)
        ]
        assert {*places} == {(block, head) for block in range(blocks) for head in range(heads)}


WINDOWS = ((0, 0), (63, 0), (64, 0), (127, 5), (130, 70), (-1, 10), (10, -1), (500, 3))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 256])
def test_k6_visits_the_tiles_that_a_window_shows(head_dim: int, window: tuple[int, int]) -> None:
    """Of each consumer: the keys that its rows see lie in its tiles, which lie in its CTA's; what hides one
    is masked, and on which side; in an edge tile or before it each row that sees a key sees its first."""
    plain = Problem.square(1, 1, 1, head_dim, False, window=window)
    for problem in [plain.with_(seqlen_q=n, seqlen_kv=m) for n in LENGTHS for m in LENGTHS]:
        kernel = k6.kernel_for(problem)
        tile, lengths, visits = kernel.tile_kv, (problem.seqlen_q, problem.seqlen_kv), []
        left, right = (10**6 if bound < 0 else bound for bound in window)
        offset = problem.seqlen_kv - problem.seqlen_q
        for q_block in range(math.ceil(problem.seqlen_q / kernel.tile_q)):
            cta_first = kernel.first_of_tile(q_block, *lengths)
            for consumer in range(kernel.consumers):
                span = kernel.span(q_block, consumer, *lengths)
                (row, end, own, visible), (before, first, edge) = kernel.begin(span, q_block, *lengths)
                assert 0 <= cta_first == first - before and first < edge <= own <= end
                visits.append((edge - first - 1, max(0, visible - edge), own - max(edge, visible)))
                for query in range(row, min(row + ROWS, problem.seqlen_q)):
                    low, high = query + offset - left, query + offset + right
                    low, high = max(0, low), min(problem.seqlen_kv - 1, high)
                    if low > high:
                        assert visible <= edge, "a row that sees no key is in no tile that is not masked"
                        continue
                    assert first * tile <= low and high < own * tile, "a key that is seen is not visited"
                    assert low < edge * tile, "a row has seen no key when the maximum is followed lazily"
                    if visible > edge:
                        assert low <= edge * tile and visible * tile - 1 <= high, (
                            "a hidden pair is not masked"
                        )
                    assert low <= max(edge, visible) * tile, "of the last tiles only the far side is masked"
        assert visits == list(kernel.steps_of(problem)), "work counts other tiles"
        (work,) = k6.work(problem)
        assert math.isclose(sum(work.trips) * len(visits), sum(map(sum, visits)))


@pytest.mark.parametrize(("causal", "top_left"), MASKS)
def test_dq_of_heads_of_256_comes_from_the_tiles_that_are_seen(causal: bool, top_left: bool) -> None:
    kernel = bwd4.kernel_for(Problem.square(1, 1, 1, 256, causal, top_left=top_left)).queries
    for problem in problems(256, causal, top_left, "bwd"):
        work = bwd4.work(problem)[1]
        consumers = work.passes * CONSUMERS
        visits = visits_of(kernel, problem)
        assert math.isclose((sum(work.trips) + 1) * consumers, visits), "work counts other tiles"


@every_mask_and_256
def test_bwd4_visits_the_tiles_that_see(head_dim: int, causal: bool, top_left: bool) -> None:
    kernel = bwd4.kernel_for(Problem.square(1, 1, 1, head_dim, causal, top_left=top_left)).main
    tile_q = kernel.tile_q
    for problem in problems(head_dim, causal, top_left, "bwd"):
        lengths = problem.seqlen_q, problem.seqlen_kv
        visited = masked_visits = of_reversed = 0
        for kv_block in range(math.ceil(problem.seqlen_kv / kernel.tile_kv)):
            keys = range(kv_block * kernel.tile_kv, (kv_block + 1) * kernel.tile_kv)
            first, masked, whole, last = map(int, kernel.q_tiles(kv_block, *lengths))
            assert 0 <= first <= whole == last == math.ceil(problem.seqlen_q / tile_q)
            for query in range(problem.seqlen_q):
                seen, tile = keys_seen(problem, query), query // tile_q
                if seen > keys[0]:
                    assert tile >= first, "a query that sees a key is not visited"
                if masked <= tile < last - 1:  # the last tile is masked always
                    assert seen > keys[-1], "a hidden pair is not masked"
            visited += last - first
            masked_visits += max(0, min(masked, last - 1) - first)
            of_reversed += max(0, min(masked, last) - 1 - first)  # the last is the first tile of queries
        work, reverses = bwd4.work(problem)[0], kernel.reversed_share(problem) > 0  # one head: it or nobody
        passes = work.passes / (2 if head_dim == 256 else 1)  # at 256 each consumer's is one
        assert math.isclose(sum(work.trips) * passes + passes, visited), "work counts other tiles"
        assert math.isclose(work.trips[0] * passes, 0 if reverses else masked_visits)
        assert math.isclose(sum(work.trips[2:]) * passes, of_reversed if reverses else 0)


WINDOWS = ((0, 0), (63, 0), (64, 64), (100, 20), (300, 0), (-1, 30), (30, -1), (0, 200), (127, 1))
every_window = pytest.mark.parametrize(
    ("head_dim", "window"), [(d, window) for d in (*HEAD_DIMS, 256) for window in WINDOWS]
)


def window_problems(head_dim: int, window: tuple[int, int]) -> list[Problem]:
    least = Problem.square(1, 1, 1, head_dim, False, direction="bwd", window=window)
    return [least.with_(seqlen_q=n, seqlen_kv=m) for n in LENGTHS for m in LENGTHS]


def sees(problem: Problem, query: int, key: int) -> bool:
    """By the window's definition, also of rows past the end."""
    left, right = problem.window
    ahead = key - (query + problem.seqlen_kv - problem.seqlen_q)
    return (left == -1 or -ahead <= left) and (right == -1 or ahead <= right)


@every_window
def test_bwd4_visits_the_tiles_of_a_window(head_dim: int, window: tuple[int, int]) -> None:
    for problem in window_problems(head_dim, window):
        kernel = bwd4.kernel_for(problem).main
        lengths, tile_q, tile_kv = (problem.seqlen_q, problem.seqlen_kv), kernel.tile_q, kernel.tile_kv
        masked_visits = 0
        for kv_block in range(math.ceil(problem.seqlen_kv / tile_kv)):
            tiles = tuple(map(int, kernel.q_tiles(kv_block, *lengths)))
            first, last = tiles[0], tiles[-1]
            runs = [(int(begin), int(end), masked) for begin, end, masked in kernel.runs(*tiles)]
            in_loops = [tile for begin, end, _ in runs for tile in range(begin, end)]
            assert in_loops == list(range(first, last - 1)), "a tile twice, or none, or out of order"
            whole = {tile for begin, end, masked in runs for tile in range(begin, end) if not masked}
            first_key, last_key = kv_block * tile_kv, kv_block * tile_kv + tile_kv - 1
            for tile in range(math.ceil(problem.seqlen_q / tile_q)):
                # Of a band corners and neighbours of the diagonal decide: its rows and keys, one by one.
                rows = range(tile * tile_q, min((tile + 1) * tile_q, problem.seqlen_q))
                ends = [sees(problem, row, key) for row in rows for key in (first_key, last_key)]
                if tile in whole:
                    assert all(ends) and last_key < problem.seqlen_kv, "a hidden pair is not masked"
                if not first <= tile < last:
                    keys = range(first_key, min(last_key + 1, problem.seqlen_kv))
                    assert not any(sees(problem, row, key) for row in rows for key in keys), "not visited"
            masked_visits += len(in_loops) - len(whole)
        work = bwd4.work(problem)[0]
        passes = work.passes / (2 if head_dim == 256 else 1)
        assert math.isclose(work.trips[0] * passes, masked_visits), "work counts other tiles"


@every_window
def test_dq_of_heads_of_256_comes_from_the_tiles_of_a_window(head_dim: int, window: tuple[int, int]) -> None:
    if head_dim != 256:
        pytest.skip("dQ has no kernel of its own")
    for problem in window_problems(head_dim, window):
        kernel = bwd4.kernel_for(problem).queries
        lengths = problem.seqlen_q, problem.seqlen_kv
        for q_block in range(math.ceil(problem.seqlen_q / kernel.tile_q)):
            taken = range(
                int(kernel.first_of_tile(q_block, *lengths)),
                int(kernel.kv_blocks((q_block + 1) * kernel.tile_q, *lengths)),
            )
            for consumer in range(CONSUMERS):
                first_row = q_block * kernel.tile_q + consumer * ROWS
                own_blocks = kernel.own_blocks(first_row, *lengths)
                span = first_row, taken.stop, own_blocks, None
                (_, _, own_blocks, _), (left, first, edge) = kernel.begin(span, q_block, *lengths)
                assert taken.start <= first < own_blocks <= taken.stop, "a tile that nobody loads"
                assert first - left == taken.start
                masked = own_blocks - kernel.visible_blocks(first_row, own_blocks, *lengths)
                runs = [(int(b), int(e), m) for b, e, m in kernel.runs(masked, own_blocks, first, edge)]
                blocks = [own_blocks - 1 - i for begin, end, _ in runs for i in range(begin, end)]
                assert [*blocks, first] == list(range(own_blocks - 1, first - 1, -1))
                whole = {own_blocks - 1 - i for b, e, masked in runs for i in range(b, e) if not masked}
                for row in range(first_row, min(first_row + ROWS, problem.seqlen_q)):
                    for key in range(problem.seqlen_kv):
                        block = key // kernel.tile_kv
                        if block in whole:
                            assert sees(problem, row, key), "a hidden pair is not masked"
                        elif not first <= block < own_blocks:
                            assert not sees(problem, row, key), "not visited"


@pytest.mark.parametrize(("head_dim", "window"), [(d, window) for d in HEAD_DIMS for window in WINDOWS])
def test_bwd4_det_has_a_turn_for_every_visit_of_a_window(head_dim: int, window: tuple[int, int]) -> None:
    for problem in window_problems(head_dim, window):
        kernel = bwd4.kernel_for(problem, deterministic=True).main
        lengths = problem.seqlen_q, problem.seqlen_kv
        turns = defaultdict(list)
        for kv_block in reversed(range(math.ceil(problem.seqlen_kv / kernel.tile_kv))):
            first, _, _, last = map(int, kernel.q_tiles(kv_block, *lengths))
            for tile in range(first, last):
                place, *turn = kernel.turn_of(kv_block, tile, *lengths)
                turns[tile, place].append(tuple(turn))
        for found in turns.values():
            assert found == [(turn, turn == len(found) - 1) for turn in range(len(found))]
        came = {
            tile: kernel.turns_at(tile, *lengths) for tile in range(math.ceil(lengths[0] / kernel.tile_q))
        }
        assert {tile for tile, _ in turns} == {tile for tile, turns_there in came.items() if turns_there > 0}


@every_mask
@pytest.mark.parametrize(
    ("batch", "kv_heads", "group", "seqlen_q", "seqlen_kv"),
    [
        (1, 1, 1, 64, 64),
        (3, 5, 1, 513, 513),
        (32, 16, 1, 512, 512),
        (8, 4, 4, 640, 257),
        (2, 8, 2, 4096, 4096),
    ],
)
def test_zeros_are_written_before_anyone_waits(
    head_dim: int,
    causal: bool,
    top_left: bool,
    batch: int,
    kv_heads: int,
    group: int,
    seqlen_q: int,
    seqlen_kv: int,
) -> None:
    """Every sum is zeroed once; the tiles that do it are fetched before the first tile of the head that waits
    for it, or all CTAs might wait for one that has not begun. And every tile is fetched once. (bwd4_det needs
    no zeros: test_turns.py.)"""
    mask = Problem.square(1, 1, 1, head_dim, causal, top_left=top_left)
    kernel = bwd4.kernel_for(mask).main
    mQ = SimpleNamespace(shape=(seqlen_q, head_dim, kv_heads * group, batch))
    mK = SimpleNamespace(shape=(seqlen_kv, head_dim, kv_heads, batch))
    kv_blocks, heads = math.ceil(seqlen_kv / kernel.tile_kv), batch * kv_heads
    tiles = kv_blocks * heads
    mSplit = SimpleNamespace(shape=(2, max(1, min(tiles - 1, 5)), 3))  # the last tiles in three parts
    kernel.count_parts(mK, None, mSplit)
    first, last = kernel.left_to_zero(mQ, mK)
    shares = defaultdict(set)
    for head in range(heads):
        if head < first or head >= last:  # the preprocess's
            shares[head] = set(range(kv_blocks))
    seen = set()
    for tile in range(count_taken(tiles, mSplit) if kernel.splits else tiles):
        kv_block, kv_head, at, *rest = map(int, kernel.locate(tile, mQ, mK))
        head = at * kv_heads + kv_head
        assert shares[head] == set(range(kv_blocks)), "waits for zeros of a tile that may not have begun"
        if kernel.splits and rest[0] > 1 and (rest[0] - 1) % 3:  # the first part of a tile writes its share
            assert (kv_block, head) in seen
        elif head + first < last:
            assert kv_block not in shares[head + first], "zeroed twice"
            shares[head + first].add(kv_block)
        seen.add((kv_block, head))
    assert len(seen) == kv_blocks * heads


@pytest.mark.parametrize("rows", [256, 192, 128, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_the_list_and_the_mean_load_agree(rows: int, causal: bool) -> None:
    """Of so many tiles that one gives way to the other."""
    blocks = math.ceil(1024 / rows)
    heads = division.MANY_TILES * 132 // blocks
    listed, mean = (
        division.forward_us(Problem(1, n, n, 1024, 1024, 64, causal), rows) for n in (heads, heads + 1)
    )
    tile = division.TILES[64][rows]
    assert abs(mean - listed) < math.ceil(1024 / tile.keys) * tile.step + tile.tile


@pytest.mark.parametrize(("head_dim", "trips"), [(64, (0.5, 15.0, 0.0)), (128, (1.0, 30.5, 0.5))])
def test_trips_of_mirrored_heads(head_dim: int, trips: tuple[float, ...]) -> None:
    """Half of the heads have their tiles of queries in the opposite order: what needs the mask comes last,
    and the last, which is apart, is one of these."""
    problem = Problem(1, 2, 2, 4096, 4096, head_dim, True, direction="bwd")
    work = bwd4.work(problem, deterministic=True)[0]
    assert work.trips == pytest.approx(trips, abs=0.04)
    assert sum(work.trips) == sum(bwd4.work(problem)[0].trips)
    assert bwd4.work(problem.with_(seqlen_q=0, seqlen_kv=0), deterministic=True)[0].trips == (0, 0, 0)
