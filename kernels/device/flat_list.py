"""All keys of all sequences as one list of chunks, and the equal, contiguous slice of it that is a CTA's.

    sequence 0: kv head 0, chunks 0 1 2 | kv head 1, chunks 0 1 2 | sequence 1: kv head 0, chunks 0 … 6 | …
    CTA                    0 0 0             0 1 1                                      1 1 2 2 2 2 3

A sequence stands in it once for every *column*: a kv head, and a block of its rows where they are too many
for one CTA. The lengths are on the device, and every warp computes from them where its CTA's slice begins.
With `unit` chunks to an entry, a CTA's slice is of whole entries, and what is computed of a sequence does not
depend on the others.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from .constants import WARP


@dataclass(frozen=True)
class FlatList:
    """What a plan follows from; `first_chunk` and the rest are asked while tracing."""

    chunk: int  # keys
    unit: int  # chunks of an entry that is never cut; 0: a chunk, and CTAs merge as many as they have
    lengths: bool  # whether sequences have lengths of their own
    appends: bool  # whether keys come to those that the length counts
    window: bool  # whether a query sees no further back than so many keys
    sms: int  # CTAs

    def length(self, mLengths, seqlen_kv, added, batch):
        """Keys of a sequence, of which `added` are new."""
        length = cute.arch.make_warp_uniform(mLengths[batch]) if self.lengths else Int32(seqlen_kv)
        return length + added if self.appends else length

    def first_chunk(self, length, seqlen_q, left):
        """The chunk with the first key that is seen: the first query sees `left` keys besides the one at its
        own place."""
        if not self.window:
            return Int32(0)
        return cutlass.max(0, length - seqlen_q - left) // self.chunk

    def chunks_of(self, length, seqlen_q, left):
        """How many chunks of a sequence are read: one, which is not loaded, if it has no key, since somebody
        must say so."""
        return cutlass.max(1, cute.ceil_div(length, self.chunk) - self.first_chunk(length, seqlen_q, left))

    def entries_of(self, chunks):
        return cute.ceil_div(chunks, self.unit) if self.unit else chunks

    @cute.jit
    def entries_or_none(self, mLengths, added, seqlen_q, left, batch):
        entries = Int32(0)
        if batch < mLengths.shape[0]:
            length = mLengths[batch]
            if const_expr(self.appends):
                length = length + added
            entries = self.entries_of(self.chunks_of(length, seqlen_q, left))
        return entries

    @cute.jit
    def own_slice(self, mLengths, seqlen_kv, added, seqlen_q, left, batch_size, columns):
        """(entries of a slice, where this CTA's begins and ends; batch, column and entry there, and how many
        entries that column has)."""
        cta, _, _ = cute.arch.block_idx()
        if const_expr(not self.lengths):
            length = self.length(mLengths, seqlen_kv, added, 0)
            entries = self.entries_of(self.chunks_of(length, seqlen_q, left))
            total = batch_size * columns * entries
            share = cutlass.max(1, cute.ceil_div(total, self.sms))
            at = cta * share
            batch, rest = at // (columns * entries), at % (columns * entries)
        else:
            lane = cute.arch.lane_idx()
            total = Int32(0)
            for first in range(0, batch_size, WARP, unroll=4):
                total += self.entries_or_none(mLengths, added, seqlen_q, left, first + lane)
            total = columns * cute.arch.warp_reduction_sum(total)
            share = cutlass.max(1, cute.ceil_div(total, self.sms))
            at = cta * share
            # 32 sequences at a time, until one ends behind `at`
            first, before = Int32(0), Int32(0)  # a sequence, and the entries of a column of those before it
            batch, rest, entries = Int32(batch_size), Int32(0), Int32(1)
            while first < batch_size:
                own = self.entries_or_none(mLengths, added, seqlen_q, left, first + lane)
                up_to = own
                for i in range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(up_to, 1 << i)
                    up_to += other if lane >= (1 << i) else 0
                behind = cute.arch.vote_ballot_sync((before + up_to) * columns > at)
                found = cutlass.min(cute.arch.popc((behind & -behind) - 1), WARP - 1)
                entries_there = cute.arch.shuffle_sync(own, found)
                before_there = before + cute.arch.shuffle_sync(up_to, found) - entries_there
                before += cute.arch.shuffle_sync(up_to, WARP - 1)
                if behind != 0:
                    batch, entries, rest = first + found, entries_there, at - before_there * columns
                    first = Int32(batch_size)
                first += WARP
        share, at, total, batch, rest, entries = [
            cute.arch.make_warp_uniform(x) for x in (share, at, total, batch, rest, entries)
        ]
        end = cutlass.min(at + share, total)
        return share, at, end, batch, rest // entries, rest % entries, entries

    @cute.jit
    def behind(
        self, mLengths, seqlen_kv, added, seqlen_q, left, columns, at, end, batch, column, entry, entries, n
    ):  # fmt: skip
        """The place `n` entries further on, which is at most the end of this column."""
        at += n
        entry += n
        if entry == entries:
            entry = Int32(0)
            column += 1
            if column == columns:
                column = Int32(0)
                batch += 1
                if const_expr(self.lengths):
                    if at < end:
                        length = self.length(mLengths, seqlen_kv, added, batch)
                        entries = self.entries_of(self.chunks_of(length, seqlen_q, left))
        return at, batch, column, entry, entries
