"""K6: the production forward.

The idea          The CTAs stay and fetch tiles, longest first: loads of the next tile hide the end of this
                  one. O is rescaled only when a row's maximum has grown by more than the row has room for
                  (`first_room`), at most 2⁸: asked of three exponents at a time, as integers
                  (`arithmetic.largest_positive`), by a warp's vote before the wait for P·V; at head_dim 64
                  of half a tile while the other half is exponentiated.
What changes      against k6_2: persistent CTAs and a tile counter; a tile's last P·V beside the next one's
                  first Q·Kᵀ, up to head_dim 128; hidden keys in a loop of their own; lazy rescaling; O by
                  TMA; a tile shape by head_dim; fp16, GQA, unequal lengths, head_dim 256; no more turns.
What does not     rings, warp specialisation, the half-tile lag of P·V behind Q·Kᵀ.
Supports          bf16 and fp16; head_dim 64, 128, 256, and multiples of 8 between in wider tiles, V's and
                  O's its own (notes/head_dims.md); lengths ≥ 1; GQA and MQA; causal masks, windows, soft
                  caps, sinks and packed sequences, as `contract.Problem` defines them. A query that sees no
                  key gives O = 0, and LSE = −∞ or the sink.
Where to read     Here are the consumers; k6_stores.py says how they store, k6_loads.py has the producer,
                  device/query_tiles.py which tiles are seen. notes/k6.md: the schedule drawn, what each idea
                  is worth, what lost; k6_policies.md.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from .calls import forward_scratch, given_names, refuse_forward, run_forward
from .calls_slices import NOWHERE
from .contract import Compiled, LazyMaximum, Problem, Scratch, Stage, Tensors, Work
from .device import lazy
from .device.compiling import ELEMENTS, compile_for_torch, fake_fp32, fake_gqa
from .device.constants import LN_2, LOG2_E, SMEM_MAX, SMS, WARP, WARPGROUP
from .device.far_scores import CappedQueries, add_rounding
from .device.forward_shapes import CONFIGS, VARIANTS, config_of, variants_for  # noqa: F401  for ablations
from .device.given import fake_given, fake_list, take_apart
from .device.key_slices import SlicedKeys, Slices, fake_slices
from .device.limits import has_own_kernel, tile_dims
from .device.masks import Mask, mask_of
from .device.packed import DENSE
from .device.piece_sums import SummingPieces
from .device.products import Products, Rows, attention_mmas, multiply_pv, multiply_qk
from .device.query_tiles import ROWS, Config, KeyTile, work_on_query_tiles
from .device.rings import CONSUMER, OwnStages, await_next, leave_hidden, skip, tma_rings
from .device.rows import OWN_ROWS, sum_of_row, with_sink
from .device.shared_tiles import packed_tiles
from .device.stores import WARPS, WarpStores, await_stores
from .device.tile_order import message_ring
from .device.tma import allocate_tiles, load_atom, store_atom
from .device.wgmma import exchanged, round_fragment
from .k6_loads import END, FIRST, FOLLOWS, LoadingQueries
from .k6_stores import Barrier, StoringQueries

STAGES = (
    Stage(
        "k6",
        "the production forward",
        "persistent CTAs, lazy rescaling, masked tiles apart, TMA store, a tile shape by head_dim",
        "k6_2",
        model="flash_attention_lazy",
        rounds_p=True,
    ),
)

# How far a row's maximum may rise before O is rescaled. A term 2^(s − max) that has become a maximum is 1 and
# exact; one above 1 is rounded, and its row with it if it makes up much of the row's sum.
GROWTH = 8.0  # in powers of two; at most
SHARE = 2.0  # of a row's first tile's sum: the term for which there is room, at most (`first_room`)


class FlashAttentionForward(CappedQueries, LoadingQueries, SummingPieces, StoringQueries):
    """The CTA: C = `consumers` warpgroups, then a warpgroup of which one warp, the producer, loads.

    barrier, how often         who arrives, how many                     who waits
    Q full, C·q_stages         the producer, 1, and the TMA's bytes      the consumer whose 64 rows they are
    Q empty, C·q_stages        that consumer's warps, 4                  the producer
    K, V full, stages each     the producer, 1, and the TMA's bytes      all consumers
    K, V empty, stages each    all consumers' warps, 4·C                 the producer
    tile told, 1               the producer's lanes, 32                  all consumers
    tile heard, 1              all consumers' threads, 128·C             the producer
    Barrier.CTA                everyone, once: the rings are there       everyone
    Barrier.Q_READ + c, C      consumer c's threads, 128, done with Q    the same, where O takes Q's place
    Barrier.LEFT + c, C        the same, done with their first piece     the warp behind the producer (slices)
    Barrier.PARTS              all consumers, done with K and V          the same, before pieces are there
    Barrier.FAR + c, C         consumer c's threads, 128, in each tile   the same (soft caps)
    Barrier.TURN + c, C − 1    consumer c's, 128, with its first scores  those of c + 1 (`Config.in_turn`)
    """

    def __init__(
        self, head_dim: int, mask: Mask, dtype: str, config: Config | None = None, sms: int = SMS,
        share: float = SHARE, exact: bool = False, has: tuple[str, ...] = (),
        value_dim: int | None = None, sliced: bool = False,
    ):  # fmt: skip
        """`share` 0 leaves GROWTH alone to decide, of far tiles too; `exact` follows maxima in each, as an
        eager softmax does. `has` names what a launch is given: `calls.given_names`. `sliced`: k6_slices."""
        assert share >= 0.0, "a share of a sum"
        self.share, self.growth = (0.0, 0.0) if exact else (share, GROWTH)
        self.value_dim, config = value_dim or head_dim, config or CONFIGS[head_dim]  # columns of V and O
        self.has, self.follows_far = has, not self.share or dtype != "bfloat16" or "softcap" not in has
        self.has_policies = bool({*has} - {"scale"})
        batch = SlicedKeys(config.tile_kv) if sliced else DENSE
        batch = packed_tiles(config.consumers) if "sequences" in has else batch
        super().__init__(head_dim, mask, ROWS * config.consumers, config.tile_kv, batch)
        self.dtype, self.config, self.sms = ELEMENTS[dtype], config, sms
        self.consumers, self.stages = config.consumers, config.stages
        self.threads = WARPGROUP * (self.consumers + 1)
        assert self.tile_kv % (8 * config.parts) == 0, "a part is some of the tile's groups of 8 columns"
        self.scale_log2 = LOG2_E / math.sqrt(head_dim)
        # 3 tiles of queries (head_dim 64): two of Q, one of O; 2 (128): O over its own Q; 1 (256): for both.
        self.q_and_o = max(n for n in (1, 2, 3) if self.tile_bytes(n) <= SMEM_MAX // config.ctas - 1024)
        self.q_stages, self.o_over_q = min(self.q_and_o, 2), self.q_and_o < 3
        # The tiles that only other consumers see must fit beside one stage of V: see `leave_hidden`.
        assert self.consumers <= self.stages and self.tile_kv >= ROWS
        self.message = 1 + self.batch.words  # how a tile is announced, and its place

    def section_bytes(self, seqlen_kv):  # the same heads up to 2048 or 4096 keys, then 8 or 16 MiB
        return cutlass.min(seqlen_kv, 4096 if self.head_dim == 256 and not self.has_policies else 2048) * 4096

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, *rest):
        """`rest` is `calls.forward_scratch` or `calls_slices.slices_scratch`, what `calls.given_names`
        names, of packed sequences as how many tiles each counts (0: they are listed), and the stream."""
        batch, heads, seqlen_q, _ = mQ.shape
        listing, tiles = None, cute.ceil_div(seqlen_q, self.tile_q) * heads * batch
        if const_expr(self.sliced):
            listing, tiles = self.slices_of(*rest[:2], mQ, mK, mO)
            rest = rest[2:]
        if const_expr(self.packed):
            *rest, each, stream = rest
            rest = *rest, stream
        mList, mCounter, given, stream = take_apart(rest, self.has)
        if const_expr(self.packed):
            totals, ctas = (seqlen_q, mK.shape[2]), self.sms * self.config.ctas
            listing, tiles = self.list_or_count(mList, given, each, totals, heads, ctas, stream)
        mQ, mK, mV, mO = [self.batch.view(mX) for mX in (mQ, mK, mV, mO)]
        loads = *load_atom(mQ, self.q_box, self.head_dim), *load_atom(mK, self.tile_kv, self.head_dim)
        loads = *loads, *load_atom(mV, self.tile_kv, self.value_dim)
        sizes = self.sizes(loads[1], loads[3])
        mmas = attention_mmas(self.dtype, self.tile_kv, self.value_dim)
        tensors = *loads, *store_atom(mO, self.o_box, self.value_dim), mLSE, mCounter
        self.kernel(*mmas, *tensors, tiles, listing, sizes, *self.on_host(*given[:3]), given.sink).launch(
            grid=(cutlass.min(tiles, self.sms * self.config.ctas), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.ctas,  # who share the registers of an SM
            preferred_smem_carveout=None if self.config.ctas == 1 else 100,  # or the compiler asks the driver
            use_pdl=self.packed,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mma_qk, mma_pv, load_Q, mQ, load_K, mK, load_V, mV, store_O, mO, mLSE, mCounter, tiles, listing,
        sizes, scale, window, cap, mSink,
    ):  # fmt: skip
        self.take(scale, window, cap)
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        consumer_warps, begun = WARPS * self.consumers, None
        if const_expr(self.sliced):
            self.slices, begun = Slices(*listing), Int32(0)
            self.take_queries(mQ.shape[0], sizes[-1].divisor, sizes[-1])
            if tidx == consumer_warps * WARP:
                begun = cute.arch.atomic_add(mCounter.iterator.llvm_ptr, Int32(1))
        elif const_expr(self.packed):
            begun = self.begin_loading(warp_idx == consumer_warps, tiles, mCounter, mQ, mK, listing)
        extents = self.extents_of(mQ, mK)
        smem = SmemAllocator()
        q_places = self.q_stages * self.consumers  # of Q; a consumer's are its number, and that + consumers
        sO = sQ = allocate_tiles(smem, self.dtype, ROWS, self.head_dim, q_places)  # (row, head_dim, place)
        if const_expr(not self.o_over_q):
            sO = allocate_tiles(smem, self.dtype, ROWS, self.value_dim, self.consumers)
        elif const_expr(self.value_dim < self.head_dim):
            sO = cute.local_tile(sQ, (ROWS, self.value_dim, q_places), (0, 0, 0))
        of_keys = lambda columns: allocate_tiles(smem, self.dtype, self.tile_kv, columns, self.stages)
        sK, sV = of_keys(self.head_dim), of_keys(self.value_dim)  # (key, column, stage)
        sVt = exchanged(sV)  # (head_dim, key, stage): the same bytes, as operand B of P·V takes them
        sTile = smem.allocate_tensor(Int32, cute.make_layout(self.message), 16)
        if const_expr(self.sliced):
            sLeft = smem.allocate_tensor(Int32, cute.make_layout(self.consumers), 16)
        q_ring, k_ring, v_ring = tma_rings(
            smem,
            (q_places, ROWS * self.head_dim * 2, WARPS),  # every consumer waits for its own rows of Q
            (self.stages, self.tile_kv * self.head_dim * 2, consumer_warps),
            (self.stages, self.tile_kv * self.value_dim * 2, consumer_warps),
            # From a shuffle it stays in a register (notes/gotchas.md, "A loop's bound may be computed anew").
            lane=cute.arch.shuffle_sync(cute.arch.lane_idx(), cute.arch.lane_idx()),
        )
        tile_ring = message_ring(smem, WARPGROUP * self.consumers)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()  # Barrier.CTA

        if warp_idx >= consumer_warps:
            # 1. the producer
            cute.arch.setmaxregister_decrease(self.config.registers[0])
            if warp_idx == consumer_warps:
                rings = q_ring, k_ring, v_ring, tile_ring
                loads = load_Q, mQ, sQ, load_K, mK, sK, load_V, mV, sV
                self.produce(rings, sTile, loads, mCounter, tiles, listing, sizes, begun)
            elif const_expr(self.sliced):
                if warp_idx == consumer_warps + 1:
                    self.tell_others(sLeft, self.consumers, Barrier.LEFT)
        else:
            # 2. a consumer's prologue, up to the first tile's S
            #     issue S = Q·K₀ᵀ
            #     for each tile of queries:
            #         wait for S · P = softmax of S                                                  (2.)
            #         for each tile of keys j = 1, 2, …:   `step`                                    (3.)
            #             issue S = Q·Kⱼᵀ and O += P·Vⱼ₋₁ · wait for S · the exponents of P · wait for O · P
            #         issue the last O += P·V · hear of the next tile · issue its S = Q·K₀ᵀ          (4.)
            #         wait for O · O / row sums to shared memory, from there by TMA · LSE
            cute.arch.setmaxregister_increase(self.config.registers[1])
            consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
            thread = tidx % WARPGROUP
            q_get = OwnStages(q_places, self.consumers, consumer)
            k_get, v_get = [pipeline.make_pipeline_state(CONSUMER, self.stages) for _ in range(2)]
            tile_get = pipeline.make_pipeline_state(CONSUMER, 1)
            x = Products(mma_qk, mma_pv, sQ, sK, sVt, k_ring, v_ring)
            rows = Rows(x, self.config.parts, thread, has_excess=not self.follows_far)
            S, O, row_max, row_sum, excess = rows.S, rows.O, rows.max, rows.sum, rows.excess
            room = cute.make_rmem_tensor(cute.make_layout(OWN_ROWS), Float32)  # (row): see `first_room`
            room.fill(self.growth)
            o_stores = WarpStores(mma_pv, sO, store_O, mO, thread, warp_idx, consumer_warps)

            announced, place = self.hear(tile_ring, tile_get, sTile, consumer)
            tile_get.advance()
            if const_expr(self.plain):
                q_ring.consumer_wait(q_get)
                k_ring.consumer_wait(k_get)
                self.await_turn(consumer, Barrier.TURN)
                multiply_qk(x, q_get, k_get)
            first_row, kv_blocks, own_blocks, visible, begin = self.span_of(place, consumer, extents)
            if const_expr(not self.plain):
                k_get = await_next(q_ring, k_ring, q_get, k_get, begin[0], announced != END)
                multiply_qk(x, q_get, k_get)
            warpgroup.wait_group(0)
            self.pass_turn(consumer, Barrier.TURN)
            while announced != END:
                # The first S is there, waited for above or at the loop's end. K runs one tile ahead of V now.
                k_ring.consumer_release(k_get)
                k_get.advance()
                if const_expr(self.mask.hides_first or self.batch.shares):
                    # Not before the last tile's Q is released: the producer puts this one's before V.
                    v_get = skip(v_ring, v_get, begin[0])
                row_max.fill(-Float32.inf)
                row_sum.fill(0.0)
                lengths, (_, first, edge) = self.batch.lengths(place, extents), begin
                limits = first, first_row, *lengths
                far = self.cap_first(S)
                if const_expr(self.mask.hides_first):
                    self.hide(S, -Float32.inf, *rows.limits, first_row, first, *lengths, both_edges=True)
                elif visible == 0:
                    self.hide(S, -Float32.inf, *rows.limits, first_row, 0, *lengths)
                lazy.first_maximum(S, row_max, self.scale_log2)
                far, roughly, least = self.behind_first(far, rows, first_row, lengths, Barrier.FAR + consumer)
                lazy.first_softmax(S, row_max, row_sum, self.scale_log2, least)
                round_fragment(x.rS, x.rP, self.dtype)
                if const_expr(self.mask.hides_first):
                    # Tiles before whose end a row may have seen no key: one or two with the first.
                    for block in range(first + 1, edge, unroll=1):
                        self.step(x, rows, room, block, limits, q_get, k_get, v_get, KeyTile.EDGE, least)
                        k_get.advance()
                        v_get.advance()
                if const_expr(self.share > 0.0):
                    for r in range_constexpr(OWN_ROWS):
                        total = sum_of_row(row_sum[r])
                        part = self.part_seen(self.share, own_blocks - first, lengths[1])
                        room[r] = lazy.first_room(total, part, self.most_room(self.growth, roughly))
                if const_expr(self.o_over_q and self.q_stages == 2):
                    # Leave the place of the Q before, when this warp's part of O has been read from there.
                    if announced == FOLLOWS:
                        await_stores()
                        q_ring.consumer_release(q_get.other)

                # 3. main loop: tiles seen whole, under a cap of one kind; then those with hidden keys
                excess.fill(0.0)  # between the loops it would cost the second one uniform registers
                for tile, rough, start, end in self.loops(edge, visible, far, roughly):
                    for block in range(start, end, unroll=1):
                        self.step(x, rows, room, block, limits, q_get, k_get, v_get, tile, rough=rough)
                        # V's next stage is K's of now: 2 instructions less than to advance it, below 20 more.
                        v_get = k_get.clone()
                        k_get.advance()
                self.mend(roughly, room, row_max, row_sum, excess)
                for block in range(cutlass.max(edge, visible), own_blocks, unroll=1):
                    self.step(x, rows, room, block, limits, q_get, k_get, v_get, KeyTile.HIDES)
                    k_get.advance()
                    v_get.advance()
                hidden, past_the_end = kv_blocks - own_blocks, first_row >= lengths[0]
                hidden, k_get, v_get = leave_hidden(
                    hidden, past_the_end, k_ring, v_ring, k_get, v_get, self.mask.hides or self.batch.shares
                )
                if const_expr(not self.o_over_q):
                    q_ring.consumer_release(q_get)

                # 4. the last P·V (if Q has two stages, beside the next tile's first Q·Kᵀ); then O and LSE
                q_left = q_get.this
                o_place = q_left.index if const_expr(self.o_over_q) else consumer
                here, this_row = place, first_row
                v_ring.consumer_wait(v_get)
                multiply_pv(x, v_get, own_blocks - first)  # of the tile before `own_blocks`, the last
                if const_expr(self.sliced):
                    self.await_pieces(place, warp_idx)
                    warpgroup.wait_group(0)
                    here, this_row = self.join(x.rO, O, row_max, row_sum, place, first_row, tidx, warp_idx)
                    if announced == FIRST:
                        self.say_left(sLeft, place, tidx, Barrier.LEFT)
                inverse, lse = [None, None], [None, None]
                for r in range_constexpr(OWN_ROWS):
                    total, factor = sum_of_row(row_sum[r]), 1.0
                    if const_expr(mSink is not None):
                        total, row_max[r], factor = with_sink(total, row_max[r], mSink[place[1]])
                    rounded = total if self.follows_far else total + sum_of_row(excess[r, 0]) * factor
                    inverse[r] = 0.0 if total == 0.0 else cute.arch.rcp_approx(rounded) * factor
                    lse[r] = (row_max[r] + cute.math.log2(total, fastmath=True)) * LN_2
                announced, place = self.hear(tile_ring, tile_get, sTile, consumer)
                tile_get.advance()
                q_get.advance()
                ahead = hidden + self.batch.before(place, consumer)  # tiles of keys until its next one
                if const_expr(self.mask.hides_first):
                    first_row, kv_blocks, own_blocks, visible, begin = self.span_of(place, consumer, extents)
                    ahead = hidden + begin[0]
                if const_expr(self.q_stages == 2):
                    k_get = await_next(q_ring, k_ring, q_get, k_get, ahead, announced != END)
                    # Without a next tile, of what lies there; nobody looks at it.
                    multiply_qk(x, q_get, k_get)
                # Here, beside products, what the next tile's start would wait for.
                if const_expr(not self.mask.hides_first):
                    first_row, kv_blocks, own_blocks, visible, begin = self.span_of(place, consumer, extents)
                warpgroup.wait_group(self.q_stages - 1)  # P·V; the next Q·Kᵀ, if it is issued, may go on
                v_ring.consumer_release(v_get)
                v_get.advance()
                v_get = skip(v_ring, v_get, hidden)
                done = O, x.rO, inverse, o_stores, o_place, Barrier.Q_READ + consumer
                done = *done, mLSE, lse, here, this_row, lengths[0], rows.where_S
                if const_expr(self.sliced):
                    if here[0] != NOWHERE:  # or the piece is left
                        self.store_tile(*done)
                else:
                    self.store_tile(*done)
                if const_expr(self.q_stages == 1):
                    q_ring.consumer_release(q_left)
                    k_get = await_next(q_ring, k_ring, q_get, k_get, ahead, announced != END)
                    multiply_qk(x, q_get, k_get)
                warpgroup.wait_group(0)

            await_stores()
            if const_expr(self.sliced):
                # 5. parts of sums of pieces, where all CTAs make them
                if self.slices.parts > 0:
                    sQuads = self.quads_in(sK, sV)
                    cute.arch.barrier(barrier_id=Barrier.PARTS, number_of_threads=WARPGROUP * self.consumers)
                    announced, place = self.hear(tile_ring, tile_get, sTile, consumer)
                    while announced != END:
                        tile_get.advance()
                        if place[4] > 1:  # pieces; one alone is stored
                            self.make_part(place, sQuads, mLSE, extents[0], warp_idx)
                        announced, place = self.hear(tile_ring, tile_get, sTile, consumer)

    def step(self, x, rows, room, kv_block, limits, q_get, k_get, v_get, tile, least=None, rough=False):
        """Q·Kᵀ of one tile, a `KeyTile`, beside P·V of the tile before, and the softmax of the one, part by
        part: while a part is subtracted and asked for its growth, the part before it is exponentiated."""
        first, first_row, *lengths = limits
        x.k_ring.consumer_wait(k_get)
        multiply_qk(x, q_get, k_get)
        x.v_ring.consumer_wait(v_get)
        multiply_pv(x, v_get, kv_block - first)
        warpgroup.wait_group(1)
        x.k_ring.consumer_release(k_get)
        hides, edge = tile in (KeyTile.HIDES, KeyTile.EDGE), tile == KeyTile.EDGE
        counts_rounding = not self.follows_far and tile in (KeyTile.FAR, KeyTile.HIDES)
        if rough:
            self.cap.keep_largest(rows.S, room)
        sums = rows.sum_of_tile() if counts_rounding else rows.sum
        # Capped scores are subtracted before they are hidden: all of them, or a part would miss a growth.
        parts = [rows.S] if edge or (hides and self.cap is not None) else rows.parts
        if hides:
            if self.cap is not None:
                self.cap.exponents(rows.S, rows.max)
            self.hide(rows.S, -Float32.inf, *rows.limits, first_row, kv_block, *lengths, both_edges=edge)
        for p, part in enumerate(parts):
            if self.cap is None:
                lazy.subtract(part, rows.max, self.scale_log2)
            elif not hides:
                self.cap.cap_whole(tile == KeyTile.FAR, rough, part, rows.max)
            if p > 0:
                lazy.exponentiate(parts[p - 1], sums)
            if edge:
                lazy.follow_maximum(part, rows.O, rows.max, rows.sum, least)
            elif tile != KeyTile.FAR or self.follows_far:
                lazy.raise_maximum(part, parts[:p], rows.relative, rows.max, rows.sum, room, self.share > 0.0)
        warpgroup.wait_group(0)
        x.v_ring.consumer_release(v_get)
        lazy.exponentiate(parts[-1], sums)
        if counts_rounding:
            add_rounding(rows.S, sums, rows.sum, rows.excess)
        round_fragment(x.rS, x.rP, self.dtype)


supports = refuse_forward


def run_kernel(compiled: Compiled, t: Tensors, each: int = 0) -> None:
    """`run_forward`; packed sequences count as `each` tiles, or are listed."""
    run_forward(compiled if t.cu_seqlens is None else lambda *given: compiled(*given, each), t)


def workspace(problem: Problem, config: Config | None = None, **options: object) -> Scratch:
    return forward_scratch(problem, ROWS * (config or config_of(problem)).consumers)


def kernel_for(
    problem: Problem, config: Config | None = None, of: type = FlashAttentionForward, **options: object
) -> FlashAttentionForward:
    """`of`: the class."""
    (columns, of_values), config = tile_dims(problem), config or config_of(problem)
    kind = columns, mask_of(problem), problem.dtype, config
    return of(*kind, value_dim=of_values, has=given_names(problem), **options)


def work(problem: Problem, **options: object) -> list[Work]:
    return [work_on_query_tiles(kernel_for(problem, **options), problem)]


def lazy_maximum(problem: Problem, **options: object) -> LazyMaximum:
    kernel = kernel_for(problem, **options)
    return LazyMaximum(kernel.tile_kv, kernel.config.parts, kernel.growth, kernel.share)


def compile_kernel(problem: Problem, **options: object) -> object:
    return compile_forward(kernel_for(problem, **options), problem)


def compile_forward(kernel: FlashAttentionForward, problem: Problem) -> object:
    q, k, v, o = fake_gqa(problem.head_dim if has_own_kernel(problem) else None, problem.dtype)
    scratch = [make_fake_tensor(Int32, (1,), (1,), assumed_align=4)]
    if kernel.packed:
        scratch = [fake_list(), *scratch]
    elif kernel.sliced:
        scratch = [*fake_slices(kernel.value_dim, WARPGROUP * kernel.consumers), *scratch]
    given = fake_given(q.shape[1], kernel.has) + [Int32(0)] * kernel.packed
    return compile_for_torch(kernel, q, k, v, o, fake_fp32(q), *scratch, *given)
