"""Which keys a query sees: a mask is an object that main loops ask while they are traced.

Query i sees the keys up to `last_key(i)`, and key j is seen by the queries from `first_query(j)` on: two ways
to say one thing, for loops over keys and for loops over queries. Neither falls as its argument grows, so that
what a tile sees follows from its first and its last row. Both may lie outside the sequence; whoever asks
bounds them by it. Arguments are plain or traced integers alike.

A mask with `hides_first` has another edge: query i sees no key before `first_key(i)`, and key j is seen by no
query behind `last_query(j)`.
"""

from dataclasses import dataclass

from ..contract import Problem
from .limits import bounds


@dataclass(frozen=True)
class Full:
    """Every query sees every key."""

    hides = False  # whether a query and a key inside the sequence may be hidden from each other
    hides_first = False  # whether keys may be hidden from a query that sees others behind them

    def last_key(self, query, seqlen_q, seqlen_kv):
        return seqlen_kv - 1

    def first_query(self, key, seqlen_q, seqlen_kv):
        return 0


@dataclass(frozen=True)
class Causal:
    """Query i sees keys up to i + seqlen_kv − seqlen_q, or with `top_left` up to i."""

    top_left: bool = False
    hides = True
    hides_first = False

    def last_key(self, query, seqlen_q, seqlen_kv):
        return query if self.top_left else query + seqlen_kv - seqlen_q

    def first_query(self, key, seqlen_q, seqlen_kv):
        return key if self.top_left else key - (seqlen_kv - seqlen_q)


@dataclass(frozen=True)
class Window:
    """Query i sees the keys from i + offset − left to i + offset + right; offset is seqlen_kv − seqlen_q. A
    kernel puts the traced integers it is given in the place of left and right."""

    left: object
    right: object
    hides = True
    hides_first = True

    def last_key(self, query, seqlen_q, seqlen_kv):
        return query + seqlen_kv - seqlen_q + self.right

    def first_key(self, query, seqlen_q, seqlen_kv):
        return query + seqlen_kv - seqlen_q - self.left

    def first_query(self, key, seqlen_q, seqlen_kv):
        return key - (seqlen_kv - seqlen_q) - self.right

    def last_query(self, key, seqlen_q, seqlen_kv):
        return key - (seqlen_kv - seqlen_q) + self.left


Mask = Full | Causal | Window


def mask_of(problem: Problem) -> Mask:
    if problem.window is not None:
        return Window(*bounds(problem.window))
    return Causal(problem.top_left) if problem.causal else Full()
