"""The reference, the pass rule and the needle inputs: that they are right, and that each of them can fail."""

import math
import re

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from harness import judging, mutations, needles, reference
from harness.cases import NEEDLE_LENGTHS
from harness.inputs import random_inputs
from hopper_attention.kernels.contract import LazyMaximum, Problem

CLOSE = 1e-12  # some thousand units of float64 round-off
SHAPES = {
    "square": Problem.square(2, 3, 203, 64, False),
    "causal": Problem.square(2, 3, 203, 128, True),
    "one row": Problem.square(1, 1, 1, 64, True),
    "grouped": Problem(2, 6, 2, 65, 65, 64, False),
    "grouped, causal": Problem(1, 5, 1, 130, 130, 64, True),
    "few queries": Problem(2, 2, 2, 7, 130, 64, False),
    "few queries, causal": Problem(2, 4, 2, 33, 130, 64, True),
    "many queries": Problem(1, 2, 2, 130, 33, 64, False),
    "fp16": Problem.square(1, 2, 65, 64, True, dtype="float16"),
    "top left": Problem.square(1, 2, 130, 64, True, top_left=True),
    "few queries, top left": Problem(2, 4, 2, 33, 130, 64, True, top_left=True),
    "many queries, top left": Problem(1, 4, 2, 130, 33, 64, True, top_left=True),
}


def mask_of(problem: Problem) -> dict[str, bool]:
    return {"causal": problem.causal, "top_left": problem.top_left}


def visible_pairs(seqlen_q: int, seqlen_kv: int, causal: bool, top_left: bool) -> torch.Tensor:
    """Which keys (columns) each query (row) sees: aligned at the bottom right, the last query sees every
    key, at the top left the first query sees one."""
    visible = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    if causal and top_left:
        return visible.tril()
    return visible.tril(seqlen_kv - seqlen_q) if causal else visible


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, top_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE in float64 by torch's own attention and logsumexp."""
    q, k, v = (x.double() for x in (q, k, v))
    visible = visible_pairs(q.shape[2], k.shape[2], causal, top_left)
    o = sdpa(q, k, v, attn_mask=visible, enable_gqa=True)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
    return o, scores.masked_fill(~visible, -math.inf).logsumexp(-1)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


# The reference


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


GRADIENT_SHAPES = SHAPES | {
    "many queries, causal": Problem(1, 4, 2, 130, 33, 64, True),  # the first 97 see no key
    "one key": Problem(1, 2, 2, 203, 1, 64, False),
    "one query": Problem(2, 2, 1, 1, 65, 128, True),
}
backward = lambda problem: random_inputs(problem.with_(direction="bwd"), "cpu")


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


@pytest.mark.parametrize("rounds_p", [False, True])
@pytest.mark.parametrize("problem", GRADIENT_SHAPES.values(), ids=GRADIENT_SHAPES)
def test_gradient_yardstick_passes_its_own_rule(problem: Problem, rounds_p: bool) -> None:
    q, k, v, do = backward(problem)
    mask = mask_of(problem)
    expected = judging.Expected(q, k, v, do=do, **mask)
    yard = reference.yardstick_gradients(q, k, v, *expected.saved, do, rounds_p=rounds_p, **mask)
    assert {x.dtype for x in yard} == {q.dtype}
    verdict = expected.judge(dict(zip(("dq", "dk", "dv"), yard)), rounds_p)
    assert verdict.failures == ()
    assert verdict.max_ratio <= 1.0
    assert verdict.rms_ratio <= 1.0


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


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_one_key_may_differ_by_cancellation(n: int, causal: bool) -> None:
    """dP − D is zero but for round-off there, which the order of additions decides."""
    for seed in range(20):
        problem = Problem.square(2, 3, n, 128, causal, direction="bwd")
        q, k, v, do = random_inputs(problem, "cpu", seed)
        expected = judging.Expected(q, k, v, causal, do)
        every = torch.arange(n)
        found = mutations.tiled_gradients(q, k, v, *expected.saved, do, causal, every, every)
        found = dict(zip(("dq", "dk", "dv"), found))
        assert expected.judge(found, False).failures == ()
        found["dq"] = found["dq"] + 2.0**-14  # much less than a gradient, more than what cancels
        assert n > 1 or not expected.judge(found, False).passed


LUCKY = {"dq and dk": (27, 4, 176, 519, -1), "dq": (9, 5, 236, 431, -1), "max": (15, 10, 63, 301, -1)}


@pytest.mark.parametrize(("seed", "head", "query", "key", "side"), LUCKY.values(), ids=LUCKY)
def test_a_tie_that_goes_the_other_way_is_no_fault(
    seed: int, head: int, query: int, key: int, side: int
) -> None:
    """The LSE's gradient puts one dS next to a tie, where the yardstick rounds it so that its error cancels
    that of D; an ideal kernel given a gradient 2·10⁻⁵ beyond the tie rounds it the other way."""
    problem = Problem.square(1, 16, 520, 128, False, dtype="float16", direction="bwd")
    q, k, v, do = (x[:, head : head + 1] for x in random_inputs(problem, "cpu", seed))
    draw = torch.randn((1, 16, 520), generator=torch.Generator().manual_seed(seed + 7))
    dlse, scale = draw[:, head : head + 1].clone(), 1.4 / math.sqrt(128)
    o, lse = judging.Expected(q, k, v, False, softmax_scale=scale).saved
    row, out, d_out, column, value = (
        x[0, 0, at].double() for x, at in ((q, query), (o, query), (do, query), (k, key), (v, key))
    )
    p = (row @ column * scale - lse[0, 0, query].double()).exp()
    ds = p * (d_out @ value - d_out @ out + dlse[0, 0, query].double())
    unit = 2.0 ** (math.floor(math.log2(ds.abs())) - 10)
    at_tie = dlse[0, 0, query].double() + ((torch.floor(ds / unit) + 0.5) * unit - ds) / p

    dlse[0, 0, query] = at_tie - 1e-5 * side
    expected = judging.Expected(q, k, v, False, do, softmax_scale=scale, dlse=dlse)
    beyond = dlse.double()
    beyond[0, 0, query] = at_tie + 1e-5 * side
    ideal = reference.gradients_of(*expected.inputs, False, torch.float64, True, scale=scale, dlse=beyond)
    found = {name: x.half() for name, x in zip(("dq", "dk", "dv"), ideal)}
    floors = judging.cancellation(q, k, v, do, scale)
    plain = reference.yardstick_gradients(*expected.inputs, False, True, scale=scale, dlse=dlse)
    assert not judging.judge_gradients(found, expected.gradients, plain, floors).passed
    verdict = expected.judge(found, True)
    assert verdict.passed
    assert verdict.row_rms_ratio < 1.5
    # Four units of that dS are no rounding.
    found["dq"][0, 0, query] += (4 * unit * scale * side * column).half()
    assert not expected.judge(found, True).passed


def test_a_nudge_moves_what_is_near_a_tie_and_nothing_else() -> None:
    q, k, v, do = backward(SHAPES["causal"])
    expected = judging.Expected(q, k, v, True, do)
    by = lambda rounds_p, nudge: reference.yardstick_gradients(*expected.inputs, True, rounds_p, nudge=nudge)
    assert all(x.equal(y) for x, y in zip(by(False, 0.0), by(False, judging.NUDGE)))
    rms = lambda x, ref: (x - ref).square().mean().sqrt().item()
    for nudge in (judging.NUDGE, -judging.NUDGE):
        for x, y, ref in zip(by(True, 0.0), by(True, nudge), expected.gradients):
            assert not x.equal(y)
            assert 0.97 < rms(y, ref) / rms(x, ref) < 1.03


def test_failures_name_the_gradient() -> None:
    q, k, v, do = backward(SHAPES["grouped, causal"])
    expected = judging.Expected(q, k, v, True, do)
    yard = reference.yardstick_gradients(q, k, v, *expected.saved, do, True, False)
    for at, name in enumerate(("dq", "dk", "dv")):
        found = dict(zip(("dq", "dk", "dv"), (x.clone() for x in yard)))
        found[name][0, 0, 7, 3] += 0.5
        verdict = expected.judge(found, False)
        assert verdict.failures
        assert all(text.startswith(f"{name}: ") for text in verdict.failures)
        assert "(b, h, row, x) = (0, 0, 7, 3)" in verdict.failures[0]
        assert verdict.max_error == far(found[name].double(), expected.gradients[at])


def test_faults_that_equal_lengths_and_heads_do_not_show() -> None:
    """A group's gradients from one of its heads only, and a causal mask aligned at the top left."""
    problem = Problem(1, 4, 2, 130, 193, 64, True)
    q, k, v, do = backward(problem)
    expected = judging.Expected(q, k, v, True, do)
    names = ("dq", "dk", "dv")
    honest = dict(zip(names, reference.yardstick_gradients(*expected.inputs, True, False)))
    assert expected.judge(honest, False).passed
    one_head = reference.yardstick_gradients(
        q[:, ::2], k, v, *(x[:, ::2] for x in (*expected.saved, do)), True, False
    )
    for name, x in zip(names[1:], one_head[1:]):
        failures = expected.judge(honest | {name: x}, False).failures
        assert failures[0].startswith(f"{name}: max error")
    square = judging.Expected(q, k[:, :, :130], v[:, :, :130], True, do)  # what a top-left mask shows
    top_left = reference.yardstick_gradients(*square.inputs, True, False)
    for name, x in zip(names, top_left):
        padded = torch.nn.functional.pad(x, (0, 0, 0, honest[name].shape[2] - x.shape[2]))
        assert not expected.judge(honest | {name: padded}, False).passed


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(130, 193), (193, 130)])
@pytest.mark.parametrize("top_left", [False, True])
def test_a_mask_aligned_at_the_other_corner_fails(seqlen_q: int, seqlen_kv: int, top_left: bool) -> None:
    q, k, v, do = backward(Problem(1, 4, 2, seqlen_q, seqlen_kv, 64, True))
    expected = judging.Expected(q, k, v, True, do, top_left)
    for here in (True, False):
        corner = top_left if here else not top_left
        yard = reference.yardstick(q, k, v, True, True, top_left=corner)
        lse = reference.reference(q, k, v, True, top_left=corner)[1].float()
        assert expected.judge({"o": yard, "lse": lse}, True).passed == here
        grads = reference.yardstick_gradients(*expected.inputs, True, True, top_left=corner)
        verdict = expected.judge(dict(zip(("dq", "dk", "dv"), grads)), True)
        assert verdict.passed == here
        assert here or {text.split(":")[0] for text in verdict.failures} == {"dq", "dk", "dv"}


def test_expected_computes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("reference", "yardstick_of", "reference_gradients", "yardstick_gradients"):
        compute = getattr(reference, name)
        counted = lambda *x, name=name, compute=compute, **y: calls.append(name) or compute(*x, **y)
        monkeypatch.setattr(judging, name, counted)
    q, k, v, do = backward(SHAPES["one row"])
    expected = judging.Expected(q, k, v, True, do)
    assert calls == []
    for rounding in (False, True, False):
        assert expected.judge({"o": v, "lse": expected.forward[1]}, rounding).passed
        assert expected.judge({"dq": 0 * q, "dk": 0 * k, "dv": do}, rounding).passed
    assert (
        sorted(calls)
        == ["reference", "reference_gradients"] + ["yardstick_gradients"] * 2 + ["yardstick_of"] * 2
    )


# The pass rule


@pytest.fixture(scope="module")
def judged() -> tuple[torch.Tensor, ...]:
    """Reference, yardstick, LSE of one causal problem."""
    q, k, v = random_inputs(Problem.square(2, 3, 203, 64, True), "cpu")
    ref, lse = reference.reference(q, k, v, True)
    return ref, reference.yardstick(q, k, v, True, False), lse


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


IN_CODES = LazyMaximum(128, 2, 2.75, e4m3=6.0)  # as k7


def in_codes(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).float()


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


def attention_in_codes(q, k, v, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE with P in e4m3 relative to its row's maximum, each key so many times as `counted` has it."""
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    maximum = scores.amax(-1, keepdim=True)
    p = in_codes(64 * (scores - maximum).exp()) / 64 * counted
    total = p.sum(-1, keepdim=True)
    return (p @ v.float() / total).to(q.dtype), (maximum + total.log()).squeeze(-1)


@pytest.mark.parametrize("keys", [1024, 4096])
def test_lse_in_codes_counts_tiles(keys: int) -> None:
    """A tile of constant V that is dropped or counted twice leaves O as it was: the LSE shows it."""
    problem = Problem(1, 2, 2, 128, keys, 64, False, direction="fp8")
    q, k, v = random_inputs(problem, "cpu")
    v[:] = v[:, :, :1]
    for times, first, size in ((1, 0, 128), (2, 0, 128), (0, 0, 128), (2, keys - 64, 64), (0, keys - 64, 64)):
        counted = torch.ones(keys)
        counted[first : first + size] = times
        verdict = judging.check(q, k, v, False, *attention_in_codes(q, k, v, counted), IN_CODES)
        assert verdict.passed == (times == 1), (times, first, size)
        assert all("LSE off by" in failure for failure in verdict.failures)


def test_lse_in_codes_is_judged_by_row_and_by_block() -> None:
    problem = Problem.square(1, 2, 1024, 64, False, direction="fp8")
    q, k, v = random_inputs(problem, "cpu")
    o, lse = reference.yardstick_of(q, k, v, False, IN_CODES)
    passes = lambda lse: judging.check(q, k, v, False, o, lse, IN_CODES).passed
    exact = reference.reference(q, k, v, False)[1]
    assert passes(lse) and passes(exact)
    for error, passed in ((0.9, True), (1.1, False)):  # a row, as one of few keys may be
        off = exact.clone()
        off[0, 1, 77] += error * 2 * judging.LSE_OF_SUMS * 8  # √64
        assert passes(off) == passed
    off = exact.clone()
    off[0, 1, 64:128] += 2.2 * judging.LSE_OF_SUMS
    assert not passes(off), "a block"
    assert not judging.check(q, k, v, False, o, lse, True).passed, "of other stages 10⁻⁵"
    for value in (math.nan, math.inf, -math.inf):
        off = exact.clone()
        off[0, 0, 3] = value
        assert not passes(off)


def test_lse_in_codes_of_rows_that_see_no_key() -> None:
    problem = Problem(1, 2, 2, 203, 65, 64, True, direction="fp8")
    q, k, v = random_inputs(problem, "cpu")
    o, lse = reference.yardstick_of(q, k, v, True, IN_CODES)
    assert (lse[:, :, :138] == -math.inf).all() and not o[:, :, :138].any()
    assert judging.check(q, k, v, True, o, lse, IN_CODES).passed
    lse[0, 0, 5] = 0.0
    assert not judging.check(q, k, v, True, o, lse, IN_CODES).passed


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


@pytest.mark.parametrize("rounds_p", [False, True, LazyMaximum(64, 2, 8.0, 2.0), LazyMaximum(80, 1, 8.0)])
@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES)
def test_yardstick_passes_its_own_rule(problem: Problem, rounds_p: bool) -> None:
    q, k, v = random_inputs(problem, "cpu")
    mask = mask_of(problem)
    yard = reference.yardstick(q, k, v, rounds_p=rounds_p, **mask)
    _, lse = reference.reference(q, k, v, **mask)
    verdict = judging.check(q, k, v, o=yard, lse=lse.float(), rounds_p=rounds_p, **mask)
    assert verdict.failures == ()
    assert verdict.passed
    assert verdict.max_ratio in (0.0, 1.0)
    assert verdict.rms_ratio in (0.0, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [(0, 0, 0, 0), (1, 2, 202, 63), (1, 0, 77, 5)])
def test_judge_sees_one_element_that_is_not_finite(
    value: float, at: tuple[int, ...], judged: tuple[torch.Tensor, ...]
) -> None:
    ref, yard, _ = judged
    o = yard.clone()
    o[at] = value
    verdict = judging.judge(o, ref, yard)
    assert not verdict.passed
    assert f"(b, h, row, x) = {at}" in verdict.failures[0]
    assert f"kernel {value:.6g}, reference {ref[at]:.6g}" in verdict.failures[0]


def test_judge_sees_an_output_of_nan_only(judged: tuple[torch.Tensor, ...]) -> None:
    ref, yard, _ = judged
    verdict = judging.judge(torch.full_like(yard, math.nan), ref, yard)
    assert verdict.failures[0].startswith(f"{yard.numel()} elements finite in one and not in the other")


@pytest.mark.parametrize("at", [(0, 0, 0, 0), (1, 2, 202, 63), (1, 0, 77, 5)])
def test_judge_names_the_worst_element(at: tuple[int, ...], judged: tuple[torch.Tensor, ...]) -> None:
    ref, yard, _ = judged
    o = yard.clone()
    o[at] += 0.5
    o[0, 1, 100, 3] += 0.1
    verdict = judging.judge(o, ref, yard)
    assert not verdict.passed
    here = f"(b, h, row, x) = {at}: kernel {o[at]:.6g}, reference {ref[at]:.6g}, yardstick {yard[at]:.6g}"
    assert verdict.failures[0].startswith("max error")
    assert here in verdict.failures[0]
    assert verdict.max_error == far(o.double(), ref)


def test_each_part_of_the_rule_fails_by_itself(judged: tuple[torch.Tensor, ...]) -> None:
    """Errors that only one part sees, so that no part can be taken away unnoticed."""
    ref, yard, lse = judged
    error = yard.double() - ref

    def failures(o: torch.Tensor, lse: torch.Tensor | None = None) -> list[str]:
        found = judging.judge(o, ref, yard, lse, judged[2]).failures
        return [re.split(r" [\d.]", text)[0] for text in found]

    spike = error.clone()
    spike.view(-1)[error.abs().argmax()] *= 2.1  # in an early row, whose yardstick is large too
    assert failures(ref + spike) == ["max error"]
    assert failures(ref + 1.2 * error) == []
    assert failures(ref + 1.3 * error) == ["rms error"]
    block = error.clone()
    block[1, 1, 64:128] *= 1.6  # 1 of 24 blocks: the whole tensor's rms hardly moves
    block.clamp_(-1.9 * error.abs().max(), 1.9 * error.abs().max())
    assert failures(ref + block) == ["rms error"]
    assert "in rows 64… of (b, h) = (1, 1)" in judging.judge(ref + block, ref, yard).failures[0]
    row = error.clone()
    row[0, 2, 150] = 3.5 * max(error[0, 2, 150].square().mean(), error[0, 2, 128:192].square().mean()).sqrt()
    verdict = judging.judge(ref + row, ref, yard)
    assert any("of (b, h, row) = (0, 2, 150)" in text for text in verdict.failures)
    assert verdict.max_ratio <= judging.MAX_FACTOR
    assert failures(yard, lse + 1e-4 * lse.abs().clamp(min=1)) == ["LSE off by"]


@pytest.mark.parametrize("wrong", [1e-3, -1e-3, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [(0, 0, 0), (1, 2, 202)])
def test_judge_sees_one_wrong_lse(
    wrong: float, at: tuple[int, ...], judged: tuple[torch.Tensor, ...]
) -> None:
    ref, yard, ref_lse = judged
    lse = ref_lse.float()
    assert judging.judge(yard, ref, yard, lse, ref_lse).passed
    lse[at] += wrong
    verdict = judging.judge(yard, ref, yard, lse, ref_lse)
    assert len(verdict.failures) == 1
    where = f"at (b, h, row) = {at}: kernel {lse[at]:.6g}, reference {ref_lse[at]:.6g}"
    assert where in verdict.failures[0]


def test_a_result_without_rounding_error_must_be_exact() -> None:
    v = torch.randn(1, 1, 1, 64).bfloat16()
    ref, _ = reference.reference(v, v, v, False)  # one key: its V
    assert judging.judge(v, ref, v).passed
    assert not judging.judge(v * (1 + 2**-7), ref, v).passed


# The needle


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [64, 257, 1024])
def test_needle(n: int, causal: bool) -> None:
    q, k, v, target = needles.needle_inputs(Problem.square(1, 2, n, 64, causal), "cpu")
    rows = torch.arange(n)
    assert not causal or bool((target <= rows).all())

    def misses(mutation: str | None) -> int:
        o, _ = mutations.tiled_model(q, k, v, causal, rows, mutation)
        return int((o != v[:, :, target]).any(-1).sum())

    assert misses(None) == 0
    assert misses("drop a tile") > 0


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(65, 257), (257, 65)])
@pytest.mark.parametrize("top_left", [False, True])
def test_needle_at_unequal_lengths(seqlen_q: int, seqlen_kv: int, top_left: bool) -> None:
    problem = Problem(1, 2, 2, seqlen_q, seqlen_kv, 64, True, top_left=top_left)
    if seqlen_q > seqlen_kv and not top_left:
        with pytest.raises(ValueError, match="the first queries see no key, and have no target"):
            needles.needle_inputs(problem, "cpu")
        return
    q, k, v, target = needles.needle_inputs(problem, "cpu")
    visible = visible_pairs(seqlen_q, seqlen_kv, **mask_of(problem))
    assert visible[torch.arange(seqlen_q), target].all()
    assert torch.equal(reference.yardstick(q, k, v, rounds_p=False, **mask_of(problem)), v[:, :, target])
    reached = min(seqlen_q, seqlen_kv) if top_left else seqlen_kv
    assert set((target // 16).tolist()) == set(range(math.ceil(reached / 16)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", NEEDLE_LENGTHS)
def test_needle_has_a_row_for_every_tile(n: int, causal: bool) -> None:
    *_, target = needles.needle_inputs(Problem.square(1, 1, n, 64, causal), "cpu")
    for tile in (16, 64, 128):
        assert set((target // tile).tolist()) == set(range(math.ceil(n / tile))), f"tiles of {tile}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [65, 257])
def test_needle_sees_any_dropped_tile(n: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, target = needles.needle_inputs(Problem.square(1, 1, n, 64, causal), "cpu")
    for start in range(0, n, 64):
        hide = mutations._drop(lambda _: (start, start + 64))
        monkeypatch.setitem(mutations.SCORE_MUTATIONS, "drop this tile", hide)
        o, _ = mutations.tiled_model(q, k, v, causal, torch.arange(n), "drop this tile")
        assert not torch.equal(o, v[:, :, target]), f"the tile from key {start} on"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [64, 257, 1024])
def test_gradient_needle(n: int, causal: bool) -> None:
    for head_dim in (64, 128):
        problem = Problem.square(1, 2, n, head_dim, causal, direction="bwd")
        inputs, exact = needles.needle_gradient_inputs(problem, "cpu")
        every = torch.arange(n)

        def misses(mutation: str | None) -> set[str]:
            found = mutations.tiled_gradients(*inputs, causal, every, every, mutation)
            messages = needles.needles_missed(problem, dict(zip(("dq", "dk", "dv"), found)), exact)
            return {re.search(r"elements of (\w+) are off", message)[1] for message in messages}

        assert misses(None) == set()
        assert misses("drop a tile") == {"dq", "dk", "dv"}
        assert "dq" in misses("forget the scale on dQ")
        assert misses("scale dK twice") == {"dk"}


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_needle_sees_any_dropped_tile(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 257
    problem = Problem.square(1, 1, n, 64, causal, direction="bwd")
    inputs, exact = needles.needle_gradient_inputs(problem, "cpu")
    for start in range(0, n, 64):
        hide = mutations._drop(lambda _: (start, start + 64))
        monkeypatch.setitem(mutations.SCORE_MUTATIONS, "drop this tile", hide)
        every = torch.arange(n)
        found = mutations.tiled_gradients(*inputs, causal, every, every, "drop this tile")
        messages = list(needles.needles_missed(problem, dict(zip(("dq", "dk", "dv"), found)), exact))
        assert len(messages) == 3, f"the tile from key {start} on"
        hidden = lambda scores, rows, columns, *_: scores[:, :, start : start + 64].fill_(-math.inf)
        monkeypatch.setitem(mutations.SCORE_MUTATIONS, "drop these queries", hidden)
        found = mutations.tiled_gradients(*inputs, causal, every, every, "drop these queries")
        messages = list(needles.needles_missed(problem, dict(zip(("dq", "dk", "dv"), found)), exact))
        assert len(messages) == 3, f"the tile from query {start} on"
