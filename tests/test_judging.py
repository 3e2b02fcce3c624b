"""The pass rule: what rounds as a kernel does and no more passes, and each part of the rule can fail."""

import math
import re

import pytest
import torch
from small_problems import GRADIENT_SHAPES, IN_CODES, SHAPES, backward, far, in_codes, mask_of

from harness import judging, mutations, reference
from harness.inputs import random_inputs
from hopper_attention.kernels.contract import LazyMaximum, Problem


@pytest.fixture(scope="module")
def judged() -> tuple[torch.Tensor, ...]:
    """Reference, yardstick, LSE of one causal problem."""
    q, k, v = random_inputs(Problem.square(2, 3, 203, 64, True), "cpu")
    ref, lse = reference.reference(q, k, v, True)
    return ref, reference.yardstick(q, k, v, True, False), lse


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


# The LSE of P in codes


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


# Gradients


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


# O, LSE and gradients of one problem


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
