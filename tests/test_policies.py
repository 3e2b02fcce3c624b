"""Windows, soft caps, sinks and packed sequences: the reference against the formulas written out, the tensors
of a problem, and that the rule sees what is wrong."""

import itertools
import math

import pytest
import torch

from harness import reference
from harness.policies import Given, random_given
from hopper_attention.kernels.contract import Problem

PLAIN = Problem(2, 4, 2, 37, 53, 64, False, direction="bwd", lse_grad=True, scaled=True)
PACKED = PLAIN.with_(
    batch=1, seqlen_q=90, seqlen_kv=120,
    sequences=((33, 40), (0, 5), (17, 0), (1, 1), (17, 30), (1, 1), (0, 0)),
)  # fmt: skip
MASKS = (
    {},
    {"causal": True},
    {"causal": True, "top_left": True},
    {"window": (7, 0)},
    {"window": (-1, 3)},
    {"window": (5, 4)},
    {"window": (0, 0)},
)
CAPS = ({}, {"softcap": 2.0})
SINKS = ({}, {"sink": True})
EVERY = [a | b | c for a, b, c in itertools.product(MASKS, CAPS, SINKS)]


def seen(problem: Problem, queries: int, keys: int) -> torch.Tensor:
    """Which keys each query sees, pair by pair."""
    offset = 0 if problem.top_left else keys - queries
    left, right = problem.window or (-1, 0 if problem.causal else -1)
    visible = torch.zeros(queries, keys, dtype=torch.bool)
    for i, j in itertools.product(range(queries), range(keys)):
        visible[i, j] = (left < 0 or j >= i + offset - left) and (right < 0 or j <= i + offset + right)
    return visible


def written_out(given: Given, q, k, v, sink) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of a problem in float64, differentiable, a sequence at a time; zero in rows of none."""
    problem = given.problem
    group = problem.heads // problem.kv_heads
    o, lse = torch.zeros_like(q), torch.zeros(q.shape[:3], dtype=q.dtype)
    batches = [(b, 0, 0, problem.seqlen_q, problem.seqlen_kv) for b in range(problem.batch)]
    if problem.sequences is not None:
        batches = [(0, *at) for at in zip(*given.starts, *zip(*problem.sequences))]
    for b, first_q, first_kv, queries, keys in batches:
        own, of = slice(first_q, first_q + queries), slice(first_kv, first_kv + keys)
        keys_, values = (x[b, :, of].repeat_interleave(group, 0) for x in (k, v))
        s = q[b, :, own] @ keys_.mT * (given.softmax_scale or problem.head_dim**-0.5)
        if problem.softcap:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        s = s.masked_fill(~seen(problem, queries, keys), -math.inf)
        logit = torch.full((problem.heads,), -math.inf, dtype=q.dtype) if sink is None else sink
        s = torch.cat([s, logit[:, None, None].expand(-1, queries, 1)], -1)  # a key more, whose value is 0
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
        blind = s.isneginf().all(-1)
        total = torch.where(blind[..., None], 0.0, s).logsumexp(-1)
        p = (s - torch.where(blind, 0.0, total)[..., None]).exp()
        at = torch.tensor(b), torch.arange(problem.heads)[:, None], torch.arange(queries) + first_q
        o = o.index_put(at, p @ values)
        lse = lse.index_put(at, torch.where(blind, -math.inf, total))
    return o, lse


def exact(problem: Problem, **more: object) -> Given:
    given = random_given(problem, seed=3, device="cpu", outside=0.0, **more)
    for name in ("q", "k", "v", "do", "dlse", "sink"):
        x = getattr(given, name)
        setattr(given, name, None if x is None else x.double())
    return given


@pytest.mark.parametrize("fields", EVERY, ids=str)
@pytest.mark.parametrize("plain", [PLAIN, PACKED], ids=["dense", "packed"])
def test_the_reference_is_what_is_written_out(plain: Problem, fields: dict[str, object]) -> None:
    padding = None if plain is PLAIN else [(1, 2)] * len(plain.sequences)
    given = exact(plain.with_(**fields), scale=0.3, padding=padding)
    leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    leaves += [] if given.sink is None else [given.sink.clone().requires_grad_()]
    o, lse = written_out(given, *leaves[:3], leaves[3] if given.sink is not None else None)
    ref_o, ref_lse = zip(*(one.forward for one in given.expected))
    assert torch.allclose(given.gathered("o", ref_o), given.own_rows("o", o), atol=1e-12)
    own = given.own_rows("lse", lse)
    assert torch.allclose(given.gathered("lse", ref_lse), own, atol=1e-12)
    seen_rows = lse.isfinite()
    dlse = torch.where(seen_rows, given.dlse, 0.0)
    grads = torch.autograd.grad(
        (o * given.do).sum() + (torch.where(seen_rows, lse, 0.0) * dlse).sum(), leaves
    )
    found = list(zip(*(one.gradients for one in given.expected)))
    for name, x, parts in zip(("dq", "dk", "dv"), grads, found):
        assert torch.allclose(given.gathered(name, parts), given.own_rows(name, x), atol=1e-11), name
    if given.sink is not None:
        rows = [
            given.own_rows(name, x)
            for name, x in (("o", o), ("lse", lse), ("do", given.do), ("dlse", given.dlse))
        ]
        o_, lse_, do_, dlse_ = (x.detach() for x in rows)
        dsink, size = reference.sink_gradient(o_, lse_, do_, given.sink, dlse_)
        assert torch.allclose(dsink, grads[3], atol=1e-11)
        assert (size >= dsink.abs()).all()
