"""How many queries a tile has of packed sequences and under a window, and the stages that follow."""

import pytest

from hopper_attention import launch, policies, selection, ways
from hopper_attention.kernels import division
from hopper_attention.kernels.contract import Problem
from hopper_attention.ways import Lengths


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("count", "length"), [(256, 64), (16, 1024), (4, 4096), (1, 16384), (1000, 3)])
def test_packed_sequences_count_as_their_mean(head_dim: int, count: int, length: int) -> None:
    total = count * length
    packed = Problem(1, 8, 8, total, total, head_dim, True, sequences=((0, 0),) * count)
    dense = Problem(count, 8, 8, length, length, head_dim, True)
    own = next(iter(division.TILES[head_dim]))
    assert division.rows_of(packed) == (division.rows_of(dense) if count == 1 else own)
    narrow = {"causal": False, "window": (63, 0)}  # which the list of tiles knows of
    if length > 64:
        assert division.rows_of(packed.with_(**narrow)) == division.rows_of(dense.with_(**narrow))
    assert division.rows_of(packed.with_(sequences=())) > 0
    lengths = ((length, length),) * count  # that the library does not know
    assert selection.forward_stage(packed.with_(sequences=lengths)) == selection.forward_stage(packed)


def test_few_packed_sequences_have_tiles_of_64_queries() -> None:
    total = lambda length: Problem(1, 8, 8, 8 * length, 8 * length, 128, True, sequences=((0, 0),) * 8)
    assert [division.rows_of(total(n)) for n in (1, 64, 300, 384, 385, 2000)] == [64, 64, 64, 64, 192, 192]
    assert division.rows_of(total(385), 264) == 64  # of twice the SMs


@pytest.mark.parametrize("window", [(127, 0), (-1, 30), (64, 64), (0, 0), (1000, 5)])
@pytest.mark.parametrize("lengths", [(500, 500), (130, 700), (700, 130)])
def test_a_window_shows_so_many_keys(window: tuple[int, int], lengths: tuple[int, int]) -> None:
    problem = Problem(1, 1, 1, *lengths, 128, False, window=window)
    offset = lengths[1] - lengths[0]
    for rows in (64, 192):
        found = division.keys_seen(problem, rows)
        for tile, seen in enumerate(found):
            keys = {
                j
                for i in range(tile * rows, tile * rows + rows)
                for j in range(lengths[1])
                if (window[0] < 0 or j >= i + offset - window[0])
                and (window[1] < 0 or j <= i + offset + window[1])
            }
            assert seen == max(1, len(keys))


def test_stages_in_parts_take_no_policies() -> None:
    problem = Problem(1, 1, 1, 8192, 8192, 128, False, direction="bwd")
    assert selection.backward_stage(problem, False)[0] == launch.IN_PARTS
    for fields in ({"window": (64, 0)}, {"softcap": 9.0}, {"sink": True}, {"sequences": ((8192, 8192),)}):
        stage_id, parts = selection.backward_stage(problem.with_(**fields), False)
        assert (stage_id, parts) == (launch.BACKWARD, None)
    few = problem.with_(seqlen_q=270, seqlen_kv=270, sequences=((200, 200), (70, 70)))
    assert selection.backward_stage(few, False)[0] == launch.BACKWARD
    assert selection.backward_stage(few, True)[0] == launch.DETERMINISTIC


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("count", "length"), [(256, 64), (512, 32), (2000, 3)])
def test_heads_of_many_short_sequences_share_tall_tiles(head_dim: int, count: int, length: int) -> None:
    """A tile as tall as k6's own costs each of them less than one of 64 queries, of which it has as many."""
    total = count * length
    packed = Problem(1, 16, 16, total, total, head_dim, True, sequences=((0, 0),) * count)
    assert division.rows_of(packed) == next(iter(division.TILES[head_dim]))
    alone = division.rows_of(Problem(count, 16, 16, length, length, head_dim, True))
    assert alone == 64  # as a batch each head has a tile


def test_most_packed_sequences_of_one_tile_of_keys_need_no_zeros() -> None:
    """By their mean, which is all that is known: `bwd4_det`, right for the others too."""
    for head_dim in (64, 128, 256):
        for total, stage_id in ((256 * 128, launch.DETERMINISTIC), (256 * 129, launch.BACKWARD)):
            packed = Problem(
                1, 4, 4, total, total, head_dim, False, direction="bwd", sequences=((0, 0),) * 256
            )
            wanted = launch.BACKWARD if head_dim == 256 else stage_id
            assert selection.backward_stage(packed, False)[0] == wanted
    nobody = packed.with_(seqlen_q=0, seqlen_kv=0, sequences=())
    assert selection.backward_stage(nobody, False)[0] in (launch.BACKWARD, launch.DETERMINISTIC)


@pytest.mark.parametrize(
    ("window", "left", "causal"),
    [
        ((4095, 0), (4095, 0), False),
        ((8191, 0), None, True),
        ((9000, 9000), None, False),
        ((3, 8191), (3, -1), False),
        ((0, 0), (0, 0), False),
        ((-1, 5), (-1, 5), False),
    ],
)
def test_a_side_that_hides_nothing_is_none(
    window: tuple[int, int], left: tuple[int, int] | None, causal: bool
) -> None:
    problem = Problem(1, 2, 2, 8192, 8192, 64, False, window=window)
    without = policies.without_idle_window(problem)
    assert (without.window, without.causal) == (left, causal)
    assert without.pairs == pytest.approx(problem.pairs, rel=1e-3)  # FlashAttention counts half a diagonal


@pytest.mark.parametrize(
    ("head_dim", "causal", "length", "stage_id"),
    [
        (128, True, 1024, launch.DETERMINISTIC),
        (128, True, 2048, launch.DETERMINISTIC),
        (128, True, 4096, launch.BACKWARD),
        (128, False, 1024, launch.BACKWARD),
        (64, True, 1024, launch.BACKWARD),
        (256, True, 1024, launch.BACKWARD),
    ],
)
def test_short_packed_sequences_take_turns(head_dim: int, causal: bool, length: int, stage_id: str) -> None:
    sequences = ((length, length),) * 8
    problem = Problem(1, 8, 2, 8 * length, 8 * length, head_dim, causal, direction="bwd", sequences=sequences)
    assert selection.backward_stage(problem, False) == (stage_id, None)
    other = (
        problem.with_(softcap=30.0),
        problem.with_(window=(500, 0), causal=False),
        problem.with_(seqlen_q=9 * length),
        problem.with_(seqlen_q=8 * 4096 + 1, seqlen_kv=8 * 4096 + 1),
        problem.with_(kv_heads=8, seqlen_q=8 * 4097, seqlen_kv=8 * 4097),
    )
    assert {selection.backward_stage(x, False)[0] for x in other} == {launch.BACKWARD}
    ungrouped = launch.DETERMINISTIC if head_dim == 128 and causal else launch.BACKWARD
    assert selection.backward_stage(problem.with_(kv_heads=8), False) == (ungrouped, None)


@pytest.mark.parametrize(
    ("total", "sequences", "longest", "found"),
    [
        (16384, 512, 0, Lengths.ANY),  # nobody says
        (0, 3, 5, Lengths.ANY),
        (16384, 0, 64, Lengths.ANY),
        (16384, 16, 1024, Lengths.EQUAL),
        (15991, 512, 64, Lengths.SHORT),
        (19359, 200, 128, Lengths.TWO_BLOCKS),
        (16000, 256, 128, Lengths.SHORT),  # half of them have one block
        (9000, 64, 192, Lengths.SHORT),
        (11067, 128, 2048, Lengths.SHORT_IF_MASKED),  # Zipf
        (12500, 64, 768, Lengths.SHORT),
        (61037, 1024, 8192, Lengths.ANY),
        (19525, 16, 1969, Lengths.ANY),
        (40000, 100, 130, Lengths.SHORT),  # two thirds of the rows are of no sequence
        pytest.param(1000, 100, 10**400, Lengths.SHORT, id="more than there can be"),
    ],
)
def test_what_is_known_of_lengths(total: int, sequences: int, longest: int, found: Lengths) -> None:
    assert ways.known_of(total, sequences, longest) is found


def test_short_sequences_have_short_tiles() -> None:
    """Where an SM has several of 64 queries; of two blocks each, tiles of two. Not where tiles are few, nor
    under a window, whose list says, nor with other keys."""
    for head_dim, of_short, of_two in ((64, 64, 64), (96, 192, 128), (128, 192, 128), (256, 128, 128)):
        of = lambda total, count, **mask: Problem(
            1, 16, 16, total, total, head_dim, **({"causal": True} | mask), sequences=((0, 0),) * count
        )
        rows = lambda problem, lengths: ways.way_of(problem, lengths=lengths).rows
        own = next(iter(division.TILES[head_dim]))
        assert rows(of(30000, 500), Lengths.ANY) == own
        assert rows(of(30000, 500), Lengths.SHORT) == of_short
        assert rows(of(50000, 500), Lengths.TWO_BLOCKS) == of_two
        assert rows(of(500, 5), Lengths.TWO_BLOCKS) == 64
        window = of(50000, 500, causal=False, window=(63, 0))
        assert {rows(window, x) for x in (Lengths.SHORT, Lengths.TWO_BLOCKS)} == {rows(window, Lengths.ANY)}
        cached = of(50000, 500).with_(seqlen_kv=400000)
        assert rows(cached, Lengths.TWO_BLOCKS) == rows(cached, Lengths.ANY)
        right = of(50000, 500, causal=False, window=(-1, 3))
        assert rows(right, Lengths.TWO_BLOCKS) == of_two
        full = of(30000, 500, causal=False)
        assert rows(full, Lengths.SHORT) == of_short
        assert rows(full, Lengths.SHORT_IF_MASKED) == own
        assert rows(of(30000, 500), Lengths.SHORT_IF_MASKED) == of_short
