"""The tensors of a problem: random inputs and poisoned outputs."""

import math
from collections.abc import Callable
from typing import Any

import torch

from harness import quantized
from harness.stages import starts_at_zero
from hopper_attention.kernels.contract import Problem, Tensors

OUTPUTS_HELD = 2  # at once, so that what is freed is not what an earlier call wrote


def random_inputs(problem: Problem, device: str = "cuda", seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(q, k, v) ~ N(0, 1), and dO after them when the problem is a backward one.

    Never zeros or small integers: they hide masking errors and make the chip faster.
    """
    generator = torch.Generator(device).manual_seed(seed)
    (of_keys, of_values), of_q = problem.dims, (problem.batch, problem.heads, problem.seqlen_q)
    of_kv = (problem.batch, problem.kv_heads, problem.seqlen_kv)
    dtype = getattr(torch, problem.dtype)
    shapes = (*of_q, of_keys), (*of_kv, of_keys), (*of_kv, of_values), (*of_q, of_values)
    shapes = shapes if problem.direction == "bwd" else shapes[:3]
    found = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for shape in shapes)
    return as_read(problem.direction, *found)


def as_read(direction: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Inputs as a kernel of this direction can hold them: codes rounded to what they and a power of two say,
    in their own dtype."""
    return tuple(map(quantized.held, inputs)) if direction in ("fp8", "fp8_rows") else inputs


def hopper_gpu() -> bool:
    """Whether the current device can run sm_90a machine code."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def returned_to_poisoned_memory(call: Callable[[], Any]) -> Any:
    """What a call that allocates its outputs returns, a tensor or a tuple with some, of memory that held NaN:
    the allocator hands out again what was freed last, and that would be what an earlier call wrote."""
    held = [call() for _ in range(OUTPUTS_HELD)]
    for found in held:
        for x in found if isinstance(found, tuple) else (found,):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.fill_(math.nan)
    del held, found, x
    return call()


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
