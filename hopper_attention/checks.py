"""What the public calls refuse, before anything is compiled, allocated or launched."""

import math
from numbers import Real

import torch

from .kernels.contract import DTYPES, Problem

VECTOR_BYTES = 16  # every stage reads rows in 16-byte accesses or by TMA, which asks for the same


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, top_left: bool = False
) -> Problem:
    """The `Problem` of tensors (batch, heads, seqlen, head_dim).

    Raises TypeError for what is not a tensor or has another dtype, ValueError for shapes that do not belong
    together, and as `Problem` does for `top_left`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, heads, seqlen, head_dim), not {x.dim()}")
        if str(x.dtype).removeprefix("torch.") not in DTYPES:
            raise TypeError(
                f"{name} must be {' or '.join(DTYPES)}, not {str(x.dtype).removeprefix('torch.')}"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, not {q.device}, {k.device} and {v.device}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, not {tuple(k.shape)} and {tuple(v.shape)}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head_dim")
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"the {q.shape[1]} query heads must be a multiple of the {k.shape[1]} key/value heads"
        )
    return Problem(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_kv=k.shape[2],
        head_dim=q.shape[3],
        causal=bool(causal),
        dtype=str(q.dtype).removeprefix("torch."),
        top_left=top_left,
    )


def gradient_problem_of(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool = False,
    top_left: bool = False,
) -> Problem:
    """The backward `Problem` of tensors as `problem_of` takes them, with o, lse and o's gradient. Raises as
    that does."""
    problem = problem_of(q, k, v, causal, top_left).with_(direction="bwd")
    check_like("o", o, "q", q)
    check_like("do", do, "q", q)
    check_lse("lse", lse, q)
    return problem


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")


def check_like(name: str, x: object, like_name: str, like: torch.Tensor) -> None:
    """Raise unless `x` is a tensor of the shape, dtype and device of `like`."""
    check_tensor(name, x)
    if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
        raise ValueError(
            f"{name} must be like {like_name}: {tuple(like.shape)} {like.dtype} on {like.device}, "
            f"not {tuple(x.shape)} {x.dtype} on {x.device}"
        )


def check_scale(softmax_scale: float | None, head_dim: int) -> float | None:
    """`softmax_scale`, or None where it is 1/√head_dim, which kernels have as a constant."""
    if softmax_scale is None:
        return None
    if not isinstance(softmax_scale, Real):
        raise TypeError(f"softmax_scale must be a number, not {type(softmax_scale).__name__}")
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite, not {softmax_scale}")
    return None if softmax_scale in (head_dim**-0.5, 1 / math.sqrt(head_dim)) else float(softmax_scale)


def check_lse(name: str, lse: object, q: torch.Tensor) -> None:
    """Raise unless `lse` has a number for each row of `q`: fp32 (batch, heads, seqlen_q), contiguous if it
    is the lse itself."""
    check_tensor(name, lse)
    if lse.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, not {str(lse.dtype).removeprefix('torch.')}")
    if (lse.shape, lse.device) != (q.shape[:3], q.device):
        raise ValueError(
            f"{name} must be (batch, heads, seqlen_q) = {tuple(q.shape[:3])} on {q.device}, "
            f"not {tuple(lse.shape)} on {lse.device}"
        )
    if name == "lse" and not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, its strides are {lse.stride()}")


def check_layout(name: str, x: torch.Tensor, written: bool = False) -> None:
    """Raise ValueError unless the rows of `x` are contiguous and 16-byte aligned, and, if `written`, no two
    elements share memory."""
    vector = VECTOR_BYTES // x.element_size()
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, its stride there is {x.stride(-1)}"
        )
    if bad := [stride for stride in x.stride()[:-1] if stride % vector]:
        raise ValueError(
            f"{name} has stride {bad[0]}: strides must be multiples of {vector} elements (16 bytes)"
        )
    if x.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"{name} starts {x.data_ptr() % VECTOR_BYTES} bytes past a 16-byte boundary: align it"
        )
    reach = 1  # elements spanned by the dimensions of smaller stride
    for stride, extent in sorted(zip(x.stride(), x.shape)) if written else ():
        if extent > 1 and stride < reach:
            raise ValueError(f"{name} is written and must not overlap itself, as with stride {stride} here")
        reach = max(reach, stride * (extent - 1) + 1)


def check_layouts(**tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        check_layout(name, x)


def check_device(stage: str, q: torch.Tensor) -> None:
    if not q.is_cuda:
        raise ValueError(f"q, k and v must be on a CUDA device, not {q.device}")
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        raise ValueError(
            f"{stage} is machine code for sm_90a (Hopper); {torch.cuda.get_device_name(q.device)} is not"
        )
