"""Scores of a tile become codes of P, in e4m3's range: those in fp32 here, those in fp16 in `half_scores`.

A softmax for `k7` has: `accumulator`, the type of the scores; `hide`; `first`, of a row's first keys;
`exponents`, of a tile while P·V of the tile before is under way, which waits for that only where a maximum
rises; and `codes`, when it is done. row_max is scaled, in powers of two, and OFFSET below the row's maximum
when that was brought up to date. A factor is `block_scales.HeadScales.factors`'.
"""

import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from .arithmetic import largest_positive
from .e4m3 import eighths_to_codes, round_to_codes
from .rows import OWN_ROWS, finite, in_parts, largest_of_row
from .wgmma import by_row

OFFSET = 6.0  # log₂ of P where a score is its row's maximum, when that has been brought up to date
LIMIT = 8.75  # log₂ of P beyond which the maximum is brought up to date: the largest code is 448 = 2^8.81
# In eighths of a power of two, and so much higher, an exponent is nearly its P's code: e4m3 has 8 codes for
# each power, from 2⁻⁷ on (were those not subnormal); 0.457 less, so that P is right on average.
EIGHTHS, FIRST_CODE = 8.0, 8.0 * 7 - 0.457


class ScoresInFp32:
    """A tile of `tile_kv` keys in `parts`, of which the last `direct_keys` have codes without exponentials,
    but in a row's first tile."""

    accumulator = Float32

    def __init__(self, tile_kv: int, parts: int, direct_keys: int):
        if direct_keys % 16 or not 0 <= direct_keys <= tile_kv:
            raise ValueError(f"direct_keys must be a multiple of 16 up to {tile_kv}, not {direct_keys}")
        self.tile_kv, self.exact_keys = tile_kv, tile_kv - direct_keys
        cuts = sorted({*range(0, tile_kv + 1, tile_kv // parts), self.exact_keys})
        self.parts = list(itertools.pairwise(cuts))  # (first key, behind the last)
        self.exact = sum(end <= self.exact_keys for _, end in self.parts)  # parts with exponentials

    def hide(self, tiles, x, rows, first_row, kv_block):
        tiles.hide(rows.S, -Float32.inf, *rows.limits, first_row, kv_block, *rows.lengths)

    def first(self, x, rows, factors):
        """S of a row's first keys becomes codes of P."""
        for r in range(OWN_ROWS):
            largest = None
            for part, (factor, exponent) in zip(in_parts(x.rS, len(factors)), factors):
                of_part = by_row(part)[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0) * factor
                of_part = of_part if exponent is None else of_part + exponent
                largest = of_part if largest is None else cute.arch.fmax(largest, of_part)
            # A row that sees any key sees the first one: only of rows that see none is it not finite.
            rows.max[r] = finite(largest_of_row(Float32(largest))) - OFFSET
        subtract(x.rS, rows.max, factors)
        exponentiate(by_row(x.rS))
        round_to_codes(x.rS, x.rP)

    def exponents(self, x, rows, factors):
        """Part by part: while a part is subtracted and asked for its growth, the part before becomes P."""
        fragments = [keys_of(x.rS, *part) for part in self.parts]
        by_rows = [by_row(fragment) for fragment in fragments]
        exact = self.exact
        for p, (part, fragment) in enumerate(zip(by_rows, fragments)):
            start, end = (keys * len(factors) // self.tile_kv for keys in self.parts[p])
            subtract(fragment, rows.max, factors[start : max(end, start + 1)], p >= exact)
            if 0 < p <= exact:
                exponentiate(by_rows[p - 1])
            relative = [*by_rows[: min(p, exact)], rows.O]
            raise_maximum(part, relative, by_rows[exact:p], rows.max, rows.sum, p >= exact)

    def codes(self, x):
        if self.exact == len(self.parts):
            exponentiate(by_row(keys_of(x.rS, *self.parts[-1])))
            round_to_codes(x.rS, x.rP)
        else:
            self.round_parts(x.rS, x.rP)

    def round_parts(self, rS, rP):
        """S, of which the first `exact_keys` columns are P and the others exponents, to codes."""
        words = cute.size(rP) * self.exact_keys // self.tile_kv
        for first, end, to_codes in ((0, words, round_to_codes), (words, cute.size(rP), eighths_to_codes)):
            if first < end:
                keys = (i * self.tile_kv // cute.size(rP) for i in (first, end))
                of_part = cute.make_tensor(rP.iterator + first, cute.make_layout(end - first))
                to_codes(keys_of(rS, *keys), of_part)


def subtract(rS, row_max, factors, in_eighths: bool = False) -> None:
    """Scores become exponents, relative to row_max; or `in_eighths` of a power of two, from FIRST_CODE on."""
    for part, (factor, exponent) in zip(in_parts(rS, len(factors)), factors):
        S = by_row(part)
        for r in range(OWN_ROWS):
            base = row_max[r] if exponent is None else row_max[r] - exponent
            by = factor
            if in_eighths:
                base, by = base * EIGHTHS - FIRST_CODE, factor * EIGHTHS
            S[r, None].store(S[r, None].load() * by - base)


def exponentiate(S) -> None:
    """Exponents become P."""
    for r in range(OWN_ROWS):
        S[r, None].store(cute.math.exp2(S[r, None].load(), fastmath=True))


@cute.jit
def raise_maximum(part, relative, exponents, row_max, row_sum, in_eighths: cutlass.Constexpr):
    """Where an exponent of `part` is larger than LIMIT, raise the row's maximum until it is OFFSET, and
    rescale what is relative to it (`lazy.raise_maximum` says why so). `exponents` are the parts before that
    are not P yet, in eighths, as `part` may be."""
    unit, first = (EIGHTHS, FIRST_CODE) if const_expr(in_eighths) else (1.0, 0.0)
    limit, offset = LIMIT * unit + first, OFFSET * unit + first
    keys = range(cute.size(part, mode=[1]))
    ahead = [largest_positive([part[r, c] for c in keys]) for r in range(OWN_ROWS)]
    if cute.arch.vote_any_sync(cute.arch.fmax(ahead[0], ahead[1]) > limit):
        warpgroup.wait_group(0)  # P·V still adds to O
        for r in range_constexpr(OWN_ROWS):
            largest = largest_of_row(ahead[r])
            ahead_of_offset = largest - offset
            if const_expr(in_eighths):
                ahead_of_offset = ahead_of_offset * (1.0 / unit)
            new_max = row_max[r] + (ahead_of_offset if largest > limit else 0.0)
            growth = new_max - row_max[r]
            row_max[r] = new_max
            grown = growth * unit if const_expr(in_eighths) else growth
            for values in (part, *exponents):
                values[r, None].store(values[r, None].load() - grown)
            factor = cute.math.exp2(-growth, fastmath=True)
            for values in relative:
                values[r, None].store(values[r, None].load() * factor)
            row_sum[r] *= factor


def keys_of(accumulator, first: int, end: int) -> cute.Tensor:
    """Columns of an accumulator fragment ((2, 2, N/8), M/64, 1), multiples of 8."""
    (pair, half, _), blocks, one = accumulator.shape
    layout = cute.make_layout(((pair, half, (end - first) // 8), blocks, one), stride=accumulator.stride)
    return cute.make_tensor(accumulator.iterator + first // 8 * pair * half, layout)
