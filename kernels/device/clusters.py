"""Results of the CTAs of a cluster put together, through their shared memories.

The CTAs have keys of their own of the same rows each, and each puts a part of the columns together: of all
rows it is sent those columns by every CTA, itself included, by stores that count on a barrier of the CTA they
go to. CTAs of a cluster are on their SMs at the same time, so they may wait for each other.

There are two places that results go to, by turns. A CTA sends a third time only when it has itself put the
second together, which needs what everybody sent the second time; and nobody does that before having read the
first. So nothing is overwritten that has not been read.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from .rows import finite

TURNS = 2


@dataclass(frozen=True)
class Exchange:
    """Of `ctas` CTAs with `rows` rows each of the same sequence and columns."""

    ctas: int
    rows: int
    head_dim: int

    @property
    def vectors(self) -> int:
        """Four columns each, that a CTA puts together of a row."""
        return self.head_dim // 4 // self.ctas

    @property
    def smem_bytes(self) -> int:
        return 0 if self.ctas == 1 else TURNS * self.rows * (self.head_dim + self.ctas) * 4 + 16

    def allocate(self, smem: object) -> tuple[cute.Tensor, cute.Tensor, cute.Pointer]:
        """What is sent to this CTA: O as (turn, from, row, column), log₂ of sums as (turn, from, row); and a
        barrier for each turn."""
        shape = TURNS, self.ctas, self.rows, 4 * self.vectors
        order = (3, 2, 1, 0)
        sO = smem.allocate_tensor(Float32, cute.make_ordered_layout(shape, order), 16)
        sLSE = smem.allocate_tensor(Float32, cute.make_ordered_layout(shape[:3], (2, 1, 0)), 16)
        return sO, sLSE, smem.allocate_array(Int64, TURNS)

    def initialise(self, sent: tuple) -> None:
        """One lane."""
        for i in range(TURNS):
            cute.arch.mbarrier_init(sent[2] + i, 1)

    @cute.jit
    def send(self, sent, turn, result, lse, row, vector):
        """Four columns of a row, divided by its sum, to the CTA that puts them together."""
        sO, sLSE, full = sent
        own, place = cute.arch.block_idx_in_cluster(), turn % TURNS
        to, inside = vector // self.vectors, vector % self.vectors
        words = cute.recast_tensor(result, Int32)
        quad = cute.local_tile(sO[place, own, row, None], (4,), (inside,))
        cute.arch.store_async_dsmem(
            quad.iterator.align(16), tuple(words[i] for i in range(4)), full + place, to
        )
        if inside == 0:
            word = cute.make_rmem_tensor(cute.make_layout(1), Float32)
            word[0] = lse
            cute.arch.store_async_dsmem(
                sLSE.iterator + cute.crd2idx((place, own, row), sLSE.layout),
                cute.recast_tensor(word, Int32)[0], full + place, to,
            )  # fmt: skip

    @cute.jit
    def wait(self, sent, turn, rows):
        """Until all CTAs have sent their `rows` rows."""
        _, _, full = sent
        tidx, _, _ = cute.arch.thread_idx()
        place = turn % TURNS
        if tidx == 0:
            size = rows * (4 * self.vectors + 1) * (4 * self.ctas)
            cute.arch.mbarrier_arrive_and_expect_tx(full + place, size)
        cute.arch.mbarrier_wait(full + place, turn // TURNS & 1)

    @cute.jit
    def put_together(self, sent, turn, row, vector):
        """Four columns of a row of O of all CTAs, and log₂ of the row's sum."""
        sO, sLSE, _ = sent
        place = turn % TURNS
        largest, total = -Float32.inf, Float32(0.0)
        lses = cute.make_rmem_tensor(cute.make_layout(self.ctas), Float32)
        for i in range_constexpr(self.ctas):
            lses[i] = sLSE[place, i, row]
            largest = cute.arch.fmax(largest, lses[i])
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        part = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        result.fill(0.0)
        for i in range_constexpr(self.ctas):
            weight = cute.math.exp2(lses[i] - finite(largest), fastmath=True)
            total += weight
            cute.autovec_copy(cute.local_tile(sO[place, i, row, None], (4,), (vector,)), part)
            result.store(result.load() + part.load() * weight)
        result.store(result.load() * (0.0 if total == 0.0 else cute.arch.rcp_approx(total)))
        return result, largest + cute.math.log2(total, fastmath=True)
