"""Packed sequences of up to one tile of keys each. Where all are (bwd4_one), tile i is sequence i, so that
nothing lists tiles, as `tile_list` does for others: where it lies is read from its lengths. Where some are
(bwd4), they come behind the others in one list."""

import cutlass.cute as cute
from cutlass import Int32

from .tile_list import CLASSES, ListBoth, ListTiles


class ShortSequences:
    """Of scratch with whole tiles of so many queries of each sequence."""

    def __init__(self, rows: int):
        self.rows, self.tiles = rows, ListTiles(rows, padded=rows)

    @cute.jit
    def find(self, index, lengths):
        """(start_q, seqlen_q, start_kv, seqlen_kv, where its scratch begins, in tiles of queries) of a
        sequence. `lengths` are what `ListTiles` makes a list of, from mCuQ to total_kv."""
        sequence, _ = self.tiles.read(index, index + 1, lengths)
        return *sequence, (sequence[0] + index * self.rows) // self.rows


class _LastOfKeys(ListTiles):
    """Tiles of keys, those of sequences that have one in the class behind all others. Row 0 of the list has
    how many come before them, and how many there are."""

    @cute.jit
    def class_of(self, sequence):
        found = super().class_of(sequence)
        if sequence[3] <= self.rows:
            found = Int32(CLASSES - 1)
        return found

    @cute.jit
    def fill(self, mList, given, final=0):
        super().fill(mList, given, final)
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.sync_threads()
        if thread == 0:
            every, before = mList[0, 0], mList[0, 1]
            mList[0, 0], mList[0, 1] = before, every


class ListBothApart(ListBoth):
    """`ListBoth`, where sequences of one tile of keys come behind all others in the list of keys' tiles."""

    def __init__(self, queries: int, keys: int):
        super().__init__(queries, keys)
        self.of_keys = _LastOfKeys(keys, of_keys=True, padded=queries, shared_keys=keys)
