"""Scores that a soft cap bounds: s becomes cap·tanh(s/cap), a step on S before the mask.

tanh.approx.f32 is one MUFU more for each score, right to 10⁻⁵ of it (measured; PTX says 2⁻¹¹). O does not
show that, but the LSE, from which a backward pass makes P anew, has to be right to 10⁻⁵ of itself, and may be
smaller than its scores. So a warp looks how large its tile's largest score is. Near zero a polynomial takes
three instructions of the FMA pipe for each, which products in flight do not slow down; beyond that it is
tanh y = 1 − 2/(1 + e^2y), two MUFU, right to about 2⁻²² of the cap.

Behind the answer lies a branch, before which P·V has to end: k6 takes tiles behind a far one for far without
asking, and has its own way to compute them (far_scores.py).
Gradients are made with the exponential alone (policies.py).
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from .arithmetic import largest_positive
from .constants import LOG2_E

# tanh y ≈ y·(c₀ + c₁y² + c₂y⁴) up to |y| = NEAR, with the least largest relative error, 5.0·10⁻⁷. Up to 0.35
# that is 2.9·10⁻⁶, which an LSE about zero, of many keys far below it, would show (tests/test_policies.py).
NEAR = 0.26
OF_NEAR = (0.9999995, -0.33320008, 0.12802711)


@cute.jit
def cap_numbers(scale: Float32, cap: Float32) -> tuple[Float32, ...]:
    """What a launch computes once, on the host, of the scale and the cap of its scores."""
    inner = scale / cap
    return scale, cap, 2.0 * LOG2_E * inner, cap * LOG2_E, NEAR * NEAR / (inner * inner)


class SoftCap:
    """What scores are capped with, of `cap_numbers`: a product q·k becomes a score in powers of two."""

    def __init__(self, numbers: tuple[Float32, ...]):
        scale, cap, self.double_log2, self.outer, self.near = numbers
        # Behind a division these stay in registers; as operands they would be loaded anew in each step, which
        # waits for that.
        inner, power, self.of_near = scale / cap, scale / cap * (cap * LOG2_E), []
        for c in OF_NEAR:  # factors of the powers of a product
            self.of_near.append(power * c)
            power = power * (inner * inner)

    def is_far(self, S: cute.Tensor, share: float = 1.0) -> Boolean:
        """Whether one of this thread's products is beyond what the polynomial is for, or a share of that."""
        # Of squares the largest as an integer is the largest, and NaN is larger than all. Asked is not what
        # is larger, which NaN is not: of a hidden key or of one row, it would send far scores of all others
        # that its thread holds to a polynomial that is not for them.
        return ~(largest_positive([S[i] * S[i] for i in range(cute.size(S))]) <= self.near * share**2)

    @cute.jit
    def exponents(self, S: cute.Tensor, row_max):
        """Products S (row, key) become scores in powers of two, less row_max[row]."""
        # A vote: the branch must be uniform in the warp (notes/k6.md, "A branch must be uniform").
        if cute.arch.vote_any_sync(self.is_far(S)):
            warpgroup.wait_group(0)  # or ptxas serialises: S is read in a branch, and P·V in flight
            self.far(S, row_max)
        else:
            for r in range_constexpr(cute.size(S, mode=[0])):
                for c in range_constexpr(cute.size(S, mode=[1])):
                    square = S[r, c] * S[r, c]
                    value = self.of_near[-1]
                    for factor in self.of_near[-2::-1]:
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
