"""Q, K and V in 8 bits, as the FP8 stages read them (`device.fp8`): which kernel, and how it is called.

The kernels                                     `quantize_rows`; where loads are to lie ahead `quantize_ahead`
"""

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32

from .contract import Compiled, Problem
from .device.columns_to_rows import QUAD
from .device.compiling import ELEMENTS, compile_for_torch, fake_rows
from .device.fp8 import ONES_ROWS
from .quantize_ahead import QuantizeAhead
from .quantize_rows import Casting, Quantize, Relayout


def quantizer(head_dim: int, dtype: type, casting: Casting) -> Quantize:
    """The kernel that does it: one that loads ahead where it computes long, with RoPE and rotating heads of
    256."""
    ahead = casting.rope or (casting.rotate and head_dim == 256)
    return (QuantizeAhead if ahead else Quantize)(head_dim, dtype, casting)


def compile_quantize(head_dim: int, dtype: str, **options: bool | str) -> Compiled:
    """The kernel for a Casting of these options.

    Called as compiled(q, k, v, q8, k8, vt8, q_scale, k_scale, v_exponent, signs, cos, sin), with None for
    what `parts` and options leave out; `quantized_shapes` lists the outputs. Not for empty ones.

    With `given_scales` in the place of those found are those of q, k and v, fp32 (batch, heads), to be read;
    `in_rows` then leaves v8 in the place of vt8, (batch, kv_heads, seqlen, head_dim).
    signs is ±1 in fp32 (head_dim,), cos and sin fp32 (at least seqlen, head_dim/2), of which a row of q or k
    takes the row of its number. Last strides are 1, the others of q, k and v multiples of 8, of codes of 16,
    of cos and sin of 4. Batch, and heads of all parts together, are at most `GRID_YZ_MAX`.
    """
    if head_dim not in (64, 128, 256):
        raise ValueError(f"takes head_dim 64, 128 or 256, not {head_dim}")
    casting = Casting(**options)
    batch = cute.sym_int()
    extents = {"q": (batch, cute.sym_int(), cute.sym_int())}
    extents |= dict.fromkeys("kv", (batch, cute.sym_int(), cute.sym_int()))
    sources, codes, scales = [], [], []
    for name in "qkv":
        if name not in casting.parts:
            sources, codes, scales = [*sources, None], [*codes, None], [*scales, None]
            continue
        b, heads, seqlen = extents[name]
        blocks = cute.sym_int()
        of_rows, of_columns = (seqlen, head_dim), (head_dim + ONES_ROWS, cute.sym_int())
        sources.append(fake_rows(ELEMENTS[dtype], (b, heads, *of_rows)))
        left = of_columns if name == "v" and not casting.in_rows else of_rows
        codes.append(fake_rows(Float8E4M3FN, (b, heads, *left)))
        scales.append(fake_rows(Float32, (b, heads) if casting.given_scales else (b, heads, blocks), 1))
    signs = fake_rows(Float32, (head_dim,), QUAD) if casting.rotate else None
    angles = cute.sym_int(), head_dim // 2
    turns = [fake_rows(Float32, angles, QUAD) if casting.rope else None for _ in range(2)]
    kernel = quantizer(head_dim, ELEMENTS[dtype], casting)
    return compile_for_torch(kernel, *sources, *codes, *scales, signs, *turns)


def compile_relayout(head_dim: int) -> Compiled:
    """Called as compiled(v8, vt8): e4m3 (batch, kv_heads, seqlen, head_dim), strides multiples of 16."""
    b, heads, seqlen = (cute.sym_int() for _ in range(3))
    v8 = fake_rows(Float8E4M3FN, (b, heads, seqlen, head_dim))
    vt8 = fake_rows(Float8E4M3FN, (b, heads, head_dim + ONES_ROWS, cute.sym_int()))
    return compile_for_torch(Relayout(head_dim), v8, vt8)


def compile_kernel(problem: Problem, **options: object) -> Compiled:
    """`compile_quantize` for what a stage's kernel is compiled for."""
    return compile_quantize(problem.head_dim, problem.dtype, **options)
