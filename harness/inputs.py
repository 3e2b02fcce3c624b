"""The tensors of a problem: random inputs, poisoned outputs, and the checks every tensor passes before a launch."""

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


def workspace_bytes(spec: dict[str, tuple[tuple[int, ...], str]]) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in spec.values())


def allocate(
    module: object,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None = None,
    poison: bool = False,
) -> Tensors:
    """Outputs and the stage's scratch for inputs q, k, v. `poison` fills both with NaN, so that an element the kernel
    leaves unwritten, or a scratch it reads before writing, cannot pass a check."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        x = torch.empty(shape, dtype=dtype, device=q.device)
        return x.fill_(math.nan) if poison else x

    scratch = {
        name: make(shape, getattr(torch, dtype)) for name, (shape, dtype) in module.workspace(problem).items()
    }
    o = make(q.shape, q.dtype) if out is None else out
    return Tensors(q, k, v, o, make(q.shape[:3], torch.float32), scratch)
