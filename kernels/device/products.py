"""Both products of a consumer of 64 queries, S = Q·Kᵀ and O += P·V, and what its thread holds of them."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .query_tiles import ROWS
from .rows import OWN_ROWS, coordinates, in_parts
from .wgmma import by_row, multiply, operand_a


def attention_mmas(dtype: type, tile_kv: int, head_dim: int) -> list[cute.TiledMma]:
    """The WGMMAs of Q·Kᵀ, both operands in shared memory, and of P·V, with P in registers."""
    source, K, MN = warpgroup.OperandSource, OperandMajorMode.K, OperandMajorMode.MN
    return [
        make_trivial_tiled_mma(dtype, dtype, K, major, Float32, (1, 1, 1), (ROWS, n), place)
        for major, n, place in ((K, tile_kv, source.SMEM), (MN, head_dim, source.RMEM))
    ]


class Products:
    """The operands and accumulators of both products, and the rings through which K and V come. MMA, MMA_M,
    … are CuTe's modes: what one instruction takes, and how often along M, N and K. Of an operand in shared
    memory a thread has descriptors.

    Hazard: never an argument of a jit function. The DSL would rebind the members to values of that function,
    which nobody may use after it (notes/gotchas.md, "`TiledMma.set` inside a helper").
    """

    def __init__(self, mma_qk, mma_pv, sQ, sK, sVt, k_ring, v_ring, scores: type = Float32):
        self.mma_qk, self.mma_pv, self.k_ring, self.v_ring = mma_qk, mma_pv, k_ring, v_ring
        tile_kv, columns = cute.size(sK, mode=[0]), cute.size(sVt, mode=[0])
        bits = sK.element_type.width
        thr_qk, thr_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        self.rS = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, tile_kv)), scores)  # ((2,2,kv/8),1,1)
        self.rO = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, columns)), Float32)  # ((2,2,d/8),1,1)
        self.rP = cute.make_rmem_tensor(cute.make_layout(cute.size(self.rS) * bits // 32), Int32)  # (word)
        self.tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))  # (MMA, MMA_M, MMA_K, place)
        self.tSrK = mma_qk.make_fragment_B(thr_qk.partition_B(sK))  # (MMA, MMA_N, MMA_K, stage)
        self.tOrV = mma_pv.make_fragment_B(thr_pv.partition_B(sVt))  # (MMA, MMA_N, MMA_K, stage)
        values = cute.recast_ptr(self.rP.iterator, None, sK.element_type)
        self.tOrP = cute.make_tensor(values, operand_a(self.rS.layout, bits))  # (MMA, MMA_M, MMA_K)


class Rows:
    """The accumulators of `Products` by row, as the softmax takes them: of this thread's two rows the columns
    it holds. The same hazard."""

    def __init__(self, x: Products, parts: int, thread, *lengths, has_excess: bool = False):
        self.S, self.O = by_row(x.rS), by_row(x.rO)  # (row, key) and (row, column of head_dim)
        self.parts = [by_row(part) for part in in_parts(x.rS, parts)]  # (row, key) each, of S left to right
        self.max, self.sum = [cute.make_rmem_tensor(cute.make_layout(OWN_ROWS), Float32) for _ in range(2)]
        self.excess = cute.make_rmem_tensor(cute.make_layout((OWN_ROWS, 1)), Float32)  # `add_rounding`
        self.relative = [self.O, self.excess] if has_excess else [self.O]  # to a row's maximum
        tile_kv = 2 * cute.size(x.rS)  # 64·tile_kv scores of 128 threads
        where_S, first_S = coordinates(x.mma_qk, ROWS, tile_kv, thread)  # (row, key) → its place in the tile
        self.where_S = where_S
        self.limits = where_S, first_S
        self.lengths = lengths  # (seqlen_q, seqlen_kv) where they are the same for all tiles

    def sum_of_tile(self) -> cute.Tensor:
        """A sum (row) that begins anew."""
        total = cute.make_rmem_tensor(self.sum.layout, Float32)
        total.fill(0.0)
        return total


def multiply_qk(x: Products, q_get, k_get) -> None:
    """Issue S = Q·Kᵀ of these places of the rings, as one commit group."""
    tSrQ, tSrK = x.tSrQ[None, None, None, q_get.index], x.tSrK[None, None, None, k_get.index]
    multiply(x.mma_qk, x.rS, tSrQ, tSrK, False)


def multiply_pv(x: Products, v_get, kv_block) -> None:
    """Issue P·V of the tile before `kv_block`, as one commit group: O += P·V, but for the first tile O = P·V,
    since zeros to add to would cost an instruction for two of them."""
    multiply(x.mma_pv, x.rO, x.tOrP, x.tOrV[None, None, None, v_get.index], kv_block > 1)
