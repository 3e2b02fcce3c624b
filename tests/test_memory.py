"""Scratch and counters: whose they are, what is kept, what a CUDA graph has."""

import pytest
import torch
from stand_in_launches import Launched, backward, forward, stand_in_for_kernels, stand_in_for_memory, tensors

from hopper_attention import memory, production
from hopper_attention.kernels import calls
from hopper_attention.kernels.contract import Problem


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    return stand_in_for_kernels(monkeypatch)


def test_scratch_is_of_the_stream_and_of_the_capture(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors(2, 4, 16, 64)
    forward(q, k, v)
    monkeypatch.setattr(memory, "current_stream", lambda index: 8)
    forward(q, k, v)
    monkeypatch.setattr(memory, "is_capturing", lambda: True)
    forward(q, k, v)
    forward(q, k, v)
    counters = [given[-1] for *_, given in launched]
    assert len({x.data_ptr() for x in counters}) == 4
    assert len(memory._memory) == 4  # floats and counters of two streams
    assert not any(x.any() for x in counters)


def test_launches_in_a_graph_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros made before, and waited for before a graph can have them; more when half are gone and somebody
    calls outside of a graph; where there are too few, a graph makes them."""
    waits = stand_in_for_memory(monkeypatch)
    monkeypatch.setattr(memory, "ZEROS", 3 * memory.TO_LINE + 4)
    spec = {"pieces": ((2, 8, 64), "float32"), "arrived": ((8,), "int32")}
    part, device = memory.part_of(print, memory.WHOLE, memory.WHOLE, spec), torch.device("cuda", 0)
    eager = [memory.scratch_of(part, device)[1] for _ in range(2)]
    assert eager[0] is eager[1] and waits == [0]
    monkeypatch.setattr(memory, "is_capturing", lambda: True)
    counters = [memory.scratch_of(part, device)[1] for _ in range(5)]
    assert len({x.data_ptr() for x in (eager[0], *counters)}) == 6
    assert all(x.shape == (8,) and not x.any() for x in counters)
    assert memory._zeros[0].numel() == 4
    monkeypatch.setattr(memory, "is_capturing", lambda: False)
    monkeypatch.setattr(memory, "current_stream", lambda index: 8)
    memory.scratch_of(part, device)
    assert memory._zeros[0].numel() == memory.ZEROS and waits == [0, 4]
    ends = [x.data_ptr() + 4 * x.numel() for x in memory._of_graphs]
    given = [x.data_ptr() for x in counters]  # of which three are still held for their graphs
    assert sum(x.data_ptr() <= y < end for y in given for x, end in zip(memory._of_graphs, ends)) == 3


def test_memory_that_was_not_there_is_asked_for_again(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors(2, 4, 16, 64)
    empty, left = memory.empty, [2]  # o, lse; and no counter

    def no_memory(*dense: object) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*dense)

    monkeypatch.setattr(memory, "empty", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        forward(q, k, v)
    monkeypatch.setattr(memory, "empty", empty)
    forward(q, k, v)
    assert len(launched) == 1


def test_scratch_of_one_launch_is_never_shared(launched: Launched) -> None:
    """Also where two of its tensors have one shape: of one key head, as many counters as tiles taken."""
    q, k, v = tensors(1, 1, 200, 64)
    backward(q, k, v)
    *_, given = launched[0]
    scratch = [x.data_ptr() for x in given[9:]]
    assert len(set(scratch)) == len(scratch) == 5
    for head_dim, deterministic in ((64, False), (128, True), (256, False)):
        problem = Problem.square(2, 4, 64, head_dim, True, direction="bwd")
        kinds = [kind for _, kind in calls.backward_scratch(problem, deterministic).values()]
        assert kinds == sorted(kinds)  # float32 before int32, as `memory.scratch_of` gives them


def test_an_lse_that_nobody_asked_for_is_scratch(launched: Launched) -> None:
    """Kept for the stream where it is small, and never the output of another call."""
    q, k, v = tensors(2, 4, 16, 64)
    for _ in range(2):
        lse = production.forward(q, k, v, None, True, False, with_lse=False)[1]
        assert lse is None
    assert forward(q, k, v, causal=True)[1].shape == (2, 4, 16)
    first, again, asked_for = (given[4] for *_, given in launched)
    assert first is again
    assert (first.shape, first.dtype) == ((2, 4, 16), torch.float32)
    assert asked_for.data_ptr() != first.data_ptr()
    q, k, v = tensors(1, 1, 2**16 + 8, 64)  # of more bytes than are kept
    for _ in range(2):
        production.forward(q, k, v, None, True, False, with_lse=False)
    assert launched[-1][2][4] is not launched[-2][2][4]
    nothing = tensors(2, 4, 0, 64)
    assert production.forward(*nothing, None, False, False, with_lse=False)[0].shape == (2, 4, 0, 64)


def test_small_scratch_is_kept_and_shared_in_one_direction(launched: Launched) -> None:
    """A forward launch may come between the kernels of another thread's backward pass."""
    q, k, v = tensors(2, 4, 16, 64)
    backward(q, k, v)
    backward(q, k, v)
    production.forward(q, k, v, None, False, False, with_lse=False)
    backward(*tensors(2, 8, 16, 64))
    first, again, of_forward, larger = (given for *_, given in launched)
    assert all(x is y for x, y in zip(first[9:], again[9:]))
    memory = [{x.untyped_storage().data_ptr() for x in given} for given in (first[9:], of_forward[4:])]
    assert len(memory[0]) == 2 and not memory[0] & memory[1]
    assert all(x.storage_offset() % 32 == 0 for x in (*first[9:], *larger[9:]))
    assert not any(x.any() for x in larger[-3:])  # counters
    large = tensors(1, 64, 4096, 64)  # sums of more bytes than are kept
    backward(*large)
    backward(*large)
    assert launched[-1][2][9].data_ptr() != launched[-1][2][10].data_ptr()
    assert launched[-1][2][9] is not launched[-2][2][9]
    assert launched[-1][2][-1] is launched[-2][2][-1]
