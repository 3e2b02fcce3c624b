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


@dsl_user_op
def _codes_here(rX, words, *, loc: object = None, ip: object = None) -> None:
    for i in range(cute.size(words)):
        group, half = 2 * (i // 2), i % 2  # a word is of one row, two columns each of two groups of 8
        places = [4 * (group + g) + 2 * half + pair for g in range(2) for pair in range(2)]
        values = [Float32(rX[place]).ir_value(loc=loc, ip=ip) for place in places]
        words[i] = Int32(nvvm.inline_ptx([T.i32()], values, [], FOUR, loc=loc, ip=ip))


@cute.jit
def round_to_codes(rX, words):
    """An accumulator's fp32 registers rX to `words` of four codes, as `wgmma.operand_a` of 8 bits takes them;
    where it stands, as `wgmma.round_fragment`."""
    _codes_here(rX, words)
