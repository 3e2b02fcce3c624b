"""What the public calls refuse, before anything is compiled, allocated or launched."""

import math
from numbers import Real
from typing import Any

import torch

from .kernels.contract import DTYPES, Problem
from .kernels.device.fp8 import quantized_shapes

VECTOR_BYTES = 16  # every stage reads rows in 16-byte accesses or by TMA, which asks for the same
E4M3 = torch.float8_e4m3fn
FP32_LEAST, FP32_MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
CAP_MOST = 1e15  # of a soft cap: fp32 has its square, and its inverse's


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, top_left: bool = False
) -> Problem:
    """The `Problem` of tensors (batch, heads, seqlen, head_dim), of which v's may be another.

    Raises TypeError for what is not a tensor or has another dtype, ValueError for shapes that do not belong
    together, and as `Problem` does for `top_left`.
    """
    _check_qkv(q, k, v, DTYPES, as_wide=False)
    value_dim = None if v.shape[3] == q.shape[3] else v.shape[3]
    return _problem(q, k, causal, top_left, dtype=name_of(q.dtype), value_dim=value_dim)


def _check_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtypes: tuple[str, ...], as_wide: bool = True
) -> None:
    """`as_wide`: values must have the keys' head_dim."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, heads, seqlen, head_dim), not {x.dim()}")
        if name_of(x.dtype) not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(dtypes)}, not {name_of(x.dtype)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, not {q.device}, {k.device} and {v.device}")
    if k.shape[:3] != v.shape[:3] or (as_wide and k.shape != v.shape):
        but = "" if as_wide else " but for head_dim"
        raise ValueError(f"k and v must have one shape{but}, not {tuple(k.shape)} and {tuple(v.shape)}")
    _check_heads(q, k)


def _check_heads(q: torch.Tensor, k: torch.Tensor) -> None:
    if q.shape[3] == 0:
        raise ValueError(f"q {tuple(q.shape)} must have a head_dim that is not 0")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head_dim")
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"the {q.shape[1]} query heads must be a multiple of the {k.shape[1]} key/value heads"
        )


def _problem(q: torch.Tensor, k: torch.Tensor, causal: bool, top_left: bool, **more: Any) -> Problem:
    return Problem(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_kv=k.shape[2],
        head_dim=q.shape[3],
        causal=bool(causal),
        top_left=top_left,
        **more,
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
    like = like_o(q, v)
    check_like("o", o, "q", like)
    check_like("do", do, "q", like)
    check_lse("lse", lse, q)
    return problem


# ---- with a window, a sink, or packed ---------------------------------------------------------------------


def general_problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, top_left: bool, packed: bool
) -> Problem:
    """`problem_of`, or of packed tensors (total, heads, head_dim)."""
    if not packed:
        return problem_of(q, k, v, causal, top_left)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 3:
            raise ValueError(
                f"{name} of packed sequences must have 3 dimensions (total, heads, head_dim), not {x.dim()}"
            )
    return problem_of(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), causal, top_left)


def check_window(window: tuple[int, int], causal: bool, top_left: bool) -> None:
    """Raise unless `window` is (left, right) from −1 on, and no causal mask beside it."""
    left, right = window
    for bound in window:
        if not isinstance(bound, int) or isinstance(bound, bool):
            raise TypeError(f"window_size must be two integers (left, right), not {window!r}")
        if bound < -1:
            raise ValueError(f"window_size must be from −1, no bound, on, not {window!r}")
    if (left, right) != (-1, -1) and (causal or top_left):
        raise ValueError(f"a causal window is (left, 0): window_size is {window!r} beside a causal mask")


def check_sink(sink: object, q: torch.Tensor, heads: int) -> None:
    """Raise unless there is a logit for each query head."""
    check_tensor("learnable_sink", sink)
    if sink.dtype != torch.float32:
        raise TypeError(f"learnable_sink must be float32, not {name_of(sink.dtype)}")
    if (tuple(sink.shape), sink.device) != ((heads,), q.device):
        raise ValueError(
            f"learnable_sink must be (heads,) = ({heads},) on {q.device}, not {tuple(sink.shape)} on "
            f"{sink.device}"
        )
    check_unit_stride("learnable_sink", sink)


def check_packing(q: torch.Tensor, cu_q: object, cu_kv: object, used_q: object, used_kv: object) -> int:
    """How many sequences are packed. Raises unless their integers are where q is, and as many as belong
    together. What they say is device data, which `lengths` looks at if it is asked to."""
    named = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_kv, "seqused_q": used_q, "seqused_k": used_kv}
    for name, x in named.items():
        if x is None and name.startswith("seqused"):
            continue
        check_tensor(name, x)
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {name_of(x.dtype)}")
        if x.dim() != 1 or x.device != q.device:
            raise ValueError(
                f"{name} must have one dimension and be on {q.device}, not {tuple(x.shape)} on {x.device}"
            )
        check_unit_stride(name, x)
    sequences = cu_q.shape[0] - 1
    if sequences < 0:
        raise ValueError("cu_seqlens_q must have an element for each sequence, and one more: it is empty")
    for name, x in named.items():
        wanted = sequences + name.startswith("cu")
        if x is not None and x.shape[0] != wanted:
            raise ValueError(
                f"{name} must have {wanted} elements, as cu_seqlens_q has {sequences + 1}, not {x.shape[0]}"
            )
    return sequences


def check_gradients(
    do: torch.Tensor,
    q: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    packed: bool,
) -> None:
    """Raise unless o, lse and their gradients are as `attention` gives them of q and v."""
    like = like_o(q, v)
    check_like("o", o, "q", like)
    check_like("do", do, "q", like)
    rows = q.transpose(0, 1) if packed else q
    check_lse("lse", lse, rows)
    if dlse is not None:
        check_lse("dlse", dlse, rows)


# ---- in 8 bits --------------------------------------------------------------------------------------------


def rows_problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, top_left: bool, dtype: torch.dtype
) -> Problem:
    """The "fp8_rows" `Problem` of e4m3 tensors in rows, with an output of `dtype`. Raises as `problem_of`."""
    check_output(dtype)
    _check_qkv(q, k, v, (name_of(E4M3),))
    return _problem(q, k, causal, top_left, dtype=name_of(dtype), direction="fp8_rows")


def quantized_problem_of(
    q8: torch.Tensor,
    k8: torch.Tensor,
    vt8: torch.Tensor,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor,
    v_exponent: torch.Tensor,
    causal: bool,
    top_left: bool,
    dtype: torch.dtype,
) -> Problem:
    """The "fp8" `Problem` of what the quantising kernel wrote, or without `q_scale` of what it will have
    written when it has quantised `q8`. Raises TypeError and ValueError for what it cannot have written."""
    check_output(dtype)
    given = {"q8": q8, "q_scale": q_scale} if q_scale is not None else {}
    given |= {"k8": k8, "vt8": vt8, "k_scale": k_scale, "v_exponent": v_exponent}
    for name, x in given.items():
        check_tensor(name, x)
        kind = E4M3 if name in ("q8", "k8", "vt8") else torch.float32
        if x.dtype != kind:
            raise TypeError(f"{name} must be {name_of(kind)}, not {name_of(x.dtype)}")
        if x.device != q8.device:
            raise ValueError(f"{name} must be where q8 is, on {q8.device}, not {x.device}")
    for name, x in (("q8" if q_scale is not None else "q", q8), ("k8", k8)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, heads, seqlen, head_dim), not {x.dim()}")
    _check_heads(q8, k8)
    problem = _problem(q8, k8, causal, top_left, dtype=name_of(dtype), direction="fp8")
    for name, (shape, _) in quantized_shapes(problem).items():
        if name in given and given[name].shape != shape:
            raise ValueError(
                f"{name} must be {shape}, as quantize gives it beside q8 {tuple(q8.shape)} and k8 "
                f"{tuple(k8.shape)}, not {tuple(given[name].shape)}"
            )
    for name in ("q_scale", "k_scale", "v_exponent"):
        if name in given:
            check_unit_stride(name, given[name])
    return problem


def quantizing_problem_of(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> Problem:
    """The `Problem` of 16-bit tensors to be quantised: q, k and v, or k and v, or q; those that are not there
    count as the others. With cos and sin, each row of q and k is turned by one of theirs. Raises as
    `problem_of`."""
    check_parts(q, k, v)
    q, k, v = (q, q, q) if k is None else (k if q is None else q, k, v)
    _check_qkv(q, k, v, DTYPES)
    problem = _problem(q, k, False, False, dtype=name_of(q.dtype), direction="fp8_cast")
    if (cos is None) != (sin is None):
        raise ValueError("rope is cos and sin: one of them is missing")
    for name, x in (("cos", cos), ("sin", sin)) if cos is not None else ():
        check_tensor(name, x)
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, not {name_of(x.dtype)}")
        rows = max(problem.seqlen_q, problem.seqlen_kv)
        if x.dim() != 2 or x.shape[0] < rows or x.shape[1] != problem.head_dim // 2:
            raise ValueError(
                f"{name} must be (at least {rows} rows, head_dim/2 = {problem.head_dim // 2}), "
                f"not {tuple(x.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{name} must be where q and k are, on {q.device}, not {x.device}")
        check_layout(name, x)
    return problem


def check_parts(q: object | None, k: object | None, v: object | None) -> None:
    """Raise ValueError unless all three are there, or k and v, or q."""
    if (k is None) != (v is None):
        raise ValueError("k and v are quantised together: one of them is missing")
    if q is None and k is None:
        raise ValueError("there is nothing to quantise: neither q nor k and v are given")


def check_descale(name: str, x: torch.Tensor | None, problem: Problem, device: torch.device) -> None:
    """Raise unless `x` is None or an fp32 scale of a whole tensor or of each (batch, kv_head). Its value is
    device data, and not looked at."""
    if x is None:
        return
    check_tensor(name, x)
    shape = problem.batch, problem.kv_heads
    if x.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, not {name_of(x.dtype)}")
    if x.numel() != 1 and x.shape != shape:
        raise ValueError(
            f"{name} must be one number or (batch, kv_heads) = {shape}, not of shape {tuple(x.shape)}"
        )
    if x.dim() > 2:
        raise ValueError(f"{name} must have at most 2 dimensions, not {x.dim()}")
    if x.device != device:
        raise ValueError(f"{name} must be where q is, on {device}, not {x.device}")


def check_mask(causal: bool, top_left: bool) -> None:
    """Raise as a problem does, for who has none yet."""
    Problem(1, 1, 1, 1, 1, 64, bool(causal), top_left=top_left)


def check_output(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or name_of(dtype) not in DTYPES:
        shown = name_of(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise TypeError(f"dtype, the output's, must be {' or '.join(DTYPES)}, not {shown}")


def like_o(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, or where values are of another width something else of O's shape, dtype and device."""
    return q if q.shape[-1] == v.shape[-1] else q[..., :1].expand(*q.shape[:-1], v.shape[-1])


# ---- of tensors -------------------------------------------------------------------------------------------


def name_of(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"{name} must not be nested: flash_attn_varlen_func takes packed sequences")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be dense, not {name_of(x.layout)}")


def check_flags(**flags: object) -> None:
    """Raise TypeError for what is neither True nor False, nor a number or a tensor for it."""
    for name, x in flags.items():
        symbol_or_numpys = isinstance(x, (torch.SymBool, torch.SymInt)) or type(x).__module__ == "numpy"
        if not (isinstance(x, (bool, int, torch.Tensor)) or symbol_or_numpys):
            raise TypeError(f"{name} must be True or False, not {x!r}")


def check_one_device(*given: object) -> None:
    """Raise ValueError unless all tensors of these are on one device: for who computes shapes alone, and whom
    one tensor on the meta device calls, whatever the others are."""
    if len(devices := {x.device for x in given if isinstance(x, torch.Tensor)}) > 1:
        raise ValueError(f"tensors must be on one device, not {' and '.join(sorted(map(str, devices)))}")


def check_unit_stride(name: str, x: torch.Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, its stride there is {x.stride(-1)}"
        )


def check_like(name: str, x: object, like_name: str, like: torch.Tensor) -> None:
    """Raise unless `x` is a tensor of the shape, dtype and device of `like`."""
    check_tensor(name, x)
    if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
        raise ValueError(
            f"{name} must be like {like_name}: {tuple(like.shape)} {like.dtype} on {like.device}, "
            f"not {tuple(x.shape)} {x.dtype} on {x.device}"
        )


def check_no_flags(**numbers: object) -> None:
    """Raise TypeError for True and False: what can be said of numbers while a graph is compiled, in which
    others may be symbols."""
    for name, x in numbers.items():
        if isinstance(x, bool):
            raise TypeError(f"{name} must be a number, not bool")


def check_scale(softmax_scale: float | None, head_dim: int = 1) -> float | None:
    """`softmax_scale`, or None where it is 1/√head_dim, which kernels have as a constant. Raises TypeError or
    ValueError for what is no positive finite number."""
    if softmax_scale is None:
        return None
    if not isinstance(softmax_scale, Real) or isinstance(softmax_scale, bool):
        raise TypeError(f"softmax_scale must be a number, not {type(softmax_scale).__name__}")
    if not FP32_LEAST <= softmax_scale <= FP32_MOST / 2:
        raise ValueError(f"softmax_scale must be positive and finite, not {softmax_scale} (in fp32)")
    return None if softmax_scale in (head_dim**-0.5, 1 / math.sqrt(head_dim)) else float(softmax_scale)


def check_softcap(softcap: object) -> float:
    """`softcap` as a float. Raises unless it is 0, for none, or a number that fp32 has, with its square and
    both their inverses."""
    if not isinstance(softcap, Real) or isinstance(softcap, bool):
        raise TypeError(f"softcap must be a number, not {type(softcap).__name__}")
    if softcap != 0.0 and not 1 / CAP_MOST <= softcap <= CAP_MOST:
        raise ValueError(f"softcap must be positive and finite, or 0 for none, not {softcap} (in fp32)")
    return float(softcap)


def check_lse(name: str, lse: object, q: torch.Tensor) -> None:
    """Raise unless `lse` has a number for each row of `q`: fp32 (batch, heads, seqlen_q), or of packed
    sequences (heads, total), contiguous if it is the lse itself."""
    check_tensor(name, lse)
    if lse.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, not {name_of(lse.dtype)}")
    if (lse.shape, lse.device) != (q.shape[:-1], q.device):
        dimensions = "batch, heads, seqlen_q" if q.dim() == 4 else "heads, total"
        raise ValueError(
            f"{name} must be ({dimensions}) = {tuple(q.shape[:-1])} on {q.device}, "
            f"not {tuple(lse.shape)} on {lse.device}"
        )
    if name == "lse" and not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, its strides are {lse.stride()}")


def check_layout(name: str, x: torch.Tensor, written: bool = False) -> None:
    """Raise ValueError unless the rows of `x` are contiguous and 16-byte aligned, and, if `written`, no two
    elements share memory."""
    vector = VECTOR_BYTES // x.element_size()
    check_unit_stride(name, x)
    if bad := [stride for stride in x.stride()[:-1] if stride % vector]:
        raise ValueError(
            f"{name} has stride {bad[0]}: strides must be multiples of {vector} elements (16 bytes)"
        )
    if x.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"{name} starts {x.data_ptr() % VECTOR_BYTES} bytes past a 16-byte boundary: align it"
        )
    if written:
        check_no_overlap(name, x)


def check_no_overlap(name: str, x: torch.Tensor) -> None:
    """Raise ValueError where two elements share memory."""
    reach = 1  # elements spanned by the dimensions of smaller stride
    for stride, extent in sorted(zip(x.stride(), x.shape)):
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
