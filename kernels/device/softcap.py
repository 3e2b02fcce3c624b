"""Scores that a soft cap bounds: s becomes cap·tanh(s/cap), a step on S before the mask.

tanh.approx.f32 is one MUFU more for each score, wrong by up to 2⁻¹¹ of it: at a cap of 50 a score of 20 is
off by 0.01, more than what rounding P to 16 bits loses. Where all scores of a warp's tile lie within ±cap, a
polynomial takes six instructions of the FMA pipe instead, which products in flight do not slow down;
elsewhere the warp takes tanh y = 1 − 2/(1 + e^2y), two MUFU.
"""

import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr

from .arithmetic import largest_positive
from .constants import LOG2_E

# tanh y ≈ y·(c₀ + c₁y² + …) for |y| ≤ 1, least largest relative error: 6.9·10⁻⁶
COEFFICIENTS = (0.99999309, -0.33298066, 0.13036811, -0.044817556, 0.0090364236)
NEAR = 1.0


class SoftCap:
    """`inner` is what a product q·k is multiplied by to be tanh's argument, `outer` what tanh is to be
    multiplied by to be a score in powers of two. `way` is "polynomial", or one of what it was measured
    against: "exp2", which it falls back to, and "approx"."""

    def __init__(self, scale: Float32, cap: Float32, way: str = "polynomial"):
        assert way in ("polynomial", "exp2", "approx")
        self.inner, self.outer, self.way = scale / cap, cap * LOG2_E, way

    @cute.jit
    def apply(self, S: cute.Tensor):
        """S (row, key) becomes tanh of its `inner` multiple."""
        S.store(S.load() * self.inner)
        if const_expr(self.way == "approx"):
            S.store(cute.math.tanh(S.load(), fastmath=True))
        elif const_expr(self.way == "exp2"):
            self.far(S)
        else:
            # Squares: the largest as an integer is the largest.
            squares = [S[i] * S[i] for i in range(cute.size(S))]
            # A vote: the branch must be uniform in the warp (notes/k6.md, "A branch must be uniform").
            if cute.arch.vote_any_sync(largest_positive(squares) > NEAR * NEAR):
                self.far(S)
            else:
                for i in range_constexpr(cute.size(S)):
                    value = Float32(COEFFICIENTS[-1])
                    for c in COEFFICIENTS[-2::-1]:
                        value = value * squares[i] + c
                    S[i] = S[i] * value

    def far(self, S: cute.Tensor) -> None:
        """tanh of S, however large."""
        for i in range(cute.size(S)):
            power = cute.math.exp2(S[i] * (2 * LOG2_E), fastmath=True)
            S[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + power)
