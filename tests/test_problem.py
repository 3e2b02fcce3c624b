"""What a problem says of itself: its mask, its FLOPs, its bytes."""

import itertools
import math

import pytest

from harness.sweep import sweep
from hopper_attention.kernels.contract import Problem


def test_alignment_of_a_mask_that_is_not_there_is_refused() -> None:
    problem = Problem.square(1, 1, 16, 64, True, top_left=True)
    with pytest.raises(ValueError, match="top_left aligns a causal mask, and there is none: causal is False"):
        problem.with_(causal=False)
    with pytest.raises(TypeError, match="top_left must be True or False, not 'top-left'"):
        problem.with_(top_left="top-left")


def test_its_name() -> None:
    problem = Problem(2, 8, 4, 100, 200, 64, True)
    assert str(problem) == "b2 h8:4 n100:200 d64 causal bfloat16"
    assert str(problem.with_(top_left=True)) == "b2 h8:4 n100:200 d64 causal top-left bfloat16"
    assert str(problem.with_(causal=False)) == "b2 h8:4 n100:200 d64 full bfloat16"


def test_equal_lengths_count_half_and_move_everything() -> None:
    for problem in (*sweep(), *sweep("bwd")):
        rows = problem.batch * problem.heads * problem.seqlen_q
        share = (0.5 if problem.causal else 1) * (2.5 if problem.direction == "bwd" else 1)
        assert problem.flops == 4 * rows * problem.seqlen_q * problem.head_dim * share
        tensors = 8 if problem.direction == "bwd" else 4
        assert problem.min_bytes == rows * (tensors * problem.head_dim * 2 + 4)
        if problem.causal:
            top_left = problem.with_(top_left=True)
            assert (top_left.flops, top_left.min_bytes) == (problem.flops, problem.min_bytes)


@pytest.mark.parametrize("lengths", [(640, 4096), (4096, 640)])
@pytest.mark.parametrize("top_left", [False, True])
def test_unequal_lengths_count_what_is_seen(lengths: tuple[int, int], top_left: bool) -> None:
    rows, keys = lengths
    problem = Problem(1, 4, 2, *lengths, 64, True, top_left=top_left)
    offset = 0 if top_left else keys - rows
    seen = [min(keys, max(0, i + offset + 1)) for i in range(rows)]
    assert math.isclose(problem.flops, 4 * 4 * 64 * sum(seen), rel_tol=1e-2)  # a diagonal counts half
    assert problem.with_(direction="bwd").flops == 2.5 * problem.flops
    queries_read, keys_read = sum(n > 0 for n in seen), max(seen)
    q, kv = 4 * 64 * 2, 2 * 2 * 64 * 2  # bytes of a query's and of a key's position
    assert problem.min_bytes == (queries_read + rows) * q + keys_read * kv + 16 * rows
    backward = (3 * queries_read + rows) * q + (keys_read + keys) * kv + 16 * queries_read
    assert problem.with_(direction="bwd").min_bytes == backward


def seen_by_hand(problem: Problem) -> list[list[int]]:
    """The keys that each query of a window sees."""
    (left, right), offset = problem.window, problem.seqlen_kv - problem.seqlen_q
    return [
        [
            j
            for j in range(problem.seqlen_kv)
            if (left < 0 or j >= i + offset - left) and (right < 0 or j <= i + offset + right)
        ]
        for i in range(problem.seqlen_q)
    ]


def test_a_windows_pairs_are_those_it_shows() -> None:
    for (q, kv), left, right in itertools.product(
        [(1, 1), (5, 5), (4, 9), (9, 4), (1, 7), (7, 1), (0, 3), (3, 0)], (-1, 0, 1, 3, 20), (-1, 0, 1, 3, 20)
    ):
        if (left, right) == (-1, -1):
            continue
        problem = Problem(2, 4, 2, q, kv, 64, False, window=(left, right))
        seen = seen_by_hand(problem)
        assert problem.pairs == sum(map(len, seen)), problem
        assert problem.flops == 4 * 2 * 4 * 64 * problem.pairs
        assert problem.not_blind == (sum(map(bool, seen)), len({j for keys in seen for j in keys})), problem


def test_packed_sequences_count_one_by_one() -> None:
    lengths = ((5, 7), (0, 3), (4, 0), (9, 2), (5, 7))
    for mask in ({"causal": False}, {"causal": True}, {"causal": False, "window": (2, 1)}):
        packed = Problem(1, 4, 2, 40, 50, 64, dtype="bfloat16", sequences=lengths, **mask)
        alone = [Problem(1, 4, 2, *pair, 64, scaled=True, **mask) for pair in lengths]
        assert packed.flops == sum(x.flops for x in alone)
        assert packed.min_bytes == sum(x.min_bytes for x in alone)  # rows of no sequence do not count
        assert packed.not_blind == tuple(map(sum, zip(*(x.not_blind for x in alone))))
    assert packed.totals == (23, 19)
    nothing = packed.with_(sequences=())
    assert (nothing.flops, nothing.min_bytes) == (0, 0)


def test_names_with_policies() -> None:
    problem = Problem(1, 8, 4, 100, 200, 64, False, window=(127, 0), softcap=50.0, sink=True)
    assert problem.scaled
    assert str(problem) == "b1 h8:4 n100:200 d64 window 127:0 bfloat16 softcap 50 sink"
    packed = Problem(1, 8, 8, 100, 100, 64, True, sequences=((60, 60), (30, 30)))
    assert str(packed) == "b1 h8 2 sequences n100 d64 causal bfloat16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": (4, 0), "causal": True}, "a causal window is (left, 0): causal must be False"),
        ({"window": (-1, -1)}, "a window without bounds is none: window must be None"),
        ({"window": (-2, 0)}, "window must be two integers (left, right) from −1 on, not (-2, 0)"),
        ({"window": [4, 0]}, "window must be two integers (left, right) from −1 on, not [4, 0]"),
        ({"window": (4.0, 0)}, "window must be two integers (left, right) from −1 on, not (4.0, 0)"),
        ({"softcap": -1.0}, "softcap must be a finite number, 0 for none, not -1.0"),
        ({"softcap": math.nan}, "softcap must be a finite number, 0 for none, not nan"),
        ({"softcap": None}, "softcap must be a finite number, 0 for none, not None"),
        ({"sink": 1}, "sink must be True or False, not 1"),
        ({"sequences": ((16, 16),), "batch": 2}, "packed sequences lie in tensors of batch 1, not 2"),
        ({"sequences": ((16, -1),)}, "sequences must be pairs (queries, keys) of integers from 0 on"),
        ({"sequences": ((9, 9), (8, 7))}, "the sequences have 17 queries, more than the 16 of the tensor"),
    ],
)
def test_policies_that_cannot_be_are_refused(fields: dict[str, object], message: str) -> None:
    given = {"batch": 1, "heads": 2, "kv_heads": 2, "seqlen_q": 16, "seqlen_kv": 16, "head_dim": 64}
    with pytest.raises((TypeError, ValueError)) as raised:
        Problem(**given | {"causal": False} | fields)
    assert message in str(raised.value)
