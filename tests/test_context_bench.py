"""The bench of context parallelism without a GPU: its rings, its model of the time, its tables."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import bench
from harness import context_model, context_reference, context_rings, context_tables, judging, reference
from harness import context_parallel as measuring
from harness.results import repository
from hopper_attention.kernels.contract import Problem

RANKS = (1, 2, 3, 4, 7, 8, 16)


def test_the_command_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: it would be measured")
    assert bench.main(["context_parallel"]) == 0
    assert "1024 GPUs" in capsys.readouterr().out
    assert bench.main(["context_parallel", "k6"]) == bench.main(["context_parallel", "--save"]) == 2


RATES = context_model.Rates(650e12, 550e12)


@pytest.mark.parametrize("both", [False, True])
def test_the_model_of_the_time(both: bool) -> None:
    """One GPU has no messages; a network without limits costs nothing; a slow one costs its bytes."""
    predict = lambda ranks, network: context_model.predict(
        16384, 32, 8, 128, ranks, RATES, network, both, hosts_of=1024
    )
    free = context_model.Network("free", 1e30, 0.0)
    assert predict(1, context_model.NDR).efficiency == predict(8, free).efficiency == 1.0
    slow = context_model.Network("slow", 1e9, 0.0)
    kv = 2 * 8 * 16384 * 128 * 2 / 1e9  # seconds
    # K and V there, again for the backward pass, and dK and dV, twice as large, home.
    messages = 7 * kv * (1 + 3 * both)
    assert messages - 2 * kv <= predict(8, slow).seconds <= messages + predict(8, free).seconds
    whole = Problem.square(1, 32, 8 * 16384, 128, True).flops / 8
    assert predict(8, free).compute >= whole / RATES.forward


@pytest.mark.parametrize("ranks", RANKS)
def test_the_models_steps_are_equal(ranks: int) -> None:
    assert context_model.steps_are_equal(ranks)


def test_a_second_host_costs() -> None:
    """From there on the slower network is what a step waits for, and more hosts change little."""
    of = lambda ranks: (
        context_model.predict(8192, 32, 8, 128, ranks, RATES, context_model.NVLINK, True).efficiency
    )
    assert of(16) < of(8) == of(1) == 1.0
    assert of(1024) == pytest.approx(of(64), abs=0.01)


def test_overlap() -> None:
    of = lambda ms, iqr=0.0: {"ms": ms, "ms_iqr": iqr}
    assert measuring.overlap({"compute": of(4.0), "messages": of(1.0), "ours": of(4.1)}) == pytest.approx(0.9)
    assert measuring.overlap({"compute": of(4.0, 0.3), "messages": of(1.0), "ours": of(4.1, 0.3)}) is None


def test_what_is_left_out_for_a_part_of_the_time() -> None:
    """A ring without messages or without kernels takes the same steps."""
    calls: list[str] = []
    kernels = context_rings.Uncomputed().kernels()

    class Four(context_rings.Unsent):
        def __init__(self) -> None:
            self.rank, self.ranks, self.there = 1, 4, {}

        def post(self, kind, *rest):
            calls.append(kind)
            return super().post(kind, *rest)

    q, k = torch.randn(1, 4, 8, 64), torch.randn(1, 2, 8, 64)
    size, ring = context_rings.Size(8, 4, 2), context_rings.Ring(Four(), kernels)
    saved = ring.run("forward", size, q, k, k, q)
    assert calls == ["keys"] * 3
    assert [x.shape for x in saved] == [q.shape, q.shape[:3]]
    found = ring.run("backward", size, q, k, k, q, saved)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
    assert Counter(calls) == {"keys": 6, "gradients": 3}
    assert len(ring.run("both", size, q, k, k, q)) == 5 and len(calls) == 18


@pytest.mark.parametrize("wrong", [None, "o", "lse", "dq", "dk", "dv"])
def test_a_long_sequence_is_judged_by_slices(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the yardstick gives passes; one row that is off in the middle does not."""
    monkeypatch.setattr(context_reference, "LAST_ROWS", 64)
    torch.manual_seed(0)
    make = lambda heads: torch.randn(1, heads, 512, 64).bfloat16()
    q, k, v, do = make(2), make(1), make(1), make(2)
    o, lse = reference.yardstick_of(q, k, v, True, True)
    dq, dk, dv = reference.yardstick_gradients(q, k, v, o, lse, do, True, True)
    x = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    if wrong:
        x[wrong] = x[wrong].clone()
        x[wrong][:, :, 250] += 0.5
    found = context_reference.slices(x, True, True, True)
    assert len(found) == 6
    failed = {name for name, verdict in found.items() if not verdict.passed}
    direction = "backward" if wrong in ("dq", "dk", "dv") else "forward"
    assert failed == ({f"{direction}, rows to 256"} if wrong else set())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rings_yardstick(ranks: int, causal: bool) -> None:
    """On one rank it is one GPU's; on more it is of the same attention, with some more roundings. A whole
    ring that rounds so passes, one row that is off does not."""
    torch.manual_seed(0)
    make = lambda heads: torch.randn(1, heads, 24 * ranks, 64).bfloat16()
    q, k, v, do = make(4), make(2), make(2), make(4)
    dlse = torch.randn(q.shape[:3])
    expected = judging.Expected(q, k, v, causal, do, dlse=dlse)
    o = context_reference.ring_yardstick(q, k, v, causal, True, ranks)
    lse = expected.forward[1].float()
    gradients = context_reference.ring_gradients(q, k, v, o, lse, do, causal, True, ranks, dlse=dlse)
    if ranks == 1:
        assert torch.equal(o, reference.yardstick(q, k, v, causal, True))
        wanted = reference.yardstick_gradients(q, k, v, o, lse, do, causal, True, dlse=dlse)
        assert all(map(torch.equal, gradients, wanted))
    x = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients))}
    judge = lambda x: context_reference.whole(
        x, causal, ranks, True, True, dlse=dlse, block_by_block=ranks > 1
    )
    assert [y.failures for y in judge(x).values()] == [(), ()]
    for name, direction in (("o", "forward"), ("dq", "backward"), ("dk", "backward"), ("dv", "backward")):
        wrong = x | {name: x[name].clone()}
        wrong[name][0, 1, 7] += 0.1
        assert not judge(wrong)[direction].passed


SIZE = {"tokens": 4096, "heads": 32, "kv_heads": 8, "causal": False}


def times(**ms: float) -> dict[str, object]:
    found = {name: {"ms": x, "ms_iqr": 0.0, "tflops": 100 / x} for name, x in ms.items()}
    for m, x in (("4", 1.6), ("16", 2.0)):
        found[f"communicator, margin {m}"] = {"ms": x, "ms_iqr": 0.0, "tflops": 100 / x}
    return found | {"overlap": None}


def test_tables() -> None:
    good, bad = ({"passed": x, "rms_ratio": y, "lse_error": 0.0} for x, y in ((True, 1.04), (False, 2.0)))
    row = {"size": SIZE, "ranks": 2, "checks": {"forward": good, "backward": good}}
    row["both"] = times(ours=1.0, alone=0.9, communicator=1.25)
    judged = {"size": SIZE, "ranks": 1, "checks": {"forward": good, "backward, rows to 9": bad}}
    run = {"model": "small", "seqlen": 32768, "gpus": 2, "tokens_per_s": 1e5, "tflops_per_gpu": 400.0}
    found = context_tables.blocks([row, judged], [{**run, "gib": 9.6, "losses": [5.5, 4.25]}])
    last = {name: lines.splitlines()[-1] for name, lines in found.items() if name != "context-model"}
    assert last == {
        "context-parallel": "| 4k, 32:8, full | forward + backward | **100** | 90.0% |  | 111 | 80"
        " |  |  |  |  |",
        "context-checks": "| 4k, 32:8, full | 1 | passes, 1.04 | **fails**, 2.00 |",
        "context-margins": "| 4k, 32:8, full | forward + backward | 100 | 80 | 62 | 50 |",
        "context-training": "| small, 32k | 2 | 100,000 | 400 | 10 | 5.5000 4.2500 |",
    }
    assert found["context-checks"].count("passes, 1.04 | passes, 1.04") == 1
    assert set(context_tables.blocks([], []).values()) == {context_tables.NOTHING}


def test_the_models_table() -> None:
    """What was measured of causal passes beside what is expected of them."""
    row = {"size": SIZE | {"causal": True}, "checks": {}, "both": times(ours=1.75)}
    lines = context_tables.model_table([row]).splitlines()
    assert sum("1.75" in line for line in lines) == 1
    assert len(lines) == 2 + len(context_tables.MODELLED)


def test_the_margins_figure(tmp_path: Path) -> None:
    row = {"size": SIZE, "both": times(ours=1.0, communicator=1.25)}
    assert context_tables.margins(row["both"]) == {0: 80.0, 4: 62.5, 16: 50.0}
    context_tables.figures([row], "H200")["context_margins.png"](tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert context_tables.figures([{"size": SIZE, "both": {"ours": {}}}, {"size": SIZE}], "H200") == {}


MEASURED = repository() / "results" / "h200" / "context_parallel" / "bench.json"


def test_the_model_against_what_was_measured() -> None:
    """Two H200s, causal, up to 16k tokens of a GPU; beyond, the power cap lowers their clock."""
    compared = 0
    for row in json.loads(MEASURED.read_text())["rows"]:
        size = context_rings.Size(**row["size"])
        if "both" not in row or not size.causal or size.tokens > 16384:
            continue
        for direction, both in (("forward", False), ("both", True)):
            inputs = size.tokens, size.heads, size.kv_heads, 128, 2, context_model.H200, context_model.NVLINK
            expected = context_model.predict(*inputs, both).seconds * 1e3
            assert expected == pytest.approx(row[direction]["ours"]["ms"], rel=0.05), (str(size), direction)
            compared += 1
    assert compared >= 8
