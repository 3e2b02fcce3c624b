"""Tiles of packed sequences that a forward kernel goes through: those of a list (`tile_list`), or, where
sequences are about equally long, as many of each as the caller says, which nothing lists.

Each sequence then counts as `each` tiles: where the tile-th lies follows from its number, and only rows are
read from cu_seqlens. A tile behind a sequence's end is left for the next. A sequence of more tiles than it
counts as is gone through in strides, by whoever has one of its first: so `each` may be any number.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .key_slices import SlicedTiles
from .limits import FINAL_LISTED
from .prepared_order import find, sizes_of
from .tile_list import rows_used


@cute.jit
def ask(mCounter):
    """The first half of `tile_order.fetch`. What it returns, for `fetched`, is on its way until then."""
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(mCounter.iterator.llvm_ptr, Int32(1))
    return taken


@cute.jit
def fetched(taken, mCounter, tiles):
    """The second half: the next tile, of what was asked for. The last fetch leaves the counter at zero."""
    grid, _, _ = cute.arch.grid_dim()
    fetches = tiles
    if cute.arch.lane_idx() == 0:
        if taken == fetches - 1:
            mCounter[0] = Int32(0)
    taken = cute.arch.shuffle_sync(taken, 0)
    return taken + grid


@cute.jit
def read_together(index, given):
    """A warp: (start_q, length_q, start_kv, length_kv) of a sequence. Each lane reads one number of them: all
    CTAs begin at once, with sequences whose numbers lie in the same lines, of which L2 serves one read after
    the other."""
    mCuQ, mCuKV, mUsedQ, mUsedKV, which_used, total_q, total_kv = given
    lane, place = cute.arch.lane_idx(), (mCuQ.iterator + index).toint()
    for i, (mX, behind) in enumerate(((mCuQ, 1), (mUsedQ, 0), (mCuKV, 0), (mCuKV, 1), (mUsedKV, 0))):
        place = (mX.iterator + (index + behind)).toint() if lane == i + 1 else place
    own = cute.make_tensor(cute.make_ptr(Int32, place, cute.AddressSpace.gmem, assumed_align=4), 1)[0]
    numbers = [cute.arch.shuffle_sync(own, i) for i in range(6)]
    of_q = rows_used(*numbers[:3], which_used & 1, total_q)
    return *of_q, *rows_used(*numbers[3:], which_used & 2, total_kv)


class PackedTiles(SlicedTiles):
    """What the warp that loads asks of packed tiles. `listing` is `list_or_count`'s."""

    @cute.jit
    def list_or_count(self, mList, given, each, totals, heads, ctas, stream):
        """Launch the kernel that lists a packed batch's tiles in the scratch mList, unless each sequence
        counts as `each` of them: (the list and what it is made of, how many tiles of all heads there may
        be)."""
        mList = cute.recast_tensor(mList, Int32)
        final = cutlass.min(FINAL_LISTED, cute.ceil_div(2 * ctas, heads))
        sequences, section = given.sequences[0].shape[0] - 1, Int32(0)
        tiles, some = each * sequences, cutlass.max(1, sequences)
        if const_expr(self.mask.hides):
            section = self.section(cutlass.max(1, totals[1] // some))
        if each == 0:
            self.lists(mList, *given.sequences, *totals, stream, final)
            tiles = Int32(mList.shape[0] - 1)
        sizes = sizes_of(self.order, cutlass.max(1, each), heads, some, section)
        return (mList, final, each, sizes, *given.sequences, *totals), cutlass.max(1, tiles * heads)

    @cute.jit
    def begin_loading(self, loads, tiles, mCounter, mQ, mK, listing):
        """`first_tile`, of the warp that `loads`, while others make the rings: lengths are far away."""
        tile, _, _ = cute.arch.block_idx()
        place, alone = (Int32(0),) * self.batch.words, Int32(0)
        if loads:
            tile, place, tiles, alone = self.first_tile(tile, tiles, mCounter, mQ, mK, listing)
        return tile, place, tiles, alone

    @cute.jit
    def first_tile(self, tile, tiles, mCounter, mQ, mK, listing):
        """Of a CTA's first tile, by its number: (tile, place, tiles, alone), the last two as `once_told`
        says. Where lengths alone say where it lies, its loads begin before the list is there. Nothing that
        is read until then is the list's kernel's: that is launched without PDL, so that all before it has
        ended when this one begins. Without a list that is waited for here."""
        mList, final, each, _, *given = listing
        heads, kv_heads, alone = mQ.shape[2], mK.shape[2], Int32(0)
        place = (Int32(0),) * self.batch.words
        if each > 0:
            cute.arch.griddepcontrol_wait()
            tile, place = self.with_rows(tile, tiles, mCounter, mQ, mK, listing)
        else:
            found = self.lists.look_up(tile, heads, self.batch.ctas_for(heads), given, final)
            known, shared, inside, blocks, *sequence = found
            block, head = self.locate_in_sequence(inside, cutlass.max(1, blocks), heads, sequence[3])
            place = self.batch.place(block, head, sequence, shared, inside, heads, kv_heads)
            if not known:
                tiles, alone = self.once_told(True, tiles, alone, mQ, listing)
                place = self.locate_listed(tile, alone, mQ, mK, mList)
        return tile, place, tiles, alone

    @cute.jit
    def once_told(self, first, tiles, alone, mQ, listing):
        """Behind the loads of a CTA's first tile: wait for the list, and say how many tiles it has, of all
        heads, and how many of each head that it has for itself. Behind others, and without a list, these are
        known."""
        if first & (listing[2] == 0):
            cute.arch.griddepcontrol_wait()
            tiles, alone = self.batch.listed_tiles(listing[0], mQ.shape[2])
        return tiles, alone

    def goes_on(self, place, listing):
        """Whether a sequence has more tiles than it counts as: whoever has one of them goes on to those
        behind it, in strides, before it fetches the next."""
        each = listing[2]
        return (each > 0) & ((place[0] + each) * self.tile_q < place[3])

    @cute.jit
    def next_tile(self, tile, then, tiles, alone, mCounter, mQ, mK, listing):
        """Behind a tile: (the next, its place). `then` is (the tile's place, whether it `goes_on`, what was
        asked for if not)."""
        place, goes_on, asked = then
        each = listing[2]
        place = place[0] + each, *place[1:]
        if not goes_on:
            tile = fetched(asked, mCounter, tiles)
            if each > 0:
                tile, place = self.with_rows(tile, tiles, mCounter, mQ, mK, listing)
            else:
                place = self.locate_listed(tile, alone, mQ, mK, listing[0])
        return tile, place

    @cute.jit
    def with_rows(self, tile, tiles, mCounter, mQ, mK, listing):
        """Where each sequence counts as so many tiles: the tile-th, or the next one fetched of which there
        are rows, and its place."""
        place, looking = (Int32(0),) * self.batch.words, tile < tiles
        while looking:
            place = self.locate_of_each(tile, mQ, mK, listing)
            looking = place[0] * self.tile_q >= place[3]
            if looking:
                tile = fetched(ask(mCounter), mCounter, tiles)
                looking = tile < tiles
        return tile, place

    @cute.jit
    def locate_of_each(self, tile, mQ, mK, listing):
        """The place of the tile-th tile, as if each sequence had `each` of them; maybe behind its end. They
        come in the order of equally long sequences, under a mask the longest first."""
        _, _, _, sizes, *given = listing
        block, head, index = find(self.order, tile, sizes)
        sequence = read_together(index, given)
        return self.batch.place(block, head, sequence, False, 0, mQ.shape[2], mK.shape[2])
