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

from harness import cudnn_fp8, fa3, judging, peers, quantized, reference, trained_peers
from harness.inputs import random_inputs
from hopper_attention.kernels import quantize
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
    "Tensor? q_descale{none}, Tensor? k_descale{none}, Tensor? v_descale{none}, float? softmax_scale{none}, "
    "bool is_causal{no}, int window_size_left{all}, int window_size_right{all}, "
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

    true_compile: Callable
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
    found = Given(torch.compile)
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


# In FP8


class Fa3InCodes(Fa3Build):
    """The build in FP8: e4m3 in, with a descale for each batch and key head, bf16 out."""

    def forward(self, *, causal: bool, **given: torch.Tensor) -> tuple:
        q, k, v = (given[name] for name in "qkv")
        self.given.note("fa3 in codes", q, k, v)
        assert {x.dtype for x in (q, k, v)} == {torch.float8_e4m3fn}
        batch, kv_heads = k.shape[0], k.shape[2]
        exact = []
        for x, name in ((q, "q_descale"), (k, "k_descale"), (v, "v_descale")):
            scale = given[name]
            assert (scale.shape, scale.dtype, scale.is_contiguous()) == (
                (batch, kv_heads),
                torch.float32,
                True,
            )
            exact.append(
                (x.float() * scale.repeat_interleave(x.shape[2] // kv_heads, 1)[:, None, :, None]).bfloat16()
            )
        return of_rows_first(*exact, causal), self.lse(q), None, None


class CudnnNode:
    """An output's, which keeps what it is told."""


class CudnnGraph:
    """cuDNN's front end as far as `cudnn_fp8` calls it: with one output type only, if `only` names it."""

    def __init__(self, given: "Given", only: str | None):
        self.given, self.only, self.calls, self.tensors, self.outputs = given, only, [], {}, {}

    def __call__(self, **options: object) -> "CudnnGraph":
        types = {"intermediate_data_type": "FLOAT", "compute_data_type": "FLOAT"}
        assert options == types | {"io_data_type": "FP8_E4M3", "handle": 7}
        self.tensors, self.outputs = {}, {}
        return self

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: str) -> str:
        self.tensors[name] = (dim, stride, data_type)
        return name

    def sdpa_fp8(self, **options: object) -> tuple:
        self.mask = {
            name: options.pop(name) for name in ("diagonal_alignment", "right_bound") if name in options
        }
        self.scale = options.pop("attn_scale")
        assert options.pop("generate_stats") is False
        assert options == {name: name for name in self.tensors}
        return self.output("o"), None, self.output("amax_s"), self.output("amax_o")

    def output(self, name: str) -> object:
        node, told = CudnnNode(), self.outputs.setdefault(name, {})
        node.name = name
        for what in ("output", "dim", "stride", "data_type"):
            setattr(node, f"set_{what}", lambda value, what=what: told.update({what: value}) or node)
        return node

    def create_execution_plans(self, modes: list) -> None:
        assert modes == ["A"]

    def check_support(self) -> None:
        if self.only and self.outputs["o"]["data_type"] != self.only:
            raise RuntimeError(f"no kernel that writes {self.outputs['o']['data_type']}")

    validate = build_operation_graph = build_plans = lambda self: None
    get_workspace_size = lambda self: 0

    def execute(self, pack: dict, workspace: torch.Tensor, handle: int) -> None:
        assert handle == 7 and workspace.numel() == 1
        x = {name: pack[name] for name in self.tensors}
        for name, (dim, stride, _) in self.tensors.items():
            assert (list(x[name].shape), list(x[name].stride())) == (dim, stride)
        self.given.note("cudnn in codes", x["q"], x["k"], x["v"])
        assert x["scale_s"].item() * x["descale_s"].item() == pytest.approx(1.0)
        assert x["scale_s"].item() <= 448.0
        assert x["scale_o"].item() == 1.0
        assert self.scale == 1 / math.sqrt(x["q"].shape[-1])
        exact = [x[name].float() * x[f"descale_{name}"] for name in "qkv"]
        rows, keys = exact[0].shape[2], exact[1].shape[2]
        diagonal = {"TOP_LEFT": 0, "BOTTOM_RIGHT": keys - rows}[
            self.mask.get("diagonal_alignment", "TOP_LEFT")
        ]
        visible = triangle(rows, keys, self.mask.get("right_bound") == 0, diagonal)
        (o,) = (value for node, value in pack.items() if getattr(node, "name", None) == "o")
        assert (list(o.shape), list(o.stride())) == (self.outputs["o"]["dim"], self.outputs["o"]["stride"])
        o.copy_(attention(*exact, visible))


@pytest.fixture
def in_codes(given: Given, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CudnnGraph]:
    """Stand-ins for both peers in FP8; called, it says what type cuDNN can write."""

    def install(only: str | None = None) -> CudnnGraph:
        graph = CudnnGraph(given, only)
        enum = lambda *names: SimpleNamespace(**{name: name for name in names})
        module = SimpleNamespace(
            data_type=enum("FP8_E4M3", "BFLOAT16", "HALF", "FLOAT"),
            diagonal_alignment=enum("TOP_LEFT", "BOTTOM_RIGHT"),
            heur_mode=enum("A"),
            create_handle=lambda: 7,
            set_stream=lambda handle, stream: graph.calls.append((handle, stream)),
            pygraph=graph,
            backend_version=lambda: 91002,
            __version__="1.14.0",
        )
        monkeypatch.setitem(sys.modules, "cudnn", module)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
        return graph

    for name in ("fa3_fwd", "fa3_fwd._C"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=None))
    build = Fa3InCodes(given, SimulatedGpu(monkeypatch))
    monkeypatch.setattr(torch.ops, "fa3_fwd", build, raising=False)
    return install


IN_FP8 = {name: peer for name, peer in peers.PEERS.items() if peer.fp8}
FP8_PROBLEMS = [(name, label) for name in IN_FP8 for label in PROBLEMS]
FP8_PROBLEMS += [("cudnn", "more keys, causal, top left")]


def fp8_problem(label: str) -> Problem:
    plain = PROBLEMS[label.removesuffix(", top left")]
    return plain.with_(direction="fp8", dtype="bfloat16", top_left=label.endswith("top left"))


def test_who_has_fp8() -> None:
    assert set(IN_FP8) == {"cudnn", "fa3"}
    assert all((peer.fp8 is None) == (peer.fp8_version is None) for peer in peers.PEERS.values())


@pytest.mark.parametrize(("name", "label"), FP8_PROBLEMS)
def test_a_peer_in_fp8_computes_the_problem(name: str, label: str, in_codes: Callable) -> None:
    graph = in_codes()
    problem = fp8_problem(label)
    q, k, v = random_inputs(problem, "cpu", seed=7)
    q, v = quantized.held(200 * q), quantized.held(500 * v)  # so that scales are not 1
    k = quantized.held(k / 200)
    assert quantized.power_of_two(q) > 1 and quantized.power_of_two(v) > 1
    exact = reference.reference(q, k, v, problem.causal, top_left=problem.top_left)[0]
    call = peers.PEERS[name].build(problem, q, k, v)
    for _ in range(2):
        found = call()
        assert found.dtype == torch.bfloat16
        assert far(found.transpose(1, 2) if name in ROWS_FIRST else found, exact) < 0.01
    if name == "cudnn":
        assert set(graph.calls) == {(7, 5)}, "the stream that is PyTorch's"


@pytest.mark.parametrize("name", IN_FP8)
def test_a_peer_in_fp8_is_given_codes_once(name: str, in_codes: Callable, given: Given) -> None:
    in_codes()
    problem = fp8_problem("causal GQA")
    inputs = random_inputs(problem, "cpu")
    call = peers.PEERS[name].build(problem, *inputs)
    call()
    call()
    assert set(given.names) == {f"{name} in codes"}
    for tensors in given.tensors:
        for x, mine, first in zip(tensors, inputs, given.tensors[0], strict=True):
            assert x.dtype == torch.float8_e4m3fn and x.is_contiguous()
            assert x.data_ptr() == first.data_ptr(), "no copy in a call"
            back = x.float() * quantized.power_of_two(mine)
            assert torch.equal(back.transpose(1, 2) if name in ROWS_FIRST else back, mine.float())


@pytest.mark.parametrize("name", IN_FP8)
def test_a_peer_in_fp8_of_16_bits_is_behind_a_cast(
    name: str, in_codes: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_codes()
    problem = fp8_problem("causal GQA").with_(direction="fp8_cast")
    casts = []

    def compile_quantize(head_dim: int, dtype: str, **options: bool) -> Callable[..., None]:
        assert (head_dim, dtype) == (problem.head_dim, problem.dtype)
        assert options == {"given_scales": True, "in_rows": True}

        def cast(*arguments: torch.Tensor | None) -> None:
            casts.append(arguments)
            for x, x8, scale in zip(arguments[:3], arguments[3:6], arguments[6:9], strict=True):
                x8.copy_(quantized.codes(x.float() / scale[..., None, None]))

        return cast

    monkeypatch.setattr(quantize, "compile_quantize", compile_quantize)
    inputs = random_inputs(problem, "cpu")
    call = peers.PEERS[name].build(problem, *inputs)
    for turn in (1, 2):
        found = call()
        assert len(casts) == turn
        exact = reference.reference(*inputs, problem.causal)[0]
        assert far(found.transpose(1, 2) if name in ROWS_FIRST else found, exact) < 0.1


def test_cudnn_writes_codes_where_it_has_nothing_else(in_codes: Callable) -> None:
    problem = fp8_problem("causal")
    inputs = random_inputs(problem, "cpu")
    graph = in_codes("FP8_E4M3")
    o = peers.PEERS["cudnn"].build(problem, *inputs)()
    assert o.dtype == torch.float8_e4m3fn
    assert far(o.double(), reference.reference(*inputs, True)[0]) < 0.1
    graph.only = "FLOAT"
    with pytest.raises(RuntimeError, match="no kernel that writes BFLOAT16"):
        peers.PEERS["cudnn"].build(problem, *inputs)


def test_fa3_in_fp8_aligns_at_the_bottom_right(in_codes: Callable) -> None:
    problem = fp8_problem("more keys, causal, top left")
    with pytest.raises(ValueError, match="aligns a causal mask at the bottom right"):
        peers.PEERS["fa3"].build(problem, *random_inputs(problem, "cpu"))


def test_versions_in_fp8(in_codes: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    in_codes()
    monkeypatch.setattr(fa3.importlib.metadata, "version", lambda name: {"fa3-fwd": "0.3"}[name])
    names = list(peers.PEERS)
    assert peers.versions(names, "fp8") == {"cudnn": "9.10.2, front end 1.14.0", "fa3": "fa3-fwd 0.3"}
    assert peers.versions(["fa2", "fa3"], "fp8") == {"fa3": "fa3-fwd 0.3"}
    monkeypatch.setitem(sys.modules, "cudnn", None)  # not installed
    with pytest.raises(ImportError):
        cudnn_fp8.version()

    def absent(name: str) -> str:
        raise fa3.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fa3.importlib.metadata, "version", absent)
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: None)
    assert peers.versions(names, "fp8") == {}
