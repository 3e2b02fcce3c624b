"""The NumPy models of softmax and of attention, forward and backward, against PyTorch in float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from in_float64 import CLOSE, Array, error, qkv, randn, torch_attention, torch_gradients

from harness.models import (
    MODELS,
    flash_attention_2,
    flash_attention_2_backward,
    flash_attention_lazy,
    online_softmax,
    safe_softmax,
)

LENGTHS = (1, 3, 64, 65, 203)
HEAD_DIMS = (64, 128)
TILES = ((64, 64), (52, 17), (5, 128))  # (tile_q, tile_kv): equal, narrow keys, keys past the whole sequence
TILE_ARGUMENTS = {
    "flash_attention_tiled": ("tile_kv",),
    "flash_attention_1": ("tile_q", "tile_kv"),
    "flash_attention_2": ("tile_q", "tile_kv"),
    "flash_attention_lazy": ("tile_kv",),
}


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
    if model is not flash_attention_lazy:  # which aligns the mask at the bottom right
        words = "causal needs q and k of the same length or top_left, got 3 and 5"
        with pytest.raises(ValueError, match=words):
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
