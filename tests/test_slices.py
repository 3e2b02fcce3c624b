"""k6_slices: which pieces of which tiles CTAs take, and who waits for whom; the kernel's own arithmetic on
plain integers."""

import math
import random
from types import SimpleNamespace

import pytest
from untraced import kernels

from hopper_attention import ways
from hopper_attention.kernels import division
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.constants import SMS

k6_slices, key_slices = kernels("k6_slices"), kernels("device.key_slices")
key_slices.Int32 = int
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


def pieces_of(problem: Problem, rows: int | None, sms: int) -> tuple[object, list[list[tuple[int, ...]]]]:
    """The kernel, and what each slice has, in the order of its producer."""
    kernel = k6_slices.kernel_for(problem, rows, sms)
    slots = k6_slices.workspace(problem, rows, sms)["states"][0][0]
    states = SimpleNamespace(shape=(slots,))
    lengths = problem.seqlen_q, problem.seqlen_kv
    q, k = [
        SimpleNamespace(shape=(problem.batch, heads, n, 0))
        for heads, n in zip((problem.heads, problem.kv_heads), lengths)
    ]
    members, ctas = kernel.slices_of(states, None, q, k)
    assert 1 <= ctas <= slots
    kernel.slices = key_slices.Slices(*members)
    check_model(problem, kernel, ctas)
    mQ, mK = [SimpleNamespace(shape=(n, 0, problem.heads, problem.batch)) for n in lengths]
    found = []
    for number in range(int(ctas)):
        at, pieces = kernel.first_piece(number, mQ, mK), []
        while (tile := at[0]) < (tiles := at[1]):
            pieces.append(tuple(map(int, kernel.locate_piece(number, tile, tiles, mQ, mK))))
            at = kernel.next_piece((tile + pieces[-1][4], *at[1:]), mQ, mK)
        found.append(pieces)
    return kernel, found


def check_model(problem: Problem, kernel: object, ctas: int) -> None:
    """`ways`, which chooses, has the kernel's numbers."""
    seen = division.keys_seen(problem, kernel.tile_q)
    steps = [math.ceil(keys / kernel.tile_kv) for keys in seen]
    of_kernel, ours = kernel.slices, ways.slices_of(problem, steps, kernel.sms, kernel.config.ctas)
    assert (of_kernel.divided, of_kernel.share, of_kernel.whole) == ours[:3]
    assert ctas == max(ours.count, min(ours.whole, kernel.sms))


@pytest.mark.parametrize("sms", [SMS, 20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "rows"), [(64, None), (128, None), (256, None), (64, 64), (128, 64)])
def test_every_step_is_some_slice_s_and_nobody_waits_for_a_later_one(
    head_dim: int, rows: int | None, causal: bool, sms: int
) -> None:
    for batch, heads, queries, keys in SHAPES:
        problem = Problem(batch, heads, heads, queries, keys, head_dim, causal)
        kernel, slices = pieces_of(problem, rows, sms)
        taken: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for number, pieces in enumerate(slices):
            assert pieces, "a CTA without work"
            for i, (block, head, at, first, count, adds, said) in enumerate(pieces):
                assert said == number and count > 0
                assert adds >= 0 or i == 0, "what others wait for comes first"
                assert adds <= 0 or i == len(pieces) - 1, "who waits has done all else"
                taken.setdefault((at, head, block), []).append((first, count, adds, number))
        q_blocks = -(-queries // kernel.tile_q)
        assert len(taken) == batch * heads * q_blocks
        for (_, _, block), parts in taken.items():
            blocks = int(kernel.kv_blocks((block + 1) * kernel.tile_q, queries, keys))
            *left, (_, _, adds, last) = parts = sorted(parts)
            ends = [first + count for first, count, *_ in parts]
            assert [first for first, *_ in parts] == [0, *ends[:-1]] and ends[-1] == blocks
            assert adds == len(left)
            assert [x[2:] for x in left] == [(LEAVES, last - adds + i) for i in range(adds)]


def test_all_slices_end_together_where_nothing_is_kept_whole() -> None:
    _, slices = pieces_of(Problem(1, 8, 8, 512, 8192, 128, True), None, SMS)
    steps = [sum(piece[4] for piece in pieces) for pieces in slices]
    assert max(steps) == steps[0] and min(steps[:-1]) == steps[0]


def test_tiles_of_which_each_sm_has_as_many_are_kept_whole() -> None:
    """25 heads of 4608 tokens: 600 tiles are four for each SM, and 72 that all of them share."""
    problem = Problem(1, 25, 25, 4608, 4608, 128, False)
    _, slices = pieces_of(problem, None, SMS)
    whole = [sum(piece[5] == 0 and piece[3] == 0 and piece[4] == 72 for piece in x) for x in slices]
    assert min(whole) == 4 and sum(whole) <= 600


def test_a_mask_at_the_top_left_is_refused_at_unequal_lengths() -> None:
    problem = Problem(1, 1, 1, 5, 9, 64, True, top_left=True)
    assert k6_slices.supports(problem) == "aligns a causal mask at the bottom right"
    assert k6_slices.supports(problem.with_(seqlen_q=9)) is None
    assert "steps" in k6_slices.supports(Problem(1, 1, 1, 2**20, 2**30, 64, False))
