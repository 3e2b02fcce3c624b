"""The operators of FP8, beside those of `ops`: what PyTorch must know of `fp8.quantize` and `attention_fp8`.

quantize(q?, k?, v?, seed?, cos?, sin?) → [q8, q_scale, k8, k_scale, vt8, v_exponent], of what is given
forward_fp8(q8, k8, vt8, q_scale, k_scale, v_exponent, softmax_scale, causal, top_left, dtype) → o, lse
forward_fp8_rows(q, k, v, q_descale, k_descale, v_descale, softmax_scale, causal, top_left, dtype) → o, lse
forward_fp8_cast(q, k, v, softmax_scale, causal, top_left) → o, lse

None has a gradient. Checks are in their implementations, as `ops`'s are.
"""

from collections.abc import Callable

import torch
from torch.library import register_fake
from torch.utils.flop_counter import register_flop_formula

from . import ops, production_fp8
from .checks import E4M3, check_one_device
from .kernels.device.fp8 import ONES_ROWS, blocks_of, padded_tokens

OPTIONS = "float? softmax_scale=None, bool causal=False, bool top_left=False"
SCHEMAS = {
    "quantize": "Tensor? q, Tensor? k, Tensor? v, int? seed=None, Tensor? cos=None, Tensor? sin=None",
    "forward_fp8": "Tensor q8, Tensor k8, Tensor vt8, Tensor q_scale, Tensor k_scale, "
    f"Tensor v_exponent, {OPTIONS}, ScalarType? dtype=None",
    "forward_fp8_rows": "Tensor q, Tensor k, Tensor v, Tensor? q_descale=None, Tensor? k_descale=None, "
    f"Tensor? v_descale=None, {OPTIONS}, ScalarType? dtype=None",
    "forward_fp8_cast": f"Tensor q, Tensor k, Tensor v, {OPTIONS}",
}
for name, arguments in SCHEMAS.items():
    result = "Tensor[]" if name == "quantize" else "(Tensor o, Tensor lse)"
    ops.library.define(f"{name}({arguments}) -> {result}", tags=ops.TAGS)
quantize = torch.ops.hopper_attention.quantize.default
forward_fp8 = torch.ops.hopper_attention.forward_fp8.default
forward_fp8_rows = torch.ops.hopper_attention.forward_fp8_rows.default
forward_fp8_cast = torch.ops.hopper_attention.forward_fp8_cast.default
OUTPUT = torch.bfloat16  # where nothing else is asked for


# ---- what runs --------------------------------------------------------------------------------------------


def run_quantize(q, k, v, seed=None, cos=None, sin=None):
    return production_fp8.quantize(q, k, v, seed, cos, sin)


def run_forward(
    q8, k8, vt8, q_scale, k_scale, v_exponent, softmax_scale=None, causal=False, top_left=False, dtype=None
):
    given = q8, k8, vt8, q_scale, k_scale, v_exponent
    return production_fp8.forward(*given, softmax_scale, causal, top_left, dtype or OUTPUT)


def run_rows(
    q, k, v, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, top_left=False,
    dtype=None,
):  # fmt: skip
    given = q, k, v, q_descale, k_descale, v_descale
    return production_fp8.forward_rows(*given, softmax_scale, causal, top_left, dtype or OUTPUT)


def run_cast(q, k, v, softmax_scale=None, causal=False, top_left=False):
    return production_fp8.forward_cast(q, k, v, softmax_scale, causal, top_left)


ops.library.impl("quantize", run_quantize, "CompositeExplicitAutograd")
ops.library.impl("forward_fp8", run_forward, "CompositeExplicitAutograd")
ops.library.impl("forward_fp8_rows", run_rows, "CompositeExplicitAutograd")
ops.library.impl("forward_fp8_cast", run_cast, "CompositeExplicitAutograd")


# ---- shapes, for tracing ----------------------------------------------------------------------------------


@register_fake("hopper_attention::quantize", lib=ops.library)
def fake_quantize(q, k, v, seed=None, cos=None, sin=None):
    check_one_device(q, k, v, cos, sin)
    outputs = []
    for x in (q, k):
        if x is not None:
            scale = x.new_empty((*x.shape[:2], blocks_of(x.shape[2])), dtype=torch.float32)
            outputs += [torch.empty_like(x, dtype=E4M3), scale]
    if v is not None:
        batch, heads, seqlen, head_dim = v.shape
        shape = batch, heads, head_dim + ONES_ROWS, padded_tokens(seqlen)
        exponent = v.new_empty((batch, heads, blocks_of(seqlen)), dtype=torch.float32)
        outputs += [v.new_empty(shape, dtype=E4M3), exponent]
    return outputs


def _fake_outputs(q, dtype):
    return torch.empty_like(q, dtype=dtype or OUTPUT), q.new_empty(q.shape[:3], dtype=torch.float32)


@register_fake("hopper_attention::forward_fp8", lib=ops.library)
def fake_forward(
    q8, k8, vt8, q_scale, k_scale, v_exponent, softmax_scale=None, causal=False, top_left=False, dtype=None
):
    check_one_device(q8, k8, vt8, q_scale, k_scale, v_exponent)
    return _fake_outputs(q8, dtype)


@register_fake("hopper_attention::forward_fp8_rows", lib=ops.library)
def fake_rows(
    q, k, v, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, top_left=False,
    dtype=None,
):  # fmt: skip
    check_one_device(q, k, v, q_descale, k_descale, v_descale)
    return _fake_outputs(q, dtype)


@register_fake("hopper_attention::forward_fp8_cast", lib=ops.library)
def fake_cast(q, k, v, softmax_scale=None, causal=False, top_left=False):
    check_one_device(q, k, v)
    return _fake_outputs(q, q.dtype)


# ---- no gradients -----------------------------------------------------------------------------------------


def without_gradients(operator: torch._ops.OpOverload) -> Callable[..., object]:
    """An operator's Autograd kernel: 8 bits are for inference."""

    def run(*given, **named):
        ops.refuse_gradients(operator, *given, *named.values())
        with ops.below_autograd():
            return operator(*given, **named)

    return run


for operator in (quantize, forward_fp8, forward_fp8_rows, forward_fp8_cast):
    ops.library.impl(operator.__name__.partition(".")[0], without_gradients(operator), "Autograd")


# ---- autocast, FLOPs --------------------------------------------------------------------------------------


def autocast_on(device: str, operator: torch._ops.OpOverload) -> Callable[..., object]:
    """`quantize` and `forward_fp8_cast` take fp32 q, k and v in autocast's type, as `ops.autocast_on`; the
    others, whose inputs are codes, autocast leaves alone."""

    def cast(q, k, v, *options, **named):
        to = torch.get_autocast_dtype(device)
        with torch.amp.autocast(device, enabled=False):
            inputs = (x.to(to) if x is not None and x.dtype == torch.float32 else x for x in (q, k, v))
            return operator(*inputs, *options, **named)

    return cast


for operator in (quantize, forward_fp8_cast):
    ops.library.impl(operator.__name__.partition(".")[0], autocast_on("cuda", operator), "AutocastCUDA")


@register_flop_formula(torch.ops.hopper_attention.forward_fp8)
def forward_flops(
    q8, k8, vt8, q_scale, k_scale, v_exponent, softmax_scale=None, causal=False, top_left=False, dtype=None,
    *, out_shape=None, **_,
) -> int:  # fmt: skip
    """As `ops.forward_flops`."""
    return ops._flops(q8, k8, causal, top_left, "fwd")


@register_flop_formula(torch.ops.hopper_attention.forward_fp8_rows)
def rows_flops(
    q, k, v, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, top_left=False,
    dtype=None, *, out_shape=None, **_,
) -> int:  # fmt: skip
    """As `ops.forward_flops`."""
    return ops._flops(q, k, causal, top_left, "fwd")


@register_flop_formula(torch.ops.hopper_attention.forward_fp8_cast)
def cast_flops(q, k, v, softmax_scale=None, causal=False, top_left=False, *, out_shape=None, **_) -> int:
    """As `ops.forward_flops`; what quantises does not count."""
    return ops._flops(q, k, causal, top_left, "fwd")


# ---- beside the dispatcher --------------------------------------------------------------------------------


def call_quantize(q, k, v, seed, cos, sin):
    """`quantize`, as `ops.call_forward` is `forward`."""
    first = k if q is None else q
    tensors = (first if x is None else x for x in (q, k, v))
    direct = type(seed) in (int, type(None)) and ops.is_direct(*tensors, cos, sin)
    return (run_quantize if direct else quantize)(q, k, v, seed, cos, sin)


def call_forward(tensors, softmax_scale, causal, top_left, dtype):
    """`forward_fp8`, the same; `tensors` are its six."""
    run = run_forward if _direct(tensors, causal, top_left) else forward_fp8
    return run(*tensors, softmax_scale, causal, top_left, dtype)


def call_rows(tensors, softmax_scale, causal, top_left, dtype):
    """`forward_fp8_rows`, the same; `tensors` are its six, of which scales may be None."""
    run = run_rows if _direct(tensors, causal, top_left) else forward_fp8_rows
    return run(*tensors, softmax_scale, causal, top_left, dtype)


def call_cast(q, k, v, softmax_scale, causal, top_left):
    """`forward_fp8_cast`, the same."""
    run = run_cast if _direct((q, k, v), causal, top_left) else forward_fp8_cast
    return run(q, k, v, softmax_scale, causal, top_left)


def _direct(tensors, causal, top_left) -> bool:
    return type(causal) is type(top_left) is bool and ops.is_direct(*tensors)
