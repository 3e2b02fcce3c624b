"""decode: attention of a few new queries to a long cache of keys and values, at the speed of memory.

The idea          A few queries do no more with a key than memory takes to deliver it, so every SM must be
                  loading all the time, and the same amount. All keys of all sequences are one flat list of
                  chunks, and each CTA takes an equal, contiguous slice of it, whichever sequences it cuts
                  through. Who finishes a cut sequence last puts its pieces together, in the same launch.
What changes      against k6: rows are the queries of all heads that share a key head; keys are split among
                  CTAs, and inside of one among warps, each with a softmax of its own, merged at the end; the
                  warps' own tensor-core products (mma.sync, 16 rows) instead of a warpgroup's (64 rows).
What does not     TMA, a ring of stages, a producer warp, the online softmax.
Supports          bf16 and fp16; head_dim 64, 128, 256; any number of queries, of which few are the purpose;
                  GQA and MQA; a length for each sequence, read on the device; keys and values in pages;
                  a causal mask aligned at the bottom right. Row i of a sequence without a visible key has
                  O = 0 and LSE = −∞.
Note              notes/decode.md
"""

import math
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from .device.compiling import ELEMENTS, compile_for_torch
from .device.constants import LN_2, LOG2_E, SMEM_MAX, SMS, VECTOR, WARP, WARPGROUP
from .device.rows import LANES, finite, largest_of_row, sum_of_row
from .device.tma import allocate_tiles, load_atom, partition_tma, row_slices

WARPS = 8  # that compute; one more loads
CONSUMERS = WARPS * WARP
TILE_Q = 16  # rows of a warp's product
GROUP = 16  # keys of a warp's product
CHUNK_BYTES = 16384  # of K, and of V
ROWS = (8, 16, 32, 64, 128)  # of a CTA; what a kernel is compiled for
PIECE = 2  # a CTA's partial results at most: of its first sequence and of its last
HALVES = 2  # rows of a product that a thread has elements of: l / 4 and that + 8


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    CONSUMERS = 1


class Decode:
    """The CTA: 8 warps that compute, then one, the producer, that loads."""

    def __init__(
        self, head_dim: int, dtype: str, rows: int, causal: bool = False, lengths: bool = True,
        box: int = 0, chunk: int = 0, sms: int = SMS, stages: int = 0, lazy: bool = True,
    ):  # fmt: skip
        """`box`: keys that one TMA loads, of one page; 0 where K and V have no pages."""
        self.head_dim, self.dtype, self.rows, self.causal = head_dim, ELEMENTS[dtype], rows, causal
        self.lengths, self.paged, self.sms, self.lazy = lengths or box > 0, box > 0, sms, lazy
        self.chunk = chunk or CHUNK_BYTES // (2 * head_dim)
        self.box = min(box or self.chunk, self.chunk)
        self.boxes = self.chunk // self.box
        self.tiles = max(1, rows // TILE_Q)  # of rows
        self.halves = 1 if rows <= TILE_Q // 2 else HALVES  # rows that count
        self.slices = WARPS // self.tiles  # of keys: that many warps share a tile of rows
        groups = self.chunk // GROUP
        self.teams = max(1, self.slices // groups)  # of warps, that take chunks in turn
        self.own_groups = max(1, groups // self.slices)  # of a chunk, a warp's
        # For the warps to merge: rows of a warp, columns at once.
        self.merge_rows = TILE_Q // HALVES * self.halves
        self.merge_columns = min(head_dim, 128 if self.halves == 1 else 64)
        self.q_stays = head_dim <= 128  # in registers
        # Registers of a thread of the producer's warpgroup and of a consumer, where 168 are too few.
        self.registers = (56, 224) if head_dim == 256 or rows >= 64 else None
        self.threads = CONSUMERS + (WARPGROUP if self.registers else WARP)
        self.stages = stages or (SMEM_MAX - 1024 - self.other_bytes) // self.stage_bytes

    @property
    def stage_bytes(self) -> int:
        return 4 * self.chunk * self.head_dim

    @property
    def other_bytes(self) -> int:
        q = max(self.rows, TILE_Q) * (self.head_dim + VECTOR) * 2
        merge = WARPS * (self.merge_rows * (self.merge_columns + VECTOR) + 2 * TILE_Q) * 4
        return q + merge + 512  # barriers

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, mLengths, mTable, mPart, mPartLSE, mArrived, scale, stream):
        loads = *load_atom(mK, self.box), *load_atom(mV, self.box)
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        mma = cute.make_tiled_mma(op, permutation_mnk=(TILE_Q, GROUP, 16))
        self.kernel(
            mma, *loads, mQ, mO, mLSE, mLengths, mTable, mPart, mPartLSE, mArrived, scale
        ).launch(
            grid=(self.sms, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mma, load_K, mK, load_V, mV, mQ, mO, mLSE, mLengths, mTable, mPart, mPartLSE, mArrived, scale
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        lane = cute.arch.lane_idx()
        if warp_idx == 0:
            cpasync.prefetch_descriptor(load_K)
            cpasync.prefetch_descriptor(load_V)

        smem = SmemAllocator()
        places = self.boxes * self.stages
        sK = allocate_tiles(smem, self.dtype, self.box, self.head_dim, places)  # (key, head_dim, place)
        sV = allocate_tiles(smem, self.dtype, self.box, self.head_dim, places)
        q_rows = max(self.rows, TILE_Q)
        # Rows of Q are padded, so that eight of them lie in different banks.
        q_layout = cute.make_layout((q_rows, self.head_dim), stride=(self.head_dim + VECTOR, 1))
        sQ = smem.allocate_tensor(self.dtype, q_layout, 16)
        merge_shape = WARPS, self.merge_rows, self.merge_columns
        pitch = self.merge_columns + VECTOR
        merge_layout = cute.make_layout(merge_shape, stride=(self.merge_rows * pitch, pitch, 1))
        sO = smem.allocate_tensor(Float32, merge_layout, 16)  # (warp, row, column)
        sStats = smem.allocate_tensor(Float32, cute.make_layout((WARPS, TILE_Q, 2), stride=(32, 2, 1)), 16)
        sLast = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        full_k, full_v, empty = (smem.allocate_array(Int64, self.stages) for _ in range(3))
        q_full, q_empty = smem.allocate_array(Int64, 1), smem.allocate_array(Int64, 1)
        if warp_idx == WARPS:
            with cute.arch.elect_one():
                for i in range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full_k + i, 1)
                    cute.arch.mbarrier_init(full_v + i, 1)
                    cute.arch.mbarrier_init(empty + i, WARPS // self.teams)
                cute.arch.mbarrier_init(q_full, 1)
                cute.arch.mbarrier_init(q_empty, WARPS)
            cute.arch.mbarrier_init_fence()

        # 1. this CTA's slice of the flat list of chunks, and where it begins
        batch_size, heads, seqlen_q, _ = mQ.shape
        kv_heads = mK.shape[2]
        group = heads // kv_heads
        all_rows = seqlen_q * group
        blocks = cute.ceil_div(all_rows, self.rows)
        columns = kv_heads * blocks  # of the flat list: what reads a sequence's keys
        share, at, batch, column, chunk, chunks = self.own_slice(
            mLengths, mK.shape[0], batch_size, columns, cta
        )
        end = at + share
        if const_expr(not self.lengths):
            end = cutlass.min(end, batch_size * columns * chunks)
        cute.arch.sync_threads()

        done = Int32(0)  # chunks that went through the ring
        turn = Int32(0)  # sequences, whose Q
        if warp_idx >= WARPS:
            # 2. the producer
            if const_expr(self.registers is not None):
                cute.arch.setmaxregister_decrease(self.registers[0])
            at = at if warp_idx == WARPS else end  # the other warps of a warpgroup have nothing to do
            while at < end and batch < batch_size:
                length = self.length(mLengths, mK.shape[0], batch)
                n = cutlass.min(chunks - chunk, end - at)
                kv_head, block = column // blocks, column % blocks
                cute.arch.mbarrier_wait(q_empty, (turn & 1) ^ 1)
                first_row = block * self.rows
                rows = cutlass.min(all_rows - first_row, self.rows)
                self.load_q(mQ, sQ, q_full, batch, kv_head * group, group, first_row, rows)
                if length > 0:
                    self.load_kv(
                        load_K, mK, sK, load_V, mV, sV, full_k, full_v, empty, mTable,
                        batch, kv_head, chunk, n, length, done,
                    )  # fmt: skip
                    done += n
                turn += 1
                at, batch, column, chunk, chunks = self.next_segment(
                    mLengths, mK.shape[0], batch_size, columns, at, batch, column, chunk, chunks, n
                )
        else:
            # 3. the consumers
            if const_expr(self.registers is not None):
                cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(
                mma, mQ, mK, mO, mLSE, mLengths, mPart, mPartLSE, mArrived, scale, sQ, sK, sV, sO, sStats, sLast,
                full_k, full_v, empty, q_full, q_empty, share, end, at, batch, column, chunk, chunks,
            )  # fmt: skip

    # ---- who works on what ----------------------------------------------------------------------------------

    @cute.jit
    def length(self, mLengths, seqlen_kv, batch):
        """Keys of a sequence."""
        length = Int32(seqlen_kv)
        if const_expr(self.lengths):
            length = cute.arch.make_warp_uniform(mLengths[batch])
        return length

    @cute.jit
    def chunks_of(self, length):
        """How often a sequence stands in the flat list, for each column: once even if it has no key, since
        somebody must say so."""
        return cutlass.max(1, cute.ceil_div(length, self.chunk))

    @cute.jit
    def own_slice(self, mLengths, seqlen_kv, batch_size, columns, cta):
        """(chunks of a CTA, where its slice begins, and that place as batch, column, chunk; chunks there)."""
        lane = cute.arch.lane_idx()
        if const_expr(not self.lengths):
            chunks = self.chunks_of(Int32(seqlen_kv))
            share = cute.ceil_div(batch_size * columns * chunks, self.sms)
            at = cta * share
            batch, rest = at // (columns * chunks), at % (columns * chunks)
            return share, at, batch, rest // chunks, rest % chunks, chunks
        total = Int32(0)
        for first in range(0, batch_size, WARP, unroll=4):
            total += self.chunks_or_none(mLengths, batch_size, first + lane)
        total = cute.arch.warp_reduction_sum(total)
        share = cute.ceil_div(total * columns, self.sms)
        at = cta * share
        first, before = Int32(0), Int32(0)  # a sequence, and the chunks of those before it
        batch, rest, chunks = Int32(batch_size), Int32(0), Int32(1)
        while first < batch_size:
            own = self.chunks_or_none(mLengths, batch_size, first + lane)
            sum_to = own
            for i in range_constexpr(5):
                other = cute.arch.shuffle_sync_up(sum_to, 1 << i)
                sum_to += other if lane >= (1 << i) else 0
            # The first sequence that ends behind `at`.
            behind = cute.arch.vote_ballot_sync((before + sum_to) * columns > at)
            found = cute.arch.popc((behind & -behind) - 1)  # 32 where there is none
            all_chunks = cute.arch.shuffle_sync(sum_to, WARP - 1)
            source = cutlass.min(found, WARP - 1)
            chunks_there = cute.arch.shuffle_sync(own, source)
            before_there = before + cute.arch.shuffle_sync(sum_to, source) - chunks_there
            before += all_chunks
            if behind != 0:
                batch, chunks, rest = first + found, chunks_there, at - before_there * columns
                first = Int32(batch_size)
            first += WARP
        share, at, batch, rest, chunks = (
            cute.arch.make_warp_uniform(x) for x in (share, at, batch, rest, chunks)
        )
        return share, at, batch, rest // chunks, rest % chunks, chunks

    @cute.jit
    def chunks_or_none(self, mLengths, batch_size, batch):
        chunks = Int32(0)
        if batch < batch_size:
            chunks = self.chunks_of(mLengths[batch])
        return chunks

    @cute.jit
    def next_segment(
        self, mLengths, seqlen_kv, batch_size, columns, at, batch, column, chunk, chunks, n
    ):  # fmt: skip
        """The place behind n more chunks of this sequence and column."""
        at += n
        chunk += n
        if chunk == chunks:
            chunk = Int32(0)
            column += 1
            if column == columns:
                column = Int32(0)
                batch += 1
                if const_expr(self.lengths):
                    if batch < batch_size:
                        chunks = self.chunks_of(self.length(mLengths, seqlen_kv, batch))
        return at, batch, column, chunk, chunks

    # ---- loads ----------------------------------------------------------------------------------------------

    @cute.jit
    def load_q(self, mQ, sQ, q_full, batch, first_head, group, first_row, rows):
        """Rows of Q, one copy each: row r is of query r / group and head r mod group."""
        lane = cute.arch.lane_idx()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_full, rows * self.head_dim * 2)
        cute.arch.sync_warp()
        atom = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), self.dtype, num_bits_per_copy=self.head_dim * 16
        )
        for row in range(lane, rows, WARP, unroll=1):
            query, head = (first_row + row) // group, (first_row + row) % group
            cute.copy(atom, mQ[batch, first_head + head, query, None], sQ[row, None], mbar_ptr=q_full)
        cute.arch.sync_warp()

    @cute.jit
    def load_kv(
        self, load_K, mK, sK, load_V, mV, sV, full_k, full_v, empty, mTable,
        batch, kv_head, chunk, n, length, done,
    ):  # fmt: skip
        box_bytes = self.box * self.head_dim * 2
        lane = cute.arch.lane_idx()
        if const_expr(not self.paged):
            tKgK, tKsK = partition_tma(load_K, mK[None, None, kv_head, batch], sK)
            tVgV, tVsV = partition_tma(load_V, mV[None, None, kv_head, batch], sV)
            for i in range(n, unroll=1):
                stage, phase = (done + i) % self.stages, ((done + i) // self.stages & 1) ^ 1
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full_k + stage, box_bytes)
                    cute.arch.mbarrier_arrive_and_expect_tx(full_v + stage, box_bytes)
                cute.copy(load_K, tKgK[None, chunk + i], tKsK[None, stage], tma_bar_ptr=full_k + stage)
                cute.copy(load_V, tVgV[None, chunk + i], tVsV[None, stage], tma_bar_ptr=full_v + stage)
        else:
            page_size = mK.shape[0]
            pages = cute.ceil_div(length, page_size)  # of the sequence
            first = chunk * self.chunk // page_size  # the page that lane 0 knows
            mPages = mTable[batch, None]
            page = self.pages_from(mPages, first, pages)
            page_after = self.pages_from(mPages, first + WARP, pages)
            for i in range(n, unroll=1):
                stage, phase = (done + i) % self.stages, ((done + i) // self.stages & 1) ^ 1
                key = (chunk + i) * self.chunk
                boxes = cutlass.min(self.boxes, cute.ceil_div(length - key, self.box))
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full_k + stage, boxes * box_bytes)
                    cute.arch.mbarrier_arrive_and_expect_tx(full_v + stage, boxes * box_bytes)
                for b in range(boxes, unroll=1):
                    at = (key + b * self.box) // page_size
                    inside = (key + b * self.box) % page_size // self.box
                    if at >= first + WARP:
                        first += WARP
                        page = page_after
                        page_after = self.pages_from(mPages, first + WARP, pages)
                    this = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, at - first))
                    place = stage * self.boxes + b
                    tKgK, tKsK = partition_tma(load_K, mK[None, None, kv_head, this], sK)
                    tVgV, tVsV = partition_tma(load_V, mV[None, None, kv_head, this], sV)
                    cute.copy(load_K, tKgK[None, inside], tKsK[None, place], tma_bar_ptr=full_k + stage)
                    cute.copy(load_V, tVgV[None, inside], tVsV[None, place], tma_bar_ptr=full_v + stage)

    @cute.jit
    def pages_from(self, mPages, first, pages):
        """Of each lane one entry of a sequence's page table, from `first` on."""
        page = Int32(0)
        if first + cute.arch.lane_idx() < pages:
            page = mPages[first + cute.arch.lane_idx()]
        return page

    # ---- products -------------------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self, mma, mQ, mK, mO, mLSE, mLengths, mPart, mPartLSE, mArrived, scale, sQ, sK, sV, sO, sStats, sLast,
        full_k, full_v, empty, q_full, q_empty, share, end, at, batch, column, chunk, chunks,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        lane = cute.arch.lane_idx()
        batch_size, heads, seqlen_q, _ = mQ.shape
        kv_heads, seqlen_kv = mK.shape[2], mK.shape[0]
        group = heads // kv_heads
        all_rows = seqlen_q * group
        blocks = cute.ceil_div(all_rows, self.rows)
        columns = kv_heads * blocks
        tile, key_slice = warp_idx % self.tiles, warp_idx // self.tiles
        team, own_slice = key_slice // (self.slices // self.teams), key_slice % (self.slices // self.teams)
        scale_log2 = scale * LOG2_E

        thread = mma.get_slice(lane)
        load = warp.LdMatrix8x8x16bOp(False, 4)
        load_t = warp.LdMatrix8x8x16bOp(True, 4)
        copy_q = cute.make_tiled_copy_A(cute.make_copy_atom(load, self.dtype), mma).get_slice(lane)
        copy_k = cute.make_tiled_copy_B(cute.make_copy_atom(load, self.dtype), mma).get_slice(lane)
        copy_v = cute.make_tiled_copy_B(cute.make_copy_atom(load_t, self.dtype), mma).get_slice(lane)
        sQ_tile = cute.local_tile(sQ, (TILE_Q, self.head_dim), (tile, 0))
        sK_groups, sV_groups = row_slices(sK, GROUP), row_slices(sV, GROUP)  # (key, head_dim, group)
        sVt = cute.make_tensor(sV_groups.iterator, cute.select(sV_groups.layout, mode=[1, 0, 2]))
        rQ = mma.make_fragment_A(thread.partition_A(sQ_tile))  # (MMA, 1, MMA_K)
        tXsQ, tXrQ = copy_q.partition_S(sQ_tile), copy_q.retile(rQ)
        rK = mma.make_fragment_B(thread.partition_B(sK_groups[None, None, 0]))  # (MMA, 2, MMA_K)
        rV = mma.make_fragment_B(thread.partition_B(sVt[None, None, 0]))  # (MMA, d / 8, 1)
        tXsK, tXsV = copy_k.partition_S(sK_groups), copy_v.partition_S(sVt)
        tXrK, tXrV = copy_k.retile(rK), copy_v.retile(rV)
        own_keys = GROUP * self.own_groups
        rS = cute.make_rmem_tensor(mma.partition_shape_C((TILE_Q, own_keys)), Float32)
        rP = cute.make_rmem_tensor(rS.layout, self.dtype)
        rO = cute.make_rmem_tensor(mma.partition_shape_C((TILE_Q, self.head_dim)), Float32)
        S, O = by_half(rS), by_half(rO)  # (half, column)
        row_max = cute.make_rmem_tensor(cute.make_layout(HALVES), Float32)
        row_sum = cute.make_rmem_tensor(cute.make_layout(HALVES), Float32)
        limit = cute.make_rmem_tensor(cute.make_layout(HALVES), Int32)

        done, turn = Int32(0), Int32(0)
        while at < end and batch < batch_size:
            length = self.length(mLengths, seqlen_kv, batch)
            n = cutlass.min(chunks - chunk, end - at)
            kv_head, block = column // blocks, column % blocks
            first_row = block * self.rows
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            rO.fill(0.0)
            # The keys that every row of the warp sees, and those that this thread's rows see.
            all_see = Int32(length)
            limit.fill(length)
            if const_expr(self.causal):
                all_see = length - seqlen_q + (first_row + tile * TILE_Q) // group + 1
                for r in range_constexpr(HALVES):
                    own = first_row + tile * TILE_Q + lane // LANES + r * (TILE_Q // 2)
                    limit[r] = cutlass.min(length, length - seqlen_q + own // group + 1)

            cute.arch.mbarrier_wait(q_full, turn & 1)
            if const_expr(self.q_stays):
                cute.copy(copy_q, tXsQ, tXrQ)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(q_empty)

            loaded = n if length > 0 else Int32(0)
            for i in range(team, loaded, self.teams, unroll=1):
                stage, phase = (done + i) % self.stages, (done + i) // self.stages & 1
                key = (chunk + i) * self.chunk + own_slice * own_keys
                first_group = stage * (self.chunk // GROUP) + own_slice * self.own_groups
                cute.arch.mbarrier_wait(full_k + stage, phase)
                rS.fill(0.0)
                for g in range_constexpr(self.own_groups):
                    rS_g = part_of(rS, g, self.own_groups)
                    for k in range_constexpr(self.head_dim // 16):
                        if const_expr(not self.q_stays):
                            cute.copy(copy_q, tXsQ[None, None, k], tXrQ[None, None, k])
                        cute.copy(copy_k, tXsK[None, None, k, first_group + g], tXrK[None, None, k])
                        cute.gemm(mma, rS_g, rQ[None, None, k], rK[None, None, k], rS_g)
                if key + own_keys > all_see:
                    hide(S, limit, key, lane)
                self.softmax(S, O, row_max, row_sum, scale_log2)
                rP.store(rS.load().to(self.dtype))
                cute.arch.mbarrier_wait(full_v + stage, phase)
                if key + own_keys > length:
                    self.blank(sV_groups, first_group, length - key)
                for g in range_constexpr(self.own_groups):
                    rP_g = part_of(rP, g, self.own_groups)
                    rP_a = cute.make_tensor(rP_g.iterator, cute.make_layout(((2, 2, 2), 1)))
                    for c in range_constexpr(self.head_dim // 16):
                        cute.copy(copy_v, tXsV[None, c, 0, first_group + g], tXrV[None, c, 0])
                        rV_c = cute.make_tensor(rV.iterator + c * 8, cute.make_layout(((2, 2), 2), stride=((1, 2), 4)))
                        rO_c = part_of(rO, c, self.head_dim // 16)
                        cute.gemm(mma, rO_c, rP_a, rV_c, rO_c)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty + stage)
            done += loaded
            turn += 1
            if const_expr(not self.q_stays):
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(q_empty)

            # 4. the warps' results are put together; then those of the CTAs
            start = at - chunk  # of this column in the flat list
            first_cta, last_cta = start // share, (start + chunks - 1) // share
            ctas = last_cta - first_cta + 1
            cta, _, _ = cute.arch.block_idx()
            piece = cta * PIECE + (1 if chunk == 0 else 0)
            rows = cutlass.min(all_rows - first_row, self.rows)
            for r in range_constexpr(self.halves):
                row_sum[r] = sum_of_row(row_sum[r])
            cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
            if lane % LANES == 0:
                for r in range_constexpr(self.halves):
                    sStats[warp_idx, lane // LANES + r * (TILE_Q // 2), 0] = row_max[r]
                    sStats[warp_idx, lane // LANES + r * (TILE_Q // 2), 1] = row_sum[r]
            for p in range_constexpr(self.head_dim // self.merge_columns):
                if const_expr(p > 0):
                    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
                self.put_piece(rO, sO, p)
                cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
                vectors = self.merge_columns // 4
                for item in range(tidx, rows * vectors, CONSUMERS, unroll=1):
                    row, vector = item // vectors, item % vectors
                    result, lse = self.merge_warps(sO, sStats, row, vector)
                    column_at = p * vectors + vector
                    if ctas == 1:
                        query, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
                        store_o(mO, result, batch, head, query, column_at, self.dtype)
                        if column_at == 0:
                            mLSE[batch, head, query] = lse * LN_2
                    else:
                        to = cute.local_tile(mPart[piece, row, None], (4,), (column_at,))
                        cute.autovec_copy(result, to)
                        if column_at == 0:
                            mPartLSE[piece, row] = lse
            if ctas > 1:
                arrived = batch * columns + column
                cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
                if tidx == 0:
                    cute.arch.fence_acq_rel_gpu()
                    before = atomic_count(mArrived, arrived)
                    cute.arch.fence_acq_rel_gpu()
                    if before == ctas - 1:
                        mArrived[arrived] = Int32(0)  # for the next launch
                    sLast[0] = before
                cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
                if sLast[0] == ctas - 1:
                    vectors = self.head_dim // 4
                    for item in range(tidx, rows * vectors, CONSUMERS, unroll=1):
                        row, vector = item // vectors, item % vectors
                        result, lse = self.merge_ctas(mPart, mPartLSE, first_cta, ctas, row, vector)
                        query, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
                        store_o(mO, result, batch, head, query, vector, self.dtype)
                        if vector == 0:
                            mLSE[batch, head, query] = lse * LN_2

            at, batch, column, chunk, chunks = self.next_segment(
                mLengths, seqlen_kv, batch_size, columns, at, batch, column, chunk, chunks, n
            )

    @cute.jit
    def softmax(self, S, O, row_max, row_sum, scale_log2):
        """Scores become P, relative to the largest so far; O and the sum follow where that has grown."""
        factor = cute.make_rmem_tensor(cute.make_layout(HALVES), Float32)
        grown = Boolean(False)
        for r in range_constexpr(self.halves):
            largest = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            largest = largest_of_row(Float32(largest)) * scale_log2
            new_max = cute.arch.fmax(row_max[r], largest)
            grown = grown | (new_max > row_max[r])
            factor[r] = cute.math.exp2(row_max[r] - finite(new_max), fastmath=True)
            row_max[r] = new_max
        if cute.arch.vote_any_sync(grown):
            for r in range_constexpr(self.halves):
                O[r, None].store(O[r, None].load() * factor[r])
                row_sum[r] = row_sum[r] * factor[r]
        for r in range_constexpr(self.halves):
            p = cute.math.exp2(S[r, None].load() * scale_log2 - finite(row_max[r]), fastmath=True)
            S[r, None].store(p)
            row_sum[r] = p.reduce(cute.ReductionOp.ADD, row_sum[r], 0)

    @cute.jit
    def blank(self, sV_groups, first_group, visible):
        """Zero the rows of V behind the length: P is 0 there, but 0 · NaN is NaN."""
        lane = cute.arch.lane_idx()
        vectors = self.head_dim // VECTOR
        rows = WARP // vectors
        zero = cute.make_rmem_tensor(cute.make_layout(VECTOR), self.dtype)
        zero.fill(0)
        for g in range_constexpr(self.own_groups):
            for i in range_constexpr(GROUP // rows):
                row = i * rows + lane // vectors
                if g * GROUP + row >= visible:
                    to = cute.local_tile(sV_groups[row, None, first_group + g], (VECTOR,), (lane % vectors,))
                    cute.autovec_copy(zero, to)
        cute.arch.fence_view_async_shared()  # before the TMA writes there again
        cute.arch.sync_warp()

    # ---- merging --------------------------------------------------------------------------------------------

    @cute.jit
    def put_piece(self, rO, sO, piece: cutlass.Constexpr):
        """Columns of this warp's O to shared memory, two at a time."""
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx, lane = tidx // WARP, tidx % WARP
        groups = self.merge_columns // 8
        pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        for r in range_constexpr(self.halves):
            row = lane // LANES + r * (TILE_Q // 2)
            for j in range_constexpr(groups):
                for c in range_constexpr(2):
                    pair[c] = rO[(c, r), 0, piece * groups + j]
                to = cute.local_tile(sO[warp_idx, row, None], (2,), (j * LANES + lane % LANES,))
                cute.autovec_copy(pair, to)

    @cute.jit
    def merge_warps(self, sO, sStats, row, vector):
        """Four columns of a row of O, of all warps that share it, and its log₂ of the sum."""
        tile, row = row // TILE_Q, row % TILE_Q
        largest = -Float32.inf
        for s in range_constexpr(self.slices):
            largest = cute.arch.fmax(largest, sStats[s * self.tiles + tile, row, 0])
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        part = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        result.fill(0.0)
        total = Float32(0.0)
        for s in range_constexpr(self.slices):
            w = s * self.tiles + tile
            weight = cute.math.exp2(sStats[w, row, 0] - finite(largest), fastmath=True)
            total += weight * sStats[w, row, 1]
            cute.autovec_copy(cute.local_tile(sO[w, row, None], (4,), (vector,)), part)
            for i in range_constexpr(4):
                result[i] += weight * part[i]
        inverse = 0.0 if total == 0.0 else 1.0 / total
        for i in range_constexpr(4):
            result[i] = result[i] * inverse
        return result, largest + cute.math.log2(total, fastmath=True)

    @cute.jit
    def merge_ctas(self, mPart, mPartLSE, first_cta, ctas, row, vector):
        """Four columns of a row of O, of all CTAs that have a piece of it, and its log₂ of the sum."""
        batch = 4  # of pieces, loaded at once
        largest, total = -Float32.inf, Float32(0.0)
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        result.fill(0.0)
        parts = cute.make_rmem_tensor(cute.make_layout((4, batch)), Float32)
        lses = cute.make_rmem_tensor(cute.make_layout(batch), Float32)
        for first in range(0, ctas, batch, unroll=1):
            for j in range_constexpr(batch):
                i = cutlass.min(first + j, ctas - 1)
                piece = (first_cta + i) * PIECE + (1 if i == 0 else 0)
                cute.autovec_copy(cute.local_tile(mPart[piece, row, None], (4,), (vector,)), parts[None, j])
                lse = mPartLSE[piece, row]
                lses[j] = lse if first + j < ctas else -Float32.inf
            new = largest
            for j in range_constexpr(batch):
                new = cute.arch.fmax(new, lses[j])
            factor = cute.math.exp2(largest - finite(new), fastmath=True)
            total = total * factor
            for i in range_constexpr(4):
                result[i] = result[i] * factor
            for j in range_constexpr(batch):
                weight = cute.math.exp2(lses[j] - finite(new), fastmath=True)
                total += weight
                for i in range_constexpr(4):
                    result[i] += weight * parts[i, j]
            largest = new
        inverse = 0.0 if total == 0.0 else 1.0 / total
        for i in range_constexpr(4):
            result[i] = result[i] * inverse
        return result, largest + cute.math.log2(total, fastmath=True)


def atomic_count(mArrived, at):
    return cute.arch.atomic_add((mArrived.iterator + at).llvm_ptr, Int32(1), sem="acq_rel", scope="gpu")


@cute.jit
def store_o(mO, result, batch, head, query, vector, dtype: cutlass.Constexpr):
    rounded = cute.make_rmem_tensor(cute.make_layout(4), dtype)
    rounded.store(result.load().to(dtype))
    cute.autovec_copy(rounded, cute.local_tile(mO[batch, head, query, None], (4,), (vector,)))


def by_half(fragment: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2), 1, N/8) as (half, (2, N/8)): a thread's two rows."""
    ((pair, half), _, groups), ((s_pair, s_half), _, s_groups) = fragment.shape, fragment.layout.stride
    layout = cute.make_layout((half, (pair, groups)), stride=(s_half, (s_pair, s_groups)))
    return cute.make_tensor(fragment.iterator, layout)


def part_of(fragment: cute.Tensor, part: int, parts: int) -> cute.Tensor:
    """An accumulator ((2, 2), 1, N/8) cut along N."""
    (own, one, groups) = fragment.shape
    layout = cute.make_layout((own, one, groups // parts), stride=fragment.layout.stride)
    return cute.make_tensor(fragment.iterator + part * cute.size(layout), layout)


@cute.jit
def hide(S, limit, key, lane):
    """−∞ for the keys from each row's limit on."""
    columns = cute.size(S, mode=[1])
    for r in range_constexpr(HALVES):
        for c in range_constexpr(columns):
            at = key + c // 2 * 8 + c % 2 + lane % LANES * 2
            S[r, c] = S[r, c] if at < limit[r] else -Float32.inf


def compile_decode(kernel: Decode, page_table: bool | None = None) -> object:
    """Stand-ins and a compile."""
    d, element = kernel.head_dim, kernel.dtype
    batch, heads, seqlen_q = (cute.sym_int() for _ in range(3))

    def rows(shape, dtype=element):
        strides = tuple(cute.sym_int64(divisibility=VECTOR) for _ in shape[:-1])
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)

    q, o = rows((batch, heads, seqlen_q, d)), rows((batch, heads, seqlen_q, d))
    kv = (cute.sym_int() if kernel.paged else batch, cute.sym_int(), cute.sym_int(), d)
    k, v = rows(kv), rows(kv)
    lse = make_fake_tensor(Float32, (batch, heads, seqlen_q), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    lengths = make_fake_tensor(Int32, (batch,), (1,), assumed_align=4) if kernel.lengths else None
    table = None
    if kernel.paged:
        table = make_fake_tensor(Int32, (batch, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
    part = make_fake_tensor(
        Float32, (PIECE * kernel.sms, kernel.rows, d), (kernel.rows * d, d, 1), assumed_align=16
    )
    part_lse = make_fake_tensor(Float32, (PIECE * kernel.sms, kernel.rows), (kernel.rows, 1), assumed_align=4)
    arrived = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)
    return compile_for_torch(kernel, q, k, v, o, lse, lengths, table, part, part_lse, arrived, Float32(1.0))
