"""P and dS inside a tile of keys, of scores whose rows are keys: the mask, exponentials, soft caps. Part of
`key_tiles.Tiles`, which says which tiles there are."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from .folded import exponent_scale
from .policies import Scores
from .wgmma import round_fragment

CAPPED_COLUMNS = 4  # of scores, whose exponentials with a soft cap are in flight together


class KeyScores(Scores):
    """Scores (key, query) of a tile of queries, under a mask."""

    tile_q: int
    dtype: type
    caps: bool  # scores, softly
    folds: bool  # LSE and D are in S and dP already: `folded`

    def take(self, numbers: tuple[object, ...]) -> None:
        super().take(numbers)
        if self.folds:
            self.scale_log2 = exponent_scale(self.scale)

    @cute.jit
    def exponentials(
        self, S, words, sLSE, places, first_key, first_query, seqlen_q, seqlen_kv, masked: cutlass.Constexpr
    ):  # fmt: skip
        """S (key, query) becomes P = exp(S·scale − LSE), 0 where the mask hides; sLSE (query, block) is
        LSE·log2 e, +∞ past the end. `places` are the `Coordinates` of S, whose tile begins at first_key and
        first_query. With a soft cap S becomes P·(1 − tanh²), which dS is made of, and P is here rounded to
        `words`; without one `round_P` does that. Where S has the LSE folded in, sLSE is None."""
        _, query = places.own[0, 0]  # of the thread's first column; the rest are at static distances
        rLSE = self.by_query(sLSE, query) if const_expr(not self.folds) else None
        tile = first_key, first_query, seqlen_q, seqlen_kv
        if const_expr(self.caps):
            self.capped_exponentials(S, words, rLSE, places, tile, masked)
        else:
            for r in range_constexpr(2):
                p = S[r, None].load() * self.scale_log2
                if const_expr(not self.folds):
                    p = p - rLSE.load()
                S[r, None].store(cute.math.exp2(p, fastmath=True))
            # Only now, when the LSE's registers are free: notes/bwd4.md, "What the assembler takes".
            if const_expr(masked):
                for r in range_constexpr(2):
                    seen = self.queries_seen(places, r, *tile)
                    for c in range_constexpr(cute.size(S, mode=[1])):
                        S[r, c] = S[r, c] if self.sees(seen, places.first[0, c][1]) else Float32(0.0)

    @cute.jit
    def capped_exponentials(self, S, words, rLSE, places, tile, masked: cutlass.Constexpr):
        """`exponentials` with a soft cap, a few columns after the other, so that few values are in flight."""
        seen = [None, None]
        if const_expr(masked):
            seen = [self.queries_seen(places, r, *tile) for r in range(2)]
        for first in range_constexpr(0, cute.size(S, mode=[1]), CAPPED_COLUMNS):
            # (register,) in the accumulator's order, whose 4 are two columns of both rows
            P = cute.make_rmem_tensor(cute.make_layout(2 * CAPPED_COLUMNS), Float32)
            for i in range_constexpr(CAPPED_COLUMNS):
                for r in range_constexpr(2):
                    c = first + i
                    p, slope = self.capped(S[r, c], rLSE[c])
                    if const_expr(masked):
                        p = p if self.sees(seen[r], places.first[0, c][1]) else Float32(0.0)
                    P[4 * (i // 2) + 2 * r + i % 2] = p
                    S[r, c] = p * slope
            here = cute.make_tensor(words.iterator + first, cute.make_layout(CAPPED_COLUMNS))
            round_fragment(P, here, self.dtype)

    @cute.jit
    def queries_seen(self, places, r: cutlass.Constexpr, first_key, first_query, seqlen_q, seqlen_kv):
        """(from, until): the queries that see the key of a thread's row r, from first_query and the thread's
        first column on."""
        key, query = first_key + places.own[r, 0][0], first_query + places.own[0, 0][1]
        begin, until = Int32(0), Int32(self.tile_q)
        if const_expr(self.mask.hides):
            begin = self.mask.first_query(key, seqlen_q, seqlen_kv) - query
        if const_expr(self.mask.hides_first):
            until = self.mask.last_query(key, seqlen_q, seqlen_kv) - query
        if key >= seqlen_kv:
            begin = Int32(self.tile_q)
        return begin, until

    @cute.jit
    def sees(self, seen, place: cutlass.Constexpr):
        """Whether the query so far behind a thread's first column is among `queries_seen`."""
        begin, until = seen
        sees = place >= begin
        if const_expr(self.mask.hides_first):
            sees = sees & (place <= until)
        return sees

    def round_P(self, acc, words) -> None:
        """P, the accumulator of the scores, to 16 bits; with a soft cap `exponentials` has done so."""
        if not self.caps:
            round_fragment(acc, words, self.dtype)

    @cute.jit
    def gradients(self, P, dP, sD, places):
        """dP becomes dS = P∘(dP − D), without the scale; sD (query, block), None where dP has D folded in."""
        if const_expr(self.folds):
            for r in range_constexpr(2):
                dP[r, None].store(P[r, None].load() * dP[r, None].load())
        else:
            rD = self.by_query(sD, places.own[0, 0][1])
            for r in range_constexpr(2):
                dP[r, None].store(P[r, None].load() * (dP[r, None].load() - rD.load()))

    @cute.jit
    def by_query(self, sX, query):
        """What a thread needs of sX (query, block), of the queries of its columns: pairs, 8 queries apart,
        from `query` on."""
        blocks = cute.size(sX, mode=[1])
        rX = cute.make_rmem_tensor(cute.make_layout(((2, 8 * blocks),)), Float32)
        for block in range_constexpr(blocks):
            pairs = cute.make_tensor(
                sX[None, block].iterator + query, cute.make_layout((2, 8), stride=(1, 8))
            )
            cute.autovec_copy(pairs, cute.make_tensor(rX.iterator + 16 * block, cute.make_layout((2, 8))))
        return rX
