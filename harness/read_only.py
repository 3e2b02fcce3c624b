"""What decode's loads take alone: its kernel with the same slices, loads and ring, whose warps wait for every
chunk and give its place back, and compute and write nothing. The yardstick of how much of a call is reading.
"""

import functools

import cutlass.cute as cute
from cutlass import Int32

from hopper_attention.kernels.decode import Decode, arrive, compile_decode
from hopper_attention.kernels.device.constants import WARP


class ReadOnly(Decode):
    """For caches whose sequences have no lengths of their own, in no clusters."""

    @cute.jit
    def consume(
        self, mQ, mK, mV, mO, mLSE, mLengths, mTable, mNewK, mNewV, mKScale, mVScale, mPart, mPartLSE,
        mArrived, scale, left, sQ, sK, sV, sO, sStats, rings, sent, added, group, blocks, sizes,
    ):  # fmt: skip
        full_k, full_v, empty, q_full, q_empty = rings
        tidx, _, _ = cute.arch.thread_idx()
        self.make_barriers(cute.arch.make_warp_uniform(tidx // WARP), rings, sent)
        batch_size, _, seqlen_q, _ = mQ.shape
        flat = mK.shape[2], added, seqlen_q, left
        slice_ = self.list.own_slice(mLengths, flat, batch_size, sizes)
        _, _, at, end, batch, columns, entry, entries = slice_
        self.wait_for_inputs()
        done, turn = Int32(0), Int32(0)
        while at < end:
            n, _, count = self.list.segment(entry, entries, end - at, mK.shape[2], seqlen_q, left)
            if count > 0:
                cute.arch.mbarrier_wait(q_full, turn & 1)
                arrive(q_empty)
            for i in range(count, unroll=1):
                stage, phase = (done + i) % self.stages, (done + i) // self.stages & 1
                cute.arch.mbarrier_wait(full_k + stage, phase)
                cute.arch.mbarrier_wait(full_v + stage, phase)
                arrive(empty + stage)
            if count > 0:
                done += count
                turn += 1
            at, batch, columns, entry, entries = self.list.behind(
                mLengths, flat, sizes[2], at, end, batch, columns, entry, entries, n
            )


@functools.cache
def compile_read_only(head_dim: int, dtype: str) -> object:
    """For 8 rows and the arguments of such a kernel of decode. Needs no GPU."""
    return compile_decode(ReadOnly(head_dim, dtype, 8, lengths=False))
