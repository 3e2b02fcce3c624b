"""`attention(q, k, v)` and `attention_backward(do, q, k, v, o, lse)`: any stage as a PyTorch call, with every
wrong input refused before a launch. `attention` is differentiable."""

import functools

import torch
from torch.autograd.function import once_differentiable

import kernels
from harness.inputs import Tensors, allocate, allocate_backward, workspace_bytes
from harness.problem import DTYPES, Problem

VECTOR_BYTES = 16  # every stage reads rows in 16-byte accesses or by TMA, which asks for the same
FORWARD = "k6"
BACKWARD = "bwd4"  # what gradients are computed with


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, top_left: bool = False
) -> Problem:
    """The `Problem` of tensors (batch, heads, seqlen, head_dim).

    Raises TypeError for what is not a tensor or has another dtype, ValueError for shapes that do not belong
    together, and as `Problem` does for `top_left`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
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


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")


def _check_like(name: str, x: object, like_name: str, like: torch.Tensor) -> None:
    """Raise unless `x` is a tensor of the shape, dtype and device of `like`."""
    _check_tensor(name, x)
    if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
        raise ValueError(
            f"{name} must be like {like_name}: {tuple(like.shape)} {like.dtype} on {like.device}, "
            f"not {tuple(x.shape)} {x.dtype} on {x.device}"
        )


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


def refuse(stage_id: str, problem: Problem) -> None:
    """Raise ValueError with the stage's reason when it does not support `problem`."""
    _, module = kernels.load(stage_id)
    if reason := module.supports(problem):
        raise ValueError(f"{stage_id} {reason}")


def compile_stage(stage_id: str, problem: Problem) -> object:
    """The stage compiled for `problem`'s head_dim, mask and dtype; one compile serves every other extent."""
    return _compile(stage_id, problem.head_dim, problem.causal, problem.dtype, problem.top_left)


@functools.cache
def _compile(stage_id: str, head_dim: int, causal: bool, dtype: str, top_left: bool) -> object:
    stage, module = kernels.load(stage_id)
    any_shape = Problem.square(
        1, 1, 1, head_dim, causal, dtype=dtype, direction=stage.direction, top_left=top_left
    )
    return module.compile_kernel(any_shape, **stage.options)


def _check_device(stage: str, q: torch.Tensor) -> None:
    if not q.is_cuda:
        raise ValueError(f"q, k and v must be on a CUDA device, not {q.device}")
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        raise ValueError(
            f"{stage} is machine code for sm_90a (Hopper); {torch.cuda.get_device_name(q.device)} is not"
        )


def _check_memory(stage: str, problem: Problem, device: torch.device) -> None:
    """Raise MemoryError when the stage's scratch does not fit."""
    found, module = kernels.load(stage)
    needed = workspace_bytes(module.workspace(problem, **found.options))
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > free:
        raise MemoryError(
            f"{stage} needs {needed / 1e9:.1f} GB of scratch for {problem}, {free / 1e9:.1f} GB are free"
        )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    top_left: bool = False,
    stage: str = FORWARD,
    out: torch.Tensor | None = None,
) -> tuple[object, object, Tensors]:
    """Check everything, compile and allocate: (module, compiled, tensors), ready for `module.run_kernel`.

    Raises TypeError or ValueError for inputs the stage does not take, MemoryError when its scratch does not
    fit.
    """
    problem = problem_of(q, k, v, causal, top_left)
    refuse(stage, problem)
    _check_device(stage, q)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_layout(name, x)
    if out is not None:
        _check_like("out", out, "q", q)
        check_layout("out", out, written=True)
    _check_memory(stage, problem, q.device)
    found, module = kernels.load(stage)
    tensors = allocate(module, problem, q.detach(), k.detach(), v.detach(), out, **found.options)
    return module, compile_stage(stage, problem), tensors


def prepare_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    top_left: bool = False,
    stage: str = BACKWARD,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[object, object, Tensors]:
    """`prepare` for a backward stage."""
    problem = problem_of(q, k, v, causal, top_left).with_(direction="bwd")
    _check_like("o", o, "q", q)
    _check_like("do", do, "q", q)
    _check_tensor("lse", lse)
    if lse.dtype != torch.float32:
        raise TypeError(f"lse must be float32, not {str(lse.dtype).removeprefix('torch.')}")
    if (lse.shape, lse.device) != (q.shape[:3], q.device):
        raise ValueError(
            f"lse must be (batch, heads, seqlen_q) = {tuple(q.shape[:3])} on {q.device}, "
            f"not {tuple(lse.shape)} on {lse.device}"
        )
    refuse(stage, problem)
    _check_device(stage, q)
    for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("do", do)):
        check_layout(name, x)
    if not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, its strides are {lse.stride()}")
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 3:
            raise TypeError("out must be a tuple of three tensors: dq, dk and dv")
        for name, x, like_name, like in zip(("dq", "dk", "dv"), out, "qkv", (q, k, v)):
            _check_like(name, x, like_name, like)
            check_layout(name, x, written=True)
        if len({x.data_ptr() for x in out if x.numel()}) < sum(x.numel() > 0 for x in out):
            raise ValueError("dq, dk and dv must not share memory")
    _check_memory(stage, problem, q.device)
    found, module = kernels.load(stage)
    inputs = (x.detach() for x in (q, k, v, o, lse, do))
    tensors = allocate_backward(module, problem, *inputs, out, **found.options)
    return module, compile_stage(stage, problem), tensors


def _attention(q, k, v, causal: bool, top_left: bool, stage: str, out: torch.Tensor | None = None):
    module, compiled, tensors = prepare(q, k, v, causal=causal, top_left=top_left, stage=stage, out=out)
    with torch.cuda.device(q.device):
        module.run_kernel(compiled, tensors)
    return tensors.o, tensors.lse


class _Differentiable(torch.autograd.Function):
    """Forward by a stage, backward by the stage BACKWARD. LSE is a second output without a gradient."""

    @staticmethod
    def forward(ctx, q, k, v, causal: bool, top_left: bool, stage: str):
        o, lse = _attention(q, k, v, causal, top_left, stage)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mark_non_differentiable(lse)
        ctx.mask = {"causal": causal, "top_left": top_left}
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        try:
            check_layout("do", do)
        except ValueError:  # such as the expanded scalar that sum() hands back
            do = do.contiguous()
        grads = attention_backward(do, *ctx.saved_tensors, **ctx.mask, stage=BACKWARD)
        return *grads, None, None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    top_left: bool = False,
    stage: str = FORWARD,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ/√d)·v by the kernel of `stage`, on PyTorch's current stream.

    q, k, v: (batch, heads, seqlen, head_dim), rows 16-byte aligned and contiguous, any other strides; k and v
    may have fewer heads. Returns o like q, with `return_lse` also the natural-log logsumexp of each row's
    scaled scores, fp32 (batch, heads, seqlen), which carries no gradient. `out` receives o instead of a new
    tensor.

    With `causal` query i sees keys up to i + seqlen_kv − seqlen_q, a mask aligned at the bottom right; one
    that sees none has o = 0 and lse = −∞. With `top_left` besides it sees keys up to i, as PyTorch's
    `is_causal` means it. At equal lengths the two are one mask, and every stage takes either.

    Where autograd is on and an input requires a gradient, o has one, computed by the stage BACKWARD; `out` is
    then refused. Raises TypeError, ValueError or MemoryError before anything is launched.
    """
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v)):
        if out is not None:
            raise ValueError("out cannot be given where an input requires a gradient")
        refuse(BACKWARD, problem_of(q, k, v, causal, top_left).with_(direction="bwd"))
        o, lse = _Differentiable.apply(q, k, v, causal, top_left, stage)
    else:
        o, lse = _attention(q, k, v, causal, top_left, stage, out)
    return (o, lse) if return_lse else o


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    top_left: bool = False,
    stage: str = BACKWARD,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attention` by the kernel of `stage`, on PyTorch's current stream: dq, dk, dv.

    do is the gradient of o; q, k, v, o, lse are what `attention` took and, with `return_lse`, gave. Mask and
    layouts as there, lse contiguous. `out`, three tensors like q, k and v, receives the gradients instead of
    new ones. Raises TypeError, ValueError or MemoryError before anything is launched.
    """
    mask = {"causal": causal, "top_left": top_left}
    module, compiled, tensors = prepare_backward(do, q, k, v, o, lse, **mask, stage=stage, out=out)
    with torch.cuda.device(q.device):
        if q.numel() and k.numel():
            module.run_kernel(compiled, tensors)
        else:  # no query or no key: no output that an input could have changed, and nothing to launch
            for x in tensors.outputs.values():
                x.zero_()
    return tuple(tensors.outputs.values())
