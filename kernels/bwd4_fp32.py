"""BWD4 for a part of a problem: gradients stay in fp32, for who adds parts.

The idea          Where a sequence lies on several GPUs, dQ, dK and dV are sums over blocks of scores, a call
                  each. Rounded to 16 bits one by one, they miss the pass rule (dV of the first keys, 1.27 ×
                  the yardstick's rms). bwd4_parts has all three in fp32 before its last passes: here these
                  passes store fp32.
What changes      against bwd4_parts: one part; the last passes write rows of fp32, by ordinary stores.
What does not     everything before.
Supports          as bwd4, but head_dim 64 and 128, not deterministic.
Note              notes/context_parallel.md
"""

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr

from .bwd4 import Backward
from .bwd4_operands import CONFIGS
from .bwd4_passes import DividedFlashAttentionBackward
from .contract import Problem
from .device.backward_ends import QUAD
from .device.compiling import ELEMENTS, compile_for_torch, fake_fp32, fake_gqa_backward, fake_rows
from .device.constants import SMS, WARP, WARPGROUP
from .device.key_parts import halves
from .device.limits import BLOCK
from .device.masks import mask_of


class Rows:
    """Sums as the accumulators they were (`backward_ends`), times the scale, as rows of fp32. A CTA takes 64
    rows, a warpgroup 64 of their columns. mZeroed is left at zero."""

    def __init__(self, head_dim: int, scaled: bool = True):
        self.threads = WARPGROUP * (head_dim // BLOCK)
        self.scale = 1.0 / math.sqrt(head_dim) if scaled else 1.0

    @cute.jit
    def __call__(self, mSum, mOut, stream, mZeroed=None, seqlen_kv=None, scale=None):
        batch, heads, seqlen, _ = mOut.shape
        self.kernel(mSum, mOut, mZeroed, scale).launch(
            grid=(cute.ceil_div(seqlen, BLOCK), heads, batch),
            block=(self.threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mSum, mOut, mZeroed, scale):
        if const_expr(scale is not None):
            self.scale = scale
        tidx, _, _ = cute.arch.thread_idx()
        # From the last head back: the main kernel has just left that in L2.
        block, head, batch = [n - 1 - i for n, i in zip(cute.arch.grid_dim(), cute.arch.block_idx())]
        cute.arch.griddepcontrol_wait()
        column, thread = tidx // WARPGROUP, tidx % WARPGROUP
        head_index = batch * mOut.shape[1] + head
        if const_expr(mZeroed is not None):
            if block == 0 and tidx == 0 and head_index < mZeroed.shape[0]:
                mZeroed[head_index] = 0
        held = cute.make_layout((QUAD, WARPGROUP, BLOCK // 8))
        gSum = cute.make_tensor(mSum[head_index, block, column, None].iterator, held)
        rSum = cute.make_rmem_tensor(cute.make_layout((QUAD, BLOCK // 8)), Float32)  # (register, g)
        for g in range_constexpr(BLOCK // 8):
            cute.autovec_copy(gSum[None, thread, g], rSum[None, g])
        rSum.store(rSum.load() * self.scale)
        first_row = block * BLOCK + 16 * (thread // WARP) + thread % WARP // 4
        for half in range_constexpr(2):
            row = first_row + 8 * half
            if row < mOut.shape[2]:
                for g in range_constexpr(BLOCK // 8):
                    # Four lanes write 32 bytes in a row: a sector of memory each time.
                    pair = column * (BLOCK // 2) + 4 * g + thread % 4
                    gPair = cute.local_tile(mOut[batch, head, row, None], (2,), (pair,))
                    cute.autovec_copy(cute.local_tile(rSum[None, g], (2,), (half,)), gPair)


class RowsOfParts:
    """`Rows` of dK and dV, where `key_parts` left one part of each."""

    def __init__(self, head_dim: int):
        self.keys, self.values = Rows(head_dim), Rows(head_dim, scaled=False)

    @cute.jit
    def __call__(self, mParts, mDK, mDV, stream, scale):
        key_parts, value_parts = halves(mParts)
        self.keys(key_parts, mDK, stream, scale=scale)
        self.values(value_parts, mDV, stream)


class PartialBackward(DividedFlashAttentionBackward):
    """`DividedFlashAttentionBackward` with fp32 dQ, dK and dV."""

    def __init__(self, main: Backward):
        super().__init__(main)
        self.postprocess, self.sum_parts = Rows(main.head_dim), RowsOfParts(main.head_dim)


def compile_kernel(problem: Problem, sms: int = SMS) -> object:
    """Of a problem its head_dim, mask, dtype and options."""
    main = Backward(
        problem.head_dim, mask_of(problem), ELEMENTS[problem.dtype], False, CONFIGS[problem.head_dim],
        divides=True, sms=sms,
    )  # fmt: skip
    kernel = PartialBackward(main)
    q, k, v, o, do, dq, dk, dv = fake_gqa_backward(problem.head_dim, problem.dtype)
    gradients = [fake_rows(Float32, x.shape) for x in (dq, dk, dv)]
    tensors = q, k, v, o, do, *gradients, fake_fp32(q), *kernel.fake_workspace()
    if problem.lse_grad:
        return compile_for_torch(kernel.with_lse_grad, *tensors, Float32(1.0), fake_fp32(q))
    if problem.scaled:
        return compile_for_torch(kernel.scaled, *tensors, Float32(1.0))
    return compile_for_torch(kernel, *tensors)
