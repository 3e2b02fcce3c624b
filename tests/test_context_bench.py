"""The bench of context parallelism without a GPU: its rings, its model of the time, its tables."""

from collections import Counter

import pytest
import torch

import bench
from harness import context_model, context_rings, context_tables
from harness import context_parallel as measuring
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


def test_tables() -> None:
    of = lambda ms: {"ms": ms, "ms_iqr": 0.0, "tflops": 100 / ms}
    size = {"tokens": 4096, "heads": 32, "kv_heads": 8, "causal": False}
    times = {"ours": of(1.0), "alone": of(0.9), "communicator": of(1.25), "communicator, margin 16": of(2.0)}
    row = {"size": size, "ranks": 2, "both": {**times, "communicator, margin 4": of(1.6), "overlap": None}}
    run = {"model": "small", "seqlen": 32768, "gpus": 2, "tokens_per_s": 1e5, "tflops_per_gpu": 400.0}
    found = context_tables.blocks([row], [{**run, "gib": 9.6, "losses": [5.5, 4.25]}])
    last = {name: lines.splitlines()[-1] for name, lines in found.items()}
    assert last == {
        "context-parallel": "| 4k, 32:8, full | forward + backward | **100** | 90.0% |  | 111 | 80"
        " |  |  |  |",
        "context-margins": "| 4k, 32:8, full | forward + backward | 100 | 80 | 62 | 50 |",
        "context-training": "| small, 32k | 2 | 100,000 | 400 | 10 | 5.5000 4.2500 |",
    }
    assert set(context_tables.blocks([], []).values()) == {context_tables.NOTHING}
