"""From a problem and its tensors to a kernel that is ready to run."""

import contextlib
import functools
import re
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from . import cache
from .checks import (
    check_device,
    check_layout,
    check_like,
    check_memory,
    check_tensor,
    problem_of,
    refuse,
)
from .kernels import ladder
from .kernels.contract import DTYPES, Problem, Tensors

HEAD_DIMS = (64, 128, 256)  # that some stage takes
FORWARD = "k6"
BACKWARD = "bwd4"  # what gradients are computed with
FUNCTION = "hopper_attention_kernel"  # in a cached object file
PROVEN_COMPILER = "4.8.1"  # the version of cache.COMPILER whose machine code passed the checks in results/


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
    """What of a problem is compiled in, as the smallest problem of its head_dim, mask and dtype."""
    stage, file = ladder.load(stage_id)
    mask = {"causal": problem.causal, "top_left": problem.top_left}
    least = Problem.square(1, 1, 1, problem.head_dim, dtype=problem.dtype, direction=stage.direction, **mask)
    if problem.top_left and file.supports(least.with_(seqlen_q=2)):
        return least.with_(top_left=False)  # at equal lengths, and it takes no others, the masks are one
    return least


def reachable(stage_id: str) -> list[Problem]:
    """Everything of a stage that a call can have compiled, as `compiled_for` gives it: a closed list."""
    stage, file = ladder.load(stage_id)
    found: list[Problem] = []
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            for mask in ({"causal": False}, {"causal": True}, {"causal": True, "top_left": True}):
                least = Problem.square(1, 1, 1, head_dim, dtype=dtype, direction=stage.direction, **mask)
                if file.supports(least) is None and (what := compiled_for(stage_id, least)) not in found:
                    found.append(what)
    return found


def compile_kernel(stage_id: str, problem: Problem, **options: object) -> Kernel:
    """`compile_stage` with other options of its kernel file. Once in a process; in another process of the
    same user it comes from the cache."""
    mask = problem.causal, problem.top_left
    what = stage_id, problem.head_dim, mask, problem.dtype, repr(sorted(options.items()))
    if what not in _compiled:  # every call comes by here: only the first asks the kernel file
        least = compiled_for(stage_id, problem)
        with _one_at_a_time:
            if least.top_left != problem.top_left:
                _compiled[what] = compile_kernel(stage_id, least, **options)
            elif what not in _compiled:
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
    warn_unless_proven()
    what = {"problem": repr(problem), "options": repr(sorted(options.items()))}
    key = cache.key_of(file=ladder.LADDER[stage_id], **what)
    with cache.alone(key):
        if (entry := cache.load(key)) is not None:
            with contextlib.suppress(Exception):  # what does not load is compiled anew
                return Kernel(_load(entry.object_file), entry.cubin, tuple(entry.description["constants"]))
        _, file = ladder.load(stage_id)
        compiled = file.compile_kernel(problem, **options)
        host = re.findall(r"llvm\.mlir\.constant\((\d+) : i64\)", str(compiled.ir_module))
        kernel = Kernel(compiled, compiled.__cubin__, tuple(sorted({int(x) for x in host})))
        if cache.folder() is not None:
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch, "kernel.o")
                compiled.export_to_c(str(path), function_name=FUNCTION)
                about = {"file": ladder.LADDER[stage_id], **what, "constants": kernel.host_constants}
                cache.store(key, path, kernel.__cubin__, **about)
        return kernel


def _load(object_file: Path) -> Callable[..., None]:
    from cutlass.cute import runtime

    return getattr(runtime.load_module(str(object_file), enable_tvm_ffi=True), FUNCTION)


def starts_at_zero(name: str, dtype: str) -> bool:
    """Whether a scratch tensor is zero before every launch, and left so by the kernel (`allocate`)."""
    return name.startswith("zero_") or not dtype.startswith("float")


def allocate(
    module: object,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None = None,
    **options: object,
) -> Tensors:
    """Uninitialised outputs and scratch of the forward stage in `module` for inputs q, k, v; `out` is used
    for O. `options` are the stage's, which scratch may depend on.

    Scratch starts uninitialised, with two exceptions that start at zero and that every kernel leaves at zero,
    so that the next launch finds them so: integers, which are counters and semaphores, and tensors whose name
    begins with "zero_", into which a kernel accumulates.
    """
    o = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return Tensors(q, k, v, o, lse, _scratch(module, problem, q.device, options))


def allocate_backward(
    module: object,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    **options: object,
) -> Tensors:
    """Uninitialised gradients and scratch of the backward stage in `module`; `out` is used for dQ, dK, dV.
    The scratch and `options` are as `allocate`'s."""
    if out is None:
        out = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return Tensors(q, k, v, o, lse, _scratch(module, problem, q.device, options), do, *out)


def _scratch(
    module: object, problem: Problem, device: torch.device, options: dict[str, object]
) -> dict[str, torch.Tensor]:
    return {
        name: (torch.zeros if starts_at_zero(name, dtype) else torch.empty)(
            shape, dtype=getattr(torch, dtype), device=device
        )
        for name, (shape, dtype) in module.workspace(problem, **options).items()
    }


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    top_left: bool = False,
    stage: str = FORWARD,
    out: torch.Tensor | None = None,
) -> tuple[object, object, Tensors]:
    """Check everything, compile and allocate: (module, compiled, tensors), ready for `module.run_kernel`.

    Raises TypeError or ValueError for inputs the stage does not take, MemoryError when its scratch does not
    fit.
    """
    problem = problem_of(q, k, v, causal, top_left)
    refuse(stage, problem)
    check_device(stage, q)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_layout(name, x)
    if out is not None:
        check_like("out", out, "q", q)
        check_layout("out", out, written=True)
    check_memory(stage, problem, q.device)
    found, module = ladder.load(stage)
    tensors = allocate(module, problem, q.detach(), k.detach(), v.detach(), out, **found.options)
    return module, compile_stage(stage, problem), tensors


def prepare_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    top_left: bool = False,
    stage: str = BACKWARD,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[object, object, Tensors]:
    """`prepare` for a backward stage."""
    problem = problem_of(q, k, v, causal, top_left).with_(direction="bwd")
    check_like("o", o, "q", q)
    check_like("do", do, "q", q)
    check_tensor("lse", lse)
    if lse.dtype != torch.float32:
        raise TypeError(f"lse must be float32, not {str(lse.dtype).removeprefix('torch.')}")
    if (lse.shape, lse.device) != (q.shape[:3], q.device):
        raise ValueError(
            f"lse must be (batch, heads, seqlen_q) = {tuple(q.shape[:3])} on {q.device}, "
            f"not {tuple(lse.shape)} on {lse.device}"
        )
    refuse(stage, problem)
    check_device(stage, q)
    for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("do", do)):
        check_layout(name, x)
    if not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, its strides are {lse.stride()}")
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 3:
            raise TypeError("out must be a tuple of three tensors: dq, dk and dv")
        for name, x, like_name, like in zip(("dq", "dk", "dv"), out, "qkv", (q, k, v)):
            check_like(name, x, like_name, like)
            check_layout(name, x, written=True)
        if len({x.data_ptr() for x in out if x.numel()}) < sum(x.numel() > 0 for x in out):
            raise ValueError("dq, dk and dv must not share memory")
    check_memory(stage, problem, q.device)
    found, module = ladder.load(stage)
    inputs = (x.detach() for x in (q, k, v, o, lse, do))
    tensors = allocate_backward(module, problem, *inputs, out, **found.options)
    return module, compile_stage(stage, problem), tensors
