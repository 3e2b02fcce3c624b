"""The tensors of a problem: random inputs, poisoned outputs, and the checks every tensor passes before a
launch."""

import math
from dataclasses import dataclass, field

import torch

from harness.problem import Problem


@dataclass
class Tensors:
    """What `run_kernel` reads and writes: q, k, v, o are (B, H, N, d), lse is fp32 (B, H, Nq)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    workspace: dict[str, torch.Tensor] = field(default_factory=dict)


def random_inputs(
    problem: Problem, device: str = "cuda", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v ~ N(0, 1). Never zeros or small integers: they hide masking errors and make the chip faster."""
    generator = torch.Generator(device).manual_seed(seed)
    q_shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    kv_shape = (problem.batch, problem.kv_heads, problem.seqlen_kv, problem.head_dim)
    dtype = getattr(torch, problem.dtype)
    return tuple(
        torch.randn(shape, device=device, dtype=dtype, generator=generator)
        for shape in (q_shape, kv_shape, kv_shape)
    )


def hopper_gpu() -> bool:
    """Whether the current device can run sm_90a machine code."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def workspace_bytes(spec: dict[str, tuple[tuple[int, ...], str]]) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in spec.values())


def poison(tensors: Tensors) -> Tensors:
    """Fill outputs and scratch with NaN, so that an element the kernel leaves unwritten, or scratch it reads
    before writing it, cannot pass a check."""
    scratch = [x for x in tensors.workspace.values() if x.is_floating_point()]
    for x in (tensors.o, tensors.lse, *scratch):
        x.fill_(math.nan)
    return tensors


def allocate(
    module: object,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None = None,
) -> Tensors:
    """Uninitialised outputs and scratch of the stage in `module` for inputs q, k, v; `out` is used for O.

    Integers in the scratch are counters: they start at zero, and every kernel leaves them at zero.
    """
    scratch = {
        name: (torch.empty if dtype.startswith("float") else torch.zeros)(
            shape, dtype=getattr(torch, dtype), device=q.device
        )
        for name, (shape, dtype) in module.workspace(problem).items()
    }
    o = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    return Tensors(q, k, v, o, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device), scratch)
