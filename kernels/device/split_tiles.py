"""The last round of tiles of keys, split: bwd4 without a mask (notes/bwd4.md, "The last round").

Tiles of equal length are taken in rounds of as many as there are SMs, and in the last round some SMs have
none: 2048 tiles are 15.5 rounds of 132, and take 16. So the tiles that are left over are taken in parts of
their queries. Each part leaves dK and dV in fp32, and who is last at a tile adds them, in the order of the
parts, and stores the sums as it would have stored its own.

    mSplit   (dK or dV, tile, part, consumer, column block, 4096) fp32, without the scale, as `key_parts`
             has parts. Of one part no tile is split, and there is one that nobody touches.
    mOrder   2 · tile + consumer: how many parts are there; zero before and after. (bwd4_det's turns.)
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from .backward_ends import QUAD
from .key_parts import quads_of_block


@cute.jit
def count_taken(tiles, mSplit):
    """How many are taken: tiles, of which the last are in parts."""
    _, split, parts, *_ = mSplit.shape
    return tiles + split * (parts - 1)


@cute.jit
def place_in_split(taken, tiles, mSplit):
    """Of the taken-th: (which of the tiles it is, 0 or as which of all parts it is taken, from 1)."""
    _, split, parts, *_ = mSplit.shape
    tile, part, whole = taken, Int32(0), tiles - split
    if taken >= whole and parts > 1:
        part = taken - whole + 1
        tile = whole + (part - 1) // parts
    return tile, part


@cute.jit
def queries_of_part(last, part, parts):
    """(first, last) of the tiles of queries, `last` of a whole tile, of what `place_in_split` gave."""
    first = Int32(0)
    if part > 0:
        of_tile = (part - 1) % parts
        first, last = last * of_tile // parts, last * (of_tile + 1) // parts
    return first, last


@cute.jit
def add_parts(rX, gX, thread):
    """A thread of a consumer takes its rows of dK or dV, as `key_parts.leave_part` leaves them, from all
    parts gX (part, column block, 4096): their sum, in their order."""
    rX.fill(0.0)
    for part in range(gX.shape[0], unroll=1):
        for own, left in quads_of_block(rX, gX[part, None, None], thread):
            more = cute.make_rmem_tensor(cute.make_layout(QUAD), Float32)
            cute.autovec_copy(left, more)
            own.store(own.load() + more.load())
