"""The warp of bwd4 that loads, at head_dim up to 128: tiles of keys and the queries that see them."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr, pipeline, range_constexpr

from .bwd4_operands import Config
from .device.dq_sums import SummedTiles
from .device.key_tiles import CONSUMERS
from .device.rings import PRODUCER, put
from .device.tile_order import fetch, tell
from .device.tma import partition_tma


class LoadingTiles(SummedTiles):
    """Tiles of keys, and who loads them."""

    config: Config

    @cute.jit
    def produce(self, rings, shared, loads, mStats, mCounter, tiles, lengths, mTiled, mList):
        """The producer warp, to the end:

            while there is a tile of keys that nobody has taken:
                tell the others which
                load K                        two stages: the tile before may be in work
                for each query head of the key head, and tile of queries that sees the keys:
                    load Q, its LSE and D     LSE and D not before the preprocess has ended
                    load V, the first time    one stage: the tile before may need V until its last step,
                                              and this tile's first Q shall not wait for that
                    load dO
            tell them that there is none

        The first tile comes from the counter too, and is not the CTA's number: CTAs wait for what earlier
        tiles leave (notes/gotchas.md, "Fetched before").
        """
        load_Q, mQ, load_dO, mDO, load_K, mK, load_V, mV = loads
        *extents, group = lengths
        q_ring, do_ring, k_ring, v_ring, tile_ring = rings.q, rings.do, rings.k, rings.v, rings.tile
        q_put = pipeline.make_pipeline_state(PRODUCER, self.config.stages)
        k_put = pipeline.make_pipeline_state(PRODUCER, self.config.k_stages)
        v_put, tile_put = [pipeline.make_pipeline_state(PRODUCER, 1) for _ in range(2)]
        if const_expr(self.listed):
            if const_expr(not self.left_over):  # which begins behind who has waited
                cute.arch.griddepcontrol_wait()  # for the list, too
            tiles = self.own_tiles(mList)[1] * mTiled.shape[2]
        tile = fetch(mCounter, tiles, own_first=False)
        waited, block = cutlass.Boolean(self.listed), cutlass.Int32(0)
        while tile < tiles:
            place = self.place_of(tile, mQ, mTiled, mList)
            if const_expr(self.by_sequence):
                place = block, *place[1:]
            tell(tile_ring, tile_put, shared.tile, (1, *place))
            tile_put.advance()
            kv_block, kv_head, *_ = place
            seqlens = self.batch.lengths(place, extents)
            first, _, _, last = self.work_on(place, *seqlens)
            mOwnStats = self.batch.scratch(mStats, place)
            # (TMA, block of 64 keys) and (TMA, consumer + 2 · stage)
            own_head = kv_head
            if const_expr(self.divides):
                own_head = kv_head // (mTiled.shape[2] // mK.shape[2])
            tKgK, tKsK = partition_tma(load_K, self.batch.keys(mK, own_head, place), shared.K)
            tVgV, tVsV = partition_tma(load_V, self.batch.keys(mV, own_head, place), shared.V)
            self.put_parts(k_ring, k_put, load_K, tKgK, tKsK, kv_block, self.config.k_stages)
            for nth in range(group, unroll=1):
                head = kv_head * group + self.head_at(nth, group, place, seqlens[1])
                # (TMA, tile of queries) and (TMA, stage)
                tQgQ, tQsQ = partition_tma(load_Q, self.batch.queries(mQ, head, place), shared.Q)
                tOgO, tOsO = partition_tma(load_dO, self.batch.queries(mDO, head, place), shared.dO)
                for step in range(first, last, unroll=1):
                    i = self.q_tile_at(step, first, last, place, *seqlens)
                    put(q_ring, q_put, load_Q, tQgQ[None, i], tQsQ)
                    # Until here only what the caller gave is read, and the counter, which the call before
                    # left at zero: the preprocess, launched without PDL, began when that had ended.
                    if not waited:
                        cute.arch.griddepcontrol_wait()
                        waited = cutlass.Boolean(True)
                    head_index = self.batch.scratch_row(place, head, mQ.shape[2])
                    self.put_stats(q_ring, q_put, mOwnStats, shared.stats, head_index, i)
                    if nth == 0 and step == first:
                        self.put_parts(v_ring, v_put, load_V, tVgV, tVsV, kv_block, 1)
                    put(do_ring, q_put, load_dO, tOgO[None, i], tOsO)
                    q_put.advance()
            if first == last:
                self.put_parts(v_ring, v_put, load_V, tVgV, tVsV, kv_block, 1)
            k_put.advance()
            v_put.advance()
            if const_expr(self.by_sequence):
                block += 1  # of more keys than there may be; all get a gradient, of NaN (`Preprocess`)
                if block * self.tile_kv >= place[5]:
                    block = cutlass.Int32(0)
                    tile = fetch(mCounter, tiles, own_first=False)
            else:
                tile = fetch(mCounter, tiles, own_first=False)
        tell(tile_ring, tile_put, shared.tile, [0] * (1 + self.words))

    @cute.jit
    def put_parts(self, ring, state, atom, tXgX, tXsX, kv_block, stages):
        """`put` of a tile of keys of K or V, 64 for each consumer; `stages` are those of the ring."""
        ring.producer_acquire(state)
        for c in range_constexpr(CONSUMERS):
            gX = tXgX[None, kv_block * CONSUMERS + c]
            at = state.index * CONSUMERS + c if const_expr(stages > 1) else c
            cute.copy(atom, gX, tXsX[None, at], tma_bar_ptr=ring.producer_get_barrier(state))
