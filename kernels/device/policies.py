"""What a launch gives a backward kernel besides tensors and scratch: numbers and tensors of its problem's
policies, and what of a score's way to P and dS depends on them. (Masks are in `masks`, where rows lie in
`packed`.)
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from ..contract import Problem
from .compiling import fake_fp32, fake_rows
from .constants import LOG2_E
from .masks import Window


@dataclass(frozen=True)
class Given:
    """What follows the scratch among the arguments of a launch, in this order; None for what its problem does
    not have."""

    scale: object = None  # of the scores
    left: object = None  # of the window
    right: object = None
    softcap: object = None
    sink: object = None  # (heads,) fp32
    cu_q: object = None  # (sequences + 1,) int32
    cu_kv: object = None
    used_q: object = None  # (sequences,) int32, or where none is given what stands for it
    used_kv: object = None
    which_used: object = None  # bit 0: used_q counts, bit 1: used_kv does
    dlse: object = None  # as the LSE
    dsink: object = None  # (heads,) fp32

    @property
    def numbers(self) -> tuple[object, ...]:
        """What main loops need, for `Numbers.take`."""
        return self.scale, self.left, self.right, self.softcap

    @property
    def sequences(self) -> tuple[object, ...]:
        """What lists tiles of packed sequences."""
        return self.cu_q, self.cu_kv, self.used_q, self.used_kv, self.which_used


def names_given(problem: Problem) -> list[str]:
    """The fields of `Given` that a launch of the problem has."""
    names = ["scale"] * problem.scaled
    names += ["left", "right"] * (problem.window is not None) + ["softcap"] * (problem.softcap > 0)
    names += ["sink"] * problem.sink
    if problem.sequences is not None:
        names += ["cu_q", "cu_kv", "used_q", "used_kv", "which_used"]
    return names + ["dlse"] * problem.lse_grad + ["dsink"] * problem.sink


def fake_given(problem: Problem, q: object) -> list[object]:
    """Stand-ins for what a launch gives, beside the stand-in `q`."""
    of_ints = lambda: make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)
    of_heads = lambda: fake_rows(Float32, (q.shape[1],), 1)
    stand_ins = {
        "scale": Float32(1.0), "left": Int32(1), "right": Int32(1), "softcap": Float32(1.0),
        "sink": of_heads(), "cu_q": of_ints(), "cu_kv": of_ints(), "used_q": of_ints(),
        "used_kv": of_ints(), "which_used": Int32(0), "dlse": fake_fp32(q), "dsink": of_heads(),
    }  # fmt: skip
    return [stand_ins[name] for name in names_given(problem)]


class Numbers:
    """What a main loop knows of the numbers that a launch gives. A kernel takes them first of all, each kernel
    anew: those of another one are values that nobody may use outside it."""

    scale: object
    scale_log2: object
    mask: object

    def take(self, numbers: tuple[object, ...]) -> None:
        """Of `Given.numbers`, inside a kernel."""
        scale, left, right, softcap = numbers
        if scale is not None:
            self.scale, self.scale_log2 = scale, scale * LOG2_E
        if left is not None:
            self.mask = Window(left, right)
        if softcap is not None:
            self.cap_log2 = softcap * LOG2_E
            self.double_log2 = 2.0 * self.scale_log2 * cute.arch.rcp_approx(softcap)

    def capped(self, x: Float32, LSE: Float32) -> tuple[Float32, Float32]:
        """With a soft cap c, of a product x: P = exp(s − LSE) of the score s = c·tanh(x·scale/c), and its slope,
        1 − tanh².

        tanh = 1 − 2r with r = 1/(1 + exp(2·x·scale/c)), and 1 − tanh² = 4r·(1 − r): two operations of the MUFU
        where tanh.approx is one, but right to 2⁻²³ of c and not to 2⁻¹¹ of s, which P would be off by.
        """
        r = cute.arch.rcp_approx(cute.math.exp2(x * self.double_log2, fastmath=True) + 1.0)
        p = cute.math.exp2((self.cap_log2 - LSE) - r * (2.0 * self.cap_log2), fastmath=True)
        return p, r * (4.0 - 4.0 * r)
