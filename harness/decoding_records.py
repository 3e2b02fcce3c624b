"""What each piece of decode's machine code that the cases run has passed on a GPU.

`bench.py decode --save` writes results/<gpu>/checks/decode.json after every case has passed: for each kernel
its identity and how many cases it passed, and the digest of what the machine code follows from. A call can
reach 5280 kernels (`calls_decode.kernels`); a case for each head_dim, type, number of rows and feature runs
about a hundred of them, the timed ones among these, and the record says which. `python -m harness.records`
judges it as it does the ladder's.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import machine_code, provenance, record_files
from harness.results import ENVIRONMENT_IDENTITY, gpu_folder, results_dir
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import DECODE, Kernel, kernel_for

from .decoding_cases import Case, Row, cases, kernel_of

FIELDS = ("head_dim", "dtype", "causal")  # of a problem, that are compiled in


@dataclass(frozen=True)
class Passed:
    """A kernel, what its machine code is, and how many cases it passed."""

    problem: Problem
    options: dict[str, Any]
    cubin_sha256: str
    cases: int

    @property
    def key(self) -> str:
        return key_of(self.problem, self.options)


@dataclass(frozen=True)
class Record:
    """What decode's kernels passed on one GPU."""

    environment: dict[str, Any]
    digest: str
    kernels: tuple[Passed, ...]

    @property
    def path(self) -> Path:
        return results_dir() / gpu_folder(self.environment["gpu"]) / "checks" / f"{DECODE}.json"

    def save(self, path: Path | None = None) -> Path:
        """Write the record, a kernel a line. Raises ValueError before writing what would be incomplete."""
        if gap := missing(self):
            raise ValueError(f"the record of {DECODE} lacks {gap}; nothing was written")
        fields = {"stage": DECODE, "environment": self.environment, "digest": self.digest}
        lines = (
            {key: getattr(x.problem, key) for key in FIELDS}
            | {"options": x.options, "cubin_sha256": x.cubin_sha256, "cases": x.cases}
            for x in self.kernels
        )
        return record_files.write(path or self.path, fields, lines)


def key_of(problem: Problem, options: dict[str, Any]) -> str:
    return repr(([getattr(problem, key) for key in FIELDS], sorted(options.items())))


def wanted() -> dict[str, tuple[Problem, dict[str, Any], int]]:
    """The kernels that the cases run, and how many cases each."""
    kernels = [kernel_of(case) for case in cases()]
    counts = Counter(key_of(*kernel) for kernel in kernels)
    return {key_of(*kernel): (*kernel, counts[key_of(*kernel)]) for kernel in kernels}


def compiled(problem: Problem, options: dict[str, Any]) -> Kernel:
    return kernel_for(DECODE, problem, options)


def identity_of(x: Case | Row) -> str:
    """Of the machine code that a case or a row runs."""
    return machine_code.identity(compiled(*kernel_of(x)))


def record_of(environment: dict[str, Any]) -> Record:
    """For who has just seen every case pass."""
    kernels = tuple(
        Passed(problem, options, machine_code.identity(compiled(problem, options)), count)
        for problem, options, count in wanted().values()
    )
    return Record(environment, provenance.digest(DECODE), kernels)


def load(path: Path) -> Record:
    """Read a record. Raises ValueError that names the file and what is wrong with it."""

    def record_of(data: dict[str, Any]) -> Record:
        if data["stage"] != DECODE:
            raise ValueError(f"not of stage {DECODE}")
        kernels = tuple(
            Passed(
                Problem.square(1, 1, 1, **{key: line[key] for key in FIELDS}, direction=DECODE),
                line["options"],
                line["cubin_sha256"],
                line["cases"],
            )
            for line in data["kernels"]
        )
        return Record(data["environment"], data["digest"], kernels)

    return record_files.read(path, record_of, missing)


def missing(record: Record) -> str | None:
    """What a record lacks of all that the cases run, or None."""
    if lacking := [key for key in ENVIRONMENT_IDENTITY if not record.environment.get(key)]:
        return f"the environment's {', '.join(lacking)}"
    passed = {x.key: x.cases for x in record.kernels}
    for key, (_, _, count) in wanted().items():
        if passed.get(key, 0) < count:
            return f"{count} cases of {key}"
    return None


def stale(record: Record) -> str | None:
    """Why a record is not known to be of today's sources, or None."""
    if record.digest != provenance.digest(DECODE):
        return (
            f"{DECODE}: its sources or compiler are not those of its record on {record.environment['gpu']}; "
            "`python -m harness.records --renew` shows whether its code is"
        )
    return None


def changed(record: Record, kernels: tuple[Passed, ...] | None = None) -> list[str]:
    """A line for each kernel (by default all) whose machine code is not what passed. Compiles."""
    return [
        f"{DECODE} {x.key}: {x.cubin_sha256:.12} passed, the source compiles to {now:.12}"
        for x in (record.kernels if kernels is None else kernels)
        if (now := machine_code.identity(compiled(x.problem, x.options))) != x.cubin_sha256
    ]


def committed() -> list[Record]:
    return [load(path) for path in sorted(results_dir().glob(f"*/checks/{DECODE}.json"))]


def report(renew: bool) -> list[str]:
    """What is missing or stale, a line each; with `renew` what is stale only by date is renewed."""
    found = committed()
    if not found:
        return [f"{DECODE}: no record; `bench.py decode --save` on a GPU makes one"]
    lines: list[str] = []
    for record in found:
        if (reason := stale(record)) is None:
            continue
        differing = changed(record) if renew else [reason]
        lines += differing
        if renew and not differing:
            Record(record.environment, provenance.digest(DECODE), record.kernels).save()
            print(f"{DECODE}: {len(record.kernels)} kernels recompiled, none changed; record renewed")
    return lines
