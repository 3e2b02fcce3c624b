"""Q and K in 8 bits where that takes long: rotated by RoPE, or at head_dim 256 by signs and the transform.

    one CTA       the same 64 rows of several heads, one after the other; while it works on one the TMA brings
                  the next to shared memory, which `quantize_rows.Quantize` leaves to the other CTAs of an SM
    RoPE          angles are read once for all these heads, and lie in shared memory, each where its thread
                  alone writes and reads it
    V             as there, a CTA for each block

Bit for bit what `Quantize` computes, but that a thread of head_dim 256 has 64 elements of a row, so that the
transform adds in another order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .device.columns_to_rows import QUAD, words_layout
from .device.constants import SMS, VECTOR, WARP
from .device.cuda_cores import swizzle
from .device.e4m3 import four_e4m3
from .device.fp8 import BLOCK, OWN_ROTATED, SMALLEST_MAXIMUM
from .device.hadamard import hadamard, transformed_chunks, transformed_signs
from .device.tma import allocate_tiles, load_atom, partition_tma, swizzled_chunks
from .quantize_rows import (
    CHUNK,
    FP32_MAX,
    OWN,
    Casting,
    Quantize,
    find_largest,
    keep,
    load_fp32,
    scaled,
    values,
    wide,
)

HEADS = 4  # of a CTA, at most
CTAS_OF_SM = 2  # that a launch should have for each place of a CTA before one has several heads
SIGNS_OF_PAIR = -0x7FFF8000  # of two 16-bit values in a word: 0x80008000


class QuantizeAhead(Quantize):
    """`Quantize`, where a Casting has `rotate`, `rope` or both."""

    def __init__(self, head_dim: int, dtype: type, casting: Casting):
        own = OWN_ROTATED[head_dim]
        # Of shared memory, for 64 rows each: beside the angles of head_dim 256 there is room for one.
        self.stages = 1 if casting.rope and head_dim == 256 else 2
        # Registers for 32 elements and what turns them; of 64 twice as many.
        threads = (768 if casting.rope else 1024) if own == OWN else 512
        super().__init__(head_dim, dtype, casting, own, threads)

    @cute.jit
    def __call__(
        self, mQ, mK, mV, mQ8, mK8, mVt8, mQ_scale, mK_scale, mV_scale, mSigns, mCos, mSin, stream
    ):  # fmt: skip
        """As `Quantize`'s."""
        given = [mX for mX in (mQ, mK, mV) if const_expr(mX is not None)]
        blocks, of_rows, loads = 0, 0, []
        for mX in given:
            blocks = cutlass.max(blocks, cute.ceil_div(mX.shape[2], BLOCK))
        for mX in (mQ, mK):
            if const_expr(mX is not None):
                of_rows = of_rows + mX.shape[1]
                loads += load_atom(mX, BLOCK)
            else:
                loads += [None, None]
        # Several heads a CTA only if that leaves all of them work.
        places = CTAS_OF_SM * SMS * self.ctas
        each = cutlass.max(1, cutlass.min(HEADS, of_rows * blocks * given[0].shape[0] // places))
        turns = 0
        for mX in given:
            turns = turns + (mX.shape[1] if const_expr(mX is mV) else cute.ceil_div(mX.shape[1], each))
        self.quantize_ahead(
            *loads, mQ, mK, mV, mQ8, mK8, mVt8, mQ_scale, mK_scale, mV_scale, mSigns, mCos, mSin, each
        ).launch(
            grid=(blocks, given[0].shape[0], turns),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=100,  # per cent; without it the compiler asks the driver
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def quantize_ahead(
        self, load_Q, tQ, load_K, tK, mQ, mK, mV, mQ8, mK8, mVt8, mQ_scale, mK_scale, mV_scale, mSigns, mCos,
        mSin, each,
    ):  # fmt: skip
        # All batches of Q come first, then K's, then V's: CTAs that take equally long run beside each other.
        _, batch, turn = cute.arch.block_idx()
        smem, warps = SmemAllocator(), self.threads // WARP
        # Maxima of warps, those without what is too large, and both again: a warp may be a head ahead.
        maxima = cute.make_layout((warps, 2, 2), stride=(1, warps, 2 * warps))
        sMax = smem.allocate_tensor(Uint32, maxima, 16)
        sX = allocate_tiles(smem, self.dtype, BLOCK, self.head_dim, self.stages)  # (row, column, stage)
        full = smem.allocate_array(Int64, self.stages)
        angles = cute.make_layout(
            (QUAD, self.threads, self.own // QUAD), stride=(1, QUAD, QUAD * self.threads)
        )
        sTurns = smem.allocate_tensor(Float32, angles, 16) if const_expr(self.rope) else None
        shared = sMax, sX, full, sTurns, mSigns, mCos, mSin, each
        if const_expr("q" in self.parts):
            turns = cute.ceil_div(mQ.shape[1], each)
            if turn < turns:
                self.rows_of_heads(load_Q, tQ, mQ, mQ8, mQ_scale, turn * each, *shared)
            turn -= turns
        if const_expr("k" in self.parts):
            turns = cute.ceil_div(mK.shape[1], each)
            if turn >= 0 and turn < turns:
                self.rows_of_heads(load_K, tK, mK, mK8, mK_scale, turn * each, *shared)
            turn -= turns
        if const_expr("v" in self.parts):
            if turn >= 0:
                words = cute.recast_ptr(sX.iterator, None, Int32)
                sCodes = cute.make_tensor(words, words_layout(self.head_dim))  # (word, unit)
                self.columns(mV, mVt8, mV_scale, batch, turn, sMax[None, None, 0], sCodes)

    @cute.jit
    def rows_of_heads(
        self, load_X, tX, mX, mX8, mScale, first, sMax, sX, full, sTurns, mSigns, mCos, mSin, each
    ):  # fmt: skip
        """A block of Q or K of `each` heads from `first` on. A thread has chunks of 16 columns in each half
        of a row: what RoPE turns lies in it, and all the transform mixes but for what `lanes` differ in."""
        tidx, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        seqlen, end = mX.shape[2], cutlass.min(first + each, mX.shape[1])
        own_row, lane = tidx // self.lanes, tidx % self.lanes
        row = block * BLOCK + own_row
        chunks = tuple(lane + self.lanes * i for i in range(self.own // CHUNK))
        if block * BLOCK < seqlen:
            # 1. the first loads, and what all heads share
            if tidx == 0:
                for stage in range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            if warp == 0:
                for stage in range_constexpr(self.stages):
                    if first + stage < end:
                        self.fetch(load_X, tX[None, None, first + stage, batch], sX, stage, full)
            masks = sign_masks(mSigns, chunks) if const_expr(self.rotate) else None
            if const_expr(self.rope):
                source = cutlass.min(row, seqlen - 1)  # angles of rows past the end may not be there
                self.keep_angles(
                    mCos[source, None], mSin[source, None], mSigns, chunks, sTurns[None, tidx, None]
                )
            vectors = cute.recast_ptr(sX.iterator, None, self.dtype)
            sVectors = cute.make_tensor(vectors, swizzled_chunks(BLOCK, self.head_dim, self.stages))
            stage, phase, parity = Int32(0), Int32(0), Int32(0)
            for head in range(first, end, unroll=1):
                # 2. a head's rows; past the end the TMA has left zeros, which change no maximum
                cute.arch.mbarrier_wait(full + stage, phase)
                rX = cute.make_rmem_tensor(cute.make_layout((VECTOR, 2 * len(chunks))), mX.element_type)
                for i in range_constexpr(2 * len(chunks)):
                    vector = swizzle(own_row, 2 * chunks[i // 2] + i % 2)
                    cute.autovec_copy(sVectors[own_row, vector, None, stage], rX[None, i])
                if const_expr(self.rotate):
                    apply_signs(rX, masks)
                x = wide(rX)
                if const_expr(self.rope):
                    x = turned(x, sTurns[None, tidx, None])
                after, signs = chunks, (1.0, 1.0)
                if const_expr(self.rotate):
                    x = hadamard(x, self.lanes)
                    after = transformed_chunks(lane, self.lanes, len(chunks))
                    signs = transformed_signs(lane, self.lanes)
                r32 = cute.make_rmem_tensor(cute.make_layout(self.own), Float32)
                keep(r32, x)

                # 3. their scale, at which the CTA meets; then nobody reads the stage any more
                inverse = Float32(0.0)
                if const_expr(self.given):
                    inverse = (1.0 / mScale[batch, head]) * self.norm
                    cute.arch.sync_threads()
                else:
                    largest = find_largest(r32, sMax[None, None, parity], Float32(FP32_MAX))
                    parity ^= 1
                    inverse = self.largest_code / cute.arch.fmax(largest, SMALLEST_MAXIMUM)
                    if tidx == 0:
                        scale = cute.arch.fmax(largest, SMALLEST_MAXIMUM) * (self.norm / self.largest_code)
                        mScale[batch, head, block] = scale if largest > 0.0 else Float32(1.0)
                if warp == 0 and head + self.stages < end:
                    self.fetch(load_X, tX[None, None, head + self.stages, batch], sX, stage, full)
                if const_expr(self.stages == 1):
                    phase ^= 1
                else:
                    phase ^= stage
                    stage ^= 1

                # 4. their codes
                x = scaled(r32, [inverse * sign for sign in signs for _ in range(self.own // 2)], self.given)
                codes = cute.make_rmem_tensor(cute.make_layout((QUAD, len(chunks))), Int32)  # (word, chunk)
                for word in range_constexpr(cute.size(codes)):
                    codes[word] = four_e4m3(*x[QUAD * word : QUAD * (word + 1)])
                if row < seqlen:
                    for i in range_constexpr(len(chunks)):
                        gX8 = cute.local_tile(mX8[batch, head, row, None], (CHUNK,), (after[i],))
                        cute.autovec_copy(codes[None, i], cute.recast_tensor(gX8, Int32))

    @cute.jit
    def fetch(self, load_X, mX, sX, stage, full):
        """One warp: this CTA's rows of mX (seqlen, head_dim) to a stage."""
        block, _, _ = cute.arch.block_idx()
        tXgX, tXsX = partition_tma(load_X, mX, sX)
        with cute.arch.elect_one():
            size = BLOCK * self.head_dim * self.dtype.width // 8
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
        cute.copy(load_X, tXgX[None, block], tXsX[None, stage], tma_bar_ptr=full + stage)

    def keep_angles(self, mCos, mSin, mSigns, chunks, sOwn) -> None:
        """A row's cosines and sines of this thread's columns to its own places, (angle, quad): of the first
        half of its chunks, which the second turn by too. Signs of columns come before RoPE here: those of
        both columns of a point that differ turn its angle round."""
        half = len(chunks) // 2
        for c in range(half):
            cos, sin = (load_fp32(mY, chunks[c]) for mY in (mCos, mSin))
            if self.rotate:
                pair = [load_fp32(mSigns, chunks[i]) for i in (c, c + half)]
                sin = [angle * a * b for angle, a, b in zip(sin, *pair)]
            for i, of_chunk in enumerate((cos, sin)):
                for j in range(QUAD):
                    quad = cute.make_rmem_tensor(cute.make_layout(QUAD), Float32)
                    keep(quad, of_chunk[QUAD * j : QUAD * (j + 1)])
                    cute.autovec_copy(quad, sOwn[None, (i * half + c) * QUAD + j])


def sign_masks(mSigns: cute.Tensor, chunks: tuple[Int32, ...]) -> list[Int32]:
    """The signs of a thread's columns as bits, of two chunks in a word: shifted left by i, bits 15 and 31 are
    those of the i-th pair of columns."""
    masks = []
    for first in range(0, len(chunks), 2):
        mask = Uint32(0)
        for c in range(2):
            for i, sign in enumerate(load_fp32(mSigns, chunks[first + c])):
                place = 16 * (1 - i % 2) + 8 * c + i // 2
                mask = mask | (sign.bitcast(Uint32) >> Uint32(place)) & Uint32(0x80000000 >> place)
        masks.append(Int32(mask))
    return masks


def apply_signs(rX: cute.Tensor, masks: list[Int32]) -> None:
    """Times ±1, two 16-bit values at once."""
    words = cute.recast_tensor(rX, Int32)
    masks = [unhoisted(mask) for mask in masks]
    for i in range(cute.size(words)):
        words[i] = words[i] ^ ((masks[i // 16] << (i % 16)) & SIGNS_OF_PAIR)


def unhoisted(value: Int32) -> Int32:
    """`value`, of which the compiler computes nothing before this place: what it computes before a loop it
    keeps in registers."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def turned(x: list[Float32], sOwn: cute.Tensor) -> list[Float32]:
    """RoPE: an element and the one that is head_dim/2 further on in the row are a point that turns by an
    angle of `keep_angles`."""
    half = len(x) // 2
    cos, sin = [], []
    for i in range(half // 2):
        quad = cute.make_rmem_tensor(cute.make_layout(QUAD), Float32)
        cute.autovec_copy(sOwn[None, i], quad)
        (cos if i < half // 4 else sin).extend(values(quad))
    points = list(zip(x[:half], x[half:], cos, sin))
    return [a * c - b * s for a, b, c, s in points] + [b * c + a * s for a, b, c, s in points]
