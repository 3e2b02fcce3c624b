"""Where a sequence's tokens lie on several ranks, and who computes which block of scores when.

A sequence of N tokens is cut into 2P chunks for P ranks. Rank r holds chunks r and 2P−1−r, its *halves*, so
that under a causal mask all ranks have the same work. In step i a rank computes its queries with the keys of
the rank i before it.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import torch

SEQUENCE = 2  # the dimension of q, k and v that is cut
LONG_MESSAGES = 5532  # queries of a key: of fewer, gradients travel for more than half of a block's time


class Rows(IntEnum):
    """Of a rank's two chunks: the first, the second, or both."""

    FIRST = 0
    SECOND = 1
    BOTH = 2

    def of(self, x: torch.Tensor, dim: int = SEQUENCE) -> torch.Tensor:
        if self is Rows.BOTH:
            return x
        half = x.shape[dim] // 2
        return x.narrow(dim, self * half, half)

    @property
    def halves(self) -> tuple["Rows", ...]:
        return (Rows.FIRST, Rows.SECOND) if self is Rows.BOTH else (self,)


class Step(NamedTuple):
    """One block of scores: a rank's own `queries` with `keys` of rank `source`. `causal` masks inside the
    block, whose sides are then equal."""

    source: int
    queries: Rows
    keys: Rows
    causal: bool


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two of 2·ranks chunks of a sequence that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def schedule(rank: int, ranks: int, causal: bool) -> list[Step]:
    """A rank's steps; in step i its keys come from the rank i before it.

    Under a causal mask a rank's own chunks, one behind the other, are masked like one sequence. Of keys from
    a lower rank all queries see the first half and none the second, which lies behind both; those from a
    higher rank lie between the two halves of queries: the second sees all, the first none. Each step is
    2·chunk² scores (the first half of (2·chunk)²), whatever the rank.
    """
    steps = [Step(rank, Rows.BOTH, Rows.BOTH, causal)]
    for i in range(1, ranks):
        source = (rank - i) % ranks
        if not causal:
            steps.append(Step(source, Rows.BOTH, Rows.BOTH, False))
        elif source < rank:
            steps.append(Step(source, Rows.BOTH, Rows.FIRST, False))
        else:
            steps.append(Step(source, Rows.SECOND, Rows.BOTH, False))
    return steps


class Turn(NamedTuple):
    """A step for some of the key heads and their query heads."""

    step: Step
    heads: slice


def first_heads(kv_heads: int, queries: int) -> int:
    """How many key heads of a rank's own block come before its other blocks, in a backward pass: half, or
    where messages are long a third. A key has so many `queries`, of all its query heads.

    Beside the first heads K and V arrive, beside the others dK and dV go home, in fp32 twice as large. That
    takes 2766/queries of the block's own time, by copy engines on NVLink (376 GB/s, 650 TFLOP/s), and no
    more than half of it from 5532 on. Halves have as many tiles, which fill a GPU best.
    """
    return math.ceil(kv_heads / (2 if queries >= LONG_MESSAGES else 3))


def backward_schedule(rank: int, ranks: int, causal: bool, kv_heads: int, first: int) -> list[Turn]:
    """`schedule` in the order of a backward pass; the i-th turn has step i, and one more may follow.

    So many key heads of a rank's own block come first, and the others last, so that there is something to
    compute while keys arrive and while gradients go home. Two calls on fewer heads read and write what one
    does.
    """
    own, *others = schedule(rank, ranks, causal)
    first = first if others else kv_heads
    turns = [Turn(own, slice(0, first)), *(Turn(step, slice(0, kv_heads)) for step in others)]
    return [*turns, Turn(own, slice(first, kv_heads))] if first < kv_heads else turns


def arrivals(rank: int, ranks: int, causal: bool) -> dict[Rows, int]:
    """From how many other ranks gradients come for each half of a rank's keys."""
    steps = [schedule(r, ranks, causal)[(r - rank) % ranks] for r in range(ranks) if r != rank]
    return {half: sum(half in step.keys.halves for step in steps) for half in Rows.BOTH.halves}


def shard(x: torch.Tensor, rank: int, ranks: int, dim: int = SEQUENCE) -> torch.Tensor:
    """A rank's part of a whole sequence along `dim`: its two chunks, one behind the other. Raises ValueError
    unless the length is a multiple of 2·ranks."""
    if x.shape[dim] % (2 * ranks):
        raise ValueError(
            f"{ranks} ranks hold two chunks of a sequence each: its length must be a multiple of "
            f"{2 * ranks}, not {x.shape[dim]}"
        )
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, ranks)], dim)


def unshard(parts: list[torch.Tensor], dim: int = SEQUENCE) -> torch.Tensor:
    """The whole sequence from every rank's part, in the order of ranks: `shard` undone."""
    chunks: list[torch.Tensor | None] = [None] * (2 * len(parts))
    for rank, part in enumerate(parts):
        for i, chunk in zip(chunks_of(rank, len(parts)), part.chunk(2, dim)):
            chunks[i] = chunk
    return torch.cat(chunks, dim)
