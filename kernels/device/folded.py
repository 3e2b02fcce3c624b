"""LSE and D folded into Sᵀ and dPᵀ: bwd4 in tiles of 128 columns, without a soft cap.

P = exp(S·τ − LSE) and dS = P∘(dP − D) take of each query two numbers that every thread of a consumer reads
from shared memory, an fp32 of each for each of its columns, and an instruction an element. Folded in, the
tensor cores subtract them: Sᵀ ends and dPᵀ begins with one more WGMMA, over 16 columns that K and V do not
have:

    Sᵀ  = K·Qᵀ + 1·(−LSE/τ)ᵀ        P  = exp(Sᵀ·τ)
    dPᵀ = 1·(−D)ᵀ + V·dOᵀ           dS = P∘dPᵀ

The tensor cores cut off what a sum cannot hold. With −LSE/τ at the end K·Qᵀ has been cut off as it was in the
forward pass, of whose scores the LSE is made; the other way round P would be off where scores are in the
thousands. D comes first since that order is faster (notes/bwd4_log.md).

Of a query −LSE/τ and −D are three bf16 each, which together hold the 24 bits of an fp32; the preprocess
leaves them, four words (`limits.FOLDED_WORDS`):

    stats    (heads, block, 64, 4) fp32, in truth bf16: x₀ x₁ x₂ 0 of −LSE/τ, then of −D, of 64 queries. They
             are bf16 in fp16's kernels, too.

That is a line of eight columns, and both products read it twice, since 16 are the least that a WGMMA takes.
So "ones", what stands on the keys' side, are halves, x/2 + x/2 being x: a line for each product, with zeros
where the other's number is, which is also read twice and with a stride of 0 for all keys.

Hazard: 0·∞ is NaN, so that what is not finite in either number makes NaN of both products of its query. A row
that is past the end or sees no key has −GREATEST for −LSE/τ, and not −∞: its P is 0 whatever the scores.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .constants import LOG2_E
from .fragments import Product
from .limits import FOLDED_WORDS

FOLDED_COLUMNS = 16  # of one WGMMA
FOLDED_PRODUCTS = 2  # of a step: Sᵀ ends with one, dPᵀ begins with one
PARTS = 3  # bf16 that hold an fp32
GREATEST = 2.0**127  # finite, and a bf16
# exp(S·τ) of a smaller scale is that of this one, 1, for any S below 2⁸⁰; the LSE over it is below GREATEST.
LEAST_SCALE = 2.0**-100
LINE = 8  # bf16 of a query, and queries (or keys) that lie together: a core matrix of WGMMA is 8 × 16 bytes
ONES = FOLDED_PRODUCTS * LINE * LINE  # bf16: the keys' side of Sᵀ, then of dPᵀ
HALVES = 0x3F003F00, 0x00003F00, 0, 0  # words of Sᵀ's line: ½ ½, ½ 0, the first in the lower half


def exponent_scale(scale: Float32 | float) -> Float32 | float:
    """τ·log₂e, by which exponents of 2 come from folded scores."""
    least = max if isinstance(scale, float) else cutlass.max
    return least(scale, LEAST_SCALE) * LOG2_E


def parts_of(x, bf16: object, fp32: object):
    """`x` of type `fp32` as three of type `bf16`, the greatest first."""
    for _ in range(PARTS):
        part = x.to(bf16)
        x = x - part.to(fp32)
        yield part


@cute.jit
def cut_off(x):
    """`x` up to ±GREATEST; NaN stays."""
    within = x
    if x > GREATEST:
        within = Float32(GREATEST)
    if x < -GREATEST:
        within = Float32(-GREATEST)
    return within


@cute.jit
def write_parts(x, gStats, which: cutlass.Constexpr):
    """`x` as three bf16 into gStats (FOLDED_WORDS,): those of −LSE/τ, 0, or of −D, 1."""
    rParts = cute.make_rmem_tensor(cute.make_layout(LINE // 2), BFloat16)
    rParts.fill(0.0)
    for i, part in enumerate(parts_of(x, BFloat16, Float32)):
        rParts[i] = part
    words = FOLDED_WORDS // 2
    rWords = cute.make_tensor(cute.recast_ptr(rParts.iterator, None, Float32), cute.make_layout(words))
    cute.autovec_copy(rWords, cute.local_tile(gStats, (words,), (which,)))


@cute.jit
def read_parts(gStats):
    """(−LSE/τ, −D) of gStats (FOLDED_WORDS,)."""
    rWords = cute.make_rmem_tensor(cute.make_layout(FOLDED_WORDS), Float32)
    cute.autovec_copy(gStats, rWords)
    values = cute.make_tensor(cute.recast_ptr(rWords.iterator, None, BFloat16), cute.make_layout(LINE))
    both = [Float32(0.0), Float32(0.0)]
    for which in range_constexpr(2):
        for i in range_constexpr(PARTS):
            both[which] += values[LINE // 2 * which + i].to(Float32)
    return both[0], both[1]


def words_of(product: int) -> list[int]:
    """The line on the keys' side, of Sᵀ, 0, or of dPᵀ, 1."""
    return [HALVES[i - FOLDED_WORDS // 2 * product] for i in range(FOLDED_WORDS)]


@cute.jit
def write_ones(sOnes, tidx):
    """The keys' side, once for a kernel, a line a thread; WGMMA may read it behind a barrier of the CTA."""
    lines = cute.make_layout((FOLDED_WORDS, ONES // LINE))
    sLines = cute.make_tensor(cute.recast_ptr(sOnes.iterator, None, Int32), lines)
    for product in range_constexpr(FOLDED_PRODUCTS):
        if tidx // LINE == product:
            for i, word in enumerate(words_of(product)):
                sLines[i, tidx] = Int32(word)
            cute.arch.fence_view_async_shared()


def folding_mma(rows: int, queries: int) -> cute.TiledMma:
    """The WGMMA of one more 16 columns, `rows` keys and so many queries."""
    K = OperandMajorMode.K
    source = warpgroup.OperandSource.SMEM
    return make_trivial_tiled_mma(BFloat16, BFloat16, K, K, Float32, (1, 1, 1), (rows, queries), source)


def ones_layout(rows: int) -> tuple[object, object]:
    """(key, column, product) of what `write_ones` has written, shape and stride."""
    lines = (LINE, rows // LINE), (LINE, FOLDED_COLUMNS // LINE)
    return (*lines, FOLDED_PRODUCTS), ((LINE, 0), (1, 0), LINE * LINE)


def stats_layout(queries: int, stages: int) -> tuple[object, object]:
    """The same of (query, column, stage) of statistics in shared memory."""
    lines = (LINE, queries // LINE), (LINE, FOLDED_COLUMNS // LINE)
    return (*lines, stages), ((LINE, LINE * LINE), (1, 0), LINE * queries)


def folding_products(
    mma: cute.TiledMma, shape: tuple[int, int, int], rS: cute.Tensor, rdP: cute.Tensor, sOnes: cute.Tensor,
    sStats: cute.Tensor,
) -> tuple[Product, Product]:  # fmt: skip
    """What Sᵀ ends and dPᵀ begins with; the last mode of B is the stage. `shape`: keys, queries, stages."""
    keys, queries, stages = shape
    thread = mma.get_slice(0)
    layouts = [cute.make_layout(x, stride=y) for x, y in (ones_layout(keys), stats_layout(queries, stages))]
    places = sOnes.iterator, cute.recast_ptr(sStats.iterator, None, BFloat16)
    halves, values = map(cute.make_tensor, places, layouts)
    tA = mma.make_fragment_A(thread.partition_A(halves))  # (MMA, 1, 1, product)
    tB = mma.make_fragment_B(thread.partition_B(values))  # (MMA, 1, 1, stage)
    of_S, of_dP = [Product(mma, acc, tA[None, None, None, i], tB) for i, acc in enumerate((rS, rdP))]
    return of_S, of_dP
