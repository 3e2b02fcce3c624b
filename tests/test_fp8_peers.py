"""What each peer in FP8 is given to compute: codes and their scales, once, or 16 bits behind a cast."""

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

from harness import cudnn_fp8, fa3, peers, quantized, reference
from harness.inputs import random_inputs
from hopper_attention.kernels import quantize
from hopper_attention.kernels.contract import Problem


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    return installed(monkeypatch)


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
