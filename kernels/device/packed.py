"""Packed batches: sequences that follow each other in one tensor, with lengths that only the GPU knows.

A `Dense` or a `Packed` object tells a main loop where rows lie, and nothing else of it changes. Which tiles
there are, a list says (`tile_list`).

Clipping without a descriptor for each sequence (the idea is Triton's `ragged_tma`): `ragged` views (total, d,
heads) as (FAR, d, heads, (total + 1, FAR + 1)). The first mode and the fourth both go from row to row; a step
of the fifth goes 2⁶⁴/FAR bytes ahead and a row back, so that FAR of them go FAR rows back, modulo 2⁶⁴. Of a
sequence that begins at row s and has n rows, row i then has the coordinates (FAR − n + i, …, s + n, FAR).
They are in bounds exactly for i < n: the TMA fills what lies behind with zeros (never with the next
sequence's rows, whose Inf would make NaN of a zero in P), and writes nothing there. Hazard: with a base FAR
rows before the tensor, which needs no fifth mode, a load of which no row is in bounds faults.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from .tile_list import locate_listed

FAR = 2**30  # rows: more than any sequence has


@dataclass(frozen=True)
class Dense:
    """Sequences of one length, a batch. A place is (block, head, batch)."""

    words = 3  # of a place
    shares = False  # whether heads may share a tile (`shared_tiles`)

    def view(self, mX):
        """What the TMA's descriptors are made of: (batch, heads, seqlen, head_dim)."""
        return mX

    def lengths(self, place, extents):
        """(seqlen_q, seqlen_kv) of the place's sequence; `extents` are those of the tensors."""
        return extents

    def queries(self, mX, head, place):
        """(row, column) of one head of a tensor beside Q, as `tma.load_atom` and `store_atom` return them."""
        return mX[None, None, head, place[2]]

    def keys(self, mX, head, place):
        """(row, column) of one head of a tensor beside K."""
        return mX[None, None, head, place[2]]

    def query_values(self, mX, place):
        """(row,) of a tensor (batch, heads, seqlen) beside Q."""
        return mX[place[2], place[1], None]

    def queries_from(self, mX, head, place):
        """What a tile whose first head is `head` loads of a tensor beside Q, as `tma.partition_tma` takes it;
        `queries_at` says where there."""
        return self.queries(mX, head, place)

    def keys_from(self, mX, head, place):
        """The same of a tensor beside K, with `keys_at`."""
        return self.keys(mX, head, place)

    def queries_at(self, place, consumer: int, consumers: int):
        """Where the 64 queries of a consumer are among those parts."""
        return None, place[0] * consumers + consumer

    def keys_at(self, place, block):
        """Where the block-th tile of keys of a tile of queries is."""
        return None, block

    def tiles_of_keys(self, place, tiles):
        """How many are loaded for a tile whose head has so many."""
        return tiles

    def of_consumer(self, place, consumer):
        """The place as a consumer is to see it."""
        return place

    def before(self, place, consumer):
        """How many tiles of keys of other heads come before a consumer's own."""
        return 0


@dataclass(frozen=True)
class Packed(Dense):
    """Sequences one behind the other. A place is (block, head, start_q, seqlen_q, start_kv, seqlen_kv), rows
    of the tensors."""

    words = 6

    def view(self, mX):
        return ragged(mX)

    def lengths(self, place, extents):
        return place[3], place[5]

    def queries(self, mX, head, place):
        return rows_of_sequence(mX, head, place[2], place[3])

    def keys(self, mX, head, place):
        return rows_of_sequence(mX, head, place[4], place[5])

    def query_values(self, mX, place):
        return cute.domain_offset((place[2],), mX[0, place[1], None])

    def ctas_for(self, heads):
        """Among how many tiles the heads of a short sequence are dealt out."""
        return heads

    def listed_tiles(self, mList, heads):
        """How many tiles a list (`tile_list.ListTiles`) has, of all heads; and how many of each head that it
        has for itself, where some are shared."""
        return Int32(mList[0, 0] * heads), Int32(0)

    def locate_listed(self, tile, alone, heads, kv_heads, mList, locate):
        """The place of the tile-th of them."""
        return locate_listed(tile, heads, mList, locate)

    def place(self, block, head, sequence, shared, inside, heads, kv_heads):
        """The place of a block and head, or of the inside-th of the tiles that heads share."""
        return block, head, *sequence


Batch = Dense | Packed
DENSE = Dense()


def ragged(mX: cute.Tensor) -> cute.Tensor:
    """(1, heads, total, head_dim) as ((total + 1, FAR + 1), heads, FAR, head_dim), as the module's head
    says."""
    _, heads, total, columns = mX.shape
    _, head_stride, row_stride, one = mX.stride
    back = 2**64 // FAR * 8 // mX.element_type.width - row_stride
    shape = (total + 1, FAR + 1), heads, FAR, columns
    layout = cute.make_layout(shape, stride=((row_stride, back), head_stride, row_stride, one))
    return cute.make_tensor(mX.iterator, layout)


def rows_of_sequence(mX: cute.Tensor, head, start, length) -> cute.Tensor:
    """(row, column) of one head of a sequence, which the TMA clips behind `length` rows. mX is the `ragged`
    view as `tma.load_atom` returns it: (row, head_dim, heads, (row, FAR + 1))."""
    return cute.domain_offset((FAR - length, 0), mX[None, None, head, (start + length, FAR)])
