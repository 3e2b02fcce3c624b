"""All keys of all sequences as one list of chunks, and the equal, contiguous slice of it that is a CTA's.

A sequence is read by several *columns*: key heads, and of each the blocks of its rows where they are too many
for one CTA. CTAs work in teams of `together`, a column each: keys of neighbouring heads lie next to each
other in memory, and are read at the same time. The list, then, is one of columns `together` at a time:

    sequence 0: heads 0 … 7, chunks 0 1 2 | sequence 1: heads 0 … 7, chunks 0 1 2 3 4 5 6 | …
    team                     0 0 0                                  0 1 1 1 1 2 2

The lengths are on the device, and every warp computes from them where its team's slice begins. With `unit`
chunks to an entry of the list, slices are of whole entries, and what is computed of a sequence does not
depend on the others.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from .constants import WARP


@dataclass(frozen=True)
class Division:
    """What of the division is the same for all CTAs, and computed once; `FastDivmodDivisorV2` divides by it
    without a division."""

    together: cute.FastDivmodDivisorV2  # CTAs of a team, each with a column
    teams: Int32  # of the grid
    column_groups: Int32  # of `together` columns, that a sequence has
    # where all sequences are equally long:
    entries: cute.FastDivmodDivisorV2  # of a column
    of_sequence: cute.FastDivmodDivisorV2  # entries of all its groups of columns
    share: Int32  # entries of a slice


@dataclass(frozen=True)
class Work:
    """The batch that is divided."""

    mLengths: cute.Tensor | None  # (batch,)
    batch_size: Int32
    seqlen_kv: Int32  # of every sequence, where they have no lengths
    added: Int32 | int  # new keys of every sequence
    seqlen_q: Int32
    left: Int32 | None  # keys that a query sees before its own place, with a window
    division: Division

    @property
    def first_key(self) -> tuple[Int32, Int32 | None, Int32 | int]:
        """What the first key that is read follows from, besides the length."""
        return self.seqlen_q, self.left, self.added


@dataclass(frozen=True)
class FlatList:
    """What a plan follows from; `first_chunk` and the rest are asked while tracing."""

    chunk: int  # keys
    unit: int  # chunks of an entry that is never cut; 0: a chunk, and CTAs merge as many as they have
    lengths: bool  # whether sequences have lengths of their own
    appends: bool  # whether keys come to those that the length counts
    window: bool  # whether a query sees no further back than so many keys
    ctas: int = 1  # of a cluster, which has a slice together

    def length(self, work, batch):
        """Keys of a sequence, the new ones among them."""
        if not self.lengths:
            length = Int32(work.seqlen_kv)
        else:
            length = cute.arch.make_warp_uniform(work.mLengths[batch])
        return length + work.added if self.appends else length

    def lanes_place(self, work):
        """Of each lane where the length of one of the first sequences is, of which there must be one; lanes
        without share the last, so that nothing has to ask."""
        return work.mLengths.iterator + cutlass.min(cute.arch.lane_idx(), work.batch_size - 1)

    def first_chunk(self, length, seqlen_q, left, added):
        """The chunk with the first key that is seen, as the first query sees `left` keys besides the one at
        its own place, or the first new one, which are stored whoever sees them."""
        if not self.window:
            return Int32(0)
        keys = seqlen_q + left
        if self.appends:
            keys = cutlass.max(keys, added)
        return cutlass.max(0, length - keys) // self.chunk

    def chunks_of(self, length, seqlen_q, left, added):
        """How many chunks of a sequence are read: one, which is not loaded, if it has no key, since somebody
        must say so."""
        behind = cute.ceil_div(length, self.chunk)
        return cutlass.max(1, behind - self.first_chunk(length, seqlen_q, left, added))

    def entries_of(self, chunks):
        return cute.ceil_div(chunks, self.unit) if self.unit else chunks

    @cute.jit
    def entries_or_none(self, work, batch, seen):
        entries = Int32(0)
        if batch < work.mLengths.shape[0]:
            length = work.mLengths[batch] if const_expr(seen is None) else seen
            if const_expr(self.appends):
                length = length + work.added
            entries = self.entries_of(self.chunks_of(length, *work.first_key))
        return entries

    @cute.jit
    def own_slice(self, work, seen=None):
        """Of this CTA: (its place in its team, entries of a slice, where its team's begins and ends; batch,
        group of columns and entry there, and how many entries there are of them). By what the lanes have
        `seen` of the lengths of at most 32 sequences, or by all of them."""
        cta, _, _ = cute.arch.block_idx()
        batch_size, of_all, column_groups = work.batch_size, work.division, work.division.column_groups
        team, mine = divmod(cta // self.ctas, of_all.together)
        if const_expr(not self.lengths):
            share, entries = of_all.share, of_all.entries.divisor
            at, total = team * share, batch_size * of_all.of_sequence.divisor
            batch, rest = divmod(at, of_all.of_sequence)
            columns, entry = divmod(rest, of_all.entries)
        else:
            lane = cute.arch.lane_idx()
            total = Int32(0)
            if const_expr(seen is not None):
                batch_size = cutlass.min(batch_size, WARP)
            for first in range(0, batch_size, WARP, unroll=4):
                total += self.entries_or_none(work, first + lane, seen)
            total = column_groups * cute.arch.warp_reduction_sum(total)
            share = cutlass.max(1, cute.ceil_div(total, of_all.teams))
            at = team * share
            # 32 sequences at a time, until one ends behind `at`
            first, before = Int32(0), Int32(0)  # a sequence, and the entries of a column of those before it
            batch, rest, entries = Int32(batch_size), Int32(0), Int32(1)
            while first < batch_size:
                own = self.entries_or_none(work, first + lane, seen)
                up_to = own
                for i in range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(up_to, 1 << i)
                    up_to += other if lane >= (1 << i) else 0
                behind = cute.arch.vote_ballot_sync((before + up_to) * column_groups > at)
                found = cutlass.min(cute.arch.popc((behind & -behind) - 1), WARP - 1)
                entries_there = cute.arch.shuffle_sync(own, found)
                before_there = before + cute.arch.shuffle_sync(up_to, found) - entries_there
                before += cute.arch.shuffle_sync(up_to, WARP - 1)
                if behind != 0:
                    batch, entries, rest = first + found, entries_there, at - before_there * column_groups
                    first = Int32(batch_size)
                first += WARP
            columns, entry = Int32(0), rest
            if column_groups > 1:
                columns, entry = rest // entries, rest % entries
        mine, share, at, total, batch, columns, entry, entries = [
            cute.arch.make_warp_uniform(x) for x in (mine, share, at, total, batch, columns, entry, entries)
        ]
        end = cutlass.min(at + share, total)
        return mine, share, at, end, batch, columns, entry, entries

    def segment(self, work, entry, entries, left_of_slice, length):
        """What comes next in a slice, of one sequence and column: (its entries, this CTA's first chunk and
        its chunks). The CTAs of a cluster have equally many, or one more."""
        first = self.first_chunk(length, *work.first_key)
        chunks = cute.ceil_div(length, self.chunk) - first  # 0 without a key
        if self.unit:
            n, own = Int32(1), entry * self.unit
            count = cutlass.min(chunks - own, self.unit)
        else:
            n, own = cutlass.min(entries - entry, left_of_slice), entry
            count = cutlass.min(chunks - own, n)
        first += own
        if self.ctas > 1:
            rank = cute.arch.block_idx_in_cluster()
            begin, end = count * rank // self.ctas, count * (rank + 1) // self.ctas
            first, count = first + begin, end - begin
        return n, first, count

    @cute.jit
    def unchanged(self, work, seen, now):
        """Whether what the lanes have seen is now the same, all lengths among it."""
        return (work.batch_size <= WARP) & cute.arch.vote_all_sync(now == seen)

    @cute.jit
    def advance(self, work, at, end, batch, columns, entry, entries, n):
        """The place `n` entries further on, which is at most the end of these columns."""
        at += n
        entry += n
        if entry == entries:
            entry = Int32(0)
            columns += 1
            if columns == work.division.column_groups:
                columns = Int32(0)
                batch += 1
                if const_expr(self.lengths):
                    if at < end:
                        length = self.length(work, batch)
                        entries = self.entries_of(self.chunks_of(length, *work.first_key))
        return at, batch, columns, entry, entries
