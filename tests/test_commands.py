"""The command lines: what they print and where they stop, without a GPU; and every command of the README.

Where a benchmark needs a GPU, stand-ins take the place of the kernel, the timer and the peers, and `bench.py`
itself is what is tested.
"""

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import of_codes
import pytest
import torch

import bench
import ref_check
from harness import case_runs, cases, judging, machine_code, measuring, mutations, peers, results, timing
from harness.inputs import random_inputs
from harness.quantized import held
from harness.results import PUBLIC_CALLS, Results, repository
from harness.sweep import short_sweep, sweep
from hopper_attention import tuned
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Tensors
from hopper_attention.launch import compile_stage

ROOT = repository()
NO_KERNEL = "no kernel was executed"
SHA_LINE = re.compile(r"^d(\d+) (\w+) .* cubin sha256 ([0-9a-f]{64})$", re.M)


def run(command: str, **environment: str) -> subprocess.CompletedProcess:
    """A shell line `[NAME=value ...] python ...` from the repository's root, with no GPU in sight."""
    words = shlex.split(command)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    env |= {"CUDA_VISIBLE_DEVICES": ""} | environment
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, env[name] = words.pop(0).partition("=")
    assert words[0] == "python"
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400
    )


# Without a GPU


def test_bench_without_a_gpu() -> None:
    done = run("python bench.py k2 --seqlen 512 --head-dim 64 --causal 0")
    assert (done.returncode, done.stderr) == (0, "")
    assert NO_KERNEL in done.stdout
    assert "bound at N = 512" in done.stdout
    assert "model flash_attention_2: agrees with float64 attention" in done.stdout
    assert "TFLOP/s ±" not in done.stdout
    # Another process, the same machine code.
    sha = machine_code.identity(compile_stage("k2", Problem.square(32, 32, 512, 64, False)))
    assert SHA_LINE.findall(done.stdout) == [("64", "full", sha)]


def test_bench_with_pins_in_the_environment() -> None:
    done = run("CHECK=1 SEQLEN=512 HEADDIM=64 CAUSAL=0 python bench.py k1")
    assert (done.returncode, done.stderr) == (0, "")
    assert NO_KERNEL in done.stdout
    assert re.findall(r"^d(\d+) (\w+) ", done.stdout, re.M) == [("64", "full")]


def test_bench_compiles_for_hopper_whatever_the_environment_says() -> None:
    done = run("CUTE_DSL_ARCH=sm_80 python bench.py k1 --seqlen 512 --head-dim 64 --causal 0")
    assert done.returncode == 0
    assert "compiled for sm_90a" in done.stdout
    sha = machine_code.identity(compile_stage("k1", Problem.square(32, 32, 512, 64, False)))
    assert SHA_LINE.findall(done.stdout) == [("64", "full", sha)]


def test_bench_of_a_whole_stage() -> None:
    done = run("python bench.py k2")
    assert (done.returncode, done.stderr) == (0, "")
    assert NO_KERNEL in done.stdout
    found = {(d, mask): sha for d, mask, sha in SHA_LINE.findall(done.stdout)}
    assert list(found) == [("64", "full"), ("64", "causal"), ("128", "full"), ("128", "causal")]
    assert len(set(found.values())) == 4


def test_bench_fails_when_a_model_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All stages are reported on, also after one whose model fails."""
    reported = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cases, "run_model", lambda stage_id: ["n1: off"] if stage_id == "k1" else [])
    monkeypatch.setattr(bench.machine_code, "inspect", lambda *_: reported.append(1) or [])
    monkeypatch.setattr(bench.machine_code, "bound_tflops", lambda *_: 1.0)
    monkeypatch.setattr(bench.machine_code, "identity", lambda *_: "a" * 64)
    monkeypatch.setattr(bench, "compile_stage", lambda *_: None)
    assert bench.main(["k1", "k2", "--seqlen", "512", "--head-dim", "64", "--causal", "0"]) == 1
    out = capsys.readouterr().out
    assert len(reported) == 2
    assert "model safe_softmax_attention: FAILS" in out
    assert "n1: off" in out
    assert "model flash_attention_2: agrees" in out
    assert bench.main(["k2", "--seqlen", "512", "--head-dim", "64", "--causal", "0"]) == 0


def test_ref_check_without_a_gpu() -> None:
    done = run("python ref_check.py k2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"k2: no Hopper GPU, {NO_KERNEL}; its model passes\n"


def test_ref_check_fails_when_a_model_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong = lambda q, k, v, **mask: (v, q[:, 0])
    monkeypatch.setitem(cases.models.MODELS, "flash_attention_2", wrong)
    assert ref_check.main(["k1", "k2"]) == 1
    out = capsys.readouterr().out
    assert f"k1: no Hopper GPU, {NO_KERNEL}; its model passes" in out
    assert f"k2: no Hopper GPU, {NO_KERNEL}; its model fails\n    b1 h1 n" in out


def test_ref_check_reports_a_mutation_that_survives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = Problem.square(1, 1, 512, 64, False)
    monkeypatch.setattr(ref_check, "sweep", lambda direction: [problem.with_(direction=direction)])
    assert ref_check.main(["--mutations"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"fwd {problem}: all {len(mutations.MUTATIONS)} mutations caught",
        f"bwd {problem}: all {len(mutations.GRADIENT_MUTATIONS)} mutations caught",
    ]
    monkeypatch.setattr(mutations, "survivors", lambda *_, **__: ["drop a key: passed the rule"])
    assert ref_check.main(["--mutations"]) == 1
    assert "MISSED ['drop a key: passed the rule']" in capsys.readouterr().out


def test_everything_imports_without_a_gpu() -> None:
    modules = ["bench", "ref_check"]
    for folder in (
        "harness",
        "hopper_attention",
        "hopper_attention/kernels",
        "hopper_attention/kernels/device",
    ):
        name = folder.replace("/", ".")
        modules += [f"{name}.{path.stem}" for path in sorted((ROOT / folder).glob("*.py"))]
    code = f"import {', '.join(modules)}; import torch; assert not torch.cuda.is_initialized()"
    done = run(f"python -c {shlex.quote(code)}")
    assert (done.returncode, done.stderr) == (0, "")


# What cannot be done: one line and exit status 2


WRONG_BENCH = {
    "": "required: stages",
    "k99": "unknown stage 'k99'; the ladder has k1, ",
    "k2 k99": "unknown stage 'k99'",
    "k2 --head-dim 96": "k2 takes head_dim 64 or 128, not 96",
    "k2 --head-dim 0": "HEADDIM must be a positive whole number, not '0'",
    "k2 --suite models": "--suite is for k6 and bwd4",
    "k6 --suite models": "needs a Hopper GPU",
    "k2 --seqlen 0": "SEQLEN must be a positive whole number, not '0'",
    "k2 --seqlen -1": "SEQLEN|expected one argument",
    "k2 --seqlen 1e3": "SEQLEN must be a positive whole number, not '1e3'",
    "k2 --seqlen ٣": "SEQLEN must be a positive whole number",
    "k2 --causal 2": "CAUSAL must be 0 or 1, not '2'",
    "k2 --causal": "expected one argument",
    "k2 --peers fa2,fa9": "unknown peer 'fa9'; there are math, ",
    "k2 --peers ''": "unknown peer ''",
    "k2 --fast": "unrecognized arguments: --fast",
    "k6 k7": "stages in FP8 have peers of their own: measure them in a run of their own",
    "k7 bwd4": "stages in FP8 have peers of their own",
    "k7 --suite models": "--suite is for k6 and bwd4",
    "k7 --head-dim 96": "k7 takes head_dim 64, 128 or 256, not 96",
    "SEQLEN=x k2": "SEQLEN must be a positive whole number, not 'x'",
    "SEQLEN= k2": "SEQLEN must be a positive whole number, not ''",
    "HEADDIM=59 k2": "k2 takes head_dim 64 or 128, not 59",
    "CAUSAL=yes k2": "CAUSAL must be 0 or 1, not 'yes'",
    "CHECK=true k2": "CHECK must be 0 or 1, not 'true'",
}


@pytest.mark.parametrize(("words", "message"), WRONG_BENCH.items())
def test_bench_refuses(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shlex.split(words)
    while arguments and "=" in arguments[0]:
        monkeypatch.setenv(*arguments.pop(0).split("="))
    assert bench.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"bench\.py: .*(?:{message}).*\n", err)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python bench.py k99", "bench.py: unknown stage 'k99'"),
        ("SEQLEN=no python bench.py k2", "bench.py: SEQLEN must be"),
        ("python ref_check.py k99", "ref_check.py: unknown stage 'k99'"),
        ("python ref_check.py k2 --save", "ref_check.py: nothing to save without a Hopper GPU"),
        ("python -m harness.profile k99", "harness.profile: unknown stage 'k99'"),
        ("python -m harness.ablation k99", "harness.ablation: unknown stage 'k99'"),
        ("python -m harness.ablation k2", "harness.ablation: k2 declares no VARIANTS"),
        ("python -m harness.ablation fa1", "harness.ablation: timing variants needs a Hopper GPU"),
    ],
)
def test_commands_stop_with_one_line(command: str, message: str) -> None:
    done = run(command)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SEQLEN": "1024", "HEADDIM": "64", "CAUSAL": "1", "CHECK": "1"}.items():
        monkeypatch.setenv(name, value)
    args = bench.parse(["k2"])
    assert args.problems == [Problem.square(16, 32, 1024, 64, True)]
    assert args.check
    args = bench.parse(["k2", "--seqlen", "512", "--head-dim", "128", "--causal", "0"])
    assert args.problems == [Problem.square(32, 16, 512, 128, False)]


def test_bench_sweeps_everything_by_default() -> None:
    args = bench.parse(["all"])
    in_fp8 = {"k7": "fp8", "k7_rows": "fp8_rows", "k8": "fp8_cast"}
    assert args.stages == [stage_id for stage_id in ladder.LADDER if stage_id not in in_fp8]
    for stage_id, direction in in_fp8.items():
        assert set(bench.parse([stage_id]).problems) == {*sweep(direction), *short_sweep(direction)}
    assert len(bench.parse([*in_fp8]).problems) == 32 * 3
    directions = {ladder.load(stage_id)[0].direction for stage_id in args.stages}
    swept = lambda direction: {*sweep(direction), *short_sweep(direction)}
    assert set(args.problems) == set().union(*map(swept, directions))
    assert len(args.problems) == 32 * len(directions)
    assert set(bench.parse(["k1", "k2"]).problems) == swept("fwd")
    assert not args.check
    assert args.peers == list(peers.PEERS)
    assert bench.parse(["k2", "--peers", "none"]).peers == []
    assert bench.parse(["k3", "k2"]).stages == ["k3_1", "k3_2", "k3_3", "k2"]  # the stages of a file
    assert bench.parse(["k2", "--save"]).save == ROOT / "results"
    assert bench.parse(["k2"]).save is None


# With a GPU, as far as one is not needed


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
    monkeypatch.setattr(timing, "sustained", lambda call, ms: timing.Timing(2 * ms, 0.0, 1400.0, 690.0))
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
    toys["attention"] = ToyKernel(writes=1)
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


def test_ready_gives_a_stage_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prepare", "prepare_backward"):
        monkeypatch.setattr(case_runs, name, lambda *inputs, **options: (inputs, options))
    q, k, v, do = random_inputs(Problem.square(1, 2, 33, 64, True, direction="bwd"), "cpu")
    forward = judging.Expected(q, k, v, True).inputs
    mask = {"causal": True, "top_left": False}
    assert case_runs.ready("k2", forward, True) == ((q, k, v), {**mask, "stage": "k2"})
    expected = judging.Expected(q, k, v, True, do)
    (got_do, *inputs, o, lse), options = case_runs.ready("bwd1", expected.inputs, True)
    assert got_do is do
    assert all(x is y for x, y in zip(inputs, (q, k, v), strict=True))
    assert options == {**mask, "stage": "bwd1"}
    assert case_runs.ready("k6", forward, True, True)[1] == {
        "causal": True,
        "top_left": True,
        "stage": "k6",
    }
    assert (o.dtype, lse.dtype) == (q.dtype, torch.float32)
    assert torch.equal(o, expected.forward[0].to(q.dtype))
    assert torch.equal(lse, expected.forward[1].float())


@backward
@pytest.mark.parametrize("stage_id", BACKWARD)
def test_model_of_a_backward_stage(stage_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cases.run_model(stage_id) == []
    name = ladder.load(stage_id)[0].model
    right = cases.models.BACKWARD_MODELS[name]
    wrong = lambda *inputs, **mask: (*right(*inputs, **mask)[:2], inputs[2])
    monkeypatch.setitem(cases.models.BACKWARD_MODELS, name, wrong)
    unequal = 4 if stage_id.startswith("bwd4") else 0  # lengths, aligned at the top left
    assert len(cases.run_model(stage_id)) == 6 * 2 * 2 + unequal


# Peers


@pytest.mark.parametrize("rows_first", [False, True])
def test_peers_backward_pass_alone(rows_first: bool) -> None:
    """The call is of the backward pass, as often as one likes, and its gradients are attention's."""
    forwards = []

    def forward(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable:
        def call() -> torch.Tensor:
            forwards.append(q)
            x = [t.transpose(1, 2) for t in (q, k, v)] if rows_first else (q, k, v)
            o = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=problem.causal)
            return o.transpose(1, 2) if rows_first else o

        return call

    problem = Problem.square(2, 3, 17, 64, True, direction="bwd")
    q, k, v, do = random_inputs(problem, "cpu")
    call = peers.Peer(lambda: "1.0", forward, rows_first).build(problem, q, k, v, do)
    for _ in range(2):
        found = [x.transpose(1, 2) if rows_first else x for x in call()]
        exact = judging.Expected(q, k, v, True, do).gradients
        for x, ref in zip(found, exact, strict=True):
            assert torch.allclose(x.double(), ref, atol=0.03 * ref.abs().max().item(), rtol=0)
    assert len(forwards) == 1
    assert not q.requires_grad
    plain = peers.Peer(lambda: "1.0", forward, rows_first).build(problem.with_(direction="fwd"), q, k, v)
    assert len(forwards) == 1
    assert not plain().requires_grad


@pytest.mark.parametrize("lengths", [(16, 16), (16, 40), (40, 16)])
@pytest.mark.parametrize(("causal", "top_left"), [(False, False), (True, False), (True, True)])
def test_math_peer_on_the_cpu(lengths: tuple[int, int], causal: bool, top_left: bool) -> None:
    problem = Problem(1, 4, 2, *lengths, 64, causal, direction="bwd", top_left=top_left)
    q, k, v, do = random_inputs(problem, "cpu")
    if causal and not top_left and lengths != (16, 16):
        with pytest.raises(ValueError, match="aligns a causal mask at the top left"):
            peers.PEERS["math"].build(problem, q, k, v, do)
        return
    found = peers.PEERS["math"].build(problem, q, k, v, do)()
    for x, ref in zip(found, judging.Expected(q, k, v, causal, do, top_left).gradients, strict=True):
        assert torch.allclose(x.double(), ref, atol=0.03 * ref.abs().max().item(), rtol=0)


def test_fa4_aligns_at_the_bottom_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cute = SimpleNamespace(flash_attn_func=lambda q, k, v, causal: (q, None))
    for name, module in (("flash_attn", SimpleNamespace(cute=cute)), ("flash_attn.cute", cute)):
        monkeypatch.setitem(sys.modules, name, module)
    problem = Problem(1, 4, 2, 16, 40, 64, True)
    q, k, v = random_inputs(problem, "cpu")
    peers.PEERS["fa4"].build(problem, q, k, v)()
    peers.PEERS["fa4"].build(problem.with_(seqlen_q=40, top_left=True), q, k, v)()
    with pytest.raises(ValueError, match="aligns a causal mask at the bottom right"):
        peers.PEERS["fa4"].build(problem.with_(top_left=True), q, k, v)


@pytest.mark.parametrize("name", [name for name in peers.PEERS if name not in ("fa3", "fa4")])
def test_other_peers_align_at_the_top_left(name: str) -> None:
    problem = Problem(1, 2, 2, 16, 40, 64, True)
    q, k, v = random_inputs(problem, "cpu")
    with pytest.raises(ValueError, match="aligns a causal mask at the top left"):
        peers.PEERS[name].build(problem, q, k, v)


# The README


README = ROOT / "README.md"
READ = [README, *sorted((ROOT / "notes").glob("*.md"))]  # the list of commands is in notes/measuring.md
COMMAND = re.compile(r"(?:[A-Z_]+=\S+\s+)*(?:python3?|make)\s")
# How each command a reader is told to type is tested.
RUN_HERE = "a test of this file runs it"
PARSED = "long: test_long_commands_are_understood gives it to its parser"
EXPANDED = "test_make_runs_the_right_program reads what it would run"
ELSEWHERE = "another file's tests call its main"
ITSELF = "it runs these tests"
TESTED = {
    "python bench.py k2": RUN_HERE,
    "python bench.py k2 --seqlen 512 --head-dim 64 --causal 0": RUN_HERE,
    "CHECK=1 SEQLEN=512 HEADDIM=64 CAUSAL=0 python bench.py k1": RUN_HERE,
    "python ref_check.py k2": RUN_HERE,
    "python bench.py all": PARSED,
    "python bench.py all --save": PARSED,
    "python bench.py k1 fa1 k2": PARSED,
    "python bench.py k3": PARSED,
    "python bench.py k7 k7_rows k8": PARSED,
    "python bench.py bwd4 bwd4_det": PARSED,
    "python bench.py k6 bwd4 --head-dim 256": PARSED,
    "python bench.py k2 --save": PARSED,
    "python ref_check.py --mutations": RUN_HERE,
    "python ref_check.py k2 --save": RUN_HERE,
    "python -m harness.records": ELSEWHERE,
    "python bench.py k6 bwd4 --suite models": PARSED,
    "python -m harness.host": ELSEWHERE,
    "python -m harness.logits": ELSEWHERE,
    "python -m harness.accuracy": ELSEWHERE,
    "python -m harness.quantizing": ELSEWHERE,
    "python -m harness.ablation fa1": RUN_HERE,
    "python -m harness.report": ELSEWHERE,
    "python -m harness.draw": ELSEWHERE,
    "python -m harness.diff k2 k3_1": ELSEWHERE,
    "python -m harness.report --check": ELSEWHERE,
    "make bench": EXPANDED,
    "make bench KERNEL=k6": EXPANDED,
    "make check": EXPANDED,
    "make check KERNEL=k2": EXPANDED,
    "make report": EXPANDED,
    "make site": EXPANDED,
    "make site-check": EXPANDED,
    "make test": ITSELF,
    "make test-torch TORCH=2.15.0": EXPANDED,
}


def commands(markdown: str) -> list[str]:
    """The python and make lines of a document's sh and bash blocks, without prompts and comments."""
    blocks = re.findall(r"^```(?:sh|bash|shell|console)[^\n]*\n(.*?)^```", markdown, re.M | re.S)
    lines = [line.strip().removeprefix("$ ") for line in "".join(blocks).replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if COMMAND.match(f"{line} ")]
    return list(dict.fromkeys(map(" ".join, found)))


def test_commands_are_found() -> None:
    text = (
        "# Title\n\n```sh\npython bench.py k2   # comment\n$ CHECK=1 A=b python bench.py \\\n k1\nls\n```\n"
        "text `make nothing`\n```python\nmake = 1\n```\n```bash\nmake test\nmake test\nmaker x\n```\n"
    )
    assert commands(text) == ["python bench.py k2", "CHECK=1 A=b python bench.py k1", "make test"]


@pytest.mark.skipif(not README.exists(), reason="there is no README.md yet")
def test_every_command_of_the_documents_is_tested() -> None:
    found = [command for path in READ for command in commands(path.read_text(encoding="utf-8"))]
    assert len(found) > 20
    assert [command for command in found if command not in TESTED] == []


@pytest.mark.parametrize("command", [command for command, how in TESTED.items() if how == PARSED])
def test_long_commands_are_understood(command: str) -> None:
    program, *arguments = shlex.split(command)[1:]
    assert program == "bench.py"
    assert bench.parse(arguments).problems


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("make bench", "bench.py k2"),
        ("make bench KERNEL=k6", "bench.py k6"),
        ("make bench KERNEL=fa1", "bench.py fa1"),
        ("make check", "ref_check.py k2"),
        ("make check KERNEL=k2", "ref_check.py k2"),
        ("make report", "-m harness.report"),
        ("make report", "-m harness.draw"),
        ("make site", "-m harness.site"),
        ("make site-check", "-m harness.site_check"),
        ("make test", "-m ruff check ."),
        ("make test", "-m pytest"),
        ("make test-torch TORCH=2.15.0", "-m pytest tests/test_ops.py"),
    ],
)
def test_make_runs_the_right_program(command: str, runs: str) -> None:
    # Outside of the make that may run this test, whose flags would be taken over.
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "KERNEL")}
    make, *arguments = shlex.split(command)
    done = subprocess.run([make, "-n", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    environment = ".venv-2.15.0" if "TORCH" in command else ".venv"
    runs = f"{environment}/bin/python {runs}"
    assert any(f"{line} ".startswith(f"{runs} ") for line in done.stdout.splitlines())


def test_make_commands_are_all_expanded() -> None:
    (mark,) = (m for m in test_make_runs_the_right_program.pytestmark if m.name == "parametrize")
    expanded = {command for command, _ in mark.args[1]}
    assert {command for command, how in TESTED.items() if how == EXPANDED} <= expanded


def test_every_peer_has_a_label() -> None:
    assert set(results.PEER_LABELS) == set(bench.parse(["k2"]).peers)


def test_report_runs_as_a_program() -> None:
    """A module without a call of its `main` exits 0 too, and says nothing."""
    done = run("python -m harness.report --check")
    assert (done.returncode, done.stdout) == (0, "everything generated is up to date\n")
