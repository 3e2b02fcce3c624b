"""The tensors of a problem: random inputs, poisoned outputs, and the checks every tensor passes before a
launch."""

import math
from dataclasses import dataclass, field

import torch

from harness.problem import Problem


@dataclass
class Tensors:
    """What `run_kernel` reads and writes.

    q, o, do, dq are (B, H, Nq, d), k, v, dk, dv (B, Hkv, Nkv, d), all of one 16-bit type; lse is fp32 (B, H,
    Nq), natural logarithms. A forward stage writes o and lse. A backward stage reads them, and do, and writes
    dq, dk, dv; a row that sees no key comes with o = 0 and lse = −∞ and has gradient zero.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    workspace: dict[str, torch.Tensor] = field(default_factory=dict)
    do: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """What the kernel writes, by name: o and lse, or dq, dk and dv."""
        names = ("o", "lse") if self.do is None else ("dq", "dk", "dv")
        return {name: getattr(self, name) for name in names}


def random_inputs(problem: Problem, device: str = "cuda", seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(q, k, v) ~ N(0, 1), and dO after them when the problem is a backward one.

    Never zeros or small integers: they hide masking errors and make the chip faster.
    """
    generator = torch.Generator(device).manual_seed(seed)
    q_shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    kv_shape = (problem.batch, problem.kv_heads, problem.seqlen_kv, problem.head_dim)
    dtype = getattr(torch, problem.dtype)
    shapes = (q_shape, kv_shape, kv_shape, *([q_shape] if problem.direction == "bwd" else []))
    return tuple(torch.randn(shape, device=device, dtype=dtype, generator=generator) for shape in shapes)


def hopper_gpu() -> bool:
    """Whether the current device can run sm_90a machine code."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def workspace_bytes(spec: dict[str, tuple[tuple[int, ...], str]]) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in spec.values())


def starts_at_zero(name: str, dtype: str) -> bool:
    """Whether a scratch tensor is zero before every launch, and left so by the kernel (`allocate`)."""
    return name.startswith("zero_") or not dtype.startswith("float")


def poison(tensors: Tensors) -> Tensors:
    """Fill outputs and scratch with NaN, so that an element the kernel leaves unwritten, or scratch it reads
    before writing it, cannot pass a check."""
    scratch = [
        x
        for name, x in tensors.workspace.items()
        if not starts_at_zero(name, str(x.dtype).removeprefix("torch."))
    ]
    for x in (*tensors.outputs.values(), *scratch):
        x.fill_(math.nan)
    return tensors


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
    o = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return Tensors(q, k, v, o, lse, _scratch(module, problem, q.device, options))


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
    return Tensors(q, k, v, o, lse, _scratch(module, problem, q.device, options), do, *out)


def _scratch(
    module: object, problem: Problem, device: torch.device, options: dict[str, object]
) -> dict[str, torch.Tensor]:
    return {
        name: (torch.zeros if starts_at_zero(name, dtype) else torch.empty)(
            shape, dtype=getattr(torch, dtype), device=device
        )
        for name, (shape, dtype) in module.workspace(problem, **options).items()
    }
