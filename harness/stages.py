"""Any stage of the ladder as a PyTorch call, and the tensors of its launch: what checks and benchmarks
run. Every wrong input is refused before a launch."""

import math

import torch

from harness import quantized
from hopper_attention import production_fp8
from hopper_attention.checks import (
    check_device,
    check_layout,
    check_layouts,
    check_like,
    gradient_problem_of,
    like_o,
    problem_of,
)
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Scratch, Tensors
from hopper_attention.launch import BACKWARD, FORWARD, compile_stage


def refuse(stage_id: str, problem: Problem) -> None:
    """Raise ValueError with the stage's reason when it does not support `problem`."""
    _, module = ladder.load(stage_id)
    if reason := module.supports(problem):
        raise ValueError(f"{stage_id} {reason}")


def workspace_bytes(spec: Scratch) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in spec.values())


def check_memory(stage: str, problem: Problem, device: torch.device) -> None:
    """Raise MemoryError when the stage's scratch does not fit."""
    found, module = ladder.load(stage)
    needed = workspace_bytes(module.workspace(problem, **found.options))
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > free:
        raise MemoryError(
            f"{stage} needs {needed / 1e9:.1f} GB of scratch for {problem}, {free / 1e9:.1f} GB are free"
        )


def starts_at_zero(name: str, dtype: str) -> bool:
    """Whether a scratch tensor is zero before every launch, and left so by the kernel (`allocate`)."""
    return name.startswith("zero_") or not dtype.startswith("float")


def allocate(
    module: object,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None = None,
    **options: object,
) -> Tensors:
    """Uninitialised outputs and scratch of the forward stage in `module` for inputs q, k, v; `out` is used
    for O. `options` are the stage's, which scratch may depend on.

    Scratch starts uninitialised, with two exceptions that start at zero and that every kernel leaves at zero,
    so that the next launch finds them so: integers, which are counters and semaphores, and tensors whose name
    begins with "zero_", into which a kernel accumulates.
    """
    o = q.new_empty((*q.shape[:3], problem.dims[1])) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    scales, signs = (), None
    if problem.reads_codes:
        q, k, v, scales = quantized.operands(q, k, v, in_rows=problem.direction == "fp8_rows")
    elif problem.in_fp8:
        signs = production_fp8.signs(problem.head_dim).to(q.device)
    scratch = scratch_of(module, problem, q.device, options)
    return Tensors(q, k, v, o, lse, scratch, scales=scales, signs=signs)


def allocate_backward(
    module: object,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    **options: object,
) -> Tensors:
    """Uninitialised gradients and scratch of the backward stage in `module`; `out` is used for dQ, dK, dV.
    The scratch and `options` are as `allocate`'s."""
    if out is None:
        out = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return Tensors(q, k, v, o, lse, scratch_of(module, problem, q.device, options), do, *out)


def scratch_of(
    module: object, problem: Problem, device: torch.device, options: dict[str, object]
) -> dict[str, torch.Tensor]:
    """A stage's scratch, as `allocate` says."""
    return {
        name: (torch.zeros if starts_at_zero(name, dtype) else torch.empty)(
            shape, dtype=getattr(torch, dtype), device=device
        )
        for name, (shape, dtype) in module.workspace(problem, **options).items()
    }


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
    found, module = ladder.load(stage)
    direction = "fwd" if found.direction == "bwd" else found.direction  # which `refuse` then names
    problem = problem_of(q, k, v, causal, top_left).with_(direction=direction)
    refuse(stage, problem)
    check_device(stage, q)
    check_layouts(q=q, k=k, v=v)
    if out is not None:
        check_like("out", out, "q", like_o(q, v))
        check_layout("out", out, written=True)
    check_memory(stage, problem, q.device)
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
    problem = gradient_problem_of(do, q, k, v, o, lse, causal, top_left)
    refuse(stage, problem)
    check_device(stage, q)
    check_layouts(q=q, k=k, v=v, o=o, do=do)
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 3:
            raise TypeError("out must be a tuple of three tensors: dq, dk and dv")
        for name, x, like_name, like in zip(("dq", "dk", "dv"), out, "qkv", (q, k, v)):
            check_like(name, x, like_name, like)
            check_layout(name, x, written=True)
        if len({x.data_ptr() for x in out if x.numel()}) < sum(x.numel() > 0 for x in out):
            raise ValueError("dq, dk and dv must not share memory")
    check_memory(stage, problem, q.device)
    found, module = ladder.load(stage)
    inputs = (x.detach() for x in (q, k, v, o, lse, do))
    tensors = allocate_backward(module, problem, *inputs, out, **found.options)
    return module, compile_stage(stage, problem), tensors


def forward(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of `hopper_attention.attention` by the kernel of a stage. The arguments are `prepare`'s."""
    module, compiled, tensors = prepare(*inputs, **options)
    with torch.cuda.device(tensors.q.device):
        module.run_kernel(compiled, tensors)
    return tensors.o, tensors.lse


def backward(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of `hopper_attention.attention_backward` by the kernel of a stage. The arguments are
    `prepare_backward`'s."""
    module, compiled, tensors = prepare_backward(*inputs, **options)
    with torch.cuda.device(tensors.q.device):
        if tensors.q.numel() and tensors.k.numel():
            module.run_kernel(compiled, tensors)
        else:  # no query or no key: no output that an input could have changed, and nothing to launch
            for x in tensors.outputs.values():
                x.zero_()
    return tuple(tensors.outputs.values())
