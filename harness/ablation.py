"""A kernel file's variants against each other: each idea switched on and off.

    python -m harness.ablation fa1 [--save]
    python -m harness.ablation bwd4 --head-dim 128 --causal 0    only these problems

Times the `VARIANTS` of a kernel file (label → arguments of its kernel; only those that its `variants_for`
names, if it has one) in one interleaved run, each row judged before and after; or, of a file that
`edits.LACKING` has, the whole kernel and those that lack one idea. With --save the rows go to
results/<gpu>/ablations/<file>.json, a `Results` file whose providers are the labels.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from harness import edits, results, timing
from harness.command import Parser, Usage, as_usage, run
from harness.inputs import hopper_gpu
from harness.measuring import Bench, Contender, Saved
from harness.sweep import HEAD_DIMS, sweep_problem
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

SEQLENS = (4096, 16384, 512)


def variant(stage_id: str, label: str) -> Contender:
    stage, file = ladder.load(stage_id)
    if ladder.FILES[stage_id] in edits.LACKING:
        return Contender(label, stage_id, stage.options, None if label == edits.WHOLE else label)
    return Contender(label, stage_id, stage.options | file.VARIANTS[label])


def variants(stage_id: str, problem: Problem) -> list[Contender]:
    """The variants of a stage's file that are candidates on a problem."""
    name, (_, file) = ladder.FILES[stage_id], ladder.load(stage_id)
    if name in edits.LACKING:
        lacking = edits.LACKING[name]
        found = [x for x in edits.labels(stage_id) if x == edits.WHOLE or lacking[x].concerns(problem)]
    else:
        found = file.variants_for(problem) if hasattr(file, "variants_for") else file.VARIANTS
    return [variant(stage_id, label) for label in found]


def problems(
    stage_id: str, head_dims: tuple[int, ...] = HEAD_DIMS, causals: tuple[bool, ...] = (False, True)
) -> list[Problem]:
    direction = ladder.load(stage_id)[0].direction
    return [sweep_problem(n, d, causal, direction) for n in SEQLENS for d in head_dims for causal in causals]


def compile_ahead(stage_id: str, wanted: list[Problem]) -> None:
    """All variants into the cache, a process a core."""
    of_one_length = [problem for problem in wanted if problem.seqlen_q == SEQLENS[0]]
    jobs = [(x, problem) for problem in of_one_length for x in variants(stage_id, problem)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))


def _compile(job: tuple[Contender, Problem]) -> None:
    contender, problem = job
    contender.compile(problem)


def measure(stage_id: str, environment: dict, wanted: list[Problem]) -> Iterator[list[results.Row]]:
    """The rows of each problem."""
    for problem in wanted:
        bench = Bench(variants(stage_id, problem), [], True, environment, sustains=False)
        yield bench.measure(problem)


def ablate(arguments: list[str] | None) -> bool:
    parser = Parser(prog="harness.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("stage")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, help="one head dimension")
    parser.add_argument("--causal", type=int, choices=(0, 1), help="with a causal mask, or without")
    parser.add_argument("--save", nargs="?", const=results.results_dir(), type=Path, help="write the rows")
    args = parser.parse_args(arguments)
    with as_usage(ValueError):
        ladder.load(args.stage)
    if not edits.labels(args.stage):
        raise Usage(f"{args.stage} declares no VARIANTS")
    if not hopper_gpu():
        raise Usage("timing variants needs a Hopper GPU")
    environment, saved, passed = timing.environment({}), None, True
    if args.save:
        folder = args.save / results.gpu_folder(environment["gpu"]) / "ablations"
        with as_usage(ValueError, OSError):
            saved = Saved(args.stage, folder / f"{ladder.LADDER[args.stage]}.json", environment)
    head_dims = HEAD_DIMS if args.head_dim is None else (args.head_dim,)
    wanted = problems(args.stage, head_dims, (False, True) if args.causal is None else (bool(args.causal),))
    compile_ahead(args.stage, wanted)
    for rows in measure(args.stage, environment, wanted):
        for row in rows:
            rate = f"{row.tflops:7.2f} TFLOP/s" if row.tflops else f"{row.check or ''} {row.error}"
            print(f"{row.problem!s:38} {row.provider:30} {rate}", flush=True)
        passed &= not any(row.check == "fail" for row in rows)
        if saved:
            saved.add(rows)
    if saved:
        print(f"wrote {saved.path}")
    return passed


def main(arguments: list[str] | None = None) -> int:
    return run("harness.ablation", lambda: ablate(arguments))


if __name__ == "__main__":
    sys.exit(main())
