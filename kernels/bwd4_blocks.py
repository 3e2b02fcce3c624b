"""BWD4 in pieces: gradients of blocks of scores, summed in fp32 over as many blocks as there are.

The idea          Where a sequence lies on several GPUs, dQ, dK and dV are sums over blocks of scores, each a
                  launch. Rounded to 16 bits one by one, they miss the pass rule (dV of the first keys, 1.27 ×
                  the yardstick's rms). Kept in fp32 as rows, every block costs passes over memory. But bwd4
                  adds to sums of dQ in any case, and they need not be zero when a block begins: what comes
                  before and after a main kernel is launched once, the main kernel once for each block.
What changes      against bwd4_parts: what is one call there is four here, compiled apart. `begin` has the
                  statistics of queries, and zeros for dQ; `block` adds a block's dQ to its sum, and leaves
                  dK and dV in fp32, in one part; `queries` rounds dQ, and `keys` rounds dK and dV, the sum of
                  two such parts if keys were seen from elsewhere too.
What does not     the main kernel; but all zeros are the preprocess's.
Supports          head_dim 64 and 128, causal and not, as bwd4; not deterministic.
Note              notes/context_parallel.md
"""

import math

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from .bwd4 import Backward
from .bwd4_operands import CONFIGS
from .contract import Problem
from .device.backward_ends import QUAD, Postprocess, Preprocess, fake_scratch
from .device.compiling import ELEMENTS, compile_for_torch, fake_fp32, fake_gqa_backward
from .device.constants import SMS, WARP, WARPGROUP
from .device.key_parts import fake_parts, halves, tiled_in_parts
from .device.limits import BLOCK, column_blocks, folds
from .device.masks import mask_of
from .device.policies import Numbers


class Adding(Backward):
    """`Backward` whose sums of dQ hold what is added to: zeros, or the blocks before."""

    zeroes_ahead = False

    def __init__(self, problem: Problem, sms: int):
        config, dtype = CONFIGS[problem.head_dim], ELEMENTS[problem.dtype]
        super().__init__(problem.head_dim, mask_of(problem), dtype, False, config, divides=True, sms=sms)


class Begin:
    """stats and zeros, as `Preprocess`; then comes the gradient of the LSE and the scale, where a problem has
    them."""

    def __init__(self, problem: Problem, sms: int):
        self.preprocess = Preprocess(problem.head_dim, folds=folds(problem.head_dim, False))
        self.lse_grad = problem.lse_grad

    @cute.jit
    def __call__(self, mO, mDO, mLSE, mStats, mDQ_sum, *rest):
        *given, stream = rest
        mDLSE, scale = given[: self.lse_grad], Numbers(*given[self.lse_grad :]).scale
        self.preprocess(mO, mDO, mLSE, mStats, mDQ_sum, stream, None, *mDLSE, scale=scale)

    @staticmethod
    def stand_ins(problem: Problem) -> list[object]:
        _, _, _, o, do, *_ = fake_gqa_backward(problem.head_dim, problem.dtype)
        dlse = [fake_fp32(o)] * problem.lse_grad
        return [o, do, fake_fp32(o), *_scratch(problem), *dlse, *_scale(problem)]


class Block:
    """The main kernel. mCounter is zero before, and after; a launch that follows may begin while this one
    ends, and needs another."""

    def __init__(self, problem: Problem, sms: int):
        self.main = Adding(problem, sms)

    @cute.jit
    def __call__(self, mQ, mK, mV, mDO, mStats, mDQ_sum, mParts, mCounter, *rest):
        *scale, stream = rest
        # Without turns and zeros nothing is counted but tiles.
        mZeroed, mOrder = None, cute.make_tensor(mCounter.iterator, cute.make_layout((1, 1)))
        mTiled = tiled_in_parts(mK, mParts, self.main.tile_kv)
        scratch = mStats, (mDQ_sum, mZeroed, mOrder), mCounter
        self.main.launch(mQ, mK, mV, mDO, None, None, *scratch, stream, Numbers(*scale), mTiled, mParts)

    @staticmethod
    def stand_ins(problem: Problem) -> list[object]:
        q, k, v, _, do, *_ = fake_gqa_backward(problem.head_dim, problem.dtype)
        counter = make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
        parts = fake_parts(problem.head_dim)
        return [q, k, v, do, *_scratch(problem), parts, counter, *_scale(problem)]


class Queries:
    """dQ of its sum, rounded."""

    def __init__(self, problem: Problem, sms: int):
        self.postprocess = Postprocess(problem.head_dim)

    @cute.jit
    def __call__(self, mDQ_sum, mDQ, *rest):
        *scale, stream = rest
        self.postprocess(mDQ_sum, mDQ, stream, numbers=Numbers(*scale))

    @staticmethod
    def stand_ins(problem: Problem) -> list[object]:
        q, *_ = fake_gqa_backward(problem.head_dim, problem.dtype)
        return [_scratch(problem)[1], q, *_scale(problem)]


class Keys:
    """dK and dV of what `Block` left of them, and with `others` of as much from elsewhere: their sum,
    rounded. A CTA takes 64 rows, a warpgroup 64 of their columns."""

    def __init__(self, problem: Problem, sms: int, others: bool = False):
        self.others = others
        self.scale = 1.0 / math.sqrt(problem.head_dim)
        self.threads = WARPGROUP * column_blocks(problem.head_dim)

    @cute.jit
    def __call__(self, mParts, *rest):
        """mParts, with `others` a second one, mDK, mDV, of a scaled problem the scale, and the stream."""
        *given, stream = rest
        own, others = halves(mParts), (None, None)
        if const_expr(self.others):
            others = halves(given.pop(0))
        mDK, mDV, *scale = given
        batch, heads, seqlen, _ = mDK.shape
        # It may begin while the kernel before ends: `others` is there by then, the stream has waited for it.
        self.kernel(own, others, (mDK, mDV), *scale).launch(
            grid=(cute.ceil_div(seqlen, BLOCK), heads, 2 * batch),
            block=(self.threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, own, others, outputs, scale=None):
        if const_expr(scale is not None):
            self.scale = scale
        # From the last head back: the main kernel has just left that in L2.
        block, head, both = [n - 1 - i for n, i in zip(cute.arch.grid_dim(), cute.arch.block_idx())]
        cute.arch.griddepcontrol_wait()
        place = block, head, both // 2
        if both % 2 == 0:
            self.round_block(own[0], others[0], outputs[0], place, self.scale)
        else:
            self.round_block(own[1], others[1], outputs[1], place, 1.0)

    @cute.jit
    def round_block(self, mOwn, mOther, mOut, place, factor):
        block, head, batch = place
        tidx, _, _ = cute.arch.thread_idx()
        column, thread = tidx // WARPGROUP, tidx % WARPGROUP
        head_index = batch * mOut.shape[1] + head
        held = cute.make_layout((QUAD, WARPGROUP, BLOCK // 8))
        quads = cute.make_layout((QUAD, BLOCK // 8))  # (register, g), of the accumulator
        rSum = cute.make_rmem_tensor(quads, Float32)
        gOwn = cute.make_tensor(mOwn[head_index, block, column, None].iterator, held)
        for g in range_constexpr(BLOCK // 8):
            cute.autovec_copy(gOwn[None, thread, g], rSum[None, g])
        if const_expr(mOther is not None):
            rOther = cute.make_rmem_tensor(quads, Float32)
            gOther = cute.make_tensor(mOther[head_index, block, column, None].iterator, held)
            for g in range_constexpr(BLOCK // 8):
                cute.autovec_copy(gOther[None, thread, g], rOther[None, g])
            rSum.store(rSum.load() + rOther.load())
        rOut = cute.make_rmem_tensor(quads, mOut.element_type)
        rOut.store((rSum.load() * factor).to(mOut.element_type))
        first_row = block * BLOCK + 16 * (thread // WARP) + thread % WARP // 4
        for half in range_constexpr(2):
            row = first_row + 8 * half
            if row < mOut.shape[2]:
                for g in range_constexpr(BLOCK // 8):
                    # Four lanes write 16 bytes in a row, and the next g the rest of the sector, in L2.
                    pair = column * (BLOCK // 2) + 4 * g + thread % 4
                    gPair = cute.local_tile(mOut[batch, head, row, None], (2,), (pair,))
                    cute.autovec_copy(cute.local_tile(rOut[None, g], (2,), (half,)), gPair)

    def stand_ins(self, problem: Problem) -> list[object]:
        _, k, v, *_ = fake_gqa_backward(problem.head_dim, problem.dtype)
        parts = [fake_parts(problem.head_dim) for _ in range(1 + self.others)]
        return [*parts, k, v, *_scale(problem)]


PIECES = {"begin": Begin, "block": Block, "queries": Queries, "keys": Keys}


def _scratch(problem: Problem) -> tuple[object, object]:
    return fake_scratch(problem.head_dim, folded=folds(problem.head_dim, False))


def _scale(problem: Problem) -> list[object]:
    return [Float32(1.0)] * problem.scaled


def compile_kernel(problem: Problem, piece: str, sms: int = SMS, **options: bool) -> object:
    """One of PIECES, of a problem's head_dim, mask, dtype and options."""
    kernel = PIECES[piece](problem, sms, **options)
    return compile_for_torch(kernel, *kernel.stand_ins(problem))
