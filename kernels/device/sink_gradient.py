"""dsink, of what `backward_ends.Preprocess` leaves of LSE and D."""

import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.memory import SmemAllocator

from .constants import LOG2_E, WARP
from .folded import exponent_scale, read_parts
from .limits import BLOCK
from .policies import listed


class SinkGradient:
    """dsink[h] = −Σ exp(sink[h] − LSE)·D over the queries of head h: the sink is a key whose value is zero,
    so that its dP is 0 and its dS is P∘(0 − D). A CTA takes a head, in an order that never changes."""

    threads = 1024

    def __init__(self, blocks: int, folds: bool = False):
        self.blocks = blocks  # of 64 queries, of a tile of packed sequences' queries
        self.folds = folds

    @cute.jit
    def __call__(self, mStats, mSink, mDsink, stream, mList=None, scale=None):
        """mStats and `scale` as `Preprocess` has them; with a sink there is a scale. A row past the end has
        an LSE of ∞, folded one of GREATEST·τ, and adds nothing."""
        scale = scale if self.folds else None
        self.sum_sinks(mStats, mSink, mDsink, mList, scale).launch(
            grid=(mSink.shape[0], 1, 1), block=(self.threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def sum_sinks(self, mStats, mSink, mDsink, mList, scale):
        tidx, _, _ = cute.arch.thread_idx()
        head, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout(self.threads // WARP), 16)
        cute.arch.griddepcontrol_wait()
        heads, blocks = mSink.shape[0], mStats.shape[1]
        if const_expr(mList is not None):
            blocks = mList[0, 0] * self.blocks  # those that sequences have; who knows what the others hold
        sink = mSink[head] * LOG2_E
        row, first = tidx % BLOCK, tidx // BLOCK
        total = Float32(0.0)
        for batch in range(mStats.shape[0] // heads, unroll=1):
            for i in range(first, blocks, self.threads // BLOCK, unroll=4):
                block = i
                if const_expr(mList is not None):
                    tile = i // self.blocks
                    first_tile, *_, place = listed(mList, tile)
                    block = (place + tile - first_tile) * self.blocks + i % self.blocks
                gStats = mStats[batch * heads + head, block, None, None]
                if const_expr(self.folds):
                    minus_LSE, minus_D = read_parts(gStats[row, None])  # the first over the scale
                    exponent = sink + minus_LSE * exponent_scale(scale)
                    total -= cute.math.exp2(exponent, fastmath=True) * minus_D
                else:
                    # Where LSE is ∞, so is −LSE the whole exponent, even of a sink of −∞: 0 and no NaN.
                    total += cute.math.exp2(sink - gStats[0, row], fastmath=True) * gStats[1, row]
        total = cute.arch.warp_reduction_sum(total)
        if tidx % WARP == 0:
            sSums[tidx // WARP] = total
        cute.arch.sync_threads()
        if tidx < WARP:
            total = cute.arch.warp_reduction_sum(sSums[tidx])
            if tidx == 0:
                mDsink[head] = -total
