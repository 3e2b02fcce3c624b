"""BWD4: the production backward.

The idea          Two warpgroups take turns. One issues the products of a step that need no thread (dK, dQ,
                  the next Sᵀ) while the other exponentiates; without turns both do the same at the same
                  time, and the tensor cores wait for the exponentials of both.
What changes      against bwd3: persistent CTAs and a tile counter; a warp that loads and two that add dQ to
                  its sum by bulk reduction; dV overlaps dS, the next Sᵀ overlaps dQ's way to shared memory;
                  masked and unmasked loops apart; the next tile's K is loaded while this one is worked on,
                  dK and dV leave while the next begins; a warp writes the zeros that dQ is added to when
                  they are about to be needed; LSE and D subtracted by the tensor cores (device/folded.py);
                  fp16, GQA without an fp32 round trip, unequal lengths; two kernels for head_dim 256, and for
                  packed sequences; the tiles of the last round in parts; `bwd4_det`, with one order of
                  additions.
What does not     what preprocess and postprocess do, who owns what, which products take registers.
Supports          bf16 and fp16; head_dims as k6, in tiles of 64, 96, 128, 192, also with values of 128, and
                  256; seqlens ≥ 1; GQA and MQA; causal masks as k6's; windows, caps, sinks, packed sequences
                  (notes/bwd4_policies.md). Who sees no key, or is seen by no query, has no gradient.
Where to read     notes/bwd4.md draws the schedule. Here are the warps' roles and the main loop up to 128
                  columns. bwd4_operands.py: shared memory, registers, operands; bwd4_stores.py: how dK and dV
                  leave; bwd4_passes.py: what else a call launches; device/key_tiles.py: which tiles see
                  which; device/dq_sums.py: dQ's way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from .bwd4_dkv import KeyGradients
from .bwd4_dq import QueryGradient
from .bwd4_operands import (
    TILE_KV,
    Config,
    Consumer,
    Fragments,
    allocate,
    config_of,
    dq_columns,
    fragments,
    issue_dQ,
    k_block,
    leave_dQ,
    rounded_dQ,
    shared_bytes,
    tiled_mmas,
)
from .bwd4_passes import FlashAttentionBackward, WideFlashAttentionBackward, compile_backward
from .bwd4_stores import Barrier, StoringTiles
from .calls import DETERMINISTIC, refuse_backward, run_backward
from .calls_split import undivided_scratch
from .contract import Problem, Scratch, Stage, Work
from .device.compiling import ELEMENTS
from .device.constants import SMS, WARP, WARPGROUP
from .device.dq_sums import AND_ADDER
from .device.folded import write_ones
from .device.key_parts import halves
from .device.key_tiles import BOTH, CONSUMER_WARPS, CONSUMERS, REGISTERS, ROWS, THREADS
from .device.limits import tile_dims
from .device.masks import Mask, mask_of
from .device.rings import CONSUMER
from .device.split_tiles import count_taken
from .device.tile_order import hear_place
from .device.tma import load_atom, store_atom
from .device.wgmma import round_fragment

STAGES = (
    Stage(
        "bwd4",
        "the production backward",
        "warp specialisation, turns, overlap inside a warpgroup, dQ by bulk reduction, persistent CTAs",
        "bwd3",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        atomics=True,
    ),
    Stage(
        "bwd4_det",
        "the production backward, deterministic",
        "dQ added in one order, so that every run gives the same bits",
        "bwd4",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        options=DETERMINISTIC,
    ),
)


class Backward(StoringTiles):
    """dK, dV, and the sums of dQ, or dQ. The CTA: consumers 0 and 1 of 64 keys each (warps 0–3, 4–7), then a
    warpgroup: warp 8 loads, 9 and 10 add dQ to its sum, 11 writes the zeros it is added to, if it needs any.

    mbarriers                   arrivals that complete a phase       who waits
    q, do, k, v   full          the producer's, and the bytes        both consumers
                  empty         8, a lane of each consumer warp      the producer
                  k's empty     the same, but each consumer's first warp only when dV has left from there
    tile          full          32, the producer's lanes             consumers, adders, zero writer
                  empty         352, all of their threads            the producer
                                (where nobody writes zeros: 320)
    own + c       ready         128, c's threads: dK and dV are in   c's first warp, which stores them
                                shared memory

    named barriers              who arrives                          who waits                       threads
    DS_READY + c + 2 · parity   the other consumer: its dS is there  c, before what dQ takes of it   256
    TURN + c                    the other consumer: its next Sᵀ is   c, before dK, dQ and next Sᵀ    256
                                issued (at first: consumer 1)
    DQ_FULL + c + 2 · parity    c: its part of dQ is there           adder `parity`                  160
    DQ_EMPTY + c                an adder: it has been read; or c's   c, before it writes there       160
                                first warp: dK has left from there
    SPLIT + c                   c: its part of dK and dV is left;    c, before one counts it, and     128
                                how many there are is known          before all read that
    K_READ                      both consumers: dQ of the tile's     both, before dV takes K's       256
                                last step is done with K             place

    DS_READY has a parity since a fast consumer may arrive for its next step before the other's slowest warp
    has come to the wait of this one; for the step after, it needs a turn that the other passes behind that
    wait. DQ_FULL's parity is the adder's number.

    What compute-sanitizer does not see. racecheck reports two pairs. What different threads both touch by
    ordinary loads and stores is the tile's numbers, between `full` and `empty` of its ring, and a
    consumer's part of dQ, which is written twice in two patterns: a step's dQ and then the tile's dK, and dK
    and then the next tile's dQ. Between the writes of each pair all 128 threads wait at DQ_EMPTY + c, as do
    the 32 that arrive there, after `cp.async.bulk.wait_group.read`: the bulk copy has read the first.
    Everything else is the async proxy's: what TMA writes and WGMMA reads is ordered by the rings' phases and
    `wgmma.wait_group`; what threads write for it to read (dS, dQ, dK, dV, and once the ones of `folded`), by
    a proxy fence before they arrive. dS's buffers need no barrier that says they are free: the other's dQ of
    a step is done before it arrives at DS_READY in the next step, where this consumer waits before it comes
    to that buffer again.
    A warp's place among parts (bwd4_parts, `split_tiles`) is its own lanes' alone, each of which writes the
    same; how many parts of a split tile are there takes the first warp's, between its two waits at SPLIT.
    initcheck's reads of O: see `device.backward_ends.Preprocess`.
    """

    def __init__(
        self, head_dim: int, mask: Mask, dtype: type, deterministic: bool, config: Config,
        divides: bool = False, sms: int = SMS, **policies: bool,
    ):  # fmt: skip
        tile = config.tile_q, TILE_KV
        super().__init__(head_dim, mask, dtype, deterministic, *tile, divides, sms, **policies)
        self.config, self.part = config, ROWS * dq_columns(head_dim)
        self.own_first = head_dim == 128 and not any((mask.hides, deterministic, divides, *policies.values()))

    @property
    def smem_bytes(self) -> int:
        return shared_bytes(self.config, self.head_dim, self.in_parts, self.words, self.folds)

    @cute.jit
    def launch(
        self, mQ, mK, mV, mDO, mDK, mDV, mStats, sums, mCounter, stream, numbers, mTiled=None, mParts=None,
        mList=None, mSplit=None,
    ):  # fmt: skip
        """`sums` are mDQ_sum, mZeroed and mOrder, or of one tile of keys mDQ; `numbers` `policies.Numbers`'.
        Divided, dK and dV are left in mParts, and mDK and mDV are not there. mSplit: `split_tiles`."""
        batch, kv_heads, seqlen_kv, _ = mK.shape
        mQ, mDO, mK, mV, mDK, mDV = [self.batch.view(mX) for mX in (mQ, mDO, mK, mV, mDK, mDV)]
        tma = []
        q, of_K = self.tile_q, k_block(self.head_dim)
        for mX, rows, block in ((mQ, q, None), (mDO, q, None), (mK, ROWS, of_K), (mV, ROWS, None)):
            tma += load_atom(mX, rows, self.head_dim, block)
        if const_expr(self.divides):
            key_parts, value_parts = halves(mParts)
            tma += [None, key_parts, None, value_parts]
            seqlen_kv, kv_heads = mTiled.shape[0], mTiled.shape[2]
        else:
            for mX in (mDK, mDV):
                tma += store_atom(mX, ROWS, self.head_dim)
        if const_expr(self.one_tile):
            sums = tuple(store_atom(self.batch.view(sums), ROWS, dq_columns(self.head_dim), of_K))
        mmas = tiled_mmas(self.config, self.head_dim, self.dtype, self.folds)
        kv_blocks = cute.ceil_div(seqlen_kv, TILE_KV)
        tiles = kv_blocks * kv_heads * batch
        if const_expr(self.splits):
            tiles = count_taken(tiles, mSplit)
        if const_expr(self.packed):
            tiles = self.most_tiles(mList) * kv_heads
        self.kernel(mmas, *tma, mStats, sums, mCounter, tiles, numbers, mTiled, mList, mSplit).launch(
            grid=(self.ctas(tiles, kv_blocks), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,  # the registers of an SM are all for one CTA
            use_pdl=True,  # K and the first Q are loaded while the preprocess ends
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mmas, load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV,
        store_dK, mDK, store_dV, mDV, mStats, sums, mCounter, tiles, numbers, mTiled, mList, mSplit,
    ):  # fmt: skip
        """mQ, mDO, mK, mV, mDK, mDV are (seqlen, head_dim, heads, batch), as TMA descriptors see them;
        divided, mDK and mDV are mParts' halves. mTiled and mParts: `key_parts`."""
        # 1. shared memory, rings, and who is who
        self.take(numbers)
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen_q, seqlen_kv = mQ.shape[0], mK.shape[0]
        mTiled = self.count_parts(mK, mTiled, mSplit)
        lengths = seqlen_q, seqlen_kv, mQ.shape[2] // mTiled.shape[2]  # the last: query heads of a key head
        if const_expr(self.counts_sums):
            self.count_sums(sums[0], sums[-1].shape[0], tiles, *lengths)
        smem = SmemAllocator()
        # All but the producer hear of tiles, and where the first stores nobody writes zeros.
        listeners = THREADS - (1 if self.zeroes_ahead else 2) * WARP
        what = self.config, self.head_dim, self.dtype, self.in_parts, self.words, listeners, self.folds
        shared, rings = allocate(smem, *what)
        if const_expr(self.one_tile):
            sums = *sums, rounded_dQ(shared.dQ, self.dtype, self.head_dim)
        if const_expr(self.folds):
            write_ones(shared.ones, tidx)
        if tidx == 0:
            for c in range_constexpr(CONSUMERS):
                cute.arch.mbarrier_init(rings.own + c, WARPGROUP)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_idx >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == CONSUMER_WARPS:
                loads = load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV
                self.produce(rings, shared, loads, mStats, mCounter, tiles, lengths, mTiled, mList)
            elif warp_idx <= CONSUMER_WARPS + CONSUMERS:
                barriers = Barrier.DQ_FULL, Barrier.DQ_EMPTY
                self.add_gradients(warp_idx, rings.tile, shared, mQ, mTiled, sums, lengths, *barriers, mList)
            elif const_expr(self.zeroes_ahead and self.packed):
                self.write_listed_zeros(rings.tile, shared.tile, mQ, mTiled, *sums[:2], mList)
            elif const_expr(self.zeroes_ahead):
                self.write_zeros(rings.tile, shared.tile, mQ, mTiled, *sums[:2])
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            stores = store_dK, mDK, store_dV, mDV
            of_parts = mTiled, mSplit, sums[-1] if self.splits else None
            self.consume(rings, shared, mmas, stores, tidx, lengths, *of_parts)

    @cute.jit
    def consume(self, rings, shared, mmas, stores, tidx, lengths, mTiled, mSplit, mOrder):
        """A consumer, to the end:

        while there is a tile of keys:
            wait for K, and that dV and dK of the tile before have left shared memory
            for each query head of the key head:
                Sᵀ of the first tile of queries
                step of each tile of queries with a hidden pair, then of the others, then of the last
            dV and dK through shared memory to global memory, if no other part of the tile is missing
        """
        # 2. a consumer's prologue
        *extents, group = lengths
        q_ring, k_ring, v_ring, tile_ring = rings.q, rings.k, rings.v, rings.tile
        consumer = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        other, thread = consumer ^ 1, tidx % WARPGROUP
        q_get, q_next = [pipeline.make_pipeline_state(CONSUMER, self.config.stages) for _ in range(2)]
        q_next.advance()
        k_get = pipeline.make_pipeline_state(CONSUMER, self.config.k_stages)
        v_get, tile_get = [pipeline.make_pipeline_state(CONSUMER, 1) for _ in range(2)]
        f = fragments(self.config, mmas, shared, self.dtype, consumer, thread)
        x = Consumer(consumer, other, thread, shared, rings)
        is_first_warp = cute.arch.make_warp_uniform(tidx // WARP) == WARPGROUP // WARP * consumer
        parity, stored = Int32(0), cutlass.Boolean(False)
        own_phase = Int32(0)
        # The stage of K that the last tile's dV is leaving from, so that only its warp has not released it
        k_left = pipeline.make_pipeline_state(CONSUMER, self.config.k_stages)
        if consumer == 1:
            self.sync(Barrier.TURN, 0, BOTH, arrive=True)  # the first turn

        valid, place = hear_place(tile_ring, tile_get, shared.tile)
        tile_get.advance()
        while valid != 0:
            seqlens = self.batch.lengths(place, extents)
            first, masked, whole, last = self.work_on(place, *seqlens)
            if const_expr(self.splits):  # which queries it is, no mask asks
                first, masked, last = Int32(0), masked - first, cute.arch.make_warp_uniform(last - first)
            if const_expr(self.in_parts):
                cute.arch.sync_warp()  # that of the tile before has been read
                of_part = place[3] if self.splits else self.place_of_part(place, mTiled.shape[2])
                shared.places[tidx // WARP] = of_part
            f.dK.acc.fill(0.0)
            f.dV.acc.fill(0.0)
            k_ring.consumer_wait(k_get)
            if stored:  # dV and dK of the tile before have left shared memory, or do so now
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.sync(Barrier.DQ_EMPTY, consumer, AND_ADDER, arrive=True)
                k_ring.consumer_release(k_left)
                k_left.advance()

            # 3. main loop: tiles of queries with a hidden pair, the others, with a window again masked ones;
            # of a reversed head from the end. The last is apart: no Sᵀ follows it, and it is masked always.
            heads = group if first < last else 0
            for _ in range(heads, unroll=1):
                q_ring.consumer_wait(q_get)
                self.scores(x, f, k_get, q_get)
                warpgroup.wait_group(0)
                v_ring.consumer_wait(v_get)
                if const_expr(self.config.keep_V):
                    tVsV = f.copy_V.partition_S(shared.V)[None, None, None, consumer]  # (CPY, CPY_M, CPY_K)
                    cute.copy(f.copy_V, tVsV, f.copy_V.retile(f.dP.A))
                for begin, end, hides in self.runs(first, masked, whole, last, place):
                    for i in range(begin, end, unroll=1):
                        where = place[0], self.q_tile_at(i, first, last, place, *seqlens), seqlens
                        self.step(x, f, k_get, q_get, q_next, parity, *where, masked=hides, final=False)
                        parity ^= 1
                        q_get.advance()
                        q_next.advance()
                where = place[0], self.q_tile_at(last - 1, first, last, place, *seqlens), seqlens
                self.step(x, f, k_get, q_get, q_next, parity, *where, masked=True, final=True)
                parity ^= 1
                q_get.advance()
                q_next.advance()
            if first == last:
                v_ring.consumer_wait(v_get)
            v_ring.consumer_release(v_get)
            v_get.advance()

            # 4. epilogue
            if const_expr(self.divides):
                part = shared.places[tidx // WARP]  # each lane wrote it
                self.leave_gradients(x, f, place, part, stores[1], stores[3])
                k_ring.consumer_release(k_get)
            else:
                stored = cutlass.Boolean(True)
                if const_expr(self.splits):
                    part = cute.arch.make_warp_uniform(shared.places[tidx // WARP])
                    if part > 0:
                        stored = self.put_together(x, f, part, mSplit, mOrder)
                if stored:
                    self.store_gradients(x, f, stores, k_get, place, is_first_warp, own_phase)
                    stored, own_phase = is_first_warp, own_phase ^ 1
                else:  # The other consumer may be the last to come at its half, and waits there.
                    self.sync(Barrier.K_READ, 0, BOTH)
                    k_ring.consumer_release(k_get)
                    k_left.advance()
            k_get.advance()
            valid, place = hear_place(tile_ring, tile_get, shared.tile)
            tile_get.advance()

        # 5. the last arrivals at a barrier must not stay behind
        if stored:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.sync(Barrier.DQ_EMPTY, consumer, AND_ADDER, arrive=True)
        self.sync(Barrier.DQ_EMPTY, consumer, AND_ADDER)
        if consumer == 0:
            self.sync(Barrier.TURN, 0, BOTH)

    def scores(self, x: Consumer, f: Fragments, k_get, q_get):
        """Issue Sᵀ = K·Qᵀ of a tile of queries."""
        f.S.of(k_get.index * CONSUMERS + x.index, q_get.index).end_with(f.LSE, q_get.index)

    def step(
        self, x: Consumer, f: Fragments, k_get, q_get, q_next, parity, kv_block, q_tile, seqlens,
        masked: bool, final: bool,
    ):  # fmt: skip
        """A tile of queries; its Sᵀ is there already. `masked` and `final` are Python's.

            issue dPᵀ                 P = exp2(Sᵀ·c − LSE), rounded             (then of the next part of
            issue dV (early_dV)       wait for dPᵀ; dS = P∘(dPᵀ − D), rounded   the queries: `Config.parts`)
            dS to shared memory; tell the other consumer that it is there
            wait for the turn ── the other issues nothing from here ──
            issue dV (otherwise), dK; wait for the other's dS (`own_first`: when half of dQ is issued)
            issue dQ; wait for dV and dK
            issue the next tile's Sᵀ, unless `final`
            pass the turn ──────────────────────────────────────────
            wait for dQ; leave Q and dO; dQ to shared memory, for an adding warp; wait for Sᵀ

        Where LSE and D are folded in: P = exp2(Sᵀ·c), dS = P∘dPᵀ.

        Nothing is in flight at either end: across a loop's back edge ptxas would serialise every WGMMA of the
        kernel (notes/bwd4.md, "What the assembler takes").
        """
        stage, shared, rings = q_get.index, x.shared, x.rings
        dV = f.dV.of(None, stage)  # here: traced behind the wait, LLVM orders the step differently
        rings.do.consumer_wait(q_get)
        for part in f.parts:
            part.dP.of(None, part.place(stage)).begin_with(f.D, stage)
            sLSE = sD = None
            if not self.folds:
                sLSE, sD = [part.own(shared.stats[None, i, None, stage]) for i in range(2)]
            hides = f.places, kv_block * TILE_KV + x.index * ROWS, part.first_query(q_tile), *seqlens
            self.exponentials(part.scores, part.words_P, sLSE, *hides, masked)
            self.round_P(part.S, part.words_P)
            if early_dV := self.config.early_dV and part is f.parts[-1]:
                dV.issue(True)
            warpgroup.wait_group(1 if early_dV else 0)  # dP
            self.gradients(part.scores, part.dscores, sD, f.places)
            round_fragment(part.dP.acc, part.words_dS, self.dtype)
        place = f.tSsdS[None, None, None, x.index + CONSUMERS * parity]
        cute.copy(f.copy_dS, f.copy_dS.retile(f.dS_out), place)
        cute.arch.fence_view_async_shared()  # written by threads, read by WGMMA
        self.sync(Barrier.DS_READY, 2 * parity + x.other, BOTH, arrive=True)

        self.sync(Barrier.TURN, x.index, BOTH)
        if not self.config.early_dV:
            dV.issue(True)
        f.dK.of(None, stage).issue(True)
        ready = lambda: self.sync(Barrier.DS_READY, 2 * parity + x.index, BOTH)
        issue_dQ(f, self.config, x, k_get, parity, ready, self.own_first)
        warpgroup.wait_group(1)  # dV and dK: the registers of P and dS are needed
        if not final:
            rings.q.consumer_wait(q_next)
            self.scores(x, f, k_get, q_next)
        self.sync(Barrier.TURN, x.other, BOTH, arrive=True)

        warpgroup.wait_group(0 if final else 1)  # dQ
        rings.q.consumer_release(q_get)
        rings.do.consumer_release(q_get)
        self.sync(Barrier.DQ_EMPTY, x.index, AND_ADDER)
        leave_dQ(f, x, self.scale if self.one_tile else None)
        cute.arch.fence_view_async_shared()  # written by threads, read by the bulk reduction or the TMA
        self.sync(Barrier.DQ_FULL, CONSUMERS * parity + x.index, AND_ADDER, arrive=True)
        warpgroup.wait_group(0)


def kernel_for(
    problem: Problem, deterministic: bool = False, config: Config | None = None, sms: int = SMS
) -> FlashAttentionBackward | WideFlashAttentionBackward:
    """The kernels of the problem's head_dim, mask and type."""
    columns, of_values = tile_dims(problem)
    options = columns, mask_of(problem), ELEMENTS[problem.dtype]
    policies = {"sms": sms, "capped": problem.softcap > 0, "packed": problem.sequences is not None}
    if columns > 128:
        policies["value_dim"] = of_values
        main, queries = KeyGradients(*options, **policies), QueryGradient(*options, **policies)
        return WideFlashAttentionBackward(main, queries, problem)
    config, left_over = config or config_of(problem), None
    if policies["packed"]:
        left_over = Backward(*options, False, config, **policies, one_tile=True, left_over=True)
    return FlashAttentionBackward(Backward(*options, deterministic, config, **policies), problem, left_over)


supports = refuse_backward
run_kernel = run_backward


def workspace(problem: Problem, deterministic: bool = False, sms: int = SMS, **_: object) -> Scratch:
    return undivided_scratch(problem, deterministic, sms=sms)


def work(problem: Problem, **options: object) -> list[Work]:
    return kernel_for(problem, **options).work(problem)


def compile_kernel(problem: Problem, **options: object) -> object:
    return compile_backward(kernel_for(problem, **options))
