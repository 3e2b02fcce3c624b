"""The cases every stage must compute correctly or refuse by name, and what proves that the rule can fail.

    python ref_check.py k2            every case for one stage (several stages, or `all`)
    python ref_check.py k2 --save     and write results/<gpu>/checks/k2.json, the record of what passed
    python ref_check.py --mutations   every mutation on every shape of the sweep: each must be caught

Without a Hopper GPU a stage's NumPy model stands in, and no kernel is executed.
"""

import argparse
import sys

import torch

from harness import case_list, case_runs, cases, mutations, policy_cases, provenance, records, results, timing
from harness.command import Parser, Usage, as_usage, run
from harness.inputs import hopper_gpu
from harness.sweep import sweep
from hopper_attention.kernels import ladder
from hopper_attention.launch import Job, reachable
from hopper_attention.precompile import ahead


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="ref_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", help="stage ids, or `all`")
    parser.add_argument("--mutations", action="store_true", help="prove that the rule catches every mutation")
    parser.add_argument("--repeats", type=int, default=100, help="launches that must be bit-identical")
    parser.add_argument("--only", help="run only the cases whose name contains this")
    parser.add_argument(
        "--no-sanitizer", action="store_true", help="leave out compute-sanitizer's two runs per stage"
    )
    parser.add_argument("--save", action="store_true", help="write the record of what passed")
    args = parser.parse_args(arguments)
    args.stages = ladder.stages_named(args.stages)
    if not args.stages and not args.mutations:
        raise Usage("name a stage, or --mutations")
    if other := [x for x in args.stages if x in ladder.BESIDE]:
        raise Usage(f"{other[0]} has cases of its own: `python bench.py {other[0]}` runs them first")
    if args.repeats < 1:
        raise Usage(f"--repeats must be at least 1, not {args.repeats}")
    with as_usage(ValueError):
        for stage_id in args.stages:
            if not case_list.chosen(stage_id, args.only):
                raise Usage(f"no case of {stage_id} has {args.only!r} in its name")
    if args.save and (args.only is not None or args.no_sanitizer):
        raise Usage("--save is of every case: not with --only or --no-sanitizer")
    if args.save and not hopper_gpu():
        raise Usage("nothing to save without a Hopper GPU: no kernel would be executed")
    return args


def check_model(stage_id: str) -> bool:
    """What can be checked without a GPU. Returns whether it passed."""
    failures = case_list.run_model(stage_id)
    verdict = "fails" if failures else "passes"
    print(f"{stage_id}: no Hopper GPU, no kernel was executed; its model {verdict}")
    print("".join(f"    {line}\n" for line in failures), end="")
    return not failures


def jobs_of(stage_id: str) -> list[Job]:
    """Most kernels that all cases run: compiled one by one, where each is needed first, they take minutes."""
    options = ladder.load(stage_id)[0].options
    kernels = dict.fromkeys((*reachable(stage_id), *policy_cases.kernels(stage_id)))
    return [(stage_id, kernel, options) for kernel in kernels]


def check_stage(stage_id: str, args: argparse.Namespace) -> bool:
    """Run a stage's cases and, with --save, write its record. Returns whether all passed."""
    case_runs.worst_seen.clear()
    cases.forms_passed.clear()
    policy_cases.problems_passed.clear()
    environment = timing.environment({})
    if args.only is None:
        ahead(jobs_of(stage_id))
    if args.save:
        results.probe(records.path_of(environment["gpu"], stage_id))
    outcomes = []
    for outcome in case_list.run_cases(stage_id, args):
        verdict = "FAIL" if outcome.failures else "pass"
        print(f"{stage_id}  {verdict}  {outcome.name}  ({outcome.seconds:.1f} s)", flush=True)
        for line in outcome.failures[:5]:
            print(f"    {line}", flush=True)
        outcomes.append(outcome)
    seen = ", ".join(f"{name} {value:.3g}" for name, value in case_runs.worst_seen.items())
    print(f"{stage_id}: worst seen: {seen}", flush=True)
    passed = not any(outcome.failures for outcome in outcomes)
    if args.save and passed:
        kernels = records.passed(stage_id)
        names = tuple(outcome.name for outcome in outcomes)
        found = records.Record(
            stage_id, environment, provenance.digest(stage_id), args.repeats, names, kernels
        )
        print(f"wrote {found.save()}")
    elif args.save:
        print(f"{stage_id}: a case failed: no record was written")
    return passed


def check_mutations() -> bool:
    """Prove that the rule catches every mutation on every shape of the sweep."""
    device, caught = "cuda" if torch.cuda.is_available() else "cpu", True
    of_direction = {"fwd": mutations.MUTATIONS, "bwd": mutations.GRADIENT_MUTATIONS}
    for direction, all_mutations in of_direction.items():
        for problem in sweep(direction):
            missed = mutations.survivors(problem, device, all_rows=device == "cuda")
            verdict = f"MISSED {missed}" if missed else f"all {len(all_mutations)} mutations caught"
            print(f"{direction} {problem}: {verdict}", flush=True)
            caught &= not missed
    return caught


def check(arguments: list[str] | None) -> bool:
    args = parse(arguments)
    passed = [check_mutations()] if args.mutations else []
    for stage_id in args.stages:
        passed.append(check_stage(stage_id, args) if hopper_gpu() else check_model(stage_id))
    return all(passed)


def main(arguments: list[str] | None = None) -> int:
    return run("ref_check.py", lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
