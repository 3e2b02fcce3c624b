"""Two results of attention to different keys become one: the call of `kernels/merge.py`."""

import torch

from ..checks import name_of
from ..kernels.contract import Problem
from ..launch import kernel_for

FILE = "merge"  # of the kernel


def merge(
    o: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, out: torch.Tensor
) -> None:
    """What attention to both sets of keys gives, from o, lse and other, other_lse of one each: into `out`,
    which may be o, and into lse. o and out are of other's 16-bit type or fp32, (batch, heads, rows,
    head_dim); rows are contiguous. A row that saw no key in either gives o = 0 and lse = −∞."""
    if not out.numel():
        return
    least = Problem.square(1, 1, 1, other.shape[3], False, dtype=name_of(other.dtype))
    wide = {"wide_in": o.dtype == torch.float32, "wide_out": out.dtype == torch.float32}
    with torch.cuda.device(out.device):
        kernel_for(FILE, least, wide)(o, lse, other, other_lse, out)
