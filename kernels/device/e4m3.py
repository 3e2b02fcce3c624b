"""Values on their way to e4m3: single operations that the compiler does not form by itself."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .wgmma import PAIRS

FOUR = """{ .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};
    cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};
    mov.b32 {$w0}, {low, high}; }"""


def four_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> Int32:
    """Four fp32 as four e4m3 in one word, `a` in the lowest byte: to nearest even, beyond ±448 to ±448, NaN
    to 0x7f. Two instructions: the second leaves the first one's half as it is."""
    return cute.arch.inline_ptx(FOUR, write_only_types=[Int32], read_only_args=[a, b, c, d])


def absolute(value: Float32) -> Float32:
    """|value|: a modifier of the instruction that takes it, no instruction."""
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def larger_pair(a: Int32, b: Int32, dtype: type) -> Int32:
    """The larger of |a| and |b|, of two 16-bit values in a word, with any sign; NaN does not count."""
    ptx = f"max.xorsign.abs.{PAIRS[dtype]} {{$w0}}, {{$r0}}, {{$r1}};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[a, b])


# 1024 has a step of 1 in fp16: added, it leaves a code, rounded, in the lowest byte, and NaN NaN.
FOUR_OF_EIGHTHS = """{ .reg .b32 low, high, magic;
    mov.b32 magic, 0x64006400;
    cvt.rn.relu.f16x2.f32 low, {$r1}, {$r0};
    cvt.rn.relu.f16x2.f32 high, {$r3}, {$r2};
    add.rn.f16x2 low, low, magic;
    add.rn.f16x2 high, high, magic;
    prmt.b32 {$w0}, low, high, 0x6420; }"""


@dsl_user_op
def _codes_here(rX, words, four: str, *, loc: object = None, ip: object = None) -> None:
    for i in range(cute.size(words)):
        group, half = 2 * (i // 2), i % 2  # a word is of one row, two columns each of two groups of 8
        places = [4 * (group + g) + 2 * half + pair for g in range(2) for pair in range(2)]
        values = [Float32(rX[place]).ir_value(loc=loc, ip=ip) for place in places]
        words[i] = Int32(nvvm.inline_ptx([T.i32()], values, [], four, loc=loc, ip=ip))


@cute.jit
def round_to_codes(rX, words):
    """An accumulator's fp32 registers rX to `words` of four codes, as `wgmma.operand_a` of 8 bits takes them;
    where it stands, as `wgmma.round_fragment`."""
    _codes_here(rX, words, FOUR)


@cute.jit
def eighths_to_codes(rX, words):
    """`round_to_codes` of 2^(y/8 − 7), for y in rX below 126.5, without an exponential: the code of e4m3 is
    linear in the exponent but for the mantissa, where 1 + f stands for 2^f. NaN stays NaN."""
    _codes_here(rX, words, FOUR_OF_EIGHTHS)
