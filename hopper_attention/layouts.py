"""How tensors lie in memory, and how what is allocated beside them is to lie."""

import torch

from .checks import VECTOR_BYTES, check_layout

Dense = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # what is allocated: shape, strides and type


def dense(shape: torch.Size, dtype: torch.dtype) -> Dense:
    return tuple(shape), torch.empty(shape, device="meta").stride(), dtype


def dense_like(x: torch.Tensor, columns: int | None = None) -> Dense:
    """As `torch.empty_like` allocates it, its dimensions in memory in the order of those of x; but for the
    last, if `columns` are given."""
    shape = *x.shape[:-1], x.shape[-1] if columns is None else columns
    like = torch.empty_strided(shape, x.stride(), dtype=x.dtype, device="meta")
    return shape, torch.empty_like(like).stride(), x.dtype


def aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """What inputs of one kind may still differ in."""
    return not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % VECTOR_BYTES


def readable(x: torch.Tensor) -> torch.Tensor:
    """x, or where a kernel cannot read it a copy."""
    try:
        check_layout("x", x)
    except ValueError:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def as_argument(x: torch.Tensor) -> object:
    """A tensor as launches take it without converting it anew in each."""
    import tvm_ffi  # which whoever has a kernel has, and who imports this package need not

    return tvm_ffi.from_dlpack(x)
