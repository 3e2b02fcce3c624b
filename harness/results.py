"""Measurements on disk: what a row holds, when it may be written, and how a new run joins an older one.

A file that loads can be trusted: a stage's time always comes with a passed check and the hash of the machine
code that ran. Writing is all or nothing, so a run that fails leaves the committed file as it was.
"""

import contextlib
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from harness.hardware import H100_SXM, H200_SXM, Gpu
from harness.sweep import short_sweep, sweep
from hopper_attention.cache import locked, write_atomically
from hopper_attention.kernels.contract import BYTES_PER_ELEMENT, Problem

if TYPE_CHECKING:
    from harness.timing import Timing

SCHEMA = 2  # 2: cubin_sha256 is machine_code.identity, symbol names normalised
DIRECTION_WORDS = {
    "fwd": "forward",
    "fp8": "FP8 forward",
    "fp8_rows": "FP8 forward, of rows",
    "fp8_cast": "FP8 forward, of 16 bits",
    "bwd": "backward",
    "decode": "decode",
}
SWEPT = tuple(direction for direction in DIRECTION_WORDS if direction != "decode")
FILE_KEYS = ("schema", "stage", "environment", "rows")
# Rows measured under different values of these do not belong in one table.
ENVIRONMENT_IDENTITY = ("gpu", "driver", "torch", "cutlass_dsl")
ENVIRONMENT_TYPES = {  # of what is not a text, or None
    "peers": dict[str, str],
    "host_us": dict[str, float | None],
    "power_cap_w": float | None,
    "gemm_tflops": float | None,
    "copy_tb_per_s": float | None,
    "peak": dict[str, float] | None,
}
SHA256 = re.compile(r"[0-9a-f]{64}")

# Every peer a stage is measured beside, in the order tables and legends list them.
PEER_LABELS = {
    "math": "PyTorch math",
    "efficient": "CUTLASS memory-efficient",
    "flex": "FlexAttention",
    "fa2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
}

# The library's call that runs a stage, by stage: a provider of its own, timed beside the kernel alone.
PUBLIC_CALLS = {
    "k6": "attention",
    "bwd4": "attention_backward",
    "bwd4_det": "attention_backward, deterministic",
}


def peer_order(peer: str) -> tuple[int, str]:
    """As PEER_LABELS has them, others behind, by name."""
    order = list(PEER_LABELS)
    return (order.index(peer) if peer in order else len(order), peer)


@dataclass
class Row:
    """One provider (a stage, a public call or a peer) on one problem: its time, or in `error` the reason
    there is none.

    Times are milliseconds, rates TFLOP/s by `Problem.flops`. `check` is "pass" but for a peer, where it is
    None.
    """

    provider: str
    direction: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    causal: bool
    dtype: str
    top_left: bool = False
    scaled: bool = False
    lse_grad: bool = False
    value_dim: int | None = None
    ms_median: float | None = None
    ms_iqr: float | None = None
    tflops: float | None = None
    tflops_sustained: float | None = None
    check: str | None = None
    max_error: float | None = None
    cubin_sha256: str | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    peak_bytes: int | None = None  # of device memory beside the problem's inputs, at most, during a call
    error: str | None = None

    @classmethod
    def on(cls, problem: Problem, provider: str, **fields: object) -> "Row":
        """A provider's row on a problem. Raises ValueError for a window, a soft cap, a sink or packed
        sequences: `harness.policy_suite` has files of its own for them."""
        if problem.policies:
            raise ValueError(f"a stage's rows are of plain problems, not {problem}")
        return cls(provider, **{name: getattr(problem, name) for name in OF_PROBLEM}, **fields)

    @classmethod
    def timed(
        cls, problem: Problem, provider: str, time: "Timing", steady: "Timing | None" = None, **fields: object
    ) -> "Row":
        """`on`, with a burst timing and, if there is one, a sustained one, whose clock and power then
        stand."""
        rate = lambda timing: problem.flops / timing.ms_median / 1e9
        return cls.on(
            problem,
            provider,
            ms_median=time.ms_median,
            ms_iqr=time.ms_iqr,
            tflops=rate(time),
            tflops_sustained=rate(steady) if steady else None,
            clock_mhz=(steady or time).clock_mhz,
            power_w=(steady or time).power_w,
            **fields,
        )

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem this row is about. Computed once: a row is not changed, only replaced."""
        return Problem(**{name: getattr(self, name) for name in OF_PROBLEM})

    @property
    def key(self) -> tuple[str, Problem]:
        """What identifies a row: no file holds two rows with the same key."""
        return self.provider, self.problem


ROW_TYPES = get_type_hints(Row)
OF_PROBLEM = tuple(f.name for f in fields(Problem) if f.name in ROW_TYPES)
# Fields that a file's rows otherwise lack.
ONLY_WHERE_TRUE = ("top_left", "scaled", "lse_grad", "value_dim", "peak_bytes")
TIMING_FIELDS = ("ms_median", "ms_iqr", "tflops", "tflops_sustained")


@dataclass
class Results:
    """One stage's measurements on one GPU, its peers' beside them, and the environment they were taken in."""

    stage: str
    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def gpu(self) -> str:
        """The GPU's name, as the driver gives it."""
        return self.environment["gpu"]

    def find(self, provider: str, problem: Problem) -> Row | None:
        """The provider's row for a problem, or None."""
        return next((row for row in self.rows if row.key == (provider, problem)), None)

    def at(self, problem: Problem) -> Row | None:
        """The stage's own row for a problem; failing that dtype, its row for the same shape in another."""
        own = (row for row in self.rows if row.provider == self.stage)
        same = [row for row in own if row.problem.with_(dtype=problem.dtype) == problem]
        return min(same, key=lambda row: row.dtype != problem.dtype, default=None)

    def best_peer(self, problem: Problem) -> Row | None:
        """The fastest timed row of another provider for a problem, or None."""
        own = self.stage, PUBLIC_CALLS.get(self.stage), *self.other_stages()
        peers = [row for row in self.rows if row.provider not in own and row.problem == problem]
        return max((row for row in peers if row.tflops is not None), key=lambda row: row.tflops, default=None)

    def other_stages(self) -> list[str]:
        """The ladder's stages that were timed beside this one."""
        ours = {self.stage, *PUBLIC_CALLS.values(), *PEER_LABELS}
        return list(dict.fromkeys(row.provider for row in self.rows if row.provider not in ours))

    def sweep_rows(self) -> list[Row]:
        """The rows, of every provider, whose shape is one of the benchmark's sweep."""
        shapes = {x for direction in SWEPT for x in (*sweep(direction), *short_sweep(direction))}
        in_bf16 = lambda problem: problem if problem.dtype == "bfloat16" else problem.with_(dtype="bfloat16")
        return [row for row in self.rows if in_bf16(row.problem) in shapes]

    def save(self, path: Path | str) -> None:
        """Write the file, rows sorted, one a line. Raises ValueError before writing if a row is at fault."""
        path = Path(path)
        if defect := _defect(self):
            raise ValueError(f"{path}: {defect}; nothing was written")
        rows = sorted(self.rows, key=lambda row: _order(row, self.stage))
        write = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
        pairs = sorted(self.environment.items())
        environment = ",\n  ".join(f"{write(key)}: {write(value)}" for key, value in pairs)
        lines = ",\n  ".join(write(_written(row)) for row in rows)
        text = (
            f'{{\n"schema": {SCHEMA},\n"stage": {write(self.stage)},\n'
            f'"environment": {{\n  {environment}\n}},\n"rows": [\n  {lines}\n]\n}}\n'
        )
        write_atomically(path, text.encode())

    @classmethod
    def load(cls, path: Path | str) -> "Results":
        """Read and validate a file. Raises ValueError that names the file and what is wrong with it."""
        path = Path(path)
        try:
            results = _parse(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:  # a JSONDecodeError is one
            raise ValueError(f"{path}: {error}") from None
        if defect := _defect(results):
            raise ValueError(f"{path}: {defect}")
        return results


load = Results.load


def merge(old: Results, new: Results) -> Results:
    """`old` with `new`'s rows in place of its own for the same provider and problem; the rest is kept.

    A new row without a time never replaces one that has a time: a run that failed takes nothing away. Nor
    does a problem's stage, where `lacks_fastest`: a ratio to the fastest peer is of one run. Raises
    ValueError when the environments differ in what makes rows comparable, a kept peer's version included.
    """
    if old.stage != new.stage:
        raise ValueError(f"cannot merge results of {new.stage} into those of {old.stage}")
    rows, lacking = {row.key: row for row in old.rows}, lacks_fastest(old, new)
    for row in new.rows:
        stays = row.key in rows and row.problem in lacking
        if row.key not in rows or (not stays and (row.error is None or rows[row.key].ms_median is None)):
            rows[row.key] = row

    kept = {row.provider for row in old.rows if rows[row.key] is row and row.ms_median is not None}
    if differing := differing_in(old.environment, new.environment, kept):
        raise ValueError(
            f"the results of {old.stage} were measured in another environment: {differing}. Go back to that "
            f"one, or remove the old file and measure the whole sweep again"
        )
    return Results(old.stage, joined(old.environment, new.environment), list(rows.values()))


def lacks_fastest(old: Results, new: Results) -> dict[Problem, str]:
    """Problems that both have, of which a peer that only `old` has a time of was faster than those that `new`
    has one of: which."""
    timed = lambda results: {row.key: row.tflops for row in results.rows if row.tflops is not None}
    before, now = timed(old), timed(new)
    found = {}
    for problem in {problem for provider, problem in now if provider not in PEER_LABELS}:
        kept = {x: before[x, problem] for x in PEER_LABELS if (x, problem) in before.keys() - now.keys()}
        measured = max((now.get((x, problem), 0.0) for x in PEER_LABELS), default=0.0)
        if kept and max(kept.values()) > measured:
            found[problem] = max(kept, key=kept.get)
    return found


def differing_in(old: dict[str, Any], new: dict[str, Any], kept: Iterable[str]) -> str:
    """What keeps rows of two environments from standing in one table, "" if nothing does: a version of a peer
    only if rows of it are `kept`, and both have it."""
    before, after = old.get("peers", {}), new.get("peers", {})
    pairs = [(key, old.get(key), new.get(key)) for key in ENVIRONMENT_IDENTITY]
    in_both = sorted({*kept} & before.keys() & after.keys())
    pairs += [(f"peers.{peer}", before[peer], after[peer]) for peer in in_both]
    return "; ".join(f"{key} was {was!r} and is {now!r}" for key, was, now in pairs if was != now)


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The environment of rows of both."""
    of_each = {key: old.get(key, {}) | new.get(key, {}) for key in ("peers", "host_us") if key in old | new}
    return old | new | of_each


def stale_rows(results: Results, sha_of: Callable[[Row], str]) -> list[str]:
    """A line for each timed row with a hash whose machine code is not what `sha_of` says it is now."""
    return [
        f"{row.provider} {row.problem}: measured on {row.cubin_sha256:.12}, the source compiles to {now:.12}"
        for row in results.rows
        if row.cubin_sha256 is not None and row.ms_median is not None
        if (now := sha_of(row)) != row.cubin_sha256
    ]


def gpu_folder(gpu_name: str) -> str:
    """A GPU's folder of results: "NVIDIA H100 80GB HBM3" gives "h100-80gb-hbm3"."""
    words = [word for word in re.split(r"[^a-z0-9]+", gpu_name.lower()) if word and word != "nvidia"]
    if not words:
        raise ValueError(f"no folder name can be made of the GPU name {gpu_name!r}")
    return "-".join(words)


def bound_gpu(environment: Mapping[str, Any]) -> Gpu | None:
    """The peak rates to hold a GPU against: those published of it, else those that its driver gave when its
    rows were measured (`hardware.peak_of`), or None."""
    words = gpu_folder(environment["gpu"]).split("-")
    if not {"pcie", "nvl"} & set(words):
        for name, gpu in (("h100", H100_SXM), ("h200", H200_SXM)):
            if name in words:
                return gpu
    peak = environment.get("peak")
    return (
        Gpu(environment["gpu"], int(peak["sms"]), peak["clock_ghz"], peak["hbm_bytes_per_s"])
        if peak
        else None
    )


def repository() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


def results_dir() -> Path:
    """The folder of committed measurements."""
    return repository() / "results"


def load_all(folder: Path | None = None) -> dict[str, dict[str, Results]]:
    """Every committed measurement: GPU folder -> stage id -> Results, both sorted by name."""
    everything: dict[str, dict[str, Results]] = {}
    for path in sorted((folder or results_dir()).glob("*/*.json")):
        results = Results.load(path)
        if results.stage != path.stem:
            raise ValueError(f"{path}: holds results of {results.stage}; the file's name is its stage")
        everything.setdefault(path.parent.name, {})[results.stage] = results
    return everything


def probe(path: Path) -> None:
    """Raise OSError unless a file could be written there; nothing stays behind but its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
        pass
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")


@contextlib.contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """While this process reads a file, changes it and writes it: others that do wait. Held is its folder, of
    which nothing stays behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with locked(folder):
            yield
    finally:
        os.close(folder)


def _written(row: Row) -> dict[str, Any]:
    """The row as a file has it."""
    return {name: value for name, value in asdict(row).items() if value or name not in ONLY_WHERE_TRUE}


def _order(row: Row, stage: str) -> tuple:
    """Rows in a file: by problem, and for one problem the stage first."""
    kind = (row.direction, row.dtype, row.head_dim, row.causal, row.top_left)
    shape = (row.seqlen_q, row.seqlen_kv, row.batch, row.heads, row.kv_heads)
    return *kind, *shape, row.provider != stage, row.provider


def _parse(data: object) -> Results:
    _require(isinstance(data, dict), "not a JSON object")
    _require(data.get("schema") == SCHEMA, f"schema {data.get('schema')!r}; this code reads {SCHEMA}")
    _exactly(data, FILE_KEYS, "the file")
    for key, kind in (("stage", str), ("environment", dict), ("rows", list)):
        _require(isinstance(data[key], kind), f"{key} is not a {kind.__name__}")
    for number, row in enumerate(data["rows"], start=1):
        _require(isinstance(row, dict), f"row {number} is not an object")
        _exactly(row, tuple(ROW_TYPES), f"row {number}", ONLY_WHERE_TRUE)
    return Results(data["stage"], data["environment"], [Row(**row) for row in data["rows"]])


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _exactly(
    found: dict[str, Any], expected: tuple[str, ...], where: str, optional: tuple[str, ...] = ()
) -> None:
    missing = [key for key in expected if key not in found and key not in optional]
    unknown = [key for key in found if key not in expected]
    _require(not missing, f"{where} lacks {', '.join(missing)}")
    _require(not unknown, f"{where} has unknown {', '.join(unknown)}")


def _defect(results: Results) -> str | None:
    """The first reason why these results may not be trusted, or None."""
    for key in ENVIRONMENT_IDENTITY:
        if not results.environment.get(key):
            return f"the environment does not name {key}"
    for key, value in results.environment.items():
        if not _fits(value, ENVIRONMENT_TYPES.get(key, str | None)):
            return f"the environment's {key} is {value!r}"
    seen = set()
    for number, row in enumerate(results.rows, start=1):
        if reason := _row_defect(row):
            return f"row {number} ({row.provider}, d={row.head_dim}, N={row.seqlen_kv}): {reason}"
        if row.key in seen:
            return f"row {number}: {row.provider} has two rows for {row.problem}"
        seen.add(row.key)
    return None


def output_bytes(problem: Problem) -> int:
    """What a call writes at least: O, or dQ, dK and dV."""
    queries, keys = problem.heads * problem.seqlen_q, 2 * problem.kv_heads * problem.seqlen_kv
    rows = problem.batch * (queries + keys * (problem.direction == "bwd"))
    return rows * problem.head_dim * BYTES_PER_ELEMENT


def _fits(value: object, hint: Any) -> bool:
    """Whether a value that JSON gave is of a type: a union, a dict, or one of JSON's own."""
    if get_origin(hint) is dict:
        of_key, of_value = get_args(hint)
        return isinstance(value, dict) and all(
            _fits(k, of_key) and _fits(v, of_value) for k, v in value.items()
        )
    if options := get_args(hint):
        return any(_fits(value, option) for option in options)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _row_defect(row: Row) -> str | None:
    for name, hint in ROW_TYPES.items():
        value = getattr(row, name)
        if not _fits(value, hint):
            return f"{name} is {value!r}"
    if row.direction not in DIRECTION_WORDS:
        return f"direction is {row.direction!r}; it is one of {', '.join(DIRECTION_WORDS)}"
    if row.top_left and not row.causal:
        return "has top_left without causal"
    if row.check not in ("pass", None):
        return f"check is {row.check!r}; it is 'pass' or nothing"
    timed = [name for name in TIMING_FIELDS if getattr(row, name) is not None]
    if row.error is not None and timed:
        return f"has an error and {', '.join(timed)}"
    if row.error is None and (row.ms_median is None or row.tflops is None):
        return "has no ms_median and tflops, and no error that says why"
    if row.error is None and not (row.ms_median > 0 and row.ms_iqr is not None and row.ms_iqr >= 0):
        return f"ms_median is {row.ms_median!r} and ms_iqr {row.ms_iqr!r}"
    if row.error is None and not math.isclose(
        row.tflops * row.ms_median * 1e9, row.problem.flops, rel_tol=1e-9
    ):
        return f"tflops is {row.tflops!r}, which is not its FLOPs over ms_median"
    if row.peak_bytes is not None and row.peak_bytes < output_bytes(row.problem):
        return f"peak_bytes is {row.peak_bytes}, less than what a call writes"
    if row.provider in PEER_LABELS and (row.check or row.cubin_sha256):
        return "a peer's row with a check, which peers do not take"
    if row.provider not in PEER_LABELS and timed:
        if row.check != "pass" or row.max_error is None:
            return "a time without a passed check, and the max_error it found"
        if not SHA256.fullmatch(row.cubin_sha256 or ""):
            return "a time without the cubin_sha256 of the machine code it belongs to"
    return None
