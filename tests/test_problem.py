"""What a problem says of itself: its mask, its FLOPs, its bytes."""

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
