"""dK and dV in parts: what sees a tile of keys, divided among several CTAs (bwd4_parts).

The query heads of a key head are divided, or the tiles of queries that see the tile of keys, or both. To what
counts and orders tiles of keys a part of the heads is a head, and a part of the queries is further keys:

    mTiled   (keys · query parts, head_dim, key head · head parts, batch), of the shape of a K that had as
             many tiles as there are to take; its elements are not read.
    mParts   (dK or dV, key head · head part, query part, block, column block, 4096) fp32, without the scale,
             laid out as the sums of dQ (`backward_ends`). Every tile stores its own, so that none of it need
             be zero before; a postprocess adds them in their order.

"key head" counts heads of all batches; a block is 64 keys.
"""

import math

import cutlass.cute as cute
from cutlass import Float32, range_constexpr
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
    return cute.make_tensor(mK.iterator, cute.make_layout((keys, head_dim, heads // batch, batch)))


def query_parts(mTiled, keys):
    """Among how many tiles queries are divided, of so many keys, whole tiles of them."""
    return mTiled.shape[0] // keys


@cute.jit
def halves(mParts):
    """The parts of dK and those of dV: (key head · head part · query part, block, column block, 4096)."""
    _, heads, queries, *inner = mParts.shape
    layout = cute.make_layout((heads * queries, *inner), stride=mParts.stride[2:])
    of_keys, of_values = [
        cute.make_tensor(mParts[i, None, None, None, None, None].iterator, layout) for i in range(2)
    ]
    return of_keys, of_values


@cute.jit
def leave_part(rX, gX, thread):
    """A thread of a consumer stores its rows of dK or dV, the accumulator of 64 keys × head_dim, to its block
    gX (column block, 4096)."""
    groups = cute.size(rX) // QUAD  # of 8 columns; the last block may have fewer
    quads = cute.make_tensor(rX.iterator, cute.make_layout((QUAD, groups)))
    for column in range_constexpr(gX.shape[0]):
        held = cute.make_layout((QUAD, WARPGROUP, BLOCK // 8))
        gQuads = cute.make_tensor(gX[column, None].iterator, held)
        for g in range_constexpr(min(BLOCK // 8, groups - BLOCK // 8 * column)):
            cute.autovec_copy(quads[None, BLOCK // 8 * column + g], gQuads[None, thread, g])


class PartSums:
    """dK and dV are the sums of their parts, rounded; dK's with the scale."""

    def __init__(self, head_dim: int):
        self.keys, self.values = Postprocess(head_dim), Postprocess(head_dim, scaled=False)

    @cute.jit
    def __call__(self, mParts, mDK, mDV, stream, numbers):
        key_parts, value_parts = halves(mParts)
        parts = key_parts.shape[0] // (mDK.shape[0] * mDK.shape[1])
        self.keys(key_parts, mDK, stream, numbers=numbers, parts=parts)
        self.values(value_parts, mDV, stream, parts=parts)
