"""What a call of bwd4 launches: the kernels of a backward pass in their order, and the scratch between them.

The main kernels are in bwd4.py (head_dim 64 and 128) and in bwd4_dkv.py and bwd4_dq.py (256); preprocess and
postprocess in device/backward_ends.py. Tensors are (batch, heads, seqlen, head_dim), mLSE without the last;
the scratch, from mStats on, has the shapes that `calls.backward_scratch` names; what a launch gives besides is
`policies.Given`.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_tensor

from .contract import Problem, Work
from .device.backward_ends import Postprocess, Preprocess, SinkGradient, fake_scratch
from .device.compiling import compile_for_torch, fake_fp32, fake_gqa_backward
from .device.dq_sums import SummedTiles
from .device.key_parts import PartSums, fake_parts, tiled_in_parts
from .device.key_tiles import CONSUMERS, Tiles, work_of
from .device.policies import Given, fake_given, names_given
from .device.query_tiles import QueryTiles


class Pass:
    """A backward pass of a problem: what is called with its tensors, its scratch and what a launch gives."""

    tensors = "mQ", "mK", "mV", "mO", "mDO", "mDQ", "mDK", "mDV", "mLSE"
    scratch: tuple[str, ...]

    def __init__(self, problem: Problem):
        self.problem, self.given = problem, names_given(problem)

    @cute.jit
    def __call__(self, *arguments):
        """`tensors`, `scratch`, the fields of `Given` that the problem has, and the stream."""
        *rest, stream = arguments
        named = self.tensors + self.scratch
        given = Given(**dict(zip(self.given, rest[len(named) :])))
        self.launch(given, stream, **dict(zip(named, rest)))

    def launch(self, given: Given, stream: object, **tensors: Any) -> None:
        """Traced: launch the kernels, in their order."""
        raise NotImplementedError

    def fake_workspace(self) -> tuple[object, ...]:
        """Stand-ins for `calls.backward_scratch`'s."""
        raise NotImplementedError

    def end(self, given: Given, stream: object, mStats: cute.Tensor) -> None:
        """What follows when dK, dV and dQ are on their way."""
        if given.sink is not None:
            SinkGradient()(mStats, given.sink, given.dsink, stream)


class FlashAttentionBackward(Pass):
    """head_dim 64 and 128: preprocess, `main` (bwd4.Backward), postprocess."""

    scratch = "mStats", "mDQ_sum", "mZeroed", "mOrder", "mCounter"

    def __init__(self, main: SummedTiles, problem: Problem):
        super().__init__(problem)
        self.main = main
        self.preprocess = Preprocess(main.head_dim)
        self.postprocess = Postprocess(main.head_dim, main if main.deterministic else None)

    def launch(
        self, given, stream, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mDQ_sum, mZeroed, mOrder,
        mCounter, mParts=None,
    ):  # fmt: skip
        mTiled = None
        if mParts is not None:
            mTiled = tiled_in_parts(mK, mParts, self.main.tile_kv)
        if self.main.deterministic:
            self.preprocess(mO, mDO, mLSE, mStats, None, stream, None, given.dlse)
        else:
            as_tiles = [
                cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0])) for x in (mQ, mK)
            ]
            if mParts is not None:
                as_tiles[1] = mTiled
            theirs = as_tiles[1].shape[2], *self.main.left_to_zero(*as_tiles)
            self.preprocess(mO, mDO, mLSE, mStats, mDQ_sum, stream, theirs, given.dlse)
        sums, numbers = (mDQ_sum, mZeroed, mOrder, mCounter), given.numbers
        self.main.launch(mQ, mK, mV, mDO, mDK, mDV, mStats, *sums, stream, numbers, mTiled, mParts)
        if self.main.deterministic:
            self.postprocess(mDQ_sum, mDQ, stream, None, mK.shape[2], numbers)
        else:
            self.postprocess(mDQ_sum, mDQ, stream, mZeroed, None, numbers)
        self.end(given, stream, mStats)

    def fake_workspace(self) -> tuple[object, ...]:
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

    scratch = "mStats", "mDQ_sum", "mParts", "mZeroed", "mOrder", "mCounter"

    def launch(self, given, stream, mDK, mDV, mParts, **tensors):
        super().launch(given, stream, mDK=mDK, mDV=mDV, mParts=mParts, **tensors)
        PartSums(self.main.head_dim)(mParts, mDK, mDV, stream, given.numbers)

    def fake_workspace(self) -> tuple[object, ...]:
        stats, sums, *counters = super().fake_workspace()
        return stats, sums, fake_parts(self.main.head_dim), *counters


class WideFlashAttentionBackward(Pass):
    """head_dim 256: preprocess, `main` (bwd4_dkv.KeyGradients), `queries` (bwd4_dq.QueryGradient).
    Deterministic."""

    scratch = "mStats", "mCounter"

    def __init__(self, main: Tiles, queries: QueryTiles, problem: Problem):
        super().__init__(problem)
        self.preprocess = Preprocess(main.head_dim)
        self.main, self.queries = main, queries

    def launch(
        self, given, stream, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter, mParts=None
    ):  # fmt: skip
        mTiled = None
        if mParts is not None:
            mTiled = tiled_in_parts(mK, mParts, self.main.tile_kv)
        self.preprocess(mO, mDO, mLSE, mStats, None, stream, None, given.dlse)
        counters = [cute.make_tensor(mCounter.iterator + i, cute.make_layout(1)) for i in range(2)]
        numbers = given.numbers
        self.main.launch(mQ, mK, mV, mDO, mDK, mDV, mStats, counters[0], stream, numbers, mTiled, mParts)
        self.queries.launch(mQ, mK, mV, mDO, mDQ, mStats, counters[1], stream, numbers)
        self.end(given, stream, mStats)

    def fake_workspace(self) -> tuple[object, ...]:
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

    scratch = "mStats", "mParts", "mCounter"

    def launch(self, given, stream, mDK, mDV, mParts, **tensors):
        super().launch(given, stream, mDK=mDK, mDV=mDV, mParts=mParts, **tensors)
        PartSums(self.main.head_dim)(mParts, mDK, mDV, stream, given.numbers)

    def fake_workspace(self) -> tuple[object, ...]:
        stats, counter = super().fake_workspace()
        return stats, fake_parts(self.main.head_dim), counter


def compile_backward(kernel: Pass) -> object:
    """The call of a backward pass, with the arguments that its problem's options add."""
    problem = kernel.problem
    q, *rest = fake_gqa_backward(problem.head_dim, problem.dtype)
    tensors = q, *rest, fake_fp32(q), *kernel.fake_workspace(), *fake_given(problem, q)
    return compile_for_torch(kernel, *tensors)
