"""Scores in fp16, two in a register, and codes of P made of them without exponentials.

An accumulator in fp16 is half as many registers, and an instruction takes two scores. What it cannot hold is
∞: codes of Q and K must be so small that no sum of head_dim products is beyond 65504
(`quantize_rows.Casting`, `largest_code`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from .p_codes import EIGHTHS, FIRST_CODE, LIMIT, OFFSET
from .rows import OWN_ROWS, finite, largest_of_row

HIDDEN_PAIR = -0x3FF0400  # two scores that are none: −∞


class ScoresInHalf:
    """The softmax of `p_codes` for them: all keys of a tile have codes without exponentials, also of a row's
    first one. Scores are read and written in words: of halves LLVM would read accumulators that are under
    way."""

    accumulator = Float16

    def __init__(self, tile_kv: int, direct_keys: int):
        if direct_keys != tile_kv:
            raise ValueError(
                f"scores in fp16 become codes without exponentials: direct_keys must be all {tile_kv}, "
                f"not {direct_keys}"
            )

    def hide(self, tiles, x, rows, first_row, kv_block):
        hide_pairs(tiles, x.rS, *rows.limits, first_row, kv_block, *rows.lengths)

    def first(self, x, rows, factors):
        words = cute.recast_tensor(x.rS, Int32)
        of_factor = cute.size(words) // len(factors)
        for r in range(OWN_ROWS):
            largest = None
            for i, (factor, exponent) in enumerate(factors):
                own = [words[j] for j in range(of_factor * i + r, of_factor * (i + 1), OWN_ROWS)]
                of_part = largest_score(own) * factor
                of_part = of_part if exponent is None else of_part + exponent
                largest = of_part if largest is None else cute.arch.fmax(largest, of_part)
            rows.max[r] = as_half_base(finite(largest_of_row(Float32(largest))) - OFFSET)
        half_exponents(words, rows.max, factors)
        pairs_to_codes(words, x.rP)

    def exponents(self, x, rows, factors):
        words = cute.recast_tensor(x.rS, Int32)
        half_exponents(words, rows.max, factors)
        raise_half_maximum(words, rows.O, rows.max, rows.sum)

    def codes(self, x):
        pairs_to_codes(cute.recast_tensor(x.rS, Int32), x.rP)


@cute.jit
def hide_pairs(tiles, rS, where_S, first_S, first_row, kv_block, seqlen_q, seqlen_kv):
    """`query_tiles.QueryTiles.hide` of scores in fp16."""
    words = cute.recast_tensor(rS, Int32)
    for r in range_constexpr(OWN_ROWS):
        row, key = where_S[r, 0]
        last_key = seqlen_kv - 1
        if const_expr(tiles.mask.hides):
            last_key = cutlass.min(last_key, tiles.mask.last_key(first_row + row, seqlen_q, seqlen_kv))
        visible = last_key - (kv_block * tiles.tile_kv + key)
        for i in range_constexpr(cute.size(words) // OWN_ROWS):
            low, high = (first_S[0, 2 * i + half][1] <= visible for half in range(2))
            kept = (Int32(0xFFFF) if low else Int32(0)) | (Int32(-0x10000) if high else Int32(0))
            word = OWN_ROWS * i + r
            words[word] = (words[word] & kept) | (HIDDEN_PAIR & ~kept)


def half_exponents(words, row_max, factors) -> None:
    """Scores become exponents, in eighths, relative to row_max."""
    of_factor = cute.size(words) // len(factors)
    for i, (factor, exponent) in enumerate(factors):
        by = twice(factor * EIGHTHS)
        for r in range(OWN_ROWS):
            base = row_max[r] if exponent is None else row_max[r] - exponent
            shift = twice(FIRST_CODE - base * EIGHTHS)
            for j in range(of_factor * i + r, of_factor * (i + 1), OWN_ROWS):
                words[j] = pair_of_eighths(words[j], by, shift)


@cute.jit
def raise_half_maximum(words, O, row_max, row_sum):
    """`p_codes.raise_maximum` for exponents of a whole tile, in fp16 and eighths."""
    limit, offset = LIMIT * EIGHTHS + FIRST_CODE, OFFSET * EIGHTHS + FIRST_CODE
    own = [pairs_of_row(words, r) for r in range(OWN_ROWS)]
    pairs = [largest_pair([words[j] for j in of_row]) for of_row in own]
    # Row by row: NaN of one must not hide what the other is ahead.
    ahead = [larger_of(pair) for pair in pairs]
    if cute.arch.vote_any_sync((ahead[0] > limit) | (ahead[1] > limit)):
        warpgroup.wait_group(0)  # P·V still adds to O
        for r in range_constexpr(OWN_ROWS):
            largest = largest_of_row(ahead[r])
            new_max = as_half_base(row_max[r] + (largest - offset) * (1.0 / EIGHTHS))
            new_max = new_max if largest > limit else row_max[r]
            growth = new_max - row_max[r]
            row_max[r] = new_max
            one, less = twice(Float32(1.0)), twice(growth * -EIGHTHS)
            for j in own[r]:
                words[j] = pair_of_eighths(words[j], one, less)
            factor = cute.math.exp2(-growth, fastmath=True)
            O[r, None].store(O[r, None].load() * factor)
            row_sum[r] *= factor


def as_half_base(maximum: Float32) -> Float32:
    """A maximum near `maximum` that exponents in fp16 are relative to exactly."""
    base = lower_of(twice(FIRST_CODE - maximum * EIGHTHS))
    return (FIRST_CODE - base) * (1.0 / EIGHTHS)


def twice(value: Float32) -> Int32:
    """fp16 of `value`, twice."""
    ptx = "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r0};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[value])


def lower_of(word: Int32) -> Float32:
    """The lower of two fp16."""
    ptx = "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; }"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[word])


def larger_of(word: Int32) -> Float32:
    """The larger of two fp16 that are not negative; NaN is the largest."""
    halves = Uint32(word)
    larger = cutlass.max(halves & Uint32(0xFFFF), halves >> Uint32(16))
    return lower_of(Int32(larger))


def pairs_of_row(words: cute.Tensor, row: int) -> list[int]:
    """Which words of an accumulator are of a row: those of the two rows take turns."""
    return list(range(row, cute.size(words), OWN_ROWS))


def pair_of_eighths(word: Int32, factor: Int32, base: Int32) -> Int32:
    """Two scores · factor + base, at least 0; NaN stays NaN."""
    return _three("fma.rn.relu.f16x2 {$w0}, {$r0}, {$r1}, {$r2};", word, factor, base)


def largest_score(words: list[Int32]) -> Float32:
    """Of pairs of any sign; NaN does not count."""
    while len(words) > 1:
        words = [*words[2:], _two("max.f16x2 {$w0}, {$r0}, {$r1};", *words[:2])]
    high = _two("prmt.b32 {$w0}, {$r0}, {$r1}, 0x1032;", words[0], words[0])
    return lower_of(_two("max.f16x2 {$w0}, {$r0}, {$r1};", words[0], high))


def largest_pair(words: list[Int32]) -> Int32:
    """Of pairs that are not negative, as the integers that they are: three at once."""
    while len(words) > 1:
        a, b, c = words[0], words[1], words[min(2, len(words) - 1)]
        ptx = "{ .reg .b32 x; max.s16x2 x, {$r0}, {$r1}; max.s16x2 {$w0}, x, {$r2}; }"
        words = [*words[3:], _three(ptx, a, b, c)]
    return words[0]


def four_codes(low: Int32, high: Int32) -> Int32:
    """Four codes of two pairs of exponents: 1024 has a step of 1 in fp16, and leaves them in lowest bytes."""
    ptx = """{ .reg .b32 low, high, magic;
        mov.b32 magic, 0x64006400;
        add.rn.f16x2 low, {$r0}, magic;
        add.rn.f16x2 high, {$r1}, magic;
        prmt.b32 {$w0}, low, high, 0x6420; }"""
    return _two(ptx, low, high)


@cute.jit
def pairs_to_codes(words: cute.Tensor, codes: cute.Tensor):
    """Exponents of an accumulator to codes, as `wgmma.operand_a` of 8 bits takes them."""
    for i in range_constexpr(cute.size(codes)):
        group, half = 2 * (i // 2), i % 2
        codes[i] = four_codes(words[2 * group + half], words[2 * (group + 1) + half])


def _two(ptx: str, a: Int32, b: Int32) -> Int32:
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[a, b])


def _three(ptx: str, a: Int32, b: Int32, c: Int32) -> Int32:
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[a, b, c])
