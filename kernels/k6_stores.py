"""How k6's consumers store O and the LSE; and what named barriers a CTA has."""

from enum import IntEnum

import cutlass.cute as cute

from .device.constants import WARPGROUP
from .device.query_tiles import ROWS, QueryTiles
from .device.rows import OWN_ROWS
from .device.stores import WARP_ROWS, WarpStores, await_stores, rounded, store_of_rows, store_warp_rows


class Barrier(IntEnum):
    """Named barriers: the first number of each kind. `k6.FlashAttentionForward` says who comes."""

    CTA = 0
    Q_READ = 1  # + consumer
    LEFT = 5  # + consumer
    PARTS = 9
    FAR = 10  # + consumer
    TURN = 14  # + consumer, but for the last of three at most


class StoringQueries(QueryTiles):
    """Tiles of queries, and how a consumer's 64 rows leave."""

    dtype: type
    q_stages: int  # of each consumer's 64 rows of Q
    o_over_q: bool  # whether O takes their place in shared memory

    q_box, o_box = ROWS, WARP_ROWS  # rows that one TMA loads, or stores

    def store_tile(
        self, O, rO, inverse, o_stores, o_place, q_read, mLSE, lse, place, first_row, end, where
    ) -> None:  # fmt: skip
        """O, the accumulator rO by row, times the inverse of each row's sum; and the LSE. `q_read`: the named
        barrier of the consumer's threads."""
        for r in range(OWN_ROWS):
            O[r, None].store(O[r, None].load() * inverse[r])
        rO16 = rounded(rO, self.dtype)
        # A warp stores its own 16 rows of O: over Q, when all are done with it, or over its last O.
        if self.o_over_q:
            cute.arch.barrier(barrier_id=q_read, number_of_threads=WARPGROUP)
        else:
            await_stores()
        self.store_o(o_stores, rO16, o_place, place)
        if self.q_stages == 1:
            await_stores()
        # After O: the fence of its store would wait for this one (notes/k6.md, "Fewer instructions").
        self.store_lse(mLSE, place, first_row, end, where, lse)

    def store_o(self, o_stores: WarpStores, rO16, o_place, place) -> None:
        """A warp's rows of O, through its place in shared memory."""
        store_warp_rows(o_stores, rO16, o_place, place, self.batch)

    def store_lse(self, mLSE, place, first_row, end, where, lse) -> None:
        """Those of a consumer's rows that lie before `end`."""
        store_of_rows(self.batch.query_values(mLSE, place), first_row, end, where, lse)
