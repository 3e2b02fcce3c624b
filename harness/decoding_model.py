"""What `decode` computes, in NumPy: the flat list of chunks, every CTA's slice of it, every warp's share of a
chunk, and how the results are put together. One sequence after the other, in any one floating-point type.

A `Defect` makes one piece wrong, for the tests that the rule of correctness must catch it.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from hopper_attention.kernels.calls_decode import (
    PIECES,
    WARPS,
    chunk_of,
    options_of,
    together_of,
)
from hopper_attention.kernels.contract import Problem

Array = np.ndarray
TILE_Q, GROUP = 16, 16


@dataclass(frozen=True)
class Plan:
    """A kernel's constants, as `Decode` has them."""

    rows: int
    chunk: int
    unit: int = 0
    ctas: int = 132
    together: int = 1  # clusters that read the same keys' columns at the same time
    cluster: int = 1  # CTAs of a cluster, which share every sequence that it reads

    @property
    def clusters(self) -> int:
        return self.ctas // self.cluster

    @property
    def slices(self) -> int:
        """Warps that share a tile of 16 rows; each has keys of its own."""
        return WARPS // max(1, self.rows // TILE_Q)

    @property
    def teams(self) -> int:
        return max(1, self.slices * GROUP // self.chunk)


@dataclass(frozen=True)
class Segment:
    """What a cluster reads of one sequence and column."""

    cluster: int
    batch: int
    column: int
    first: int  # chunk
    chunks: int  # 0 where the sequence has no key
    piece: int  # where its result goes, if it is not all of the sequence
    pieces: tuple[int, ...]  # of the sequence and column, in their order; empty if this is all of it

    def parts(self, ctas: int) -> list[tuple[int, int]]:
        """(first chunk, chunks) of each of the cluster's CTAs."""
        cuts = [self.chunks * rank // ctas for rank in range(ctas + 1)]
        return [(self.first + at, end - at) for at, end in itertools.pairwise(cuts)]


def first_chunk(plan: Plan, length: int, queries: int, left: int | None, added: int = 0) -> int:
    """`added`: new keys, of which none is left out, whoever sees it."""
    return 0 if left is None else max(0, length - max(queries + left, added)) // plan.chunk


def segments(
    plan: Plan, lengths: list[int], columns: int, queries: int = 1, left: int | None = None, added: int = 0
) -> list[Segment]:
    """Every cluster's, in the order in which it works on them."""
    firsts = [first_chunk(plan, n, queries, left, added) for n in lengths]
    chunks = [math.ceil(n / plan.chunk) - first for n, first in zip(lengths, firsts)]
    entries = [max(1, math.ceil(n / (plan.unit or 1))) for n in chunks]
    together, groups = plan.together, columns // plan.together
    share = max(1, math.ceil(groups * sum(entries) / (plan.clusters // together)))
    found, start = [], 0
    for batch, n in enumerate(entries):
        for group in range(groups):
            teams = range(start // share, (start + n - 1) // share + 1)
            if plan.unit:
                cuts = range(start, start + n + 1)
            else:
                cuts = [start, *(team * share for team in teams[1:]), start + n]
            for mine in range(together):
                if plan.unit:
                    pieces = tuple(at * together + mine for at in cuts[:-1])
                else:
                    pieces = tuple((t * together + mine) * PIECES + (i == 0) for i, t in enumerate(teams))
                for i, (at, end) in enumerate(itertools.pairwise(cuts)):
                    entry, width = at - start, plan.unit or 1
                    here = max(0, min(chunks[batch] - entry * width, (end - at) * width))
                    cluster, column = at // share * together + mine, group * together + mine
                    first = firsts[batch] + entry * width
                    of_all = pieces if len(pieces) > 1 else ()
                    found.append(Segment(cluster, batch, column, first, here, pieces[i], of_all))
            start += n
    return sorted(found, key=lambda segment: segment.cluster)


def softmax_piece(scores: Array, values: Array) -> tuple[Array, Array, Array]:
    """(O not yet divided, the largest score, the sum) of rows; 0, −∞ and 0 of a row without a key."""
    largest = scores.max(-1, initial=-np.inf)
    p = np.exp(scores - np.where(np.isfinite(largest), largest, 0)[:, None])
    return p @ values, largest, p.sum(-1)


def combined(parts: list[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    """Pieces of a softmax in their order."""
    largest = np.max([m for _, m, _ in parts], axis=0)
    shift = np.where(np.isfinite(largest), largest, 0)
    weights = [np.exp(m - shift) for _, m, _ in parts]
    o = sum(w[:, None] * o for w, (o, _, _) in zip(weights, parts))
    return o, largest, sum(w * l for w, (_, _, l) in zip(weights, parts))


def of_pieces(pieces: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """(O, LSE) of pieces that are finished themselves: an LSE weighs its O, whose sum is 1."""
    counts = [np.where(np.isfinite(lse), np.ones_like(lse), 0) for _, lse in pieces]
    return finished(*combined([(o, lse, one) for (o, lse), one in zip(pieces, counts)]))


def finished(o: Array, largest: Array, total: Array) -> tuple[Array, Array]:
    """(O, LSE); 0 and −∞ of a row without a key."""
    with np.errstate(divide="ignore"):
        lse = largest + np.log(total)
    return o / np.where(total == 0, 1, total)[:, None], lse


DEFECTS = (
    "a piece dropped",
    "two pieces in each other's place",
    "a piece of the launch before",
    "a page read twice",
    "a length off by one",
    "a team's chunk skipped",
    "a maximum not its piece's",
    "a CTA's result of the sequence before",
)


def decode(
    plan: Plan, q: Array, k: Array, v: Array, lengths: list[int], *, causal: bool = False,
    left: int | None = None, scale: float | None = None, defect: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """q (batch, queries, heads, d), k and v (batch, seqlen, kv heads, d): o like q, lse (batch, heads,
    queries)."""
    batch, queries, heads, d = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    blocks = math.ceil(queries * group / plan.rows)
    scale = d**-0.5 if scale is None else scale
    o, lse = np.full_like(q, np.nan), np.full((batch, heads, queries), np.nan, q.dtype)
    scratch: dict[int, tuple[Array, Array]] = {}
    arrived: dict[tuple[int, int], int] = {}
    before = None  # what the first CTA of a cluster sent last
    for x in segments(plan, lengths, kv_heads * blocks, queries, left):
        head, block = x.column // blocks, x.column % blocks
        rows = np.arange(block * plan.rows, min((block + 1) * plan.rows, queries * group))
        of_query, of_head = rows // group, head * group + rows % group
        length = lengths[x.batch] - (defect == "a length off by one" and lengths[x.batch] > 1)
        ctas = []
        for first_of_cta, chunks in x.parts(plan.cluster):
            parts = []
            for warp in range(plan.slices):
                mine = []
                in_chunk = plan.slices // plan.teams
                team, own = warp // in_chunk, warp % in_chunk
                width = plan.chunk // in_chunk
                for i in range(chunks):
                    if i % plan.teams != team or (defect == DEFECTS[5] and i == chunks - 1):
                        continue
                    first = (first_of_cta + i) * plan.chunk + own * width
                    keys = np.arange(first, min(first + width, length))
                    source = keys - 16 if defect == "a page read twice" and first == 16 else keys
                    scores = q[x.batch, of_query, of_head] @ k[x.batch, source, head].T * scale
                    place = lengths[x.batch] - queries + of_query[:, None]
                    hidden = causal & (keys > place)
                    if left is not None:
                        hidden = hidden | (keys < place - left)
                    scores = np.where(hidden, -np.inf, scores)
                    mine.append(softmax_piece(scores, v[x.batch, source, head]))
                none = (
                    np.zeros((len(rows), d), q.dtype),
                    np.full(len(rows), -np.inf, q.dtype),
                    np.zeros(len(rows)),
                )
                parts.append(combined(mine) if mine else none)
            ctas.append(finished(*combined(parts)))
        if defect == "a CTA's result of the sequence before":
            before, ctas[0] = ctas[0], before or ctas[0]
        result = of_pieces(ctas) if plan.cluster > 1 else ctas[0]
        if x.pieces:
            scratch[x.piece] = result
            where = x.batch, x.column
            arrived[where] = arrived.get(where, 0) + 1
            early = defect == "a piece of the launch before" and arrived[where] == len(x.pieces) - 1
            if arrived[where] < len(x.pieces) and not early:
                continue
            stale = np.zeros_like(result[0]), np.zeros_like(result[1])
            pieces = [scratch.get(piece, stale) for piece in x.pieces]
            if defect == "a piece dropped":
                pieces = pieces[:-1]
            lses = [m for _, m in pieces]
            if defect == "two pieces in each other's place":
                lses[:2] = lses[1::-1]
            if defect == "a maximum not its piece's":
                lses = [lses[0]] * len(lses)
            result = of_pieces([(o_, lse_) for (o_, _), lse_ in zip(pieces, lses)])
            if early:
                arrived[where] = -len(x.pieces)
        o[x.batch, of_query, of_head], lse[x.batch, of_head, of_query] = result
    return o, lse


def attention(
    q: Array, k: Array, v: Array, lengths: list[int], *, causal: bool = False, left: int | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The definition: all scores of a sequence, their softmax, its output."""
    batch, queries, heads, d = q.shape
    group = heads // k.shape[2]
    o, lse = np.zeros_like(q), np.full((batch, heads, queries), -np.inf, q.dtype)
    place = np.arange(queries)[:, None] - queries
    for b, length in enumerate(lengths):
        keys = np.arange(length)
        hidden = causal & (keys > place + length)
        if left is not None:
            hidden = hidden | (keys < place + length - left)
        for h in range(heads):
            scores = q[b, :, h] @ k[b, :length, h // group].T * (d**-0.5 if scale is None else scale)
            piece = softmax_piece(np.where(hidden, -np.inf, scores), v[b, :length, h // group])
            o[b, :, h], lse[b, h] = finished(*piece)
    return o, lse


def plan_of(
    queries: int, heads: int, kv_heads: int, head_dim: int, unit: int = 0, ctas: int = 132
) -> Plan:  # fmt: skip
    """As `calls_decode` chooses for 16-bit keys."""
    problem = Problem(1, heads, kv_heads, queries, 1, head_dim, False, direction="decode")
    options = options_of(problem, True, 0, False, False, False, unit > 0)
    together = together_of(problem, options, ctas)
    return Plan(options["rows"], chunk_of(head_dim, False), unit, ctas, together, options["cluster"])
