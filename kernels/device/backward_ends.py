"""The kernels before and after a backward stage on WGMMA, and the scratch between them. Introduced by bwd3.

    stats    (heads, block, 2, 64) fp32: LSE·log₂e, then D, of 64 query rows. A row that is past the end or
             sees no key has an LSE of ∞, so that its P = exp2(S − ∞) is 0 whatever the scores. At 128
             columns without a soft cap bwd4's are laid out as `folded` says.
    dQ_sum   (heads·sums, block, column block, 8·128·4) fp32: dQ of 64 query rows × 64 columns as the
             accumulator of an m64n64 WGMMA holds it: element (g, t, j) is register 4g + j of thread t, row
             16⌊t/32⌋ + ⌊(t mod 32)/4⌋ + 8⌊j/2⌋ and column 8g + 2(t mod 4) + j mod 2. What a warp accesses
             at once, 16 bytes a thread, is 512 bytes in a row; no addition computes where its element lies.

"heads" counts heads of all batches; blocks are padded to whole tiles of queries, the largest of the kernels
that read them. "sums" is 1 but where tiles of keys take turns, which then may be at several.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .constants import LOG2_E, VECTOR, WARP, WARPGROUP
from .folded import cut_off, exponent_scale, write_parts
from .limits import BLOCK, column_blocks, stats_shape
from .packed import DENSE, Packed
from .policies import listed
from .short_sequences import ShortSequences
from .tma import allocate_tiles, partition_tma, store_atom

QUAD = 4  # fp32 in one 16-byte access
ROWS_IN_FLIGHT = 4  # of O and of dO, a thread of the preprocess
IN_FLIGHT = 3  # sums of a block, on their way to a thread of the postprocess


def fake_scratch(head_dim: int, sums: int = 1, folded: bool = False) -> tuple[object, object]:
    """Stand-ins for stats and dQ_sum, both contiguous."""
    heads, blocks = cute.sym_int(), cute.sym_int()
    of_sums = heads if sums == 1 else cute.sym_int()
    stand_ins = []
    for rows, inner in ((heads, stats_shape(folded)), (of_sums, (column_blocks(head_dim), BLOCK * BLOCK))):
        size = math.prod(inner)
        strides = (cute.sym_int64(divisibility=size), size, inner[1], 1)
        stand_ins.append(make_fake_tensor(Float32, (rows, blocks, *inner), strides, assumed_align=128))
    return tuple(stand_ins)


def as_tiles(*tensors):
    """(batch, heads, seqlen, head_dim) as main kernels see them, (seqlen, head_dim, heads, batch)."""
    return [cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0])) for x in tensors]


class Preprocess:
    """stats, and zeros for dQ_sum. With mDLSE, the gradient of the LSE, D is less by it: ∂LSE/∂S is P, so
    that dS = P∘(dP − D) + P∘dLSE. A CTA takes a block; a thread holds 4 rows' chunks of O and dO at once.

    `theirs` = (how many key heads a batch has, first, last) leaves the sums of the key heads from `first` to
    `last`, of all batches, to the main kernel. Without mDQ_sum there are no zeros to write.

    compute-sanitizer's initcheck reports reads of O. They lie inside the caller's tensor: rows past the end
    read the last row again. What the tool does not count as written is what the async proxy wrote, as the TMA
    does the O of k6.
    """

    def __init__(
        self, head_dim: int, packed: int | None = None, most_keys: int | None = None, folds: bool = False
    ):
        """Of packed sequences, tiles of so many queries; without a list if none has more than `most_keys`.
        Stats as `folded` has them if it `folds`."""
        self.folds, self.scale = folds, 1.0 / math.sqrt(head_dim)
        self.packed = packed // BLOCK if packed else None  # blocks of a tile
        self.most_keys = most_keys
        self.sequences = ShortSequences(packed) if most_keys else None
        # Lanes that share a row: a power of two, as a sum over them must be.
        self.chunks = 2 ** math.ceil(math.log2(head_dim // VECTOR))
        self.threads = BLOCK * self.chunks // ROWS_IN_FLIGHT

    @cute.jit
    def __call__(
        self, mO, mDO, mLSE, mStats, mDQ_sum, stream, theirs=None, mDLSE=None, mList=None, mListKV=None,
        scale=None,
    ):  # fmt: skip
        """Of packed sequences mList lists tiles of `packed` queries, mListKV those of keys; `theirs` is the
        main kernel (`dq_sums.SummedTiles`), with Q and K, which zeroes all sums but its first section's. Of
        short ones mList is their lengths. `scale`: of a scaled problem, folded stats are divided by it."""
        scale = scale if self.folds else None
        heads, blocks, _, _ = mStats.shape
        arguments = mO, mDO, mLSE, mStats, mDQ_sum
        shape = {"grid": (heads * blocks, 1, 1), "block": (self.threads, 1, 1)}
        if const_expr(self.packed is None):
            self.preprocess(*arguments, theirs, mDLSE, scale).launch(**shape, stream=stream)
        elif const_expr(self.sequences is not None):
            sequences, total = mList[0].shape[0] - 1, mO.shape[2]
            each = cute.ceil_div(total, cutlass.max(1, sequences) * self.packed * BLOCK)  # tiles
            shape["grid"] = sequences * each * heads * self.packed, 1, 1
            inputs = mO, mDO, mLSE, mStats, mDLSE
            self.preprocess_sequences(*inputs, each, mList, scale).launch(**shape, stream=stream)
        else:
            mQ = mK = None
            if const_expr(mDQ_sum is not None):
                self.main, mQ, mK = theirs[0], *as_tiles(*theirs[1:])
            self.preprocess_packed(*arguments, mDLSE, mList, mListKV, mQ, mK, scale).launch(
                **shape, use_pdl=True, stream=stream
            )

    @cute.kernel
    def preprocess_packed(self, mO, mDO, mLSE, mStats, mDQ_sum, mDLSE, mList, mListKV, mQ, mK, scale):
        """As `preprocess`, of a tile of the list, whichever the last ones are: there is room for more."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_launch_dependents()
        heads = mO.shape[1]
        cta = ctas - 1 - cta  # the main kernel begins with the first sequences, and finds them in L2
        tile, head, own = cta // self.packed // heads, cta // self.packed % heads, cta % self.packed
        cute.arch.griddepcontrol_wait()
        if tile < mList[0, 0]:
            first, _, start, seqlen, _, seqlen_kv, place = listed(mList, tile)
            block = (tile - first) * self.packed + own
            inputs = self.rows_of(start, place, mO, mDO, mLSE, mStats, mDLSE)
            if const_expr(mDQ_sum is not None):
                # Sums that no tile of keys adds to, and those of the section that comes first
                zeroes = seqlen_kv == 0
                _, kv_blocks, _, seqlen_q, _, _, first_place = listed(mListKV, 0)
                if place == first_place and not zeroes:
                    given = kv_blocks, seqlen_q, 0, mQ, mK, mDQ_sum, mListKV[0, 0]
                    _, together, _ = self.main.zeros_wanted(0, *given)
                    zeroes = head // (mQ.shape[2] // mK.shape[2]) < together
                if zeroes:
                    self.write_zeros(mDQ_sum, head, place * self.packed + block)
            self.reduce(*inputs, None, None, 0, head, head, block, seqlen, scale=scale)

    @cute.kernel
    def preprocess_sequences(self, mO, mDO, mLSE, mStats, mDLSE, each, lengths, scale):
        """As `preprocess`, of a sequence: every `each`-th of its tiles. Of one with more keys than one tile
        of keys has, whose dQ would be that of some of them, all gradients are NaN."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_launch_dependents()
        heads = mO.shape[1]
        cta = ctas - 1 - cta  # the main kernel begins with the first sequences, and finds them in L2
        tile, head, own = cta // self.packed // heads, cta // self.packed % heads, cta % self.packed
        start, seqlen, _, seqlen_kv, place = self.sequences.find(tile // each, lengths)
        inputs = self.rows_of(start, place, mO, mDO, mLSE, mStats, mDLSE)
        exceeds = seqlen_kv > self.most_keys
        for i in range(tile % each, cute.ceil_div(seqlen, self.packed * BLOCK), each, unroll=1):
            block = i * self.packed + own
            self.reduce(*inputs, None, None, 0, head, head, block, seqlen, exceeds, scale)

    def rows_of(self, start, place, mO, mDO, mLSE, mStats, mDLSE):
        """Inputs and scratch of a packed sequence alone: from row `start`, and from the place-th tile on."""
        mO, mDO = [cute.domain_offset((0, 0, start, 0), mX) for mX in (mO, mDO)]
        mLSE = cute.domain_offset((0, 0, start), mLSE)
        if mDLSE is not None:
            mDLSE = cute.domain_offset((0, 0, start), mDLSE)
        return mO, mDO, mLSE, cute.domain_offset((0, place * self.packed, 0, 0), mStats), mDLSE

    @cute.kernel
    def preprocess(self, mO, mDO, mLSE, mStats, mDQ_sum, theirs, mDLSE, scale):
        tile, _, _ = cute.arch.block_idx()
        tiles, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_launch_dependents()
        tile = tiles - 1 - tile  # the main kernel begins with the first heads, and finds them in L2
        _, heads, seqlen, _ = mO.shape
        blocks = (mStats if const_expr(mDQ_sum is None) else mDQ_sum).shape[1]  # the same in both
        head_index, block = tile // blocks, tile % blocks
        batch, head = head_index // heads, head_index % heads
        inputs = mO, mDO, mLSE, mStats, mDLSE
        self.reduce(*inputs, mDQ_sum, theirs, batch, head, head_index, block, seqlen, scale=scale)

    @cute.jit
    def reduce(
        self, mO, mDO, mLSE, mStats, mDLSE, mDQ_sum, theirs, batch, head, head_index, block, seqlen,
        exceeds=None, scale=None,
    ):  # fmt: skip
        """A CTA, a block of 64 queries; `head_index` is the row of scratch. What `exceeds` makes NaN."""
        tidx, _, _ = cute.arch.thread_idx()
        heads = mO.shape[1]
        group, chunk = tidx // self.chunks, tidx % self.chunks
        columns, past_columns = mO.shape[3], False
        if const_expr(not cute.is_static(columns)):  # past them, the last ones again, which count for nothing
            past_columns = chunk * VECTOR >= columns
            chunk_read = cutlass.min(chunk, columns // VECTOR - 1)
        else:
            chunk_read = chunk

        # Rows past the end read the last row again, and count for nothing: loads without branches are all in
        # flight before the first is waited for.
        fragment = cute.make_layout((VECTOR, ROWS_IN_FLIGHT))
        rO, rDO = [cute.make_rmem_tensor(fragment, mO.element_type) for _ in range(2)]  # (column, row)
        for i in range_constexpr(ROWS_IN_FLIGHT):
            row = cutlass.min(block * BLOCK + group + BLOCK // ROWS_IN_FLIGHT * i, seqlen - 1)
            for mX, rX in ((mO, rO), (mDO, rDO)):
                gX = cute.local_tile(mX[batch, head, row, None], (VECTOR,), (chunk_read,))
                cute.autovec_copy(gX, rX[None, i])

        if const_expr(mDQ_sum is not None and theirs is None):
            self.write_zeros(mDQ_sum, head_index, block)
        elif const_expr(mDQ_sum is not None):
            kv_heads, first, last = theirs
            kv_head = head_index // (heads // kv_heads)
            if kv_head < first or kv_head >= last:
                self.write_zeros(mDQ_sum, head_index, block)

        for i in range_constexpr(ROWS_IN_FLIGHT):
            row = group + BLOCK // ROWS_IN_FLIGHT * i
            products = rO[None, i].load().to(Float32) * rDO[None, i].load().to(Float32)
            row_dot = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            if const_expr(not cute.is_static(columns)):
                row_dot = Float32(0.0) if past_columns else row_dot
            row_dot = cute.arch.warp_reduction_sum(row_dot, threads_in_group=self.chunks)
            if chunk == 0:
                past = block * BLOCK + row >= seqlen
                if const_expr(mDLSE is not None):
                    row_dot -= mDLSE[batch, head, cutlass.min(block * BLOCK + row, seqlen - 1)]
                row_dot = Float32(0.0) if past else row_dot
                if const_expr(self.folds):
                    write_parts(-row_dot, mStats[head_index, block, row, None], 1)
                else:
                    mStats[head_index, block, 1, row] = row_dot
        if tidx < BLOCK:
            row = block * BLOCK + tidx
            lse = mLSE[batch, head, cutlass.min(row, seqlen - 1)] * LOG2_E
            if const_expr(exceeds is not None):
                lse = Float32(math.nan) if exceeds else lse
            unseen = row >= seqlen or lse == -Float32.inf
            lse = Float32.inf if unseen else lse
            if const_expr(self.folds):
                log2_scale = exponent_scale(self.scale if const_expr(scale is None) else scale)
                write_parts(cut_off(-lse / log2_scale), mStats[head_index, block, tidx, None], 0)
            else:
                mStats[head_index, block, 0, tidx] = lse

    @cute.jit
    def write_zeros(self, mDQ_sum, head_index, block):
        tidx, _, _ = cute.arch.thread_idx()
        _, _, columns, size = mDQ_sum.shape
        zero = cute.make_rmem_tensor(cute.make_layout(QUAD), Float32)
        zero.fill(0.0)
        sums = cute.make_layout((QUAD, self.threads, columns * size // QUAD // self.threads))
        gDQ_sum = cute.make_tensor(mDQ_sum[head_index, block, None, None].iterator, sums)
        for i in range_constexpr(sums.shape[2]):
            cute.autovec_copy(zero, gDQ_sum[None, tidx, i])


class Postprocess:
    """dQ = dQ_sum/√d, rounded. A CTA takes a block, a warpgroup 64 of its columns: with the layout the sums
    were left in, they leave for shared memory like any accumulator, and for dQ by TMA, in whole rows. Where
    there may be several sums to add, a CTA is `narrow`, with 64 columns of a block, so that more SMs read.

    mZeroed, if there is one, is what the main kernel counted in: it is left at zero. Where the first to come
    stored (`tiles`, of the main kernel, knows how many came), dQ is what they left in each sum, or zero.

    dK and dV in parts are sums of that kind, too: `key_parts.PartSums`."""

    def __init__(
        self, head_dim: int, tiles: object = None, scaled: bool = True, packed: int | None = None,
        narrow: bool = False, apart: int | None = None,
    ):  # fmt: skip
        self.apart = apart  # of packed sequences those with up to so many keys have no sums, if any
        self.packed = packed // BLOCK if packed else None  # as `Preprocess`
        self.batch = Packed() if packed else DENSE
        self.narrow, self.columns, self.tiles = narrow, 1 if narrow else column_blocks(head_dim), tiles
        self.ctas = column_blocks(head_dim) // self.columns  # of a block
        self.head_dim = BLOCK * self.columns
        self.threads = WARPGROUP * self.columns
        self.scale = 1.0 / math.sqrt(head_dim) if scaled else 1.0

    @cute.jit
    def __call__(self, mDQ_sum, mDQ, stream, mZeroed=None, keys=None, numbers=None, mList=None):
        """Where the first to come stored `keys` are how many there are, of how many heads; mList of packed
        sequences, as in `Preprocess`."""
        batch, heads, seqlen, _ = mDQ.shape
        blocks = cute.ceil_div(seqlen, BLOCK)
        if const_expr(self.packed is not None):
            blocks = mDQ_sum.shape[1]
        mma, store = self.layout_of(mDQ.element_type), self.store_atom(mDQ)
        shape = {"grid": (blocks * self.ctas, heads, batch), "block": (self.threads, 1, 1)}
        self.postprocess(mma, *store, mDQ_sum, mZeroed, keys, numbers, mList).launch(
            **shape,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def postprocess(self, mma, store_DQ, mDQ, mDQ_sum, mZeroed, keys, numbers, mList):
        seqlen_kv, of_keys = None, None
        if const_expr(keys is not None):
            seqlen_kv, key_heads = keys
            of_keys = *keys, key_heads * cute.ceil_div(seqlen_kv, self.tiles.tile_kv)
        self.take(numbers, mDQ_sum, mDQ, of_keys)
        shared = self.allocate(store_DQ.value_type)
        # From the last head back: the main kernel has just left that in L2.
        block, head, batch = [n - 1 - i for n, i in zip(cute.arch.grid_dim(), cute.arch.block_idx())]
        column = 0
        if const_expr(self.narrow):
            block, column = block // self.ctas, block % self.ctas
        cute.arch.griddepcontrol_wait()
        if const_expr(self.packed is None):
            head_index, lengths = batch * mDQ.shape[2] + head, (mDQ.shape[0], seqlen_kv)
            place, of_one = (block, head, batch), {"mZeroed": mZeroed, "column": column}
            self.round_block(mma, store_DQ, mDQ, shared, mDQ_sum, place, head_index, lengths, **of_one)
        else:
            if const_expr(mZeroed is not None):
                ctas, _, _ = cute.arch.grid_dim()
                tidx, _, _ = cute.arch.thread_idx()
                counters = cute.size(mZeroed)
                last = counters if tidx == 0 else 0
                for i in range(head * ctas + block, last, ctas * mDQ.shape[2], unroll=1):
                    mZeroed[i] = Int32(0)
            tile, own = block // self.packed, block % self.packed
            if tile < mList[0, 0]:
                first, _, *sequence, at = listed(mList, tile)
                mSums = cute.domain_offset((0, at * self.packed, 0, 0), mDQ_sum)
                own_place = (tile - first) * self.packed + own, head, *sequence
                own_lengths = self.batch.lengths(own_place, None)
                summed = own_place[0] * BLOCK < own_lengths[0]  # a tile's blocks may be more than have rows
                if const_expr(self.apart is not None):
                    summed = summed & ((own_lengths[1] == 0) | (own_lengths[1] > self.apart))
                if summed:
                    self.round_block(mma, store_DQ, mDQ, shared, mSums, own_place, head, own_lengths)

    def layout_of(self, dtype: type) -> cute.TiledMma:
        """The product whose accumulator a block of sums lies as: only that is used of it."""
        return make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, self.columns, 1),
            (BLOCK, BLOCK), warpgroup.OperandSource.SMEM,
        )  # fmt: skip

    def store_atom(self, mDQ) -> tuple[cute.CopyAtom, cute.Tensor]:
        return store_atom(self.batch.view(mDQ), BLOCK, self.head_dim)

    def take(self, numbers, mDQ_sum, mDQ, of_keys=None) -> None:
        """What a launch gives; inside a kernel, anew in each. `of_keys`: their length, heads (or parts of
        them) and tiles."""
        if numbers is not None and numbers[0] is not None:
            self.scale = numbers[0]
        if self.tiles is not None:
            self.tiles.take(numbers)  # what it took inside another kernel nobody may use here
            if self.tiles.counts_sums:
                (seqlen_q, _, heads, batches), (seqlen_kv, key_heads, tiles) = mDQ.shape, of_keys
                heads *= batches
                self.tiles.count_sums(mDQ_sum, heads, tiles, seqlen_q, seqlen_kv, heads // key_heads)

    def allocate(self, dtype: type) -> tuple[cute.Tensor, cute.Tensor | None]:
        """Shared memory for what leaves: (row, column, 1); and of a narrow CTA, for the sums that come:
        (register, g, thread, sum)."""
        smem = SmemAllocator()
        sX, sRing = allocate_tiles(smem, dtype, BLOCK, self.head_dim, 1), None
        if self.narrow:
            shape = QUAD, BLOCK // 8, self.threads, IN_FLIGHT
            side_by_side = cute.make_ordered_layout(shape, order=(0, 2, 1, 3))  # what a warp accesses at once
            sRing = smem.allocate_tensor(Float32, side_by_side, 128)
        return sX, sRing

    @cute.jit
    def round_block(
        self, mma, store_DQ, mDQ, shared, mDQ_sum, place, head_index, lengths=None, mZeroed=None, parts=None,
        column=0,
    ):  # fmt: skip
        """A CTA: the block of a place, of a narrow one its column-th column block; `head_index` is the row of
        scratch, per sum, of which there are `parts` or as many as follow from `lengths`."""
        tidx, _, _ = cute.arch.thread_idx()
        (sDQ, sRing), block, dtype = shared, place[0], store_DQ.value_type
        own_column, thread = column + tidx // WARPGROUP, tidx % WARPGROUP

        rDQ = cute.make_rmem_tensor(mma.partition_shape_C((BLOCK, self.head_dim)), Float32)
        quads = cute.make_tensor(rDQ.iterator, cute.make_layout((QUAD, BLOCK // 8)))  # (register, g)
        if const_expr(mZeroed is not None):
            if block == 0 and column == 0 and tidx == 0 and head_index < mZeroed.shape[0]:
                mZeroed[head_index] = 0
        held = cute.make_layout((QUAD, WARPGROUP, BLOCK // 8))
        if const_expr(parts is not None):
            rDQ.fill(0.0)
            row = head_index * parts
            add_sums(quads, sRing, mDQ_sum, row, parts, (block, own_column), tidx)
        elif const_expr(self.tiles is None):
            gDQ_sum = cute.make_tensor(mDQ_sum[head_index, block, own_column, None].iterator, held)
            for g in range_constexpr(BLOCK // 8):
                cute.autovec_copy(gDQ_sum[None, thread, g], quads[None, g])
        else:
            rDQ.fill(0.0)
            row, q_tile = head_index * self.tiles.sums, block // self.tiles.blocks
            if const_expr(self.narrow):
                came = self.tiles.sums_at(q_tile, *lengths, head_index % self.tiles.group)
                add_sums(quads, sRing, mDQ_sum, row, came, (block, own_column), tidx)
            else:  # one sum, or two
                came = self.tiles.turns_at(q_tile, *lengths)
                for i in range_constexpr(self.tiles.sums):
                    gDQ_sum = cute.make_tensor(mDQ_sum[row + i, block, own_column, None].iterator, held)
                    if came > i:
                        add_sum(quads, gDQ_sum, thread)

        rDQ16 = cute.make_rmem_tensor(rDQ.layout, dtype)
        rDQ16.store((rDQ.load() * self.scale).to(dtype))
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        copy_DQ = cute.make_tiled_copy_C(stmatrix, mma).get_slice(tidx)
        cute.copy(stmatrix, copy_DQ.retile(rDQ16), copy_DQ.partition_D(sDQ)[None, None, None, 0])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(tidx // WARP) == 0:
            blocks = None, None  # of rows, and of columns
            tDQgDQ, tDQsDQ = partition_tma(store_DQ, self.batch.queries(mDQ, place[1], place), sDQ, blocks)
            cute.copy(store_DQ, tDQsDQ[None, 0], tDQgDQ[None, block, column])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory goes with the CTA


@cute.jit
def add_sums(quads, sRing, mSums, row, count, at, tidx):
    """Add what `count` rows of sums, from `row` on, hold of a block and column block to an accumulator, in
    their order. IN_FLIGHT are on their way at once, to places that each thread has for itself: one after the
    other each would wait for L2, and in registers they would leave an SM fewer CTAs."""
    (block, column), thread = at, tidx % WARPGROUP
    for i in range_constexpr(IN_FLIGHT):
        if i < count:
            send_for(mSums[row + i, block, column, None], sRing[None, None, tidx, i], thread)
        cute.arch.cp_async_commit_group()
    for i in range(count, unroll=1):
        cute.arch.cp_async_wait_group(IN_FLIGHT - 1)
        sSum, rSum = sRing[None, None, tidx, i % IN_FLIGHT], cute.make_rmem_tensor(quads.layout, Float32)
        cute.autovec_copy(sSum, rSum)
        quads.store(quads.load() + rSum.load())
        if i + IN_FLIGHT < count:
            send_for(mSums[row + i + IN_FLIGHT, block, column, None], sSum, thread)
        cute.arch.cp_async_commit_group()


def add_sum(quads, gQuads, thread) -> None:
    """Add a thread's elements of a column block (register, thread, g) to its accumulator (register, g)."""
    rSum = cute.make_rmem_tensor(quads.layout, Float32)
    for g in range(BLOCK // 8):
        cute.autovec_copy(gQuads[None, thread, g], rSum[None, g])
    quads.store(quads.load() + rSum.load())


@cute.jit
def send_for(gSum, sSum, thread):
    """Begin to copy a thread's elements of a column block (4096,), as its accumulator (register, g) has
    them."""
    past_l1 = cpasync.LoadCacheMode.GLOBAL  # other SMs have written them
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(past_l1), Float32, num_bits_per_copy=QUAD * Float32.width)
    gQuads = cute.make_tensor(gSum.iterator, cute.make_layout((QUAD, WARPGROUP, BLOCK // 8)))
    for g in range_constexpr(BLOCK // 8):
        cute.copy(atom, gQuads[None, thread, g], sSum[None, g])
