"""The keys of a tile of queries among several CTAs (k6_slices): equal slices of all steps, and which pieces
of tiles they are.

A step is a tile of queries with one of the tiles of keys that it sees. All steps stand in one list, head by
head, and CTA j has the j-th of its equal slices. It goes through it from right to left:

    steps     │ tile 0 ───────── │ tile 1 ───────── │ tile 2 ───────── │
    slices    │ 0 ───────── │ 1 ───────── │ 2 ───────── │ 3 ───────────│
    slice 2                           2nd ▓▓▓▓▓▓▓▓▓▓▒▒▒▒ 1st

What a slice has of a tile is a piece. Few pieces of a tile are added by whoever has its last step (▓) to its
own: the others (▒) are left in global memory. Of more than ALONE all are left, and when the slices are done
their sum is made by all CTAs, a part of it each (piece_sums.py has both).

No hang: a CTA has one slice, numbered as they are fetched, and takes parts of sums when it is done, if all
slices are taken then. Whoever waits does so for pieces of slices fetched before, which wait for nobody: where
it adds to its own they are the first that their CTAs compute, and where sums are made in parts no slice
waits.

Where K and V of all heads do not stay in L2 slices are of the tiles that are left when each CTA has as many
whole ones as the others. These come head by head, between the piece that is left and the one that is added
to.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_tensor

from ..calls_slices import CACHED_BYTES, LEAST_STEPS, MOST_PIECES, QUAD, sums_are_shared
from .constants import WARP, WARPGROUP
from .limits import BLOCK
from .packed import Dense
from .prepared_order import divisor
from .query_tiles import Config, QueryTiles

LEAVES = -1  # in the place of how many pieces are to be added: the piece is left for others to add
SLOT_BITS = 16


class Slices(NamedTuple):
    """What a launch knows of its slices."""

    mStates: cute.Tensor  # fp32 (slot, quad, thread, 4): a piece that was left
    mLeft: cute.Tensor  # int32 (slot · warps + 1,): not 0 while it waits to be added; CTAs that have ended
    mO: cute.Tensor  # (batch, heads, seqlen, head_dim), where parts of sums are stored
    heads: cute.FastDivmodDivisorV2  # of a batch
    blocks: cute.FastDivmodDivisorV2  # steps of a tile, where all have as many, without a mask
    steps: cute.FastDivmodDivisorV2  # of a head
    share: cute.FastDivmodDivisorV2  # steps of a slice
    divided: Int32  # steps, the first, that are divided into slices
    whole: Int32  # tiles of queries behind them that are not
    parts: Int32  # in which a tile's sum is made; 0: whoever has its last step adds its pieces
    sums: Int32  # parts of all tiles that are divided


@dataclass(frozen=True)
class SlicedKeys(Dense):
    """Sequences of one length, of whose keys a tile takes a piece. A place is (block, head, batch, first tile
    of keys, how many, `in_one_word`: the piece's slot, and how many before it are added to it, or LEAVES); of
    a part of a sum (block, head, batch, which, how many pieces, the first one's slot)."""

    tile_kv: int
    words = 6

    def lengths(self, place, extents):
        """From the piece's first key on, with which a mask aligned at the bottom right stays where it is."""
        return extents[0], extents[1] - place[3] * self.tile_kv

    def keys_at(self, place, block):
        return None, place[3] + block

    def tiles_of_keys(self, place, tiles):
        return cutlass.min(tiles, place[4])


def in_one_word(slot, adds):
    """A piece's slot and how many it adds, or LEAVES: a register instead of two."""
    return slot + ((adds - LEAVES) << SLOT_BITS)


def from_one_word(word):
    """What `in_one_word` was made of."""
    return word & (2**SLOT_BITS - 1), (word >> SLOT_BITS) + LEAVES


def fake_slices(value_dim: int, threads: int) -> tuple[object, object]:
    """Stand-ins for `Slices`' scratch, contiguous."""
    inner = value_dim * BLOCK // WARPGROUP // QUAD + 1, threads, QUAD
    strides = cute.sym_int64(divisibility=math.prod(inner)), threads * QUAD, QUAD, 1
    states = make_fake_tensor(Float32, (cute.sym_int(), *inner), strides, assumed_align=128)
    return states, make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)


class SlicedTiles(QueryTiles):
    """Tiles of queries in pieces. The order of steps is that of heads, blocks of queries and keys."""

    config: Config
    sms: int
    value_dim: int
    slices: Slices  # inside a kernel

    @property
    def sliced(self) -> bool:
        return isinstance(self.batch, SlicedKeys)

    @property
    def keeps_whole(self) -> bool:
        """Whether, of keys that do not stay in L2, only those tiles are divided that are left when each SM
        has as many as the others: where all have as many steps, and an SM has one CTA."""
        return not self.mask.hides and self.config.ctas == 1

    # ---- what tiles are of: here the queries of a head; k6_groups has those of a group of heads ------------

    def take_queries(self, queries, group, by=None):
        """How many a head has, and heads a group, also as what is divided `by`: before anything is asked, on
        the host and in the kernel."""

    def rows_of(self, queries, heads, kv_heads):
        """Rows of what a tile belongs to, and of how many such a batch consists."""
        return queries, heads

    def extents_of(self, mQ, mK):
        """How many rows and how many keys, in the kernel."""
        return self.rows_of(mQ.shape[0], mQ.shape[2], mK.shape[2])[0], mK.shape[0]

    def query_at(self, row, place):
        """(query, head) of a row of a place's tiles."""
        return row, place[1]

    @cute.jit
    def slices_of(self, mStates, mLeft, mQ, mK, mO):
        """On the host, of Q, K and O (batch, heads, seqlen, head_dim): (`Slices`' members, how many CTAs)."""
        batch, heads, queries, _ = mQ.shape
        self.take_queries(queries, heads // mK.shape[1])
        seqlen_q, of_batch = self.rows_of(queries, heads, mK.shape[1])
        heads, seqlen_kv, key_rows = batch * of_batch, mK.shape[2], batch * mK.shape[1] * mK.shape[2]
        q_blocks, steps = cute.ceil_div(seqlen_q, self.tile_q), Int32(0)
        if const_expr(self.mask.hides):
            for i in range(q_blocks):
                steps += self.kv_blocks((i + 1) * self.tile_q, seqlen_q, seqlen_kv)
        else:
            steps = q_blocks * self.kv_blocks(self.tile_q, seqlen_q, seqlen_kv)
        longest = self.kv_blocks(q_blocks * self.tile_q, seqlen_q, seqlen_kv)
        whole = Int32(0)
        if const_expr(self.keeps_whole):
            # Slices of neighbours are of all heads at once, whole tiles come head by head.
            if key_rows > CACHED_BYTES // (4 * self.head_dim):
                whole = heads * q_blocks // self.sms * self.sms
        divided = heads * steps - whole * longest
        least = cute.ceil_div(longest, MOST_PIECES)  # `least_steps`
        share = cutlass.max(LEAST_STEPS, least, cute.ceil_div(divided, self.sms * self.config.ctas))
        count, tiles = cute.ceil_div(divided, share), heads * q_blocks - whole
        ctas, parts = cutlass.max(count, cutlass.min(whole, self.sms)), Int32(0)
        if sums_are_shared(longest, share, count, tiles, mStates.shape[0]):
            parts = Int32(1)
            while (parts * 2 * tiles <= ctas) & (self.quads % (parts * 2) == 0):
                parts *= 2
        divided_by = [divisor(x) for x in (of_batch, longest, steps, share)]
        return (mStates, mLeft, mO, *divided_by, divided, whole, parts, parts * tiles), ctas

    @property
    def quads(self) -> int:
        """Of a thread's O: four values each, two columns of two rows."""
        return self.value_dim * BLOCK // WARPGROUP // QUAD

    def left(self, slot, warp):
        """Whether a warp's rows of a piece are there: 1, and one more for each who waited and has seen so."""
        warps = self.slices.mStates.shape[2] // WARP
        return (self.slices.mLeft.iterator + (slot * warps + warp)).llvm_ptr

    # ---- which pieces: the producer ------------------------------------------------------------------------

    @cute.jit
    def own_slice(self, taken, mQ, mK):
        """(number, at): the slice whose number lane 0 has `taken` off the counter, and where in it the
        producer begins."""
        number = cute.arch.shuffle_sync(taken, 0)
        return number, self.first_piece(number, mQ, mK)

    @cute.jit
    def first_piece(self, number, mQ, mK):
        """Where in a slice the producer begins."""
        share = self.slices.share.divisor
        begin = cutlass.min(number * share, self.slices.divided)
        end = cutlass.min(begin + share, self.slices.divided)
        at = -end, -begin, -begin, -begin, number
        if const_expr(self.keeps_whole):
            if end % self.slices.blocks == 0:
                at = self.next_piece(at, mQ, mK)
        return at

    @cute.jit
    def next_piece(self, at, mQ, mK):
        """Where the producer goes on behind a piece, as (tile, tiles, kept, end, ahead): it is at step −tile,
        and goes to the left up to −tiles. Between the piece that is left and the one that is added to come
        its whole tiles, of which `ahead` is the next; what is still to do of the slice, from −kept to −end,
        comes behind them."""
        tile, tiles, kept, end, ahead = at
        if const_expr(self.keeps_whole):
            if ahead < self.slices.whole:
                if ahead < self.sms:  # its first
                    kept = tile
                blocks = self.slices.blocks.divisor
                begin = self.slices.divided + ahead * blocks
                tile, tiles = -begin - blocks, -begin
                ahead += self.sms
            elif tile == tiles and kept < end:
                tile, tiles, kept = kept, end, end
        return tile, tiles, kept, end, ahead

    @cute.jit
    def locate_piece(self, number, tile, tiles, mQ, mK):
        """The place of the piece of slice `number` that ends at step −tile, and begins at −tiles or later."""
        seqlen_q, _ = self.rows_of(mQ.shape[0], mQ.shape[2], mK.shape[2])
        seqlen_kv, heads = mK.shape[0], self.slices.heads
        last = -tile - 1
        head, inside = last // self.slices.steps, last % self.slices.steps
        block, blocks = Int32(0), self.kv_blocks(self.tile_q, seqlen_q, seqlen_kv)
        if const_expr(self.mask.hides):
            while inside >= blocks:
                inside -= blocks
                block += 1
                blocks = self.kv_blocks((block + 1) * self.tile_q, seqlen_q, seqlen_kv)
        else:
            block, inside = inside // self.slices.blocks, inside % self.slices.blocks
        begin = last - inside  # the tile's first step
        first = cutlass.max(0, -tiles - begin)
        slot, adds = number, Int32(0)
        if begin < self.slices.divided:  # a tile that is
            before = number - begin // self.slices.share  # pieces of it
            if self.slices.parts > 0:
                slot += self.tile_number(head, block, seqlen_q)
                if before + (begin + blocks - 1) // self.slices.share > number:
                    adds = Int32(LEAVES)
            else:
                adds = before
                if inside + 1 < blocks:
                    adds = Int32(LEAVES)
        return block, head % heads, head // heads, first, inside + 1 - first, in_one_word(slot, adds)

    def tile_number(self, head, block, seqlen_q):
        """Of all tiles of queries. A slice's number and this are a slot that no other piece has."""
        return head * cute.ceil_div(seqlen_q, self.tile_q) + block

    # ---- which parts of sums: the producer, when it has all pieces -----------------------------------------

    @cute.jit
    def next_part(self, mCounter):
        """The next part of a sum that nobody has taken, or as many as there are. It comes off the counter of
        slices, but not before all of these are taken: each CTA has the slice that it finds when it begins,
        however late that is. Whoever took the last one makes what others left."""
        ctas, _, _ = cute.arch.grid_dim()
        counter, taken = mCounter.iterator.llvm_ptr, Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")
            if taken >= ctas:
                taken = cute.arch.atomic_add(counter, Int32(1))
        taken = cute.arch.shuffle_sync(taken, 0)
        return taken - ctas if taken >= ctas else self.slices.sums

    @cute.jit
    def end_launch(self, mCounter):
        """At the end: the last CTA leaves the counter at zero, and that of those who have been here."""
        ctas, _, _ = cute.arch.grid_dim()
        ended = self.left(self.slices.mStates.shape[0], 0)  # behind all flags
        if cute.arch.lane_idx() == 0:
            if cute.arch.atomic_add(ended, Int32(1)) == ctas - 1:
                cute.arch.store(ended, Int32(0), sem="relaxed", scope="gpu")
                mCounter[0] = Int32(0)

    @cute.jit
    def locate_part(self, part, mQ, mK):
        """The place of a part of a sum."""
        seqlen_q, _ = self.rows_of(mQ.shape[0], mQ.shape[2], mK.shape[2])
        seqlen_kv, heads = mK.shape[0], self.slices.heads
        tile, q_blocks = part // self.slices.parts, cute.ceil_div(seqlen_q, self.tile_q)
        head, block = tile // q_blocks, tile % q_blocks
        begin, blocks = head * self.slices.steps.divisor, self.kv_blocks(self.tile_q, seqlen_q, seqlen_kv)
        if const_expr(self.mask.hides):
            for i in range(block):
                begin += blocks
                blocks = self.kv_blocks((i + 2) * self.tile_q, seqlen_q, seqlen_kv)
        else:
            begin += block * blocks
        number = begin // self.slices.share
        pieces = (begin + blocks - 1) // self.slices.share - number + 1
        return block, head % heads, head // heads, part % self.slices.parts, pieces, number + tile
