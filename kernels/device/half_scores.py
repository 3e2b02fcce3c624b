"""Scores in fp16, two in a register, and codes of P made of them without exponentials.

An accumulator in fp16 is half as many registers, and an instruction takes two scores. What it cannot hold is
∞: codes of Q and K must be so small that no sum of head_dim products is beyond 65504 (`quantize.Quantize`,
`largest_code`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, range_constexpr

from .rows import OWN_ROWS

HIDDEN_PAIR = -0x3FF0400  # two scores that are none: −∞


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
