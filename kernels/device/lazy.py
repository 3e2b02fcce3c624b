"""A row's maximum that may be behind its scores, and what is rescaled when it is brought up to date."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from .arithmetic import largest_positive
from .far_scores import raised
from .rows import OWN_ROWS, finite, largest_of_row, sum_of_row


def subtract(S, row_max, scale_log2) -> None:
    """Scores become exponents, relative to row_max."""
    for r in range(OWN_ROWS):
        S[r, None].store(S[r, None].load() * scale_log2 - row_max[r])


def exponentiate(S, row_sum) -> None:
    """Exponents become P, and row_sum follows: by the sum of these terms. Thousands of equal ones, each added
    to the row's, would all be rounded the same way."""
    for r in range(OWN_ROWS):
        S[r, None].store(cute.math.exp2(S[r, None].load(), fastmath=True))
        first, *others = [S[r, c] for c in range(cute.size(S, mode=[1]))]
        row_sum[r] += sum(others, first)


def first_maximum(S, row_max, scale_log2) -> None:
    """row_max becomes the largest of S of a row's first keys, scaled, in powers of two."""
    for r in range(OWN_ROWS):
        tile_max = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        # Not finite of a row that sees none of these keys, and so, but where keys before a first one are
        # hidden too (`follow_maximum`), of one that sees no key.
        row_max[r] = finite(largest_of_row(Float32(tile_max))) * scale_log2


def first_softmax(S, row_max, row_sum, scale_log2, least) -> None:
    """S of a row's first keys becomes P, relative to row_max, `raised` to `least` if there is one."""
    if least is not None:
        for r in range(OWN_ROWS):
            row_max[r] = raised(row_max[r], least)
    subtract(S, row_max, scale_log2)
    exponentiate(S, row_sum)


def first_room(total, part, growth):
    """In powers of two, how far a row's maximum may rise from its first tile's: log₂ of `part` of the tile's
    sum, which is about what each tile adds to the row; between 0 and `growth`. Of rows that see a part of all
    keys only that part of it: their terms weigh more, and they are soon done."""
    return cute.arch.fmin(cute.arch.fmax(cute.math.log2(total * part, fastmath=True), 0.0), growth)


@cute.jit
def raise_maximum(part, before, relative, row_max, row_sum, room, narrows: cutlass.Constexpr):
    """Where an exponent of `part` is larger than its row has `room` for, raise the row's maximum by it, and
    rescale what is relative to it: the part, P of the parts `before`, the sum, and (row, …) in `relative`, O
    at least. The maximum is subtracted already: the largest positive exponent is the growth. −∞ of hidden
    scores needs no care. Where `narrows`, a row whose maximum has risen has no room from then on."""
    # Each thread asks its own keys; the four of a row put theirs together only in the branch.
    keys = range(cute.size(part, mode=[1]))
    ahead = [largest_positive([part[r, c] for c in keys]) for r in range(OWN_ROWS)]
    # A vote: the branch must be uniform in the warp (notes/k6.md, "A branch must be uniform").
    if cute.arch.vote_any_sync((ahead[0] > room[0]) | (ahead[1] > room[1])):
        warpgroup.wait_group(0)  # P·V still adds to O
        for r in range_constexpr(OWN_ROWS):
            # Only of a row that has grown: what others of the warp see must not change its bits.
            growth = largest_of_row(ahead[r])
            new_max = row_max[r] + (growth if growth > room[r] else 0.0)
            growth = new_max - row_max[r]  # as rounded: what the keys to come are relative to
            row_max[r] = new_max
            if const_expr(narrows):
                room[r] = cute.arch.fmax(room[r] - growth, 0.0)  # it rose by more than there was
            # The exponents keep the rounding of their size before: 2⁻²⁴ of the growth.
            part[r, None].store(part[r, None].load() - growth)
            factor = cute.math.exp2(-growth, fastmath=True)
            for values in (*before, *relative):
                values[r, None].store(values[r, None].load() * factor)
            row_sum[r] *= factor


@cute.jit
def follow_maximum(S, O, row_max, row_sum, least):
    """As `raise_maximum` without room, for tiles before the end of which a row may have seen no key. Such a
    row's maximum is 0, of no score, and perhaps so far above all of its scores that none of them would be
    left; it becomes the first one's, up or down, `raised` to `least`."""
    growth = [None, None]
    for r in range_constexpr(OWN_ROWS):
        tile_max = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        ahead = largest_of_row(Float32(tile_max))
        seen = sum_of_row(row_sum[r]) > 0.0
        behind = 0.0 if seen else -Float32.inf
        if const_expr(least is not None):
            behind = -Float32.inf if least > -Float32.inf else behind
        new_max = row_max[r] + finite(cute.arch.fmax(ahead, behind))
        if const_expr(least is not None):
            # Of a row whose maximum was raised, this tile's largest term is to be exact too.
            new_max = raised(new_max, row_max[r] if seen & (least > -Float32.inf) else least)
        growth[r] = new_max - row_max[r]  # as rounded: what the keys to come are relative to
        row_max[r] = new_max
        S[r, None].store(S[r, None].load() - growth[r])
    warpgroup.wait_group(0)  # P·V still adds to O
    for r in range_constexpr(OWN_ROWS):
        # Where a maximum falls there is nothing to rescale: 0, and not 0·∞.
        factor = cute.math.exp2(-cute.arch.fmax(growth[r], 0.0), fastmath=True)
        O[r, None].store(O[r, None].load() * factor)
        row_sum[r] *= factor
