"""What a call of bwd4 launches: the kernels of a backward pass in their order, and the scratch between them.

The main kernels are in bwd4.py (head_dim up to 128) and in bwd4_dkv.py and bwd4_dq.py (above); preprocess and
postprocess in device/backward_ends.py. Tensors are (batch, heads, seqlen, head_dim), mLSE without the last;
the scratch, from mStats on, has the shapes that `calls.backward_scratch` names, or where tiles can be split
`calls_split.undivided_scratch`; what follows is what `calls.given_names` names.
"""

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_tensor

from .calls import given_names
from .contract import Problem, Work
from .device.backward_ends import Postprocess, Preprocess, as_tiles, fake_scratch
from .device.compiling import compile_for_torch, fake_fp32, fake_gqa_backward
from .device.dq_sums import SummedTiles
from .device.folded import FOLDED_COLUMNS, FOLDED_PRODUCTS
from .device.given import Given, fake_given, fake_heads, fake_list, take_given
from .device.key_parts import PartSums, fake_parts, tiled_in_parts
from .device.key_tiles import CONSUMERS, ROWS, Tiles, work_of
from .device.limits import has_own_kernel
from .device.policies import Numbers
from .device.query_tiles import QueryTiles
from .device.short_sequences import ListBothApart
from .device.sink_gradient import SinkGradient
from .device.tile_list import ListBoth


class Pass:
    """A backward pass of a problem: what is called with its tensors, its scratch and what a launch gives."""

    tensors = "mQ", "mK", "mV", "mO", "mDO", "mDQ", "mDK", "mDV", "mLSE"
    floats: tuple[str, ...]  # scratch
    counters: tuple[str, ...]
    left_over: SummedTiles | None = None  # who has packed sequences of one tile of keys

    def __init__(self, problem: Problem):
        self.problem, self.names = problem, given_names(problem)
        self.packed = problem.sequences is not None
        self.lists = ("mListQ", "mListKV") if self.packed else ()

    @cute.jit
    def __call__(self, *arguments):
        """`tensors`, `calls.backward_scratch`, what a launch gives, and the stream."""
        *rest, stream = arguments
        named = self.tensors + self.floats + self.lists + self.counters
        given = rest[len(named) :]
        policies = take_given(given, self.names)
        mDLSE = given.pop(0) if self.problem.lse_grad else None
        mDsink = given.pop(0) if self.problem.sink else None
        tensors = dict(zip(named, rest))
        for name in self.lists:
            tensors[name] = cute.recast_tensor(tensors[name], Int32)
        self.launch(policies, mDLSE, mDsink, stream, **tensors)

    def launch(self, given: Given, mDLSE: object, mDsink: object, stream: object, **tensors: Any) -> None:
        """Traced: launch the kernels, in their order."""
        raise NotImplementedError

    def numbers(self, given: Given) -> Numbers:
        return Numbers(given.scale, given.window, given.softcap)

    def list_tiles(self, main: Tiles, rows: int, given: Given, stream, mQ, mK, mListQ, mListKV) -> None:
        """Of packed sequences, before anything else: their tiles of `rows` queries and those of keys."""
        if self.lists:
            lists = (ListBothApart if self.left_over else ListBoth)(rows, main.tile_kv)
            lists(mListQ, mListKV, given.sequences, mQ.shape[2], mK.shape[2], stream)

    def fake_workspace(self) -> tuple[object, ...]:
        """Stand-ins for `calls.backward_scratch`'s."""
        raise NotImplementedError

    def fake_lists(self) -> tuple[object, ...]:
        return tuple(fake_list() for _ in self.lists)


def each_of(mCounter: cute.Tensor, kernels: int) -> list[cute.Tensor]:
    """A counter of tiles for each of so many kernels."""
    return [cute.make_tensor(mCounter.iterator + i, cute.make_layout(1)) for i in range(kernels)]


class FlashAttentionBackward(Pass):
    """Up to head_dim 128: preprocess, `main` (bwd4.Backward), postprocess; of one tile of keys without. Of
    packed sequences `left_over`, a kernel behind `main`, may have those of one tile."""

    floats, counters = ("mStats", "mDQ_sum"), ("mZeroed", "mOrder", "mCounter")

    def __init__(self, main: SummedTiles, problem: Problem, left_over: SummedTiles | None = None):
        super().__init__(problem)
        self.main, self.left_over, most_keys = main, left_over, None
        packed = main.tile_q if self.packed else None
        if main.one_tile:
            self.floats, self.counters = tuple(x for x in self.floats if x != "mDQ_sum"), ("mCounter",)
            self.lists, most_keys = (), main.tile_kv if main.by_sequence else None
        if main.splits:
            self.floats = *self.floats, "mSplit"
        self.preprocess = Preprocess(main.head_dim, packed, most_keys, main.folds)
        tiles = main if main.deterministic else None
        narrow = main.divides or main.counts_sums
        apart = left_over.tile_kv if left_over else None
        self.postprocess = Postprocess(main.head_dim, tiles, packed=packed, narrow=narrow, apart=apart)

    def launch(
        self, given, mDLSE, mDsink, stream, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter,
        mDQ_sum=None, mSplit=None, mZeroed=None, mOrder=None, mParts=None, mListQ=None, mListKV=None,
    ):  # fmt: skip
        mTiled, numbers = None, self.numbers(given)
        self.list_tiles(self.main, self.main.tile_q, given, stream, mQ, mK, mListQ, mListKV)
        if self.main.by_sequence:
            mListQ = mListKV = *given.sequences, mQ.shape[2], mK.shape[2]  # by which tiles are found
        if mParts is not None:
            mTiled = tiled_in_parts(mK, mParts, self.main.tile_kv)
        scaled = {"scale": given.scale}
        if self.main.deterministic or self.main.one_tile:
            self.preprocess(mO, mDO, mLSE, mStats, None, stream, None, mDLSE, mListQ, **scaled)
        elif self.packed:
            more = mDLSE, mListQ, mListKV
            self.preprocess(mO, mDO, mLSE, mStats, mDQ_sum, stream, (self.main, mQ, mK), *more, **scaled)
        else:
            tiles = as_tiles(mQ, mK)
            if mParts is not None:
                tiles[1] = mTiled
            theirs = tiles[1].shape[2], *self.main.left_to_zero(*tiles)
            self.preprocess(mO, mDO, mLSE, mStats, mDQ_sum, stream, theirs, mDLSE, **scaled)
        sums, inputs = mDQ if self.main.one_tile else (mDQ_sum, mZeroed, mOrder), (mQ, mK, mV, mDO)
        counters = each_of(mCounter, 2) if self.left_over else [mCounter]
        outputs, more = (mDK, mDV, mStats), (stream, numbers, mTiled, mParts, mListKV)
        self.main.launch(*inputs, *outputs, sums, counters[0], *more, mSplit)
        if self.left_over is not None:
            # Its CTAs begin when all of `main` have waited for the preprocess and said so (`add_gradients`),
            # as these end, and end when all these have: the postprocess, which waits for it, needs both.
            self.left_over.launch(*inputs, *outputs, mDQ, counters[1], *more)
        counted, keys = mZeroed, None
        if self.main.deterministic:
            counted, keys = None, (mK.shape[2], mK.shape[0] * mK.shape[1])
        if mParts is not None:
            add = PartSums(self.main.head_dim, None if self.main.one_tile else self.postprocess)
            add(mParts, mDK, mDV, stream, numbers, mDQ, mDQ_sum, counted)
        elif not self.main.one_tile:
            self.postprocess(mDQ_sum, mDQ, stream, counted, keys, numbers, mList=mListQ)
        if mDsink is not None:
            sinks = SinkGradient(self.main.blocks, self.main.folds)
            sinks(mStats, given.sink, mDsink, stream, mListQ, **scaled)

    def fake_workspace(self) -> tuple[object, ...]:
        if self.main.one_tile:
            counter = make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
            stats, _ = fake_scratch(self.main.head_dim, folded=self.main.folds)
            return stats, *self.fake_lists(), counter
        order = (cute.sym_int(), cute.sym_int())
        sums = 2 if self.main.counts_sums else self.main.sums
        return (
            *fake_scratch(self.main.head_dim, sums, self.main.folds),
            *([fake_parts(self.main.head_dim)] if self.main.splits else ()),
            *self.fake_lists(),
            make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4),
            make_fake_tensor(Int32, order, (cute.sym_int64(), 1), assumed_align=4),
            make_fake_tensor(Int32, (2 if self.packed else 1,), (1,), assumed_align=4),
        )

    def work(self, problem: Problem) -> list[Work]:
        work = work_of(self.main, problem, 5, f"{self.main.tile_kv} keys of a query head")
        if self.main.folds:
            more = 1 + FOLDED_PRODUCTS * FOLDED_COLUMNS / (5 * problem.head_dim)
            work = replace(work, tensor_flops=work.tensor_flops * more)
        return [work]


class DividedFlashAttentionBackward(FlashAttentionBackward):
    """`FlashAttentionBackward` with what sees a tile of keys divided: `main` leaves dK and dV in parts, which
    are added."""

    floats = "mStats", "mDQ_sum", "mParts"

    def fake_workspace(self) -> tuple[object, ...]:
        before, after = len(self.floats) - 1, super().fake_workspace()
        return *after[:before], fake_parts(self.main.head_dim), *after[before:]


class WideFlashAttentionBackward(Pass):
    """head_dim above 128: preprocess, `main` (bwd4_dkv.KeyGradients), `queries` (bwd4_dq.QueryGradient).
    Deterministic."""

    floats, counters = ("mStats",), ("mCounter",)

    def __init__(self, main: Tiles, queries: QueryTiles, problem: Problem):
        super().__init__(problem)
        self.preprocess = Preprocess(main.head_dim, queries.tile_q if self.packed else None)
        self.main, self.queries = main, queries

    def launch(
        self, given, mDLSE, mDsink, stream, mQ, mK, mV, mO, mDO, mDQ, mDK, mDV, mLSE, mStats, mCounter,
        mParts=None, mListQ=None, mListKV=None,
    ):  # fmt: skip
        mTiled, numbers = None, self.numbers(given)
        self.list_tiles(self.main, self.queries.tile_q, given, stream, mQ, mK, mListQ, mListKV)
        if mParts is not None:
            mTiled = tiled_in_parts(mK, mParts, self.main.tile_kv)
        self.preprocess(mO, mDO, mLSE, mStats, None, stream, None, mDLSE, mListQ)
        counters = each_of(mCounter, 2)
        inputs, more = (mQ, mK, mV, mDO), (mTiled, mParts, mListKV)
        self.main.launch(*inputs, mDK, mDV, mStats, counters[0], stream, numbers, *more)
        self.queries.launch(*inputs, mDQ, mStats, counters[1], stream, numbers, mListQ)
        if mDsink is not None:
            SinkGradient(self.queries.tile_q // ROWS)(mStats, given.sink, mDsink, stream, mListQ)

    def fake_workspace(self) -> tuple[object, ...]:
        counters = make_fake_tensor(Int32, (2,), (1,), assumed_align=4)
        return fake_scratch(self.main.head_dim)[0], *self.fake_lists(), counters

    def work(self, problem: Problem) -> list[Work]:
        unit = "64 keys of a query head, one consumer's half"
        return [
            work_of(self.main, problem, 4, unit, roles=CONSUMERS),
            work_of(self.queries, problem, 3, "128 queries"),
        ]


class DividedWideFlashAttentionBackward(WideFlashAttentionBackward):
    """`WideFlashAttentionBackward` with what sees a tile of keys divided, as
    `DividedFlashAttentionBackward`."""

    floats = "mStats", "mParts"

    def launch(self, given, mDLSE, mDsink, stream, mDK, mDV, mParts, **tensors):
        super().launch(given, mDLSE, mDsink, stream, mDK=mDK, mDV=mDV, mParts=mParts, **tensors)
        PartSums(self.main.head_dim)(mParts, mDK, mDV, stream, self.numbers(given))

    def fake_workspace(self) -> tuple[object, ...]:
        stats, *counters = super().fake_workspace()
        return stats, fake_parts(self.main.head_dim), *counters


def compile_backward(kernel: Pass) -> object:
    """The call of a backward pass, with the arguments that its problem's options add."""
    problem = kernel.problem
    q, *rest = fake_gqa_backward(problem.head_dim if has_own_kernel(problem) else None, problem.dtype)
    given = fake_given(q.shape[1], kernel.names)
    given += [fake_fp32(q)] * problem.lse_grad + [fake_heads(q.shape[1])] * problem.sink
    return compile_for_torch(kernel, q, *rest, fake_fp32(q), *kernel.fake_workspace(), *given)
