"""Stand-ins for what the peers call. They compute attention by its definition from what they are given, so
that anything else in the problem's place gives another result, and they keep what they were given."""

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

from harness import fa3
from hopper_attention.kernels.contract import Problem

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


def installed(monkeypatch: pytest.MonkeyPatch) -> Given:
    """In the place of the peers, for a test."""
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
