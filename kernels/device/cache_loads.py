"""The loads of a CTA that attends to a cache: K and V through a ring of stages by TMA, of pages one box each,
and the rows of Q by bulk copies. By one warp, the producer."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..calls_decode import WARPS
from .constants import WARP
from .tma import partition_tma

# L2's policy for what is read once: to go before anything else does (`EVICT_FIRST` of CUTLASS). Pieces and
# counters then stay.
READ_ONCE = 0x12F0000000000000


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

    @property
    def boxes(self) -> int:
        return self.chunk // self.box

    def initialise(self, rings, first: bool) -> None:
        """One lane: make the barriers of the first load, or all others."""
        full_k, full_v, empty, q_full, q_empty = rings
        for i in range(self.stages):
            if first == (i == 0):
                cute.arch.mbarrier_init(full_k + i, 1)
                cute.arch.mbarrier_init(full_v + i, 1)
            if not first:
                cute.arch.mbarrier_init(empty + i, WARPS)
        if not first:
            cute.arch.mbarrier_init(q_full, 1)
            cute.arch.mbarrier_init(q_empty, WARPS)

    @cute.jit
    def page_of(self, first, pages_a_chunk):
        """The page in which chunk `first` of a sequence begins; of boxes smaller than a chunk each is one."""
        page = Int32(0)
        if const_expr(self.paged):
            page = first * self.boxes if const_expr(self.boxes > 1) else first // pages_a_chunk
        return page

    @cute.jit
    def table_window(self, mTable, batch, known, early: cutlass.Constexpr = False):
        """Of each lane one entry of a sequence's page table, from entry `known` on. `early`: before the
        launch before has ended, which may still write it."""
        page = Int32(0)
        if const_expr(self.paged):
            at = known + cute.arch.lane_idx()
            inside = at < mTable.shape[1]
            if const_expr(early):
                inside = inside & (at >= 0)  # what is not a length may lead anywhere
            if inside:
                if const_expr(early):
                    page = unkept(mTable.iterator + cute.crd2idx((batch, at), mTable.layout))
                else:
                    page = mTable[batch, at]
        return page

    @cute.jit
    def find_first(self, mK, mV, page, batch, kv_head, first, per_page):
        """Fetch the first line of what is loaded first of K and of V to L2, so that the way there is known to
        the TLBs. Of a page that may not be what it will be."""
        place, key = batch, first * self.chunk
        if const_expr(self.paged):
            place = cute.arch.shuffle_sync(page, 0)
            key = Int32(0)
            if const_expr(self.boxes == 1):
                key = first % per_page * self.chunk
        if (place >= 0) & (place < mK.shape[0]) & (key >= 0) & (key < mK.shape[2]):
            with cute.arch.elect_one():
                for mX in (mK, mV):
                    line = mX[place, kv_head, key, None].iterator
                    cute.arch.prefetch(line.llvm_ptr, cache_level="L2")

    def inside(self, mK, page, first, boxes):
        """Whether `boxes` boxes of chunk `first`, of which a lane has the pages if there are any, lie in the
        cache, whatever led there."""
        if not self.paged:
            return first * self.chunk < mK.shape[2]
        there = (page >= 0) & (page < mK.shape[0])
        return cute.arch.vote_all_sync(there | (cute.arch.lane_idx() >= boxes))

    @cute.jit
    def drop(self, rings):
        """Wait for what was loaded on a guess, and leave the barriers of the first stage as they were: after
        a phase with the wrong bytes and one without any, the next has the first one's parity. Hazard: no
        warp may look before, and none does, since all wait for Q first, which is loaded after this."""
        for barrier in rings[:2]:
            cute.arch.mbarrier_wait(barrier, 0)
        cute.arch.sync_warp()  # all lanes have seen the first phase end before the second does
        for barrier in rings[:2]:
            expect(barrier, 0)

    def boxes_of(self, length, chunk):
        """Of a chunk with keys, those that are loaded of it."""
        if self.boxes == 1:
            return Int32(1)
        return cutlass.min(self.boxes, cute.ceil_div(length - chunk * self.chunk, self.box))

    @cute.jit
    def parts(self, load_K, mK, sK, load_V, mV, sV, batch, kv_head):
        """Of a sequence and head K and V as partitioned for TMA, if they are not in pages."""
        if const_expr(self.paged):
            return None
        return (
            *partition_tma(load_K, mK[None, None, kv_head, batch], sK),
            *partition_tma(load_V, mV[None, None, kv_head, batch], sV),
        )

    @cute.jit
    def chunk_to(
        self, stage, load_K, mK, sK, load_V, mV, sV, rings, parts, kv_head, chunk, length, per_page, page,
        known, waits: cutlass.Constexpr, begins, early: cutlass.Constexpr = False,
    ):  # fmt: skip
        """K and V of one chunk. `page` is of each lane an entry of the page table, from `known` on. `early`:
        on a guess, when the launch before has ended, from `page` on. This is other code than that of the main
        loop, and not unrolled: both want more uniform registers than there are, and spill."""
        full_k, full_v = rings[:2]
        box_bytes = self.box * self.head_dim * self.kv_bytes
        if const_expr(not self.paged):
            tKgK, tKsK, tVgV, tVsV = parts
            expect(full_k + stage, box_bytes)
            expect(full_v + stage, box_bytes)
            if const_expr(early):
                cute.arch.griddepcontrol_wait()
            elif const_expr(waits):
                if begins:
                    cute.arch.griddepcontrol_wait()
            load_once(load_K, tKgK[None, chunk], tKsK[None, stage], full_k + stage)
            load_once(load_V, tVgV[None, chunk], tVsV[None, stage], full_v + stage)
        else:
            at, inside = self.page_of(chunk, per_page), Int32(0)
            if const_expr(self.boxes == 1):
                inside = chunk % per_page
            boxes = self.boxes_of(length, chunk)
            expect(full_k + stage, boxes * box_bytes)
            expect(full_v + stage, boxes * box_bytes)
            whole = load_K, mK, sK, load_V, mV, sV, rings, stage, kv_head, inside
            if const_expr(early):
                place = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, 0))
                cute.arch.griddepcontrol_wait()
                for b in range(boxes, unroll=1):
                    self.box_to(b, *whole, place)
                    place = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, b + 1))
            else:
                places = [
                    cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, at + b - known))
                    for b in range(self.boxes)
                ]
                for b in range_constexpr(self.boxes):
                    if b < boxes:
                        self.box_to(b, *whole, places[b])

    @cute.jit
    def box_to(self, b, load_K, mK, sK, load_V, mV, sV, rings, stage, kv_head, inside, place):
        """One box of a chunk, of a page."""
        from_k, to_k = partition_tma(load_K, mK[None, None, kv_head, place], sK)
        from_v, to_v = partition_tma(load_V, mV[None, None, kv_head, place], sV)
        to = stage * self.boxes + b
        load_once(load_K, from_k[None, inside], to_k[None, to], rings[0] + stage)
        load_once(load_V, from_v[None, inside], to_v[None, to], rings[1] + stage)

    @cute.jit
    def chunks(
        self, load_K, mK, sK, load_V, mV, sV, mQ, sQ, mTable, rings, batch, kv_head, block, group, first,
        count, length, done, turn, per_page, page, made, waits: cutlass.Constexpr, guessed,
    ):  # fmt: skip
        """K and V of `count` chunks, and behind the first of them Q. `page` is of each lane an entry of the
        page table, from that of the first chunk on; `made` the barrier at which the CTA's are. `waits`: for
        the launch before, when everything else is ready for the first load. `guessed`: whether the CTA's
        first chunk has been loaded already; None where none ever is."""
        _, _, empty, q_full, q_empty = rings
        parts = self.parts(load_K, mK, sK, load_V, mV, sV, batch, kv_head)
        known = self.page_of(first, per_page)
        page_after = self.table_window(mTable, batch, known + WARP)
        for i in range(count, unroll=1):
            stage, phase = (done + i) % self.stages, ((done + i) // self.stages & 1) ^ 1
            if done + i >= self.stages:
                cute.arch.mbarrier_wait(empty + stage, phase)
            if const_expr(self.paged):
                # A chunk's pages are never in two windows of the table.
                if self.page_of(first + i, per_page) >= known + WARP:
                    known += WARP
                    page = page_after
                    page_after = self.table_window(mTable, batch, known + WARP)
            wanted = Boolean(True)
            if const_expr(guessed is not None):
                wanted = (done + i > 0) | (not guessed)
            if wanted:
                self.chunk_to(
                    stage, load_K, mK, sK, load_V, mV, sV, rings, parts, kv_head, first + i, length, per_page,
                    page, known, waits, done + i == 0,
                )  # fmt: skip
            if i == 0:
                if turn == 0:
                    wait_at(made)
                cute.arch.mbarrier_wait(q_empty, (turn & 1) ^ 1)
                self.rows_of_q(mQ, sQ, q_full, batch, kv_head, group, block * self.rows)

    @cute.jit
    def rows_of_q(self, mQ, sQ, q_full, batch, kv_head, group, first_row):
        """Rows of Q, one copy each: row r is of query r / group and head r mod group."""
        rows = cutlass.min(mQ.shape[2] * group.divisor - first_row, self.rows)
        expect(q_full, rows * self.head_dim * 2)
        cute.arch.sync_warp()
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.dtype, num_bits_per_copy=self.head_dim * 16)
        for row in range(cute.arch.lane_idx(), rows, WARP, unroll=1):
            query, head = divmod(first_row + row, group)
            cute.copy(
                atom, mQ[batch, kv_head * group.divisor + head, query, None], sQ[row, None], mbar_ptr=q_full
            )
        cute.arch.sync_warp()


def wait_at(made: tuple[int, int]) -> None:
    """(named barrier, threads)."""
    cute.arch.barrier(barrier_id=made[0], number_of_threads=made[1])


def unkept(place: cute.Pointer) -> Int32:
    """What is there now, past L1: a later plain load finds what will be there then."""
    return cute.arch.load(place.llvm_ptr, Int32, sem="relaxed", scope="gpu")


def load_once(atom, source, target, barrier) -> None:
    """By TMA, what nobody reads again before the next step."""
    cute.copy(atom, source, target, tma_bar_ptr=barrier, cache_policy=Int64(READ_ONCE))


def expect(barrier, size) -> None:
    """One lane: arrive at a barrier that waits for so many bytes besides."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
