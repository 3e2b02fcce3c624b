"""`bench.py` from the check to the file it writes, without a GPU: stand-ins take the place of the kernel, the
timer and the peers."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import of_codes
import pytest
import torch

import bench
from harness import judging, machine_code, measuring, peers, timing
from harness.inputs import random_inputs
from harness.quantized import held
from harness.results import PUBLIC_CALLS, Results
from hopper_attention import tuned
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Tensors


def sha_of(compiled: SimpleNamespace) -> str:
    return compiled.name.encode().hex().ljust(64, "0")


class ToyKernel:
    """In place of a kernel file: the reference, at fault from a sequence length on, or nothing written from a
    launch on."""

    def __init__(self, fails_from: int | None = None, writes: int = 10**9):
        self.fails_from, self.writes, self.launches = fails_from, writes, 0

    def workspace(self, problem: Problem, **options: object) -> dict:
        return {}

    def run_kernel(self, compiled: SimpleNamespace, t: Tensors) -> None:
        self.launches += 1
        if self.launches > self.writes:
            return
        expected = judging.Expected(*of_codes.read(t), compiled.causal, t.do)
        results = expected.forward if t.do is None else expected.gradients
        for x, result in zip(t.outputs.values(), results):
            x.copy_(result)
        if self.fails_from is not None and t.q.shape[2] >= self.fails_from:
            next(iter(t.outputs.values()))[..., 3, 5] += 0.1


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> dict[str, ToyKernel | Exception]:
    """A stage's stand-in by its id; what is an exception is raised while preparing the launch."""
    names = *ladder.LADDER, *PUBLIC_CALLS.values()
    stand_ins: dict[str, ToyKernel | Exception] = {name: ToyKernel() for name in names}

    def ready(contender: measuring.Contender, expected: judging.Expected, problem: Problem) -> tuple:
        toy = stand_ins[contender.name]
        if isinstance(toy, Exception):
            raise toy
        compiled = SimpleNamespace(name=contender.name, causal=problem.causal)
        tensors = expected.allocate(toy, problem)  # in memory that an earlier run left its result in
        left = expected.forward if expected.do is None else expected.gradients
        for x, result in zip(tensors.outputs.values(), left):
            x.copy_(result)
        return toy, compiled, tensors

    def peer(error: Exception | None = None) -> peers.Peer:
        def forward(problem: Problem, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
            def call() -> torch.Tensor:
                if error:
                    raise error
                return sum(inputs)

            return call

        return peers.Peer(lambda: "1.0", forward)

    def interleaved(calls: dict[str, Callable]) -> dict[str, timing.Timing]:
        for call in calls.values():
            call()
        return {name: timing.Timing(0.25, 0.01, 1700.0, None) for name in calls}

    environment = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "1", "cuda": "2", "torch": "3"}
    environment["cutlass_dsl"] = "4"
    lacking = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9.00 GiB of which "
        "1.50 GiB is free."
    )
    monkeypatch.setattr("harness.sweep.TOTAL_TOKENS", 256)
    monkeypatch.setattr("harness.sweep.HIDDEN_SIZE", 128)
    monkeypatch.setattr(measuring, "random_inputs", lambda problem: random_inputs(problem, "cpu"))
    monkeypatch.setattr(measuring, "ready", ready)
    monkeypatch.setattr(tuned, "gpu", lambda device=None: tuned.H200)
    monkeypatch.setattr(measuring, "peak_memory", lambda: contextlib.nullcontext(lambda: 2**20))
    monkeypatch.setattr(measuring, "SUSTAINED_TFLOPS", 0.0)
    for rate in ("gemm_tflops", "copy_tb_per_s"):
        monkeypatch.setattr(timing, rate, lambda: 12.5)
    monkeypatch.setattr(machine_code, "identity", sha_of)
    monkeypatch.setattr(timing, "environment", lambda found: environment | {"peers": found, "host_us": {}})
    monkeypatch.setattr(timing, "interleaved", interleaved)
    at_cap = lambda calls, ms: {name: timing.Timing(2 * ms[name], 0.0, 1400.0, 690.0) for name in calls}
    monkeypatch.setattr(timing, "sustained", at_cap)
    monkeypatch.setattr(timing, "host_microseconds", lambda call: call() or 4.321)
    table = {"math": peer(lacking), "fa2": peer(), "flex": peer(RuntimeError("no such mask\nat line 3"))}
    monkeypatch.setattr(peers, "PEERS", table)
    for name, answer in {
        "is_available": True,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100",
        "synchronize": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return stand_ins


SMALL = ["--head-dim", "64", "--causal", "1"]


def load(folder: Path, stage_id: str) -> Results:
    return Results.load(folder / "h100-80gb-hbm3" / f"{stage_id}.json")


def test_a_passing_run_is_saved(toys: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["k1", "k2", *SMALL, "--seqlen", "64", "--save", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("of the hardware bound") == 2
    assert re.search(r"^k2 +b4 h2 n64 d64 causal bfloat16 +pass +0\.0\d TFLOP/s", out, re.M)
    assert "1.000 × fa2" in out
    for stage_id in ("k1", "k2"):
        saved = load(tmp_path, stage_id)
        assert {row.provider for row in saved.rows} == {stage_id, *peers.PEERS}
        (row,) = (row for row in saved.rows if row.provider == stage_id)
        assert row.problem == Problem.square(4, 2, 64, 64, True)
        assert (row.check, row.ms_median, row.tflops_sustained) == ("pass", 0.25, None)
        assert row.tflops == row.problem.flops / 0.25e-3 / 1e12
        assert row.peak_bytes == 2**20
        assert 0 < row.max_error < 0.02
        assert row.cubin_sha256 == sha_of(SimpleNamespace(name=stage_id))
        assert saved.environment["host_us"] == {stage_id: 4.32}
        assert (saved.environment["gemm_tflops"], saved.environment["copy_tb_per_s"]) == (12.5, 12.5)
        errors = {row.provider: row.error for row in saved.rows if row.error}
        assert errors == {
            "math": "OOM: needs at least 9.5 GiB, the GPU has 9.0",
            "flex": "unsupported: no such mask",
        }


def test_a_public_call_is_timed_beside_its_kernel(
    toys: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of its own in the stage's file, checked like the stage's, and no peer of it."""
    command = ["k6", *SMALL, "--seqlen", "64", "--save", str(tmp_path)]
    assert bench.main(command) == 0
    assert re.search(r"^attention +b4 h2 .* pass .* 1\.000 × fa2", capsys.readouterr().out, re.M)
    saved = load(tmp_path, "k6")
    assert {row.provider: row.check for row in saved.rows if row.tflops} == {
        "k6": "pass", "attention": "pass", "fa2": None,
    }  # fmt: skip
    assert saved.best_peer(saved.rows[0].problem).provider == "fa2"
    assert saved.environment["host_us"] == {"k6": 4.32, "attention": 4.32}
    toys["attention"] = ToyKernel(writes=3)  # what is judged first, behind two whose memory is poisoned
    assert bench.main(command) == 1
    assert "after the timing" in capsys.readouterr().out


def test_what_is_timed_of_a_public_call_is_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs are the ones that are judged, not what was allocated beside it."""
    seen = []
    found = {"attention": ("o", "lse"), "attention_backward": ("dq", "dk", "dv")}
    for name, outputs in found.items():
        call = lambda *x, outputs=outputs, **options: seen.append(options) or outputs
        monkeypatch.setattr(measuring, name, call)
    of_stage = {
        "k6": {"return_lse": True},
        "bwd4": {"deterministic": False},
        "bwd4_det": {"deterministic": True},
    }
    for stage_id, options in of_stage.items():
        contender = measuring.Contender.public_call(stage_id)
        direction = ladder.load(stage_id)[0].direction
        problem = Problem.square(1, 2, 64, 64, True, direction=direction)
        q, k, v, *do = random_inputs(problem, "cpu")
        t = Tensors(q, k, v, q, q, do=do[0] if do else None)
        measuring.PublicCall(contender, problem).run_kernel(None, t)
        assert list(t.outputs.values()) == list(t.outputs)
        assert seen.pop() == {"causal": True, "top_left": False, **options}


def test_a_second_run_joins_the_first(toys: dict, tmp_path: Path) -> None:
    for seqlen in ("64", "128", "64"):
        assert bench.main(["k2", *SMALL, "--seqlen", seqlen, "--peers", "none", "--save", str(tmp_path)]) == 0
    assert [row.seqlen_q for row in load(tmp_path, "k2").rows] == [64, 128]


def test_long_rows_have_a_sustained_rate(toys: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SUSTAINED_FROM", 128)
    monkeypatch.setattr(bench, "LENGTHS", (64, 128))
    assert bench.main(["k2", *SMALL, "--peers", "none", "--save", str(tmp_path)]) == 0
    short, long = load(tmp_path, "k2").rows
    assert (short.tflops_sustained, short.clock_mhz) == (None, 1700.0)
    assert (long.tflops_sustained, long.clock_mhz, long.power_w) == (long.tflops / 2, 1400.0, 690.0)


def test_a_failed_check_has_no_number_and_is_not_saved(
    toys: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toys["k1"] = ToyKernel(fails_from=0)
    command = [*SMALL, "--seqlen", "64", "--save", str(tmp_path)]
    assert bench.main(["k1", *command, "--peers", "none"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^k1 +b4 h2 n64 d64 causal bfloat16 +fail +max error .* worst at \(", out, re.M)
    assert "TFLOP/s ±" not in out
    assert "A check failed: those rows have no time, and were not written." in out
    assert toys["k1"].launches == 1  # the check's: it was not timed
    assert load(tmp_path, "k1").rows == []

    assert bench.main(["k1", "k2", *command]) == 1
    assert capsys.readouterr().out.count("of the hardware bound") == 1  # k2's
    assert {row.provider for row in load(tmp_path, "k1").rows} == set(peers.PEERS)
    assert {row.provider for row in load(tmp_path, "k2").rows} == {"k2", *peers.PEERS}


@pytest.mark.parametrize("last", [1, 2])  # the check's launch, and the timed one's
def test_what_stops_writing_after_its_check_has_no_number(
    last: int, toys: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its outputs still hold what the check saw, but for the poison."""
    toys["k2"] = ToyKernel(writes=last)
    command = ["k2", *SMALL, "--seqlen", "64", "--peers", "none", "--save", str(tmp_path)]
    assert bench.main(command) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"^k2 .* fail +after the timing: \d+ elements finite in one and not in the other", out, re.M
    )
    assert "TFLOP/s ±" not in out
    assert load(tmp_path, "k2").rows == []


def test_rows_measured_before_a_crash_are_kept(
    toys: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LENGTHS", (64, 128))

    def crash(calls: dict) -> dict:
        if len(list(tmp_path.rglob("k2.json"))):
            raise RuntimeError("the driver is gone")
        return measured(calls)

    measured = timing.interleaved
    monkeypatch.setattr(timing, "interleaved", crash)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        bench.main(["k2", *SMALL, "--peers", "none", "--save", str(tmp_path)])
    assert [row.seqlen_q for row in load(tmp_path, "k2").rows] == [64]


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(
    toys: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["k2", *SMALL, "--seqlen", "64", "--peers", "none", "--save"]
    (tmp_path / "a file").write_text("")
    (tmp_path / "taken" / "h100-80gb-hbm3" / "k2.json").mkdir(parents=True)
    for folder in ("a file", "taken"):
        assert bench.main([*command, str(tmp_path / folder)]) == 2
        assert re.fullmatch(r"bench\.py: .+\n", capsys.readouterr().err)
    assert toys["k2"].launches == 0


def test_an_earlier_result_in_memory_passes_no_check(
    toys: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toys["k2"] = ToyKernel(writes=0)
    command = ["k2", *SMALL, "--seqlen", "64", "--peers", "none", "--save", str(tmp_path)]
    assert bench.main(command) == 1
    assert "elements finite in one and not in the other" in capsys.readouterr().out
    assert load(tmp_path, "k2").rows == []


def test_a_failed_check_leaves_what_was_saved(toys: dict, tmp_path: Path) -> None:
    command = ["k1", *SMALL, "--seqlen", "64", "--save", str(tmp_path)]
    assert bench.main(command) == 0
    before = load(tmp_path, "k1")
    toys["k1"] = ToyKernel(fails_from=0)
    assert bench.main(command) == 1
    assert load(tmp_path, "k1") == before


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_check_of_every_row(how: str, toys: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each kernel compiled; with CHECK=1 each row, where a fault of long sequences shows."""
    monkeypatch.setattr(bench, "LENGTHS", (64, 128))
    toys["k2"] = ToyKernel(fails_from=128)
    command = ["k2", *SMALL, "--peers", "none"]
    assert bench.main(command) == 0
    if how == "flag":
        command.append("--check")
    else:
        monkeypatch.setenv("CHECK", "1")
    assert bench.main(command) == 1


def test_rows_after_a_failed_one_are_checked_again(toys: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LENGTHS", (128, 64))
    toys["k2"] = ToyKernel(fails_from=128)
    args = bench.parse(["k2", *SMALL, "--peers", "none"])
    run = measuring.Bench([measuring.Contender.stage("k2")], [], False, timing.environment({}))
    first, second = (run.measure(problem)[0] for problem in args.problems)
    assert (first.check, first.tflops, first.cubin_sha256) == ("fail", None, None)
    assert (second.check, second.max_error is None) == ("pass", False)


def test_scratch_that_does_not_fit_becomes_a_row(
    toys: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toys["k1"] = MemoryError("k1 needs 34.4 GB of scratch")
    assert bench.main(["k1", "k2", *SMALL, "--seqlen", "64", "--save", str(tmp_path)]) == 0
    assert re.search(r"^k1 .* OOM: k1 needs 34\.4 GB of scratch$", capsys.readouterr().out, re.M)
    (row,) = (row for row in load(tmp_path, "k1").rows if row.provider == "k1")
    assert (row.error, row.tflops, row.check) == ("OOM: k1 needs 34.4 GB of scratch", None, None)
    assert any(row.tflops for row in load(tmp_path, "k2").rows if row.provider == "k2")


def test_a_stage_in_fp8_is_beside_the_peers_that_have_it(
    toys: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are given what the stage is, in 16 bits, and named by versions of their own."""
    given = []

    def in_fp8(problem: Problem, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
        assert problem.direction == "fp8"
        *codes, scales = inputs
        given.append([x.float() * scale for x, scale in zip(codes, scales, strict=True)])
        return lambda: codes[0]

    peer = dataclasses.replace(peers.PEERS["fa2"], fp8=in_fp8, fp8_version=lambda: "8.0")
    monkeypatch.setitem(peers.PEERS, "fa2", peer)
    assert bench.main(["k7", *SMALL, "--seqlen", "64", "--save", str(tmp_path)]) == 0
    saved = load(tmp_path, "k7")
    assert saved.environment["peers"] == {"fa2": "8.0"}
    assert [row.provider for row in saved.rows if row.error is None] == ["k7", "fa2"]
    assert {row.direction for row in saved.rows} == {"fp8"}
    assert saved.rows[0].check == "pass"
    assert saved.rows[0].problem == Problem.square(4, 2, 64, 64, True, direction="fp8")
    ((q, k, v),) = given
    assert all(torch.equal(held(x), x) for x in (q, k, v))
    toys["k7"] = ToyKernel(fails_from=0)
    assert bench.main(["k7", *SMALL, "--seqlen", "64", "--peers", "none"]) == 1


# Backward stages


BACKWARD = [stage_id for stage_id in ladder.LADDER if ladder.load(stage_id)[0].direction == "bwd"]
backward = pytest.mark.skipif(not BACKWARD, reason="the ladder has no backward stage yet")


@backward
def test_a_backward_stage_beside_a_forward_one(toys: dict, tmp_path: Path) -> None:
    """Each direction has its own problems and peers, and a file holds the rows of its stage's direction."""
    stages = [BACKWARD[0], "k2"]
    assert bench.main([*stages, *SMALL, "--seqlen", "64", "--save", str(tmp_path)]) == 0
    for stage_id, direction, flops in (("k2", "fwd", 1.0), (BACKWARD[0], "bwd", 2.5)):
        saved = load(tmp_path, stage_id)
        assert [row.provider for row in saved.rows if row.error is None] == [stage_id, "fa2"]
        assert {row.direction for row in saved.rows} == {direction}
        assert saved.rows[0].check == "pass"
        assert saved.rows[0].tflops == flops * 4 * 4 * 2 * 64 * 64 * 64 / 2 / 0.25e-3 / 1e12
        assert set(saved.environment["host_us"]) == {stage_id}


@backward
def test_a_backward_stage_that_fails_its_check(toys: dict, capsys: pytest.CaptureFixture[str]) -> None:
    for toy, words in ((ToyKernel(fails_from=0), "max error"), (ToyKernel(writes=0), r"\d+ elements")):
        toys[BACKWARD[0]] = toy
        assert bench.main([BACKWARD[0], *SMALL, "--seqlen", "64", "--peers", "none"]) == 1
        assert re.search(rf"^{BACKWARD[0]} .* fail +dq: {words} ", capsys.readouterr().out, re.M)
