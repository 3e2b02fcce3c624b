"""Inputs of the NumPy models, and what PyTorch makes of them in float64."""

import math

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

CLOSE = 1e-12  # some thousand units of float64 round-off, for results of order 1
Array = np.ndarray


def randn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def qkv(n: int, d: int, nk: int | None = None) -> list[Array]:
    return [randn(rows, d, seed=seed) for seed, rows in enumerate((n, nk or n, nk or n))]


def error(actual: Array, expected: Array) -> float:
    """max|actual − expected|; infinite where either is not finite, so that a NaN cannot pass."""
    assert actual.shape == expected.shape
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return math.inf
    return float(np.abs(actual - expected).max())


def torch_attention(
    q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None
) -> tuple[Array, Array]:
    q, k, v = (torch.from_numpy(x) for x in (q, k, v))
    o = sdpa(q[None], k[None], v[None], is_causal=causal, scale=scale)[0]
    s = q @ k.T * (1 / math.sqrt(q.shape[1]) if scale is None else scale)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    return o.numpy(), torch.logsumexp(s, dim=1).numpy()


def torch_gradients(
    q: Array, k: Array, v: Array, do: Array, causal: bool = False, scale: float | None = None
) -> tuple[Array, ...]:
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    o = sdpa(*(x[None] for x in leaves), is_causal=causal, scale=scale)
    return tuple(g.numpy() for g in torch.autograd.grad(o[0], leaves, torch.from_numpy(do)))
