"""Scores that a soft cap bounds: s becomes cap·tanh(s/cap), a step on S before the mask.

tanh.approx.f32 is one MUFU more for each score, wrong by up to 2⁻¹¹ of it; O hardly shows it, but the LSE,
from which a backward pass makes P anew, has to be right to 10⁻⁵. Where all scores of a warp's tile lie within
a third of the cap, a polynomial takes three instructions of the FMA pipe instead, which products in flight do
not slow down, and is right to 3·10⁻⁶; elsewhere the warp takes tanh y = 1 − 2/(1 + e^2y), two MUFU, right to
about 2⁻²² of the cap.
"""

import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from .arithmetic import largest_positive
from .constants import LOG2_E

# tanh y ≈ y·(c₀ + c₁y² + c₂y⁴) for |y| ≤ NEAR, with the least largest relative error: 2.9·10⁻⁶
COEFFICIENTS = (0.99999714, -0.33290955, 0.12395031)
NEAR = 0.35


class SoftCap:
    """What scores are capped with: a product q·k, its scale and the cap make a score in powers of two. `way`
    is "polynomial", or one of what it was measured against: "exp2", which it falls back to, and "approx"."""

    def __init__(self, scale: Float32, cap: Float32, way: str = "polynomial"):
        assert way in ("polynomial", "exp2", "approx")
        self.inner, self.outer, self.way = scale / cap, cap * LOG2_E, way
        square = self.inner * self.inner
        self.largest_square = NEAR * NEAR / square
        self.factors, power = [], self.inner * self.outer
        for c in COEFFICIENTS:
            self.factors.append(power * c)
            power = power * square

    @cute.jit
    def exponents(self, S: cute.Tensor, row_max):
        """Products S (row, key) become scores in powers of two, less row_max[row]."""
        if const_expr(self.way == "approx"):
            for r in range_constexpr(cute.size(S, mode=[0])):
                tanh = cute.math.tanh(S[r, None].load() * self.inner, fastmath=True)
                S[r, None].store(tanh * self.outer - row_max[r])
        elif const_expr(self.way == "exp2"):
            self.far(S, row_max)
        else:
            # Of squares the largest as an integer is the largest.
            squares = [S[i] * S[i] for i in range(cute.size(S))]
            # A vote: the branch must be uniform in the warp (notes/k6.md, "A branch must be uniform").
            if cute.arch.vote_any_sync(largest_positive(squares) > self.largest_square):
                warpgroup.wait_group(0)  # or ptxas serialises: S is read in a branch, and P·V in flight
                self.far(S, row_max)
            else:
                for r in range_constexpr(cute.size(S, mode=[0])):
                    for c in range_constexpr(cute.size(S, mode=[1])):
                        square = S[r, c] * S[r, c]
                        value = (self.factors[2] * square + self.factors[1]) * square + self.factors[0]
                        S[r, c] = S[r, c] * value - row_max[r]

    def far(self, S: cute.Tensor, row_max) -> None:
        """The same, however large the scores are."""
        for r in range(cute.size(S, mode=[0])):
            power = cute.math.exp2(S[r, None].load() * (2.0 * LOG2_E * self.inner), fastmath=True)
            S[r, None].store(power + 1.0)
            for c in range(cute.size(S, mode=[1])):
                tanh = 1.0 - 2.0 * cute.arch.rcp_approx(S[r, c])
                S[r, c] = tanh * self.outer - row_max[r]
