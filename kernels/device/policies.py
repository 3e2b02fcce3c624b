"""How a backward kernel comes to what its problem's policies add: the numbers that a launch gives, and where
rows of packed sequences lie, in tensors and in scratch. (Masks are in `masks`.)"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from .constants import LOG2_E
from .limits import LISTED
from .masks import Window
from .packed import Dense, Packed


class Numbers(NamedTuple):
    """What main loops are given, of `given.Given`; None where a problem has none."""

    scale: object = None
    window: object = None  # (left, right)
    softcap: object = None


class Scores:
    """How a kernel makes P of scores. It takes a launch's numbers first of all, each kernel anew: those of
    another kernel are values that nobody may use outside it."""

    scale: object
    scale_log2: object
    mask: object

    def take(self, numbers: tuple[object, ...]) -> None:
        """`Numbers`, inside a kernel."""
        scale, window, softcap = numbers
        if scale is not None:
            self.scale, self.scale_log2 = scale, scale * LOG2_E
        if window is not None:
            self.mask = Window(*window)
        if softcap is not None:
            self.cap_log2 = softcap * LOG2_E
            self.double_log2 = 2.0 * self.scale_log2 * cute.arch.rcp_approx(softcap)

    def capped(self, x: Float32, LSE: Float32) -> tuple[Float32, Float32]:
        """With a soft cap c, of a product x: P = exp(s − LSE) of the score s = c·tanh(x·scale/c), and its
        slope ds/d(x·scale) = 1 − tanh². LSE in powers of two.

        tanh = 1 − 2r with r = 1/(1 + exp(2·x·scale/c)), and 1 − tanh² = 4r·(1 − r): two operations of the
        MUFU where tanh.approx is one, but right to 2⁻²³ of c and not to 2⁻¹¹ of s, which P would be off by.
        """
        r = cute.arch.rcp_approx(cute.math.exp2(x * self.double_log2, fastmath=True) + 1.0)
        p = cute.math.exp2((self.cap_log2 - LSE) - r * (2.0 * self.cap_log2), fastmath=True)
        return p, r * (4.0 - 4.0 * r)


@dataclass(frozen=True)
class DenseScratch(Dense):
    """Where rows of `Dense` lie in scratch, (batch · heads, block, …)."""

    def scratch(self, mX, place):
        """Scratch whose blocks count from those of the place's sequence on."""
        return mX

    def scratch_row(self, place, head, heads):
        return place[2] * heads + head


@dataclass(frozen=True)
class PackedScratch(Packed):
    """The same of `Packed`, whose places have two more numbers: of the block of scratch where the sequence's
    queries begin, and of its first tile in the list. Scratch is (heads, block, …), of each sequence whole
    tiles of queries."""

    words = 8

    def scratch(self, mX, place):
        return cute.domain_offset((0, place[6], *[0] * (cute.rank(mX) - 2)), mX)

    def scratch_row(self, place, head, heads):
        return head


def listed(mList, tile):
    """What a list (`tile_list.ListTiles`) says of its tile-th tile: (first, blocks, start_q, seqlen_q,
    start_kv, seqlen_kv, place)."""
    return [mList[1 + tile, i] for i in range(1, LISTED)]
