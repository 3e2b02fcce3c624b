"""The NumPy models against PyTorch in float64, and the errata of the FlashAttention-2 paper, one test each.

An erratum's test runs one derivation twice, its argument the printed formula and then the corrected one: the
only difference between a result that agrees with PyTorch and one that does not.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from harness.models import (
    MODELS,
    flash_attention_2,
    flash_attention_2_backward,
    online_softmax,
    safe_softmax,
    safe_softmax_attention,
)

LENGTHS = (1, 3, 64, 65, 203)
HEAD_DIMS = (64, 128)
TILES = ((64, 64), (52, 17), (5, 128))  # (tile_q, tile_kv): equal, narrow keys, keys past the whole sequence
TILE_ARGUMENTS = {
    "flash_attention_tiled": ("tile_kv",),
    "flash_attention_1": ("tile_q", "tile_kv"),
    "flash_attention_2": ("tile_q", "tile_kv"),
}
CLOSE = 1e-12  # some thousand units of float64 round-off, for results of order 1
WRONG = 1e-2  # every printed formula misses by more than this

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


def tilings(name: str) -> list[dict[str, int]]:
    """The tile sizes to run a model with, as keyword arguments; one empty set for a model without tiles."""
    names = TILE_ARGUMENTS.get(name, ())
    return [{key: tile[key == "tile_kv"] for key in names} for tile in (TILES if names else TILES[:1])]


# ---- softmax -----------------------------------------------------------------------------------------------


def with_hidden(x: Array) -> Array:
    """−∞ at random places, at the first five elements of row 0 and at all but the last of row 1."""
    x = np.where(randn(*x.shape, seed=9) > 0.5, -np.inf, x)
    x[0, :5] = x[1, :-1] = -np.inf
    x[:, -1] = 0.25
    return x


@pytest.mark.parametrize("softmax", (safe_softmax, online_softmax))
@pytest.mark.parametrize(
    "x",
    (
        pytest.param(randn(7, 203), id="plain"),
        pytest.param(randn(7, 1), id="one"),
        pytest.param(randn(2, 3, 65), id="3d"),
        pytest.param(randn(65), id="1d"),
        pytest.param(np.sort(randn(7, 203)), id="maximum-always-grows"),
        pytest.param(1e4 * randn(7, 203), id="large"),
        pytest.param(1e4 + randn(7, 203), id="far-from-zero"),
        pytest.param(with_hidden(randn(7, 203)), id="hidden"),
        pytest.param(with_hidden(1e4 * randn(7, 203)), id="large-hidden"),
    ),
)
def test_softmax(softmax: Callable[[Array], Array], x: Array) -> None:
    assert error(softmax(x), torch.softmax(torch.from_numpy(x), -1).numpy()) < CLOSE


# ---- forward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("n", LENGTHS)
def test_forward(name: str, n: int, d: int, causal: bool) -> None:
    q, k, v = qkv(n, d)
    o, lse = torch_attention(q, k, v, causal)
    for tiles in tilings(name):
        model_o, model_lse = MODELS[name](q, k, v, causal=causal, **tiles)
        assert error(model_o, o) < CLOSE, tiles
        assert error(model_lse, lse) < CLOSE, tiles


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
def test_forward_large_logits(name: str, causal: bool) -> None:
    q, k, v = qkv(203, 64)
    q *= 1e4
    o, lse = torch_attention(q, k, v, causal)
    for tiles in tilings(name):
        model_o, model_lse = MODELS[name](q, k, v, causal=causal, **tiles)
        assert error(model_o, o) < 1e-9, tiles  # round-off of a logit near 4e4 is 1e-11, and exp passes it on
        assert error(model_lse / np.abs(lse), lse / np.abs(lse)) < CLOSE, tiles


@pytest.mark.parametrize("name", MODELS)
def test_forward_other_scale_and_unequal_lengths(name: str) -> None:
    q, k, v = qkv(65, 64, nk=203)
    v = v[:, :40]
    o, lse = torch_attention(q, k, v, scale=0.3)
    for tiles in tilings(name):
        model_o, model_lse = MODELS[name](q, k, v, scale=0.3, **tiles)
        assert error(model_o, o) < CLOSE, tiles
        assert error(model_lse, lse) < CLOSE, tiles


UNEQUAL = ((65, 203), (203, 65), (1, 130), (130, 1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("n", "nk"), UNEQUAL)
def test_forward_top_left(name: str, n: int, nk: int) -> None:
    q, k, v = qkv(n, 64, nk)
    o, lse = torch_attention(q, k, v, causal=True)  # torch's is_causal is aligned at the top left
    for tiles in tilings(name):
        model_o, model_lse = MODELS[name](q, k, v, causal=True, top_left=True, **tiles)
        assert error(model_o, o) < CLOSE, tiles
        assert error(model_lse, lse) < CLOSE, tiles


@pytest.mark.parametrize("name", MODELS)
def test_forward_keeps_float32(name: str) -> None:
    q, k, v = (x.astype(np.float32) for x in qkv(65, 64))
    o, lse = MODELS[name](q, k, v, causal=True)
    assert o.dtype == lse.dtype == np.float32
    reference_o, reference_lse = torch_attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert error(o.astype(np.float64), reference_o) < 1e-5
    assert error(lse.astype(np.float64), reference_lse) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_forward_empty(name: str) -> None:
    o, lse = MODELS[name](*qkv(0, 64), causal=True)
    assert o.shape == (0, 64) and lse.shape == (0,)


@pytest.mark.parametrize("name", MODELS)
def test_refusals(name: str) -> None:
    model = MODELS[name]
    q, k, v = qkv(3, 64, nk=5)
    with pytest.raises(ValueError, match="causal needs q and k of the same length or top_left, got 3 and 5"):
        model(q, k, v, causal=True)
    with pytest.raises(ValueError, match="top_left aligns a causal mask, and there is none"):
        model(q, k, v, top_left=True)
    with pytest.raises(ValueError, match="k and v must have the same length, got 5 and 4"):
        model(q, k, v[:4])
    with pytest.raises(ValueError, match="q and k must have the same head_dim, got 64 and 32"):
        model(q, k[:, :32], v)
    with pytest.raises(ValueError, match="v must be a floating-point matrix"):
        model(q, k, v[None])
    with pytest.raises(ValueError, match="q must be a floating-point matrix"):
        model(q.astype(int), k, v)
    for key in TILE_ARGUMENTS.get(name, ()):
        with pytest.raises(ValueError, match="tile sizes must be at least 1, got 0"):
            model(q, k, v, **{key: 0})


# ---- backward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("n", LENGTHS)
def test_backward(n: int, d: int, causal: bool) -> None:
    q, k, v = qkv(n, d)
    do = randn(n, d, seed=3)
    gradients = torch_gradients(q, k, v, do, causal)
    o, lse = flash_attention_2(q, k, v, causal=causal)
    for tile_q, tile_kv in TILES:
        tiles = {"tile_q": tile_q, "tile_kv": tile_kv}
        result = flash_attention_2_backward(q, k, v, o, lse, do, causal=causal, **tiles)
        for name, actual, expected in zip(("dq", "dk", "dv"), result, gradients, strict=True):
            assert error(actual, expected) < CLOSE, (name, tiles)


@pytest.mark.parametrize(("n", "nk"), UNEQUAL)
def test_backward_top_left(n: int, nk: int) -> None:
    q, k, v = qkv(n, 64, nk)
    do = randn(n, 64, seed=3)
    gradients = torch_gradients(q, k, v, do, causal=True)
    o, lse = flash_attention_2(q, k, v, causal=True, top_left=True)
    for tile_q, tile_kv in TILES:
        tiles = {"tile_q": tile_q, "tile_kv": tile_kv}
        result = flash_attention_2_backward(q, k, v, o, lse, do, causal=True, top_left=True, **tiles)
        for name, actual, expected in zip(("dq", "dk", "dv"), result, gradients, strict=True):
            assert error(actual, expected) < CLOSE, (name, tiles)
        assert not any(x[n:].any() for x in result[1:]), "keys that no query sees"


def test_backward_other_scale_and_unequal_lengths() -> None:
    q, k, v = qkv(65, 64, nk=203)
    v = v[:, :40]
    do = randn(65, 40, seed=3)
    o, lse = flash_attention_2(q, k, v, scale=0.3)
    result = flash_attention_2_backward(q, k, v, o, lse, do, scale=0.3)
    for actual, expected in zip(result, torch_gradients(q, k, v, do, scale=0.3), strict=True):
        assert error(actual, expected) < CLOSE


# ---- errata of the FlashAttention-2 paper (arXiv 2307.08691) -----------------------------------------------


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


def assert_gradients(actual: tuple[Array, ...], expected: tuple[Array, ...]) -> None:
    for name, x, y in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        assert error(x, y) < CLOSE, name


@pytest.mark.parametrize("n", (64, 65))
def test_erratum_dk_is_ds_transposed_times_q(n: int) -> None:
    d = 64
    q, k, v = qkv(n, d)
    do = randn(n, d, seed=3)
    expected = torch_gradients(q, k, v, do)
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
    d = 64
    q, k, v = qkv(n, d)
    do = randn(n, d, seed=3)
    expected = torch_gradients(q, k, v, do)
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
