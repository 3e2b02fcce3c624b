"""Inputs on which a tile that is dropped, counted twice or read in another's place shows, at any length."""

import math
from collections.abc import Iterator

import torch

from harness.reference import Gradients, diagonal_offset, reference, reference_gradients
from hopper_attention.kernels.contract import Problem


def needle_inputs(problem: Problem, device: str, amplitude: float = 32.0, seed: int = 0):
    """q, k, v and the key index (N,) that each query row must return exactly.

    Keys are random ±1 words and a query is `amplitude` times the word of its target, so that every other
    key's weight underflows. Targets are the first and last keys of every 16-key tile, hence of any tile that
    is a multiple of 16: a tile that is dropped or read in another's place shows in some row, at any length;
    one that is counted twice shows in the LSE. Raises ValueError where a query sees no key.
    """
    offset = diagonal_offset(problem.seqlen_q, problem.seqlen_kv, problem.top_left)
    if problem.causal and offset < 0:
        raise ValueError(f"{problem}: the first queries see no key, and have no target")
    generator = torch.Generator(device).manual_seed(seed)
    shape = (problem.batch, problem.heads, problem.seqlen_kv, problem.head_dim)
    k = torch.randint(0, 2, shape, device=device, generator=generator).mul(2).sub(1).to(torch.bfloat16)
    v = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
    index = torch.arange(problem.seqlen_kv, device=device)
    needles = index[(index % 16 == 0) | (index % 16 == 15) | (index == problem.seqlen_kv - 1)]
    rows = torch.arange(problem.seqlen_q, device=device)
    visible = (
        torch.searchsorted(needles, rows + offset, right=True)
        if problem.causal
        else torch.full_like(rows, len(needles))
    )
    # Odd rows and the last one take the latest needle they may see, so that tiles near the diagonal are hit;
    # the others cycle.
    latest = (rows % 2 == 1) | (rows == problem.seqlen_q - 1)
    choice = torch.where(latest, visible - 1, (rows // 2) % visible)
    target = needles[choice]
    return k[:, :, target] * amplitude, k, v, target


def needle_gradient_inputs(problem: Problem, device: str, seed: int = 0):
    """q, k, v, o, lse, do for a backward stage whose gradients show every tile, and those gradients.

    As `needle_inputs`, but V and dO are ±1 words, and O is given as zero, which makes D zero: then dS is
    dO·V at a row's target, a whole number, and nothing elsewhere, and every sum is one of whole numbers. A
    tile of queries or keys that is dropped, counted twice or read in another's place moves some of them by at
    least one.
    """
    q, k, v, _ = needle_inputs(problem, device, seed=seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    v, do = (
        torch.randint(0, 2, x.shape, device=device, generator=generator).mul(2).sub(1).to(x.dtype)
        for x in (v, q)
    )
    lse = reference(q, k, v, problem.causal, top_left=problem.top_left)[1]
    o = torch.zeros_like(q)
    exact = reference_gradients(q, k, v, o, lse, do, problem.causal, top_left=problem.top_left)
    return (q, k, v, o, lse.float(), do), exact


def needles_missed(problem: Problem, found: dict[str, torch.Tensor], exact: Gradients) -> Iterator[str]:
    """A message for each gradient of `needle_gradient_inputs` that is not what it must be, but for its last
    roundings: a 16-bit result's, and e^(S − LSE) for 1 to within 2⁻¹³."""
    step = 1.0 / math.sqrt(problem.head_dim)  # dQ and dK are whole numbers times the scale
    for (name, x), ref, unit in zip(found.items(), exact, (step, step, 1.0)):
        wrong = ~((x.double() - ref).abs() <= ref.abs() * 2**-7 + unit / 4)  # also where x is NaN
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            yield (
                f"{problem}: {int(wrong.sum())} elements of {name} are off, first at (b, h, row, x) = {at}: "
                f"kernel {x[at]:.6g}, expected {ref[at]:.6g}"
            )
