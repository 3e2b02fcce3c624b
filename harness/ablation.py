"""A kernel file's variants against each other: each idea switched on and off.

    python -m harness.ablation fa1 [--save]

Times the `VARIANTS` of a kernel file (label → arguments of its kernel; only those that its `variants_for`
names, if it has one) in one interleaved run, each checked first. With --save the rows go to
results/<gpu>/ablations/<file>.json, a `Results` file whose providers are the labels.
"""

import argparse
import sys
from pathlib import Path

import kernels
import ref_check
from harness import machine_code, results, timing
from harness.inputs import hopper_gpu, random_inputs
from harness.problem import HEAD_DIMS, sweep_problem

SEQLENS = (512, 4096, 16384)


def measure(stage_id: str, seqlens: tuple[int, ...] = SEQLENS) -> list[results.Row]:
    """One row for each variant and problem. Raises ValueError when a variant fails its check."""
    stage, module = kernels.load(stage_id)
    rows, compiled, checked = [], {}, set()
    for d in HEAD_DIMS:
        for causal in (False, True):
            for n in seqlens:
                problem = sweep_problem(n, d, causal, stage.direction)
                q, k, v, *do = random_inputs(problem)
                expected = ref_check.Expected(q, k, v, causal, *do)
                calls = {}
                labels = module.variants_for(problem) if hasattr(module, "variants_for") else module.VARIANTS
                for label in labels:
                    options = stage.options | module.VARIANTS[label]
                    key = (label, d, causal)
                    if key not in compiled:
                        compiled[key] = module.compile_kernel(problem, **options)
                    tensors = expected.allocate(module, problem, **options)
                    calls[label] = lambda c=compiled[key], t=tensors: module.run_kernel(c, t)
                    if key in checked:
                        continue
                    rounding = ref_check.rounding_of(stage, module, problem, **options)
                    verdict = expected.run(module, compiled[key], tensors, rounding)
                    if not verdict.passed:
                        raise ValueError(f"{label} on {problem}: {'; '.join(verdict.failures)}")
                    checked.add(key)
                for label, time in timing.interleaved(calls).items():
                    sha = machine_code.sha256(compiled[label, d, causal])
                    rows.append(results.Row.timed(problem, label, time, check="pass", cubin_sha256=sha))
                    print(f"{problem!s:38} {label:30} {rows[-1].tflops:7.2f} TFLOP/s", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage")
    parser.add_argument("--save", nargs="?", const=results.results_dir(), type=Path, help="write the rows")
    args = parser.parse_args(arguments)
    try:
        _, module = kernels.load(args.stage)
        if not hasattr(module, "VARIANTS"):
            raise ValueError(f"{args.stage} declares no VARIANTS")
        if not hopper_gpu():
            raise ValueError("timing variants needs a Hopper GPU")
        rows = measure(args.stage)
    except ValueError as error:
        print(f"harness.ablation: {error}", file=sys.stderr)
        return 2
    if args.save:
        env = timing.environment({})
        path = args.save / results.gpu_folder(env["gpu"]) / "ablations" / f"{kernels.LADDER[args.stage]}.json"
        results.Results(args.stage, env, rows).save(path)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
