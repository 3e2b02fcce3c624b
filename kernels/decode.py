"""decode: attention of a few new queries to a long cache of keys and values, at the speed of memory.

The idea          A few queries do no more with a key than memory takes to deliver it, so every SM must be
                  loading all the time, and the same amount. All keys of all sequences are one flat list of
                  chunks, and each CTA takes an equal, contiguous slice of it, whichever sequences it cuts
                  through. Who finishes a cut sequence last puts its pieces together, in the same launch.
What changes      against k6: rows are the queries of all heads that share a key head; keys are split among
                  CTAs, and inside of one among warps, each with a softmax of its own, merged at the end; the
                  warps' own tensor-core products (mma.sync, 16 rows) instead of a warpgroup's (64 rows).
What does not     TMA, a ring of stages, a producer warp, the online softmax.
Supports          bf16 and fp16, caches in e4m3 too; head_dim 64, 128, 256; any number of queries, of which
                  few are the purpose; GQA and MQA; a length for each sequence, read on the device; keys and
                  values in pages; new ones, stored by the launch; a causal mask aligned at the bottom right,
                  a window to the left; bits that do not depend on the batch. A row without a visible key has
                  O = 0 and LSE = −∞.
Where to read     device/flat_list.py (slices), cache_loads.py (the producer), warp_products.py, cache_rows.py
                  (rows that a warp changes), merging.py and clusters.py (pieces put together).
Note              notes/decode.md
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from .calls_decode import CHUNK_BYTES, PIECES, ROWS, WARPS, refuse_decode
from .contract import Problem, Stage
from .device.cache_loads import CONSUMER_THREADS, Barrier, CacheLoads, Inputs, Ring, kept, unkept
from .device.cache_rows import append, blank
from .device.compiling import ELEMENTS, compile_for_torch
from .device.constants import LOG2_E, SMEM_MAX, SMS, VECTOR, WARP, WARPGROUP
from .device.flat_list import Division, FlatList
from .device.merging import Merging, Outputs, Place, Shared
from .device.rows import LANES, finite, largest_of_row
from .device.tma import allocate_tiles, load_atom
from .device.warp_products import GROUP, HALVES, TILE_Q, by_half, hide, part_of, warp_products

RING = 3  # stages: 96 KB of K and V on their way to each SM. More take no less time (notes/decode_log.md)

STAGES = (
    Stage(
        "decode",
        "a few queries to a cache of keys and values",
        "split keys, combined in the same launch; pages, lengths on the device, FP8 caches",
        "k6",
        direction="decode",
        model="decode",
        rounds_p=True,
    ),
)


class Decode:
    """The CTA: 8 warps that compute, then one, the producer, that loads.

    barrier, how often         who arrives, how many                     who waits
    K, V full, stages each     the producer, 1, and the TMA's bytes      all 8 warps
    empty, stages              all 8 warps                               the producer
    Q full, 1                  the producer, 1, and the rows' bytes      all 8 warps
    Q empty, 1                 all 8 warps                               the producer
    sent, 2, in clusters       one thread, and the bytes of all CTAs     warps that put them together
    Barrier.FIRST_MADE         the producer                              the 8 warps
    Barrier.OTHERS_MADE        warp 0                                    the producer
    Barrier.CONSUMERS          the 8 warps                               the same
    """

    def __init__(
        self, head_dim: int, dtype: str, rows: int, causal: bool = False, lengths: bool = True,
        box: int = 0, eight_bits: bool = False, window: bool = False, appends: bool = False, unit: int = 0,
        chunk: int = 0, sms: int = SMS, stages: int = RING, pdl: bool = True, cluster: int = 1,
        early_load: bool = True,
    ):  # fmt: skip
        """`box`: keys that one TMA loads, all of one page; 0 where K and V have no pages. `unit`: chunks that
        are a piece of a sequence, whatever else is in the batch; 0 for as many as a CTA's slice has. `pdl`:
        the launch begins while the one before it in the stream ends, and waits for it before it reads.
        `cluster`: CTAs that share a slice of the list, and so every sequence of it. `early_load`: of a cache
        with lengths the first keys and values are loaded before it is known that they are the first."""
        assert rows in ROWS, "rows that a kernel is made for"
        self.head_dim, self.dtype, self.rows, self.causal = head_dim, ELEMENTS[dtype], rows, causal
        self.eight_bits, self.paged, self.appends, self.window = eight_bits, box > 0, appends, window
        self.kv_dtype = Float8E4M3FN if eight_bits else self.dtype
        self.product_dtype = Float16 if eight_bits else self.dtype  # which has all values of e4m3
        self.kv_bytes = 1 if eight_bits else 2
        self.chunk = chunk or CHUNK_BYTES // (self.kv_bytes * head_dim)  # keys
        self.box = min(box or self.chunk, self.chunk)
        self.unit, self.sms, self.pdl = unit, sms, pdl
        self.cluster = cluster
        self.list = FlatList(self.chunk, unit, lengths or self.paged, appends, window, cluster)
        self.tiles = max(1, rows // TILE_Q)  # of 16 rows
        self.halves = 1 if rows < TILE_Q else HALVES  # rows of a thread that count
        self.slices = WARPS // self.tiles  # of keys: that many warps share a tile of rows
        groups = self.chunk // GROUP
        self.teams = max(1, self.slices // groups)  # of warps, that take chunks in turn
        self.own_groups = max(1, groups // self.slices)  # of a chunk, a warp's
        self.merging = Merging(head_dim, self.dtype, rows, eight_bits, unit, cluster)
        self.keep_q = head_dim <= 128  # in registers
        # Of a thread of the producer's warpgroup and of a consumer, where 168 are too few.
        few = head_dim <= 128 and rows < TILE_Q and not (self.list.lengths or window)
        self.registers = None if few else (56, 224)
        self.threads = CONSUMER_THREADS + (WARPGROUP if self.registers else WARP)
        assert stages * self.stage_bytes + self.other_bytes <= SMEM_MAX - 1024, "shared memory"
        self.stages = stages
        self.loads = CacheLoads(
            head_dim, rows, self.dtype, self.kv_bytes, self.chunk, self.box, self.stages, self.paged,
            self.list, pdl, early_load,
        )  # fmt: skip

    @property
    def stage_bytes(self) -> int:
        return 2 * self.chunk * self.head_dim * self.kv_bytes

    @property
    def other_bytes(self) -> int:
        q = max(self.rows, TILE_Q) * (self.head_dim + VECTOR) * 2
        return q + self.merging.smem_bytes + 512  # and barriers

    @cute.jit
    def __call__(
        self, mQ, mK, mV, mO, mLSE, mLengths, mTable, mNewK, mNewV, mKScale, mVScale, mPart, mPartLSE,
        mArrived, together, scale, left, stream,
    ):  # fmt: skip
        """Tensors are (batch or page, seqlen, heads, head_dim); what options leave out is None."""
        mQ, mK, mV, mO, mNewK, mNewV = (heads_first(mX) for mX in (mQ, mK, mV, mO, mNewK, mNewV))
        loads = *load_atom(mK, self.box), *load_atom(mV, self.box)
        # What is the same for all CTAs is computed here, divisors included.
        batch, heads, seqlen_q, _ = mQ.shape
        group = heads // mK.shape[1]
        blocks = cute.ceil_div(seqlen_q * group, self.rows)
        column_groups = mK.shape[1] * blocks // together
        teams = self.sms // self.cluster // together
        entries = Int32(1)
        if const_expr(not self.list.lengths):
            added = mNewK.shape[2] if const_expr(self.appends) else 0
            chunks = self.list.chunks_of(Int32(mK.shape[2]) + added, seqlen_q, left, added)
            entries = self.list.entries_of(chunks)
        share = cutlass.max(1, cute.ceil_div(batch * column_groups * entries, teams))
        divisor = cute.FastDivmodDivisorV2
        per_page = divisor(cutlass.max(1, mK.shape[2] // self.chunk)) if const_expr(self.paged) else None
        sizes = (
            divisor(together),
            teams,
            column_groups,
            divisor(entries),
            divisor(column_groups * entries),
            share,
        )
        self.kernel(
            divisor(group), divisor(blocks), per_page, *sizes, *loads, mQ, mK, mV, mO, mLSE, mLengths, mTable,
            mNewK, mNewV, mKScale, mVScale, mPart, mPartLSE, mArrived, scale, left,
        ).launch(
            grid=(self.sms // self.cluster * self.cluster, 1, 1), block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None, min_blocks_per_mp=1,
            use_pdl=self.pdl, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, group, blocks, per_page, together, teams, column_groups, entries, of_sequence, share,
        load_K, tmaK, load_V, tmaV, mQ, mK, mV, mO, mLSE, mLengths, mTable,
        mNewK, mNewV, mKScale, mVScale, mPart, mPartLSE, mArrived, scale, left,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        if warp_idx == WARPS:
            cpasync.prefetch_descriptor(load_K)
            cpasync.prefetch_descriptor(load_V)
        if const_expr(self.pdl):
            # The next launch gets SMs as CTAs of this one end; it too waits for what is before it.
            cute.arch.griddepcontrol_launch_dependents()
        smem = SmemAllocator()
        tiles = smem, self.kv_dtype, self.box, self.head_dim, self.loads.boxes * self.stages
        sK, sV = allocate_tiles(*tiles), allocate_tiles(*tiles)  # (key, head_dim, box)
        # Rows of Q are padded, so that eight of them lie in different banks.
        q_shape = max(self.rows, TILE_Q), self.head_dim
        sQ = smem.allocate_tensor(
            self.dtype, cute.make_layout(q_shape, stride=(self.head_dim + VECTOR, 1)), 16
        )
        sO, sStats = self.merging.allocate(smem)
        full_k = smem.allocate_array(Int64, 3 * self.stages + 2)
        full_v, empty, q_full = (full_k + i * self.stages for i in (1, 2, 3))
        ring = Ring(sK, sV, sQ, full_k, full_v, empty, q_full, q_full + 1)
        sent = self.merging.exchange.allocate(smem) if const_expr(self.cluster > 1) else None
        shared = Shared(sO, sStats, sent)

        # 1. the problem
        # `consume` reads the two lengths again: taken from here, ptxas allocates other registers (it was not
        # timed; the machine code is that of the record).
        seqlens = mQ.shape[2], mK.shape[2]
        added = mNewK.shape[2] if const_expr(self.appends) else 0
        inputs = Inputs(
            mQ, mK, mV, mLengths, mTable, mNewK, mNewV, mKScale, mVScale, load_K, tmaK, load_V, tmaV, added,
            left, group, blocks, per_page,
            Division(together, teams, column_groups, entries, of_sequence, share),
        )  # fmt: skip
        outputs = Outputs(mO, mLSE, mPart, mPartLSE, mArrived)
        if warp_idx >= WARPS:
            # 2. the producer
            if const_expr(self.registers is not None):
                cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_idx == WARPS:
                self.loads.produce(inputs, ring, self.loads.work(inputs, *seqlens))
        else:
            if const_expr(self.registers is not None):
                cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(inputs, outputs, ring, shared, scale)

    @cute.jit
    def make_barriers(self, warp_idx, ring: Ring, shared: Shared):
        """What the 8 warps begin with: warp 0 makes the barriers that the first load does without, and all
        wait for those that the producer makes before it begins that load."""
        if warp_idx == 0:
            with cute.arch.elect_one():
                self.loads.initialise(ring, first=False)
                if const_expr(self.cluster > 1):
                    self.merging.exchange.initialise(shared.sent)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=Barrier.OTHERS_MADE, number_of_threads=2 * WARP)
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
        cute.arch.barrier(barrier_id=Barrier.FIRST_MADE, number_of_threads=CONSUMER_THREADS + WARP)

    @cute.jit
    def consume(self, inputs: Inputs, outputs: Outputs, ring: Ring, shared: Shared, scale: Float32):
        """One of the 8 warps, to the end of the CTA's slice."""
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx, lane = cute.arch.make_warp_uniform(tidx // WARP), cute.arch.lane_idx()
        self.make_barriers(warp_idx, ring, shared)
        work = self.loads.work(inputs, inputs.mQ.shape[2], inputs.mK.shape[2])
        group, together = inputs.group, work.division.together.divisor
        all_rows = work.seqlen_q * group.divisor
        seen = None
        if const_expr(self.loads.guesses):
            lanes_place = self.list.lanes_place(work)
            seen = unkept(lanes_place)
        mine, share, at, end, batch, columns, entry, entries = self.list.own_slice(work, seen)
        self.loads.wait_for_inputs()
        if const_expr(self.loads.guesses):
            if not self.list.unchanged(work, seen, kept(lanes_place)):
                mine, share, at, end, batch, columns, entry, entries = self.list.own_slice(work)
        tile, key_slice = warp_idx % self.tiles, warp_idx // self.tiles
        team_slices = self.slices // self.teams
        team, own_slice = key_slice // team_slices, key_slice % team_slices

        own_keys = GROUP * self.own_groups
        sQ_tile = cute.local_tile(ring.sQ, (TILE_Q, self.head_dim), (tile, 0))
        x, sK_groups, sV_groups = warp_products(
            self.product_dtype, sQ_tile, ring.sK, ring.sV, self.eight_bits, self.keep_q
        )
        rS = cute.make_rmem_tensor(x.mma.partition_shape_C((TILE_Q, own_keys)), Float32)
        rP = cute.make_rmem_tensor(rS.layout, self.product_dtype)
        rO = cute.make_rmem_tensor(x.mma.partition_shape_C((TILE_Q, self.head_dim)), Float32)
        S, O = by_half(rS), by_half(rO)  # (half, column)
        row_max, row_sum = (cute.make_rmem_tensor(cute.make_layout(HALVES), Float32) for _ in range(2))
        limit, low = (cute.make_rmem_tensor(cute.make_layout(HALVES), Int32) for _ in range(2))

        done, turn, visit = Int32(0), Int32(0), Int32(0)
        while at < end:
            length = self.list.length(work, batch)
            n, first, count = self.list.segment(work, entry, entries, end - at, length)
            column = columns * together + mine
            kv_head, block = divmod(column, inputs.blocks)
            first_row = block * self.rows
            # Where the result goes: `pieces` of CTAs in this place of consecutive teams, or of entries
            start = at - entry  # of these columns in the flat list
            first_piece, pieces, piece = start, entries, at * together + mine
            if const_expr(self.unit == 0):
                first_piece = start // share
                pieces = (start + entries - 1) // share - first_piece + 1
                piece = cute.arch.block_idx()[0] // self.cluster * PIECES + (1 if entry == 0 else 0)
            rows, first_head = cutlass.min(all_rows - first_row, self.rows), kv_head * group.divisor
            own_row = first_row + tile * TILE_Q  # the warp's first
            scale_log2 = scale * LOG2_E
            if const_expr(self.eight_bits):
                scale_log2 = scale_log2 * inputs.mKScale[batch, kv_head]
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            rO.fill(0.0)
            # Keys below `all_see` and from `all_from` on are seen by all rows of the warp; `limit` and `low`
            # are the same of this thread's rows.
            all_see, all_from = Int32(length), Int32(0)
            limit.fill(length)
            low.fill(0)
            if const_expr(self.causal or self.window):
                before = length - work.seqlen_q  # the key at the place of query 0
                if const_expr(self.causal):
                    all_see = before + own_row // group + 1
                if const_expr(self.window):
                    all_from = before + (own_row + TILE_Q - 1) // group - work.left
                for r in range_constexpr(HALVES):
                    query = (own_row + lane // LANES + r * (TILE_Q // HALVES)) // group
                    if const_expr(self.causal):
                        limit[r] = cutlass.min(length, before + query + 1)
                    if const_expr(self.window):
                        low[r] = before + query - work.left

            if count > 0:
                cute.arch.mbarrier_wait(ring.q_full, turn & 1)
                if const_expr(self.keep_q):
                    x.load_q()
                    arrive(ring.q_empty)
            # 3. main loop
            for i in range(count, unroll=1):
                stage, phase = (done + i) % self.stages, (done + i) // self.stages & 1
                cute.arch.mbarrier_wait(ring.full_k + stage, phase)
                # Hazard: a warp waits for the chunks of other teams too. It would else be a round of the ring
                # ahead of a load that is still under way, and a barrier's phase is one bit.
                if i % self.teams == team:
                    key = (first + i) * self.chunk + own_slice * own_keys
                    own_group = stage * (self.chunk // GROUP) + own_slice * self.own_groups
                    if const_expr(self.appends):
                        if key + own_keys > length - work.added:
                            cute.arch.mbarrier_wait(ring.full_v + stage, phase)
                            append(
                                inputs, sK_groups, sV_groups, batch, kv_head, key, own_group,
                                length - work.added, work.added, self.own_groups,
                            )  # fmt: skip
                    rS.fill(0.0)
                    for g in range_constexpr(self.own_groups):
                        x.multiply_qk(part_of(rS, g, self.own_groups), own_group + g)
                    if (key + own_keys > all_see) | (key < all_from):
                        hide(S, limit, low, key, self.window)
                    self.softmax(S, O, row_max, row_sum, scale_log2)
                    rP.store(rS.load().to(self.product_dtype))
                    cute.arch.mbarrier_wait(ring.full_v + stage, phase)
                    if key + own_keys > length:
                        blank(sV_groups, own_group, length - key, self.own_groups)
                    for g in range_constexpr(self.own_groups):
                        x.multiply_pv(rO, part_of(rP, g, self.own_groups), own_group + g)
                else:
                    cute.arch.mbarrier_wait(ring.full_v + stage, phase)
                arrive(ring.empty + stage)
            if count > 0:
                done += count
                turn += 1
                if const_expr(not self.keep_q):
                    arrive(ring.q_empty)

            # 4. the warps' results are put together, in a cluster the CTAs'; then, by who comes last, pieces
            place = Place(batch, first_head, first_row, group, rows, piece, pieces)
            value_scale = inputs.mVScale[batch, kv_head] if const_expr(self.eight_bits) else Float32(1.0)
            if const_expr(self.cluster > 1):
                if visit == 0:
                    cute.arch.cluster_wait()  # all its CTAs have begun, and their barriers are made
            self.merging.merge_warps(outputs, shared, place, rO, row_max, row_sum, value_scale, visit)
            if const_expr(self.cluster > 1):
                self.merging.merge_cluster(
                    outputs, shared, place, batch * work.division.column_groups * together + column,
                    first_piece * together + mine, together, visit,
                )  # fmt: skip
                visit += 1
            elif place.pieces > 1:
                self.merging.merge_pieces(
                    outputs, place, batch * work.division.column_groups * together + column,
                    first_piece * together + mine, together,
                )  # fmt: skip
            at, batch, columns, entry, entries = self.list.advance(
                work, at, end, batch, columns, entry, entries, n
            )
        if const_expr(self.cluster > 1):
            if visit == 0:
                cute.arch.cluster_wait()

    @cute.jit
    def softmax(self, S, O, row_max, row_sum, scale_log2):
        """Scores become P, relative to the largest so far; O and the sum follow where that has grown."""
        factor = cute.make_rmem_tensor(cute.make_layout(HALVES), Float32)
        grown = Boolean(False)
        for r in range_constexpr(self.halves):
            largest = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            new_max = cute.arch.fmax(row_max[r], largest_of_row(Float32(largest)) * scale_log2)
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


def heads_first(mX: cute.Tensor | None) -> cute.Tensor | None:
    """(batch, seqlen, heads, head_dim) as (batch, heads, seqlen, head_dim)."""
    if mX is None:
        return None
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[0, 2, 1, 3]))


def arrive(barrier) -> None:
    """One lane, when all of its warp are here."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def supports(problem: Problem) -> str | None:
    """Why the kernel refuses the problem, or None."""
    return refuse_decode(problem)


def compile_kernel(problem: Problem, **options: object) -> object:
    """Needs no tensors and no GPU. Of the problem head_dim, mask and dtype are compiled in; `options` are
    Decode's, of which `calls_decode.options_of` makes those of a call."""
    return compile_decode(Decode(problem.head_dim, problem.dtype, causal=problem.causal, **options))


def compile_decode(kernel: Decode) -> object:
    """The kernel with tensors of any extents."""
    d, element, of_kv = kernel.head_dim, kernel.dtype, kernel.kv_dtype
    batch, heads, kv_heads, seqlen_q, added, pieces = (cute.sym_int() for _ in range(6))

    def rows(dtype, *shape):
        strides = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape)
        return make_fake_tensor(dtype, (*shape, d), (*strides, 1), assumed_align=16)

    def plain(dtype, *shape, last=1):
        strides = tuple(cute.sym_int64() for _ in shape[1:])
        return make_fake_tensor(dtype, shape, (*strides, last), assumed_align=4)

    q, o = (rows(element, batch, seqlen_q, heads) for _ in range(2))
    places = cute.sym_int() if kernel.paged else batch
    seqlen_kv = cute.sym_int()
    k, v = (rows(of_kv, places, seqlen_kv, kv_heads) for _ in range(2))
    lse = plain(Float32, batch, heads, seqlen_q)
    lengths = plain(Int32, batch) if kernel.list.lengths else None
    table = plain(Int32, batch, cute.sym_int()) if kernel.paged else None
    new = [rows(of_kv, batch, added, kv_heads) if kernel.appends else None for _ in range(2)]
    one_scale = lambda: plain(Float32, batch, kv_heads, last=cute.sym_int64())
    scales = [one_scale() if kernel.eight_bits else None for _ in range(2)]
    part_shape = pieces, kernel.rows, d
    part = make_fake_tensor(Float32, part_shape, (kernel.rows * d, d, 1), assumed_align=16)
    part_lse = make_fake_tensor(Float32, part_shape[:2], (kernel.rows, 1), assumed_align=4)
    arrived = plain(Int32, cute.sym_int())
    given = Int32(1), Float32(1.0), Int32(0) if kernel.window else None
    return compile_for_torch(
        kernel, q, k, v, o, lse, lengths, table, *new, *scales, part, part_lse, arrived, *given
    )
