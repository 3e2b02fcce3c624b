"""How often the main loops over tiles of keys run on a problem, masked and not: what `Work` says of them. It
counts on plain integers, for a whole problem, what `key_tiles.Tiles` computes for one tile."""

import math

from ..contract import Problem
from .limits import FINAL_SECTIONS, L2_BYTES

ONE_WAY = 512  # queries up to which every head's gradients come from its first query on (`key_tiles.Tiles`)


class CountedTiles:
    """Counts of `key_tiles.Tiles`."""

    def trips(self, problem: Problem) -> tuple[int, float, float]:
        """How often tiles of keys meet a query head, and how many of its tiles of queries, masked and not,
        one of them meets on average in the main loop, in which the last tile is not."""
        if problem.sequences is not None:
            found = [(often, *self.trips(one)) for one, often in problem.alone]
            tiles = sum(often * tiles for often, tiles, *_ in found)
            means = [sum(x[0] * x[1] * x[i] for x in found) / max(1, tiles) for i in (2, 3)]
            return tiles, *means
        last, masked, unmasked = math.ceil(problem.seqlen_q / self.tile_q), 0, 0
        lengths, kv_blocks = (problem.seqlen_q, problem.seqlen_kv), self.kv_blocks_seen(problem)
        if kv_blocks == 0:
            return 0, 0.0, 0.0
        for kv_block in range(kv_blocks):
            first, split = self.masked_tiles(problem, kv_block)
            end, to = last, last - 1  # whole tiles end at `to`
            if self.mask.hides_first:
                first_key = kv_block * self.tile_kv
                behind = self.mask.last_query(first_key + self.tile_kv - 1, *lengths) + 1
                end = min(last, math.ceil(max(0, behind) / self.tile_q))
                to = min(end - 1, max(0, self.mask.last_query(first_key, *lengths) + 1) // self.tile_q)
            split = max(first, min(split, end - 1))
            whole = max(0, to - split)
            unmasked += whole
            masked += max(0, end - 1 - first - whole)
        return kv_blocks * problem.batch * problem.heads, masked / kv_blocks, unmasked / kv_blocks

    def kv_blocks_seen(self, problem: Problem) -> int:
        """Tiles of keys up to the last that a query sees."""
        keys = problem.seqlen_kv
        if problem.top_left:  # no tile of queries sees later ones, whose passes have no product
            keys = min(keys, math.ceil(problem.seqlen_q / self.tile_q) * self.tile_q)
        return math.ceil(keys / self.tile_kv)

    def masked_tiles(self, problem: Problem, kv_block: int) -> tuple[int, int]:
        """The first tile of queries that is visited for a tile of keys, and behind which none needs the
        mask."""
        last, first, split = math.ceil(problem.seqlen_q / self.tile_q), 0, 0
        if self.mask.hides:
            query = self.mask.first_query(kv_block * self.tile_kv, problem.seqlen_q, problem.seqlen_kv)
            first = min(last, max(0, query) // self.tile_q)
            split = math.ceil(max(0, query + self.tile_kv - 1) / self.tile_q)
        if (kv_block + 1) * self.tile_kv > problem.seqlen_kv:
            split = last
        if self.one_tile:
            first = 0
        return first, max(first, min(split, last))

    def reversed_masked(self, problem: Problem) -> float:
        """As `trips` has masked tiles, of a head that is reversed: they come last, the last is apart."""
        kv_blocks = self.kv_blocks_seen(problem)
        found = (self.masked_tiles(problem, kv_block) for kv_block in range(kv_blocks))
        return sum(max(0, split - first - 1) for first, split in found) / max(1, kv_blocks)

    def reversed_share(self, problem: Problem) -> float:
        """The share of heads that are."""
        heads = problem.batch * problem.kv_heads
        if self.alternates:
            return math.ceil(heads / 2) / max(1, heads) if problem.seqlen_q > ONE_WAY else 0.0
        if not (self.mirrors and heads and problem.seqlen_kv) or problem.seqlen_kv > 2 * problem.seqlen_q:
            return 0.0
        if problem.seqlen_q * self.column_bytes * self.head_dim > L2_BYTES:
            return 1.0
        kv_blocks = math.ceil(problem.seqlen_kv / self.tile_kv)
        most = self.most_last(heads)
        section = self.section_of(most, kv_blocks, problem.seqlen_q, problem.heads, problem.kv_heads)
        final = max(heads - FINAL_SECTIONS * section, (heads + 1) // 2) // section * section
        return 1 - final / heads
