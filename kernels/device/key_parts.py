"""dK and dV in parts: where a key head's query heads are divided among several tiles of keys (bwd4_gqa).

    parts    (dK or dV, key head · part, block, column block, 4096) fp32, without the scale, laid out as the
             sums of dQ (`backward_ends`). Every tile of keys stores its own, so that none of it need be zero
             before; a postprocess adds them in their order.

"key head" counts heads of all batches, as K would have them with a head for each part; a block is 64 keys.
"""

import math

import cutlass.cute as cute
from cutlass import Float32, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from .backward_ends import QUAD
from .constants import WARPGROUP
from .limits import BLOCK


def fake_parts(head_dim: int) -> object:
    """A stand-in for parts, contiguous."""
    heads, blocks = cute.sym_int(), cute.sym_int()
    inner = head_dim // BLOCK, BLOCK * BLOCK
    size = math.prod(inner)
    strides = (cute.sym_int64(divisibility=size), cute.sym_int64(divisibility=size), size, inner[1], 1)
    return make_fake_tensor(Float32, (2, heads, blocks, *inner), strides, assumed_align=128)


@cute.jit
def with_parts_as_heads(mK, heads):
    """(seqlen, head_dim, key head · part, batch), of the shape that K (batch, key head, seqlen, head_dim)
    would have, `heads` of all batches; its elements are not read."""
    batch, _, seqlen, head_dim = mK.shape
    return cute.make_tensor(mK.iterator, cute.make_layout((seqlen, head_dim, heads // batch, batch)))


@cute.jit
def leave_part(rX, gX, thread):
    """A thread of a consumer stores its rows of dK or dV, the accumulator of 64 keys × head_dim, to its block
    gX (column block, 4096)."""
    columns = gX.shape[0]
    quads = cute.make_tensor(rX.iterator, cute.make_layout((QUAD, BLOCK // 8, columns)))
    for column in range_constexpr(columns):
        held = cute.make_layout((QUAD, WARPGROUP, BLOCK // 8))
        gQuads = cute.make_tensor(gX[column, None].iterator, held)
        for g in range_constexpr(BLOCK // 8):
            cute.autovec_copy(quads[None, g, column], gQuads[None, thread, g])
