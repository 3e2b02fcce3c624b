"""Needle inputs: a tile that is dropped shows in the outputs and in every gradient, whichever tile it is."""

import math
import re

import pytest
import torch
from small_problems import mask_of, visible_pairs

from harness import mutations, needles, reference
from harness.cases import NEEDLE_LENGTHS
from hopper_attention.kernels.contract import Problem


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [64, 257, 1024])
def test_needle(n: int, causal: bool) -> None:
    q, k, v, target = needles.needle_inputs(Problem.square(1, 2, n, 64, causal), "cpu")
    rows = torch.arange(n)
    assert not causal or bool((target <= rows).all())

    def misses(mutation: str | None) -> int:
        o, _ = mutations.tiled_model(q, k, v, causal, rows, mutation)
        return int((o != v[:, :, target]).any(-1).sum())

    assert misses(None) == 0
    assert misses("drop a tile") > 0


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(65, 257), (257, 65)])
@pytest.mark.parametrize("top_left", [False, True])
def test_needle_at_unequal_lengths(seqlen_q: int, seqlen_kv: int, top_left: bool) -> None:
    problem = Problem(1, 2, 2, seqlen_q, seqlen_kv, 64, True, top_left=top_left)
    if seqlen_q > seqlen_kv and not top_left:
        with pytest.raises(ValueError, match="the first queries see no key, and have no target"):
            needles.needle_inputs(problem, "cpu")
        return
    q, k, v, target = needles.needle_inputs(problem, "cpu")
    visible = visible_pairs(seqlen_q, seqlen_kv, **mask_of(problem))
    assert visible[torch.arange(seqlen_q), target].all()
    assert torch.equal(reference.yardstick(q, k, v, rounds_p=False, **mask_of(problem)), v[:, :, target])
    reached = min(seqlen_q, seqlen_kv) if top_left else seqlen_kv
    assert set((target // 16).tolist()) == set(range(math.ceil(reached / 16)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", NEEDLE_LENGTHS)
def test_needle_has_a_row_for_every_tile(n: int, causal: bool) -> None:
    *_, target = needles.needle_inputs(Problem.square(1, 1, n, 64, causal), "cpu")
    for tile in (16, 64, 128):
        assert set((target // tile).tolist()) == set(range(math.ceil(n / tile))), f"tiles of {tile}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [65, 257])
def test_needle_sees_any_dropped_tile(n: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, target = needles.needle_inputs(Problem.square(1, 1, n, 64, causal), "cpu")
    for start in range(0, n, 64):
        hide = mutations._drop(lambda _: (start, start + 64))
        monkeypatch.setitem(mutations.SCORE_MUTATIONS, "drop this tile", hide)
        o, _ = mutations.tiled_model(q, k, v, causal, torch.arange(n), "drop this tile")
        assert not torch.equal(o, v[:, :, target]), f"the tile from key {start} on"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [64, 257, 1024])
def test_gradient_needle(n: int, causal: bool) -> None:
    for head_dim in (64, 128):
        problem = Problem.square(1, 2, n, head_dim, causal, direction="bwd")
        inputs, exact = needles.needle_gradient_inputs(problem, "cpu")
        every = torch.arange(n)

        def misses(mutation: str | None) -> set[str]:
            found = mutations.tiled_gradients(*inputs, causal, every, every, mutation)
            messages = needles.needles_missed(problem, dict(zip(("dq", "dk", "dv"), found)), exact)
            return {re.search(r"elements of (\w+) are off", message)[1] for message in messages}

        assert misses(None) == set()
        assert misses("drop a tile") == {"dq", "dk", "dv"}
        assert "dq" in misses("forget the scale on dQ")
        assert misses("scale dK twice") == {"dk"}


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_needle_sees_any_dropped_tile(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 257
    problem = Problem.square(1, 1, n, 64, causal, direction="bwd")
    inputs, exact = needles.needle_gradient_inputs(problem, "cpu")
    for start in range(0, n, 64):
        hide = mutations._drop(lambda _: (start, start + 64))
        monkeypatch.setitem(mutations.SCORE_MUTATIONS, "drop this tile", hide)
        every = torch.arange(n)
        found = mutations.tiled_gradients(*inputs, causal, every, every, "drop this tile")
        messages = list(needles.needles_missed(problem, dict(zip(("dq", "dk", "dv"), found)), exact))
        assert len(messages) == 3, f"the tile from key {start} on"
        hidden = lambda scores, rows, columns, *_: scores[:, :, start : start + 64].fill_(-math.inf)
        monkeypatch.setitem(mutations.SCORE_MUTATIONS, "drop these queries", hidden)
        found = mutations.tiled_gradients(*inputs, causal, every, every, "drop these queries")
        messages = list(needles.needles_missed(problem, dict(zip(("dq", "dk", "dv"), found)), exact))
        assert len(messages) == 3, f"the tile from query {start} on"
