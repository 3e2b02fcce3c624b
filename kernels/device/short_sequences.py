"""Packed sequences of up to one tile of keys each (bwd4_one): tile i is sequence i, so that nothing lists
tiles, as `tile_list` does for others. Where a sequence lies is read from its lengths."""

import cutlass.cute as cute

from .tile_list import ListTiles


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
