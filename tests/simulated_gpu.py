"""A GPU, its stream and its host on virtual clocks, in place of those that `harness.timing` reads.

Nothing here takes time: a kernel's duration is known, and a timer is right when that is what it reports. L2
is warm after a kernel and cold after writing as much as it holds; work without rests ends at the power cap.
There is one stream, so when an operation will run is known as soon as it is enqueued.
"""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from harness import timing

L2_BYTES = 50 * 2**20
BYTES_PER_SECOND = 3.35e12
CLOCK_HZ = 1.98e9
QUEUE = 1024  # operations that fit the stream's queue; the host waits for a place
SETTLED = 0.4  # seconds of work without rest until the power cap sets the clock
EVEN = 2.0  # until every second is like the last
IDLE, BURST, CAPPED = (345.0, 80.0), (1700.0, 600.0), (1400.0, 690.0)  # MHz and W


class SimulatedGpu:
    """`call` makes what is timed; `now` is the host's clock, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        self.done = 0.0  # when the stream will have done what is enqueued
        self.warm = False  # whether L2 holds what kernels read
        self.work = 0.0  # seconds that the GPU has not rested from
        self.sleeps: list[int] = []  # cycles
        self.kernels: list[tuple[float, float, tuple[float, float]]] = []  # begin, end, clock and power
        self.queue: deque[float] = deque()  # when each operation will be done
        for name, stand_in in {
            "Event": lambda enable_timing=False: Event(self, enable_timing),
            "_sleep": self.sleep,
            "synchronize": lambda: self.wait_until(self.done),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        empty = torch.empty
        on_gpu = lambda *shape, device=None, **options: (
            self.empty(*shape, **options) if device == "cuda" else empty(*shape, device=device, **options)
        )
        monkeypatch.setattr(torch, "empty", on_gpu)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))
        sensors = SimpleNamespace(clock_mhz=lambda: self.sensed()[0], power_w=lambda: self.sensed()[1])
        monkeypatch.setattr(timing, "Sensors", lambda: sensors)

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)

    def enqueue(self, seconds: float, rest: bool = False) -> float:
        """An operation that begins when those before it are done: that moment."""
        while self.queue and self.queue[0] <= self.now:
            self.queue.popleft()
        if len(self.queue) == QUEUE:
            self.wait_until(self.queue.popleft())
        begin = max(self.now, self.done)
        idle = begin - self.done + (seconds if rest else 0.0)
        self.work = max(0.0, self.work - idle) + (0.0 if rest else seconds)
        self.done = begin + seconds
        self.queue.append(self.done)
        return begin

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles)
        self.enqueue(cycles / CLOCK_HZ, rest=True)

    def empty(self, *shape: int, dtype: torch.dtype) -> SimpleNamespace:
        size = torch.Size(shape).numel() * dtype.itemsize

        def zero_() -> None:
            self.enqueue(size / BYTES_PER_SECOND)
            self.warm = self.warm and size < L2_BYTES

        return SimpleNamespace(zero_=zero_)

    def launch(self, ms: float, host_us: float = 0.0) -> None:
        """A kernel of so many milliseconds, which the host takes so many microseconds to enqueue."""
        self.now += 1e-6 * host_us
        state = CAPPED if self.work >= SETTLED else BURST
        begin = self.enqueue(1e-3 * ms)
        self.kernels.append((begin, self.done, state))
        self.warm = True

    def call(
        self,
        ms: float,
        cold_ms: float = 0.0,
        capped_ms: float = 0.0,
        uneven_ms: float = 0.0,
        host_us: float = 0.0,
    ) -> Callable[[], None]:
        """A call of one kernel: it takes `ms`, that much more where L2 is cold, that much more again at the
        power cap, and more until that is EVEN."""

        def call() -> None:
            cold, capped, uneven = not self.warm, self.work >= SETTLED, self.work < EVEN
            self.launch(ms + cold * cold_ms + capped * capped_ms + uneven * uneven_ms, host_us)

        return call

    def sensed(self) -> tuple[float, float]:
        """Clock and power now: the clock that of a kernel if one is running, the power that of the last."""
        for begin, end, (clock, power) in reversed(self.kernels):
            if begin <= self.now:
                return clock if self.now < end else IDLE[0], power
        return IDLE


class Event:
    def __init__(self, gpu: SimulatedGpu, enable_timing: bool):
        self.gpu, self.timed, self.moment = gpu, enable_timing, 0.0

    def record(self) -> None:
        self.moment = max(self.gpu.now, self.gpu.done)

    def synchronize(self) -> None:
        self.gpu.wait_until(self.moment)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`, if the host has waited for both."""
        assert self.timed and end.timed, "an event without timing"
        assert max(self.moment, end.moment) <= self.gpu.now, "device not ready"
        return 1e3 * (end.moment - self.moment)
