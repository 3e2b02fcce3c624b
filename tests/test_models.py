"""The NumPy models against PyTorch in float64, and the errata of the FlashAttention-2 paper, one test each.

An erratum's test runs one derivation twice, its argument the printed formula and then the corrected one: the
only difference between a result that agrees with PyTorch and one that does not.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from harness import cases, models, reference
from harness.models import (
    CONSUMER_ROWS,
    MODELS,
    flash_attention_2,
    flash_attention_2_backward,
    flash_attention_lazy,
    online_softmax,
    safe_softmax,
    safe_softmax_attention,
)
from hopper_attention.kernels import k6, ladder
from hopper_attention.kernels.contract import LazyMaximum, Problem
from hopper_attention.kernels.device import forward_shapes
from hopper_attention.kernels.device.constants import WARP, WARPGROUP
from hopper_attention.kernels.device.query_tiles import ROWS

LENGTHS = (1, 3, 64, 65, 203)
HEAD_DIMS = (64, 128)
TILES = ((64, 64), (52, 17), (5, 128))  # (tile_q, tile_kv): equal, narrow keys, keys past the whole sequence
TILE_ARGUMENTS = {
    "flash_attention_tiled": ("tile_kv",),
    "flash_attention_1": ("tile_q", "tile_kv"),
    "flash_attention_2": ("tile_q", "tile_kv"),
    "flash_attention_lazy": ("tile_kv",),
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


# ---- K6's lazy maximum -------------------------------------------------------------------------------------

WARP_ROWS = ROWS * WARP // WARPGROUP
MASKS = {
    "full": {},
    "bottom right": {"causal": True},
    "top left": {"causal": True, "top_left": True},
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
# (head_dim, tile_kv, parts): every shape of k6, and some of no kernel.
SHAPES = {
    (d, config.tile_kv, config.parts)
    for d, configs in (
        *forward_shapes.CANDIDATES.items(),
        *((d, (config,)) for d, config in k6.CONFIGS.items() if isinstance(d, int)),
    )
    for config in configs
}
SHAPES |= {(64, 8, 8), (64, 20, 4), (64, 51, 3), (128, 7, 1), (256, 64, 2)}
# growth and share; the last follows the maximum in every tile
RULES = ((k6.GROWTH, k6.SHARE), (k6.GROWTH, 0.5), (k6.GROWTH, 0.0), (0.0, 0.0))
LAZY_LENGTHS = ((203, 203), (65, 65), (64, 64), (3, 3), (1, 1))
LAZY_LENGTHS += ((65, 203), (203, 65), (1, 130), (130, 1), (64, 65), (150, 129))


def steep(n: int, d: int, nk: int | None = None, first: float = 0.0, tile_kv: int = 64) -> list[Array]:
    """q, k, v whose scores rise and fall by many powers of two from key to key and from tile to tile.

    A row follows them with a factor of its own between −1 and 1, so that some rise where others fall, and
    every fourth not at all. The first tile of keys is `first` powers of two above where it would be.
    """
    q, k, v = qkv(n, d, nk)
    levels = np.repeat(60 * randn(len(k) // 16 + 1, seed=4), 16)[: len(k)]  # of 16 keys in a row
    levels[:tile_kv] += first
    q[:, 0] = np.random.default_rng(5).uniform(-1, 1, n) * math.sqrt(d) * math.log(2)
    q[::4, 0] = 0.0
    q[:, 1:] *= 2
    k[:, 0] = levels + randn(len(k), seed=6)
    return [q, k, v]


def lazy_reference(
    q: Array, k: Array, v: Array, rounding: reference.Rounding = False, **mask: bool
) -> list[Array]:
    """O and LSE in float64 of one head; with `rounding` P goes through bf16 relative to a lazy maximum."""
    dtype = torch.bfloat16 if rounding else torch.float64
    q, k, v = (torch.from_numpy(x)[None, None].to(dtype) for x in (q, k, v))
    causal, top_left = mask.get("causal", False), mask.get("top_left", False)
    found = reference._attention(q, k, v, causal, None, torch.float64, rounding, top_left, scale=None)
    return [x[0, 0].numpy() for x in found]


def round_bf16(x: Array) -> Array:
    return torch.from_numpy(x).to(torch.bfloat16).double().numpy()


def off(found: tuple[Array, Array], exact: list[Array]) -> float:
    """The larger error of O and LSE; infinite unless the same rows, which see no key, have LSE = −∞."""
    blind = [lse == -math.inf for _, lse in (found, exact)]
    if (blind[0] != blind[1]).any():
        return math.inf
    return max(error(found[0], exact[0]), error(*(np.where(blind[0], 0.0, lse) for _, lse in (found, exact))))


def same_bits(a: tuple[Array, Array], b: tuple[Array, Array], rows: Array) -> bool:
    return all(x[rows].tobytes() == y[rows].tobytes() for x, y in zip(a, b, strict=True))


def unequal_to_attention(model: Callable) -> bool:
    """Off float64 attention. Of more queries than keys the first see none."""
    for q, k, v in (steep(203, 64), steep(203, 64, 65), steep(65, 64, 150)):
        if not off(model(q, k, v, causal=True, parts=2), lazy_reference(q, k, v, causal=True)) < CLOSE:
            return True
    return False


def unequal_to_the_yardstick(model: Callable) -> bool:
    """P, rounded to bf16, is not the yardstick's: it is relative to another maximum."""
    rounding = LazyMaximum(64, 2, k6.GROWTH, k6.SHARE)
    for lengths, causal in product(((203, 64), (203, 64, 310)), (False, True)):
        inputs = [round_bf16(x) for x in steep(*lengths)]
        found = model(*inputs, causal=causal, parts=2, round_p=round_bf16)
        if not off(found, lazy_reference(*inputs, rounding=rounding, causal=causal)) < CLOSE:
            return True
    return False


def rows_depend_on_each_other(model: Callable) -> bool:
    """A row whose maximum is raised, by its own query or by a key that it is the first to see, or whose terms
    are all alike, changes bits of other rows, or of rows that do not see the key."""
    rows = np.arange(150)
    for size in (1, 4):  # the other rows' maxima hardly rise, or rise too
        q, k, v = qkv(150, 64)
        q *= size
        before = model(q, k, v, causal=True, parts=2)
        for raised in (70, 100, 127, 149):
            loud, even, key = q.copy(), q.copy(), k.copy()
            loud[raised] *= 64
            even[raised] = 0.0
            key[raised] = 8 * q[raised]
            for inputs, untouched in (
                ((loud, k, v), rows != raised),
                ((even, k, v), rows != raised),
                ((q, key, v), rows < raised),
            ):
                found = model(*inputs, causal=True, parts=2)
                assert not same_bits(found, before, ~untouched)
                if not same_bits(found, before, untouched):
                    return True
    return False


FAULTS = (unequal_to_attention, unequal_to_the_yardstick, rows_depend_on_each_other)


def test_lazy_defaults_are_k6s() -> None:
    problem = Problem.square(1, 1, 512, 128, False)
    parameters = inspect.signature(flash_attention_lazy).parameters
    found = k6.lazy_maximum(problem)
    assert found.behind == {name: parameters[name].default for name in found.behind}
    assert found.e4m3 is None
    assert k6.lazy_maximum(problem, exact=True)[2:] == (0.0, 0.0, None, None)
    assert CONSUMER_ROWS == ROWS


@every_mask
@pytest.mark.parametrize(("d", "tile_kv", "parts"), sorted(SHAPES))
def test_lazy(d: int, tile_kv: int, parts: int, mask: dict[str, bool]) -> None:
    for n, nk in LAZY_LENGTHS:
        for q, k, v in (qkv(n, d, nk), steep(n, d, nk), steep(n, d, nk, first=-400.0, tile_kv=tile_kv)):
            exact = lazy_reference(q, k, v, **mask)
            for rule in RULES:
                shape = LazyMaximum(tile_kv, parts, *rule).behind
                found = flash_attention_lazy(q, k, v, **mask, **shape)
                assert off(found, exact) < CLOSE, (n, nk, rule)


@every_mask
@pytest.mark.parametrize(("tile_kv", "parts"), ((64, 1), (64, 2), (64, 4), (128, 4), (20, 4)))
def test_lazy_rounds_p_as_the_yardstick_does(tile_kv: int, parts: int, mask: dict[str, bool]) -> None:
    """The model's maximum is behind where the yardstick's is: P rounded relative to either is the same."""
    for (n, nk), first in product(((203, 203), (65, 203), (203, 65)), (0.0, -400.0)):
        inputs = [round_bf16(x) for x in steep(n, 64, nk, first, tile_kv)]
        for rule in RULES:
            rounding = LazyMaximum(tile_kv, parts, *rule)
            found = flash_attention_lazy(*inputs, **mask, **rounding.behind, round_p=round_bf16)
            assert off(found, lazy_reference(*inputs, rounding=rounding, **mask)) < CLOSE


def test_steep_scores_raise_some_rows_of_a_warp_and_not_others() -> None:
    """What the tests of this section rest on: in most tiles of most warps the branch is some rows' only."""
    q, k, _ = steep(192, 64)
    scores = torch.from_numpy(q @ k.T / 8)[None]
    all_keys = torch.full((192,), 192)
    base = reference._lazy_maximum(scores, LazyMaximum(64, 2, k6.GROWTH), all_keys)[0, :, ::64]
    raised = (base.diff() > 0).unflatten(0, (-1, WARP_ROWS))  # (warps, rows, tiles but the first)
    some = raised.any(1) & ~raised.all(1)
    assert some.double().mean() > 0.9
    assert 0.1 < raised.double().mean() < 0.9
    assert (base.diff()[base.diff() > 0] > k6.GROWTH * math.log(2)).all()


def test_lazy_rows_that_see_no_key() -> None:
    q, k, v = steep(203, 64, 65)
    o, lse = flash_attention_lazy(q, k, v, causal=True)
    assert (lse[:138] == -math.inf).all() and np.isfinite(lse[138:]).all()
    assert not o[:138].any() and o[138:].all()
    for mask in MASKS.values():
        o, lse = flash_attention_lazy(q, k[:0], v[:0], **mask)
        assert not o.any() and (lse == -math.inf).all()


def test_lazy_refuses_parts_that_do_not_divide_a_tile() -> None:
    for tile_kv, parts in ((64, 3), (64, 0), (64, 128)):
        with pytest.raises(ValueError, match=f"parts must divide a tile of {tile_kv} keys, got {parts}"):
            flash_attention_lazy(*qkv(3, 64), tile_kv=tile_kv, parts=parts)


@pytest.mark.parametrize("fault", FAULTS)
def test_lazy_has_no_fault(fault: Callable[[Callable], bool]) -> None:
    assert not fault(flash_attention_lazy)


RAISED, RISE = "raised = ahead > room", "np.where(raised, ahead, 0.0)"
AHEAD = "ahead = piece.max(axis=1)"
RESCALES = "for x in (*pieces[:i], acc):"
LAGGED = "acc += p @ _load(v, key - tile_kv, tile_kv)"
ROUNDED = "p = s if round_p is None else round_p(s)"
LAST = "        acc += p @ _load(v, key, tile_kv)\n        o[rows]"
# By name, what of the model is otherwise, and who notices.
MUTATIONS = {
    "O not rescaled": ({RESCALES: "for x in pieces[:i]:"}, unequal_to_attention),
    "the sum not rescaled": ({"row_sum *= rescale": "pass"}, unequal_to_attention),
    "P of the parts before not rescaled": ({RESCALES: "for x in (acc,):"}, unequal_to_attention),
    "the growth not taken from the exponents": ({"piece -= grown[:, None]": "pass"}, unequal_to_attention),
    "the maximum not raised": ({"                row_max = new_max\n": ""}, unequal_to_attention),
    "only the last tile masked": ({"> by_first": "> by_last"}, unequal_to_attention),
    "tiles up to the first row's last": ({"max(1, by_last)": "max(1, by_first)"}, unequal_to_attention),
    "−∞ as a maximum": ({"_shift(s.max(axis=1))": "s.max(axis=1)"}, unequal_to_attention),
    "the last P·V forgotten": ({LAST: "        o[rows]"}, unequal_to_attention),
    "P·V of the tile's own V": ({LAGGED: "acc += p @ _load(v, key, tile_kv)"}, unequal_to_attention),
    "O rescaled before the last P·V joins it": (
        {LAGGED: "earlier = p", ROUNDED: f"{LAGGED.replace('p @', 'earlier @')} if key else 0; {ROUNDED}"},
        unequal_to_attention,
    ),
    "the first maximum that of a part": (
        {"_shift(s.max": "_shift(s[:, : tile_kv // parts].max"},
        unequal_to_the_yardstick,
    ),
    "the maximum always followed": ({RAISED: "raised = ahead > 0"}, unequal_to_the_yardstick),
    "the maximum never followed": ({RAISED: "raised = ahead > np.inf"}, unequal_to_the_yardstick),
    "the growth in natural units": ({RAISED: f"{RAISED} / np.log(2.0)"}, unequal_to_the_yardstick),
    "the share not asked": ({"if share and p is None:": "if False:"}, unequal_to_the_yardstick),
    "the share that of a row that sees all keys": ({"row_sum * own": "row_sum"}, unequal_to_the_yardstick),
    "the share that of each row by its own keys": (
        {"row_sum * own": "row_sum * np.minimum(own, np.arange(row + 1, row + len(row_sum) + 1) / len(k))"},
        unequal_to_the_yardstick,
    ),
    "the share of one term": ({"share * row_sum": "share * row_sum**0"}, unequal_to_the_yardstick),
    "room left where the maximum has risen": ({"room[raised] = 0.0": "pass"}, unequal_to_the_yardstick),
    "the warp's maximum": ({AHEAD: "ahead = of_warp(piece.max(axis=1))"}, rows_depend_on_each_other),
    "the warp's vote": (
        {RAISED: "raised = of_warp(ahead > room)", RISE: RISE.replace("ahead", "np.maximum(ahead, 0.0)")},
        rows_depend_on_each_other,
    ),
    "the warp's share": ({"share * row_sum": "share * of_warp(row_sum)"}, rows_depend_on_each_other),
}


def mutated(edits: dict[str, str]) -> Callable:
    """The model with lines of its source replaced."""
    source = inspect.getsource(flash_attention_lazy)
    for old, new in edits.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)

    def of_warp(x: Array) -> Array:
        """Of each row the largest of its warp's."""
        return np.repeat(np.maximum.reduceat(x, range(0, len(x), WARP_ROWS)), WARP_ROWS)[: len(x)]

    scope = {**vars(models), "of_warp": of_warp}
    exec(source, scope)
    return scope["flash_attention_lazy"]


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_of_lazy_is_caught(name: str) -> None:
    edits, fault = MUTATIONS[name]
    with np.errstate(all="ignore"):
        assert fault(mutated(edits))


def test_run_model_runs_the_lazy_model_as_k6_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the kernel file says of its tiles, and with scores that take the branch."""
    stage, module = ladder.load("k6")
    lazy = replace(stage, model="flash_attention_lazy")
    monkeypatch.setattr(cases.ladder, "load", lambda stage_id: (lazy, module))
    asked = set()

    def spy(q: Array, k: Array, v: Array, **arguments: object) -> tuple[Array, Array]:
        asked.add((q.shape[1], *(arguments[name] for name in LazyMaximum(0, 0, 0.0).behind)))
        return flash_attention_lazy(q, k, v, **arguments)

    monkeypatch.setitem(MODELS, "flash_attention_lazy", spy)
    assert cases.run_model("k6") == []
    assert asked == {(64, 64, 2, 8.0, 2.0), (128, 64, 1, 8.0, 2.0)}
    monkeypatch.setitem(MODELS, "flash_attention_lazy", mutated(MUTATIONS["O not rescaled"][0]))
    failures = cases.run_model("k6")
    for problem in ("n512 d64 full", "n512 d128 causal"):
        assert any(problem in line for line in failures)


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
