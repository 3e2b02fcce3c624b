"""What rows' exponents are relative to where their maxima are not followed: tiles far from zero, under a soft
cap, of which bf16 holds all exponents (softcap.py).

An eager softmax's largest term is 1, and exact in bf16; here it is rounded, and all terms that equal it are
rounded as it is. O = P·V / sum P shows that error whole unless the sum shares it.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from .arithmetic import largest_positive
from .rows import OWN_ROWS
from .wgmma import round_fragment

ONE_TWICE = (
    0x7F000000  # the bits of 1, twice: less those of x > 0 they are those of 1/x, up to an eighth more
)


def raised(maximum: Float32, least: Float32) -> Float32:
    """`maximum`, and as many whole powers of two as bring it to `least`: what was 1 stays exact in bf16."""
    return maximum + cute.math.ceil(cute.arch.fmax(least - maximum, 0.0))


def add_rounding(P, tile_sum, row_sum, excess) -> None:
    """Add a tile's sums to the rows', and what rounding P to bf16 adds to them to `excess` (row, 1).

    Taken is that a thread's terms are all rounded, for their size, as its largest is. Where that is not so
    the others are small, or many different ones, whose errors cancel.
    """
    of_rows = cute.make_layout(OWN_ROWS)
    largest, bits = cute.make_rmem_tensor(of_rows, Float32), cute.make_rmem_tensor(of_rows, Int32)
    word = cute.make_rmem_tensor(cute.make_layout(1), Int32)
    for r in range(OWN_ROWS):
        largest[r] = largest_positive([P[r, c] for c in range(cute.size(P, mode=[1]))])
    round_fragment(largest, word, BFloat16)
    bits[0], bits[1] = word[0] << 16, word[0] & Int32(-1 << 16)
    rounded = cute.recast_tensor(bits, Float32)
    inverse_bits = cute.make_rmem_tensor(of_rows, Int32)
    for r in range(OWN_ROWS):
        inverse_bits[r] = ONE_TWICE - cute.recast_tensor(largest, Int32)[r]
        relative = (rounded[r] - largest[r]) * cute.recast_tensor(inverse_bits, Float32)[r]
        excess[r, 0] += relative * tile_sum[r]
        row_sum[r] += tile_sum[r]
