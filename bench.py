"""Check and benchmark stages of the ladder beside the peers.

    python bench.py k2                    the sweep: seqlen 128…16384 × head_dim {64, 128} × causal {0, 1}
    python bench.py k1 fa1 k2             several stages in one interleaved run; `all` for the 16-bit ladder
    python bench.py bwd4                  a backward stage, beside the peers' backward passes
    python bench.py k7 k7_rows k8         stages in FP8, beside the peers that have it, in a run of their own
    python bench.py context_parallel      a sequence on several GPUs (harness/context_parallel.py)
    python bench.py decode                a few queries to a cache, with rows of its own (harness/decoding.py)
    python bench.py k6 --suite models     the library on models' shapes (harness/suite.py), beside the peers
    python bench.py k6 bwd4 --suite packed    packed sequences, or `window`: harness/policy_suite.py
    CHECK=1 SEQLEN=512 HEADDIM=64 CAUSAL=0 python bench.py k1
    python bench.py k1 --check --seqlen 512 --head-dim 64 --causal 0

On a machine without a Hopper GPU the same command compiles the stage for sm_90a, reports what the machine
code asks of the hardware, checks the stage's algorithm on the CPU, and says that no kernel was executed.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from harness import (
    case_list,
    context_parallel,
    decoding,
    machine_code,
    peers,
    policy_suite,
    results,
    suite,
    suites,
    timing,
)
from harness.case_runs import fitted
from harness.command import Parser, Usage, as_usage, run
from harness.inputs import hopper_gpu
from harness.measuring import Bench, Contender, Saved, stages_for
from harness.results import PUBLIC_CALLS
from harness.stages import refuse
from harness.sweep import HEAD_DIMS, LENGTHS, sweep_problem
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import FORWARD, compile_stage

STATIC_SEQLEN = 4096  # where the static report states its bound
REPO = Path(__file__).resolve().parent


def whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise Usage(f"{name} must be a positive whole number, not {text!r}")
    return int(text)


def truth(text: str, name: str) -> bool:
    if text not in ("0", "1"):
        raise Usage(f"{name} must be 0 or 1, not {text!r}")
    return text == "1"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line and environment; a flag wins over the environment variable of the same meaning."""
    env = os.environ.get
    parser = Parser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", help=f"{', '.join(ladder.CHECKED)}, or all")
    parser.add_argument("--check", action="store_true", help="check every row, not once per kernel (CHECK=1)")
    parser.add_argument("--seqlen", default=env("SEQLEN"), help="one sequence length (SEQLEN)")
    parser.add_argument("--head-dim", default=env("HEADDIM"), help="one head dimension (HEADDIM)")
    parser.add_argument("--causal", default=env("CAUSAL"), help="0 or 1 (CAUSAL)")
    parser.add_argument("--peers", default=",".join(peers.PEERS), help="comma-separated, or none")
    parser.add_argument(
        "--save", nargs="?", const=REPO / "results", type=Path, help="write results/<gpu>/<stage>.json"
    )
    parser.add_argument(
        "--suite", choices=[*suites.SUITES, *policy_suite.SUITES], help="instead of the sweep"
    )
    args = parser.parse_args(arguments)
    # What is committed is checked row by row: a fault may show at one length only.
    args.check = args.check or truth(env("CHECK", "0"), "CHECK") or args.save is not None
    args.seqlens = LENGTHS if args.seqlen is None else (whole(args.seqlen, "SEQLEN"),)
    args.head_dims = HEAD_DIMS if args.head_dim is None else (whole(args.head_dim, "HEADDIM"),)
    args.causals = (False, True) if args.causal is None else (truth(args.causal, "CAUSAL"),)
    args.peers = [] if args.peers == "none" else args.peers.split(",")
    if unknown := [name for name in args.peers if name not in peers.PEERS]:
        raise Usage(f"unknown peer {unknown[0]!r}; there are {', '.join(peers.PEERS)}")
    if other := [x for x in args.stages if x in (*ladder.BESIDE, "context_parallel")]:
        if args.stages != other[:1] or args.suite:
            raise Usage(f"{other[0]} has rows of its own: measure it alone")
        named = {"head_dim": args.head_dim, "causal": args.causal, "seqlen": args.seqlen}
        named |= {"peers": None if args.peers == list(peers.PEERS) else args.peers}
        taken = {"seqlen"} if other[0] == "context_parallel" else set()
        if ignored := [name for name, x in named.items() if x is not None and name not in taken]:
            raise Usage(f"{other[0]} has rows of its own: it takes no --{ignored[0].replace('_', '-')}")
        return args
    everything = args.stages == ["all"]
    args.stages = ladder.stages_named(args.stages)
    few = [x for x in args.stages if x in ladder.FEW_KEYS and not everything]
    if few and hopper_gpu():
        raise Usage(f"{few[0]} is for so few keys that the sweep has no row: see bwd4's --suite models")
    if everything:  # that one run can hold
        args.stages = [x for x in ladder.LADDER if ladder.load(x)[0].direction in ("fwd", "bwd")]
    if args.suite and (other := [x for x in args.stages if x not in suite.DIRECTIONS]):
        raise Usage(f"--suite is for {' and '.join(suite.DIRECTIONS)}, the library's stages, not {other[0]}")
    with as_usage(ValueError):
        args.problems = [
            sweep_problem(n, d, causal, direction)
            for direction in dict.fromkeys(ladder.load(stage_id)[0].direction for stage_id in args.stages)
            for d in args.head_dims
            for causal in args.causals
            for n in args.seqlens
        ]
        if len({problem.in_fp8 for problem in args.problems}) > 1:
            raise Usage("stages in FP8 have peers of their own: measure them in a run of their own")
        for problem in args.problems:
            for stage_id in stages_for(problem, args.stages):
                refuse(stage_id, fitted(ladder.load(stage_id)[0], problem))
    return args


# ---- without a GPU -----------------------------------------------------------------------------------------


def static_report(stage_id: str, args: argparse.Namespace, console: Console) -> bool:
    """Compile, inspect, run the model. Returns whether the model passed."""
    stage, module = ladder.load(stage_id)
    n = args.seqlens[0] if len(args.seqlens) == 1 else STATIC_SEQLEN
    n = min(n, stage.most_keys or n)
    console.print(
        f"[bold]{stage_id}[/] {stage.title}: compiled for sm_90a. No Hopper GPU here: no kernel was executed."
    )
    code = Table(title="machine code", title_justify="left")
    for heading in (
        "kernel",
        "d",
        "causal",
        "registers",
        "frame B",
        "LDL/STL",
        "shared B",
        "main loop, instructions a thread",
    ):
        code.add_column(heading, overflow="fold")
    units = Table(
        title=f"one SM's cycles for one pass of the main loop; bound at N = {n}", title_justify="left"
    )
    for heading in (
        "kernel",
        "d",
        "causal",
        "one pass",
        "tensor",
        "MUFU",
        "FP32",
        "ALU",
        "issue",
        "shared",
        "HBM",
        "bound by",
    ):
        units.add_column(heading, overflow="fold")
    lines = []
    for d in args.head_dims:
        for causal in args.causals:
            problem = sweep_problem(n, d, causal, stage.direction)
            compiled = compile_stage(stage_id, problem)
            demands = machine_code.inspect(compiled, module.work(problem, **stage.options))
            for x in demands:
                who = (x.work.kernel, str(d), str(int(causal)))
                mix = ", ".join(f"{count:.0f} {kind}" for kind, count in x.mix.items())
                spills = x.code.count("LDL|STL")
                sizes = (x.code.registers, x.code.frame_bytes, spills, x.work.smem_bytes)
                code.add_row(*who, *map(str, sizes), mix)
                units.add_row(*who, x.work.unit, *(f"{c:.0f}" for c in x.cycles.values()), x.unit)
            bound = machine_code.bound_tflops(problem, demands)
            sha = machine_code.identity(compiled)
            lines.append(
                f"d{d} {'causal' if causal else 'full':6} bound {bound:6.1f} TFLOP/s  cubin sha256 {sha}"
            )
    for item in (code, units, *lines):
        console.print(item)
    console.print(
        "Shared-memory cycles assume that no two lanes read the same address; broadcasts cost less."
    )
    failures = case_list.run_model(stage_id)
    verdict = "FAILS" if failures else "agrees with float64 attention to 1e-12"
    console.print(f"model {stage.model}: {verdict}\n")
    for line in failures:
        console.print(f"    {line}")
    return not failures


# ---- on a Hopper GPU ---------------------------------------------------------------------------------------


def line_of(name: str, problem: Problem, rows: list[results.Row], environment: dict) -> str:
    """One row of the terminal's table."""
    mine = next(row for row in rows if row.provider == name)
    if mine.tflops is None:
        return f"{problem!s:38} {mine.check or '':5} {mine.error}"
    others = [row for row in rows if row.provider in peers.PEERS and row.tflops]
    best = max(others, key=lambda row: row.tflops, default=None)
    text = f"{problem!s:38} {mine.check or '':5} {mine.tflops:7.2f} TFLOP/s"
    text += f" ± {mine.ms_iqr / mine.ms_median:5.1%}"
    if peak := results.bound_gpu(environment):
        text += f" {peak.roofline_seconds(problem) * 1e3 / mine.ms_median:6.1%} of the hardware bound"
    return text + (f"  {mine.tflops / best.tflops:6.3f} × {best.provider} {best.tflops:.0f}" if best else "")


def gpu_bench(args: argparse.Namespace, console: Console) -> bool:
    """Run the sweep and, with --save, keep its results. Returns whether every check passed."""
    env = timing.environment(peers.versions(args.peers, args.problems[0].direction))
    console.print(f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, "
                  f"DSL {env['cutlass_dsl']}, peers {env['peers']}", soft_wrap=True)  # fmt: skip
    env |= {"gemm_tflops": round(timing.gemm_tflops(), 1), "copy_tb_per_s": round(timing.copy_tb_per_s(), 2)}
    console.print(f"bf16 GEMM {env['gemm_tflops']} TFLOP/s, copy {env['copy_tb_per_s']} TB/s on this GPU")
    files, passed = {}, True
    contenders = [Contender.stage(stage_id) for stage_id in args.stages]
    if any(problem.direction == "fp8_cast" for problem in args.problems):
        contenders.append(Contender.stage(FORWARD))  # what a user has without FP8
    contenders += [Contender.public_call(stage_id) for stage_id in args.stages if stage_id in PUBLIC_CALLS]
    bench = Bench(contenders, list(env["peers"]), args.check, env)
    if args.save:
        folder = args.save / results.gpu_folder(env["gpu"])
        with as_usage(ValueError, OSError):
            files = {x: Saved(x, folder / f"{x}.json", env | {"host_us": {}}) for x in args.stages}
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        for problem in progress.track(args.problems, description="sweep"):
            rows = bench.measure(problem)
            passed &= not any(row.check == "fail" for row in rows)
            for stage_id in stages_for(problem, args.stages):
                names = [stage_id, *([PUBLIC_CALLS[stage_id]] if stage_id in PUBLIC_CALLS else [])]
                names += [FORWARD] * (problem.direction == "fp8_cast")
                for name in names:
                    line = line_of(name, problem, rows, env)
                    console.print(f"{name:5} {line}", soft_wrap=True, highlight=False)
                if files:
                    own = [row for row in rows if row.provider in (*names, *peers.PEERS)]
                    host_us = {k: v for k, v in env["host_us"].items() if k in names}
                    stay = files[stage_id].add(own, host_us=host_us)
                    for peer in stay.values():
                        why = f"the file's rows stay, whose fastest peer, {peer}, has no time in this run"
                        console.print(f"{stage_id:5} {problem}: {why}", soft_wrap=True, highlight=False)
                    passed &= not stay
    console.print(f"host time of a call, µs: {env['host_us']}")
    for file in files.values():
        console.print(f"wrote {file.path}")
    if not passed:
        console.print("A check failed: those rows have no time" + ", and were not written." * bool(files))
    return passed


def command(arguments: list[str] | None) -> bool:
    console = Console(width=None if sys.stdout.isatty() else 150)
    args = parse(arguments)
    if args.stages == ["decode"]:
        if args.save and not hopper_gpu():
            raise Usage("nothing to save without a Hopper GPU: no kernel would be executed")
        return decoding.run(args.save, console) if hopper_gpu() else decoding.run_model(console)
    if args.stages == ["context_parallel"]:
        if args.save and not hopper_gpu():
            raise Usage("nothing to save without a Hopper GPU: no kernel would be executed")
        if not hopper_gpu():
            return context_parallel.run_model(console.print)
        return context_parallel.run(args.save, None if args.seqlen is None else args.seqlens[0])
    if args.suite:
        if not hopper_gpu():
            raise Usage("--suite times the library: it needs a Hopper GPU")
        wanted = lambda problem: (
            (args.seqlen is None or problem.seqlen_q in args.seqlens) and problem.causal in args.causals
            and (args.head_dim is None or problem.head_dim in args.head_dims)
        )  # fmt: skip
        run_suite = policy_suite.run if args.suite in policy_suite.SUITES else suite.run
        return run_suite(args.suite, args.stages, args.save, args.peers, wanted)
    if hopper_gpu():
        return gpu_bench(args, console)
    if args.save:
        raise Usage("nothing to save without a Hopper GPU: no kernel would be executed")
    passed = [static_report(stage_id, args, console) for stage_id in args.stages]  # all, also after a failure
    return all(passed)


def main(arguments: list[str] | None = None) -> int:
    warnings.filterwarnings("ignore", message=".*flash_attn.*|.*deprecated.*")
    return run("bench.py", lambda: command(arguments))


if __name__ == "__main__":
    sys.exit(main())
