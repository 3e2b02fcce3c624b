"""What a peer's call computes: attention, its backward pass alone, a causal mask where the peer aligns it."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from harness import judging, peers
from harness.inputs import random_inputs
from hopper_attention.kernels.contract import Problem


@pytest.mark.parametrize("rows_first", [False, True])
def test_peers_backward_pass_alone(rows_first: bool) -> None:
    """The call is of the backward pass, as often as one likes, and its gradients are attention's."""
    forwards = []

    def forward(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable:
        def call() -> torch.Tensor:
            forwards.append(q)
            x = [t.transpose(1, 2) for t in (q, k, v)] if rows_first else (q, k, v)
            o = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=problem.causal)
            return o.transpose(1, 2) if rows_first else o

        return call

    problem = Problem.square(2, 3, 17, 64, True, direction="bwd")
    q, k, v, do = random_inputs(problem, "cpu")
    call = peers.Peer(lambda: "1.0", forward, rows_first).build(problem, q, k, v, do)
    for _ in range(2):
        found = [x.transpose(1, 2) if rows_first else x for x in call()]
        exact = judging.Expected(q, k, v, True, do).gradients
        for x, ref in zip(found, exact, strict=True):
            assert torch.allclose(x.double(), ref, atol=0.03 * ref.abs().max().item(), rtol=0)
    assert len(forwards) == 1
    assert not q.requires_grad
    plain = peers.Peer(lambda: "1.0", forward, rows_first).build(problem.with_(direction="fwd"), q, k, v)
    assert len(forwards) == 1
    assert not plain().requires_grad


@pytest.mark.parametrize("lengths", [(16, 16), (16, 40), (40, 16)])
@pytest.mark.parametrize(("causal", "top_left"), [(False, False), (True, False), (True, True)])
def test_math_peer_on_the_cpu(lengths: tuple[int, int], causal: bool, top_left: bool) -> None:
    problem = Problem(1, 4, 2, *lengths, 64, causal, direction="bwd", top_left=top_left)
    q, k, v, do = random_inputs(problem, "cpu")
    if causal and not top_left and lengths != (16, 16):
        with pytest.raises(ValueError, match="aligns a causal mask at the top left"):
            peers.PEERS["math"].build(problem, q, k, v, do)
        return
    found = peers.PEERS["math"].build(problem, q, k, v, do)()
    for x, ref in zip(found, judging.Expected(q, k, v, causal, do, top_left).gradients, strict=True):
        assert torch.allclose(x.double(), ref, atol=0.03 * ref.abs().max().item(), rtol=0)


def test_fa4_aligns_at_the_bottom_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cute = SimpleNamespace(flash_attn_func=lambda q, k, v, causal: (q, None))
    for name, module in (("flash_attn", SimpleNamespace(cute=cute)), ("flash_attn.cute", cute)):
        monkeypatch.setitem(sys.modules, name, module)
    problem = Problem(1, 4, 2, 16, 40, 64, True)
    q, k, v = random_inputs(problem, "cpu")
    peers.PEERS["fa4"].build(problem, q, k, v)()
    peers.PEERS["fa4"].build(problem.with_(seqlen_q=40, top_left=True), q, k, v)()
    with pytest.raises(ValueError, match="aligns a causal mask at the bottom right"):
        peers.PEERS["fa4"].build(problem.with_(top_left=True), q, k, v)


@pytest.mark.parametrize("name", [name for name in peers.PEERS if name not in ("fa3", "fa4")])
def test_other_peers_align_at_the_top_left(name: str) -> None:
    problem = Problem(1, 2, 2, 16, 40, 64, True)
    q, k, v = random_inputs(problem, "cpu")
    with pytest.raises(ValueError, match="aligns a causal mask at the top left"):
        peers.PEERS[name].build(problem, q, k, v)
