"""Scores that a soft cap bounds: s becomes cap·tanh(s/cap), a step on S before the mask.

tanh.approx.f32 is one MUFU more for each score, wrong by up to 2⁻¹¹ of it; O hardly shows it, but the LSE,
from which a backward pass makes P anew, has to be right to 10⁻⁵. So a warp looks how large its tile's largest
score is. Within a third of the cap a polynomial takes three instructions of the FMA pipe for each, which
products in flight do not slow down, and is right to 3·10⁻⁶; up to the cap itself one of degree 11 takes six;
beyond that it is tanh y = 1 − 2/(1 + e^2y), two MUFU, right to about 2⁻²² of the cap.
"""

import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from .arithmetic import largest_positive
from .constants import LOG2_E

# tanh y ≈ y·(c₀ + c₁y² + c₂y⁴ + …), up to |y| as named, with the least largest relative error
NEAR = 0.35  # 2.9·10⁻⁶
OF_NEAR = (0.99999714, -0.33290955, 0.12395031)
MIDDLE = 1.0  # 6·10⁻⁷
OF_MIDDLE = (0.99999941, -0.33329042, 0.13281433, -0.05160564, 0.01674308, -0.00306705)


@cute.jit
def cap_numbers(scale: Float32, cap: Float32) -> tuple[Float32, ...]:
    """What a launch computes once, on the host, of the scale and the cap of its scores."""
    inner, outer = scale / cap, cap * LOG2_E
    square = inner * inner
    # Beyond these the last of `factors` has no place in fp32, and what is not near counts as far.
    fits = (square > 2.0**-22) & (square < 2.0**22)
    middle = MIDDLE * MIDDLE / square if fits else Float32(0.0)
    numbers = 2.0 * LOG2_E * inner, outer, NEAR * NEAR / square, middle
    return scale, cap, *numbers, *factors(OF_MIDDLE, inner, outer)


def factors(coefficients: tuple[float, ...], inner: Float32, outer: Float32) -> list[Float32]:
    """Of the powers of a product q·k, where y = inner·q·k, and outer makes a score of tanh y, in powers of
    two."""
    found, power = [], inner * outer
    for c in coefficients:
        found.append(power * c)
        power = power * (inner * inner)
    return found


class SoftCap:
    """What scores are capped with, of `cap_numbers`: a product q·k becomes a score in powers of two. `way` is
    "polynomial", or one of what it was measured against: "exp2", which it falls back to, and "approx"."""

    def __init__(self, numbers: tuple[Float32, ...], way: str = "polynomial"):
        assert way in ("polynomial", "exp2", "approx")
        scale, cap, self.double_log2, self.outer, self.near, self.middle, *self.of_middle = numbers
        # Behind a division they stay in registers; as operands they would be loaded anew in each step, which
        # waits for that.
        self.of_near = factors(OF_NEAR, scale / cap, cap * LOG2_E)
        self.way = way

    @cute.jit
    def exponents(self, S: cute.Tensor, row_max):
        """Products S (row, key) become scores in powers of two, less row_max[row]."""
        if const_expr(self.way == "approx"):
            for r in range_constexpr(cute.size(S, mode=[0])):
                tanh = cute.math.tanh(S[r, None].load() * (self.double_log2 / (2.0 * LOG2_E)), fastmath=True)
                S[r, None].store(tanh * self.outer - row_max[r])
        elif const_expr(self.way == "exp2"):
            self.far(S, row_max)
        else:
            # Of squares the largest as an integer is the largest, and NaN is larger than all.
            largest = largest_positive([S[i] * S[i] for i in range(cute.size(S))])
            # A vote: the branch must be uniform in the warp (notes/k6.md, "A branch must be uniform"). Asked
            # is not what is larger, which NaN is not: of a hidden key or of one row, it would send far scores
            # of all others that its thread holds to a polynomial that is not for them.
            if cute.arch.vote_any_sync(~(largest <= self.near)):
                if cute.arch.vote_any_sync(~(largest <= self.middle)):
                    warpgroup.wait_group(0)  # or ptxas serialises: S is read in a branch, and P·V in flight
                    self.far(S, row_max)
                else:
                    self.polynomial(S, row_max, self.of_middle)
            else:
                self.polynomial(S, row_max, self.of_near)

    def polynomial(self, S: cute.Tensor, row_max, factors) -> None:
        """The same of scores that the factors are for."""
        for r in range(cute.size(S, mode=[0])):
            for c in range(cute.size(S, mode=[1])):
                square = S[r, c] * S[r, c]
                value = factors[-1]
                for factor in factors[-2::-1]:
                    value = value * square + factor
                S[r, c] = S[r, c] * value - row_max[r]

    def far(self, S: cute.Tensor, row_max) -> None:
        """The same, however large the scores are."""
        for r in range(cute.size(S, mode=[0])):
            largest = self.outer - row_max[r]
            power = cute.math.exp2(S[r, None].load() * self.double_log2, fastmath=True)
            S[r, None].store(power + 1.0)
            for c in range(cute.size(S, mode=[1])):
                S[r, c] = largest - 2.0 * self.outer * cute.arch.rcp_approx(S[r, c])
