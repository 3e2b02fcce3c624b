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
from simulated_gpu import SimulatedGpu
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, flex_attention
from torch.nn.attention.flex_attention import BlockMask

from harness import fa3, peers, reference
from harness.inputs import random_inputs
from hopper_attention.kernels.contract import Problem

BACKENDS = {
    "math": SDPBackend.MATH,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BOTTOM_RIGHT = ("fa3", "fa4")  # the others align a causal mask at the top left
ROWS_FIRST = ("fa3", "fa4")  # they take (B, N, H, d)
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


def of_rows_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """(B, N, H, d), a causal mask aligned at the bottom right."""
    rows, keys = q.shape[1], k.shape[1]
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return attention(*heads_first, triangle(rows, keys, causal, keys - rows)).transpose(1, 2).contiguous()


FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new{none}, Tensor? out{none}, int? max_seqlen_q{none}, "
    "float? softmax_scale{none}, bool is_causal{no}, int window_size_left{all}, int window_size_right{all}, "
    "int attention_chunk{zero}, float softcap{zero_}, bool is_rotary_interleaved{no}, int num_splits{zero}, "
    "bool? pack_gqa{none}, int sm_margin{zero}) -> (Tensor, Tensor, Tensor, Tensor)"
)
FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? dq{none}, "
    "Tensor? dk{none}, Tensor? dv{none}, float? softmax_scale{none}, bool is_causal{no}, "
    "int window_size_left{all}, int window_size_right{all}, float softcap{zero_}, bool deterministic{no}, "
    "int sm_margin{zero}) -> (Tensor, Tensor, Tensor, Tensor)"
)
NONE_OF_IT = {"window_size_left": -1, "window_size_right": -1, "num_splits": 1}  # False, zero or None else


class Fa3Build:
    """A build of FlashAttention-3 that takes `ms` of a simulated GPU; its operators have defaults or not."""

    def __init__(self, given: "Given", gpu: SimulatedGpu, ms: float = 1.0, defaults: bool = True):
        self.given, self.gpu, self.ms = given, gpu, ms
        values = {"none": "None", "no": "False", "all": "-1", "zero": "0", "zero_": "0.0"}
        values = {name: f"={value}" if defaults else "" for name, value in values.items()}
        for name, text, run in (("fwd", FA3_FORWARD, self.forward), ("bwd", FA3_BACKWARD, self.backward)):
            setattr(self, name, SimpleNamespace(default=self.operator(text.format(**values), run)))

    def operator(self, text: str, run: Callable) -> Callable:
        schema = torch._C.parse_schema(f"stand_in::{text}")

        def call(*values: object) -> object:
            given = dict(zip((argument.name for argument in schema.arguments), values, strict=True))
            used = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
            causal = given.pop("is_causal")
            for name, x in given.items():
                assert name in used or x == NONE_OF_IT.get(name) or (name not in NONE_OF_IT and not x)
            self.gpu.launch(self.ms)
            return run(**used, causal=causal)

        call._schema = schema
        return call

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple:
        self.given.note("fa3", q, k, v)
        return of_rows_first(q, k, v, causal), self.lse(q), None, None

    def lse(self, q: torch.Tensor) -> torch.Tensor:
        return torch.arange(q.shape[0] * q.shape[1] * q.shape[2]).view(q.shape[0], q.shape[2], q.shape[1])

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        causal: bool,
    ) -> tuple:
        """Into the gradients it is given: what builds return, and in which order, differs."""
        self.given.note("fa3 backward", q, k, v)
        assert dout.is_contiguous()
        assert torch.equal(out, of_rows_first(q, k, v, causal))
        assert torch.equal(softmax_lse, self.lse(q))
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(of_rows_first(*inputs, causal), inputs, dout)
        for given, gradient in zip((dq, dk, dv), found, strict=True):
            given.copy_(gradient)
        return (softmax_lse,)


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

    def sdpa(self, *inputs: torch.Tensor, is_causal: bool = False, enable_gqa: bool = False) -> torch.Tensor:
        query, key, value = inputs
        self.note("sdpa", query, key, value)
        self.backends.append(_cur_sdpa_kernel_backends())
        assert enable_gqa or query.shape[1] == key.shape[1], "heads differ without enable_gqa"
        return attention(query, key, value, triangle(query.shape[2], key.shape[2], is_causal))

    def flex(
        self, *inputs: torch.Tensor, block_mask: BlockMask | None = None, enable_gqa: bool = False
    ) -> torch.Tensor:
        query, key, value = inputs
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

    def fa4(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
        self.note("fa4", q, k, v)
        return of_rows_first(q, k, v, causal)

    def compile(self, function: Callable, **options: object) -> Callable:
        def compiled(*args: object, **kwargs: object) -> object:
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
    build = Fa3Build(found, SimulatedGpu(monkeypatch))
    monkeypatch.setattr(fa3, "builds", lambda: {"flash_attn_3": build})
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
