"""Single operations that the compiler does not form by itself."""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32


def store_if(condition: Boolean, place: cute.Pointer, value: Float32) -> None:
    """Store `value` at `place` in global memory where `condition` holds, without a branch: the compiler would
    put what value and place are computed from into it too, and the warp would wait for each step."""
    operands = [Int32(condition), place.toint(), value]
    ptx = "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; @p st.global.f32 [{$r1}], {$r2}; }"
    cute.arch.inline_ptx(ptx, read_only_args=operands)


def _larger_bits(a: Float32, b: Float32, c: Float32) -> Float32:
    """Of three fp32 the one whose bits are the largest signed integer: one instruction, VIMNMX3."""
    ptx = """{ .reg .b32 x, y, z;
        mov.b32 x, {$r0}; mov.b32 y, {$r1}; mov.b32 z, {$r2};
        max.s32 x, x, y; max.s32 x, x, z;
        mov.b32 {$w0}, x; }"""
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[a, b, c])


def largest_positive(values: list[Float32]) -> Float32:
    """The largest of `values` if one of them is positive; if none is, any of them.

    If one is positive, the largest as an integer is the largest as fp32, and Hopper takes three integers in
    one instruction where it takes two fp32.
    """
    while len(values) > 1:
        values = [*values[3:], _larger_bits(values[0], values[1], values[min(2, len(values) - 1)])]
    return values[0]
