"""The list of a packed batch's tiles: a kernel of one CTA makes it of lengths that only the GPU knows, those
with the longest loops first; the main kernel, launched behind it with PDL, fetches from it, and finds a CTA's
first tile itself meanwhile, if sequences are few (`ListTiles.look_up`)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .constants import WARP
from .limits import FINAL_LISTED, LISTED
from .masks import Mask

THREADS = 512  # of the one CTA that lists tiles
LIST_WARPS = THREADS // WARP
CLASSES = 128  # of sequences, by the length of their tiles' loops: four for each power of two
SHARED_QUERIES = 64  # of a sequence, at most, whose heads share a tile: a consumer's
PER_THREAD = CLASSES * LIST_WARPS // THREADS


def locate_listed(tile, heads, mList, locate):
    """What the list says of the tile-th tile: (block, head, start_q, seqlen_q, start_kv, seqlen_kv).

    Tiles of one sequence and all its heads follow each other; which comes when among them, `locate(inside,
    blocks, heads, seqlen_kv)` says.
    """
    row = cutlass.min(1 + tile // heads, mList.shape[0] - 1)  # behind the last tile nobody reads what it says
    record = [mList[row, i] for i in range(LISTED)]
    first, blocks, start_q, seqlen_q, start_kv, seqlen_kv = record[1:7]
    block, head = one_of_final(tile, heads, blocks, *locate(tile - first * heads, blocks, heads, seqlen_kv))
    return block, head, start_q, seqlen_q, start_kv, seqlen_kv


@cute.jit
def one_of_final(tile, heads, blocks, block, head):
    """(block, head), or, of one of the final tiles, which one it is itself."""
    if blocks < 0:
        block, head = -1 - blocks, tile % heads
    return block, head


class ListTiles:
    """The kernel that lists tiles of `rows` queries, or of keys with `of_keys`.

    Row 0 of the list has their number, of one head; row 1 + i what is known of tile i: (sequence, first,
    blocks, start_q, seqlen_q, start_kv, seqlen_kv, place), where `first` is the first tile of its sequence
    and `blocks` how many it has; `place` is where its queries begin in scratch that has whole tiles of
    `padded` queries of each sequence, in such tiles: no two sequences meet there, and nobody adds up lengths.
    Sequences go by the length of the loop over the other side, longest first, in classes a quarter of a power
    of two wide, and in a class as they come: a counting sort whose result does not depend on who is first. A
    sequence's tiles stay together, since they share its keys in L2.

    With `mask` the final tiles, as many of each head as `final` says, are listed one by one, longest first:
    what is fetched last is then short. In the place of `blocks` they have −1 − their own number.

    With `shared_keys` sequences of up to 64 queries and so many keys come behind all others, a row each, in a
    class of their own: their heads share tiles (`shared_tiles`). Row 0 says how many rows come before them.

    Warp w takes the w-th share of the sequences, 32 at a time: once to count tiles by class, then, when it is
    known where a warp's tiles of a class begin, to write them.
    """

    def __init__(
        self,
        rows: int,
        of_keys: bool = False,
        padded: int = 1,
        mask: Mask | None = None,
        shared_keys: int = 0,
    ):
        self.rows, self.of_keys, self.padded, self.mask = rows, of_keys, padded, mask
        self.shared_keys = shared_keys

    @cute.jit
    def __call__(self, mList, mCuQ, mCuKV, mUsedQ, mUsedKV, which_used, total_q, total_kv, stream, final=0):
        """mList int32 (1 + tiles, 8) with room for total // rows + sequences tiles; cumulative lengths int32
        (sequences + 1,), used ones (sequences,); of `which_used` bit 0 says that mUsedQ counts, bit 1 that
        mUsedKV does. What lies behind `total_q` or `total_kv` is no sequence's."""
        self.list_tiles(mList, mCuQ, mCuKV, mUsedQ, mUsedKV, which_used, total_q, total_kv, final).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def list_tiles(self, mList, mCuQ, mCuKV, mUsedQ, mUsedKV, which_used, total_q, total_kv, final):
        cute.arch.griddepcontrol_launch_dependents()
        self.fill(mList, (mCuQ, mCuKV, mUsedQ, mUsedKV, which_used, total_q, total_kv), final)

    @cute.jit
    def fill(self, mList, given, final=0):
        """One CTA: write the list."""
        mCuQ = given[0]
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        sequences = mCuQ.shape[0] - 1
        share = cute.ceil_div(sequences, LIST_WARPS)
        begin, end = warp * share, cutlass.min((warp + 1) * share, sequences)
        own_sequence, own_blocks = self.read(begin + lane, end, given)  # on its way meanwhile
        smem = SmemAllocator()
        # Tiles by class and warp, longest class first; then where those of this class and warp begin.
        sTiles = smem.allocate_tensor(Int32, cute.make_layout((LIST_WARPS, CLASSES)), 16)
        sWarps = smem.allocate_tensor(Int32, cute.make_layout(LIST_WARPS), 16)
        if const_expr(self.shared_keys):
            sAlone = smem.allocate_tensor(Int32, cute.make_layout(1), 16)  # rows before those that are shared
        for i in range_constexpr(PER_THREAD):
            sTiles[i * THREADS + thread] = Int32(0)
        cute.arch.sync_threads()

        self.count(sTiles, warp, own_sequence, own_blocks)
        for first in range(begin + WARP, end, WARP, unroll=1):
            sequence, blocks = self.read(first + lane, end, given)
            self.count(sTiles, warp, sequence, blocks)
        cute.arch.sync_threads()

        # Exclusive sums, of PER_THREAD neighbours in a thread, of 32 threads in a warp, of all warps.
        own = [sTiles[thread * PER_THREAD + i] for i in range(PER_THREAD)]
        total = own[0]
        for i in range_constexpr(1, PER_THREAD):
            total += own[i]
        up_to = sum_up_to(total)
        if lane == WARP - 1:
            sWarps[warp] = up_to
        cute.arch.sync_threads()
        of_warp = sWarps[cutlass.min(lane, LIST_WARPS - 1)]
        before_warps = sum_up_to(of_warp)
        before = cute.arch.shuffle_sync(before_warps - of_warp, warp) + up_to - total
        if thread == LIST_WARPS - 1:
            mList[0, 0] = before_warps
        if const_expr(self.shared_keys):
            if thread == (CLASSES - 1) * LIST_WARPS // PER_THREAD:  # whose first number is the last class's
                sAlone[0] = before
                mList[0, 1] = before
        for i in range_constexpr(PER_THREAD):
            sTiles[thread * PER_THREAD + i] = before
            before += own[i]
        cute.arch.sync_threads()

        record = self.record_of(sTiles, warp, begin + lane, end, own_sequence, own_blocks)
        if const_expr(self.mask is not None):
            tiles = cute.arch.shuffle_sync(before_warps, LIST_WARPS - 1)
            if const_expr(self.shared_keys):
                tiles = sAlone[0]
            first_final = cutlass.max(0, tiles - final) if sequences <= THREADS else tiles
            sFinal = smem.allocate_tensor(Int32, cute.make_layout(FINAL_LISTED), 16)
            record = self.list_final(mList, sFinal, record, first_final, tiles)
        self.write(mList, record)
        for first in range(begin + WARP, end, WARP, unroll=1):
            sequence, blocks = self.read(first + lane, end, given)
            self.write(mList, self.record_of(sTiles, warp, first + lane, end, sequence, blocks))

    @cute.jit
    def count(self, sTiles, warp, sequence, blocks):
        place = cute.crd2idx((warp, self.class_of(sequence)), sTiles.layout)
        if blocks > 0:
            cute.arch.atomic_add((sTiles.iterator + place).llvm_ptr, blocks)

    @cute.jit
    def record_of(self, sTiles, warp, index, end, sequence, blocks):
        """A warp: what is to be listed of its lanes' sequences, behind those of the same class before."""
        lane, own_class = cute.arch.lane_idx(), self.class_of(sequence)
        # Tiles of this class in lanes before this one, and in all.
        before, together = Int32(0), Int32(0)
        for i in range(cutlass.min(WARP, end - index + lane), unroll=1):  # of those there are
            theirs, others = cute.arch.shuffle_sync(own_class, i), cute.arch.shuffle_sync(blocks, i)
            others = others if theirs == own_class else 0
            before += others if i < lane else 0
            together += others
        begins = sTiles[warp, own_class]
        cute.arch.sync_warp()
        sTiles[warp, own_class] = begins + together  # of all lanes of a class the same
        place = (sequence[0] + index * self.padded) // self.padded
        return [index, begins + before, blocks, *sequence, place]

    @cute.jit
    def list_final(self, mList, sFinal, record, first_final, tiles):
        """List the tiles of sequences that begin from first_final on; the records, of these without tiles."""
        thread, _, _ = cute.arch.thread_idx()
        first, blocks = record[1], record[2]
        if thread < FINAL_LISTED:
            sFinal[thread] = Int32(-1)  # what belongs to a sequence that begins before
        cute.arch.sync_threads()
        found = (blocks > 0) & (first >= first_final)
        if const_expr(self.shared_keys):
            found = found & (first < tiles)
        # Sequences of one tile, of which there may be many, all at once; others one after the other.
        several = cute.arch.vote_ballot_sync(found & (blocks > 1))
        if found & (blocks == 1):
            sFinal[first - first_final] = self.loop_of(0, *record[3:7])
        left = several
        while left != 0:
            theirs, left = next_of(left, record)
            for block in range(cute.arch.lane_idx(), theirs[2], WARP, unroll=1):
                sFinal[theirs[1] + block - first_final] = self.loop_of(block, *theirs[3:7])
        cute.arch.sync_threads()
        if found & (blocks == 1):
            self.write_final(mList, sFinal, record, 0, first_final, tiles)
        left = several
        while left != 0:
            theirs, left = next_of(left, record)
            for block in range(cute.arch.lane_idx(), theirs[2], WARP, unroll=1):
                self.write_final(mList, sFinal, theirs, block, first_final, tiles)
        apart = first < first_final
        if const_expr(self.shared_keys):
            apart = apart | (first >= tiles)
        return [*record[:2], blocks if apart else 0, *record[3:]]

    @cute.jit
    def write_final(self, mList, sFinal, record, block, first_final, tiles):
        """A thread: one of the final tiles, behind those with longer loops."""
        index = record[1] + block - first_final
        own, place = sFinal[index], first_final
        for i in range(tiles - first_final, unroll=4):
            other = sFinal[i]
            place += 1 if (other > own) | (other < 0) | ((other == own) & (i < index)) else 0
        one = [*record[:2], -1 - block, *record[3:]]
        for i in range_constexpr(LISTED):
            mList[1 + place, i] = one[i]

    @cute.jit
    def loop_of(self, block, start_q, seqlen_q, start_kv, seqlen_kv):
        """How long a tile's loop over the other side is, in rows; 0 of windows, which are about the same."""
        length = Int32(0)
        if const_expr(not self.mask.hides_first and self.of_keys):
            length = seqlen_q - cutlass.max(0, self.mask.first_query(block * self.rows, seqlen_q, seqlen_kv))
        elif const_expr(not self.mask.hides_first):
            last = self.mask.last_key((block + 1) * self.rows, seqlen_q, seqlen_kv)
            length = cutlass.min(seqlen_kv, last)
        return cutlass.max(0, length)

    @cute.jit
    def read(self, sequence, end, given):
        """((start_q, length_q, start_kv, length_kv), tiles) of a sequence, none behind `end`."""
        mCuQ, mCuKV, mUsedQ, mUsedKV, which_used, total_q, total_kv = given
        start_q = length_q = start_kv = length_kv = Int32(0)
        if sequence < end:
            # Loads without branches: all on their way at once.
            of_q = mCuQ[sequence], mCuQ[sequence + 1], mUsedQ[sequence]
            of_kv = mCuKV[sequence], mCuKV[sequence + 1], mUsedKV[sequence]
            start_q, length_q = rows_used(*of_q, which_used & 1, total_q)
            start_kv, length_kv = rows_used(*of_kv, which_used & 2, total_kv)
        blocks = cute.ceil_div(length_kv if const_expr(self.of_keys) else length_q, self.rows)
        return (start_q, length_q, start_kv, length_kv), blocks

    @cute.jit
    def look_up(self, tile, heads, ctas_for_heads, given, final):
        """One warp, while the list is made: what it will say of the tile-th tile of all heads, as (whether
        that is known, whether heads share it, which one it is of those or of its sequence's, how many tiles
        of each head its sequence has, start_q, seqlen_q, start_kv, seqlen_kv).

        It is known of up to 32 sequences, a lane each, if they are of the class that comes first, and not
        among the `final` tiles of each head, which have an order of their own.
        """
        known = shared = cutlass.Boolean(False)
        inside = blocks = start_q = seqlen_q = start_kv = seqlen_kv = Int32(0)
        sequences = given[0].shape[0] - 1
        if sequences <= WARP:
            sequence, tiles = self.read(cute.arch.lane_idx(), sequences, given)
            own_class = Int32(self.class_of(sequence))
            first_class = cute.arch.warp_redux_sync(own_class if tiles > 0 else CLASSES, "min")
            alone, row = tiles, tile // heads
            if const_expr(self.shared_keys):
                alone = tiles if own_class < CLASSES - 1 else 0
                shared = first_class == CLASSES - 1
                row = tile // ctas_for_heads if shared else row
            first_final = cute.arch.warp_redux_sync(alone, "add") - final
            tiles = tiles if own_class == first_class else 0
            up_to = sum_up_to(tiles)
            here = cute.arch.vote_ballot_sync((up_to - tiles <= row) & (row < up_to))
            lane = cute.arch.popc(here - 1) % WARP  # of the one bit; any, if there is none
            first, blocks = [cute.arch.shuffle_sync(x, lane) for x in (up_to - tiles, tiles)]
            start_q, seqlen_q, start_kv, seqlen_kv = [cute.arch.shuffle_sync(x, lane) for x in sequence]
            inside = tile if shared else tile - first * heads
            known = (here != 0) & (shared | (first < first_final))
        return known, shared, inside, blocks, start_q, seqlen_q, start_kv, seqlen_kv

    @cute.jit
    def class_of(self, sequence):
        """0 for the longest loops: their lengths' logarithm, to a quarter of a power of two."""
        length = sequence[1] if const_expr(self.of_keys) else sequence[3]
        length = cutlass.min(length, (1 << 29) - 1)
        power = WARP - 1 - cute.arch.clz(length | 1)
        found = Int32(CLASSES - 1) - (4 * power + ((length << 2) >> power))
        if const_expr(self.shared_keys):
            found = Int32(found) - 1  # of the longest it is 7
            if (sequence[1] <= SHARED_QUERIES) & (sequence[3] <= self.shared_keys):
                found = Int32(CLASSES - 1)
        return found

    @cute.jit
    def write(self, mList, record):
        """A warp: each lane's record, as often as its sequence has tiles."""
        blocks, first = record[2], record[1]
        if blocks == 1:
            for i in range_constexpr(LISTED):
                mList[1 + first, i] = record[i]
        # Of the others one after the other, a tile for each lane.
        left = cute.arch.vote_ballot_sync(blocks > 1)
        while left != 0:
            theirs, left = next_of(left, record)
            for block in range(cute.arch.lane_idx(), theirs[2], WARP, unroll=1):
                for i in range_constexpr(LISTED):
                    mList[1 + theirs[1] + block, i] = theirs[i]


@cute.jit
def next_of(lanes, record):
    """A warp: the record of the first of these lanes, and the lanes without it."""
    lane = cute.arch.popc((lanes & -lanes) - 1)
    return [cute.arch.shuffle_sync(x, lane) for x in record], lanes & (lanes - 1)


class ListBoth:
    """The kernel that lists tiles of `queries` queries and tiles of `keys` keys, a CTA each, for scratch with
    whole tiles of so many queries."""

    def __init__(self, queries: int, keys: int):
        self.of_queries = ListTiles(queries, padded=queries)
        self.of_keys = ListTiles(keys, of_keys=True, padded=queries)

    @cute.jit
    def __call__(self, mListQ, mListKV, sequences, total_q, total_kv, stream):
        """Arguments as `ListTiles` takes them; `sequences` are those from mCuQ to which_used."""
        self.list_both(mListQ, mListKV, *sequences, total_q, total_kv).launch(
            grid=(2, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def list_both(self, mListQ, mListKV, mCuQ, mCuKV, mUsedQ, mUsedKV, which_used, total_q, total_kv):
        cute.arch.griddepcontrol_launch_dependents()
        given = mCuQ, mCuKV, mUsedQ, mUsedKV, which_used, total_q, total_kv
        cta, _, _ = cute.arch.block_idx()
        if cta == 0:
            self.of_queries.fill(mListQ, given)
        else:
            self.of_keys.fill(mListKV, given)


@cute.jit
def rows_used(start, end, used, counts, total):
    """(first row, rows) of a sequence, of which, if that `counts`, `used` are. What cu_seqlens say of rows
    that the tensor does not have, or with an end before the beginning, is no row."""
    start = cutlass.min(cutlass.max(start, 0), total)
    length = cutlass.min(end, total) - start
    length = cutlass.max(0, cutlass.min(length, used if counts != 0 else length))
    return start, length


@cute.jit
def sum_up_to(value):
    """Of each lane the sum of `value` up to its own."""
    for i in range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        value += other if cute.arch.lane_idx() >= (1 << i) else 0
    return value
