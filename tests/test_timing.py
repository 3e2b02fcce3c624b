"""The timers, on a simulated GPU whose times are known."""

import statistics

import pytest
import torch
from simulated_gpu import BURST, CAPPED, L2_BYTES, QUEUE, SETTLED, SimulatedGpu

from harness import timing


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    return SimulatedGpu(monkeypatch)


def exactly(ms: float) -> object:
    return pytest.approx(ms, rel=1e-9, abs=1e-12)


# The simulation itself


def test_a_simulated_kernel_is_cold_once_l2_was_written_over(gpu: SimulatedGpu) -> None:
    def duration() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    call = gpu.call(2.0, cold_ms=1.0)
    assert duration() == exactly(3.0)
    assert duration() == exactly(2.0)
    for size, ms in ((L2_BYTES // 2, 2.0), (L2_BYTES, 3.0)):
        torch.empty(size, dtype=torch.int8, device="cuda").zero_()
        torch.cuda._sleep(1_000_000)
        assert duration() == exactly(ms)


def test_a_simulated_host_is_timed_where_the_gpu_waits_for_it(gpu: SimulatedGpu) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    gpu.launch(2.0, host_us=500.0)
    end.record()
    with pytest.raises(AssertionError, match="not ready"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) == exactly(2.5)


def test_a_simulated_queue_fills(gpu: SimulatedGpu) -> None:
    for _ in range(QUEUE):
        gpu.launch(1.0)
    assert gpu.now == 0.0
    gpu.launch(1.0)
    assert gpu.now == exactly(1e-3)


# Launches one at a time


@pytest.mark.parametrize("host_us", [0.0, 20.0, 400.0, 1500.0])
@pytest.mark.parametrize("ms", [0.004, 0.3, 7.0, 80.0])
def test_a_call_is_timed_with_l2_cold_and_without_the_host(
    ms: float, host_us: float, gpu: SimulatedGpu
) -> None:
    found = timing.interleaved({"a": gpu.call(ms, cold_ms=0.5 * ms, host_us=host_us)})
    assert (found["a"].ms_median, found["a"].ms_iqr) == (exactly(1.5 * ms), exactly(0.0))


def test_calls_do_not_warm_one_another(gpu: SimulatedGpu) -> None:
    calls = {name: gpu.call(ms, cold_ms=ms) for name, ms in (("a", 1.0), ("b", 2.0), ("c", 5.0))}
    found = timing.interleaved(calls)
    assert {name: time.ms_median for name, time in found.items()} == {
        "a": exactly(2.0),
        "b": exactly(4.0),
        "c": exactly(10.0),
    }


def test_all_calls_take_turns(gpu: SimulatedGpu) -> None:
    order = []

    def call(name: str) -> None:
        order.append(name)
        gpu.launch(10.0)

    calls = {name: lambda name=name: call(name) for name in ("a", "b")}
    found = timing.interleaved(calls, seconds=0.06, rest=0.0)
    # A first turn that is not counted, then 60 ms of 10 ms each; another one begins each turn.
    assert order == [*"ab", *"ba", *"ab", *"ba", *"ab", *"ba", *"ab"]
    for time in found.values():
        assert time == timing.Timing(exactly(10.0), exactly(0.0), *BURST)
    assert set(gpu.sleeps) == {timing.SLEEP_CYCLES}


def test_each_call_runs_as_often_as_its_time_allows(gpu: SimulatedGpu) -> None:
    def call(name: str, ms: float) -> None:
        launches[name] += 1
        gpu.launch(ms)

    times = {"short": 0.1, "middling": 9.0, "long": 100.0, "longest": 500.0}
    launches = dict.fromkeys(times, 0)
    found = timing.interleaved({name: lambda name=name, ms=ms: call(name, ms) for name, ms in times.items()})
    at_most, at_least = timing.MAX_REPEATS, timing.MIN_REPEATS
    wanted = {"short": at_most, "middling": 16, "long": at_least, "longest": at_least}
    assert launches == {name: 1 + repeats for name, repeats in wanted.items()}
    assert {name: time.ms_median for name, time in found.items()} == {
        name: exactly(ms) for name, ms in times.items()
    }


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (10.0, [3.0, 1.0, 2.0, 9.0, 4.0, 8.0, 1.5, 1.2, 30.0, 2.5]),  # a first turn that only warms up
        (200.0, [3.0, 210.0, 190.0, 205.0, 1.0]),  # one that is counted
    ],
)
def test_median_and_range_are_of_the_measured_launches(
    first: float, others: list[float], gpu: SimulatedGpu
) -> None:
    times = iter([first, *others])
    found = timing.interleaved({"a": lambda: gpu.launch(next(times))}, seconds=0.1)["a"]
    assert next(times, None) is None
    counted = sorted([first, *others] if first > 100.0 else others)
    low, _, high = statistics.quantiles(counted, n=4, method="inclusive")
    assert found.ms_median == exactly(statistics.median(counted))
    assert found.ms_iqr == exactly(high - low)


def test_clock_is_read_while_the_call_runs(gpu: SimulatedGpu) -> None:
    calls = {name: gpu.call(ms, host_us=10.0) for name, ms in (("a", 0.05), ("b", 3.0))}
    found = timing.interleaved(calls)
    assert [(time.clock_mhz, time.power_w) for time in found.values()] == [BURST, BURST]


@pytest.mark.parametrize("milliseconds", [0.5, 50.0])
def test_the_gpu_sleeps_until_the_host_is_done(milliseconds: float, gpu: SimulatedGpu) -> None:
    timing.interleaved({"slow": gpu.call(10.0, host_us=1e3 * milliseconds)}, seconds=0.03, rest=0.0)
    first, *later = gpu.sleeps
    assert first == timing.SLEEP_CYCLES  # nothing is known yet, and nothing is measured
    needed = min(int(2e-3 * milliseconds * timing.CYCLES_PER_SECOND), timing.SLEEP_CYCLES_MAX)
    assert later
    assert all(needed - 1 <= cycles <= needed + 1 for cycles in later)


def test_a_call_that_waits_for_the_gpu_does_not_prolong_every_sleep(gpu: SimulatedGpu) -> None:
    def call() -> None:
        gpu.launch(1.0)
        torch.cuda.synchronize()

    assert timing.interleaved({"a": call})["a"].ms_median == exactly(1.0)
    assert max(gpu.sleeps) == timing.SLEEP_CYCLES_MAX


@pytest.mark.parametrize(
    ("rest", "cycles"),
    [(0.01, timing.SLEEP_CYCLES), (0.5, 10_000_000), (9.0, 180_000_000), (99.0, timing.REST_CYCLES_MAX)],
)
def test_the_gpu_rests_in_proportion_to_the_call(rest: float, cycles: int, gpu: SimulatedGpu) -> None:
    timing.interleaved({"a": gpu.call(10.0)}, seconds=0.03, rest=rest)
    first, *later = gpu.sleeps
    assert first == timing.SLEEP_CYCLES  # how long a call takes is known from then on
    assert later == [pytest.approx(cycles, abs=1)] * timing.MIN_REPEATS


def test_rests_keep_the_gpu_from_its_power_cap(gpu: SimulatedGpu) -> None:
    calls = {name: gpu.call(5.0, capped_ms=1.0) for name in "abcdef"}
    for rest, ms, state in ((timing.REST, 5.0, BURST), (0.0, 6.0, CAPPED)):
        for time in timing.interleaved(calls, seconds=1.0, rest=rest).values():
            assert (time.ms_median, time.clock_mhz, time.power_w) == (exactly(ms), *state)


# Launches back to back


@pytest.mark.parametrize("seconds", [0.7, 2.0])
@pytest.mark.parametrize("ms", [0.06, 0.4, 20.0, 130.0])
def test_a_sustained_time_is_that_of_launches_at_the_power_cap(
    ms: float, seconds: float, gpu: SimulatedGpu
) -> None:
    # Nothing is flushed between launches, and the burst time that says how many to queue is another.
    call = gpu.call(ms, cold_ms=ms, capped_ms=0.25 * ms, host_us=3.0)
    found = timing.sustained({"call": call}, {"call": 1.1 * ms}, seconds, turns=2)["call"]
    # While a burst's first launch is enqueued, the GPU waits.
    assert found.ms_median == pytest.approx(1.25 * ms + 3e-3 / max(1, int(50 / (1.1 * ms))), rel=1e-4)
    assert found.ms_iqr == 0.0
    assert (found.clock_mhz, found.power_w) == CAPPED
    settled = [begin for begin, _, state in gpu.kernels if state == CAPPED]
    assert settled[0] == pytest.approx(SETTLED, abs=3e-3 * ms)
    turn = timing.SETTLING_SECONDS + seconds / 2
    assert 3 * turn <= gpu.now <= 3 * (turn + 2 * max(0.065, 2e-3 * ms))
    assert gpu.done <= gpu.now  # nothing was counted that had not run yet


def test_who_is_sustained_first_has_no_other_time(gpu: SimulatedGpu) -> None:
    calls = {name: gpu.call(2.0, uneven_ms=0.1) for name in "abc"}
    found = timing.sustained(calls, dict.fromkeys(calls, 2.0))
    assert list(found) == list(calls)
    assert [time.ms_median for time in found.values()] == pytest.approx([2.0] * 3, rel=1e-6)


def test_a_sustained_time_is_of_two_seconds_unless_told_otherwise(gpu: SimulatedGpu) -> None:
    timing.sustained({"call": gpu.call(1.0)}, {"call": 1.0})
    turns = timing.SUSTAINED_TURNS
    of_turn = timing.SETTLING_SECONDS + timing.SUSTAINED_SECONDS / turns
    assert gpu.now == pytest.approx((1 + turns) * of_turn, abs=0.1 * (1 + turns))
    assert (timing.SUSTAINED_SECONDS, turns) == (2.0, 4)


# The host


@pytest.mark.parametrize("ms", [0.001, 0.5])
@pytest.mark.parametrize("host_us", [1.7, 4.0, 35.0])
def test_host_time_is_that_of_one_call(host_us: float, ms: float, gpu: SimulatedGpu) -> None:
    """Whether the host or the GPU is the slower one."""
    assert timing.host_microseconds(gpu.call(ms, host_us=host_us)) == exactly(host_us)
    assert len(gpu.kernels) == 20 * 500
    assert gpu.done <= gpu.now  # nothing runs into what is measured next


def test_host_time_is_of_the_least_disturbed_round(gpu: SimulatedGpu) -> None:
    def call() -> None:
        round_ = len(gpu.kernels) // 7
        gpu.launch(0.01, host_us=5.0 if round_ == 2 else 8.0 + round_)

    assert timing.host_microseconds(call, calls=7, rounds=5) == exactly(5.0)
    assert len(gpu.kernels) == 7 * 5
