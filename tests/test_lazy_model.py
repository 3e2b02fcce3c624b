"""The NumPy model of K6's lazy maximum against attention in float64 and against the yardstick in 16 bits, and
that every fault of the model is noticed."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from in_float64 import CLOSE, Array, error, qkv, randn

from harness import case_list, models, reference
from harness.models import CONSUMER_ROWS, MODELS, flash_attention_lazy
from hopper_attention.kernels import k6, ladder
from hopper_attention.kernels.contract import LazyMaximum, Problem
from hopper_attention.kernels.device import forward_shapes
from hopper_attention.kernels.device.constants import WARP, WARPGROUP
from hopper_attention.kernels.device.query_tiles import ROWS

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
    """What the tests of this file rest on: in most tiles of most warps the branch is some rows' only."""
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
    monkeypatch.setattr(case_list.ladder, "load", lambda stage_id: (lazy, module))
    asked = set()

    def spy(q: Array, k: Array, v: Array, **arguments: object) -> tuple[Array, Array]:
        asked.add((q.shape[1], *(arguments[name] for name in LazyMaximum(0, 0, 0.0).behind)))
        return flash_attention_lazy(q, k, v, **arguments)

    monkeypatch.setitem(MODELS, "flash_attention_lazy", spy)
    assert case_list.run_model("k6") == []
    assert asked == {(64, 64, 2, 8.0, 2.0), (128, 64, 1, 8.0, 2.0)}
    monkeypatch.setitem(MODELS, "flash_attention_lazy", mutated(MUTATIONS["O not rescaled"][0]))
    failures = case_list.run_model("k6")
    for problem in ("n512 d64 full", "n512 d128 causal"):
        assert any(problem in line for line in failures)
