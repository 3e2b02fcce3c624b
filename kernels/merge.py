"""Merge: attention to two sets of keys becomes attention to both.

The idea          O and LSE say all of a row that a merge needs: with weights exp(LSE − max), O is the
                  weighted mean and the LSE the logarithm of the weights' sum (mathematics.md, split and
                  merge). One pass over memory, in fp32.
Supports          O of 16 bits or fp32, in place; head_dim a multiple of 8 up to 256; any strides with
                  contiguous rows.
Note              notes/context_parallel.md, whose steps it joins.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from .contract import Problem
from .device.compiling import ELEMENTS, compile_for_torch, fake_rows
from .device.constants import LN_2, LOG2_E, VECTOR, WARP
from .device.limits import BLOCK
from .device.rows import finite

ROWS_IN_FLIGHT = 4  # of both inputs, a thread


class Merge:
    """A CTA takes 64 rows of a head. The threads of a row have all read its LSE before one of them writes it:
    those of a warp do so together, and where a row's lie in two warps all wait."""

    def __init__(self, head_dim: int):
        self.chunks = head_dim // VECTOR  # lanes that share a row
        self.threads = BLOCK * self.chunks // ROWS_IN_FLIGHT

    @cute.jit
    def __call__(self, mA, mA_lse, mB, mB_lse, mO, stream):
        batch, heads, seqlen, _ = mO.shape
        blocks = cute.ceil_div(seqlen, BLOCK)
        self.kernel(mA, mA_lse, mB, mB_lse, mO, blocks).launch(
            grid=(batch * heads * blocks, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mA, mA_lse, mB, mB_lse, mO, blocks):
        tidx, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        _, heads, seqlen, _ = mO.shape
        head_index, block = tile // blocks, tile % blocks
        batch, head = head_index // heads, head_index % heads
        group, chunk = tidx // self.chunks, tidx % self.chunks

        # Rows past the end read the last row again: loads without branches are all in flight at once.
        fragment = cute.make_layout((VECTOR, ROWS_IN_FLIGHT))  # (column, row)
        rA, rB = [cute.make_rmem_tensor(fragment, mX.element_type) for mX in (mA, mB)]
        rA_lse, rB_lse = [cute.make_rmem_tensor(cute.make_layout(ROWS_IN_FLIGHT), Float32) for _ in range(2)]
        for i in range_constexpr(ROWS_IN_FLIGHT):
            row = cutlass.min(block * BLOCK + group + BLOCK // ROWS_IN_FLIGHT * i, seqlen - 1)
            for mX, mLSE, rX, rLSE in ((mA, mA_lse, rA, rA_lse), (mB, mB_lse, rB, rB_lse)):
                copy_chunk(mX, batch, head, row, chunk, rX[None, i], True)
                rLSE[i] = mLSE[batch, head, row]
        if const_expr(WARP % self.chunks == 0):
            cute.arch.sync_warp()
        else:
            cute.arch.sync_threads()

        for i in range_constexpr(ROWS_IN_FLIGHT):
            row = block * BLOCK + group + BLOCK // ROWS_IN_FLIGHT * i
            largest = cute.arch.fmax(rA_lse[i], rB_lse[i])
            weights = [
                cute.math.exp2((x - finite(largest)) * LOG2_E, fastmath=True) for x in (rA_lse[i], rB_lse[i])
            ]
            total = weights[0] + weights[1]
            inverse = 0.0 if total == 0.0 else 1.0 / total
            merged = rA[None, i].load().to(Float32) * (weights[0] * inverse)
            merged = merged + rB[None, i].load().to(Float32) * (weights[1] * inverse)
            rO = cute.make_rmem_tensor(cute.make_layout(VECTOR), mO.element_type)
            rO.store(merged.to(mO.element_type))
            if row < seqlen:
                copy_chunk(mO, batch, head, row, chunk, rO, False)
                if chunk == 0:
                    mA_lse[batch, head, row] = largest + cute.math.log2(total, fastmath=True) * LN_2


@cute.jit
def copy_chunk(mX, batch, head, row, chunk, rX, load: cutlass.Constexpr):
    """VECTOR columns of a row, in accesses of 16 bytes."""
    for j in range_constexpr(mX.element_type.width // 16):
        size = VECTOR * 16 // mX.element_type.width
        gX = cute.local_tile(mX[batch, head, row, None], (size,), (chunk * (VECTOR // size) + j,))
        part = cute.local_tile(rX, (size,), (j,))
        if const_expr(load):
            cute.autovec_copy(gX, part)
        else:
            cute.autovec_copy(part, gX)


def compile_kernel(problem: Problem, wide_in: bool = False, wide_out: bool = False) -> object:
    """Of a problem its head_dim and dtype; wide is fp32."""
    narrow = ELEMENTS[problem.dtype]
    extents = tuple(cute.sym_int() for _ in range(3))
    o = [
        fake_rows(Float32 if wide else narrow, (*extents, problem.head_dim))
        for wide in (wide_in, False, wide_out)
    ]
    lse = [
        make_fake_tensor(Float32, extents, (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
        for _ in range(2)
    ]
    return compile_for_torch(Merge(problem.head_dim), o[0], lse[0], o[1], lse[1], o[2])
