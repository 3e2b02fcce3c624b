"""Rows of a chunk of keys and values that a warp changes in shared memory: those behind the length, and new
ones. Tiles are (row of 16, column, group of 16 keys), columns in 16-bit units."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, range_constexpr

from .cache_loads import Inputs
from .constants import VECTOR, WARP
from .warp_products import GROUP


@cute.jit
def blank(sV_groups, own_group, visible, groups: cutlass.Constexpr):
    """Zero the rows of V behind the length: P is 0 there, but 0 · NaN is NaN."""
    zero = cute.make_rmem_tensor(cute.make_layout(VECTOR), sV_groups.element_type)
    zero.fill(0)
    row_vectors = cute.size(sV_groups, mode=[1]) // VECTOR
    for i in range_constexpr(groups * GROUP * row_vectors // WARP):
        row = (i * WARP + cute.arch.lane_idx()) // row_vectors
        vector = (i * WARP + cute.arch.lane_idx()) % row_vectors
        if row >= visible:
            to = sV_groups[row % GROUP, None, own_group + row // GROUP]
            cute.autovec_copy(zero, cute.local_tile(to, (VECTOR,), (vector,)))
    cute.arch.fence_view_async_shared()  # before the TMA writes there again
    cute.arch.sync_warp()


@cute.jit
def append(
    x: Inputs, sK_groups, sV_groups, batch, kv_head, key, own_group, old, added, groups: cutlass.Constexpr
):  # fmt: skip
    """New keys and values of this warp's slice of a chunk: to the cache, and over what the TMA found
    there. They begin at `old`. Whoever else has these keys in a slice writes the same. What a wrong length
    or page puts beside the cache is not written."""
    kind = sK_groups.element_type  # 16-bit units
    row_vectors = cute.size(sK_groups, mode=[1]) // VECTOR
    vector_kv = 8 * 2 * VECTOR // x.mK.element_type.width  # elements of the cache in 16 bytes
    one = cute.make_rmem_tensor(cute.make_layout(VECTOR), kind)
    for i in range_constexpr(groups * GROUP * row_vectors // WARP):
        row = (i * WARP + cute.arch.lane_idx()) // row_vectors
        vector = (i * WARP + cute.arch.lane_idx()) % row_vectors
        at = key + row
        if (at >= old) & (at < old + added):
            place, inside, fits = batch, at, at < x.mK.shape[2]
            if const_expr(x.mTable is not None):
                page, inside, place, fits = at // x.mK.shape[2], at % x.mK.shape[2], Int32(0), Boolean(False)
                if page < x.mTable.shape[1]:
                    place = x.mTable[batch, page]
                    fits = (place >= 0) & (place < x.mK.shape[0])
            for mX, mNew, sX in ((x.mK, x.mNewK, sK_groups), (x.mV, x.mNewV, sV_groups)):
                source = cute.local_tile(mNew[batch, kv_head, at - old, None], (vector_kv,), (vector,))
                cute.autovec_copy(cute.recast_tensor(source, kind), one)
                to = sX[row % GROUP, None, own_group + row // GROUP]
                cute.autovec_copy(one, cute.local_tile(to, (VECTOR,), (vector,)))
                if fits:
                    target = cute.local_tile(mX[place, kv_head, inside, None], (vector_kv,), (vector,))
                    cute.autovec_copy(one, cute.recast_tensor(target, kind))
    cute.arch.fence_view_async_shared()  # before the TMA writes there again
    cute.arch.sync_warp()
