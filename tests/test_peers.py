"""What each peer is given to compute: the problem, its inputs and its mask, and nothing else.

Stand-ins take the place of what the peers call. They compute attention by its definition from what they are
given, so that anything else in the problem's place gives another result, and they keep what they were given.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, flex_attention

from harness import peers, reference
from harness.inputs import random_inputs
from hopper_attention.kernels.contract import Problem

BACKENDS = {
    "math": SDPBackend.MATH,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BOTTOM_RIGHT = ("fa4",)  # the others align a causal mask at the top left
ROWS_FIRST = ("fa4",)  # takes (B, N, H, d)
PROBLEMS = {
    "full": Problem(2, 3, 3, 140, 140, 64, False),
    "causal": Problem(2, 3, 3, 140, 140, 64, True),
    "GQA": Problem(1, 6, 2, 140, 140, 128, False),
    "causal GQA": Problem(1, 6, 2, 140, 140, 64, True),
    "MQA": Problem(1, 4, 1, 129, 129, 64, True, "float16"),
    "more keys": Problem(1, 4, 2, 140, 300, 64, False),
    "more keys, causal": Problem(1, 4, 2, 140, 300, 64, True),
    "more queries": Problem(1, 4, 2, 300, 140, 64, False),
}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """By its definition, differentiable, of (B, H, N, d) and a mask (N, N) of what is seen."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ keys.mT / math.sqrt(q.shape[-1])
    return (scores.masked_fill(~visible, -math.inf).softmax(-1) @ values).to(q.dtype)


def triangle(rows: int, keys: int, causal: bool, diagonal: int = 0) -> torch.Tensor:
    everything = torch.ones(rows, keys, dtype=torch.bool)
    return everything.tril(diagonal) if causal else everything


@dataclass
class Given:
    """What the stand-ins were given, call by call."""

    names: list[str] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    backends: list[list[SDPBackend]] = field(default_factory=list)
    compiled: list[tuple[Callable, dict]] = field(default_factory=list)

    def note(self, name: str, *tensors: torch.Tensor) -> None:
        self.names.append(name)
        self.tensors.append(tensors)

    def sdpa(self, query, key, value, *, is_causal=False, enable_gqa=False):
        self.note("sdpa", query, key, value)
        self.backends.append(_cur_sdpa_kernel_backends())
        assert enable_gqa or query.shape[1] == key.shape[1], "heads differ without enable_gqa"
        return attention(query, key, value, triangle(query.shape[2], key.shape[2], is_causal))

    def flex(self, query, key, value, *, block_mask=None, enable_gqa=False):
        self.note("flex", query, key, value)
        assert enable_gqa or query.shape[1] == key.shape[1], "heads differ without enable_gqa"
        rows, keys = query.shape[2], key.shape[2]
        if block_mask is None:
            return attention(query, key, value, triangle(rows, keys, False))
        assert block_mask.shape == (1, 1, rows, keys)
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        height, width = block_mask.BLOCK_SIZE
        blocks = block_mask.to_dense()[0, 0].bool()[i // height, j // width]
        return attention(query, key, value, block_mask.mask_mod(0, 0, i, j) & blocks)

    def fa4(self, q, k, v, *, causal=False):
        self.note("fa4", q, k, v)
        rows, keys = q.shape[1], k.shape[1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, triangle(rows, keys, causal, keys - rows)).transpose(1, 2).contiguous()

    def compile(self, function, **options):
        def compiled(*args, **kwargs):
            self.names.append("compiled")
            return function(*args, **kwargs)

        self.compiled.append((function, options))
        return compiled


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    found = Given()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", found.sdpa)
    monkeypatch.setattr(flex_attention, "flex_attention", found.flex)
    monkeypatch.setattr(torch, "compile", found.compile)
    cute = SimpleNamespace(flash_attn_func=found.fa4)
    for name, module in (("flash_attn", SimpleNamespace(cute=cute)), ("flash_attn.cute", cute)):
        monkeypatch.setitem(sys.modules, name, module)
    return found


def far(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def problem_for(name: str, label: str, direction: str) -> Problem:
    problem = PROBLEMS[label].with_(direction=direction)
    unequal = problem.causal and problem.seqlen_q != problem.seqlen_kv
    return problem.with_(top_left=unequal and name not in BOTTOM_RIGHT)


@pytest.mark.parametrize("label", PROBLEMS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_computes_the_problem(name: str, direction: str, label: str, given: Given) -> None:
    problem = problem_for(name, label, direction)
    inputs = random_inputs(problem, "cpu", seed=7)
    kept = [x.clone() for x in inputs]
    q, k, v, *do = inputs
    expected = reference.Expected(q, k, v, problem.causal, *do, top_left=problem.top_left)
    exact = expected.gradients if do else expected.forward[:1]
    call = peers.PEERS[name].build(problem, *inputs)
    for _ in range(2):
        found = call() if do else [call()]
        for x, ref in zip(found, exact, strict=True):
            x = x.transpose(1, 2) if name in ROWS_FIRST else x
            assert (x.shape, x.dtype) == (ref.shape, q.dtype)
            assert far(x, ref) < 0.01
    for x, before in zip(inputs, kept):
        assert torch.equal(x, before)
        assert not x.requires_grad


@pytest.mark.parametrize("label", ["full", "causal GQA"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_is_given_the_inputs_as_it_likes_them(
    name: str, direction: str, label: str, given: Given
) -> None:
    """What is timed makes no copies: the tensors are the problem's, or laid out anew before the call; and the
    key heads of GQA are not repeated."""
    problem = problem_for(name, label, direction)
    inputs = random_inputs(problem, "cpu")
    call = peers.PEERS[name].build(problem, *inputs)
    built = len(given.tensors)
    assert built == (direction == "bwd")  # the forward pass, which is not part of the call
    call()
    call()
    assert len(given.tensors) == (1 if direction == "bwd" else 2)
    for tensors in given.tensors:
        for x, mine, first in zip(tensors, inputs, given.tensors[0]):
            assert torch.equal(x.transpose(1, 2) if name in ROWS_FIRST else x, mine)
            assert x.is_contiguous()
            assert x.data_ptr() == (first if name in ROWS_FIRST else mine).data_ptr()
            assert x.requires_grad == (direction == "bwd")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_is_the_one_it_is_named_after(name: str, direction: str, given: Given) -> None:
    problem = PROBLEMS["causal GQA"].with_(direction=direction)
    peers.PEERS[name].build(problem, *random_inputs(problem, "cpu"))()
    if name in BACKENDS:
        assert given.names == ["sdpa"]
        assert given.backends == [[BACKENDS[name]]]
    elif name == "flex":
        assert given.names == ["compiled", "flex"]
        assert given.compiled == [(given.flex, {"dynamic": False})]
    else:
        assert given.names == [name]


def test_every_peer_is_tested() -> None:
    assert set(peers.PEERS) == {*BACKENDS, "flex", "fa4"}


def test_fa4_may_give_the_lse_too(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS["GQA"]
    inputs = random_inputs(problem, "cpu")
    plain = peers.PEERS["fa4"].build(problem, *inputs)()
    cute = SimpleNamespace(flash_attn_func=lambda *x, **mask: (given.fa4(*x, **mask), None))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    assert torch.equal(peers.PEERS["fa4"].build(problem, *inputs)(), plain)
