"""Tiles that threads load and address themselves, 16 bytes at a time: fa1, k2 and bwd2."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from .constants import VECTOR


def tile_layout(rows: int, head_dim: int) -> cute.Layout:
    """(row, chunk, element): a row-major bf16 tile seen as 16-byte chunks."""
    return cute.make_layout((rows, head_dim // VECTOR, VECTOR), stride=(head_dim, VECTOR, 1))


@cute.jit
def swizzle(row: Int32, chunk: Int32):
    """Where chunk `chunk` of row `row` is kept. Without it the rows a warp reads together share 4 of 32
    banks."""
    return chunk ^ (row & 7)


@cute.jit
def load_tile(mX: cute.Tensor, sX: cute.Tensor, block: Int32, threads: cutlass.Constexpr):
    """Copy rows [block·R, block·R + R) of mX (seqlen, head_dim) into sX (R, chunk, 8); rows past the end are
    zero.

    Zeros, not leftovers: what lies past the sequence may be NaN, and 0·NaN in P·V is NaN.
    """
    tidx, _, _ = cute.arch.thread_idx()
    rows, chunks, _ = sX.shape
    rX = cute.make_rmem_tensor(cute.make_layout(VECTOR), mX.element_type)
    for i in range_constexpr(rows * chunks // threads):
        row, chunk = (tidx + i * threads) // chunks, (tidx + i * threads) % chunks
        rX.fill(0)
        if block * rows + row < mX.shape[0]:
            gX = cute.local_tile(mX[block * rows + row, None], (VECTOR,), (chunk,))
            cute.autovec_copy(gX, rX)
        cute.autovec_copy(rX, sX[row, swizzle(row, chunk), None])


@cute.jit
def widen(x: cute.TensorSSA):
    """8 bf16 to 8 fp32 at one integer instruction each: a bf16 is the upper half of an fp32.

    The DSL's `.to(Float32)` takes three for every two elements, and two fifths of what these kernels issue is
    widening.
    """
    words = x.bitcast(Int32)
    # The mask is written as an Int32: 0xFFFF0000 would make the words 64-bit, and bitcast then spreads each
    # over two.
    low, high = (words << 16).bitcast(Float32), (words & -0x10000).bitcast(Float32)
    wide = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
    for i in range_constexpr(VECTOR // 2):
        wide[2 * i] = low[i]
        wide[2 * i + 1] = high[i]
    return wide
