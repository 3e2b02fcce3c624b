"""Results put together: of the warps of a CTA, which have keys of their own each, through shared memory; of
the CTAs of a cluster through each other's (`clusters.Exchange`); of others, through global memory, by
whichever warp comes last.

Rows are dealt out to warps, with all their columns: 16 or 32 lanes have four columns each of a row. A row is
the same warp's in every CTA, so that the warp which comes last to a row needs no other warp. Nobody waits for
a CTA outside its cluster: a warp that is not the last goes on. Sums are formed in the order of the pieces,
whoever comes last, so that results have the same bits in every run.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from ..calls_decode import PIECES, WARPS
from .cache_loads import CONSUMER_THREADS, Barrier
from .clusters import Exchange
from .constants import LN_2, VECTOR, WARP
from .rows import LANES, finite, sum_of_row
from .warp_products import HALVES, TILE_Q, columns_of


@dataclass(frozen=True)
class Outputs:
    """Where results go."""

    mO: cute.Tensor  # (batch, head, query, head_dim)
    mLSE: cute.Tensor  # (batch, head, query)
    mPart: cute.Tensor  # O of pieces, fp32 (piece, row, head_dim)
    mPartLSE: cute.Tensor  # log₂ of their rows' sums (piece, row), in clusters (piece · ctas + rank, row)
    mArrived: cute.Tensor  # how many pieces are there, zero between launches (column · ctas · WARPS,)


@dataclass(frozen=True)
class Place:
    """Rows of a sequence and key head, one CTA's, and the pieces that they come in."""

    batch: Int32
    first_head: Int32
    first_row: Int32
    group: cute.FastDivmodDivisorV2  # heads of a key head: row r is of query r / group and head r mod group
    rows: Int32  # of this block, that there are
    piece: Int32  # this CTA's, in mPart
    pieces: Int32  # of these rows


@dataclass(frozen=True)
class Shared:
    """Through which warps, and the CTAs of a cluster, put results together, in shared memory."""

    sO: cute.Tensor  # of each warp (warp, row, column)
    sStats: cute.Tensor  # its rows' maxima and sums (warp, row, 2)
    sent: tuple | None  # by the cluster's CTAs, Exchange's


class Merging:
    """Of a CTA with `rows` rows, in `tiles` of 16, each shared by `slices` warps."""

    def __init__(self, head_dim: int, dtype: type, rows: int, eight_bits: bool, unit: int, ctas: int = 1):
        """`ctas`: of a cluster, which share all sequences."""
        self.head_dim, self.dtype, self.rows = head_dim, dtype, rows
        self.exchange = Exchange(ctas, rows, head_dim)
        self.eight_bits, self.unit = eight_bits, unit
        self.tiles = max(1, rows // TILE_Q)
        self.slices = WARPS // self.tiles
        self.halves = 1 if rows < TILE_Q else HALVES  # rows of a thread that count
        # What is put together at once: rows of a warp, columns.
        self.merge_rows = TILE_Q // HALVES * self.halves
        self.merge_columns = min(head_dim, 128 if self.halves == 1 else 64)

    @property
    def smem_bytes(self) -> int:
        own = WARPS * (self.merge_rows * (self.merge_columns + VECTOR) + 2 * TILE_Q) * 4
        return own + self.exchange.smem_bytes

    def allocate(self, smem: object) -> tuple[cute.Tensor, cute.Tensor]:
        """`Shared`'s sO and sStats."""
        pitch = self.merge_columns + VECTOR
        shape = WARPS, self.merge_rows, self.merge_columns
        layout = cute.make_layout(shape, stride=(self.merge_rows * pitch, pitch, 1))
        sO = smem.allocate_tensor(Float32, layout, 16)
        stats = cute.make_layout((WARPS, TILE_Q, 2), stride=(2 * TILE_Q, 2, 1))
        return sO, smem.allocate_tensor(Float32, stats, 16)

    def all_warps(self) -> None:
        cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMER_THREADS)

    @cute.jit
    def merge_warps(
        self, out: Outputs, shared: Shared, place: Place, rO, row_max, row_sum, value_scale, visit
    ):
        """Put the results of warps with the same rows together, through shared memory: O and LSE, or a
        piece of them if there are several; in a cluster they are sent to who puts its CTAs' together."""
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx, lane = cute.arch.make_warp_uniform(tidx // WARP), cute.arch.lane_idx()
        sO, sStats, mPartLSE = shared.sO, shared.sStats, out.mPartLSE
        own = self.merge_columns // 4
        at_once = WARP // own  # rows of a warp
        for r in range_constexpr(self.halves):
            row_sum[r] = sum_of_row(row_sum[r])
        for p in range_constexpr(self.head_dim // self.merge_columns):
            # All have read what was there before.
            self.all_warps()
            if const_expr(p == 0):
                if lane % LANES == 0:
                    for r in range_constexpr(self.halves):
                        sStats[warp_idx, lane // LANES + r * (TILE_Q // HALVES), 0] = row_max[r]
                        sStats[warp_idx, lane // LANES + r * (TILE_Q // HALVES), 1] = row_sum[r]
            self.put_columns(rO, sO, warp_idx, lane, p)
            self.all_warps()
            for i in range(cute.ceil_div(self.rows, WARPS * at_once), unroll=1):
                row, vector = (i * WARPS + warp_idx) * at_once + lane // own, lane % own
                if row < place.rows:
                    result, lse = self.row_of_warps(shared, row, vector, value_scale)
                    if const_expr(self.exchange.ctas > 1):
                        self.exchange.send(shared.sent, visit, result, lse, row, p * own + vector)
                    elif place.pieces == 1:
                        store_row(out, place, result, lse, row, p * own + vector, self.dtype)
                    else:
                        of_piece = out.mPart[place.piece, row, None]
                        to = cute.local_tile(of_piece, (4,), (p * own + vector,))
                        cute.autovec_copy(result, to)
                        if p * own + vector == 0:
                            mPartLSE[place.piece, row] = lse

    def put_columns(self, rO, sO, warp_idx, lane, p: int) -> None:
        """The p-th columns of this warp's O to shared memory."""
        vector = 4 if self.eight_bits else 2
        values = cute.make_rmem_tensor(cute.make_layout(vector), Float32)
        units = self.merge_columns // 16
        for r in range(self.halves):
            row = sO[warp_idx, lane // LANES + r * (TILE_Q // HALVES), None]
            for unit in range(units):
                found = columns_of(rO, r, p * units + unit, self.eight_bits)
                for part in range(4 // vector):
                    for i in range(vector):
                        values[i] = found[part * vector + i]
                    at = (unit * (4 // vector) + part) * LANES + lane % LANES
                    cute.autovec_copy(values, cute.local_tile(row, (vector,), (at,)))

    @cute.jit
    def row_of_warps(self, shared, row, vector, value_scale):
        """Four columns of a row of O, of all warps that share it, and log₂ of the row's sum."""
        sO, sStats = shared.sO, shared.sStats
        tile, inside = row // TILE_Q, row % TILE_Q
        largest = -Float32.inf
        for s in range_constexpr(self.slices):
            largest = cute.arch.fmax(largest, sStats[s * self.tiles + tile, inside, 0])
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        part = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        result.fill(0.0)
        total = Float32(0.0)
        for s in range_constexpr(self.slices):
            w = s * self.tiles + tile
            weight = cute.math.exp2(sStats[w, inside, 0] - finite(largest), fastmath=True)
            total += weight * sStats[w, inside, 1]
            cute.autovec_copy(cute.local_tile(sO[w, inside, None], (4,), (vector,)), part)
            result.store(result.load() + part.load() * weight)
        result.store(result.load() * (value_scale * (0.0 if total == 0.0 else cute.arch.rcp_approx(total))))
        return result, largest + cute.math.log2(total, fastmath=True)

    @cute.jit
    def merge_pieces(self, out: Outputs, place: Place, column, first, stride):
        """A warp: say that its rows of a piece are there, and if it is the last to say so of these rows, put
        the pieces together, in their order: every `stride`-th in mPart from `first` on."""
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx, lane = cute.arch.make_warp_uniform(tidx // WARP), cute.arch.lane_idx()
        own = self.merge_columns // 4
        at_once = WARP // own
        arrived = column * WARPS + warp_idx
        if warp_idx * at_once < place.rows:
            if self.is_last(out.mArrived, arrived, place.pieces):
                lanes = min(WARP, self.head_dim // 4)  # of a row
                passes = at_once * lanes // WARP
                for i in range(cute.ceil_div(self.rows, WARPS * at_once) * passes, unroll=1):
                    first_row = (i // passes * WARPS + warp_idx) * at_once + i % passes * (WARP // lanes)
                    row = first_row + lane // lanes
                    for p in range(self.head_dim // (4 * lanes), unroll=1):
                        # All lanes, since they tell each other what pieces weigh.
                        vector = p * lanes + lane % lanes
                        result, lse = self.row_of_pieces(
                            out, first, stride, place.pieces, cutlass.min(row, place.rows - 1), vector, lanes
                        )
                        if row < place.rows:
                            store_row(out, place, result, lse, row, vector, self.dtype)

    @cute.jit
    def merge_cluster(self, out: Outputs, shared: Shared, place: Place, column, first, stride, visit):
        """Put a part of the columns of all CTAs of the cluster together: O and LSE, or a piece, and whoever
        is the last to say that those columns of a piece are there puts the pieces together."""
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        x, sent, rank = self.exchange, shared.sent, cute.arch.block_idx_in_cluster()
        mPartLSE = out.mPartLSE
        inside = tidx % x.vectors
        vector = rank * x.vectors + inside
        at_once = CONSUMER_THREADS // x.vectors  # rows
        passes = -(-self.rows // at_once)
        if warp_idx * WARP < place.rows * x.vectors:
            x.wait(sent, visit, place.rows)
            for i in range(passes, unroll=1):
                row = i * at_once + tidx // x.vectors
                result, lse = x.put_together(sent, visit, cutlass.min(row, place.rows - 1), inside)
                if row < place.rows:
                    if place.pieces == 1:
                        store_row(out, place, result, lse, row, vector, self.dtype)
                    else:
                        of_piece = out.mPart[place.piece, row, None]
                        cute.autovec_copy(result, cute.local_tile(of_piece, (4,), (vector,)))
                        if inside == 0:
                            mPartLSE[place.piece * x.ctas + rank, row] = lse
            if place.pieces > 1:
                if self.is_last(out.mArrived, (column * x.ctas + rank) * WARPS + warp_idx, place.pieces):
                    for i in range(passes, unroll=1):
                        row = i * at_once + tidx // x.vectors
                        result, lse = self.row_of_pieces(
                            out, first, stride, place.pieces, cutlass.min(row, place.rows - 1), vector,
                            min(x.vectors, WARP),
                        )  # fmt: skip
                        if row < place.rows:
                            store_row(out, place, result, lse, row, vector, self.dtype)

    @cute.jit
    def is_last(self, mArrived, counter, pieces):
        """A warp: count what it has written of a piece; whether all others are there. Then the counter is at
        zero again, for the next launch."""
        lane = cute.arch.lane_idx()
        cute.arch.sync_warp()
        before = Int32(0)
        if lane == 0:
            # What the warp has written is there for whoever counts on, and what those before have for it.
            before = cute.arch.atomic_add(
                (mArrived.iterator + counter).llvm_ptr, Int32(1), sem="acq_rel", scope="gpu"
            )
        cute.arch.sync_warp()
        last = cute.arch.shuffle_sync(before, 0) == pieces - 1
        if last:
            if lane == 0:
                mArrived[counter] = Int32(0)
        return last

    @cute.jit
    def row_of_pieces(self, out, first_piece, stride, pieces, row, vector, lanes: cutlass.Constexpr):
        """Four columns of a row of O, of all pieces, and log₂ of the row's sum. Each lane weighs one piece,
        and tells the other `lanes` of the row."""
        lane = cute.arch.lane_idx()
        # Loads under way, for which there are registers: 132 CTAs for 8 key heads leave 16 pieces, for 4 33.
        at_once = min(16 if self.halves == 1 else 17, lanes)
        largest, total = -Float32.inf, Float32(0.0)
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        result.fill(0.0)
        parts = cute.make_rmem_tensor(cute.make_layout((4, at_once)), Float32)
        own = lane % lanes
        for first in range(0, pieces, at_once, unroll=1):
            whose = self.index_of(first_piece, stride, cutlass.min(first + own, pieces - 1))
            if const_expr(self.exchange.ctas > 1):
                whose = whose * self.exchange.ctas + cute.arch.block_idx_in_cluster()
            lse = out.mPartLSE[whose, row]
            lse = lse if (own < at_once) & (first + own < pieces) else -Float32.inf
            for j in range_constexpr(at_once):
                # There are two at least, so the first is never another.
                i = cutlass.min(first + j, pieces - 1) if j else first
                whole = out.mPart[self.index_of(first_piece, stride, i, may_be_first=j == 0), row, None]
                cute.autovec_copy(cute.local_tile(whole, (4,), (vector,)), parts[None, j])
            new = cute.arch.fmax(largest, cute.arch.warp_reduction_max(lse, threads_in_group=lanes))
            weight = cute.math.exp2(lse - finite(new), fastmath=True)
            factor = cute.math.exp2(largest - finite(new), fastmath=True)
            total = total * factor + cute.arch.warp_reduction_sum(weight, threads_in_group=lanes)
            result.store(result.load() * factor)
            for j in range_constexpr(at_once):
                of_piece = cute.arch.shuffle_sync(weight, lane - own + j)
                result.store(result.load() + parts[None, j].load() * of_piece)
            largest = new
        result.store(result.load() * (0.0 if total == 0.0 else cute.arch.rcp_approx(total)))
        return result, largest + cute.math.log2(total, fastmath=True)

    def index_of(self, first_piece, stride, i, may_be_first: bool = True):
        """Which of all pieces is the i-th of these rows."""
        at = first_piece + i * stride
        if self.unit:
            return at
        return at * PIECES + Int32(i == 0) if may_be_first else at * PIECES


@cute.jit
def store_row(out, place, result, lse, row, vector, dtype: cutlass.Constexpr):
    """Four columns of a row of O; with the first the LSE, which comes as a power of two."""
    mLSE = out.mLSE
    query, head = divmod(place.first_row + row, place.group)
    head = place.first_head + head
    rounded = cute.make_rmem_tensor(cute.make_layout(4), dtype)
    rounded.store(result.load().to(dtype))
    cute.autovec_copy(rounded, cute.local_tile(out.mO[place.batch, head, query, None], (4,), (vector,)))
    if vector == 0:
        mLSE[place.batch, head, query] = lse * LN_2
