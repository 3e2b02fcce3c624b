"""Places in rings, and what a consumer does with a ring beside waiting for a stage and leaving it. The rings
themselves are `tma.tma_rings`, which the stages before k6 take from there."""

import copy

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from .tma import CONSUMER, PRODUCER, put, tma_rings

__all__ = ["CONSUMER", "PRODUCER", "OwnStages", "put", "skip", "tma_rings"]


class OwnStages(PipelineState):
    """Where a consumer is in a ring whose stages are dealt out to all of them: of `stages` those are its own
    whose number is its own modulo `consumers`.

    `this` and `other` are properties: of what a dynamic loop calls a method, the DSL makes a loop-carried
    value, in the order of the calls, and another order is other machine code.
    """

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
