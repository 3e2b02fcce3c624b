"""From a problem to a compiled kernel, from the cache or the compiler, once in a process."""

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import re
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import cache
from .kernels import calls_decode, calls_fp8, division, ladder
from .kernels.contract import DTYPES, Problem
from .kernels.device.constants import SMS
from .kernels.device.limits import HEAD_DIMS, compiled_dims, other_dims, tile_dim

FORWARD = "k6"
# By the rows that `division.rows_of` may choose instead.
FORWARD_IN_ROWS = {192: "k6_r192", 128: "k6_r128", 64: "k6_r64"}
# And in equal slices: of tiles with these rows, otherwise with k6's own.
IN_SLICES, IN_SLICES_OF_ROWS = "k6_slices", {192: "k6_slices_r192", 64: "k6_slices_r64"}
# And with the heads of a group in a tile: of 64 rows, otherwise of 128.
IN_GROUPS, IN_GROUPS_OF_ROWS = "k6_groups", {64: "k6_groups_r64"}
IN_ROWS = FORWARD_IN_ROWS, IN_SLICES_OF_ROWS, IN_GROUPS_OF_ROWS
# What gradients are computed with: where tiles of keys are few (`division.parts_of`), in parts; of no more
# keys than one tile has, without sums of dQ.
BACKWARD, IN_PARTS = "bwd4", "bwd4_parts"
DETERMINISTIC, DETERMINISTIC_IN_PARTS = "bwd4_det", "bwd4_parts_det"
ONE_TILE, ONE_TILE_IN_PARTS = "bwd4_one", "bwd4_one_parts"
DECODE = "decode"  # what queries to a cache are computed with
# The stages that take windows, soft caps, sinks and packed sequences, or these alone.
WITH_POLICIES = [FORWARD, *FORWARD_IN_ROWS.values(), BACKWARD, DETERMINISTIC, ONE_TILE]
# The stages that a call may run.
LIBRARY = [
    FORWARD,
    *FORWARD_IN_ROWS.values(),
    IN_SLICES,
    *IN_SLICES_OF_ROWS.values(),
    IN_GROUPS,
    *IN_GROUPS_OF_ROWS.values(),
    BACKWARD,
    IN_PARTS,
    DETERMINISTIC,
    DETERMINISTIC_IN_PARTS,
    ONE_TILE,
    ONE_TILE_IN_PARTS,
]
FP8, FP8_ROWS, FP8_CAST = "k7", "k7_rows", "k8"  # of what `quantize` gave, of e4m3 in rows, of 16 bits
QUANTIZE = "quantize"  # no stage, but the file of the kernel that makes what FP8 reads
FUNCTION = "hopper_attention_kernel"  # in a cached file
RUNTIME_PACKAGE = "nvidia_cutlass_dsl"
Job = tuple[str, Problem, dict[str, Any]]  # as `kernel_for` takes it
PROVEN_COMPILER = "4.8.1"  # the version of cache.COMPILER whose machine code passed the checks in results/


def sms_option(sms: int) -> dict[str, int]:
    """The option of the library's kernels for a GPU with other SMs than they are compiled for by default:
    H100 PCIe has 114, H20 78."""
    return {} if sms == SMS else {"sms": sms}


class UnprovenCompilerWarning(UserWarning):
    """The installed compiler is not the one whose machine code was checked on a GPU."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, just compiled or from the cache: called with torch tensors, it enqueues on PyTorch's
    current stream."""

    launch: Callable[..., None]
    __cubin__: bytes
    host_constants: tuple[int, ...]  # 64-bit ones of the launching code; dynamic shared memory is among them

    def __call__(self, *tensors: torch.Tensor) -> None:
        self.launch(*tensors)


_one_at_a_time = threading.RLock()  # the DSL aborts the process when two threads compile
_compiled: dict[tuple[object, ...], Kernel] = {}


def compile_stage(stage_id: str, problem: Problem) -> Kernel:
    """The stage compiled for `problem`'s head_dim, mask and dtype; one compile serves every other extent."""
    return compile_kernel(stage_id, problem, **ladder.load(stage_id)[0].options)


def compiled_for(stage_id: str, problem: Problem) -> Problem:
    """What of a problem is compiled in, as the smallest problem of its head_dim, mask, dtype and options."""
    stage, file = ladder.load(stage_id)
    least = least_of(problem).with_(direction=stage.direction)
    if least.in_fp8:
        least = least.with_(scaled=False)  # its kernel is given a scale in any case
    if problem.top_left and file.supports(least.with_(seqlen_q=2)):
        return least.with_(top_left=False)  # at equal lengths, and it takes no others, the masks are one
    return least


# What stands for a window, a soft cap, a sink, packed sequences: their values are given at a launch.
CANONICAL = {"window": (0, 0), "softcap": 1.0, "sink": True, "sequences": ((1, 1),)}


def least_of(problem: Problem) -> Problem:
    """The smallest problem with the same kernel, of a stage that tells masks of equal lengths apart."""
    extents = {"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 1, "seqlen_kv": 1}
    policies = {name: CANONICAL[name] for name in problem.policies}
    return problem.with_(**extents, **policies, **compiled_dims(problem))


def reachable(stage_id: str) -> list[Problem]:
    """Everything of a stage that a call can have compiled, as `compiled_for` gives it: a closed list."""
    stage, file = ladder.load(stage_id)
    found: list[Problem] = []
    backward = stage.direction == "bwd"
    for dims in [*({"head_dim": x} for x in HEAD_DIMS), *other_dims(stage.direction)]:
        for dtype in DTYPES:
            for mask in ({"causal": False}, {"causal": True}, {"causal": True, "top_left": True}):
                for more in ({}, {"scaled": True}, *([{"scaled": True, "lse_grad": True}] * backward)):
                    kind = dims | mask | more | {"dtype": dtype, "direction": stage.direction}
                    least = Problem(1, 1, 1, 1, 1, **kind)
                    if file.supports(least) or not has_height(stage_id, least):
                        continue
                    if (what := compiled_for(stage_id, least)) not in found:
                        found.append(what)
    return found


def has_height(stage_id: str, problem: Problem) -> bool:
    """Whether the stage may be chosen for heads of this size: in another height than k6's where there is such
    a tile."""
    rows = next((rows for of in IN_ROWS for rows, name in of.items() if name == stage_id), None)
    return rows is None or rows in list(division.TILES[tile_dim(problem)])[1:]


def reachable_with_policies(stage_id: str) -> list[Problem]:
    """Everything of a stage with windows, soft caps, sinks or packed sequences that a call can have compiled,
    as `compiled_for` gives it: a closed list beside that of `reachable`."""
    stage, file = ladder.load(stage_id)
    masks = ({}, {"causal": True}, {"causal": True, "top_left": True}, {"window": CANONICAL["window"]})
    others = [{name: CANONICAL[name]} for name in ("softcap", "sink", "sequences")]
    found = []
    for head_dim, dtype, mask in itertools.product(HEAD_DIMS, DTYPES, masks):
        for softcap, sink, packed in itertools.product(*([{}, x] for x in others)):
            for lse_grad in (False, True)[: 1 + (stage.direction == "bwd")]:
                if (packed and mask.get("top_left")) or not (mask.get("window") or softcap or sink or packed):
                    continue
                fields = {"causal": False} | mask | softcap | sink | packed
                fields |= {"dtype": dtype, "direction": stage.direction, "lse_grad": lse_grad}
                least = Problem.square(1, 1, 1, head_dim, scaled=True, **fields)
                if file.supports(least) is None and has_height(stage_id, least):
                    found.append(compiled_for(stage_id, least))
    return found


def reachable_in_fp8() -> list[Job]:
    """Everything that a call in FP8 can have compiled, as `kernel_for` takes it: a closed list."""
    options = {FP8: calls_fp8.BLOCK_SCALES, FP8_ROWS: {}, FP8_CAST: {}}
    attending = [(name, problem, options[name]) for name in options for problem in reachable(name)]
    preparing: list[Job] = []
    for head_dim, dtype in itertools.product(HEAD_DIMS, DTYPES):
        least = Problem.square(1, 1, 1, head_dim, False, dtype=dtype, direction="fp8_cast")
        for parts, rotate, rope in itertools.product(calls_fp8.PARTS, (False, True), (False, True)):
            preparing.append((QUANTIZE, least, calls_fp8.quantize_options(parts, rotate, rope)))
    return attending + preparing


def reachable_in_decode() -> list[Job]:
    """Everything that attention to a cache can have compiled, as `kernel_for` takes it: a closed list."""
    return [(DECODE, problem, options) for problem, options in calls_decode.kernels()]


def compile_kernel(stage_id: str, problem: Problem, **options: object) -> Kernel:
    """`compile_stage` with other options of its kernel file. Once in a process; in another process of the
    same user it comes from the cache."""
    return kernel_for(stage_id, compiled_for(stage_id, problem), options)


def kernel_for(stage_id: str, least: Problem, options: dict[str, object]) -> Kernel:
    """The kernel for a problem as `compiled_for` gives it, of a stage or of QUANTIZE. Where it is cached, no
    kernel file is imported."""
    what = stage_id, least, repr(sorted(options.items()))
    with _one_at_a_time:
        if what not in _compiled:
            _compiled[what] = _compile_or_load(stage_id, least, options)
        return _compiled[what]


@functools.cache  # once in a process
def warn_unless_proven() -> None:
    """Warn when the compiler, or one of its libraries, is not of the version PROVEN_COMPILER."""
    versions: dict[str, str | None] = {cache.COMPILER: None}
    with contextlib.suppress(Exception):  # a kernel must not fail for a broken installation's metadata
        versions |= cache.compiler_versions()
    if set(versions.values()) != {PROVEN_COMPILER}:
        compiler = versions[cache.COMPILER]
        found = ", ".join(
            f"{name} {version or 'of a version that cannot be read'}"
            for name, version in versions.items()
            if name == cache.COMPILER or version != compiler
        )
        warnings.warn(
            f"the kernels were checked as {cache.COMPILER} {PROVEN_COMPILER} compiles them; this is {found}: "
            "its machine code is unproven",
            UnprovenCompilerWarning,
            stacklevel=2,
        )


def _compile_or_load(stage_id: str, problem: Problem, options: dict[str, object]) -> Kernel:
    def compile_now() -> object:
        file = ladder.load_file(ladder.FILES.get(stage_id, stage_id))
        return file.compile_kernel(problem, **options)

    return kept(compile_now, **_named(stage_id, problem, options))


def is_kept(stage_id: str, least: Problem, options: dict[str, object]) -> bool:
    """Whether the next process would find what `kernel_for` gives."""
    return cache.load(cache.key_of(**_named(stage_id, least, options))) is not None


def _named(stage_id: str, problem: Problem, options: dict[str, object]) -> dict[str, str]:
    """What a kernel is in the cache, as `kept` takes it."""
    file = ladder.FILES.get(stage_id, stage_id)
    return {"file": file, "problem": repr(problem), "options": repr(sorted(options.items()))}


def kept(compile_now: Callable[[], object], **what: str) -> Kernel:
    """The kernel that `what` names, from the cache; where it is not there, as `compile_now` makes it."""
    warn_unless_proven()
    key = cache.key_of(**what)
    with cache.alone(key):
        if (entry := cache.load(key)) is not None:
            with contextlib.suppress(Exception):  # what does not load is compiled anew
                return Kernel(_load(entry), entry.cubin, tuple(entry.description["constants"]))
        compiled = compile_now()
        host = re.findall(r"llvm\.mlir\.constant\((\d+) : i64\)", str(compiled.ir_module))
        kernel = Kernel(compiled, compiled.__cubin__, tuple(sorted({int(x) for x in host})))
        # A kernel that cannot be kept is compiled again by the next process, and serves this one.
        with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as scratch:
            if cache.folder() is not None:
                about = what | {"constants": kernel.host_constants}
                cache.store(key, _export(compiled, Path(scratch)), kernel.__cubin__, **about)
        return kernel


def _runtime_library() -> Path:
    """What host code needs of the compiler that this Python has, found without importing it: of builds for
    two versions of CUDA the newest, as the compiler itself chooses. Raises FileNotFoundError."""
    spec = importlib.util.find_spec(RUNTIME_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if found := sorted(Path(folder).glob("cu*/lib/libcute_dsl_runtime.so")):
            return found[-1]
    raise FileNotFoundError(f"{RUNTIME_PACKAGE} has no libcute_dsl_runtime.so")


def _export(compiled: object, folder: Path) -> Path:
    """The host code with its cubin as a file: a shared library where there is a linker, which loads in a
    millisecond and without the compiler; else an object, which the compiler's own linker loads."""
    path = folder / "kernel.o"
    compiled.export_to_c(str(path), function_name=FUNCTION)
    library = path.with_suffix(".so")
    for linker in ("cc", "gcc", "clang"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [linker, "-shared", "-nostdlib", "-o", str(library), str(path)]
            subprocess.run(command, capture_output=True, check=True, timeout=60)
            return library
    return path


def _load(entry: cache.Entry) -> Callable[..., None]:
    if entry.file.suffix == ".o":
        from cutlass.cute import runtime

        return getattr(runtime.load_module(str(entry.file), enable_tvm_ffi=True), FUNCTION)
    import tvm_ffi

    # Of this environment, whatever other one the entry was made in: a second copy of either would be fatal.
    for library in (tvm_ffi.libinfo.find_libtvm_ffi(), _runtime_library()):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(entry.file)).get_function(FUNCTION)
