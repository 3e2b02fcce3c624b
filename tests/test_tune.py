"""Costs of tiles follow from times, are kept for the GPU they are of, and believed only of these kernels."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from hopper_attention import cache, tune, tuned
from hopper_attention.kernels import division
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.division import TILES, Tile, Tiles

GPU = "NVIDIA H20"
SLOWER: Tiles = {
    d: {
        rows: Tile(x.keys, x.ctas, *(1.7 * y for y in (x.step, x.alone, x.tile, x.call)))
        for rows, x in of_rows.items()
    }
    for d, of_rows in TILES.items()
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    tuned.known.cache_clear()


@pytest.mark.parametrize("sms", [78, 114, 132])
def test_costs_follow_from_times(sms: int) -> None:
    """A GPU that takes what the model says is measured as what it is."""
    found = tune.measured(sms, lambda problem, rows: division.forward_us(problem, rows, sms, SLOWER))
    for head_dim, of_rows in SLOWER.items():
        assert [*found[head_dim]] == [*of_rows]  # k6's own first
        for rows, expected in of_rows.items():
            assert found[head_dim][rows] == pytest.approx(expected)


def test_launches_are_one_tile_for_each_place() -> None:
    seen: list[Problem] = []
    tune.costs(64, 64, 10, lambda problem, rows: seen.append(problem) or float(len(seen)))
    assert {(x.batch, x.kv_heads, x.seqlen_q, x.causal) for x in seen} == {(1, 1, 64, False)}
    assert sorted((x.heads, x.seqlen_kv) for x in seen) == [
        (10, 512),
        (10, 2048),
        (30, 512),
        (30, 2048),
        (60, 512),
    ]


@pytest.mark.parametrize("times", [lambda problem, rows: 5.0, lambda problem, rows: -problem.seqlen_kv])
def test_times_that_make_no_sense_are_refused(times) -> None:
    with pytest.raises(RuntimeError, match="make no sense"):
        tune.measured(132, times)


def test_what_is_kept_is_what_is_known() -> None:
    assert tuned.known(GPU) is TILES
    path = tuned.save(GPU, SLOWER)
    tuned.save("NVIDIA H200", TILES)
    assert tuned.known(GPU) == SLOWER
    assert tuned.known("NVIDIA H200") == TILES
    assert tuned.known("another") is TILES
    assert {*json.loads(path.read_text())} == {GPU, "NVIDIA H200"}
    tuned.forget()
    assert tuned.known(GPU) is TILES
    tuned.forget()  # twice is no error


def test_costs_of_other_kernels_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.save(GPU, SLOWER)
    monkeypatch.setattr(cache, "sources", lambda: "others")
    tuned.known.cache_clear()
    assert tuned.known(GPU) is TILES


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"GPU": 3}', '{"GPU": {"sources": "ours", "tiles": {"64": {}}}}']
)
def test_what_is_no_file_is_not_believed(text: str) -> None:
    path = tuned.save(GPU, SLOWER)
    path.write_text(text.replace("GPU", GPU).replace("ours", cache.sources()))
    tuned.known.cache_clear()
    assert tuned.known(GPU) is TILES


@pytest.mark.parametrize(
    "field, value",
    [("keys", 0), ("ctas", 0), ("step", 0.0), ("alone", math.nan), ("call", math.inf), ("tile", -1.0),
     ("step", "1.0"), ("call", None), ("keys", 48), ("tile", True)],
)  # fmt: skip
def test_costs_that_cannot_be_are_not_believed(field: str, value: object) -> None:
    """One number of a file that is otherwise as `tune` writes it."""
    path = tuned.save(GPU, SLOWER)
    kept = json.loads(path.read_text())
    kept[GPU]["tiles"]["64"]["128"][Tile._fields.index(field)] = value
    path.write_text(json.dumps(kept))
    tuned.known.cache_clear()
    assert tuned.known(GPU) is TILES


def test_nobody_else_writes_what_is_kept() -> None:
    before = os.umask(0o002)
    try:
        assert tuned.save(GPU, SLOWER).stat().st_mode & 0o777 == cache.OWN
    finally:
        os.umask(before)


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, "")
    with pytest.raises(RuntimeError, match="no folder"):
        tuned.save(GPU, SLOWER)
    assert tuned.known(GPU) is TILES
    tuned.forget()


def test_without_a_gpu_nothing_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert tune.main([]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
    assert tune.main(["--forget"]) == 0
    monkeypatch.setattr(tuned, "path", lambda: tmp_path)  # which is no file
    assert tune.main(["--forget"]) == 1
