"""The command lines: what they print and where they stop, without a GPU."""

import re
import shlex

import pytest
import torch
from running import ROOT, run

import bench
import ref_check
from harness import case_list, machine_code, models, mutations, peers, results
from harness.sweep import short_sweep, sweep
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import compile_stage

NO_KERNEL = "no kernel was executed"
SHA_LINE = re.compile(r"^d(\d+) (\w+) .* cubin sha256 ([0-9a-f]{64})$", re.M)
BACKWARD = [stage_id for stage_id in ladder.LADDER if ladder.load(stage_id)[0].direction == "bwd"]


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


def test_bench_of_a_stage_for_few_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Inspected like any other; on a GPU the sweep has no row for it."""
    done = run("python bench.py bwd4_one --head-dim 64 --causal 0")
    assert (done.returncode, done.stderr) == (0, "")
    assert NO_KERNEL in done.stdout
    assert "bound at N = 128" in done.stdout
    sha = machine_code.identity(
        compile_stage("bwd4_one", Problem.square(1, 1, 128, 64, False, direction="bwd"))
    )
    assert SHA_LINE.findall(done.stdout) == [("64", "full", sha)]
    monkeypatch.setattr(bench, "hopper_gpu", lambda: True)
    assert bench.main(["bwd4_one"]) == 2
    assert "bwd4_one is for so few keys that the sweep has no row" in capsys.readouterr().err


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
    monkeypatch.setattr(case_list, "run_model", lambda stage_id: ["n1: off"] if stage_id == "k1" else [])
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
    monkeypatch.setitem(models.MODELS, "flash_attention_2", wrong)
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


@pytest.mark.parametrize("stage_id", BACKWARD)
def test_model_of_a_backward_stage(stage_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert case_list.run_model(stage_id) == []
    name = ladder.load(stage_id)[0].model
    right = models.BACKWARD_MODELS[name]
    wrong = lambda *inputs, **mask: (*right(*inputs, **mask)[:2], inputs[2])
    monkeypatch.setitem(models.BACKWARD_MODELS, name, wrong)
    unequal = 4 if stage_id.startswith("bwd4") else 0  # lengths, aligned at the top left
    assert len(case_list.run_model(stage_id)) == 6 * 2 * 2 + unequal


def test_report_runs_as_a_program() -> None:
    """A module without a call of its `main` exits 0 too, and says nothing."""
    done = run("python -m harness.report --check")
    assert (done.returncode, done.stdout) == (0, "everything generated is up to date\n")


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
        ("python -m harness.profile bwd4_one", "harness.profile: bwd4_one takes up to 128 keys"),
        ("python -m harness.profile decode", "harness.profile: decode has other problems than the sweep's"),
        ("python ref_check.py decode", "ref_check.py: decode has cases of its own"),
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


def test_every_peer_has_a_label() -> None:
    assert set(results.PEER_LABELS) == set(bench.parse(["k2"]).peers)
