"""What a call of bwd4 launches: the kernels of a backward pass in their order, and the scratch between them.

The main kernels are in bwd4.py (head_dim 64 and 128) and in bwd4_dkv.py and bwd4_dq.py (256); preprocess and
postprocess in device/backward_ends.py. Tensors are (batch, heads, seqlen, head_dim), mLSE without the last;
the scratch, from mStats on, has the shapes that `workspace` names.
"""

import math

import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.runtime import make_fake_tensor

from .contract import Problem, Work
from .device.backward_ends import Postprocess, Preprocess, fake_scratch, scratch_shapes
from .device.dq_sums import SummedTiles
from .device.key_tiles import CONSUMERS, Tiles, work_of
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
        if const_expr(self.main.deterministic):
            self.preprocess(mO, mDO, mLSE, mStats, None, stream)
        else:
            as_tiles = [
                cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0])) for x in (mQ, mK)
            ]
            theirs = mK.shape[1], *self.main.left_to_zero(*as_tiles)
            self.preprocess(mO, mDO, mLSE, mStats, mDQ_sum, stream, theirs)
        self.main.launch(mQ, mK, mV, mDO, mDK, mDV, mStats, mDQ_sum, mZeroed, mOrder, mCounter, stream)
        if const_expr(self.main.deterministic):
            self.postprocess(mDQ_sum, mDQ, stream, None, mK.shape[2])
        else:
            self.postprocess(mDQ_sum, mDQ, stream, mZeroed)

    def workspace(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        heads, tiles = problem.batch * problem.heads, math.ceil(problem.seqlen_q / self.main.tile_q)
        return scratch_shapes(problem, self.main.tile_q, self.main.sums) | {
            # how many shares of a key head's dQ_sum are zero
            "zeroed": ((problem.batch * problem.kv_heads,), "int32"),
            "order": ((heads, tiles * self.main.sums), "int32"),  # whose turn it is to add to dQ_sum
            "counter": ((1,), "int32"),  # of tiles taken; two launches at once must not share any of these
        }

    def fake_workspace(self) -> tuple[object, ...]:
        """Stand-ins for `workspace`'s."""
        order = (cute.sym_int(), cute.sym_int())
        return (
            *fake_scratch(self.main.head_dim, self.main.sums),
            make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4),
            make_fake_tensor(Int32, order, (cute.sym_int64(), 1), assumed_align=4),
            make_fake_tensor(Int32, (1,), (1,), assumed_align=4),
        )

    def work(self, problem: Problem) -> list[Work]:
        return [work_of(self.main, problem, 5, f"{self.main.tile_kv} keys of a query head")]


class WideFlashAttentionBackward:
    """head_dim 256: preprocess, `main` (bwd4_dkv.KeyGradients), `queries` (bwd4_dq.QueryGradient).
    Deterministic."""

    def __init__(self, main: Tiles, queries: QueryTiles):
        self.preprocess = Preprocess(main.head_dim)
        self.main, self.queries = main, queries

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter, stream):
        self.preprocess(mO, mDO, mLSE, mStats, None, stream)
        counters = [cute.make_tensor(mCounter.iterator + i, cute.make_layout(1)) for i in range(2)]
        self.main.launch(mQ, mK, mV, mDO, mDK, mDV, mStats, counters[0], stream)
        self.queries.launch(mQ, mK, mV, mDO, mDQ, mStats, counters[1], stream)

    def workspace(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        return {
            "stats": scratch_shapes(problem, self.queries.tile_q)["stats"],
            # of tiles taken, a kernel each; two launches at once must not share it
            "counter": ((2,), "int32"),
        }

    def fake_workspace(self) -> tuple[object, ...]:
        """Stand-ins for `workspace`'s."""
        return fake_scratch(self.main.head_dim)[0], make_fake_tensor(Int32, (2,), (1,), assumed_align=4)

    def work(self, problem: Problem) -> list[Work]:
        unit = "64 keys of a query head, one consumer's half"
        return [
            work_of(self.main, problem, 4, unit, roles=CONSUMERS),
            work_of(self.queries, problem, 3, "128 queries"),
        ]
