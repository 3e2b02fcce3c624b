"""What k6 and bwd4's dQ kernel share beside their products: the tiles of queries they walk, and for each the
tiles of keys that are seen. The counterpart for tiles of keys is `key_tiles.Tiles`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from ..contract import Problem, Work
from .constants import LOG2_E, WARPGROUP
from .masks import Mask, Window
from .packed import DENSE, Batch, Packed
from .softcap import SoftCap, cap_numbers
from .tile_list import ListTiles
from .tile_order import ByHead, BySection, hear_place

ROWS = 64  # queries of a consumer: the M of a WGMMA


@dataclass(frozen=True)
class Config:
    """A tile shape and what measured best with it."""

    consumers: int  # warpgroups of 64 rows
    tile_kv: int
    stages: int  # of the ring of K, and of V
    registers: tuple[int, int]  # of a producer's thread, of a consumer's
    parts: int = 1  # of a tile's keys: the exponentials of one run beside what the next begins with
    ctas: int = 1  # of an SM
    in_turn: bool = False  # the consumers of a slice begin one after the other

    def __str__(self) -> str:
        shape = f"{ROWS * self.consumers}×{self.tile_kv}, {self.stages} stages"
        shape += f", {self.parts} parts" * (self.parts > 1)
        return shape + f", {self.ctas} CTAs an SM" * (self.ctas > 1)


class KeyTile(IntEnum):
    """What a consumer knows of a tile of keys before it multiplies. Before the end of an EDGE tile a row may
    have seen none; a FAR one hides none, and is taken for far from zero (`SoftCap`)."""

    WHOLE, FAR, HIDES, EDGE = range(4)


class QueryTiles:
    """Tiles of `tile_q` queries, 64 a consumer, for each those of `tile_kv` keys that they see."""

    def __init__(self, head_dim: int, mask: Mask, tile_q: int, tile_kv: int, batch: Batch = DENSE):
        self.head_dim, self.mask, self.tile_q, self.tile_kv = head_dim, mask, tile_q, tile_kv
        self.batch, self.packed = batch, isinstance(batch, Packed)
        # With a mask the tile that sees most, the last of a head, comes first (tile_order.py says why).
        self.order = BySection(backwards=True) if mask.hides else ByHead()

    def on_host(self, scale, window, softcap):
        """What a kernel takes of what a launch is given: numbers in powers of two, which are then operands
        and need neither a register nor an instruction of the loops. A kernel without policies is given the
        scale as it is: its machine code is that which has a record."""
        if softcap is not None:
            return None, window, cap_numbers(scale, softcap)
        return scale * LOG2_E if self.has_policies else scale, window, None

    def take(self, scale, window, cap) -> None:
        """What `on_host` gave, inside the kernel. With a soft cap scores come out in powers of two."""
        if scale is not None:
            self.scale_log2 = scale if self.has_policies else scale * LOG2_E
        if window is not None:
            self.mask = Window(*window)
        if cap is not None:
            self.cap, self.scale_log2 = SoftCap(cap), 1.0

    def section_bytes(self, seqlen_kv):
        """Of K and V of the heads that are worked on together under a mask, and stay in L2."""
        raise NotImplementedError

    def seen_before(self, row, seqlen_q, seqlen_kv):
        """How many keys end with the last that the row before `row` sees: the next row's last is the first
        that it does not."""
        return self.mask.last_key(row, seqlen_q, seqlen_kv)

    @cute.jit
    def kv_blocks(self, rows, seqlen_q, seqlen_kv):
        """Tiles of keys that some of the first `rows` queries sees; at least one, so that what they get is
        written."""
        keys = seqlen_kv
        if const_expr(self.mask.hides):
            keys = cutlass.max(1, cutlass.min(seqlen_kv, self.seen_before(rows, seqlen_q, seqlen_kv)))
        elif const_expr(self.packed):
            keys = cutlass.max(1, keys)
        return cute.ceil_div(keys, self.tile_kv)

    @cute.jit
    def first_block(self, first_row, blocks, seqlen_q, seqlen_kv):
        """The first of `blocks` tiles of keys that a query from first_row on sees; the last, if none does."""
        first = Int32(0)
        if const_expr(self.mask.hides_first):
            key = cutlass.max(0, self.mask.first_key(first_row, seqlen_q, seqlen_kv))
            first = cutlass.min(blocks - 1, key // self.tile_kv)
        return first

    @cute.jit
    def own_blocks(self, first_row, seqlen_q, seqlen_kv):
        """`kv_blocks` of a consumer whose queries begin at first_row: one, if they are all past the end."""
        blocks = self.kv_blocks(first_row + ROWS, seqlen_q, seqlen_kv)
        if first_row >= seqlen_q:
            blocks = Int32(1)
        return blocks

    @cute.jit
    def visible_blocks(self, first_row, own_blocks, seqlen_q, seqlen_kv):
        """How many of a consumer's `own_blocks` hide no pair: they are its first."""
        seen = seqlen_kv  # keys that its first row sees; with a mask as many as in `kv_blocks`
        if const_expr(self.mask.hides):
            seen = cutlass.min(seen, cutlass.max(0, self.seen_before(first_row + 1, seqlen_q, seqlen_kv)))
        return cutlass.min(own_blocks, seen // self.tile_kv)

    @cute.jit
    def span(self, q_block, consumer, seqlen_q, seqlen_kv):
        """A consumer's part of a tile: its first row; how many tiles of keys the CTA takes, how many of them
        it takes part in itself, and how many of those hide no pair."""
        first_row = q_block * self.tile_q + consumer * ROWS
        kv_blocks = self.kv_blocks(q_block * self.tile_q + self.tile_q, seqlen_q, seqlen_kv)
        own_blocks = self.own_blocks(first_row, seqlen_q, seqlen_kv)
        visible = self.visible_blocks(first_row, own_blocks, seqlen_q, seqlen_kv)
        return first_row, kv_blocks, own_blocks, visible

    def part_seen(self, share, own_blocks, seqlen_kv):
        """`share` times what part of the keys that a row may see rows do that take so many tiles of them."""
        if not self.mask.hides:
            return share
        keys = seqlen_kv
        if self.mask.hides_first:  # as many as a row sees in the middle
            left, right = [cutlass.min(seqlen_kv, x) for x in (self.mask.left, self.mask.right)]
            keys = cutlass.min(keys, left + right + 1)
        return share * Float32(own_blocks) * cute.arch.rcp_approx(Float32(cute.ceil_div(keys, self.tile_kv)))

    @cute.jit
    def begin(self, span, q_block, seqlen_q, seqlen_kv):
        """`span`, in tiles of all keys from the first on, where keys before a first one are hidden too; and
        where a consumer begins: how many of the CTA's tiles it leaves, its first, and the one before which
        each of its rows that sees a key has seen its first. At least its first is its own."""
        first_row, kv_blocks, own_blocks, visible = span
        cta_first = self.first_block(q_block * self.tile_q, kv_blocks, seqlen_q, seqlen_kv)
        first = self.first_block(first_row, own_blocks, seqlen_q, seqlen_kv)
        # Behind the tile with its last row's first key: until then that row may have seen none.
        edge = cutlass.max(0, self.mask.first_key(first_row + ROWS - 1, seqlen_q, seqlen_kv))
        edge = edge // self.tile_kv + 1
        if first_row >= seqlen_q:  # rows past the end take one tile, which nobody looks at
            first, own_blocks = cta_first, cta_first + 1
        edge = cutlass.min(cutlass.max(edge, first + 1), own_blocks)
        return (first_row, kv_blocks, own_blocks, visible), (first - cta_first, first, edge)

    def span_of(self, place, consumer, extents):
        """`span` of a place, and where the consumer begins (`begin`)."""
        lengths = self.batch.lengths(place, extents)
        span, begin = self.span(place[0], consumer, *lengths), (0, 0, 1)
        if self.mask.hides_first:
            span, begin = self.begin(span, place[0], *lengths)
        if self.batch.shares:
            span, begin = self.batch.among(place, consumer, span, begin)
        return *span, begin

    def hear(self, ring, state, sTile, consumer):
        """How a tile is announced, and its place as the consumer is to see it."""
        announced, place = hear_place(ring, state, sTile)
        return announced, self.batch.of_consumer(place, consumer)

    def first_of_tile(self, q_block, seqlen_q, seqlen_kv):
        """The first tile of keys that some query of a tile sees."""
        if not self.mask.hides_first:
            return 0
        kv_blocks = self.kv_blocks(q_block * self.tile_q + self.tile_q, seqlen_q, seqlen_kv)
        return self.first_block(q_block * self.tile_q, kv_blocks, seqlen_q, seqlen_kv)

    def tiles_loaded(self, place, lengths):
        """How many tiles of keys are loaded for a tile of queries."""
        kv_blocks = self.kv_blocks(place[0] * self.tile_q + self.tile_q, *lengths)
        return self.batch.tiles_of_keys(place, kv_blocks)

    def queries_at(self, place, consumer: int):
        """Which of what `batch.queries_from` gives is a consumer's."""
        return self.batch.queries_at(place, consumer, self.tile_q // ROWS)

    def steps_of(self, problem: Problem) -> Iterator[tuple[int, int, int]]:
        """Of each consumer's 64 queries of a head how many tiles of keys there are beside the first: before
        the end of which a row may have seen no key; behind them, that hide no pair; and the others."""
        if problem.sequences is not None:
            for one, often in problem.alone:
                yield from list(self.steps_of(one)) * often
            return
        if not self.mask.hides_first:
            for own, visible in self.blocks_of(problem):
                yield 0, max(1, visible) - 1, own - max(1, visible)
            return
        tile, lengths = self.tile_kv, (problem.seqlen_q, problem.seqlen_kv)
        for row in range(0, math.ceil(problem.seqlen_q / self.tile_q) * self.tile_q, ROWS):
            own = math.ceil(max(1, min(problem.seqlen_kv, self.seen_before(row + ROWS, *lengths))) / tile)
            first = min(own - 1, max(0, self.mask.first_key(row, *lengths)) // tile)
            edge = max(0, self.mask.first_key(row + ROWS - 1, *lengths)) // tile + 1
            seen = min(problem.seqlen_kv, max(0, self.seen_before(row + 1, *lengths)))
            if row >= problem.seqlen_q:
                own = first + 1
            edge = min(max(edge, first + 1), own)
            whole = max(edge, min(own, seen // tile))
            yield edge - first - 1, whole - edge, own - whole

    def blocks_of(self, problem: Problem) -> Iterator[tuple[int, int]]:
        """Of each consumer's 64 queries of a head the `own_blocks`, and how many of them hide no pair."""
        lengths = problem.seqlen_q, problem.seqlen_kv
        for first_row in range(0, math.ceil(problem.seqlen_q / self.tile_q) * self.tile_q, ROWS):
            seen = keys = max(1, problem.seqlen_kv) if self.packed else problem.seqlen_kv
            if self.mask.hides:
                seen = min(seen, max(0, self.seen_before(first_row + 1, *lengths)))
                keys = max(1, min(keys, self.seen_before(first_row + ROWS, *lengths)))
            own = 1 if first_row >= problem.seqlen_q else math.ceil(keys / self.tile_kv)
            yield own, min(own, seen // self.tile_kv)

    @cute.jit
    def locate(self, tile, mQ, mK):
        """(q_block, head, batch) of the tile-th tile in the order they are fetched."""
        heads, all_heads = mQ.shape[2], mQ.shape[2] * mQ.shape[3]
        q_blocks = cute.ceil_div(mQ.shape[0], self.tile_q)
        q_block, head = self.order.locate(tile, q_blocks, all_heads, self.section(mK.shape[0]))
        return q_block, head % heads, head // heads

    @cute.jit
    def section(self, seqlen_kv):
        """How many heads are worked on together."""
        section = None
        if const_expr(self.mask.hides):
            # As many heads as have section_bytes of K and V, 4·head_dim bytes a key. Divided twice and never
            # multiplied up: a head's bytes may not fit 32 bits, with 2²¹ keys and more.
            section = self.section_bytes(seqlen_kv) // (4 * self.head_dim) // seqlen_kv
        return section

    @property
    def lists(self) -> ListTiles:
        return ListTiles(self.tile_q, mask=self.mask, shared_keys=self.tile_kv if self.batch.shares else 0)

    def locate_in_sequence(self, inside, blocks, heads, seqlen_kv):
        """(block, head) of the inside-th tile of a packed sequence with so many of each head."""
        return self.order.locate(inside, blocks, heads, self.section(cutlass.max(1, seqlen_kv)))

    def locate_listed(self, tile, alone, mQ, mK, mList):
        """The place of the tile-th tile of a list of packed ones: (block, head, start_q, …), `Packed`'s, of
        which `alone` are a head's own."""
        heads, kv_heads = mQ.shape[2], mK.shape[2]
        return self.batch.locate_listed(tile, alone, heads, kv_heads, mList, self.locate_in_sequence)

    @cute.jit
    def hide(
        self, S, value, where_S, first_S, first_row, kv_block, seqlen_q, seqlen_kv,
        both_edges: cutlass.Constexpr = False,
    ):  # fmt: skip
        """S (row, key) becomes `value` where the key lies past the diagonal, or past the end; with
        `both_edges` also where it lies before the first that is seen.

        where_S and first_S are `rows.coordinates`': (row, key) in the tile of each element of S, of this
        thread's at run time and of thread 0's as constants. The limit is moved by the thread's first key, so
        that each comparison is with a constant and a thread needs no register for each of its columns.
        """
        for r in range_constexpr(2):
            row, key = where_S[r, 0]  # of the thread's first column; the rest are static
            last_key = seqlen_kv - 1
            if const_expr(self.mask.hides):
                last_key = cutlass.min(last_key, self.mask.last_key(first_row + row, seqlen_q, seqlen_kv))
            visible = last_key - (kv_block * self.tile_kv + key)
            for c in range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = S[r, c] if first_S[0, c][1] <= visible else value
            if const_expr(both_edges):
                hidden = self.mask.first_key(first_row + row, seqlen_q, seqlen_kv)
                hidden = hidden - (kv_block * self.tile_kv + key)
                for c in range_constexpr(cute.size(S, mode=[1])):
                    S[r, c] = S[r, c] if first_S[0, c][1] >= hidden else value


def work_on_query_tiles(kernel: QueryTiles, problem: Problem) -> Work:
    """The `Work` of a forward kernel that walks them: a first tile of keys apart, then a loop over those that
    are seen whole and a loop over the others; before them, where keys before a first one are hidden, one over
    those with that edge. `kernel` also has sms, consumers and smem_bytes."""
    heads = problem.batch * problem.heads
    steps = list(kernel.steps_of(problem))
    rows = max(1, len(steps))  # of 64 queries, each the work of one consumer
    q_blocks, trips = rows / kernel.consumers, [sum(each) / rows for each in zip(*steps)] or [0.0] * 3
    blocks = rows + sum(map(sum, steps))
    return Work(
        kernel=type(kernel).__name__,
        unit=f"{kernel.tile_q} queries",
        threads=WARPGROUP * kernel.consumers,
        ctas=min(kernel.sms, round(q_blocks * heads)),
        passes=round(q_blocks * heads),
        trips=tuple(trips[not kernel.mask.hides_first :]),
        ffma=0,
        hbm_bytes=problem.min_bytes / (q_blocks * heads),
        smem_bytes=kernel.smem_bytes,
        tensor_flops=4 * ROWS * kernel.tile_kv * problem.head_dim * blocks / q_blocks,
    )
