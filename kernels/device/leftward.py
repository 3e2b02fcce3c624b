"""Tiles of queries whose tiles of keys are taken from right to left, as bwd4's dQ kernel does: `query_tiles`
with the loops over them, and P."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import const_expr, range_constexpr

from ..contract import Problem
from .constants import LOG2_E
from .key_tiles import CONSUMERS
from .masks import Mask
from .policies import DenseScratch, PackedScratch, Scores, listed
from .query_tiles import QueryTiles


class TilesOfQueries(Scores, QueryTiles):  # `take` is the former's
    """Tiles of queries, two consumers a CTA."""

    def __init__(
        self, head_dim: int, mask: Mask, tile_q: int, tile_kv: int, capped: bool = False, packed: bool = False
    ):
        super().__init__(head_dim, mask, tile_q, tile_kv, PackedScratch() if packed else DenseScratch())
        self.caps = capped  # scores, softly
        self.scale = 1.0 / math.sqrt(head_dim)
        self.scale_log2 = self.scale * LOG2_E

    def runs(self, masked, own_blocks, first, edge):
        """The loops over a consumer's tiles of keys, one after the other, from right to left, as (begin, end,
        whether masked); the last tile, `first`, is apart. With a window those left of `edge` are masked too.
        A generator, so that each bound is computed where its loop begins."""
        if self.mask.hides_first:
            last = own_blocks - 1 - first
            split = cutlass.min(masked, last)
            yield 0, split, True
            end = cutlass.max(split, cutlass.min(last, own_blocks - edge))
            yield split, end, False
            yield end, last, True
        else:
            split = cutlass.min(masked, own_blocks - 1)
            yield 0, split, True
            yield split, own_blocks - 1, False

    def place_of(self, tile, mQ, mK, mList):
        """The tile-th tile's place, of `self.batch`; mList only of packed ones."""
        return self.locate_listed(tile, mQ, mList) if self.packed else self.locate(tile, mQ, mK)

    def locate_listed(self, tile, mQ, mList):
        """(q_block, head, start_q, …): as `QueryTiles`, and where in scratch the sequence's queries are."""
        heads = mQ.shape[2]
        first, q_blocks, *sequence, place = listed(mList, tile // heads)
        section = self.section(cutlass.max(1, sequence[3]))
        q_block, head = self.order.locate(tile - first * heads, q_blocks, heads, section)
        return q_block, head, *sequence, place * CONSUMERS, first

    @cute.jit
    def exponentials(self, S, rLSE):
        """S (query, key) becomes P = exp(S·scale − LSE); rLSE is LSE·log2 e, +∞ past the end. With a soft cap
        it becomes P·(1 − tanh²), which dS is made of."""
        for r in range_constexpr(2):
            if const_expr(self.caps):
                for c in range_constexpr(cute.size(S, mode=[1])):
                    p, slope = self.capped(S[r, c], rLSE[r])
                    S[r, c] = p * slope
            else:
                p = S[r, None].load() * self.scale_log2 - rLSE[r]
                S[r, None].store(cute.math.exp2(p, fastmath=True))

    def trips(self, problem: Problem) -> tuple[int, float, float]:
        """How many tiles of queries there are, and how many of keys, masked and not, a consumer meets on
        average in the main loop, in which the last one is not."""
        steps = list(self.steps_of(problem))
        rows = max(1, len(steps))  # of 64 queries, each the work of one consumer
        masked, unmasked = sum(edge + last for edge, _, last in steps), sum(whole for _, whole, _ in steps)
        return rows // CONSUMERS * problem.batch * problem.heads, masked / rows, unmasked / rows
