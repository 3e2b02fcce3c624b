"""Windows, soft caps, sinks and packed sequences on a Hopper GPU, through the public calls."""

import math

import pytest
import torch

from harness import fuzz, policy_cases
from harness.policies import Given, random_given
from harness.reference import rounding_of
from hopper_attention import (
    attention,
    enabled,
    flash_attn_func,
    flash_attn_varlen_func,
    ops_policies,
    selection,
)
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

pytestmark = pytest.mark.gpu

LENGTHS = ((203, 203), (0, 5), (64, 64), (1, 77), (300, 129), (7, 0))
POLICIES = (
    {"window_size": (64, 0)},
    {"softcap": 20.0, "causal": True},
    {"sink": True, "causal": True},
    {"window_size": (100, 30), "softcap": 5.0, "sink": True},
)
every_policy = pytest.mark.parametrize("options", POLICIES, ids=str)
every_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])


def given_of(packed: bool, head_dim: int, options: dict, outside: float = math.nan) -> Given:
    """A problem in both directions: the gradients' is the forward one's too."""
    left, right = options.get("window_size", (-1, -1))
    fields = {
        "window": (left, right) if "window_size" in options else None,
        "softcap": options.get("softcap", 0.0),
        "sink": options.get("sink", False),
        "direction": "bwd",
        "scaled": True,
        "lse_grad": True,
    }
    causal = options.get("causal", False)
    if packed:
        queries, keys = (sum(x) for x in zip(*LENGTHS))
        problem = Problem(1, 8, 2, queries, keys, head_dim, causal, sequences=LENGTHS, **fields)
    else:
        problem = Problem(2, 8, 2, 257, 389, head_dim, causal, **fields)
    return random_given(problem, outside=outside)


def call(given: Given, q, k, v, sink, options: dict, **more: object):
    """The public call's o and lse."""
    options = {name: x for name, x in options.items() if name != "sink"} | more
    options |= {"learnable_sink": sink, "return_lse": True}
    if given.problem.sequences is None:
        return attention(q, k, v, **options)
    (cu_q, cu_k), _ = given.lengths()
    o, lse = flash_attn_varlen_func(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_q, cu_k, **options)
    return o.transpose(0, 1)[None], lse[None]


@every_policy
@every_head_dim
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients(packed: bool, head_dim: int, options: dict) -> None:
    given = given_of(packed, head_dim, options)
    problem = given.problem
    leaves = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
    sink = None if given.sink is None else given.sink.detach().requires_grad_()
    o, lse = call(given, *leaves, sink, options)
    forward = problem.with_(direction="fwd", lse_grad=False)
    stage, module = ladder.load(selection.forward_stage(forward))
    rounding = rounding_of(stage, module, forward, **stage.options)
    assert given.judge({"o": o.detach(), "lse": lse.detach()}, rounding, poisoned=False) == []
    seen = lse.isfinite()
    dlse = torch.where(seen, given.dlse, 0.0)
    learned = [*leaves, *([] if sink is None else [sink])]
    grads = torch.autograd.grad((o, lse), learned, (given.do, dlse))
    # of the O and LSE that the kernel gave, not of `saved`
    given.saved = o.detach(), lse.detach()
    given.dlse = dlse
    outputs = dict(zip(("dq", "dk", "dv", "dsink"), grads))
    assert given.judge(outputs, True, poisoned=False) == []


@every_head_dim
def test_packed_and_dense_agree(head_dim: int) -> None:
    """Equal sequences, packed and as a batch: the same numbers to a rounding."""
    q, k, v = (torch.randn(4, 300, 8, head_dim, device="cuda").bfloat16() for _ in range(3))
    cu = torch.arange(5, dtype=torch.int32, device="cuda") * 300
    for options in ({"causal": True}, {"window_size": (99, 0)}):
        dense = flash_attn_func(q, k, v, **options)
        packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 300, 300, **options)
        assert (packed.view_as(dense) - dense).abs().max() <= 2**-6


MANY_SHORT = [i % 65 for i in range(700)], [65 + i % 64 for i in range(250)]  # for which tiles are shorter


@pytest.mark.parametrize(
    "lengths", [[300] * 4, [300, 1, 0, 900], [7] * 90, [0, 0, 5], *MANY_SHORT], ids=lambda x: f"{len(x)}"
)
@every_head_dim
def test_right_or_wrong_the_longest_is_a_hint(head_dim: int, lengths: list[int]) -> None:
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths) + 9, 8, head_dim, device="cuda").bfloat16() for _ in range(3))
    for options in ({"causal": True}, {"window_size": (99, 0)}):
        call = lambda most: flash_attn_varlen_func(q, k, v, starts, starts, most, most, **options)
        plain = call(None)[: sum(lengths)]
        mean = -(-sum(lengths) // len(lengths))  # with which they seem equally long
        for most in (max(lengths), mean, 1, 10**6):
            for _ in range(3):
                assert (call(most)[: sum(lengths)] - plain).abs().max() <= 2**-6


@pytest.mark.parametrize("lengths", [[64] * 40, [128, 0, 1, 77], [3] * 200], ids=lambda x: f"{len(x)}")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_short_sequences_are_those_of_any(head_dim: int, lengths: list[int]) -> None:
    """Whoever says that they are short has them sooner; where one is longer than was said, they are NaN."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    rows = sum(lengths)
    leaves = [
        torch.randn(rows, heads, head_dim, device="cuda").bfloat16().requires_grad_() for heads in (8, 2, 2)
    ]

    def gradients(most: int | None, starts: torch.Tensor = starts) -> list[torch.Tensor]:
        o = flash_attn_varlen_func(*leaves, starts, starts, most, most, causal=True)
        return torch.autograd.grad(o.float().square().sum(), leaves)

    for told, plain in zip(gradients(max(lengths)), gradients(None)):
        assert (told.float() - plain.float()).norm() <= 4e-3 * plain.float().norm()
        assert told.equal(told)  # no NaN
    two = torch.tensor([0, 5, rows], dtype=torch.int32, device="cuda")
    if rows - 5 > 128:
        for gradient in gradients(128, two):
            assert gradient[:5].isfinite().all() and gradient[5:].isnan().any((1, 2)).all()


def test_lengths_are_never_read_on_the_host() -> None:
    given = given_of(True, 128, {"causal": True})
    inputs = [x[0].transpose(0, 1).detach().requires_grad_() for x in (given.q, given.k, given.v)]
    cu_q, cu_k = given.lengths()[0]
    flash_attn_varlen_func(*inputs, cu_q, cu_k, causal=True).sum().backward()  # compiled, planned
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = flash_attn_varlen_func(*inputs, cu_q, cu_k, causal=True)
        o.backward(o.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("total", [0, 5])
def test_nothing_to_attend_to(total: int) -> None:
    """Total 0, no sequence, and queries whose sequences have no keys."""
    rows = lambda n: torch.randn(n, 4, 64, device="cuda").bfloat16().requires_grad_()
    q, k, v, sink = rows(total), rows(0), rows(0), torch.ones(4, device="cuda", requires_grad=True)
    cu_q = torch.tensor([0, total], dtype=torch.int32, device="cuda")
    cu_k = torch.zeros(2, dtype=torch.int32, device="cuda")
    o, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, learnable_sink=sink, return_lse=True)
    assert not o.any() and (lse == 1.0).all()
    grads = torch.autograd.grad((o, lse), (q, k, v, sink), (o, torch.ones_like(lse)))
    assert not any(x.any() for x in grads[:3]) and (grads[3] == total).all()
    nobody = torch.zeros(1, dtype=torch.int32, device="cuda")
    assert flash_attn_varlen_func(q, rows(9), rows(9), nobody, nobody).shape == q.shape


def test_opcheck() -> None:
    given = given_of(True, 64, {"sink": True, "causal": True}, outside=0.0)
    inputs = [x[0].transpose(0, 1).detach().requires_grad_() for x in (given.q, given.k, given.v)]
    cu_q, cu_k = given.lengths()[0]
    options = {"sink": given.sink, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    torch.library.opcheck(ops_policies.forward, inputs, options)


def test_compiled_is_eager() -> None:
    given = given_of(True, 128, {"causal": True})
    inputs = [x[0].transpose(0, 1).contiguous() for x in (given.q, given.k, given.v)]
    lengths = given.lengths()[0]
    step = lambda *x: flash_attn_varlen_func(*x, causal=True, softcap=10.0)
    assert torch.compile(step, fullgraph=True)(*inputs, *lengths).equal(step(*inputs, *lengths))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (50, 0)])
def test_varlen_attn(window: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
    lengths = torch.tensor([0, 200, 264, 500], dtype=torch.int32, device="cuda")
    inputs = [torch.randn(500, 8, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    step = lambda: varlen.varlen_attn(*inputs, lengths, lengths, 236, 236, window_size=window)
    plain = step()
    plain_grads = torch.autograd.grad(plain, inputs, torch.ones_like(plain))
    with enabled():
        found = step()
        grads = torch.autograd.grad(found, inputs, torch.ones_like(found))
    assert (found - plain).abs().max() <= 2**-6 and not found.equal(plain)
    for x, y in zip(grads, plain_grads):
        assert (x - y).abs().max() <= 0.02 * y.abs().max()


@pytest.mark.parametrize("direction", fuzz.SETS)
def test_some_random_problems(direction: str) -> None:
    """All of them: `python -m harness.fuzz`."""
    failed = [(x.problem, failures) for x, failures in fuzz.run(5000, 6, (direction,)) if failures]
    assert failed == []


def test_no_sequence_too_many() -> None:
    problem = policy_cases.packed_of("k6", [(n % 4, n % 4) for n in range(10**5)], 64, heads=2, kv_heads=2)
    given = random_given(problem.with_(causal=True))
    o, lse = call(given, given.q, given.k, given.v, None, {"causal": True})
    stage, module = ladder.load("k6")
    rounding = rounding_of(stage, module, given.problem, **stage.options)
    assert given.judge({"o": o, "lse": lse}, rounding, poisoned=False) == []
