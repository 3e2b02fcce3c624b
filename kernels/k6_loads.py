"""The warp of k6 that loads: queries, and the keys and values that they see."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync

from .calls_slices import NOWHERE
from .device.equal_tiles import PackedTiles, ask
from .device.prepared_order import divisor, find, prepared, sizes_of
from .device.rings import PRODUCER, put, put_both
from .device.tile_order import fetch, tell
from .device.tma import partition_tma

END, FIRST, FOLLOWS = range(3)  # how a CTA's tiles are announced


class LoadingQueries(PackedTiles):
    """Tiles of queries, and who loads them."""

    consumers: int
    q_stages: int  # of each consumer's 64 rows of Q
    stages: int  # of the ring of K, and of V
    keys_first = False  # K before Q

    def __init__(self, *tiles: object):
        super().__init__(*tiles)
        self.order = prepared(self.order)

    @property
    def plain(self) -> bool:
        """Whether a CTA has a tile, and begins at its first key."""
        return not (self.packed or self.mask.hides_first)

    def tile_bytes(self, q_and_o: int) -> int:
        """Of shared memory, with so many tiles of Q and O, and the rings of K and V."""
        q = (q_and_o * self.head_dim if q_and_o < 3 else 2 * self.head_dim + self.value_dim) * self.tile_q
        return (q + self.stages * self.tile_kv * (self.head_dim + self.value_dim)) * 2

    @property
    def smem_bytes(self) -> int:
        """All of the kernel's shared memory."""
        barriers = 2 * (self.q_stages * self.consumers + 2 * self.stages + 1)
        words = math.ceil(self.message / 4) + (math.ceil(self.consumers / 4) if self.sliced else 0)
        return self.tile_bytes(self.q_and_o) + 16 * words + barriers * 8

    @property
    def nowhere(self) -> list[int]:
        """A place without rows, which consumers hear of at the end."""
        return [0 if self.plain else NOWHERE] + [0] * (self.batch.words - 1)

    def sizes(self, mQ, mK):
        """On the host: what `find` takes, unless tiles are packed or sliced; and, the last, the query heads
        of a key head, to be divided by."""
        heads, found = mQ.shape[2], []
        if not (self.packed or self.sliced):
            blocks, section = cute.ceil_div(mQ.shape[0], self.tile_q), self.section(mK.shape[0])
            found = sizes_of(self.order, blocks, heads, mQ.shape[3], section)
        return [*found, divisor(heads // mK.shape[2])]

    def kv_head_of(self, head, group):
        """The key head of a place's head, in groups of so many."""
        return head // group

    def partition_queries(self, load_Q, mQ, sQ, place):
        """What `put_queries` takes of the queries of a place's head."""
        return partition_tma(load_Q, self.batch.queries_from(mQ, place[1], place), sQ)

    def put_queries(self, q_ring, q_put, load_Q, tQgQ, tQsQ, place, consumer: int):
        """Load those of a consumer."""
        put(q_ring, q_put, load_Q, tQgQ[self.queries_at(place, consumer)], tQsQ)

    @cute.jit
    def produce(self, rings, sTile, loads, mCounter, tiles, listing, sizes, begun):
        """The producer warp, to the end, as far ahead as the rings have room, across the ends of tiles:

        for each tile of queries:
            tell the consumers where it lies
            load Q of consumer 0, K₀, Q of the others, V₀; K₀ first where Q comes in many boxes
            load Kⱼ and Vⱼ for j = 1, 2, …, from left to right
            fetch the next; of packed tiles (`equal_tiles`) it is asked for two tiles of keys before the end,
            and looked up one before it
        tell the consumers that there are no more; `tell_parts`

        `begun` is what was asked for before the rings were there: a slice, or what `begin_loading` returns.
        """
        q_ring, k_ring, v_ring, tile_ring = rings
        load_Q, mQ, sQ, load_K, mK, sK, load_V, mV, sV = loads
        *sizes, group = sizes
        extents = self.extents_of(mQ, mK)
        q_put = pipeline.make_pipeline_state(PRODUCER, self.q_stages * self.consumers)
        kv_put = pipeline.make_pipeline_state(PRODUCER, self.stages)
        tile_put = pipeline.make_pipeline_state(PRODUCER, 1)
        tile, _, _ = cute.arch.block_idx()
        announced = Int32(FIRST)
        if const_expr(self.packed):
            for atom in (load_Q, load_K, load_V):
                cpasync.prefetch_descriptor(atom)
            tile, listed, tiles, alone = begun
        if const_expr(self.sliced):
            number, at = self.own_slice(begun, mQ, mK)
            tile, tiles, *_ = at
        while tile < tiles:
            if const_expr(self.packed):
                place = listed
            elif const_expr(self.sliced):
                place = self.locate_piece(number, tile, tiles, mQ, mK)
            else:
                place = find(self.order, tile, sizes)
            tell(tile_ring, tile_put, sTile, (announced, *place))
            tile_put.advance()
            q_block, head = place[0], place[1]
            kv_head = self.kv_head_of(head, group)
            # (TMA, block of rows) in global memory, (TMA, place or stage) in shared
            tQgQ, tQsQ = self.partition_queries(load_Q, mQ, sQ, place)
            tKgK, tKsK = partition_tma(load_K, self.batch.keys_from(mK, kv_head, place), sK)
            tVgV, tVsV = partition_tma(load_V, self.batch.keys_from(mV, kv_head, place), sV)
            lengths = self.batch.lengths(place, extents)
            first = self.first_of_tile(q_block, *lengths)
            if const_expr(self.packed):
                # What is next is asked for a tile of keys ahead of when it is looked up.
                kv_blocks = self.tiles_loaded(place, lengths)
                ahead, last = kv_blocks - 2, cutlass.max(first + 1, kv_blocks - 1)
                goes_on, asked = self.goes_on(place, listing), Int32(0)
                if (ahead <= first) & ~goes_on:
                    asked = ask(mCounter)
            for i in range_constexpr(self.consumers):
                if const_expr(i == 0 and self.keys_first):
                    put(k_ring, kv_put, load_K, tKgK[self.batch.keys_at(place, first)], tKsK)
                self.put_queries(q_ring, q_put, load_Q, tQgQ, tQsQ, place, i)
                q_put.advance()
                if const_expr(i == 0 and not self.keys_first):
                    put(k_ring, kv_put, load_K, tKgK[self.batch.keys_at(place, first)], tKsK)
            put(v_ring, kv_put, load_V, tVgV[self.batch.keys_at(place, first)], tVsV)
            kv_put.advance()
            kv = k_ring, load_K, tKgK, tKsK, v_ring, load_V, tVgV, tVsV
            if const_expr(not self.packed):
                ahead = self.tiles_loaded(place, lengths)
            for block in range(first + 1, ahead, unroll=1):
                put_both(*kv, kv_put, self.batch.keys_at(place, block))
                kv_put.advance()
            if const_expr(self.packed):
                if (ahead > first) & ~goes_on:
                    asked = ask(mCounter)
                for block in range(cutlass.max(first + 1, ahead), last, unroll=1):
                    put_both(*kv, kv_put, self.batch.keys_at(place, block))
                    kv_put.advance()
                tiles, alone = self.once_told(announced == FIRST, tiles, alone, mQ, listing)
                # Where the next tile lies is read while the last stage is waited for.
                then = place, goes_on, asked
                tile, listed = self.next_tile(tile, then, tiles, alone, mCounter, mQ, mK, listing)
                for block in range(last, kv_blocks, unroll=1):
                    put_both(*kv, kv_put, self.batch.keys_at(place, block))
                    kv_put.advance()
            elif const_expr(self.sliced):
                at = self.next_piece((tile + place[4], *at[1:]), mQ, mK)
                tile, tiles, *_ = at
            else:
                tile = fetch(mCounter, tiles)
            announced = Int32(FOLLOWS)
        tell(tile_ring, tile_put, sTile, (END, *self.nowhere))
        if const_expr(self.sliced):
            self.tell_parts(tile_ring, tile_put, sTile, mCounter, mQ, mK)
            self.end_launch(mCounter)

    @cute.jit
    def tell_parts(self, tile_ring, tile_put, sTile, mCounter, mQ, mK):
        """Where sums are made in parts: tell the consumers which they make, and that there are no more."""
        if self.slices.parts > 0:
            part = self.next_part(mCounter)
            while part < self.slices.sums:
                place = self.locate_part(part, mQ, mK)
                tile_put.advance()
                tell(tile_ring, tile_put, sTile, (FOLLOWS, *place))
                part = self.next_part(mCounter)
            tile_put.advance()
            tell(tile_ring, tile_put, sTile, (END, *self.nowhere))
