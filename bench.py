"""Check and benchmark stages of the ladder beside the peers.

    python bench.py k2                    the sweep: seqlen 512…16384 × head_dim {64, 128} × causal {0, 1}
    python bench.py k1 fa1 k2             several stages in one interleaved run; `all` for the ladder
    python bench.py bwd4                  a backward stage, beside the peers' backward passes
    CHECK=1 SEQLEN=512 HEADDIM=64 CAUSAL=0 python bench.py k1
    python bench.py k1 --check --seqlen 512 --head-dim 64 --causal 0

On a machine without a Hopper GPU the same command compiles the stage for sm_90a, reports what the machine
code asks of the hardware, checks the stage's algorithm on the CPU, and says that no kernel was executed.
"""

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import kernels
import ref_check
from harness import cases, machine_code, peers, results, timing
from harness.attention import compile_stage, refuse
from harness.inputs import hopper_gpu, random_inputs
from harness.problem import HEAD_DIMS, SEQLENS, Problem, sweep_problem

SUSTAINED_FROM = 16384  # sequence length from which the power cap, not the burst, is what a user sees
STATIC_SEQLEN = 4096  # where the static report states its bound
REPO = Path(__file__).resolve().parent


class Usage(Exception):
    """What the user asked for cannot be done; the message is one line and the exit status 2."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise Usage(message)


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
    parser.add_argument("stages", nargs="+", help=f"{', '.join(kernels.LADDER)}, or all")
    parser.add_argument("--check", action="store_true", help="check every row, not once per kernel (CHECK=1)")
    parser.add_argument("--seqlen", default=env("SEQLEN"), help="one sequence length (SEQLEN)")
    parser.add_argument("--head-dim", default=env("HEADDIM"), help="one head dimension (HEADDIM)")
    parser.add_argument("--causal", default=env("CAUSAL"), help="0 or 1 (CAUSAL)")
    parser.add_argument("--peers", default=",".join(peers.PEERS), help="comma-separated, or none")
    parser.add_argument(
        "--save", nargs="?", const=REPO / "results", type=Path, help="write results/<gpu>/<stage>.json"
    )
    args = parser.parse_args(arguments)
    # What is committed is checked row by row: a fault may show at one length only.
    args.check = args.check or truth(env("CHECK", "0"), "CHECK") or args.save is not None
    args.seqlens = SEQLENS if args.seqlen is None else (whole(args.seqlen, "SEQLEN"),)
    args.head_dims = HEAD_DIMS if args.head_dim is None else (whole(args.head_dim, "HEADDIM"),)
    args.causals = (False, True) if args.causal is None else (truth(args.causal, "CAUSAL"),)
    args.peers = [] if args.peers == "none" else args.peers.split(",")
    if unknown := [name for name in args.peers if name not in peers.PEERS]:
        raise Usage(f"unknown peer {unknown[0]!r}; there are {', '.join(peers.PEERS)}")
    if args.stages == ["all"]:
        args.stages = list(kernels.LADDER)
    try:
        args.problems = [
            sweep_problem(n, d, causal, direction)
            for direction in dict.fromkeys(kernels.load(stage_id)[0].direction for stage_id in args.stages)
            for d in args.head_dims
            for causal in args.causals
            for n in args.seqlens
        ]
        for problem in args.problems:
            for stage_id in stages_for(problem, args):
                refuse(stage_id, problem)
    except ValueError as error:
        raise Usage(str(error)) from None
    return args


def stages_for(problem: Problem, args: argparse.Namespace) -> list[str]:
    """The stages asked for that compute the problem's direction."""
    return [stage_id for stage_id in args.stages if kernels.load(stage_id)[0].direction == problem.direction]


# ---- without a GPU -----------------------------------------------------------------------------------------


def static_report(stage_id: str, args: argparse.Namespace, console: Console) -> bool:
    """Compile, inspect, run the model. Returns whether the model passed."""
    stage, module = kernels.load(stage_id)
    n = args.seqlens[0] if len(args.seqlens) == 1 else STATIC_SEQLEN
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
            sha = machine_code.sha256(compiled)
            lines.append(
                f"d{d} {'causal' if causal else 'full':6} bound {bound:6.1f} TFLOP/s  cubin sha256 {sha}"
            )
    for item in (code, units, *lines):
        console.print(item)
    console.print(
        "Shared-memory cycles assume that no two lanes read the same address; broadcasts cost less."
    )
    failures = cases.run_model(stage_id)
    verdict = "FAILS" if failures else "agrees with float64 attention to 1e-12"
    console.print(f"model {stage.model}: {verdict}\n")
    for line in failures:
        console.print(f"    {line}")
    return not failures


# ---- on a Hopper GPU ---------------------------------------------------------------------------------------


def out_of_memory(error: torch.OutOfMemoryError) -> str:
    """ "OOM: …" with what the GPU would have had to hold, as far as the allocator's message tells."""
    gib = [float(x) for x in re.findall(r"(\d+\.\d+) GiB", str(error))]  # asked, capacity, free, ...
    if len(gib) < 3:
        return "OOM: " + str(error).partition(". ")[0]
    asked, capacity, free = gib[:3]
    return f"OOM: needs at least {capacity - free + asked:.1f} GiB, the GPU has {capacity:.1f}"


def host_microseconds(stage_id: str, problem: Problem) -> float:
    """Host time of one `run_kernel`, on a problem so small that the GPU is done before the host."""
    q, k, v, *do = random_inputs(problem.with_(batch=1, heads=1, kv_heads=1, seqlen_q=64, seqlen_kv=64))
    small = ref_check.Expected(q, k, v, problem.causal, *do)
    module, compiled, tensors = cases.ready(stage_id, small.inputs, problem.causal)
    return timing.host_microseconds(lambda: module.run_kernel(compiled, tensors))


def bench_problem(problem: Problem, args: argparse.Namespace, checked: set, env: dict) -> list[results.Row]:
    """One row per stage and peer on one problem, timed in one interleaved run."""
    q, k, v, *do = inputs = random_inputs(problem)
    expected = ref_check.Expected(q, k, v, problem.causal, *do)
    calls, fixed, rows = {}, {}, []

    def attempt(name: str) -> None:
        """Build a peer's call and run it once, so that one that cannot run does not stop the others."""
        try:
            call = peers.PEERS[name].build(problem, *inputs)
            call()
            torch.cuda.synchronize()
            calls[name] = call
        except torch.OutOfMemoryError as error:
            rows.append(results.Row.on(problem, name, error=out_of_memory(error)))
        except Exception as error:
            reason = f"unsupported: {str(error).splitlines()[0]:.100}"
            rows.append(results.Row.on(problem, name, error=reason))

    def measure() -> None:
        try:
            times = timing.interleaved(calls)
        except torch.OutOfMemoryError as error:
            rows.extend(results.Row.on(problem, name, error=out_of_memory(error)) for name in calls)
            times = {}
        for name, time in times.items():
            steady = None
            if problem.seqlen_q >= SUSTAINED_FROM:
                steady = timing.sustained(calls[name], time.ms_median)
            rows.append(results.Row.timed(problem, name, time, steady, **fixed.get(name, {})))
        calls.clear()
        torch.cuda.empty_cache()

    # PyTorch's math path also materialises S. It goes first and alone, so that no stage's scratch is what it
    # lacks.
    if "math" in env["peers"]:
        attempt("math")
        if calls:
            measure()
        torch.cuda.empty_cache()
    for stage_id in stages_for(problem, args):
        stage, _ = kernels.load(stage_id)
        try:
            module, compiled, tensors = cases.ready(stage_id, expected.inputs, problem.causal)
        except (MemoryError, torch.OutOfMemoryError) as error:
            text = f"OOM: {error}" if isinstance(error, MemoryError) else out_of_memory(error)
            rows.append(results.Row.on(problem, stage_id, error=text))
            continue
        fixed[stage_id] = {"check": "pass", "max_error": None, "cubin_sha256": machine_code.sha256(compiled)}
        kernel = (stage_id, problem.head_dim, problem.causal)
        if args.check or kernel not in checked:
            rounding = ref_check.rounding_of(stage, module, problem)
            verdict = expected.run(module, compiled, tensors, rounding)
            if not verdict.passed:
                reason = "; ".join(verdict.failures)
                rows.append(results.Row.on(problem, stage_id, check="fail", error=reason))
                continue
            checked.add(kernel)
            fixed[stage_id]["max_error"] = verdict.max_error
        if stage_id not in env["host_us"]:
            env["host_us"][stage_id] = round(host_microseconds(stage_id, problem), 2)
        calls[stage_id] = lambda m=module, c=compiled, t=tensors: m.run_kernel(c, t)
    for name in env["peers"]:
        if name != "math":
            attempt(name)
    measure()
    return rows


def line_of(stage_id: str, problem: Problem, rows: list[results.Row]) -> str:
    """One row of the terminal's table."""
    mine = next(row for row in rows if row.provider == stage_id)
    if mine.tflops is None:
        return f"{problem!s:38} {mine.check or '':5} {mine.error}"
    others = [row for row in rows if row.provider in peers.PEERS and row.tflops]
    best = max(others, key=lambda row: row.tflops, default=None)
    of_bound = problem.roofline_seconds() * 1e3 / mine.ms_median
    text = f"{problem!s:38} {'pass' if mine.max_error is not None else '':5} {mine.tflops:7.2f} TFLOP/s ± "
    text += f"{mine.ms_iqr / mine.ms_median:5.1%} {of_bound:6.1%} of the hardware bound"
    return text + (f"  {mine.tflops / best.tflops:6.3f} × {best.provider} {best.tflops:.0f}" if best else "")


def merged(path: Path, new: results.Results) -> results.Results:
    """`new` over what `path` holds, if anything. Raises Usage when the two do not belong together."""
    try:
        return results.merge(results.load(path), new) if path.exists() else new
    except ValueError as error:
        raise Usage(str(error)) from None


def gpu_bench(args: argparse.Namespace, console: Console) -> bool:
    """Run the sweep and, with --save, write its results. Returns whether every check passed."""
    env, checked, found = timing.environment(peers.versions(args.peers)), set(), []
    console.print(f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, "
                  f"DSL {env['cutlass_dsl']}, peers {env['peers']}", soft_wrap=True)  # fmt: skip
    files = {}
    if args.save:  # a file that would refuse these rows refuses them now, not after they were measured
        folder = args.save / results.gpu_folder(env["gpu"])
        files = {stage_id: folder / f"{stage_id}.json" for stage_id in args.stages}
        for stage_id, path in files.items():
            merged(path, results.Results(stage_id, env, []))
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        for problem in progress.track(args.problems, description="sweep"):
            rows = bench_problem(problem, args, checked, env)
            found += rows
            for stage_id in stages_for(problem, args):
                console.print(
                    f"{stage_id:5} {line_of(stage_id, problem, rows)}", soft_wrap=True, highlight=False
                )
    passed = not any(row.check == "fail" for row in found)
    console.print(f"host time of run_kernel, µs: {env['host_us']}")
    if files and not passed:
        console.print("A check failed: nothing was written.")
    elif files:
        for stage_id, path in files.items():
            own_env = env | {"host_us": {stage_id: env["host_us"].get(stage_id)}}
            direction = kernels.load(stage_id)[0].direction
            own = [row for row in found if row.direction == direction]
            rows = [row for row in own if row.provider in (stage_id, *peers.PEERS)]
            merged(path, results.Results(stage_id, own_env, rows)).save(path)
            console.print(f"wrote {path}")
    return passed


def main(arguments: list[str] | None = None) -> int:
    warnings.filterwarnings("ignore", message=".*flash_attn.*|.*deprecated.*")
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        args = parse(arguments)
        if hopper_gpu():
            return 0 if gpu_bench(args, console) else 1
        if args.save:
            raise Usage("nothing to save without a Hopper GPU: no kernel would be executed")
    except Usage as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    passed = [static_report(stage_id, args, console) for stage_id in args.stages]  # all, also after a failure
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
