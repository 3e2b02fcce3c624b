"""Rows of an accumulator of 64: a thread holds pairs of columns of two of them, four lanes share each.

Of warp w of a warpgroup, lane l holds rows 16·w + l/4 and + 8, of each group of 8 columns columns 2·(l mod 4)
and the next (PTX ISA, the fragment of wgmma's D).
"""

import cutlass.cute as cute
from cutlass import Float32

from .constants import LOG2_E
from .wgmma import by_row

LANES = 4  # threads that share a row; they are neighbours in one warp
OWN_ROWS = 2  # of a thread


def coordinates(mma: cute.TiledMma, rows: int, columns: int, thread) -> list[cute.Tensor]:
    """The (row, column) in the tile of each accumulator element: of `thread`'s, and of thread 0's. Both are
    shaped as `by_row` shapes the accumulator.

    Why two: those of `thread` are computed at run time, those of thread 0 are constants. All threads hold the
    same pattern, moved: a column of `thread` lies as far from its first as a column of thread 0 does from 0.
    Who compares columns moves the limit once, and compares with constants.
    """
    tile = cute.make_identity_tensor((rows, columns))
    return [by_row(mma.get_slice(t).partition_C(tile)) for t in (thread, 0)]


def in_parts(accumulator: cute.Tensor, parts: int) -> list[cute.Tensor]:
    """An accumulator fragment ((2, 2, N/8), M/64, 1) cut along N, left to right."""
    (pair, half, groups), blocks, one = accumulator.shape
    layout = cute.make_layout(((pair, half, groups // parts), blocks, one), stride=accumulator.stride)
    return [cute.make_tensor(accumulator.iterator + p * cute.size(layout), layout) for p in range(parts)]


def largest_of_row(value: Float32) -> Float32:
    """The largest `value` of the lanes of a row."""
    return cute.arch.warp_reduction_max(value, threads_in_group=LANES)


def sum_of_row(value: Float32) -> Float32:
    """The sum of the `value`s of the lanes of a row."""
    return cute.arch.warp_reduction_sum(value, threads_in_group=LANES)


@cute.jit
def with_sink(total: Float32, row_max: Float32, sink: Float32):
    """A row's sum, its maximum and the factor of what is summed, when e^sink joins the sum; the maximum in
    powers of two. Nothing overflows, however far the sink is from the scores; −∞ changes nothing."""
    sink_log2 = sink * LOG2_E
    seen = row_max if total > 0.0 else -Float32.inf  # of a row without keys the maximum is 0, and no score's
    largest = finite(cute.arch.fmax(seen, sink_log2))
    factor = cute.math.exp2(seen - largest, fastmath=True)
    return total * factor + cute.math.exp2(sink_log2 - largest, fastmath=True), largest, factor


@cute.jit
def finite(maximum: Float32):
    """What exp subtracts: 0 while no key was visible, since −∞ − (−∞) would be NaN and not e^−∞ = 0."""
    return 0.0 if maximum == -Float32.inf else maximum
