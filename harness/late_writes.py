"""A kernel that lets the next launch begin, and only then writes what that reads: what decode guesses from
what it finds early is then wrong, every time."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_tensor

from hopper_attention.kernels.device.compiling import compile_for_torch

THREADS = 128
CYCLES = 20_000  # 10 µs, in which the next launch's CTAs begin


class LateWrites:
    """To a place, first what will not do; when the next launch may have begun, what counts."""

    @cute.jit
    def __call__(self, place: cute.Tensor, early: cute.Tensor, late: cute.Tensor, stream):
        self.kernel(place, early, late).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, place: cute.Tensor, early: cute.Tensor, late: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        for i in range(tidx, place.shape[0], THREADS, unroll=1):
            place[i] = early[i]
        cute.arch.fence_acq_rel_gpu()
        cute.arch.griddepcontrol_launch_dependents()
        begun = cute.arch.clock64()
        while cute.arch.clock64() - begun < CYCLES:
            pass
        for i in range(tidx, place.shape[0], THREADS, unroll=1):
            place[i] = late[i]


def compile_late_writes() -> object:
    """For three int32 tensors (n,) on the GPU: place, what is written early, what is written late."""
    size = cute.sym_int()
    tensors = (make_fake_tensor(Int32, (size,), (1,), assumed_align=4) for _ in range(3))
    return compile_for_torch(LateWrites(), *tensors)
