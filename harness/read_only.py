"""What decode's loads take alone: its kernel with the same slices, loads and ring, whose warps wait for every
chunk and give its place back, and compute and write nothing. The yardstick of how much of a call is reading.
"""

import functools

import cutlass.cute as cute
from cutlass import Float32, Int32

from hopper_attention.kernels.decode import Decode, arrive, compile_decode
from hopper_attention.kernels.device.cache_loads import Inputs, Ring
from hopper_attention.kernels.device.constants import WARP
from hopper_attention.kernels.device.merging import Outputs, Shared


class ReadOnly(Decode):
    """For caches whose sequences have no lengths of their own, in no clusters."""

    @cute.jit
    def consume(self, inputs: Inputs, outputs: Outputs, ring: Ring, shared: Shared, scale: Float32):
        tidx, _, _ = cute.arch.thread_idx()
        self.make_barriers(cute.arch.make_warp_uniform(tidx // WARP), ring, shared)
        work = self.loads.work(inputs, inputs.mQ.shape[2], inputs.mK.shape[2])
        _, _, at, end, batch, columns, entry, entries = self.list.own_slice(work)
        self.loads.wait_for_inputs()
        done, turn = Int32(0), Int32(0)
        while at < end:
            n, _, count = self.list.segment(work, entry, entries, end - at, work.seqlen_kv)
            if count > 0:
                cute.arch.mbarrier_wait(ring.q_full, turn & 1)
                arrive(ring.q_empty)
            for i in range(count, unroll=1):
                stage, phase = (done + i) % self.stages, (done + i) // self.stages & 1
                cute.arch.mbarrier_wait(ring.full_k + stage, phase)
                cute.arch.mbarrier_wait(ring.full_v + stage, phase)
                arrive(ring.empty + stage)
            if count > 0:
                done += count
                turn += 1
            at, batch, columns, entry, entries = self.list.advance(
                work, at, end, batch, columns, entry, entries, n
            )


@functools.cache
def compile_read_only(head_dim: int, dtype: str) -> object:
    """For 8 rows and the arguments of such a kernel of decode. Needs no GPU."""
    return compile_decode(ReadOnly(head_dim, dtype, 8, lengths=False))
