"""What becomes of pieces of tiles (key_slices.py): they are left, and added.

A piece is left in global memory as its consumers hold it: O not divided, each row's maximum, each thread's
part of its sum. Pieces are added in one order, so that every run gives the same bits:

    few      by the consumers of the one that has the tile's last step, to their own, nearest first
    many     in parts, of some columns of all the tile's rows each, from the first piece to the last

Each warp of a consumer leaves, waits and adds for its own 16 rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..calls_slices import NOWHERE, QUAD
from .arithmetic import store_if
from .constants import LN_2, WARP, WARPGROUP
from .key_slices import LEAVES, SlicedTiles, from_one_word
from .rows import LANES, OWN_ROWS, finite, sum_of_row
from .stores import WARP_ROWS

QUADS_IN_FLIGHT = 16  # that a thread reads of a piece at once
QUAD_COLUMNS, ROWS_APART = 8, 8  # of the quads of a row's lanes; a lane's two rows (`rows`)


def registers(*shape: int) -> cute.Tensor:
    """fp32 ones."""
    return cute.make_rmem_tensor(cute.make_layout(shape), Float32)


class SummingPieces(SlicedTiles):
    """Consumers, of pieces of tiles."""

    consumers: int
    dtype: type  # of O

    def span_of(self, place, consumer, extents):
        first_row, *blocks, begin = super().span_of(place, consumer, extents)
        if self.sliced:
            blocks = [cute.arch.make_warp_uniform(cutlass.min(x, place[4])) for x in blocks]
        return first_row, *blocks, begin

    def state(self, slot, tidx):
        """A thread's place for what a piece leaves: (4, quad), of which the last is its two rows' maxima and
        sums."""
        gState = self.slices.mStates[slot, None, tidx, None]
        return cute.make_tensor(gState.iterator, cute.select(gState.layout, mode=[1, 0]))

    # ---- the first scores ----------------------------------------------------------------------------------

    @cute.jit
    def await_turn(self, consumer, barrier: cutlass.Constexpr):
        """Before a consumer's first product: until the one before has its scores. Issued at once, all would
        have them as late as the last, and then exponentiate together."""
        if const_expr(self.config.in_turn):
            if consumer > 0:
                cute.arch.barrier(barrier_id=barrier + consumer - 1, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, consumer, barrier: cutlass.Constexpr):
        """When the first scores are there: let the next consumer begin."""
        if const_expr(self.config.in_turn):
            if consumer < self.consumers - 1:
                cute.arch.barrier_arrive(barrier_id=barrier + consumer, number_of_threads=2 * WARPGROUP)

    # ---- a piece is done -----------------------------------------------------------------------------------

    def await_pieces(self, place, warp):
        """A consumer's warp, beside its last product: wait until the pieces that it adds are there."""
        slot, adds = from_one_word(place[5])
        self.await_left(slot - adds, adds, 1, warp)

    @cute.jit
    def await_left(self, slot, count, waiting, warp):
        """Wait until the pieces of `count` slots from `slot` on have been left. Each lane waits for one. The
        last who does, of so many `waiting`, leaves 0 for the next launch."""
        lane = cute.arch.lane_idx()
        for i in range(lane, count, WARP, unroll=1):
            left = self.left(slot + i, warp)
            there = cute.arch.load(left, Int32, sem="acquire", scope="gpu")
            while there == 0:
                there = cute.arch.load(left, Int32, sem="acquire", scope="gpu")
            if waiting > 1:
                there = cute.arch.atomic_add(left, Int32(1))
            if there == waiting:
                cute.arch.store(left, Int32(0), sem="relaxed", scope="gpu")
        cute.arch.sync_warp()

    @cute.jit
    def join(self, rO, O, row_max, row_sum, place, first_row, tidx, warp):
        """A consumer's warp, when O += P·V is done: add what it is to add, or leave what it has, and say so
        where that is for parts of a sum. rO is O's accumulator, O the same by row. Returns (place, first row)
        of what else is to be stored: nowhere, if the piece is left."""
        (slot, adds), last = from_one_word(place[5]), self.quads
        for r in range_constexpr(OWN_ROWS):
            if sum_of_row(row_sum[r]) == 0.0:  # no key is seen: a maximum of 0 is no score's
                row_max[r] = -Float32.inf
                O[r, None].fill(0.0)  # and not 0·NaN, of a hidden value
        quads = cute.make_tensor(rO.iterator, cute.make_layout((QUAD, last)))
        for i in range(adds, unroll=1):
            self.add_state(quads, row_max, row_sum, self.state(slot - i - 1, tidx))
        if adds == LEAVES:
            gState, about = self.state(slot, tidx), registers(QUAD)
            for r in range_constexpr(OWN_ROWS):
                about[r], about[OWN_ROWS + r] = row_max[r], row_sum[r]
            for i in range_constexpr(last):
                cute.autovec_copy(quads[None, i], gState[None, i])
            cute.autovec_copy(about, gState[None, last])
            if self.slices.parts > 0:
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.store(self.left(slot, warp), Int32(1), sem="release", scope="gpu")
            place, first_row = (Int32(NOWHERE), *place[1:]), Int32(NOWHERE * self.tile_q)
        for r in range_constexpr(OWN_ROWS):
            row_max[r] = finite(row_max[r])
        return place, first_row

    @cute.jit
    def add_state(self, quads, row_max, row_sum, state):
        """Add a piece to a thread's own: O as quads (4, quad), maxima and sums."""
        about, held = registers(QUAD), registers(QUAD, min(self.quads, QUADS_IN_FLIGHT))
        own, other = registers(OWN_ROWS), registers(OWN_ROWS)
        cute.autovec_copy(state[None, self.quads], about)
        for first in range_constexpr(0, self.quads, QUADS_IN_FLIGHT):
            quads_here = range(min(QUADS_IN_FLIGHT, self.quads - first))
            for i in quads_here:
                cute.autovec_copy(state[None, first + i], held[None, i])
            if const_expr(first == 0):
                for r in range_constexpr(OWN_ROWS):
                    largest = cute.arch.fmax(row_max[r], about[r])
                    own[r] = cute.math.exp2(row_max[r] - finite(largest), fastmath=True)
                    other[r] = cute.math.exp2(about[r] - finite(largest), fastmath=True)
                    row_sum[r] = row_sum[r] * own[r] + about[OWN_ROWS + r] * other[r]
                    row_max[r] = largest
            for i in quads_here:
                for j in range(QUAD):  # two columns of either row
                    r = j // 2
                    quads[j, first + i] = quads[j, first + i] * own[r] + held[j, i] * other[r]

    # ---- saying so: a warp of its own, since what is stored takes a microsecond to arrive ------------------

    @cute.jit
    def say_left(self, sLeft, place, tidx, barrier: cutlass.Constexpr):
        """A consumer, behind its first piece: whether it has left that for another's sum."""
        consumer = tidx // WARPGROUP  # not the uniform one: uniform registers run out
        if tidx % WARPGROUP == 0:
            slot, adds = from_one_word(place[5])
            sLeft[consumer] = slot if adds == LEAVES and self.slices.parts == 0 else Int32(LEAVES)
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

    # ---- parts of sums -------------------------------------------------------------------------------------

    def quads_in(self, sK, sV) -> cute.Tensor:
        """(about and quad, piece, thread, 4) in the place of K and V, one behind the other: what each thread
        has copied for itself."""
        place = cute.recast_ptr(sK.iterator, cute.make_swizzle(0, 4, 3), Float32)
        threads = WARPGROUP * self.consumers
        bits = (cute.size(sK) + cute.size(sV)) * sK.element_type.width
        pieces = bits // (2 * threads * QUAD * Float32.width)
        layout = cute.make_ordered_layout((2, pieces, threads, QUAD), order=(3, 2, 1, 0))
        return cute.make_tensor(place, layout)

    @cute.jit
    def make_part(self, place, sQuads, mLSE, end, warp):
        """A consumer's warp: add its rows of a part of a tile's pieces, and store them in O; of the first in
        LSE too. The code is short: it is fetched from memory for one use."""
        part, pieces, slot = place[3], place[4], place[5]
        self.await_left(slot, pieces, self.slices.parts, warp)
        lane = cute.arch.lane_idx()  # what is made of it anew takes no register before
        row, column = warp * WARP_ROWS + lane // LANES, 2 * (lane % LANES)
        row += place[0] * self.tile_q
        each, at_once = self.quads // self.slices.parts, sQuads.shape[1]
        for quad in range(part * each, part * each + each, unroll=1):
            quads, row_max, row_sum = registers(QUAD), registers(OWN_ROWS), registers(OWN_ROWS)
            for x, begin in ((quads, 0.0), (row_max, -Float32.inf), (row_sum, 0.0)):
                x.fill(begin)
            for first in range(0, pieces, at_once, unroll=1):
                count, thread = cutlass.min(at_once, pieces - first), warp * WARP + lane
                self.add_quads(quads, row_max, row_sum, sQuads, slot + first, count, quad, thread)
            for r in range_constexpr(OWN_ROWS):
                total, own = sum_of_row(row_sum[r]), row + ROWS_APART * r
                query, head = self.query_at(own, place)
                there = (own < end) & (query < self.slices.mO.shape[2])
                inverse = 0.0 if total == 0.0 else cute.arch.rcp_approx(total)
                pair = registers(2)
                for c in range_constexpr(2):
                    pair[c] = quads[2 * r + c] * inverse
                self.store_pair(pair, there, (place[2], head, query), QUAD_COLUMNS * quad + column)
                lse = (finite(row_max[r]) + cute.math.log2(total, fastmath=True)) * LN_2
                says = there & (quad + column == 0)
                store_if(says, mLSE[place[2], head, None].iterator + query, lse)

    @cute.jit
    def add_quads(self, quads, row_max, row_sum, sQuads, slot, count, quad, thread):
        """Add a thread's quad of the pieces of `count` slots, all of which come at once."""
        mode = cpasync.LoadCacheMode.GLOBAL  # other SMs have written them
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), Float32, num_bits_per_copy=QUAD * Float32.width)
        for p in range(count, unroll=1):
            state = self.state(slot + p, thread)
            for i, which in enumerate((self.quads, quad)):
                cute.copy(atom, state[None, which], sQuads[i, p, thread, None])
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        largest, own = registers(OWN_ROWS), registers(OWN_ROWS)
        for r in range_constexpr(OWN_ROWS):
            largest[r] = row_max[r]
        for p in range(count, unroll=4):
            for r in range_constexpr(OWN_ROWS):
                largest[r] = cute.arch.fmax(largest[r], sQuads[0, p, thread, r])
        for r in range_constexpr(OWN_ROWS):
            own[r] = cute.math.exp2(row_max[r] - finite(largest[r]), fastmath=True)
            row_max[r], row_sum[r] = largest[r], row_sum[r] * own[r]
            for j in range_constexpr(2 * r, 2 * r + 2):
                quads[j] = quads[j] * own[r]
        for p in range(count, unroll=4):
            about, held = registers(QUAD), registers(QUAD)
            cute.autovec_copy(sQuads[0, p, thread, None], about)
            cute.autovec_copy(sQuads[1, p, thread, None], held)
            for r in range_constexpr(OWN_ROWS):
                factor = cute.math.exp2(about[r] - finite(largest[r]), fastmath=True)
                row_sum[r] = row_sum[r] + about[OWN_ROWS + r] * factor
                for j in range_constexpr(2 * r, 2 * r + 2):
                    quads[j] = quads[j] + held[j] * factor

    @cute.jit
    def store_pair(self, pair, there, at, column):
        """Two columns of a row of O, if that is there."""
        if there & (column < self.slices.mO.shape[3]):
            rounded = cute.make_rmem_tensor(pair.layout, self.dtype)
            rounded.store(pair.load().to(self.dtype))
            to = self.slices.mO[(*at, None)].iterator + column
            cute.arch.store(cute.recast_ptr(to, dtype=Int32).llvm_ptr, cute.recast_tensor(rounded, Int32)[0])
