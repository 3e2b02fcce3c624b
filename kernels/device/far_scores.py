"""A soft cap where scores are far from zero: tiles of keys that are taken for far, and rows' maxima that are
not followed there.

`SoftCap` asks each tile how large its scores are, and behind the answer lies a branch, before which P·V has
to end. A consumer whose first tile of keys was far, or nearly, does not ask again of those that hide no key:
it takes them for far, in one of two ways. The first tile, and those with hidden keys, are computed score by
score. Of larger caps no tile is taken for far.

Exactly, for all rows: four scores of a row share a reciprocal,

    r = 1/(abcd),   1/a = (r·cd)·b,   1/b = (r·cd)·a,   1/c = (r·ab)·d,   1/d = (r·ab)·c,

where a is (1 + e^2y)/2³⁰, but at most 1, as an FFMA that saturates has it: their product stays in fp32. That
is right to about 2⁻²¹ of the cap, which the LSE of a row of few keys would show.

Roughly, by the hardware's tanh, right to 1.11·10⁻⁵ of a score: where each row's first tile has a score of
`rough_from` or more, so that scores that weigh are hardly larger than the row's LSE, or so small beside the
cap that they are righter. The LSE may be off by 10⁻⁵ of itself; so the term of each row's largest score,
which may be all of the row, is made right in the sum that the LSE is of (`mend`). Of m scores that are equal
that takes 1/m of the error, and ln m is added to the LSE: what is left is at most 0.97·10⁻⁵ of it, of up to a
million keys (tests/test_policies.py). In kernels that follow maxima all are exact.

In neither way are rows' maxima followed, if P is bf16 and has a place for all exponents of the cap: they are
relative to the first tile's maximum, `raised` to no less than the cap less ABOVE. An eager softmax's largest
term is 1, and exact in bf16; here it is rounded, and all terms that equal it are rounded as it is. O = P·V /
sum P shows that error whole unless the sum shares it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr, range_constexpr
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from . import softcap
from .arithmetic import largest_positive
from .constants import LOG2_E, WARPGROUP
from .query_tiles import KeyTile, QueryTiles
from .rows import LANES, OWN_ROWS, largest_of_row
from .wgmma import round_fragment

# From this part of softcap.NEAR on a first tile is far; later tiles reach somewhat further.
FIRST = 0.85
# From a score of this part of a cap on a first tile is far if those behind it may be rough, of more than 64
# columns, without a window. Rough tiles are faster there than near ones, whose maxima are followed.
EARLY = 0.1
# `rough_from` at least and at most, in powers of two.
ROUGH_FROM = 1.5 * LOG2_E, 5.2 * LOG2_E
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


class FarScores(softcap.SoftCap):
    """`SoftCap`, and what a consumer does of tiles that it takes for far. `follows`: it follows maxima there
    too, under any cap. `early`: far ones that may be rough begin at EARLY."""

    def __init__(self, numbers: tuple[Float32, ...], follows: bool, early: bool):
        *numbers, self.inner = numbers  # `CappedQueries.on_host`
        self.follows, self.early = follows, early
        super().__init__(numbers)

    @cute.jit
    def first_tile(self, S: cute.Tensor) -> Boolean:
        """Products S of a tile of queries' first keys become scores in powers of two. Returns whether one of
        this thread's is far."""
        far = self.is_far(S, FIRST)
        self.exponents(S, [0.0, 0.0])
        return far

    @cute.jit
    def behind_first(self, far: Boolean, maxima: cute.Tensor, counts, keys: Int32, barrier: Int32):
        """How all of the warpgroup take the tiles behind a first one, in which its rows' largest scores are
        `maxima`; of `keys` in all. Returns 1 if for far, else 0; 1 if those may be capped `far_roughly`; and
        what exponents are relative to at least: None where maxima are followed in any case, −∞ where they are
        this time. `far`: what `first_tile` says. counts (row): that the row is one of the queries'."""
        # Through a shuffle: the compiler does not know that a barrier tells all the same, and would hold all
        # that depends on it in registers, descriptors of products too (a fifth of the speed).
        any_of_all = lambda here: cute.arch.make_warp_uniform(Int32(any_of_warpgroup(here, Int32(barrier))))
        if const_expr(self.follows):
            return any_of_all(far), 0, None
        bound = rough_from(cute.math.log2(Float32(keys), fastmath=True), self.outer)
        # One by one: the smaller one of NaN and a number is neither.
        small = [counts[r] & (maxima[r] < bound) for r in range(OWN_ROWS)]
        roughly = 1 - any_of_all(small[0] | small[1])
        if const_expr(self.early):
            largest = cute.arch.fmax(maxima[0], maxima[1])
            far = far | ((roughly == 1) & (largest > EARLY * self.outer))
        far = any_of_all(far & (2.0 * self.outer <= ABOVE + BELOW))
        return far, far & roughly, self.outer - ABOVE if far == 1 else -Float32.inf

    def cap_whole(self, far: bool, rough: bool, S: cute.Tensor, row_max) -> None:
        """Products S (row, key) of a tile that hides no pair become scores in powers of two, less row_max."""
        way = (self.far_roughly if rough else self.far_together) if far else self.exponents
        way(S, row_max)

    def far_roughly(self, S: cute.Tensor, row_max) -> None:
        """The same, by the hardware's tanh."""
        for r in range(cute.size(S, mode=[0])):
            for c in range(cute.size(S, mode=[1])):
                S[r, c] = self._rough(S[r, c], row_max[r])

    def _rough(self, product: Float32, row_max: Float32) -> Float32:
        return tanh_approx(product * self.inner) * self.outer - row_max

    def keep_largest(self, S: cute.Tensor, room: cute.Tensor) -> None:
        """The largest product of each row of S (row, key), so far, to `room`."""
        for r, product in enumerate(largest_of_each(S)):
            room[r] = cute.arch.fmax(room[r], product)

    @cute.jit
    def mend(self, roughly: Int32, room: cute.Tensor, row_max, row_sum, excess):
        """Behind tiles capped `far_roughly`: make the term of a row's largest product there right in row_sum,
        of which the LSE is, but not in the sum that divides O, since P·V has it as it was. Maxima that are
        followed from here on have no room."""
        if const_expr(not self.follows):
            if roughly == 1:
                for r in range_constexpr(OWN_ROWS):
                    product = largest_of_row(room[r])
                    term = cute.math.exp2(self._rough(product, row_max[r]), fastmath=True)
                    power = cute.math.exp2(product * self.double_log2, fastmath=True)
                    right = self.outer - row_max[r] - 2.0 * self.outer * cute.arch.rcp_approx(power + 1.0)
                    off = (cute.math.exp2(right, fastmath=True) - term) * (1.0 / LANES)
                    row_sum[r] += off
                    excess[r, 0] -= off
                room.fill(0.0)

    def far_together(self, S: cute.Tensor, row_max) -> None:
        """The same, as right as `far`, four scores at a time. NaN is a factor of 0: it spoils the others,
        of its row."""
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

    def on_host(self, scale, window, cap):
        *given, numbers = super().on_host(scale, window, cap)
        return *given, None if numbers is None else (*numbers, scale / cap)

    def take(self, scale, window, cap) -> None:
        super().take(scale, window, None if cap is None else cap[:-1])
        if cap is not None:
            early = self.head_dim > 64 and not self.mask.hides_first
            self.cap = FarScores(cap, self.follows_far, early)

    def cap_first(self, S):
        """`FarScores.first_tile`; without a cap nothing is far."""
        return False if self.cap is None else self.cap.first_tile(S)

    def behind_first(self, far, rows, first_row, lengths, barrier):
        """`FarScores.behind_first`, of rows from first_row on."""
        if self.cap is None:
            return 0, 0, None
        counts = [first_row + rows.where_S[r, 0][0] < lengths[0] for r in range(OWN_ROWS)]
        return self.cap.behind_first(far, rows.max, counts, lengths[1], barrier)

    def most_room(self, growth, roughly):
        """How far rows' maxima may rise: `growth`. Rows capped roughly, whose maxima nobody follows, have
        their largest product in the room's place, so far none."""
        return growth if self.cap is None or self.follows_far else growth * Float32(1 - roughly)

    def mend(self, roughly, room, row_max, row_sum, excess) -> None:
        if self.cap is not None:
            self.cap.mend(roughly, room, row_max, row_sum, excess)

    def loops(self, first, end, far, roughly) -> list[tuple[KeyTile, bool, object, object]]:
        """(kind, whether capped roughly, first, end) of the loops over tiles of keys seen whole. Under a cap
        one of them has all."""
        if self.cap is None:
            return [(KeyTile.WHOLE, False, first, end)]
        asked = end - far * (end - first)
        if self.follows_far:
            return [(KeyTile.WHOLE, False, first, asked), (KeyTile.FAR, False, asked, end)]
        exact = end - roughly * (end - asked)
        far_ones = (KeyTile.FAR, False, asked, exact), (KeyTile.FAR, True, exact, end)
        return [(KeyTile.WHOLE, False, first, asked), *far_ones]


def shrunk_up_to_1(a: Float32, by: float) -> Float32:
    """(1 + a)·by, but at most 1, of a ≥ 0: one instruction. NaN gives 0."""
    ptx = "fma.rn.sat.ftz.f32 {$w0}, {$r0}, {$r1}, {$r1};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[a, Float32(by)])


def tanh_approx(y: Float32) -> Float32:
    """The hardware's tanh, one MUFU operation: right to 1.11·10⁻⁵ of itself (measured, all fp32)."""
    ptx = "tanh.approx.f32 {$w0}, {$r0};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[y])


def rough_from(log2_keys: Float32, outer: Float32) -> Float32:
    """Which largest score of its first tile, in powers of two, lets a row of so many keys be capped roughly,
    under a cap of `outer` in powers of two. n keys that are all s below zero weigh e^(ln n − s) together, and
    must not outweigh the largest one where s is beyond a fifth of the cap. Up to a quarter of it either the
    hardware's tanh is right to 4·10⁻⁶, or s is small (tests/test_policies.py has its errors)."""
    least, most = ROUGH_FROM
    return cutlass.min(cutlass.max(log2_keys - outer / 5, least), most)


def raised(maximum: Float32, least: Float32) -> Float32:
    """`maximum`, and as many whole powers of two as bring it to `least`: what was 1 stays exact in bf16."""
    return maximum + cute.math.ceil(cute.arch.fmax(least - maximum, 0.0))


def largest_of_each(values: cute.Tensor) -> list[Float32]:
    """Of each row of (row, …) this thread's largest value if one is positive, or any of them."""
    columns = range(cute.size(values, mode=[1]))
    return [largest_positive([values[r, c] for c in columns]) for r in range(OWN_ROWS)]


def add_rounding(P: cute.Tensor, tile_sum, row_sum, excess) -> None:
    """Add a tile's sums to the rows', and what rounding P to bf16 adds to them to `excess` (row, 1).

    Taken is that a thread's terms are all rounded, for their size, as its largest is. Where that is not so
    the others are small, or many different ones, whose errors cancel.
    """
    of_rows = cute.make_layout(OWN_ROWS)
    largest, bits = cute.make_rmem_tensor(of_rows, Float32), cute.make_rmem_tensor(of_rows, Int32)
    word = cute.make_rmem_tensor(cute.make_layout(1), Int32)
    for r, term in enumerate(largest_of_each(P)):
        largest[r] = term
    round_fragment(largest, word, BFloat16)
    bits[0], bits[1] = word[0] << 16, word[0] & Int32(-1 << 16)
    rounded = cute.recast_tensor(bits, Float32)
    inverse_bits = cute.make_rmem_tensor(of_rows, Int32)
    for r in range(OWN_ROWS):
        inverse_bits[r] = ONE_TWICE - cute.recast_tensor(largest, Int32)[r]
        relative = (rounded[r] - largest[r]) * cute.recast_tensor(inverse_bits, Float32)[r]
        excess[r, 0] += relative * tile_sum[r]
        row_sum[r] += tile_sum[r]
