"""What `kernels/quantize.py` computes, in PyTorch, on the CPU or a GPU.

Bit for bit: every operation is the kernel's, in fp32 and in its order. But for the sign of a zero after a
rotation, and for RoPE, which the kernel computes with fused multiply-adds: there a code may be its neighbour.
"""

import math
from dataclasses import dataclass

import torch

from hopper_attention.checks import E4M3
from hopper_attention.kernels.device.fp8 import (
    BLOCK,
    E4M3_MAX,
    EXPONENT_MAX,
    EXPONENT_MIN,
    LARGEST_V,
    ONES_ROWS,
    OWN_ROTATED,
    SMALLEST_MAXIMUM,
    TOKEN_ORDER,
    TOKENS,
    padded_tokens,
)

FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Quantized:
    """Codes and scales as `device.fp8` has them, and the fp32 tensors that they stand for: q and k
    (rotated, if they were), v in rows. Without scales found, those are None."""

    q8: torch.Tensor
    k8: torch.Tensor
    vt8: torch.Tensor
    q_scale: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_exponent: torch.Tensor | None
    dequantized: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """What the kernel writes, by the names of `quantized_shapes`."""
        names = ("q8", "k8", "vt8", "q_scale", "k_scale", "v_exponent")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def quantize_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotate: bool = False,
    signs: torch.Tensor | None = None,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    given_scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Quantized:
    """q (B, H, Nq, d), k and v (B, Hkv, Nk, d). `signs` ±1 (d,), which `rotate` needs; `rope` is cos and sin,
    fp32 (seqlen, d/2); `given_scales` are q's, k's and v's, fp32 (B, heads)."""
    given = given_scales or (None, None, None)
    q8, q_scale, q_back = _rows(q, signs if rotate else None, rope, given[0])
    k8, k_scale, k_back = _rows(k, signs if rotate else None, rope, given[1])
    v8, exponent, v_back = _tokens(v.float(), given[2])
    weights = torch.ones(v.shape[:3], device=v.device) if exponent is None else of_rows(2.0**-exponent, v)
    vt8 = transposed(v8, codes(weights))
    return Quantized(q8, k8, vt8, q_scale, k_scale, exponent, (q_back, k_back, v_back))


def held(x: torch.Tensor) -> torch.Tensor:
    """16-bit x rounded to what e4m3 and one power of two for all of it say, in its own dtype."""
    scale = power_of_two(x)
    return (codes(x.float() / scale).float() * scale).to(x.dtype)


def power_of_two(x: torch.Tensor) -> float:
    """The least scale, at least 1, by which all of x that is finite is within e4m3's range."""
    largest = x.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max().item() if x.numel() else 0.0
    return 2.0 ** max(0, math.ceil(math.log2(largest / E4M3_MAX))) if largest else 1.0


def full_scale(x: torch.Tensor) -> torch.Tensor:
    """fp32 (1, 1): the scale by which the largest |x| is e4m3's largest, found on x's device."""
    return (x.abs().max().float() / E4M3_MAX).reshape(1, 1)


def operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, in_rows: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """q8, k8, Vt8, or `in_rows` v8, and scales (B, kv_heads, 1) of 16-bit tensors that are `held` exactly.
    Codes of contiguous tensors lie among NaN; others keep their layout."""
    scales = [power_of_two(x) for x in (q, k, v)]
    in_codes = [codes(x.float() / scale) for x, scale in zip((q, k, v), scales)]
    q8, k8, v8 = (_among_nan(x8, 2) if x.is_contiguous() else x8 for x8, x in zip(in_codes, (q, k, v)))
    if not in_rows:
        v8 = _among_nan(transposed(in_codes[2], codes(torch.ones(v.shape[:3], device=v.device))), 3)
    spread = [torch.full((*k.shape[:2], 1), scale, device=k.device) for scale in scales]
    return q8, k8, v8, tuple(spread)


def _among_nan(x8: torch.Tensor, dim: int) -> torch.Tensor:
    """The same codes with 128 of NaN behind them along `dim`."""
    shape = [*x8.shape]
    shape[dim] += 128
    around = torch.full(shape, 0x7F, dtype=torch.uint8, device=x8.device)
    inside = around.narrow(dim, 0, x8.shape[dim])
    inside.copy_(x8.view(torch.uint8))
    return inside.view(E4M3)


def codes(x: torch.Tensor) -> torch.Tensor:
    """fp32 as e4m3: to nearest even, saturating; NaN is 0x7f, whatever its sign."""
    as_bytes = x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(as_bytes, 0x7F), as_bytes).view(E4M3)


def transposed(v8: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Vt8 of e4m3 V (B, Hkv, N, d) and e4m3 weights of one (B, Hkv, N)."""
    seqlen = v8.shape[2]
    rows = torch.cat([v8.view(torch.uint8), *[weights.view(torch.uint8)[..., None]] * ONES_ROWS], dim=-1)
    padding = (0, 0, 0, padded_tokens(seqlen) - seqlen)
    groups = torch.nn.functional.pad(rows, padding).unflatten(2, (-1, TOKENS))
    return groups[..., TOKEN_ORDER, :].flatten(2, 3).mT.contiguous().view(E4M3)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """√d times the Walsh–Hadamard transform of the last dimension: by the bits of the elements that a thread
    has, those of a chunk before those of its chunks, then by those of the lane."""
    d = x.shape[-1]
    first = 4 + (d // OWN_ROTATED[d]).bit_length() - 1  # behind the lane's
    for bit in (0, 1, 2, 3, *range(first, d.bit_length() - 1), *range(4, first)):
        first, second = x.unflatten(-1, (-1, 2, 1 << bit)).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
    return x


def rotated(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """k8's rotation of fp32 rows, in which the kernel leaves 1/√d to the scale."""
    return hadamard(x * signs) / math.sqrt(x.shape[-1])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on (…, seqlen, d): element j turns with j + d/2."""
    cos, sin = cos[: x.shape[-2]], sin[: x.shape[-2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _rows(x, signs, rope, given):
    """(codes, scales found or None, what they stand for) of Q or K."""
    x, norm = x.float(), 1.0
    if rope is not None:
        x = turned(x, *rope)
    if signs is not None:
        x, norm = hadamard(x * signs), 1.0 / math.sqrt(x.shape[-1])
    if given is not None:
        x8 = codes(x * (given.reciprocal() * norm)[..., None, None] + (x - x))
        return x8, None, x8.float() * given[..., None, None]
    x, largest = _largest(x, FP32_MAX)
    bounded = largest.clamp(min=SMALLEST_MAXIMUM)
    inverse = torch.full_like(bounded, E4M3_MAX) / bounded  # `448 / bounded` is its reciprocal times 448
    scale = torch.where(largest > 0, bounded * (norm / E4M3_MAX), torch.ones_like(bounded))
    x8 = codes(x * of_rows(inverse, x)[..., None])
    return x8, scale, x8.float() * of_rows(scale, x)[..., None]


def _tokens(v, given):
    """(codes in rows, exponents or None, what they stand for) of V."""
    if given is not None:
        v8 = codes(v * given.reciprocal()[..., None, None] + (v - v))
        return v8, None, v8.float() * given[..., None, None]
    v, largest = _largest(v, LARGEST_V)
    mantissa, exponent = torch.frexp(largest / E4M3_MAX)  # exact up to where the exponent is clamped
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # ⌈log₂⌉
    exponent = torch.where(largest > 0, exponent, EXPONENT_MIN).clamp(EXPONENT_MIN, EXPONENT_MAX).float()
    v8 = codes(v * of_rows(2.0**-exponent, v)[..., None])
    return v8, exponent, v8.float() * of_rows(2.0**exponent, v)[..., None]


def _largest(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x with NaN for what lies beyond ±limit, and the largest |x| of each block of rows, NaN apart."""
    x = torch.where(x.abs() > limit, math.nan, x)
    rows = x.nan_to_num(nan=0.0).abs().amax(-1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % BLOCK))
    return x, rows.unflatten(-1, (-1, BLOCK)).amax(-1)


def of_rows(of_blocks: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A number of each block as one of each row of x."""
    return of_blocks.repeat_interleave(BLOCK, dim=-1)[..., : x.shape[2]]
