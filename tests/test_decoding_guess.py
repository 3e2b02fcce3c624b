"""The first load of decode's producer on a guess, and what becomes of a wrong one: barriers with the one-bit
phase that the hardware has, and producer, TMA and warps as generators that take turns at random. What would
hang a GPU stops here, and so does a warp that takes bytes which are not its chunk's.

The order of loads, waits and arrivals is written down a second time: change both together.
"""

import random
from collections.abc import Callable, Iterator

import pytest

WRONG = "another sequence's"
PATIENCE = 3000  # turns in which nothing happens


class Barrier:
    """An mbarrier: a phase ends with the last of `count` arrivals and of the bytes that are expected."""

    def __init__(self, count: int):
        self.count, self.phase, self.pending, self.bytes = count, 0, count, 0

    def arrive(self, expected: int = 0) -> None:
        assert self.pending > 0, "more arrivals than the barrier was made for"
        self.pending -= 1
        self.complete(-expected)

    def complete(self, arrived: int) -> None:
        self.bytes -= arrived
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def wait(self, parity: int) -> Iterator[None]:
        """Until the phase of this parity has ended: what `try_wait.parity` answers."""
        while self.phase % 2 == parity:
            yield


class Cta:
    """`chunks` of one sequence after another go through `stages` stages to `warps` warps."""

    def __init__(self, chunks: list[int], guess: str | None, defect: str | None, stages: int):
        self.chunks, self.guess, self.defect = chunks, guess, defect
        self.stages, self.warps = stages, 2
        self.full = [[Barrier(1) for _ in range(stages)] for _ in "kv"]
        self.empty = [Barrier(self.warps) for _ in range(stages)]
        self.q_full, self.q_empty = Barrier(1), Barrier(self.warps)
        self.place: list[list[object]] = [[None] * stages for _ in "kv"]
        self.under_way: list[tuple[int, int, object]] = []
        self.taken: list[list[object]] = [[] for _ in range(self.warps)]

    def load(self, stage: int, what: object) -> None:
        for x in range(2):
            self.full[x][stage].arrive(1)
            assert all(load[:2] != (x, stage) for load in self.under_way), "two loads to one place"
            self.under_way.append((x, stage, what))

    def tma(self, chance: random.Random) -> bool:
        """Some load ends; whether there was one."""
        if not self.under_way:
            return False
        x, stage, what = self.under_way.pop(chance.randrange(len(self.under_way)))
        self.place[x][stage] = what
        self.full[x][stage].complete(1)
        return True

    def producer(self) -> Iterator[None]:
        loaded, sent = False, False
        if self.guess:
            self.load(0, WRONG if self.guess == "wrong" else (0, 0))
            loaded = True
            if self.defect == "Q before the lengths":
                self.q_full.arrive()
                sent = True
            yield
            if self.guess == "wrong":
                loaded = False
                if self.defect != "no wait":
                    for x in range(2):
                        yield from self.full[x][0].wait(0)
                if self.defect != "one phase":
                    for x in range(2):
                        self.full[x][0].arrive()
        done, turn = 0, 0
        for sequence, count in enumerate(self.chunks):
            for i in range(count):
                stage, parity = done % self.stages, done // self.stages & 1 ^ 1
                if done >= self.stages:
                    yield from self.empty[stage].wait(parity)
                if done or not loaded:
                    self.load(stage, (sequence, i))
                done += 1
                yield
                if i == 0:
                    yield from self.q_empty.wait(turn & 1 ^ 1)
                    if not (turn == 0 and sent):
                        self.q_full.arrive()
                    turn += 1

    def warp(self, own: int) -> Iterator[None]:
        done = 0
        for turn, count in enumerate(filter(None, self.chunks)):
            yield from self.q_full.wait(turn & 1)
            self.q_empty.arrive()
            for _ in range(count):
                stage, parity = done % self.stages, done // self.stages & 1
                for x in range(2):
                    yield from self.full[x][stage].wait(parity)
                    self.taken[own].append(self.place[x][stage])
                self.empty[stage].arrive()
                done += 1
                yield

    def run(self, chance: random.Random) -> None:
        """Everybody by turns; AssertionError for a hang, and for what a warp should not have taken."""
        actors = [self.producer(), *(self.warp(i) for i in range(self.warps))]
        idle = 0
        while actors or self.under_way:
            i, idle = chance.randrange(len(actors) + 1), idle + 1
            if i == len(actors):
                idle = 0 if self.tma(chance) else idle
            elif next(actors[i], "done") == "done":
                del actors[i]
                idle = 0
            assert idle < PATIENCE, "nobody goes on"
        wanted = [(b, i) for b, count in enumerate(self.chunks) for i in range(count) for _ in "kv"]
        assert all(taken == wanted for taken in self.taken), "not the chunks that were wanted"


def of_each(seed: int, guess: str | None, defect: str | None = None) -> Callable[[], None]:
    chance = random.Random(seed)
    chunks = [chance.randint(0, 5) for _ in range(chance.randint(1, 4))]
    if guess == "right" or defect:  # a guess is of a sequence with keys
        chunks[0] += 1
    return lambda: Cta(chunks, guess, defect, chance.randint(1, 4)).run(chance)


@pytest.mark.parametrize("guess", [None, "right", "wrong"])
def test_every_warp_takes_what_is_its_own(guess: str | None) -> None:
    """Also where a guess was wrong because nothing is left to load."""
    for seed in range(300):
        of_each(seed, guess)()


@pytest.mark.parametrize("defect", ["one phase", "no wait", "Q before the lengths"])
def test_what_the_order_is_for(defect: str) -> None:
    """A drop in another way is seen: without a phase of its own, without waiting, after Q has gone out."""
    seen = 0
    for seed in range(100):
        try:
            of_each(seed, "wrong", defect)()
        except AssertionError:
            seen += 1
    assert seen > 0
