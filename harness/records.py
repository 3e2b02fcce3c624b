"""What each piece of machine code that a user can reach has passed on a GPU.

    python -m harness.records            say what is missing or stale
    python -m harness.records --renew    recompile everything, and date the records of what did not change

`ref_check.py STAGE --save` writes results/<gpu>/checks/<stage>.json after every case has passed: for each
kernel of `launch.reachable` its identity and the forms of problem it computed, and the digest of what the
machine code follows from (`provenance`). While the digest is that of the sources, the machine code is what
passed. An edit that changes no instruction makes a digest stale and nothing else: `--renew` proves that by
recompiling, on any machine. The tests recompile one of the plain cases of each stage and some of the others,
other ones for each commit, so that a digest that was not made by compiling is found out, and all plain cases
of a stage whose record is not current.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import cases, decoding_records, head_dims, machine_code, provenance  # noqa: F401  head_dims: cases
from harness.results import ENVIRONMENT_IDENTITY, gpu_folder, results_dir
from hopper_attention.cache import write_atomically
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.limits import HEAD_DIMS
from hopper_attention.launch import compile_stage, reachable

SCHEMA = 1
KERNEL_FIELDS = ("head_dim", "causal", "top_left", "dtype", "direction", "scaled", "lse_grad", "value_dim")


@dataclass(frozen=True)
class Checked:
    """A kernel, what its machine code is, and the forms of `cases.FORMS` it passed."""

    kernel: Problem
    cubin_sha256: str
    forms: tuple[str, ...]


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
        kernels = [
            {key: value for key in KERNEL_FIELDS if (value := getattr(x.kernel, key)) is not None}
            | {"cubin_sha256": x.cubin_sha256, "forms": x.forms}
            for x in self.kernels
        ]
        fields = {"schema": SCHEMA, "stage": self.stage, "environment": self.environment}
        fields |= {"digest": self.digest, "repeats": self.repeats, "cases": self.cases}
        write = lambda x: json.dumps(x, ensure_ascii=False, sort_keys=False)
        head = ",\n".join(f"{write(key)}: {write(value)}" for key, value in fields.items())
        lines = ",\n  ".join(map(write, kernels))
        path = path or self.path
        write_atomically(path, f'{{\n{head},\n"kernels": [\n  {lines}\n]\n}}\n'.encode())
        return path


def path_of(gpu: str, stage_id: str) -> Path:
    return results_dir() / gpu_folder(gpu) / "checks" / f"{stage_id}.json"


def load(path: Path) -> Record:
    """Read a record. Raises ValueError that names the file and what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != SCHEMA:
            raise ValueError(f"not of schema {SCHEMA}")
        data["cases"] = tuple(data["cases"])
        data["kernels"] = tuple(
            Checked(
                Problem.square(1, 1, 1, **{key: line.pop(key) for key in KERNEL_FIELDS if key in line}),
                line.pop("cubin_sha256"),
                tuple(line.pop("forms")),
            )
            for line in data["kernels"]
        )
        record = Record(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error!r}") from None
    if gap := missing(record):
        raise ValueError(f"{path}: lacks {gap}")
    return record


def missing(record: Record) -> str | None:
    """What a record lacks of all that its stage must pass, or None."""
    if lacking := [key for key in ENVIRONMENT_IDENTITY if not record.environment.get(key)]:
        return f"the environment's {', '.join(lacking)}"
    if lacking := [name for name in cases.of_reachable(record.stage) if name not in record.cases]:
        return f"the cases {', '.join(lacking)}"
    if record.repeats < 1:
        return "repeats"
    passed = {x.kernel: x.forms for x in record.kernels}
    for kernel in recorded(record.stage):
        for form in cases.forms_of(record.stage, kernel):
            if form not in passed.get(kernel, ()):
                return f"{form} of {kernel}"
    return None


def recorded(stage_id: str) -> list[Problem]:
    """The kernels that a record lists: of all that can be reached those of heads of HEAD_DIMS, V's as the
    others. Those of other head dims passed the cases of `harness.head_dims`, and have no record yet."""
    return [x for x in reachable(stage_id) if x.head_dim in HEAD_DIMS and x.value_dim is None]


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
    return [
        f"{record.stage} {x.kernel}: {x.cubin_sha256:.12} passed, the source compiles to {now:.12}"
        for x in record.kernels
        if kernels is None or x.kernel in kernels
        if (now := machine_code.identity(compile_stage(record.stage, x.kernel))) != x.cubin_sha256
    ]


def committed() -> dict[str, list[Record]]:
    """Every committed record of the ladder by stage."""
    found: dict[str, list[Record]] = {stage_id: [] for stage_id in ladder.LADDER}
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
