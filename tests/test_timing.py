"""The interleaved timer, with a GPU's clockwork in place of the GPU."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from harness import timing


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cycles the GPU was told to sleep; every call takes it 10 ms."""

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        record = synchronize = lambda self: None
        elapsed_time = lambda self, end: 10.0

    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(zero_=lambda: None))
    sensors = SimpleNamespace(clock_mhz=lambda: 1700.0, power_w=lambda: 600.0)
    monkeypatch.setattr(timing, "Sensors", lambda: sensors)
    return cycles


def busy_for(seconds: float) -> Callable[[], None]:
    def call() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    return call


def test_all_calls_take_turns(sleeps: list[int]) -> None:
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    found = timing.interleaved(calls, seconds=0.04, rest=0.0)
    # A first turn that is not counted, then 40 ms of 10 ms each; another one begins each turn.
    assert order == [*"ab", *"ba", *"ab", *"ba", *"ab"]
    assert found == dict.fromkeys("ab", timing.Timing(10.0, 0.0, 1700.0, 600.0))
    assert set(sleeps) == {timing.SLEEP_CYCLES}


@pytest.mark.parametrize("milliseconds", [0.5, 50.0])
def test_the_gpu_sleeps_until_the_host_is_done(milliseconds: float, sleeps: list[int]) -> None:
    timing.interleaved({"slow": busy_for(milliseconds / 1e3)}, seconds=0.03, rest=0.0)
    first, *later = sleeps
    assert first == timing.SLEEP_CYCLES  # nothing is known yet, and nothing is measured
    needed = min(2 * milliseconds / 1e3 * timing.CYCLES_PER_SECOND, timing.SLEEP_CYCLES_MAX)
    assert all(needed <= cycles <= timing.SLEEP_CYCLES_MAX for cycles in later)


@pytest.mark.parametrize(
    ("rest", "cycles"), [(0.01, timing.SLEEP_CYCLES), (0.5, 10_000_000), (9.0, 40_000_000)]
)
def test_the_gpu_rests_in_proportion_to_the_call(rest: float, cycles: int, sleeps: list[int]) -> None:
    timing.interleaved({"a": lambda: None}, seconds=0.03, rest=rest)
    assert sleeps == [timing.SLEEP_CYCLES] + [cycles] * 3  # how long a call takes is known from the first
