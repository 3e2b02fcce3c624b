"""What a consumer does with the stages of a ring, beside waiting for one and leaving it."""

import copy

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState


class OwnStages(PipelineState):
    """Where a consumer is in a ring whose stages are dealt out to all of them: of `stages` those are its own
    whose number is its own modulo `consumers`."""

    def __init__(self, stages: int, consumers: int, consumer: Int32):
        super().__init__(stages, Int32(0), consumer, Int32(0))
        self.consumers, self.consumer = consumers, consumer

    def advance(self) -> None:
        """To the next of its own."""
        for _ in range(self.consumers):
            super().advance()

    @property
    def this(self) -> PipelineState:
        """The one it is at, to be left after `advance`."""
        return self._to_leave(self.index)

    @property
    def other(self) -> PipelineState:
        """The other of its own, if it has two, to be left."""
        return self._to_leave(2 * self.consumer + self.consumers - self.index)

    def _to_leave(self, index: Int32) -> PipelineState:
        return PipelineState(self.stages, Int32(0), index, Int32(0))  # a wait would need its phase

    def __new_from_mlir_values__(self, values: list) -> "OwnStages":
        """The same place behind a loop or a branch: what `PipelineState` does, but of this class."""
        carried = copy.copy(self)
        carried._count, carried._index, carried._phase = map(Int32, values)
        return carried


@cute.jit
def skip(ring, state, stages):
    """Leave the next `stages` stages as they come; the state behind them."""
    for _ in range(stages, unroll=1):
        ring.consumer_wait(state)
        ring.consumer_release(state)
        state.advance()
    return state


@cute.jit
def await_stores():
    """A warp: wait until what it stores by TMA has been read from shared memory."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)  # of the lane that issued it
    cute.arch.sync_warp()
