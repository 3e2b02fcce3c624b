"""The kernels that quantise (`quantize` is how they are called): one launch, bound by memory.

    one CTA       a block of 64 rows of Q, K or V; it stays in registers between its maximum and its codes:
                  32 elements a thread, loaded and stored 16 bytes at a time
    Q, K          optionally rotated by RoPE, then by random signs and a Walsh–Hadamard transform, in fp32
                  (`device.hadamard`)
    V             transposed: a conversion takes two values and may take them from two rows, so that the words
                  it leaves are already columns of four tokens; through shared memory they become rows
                  (`device.columns_to_rows`)
    relayout      the same transposition of e4m3 that is there already

What becomes of what e4m3 cannot say. NaN stays NaN. ±∞ becomes NaN, and with it, if rotated, its row; the
block's scale is that of the others. So does V beyond ±448·2⁹ = 229,376, since no exponent reaches it. Nothing
else saturates, unless scales are given: then whatever lies beyond ±448 of them. A block of zeros has scale 1
(of V: exponent −8); scales are at least 2⁻¹⁰⁰/448, so that what is smaller than 2⁻¹⁰⁹ or so may become 0.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .device.columns_to_rows import (
    QUAD,
    blank_past_end,
    own_words,
    put_columns,
    store_transposed,
    token_of,
    transposed_bytes,
    words_layout,
)
from .device.constants import VECTOR, WARP
from .device.cuda_cores import widen
from .device.e4m3 import absolute, four_e4m3, larger_pair
from .device.fp8 import (
    BLOCK,
    E4M3_MAX,
    EXPONENT_MAX,
    EXPONENT_MIN,
    LARGEST_V,
    SMALLEST_MAXIMUM,
    TOKENS,
)
from .device.hadamard import hadamard, transformed_chunks, transformed_signs

CHUNK = 16  # codes in 16 bytes
OWN = 32  # elements of a thread, or a multiple of them
# For which registers must suffice: plain, rotated. 1024 are 64 KiB on their way.
THREADS_PER_SM = 1536, 1024
FP32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Casting:
    """What a launch does to its tensors, `parts` of Q, K and V.

    `rotate`: Q and K times signs, ±1 fp32 (head_dim,), and the normalised Walsh–Hadamard matrix; `rope`: they
    turn by given angles before. The largest of 64 rows of Q or K becomes `largest_code`. With `given_scales`
    an fp32 (batch, heads) of each tensor is read, x8 = x · (1/scale), where otherwise a scale is found for
    each block and written; V may then stay `in_rows`.
    """

    rotate: bool = False
    rope: bool = False
    given_scales: bool = False
    parts: str = "qkv"
    in_rows: bool = False
    largest_code: float = E4M3_MAX

    def __post_init__(self) -> None:
        if self.parts not in ("qkv", "q", "k", "v", "qk", "kv"):
            raise ValueError(f"takes parts of qkv, not {self.parts!r}")
        if self.in_rows and (self.rotate or self.rope or not self.given_scales):
            raise ValueError("leaves V in rows only with given scales, and unrotated")


class Quantize:
    """`dtype` to e4m3, as a Casting says but for `rope`, which takes `quantize_ahead.QuantizeAhead`. A thread
    has `own` elements; registers suffice for `threads_per_sm`."""

    def __init__(
        self, head_dim: int, dtype: type, casting: Casting, own: int = OWN, threads_per_sm: int | None = None
    ):
        self.head_dim, self.dtype, self.own = head_dim, dtype, own
        self.parts, self.largest_code = casting.parts, casting.largest_code
        self.rotate, self.rope, self.given = casting.rotate, casting.rope, casting.given_scales
        in_rows = casting.in_rows
        self.columns_of_v, self.rows_of_v = ("v" in self.parts and x for x in (not in_rows, in_rows))
        self.threads = BLOCK * head_dim // own
        self.lanes = head_dim // own  # that share a row of Q or K; neighbours in one warp
        threads_per_sm = threads_per_sm or THREADS_PER_SM[int(self.rotate)]
        self.ctas = max(1, threads_per_sm // self.threads)
        # The transform leaves out its 1/√d: the scale makes up for it.
        self.norm = 1.0 / math.sqrt(head_dim) if self.rotate else 1.0

    @cute.jit
    def __call__(
        self, mQ, mK, mV, mQ8, mK8, mVt8, mQ_scale, mK_scale, mV_scale, mSigns, mCos, mSin, stream
    ):  # fmt: skip
        """What `parts` and options leave out is None."""
        rows = [mX for mX in (mQ, mK, mV) if const_expr(mX is not None)]
        blocks, heads = 0, 0
        for mX in rows:
            blocks = cutlass.max(blocks, cute.ceil_div(mX.shape[2], BLOCK))
            heads = heads + mX.shape[1]
        self.quantize(
            mQ, mK, mV, mQ8, mK8, mVt8, mQ_scale, mK_scale, mV_scale, mSigns, mCos, mSin
        ).launch(
            grid=(blocks, heads, rows[0].shape[0]),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=40,  # per cent; without it the compiler asks the driver, that may not be
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def quantize(self, mQ, mK, mV, mQ8, mK8, mVt8, mQ_scale, mK_scale, mV_scale, mSigns, mCos, mSin):
        _, head, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        warps = self.threads // WARP
        sMax = smem.allocate_tensor(Uint32, cute.make_layout((warps, 2), stride=(1, warps)), 16)
        rotation = mSigns, mCos, mSin
        if const_expr(self.columns_of_v):
            sCodes = smem.allocate_tensor(Int32, words_layout(self.head_dim), 16)  # (word, unit)
        if const_expr("q" in self.parts):
            if head < mQ.shape[1]:
                self.rows(mQ, mQ8, mQ_scale, head, sMax, *rotation)
            head -= mQ.shape[1]
        if const_expr("k" in self.parts):
            if head >= 0 and head < mK.shape[1]:
                self.rows(mK, mK8, mK_scale, head, sMax, *rotation)
            head -= mK.shape[1]
        if const_expr(self.columns_of_v):
            if head >= 0:
                _, _, batch = cute.arch.block_idx()
                self.columns(mV, mVt8, mV_scale, batch, head, sMax, sCodes)
        if const_expr(self.rows_of_v):
            if head >= 0:
                self.rows(mV, mVt8, mV_scale, head, sMax, *rotation)

    @cute.jit
    def rows(self, mX, mX8, mScale, head, sMax, mSigns, mCos, mSin):
        """A block of Q or K. A thread has 16 columns of each half of a row: what RoPE turns lies in it, and
        all the transform mixes but for what `lanes` differ in."""
        tidx, _, _ = cute.arch.thread_idx()
        block, _, batch = cute.arch.block_idx()
        seqlen = mX.shape[2]
        row, lane = block * BLOCK + tidx // self.lanes, tidx % self.lanes
        halves, signs = (lane, lane + self.lanes), (1.0, 1.0)  # in chunks
        if block * BLOCK < seqlen:
            # Rows past the end read the last row again, which changes no maximum.
            source = cutlass.min(row, seqlen - 1)
            rX = cute.make_rmem_tensor(cute.make_layout((CHUNK, 2)), mX.element_type)  # (column, half)
            for half in range_constexpr(2):
                gX = cute.local_tile(mX[batch, head, source, None], (CHUNK,), (halves[half],))
                cute.autovec_copy(gX, rX[None, half])
            if const_expr(self.rotate):
                x = wide(rX)
                drawn = [sign for chunk in halves for sign in load_fp32(mSigns, chunk)]
                x = hadamard([a * sign for a, sign in zip(x, drawn)], self.lanes)
                halves, signs = transformed_chunks(lane, self.lanes, 2), transformed_signs(lane, self.lanes)
                rX = cute.make_rmem_tensor(cute.make_layout(OWN), Float32)
                keep(rX, x)

            inverse = Float32(0.0)
            if const_expr(self.given):
                inverse = (1.0 / mScale[batch, head]) * self.norm
            else:
                largest = find_largest(rX, sMax, Float32(FP32_MAX))
                inverse = self.largest_code / cute.arch.fmax(largest, SMALLEST_MAXIMUM)
                if tidx == 0:
                    scale = cute.arch.fmax(largest, SMALLEST_MAXIMUM) * (self.norm / self.largest_code)
                    mScale[batch, head, block] = scale if largest > 0.0 else Float32(1.0)
            x = scaled(rX, [inverse * sign for sign in signs for _ in range(CHUNK)], self.given)
            codes = cute.make_rmem_tensor(cute.make_layout((QUAD, 2)), Int32)  # (word, half)
            for word in range_constexpr(2 * QUAD):
                codes[word] = four_e4m3(*x[QUAD * word : QUAD * (word + 1)])
            if row < seqlen:
                for half in range_constexpr(2):
                    gX8 = cute.local_tile(mX8[batch, head, row, None], (CHUNK,), (halves[half],))
                    cute.autovec_copy(codes[None, half], cute.recast_tensor(gX8, Int32))

    @cute.jit
    def columns(self, mV, mVt8, mScale, batch, head, sMax, sCodes):
        """A block of V. A thread has 8 columns of the four tokens of one word, or of several; 8 lanes read
        128 bytes of a row."""
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        seqlen = mV.shape[2]
        words_of_thread = self.own // OWN
        places = [own_words(self.head_dim // VECTOR, self.threads * i) for i in range(words_of_thread)]
        if block * BLOCK < seqlen:
            tokens = cute.make_layout((VECTOR, QUAD * words_of_thread))
            rV = cute.make_rmem_tensor(tokens, mV.element_type)  # (column, token)
            for w in range_constexpr(words_of_thread):
                group, word, chunk = places[w]
                for i in range_constexpr(QUAD):
                    token = block * BLOCK + TOKENS * group + token_of(word, i)
                    source = cutlass.min(token, seqlen - 1)
                    gV = cute.local_tile(mV[batch, head, source, None], (VECTOR,), (chunk,))
                    cute.autovec_copy(gV, rV[None, QUAD * w + i])
                of_word = cute.local_tile(rV, (VECTOR, QUAD), (0, w))
                blank_past_end(cute.recast_tensor(of_word, Int32), group, word, seqlen)

            inverse, weight = Float32(0.0), Float32(1.0)
            if const_expr(self.given):
                inverse = 1.0 / mScale[batch, head]
            else:
                largest = find_largest(rV, sMax, Float32(LARGEST_V))
                # e = ⌈log₂(largest/448)⌉ from the bits: 448 is 1.75·2⁸, and what exceeds 1.75 carries.
                exponent = ((largest.bitcast(Int32) + 0x1FFFFF) >> 23) - (127 + 8)
                exponent = cutlass.max(EXPONENT_MIN, cutlass.min(EXPONENT_MAX, exponent))
                inverse = ((127 - exponent) << 23).bitcast(Float32)  # 2^−e
                weight = inverse
                if tidx == 0:
                    mScale[batch, head, block] = Float32(exponent)
            x = scaled(rV, [inverse] * self.own, self.given)
            for w in range_constexpr(words_of_thread):
                of_word = x[OWN * w : OWN * (w + 1)]
                words = [four_e4m3(*of_word[column::VECTOR]) for column in range(VECTOR)]
                put_columns(words, sCodes, *places[w])
            cute.arch.sync_threads()
            weights = four_e4m3(weight, weight, weight, weight)
            store_transposed(sCodes, mVt8, batch, head, seqlen, weights, VECTOR, self.threads)


class Relayout:
    """e4m3 V in rows to Vt8, with weights of one that are 1."""

    def __init__(self, head_dim: int):
        self.head_dim = head_dim
        self.threads = BLOCK * head_dim // (QUAD * CHUNK)

    @cute.jit
    def __call__(self, mV8, mVt8, stream):
        self.launch(mV8, mVt8, None, None, stream)

    @cute.jit
    def launch(self, mV8, mVt8, descales, mScales, stream):
        batch, heads, seqlen, _ = mV8.shape
        self.relayout(mV8, mVt8, descales, mScales).launch(
            grid=(cute.ceil_div(seqlen, BLOCK), heads, batch), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def relayout(self, mV8, mVt8, descales, mScales):
        block, head, batch = cute.arch.block_idx()
        seqlen = mV8.shape[2]
        if const_expr(mScales is not None):
            tidx, _, _ = cute.arch.thread_idx()
            if block == 0 and tidx == 0:
                self.check(descales, mScales, head, batch)
        smem = SmemAllocator()
        sCodes = smem.allocate_tensor(Int32, words_layout(self.head_dim), 16)  # (word, unit)
        group, word, chunk = own_words(self.head_dim // CHUNK)
        rV = cute.make_rmem_tensor(cute.make_layout((QUAD, QUAD)), Int32)  # (four columns, token)
        for i in range_constexpr(QUAD):
            source = cutlass.min(block * BLOCK + TOKENS * group + token_of(word, i), seqlen - 1)
            gV = cute.local_tile(mV8[batch, head, source, None], (CHUNK,), (chunk,))
            cute.autovec_copy(cute.recast_tensor(gV, Int32), rV[None, i])
        blank_past_end(rV, group, word, seqlen)
        words = [code for i in range(QUAD) for code in transposed_bytes([rV[i, j] for j in range(QUAD)])]
        put_columns(words, sCodes, group, word, chunk)
        cute.arch.sync_threads()
        store_transposed(sCodes, mVt8, batch, head, seqlen, Int32(0x38383838), CHUNK, self.threads)


class RelayoutAndCheck(Relayout):
    """And the scales of Q, K and V, fp32 (batch, kv_heads), to mScales (3, batch, kv_heads, 1): NaN for a
    head of which one is not positive and finite, so that all that comes of them is NaN. Nobody has to wait
    for the GPU to know it."""

    @cute.jit
    def __call__(self, mV8, mVt8, mQ_scale, mK_scale, mV_scale, mScales, stream):
        self.launch(mV8, mVt8, (mQ_scale, mK_scale, mV_scale), mScales, stream)

    @cute.jit
    def check(self, descales, mScales, head, batch):
        poison = Float32(0.0)
        for i in range_constexpr(3):
            scale = descales[i][batch, head]
            poison += scale - scale  # NaN of NaN and ±∞
            poison = poison if scale > 0.0 else Float32(math.nan)
        for i in range_constexpr(3):
            mScales[i, batch, head, 0] = descales[i][batch, head] + poison


# What a thread does in registers


def wide(rX: cute.Tensor) -> list[Float32]:
    """A thread's elements as fp32."""
    if rX.element_type is cutlass.BFloat16:
        pieces = [
            cute.make_tensor(rX.iterator + i, cute.make_layout(VECTOR))
            for i in range(0, cute.size(rX), VECTOR)
        ]
        return [x for piece in pieces for x in values(widen(piece.load()))]
    r32 = cute.make_rmem_tensor(rX.layout, Float32)
    r32.store(rX.load().to(Float32))
    return values(r32)


def values(rX: cute.Tensor) -> list[Float32]:
    return [rX[i] for i in range(cute.size(rX))]


def keep(rX: cute.Tensor, x: list[Float32]) -> None:
    for i, value in enumerate(x):
        rX[i] = value


def load_fp32(mX: cute.Tensor, chunk: Int32) -> list[Float32]:
    """16 consecutive fp32 of a vector."""
    rX = cute.make_rmem_tensor(cute.make_layout(CHUNK), Float32)
    cute.autovec_copy(cute.local_tile(mX, (CHUNK,), (chunk,)), rX)
    return values(rX)


def scaled(rX: cute.Tensor, inverses: list[Float32], saturates: bool) -> list[Float32]:
    """x · inverse. Where conversion may saturate, ±∞ must not: x − x is 0, or then NaN."""
    return [a * b + (a - a) if saturates else a * b for a, b in zip(wide(rX), inverses)]


@cute.jit
def find_largest(rX, sMax, limit):
    """The largest |x| of the CTA's, of those up to `limit`; larger ones become NaN, which does not count."""
    largest = largest_of_cta(magnitude(rX), sMax[None, 0])
    if largest > limit:
        past = [absolute(x) > limit for x in wide(rX)]
        words = cute.recast_tensor(rX, Int32)
        per_word = cute.size(rX) // cute.size(words)
        for first in range_constexpr(0, cute.size(rX), OWN):
            for i in range_constexpr(first, first + OWN):
                nan = 0x7FFFFFFF if per_word == 1 else 0x7FFF << 16 * (i % 2)
                words[i // per_word] = words[i // per_word] | (Int32(nan) if past[i] else Int32(0))
        largest = largest_of_cta(magnitude(rX), sMax[None, 1])
    return largest


def magnitude(rX: cute.Tensor) -> Float32:
    """The largest |x| of a thread's, of those that are not NaN. Two 16-bit ones take one instruction."""
    if rX.element_type is Float32:
        found = values(rX)
    else:
        pairs = values(cute.recast_tensor(rX, Int32))
        while len(pairs) > 1:
            pairs = [larger_pair(a, b, rX.element_type) for a, b in zip(pairs[::2], pairs[1::2])]
        both = cute.make_rmem_tensor(cute.make_layout(2), rX.element_type)
        cute.recast_tensor(both, Int32)[0] = pairs[0]
        found = [x.to(Float32) for x in values(both)]
    largest = Float32(0.0)
    for x in found:
        largest = cute.arch.fmax(largest, absolute(x))
    return largest


@cute.jit
def largest_of_cta(value: Float32, sMax: cute.Tensor):
    """The largest `value`, none of which is negative or NaN: as integers they compare the same, and a warp
    has an instruction for that."""
    tidx, _, _ = cute.arch.thread_idx()
    of_warp = cute.arch.warp_redux_sync(value.bitcast(Uint32), "max")
    if tidx % WARP == 0:
        sMax[tidx // WARP] = of_warp
    cute.arch.sync_threads()
    largest = Uint32(0)
    of_warps = sMax.load()
    for i in range_constexpr(cute.size(sMax)):
        largest = cutlass.max(largest, of_warps[i])
    return largest.bitcast(Float32)
