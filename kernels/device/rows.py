"""Rows of an accumulator of 64 rows: a thread holds pairs of columns of two of them, four lanes share each."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp

from .arithmetic import store_if
from .constants import WARP, WARPGROUP
from .tma import partition_tma, row_slices
from .wgmma import by_row

LANES = 4  # threads that share a row; they are neighbours in one warp
OWN_ROWS = 2  # of a thread
WARPS = WARPGROUP // WARP
WARP_ROWS = 16  # of an accumulator, each held by one warp


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
def store_of_rows(mX, first_row, end, where, values):
    """Store values[r], which all lanes of this thread's row r have, at mX[first_row + row], if that lies
    before `end`. One store: of the four lanes the first stores one row's value and the second the other's."""
    lane = where[0, 0][1] // 2
    row = first_row + (where[0, 0][0] if lane == 0 else where[1, 0][0])
    store_if((lane < 2) & (row < end), mX.iterator + row, values[0] if lane == 0 else values[1])


class WarpStores:
    """How an accumulator leaves, each warp with the 16 rows it holds: by STSM to shared memory, from there by
    TMA. Never an argument of a jit function, as `products.Products`."""

    def __init__(self, mma: cute.TiledMma, sX: cute.Tensor, thread):
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), sX.element_type)
        self.copy = cute.make_tiled_copy_C(stmatrix, mma).get_slice(thread)
        self.tXsX = self.copy.partition_D(sX)  # (CPY, CPY_M, CPY_N, place)
        self.sX_warps = row_slices(sX, WARP_ROWS)  # (row, column, warp of a place)


def rounded(rX: cute.Tensor, dtype: type) -> cute.Tensor:
    """An accumulator in 16 bits, in its own layout."""
    rX16 = cute.make_rmem_tensor(rX.layout, dtype)
    rX16.store(rX.load().to(dtype))
    return rX16


def store_warp_rows(x: WarpStores, rX16: cute.Tensor, place, atom, mX, tile, warps: int, warp_idx) -> None:
    """Store the rows of this warp, the warp_idx-th of the `warps` that a tile of mX (seqlen, column, heads,
    batch) has, through `place` of shared memory. `tile` is (block, head, batch)."""
    cute.copy(x.copy, x.copy.retile(rX16), x.tXsX[None, None, None, place])
    cute.arch.fence_view_async_shared()  # written by threads, read by the TMA
    cute.arch.sync_warp()
    block, head, batch = tile
    tXgX, tXsX = partition_tma(atom, mX[None, None, head, batch], x.sX_warps)  # (TMA, warp's rows) each
    here, there = place * WARPS + warp_idx % WARPS, block * warps + warp_idx
    cute.copy(atom, tXsX[None, here], tXgX[None, there])
    cute.arch.cp_async_bulk_commit_group()
