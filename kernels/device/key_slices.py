"""The keys of a tile of queries among several CTAs (k6_slices): equal slices of all steps, and their merge.

A step is a tile of queries with one of the tiles of keys that it sees. All steps stand in one list, head by
head, and CTA j has the j-th of its equal slices. It goes through it from right to left:

    steps     │ tile 0 ───────── │ tile 1 ───────── │ tile 2 ───────── │
    slices    │ 0 ───────── │ 1 ───────── │ 2 ───────── │ 3 ───────────│
    slice 2                           2nd ▓▓▓▓▓▓▓▓▓▓▒▒▒▒ 1st

What a slice has of a tile is a piece. One that lacks the tile's last step (▒) is left in global memory as its
consumers hold it: O not divided, each row's maximum, each thread's part of its sum. Whoever has the last step
(▓) adds what the slices before have left, nearest first, and stores the tile: one order, so that every run
gives the same bits. Of more than ALONE pieces some first add those before them, so that the last has fewer to
add:

    pieces of a tile   0  1  2  3  4  5  6  7  8  9
    first              └──┤  └────────┤  └────────┤   into 1, 5 and 9, which has the tile's end
    then                  └───────────┴───────────┤   into 9

No hang: slices are numbered as CTAs fetch them. A piece without its tile's end is the first that its CTA
computes. Whoever waits does so for such pieces of slices fetched before its own alone.

Where K and V of all heads do not stay in L2 slices are of the tiles that are left when each CTA has as many
whole ones as the others. These come head by head, between the piece that is left and the one that is added
to.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from ..calls_slices import ALONE, CACHED_BYTES, LEAST_STEPS, NOWHERE, QUAD
from .constants import WARP, WARPGROUP
from .limits import BLOCK
from .packed import Dense
from .query_tiles import Config, QueryTiles
from .rows import OWN_ROWS, finite, sum_of_row

QUADS_IN_FLIGHT = 16  # that a thread reads of a piece at once
LEAVES = -1  # in the place of how many sums are to be added: a piece that is left for another to add
NUMBER, ADDS = 16, 8  # bits of a slice's number, and of how many pieces it adds, in one register


class Slices(NamedTuple):
    """What a launch knows of its slices."""

    mStates: cute.Tensor  # fp32 (slice, quad, thread, 4): a piece that was left
    mLeft: cute.Tensor  # int32 (slice · warps,): 1 while it waits to be added
    share: Int32  # steps of a slice
    steps: Int32  # of a head
    divided: Int32  # steps, the first, that are divided into slices
    whole: Int32  # tiles of queries behind them that are not
    group: Int32  # query heads of a key head


@dataclass(frozen=True)
class SlicedKeys(Dense):
    """Sequences of one length, of whose keys a tile takes a piece. A place is (block, head, batch, first tile
    of keys, how many, `in_one_word`: slice, how many pieces to add, and how many sums or LEAVES). Sums are
    what every (pieces to add + 1)-th slice before has left; the farthest may be of fewer pieces."""

    tile_kv: int
    words = 6

    def lengths(self, place, extents):
        """From the piece's first key on, with which a mask aligned at the bottom right stays where it is."""
        return extents[0], extents[1] - place[3] * self.tile_kv

    def keys_at(self, place, block):
        return None, place[3] + block

    def tiles_of_keys(self, place, tiles):
        return cutlass.min(tiles, place[4])


def in_one_word(number, adds, sums):
    """A slice's number, how many pieces it adds and how many sums, or LEAVES: a register instead of three."""
    return number + (adds << NUMBER) + ((sums - LEAVES) << (NUMBER + ADDS))


def from_one_word(word):
    """What `in_one_word` was made of."""
    adds = (word >> NUMBER) & (2**ADDS - 1)
    return word & (2**NUMBER - 1), adds, (word >> (NUMBER + ADDS)) + LEAVES


def fake_slices(value_dim: int, threads: int) -> tuple[object, object]:
    """Stand-ins for `Slices`' tensors, contiguous."""
    inner = value_dim * BLOCK // WARPGROUP // QUAD + 1, threads, QUAD
    strides = cute.sym_int64(divisibility=math.prod(inner)), threads * QUAD, QUAD, 1
    states = make_fake_tensor(Float32, (cute.sym_int(), *inner), strides, assumed_align=128)
    return states, make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)


class SlicedTiles(QueryTiles):
    """Tiles of queries in pieces. The order of steps is that of heads, blocks of queries and keys."""

    config: Config
    sms: int
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

    def take_queries(self, queries, group):
        """How many a head has, and heads a group: before anything is asked, on the host and in the kernel."""

    def rows_of(self, queries, heads, kv_heads):
        """Rows of what a tile belongs to, and of how many such a batch consists."""
        return queries, heads

    def extents_of(self, mQ, mK):
        """How many rows and how many keys, in the kernel."""
        return self.rows_of(mQ.shape[0], mQ.shape[2], mK.shape[2])[0], mK.shape[0]

    @cute.jit
    def slices_of(self, mStates, mLeft, mQ, mK):
        """On the host, of Q and K (batch, heads, seqlen, head_dim): (`Slices`' members, how many CTAs)."""
        batch, heads, queries, _ = mQ.shape
        group = heads // mK.shape[1]
        self.take_queries(queries, group)
        seqlen_q, heads = self.rows_of(queries, heads, mK.shape[1])
        heads, seqlen_kv, key_rows = batch * heads, mK.shape[2], batch * mK.shape[1] * mK.shape[2]
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
        least = cute.ceil_div(longest, ALONE)  # `least_steps`
        if longest > ALONE**2:
            least = cute.ceil_div(longest, ALONE**2)
        elif longest % least != 0:
            least = cute.ceil_div(longest - 1, ALONE - 1)
        share = cutlass.max(LEAST_STEPS, least, cute.ceil_div(divided, mStates.shape[0]))
        ctas = cutlass.max(cute.ceil_div(divided, share), cutlass.min(whole, self.sms))
        return (mStates, mLeft, share, steps, divided, whole, group), ctas

    # ---- which pieces: the producer ------------------------------------------------------------------------

    @cute.jit
    def own_slice(self, mCounter, taken, mQ, mK):
        """(number, at): the slice whose number lane 0 has `taken` off the counter, and where in it the
        producer begins. The last to take one leaves the counter at zero."""
        ctas, _, _ = cute.arch.grid_dim()
        number = cute.arch.shuffle_sync(taken, 0)
        if number == ctas - 1 and cute.arch.lane_idx() == 0:
            mCounter[0] = Int32(0)
        return number, self.first_piece(number, mQ, mK)

    @cute.jit
    def first_piece(self, number, mQ, mK):
        """Where in a slice the producer begins."""
        begin = cutlass.min(number * self.slices.share, self.slices.divided)
        end = cutlass.min(begin + self.slices.share, self.slices.divided)
        at = -end, -begin, -begin, -begin, number
        if const_expr(self.keeps_whole):
            if end % self.kv_blocks(self.tile_q, mQ.shape[0], mK.shape[0]) == 0:
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
                blocks = self.kv_blocks(self.tile_q, mQ.shape[0], mK.shape[0])
                begin = self.slices.divided + ahead * blocks
                tile, tiles = -begin - blocks, -begin
                ahead += self.sms
            elif tile == tiles and kept < end:
                tile, tiles, kept = kept, end, end
        return tile, tiles, kept, end, ahead

    @cute.jit
    def locate_piece(self, number, tile, tiles, mQ, mK):
        """The place of the piece of slice `number` that ends at step −tile, and begins at −tiles or later."""
        seqlen_q, heads = self.rows_of(mQ.shape[0], mQ.shape[2], mK.shape[2])
        seqlen_kv = mK.shape[0]
        last = -tile - 1
        head, inside = last // self.slices.steps, last % self.slices.steps
        block, blocks = Int32(0), self.kv_blocks(self.tile_q, seqlen_q, seqlen_kv)
        if const_expr(self.mask.hides):
            while inside >= blocks:
                inside -= blocks
                block += 1
                blocks = self.kv_blocks((block + 1) * self.tile_q, seqlen_q, seqlen_kv)
        else:
            block, inside = inside // blocks, inside % blocks
        begin = last - inside  # the tile's first step
        first = cutlass.max(0, -tiles - begin)
        adds, sums = Int32(0), Int32(0)
        if begin < self.slices.divided:  # a tile that is
            before = number - begin // self.slices.share  # pieces of it
            behind = (begin + blocks - 1) // self.slices.share - number
            together = Int32(ALONE)
            if before + behind >= ALONE:
                together = Int32(2)
                while together * together <= before + behind:
                    together += 1
            if behind % together == 0:
                adds = cutlass.min(before, together - 1)
                sums = before // together
            if inside + 1 < blocks:
                sums = Int32(LEAVES)
        word = in_one_word(number, adds, sums)
        return block, head % heads, head // heads, first, inside + 1 - first, word

    # ---- what becomes of them: consumers -------------------------------------------------------------------

    def span_of(self, place, consumer, extents):
        first_row, *blocks, begin = super().span_of(place, consumer, extents)
        if self.sliced:
            blocks = [cute.arch.make_warp_uniform(cutlass.min(x, place[4])) for x in blocks]
        return first_row, *blocks, begin

    def state(self, number, tidx):
        """A thread's place for what slice `number` leaves: (4, quad), of which the last is its two rows'
        maxima and sums."""
        gState = self.slices.mStates[number, None, tidx, None]
        return cute.make_tensor(gState.iterator, cute.select(gState.layout, mode=[1, 0]))

    def left(self, number, warp):
        """Whether a warp's rows of what slice `number` leaves are there."""
        warps = self.slices.mStates.shape[2] // WARP
        return (self.slices.mLeft.iterator + (number * warps + warp)).llvm_ptr

    def await_pieces(self, place, warp):
        """A consumer's warp, beside its last product: wait until the pieces that it adds are there."""
        number, adds, _ = from_one_word(place[5])
        self.await_left(number, adds, 1, warp)

    @cute.jit
    def await_left(self, number, count, apart, warp):
        """Wait until `count` slices before `number`, each `apart`-th, have left a piece. Each lane waits for
        one, and leaves 0 for the next launch."""
        lane = cute.arch.lane_idx()
        for i in range(1 + lane, count + 1, WARP, unroll=1):
            left = self.left(number - i * apart, warp)
            there = cute.arch.load(left, Int32, sem="acquire", scope="gpu")
            while there == 0:
                there = cute.arch.load(left, Int32, sem="acquire", scope="gpu")
            cute.arch.store(left, Int32(0), sem="relaxed", scope="gpu")
        cute.arch.sync_warp()

    @cute.jit
    def join(self, rO, O, row_max, row_sum, place, first_row, tidx, warp):
        """A consumer's warp, when O += P·V is done: add what it is to add, and store the sum to global memory
        if it is to be left. rO is O's accumulator, O the same by row. Returns (place, first row) of what else
        is to be stored: nowhere, if the piece is left."""
        (number, adds, sums), last = from_one_word(place[5]), cute.size(rO) // QUAD
        for r in range_constexpr(OWN_ROWS):
            if sum_of_row(row_sum[r]) == 0.0:  # no key is seen: a maximum of 0 is no score's
                row_max[r] = -Float32.inf
                O[r, None].fill(0.0)  # and not 0·NaN, of a hidden value
        quads = cute.make_tensor(rO.iterator, cute.make_layout((QUAD, last)))
        self.add_pieces(quads, row_max, row_sum, number, adds, 1, tidx)
        if sums > 0:
            self.await_left(number, sums, adds + 1, warp)
            self.add_pieces(quads, row_max, row_sum, number, sums, adds + 1, tidx)
        if sums == LEAVES:
            gState = self.state(number, tidx)
            about = cute.make_rmem_tensor(cute.make_layout(QUAD), Float32)
            for r in range_constexpr(OWN_ROWS):
                about[r], about[OWN_ROWS + r] = row_max[r], row_sum[r]
            for i in range_constexpr(last):
                cute.autovec_copy(quads[None, i], gState[None, i])
            cute.autovec_copy(about, gState[None, last])
            place, first_row = (Int32(NOWHERE), *place[1:]), Int32(NOWHERE * self.tile_q)
        for r in range_constexpr(OWN_ROWS):
            row_max[r] = finite(row_max[r])
        return place, first_row

    @cute.jit
    def add_pieces(self, quads, row_max, row_sum, number, count, apart, tidx):
        """Add what `count` slices before `number` have left, each `apart`-th, nearest first."""
        at_once = self.pieces_at_once
        state = lambda i: self.state(number - i * apart, tidx)
        for i in range(0, count // at_once, unroll=1):
            pieces = [state(at_once * i + p + 1) for p in range(at_once)]
            self.add_states(quads, row_max, row_sum, pieces)
        if const_expr(at_once > 1):
            for i in range(count // at_once * at_once, count, unroll=1):
                self.add_states(quads, row_max, row_sum, [state(i + 1)])

    @property
    def pieces_at_once(self) -> int:
        """How many are read at once: as many as registers hold beside O."""
        quads = self.value_dim * BLOCK // WARPGROUP // QUAD
        return 2 if quads <= QUADS_IN_FLIGHT and self.config.consumers <= 2 else 1

    @cute.jit
    def add_states(self, quads, row_max, row_sum, states):
        """Add some `state`s to a thread's own: O as quads (4, quad), maxima and sums."""
        last, count = cute.size(quads, mode=[1]), len(states)
        registers = lambda *shape: cute.make_rmem_tensor(cute.make_layout(shape), Float32)
        abouts = [registers(QUAD) for _ in range(count)]
        helds = [registers(QUAD, min(last, QUADS_IN_FLIGHT)) for _ in range(count)]
        own, theirs = registers(OWN_ROWS), [registers(OWN_ROWS) for _ in range(count)]
        for p in range_constexpr(count):
            cute.autovec_copy(states[p][None, last], abouts[p])
        for first in range_constexpr(0, last, QUADS_IN_FLIGHT):
            quads_here = range(min(QUADS_IN_FLIGHT, last - first))
            for p in range_constexpr(count):
                for i in quads_here:
                    cute.autovec_copy(states[p][None, first + i], helds[p][None, i])
            if const_expr(first == 0):
                for r in range_constexpr(OWN_ROWS):
                    largest = row_max[r]
                    for p in range_constexpr(count):
                        largest = cute.arch.fmax(largest, abouts[p][r])
                    own[r] = cute.math.exp2(row_max[r] - finite(largest), fastmath=True)
                    row_sum[r] = row_sum[r] * own[r]
                    for p in range_constexpr(count):
                        theirs[p][r] = cute.math.exp2(abouts[p][r] - finite(largest), fastmath=True)
                        row_sum[r] = row_sum[r] + abouts[p][OWN_ROWS + r] * theirs[p][r]
                    row_max[r] = largest
            for i in quads_here:
                for j in range(QUAD):  # two columns of either row
                    value = quads[j, first + i] * own[j // 2]
                    for p in range_constexpr(count):
                        value = value + helds[p][j, i] * theirs[p][j // 2]
                    quads[j, first + i] = value

    # ---- saying so: a warp of its own, since what is stored takes a microsecond to arrive ------------------

    @cute.jit
    def say_left(self, sLeft, place, consumer, thread, barrier: cutlass.Constexpr):
        """A consumer, behind its first piece: whether it has left that."""
        if thread == 0:
            number, _, sums = from_one_word(place[5])
            sLeft[consumer] = number if sums == LEAVES else Int32(LEAVES)
        cute.arch.barrier_arrive(barrier_id=barrier + consumer, number_of_threads=WARPGROUP + WARP)

    @cute.jit
    def tell_others(self, sLeft, consumers: cutlass.Constexpr, barrier: cutlass.Constexpr):
        """One warp, to the end: tell other CTAs of pieces that are left."""
        warps = WARPGROUP // WARP
        for c in range_constexpr(consumers):
            cute.arch.barrier(barrier_id=barrier + c, number_of_threads=WARPGROUP + WARP)
            if sLeft[c] != LEAVES and cute.arch.lane_idx() < warps:
                left = self.left(sLeft[c], c * warps + cute.arch.lane_idx())
                cute.arch.store(left, Int32(1), sem="release", scope="gpu")
