"""What each peer is given to compute: the problem, its inputs and its mask, and nothing else."""

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from simulated_gpu import SimulatedGpu
from stand_in_peers import (
    PROBLEMS,
    ROWS_FIRST,
    Fa3Build,
    Given,
    attention,
    far,
    installed,
    of_rows_first,
    triangle,
)
from torch.nn.attention import SDPBackend

from harness import fa3, judging, peers, trained_peers
from harness.inputs import random_inputs
from hopper_attention.kernels.contract import Problem

BACKENDS = {
    "math": SDPBackend.MATH,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BOTTOM_RIGHT = ("fa3", "fa4")  # the others align a causal mask at the top left


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    return installed(monkeypatch)


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
    expected = judging.Expected(q, k, v, problem.causal, *do, top_left=problem.top_left)
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
    alone = direction == "bwd" and name != "fa3"  # autograd runs what the forward pass has left
    built = len(given.tensors)
    call()
    call()
    assert len(given.tensors) == built + (0 if alone else 2)
    for tensors in given.tensors:
        for x, mine, first in zip(tensors, inputs, given.tensors[0]):
            assert torch.equal(x.transpose(1, 2) if name in ROWS_FIRST else x, mine)
            assert x.is_contiguous()
            assert x.data_ptr() == (first if name in ROWS_FIRST else mine).data_ptr()
            assert x.requires_grad == alone


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
    elif name == "fa3":
        times = fa3.TIMED + 1  # how often it ran before it was chosen
        passes = ["fa3"] * (times + 1)
        assert given.names == passes + ["fa3 backward"] * (times + 1) * (direction == "bwd")
    else:
        assert given.names == [name]


def test_every_peer_is_tested() -> None:
    assert set(peers.PEERS) == {*BACKENDS, "flex", "fa3", "fa4"}


def test_fa4_may_give_the_lse_too(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS["GQA"]
    inputs = random_inputs(problem, "cpu")
    plain = peers.PEERS["fa4"].build(problem, *inputs)()
    cute = SimpleNamespace(flash_attn_func=lambda *x, **mask: (given.fa4(*x, **mask), None))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    assert torch.equal(peers.PEERS["fa4"].build(problem, *inputs)(), plain)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("defaults", [False, True])
def test_fa3_is_the_fastest_build_that_runs(
    defaults: bool, direction: str, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Fa3Build):
        def operator(self, text: str, run: Callable) -> Callable:
            def call(*values: object) -> None:
                raise RuntimeError("no kernel image is available")

            call._schema = super().operator(text, run)._schema
            return call

    gpu = SimulatedGpu(monkeypatch)
    slow, fast = (Fa3Build(given, gpu, ms, defaults) for ms in (2.0, 1.5))
    problem = PROBLEMS["causal GQA"].with_(direction=direction)
    inputs = random_inputs(problem, "cpu")
    for order in ((slow, fast), (fast, slow), (Broken(given, gpu), slow, fast), (fast, Broken(given, gpu))):
        monkeypatch.setattr(fa3, "builds", lambda: dict(enumerate(order)))
        call = peers.PEERS["fa3"].build(problem, *inputs)
        before = len(gpu.kernels)
        call()
        ((begin, end, _),) = gpu.kernels[before:]
        assert end - begin == pytest.approx(1.5e-3)
    monkeypatch.setattr(fa3, "builds", lambda: {"broken": Broken(given, gpu)})
    with pytest.raises(RuntimeError, match="no kernel image"):
        peers.PEERS["fa3"].build(problem, *inputs)


def test_fa3_without_a_backward_pass(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Fa3Build(given, SimulatedGpu(monkeypatch))
    del build.bwd
    monkeypatch.setattr(fa3, "builds", lambda: {"fa3_fwd": build})
    problem = PROBLEMS["GQA"].with_(direction="bwd")
    with pytest.raises(RuntimeError, match="has a backward pass"):
        peers.PEERS["fa3"].build(problem, *random_inputs(problem, "cpu"))


# In training


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Causal, (B, N, H, d), as an operator's implementation may compute them: without autograd."""
    q, k, v, do = (x.transpose(1, 2).float() for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    visible = triangle(q.shape[2], k.shape[2], True)
    p = (q @ k.mT * scale).masked_fill(~visible, -math.inf).softmax(-1)
    dp = do @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return tuple(x.transpose(1, 2).contiguous() for x in (ds @ k, ds.mT @ q, p.mT @ do))


def trained_on(name: str, given: Given, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """The peer's call in a model, of stand-ins, compiled by the true `torch.compile`."""

    class Build(Fa3Build):
        def backward(self, dout, q, k, v, out, softmax_lse, dq, dk, dv, causal):
            for x, gradient in zip((dq, dk, dv), gradients(q, k, v, dout), strict=True):
                x.copy_(gradient)
            return (softmax_lse,)

    def fa4_forward(q, k, v, *, causal, return_lse):
        assert causal
        assert return_lse
        return of_rows_first(q, k, v, True), torch.zeros(q.shape[0], q.shape[2], q.shape[1]), None

    interface = SimpleNamespace(
        _flash_attn_fwd=fa4_forward,
        _flash_attn_bwd=lambda q, k, v, o, do, lse, *, causal: gradients(q, k, v, do),
    )
    sys.modules["flash_attn.cute"].interface = interface
    monkeypatch.setattr(fa3, "builds", lambda: {"a": Build(given, SimulatedGpu(monkeypatch))})
    monkeypatch.setattr(trained_peers, "FP32_ROWS", 16)
    trained_peers.attention.cache_clear()
    return trained_peers.attention(name)


@pytest.mark.parametrize("name", trained_peers.PASSES)
def test_a_peer_in_training(name: str, given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager, and compiled as one graph: the values and gradients of the definition."""
    compile = given.true_compile
    call = trained_on(name, given, monkeypatch)
    leaves = [torch.randn(2, 3, 40, 64, requires_grad=True) for _ in range(3)]
    do = torch.randn(2, 3, 40, 64)
    expected = attention(*leaves, triangle(40, 40, True))
    exact = torch.autograd.grad(expected, leaves, do)

    def step(q, k, v):
        return call(1.0 * q, k, v) * 1.0

    for run in (step, compile(step, fullgraph=True, backend="aot_eager")):
        o = run(*leaves)
        for x, y in zip((o, *torch.autograd.grad(o, leaves, do)), (expected, *exact), strict=True):
            assert torch.allclose(x, y, atol=1e-5)


def test_fa3_in_training_needs_a_backward_pass(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Fa3Build(given, SimulatedGpu(monkeypatch))
    del build.bwd
    monkeypatch.setattr(fa3, "builds", lambda: {"fa3_fwd": build})
    trained_peers.attention.cache_clear()
    with pytest.raises(ImportError, match="has a backward pass"):
        trained_peers.attention("fa3")
