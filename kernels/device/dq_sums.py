"""The way dQ takes to its sum, where every tile of keys adds to it: bwd4 at head_dim up to 128.

The consumers leave dQ of a step in shared memory. Two warps add it to its sum in global memory, by bulk
reduction: a kind of TMA copy that adds fp32 in L2 (RED from registers was slower: notes/bwd4.md, "What was
predicted"). What this module does besides has a section of its own in the note.

zeros     The sums must be zero before the first addition. Zeros written by the preprocess have left L2 by
          then; a warp of the main kernel writes them a section of heads ahead, and they are still there
          ("Zeros").
turns     What makes bwd4_det deterministic: a tile of keys adds to dQ when those before it have. The first
          one stores, and nobody needs zeros ("Deterministic").
one tile  Where a head has no other tile of keys there is nothing to add to (bwd4_one, and of packed
          sequences those that have one): the consumers leave dQ rounded, and the two warps store it where
          the caller wants it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr

from .constants import WARP, WARPGROUP
from .key_tiles import CONSUMER_WARPS, CONSUMERS, ROWS, Tiles
from .limits import ROTATED_BYTES
from .policies import listed
from .rings import CONSUMER
from .spread import ROUNDS_APART, begin_behind, begins_at
from .tile_order import hear_place
from .tma import partition_tma

PART = ROWS * 64  # elements of dQ_sum in a row: 64 queries × 64 columns
AND_ADDER = WARPGROUP + WARP  # threads at a named barrier where a consumer and an adding warp meet


class SummedTiles(Tiles):
    """Tiles of keys that add to sums of dQ.

    Global memory: mDQ_sum (head · sums, block, column block, PART) fp32, as `backward_ends` describes it;
    mZeroed (key head), how many shares are zero; mOrder (head, q_tile · sums), turns, or as `split_tiles`.
    """

    part: int  # elements of it that a consumer's dQ of a step is, one behind the other

    @property
    def zeroes_ahead(self) -> bool:
        """Whether zeros are written a section ahead: not where the first to come stores."""
        return not (self.deterministic or self.one_tile)

    # ---- additions ----------------------------------------------------------------------------------------

    @cute.jit
    def add_gradients(
        self, warp_idx, tile_ring, shared, mQ, mK, sums, lengths, full: cutlass.Constexpr,
        empty: cutlass.Constexpr, mList=None,
    ):  # fmt: skip
        """One of the two warps behind the producer, to the end. It has every other step:

            for each tile of keys, query head of its key head, and tile of queries that sees it:
                wait for the tile's turn                            (only in one order: bwd4_det)
                for each consumer:
                    wait at `full`      its part of dQ is in shared memory
                    add it to the sum, wait until it has been read  (bwd4_one: store it)
                    arrive at `empty`   it may be written again
                pass the turn on                                    (bwd4_det)

        `full` + 2 · mine + consumer is a named barrier of this warp and that consumer; both warps arrive at
        `empty` + consumer, in turns, since a consumer's buffer is one. `sums` are mDQ_sum, mZeroed, mOrder;
        of one tile of keys what `store_tile` takes.
        """
        *extents, group = lengths
        sdQ, sTile = shared.dQ, shared.tile
        if const_expr(not self.one_tile):
            mDQ_sum, mZeroed, mOrder = sums
        if const_expr(not self.left_over):  # which begins behind who has waited
            cute.arch.griddepcontrol_wait()  # for the preprocess's zeros, if it writes some
        if const_expr(self.divides or not self.one_tile):  # who is behind the others begins at their end
            cute.arch.griddepcontrol_launch_dependents()
        mine, step = warp_idx - CONSUMER_WARPS - 1, Int32(0)
        zeroed = None
        if const_expr(self.zeroes_ahead and not self.packed):
            zeroed = self.left_to_zero(mQ, mK)
        tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
        self.sync(empty, mine, AND_ADDER, arrive=True)  # at first both consumers' parts are free
        valid, place = hear_place(tile_ring, tile_get, sTile)
        tile_get.advance()
        while valid != 0:
            kv_head = place[1]
            seqlen_q, seqlen_kv = self.batch.lengths(place, extents)
            first, _, _, last = self.work_on(place, seqlen_q, seqlen_kv)
            if const_expr(self.zeroes_ahead and self.packed):
                self.await_listed_zeros(mZeroed, mQ, mK, mDQ_sum, place, mList)
            elif const_expr(self.zeroes_ahead):
                self.await_zeros(mZeroed, mK, kv_head, place[2], *zeroed)
            if const_expr(not self.one_tile):
                mSums, mTurns = mDQ_sum, mOrder
            if const_expr(self.listed and not self.one_tile):
                mSums = self.batch.scratch(mDQ_sum, place)
                mTurns = cute.domain_offset((0, place[6] // self.blocks * self.sums), mOrder)
            for nth in range(group, unroll=1):
                g = self.head_at(nth, group, place, seqlen_kv)
                head_index = self.batch.scratch_row(place, kv_head * group, mQ.shape[2]) + g
                for step_of_head in range(first, last, unroll=1):
                    if step % 2 == mine:
                        i = self.q_tile_at(step_of_head, first, last, place, seqlen_q, seqlen_kv)
                        if const_expr(self.one_tile):
                            to = i, kv_head * group + g, place
                            self.store_tile(*sums, *to, full, CONSUMERS * mine, empty)
                        else:
                            at, turn, final = self.turn_of(place[0], i, seqlen_q, seqlen_kv, place, g)
                            order = mTurns[head_index, None].iterator + (i * self.sums + at)
                            if const_expr(self.deterministic):
                                await_value(order, turn)
                            else:
                                turn = None
                            for c in range_constexpr(CONSUMERS):
                                self.sync(full, CONSUMERS * mine + c, AND_ADDER)
                                sum_at = mSums[head_index * self.sums + at, i * self.blocks, 0, None].iterator
                                source = sdQ[None, None, None, c].iterator
                                add_to_sum(sum_at + c * self.part, source, self.part * 4, turn)
                                self.sync(empty, c, AND_ADDER, arrive=True)
                            if const_expr(self.deterministic):
                                pass_turn(order, turn, final)
                    step += 1
            valid, place = hear_place(tile_ring, tile_get, sTile)
            tile_get.advance()
        if const_expr(self.left_over):
            cute.arch.griddepcontrol_wait()  # for who waits for this kernel and needs those before it

    @cute.jit
    def store_tile(
        self, store, mDQ, sdQ, q_tile, head, place, full: cutlass.Constexpr, first, empty: cutlass.Constexpr
    ):  # fmt: skip
        """One warp, of one tile of keys: store both consumers' parts of a step's dQ, in sdQ (query, column,
        …) a constant distance apart, to mDQ, but for rows past its end. The barriers are `full` + `first` +
        consumer and `empty` + consumer, as above."""
        apart, blocks = cute.size(sdQ, mode=[2]) // CONSUMERS, (None, None)  # of rows, and of columns
        tXgX, tXsX = partition_tma(store, self.batch.queries(mDQ, head, place), sdQ, blocks)
        for c in range_constexpr(CONSUMERS):
            self.sync(full, first + c, AND_ADDER)
            row, column = (q_tile * CONSUMERS + c, 0) if self.blocks == CONSUMERS else (q_tile, c)
            cute.copy(store, tXsX[None, apart * c], tXgX[None, row, column])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            self.sync(empty, c, AND_ADDER, arrive=True)

    # ---- zeros --------------------------------------------------------------------------------------------

    @cute.jit
    def left_to_zero(self, mQ, mK):
        """(first, last): the key heads whose dQ sums the main kernel zeroes. The preprocess has the rest."""
        section, heads = self.section(mQ, mK), mK.shape[2] * mK.shape[3]
        return section, self.final(heads, section, (heads + 1) // 2)

    @cute.jit
    def write_zeros(self, tile_ring, sTile, mQ, mK, mDQ_sum, mZeroed):
        """One warp, to the end: with each tile of keys a share of the zeros for the same head of the next
        section. All tiles that write them are fetched before any that waits for them, so nobody waits for
        one who has not begun."""
        cute.arch.griddepcontrol_wait()  # zeros beside the preprocess's reads may leave L2
        tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
        group = mQ.shape[2] // mK.shape[2]
        kv_blocks = cute.ceil_div(mK.shape[0], self.tile_kv)
        ahead, last = self.left_to_zero(mQ, mK)
        sums = mDQ_sum.shape[1] * mDQ_sum.shape[2] * group  # blocks of a key head
        share = cute.ceil_div(sums, kv_blocks)
        zero = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        zero.fill(0.0)
        valid, place = hear_place(tile_ring, tile_get, sTile)
        tile_get.advance()
        while valid != 0:
            block, kv_head, batch, *_ = place
            if const_expr(self.divides):
                block = block * self.parts + place[3]
            head = batch * mK.shape[2] + kv_head + ahead
            if const_expr(self.splits):
                if place[3] > 0 and (place[3] - 1) % self.parts > 0:  # the tile's first part writes them
                    head = last
            if head < last:
                first = mDQ_sum[head * group, None, None, None].iterator
                for i in range(block * share, cutlass.min(sums, block * share + share), unroll=1):
                    held = cute.make_layout((4, WARP, PART // (4 * WARP)))
                    gSum = cute.make_tensor(first + Int64(i) * PART, held)
                    for j in range_constexpr(held.shape[2]):
                        cute.autovec_copy(zero, gSum[None, cute.arch.lane_idx(), j])
                cute.arch.fence_acq_rel_gpu()
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    done = (mZeroed.iterator + head).llvm_ptr
                    cute.arch.atomic_add(done, Int32(1), sem="release", scope="gpu")
            valid, place = hear_place(tile_ring, tile_get, sTile)
            tile_get.advance()

    @cute.jit
    def await_zeros(self, mZeroed, mK, kv_head, batch, first, last):
        """One warp: wait until all of a head's dQ sums have been zeroed."""
        head = batch * mK.shape[2] + kv_head
        if head >= first and head < last:
            await_value(mZeroed.iterator + head, cute.ceil_div(mK.shape[0], self.tile_kv))

    # ---- zeros of packed sequences ------------------------------------------------------------------------
    # As above, but sequences differ. A section of a sequence's heads zeroes the sums of what comes next: its
    # next section, or the first of the next sequence in the list. mZeroed counts rows of PART that are zero,
    # and has a place for each section: that of its first tile.

    @cute.jit
    def zeros_wanted(self, first, kv_blocks, seqlen_q, head, mQ, mK, mDQ_sum, listed_tiles):
        """Of the section with a key head of a sequence: (its first head, its heads, rows of PART of each)."""
        section, final = self.sections(first, kv_blocks, seqlen_q, mQ, mK, listed_tiles)
        head, together = self.section_with(head, mK.shape[2], section, final)
        blocks = cute.ceil_div(seqlen_q, self.tile_q) * self.blocks
        return head, together, blocks * mDQ_sum.shape[2] * (mQ.shape[2] // mK.shape[2])

    @cute.jit
    def await_listed_zeros(self, mZeroed, mQ, mK, mDQ_sum, place, mList):
        """One warp: wait until all sums of a place's section have been zeroed."""
        _, head, _, seqlen_q, _, seqlen_kv, _, first = place
        of_sequence = first, cute.ceil_div(seqlen_kv, self.tile_kv), seqlen_q
        head, together, rows = self.zeros_wanted(*of_sequence, head, mQ, mK, mDQ_sum, mList[0, 0])
        section = first * mK.shape[2] + head
        if section > 0:  # the first one's are the preprocess's
            await_value(mZeroed.iterator + section, together * rows)

    @cute.jit
    def write_listed_zeros(self, tile_ring, sTile, mQ, mK, mDQ_sum, mZeroed, mList):
        """One warp, to the end: with each tile of keys a share of the zeros for what comes next."""
        cute.arch.griddepcontrol_wait()
        tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
        heads, group, columns = mK.shape[2], mQ.shape[2] // mK.shape[2], mDQ_sum.shape[2]
        sizes = mQ, mK, mDQ_sum, mList[0, 0]
        zero = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        zero.fill(0.0)
        valid, place = hear_place(tile_ring, tile_get, sTile)
        tile_get.advance()
        while valid != 0:
            kv_block, kv_head, _, seqlen_q, _, seqlen_kv, _, first = place
            kv_blocks = cute.ceil_div(seqlen_kv, self.tile_kv)
            own, together, _ = self.zeros_wanted(first, kv_blocks, seqlen_q, kv_head, *sizes)
            mine, tiles = (kv_head - own) * kv_blocks + kv_block, together * kv_blocks
            head, tile = own + together, first
            if head == heads:
                head, tile = Int32(0), first + kv_blocks
            if tile < mList[0, 0]:
                _, blocks, _, seqlen_q, _, _, at = listed(mList, tile)
                _, together, rows = self.zeros_wanted(tile, blocks, seqlen_q, head, *sizes)
                share = cute.ceil_div(together * rows, tiles)
                end = cutlass.min(together * rows, (mine + 1) * share)
                per_head = rows // group
                for i in range(mine * share, end, unroll=1):
                    block = at * self.blocks + i % per_head // columns
                    first_of = mDQ_sum[head * group + i // per_head, block, i % columns, None].iterator
                    held = cute.make_layout((4, WARP, PART // (4 * WARP)))
                    gSum = cute.make_tensor(first_of, held)
                    for j in range_constexpr(held.shape[2]):
                        cute.autovec_copy(zero, gSum[None, cute.arch.lane_idx(), j])
                if mine * share < end:
                    cute.arch.fence_acq_rel_gpu()
                    cute.arch.sync_warp()
                    if cute.arch.lane_idx() == 0:
                        done = (mZeroed.iterator + (tile * heads + head)).llvm_ptr
                        cute.arch.atomic_add(done, end - mine * share, sem="release", scope="gpu")
            valid, place = hear_place(tile_ring, tile_get, sTile)
            tile_get.advance()

    # ---- turns --------------------------------------------------------------------------------------------

    def count_sums(self, mDQ_sum, heads, tiles, seqlen_q, seqlen_kv, group) -> None:
        """How many sums a tile of queries has, of so many heads: as many as the caller has allocated
        (`calls.sums_for`). And whether so many tiles of keys begin with different queries, or heads of their
        group. Inside a kernel, each anew."""
        self.sums, self.group = mDQ_sum.shape[0] // heads, group
        self.heads_apart, self.queries_apart, self.chains = self.spread_of(tiles, seqlen_q, seqlen_kv)

    @cute.jit
    def spread_of(self, tiles, seqlen_q, seqlen_kv):
        """(heads, queries, chains): with how many different heads of their group tiles of keys begin, 1 or
        all; whether with different queries; and how many chains of turns there are. If they begin apart a
        chain has two sums, one for who has not been at the end yet."""
        heads, queries, chains = Int32(1), cutlass.Boolean(False), self.sums
        # Where most of them begin together, and are about as long
        apart = (tiles <= ROUNDS_APART * self.sms) & (self.sums % 2 == 0)
        if const_expr(self.mask.hides):
            apart = apart & (seqlen_kv > 2 * seqlen_q)
        if const_expr(self.rotates):
            queries = apart & (self.group == 1)
            if const_expr(self.in_waves):
                queries = queries | self.is_rotated(seqlen_q, seqlen_kv)
            if queries:
                apart = cutlass.Boolean(False)
        if apart:
            heads = self.group
        if queries | (heads > 1):
            chains = self.sums // 2
        return heads, queries, chains

    @cute.jit
    def q_tile_at(self, i, first, last, place, seqlen_q, seqlen_kv):
        """The tile of queries of a step, counted from `first` to `last` − 1 (`Tiles.work_on`)."""
        if const_expr(self.reverses):
            if place[-1] != 0:
                i = first + last - 1 - i
        if const_expr(self.rotates):
            if self.queries_apart:
                tiles = self.seen_by_all(seqlen_q, seqlen_kv)
                if place[0] < tiles:
                    i += begins_at(self.fetched(place[0], tiles), tiles, last)
                    if i >= last:
                        i -= last
        return self.of_part(i, place)

    def fetched(self, kv_block, tiles):
        """As which of a head's so many tiles of keys one is fetched that is not mirrored."""
        return tiles - 1 - kv_block if self.mask.hides else kv_block

    def seen_by_all(self, seqlen_q, seqlen_kv):
        """How many tiles of keys all queries see; they are the first."""
        if not self.mask.hides:
            return cute.ceil_div(seqlen_kv, self.tile_kv)
        return cutlass.max(0, self.mask.last_key(0, seqlen_q, seqlen_kv) + 1) // self.tile_kv

    @cute.jit
    def head_at(self, nth, group, place, seqlen_kv):
        """The query head of its group that a tile of keys comes to as its nth: those that are fetched first
        begin with the last ones, if heads are apart."""
        head = nth
        if const_expr(self.counts_sums):
            kv_blocks = cute.ceil_div(seqlen_kv, self.tile_kv)
            head = nth + begins_at(self.fetched(place[0], kv_blocks), kv_blocks, self.heads_apart)
            if head >= group:
                head -= group
        return head

    def is_rotated(self, seqlen_q, seqlen_kv):
        """Whether tiles of keys begin with different queries however many there are: where there is a sum for
        who comes around to them, and what CTAs read at different places stays in L2."""
        fits = (seqlen_q * (self.column_bytes + 4) * self.head_dim <= ROTATED_BYTES) & (seqlen_kv <= 2**23)
        return (self.sums == 2) & fits

    @cute.jit
    def turns_at(self, q_tile, seqlen_q, seqlen_kv):
        """How many tiles of keys add to dQ of a tile of queries: those of `keys_seen`."""
        first, end = self.keys_seen(q_tile, seqlen_q, seqlen_kv)
        return end - first if const_expr(self.mask.hides_first) else end

    @cute.jit
    def sums_at(self, q_tile, seqlen_q, seqlen_kv, g):
        """How many sums of a tile of queries' dQ, of a group's g-th head, anyone adds to; they are the
        first."""
        turns = self.turns_at(q_tile, seqlen_q, seqlen_kv)
        late, chains = self.late_turns(q_tile, seqlen_q, seqlen_kv, g, turns)
        return cutlass.min(late, chains) + cutlass.min(turns - late, chains)

    @cute.jit
    def late_turns(self, q_tile, seqlen_q, seqlen_kv, g, turns):
        """(late, chains): how many of the turns, which are the first, come after the others, since those
        tiles of keys began behind this tile of queries; and among how many sums either kind is divided."""
        position, positions, tiles = g, self.heads_apart, cute.ceil_div(seqlen_kv, self.tile_kv)
        if const_expr(self.rotates):
            if self.queries_apart:
                # Tiles that not all queries see begin with the first that does. Their turns are the first, so
                # they are among the late ones: others may be there before them.
                tiles = self.seen_by_all(seqlen_q, seqlen_kv)
                position, positions = q_tile, cute.ceil_div(seqlen_q, self.tile_q)
        # Under a mask the first that are fetched may have no turn, or have one and no place of their own.
        return cutlass.max(0, begin_behind(position, tiles, positions) + turns - tiles), self.chains

    @cute.jit
    def keys_seen(self, q_tile, seqlen_q, seqlen_kv):
        """(first, end): the tiles of keys that a tile of queries sees."""
        keys = seqlen_kv
        if const_expr(self.mask.hides):
            # How many keys its last row sees: last_key of that row, + 1. Tiles of keys behind them have no
            # turn, as `q_tiles` skips them. As a sum: otherwise bwd4_det has other machine code at 128.
            seen = (q_tile + 1) * self.tile_q + self.mask.last_key(0, seqlen_q, seqlen_kv)
            keys = cutlass.max(0, cutlass.min(keys, seen))
        first, end = Int32(0), cute.ceil_div(keys, self.tile_kv)
        if const_expr(self.mask.hides_first):
            first_key = cutlass.max(0, self.mask.first_key(q_tile * self.tile_q, seqlen_q, seqlen_kv))
            first = cutlass.min(end, first_key // self.tile_kv)
        return first, end

    @cute.jit
    def turn_of(self, kv_block, q_tile, seqlen_q, seqlen_kv, place=None, g=0):
        """(sum, turn, final): to which sum of a tile of queries' dQ, of its group's g-th head, a tile of keys
        adds, and when; of a head that may be mirrored with its `place`.

        Whoever comes before it was fetched before it (`Tiles.locate`: blocks ascend, under a mask descend
        unless mirrored, as turns do), so nobody waits for one who has not begun.
        """
        first, end = self.keys_seen(q_tile, seqlen_q, seqlen_kv)
        turns = end - first if const_expr(self.mask.hides_first) else end
        turn = kv_block
        if const_expr(self.mask.hides):
            # From the diagonal to the left: CTAs that begin together reach the tile in this order.
            turn = end - 1 - kv_block
            if const_expr(self.mirrors):
                if place[-1] != 0:
                    turn = kv_block
        before, chains = 0, self.sums
        if const_expr(self.counts_sums):
            # Sums for those who come before they have been at the end, and others for who comes after it: in
            # either kind who is fetched later comes later.
            late, chains = self.late_turns(q_tile, seqlen_q, seqlen_kv, g, turns)
            before, turn, turns = Int32(0), turn - late, turns - late
            if turn < 0:
                before, turn, turns = cutlass.min(chains, turns), turn + late, late
        return before + turn % chains, turn // chains, turn + chains >= turns


@cute.jit
def await_value(place, value):
    """One warp: lane 0, which alone issues bulk copies, waits until `place` holds `value`, before what its
    async proxy does next; the other lanes go on."""
    if cute.arch.lane_idx() == 0:
        seen = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
        while seen != value:
            seen = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
        cute.arch.fence_proxy("async.global")


@cute.jit
def pass_turn(order, turn, final):
    """One warp: let the next in, with all that was added so far; the last leaves 0 for the next launch."""
    if cute.arch.lane_idx() == 0:
        cute.arch.cp_async_bulk_wait_group(0)  # what was added has arrived, and not only left
        cute.arch.fence_proxy("async.global")
        cute.arch.store(order, 0 if final else turn + 1, sem="release", scope="gpu")


def bulk_copy(target: cute.Pointer, source: cute.Pointer, size: int, adds: bool) -> None:
    """One thread: copy or add `size` bytes of fp32 from `source` in shared memory to `target` in global
    memory."""
    reduce, add = (".reduce", ".add.f32") if adds else ("", "")
    ptx = f"cp{reduce}.async.bulk.global.shared::cta.bulk_group{add} [{{$r0}}], [{{$r1}}], {{$r2}};"
    cute.arch.inline_ptx(ptx, read_only_args=[Int64(target.toint()), Int32(source.toint()), Int32(size)])


@cute.jit
def add_to_sum(target, source, size: cutlass.Constexpr, turn=None):
    """One warp: start the addition of `size` bytes, and wait until `source` has been read. With turns, the
    first one stores."""
    if cute.arch.lane_idx() == 0:
        if const_expr(turn is None):
            bulk_copy(target, source, size, adds=True)
        elif turn == 0:
            bulk_copy(target, source, size, adds=False)
        else:
            bulk_copy(target, source, size, adds=True)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
