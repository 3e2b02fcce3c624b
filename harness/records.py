"""What each piece of machine code that a user can reach has passed on a GPU.

    python -m harness.records            say what is missing or stale
    python -m harness.records --renew    recompile everything, and date the records of what did not change

`ref_check.py STAGE --save` writes results/<gpu>/checks/<stage>.json after every case has passed: for each
kernel of `launch.reachable` its identity and the forms of problem it computed; for each kernel with windows,
soft caps, sinks or packed sequences that the cases run (`policy_cases.kernels`) how many problems; and the
digest of what the machine code follows from (`provenance`). While the digest is that of the sources, the
machine code is what passed. An edit that changes no instruction makes a digest stale and nothing else:
`--renew` proves that by recompiling, on any machine. The tests recompile one of the plain cases of each stage
and some of the others, other ones for each commit, so that a digest that was not made by compiling is found
out, and all plain cases of a stage whose record is not current.
"""

import argparse
import functools
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import case_list, cases, decoding_records, machine_code, policy_cases, provenance, record_files
from harness import head_dims as _head_dims  # noqa: F401  registers its cases
from harness.results import ENVIRONMENT_IDENTITY, gpu_folder, results_dir
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import compile_stage, reachable, reachable_with_policies

KERNEL_FIELDS = ("head_dim", "causal", "top_left", "dtype", "direction", "scaled", "lse_grad", "value_dim")
FOR_PROCESSES = 16  # kernels to compile, from which on other processes are worth their start
POLICY_FIELDS = ("window", "softcap", "sink", "sequences")  # written of kernels that have them


@dataclass(frozen=True)
class Checked:
    """A kernel, what its machine code is, and what it passed: forms of `cases.FORMS`, or, with policies, so
    many problems of `policy_cases`."""

    kernel: Problem
    cubin_sha256: str
    forms: tuple[str, ...] = ()
    problems: int = 0

    def line(self) -> dict[str, Any]:
        """As it is written."""
        fields = {x: value for x in KERNEL_FIELDS if (value := getattr(self.kernel, x)) is not None}
        fields |= {x: getattr(self.kernel, x) for x in self.kernel.policies}
        passed = {"problems": self.problems} if self.kernel.policies else {"forms": self.forms}
        return fields | {"cubin_sha256": self.cubin_sha256} | passed

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> "Checked":
        """From what `line` gave."""
        fields = {x: line[x] for x in (*KERNEL_FIELDS, *POLICY_FIELDS) if x in line}
        for name, as_tuple in (("window", tuple), ("sequences", lambda x: tuple(map(tuple, x)))):
            if name in fields:
                fields[name] = as_tuple(fields[name])
        kernel = Problem.square(1, 1, 1, **fields)
        forms, problems = tuple(line.get("forms", ())), line.get("problems", 0)
        return cls(kernel, line["cubin_sha256"], forms, problems)


@dataclass(frozen=True)
class Record:
    """What a stage's kernels passed on one GPU."""

    stage: str
    environment: dict[str, Any]
    digest: str  # `provenance.digest` of the sources they were, or have since been shown to be, compiled from
    repeats: int  # launches that were bit-identical
    cases: tuple[str, ...]
    kernels: tuple[Checked, ...]

    @property
    def path(self) -> Path:
        return path_of(self.environment["gpu"], self.stage)

    def save(self, path: Path | None = None) -> Path:
        """Write the record, a kernel a line. Raises ValueError before writing what would be incomplete."""
        if gap := missing(self):
            raise ValueError(f"the record of {self.stage} lacks {gap}; nothing was written")
        fields = {"stage": self.stage, "environment": self.environment, "digest": self.digest}
        fields |= {"repeats": self.repeats, "cases": self.cases}
        return record_files.write(path or self.path, fields, (x.line() for x in self.kernels))


def path_of(gpu: str, stage_id: str) -> Path:
    return results_dir() / gpu_folder(gpu) / "checks" / f"{stage_id}.json"


def load(path: Path) -> Record:
    """Read a record. Raises ValueError that names the file and what is wrong with it."""

    def record_of(data: dict[str, Any]) -> Record:
        kernels = tuple(map(Checked.of_line, data.pop("kernels")))
        return Record(**data | {"cases": tuple(data["cases"])}, kernels=kernels)

    return record_files.read(path, record_of, missing)


def missing(record: Record) -> str | None:
    """What a record lacks of all that its stage must pass, or None."""
    if lacking := [key for key in ENVIRONMENT_IDENTITY if not record.environment.get(key)]:
        return f"the environment's {', '.join(lacking)}"
    if lacking := [name for name in case_list.chosen(record.stage) if name not in record.cases]:
        return f"the cases {', '.join(lacking)}"
    if record.repeats < 1:
        return "repeats"
    passed = {x.kernel: x for x in record.kernels}
    for kernel in reachable(record.stage):
        for form in cases.forms_of(record.stage, kernel):
            if kernel not in passed or form not in passed[kernel].forms:
                return f"{form} of {kernel}"
    for kernel, problems in with_policies(record.stage).items():
        if kernel not in passed or passed[kernel].problems < problems:
            return f"{problems} problems of {kernel}"
    return None


def with_policies(stage_id: str) -> Counter[Problem]:
    """The kernels with policies that a record lists at least, and how many problems each has passed."""
    of_cases, listed = policy_cases.kernels(stage_id), reachable_with_policies(stage_id)
    return Counter({kernel: count for kernel, count in of_cases.items() if kernel in listed})


def passed(stage_id: str) -> tuple[Checked, ...]:
    """For who has just seen every case pass, of what a call can reach. Compiles what the cases did not."""
    identity = functools.partial(_identity, stage_id)
    listed = {*reachable(stage_id), *reachable_with_policies(stage_id)}
    of_forms = [(x, {"forms": tuple(forms)}) for x, forms in cases.forms_passed.items()]
    # Cases of policies have plain problems too, of kernels that all forms have passed.
    others = [(x, {"problems": count}) for x, count in policy_cases.problems_passed.items() if x.policies]
    return tuple(Checked(x, identity(x), **found) for x, found in of_forms + others if x in listed)


def _identity(stage_id: str, kernel: Problem) -> str:
    return machine_code.identity(compile_stage(stage_id, kernel))


def identities(stage_id: str, kernels: list[Problem]) -> list[str]:
    """Of today's machine code. A process compiles one kernel at a time: many are for as many processes as
    there are cores."""
    identity = functools.partial(_identity, stage_id)
    if len(kernels) < FOR_PROCESSES:
        return list(map(identity, kernels))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        return list(pool.map(identity, kernels))


def stale(record: Record) -> str | None:
    """Why a record is not known to be of today's sources, or None."""
    if record.digest != provenance.digest(record.stage):
        return (
            f"{record.stage}: its sources, options or compiler are not those of its record on "
            f"{record.environment['gpu']}; `python -m harness.records --renew` shows whether its code is"
        )
    return None


def changed(record: Record, kernels: list[Problem] | None = None) -> list[str]:
    """A line for each kernel (by default all) whose machine code is not what passed. Compiles."""
    asked = [x for x in record.kernels if kernels is None or x.kernel in kernels]
    return [
        f"{record.stage} {x.kernel}: {x.cubin_sha256:.12} passed, the source compiles to {now:.12}"
        for x, now in zip(asked, identities(record.stage, [x.kernel for x in asked]))
        if now != x.cubin_sha256
    ]


def committed() -> dict[str, list[Record]]:
    """Every committed record by stage."""
    found: dict[str, list[Record]] = {stage_id: [] for stage_id in ladder.CHECKED}
    for path in sorted(results_dir().glob("*/checks/*.json")):
        if path.stem in ladder.BESIDE:
            continue
        record = load(path)
        found[record.stage].append(record)
    return found


def main(arguments: list[str] | None = None) -> int:
    """0 when each stage has a record of today's machine code, 1 when one lacks or changed, 2 for a bad
    file."""
    parser = argparse.ArgumentParser(prog="python -m harness.records", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--renew", action="store_true", help="recompile, and renew what is stale only by date"
    )
    renew = parser.parse_args(arguments).renew
    lines = []
    try:
        for stage_id, records in committed().items():
            if not records:
                lines.append(f"{stage_id}: no record; `ref_check.py {stage_id} --save` on a GPU makes one")
            for record in records:
                if (reason := stale(record)) is None:
                    continue
                if not renew:
                    lines.append(reason)
                elif differing := changed(record):
                    lines += differing
                else:
                    Record(**vars(record) | {"digest": provenance.digest(stage_id)}).save()
                    print(
                        f"{stage_id}: {len(record.kernels)} kernels recompiled, none changed; record renewed"
                    )
        lines += decoding_records.report(renew)
    except ValueError as error:
        print(f"harness.records: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines) or "every kernel that can be reached has a current record")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
