"""Time kernels side by side: CUDA events, L2 flushed, every provider's launches interleaved with the
others'."""

import datetime
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from harness.hardware import peak_of

FLUSH_BYTES = 256 * 2**20  # five times the H100's L2
SLEEP_CYCLES = 500_000  # ≈ 0.28 ms on the GPU: longer than most providers' host time
SLEEP_CYCLES_MAX = 8_000_000  # for a call that waits for the GPU, whose host time would double every turn
CYCLES_PER_SECOND = 2e9  # of the SM clock, at most
REST = 2.0  # of a call's time: calls of milliseconds one after the other would be timed at the power cap
REST_CYCLES_MAX = 200_000_000  # ≈ 0.1 s
MIN_REPEATS, MAX_REPEATS = 5, 60
SUSTAINED_SECONDS, SUSTAINED_TURNS = 2.0, 4
SETTLING_SECONDS = 0.5


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, and the state of the GPU while it ran."""

    ms_median: float
    ms_iqr: float
    clock_mhz: float | None
    power_w: float | None


class Sensors:
    """Clock, power and temperature of the current GPU through NVML; None where NVML does not answer."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml
        except Exception:  # no NVML, or no right to it: timings are as good without
            self._nvml = None

    def _read(self, query: Callable[[object], float]) -> float | None:
        if self._nvml is None:
            return None
        try:
            return query(self._nvml)
        except self._nvml.NVMLError:
            return None

    def clock_mhz(self) -> float | None:
        """SM clock now."""
        return self._read(lambda n: float(n.nvmlDeviceGetClockInfo(self._gpu, n.NVML_CLOCK_SM)))

    def power_w(self) -> float | None:
        """Power drawn, averaged by the driver over about a second."""
        return self._read(lambda n: n.nvmlDeviceGetPowerUsage(self._gpu) / 1e3)

    def power_cap_w(self) -> float | None:
        return self._read(lambda n: n.nvmlDeviceGetEnforcedPowerLimit(self._gpu) / 1e3)

    def temperature_c(self) -> float | None:
        return self._read(lambda n: float(n.nvmlDeviceGetTemperature(self._gpu, n.NVML_TEMPERATURE_GPU)))

    def driver(self) -> str | None:
        return self._read(lambda n: n.nvmlSystemGetDriverVersion())


def gemm_tflops(size: int = 8192, seconds: float = 0.2) -> float:
    """What a bf16 matrix product of PyTorch's reaches on this GPU, on random data, in bursts."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    time = interleaved({"gemm": lambda: torch.matmul(a, b, out=out)}, seconds)["gemm"]
    return 2 * size**3 / time.ms_median / 1e9


def copy_tb_per_s(size: int = 2**32, seconds: float = 0.1) -> float:
    """What a copy inside device memory reaches on this GPU, bytes read and written counted."""
    source = torch.empty(size, device="cuda", dtype=torch.int8)
    target = torch.empty_like(source)
    time = interleaved({"copy": lambda: target.copy_(source)}, seconds, rest=0.0)["copy"]
    return 2 * size / time.ms_median / 1e9


def environment(peers: dict[str, str]) -> dict[str, object]:
    """What numbers taken here depend on besides the code; `peers` are the versions of those timed beside
    it."""
    import cutlass

    sensors = Sensors()
    cudnn = torch.backends.cudnn.version()
    return {
        "gpu": torch.cuda.get_device_name(),
        "power_cap_w": sensors.power_cap_w(),
        "driver": sensors.driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cutlass_dsl": cutlass.__version__,
        "python": platform.python_version(),
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else None,
        "peers": peers,
        "peak": peak_of(torch.cuda.get_device_properties(None)),
        "host_us": {},
        "date": datetime.date.today().isoformat(),
    }


def interleaved(
    calls: dict[str, Callable[[], object]], seconds: float = 0.15, rest: float = REST
) -> dict[str, Timing]:
    """Median and interquartile range of each call in milliseconds, all calls taking turns.

    Each call runs about `seconds` in all, between MIN_REPEATS and MAX_REPEATS times. Before each measured
    launch L2 is flushed and the GPU sleeps: `rest` times as long as the call takes, so that a burst is timed
    and not the power cap (`sustained` does that), and long enough for the host to have enqueued the launch,
    twice as long as it took the last time, so that nobody's host time is measured.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    sensors = Sensors()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    repeats, clock, host = dict.fromkeys(calls, 1), dict.fromkeys(calls), dict.fromkeys(calls, 0.0)
    rests = dict.fromkeys(calls, 0)
    turn = 0
    while waiting := [name for name in calls if turn < repeats[name]]:
        events = {}
        # Each turn another one begins: what follows the synchronisation is about 1 % slower.
        first = turn % len(waiting)
        for name in (*waiting[first:], *waiting[:first]):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            enqueued = min(int(2 * host[name] * CYCLES_PER_SECOND), SLEEP_CYCLES_MAX)
            torch.cuda._sleep(max(SLEEP_CYCLES, enqueued, rests[name]))
            begin = time.perf_counter()
            start.record()
            calls[name]()
            end.record()
            host[name] = time.perf_counter() - begin
            events[name] = (start, end)
            if turn == repeats[name] - 1:
                start.synchronize()  # the GPU is inside the call now, or just past a short one
                clock[name] = sensors.clock_mhz()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            ms = start.elapsed_time(end)
            if turn == 0:  # the first turn warms up and sets how often; a call this slow needs no warming
                repeats[name] = 1 + min(MAX_REPEATS, max(MIN_REPEATS, int(seconds * 1e3 / ms)))
                rests[name] = min(int(rest * ms * 1e-3 * CYCLES_PER_SECOND), REST_CYCLES_MAX)
            if turn > 0 or ms > 1e3 * seconds:
                samples[name].append(ms)
        turn += 1
    power = sensors.power_w()
    timings = {}
    for name, ms in samples.items():
        low, _, high = statistics.quantiles(ms, n=4, method="inclusive")
        timings[name] = Timing(statistics.median(ms), high - low, clock[name], power)
    return timings


def sustained(
    calls: Mapping[str, Callable[[], object]],
    ms: Mapping[str, float],
    seconds: float = SUSTAINED_SECONDS,
    turns: int = SUSTAINED_TURNS,
) -> dict[str, Timing]:
    """Of each call, the mean milliseconds of back-to-back launches over at least `seconds`, as `ms_median`,
    given what one takes, `ms`.

    The calls take `turns` turns; in each, half a second is not counted, in which the GPU settles at its power
    cap. Before these is a turn of which nothing is counted: who comes first after a rest has 1 to 3 % less
    for longer than that (notes/measuring.md, "Bursts and steady work"). Launches are queued in bursts of
    about 50 ms; clock and power are read while they run, and reported as medians.
    """
    sensors = Sensors()

    def run_for(name: str, limit: float) -> tuple[int, float, list[tuple[float | None, float | None]]]:
        count, readings, begin = 0, [], time.perf_counter()
        burst = max(1, int(50 / ms[name]))
        while time.perf_counter() - begin < limit:
            for _ in range(burst):
                calls[name]()
            readings.append((sensors.clock_mhz(), sensors.power_w()))
            torch.cuda.synchronize()
            count += burst
        return count, time.perf_counter() - begin, readings

    ran: dict[str, list[tuple]] = {name: [] for name in calls}
    for _ in range(1 + turns):
        for name in calls:
            run_for(name, SETTLING_SECONDS)
            ran[name].append(run_for(name, seconds / turns))
    middle = lambda values: statistics.median(values) if values else None
    timings = {}
    for name, (_, *counted) in ran.items():
        counts, elapsed, readings = zip(*counted)
        columns = zip(*itertools.chain(*readings))
        clocks, powers = ([x for x in column if x is not None] for column in columns)
        timings[name] = Timing(1e3 * sum(elapsed) / sum(counts), 0.0, middle(clocks), middle(powers))
    return timings


def host_microseconds(call: Callable[[], object], calls: int = 500, rounds: int = 20) -> float:
    """Host time of one asynchronous call in µs: the least mean of several rounds short enough not to fill the
    queue."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - begin)
        torch.cuda.synchronize()
    return 1e6 * best / calls
