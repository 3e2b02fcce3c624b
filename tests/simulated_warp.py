"""A warp on plain integers: a function of kernels whose lanes exchange values, run for 32 lanes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

WARP = 32


class _Asked(Exception):
    """A lane has come to an exchange whose outcome is not known yet."""


class Warp:
    """Lanes run one after the other, each up to the first exchange that not all have come to; then what they
    gave there is exchanged, and all begin again, with one more outcome known."""

    def __init__(self) -> None:
        self.outcomes: list[list[int]] = []  # of each exchange, by lane
        self.given: list[int] = []
        self.lane = self.at = 0
        self.way: Callable[[list[int]], list[int]] = list

    def run(self, function: Callable[[], Any]) -> list[Any]:
        """What `function` returns in each lane."""
        self.outcomes.clear()
        while True:
            self.given, found = [], []
            for self.lane in range(WARP):
                self.at = 0
                try:
                    found.append(function())
                except _Asked:
                    assert not found, "some lanes exchange what others do not"
            if found:
                return found
            self.outcomes.append(self.way(self.given))

    def exchange(self, value: int, way: Callable[[list[int]], list[int]]) -> int:
        if self.at == len(self.outcomes):
            self.given.append(int(value))
            self.way = way
            raise _Asked
        self.at += 1
        return self.outcomes[self.at - 1][self.lane]

    # ---- cute.arch ----------------------------------------------------------------------------------------

    def lane_idx(self) -> int:
        return self.lane

    def shuffle_sync(self, value: int, lane: int) -> int:
        assert 0 <= lane < WARP
        return self.exchange(value, lambda values: [values[int(lane)]] * WARP)  # `lane` is the same in all

    def shuffle_sync_up(self, value: int, offset: int, mask_and_clamp: int = 0) -> int:
        return self.exchange(value, lambda values: [values[max(i - offset, i % offset)] for i in range(WARP)])

    def vote_ballot_sync(self, condition: bool) -> int:
        bits = lambda values: sum(bool(x) << i for i, x in enumerate(values))
        return self.exchange(condition, lambda values: [bits(values)] * WARP)

    def warp_redux_sync(self, value: int, kind: str) -> int:
        whole = {"min": min, "add": sum}[kind]
        return self.exchange(value, lambda values: [whole(values)] * WARP)

    def popc(self, value: int) -> int:
        return (int(value) & (2**WARP - 1)).bit_count()

    def clz(self, value: int) -> int:
        return WARP - int(value).bit_length()


@contextmanager
def simulated(module: ModuleType) -> Iterator[Warp]:
    """While this runs, what `module` asks of `cute.arch` a `Warp` answers."""
    warp, real = Warp(), module.cute
    fake = SimpleNamespace(arch=warp, ceil_div=lambda a, b: -(-a // b), jit=real.jit)
    with mock.patch.multiple(module, cute=fake, range_constexpr=range):
        yield warp
