"""How results leave: an accumulator through shared memory by TMA, values of its rows directly."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from .arithmetic import store_if
from .constants import WARP, WARPGROUP
from .packed import DENSE, Batch
from .tma import partition_tma, row_slices

WARPS = WARPGROUP // WARP
WARP_ROWS = 16  # of an accumulator of 64 rows, each held by one warp


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

    def __init__(
        self, mma: cute.TiledMma, sX: cute.Tensor, atom, mX: cute.Tensor, thread, warp_idx, warps: int
    ):
        self.atom, self.mX = atom, mX  # (seqlen, column, heads, batch)
        self.warp_idx, self.warps = warp_idx, warps  # in the CTA; of all that store a tile
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), sX.element_type)
        self.copy = cute.make_tiled_copy_C(stmatrix, mma).get_slice(thread)
        self.tXsX = self.copy.partition_D(sX)  # (CPY, CPY_M, CPY_N, place)
        self.sX_warps = row_slices(sX, WARP_ROWS)  # (row, column, warp of a place)


def rounded(rX: cute.Tensor, dtype: type) -> cute.Tensor:
    """An accumulator in 16 bits, in its own layout."""
    rX16 = cute.make_rmem_tensor(rX.layout, dtype)
    rX16.store(rX.load().to(dtype))
    return rX16


def store_warp_rows(x: WarpStores, rX16: cute.Tensor, place, tile, batch: Batch = DENSE) -> None:
    """Store this warp's rows through `place` of shared memory into `tile`, a place of `batch`: (block, head,
    …)."""
    cute.copy(x.copy, x.copy.retile(rX16), x.tXsX[None, None, None, place])
    cute.arch.fence_view_async_shared()  # written by threads, read by the TMA
    cute.arch.sync_warp()
    mX = batch.queries(x.mX, tile[1], tile)  # (row, column)
    tXgX, tXsX = partition_tma(x.atom, mX, x.sX_warps)  # (TMA, rows of a warp)
    here, there = place * WARPS + x.warp_idx % WARPS, tile[0] * x.warps + x.warp_idx
    cute.copy(x.atom, tXsX[None, here], tXgX[None, there])  # which elects a lane itself
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def await_stores():
    """A warp: wait until what it stores by TMA has been read from shared memory."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)  # of the lane that issued it
    cute.arch.sync_warp()
