"""dK and dV in parts: what sees a tile of keys, divided among several CTAs (bwd4_parts).

The query heads of a key head are divided, or the tiles of queries that see the tile of keys, or both. To what
counts and orders tiles of keys a part of the heads is a head, and a part of the queries is further keys:

    mTiled   (keys · query parts, head_dim, key head · head parts, batch, query parts), of the shape of a K
             that had as many tiles as there are to take; its elements are not read.
    mParts   (dK or dV, key head · head part, query part, block, column block, 4096) fp32, without the scale,
             laid out as the sums of dQ (`backward_ends`). Every tile stores its own, so that none of it need
             be zero before; what rounds dQ's sums adds them in their order.

"key head" counts heads of all batches; a block is 64 keys.
"""

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.runtime import make_fake_tensor

from .backward_ends import QUAD, Postprocess
from .constants import WARPGROUP
from .limits import BLOCK, column_blocks


def fake_parts(head_dim: int) -> object:
    """A stand-in for mParts, contiguous."""
    heads, queries, blocks = (cute.sym_int() for _ in range(3))
    inner = column_blocks(head_dim), BLOCK * BLOCK
    size = math.prod(inner)
    outer = (cute.sym_int64(divisibility=size) for _ in range(3))
    shape, strides = (2, heads, queries, blocks, *inner), (*outer, size, inner[1], 1)
    return make_fake_tensor(Float32, shape, strides, assumed_align=128)


@cute.jit
def tiled_in_parts(mK, mParts, tile_kv: int):
    """mTiled of K (batch, key head, seqlen, head_dim)."""
    batch, _, seqlen, head_dim = mK.shape
    _, heads, queries, *_ = mParts.shape
    keys = cute.ceil_div(seqlen, tile_kv) * tile_kv * queries
    shape = keys, head_dim, heads // batch, batch, queries
    return cute.make_tensor(mK.iterator, cute.make_layout(shape))


@cute.jit
def halves(mParts):
    """The parts of dK and those of dV: (key head · head part · query part, block, column block, 4096)."""
    _, heads, queries, *inner = mParts.shape
    layout = cute.make_layout((heads * queries, *inner), stride=mParts.stride[2:])
    of_keys, of_values = [
        cute.make_tensor(mParts[i, None, None, None, None, None].iterator, layout) for i in range(2)
    ]
    return of_keys, of_values


def quads_of_block(rX, gX, thread):
    """(own, left) for each quad of a thread of a consumer: in its rows of dK or dV, the accumulator of 64
    keys × head_dim, and in its block gX (column block, 4096)."""
    groups = cute.size(rX) // QUAD  # of 8 columns; the last block may have fewer
    quads = cute.make_tensor(rX.iterator, cute.make_layout((QUAD, groups)))
    for column in range(gX.shape[0]):
        held = cute.make_layout((QUAD, WARPGROUP, BLOCK // 8))
        gQuads = cute.make_tensor(gX[column, None].iterator, held)
        for g in range(min(BLOCK // 8, groups - BLOCK // 8 * column)):
            yield quads[None, BLOCK // 8 * column + g], gQuads[None, thread, g]


@cute.jit
def leave_part(rX, gX, thread):
    """A thread of a consumer stores its rows of dK or dV to its block gX."""
    for own, left in quads_of_block(rX, gX, thread):
        cute.autovec_copy(own, left)


@cute.jit
def place_from_last(cta, mX):
    """(block, head, batch) of mX (seqlen, head_dim, heads, batch) from the last back, which the main kernel
    has just left in L2, and the row of scratch."""
    seqlen, _, heads, batches = mX.shape
    blocks = cute.ceil_div(seqlen, BLOCK)
    i = blocks * heads * batches - 1 - cta
    row = i // blocks
    return (i % blocks, row % heads, row // heads), row


class PartSums:
    """dK and dV are the sums of their parts, rounded; dK's with the scale. The same launch makes dQ of its
    sums where those have a postprocess, `queries`: a launch costs a short call more than its work."""

    def __init__(self, head_dim: int, queries: Postprocess | None = None):
        self.keys = Postprocess(head_dim, narrow=True)
        self.values = Postprocess(head_dim, scaled=False, narrow=True)
        self.queries = queries

    @cute.jit
    def __call__(self, mParts, mDK, mDV, stream, numbers, mDQ=None, mDQ_sum=None, mZeroed=None):
        """The last three as `Postprocess` takes them."""
        key_parts, value_parts = halves(mParts)
        mma, tma = self.keys.layout_of(mDK.element_type), []
        batch, kv_heads, seqlen_kv, _ = mDK.shape
        ctas = 2 * batch * kv_heads * cute.ceil_div(seqlen_kv, BLOCK) * self.keys.ctas
        for mX in (mDK, mDV):
            tma += self.keys.store_atom(mX)
        of_queries = None, None
        if const_expr(self.queries is not None):
            of_queries = self.queries.store_atom(mDQ)
            ctas += batch * mDQ.shape[1] * cute.ceil_div(mDQ.shape[2], BLOCK) * self.keys.ctas
        rest = key_parts, value_parts, mParts.shape[1], mDQ_sum, mZeroed, numbers
        self.add_parts(mma, *tma, *of_queries, *rest).launch(
            grid=(ctas, 1, 1), block=(self.keys.threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def add_parts(
        self, mma, store_DK, mDK, store_DV, mDV, store_DQ, mDQ, key_parts, value_parts, key_heads, mDQ_sum,
        mZeroed, numbers,
    ):  # fmt: skip
        """A CTA, 64 rows of 64 columns: those of dK and dV first, which have several sums."""
        shared = self.keys.allocate(store_DK.value_type)
        seqlen_kv, _, kv_heads, batches = mDK.shape
        parts = key_parts.shape[0] // (kv_heads * batches)
        cta, of_keys = cute.arch.block_idx()[0], kv_heads * batches * cute.ceil_div(seqlen_kv, BLOCK)
        cta, column = cta // self.keys.ctas, cta % self.keys.ctas
        of_parts = {"parts": parts, "column": column}
        self.keys.take(numbers, None, None)
        if const_expr(self.queries is not None):
            tiles = 0
            if const_expr(self.queries.tiles is not None):
                tiles = key_parts.shape[0] * cute.ceil_div(seqlen_kv, self.queries.tiles.tile_kv)
            self.queries.take(numbers, mDQ_sum, mDQ, (seqlen_kv, key_heads, tiles))
        cute.arch.griddepcontrol_wait()
        if cta < of_keys:
            place, row = place_from_last(cta, mDK)
            self.keys.round_block(mma, store_DK, mDK, shared, key_parts, place, row, **of_parts)
        elif cta < 2 * of_keys:
            place, row = place_from_last(cta - of_keys, mDV)
            self.values.round_block(mma, store_DV, mDV, shared, value_parts, place, row, **of_parts)
        else:
            if const_expr(self.queries is not None):
                place, row = place_from_last(cta - 2 * of_keys, mDQ)
                of_sums = {"lengths": (mDQ.shape[0], seqlen_kv), "mZeroed": mZeroed, "column": column}
                self.queries.round_block(mma, store_DQ, mDQ, shared, mDQ_sum, place, row, **of_sums)
