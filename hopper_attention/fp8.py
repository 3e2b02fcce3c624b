"""Attention in FP8: `quantize` and `attention_fp8`, for inference."""

from numbers import Real
from typing import NamedTuple

import torch

from . import ops_fp8
from .checks import (
    E4M3,
    FP32_LEAST,
    FP32_MOST,
    check_flags,
    check_mask,
    check_no_flags,
    check_output,
    check_parts,
    check_scale,
    check_tensor,
    name_of,
    quantized_problem_of,
)


class QuantizedRows(NamedTuple):
    """Q or K as `quantize` gives it: x ≈ codes · scale, after a rotation by the signs of `seed`."""

    codes: torch.Tensor  # e4m3 (batch, heads, seqlen, head_dim), its dimensions in memory in x's order
    scale: torch.Tensor  # fp32 (batch, heads, ⌈seqlen/64⌉), of each 64 rows
    seed: int | None  # None: not rotated


class QuantizedColumns(NamedTuple):
    """V as `quantize` gives it, transposed, tokens in the kernel's order, with the rows by which it sums P:
    `kernels/device/fp8.py` has the layout. V ≈ codes · 2^exponent."""

    codes: torch.Tensor  # e4m3 (batch, kv_heads, head_dim + 8, seqlen padded to a multiple of 16)
    exponent: torch.Tensor  # fp32 (batch, kv_heads, ⌈seqlen/64⌉), of each 64 tokens
    seqlen: int  # without the padding


class Quantized(NamedTuple):
    """What `quantize` gives; None for what it was not given."""

    q: QuantizedRows | None
    k: QuantizedRows | None
    v: QuantizedColumns | None


def quantize(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    incoherent: bool = True,
    seed: int = 0,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    centred: bool = False,
) -> Quantized:
    """q, k and v in 8 bits for `attention_fp8`, in one launch on PyTorch's current stream.

    All three, or k and v, or q alone: keys and values can be kept, and each new q be quantised beside them.
    They are (batch, heads, seqlen, head_dim), bf16 or fp16, head_dim 64, 128 or 256, rows 16-byte aligned and
    contiguous; k and v may have fewer heads. Each 64 rows of q and of k get a scale, by which the largest of
    them is e4m3's largest, 448; each 64 of v a power of two. NaN, and ±∞, become NaN.

    With `incoherent` q and k are first multiplied by random signs and the normalised Walsh–Hadamard matrix
    (FlashAttention-3's incoherent processing): scores stay what they are, and an outlier's error is spread
    over a row. Signs follow from `seed` and head_dim (`production_fp8.signs`); q and k must have the same.
    `rope` is (cos, sin), fp32 (at least seqlen, head_dim/2): before all that, elements j and j + head_dim/2
    of row i of q and of k turn by row i's angle j, in fp32. Queries that begin at another position than the
    keys are quantised apart, with cos[i:] and sin[i:].

    With `centred` each head's k loses its mean over the tokens before, by PyTorch's kernels. No weight of a
    softmax changes, and so o does not; an lse lacks softmax_scale · q·mean. Codes err relative to their size:
    worth it where all keys of a head share a large vector (`harness.accuracy`, "K less its mean"). Not with
    `rope`, which turns that vector for each key by another angle: such keys are turned before.

    Under autocast fp32 q, k and v are cast to its type. Raises TypeError or ValueError before anything is
    launched, NotImplementedError where a gradient is wanted: there is none.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None:
            check_tensor(name, x)
    check_parts(q, k, v)
    if not isinstance(incoherent, bool):
        raise TypeError(f"incoherent must be True or False, not {incoherent!r}")
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        raise TypeError(f"seed must be an integer, not {type(seed).__name__}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must have 64 bits, not {seed}")
    if rope is not None and not (isinstance(rope, (tuple, list)) and len(rope) == 2):
        raise TypeError("rope must be two tensors: cos and sin")
    for name, x in zip(("cos", "sin"), rope or ()):
        if x is not None:
            check_tensor(name, x)
    if not isinstance(centred, bool):
        raise TypeError(f"centred must be True or False, not {centred!r}")
    if centred and (k is None or rope is not None):
        raise ValueError("centred is of k, " + ("which is missing" if k is None else "and not with rope"))
    return _quantize(q, less_mean(k) if centred else k, v, seed if incoherent else None, rope)


def less_mean(k: torch.Tensor) -> torch.Tensor:
    """k less the mean of each head's tokens, both rounded to k's type. What is no k stays, to be refused."""
    if k.dim() != 4 or k.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return k
    return k - k.mean(2, keepdim=True, dtype=torch.float32).to(k.dtype)


def _quantize(q, k, v, seed: int | None, rope=None) -> Quantized:
    cos, sin = rope or (None, None)
    found = ops_fp8.call_quantize(q, k, v, seed, cos, sin)
    of_q = None if q is None else QuantizedRows(found[0], found[1], seed)
    if k is None:
        return Quantized(of_q, None, None)
    k8, k_scale, vt8, v_exponent = found[-4:]
    return Quantized(of_q, QuantizedRows(k8, k_scale, seed), QuantizedColumns(vt8, v_exponent, v.shape[2]))


Operand = torch.Tensor | QuantizedRows
Descale = torch.Tensor | float | None


def attention_fp8(
    q: Operand,
    k: Operand,
    v: torch.Tensor | QuantizedColumns,
    *,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    causal: bool = False,
    top_left: bool = False,
    softmax_scale: float | None = None,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` with products of e4m3 operands, on PyTorch's current stream; no gradients. q, k and v are

    - **what `quantize` gave**: `attention_fp8(*quantize(q, k, v))`. Or q in bf16 or fp16 beside quantised k
      and v, the cache: it is then quantised as k was, without `rope`;
    - **bf16 or fp16**: quantised here, as `quantize(q, k, v)` does it;
    - **e4m3 in rows**, (batch, heads, seqlen, head_dim), as FlashAttention-3 takes them: q · q_descale is
      meant, and so for k and v. A descale is an fp32 tensor of one number or of (batch, kv_heads), with any
      strides; a number; or None for 1. V is laid out anew on the way.

    Masks, `softmax_scale`, layouts and the LSE are `attention`'s. o has the `dtype` bf16 or fp16, by default
    that of q if it is one of them (under autocast of fp32 q autocast's), else bf16.

    A number that is no scale (zero, negative, NaN, ∞) raises ValueError at once. Those in a tensor are not
    looked at, which would wait for the GPU: where one is no scale, o and lse of its head are NaN. Raises
    TypeError or ValueError before anything is launched, and NotImplementedError where a gradient is wanted;
    in a compiled graph too, where tensors in 16 bits may have been quantised by then, and a number that is no
    scale is Dynamo's error.
    """
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options = softmax_scale, causal, top_left
    # What would be refused when something has been quantised already. A compiled graph finds it later: if it
    # were checked here there would be a graph for each shape.
    ahead = not torch.compiler.is_compiling()
    (check_scale if ahead else check_no_flags)(softmax_scale=softmax_scale)
    if ahead:
        check_flags(causal=causal, top_left=top_left)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, torch.Tensor):
            check_tensor(name, x)
    if isinstance(q, torch.Tensor) and q.dtype == E4M3:
        for name, x in (("k", k), ("v", v)):
            _check_in_rows(name, x)
        given = (descale_of(name, x, q.device) for name, x in descales.items())
        o, lse = ops_fp8.call_rows((q, k, v, *given), *options, dtype)
        return (o, lse) if return_lse else o
    for name, x in descales.items():
        if x is not None:
            raise ValueError(f"{name} belongs to e4m3 tensors in rows; of others the scales are found")
    if isinstance(q, torch.Tensor):
        own = _dtype_of(q)
        dtype = dtype or own
        if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
            if dtype == own:
                o, lse = ops_fp8.call_cast(q, k, v, *options)
                return (o, lse) if return_lse else o
            if ahead:
                check_output(dtype)
                check_mask(causal, top_left)
            q, k, v = _quantize(q, k, v, seed=0)
        elif isinstance(k, QuantizedRows):
            _check_kept(k, v)
            if ahead:
                kept = k.codes, v.codes, None, k.scale, v.exponent
                quantized_problem_of(q, *kept, causal, top_left, dtype or ops_fp8.OUTPUT)
            q = _quantize(q, None, None, k.seed).q
    _check_quantized(q, k, v)
    tensors = q.codes, k.codes, v.codes, q.scale, k.scale, v.exponent
    o, lse = ops_fp8.call_forward(tensors, *options, dtype)
    return (o, lse) if return_lse else o


def _check_kept(k: object, v: object) -> None:
    """Raise unless keys and values are parts that belong together, as far as their shapes do not say it."""
    for name, x, kind in (("k", k, QuantizedRows), ("v", v, QuantizedColumns)):
        _check_kind(name, x, kind)
    if v.seqlen != k.codes.shape[2]:
        raise ValueError(f"k and v must have one length, not {k.codes.shape[2]} and {v.seqlen}")


def _check_kind(name: str, x: object, kind: type) -> None:
    if not isinstance(x, kind):
        raise TypeError(
            f"{name} must be the {name} of `quantize` where another of q, k and v is, or a tensor like "
            f"the others, not {type(x).__name__}"
        )


def _check_quantized(q: object, k: object, v: object) -> None:
    """As `_check_kept`, of all three."""
    _check_kind("q", q, QuantizedRows)
    _check_kept(k, v)
    if q.seed != k.seed:
        raise ValueError(
            "q and k must be rotated by the same signs, or neither: q's seed is "
            f"{q.seed}, k's {k.seed} (None: not rotated)"
        )


def _check_in_rows(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype != E4M3:
        found = name_of(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name} must be {name_of(E4M3)} as q is, not {found}")


def descale_of(name: str, x: Descale, device: torch.device) -> torch.Tensor | None:
    """A descale as a tensor, a number as one of shape (1,). Raises TypeError or ValueError for what is no
    scale, as far as the host can see."""
    if x is None or isinstance(x, torch.Tensor):
        if x is not None:
            check_tensor(name, x)
        return x
    if not isinstance(x, Real) or isinstance(x, bool):
        raise TypeError(f"{name} must be a tensor or a number, not {type(x).__name__}")
    if not FP32_LEAST <= x <= FP32_MOST:
        raise ValueError(f"{name} must be positive and finite, not {x} (in fp32)")
    return torch.full((1,), float(x), dtype=torch.float32, device=device)


def _dtype_of(q: torch.Tensor) -> torch.dtype | None:
    """The type of an output beside this q, if it says one."""
    if q.dtype == torch.float32 and torch.is_autocast_enabled(q.device.type):
        return torch.get_autocast_dtype(q.device.type)
    return q.dtype if q.dtype in (torch.bfloat16, torch.float16) else None
