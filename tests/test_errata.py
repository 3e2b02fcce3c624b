"""The errata of the FlashAttention-2 paper (arXiv 2307.08691), one test each.

A test runs one derivation twice, its argument the printed formula and then the corrected one: the only
difference between a result that agrees with PyTorch and one that does not.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from in_float64 import CLOSE, Array, error, qkv, randn, torch_attention, torch_gradients

from harness.models import flash_attention_2, flash_attention_2_backward, safe_softmax_attention

WRONG = 1e-2  # every printed formula misses by more than this


def deferred_normalisation(
    q: Array, k: Array, v: Array, rescale: Callable[[Array, Array], Array], tile_kv: int = 16
) -> Array:
    """FA2's Algorithm 1 over key tiles; `rescale(m_old, m_new)` (N, 1) multiplies O, the formula of line 10.

    The first tile has nothing to rescale, so a formula that cannot be evaluated at m = −∞ gets its chance.
    """
    scale = 1 / math.sqrt(q.shape[1])

    def tile(key: int, old_max: Array | float) -> tuple[Array, Array, Array]:
        s = q @ k[key : key + tile_kv].T * scale
        new_max = np.maximum(old_max, s.max(axis=1, keepdims=True))
        p = np.exp(s - new_max)
        return new_max, p.sum(axis=1, keepdims=True), p @ v[key : key + tile_kv]

    row_max, row_sum, o = tile(0, -math.inf)
    for key in range(tile_kv, len(k), tile_kv):
        new_max, tile_sum, tile_o = tile(key, row_max)
        row_sum = np.exp(row_max - new_max) * row_sum + tile_sum
        o = rescale(row_max, new_max) * o + tile_o
        row_max = new_max
    return o / row_sum


def test_erratum_algorithm_1_line_10_rescaling_is_not_inverted() -> None:
    def printed(m_old: Array, m_new: Array) -> Array:
        return 1 / np.exp(m_old - m_new)

    def corrected(m_old: Array, m_new: Array) -> Array:
        return np.exp(m_old - m_new)

    q, k, v = qkv(65, 64)
    o, _ = torch_attention(q, k, v)
    assert error(deferred_normalisation(q, k, v, corrected), o) < CLOSE
    assert WRONG < error(deferred_normalisation(q, k, v, printed), o) < math.inf

    # From the initial state of line 5, O = 0 and m = −∞, the printed factor is ∞ and ∞·O is NaN.
    start, first = np.full((1, 1), -np.inf), np.zeros((1, 1))
    assert corrected(start, first) * 0.0 == 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        assert np.isnan(printed(start, first) * 0.0)


def two_blocks(q: Array, k: Array, v: Array, combine: Callable[..., Array]) -> Array:
    """O after the second of two key blocks, in the notation of FA2's sections 2 and 3.1.1.

    `combine(o1, l1, l2, decay, pv2)` gives it from O(1) = diag(l(1))⁻¹·e^(S(1)−m(1))·V(1), the two sums,
    e^(m(1)−m(2)), each (N, 1), and e^(S(2)−m(2))·V(2).
    """
    scale, half = 1 / math.sqrt(q.shape[1]), len(k) // 2
    s1, s2 = q @ k[:half].T * scale, q @ k[half:].T * scale
    m1 = s1.max(axis=1, keepdims=True)
    l1 = np.exp(s1 - m1).sum(axis=1, keepdims=True)
    o1 = np.exp(s1 - m1) @ v[:half] / l1
    m2 = np.maximum(m1, s2.max(axis=1, keepdims=True))
    decay = np.exp(m1 - m2)
    l2 = decay * l1 + np.exp(s2 - m2).sum(axis=1, keepdims=True)
    return combine(o1, l1, l2, decay, np.exp(s2 - m2) @ v[half:])


def test_erratum_section_3_1_1_unscaled_recurrence() -> None:
    q, k, v = qkv(65, 64)
    o, _ = torch_attention(q, k, v)

    def run(unscaled: Callable[..., Array]) -> float:
        return error(two_blocks(q, k, v, lambda o1, l1, l2, decay, pv2: unscaled(o1, l1, decay, pv2) / l2), o)

    assert run(lambda o1, l1, decay, pv2: l1 * decay * o1 + pv2) < CLOSE
    assert run(lambda o1, l1, decay, pv2: o1 / l1 + pv2) > WRONG  # as printed
    assert run(lambda o1, l1, decay, pv2: l1 * o1 + pv2) > WRONG  # e^(m(1)−m(2)) missing
    assert run(lambda o1, l1, decay, pv2: decay * o1 / l1 + pv2) > WRONG  # diag(l(1)) inverted
    # Reading O(1) in the printed formula as the un-scaled Õ(1) = diag(l(1))·O(1) does not save it.
    assert run(lambda o1, l1, decay, pv2: (l1 * o1) / l1 + pv2) > WRONG
    assert run(lambda o1, l1, decay, pv2: decay * (l1 * o1) / l1 + pv2) > WRONG


def test_erratum_section_2_normalised_recurrence() -> None:
    q, k, v = qkv(65, 64)
    o, _ = torch_attention(q, k, v)

    def run(combine: Callable[..., Array]) -> float:
        return error(two_blocks(q, k, v, combine), o)

    assert run(lambda o1, l1, l2, decay, pv2: (l1 / l2) * decay * o1 + pv2 / l2) < CLOSE
    assert run(lambda o1, l1, l2, decay, pv2: o1 / (l1 / l2) + pv2 / l2) > WRONG  # as printed
    assert run(lambda o1, l1, l2, decay, pv2: (l1 / l2) * o1 + pv2 / l2) > WRONG  # e^(m(1)−m(2)) missing
    assert run(lambda o1, l1, l2, decay, pv2: decay * o1 / (l1 / l2) + pv2 / l2) > WRONG  # inverted


def standard_backward(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    key_gradient: Callable[[Array, Array], Array] = lambda q, ds: ds.T @ q,
    row_term: Callable[[Array, Array], Array] = lambda do, o: (do * o).sum(axis=1),
) -> tuple[Array, Array, Array]:
    """Attention's backward without tiles; `key_gradient(q, ds)` is dK, and `row_term(do, o)` is D."""
    scale = 1 / math.sqrt(q.shape[1])
    o, lse = safe_softmax_attention(q, k, v)
    p = np.exp(q @ k.T * scale - lse[:, None])
    ds = p * (do @ v.T - row_term(do, o)[:, None]) * scale
    return ds @ k, key_gradient(q, ds), p.T @ do


def backward_problem(n: int, d: int = 64) -> tuple[int, list[Array], tuple[Array, ...]]:
    """d; q, k, v and dO (n, d); their gradients."""
    inputs = [*qkv(n, d), randn(n, d, seed=3)]
    return d, inputs, torch_gradients(*inputs)


def assert_gradients(actual: tuple[Array, ...], expected: tuple[Array, ...]) -> None:
    for name, x, y in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        assert error(x, y) < CLOSE, name


@pytest.mark.parametrize("n", (64, 65))
def test_erratum_dk_is_ds_transposed_times_q(n: int) -> None:
    d, (q, k, v, do), expected = backward_problem(n)
    assert_gradients(standard_backward(q, k, v, do, key_gradient=lambda q, ds: ds.T @ q), expected)

    def printed(q: Array, ds: Array) -> Array:
        return q @ ds.T

    if n != d:  # (N, d) by (N, N): no such product
        with pytest.raises(ValueError, match="matmul"):
            standard_backward(q, k, v, do, key_gradient=printed)
    else:
        assert error(standard_backward(q, k, v, do, key_gradient=printed)[1], expected[1]) > WRONG


@pytest.mark.parametrize("n", (64, 65))
def test_erratum_row_term_has_length_n(n: int) -> None:
    d, (q, k, v, do), expected = backward_problem(n)
    o, lse = flash_attention_2(q, k, v)

    def of_length_n(do: Array, o: Array) -> Array:
        return (do * o).sum(axis=1)

    def of_length_d(do: Array, o: Array) -> Array:  # the one sum of dO∘O that lies in R^d, as printed
        return (do * o).sum(axis=0)

    assert of_length_n(do, o).shape == (n,) and of_length_d(do, o).shape == (d,)
    assert_gradients(standard_backward(q, k, v, do, row_term=of_length_n), expected)
    assert_gradients(flash_attention_2_backward(q, k, v, o, lse, do), expected)
    if n != d:  # one number per row of dP is needed
        with pytest.raises(ValueError, match="broadcast"):
            standard_backward(q, k, v, do, row_term=of_length_d)
    else:
        dq, dk, _ = standard_backward(q, k, v, do, row_term=of_length_d)
        assert error(dq, expected[0]) > WRONG and error(dk, expected[1]) > WRONG
