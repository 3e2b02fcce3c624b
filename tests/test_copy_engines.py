"""The ring's messages by copy engines, on a CPU: who waits for whom, what is overdue, where words lie."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from hopper_attention.integrations import context_parallel as cp
from hopper_attention.integrations import copy_engines


def channel(done: bool, waited_s: float, timeout: float = 10.0) -> copy_engines.Channel:
    event = SimpleNamespace(query=lambda: done)
    found = copy_engines.Channel(None, None, 0, 2, None, timeout)
    found.last = event, -waited_s
    return found


@pytest.mark.parametrize(
    ("done", "waited_s", "late"), [(False, 11.0, True), (True, 11.0, False), (False, 9.0, False)]
)
def test_what_is_overdue(done: bool, waited_s: float, late: bool) -> None:
    """Only what is older than the timeout, and has not come."""
    one, watch = channel(done, waited_s), copy_engines.Watch()
    watch.channels.add(one)
    assert (watch.overdue(0.0) is one) == late


def test_what_is_young_is_not_asked() -> None:
    """An event must not be asked while a CUDA graph is captured."""
    one, watch = channel(False, 1.0), copy_engines.Watch()
    one.last[0].query = lambda: pytest.fail("asked")
    watch.channels.add(one)
    assert watch.overdue(0.0) is None


def test_words_of_a_channel_are_apart() -> None:
    """Each has one writer, and none lies in a place."""
    for ranks in (2, 3, 8):
        handle = SimpleNamespace(buffer_ptrs=[1 << 20 * (rank + 1) for rank in range(ranks)])
        one = copy_engines.Channel(None, handle, 256, ranks, None, 1.0)
        words = [
            one.word(0, what, place, writer)
            for what in (copy_engines.FREE, copy_engines.THERE) for place in (0, 1) for writer in range(ranks)
        ]  # fmt: skip
        assert len(set(words)) == len(words)
        assert max(words) + 4 <= handle.buffer_ptrs[0] + copy_engines.Channel.header(ranks)


class Stream:
    """What a stream is told to wait for, in order, beside what is queued on it."""

    def __init__(self, name: str):
        self.name, self.queued = name, []

    def wait_stream(self, other: "Stream") -> None:
        self.queued.append(f"behind {other.name}")


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A rank of two with a channel, on the CPU; whose streams say what they wait for."""
    state = SimpleNamespace(current=Stream("A"), copies=Stream("copies"))
    events = {"record": lambda stream: None, "query": lambda: True}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(**events))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    queue = lambda name: lambda stream, address, n: stream.queued.append(f"{name} {n}")
    monkeypatch.setattr(copy_engines, "write_word", queue("write"))
    monkeypatch.setattr(copy_engines, "wait_for_word", queue("wait for"))
    monkeypatch.setattr(cp.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(cp.dist, "get_world_size", lambda group: 2)
    memory = lambda holder, shape, dtype, at: torch.zeros(shape, dtype=dtype)
    handle = SimpleNamespace(buffer_ptrs=[0, 1 << 20], get_buffer=memory)
    one = copy_engines.Channel(torch.zeros(1), handle, 1 << 16, 2, state.copies, 1.0)
    monkeypatch.setattr(copy_engines.CopyExchange, "channel", lambda self, kind, device: one)
    state.exchange = lambda: copy_engines.CopyExchange(Group(), {})
    return state


class Group:
    """Of two ranks, that can be held weakly."""


def send(exchange: copy_engines.CopyExchange):
    x = torch.zeros(4, 8)
    return exchange.post("keys", 1, [x], 1, [x.shape])


def test_a_call_returns_when_what_it_sends_is_read(copying: SimpleNamespace) -> None:
    """K and V are the caller's, and the receiver may be behind."""
    exchange = copying.exchange()
    send(exchange)()
    exchange.finish()
    assert copying.current.queued == ["wait for 1", "behind copies"]


def test_a_place_is_free_when_every_stream_has_read_it(copying: SimpleNamespace) -> None:
    """A second stream's messages come behind what the first one reads, which the second does not wait for."""
    first, second = copying.current, Stream("B")
    send(copying.exchange())()
    assert copying.copies.queued[0] == "behind A"
    copying.copies.queued.clear()
    copying.current = second
    send(copying.exchange())()
    assert copying.copies.queued[:3] == ["behind A", "behind B", "write 2"]
    copying.copies.queued.clear()
    send(copying.exchange())()
    assert copying.copies.queued[:2] == ["behind B", "write 3"]
    assert first.queued == ["wait for 1"]
