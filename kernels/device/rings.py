"""Rings of stages in shared memory: barriers, who puts what into a stage, and how a consumer leaves it."""

import copy

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.pipeline import Agent, CooperativeGroup, PipelineState, PipelineTmaAsync, PipelineUserType

PRODUCER, CONSUMER = PRODUCER_CONSUMER = PipelineUserType.Producer, PipelineUserType.Consumer


def tma_rings(
    smem: object, *rings: tuple[int, int, int], lane: Int32 | None = None
) -> list[PipelineTmaAsync]:
    """A ring for each (stages, bytes of a stage, warps that release it), its barriers in shared memory. They
    wait for `pipeline_init_arrive` and `pipeline_init_wait`. A stage is full by one arrival, of an elected
    lane of the producer, and its bytes; it is empty when one lane of each releasing warp has arrived. Each
    release asks for the lane; given `lane`, that is not read anew."""
    return [
        PipelineTmaAsync.create(
            num_stages=stages,
            tx_count=tx_count,
            barrier_storage=smem.allocate_array(Int64, 2 * stages),
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, warps),
            tidx=lane,
            defer_sync=True,
        )
        for stages, tx_count, warps in rings
    ]


@cute.jit
def put(ring, state, atom, source: cute.Tensor, destination: cute.Tensor):
    """One warp: wait until the consumers have left the stage of `state`, expect its bytes, start the copy of
    `source` (TMA,) into that stage of `destination` (TMA, stage)."""
    ring.producer_acquire(state)
    # A copy by TMA elects its lane itself: never call it inside `elect_one`.
    cute.copy(atom, source, destination[None, state.index], tma_bar_ptr=ring.producer_get_barrier(state))


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
