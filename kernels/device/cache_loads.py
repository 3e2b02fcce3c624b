"""The loads of a CTA that attends to a cache, by one warp, the producer: K and V through a ring of stages by
TMA, of pages one box each, and the rows of Q by bulk copies."""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..calls_decode import WARPS
from .constants import WARP
from .flat_list import Division, FlatList, Work
from .tma import partition_tma

# L2's policy for what is read once: to go before anything else does (`EVICT_FIRST` of CUTLASS). Pieces and
# counters then stay.
READ_ONCE = 0x12F0000000000000

CONSUMER_THREADS = WARPS * WARP


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0  # sync_threads, which nobody calls
    FIRST_MADE = 1  # the mbarriers of the first load
    OTHERS_MADE = 2
    CONSUMERS = 3


@dataclass(frozen=True)
class Inputs:
    """What a launch reads. What its options leave out is None."""

    mQ: cute.Tensor  # (batch, head, query, head_dim)
    mK: cute.Tensor  # (batch or page, kv head, key, head_dim)
    mV: cute.Tensor
    mLengths: cute.Tensor | None  # (batch,)
    mTable: cute.Tensor | None  # pages (batch, place in the sequence)
    mNewK: cute.Tensor | None  # (batch, kv head, key, head_dim)
    mNewV: cute.Tensor | None
    mKScale: cute.Tensor | None  # (batch, kv head)
    mVScale: cute.Tensor | None
    load_K: cute.CopyAtom  # by TMA, of a box
    tmaK: cute.Tensor
    load_V: cute.CopyAtom
    tmaV: cute.Tensor
    added: Int32 | int  # new keys of each sequence
    left: Int32 | None  # keys that a query sees before its own place
    group: cute.FastDivmodDivisorV2  # heads of a key head
    blocks: cute.FastDivmodDivisorV2  # of a CTA's rows, that the rows of a key head are
    per_page: cute.FastDivmodDivisorV2 | None  # chunks of a page
    division: Division


@dataclass(frozen=True)
class Ring:
    """What the producer fills in shared memory, and its mbarriers."""

    sK: cute.Tensor  # (key, head_dim, box)
    sV: cute.Tensor
    sQ: cute.Tensor  # (row, head_dim)
    full_k: cute.Pointer  # one a stage
    full_v: cute.Pointer
    empty: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer


@dataclass(frozen=True)
class CacheLoads:
    """Chunks of `chunk` keys, loaded in `boxes` of `box` keys each, through `stages` stages."""

    head_dim: int
    rows: int  # of Q
    dtype: type  # of Q
    kv_bytes: int  # of an element of K
    chunk: int
    box: int
    stages: int
    paged: bool
    list: FlatList
    pdl: bool
    early_load: bool

    @property
    def boxes(self) -> int:
        return self.chunk // self.box

    @property
    def guesses(self) -> bool:
        """Whether a CTA looks at the lengths before the launch before has ended, and then whether they are
        still the same."""
        return self.pdl and self.list.lengths

    @property
    def loads_on_guess(self) -> bool:
        """Whether it also loads its first keys and values before it knows. Twice the TMA instructions of rows
        of 512 bytes are more than there are uniform registers for, and spill."""
        return self.guesses and self.early_load and self.head_dim <= 128

    def work(self, x: Inputs, seqlen_q: Int32, seqlen_kv: Int32) -> Work:
        """`seqlen_kv`: of a page, if there are pages."""
        return Work(x.mLengths, x.mQ.shape[0], seqlen_kv, x.added, seqlen_q, x.left, x.division)

    def initialise(self, ring: Ring, first: bool) -> None:
        """One lane: make the barriers of the first load, or all others."""
        for i in range(self.stages):
            if first == (i == 0):
                cute.arch.mbarrier_init(ring.full_k + i, 1)
                cute.arch.mbarrier_init(ring.full_v + i, 1)
            if not first:
                cute.arch.mbarrier_init(ring.empty + i, WARPS)
        if not first:
            cute.arch.mbarrier_init(ring.q_full, 1)
            cute.arch.mbarrier_init(ring.q_empty, WARPS)

    def wait_for_inputs(self) -> None:
        """Until the launch before has ended, nothing is written in global memory, and nothing that is read
        counts: it may have made anything of it, lengths included, and may be reading scratch."""
        if self.pdl:
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def produce(self, x: Inputs, ring: Ring, work: Work):
        """As far ahead as the ring has room, across the ends of sequences."""
        with cute.arch.elect_one():
            self.initialise(ring, first=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=Barrier.FIRST_MADE, number_of_threads=CONSUMER_THREADS + WARP)
        if const_expr(self.list.ctas > 1):
            cute.arch.cluster_arrive_relaxed()

        # While the launch before ends: where the slice is if that leaves the lengths as they are, and the way
        # to its first keys. Lengths and pages may be anything yet: what they lead to is fetched, if it is
        # there, and not looked at.
        seen, lanes_place, guessed = None, None, None
        if const_expr(self.guesses):
            lanes_place = self.list.lanes_place(work)
            seen = unkept(lanes_place)
        if const_expr(self.loads_on_guess):
            guessed = Boolean(False)
        mine, _, at, end, batch, columns, entry, entries = self.list.own_slice(work, seen)
        n, first, count, length = Int32(1), Int32(-1), Int32(0), Int32(0)
        kv_head, block, page, entry_place = Int32(0), Int32(0), Int32(0), None
        if const_expr(self.pdl):
            if (at < end) & (batch < work.batch_size):
                if const_expr(self.guesses):
                    length = cute.arch.shuffle_sync(seen, batch) + work.added
                else:
                    length = self.list.length(work, batch)
                n, first, count = self.list.segment(work, entry, entries, end - at, length)
                first = cutlass.max(0, first)
                kv_head, block = divmod(columns * work.division.together.divisor + mine, x.blocks)
            if const_expr(self.paged):
                entry_place = self.entry_place(x, batch, first, lanes_place)
                page = unkept(entry_place)
            if first >= 0:
                self.prefetch_first(x, page, batch, kv_head, first)
                if const_expr(self.loads_on_guess):
                    inside = self.inside(x, page, first, self.boxes_of(length, first))
                    guessed = (count > 0) & (work.batch_size <= WARP) & inside
        # The launch before ends, and what is read counts. The first chunk is loaded from where the slice was
        # before, without waiting for lengths and pages to be read again; if one has changed, it is dropped.
        # Memory has nothing else to do until the next loads, so whatever of them is known already is kept.
        known = first >= 0
        if const_expr(self.guesses):
            now, page_now = Int32(0), Int32(0)
            if const_expr(self.loads_on_guess):
                if guessed:
                    now, page_now = self.load_on_guess(
                        x, ring, batch, kv_head, first, length, page, lanes_place, entry_place
                    )
                else:
                    now, page_now = self.read_again(lanes_place, entry_place)
            else:
                now, page_now = self.read_again(lanes_place, entry_place)
            same = self.list.unchanged(work, seen, now)
            if const_expr(self.paged):
                same = same & cute.arch.vote_all_sync(page_now == page)
            if not same:
                mine, _, at, end, batch, columns, entry, entries = self.list.own_slice(work)
                if const_expr(self.loads_on_guess):
                    if guessed:
                        self.drop(ring)
                    guessed = Boolean(False)
            known = known & same

        done, turn = Int32(0), Int32(0)  # chunks that went through the ring; sequences, whose Q did
        while at < end:
            if not known:
                length = self.list.length(work, batch)
                n, first, count = self.list.segment(work, entry, entries, end - at, length)
                kv_head, block = divmod(columns * work.division.together.divisor + mine, x.blocks)
                page = self.table_window(x, batch, self.page_of(x, first))
            known = Boolean(False)
            if count > 0:
                self.chunks(x, ring, batch, kv_head, block, first, count, length, done, turn, page, guessed)
                done += count
                turn += 1
            at, batch, columns, entry, entries = self.list.advance(
                work, at, end, batch, columns, entry, entries, n
            )
        if turn == 0:
            wait_for_others()
        if const_expr(self.list.ctas > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def page_of(self, x, first):
        """The page in which chunk `first` of a sequence begins; of boxes smaller than a chunk each is one."""
        page = Int32(0)
        if const_expr(self.paged):
            page = first * self.boxes if const_expr(self.boxes > 1) else first // x.per_page
        return page

    @cute.jit
    def table_window(self, x, batch, begin):
        """Of each lane one entry of a sequence's page table, from entry `begin` on."""
        page = Int32(0)
        if const_expr(self.paged):
            at = begin + cute.arch.lane_idx()
            if at < x.mTable.shape[1]:
                page = x.mTable[batch, at]
        return page

    @cute.jit
    def entry_place(self, x, batch, first, otherwise):
        """Where the entry is that a lane has of `table_window` at chunk `first`, which may lead anywhere.
        Lanes without one read `otherwise`, a number behind which no key is, so that nothing has to ask."""
        place, at = otherwise.toint(), self.page_of(x, first) + cute.arch.lane_idx()
        if (first >= 0) & (at >= 0) & (at < x.mTable.shape[1]):
            place = (x.mTable.iterator + cute.crd2idx((batch, at), x.mTable.layout)).toint()
        return cute.make_ptr(Int32, place, cute.AddressSpace.gmem, assumed_align=4)

    @cute.jit
    def prefetch_first(self, x, page, batch, kv_head, first):
        """Fetch the first line of what is loaded first of K and of V to L2, so that the way there is known to
        the TLBs. Of a page that may not be what it will be."""
        place, key = batch, first * self.chunk
        if const_expr(self.paged):
            place, key = cute.arch.shuffle_sync(page, 0), self.inside_page(x, first) * self.chunk
        if (place >= 0) & (place < x.mK.shape[0]) & (key >= 0) & (key < x.mK.shape[2]):
            with cute.arch.elect_one():
                for mX in (x.mK, x.mV):
                    line = mX[place, kv_head, key, None].iterator
                    cute.arch.prefetch(line.llvm_ptr, cache_level="L2")

    def inside(self, x, page, first, boxes):
        """Whether `boxes` boxes of chunk `first`, of which a lane has the pages if there are any, lie in the
        cache, whatever led there."""
        if not self.paged:
            return first * self.chunk < x.mK.shape[2]
        there = (page >= 0) & (page < x.mK.shape[0])
        return cute.arch.vote_all_sync(there | (cute.arch.lane_idx() >= boxes))

    @cute.jit
    def drop(self, ring):
        """Wait for what was loaded on a guess, and leave the barriers of the first stage as they were: after
        a phase with the wrong bytes and one without any, the next has the first one's parity. Hazard: no
        warp may look before, and none does, since all wait for Q first, which is loaded after this."""
        for barrier in (ring.full_k, ring.full_v):
            cute.arch.mbarrier_wait(barrier, 0)
        cute.arch.sync_warp()  # all lanes have seen the first phase end before the second does
        for barrier in (ring.full_k, ring.full_v):
            expect(barrier, 0)

    def boxes_of(self, length, chunk):
        """Of a chunk with keys, those that are loaded of it."""
        if self.boxes == 1:
            return Int32(1)
        return cutlass.min(self.boxes, cute.ceil_div(length - chunk * self.chunk, self.box))

    def inside_page(self, x, chunk):
        """Which chunk of its page a chunk is."""
        return chunk % x.per_page if self.boxes == 1 else Int32(0)

    def expect_boxes(self, ring, stage, boxes):
        """The producer's arrival for a chunk of so many, with their bytes."""
        for barrier in (ring.full_k, ring.full_v):
            expect(barrier + stage, boxes * (self.box * self.head_dim * self.kv_bytes))

    @cute.jit
    def parts(self, x, ring, batch, kv_head):
        """Of a sequence and head K and V as partitioned for TMA, if they are not in pages."""
        if const_expr(self.paged):
            return None
        return (
            *partition_tma(x.load_K, x.tmaK[None, None, kv_head, batch], ring.sK),
            *partition_tma(x.load_V, x.tmaV[None, None, kv_head, batch], ring.sV),
        )

    @cute.jit
    def read_again(self, lanes_place, entry_place):
        """When the launch before has ended, of each lane a length and an entry of the page table."""
        self.wait_for_inputs()
        now, page_now = kept(lanes_place), Int32(0)
        if const_expr(self.paged):
            page_now = kept(entry_place)
        return now, page_now

    @cute.jit
    def load_on_guess(self, x, ring, batch, kv_head, chunk, length, page, lanes_place, entry_place):
        """`read_again`, and right behind it the first chunk into the first stage: with the reads behind the
        loads, pages of 16 are 0.2 µs slower. This is other code than that of the main loop, and not unrolled:
        both want more uniform registers than there are, and spill."""
        parts, boxes = self.parts(x, ring, batch, kv_head), self.boxes_of(length, chunk)
        self.expect_boxes(ring, 0, boxes)
        if const_expr(not self.paged):
            now, page_now = self.read_again(lanes_place, entry_place)
            self.whole_to(x, ring, 0, parts, chunk)
        else:
            inside = self.inside_page(x, chunk)
            place = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, 0))
            now, page_now = self.read_again(lanes_place, entry_place)
            for b in range(boxes, unroll=1):
                self.box_to(x, ring, Int32(0), kv_head, inside, b, place)
                place = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, b + 1))
        return now, page_now

    @cute.jit
    def chunk_to(
        self, x, ring, stage, parts, kv_head, chunk, length, page, begin, waits: cutlass.Constexpr, is_first
    ):
        """K and V of one chunk. `page` is of each lane an entry of the page table, from `begin` on. `waits`:
        at the CTA's first load, which `is_first` says, the launch before is waited for."""
        boxes = self.boxes_of(length, chunk)
        self.expect_boxes(ring, stage, boxes)
        if const_expr(not self.paged):
            if const_expr(waits):
                if is_first:
                    cute.arch.griddepcontrol_wait()
            self.whole_to(x, ring, stage, parts, chunk)
        else:
            at, inside = self.page_of(x, chunk), self.inside_page(x, chunk)
            places = [
                cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, at + b - begin))
                for b in range(self.boxes)
            ]
            for b in range_constexpr(self.boxes):
                if b < boxes:
                    self.box_to(x, ring, stage, kv_head, inside, b, places[b])

    def whole_to(self, x, ring, stage, parts, chunk):
        """A chunk that has no pages."""
        tKgK, tKsK, tVgV, tVsV = parts
        load_once(x.load_K, tKgK[None, chunk], tKsK[None, stage], ring.full_k + stage)
        load_once(x.load_V, tVgV[None, chunk], tVsV[None, stage], ring.full_v + stage)

    @cute.jit
    def box_to(self, x, ring, stage, kv_head, inside, b, place):
        """One box of a chunk, of a page."""
        from_k, to_k = partition_tma(x.load_K, x.tmaK[None, None, kv_head, place], ring.sK)
        from_v, to_v = partition_tma(x.load_V, x.tmaV[None, None, kv_head, place], ring.sV)
        to = stage * self.boxes + b
        load_once(x.load_K, from_k[None, inside], to_k[None, to], ring.full_k + stage)
        load_once(x.load_V, from_v[None, inside], to_v[None, to], ring.full_v + stage)

    @cute.jit
    def chunks(self, x, ring, batch, kv_head, block, first, count, length, done, turn, page, guessed):
        """K and V of `count` chunks, and behind the first of them Q. `page` is of each lane an entry of the
        page table, from that of the first chunk on; `guessed` whether the CTA's first chunk has been loaded
        already, None where none ever is."""
        parts = self.parts(x, ring, batch, kv_head)
        begin, page_after = self.page_of(x, first), Int32(0)
        for i in range(count, unroll=1):
            stage, phase = (done + i) % self.stages, ((done + i) // self.stages & 1) ^ 1
            if done + i >= self.stages:
                cute.arch.mbarrier_wait(ring.empty + stage, phase)
            if const_expr(self.paged):
                # A chunk's pages are never in two windows of the table.
                if self.page_of(x, first + i) >= begin + WARP:
                    begin += WARP
                    page = page_after
                    page_after = self.table_window(x, batch, begin + WARP)
            wanted = Boolean(True)
            if const_expr(guessed is not None):
                wanted = (done + i > 0) | (not guessed)
            if wanted:
                # For the launch before it waits when everything else is ready for the first load.
                waits = self.pdl and not self.list.lengths
                self.chunk_to(
                    x, ring, stage, parts, kv_head, first + i, length, page, begin, waits, done + i == 0
                )
            if i == 0:
                if turn == 0:
                    wait_for_others()
                cute.arch.mbarrier_wait(ring.q_empty, (turn & 1) ^ 1)
                self.rows_of_q(x, ring, batch, kv_head, block * self.rows)
            if const_expr(self.paged):
                # Not with the first chunk, which would wait for it; a window has the pages of two at least.
                if i == 1:
                    page_after = self.table_window(x, batch, begin + WARP)

    @cute.jit
    def rows_of_q(self, x, ring, batch, kv_head, first_row):
        """Rows of Q, one copy each: row r is of query r / group and head r mod group."""
        rows = cutlass.min(x.mQ.shape[2] * x.group.divisor - first_row, self.rows)
        expect(ring.q_full, rows * self.head_dim * 2)
        cute.arch.sync_warp()
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.dtype, num_bits_per_copy=self.head_dim * 16)
        for row in range(cute.arch.lane_idx(), rows, WARP, unroll=1):
            query, head = divmod(first_row + row, x.group)
            source = x.mQ[batch, kv_head * x.group.divisor + head, query, None]
            cute.copy(atom, source, ring.sQ[row, None], mbar_ptr=ring.q_full)
        cute.arch.sync_warp()


def wait_for_others() -> None:
    """Until the mbarriers are made that the first load does without."""
    cute.arch.barrier(barrier_id=Barrier.OTHERS_MADE, number_of_threads=2 * WARP)


def unkept(place: cute.Pointer) -> Int32:
    """What is there now, past L1: a later plain load finds what will be there then."""
    return cute.arch.load(place.llvm_ptr, Int32, sem="relaxed", scope="gpu")


def kept(place: cute.Pointer) -> Int32:
    """What is there now, by a plain load, which L1 keeps."""
    return cute.arch.load(place.llvm_ptr, Int32)


def load_once(atom, source, target, barrier) -> None:
    """By TMA, what nobody reads again before the next step."""
    cute.copy(atom, source, target, tma_bar_ptr=barrier, cache_policy=Int64(READ_ONCE))


def expect(barrier, size) -> None:
    """One lane: arrive at a barrier that waits for so many bytes besides."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
