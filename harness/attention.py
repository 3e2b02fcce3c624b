"""`attention(q, k, v)`: any forward stage as a PyTorch call, with every wrong input refused before a
launch."""

import functools

import torch

import kernels
from harness.inputs import Tensors, allocate, workspace_bytes
from harness.problem import DTYPES, Problem

VECTOR_BYTES = 16  # every stage reads rows in 16-byte accesses or by TMA, which asks for the same


def problem_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> Problem:
    """The `Problem` of tensors (batch, heads, seqlen, head_dim).

    Raises TypeError for what is not a tensor or has another dtype, ValueError for shapes that do not belong
    together.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
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
    """The stage compiled for `problem`'s head_dim, causal flag and dtype; one compile serves every other
    extent."""
    return _compile(stage_id, problem.head_dim, problem.causal, problem.dtype)


@functools.cache
def _compile(stage_id: str, head_dim: int, causal: bool, dtype: str) -> object:
    stage, module = kernels.load(stage_id)
    any_shape = Problem.square(1, 1, 1, head_dim, causal, dtype=dtype, direction=stage.direction)
    return module.compile_kernel(any_shape, **stage.options)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    stage: str = "k6",
    out: torch.Tensor | None = None,
) -> tuple[object, object, Tensors]:
    """Check everything, compile and allocate: (module, compiled, tensors), ready for `module.run_kernel`.

    Raises TypeError or ValueError for inputs the stage does not take, MemoryError when its scratch does not
    fit.
    """
    problem = problem_of(q, k, v, causal)
    refuse(stage, problem)
    if not q.is_cuda:
        raise ValueError(f"q, k and v must be on a CUDA device, not {q.device}")
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        raise ValueError(
            f"{stage} is machine code for sm_90a (Hopper); {torch.cuda.get_device_name(q.device)} is not"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_layout(name, x)
    if out is not None:
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out must be a torch.Tensor, not {type(out).__name__}")
        if (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
            raise ValueError(f"out must be like q: {tuple(q.shape)} {q.dtype} on {q.device}")
        check_layout("out", out, written=True)
    _, module = kernels.load(stage)
    needed, free = workspace_bytes(module.workspace(problem)), torch.cuda.mem_get_info(q.device)[0]
    free += torch.cuda.memory_reserved(q.device) - torch.cuda.memory_allocated(q.device)
    if needed > free:
        raise MemoryError(
            f"{stage} needs {needed / 1e9:.1f} GB of scratch for {problem}, {free / 1e9:.1f} GB are free"
        )
    tensors = allocate(module, problem, q, k, v, out)
    return module, compile_stage(stage, problem), tensors


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    stage: str = "k6",
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ/√d)·v by the kernel of `stage`, on PyTorch's current stream.

    q, k, v: (batch, heads, seqlen, head_dim), rows 16-byte aligned and contiguous, any other strides. Returns
    o like q, with `return_lse` also the natural-log logsumexp of each row's scaled scores, fp32 (batch,
    heads, seqlen). `out` receives o instead of a new tensor. Raises TypeError, ValueError or MemoryError
    before anything is launched.
    """
    module, compiled, tensors = prepare(q, k, v, causal=causal, stage=stage, out=out)
    with torch.cuda.device(q.device):
        module.run_kernel(compiled, tensors)
    return (tensors.o, tensors.lse) if return_lse else tensors.o
