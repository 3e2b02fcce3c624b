"""A soft cap where scores are far from zero: tiles of keys that are taken for far, and rows' maxima that are
not followed there.

`SoftCap` asks each tile how large its scores are, and behind the answer lies a branch, before which P·V has
to end. A consumer whose first tile of keys was far, or nearly, does not ask again of those that hide no key:
it takes them for far, and four scores of a row share a reciprocal,

    r = 1/(abcd),   1/a = (r·cd)·b,   1/b = (r·cd)·a,   1/c = (r·ab)·d,   1/d = (r·ab)·c,

where a is (1 + e^2y)/2³⁰, but at most 1, as an FFMA that saturates has it: their product stays in fp32. That
is right to about 2⁻²¹ of the cap, which the LSE of a row of few keys would show: the first tile, and those
with hidden keys, are computed score by score.

Nor does it follow its rows' maxima there, if P is bf16 and has a place for all exponents of the cap: they are
relative to the first tile's maximum, `raised` to no less than the cap less ABOVE. Of larger caps no tile is
taken for far. An eager softmax's largest term is 1, and exact in bf16; here it is rounded, and all terms that
equal it are rounded as it is. O = P·V / sum P shows that error whole unless the sum shares it.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from .arithmetic import largest_positive
from .constants import WARPGROUP
from .query_tiles import QueryTiles
from .rows import OWN_ROWS
from .softcap import SoftCap
from .wgmma import round_fragment

FIRST = 0.85  # of what a polynomial is for: from there a first tile is far. Later ones reach somewhat further
TOGETHER = 4  # scores of a reciprocal
LARGEST = 30  # of 2y·log₂ e: four factors are 2⁻¹²⁰ or more, and from there on tanh y is 1 in fp32
# How far exponents in powers of two may reach where maxima are not followed. Sums of P·V have room for values
# of 2⁷⁶ over the number of keys, and values from 2⁻²⁴ on add no denormal numbers.
ABOVE, BELOW = 50.0, 100.0
# The bits of 1, twice: less those of x > 0 they are those of 1/x, up to an eighth more.
ONE_TWICE = 0x7F000000


@dsl_user_op
def any_of_warpgroup(here: Boolean, barrier: Int32, *, loc: object = None, ip: object = None) -> Boolean:
    """Whether `here` holds for a thread of a warpgroup, all of which meet at a named barrier."""
    here, barrier, threads = (x.ir_value(loc=loc, ip=ip) for x in (here, barrier, Int32(WARPGROUP)))
    rest = {"thread_count": threads, "aligned": True, "loc": loc, "ip": ip}
    return Boolean(nvvm.barrier_cta_red(here, barrier, nvvm.BarrierReduxKind.OR, **rest))


class FarScores(SoftCap):
    """`SoftCap`, and what a consumer does of tiles that it takes for far. `follows`: it follows maxima there
    too, under any cap."""

    def __init__(self, numbers: tuple[Float32, ...], follows: bool):
        self.follows = follows
        super().__init__(numbers)

    @cute.jit
    def first_tile(self, S: cute.Tensor, barrier: Int32):
        """Products S of a tile of queries' first keys become scores in powers of two. Returns 1 if all of the
        warpgroup are to take the tiles that follow for far, else 0; and what exponents are relative to at
        least: None where maxima are followed in any case, −∞ where they are this time."""
        far, least = self.is_far(S, FIRST), None
        if const_expr(not self.follows):
            far = far & (2.0 * self.outer <= ABOVE + BELOW)
        # Through a shuffle: the compiler does not know that a barrier tells all the same, and would hold all
        # that depends on it in registers, descriptors of products too (a fifth of the speed).
        far = cute.arch.make_warp_uniform(Int32(any_of_warpgroup(far, Int32(barrier))))
        if const_expr(not self.follows):
            least = self.outer - ABOVE if far == 1 else -Float32.inf
        self.exponents(S, [0.0, 0.0])
        return far, least

    def far_together(self, S: cute.Tensor, row_max) -> None:
        """As `far`, four scores at a time. One of NaN is a factor of 0: it spoils the others, of its row."""
        least = 2.0**-LARGEST
        for r in range(cute.size(S, mode=[0])):
            largest = self.outer - row_max[r]
            for at in range(0, cute.size(S, mode=[1]), TOGETHER):
                doubled = [S[r, at + i] * self.double_log2 for i in range(TOGETHER)]
                a, b, c, d = [shrunk_up_to_1(cute.math.exp2(x, fastmath=True), least) for x in doubled]
                ab, cd = a * b, c * d
                shared = cute.arch.rcp_approx(ab * cd) * (-2.0 * least * self.outer)
                of_ab, of_cd = shared * cd, shared * ab
                for i, x in enumerate((of_ab * b, of_ab * a, of_cd * d, of_cd * c)):
                    S[r, at + i] = x + largest


class CappedQueries(QueryTiles):
    """Tiles of queries of which a cap takes tiles of keys for far."""

    cap: FarScores | None = None
    follows_far = True  # rows' maxima, there too

    def take(self, scale, window, cap) -> None:
        super().take(scale, window, cap)
        if cap is not None:
            self.cap = FarScores(cap, self.follows_far)


def shrunk_up_to_1(a: Float32, by: float) -> Float32:
    """(1 + a)·by, but at most 1, of a ≥ 0: one instruction. NaN gives 0."""
    ptx = "fma.rn.sat.ftz.f32 {$w0}, {$r0}, {$r1}, {$r1};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[a, Float32(by)])


def raised(maximum: Float32, least: Float32) -> Float32:
    """`maximum`, and as many whole powers of two as bring it to `least`: what was 1 stays exact in bf16."""
    return maximum + cute.math.ceil(cute.arch.fmax(least - maximum, 0.0))


def add_rounding(P, tile_sum, row_sum, excess) -> None:
    """Add a tile's sums to the rows', and what rounding P to bf16 adds to them to `excess` (row, 1).

    Taken is that a thread's terms are all rounded, for their size, as its largest is. Where that is not so
    the others are small, or many different ones, whose errors cancel.
    """
    of_rows = cute.make_layout(OWN_ROWS)
    largest, bits = cute.make_rmem_tensor(of_rows, Float32), cute.make_rmem_tensor(of_rows, Int32)
    word = cute.make_rmem_tensor(cute.make_layout(1), Int32)
    for r in range(OWN_ROWS):
        largest[r] = largest_positive([P[r, c] for c in range(cute.size(P, mode=[1]))])
    round_fragment(largest, word, BFloat16)
    bits[0], bits[1] = word[0] << 16, word[0] & Int32(-1 << 16)
    rounded = cute.recast_tensor(bits, Float32)
    inverse_bits = cute.make_rmem_tensor(of_rows, Int32)
    for r in range(OWN_ROWS):
        inverse_bits[r] = ONE_TWICE - cute.recast_tensor(largest, Int32)[r]
        relative = (rounded[r] - largest[r]) * cute.recast_tensor(inverse_bits, Float32)[r]
        excess[r, 0] += relative * tile_sum[r]
        row_sum[r] += tile_sum[r]
