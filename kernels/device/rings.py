"""Rings of stages in shared memory: barriers, who puts what into a stage, and how a consumer leaves it."""

import copy

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
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


def put_both(k_ring, load_K, K, sK, v_ring, load_V, V, sV, state, at) -> None:
    """`put` of a tile of keys and of their values; `at` is where among the tiles."""
    put(k_ring, state, load_K, K[at], sK)
    put(v_ring, state, load_V, V[at], sV)


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


@cute.jit
def await_next(q_ring, k_ring, q_get, k_get, ahead, there):
    """Release the K of `ahead` tiles, then wait for the next tile's Q and first K, if it is `there`."""
    k_get = skip(k_ring, k_get, ahead)
    if there:
        q_ring.consumer_wait(q_get)
        k_ring.consumer_wait(k_get)
    return k_get


@cute.jit
def leave_hidden(hidden, past_the_end, k_ring, v_ring, k_get, v_get, hides: cutlass.Constexpr):
    """The tiles of keys that only rows of other consumers see, or that are other heads': how many are still
    to be released.

    Each consumer must release every stage, or the producer waits for its warps when the ring comes round. It
    releases their K while it waits for the next tile (`await_next`), their V after its own last one. Hazard:
    until then it holds that stage of V, and the producer puts V beside K, so they must all fit into the other
    stages, together with those before its first tile of the next queries (the assertion in k6's `__init__`),
    or all wait forever. Rows past the end have no such bound and release theirs here, K and V in turn; their
    last P·V, which is not stored, is of another V. `tests/test_rings.py` runs this schedule."""
    if past_the_end:
        for _ in range(hidden, unroll=1):
            v_get = skip(v_ring, v_get, 1)
            k_get = skip(k_ring, k_get, 1)
        hidden = Int32(0)
    if const_expr(not hides):
        hidden = 0  # others have none anyway, which the compiler does not know
    return hidden, k_get, v_get
