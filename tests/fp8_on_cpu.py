"""`quantize` and `attention_fp8` on a CPU: the reference in the kernels' place, and inputs."""

from collections.abc import Iterator

import pytest
import torch
from in_fp8 import stood_for

from harness.quantized import codes, quantize_reference
from harness.reference import reference
from hopper_attention import ops_fp8, production_fp8

E4M3 = torch.float8_e4m3fn
REAL = {name: getattr(ops_fp8, name) for name in ("run_quantize", "run_forward", "run_rows", "run_cast")}


def run_quantize(q, k, v, seed=None, cos=None, sin=None):
    first = k if q is None else q
    signs = None if seed is None else production_fp8.signs(first.shape[-1], seed)
    rope = None if cos is None else (cos, sin)
    found = quantize_reference(*(first if x is None else x for x in (q, k, v)), seed is not None, signs, rope)
    as_given = lambda x8, x: torch.empty_like(x, dtype=E4M3).copy_(x8)
    outputs = [] if q is None else [as_given(found.q8, q), found.q_scale]
    return outputs + (
        [] if k is None else [as_given(found.k8, k), found.k_scale, found.vt8, found.v_exponent]
    )


def written(q, o, lse, dtype):
    return torch.empty_like(q, dtype=dtype or torch.bfloat16).copy_(o), lse.float()


def run_forward(
    q8, k8, vt8, q_scale, k_scale, v_exponent, softmax_scale=None, causal=False, top_left=False, dtype=None
):
    tensors = stood_for(q8, k8, vt8, q_scale, k_scale, v_exponent)
    return written(q8, *reference(*tensors, causal, None, top_left, softmax_scale), dtype)


def run_rows(
    q, k, v, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, top_left=False,
    dtype=None,
):  # fmt: skip
    heads = k.shape[:2]
    scales = [torch.ones(heads) if x is None else x.expand(heads) for x in (q_descale, k_descale, v_descale)]
    scales[0] = scales[0].repeat_interleave(q.shape[1] // k.shape[1], 1)
    tensors = (x.float() * scale[..., None, None] for x, scale in zip((q, k, v), scales))
    return written(q, *reference(*tensors, causal, None, top_left, softmax_scale), dtype)


def run_cast(q, k, v, softmax_scale=None, causal=False, top_left=False):
    found = run_quantize(q, k, v, 0)
    return run_forward(*found[::2], *found[1::2], softmax_scale, causal, top_left, q.dtype)


STAND_INS = {"run_quantize": run_quantize, "run_forward": run_forward}
STAND_INS |= {"run_rows": run_rows, "run_cast": run_cast}
OPERATORS = {"run_quantize": "quantize", "run_forward": "forward_fp8"}
OPERATORS |= {"run_rows": "forward_fp8_rows", "run_cast": "forward_fp8_cast"}


def stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels of the operators are the reference's formulas, for CPU tensors. A list of those that were
    called beside the dispatcher."""
    torch._dynamo.reset()
    direct: list[str] = []
    library = torch.library.Library("hopper_attention", "IMPL")
    for name, stand_in in STAND_INS.items():
        call = lambda *x, name=name, stand_in=stand_in: direct.append(name) or stand_in(*x)
        monkeypatch.setattr(ops_fp8, name, call)
        library.impl(OPERATORS[name], stand_in, "CPU")
    for operator in (ops_fp8.quantize, ops_fp8.forward_fp8_cast):
        name = operator.__name__.partition(".")[0]
        library.impl(name, ops_fp8.autocast_on("cpu", operator), "AutocastCPU")
    yield direct
    library._destroy()


def checked_for_real(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real checks, for CPU tensors too."""
    library = torch.library.Library("hopper_attention", "IMPL", "CPU")
    for name, run in REAL.items():
        monkeypatch.setattr(ops_fp8, name, run)
        library.impl(OPERATORS[name], run, allow_override=True)
    yield
    library._destroy()


def inputs(heads=4, kv_heads=2, seqlen_q=9, seqlen_kv=70, dtype=torch.bfloat16) -> list[torch.Tensor]:
    shapes = [(2, heads, seqlen_q, 64), (2, kv_heads, seqlen_kv, 64), (2, kv_heads, seqlen_kv, 64)]
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def in_rows(**shape) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """e4m3 q, k, v, and scales of each (batch, kv_head)."""
    tensors = inputs(**shape)
    names = ("q_descale", "k_descale", "v_descale")
    scales = {name: torch.rand(tensors[1].shape[:2]) + 0.5 for name in names}
    return [codes(x.float()) for x in tensors], scales
