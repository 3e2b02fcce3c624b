"""Packed sequences on several ranks: each sequence is cut for itself, and the ring goes over all at once.

A rank holds two chunks of every sequence, one behind the other, and its sequences are packed as the whole
ones were. For the ring they lie in *halves*: the first chunks of all sequences, then the second ones. What
`zigzag` says of a rank's two halves then holds for packed ones, and a block of scores is attention of packed
sequences: of whole ones, which are put in order for it, or of chunks.
"""

import functools
import itertools

import torch
import torch.nn.functional as F

from .. import ops_policies
from ..policies import as_batch
from . import merging, zigzag
from .block_gradients import Gradient, OneByOne

ROWS = 0  # the dimension of packed tensors that is cut


class Packing:
    """Where the chunks of a rank's packed sequences lie. Nothing is read on the host."""

    def __init__(self, cu_seqlens: torch.Tensor, rows: int, ranks: int = 1):
        """`cu_seqlens` are of the whole sequences, whose lengths are multiples of 2·ranks; a rank has so many
        `rows`, of which those behind the last sequence count for nothing."""
        whole = cu_seqlens // ranks
        self.rows, self.cu_seqlens = rows, {rows: whole, rows // 2: whole // 2}
        whole = F.pad(whole.long(), (0, 1), value=rows)  # rows of no sequence are cut as another one's
        row = torch.arange(rows, device=whole.device)
        sequence = torch.searchsorted(whole, row, right=True) - 1
        begin, chunk = whole[sequence], (whole.diff() // 2)[sequence]
        second = row - begin >= chunk
        self.in_halves = begin // 2 + (row - begin) + torch.where(second, rows // 2 - chunk, 0)
        self.in_order = torch.empty_like(self.in_halves)
        self.in_order[self.in_halves] = row

    def halves(self, x: torch.Tensor, dim: int = ROWS) -> torch.Tensor:
        """Rows that are in order, in halves."""
        return x.index_select(dim, self.in_order)

    def order(self, x: torch.Tensor, dim: int = ROWS) -> torch.Tensor:
        """Rows that are in halves, in order."""
        return x.index_select(dim, self.in_halves)

    # A block's rows are all of a rank's, or one half: chunks, which are in order.

    def unpacked(self, x: torch.Tensor) -> torch.Tensor:
        """A block's (1, heads, rows, head_dim) as packed sequences (rows, heads, head_dim)."""
        x = x[0].transpose(0, 1)
        return self.order(x) if x.shape[ROWS] == self.rows else x

    def repacked(self, x: torch.Tensor) -> torch.Tensor:
        """`unpacked` undone."""
        return as_batch(self.halves(x) if x.shape[ROWS] == self.rows else x)

    def unpacked_lse(self, lse: torch.Tensor | None) -> torch.Tensor | None:
        """A block's (1, heads, rows) as (heads, rows)."""
        if lse is None:
            return None
        return self.order(lse[0], 1) if lse.shape[2] == self.rows else lse[0].contiguous()

    def repacked_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return (self.halves(lse, 1) if lse.shape[1] == self.rows else lse)[None]

    def lengths(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """As the operators are given them, after the sink."""
        return None, self.cu_seqlens[q.shape[ROWS]], self.cu_seqlens[k.shape[ROWS]], None, None

    def forward(self, q, k, v, softmax_scale, causal):
        """`ops.forward` of a block."""
        q, k, v = map(self.unpacked, (q, k, v))
        o, lse = ops_policies.forward(q, k, v, *self.lengths(q, k), softmax_scale, causal)
        return self.repacked(o), self.repacked_lse(lse)

    def backward(self, do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic) -> Gradient:
        """`ops.backward` of a block."""
        do, q, k, v, o = map(self.unpacked, (do, q, k, v, o))
        lse, dlse = map(self.unpacked_lse, (lse, dlse))
        options = softmax_scale, causal, top_left, -1, -1, 0.0, deterministic
        found = ops_policies.backward(do, q, k, v, o, lse, dlse, *self.lengths(q, k), *options)
        return tuple(map(self.repacked, found[:3]))

    def kernels(self, kernels: type, merge=merging.merge):
        """As `context_parallel.Kernels`."""
        return kernels(self.forward, functools.partial(OneByOne, backward=self.backward), merge)


def shard(x: torch.Tensor, cu_seqlens: torch.Tensor, rank: int, ranks: int, dim: int = ROWS) -> torch.Tensor:
    """A rank's part of whole packed sequences along `dim`: of each its two chunks. Their lengths must be
    multiples of 2·ranks."""
    return x.index_select(dim, places(cu_seqlens, rank, ranks))


def places(cu_seqlens: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Where a rank's rows lie among the whole packed ones. Reads the lengths on the host. Raises ValueError
    for lengths that are no multiples of 2·ranks."""
    bounds = cu_seqlens.tolist()
    found = [
        zigzag.shard(torch.arange(begin, end), rank, ranks, 0) for begin, end in itertools.pairwise(bounds)
    ]
    return torch.cat(found).to(cu_seqlens.device) if found else cu_seqlens.new_empty(0)
