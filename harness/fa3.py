"""FlashAttention-3 (Dao-AILab/flash-attention, `hopper/`), from whichever of its builds is installed.

Builds register the same operators under names of their own: FlashAttention-3's package and xformers as
`flash_attn_3`, the fa3-fwd package, which has no backward pass, as `fa3_fwd`. Each is called as its own
Python front end calls it, tensors (batch, seqlen, heads, head_dim), less that front end's checks.
"""

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch

BUILDS = {  # a module that registers the operators, and their name in torch.ops
    "flash_attn_3._C": "flash_attn_3",
    "xformers.flash_attn_3._C": "flash_attn_3",
    "fa3_fwd._C": "fa3_fwd",
}
DISTRIBUTIONS = ("flash_attn_3", "xformers", "fa3-fwd")
FEW = 128  # queries, beside more keys: its call for caches divides the keys then, and here it does too
TIMED = 10  # launches that decide which build is the fastest on a problem


@functools.cache
def builds() -> dict[str, object]:
    """The operators of each build that loads, by its name in torch.ops."""
    for folder in sys.path:  # builds for CUDA 12 want its run-time library beside the one PyTorch brought
        for library in sorted(Path(folder or ".").glob("libcudart.so.12")):
            ctypes.CDLL(str(library))
    found = {}
    for module, name in BUILDS.items():
        if name not in found:
            try:
                importlib.import_module(module)
                found[name] = getattr(torch.ops, name)
            except Exception:  # not installed, or for another PyTorch
                continue
    return found


def version() -> str:
    """What is known of the builds. Raises PackageNotFoundError when there is none."""
    if not builds():
        raise importlib.metadata.PackageNotFoundError("flash_attn_3")
    known = []
    for name in DISTRIBUTIONS:
        try:
            known.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(known) or f"builds {' and '.join(builds())}"


def version_fp8() -> str:
    """What is known of the build that `forward_fp8` calls. Raises PackageNotFoundError without it."""
    try:
        return f"fa3-fwd {importlib.metadata.version('fa3-fwd')}"
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec("fa3_fwd") is None:
            raise
        return "build fa3_fwd"


def _arguments(operator: object, **given: object) -> dict[str, object]:
    """All that the operator takes: what is given by name, and None, False or zero for the rest, by which its
    front end says that a feature is not used."""
    arguments = {}
    for argument in operator.default._schema.arguments:
        if argument.name in given:
            arguments[argument.name] = given.pop(argument.name)
        elif argument.has_default_value():
            arguments[argument.name] = argument.default_value
        else:
            kind = str(argument.type)
            unused = {"bool": False, "int": 0, "float": 0.0}
            arguments[argument.name] = None if kind.startswith("Optional") else unused[kind]
    if given:
        raise TypeError(f"the operator has no argument {', '.join(given)}")
    return arguments


def _call(operator: object, **given: object) -> Callable[[], object]:
    return functools.partial(operator.default, *_arguments(operator, **given).values())


def _taking(operator: object, *names: str, **given: object) -> Callable[..., object]:
    """The operator as a function of the arguments of these names."""
    arguments = _arguments(operator, **given, **dict.fromkeys(names))
    places = [list(arguments).index(name) for name in names]

    def call(*tensors: torch.Tensor) -> object:
        taken = list(arguments.values())
        for place, x in zip(places, tensors, strict=True):
            taken[place] = x
        return operator.default(*taken)

    return call


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A call of the fastest build's forward pass that returns (o, lse (batch, heads, seqlen))."""
    splits = 0 if q.shape[1] <= FEW < k.shape[1] else 1  # 0: as many as it finds best
    options = {"is_causal": causal, "num_splits": splits, "window_size_left": -1, "window_size_right": -1}
    calls = [_call(build.fwd, q=q, k=k, v=v, **options) for build in builds().values()]
    return fastest([lambda call=call: call()[:2] for call in calls])


def forward_fp8(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: tuple[torch.Tensor, ...], causal: bool
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """`forward` of e4m3 tensors, and of `descales` (batch, kv_heads) for q, k and v. Of the builds that of
    the fa3-fwd package: the others bring a second CUDA run-time library into the process, beside which
    cuDNN's front end refuses to run. Raises ImportError without it."""
    importlib.import_module("fa3_fwd._C")
    options = {"is_causal": causal, "num_splits": 1, "window_size_left": -1, "window_size_right": -1}
    options |= dict(zip(("q_descale", "k_descale", "v_descale"), descales))
    call = _call(torch.ops.fa3_fwd.fwd, q=q, k=k, v=v, **options)
    return lambda: call()[:2]


def backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call of the backward pass that returns (dq, dk, dv); the forward one runs here. Raises RuntimeError
    when no build has one."""
    able = [build for build in builds().values() if hasattr(build, "bwd")]
    if not able:
        raise RuntimeError("no build of FlashAttention-3 here has a backward pass")
    o, lse = forward(q, k, v, causal)()
    gradients = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    inputs = {"dout": do, "q": q, "k": k, "v": v, "out": o, "softmax_lse": lse, **gradients}
    options = {"is_causal": causal, "window_size_left": -1, "window_size_right": -1}
    calls = [_call(build.bwd, **inputs, **options) for build in able]

    def filled(call: Callable[[], object]) -> Callable[[], tuple[torch.Tensor, ...]]:
        def run() -> tuple[torch.Tensor, ...]:
            call()  # builds return them in different places
            return tuple(gradients.values())

        return run

    return fastest([filled(call) for call in calls])


def passes(causal: bool) -> tuple[Callable[..., tuple[torch.Tensor, ...]], ...]:
    """Both passes of a build that has both, as functions: of q, k, v, which gives o and lse, and of do, q, k,
    v, o, lse, which gives dq, dk, dv. Raises ImportError without one."""
    build = next((build for build in builds().values() if hasattr(build, "bwd")), None)
    if build is None:
        raise ImportError("no build of FlashAttention-3 here has a backward pass")
    options = {"is_causal": causal, "window_size_left": -1, "window_size_right": -1}
    run_forward = _taking(build.fwd, "q", "k", "v", **options, num_splits=1)
    names = "dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"
    run_backward = _taking(build.bwd, *names, **options)

    def forward(q, k, v):
        return run_forward(q, k, v)[:2]

    def backward(do, q, k, v, o, lse):
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        run_backward(do, q, k, v, o, lse, *gradients)
        return gradients

    return forward, backward


def fastest(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """The one of several calls that takes the least time, of those that run at all. Raises what the last of
    them raised when none does."""
    best, least, reason = None, float("inf"), None
    for call in calls:
        try:
            call()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(TIMED):
                call()
            end.record()
            torch.cuda.synchronize()
            if start.elapsed_time(end) < least:
                best, least = call, start.elapsed_time(end)
        except RuntimeError as error:
            reason = error
    if best is None:
        raise reason or RuntimeError("there is no build of FlashAttention-3 here")
    return best
