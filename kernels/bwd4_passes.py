"""What a call of bwd4 launches: the kernels of a backward pass in their order, and the scratch between them.

The main kernels are in bwd4.py (head_dim 64 and 128) and in bwd4_dkv.py and bwd4_dq.py (256); preprocess and
postprocess in device/backward_ends.py. Tensors are (batch, heads, seqlen, head_dim), mLSE without the last;
the scratch, from mStats on, has the shapes that `calls.backward_scratch` names.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_tensor

from .contract import Problem, Work
from .device.backward_ends import Postprocess, Preprocess, fake_scratch
from .device.compiling import compile_for_torch, fake_fp32, fake_gqa_backward
from .device.dq_sums import SummedTiles
from .device.key_parts import PartSums, fake_parts, tiled_in_parts
from .device.key_tiles import CONSUMERS, Tiles, work_of
from .device.limits import has_own_kernel
from .device.query_tiles import QueryTiles


class FlashAttentionBackward:
    """head_dim 64 and 128: preprocess, `main` (bwd4.Backward), postprocess."""

    def __init__(self, main: SummedTiles):
        self.main = main
        self.preprocess = Preprocess(main.head_dim)
        self.postprocess = Postprocess(main.head_dim, main if main.deterministic else None)

    @cute.jit
    def __call__(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter, stream
    ):
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter
        self.launch(*tensors, None, None, stream)

    @cute.jit
    def scaled(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter, scale,
        stream,
    ):  # fmt: skip
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter
        self.launch(*tensors, scale, None, stream)

    @cute.jit
    def with_lse_grad(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter, scale,
        mDLSE, stream,
    ):  # fmt: skip
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter
        self.launch(*tensors, scale, mDLSE, stream)

    @cute.jit
    def launch(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter, scale,
        mDLSE, stream, mParts=None,
    ):  # fmt: skip
        mTiled = None
        if const_expr(mParts is not None):
            mTiled = tiled_in_parts(mK, mParts, self.main.tile_kv)
        if const_expr(self.main.deterministic):
            self.preprocess(mO, mDO, mLSE, mStats, None, stream, None, mDLSE)
        else:
            as_tiles = [
                cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0])) for x in (mQ, mK)
            ]
            if const_expr(mParts is not None):
                as_tiles[1] = mTiled
            theirs = as_tiles[1].shape[2], *self.main.left_to_zero(*as_tiles)
            self.preprocess(mO, mDO, mLSE, mStats, mDQ_sum, stream, theirs, mDLSE)
        sums = mDQ_sum, mZeroed, mOrder, mCounter
        self.main.launch(mQ, mK, mV, mDO, mDK, mDV, mStats, *sums, stream, scale, mTiled, mParts)
        if const_expr(self.main.deterministic):
            self.postprocess(mDQ_sum, mDQ, stream, None, mK.shape[2], scale)
        else:
            self.postprocess(mDQ_sum, mDQ, stream, mZeroed, None, scale)
        if const_expr(mParts is not None):
            self.sum_parts(mParts, mDK, mDV, stream, scale)

    def fake_workspace(self) -> tuple[object, ...]:
        """Stand-ins for `calls.backward_scratch`'s."""
        order = (cute.sym_int(), cute.sym_int())
        return (
            *fake_scratch(self.main.head_dim, self.main.sums),
            make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4),
            make_fake_tensor(Int32, order, (cute.sym_int64(), 1), assumed_align=4),
            make_fake_tensor(Int32, (1,), (1,), assumed_align=4),
        )

    def work(self, problem: Problem) -> list[Work]:
        return [work_of(self.main, problem, 5, f"{self.main.tile_kv} keys of a query head")]


class DividedFlashAttentionBackward(FlashAttentionBackward):
    """`FlashAttentionBackward` with what sees a tile of keys divided: `main` leaves dK and dV in parts, which
    are added."""

    def __init__(self, main: SummedTiles):
        super().__init__(main)
        self.sum_parts = PartSums(main.head_dim)

    @cute.jit
    def __call__(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mParts, mZeroed, mOrder, mCounter,
        stream,
    ):  # fmt: skip
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter
        self.launch(*tensors, None, None, stream, mParts)

    @cute.jit
    def scaled(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mParts, mZeroed, mOrder, mCounter,
        scale, stream,
    ):  # fmt: skip
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter
        self.launch(*tensors, scale, None, stream, mParts)

    @cute.jit
    def with_lse_grad(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mParts, mZeroed, mOrder, mCounter,
        scale, mDLSE, stream,
    ):  # fmt: skip
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder, mCounter
        self.launch(*tensors, scale, mDLSE, stream, mParts)

    def fake_workspace(self) -> tuple[object, ...]:
        """Stand-ins for `calls.backward_scratch`'s."""
        stats, sums, *counters = super().fake_workspace()
        return stats, sums, fake_parts(self.main.head_dim), *counters


class WideFlashAttentionBackward:
    """head_dim 256: preprocess, `main` (bwd4_dkv.KeyGradients), `queries` (bwd4_dq.QueryGradient).
    Deterministic."""

    def __init__(self, main: Tiles, queries: QueryTiles):
        self.preprocess = Preprocess(main.head_dim)
        self.main, self.queries = main, queries

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter, stream):
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter
        self.launch(*tensors, None, None, stream)

    @cute.jit
    def scaled(self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter, scale, stream):
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter
        self.launch(*tensors, scale, None, stream)

    @cute.jit
    def with_lse_grad(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter, scale, mDLSE, stream
    ):  # fmt: skip
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter
        self.launch(*tensors, scale, mDLSE, stream)

    @cute.jit
    def launch(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter, scale, mDLSE, stream, mParts=None
    ):  # fmt: skip
        mTiled = None
        if const_expr(mParts is not None):
            mTiled = tiled_in_parts(mK, mParts, self.main.tile_kv)
        self.preprocess(mO, mDO, mLSE, mStats, None, stream, None, mDLSE)
        counters = [cute.make_tensor(mCounter.iterator + i, cute.make_layout(1)) for i in range(2)]
        self.main.launch(mQ, mK, mV, mDO, mDK, mDV, mStats, counters[0], stream, scale, mTiled, mParts)
        self.queries.launch(mQ, mK, mV, mDO, mDQ, mStats, counters[1], stream, scale)
        if const_expr(mParts is not None):
            self.sum_parts(mParts, mDK, mDV, stream, scale)

    def fake_workspace(self) -> tuple[object, ...]:
        """Stand-ins for `calls.backward_scratch`'s."""
        return fake_scratch(self.main.head_dim)[0], make_fake_tensor(Int32, (2,), (1,), assumed_align=4)

    def work(self, problem: Problem) -> list[Work]:
        unit = "64 keys of a query head, one consumer's half"
        return [
            work_of(self.main, problem, 4, unit, roles=CONSUMERS),
            work_of(self.queries, problem, 3, "128 queries"),
        ]


class DividedWideFlashAttentionBackward(WideFlashAttentionBackward):
    """`WideFlashAttentionBackward` with what sees a tile of keys divided, as
    `DividedFlashAttentionBackward`."""

    def __init__(self, main: Tiles, queries: QueryTiles):
        super().__init__(main, queries)
        self.sum_parts = PartSums(main.head_dim)

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mParts, mCounter, stream):
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter
        self.launch(*tensors, None, None, stream, mParts)

    @cute.jit
    def scaled(self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mParts, mCounter, scale, stream):
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter
        self.launch(*tensors, scale, None, stream, mParts)

    @cute.jit
    def with_lse_grad(
        self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mParts, mCounter, scale, mDLSE, stream
    ):  # fmt: skip
        tensors = mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter
        self.launch(*tensors, scale, mDLSE, stream, mParts)

    def fake_workspace(self) -> tuple[object, ...]:
        """Stand-ins for `calls.backward_scratch`'s."""
        stats, counter = super().fake_workspace()
        return stats, fake_parts(self.main.head_dim), counter


def compile_backward(kernel: FlashAttentionBackward | WideFlashAttentionBackward, problem: Problem) -> object:
    """The call of a backward pass, with the arguments that the problem's options add."""
    own = has_own_kernel(problem)
    q, *rest = fake_gqa_backward(problem.head_dim if own else None, problem.dtype)
    tensors = q, *rest, fake_fp32(q), *kernel.fake_workspace()
    if problem.lse_grad:
        return compile_for_torch(kernel.with_lse_grad, *tensors, Float32(1.0), fake_fp32(q))
    if problem.scaled or not own:
        return compile_for_torch(kernel.scaled, *tensors, Float32(1.0))
    return compile_for_torch(kernel, *tensors)
