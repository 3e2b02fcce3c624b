"""What codes of Q, K and V are multiplied by, in a kernel that reads 8 bits: one scale for each head, or one
for each 64 rows.

    of heads      fp32 (batch, kv_heads, 1) each, of Q, K and V
    of blocks     of Q (batch, heads, blocks of 64 queries), of K (batch, kv_heads, blocks of 64 keys), and in
                  V's place the exponents of its blocks: V = V8 · 2^e. Those of a tile of keys come with it,
                  in shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, range_constexpr

from .fp8 import BLOCK


class HeadScales:
    """One of a head."""

    def __init__(self, tile_kv: int, stages: int):
        self.blocks, self.stages = tile_kv // BLOCK, stages  # blocks of a tile of keys, stages of K
        self.bytes = 0  # of shared memory

    def allocate(self, smem) -> cute.Tensor | None:
        """K's scales and V's exponents, by stage."""

    def put(self, k_ring, state, of_kv, kv_block) -> None:
        """Those of a tile of keys to the stage that `rings.put` fills next."""

    def of_tile(self, given, scale_log2, batch, head, first_row, group):
        """What a score of a consumer's tile is multiplied by, but for its block's scale of K, and what O
        is."""
        kv_head, (mQs, mKs, mVs) = head // group, given
        return scale_log2 * mQs[batch, kv_head, 0] * mKs[batch, kv_head, 0], mVs[batch, kv_head, 0]

    def factors(self, qk_scale, sScales, k_get) -> list[tuple]:
        """For each block of keys in a stage: what its scores are multiplied by, and the exponent of its V."""
        return [(qk_scale, None)]


class BlockScales(HeadScales):
    """One of each 64 rows."""

    def __init__(self, tile_kv: int, stages: int):
        super().__init__(tile_kv, stages)
        self.bytes = 8 * self.blocks * stages

    def allocate(self, smem):
        return smem.allocate_tensor(Float32, cute.make_layout((2 * self.blocks, self.stages)), 16)

    @cute.jit
    def put(self, k_ring, state, of_kv, kv_block):
        """Consumers see them as they see the keys: what `rings.put` arrives with at the stage's barrier
        releases them, for every lane has written them."""
        sScales, mKs, mVs = of_kv
        found = cute.make_rmem_tensor(2 * self.blocks, Float32)
        for i in range_constexpr(self.blocks):
            block = cutlass.min(kv_block * self.blocks + i, mKs.shape[0] - 1)
            found[i], found[self.blocks + i] = mKs[block], mVs[block]
        k_ring.sync_object_empty.wait(state.index, state.phase)  # the reads are under way
        cute.autovec_copy(found, sScales[None, state.index])

    @cute.jit
    def of_tile(self, given, scale_log2, batch, head, first_row, group):
        mQs = given[0]
        block = cutlass.min(first_row // BLOCK, mQs.shape[2] - 1)
        return scale_log2 * mQs[batch, head, block], Float32(1.0)

    def factors(self, qk_scale, sScales, k_get):
        rScales = cute.make_rmem_tensor(2 * self.blocks, Float32)
        cute.autovec_copy(sScales[None, k_get.index], rScales)
        return [(qk_scale * rScales[i], rScales[self.blocks + i]) for i in range(self.blocks)]
