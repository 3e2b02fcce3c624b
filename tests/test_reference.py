"""The reference against torch's own attention and autograd in float64, and the yardstick: it rounds where a
kernel does, relative to the maximum that the kernel knows."""

import math

import pytest
import torch
from in_float64 import CLOSE
from small_problems import GRADIENT_SHAPES, IN_CODES, SHAPES, backward, far, in_codes, mask_of, visible_pairs
from torch.nn.functional import scaled_dot_product_attention as sdpa

from harness import judging, reference
from harness.inputs import random_inputs
from hopper_attention.kernels.contract import LazyMaximum, Problem


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, top_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE in float64 by torch's own attention and logsumexp."""
    q, k, v = (x.double() for x in (q, k, v))
    visible = visible_pairs(q.shape[2], k.shape[2], causal, top_left)
    o = sdpa(q, k, v, attn_mask=visible, enable_gqa=True)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
    return o, scores.masked_fill(~visible, -math.inf).logsumexp(-1)


# O and LSE


# Scores held at once: all; one row of one head; some rows; and for some shapes two heads of three.
@pytest.mark.parametrize("chunk", [reference.CHUNK_ELEMENTS, 1, 1000, 2 * 203 * 203])
@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES)
def test_reference_is_attention(problem: Problem, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", chunk)
    q, k, v = random_inputs(problem, "cpu")
    o, lse = reference.reference(q, k, v, **mask_of(problem))
    expected_o, expected_lse = exact(q, k, v, **mask_of(problem))
    assert o.dtype == lse.dtype == torch.float64
    assert (o.shape, lse.shape) == (expected_o.shape, expected_lse.shape)
    assert far(o, expected_o) < CLOSE
    assert far(lse, expected_lse) < CLOSE


@pytest.mark.parametrize("chunk", [reference.CHUNK_ELEMENTS, 300])
@pytest.mark.parametrize("name", ["causal", "grouped", "few queries, causal", "few queries, top left"])
def test_reference_of_some_rows(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", chunk)
    problem = SHAPES[name]
    q, k, v = random_inputs(problem, "cpu")
    rows = torch.tensor([0, 5, 6, 31, problem.seqlen_q - 1])
    o, lse = reference.reference(q, k, v, rows=rows, **mask_of(problem))
    expected_o, expected_lse = exact(q, k, v, **mask_of(problem))
    assert far(o, expected_o[:, :, rows]) < CLOSE
    assert far(lse, expected_lse[:, :, rows]) < CLOSE


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(33, 130), (130, 33), (1, 65), (65, 1)])
def test_top_left_is_what_torch_calls_causal(seqlen_q: int, seqlen_kv: int) -> None:
    q, k, v = (x.double() for x in random_inputs(Problem(1, 2, 2, seqlen_q, seqlen_kv, 64, True), "cpu"))
    o = sdpa(q, k, v, is_causal=True)
    assert far(reference.reference(q, k, v, True, top_left=True)[0], o) < CLOSE
    assert far(reference.reference(q, k, v, True)[0], o) > 0.1


def test_yardstick_rounds_as_a_kernel_does() -> None:
    problem = SHAPES["causal"]
    q, k, v = random_inputs(problem, "cpu")
    ref, _ = reference.reference(q, k, v, True)
    plain, rounded = (reference.yardstick(q, k, v, True, rounds_p) for rounds_p in (False, True))
    assert plain.dtype == rounded.dtype == torch.bfloat16
    assert not torch.equal(plain, rounded)
    # Round-off of an output below 4 in magnitude: half of 2⁻⁷ · 2, and as much again for a rounded P.
    assert 1e-3 < far(plain.double(), ref) < 2**-7
    assert far(rounded.double(), ref) < 2**-6


# Gradients


def exact_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    causal: bool,
    top_left: bool = False,
) -> tuple[torch.Tensor, ...]:
    """dQ, dK, dV in float64 by autograd, of a softmax in which a row that sees no key is zero."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    visible = visible_pairs(q.shape[2], k.shape[2], causal, top_left)
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
    p = scores.masked_fill(~visible, -1e300).softmax(-1) * visible
    return torch.autograd.grad(p @ v.repeat_interleave(group, 1), (q, k, v), do.double())


@pytest.mark.parametrize("chunk", [reference.CHUNK_ELEMENTS, 1, 1000, 2 * 203 * 203])
@pytest.mark.parametrize("problem", GRADIENT_SHAPES.values(), ids=GRADIENT_SHAPES)
def test_reference_gradients_are_those_of_autograd(
    problem: Problem, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", chunk)
    q, k, v, do = backward(problem)
    found = judging.Expected(q, k, v, do=do, **mask_of(problem)).gradients
    for x, expected in zip(found, exact_gradients(q, k, v, do, **mask_of(problem))):
        assert x.dtype == torch.float64
        assert x.shape == expected.shape
        assert far(x, expected) < CLOSE
    if problem.top_left:  # keys past the last query are seen by none
        assert not any(x[:, :, problem.seqlen_q :].any() for x in found[1:])
    elif problem.causal and problem.seqlen_q > problem.seqlen_kv:
        assert not found[0][:, :, : problem.seqlen_q - problem.seqlen_kv].any()


def test_gradients_of_some_rows_and_columns() -> None:
    q, k, v, do = backward(GRADIENT_SHAPES["few queries, causal"])
    expected = judging.Expected(q, k, v, True, do)
    rows, columns = torch.tensor([0, 5, 32]), torch.tensor([1, 64, 101, 129])
    some = lambda **selected: reference.gradients_of(
        q, k, v, *expected.forward, do, True, torch.float64, False, **selected
    )
    assert far(some(rows=rows)[0], expected.gradients[0][:, :, rows]) < CLOSE
    for x, whole in zip(some(columns=columns)[1:], expected.gradients[1:]):
        assert far(x, whole[:, :, columns]) < CLOSE


def test_gradient_yardstick_rounds_as_a_kernel_does() -> None:
    q, k, v, do = backward(SHAPES["causal"])
    expected = judging.Expected(q, k, v, True, do)
    rms = lambda x: x.square().mean().sqrt().item()
    for at in range(3):
        ref = expected.gradients[at]
        plain, rounded = (
            reference.yardstick_gradients(q, k, v, *expected.saved, do, True, rounds_p)[at]
            for rounds_p in (False, True)
        )
        assert not torch.equal(plain, rounded)
        # A 16-bit result alone is off by about 2⁻¹⁰ of its size; O, P and dS add about as much.
        assert 2**-11 * rms(ref) < rms(plain - ref) < rms(rounded - ref) < 2**-7 * rms(ref)


# The lazy maximum, and P in codes


def test_lazy_maximum_of_a_row_follows_its_own_scores() -> None:
    scores = torch.zeros(1, 4, 6)
    scores[0, 0, 2:4] = 5.0  # the middle tile of three
    scores[0, 1, 2:4] = 1.0  # not enough to bring the row up to date
    scores[0, 2, :2] = -torch.inf  # sees nothing of the first tile
    all_keys = torch.full((4,), 6)
    base = reference._lazy_maximum(scores, LazyMaximum(2, 1, growth=2.0 / math.log(2)), all_keys)
    of_tile = torch.tensor([[0.0, 5.0, 5.0], [0.0, 0.0, 0.0], [-torch.inf, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(base[0], of_tile.repeat_interleave(2, -1))
    exact = reference._lazy_maximum(scores, LazyMaximum(6, 3, 8.0), all_keys)  # one tile: its maximum
    assert torch.equal(exact, scores.amax(-1, keepdim=True).expand_as(scores))


def test_lazy_maximum_is_asked_of_each_part_of_a_tile() -> None:
    scores = torch.zeros(1, 3, 8)  # two tiles of two parts, growth asked at 2
    scores[0, 0, 4:] = torch.tensor([3.0, 0.0, 4.0, 0.0])  # the second part exceeds the first by less than 2
    scores[0, 1, 4:] = torch.tensor([0.0, 0.0, 4.0, 0.0])
    scores[0, 2, 4:] = torch.tensor([4.0, 0.0, 7.0, 0.0])  # both parts grow: the tile's P follows the second
    all_keys = torch.full((3,), 8)
    base = reference._lazy_maximum(scores, LazyMaximum(4, 2, growth=2.0 / math.log(2)), all_keys)
    of_tile = torch.tensor([[0.0, 3.0], [0.0, 4.0], [0.0, 7.0]])
    assert torch.equal(base[0], of_tile.repeat_interleave(4, -1))


def test_lazy_maximum_has_room_up_to_a_share_of_the_first_tile() -> None:
    scores = torch.zeros(1, 4, 8)  # four tiles of two keys; the first's sum is 2, and room is for e³
    scores[0, 0, 2] = 2.9
    scores[0, 1, 2], scores[0, 1, 4] = 3.1, 3.5  # where it has risen once, it follows
    scores[0, 2, 2] = 2.9  # of a row whose 64 see half the keys: room for e³ / 2
    scores[0, 3, :2] = -torch.inf  # sees nothing of the first tile
    lazy = LazyMaximum(2, 1, growth=5.0 / math.log(2), share=math.exp(3.0) / 2)
    base = reference._lazy_maximum(scores, lazy, seen=torch.tensor([8, 7, 4, 8]))
    of_tile = [[0.0, 0.0, 0.0, 0.0], [0.0, 3.1, 3.5, 3.5], [0.0, 2.9, 2.9, 2.9], [-torch.inf, 0.0, 0.0, 0.0]]
    assert torch.equal(base[0], torch.tensor(of_tile).repeat_interleave(2, -1))
    least = lazy._replace(growth=2.0 / math.log(2))  # growth bounds the share's room
    assert reference._lazy_maximum(scores, least, torch.full((4,), 8))[0, 0, 2] == scores[0, 0, 2]


@pytest.mark.parametrize("causal", [False, True])
def test_yardstick_in_codes_is_a_loop(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, tile by tile: P rounded relative to what the lazy maximum is at the tile's end, and O
    divided by the sum of rounded P."""
    monkeypatch.setattr(reference, "_truncation", lambda scores, head_dim: torch.zeros(()))
    q, k, v = (x.float() for x in random_inputs(Problem.square(1, 1, 23, 64, causal, direction="fp8"), "cpu"))
    q *= 3
    lazy = LazyMaximum(tile_kv=4, parts=2, growth=1.5, e4m3=6.0)
    o, lse = reference.yardstick_of(q, k, v, causal, lazy)
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    raised = 0
    for row in range(23):
        keys = range(row + 1 if causal else 23)
        scores = torch.stack([q[row] @ k[key] / 8 for key in keys])
        base, total, out = scores[:4].max(), 0.0, torch.zeros(64)
        for begin in range(0, len(scores), 4):
            tile = scores[begin : begin + 4]
            for part in tile.split(2):
                if part.max() - base > 1.5 * math.log(2):
                    factor = (base - part.max()).exp()
                    base, total, out, raised = part.max(), total * factor, out * factor, raised + 1
            p = in_codes(64 * (tile - base).exp())
            total, out = total + p.sum(), out + p @ v[begin : begin + len(tile)]
        # A score next to a tie, in another order of additions, may round the other way.
        torch.testing.assert_close(o[0, 0, row], out / total, rtol=0, atol=2e-3)
        torch.testing.assert_close(lse[0, 0, row], base - math.log(64) + total.log(), rtol=0, atol=2e-3)
    assert raised > 5


def test_large_scores_in_codes_lose_what_the_tensor_cores_truncate() -> None:
    q, k, v = random_inputs(Problem.square(1, 1, 300, 64, False, direction="fp8"), "cpu")
    rms = lambda q: [
        (reference.yardstick(q, k, v, False, rounding).double() - reference.reference(q, k, v, False)[0])
        .square().mean().sqrt()
        for rounding in (IN_CODES, IN_CODES._replace(e4m3=None))
    ]  # fmt: skip
    usual, large = rms(q), rms(q * 512)  # of large scores one key is all, and P is 1
    assert usual[0] < 20 * usual[1]
    assert large[0] > 20 * large[1]


def test_rows_of_a_block_count_their_tiles_together() -> None:
    rows = torch.tensor([0, 63, 64, 150])
    assert reference._seen_together(rows, 300, 0, False).tolist() == [300, 300, 300, 300]
    assert reference._seen_together(rows, 300, 0, True).tolist() == [64, 64, 128, 192]
    assert reference._seen_together(rows, 150, -100, True).tolist() == [1, 1, 28, 92]
    assert reference._seen_together(rows, 150, 50, True).tolist() == [114, 114, 150, 150]


def test_a_share_keeps_the_terms_exact_that_weigh() -> None:
    """What it is for: with outliers the error is next to an eager softmax's, with `growth` alone not."""
    q, k, v = random_inputs(Problem.square(1, 2, 1024, 64, False), "cpu")
    generator = torch.Generator().manual_seed(1)
    for x in (q, k):
        x[torch.rand(x.shape, generator=generator) < 1e-3] *= 10
    exact = reference.reference(q, k, v, False)[0]
    rms = [
        (reference.yardstick(q, k, v, False, rounding).double() - exact).square().mean().sqrt()
        for rounding in (True, LazyMaximum(64, 2, 8.0, 2.0), LazyMaximum(64, 2, 8.0))
    ]
    assert rms[1] < 1.03 * rms[0]
    assert rms[2] > 1.04 * rms[0]


def test_lazy_yardstick_differs_by_roundings_only() -> None:
    q, k, v = random_inputs(Problem.square(1, 2, 300, 64, True), "cpu")
    ref = reference.reference(q, k, v, True)[0]
    plain, lazy = (reference.yardstick(q, k, v, True, how) for how in (True, LazyMaximum(64, 2, 8.0)))
    assert not torch.equal(plain, lazy)
    rms = [(x.double() - ref).square().mean().sqrt() for x in (plain, lazy)]
    assert rms[1] < 1.2 * rms[0]
