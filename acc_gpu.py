"""Issue 19, item 6: what a tighter maximum, or other sums, cost in speed and bring in accuracy, on a GPU.

    PYTHONPATH=. OUT=... python acc_gpu.py [seconds]

Compiles every variant in a pool of processes; then, problem by problem, until the seconds are spent: judges
it and compares its error with the peers', on N(0, 1) and with outliers; times all variants interleaved. What
is known so far is always in $OUT/acc.json.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from harness import peers, reference, timing
from harness.inputs import poison, random_inputs
from hopper_attention.kernels import k6, ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import compile_kernel
from hopper_attention.precompile import fill

STAGE = "k6"
VARIANTS: dict[str, dict[str, Any]] = {
    "growth 8": {},
    "growth 3": {"growth": 3.0},
    "growth 0": {"growth": 0.0},
    "share 2": {"share": 2.0},
    "share 1": {"share": 1.0},
    "share 0.6": {"share": 0.6},
    "share 0.5": {"share": 0.5},
    "share 0.4": {"share": 0.4},
    "tensor": {"sums": "tensor"},
    "rounded": {"sums": "rounded"},
}
HEAD_DIMS, MASKS, LENGTHS = (64, 128, 256), (False, True), (4096, 16384, 1024)
HIDDEN, TOKENS = 2048, 16384
OUTLIERS, DEVIATION = 1e-3, 10.0  # share of the elements of Q and K, and of what deviation they are


def square(n: int, d: int, causal: bool, batch: int | None = None) -> Problem:
    return Problem.square(batch or TOKENS // n, HIDDEN // d, n, d, causal)


def jobs() -> list[tuple[str, Problem, dict[str, Any]]]:
    return [
        (STAGE, square(1, d, causal, 1).with_(heads=1, kv_heads=1), options)
        for d in HEAD_DIMS for causal in MASKS for options in VARIANTS.values()
    ]  # fmt: skip


def inputs_of(problem: Problem, kind: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    q, k, v = random_inputs(problem, seed=seed)
    if kind == "rising":  # as harness.cases.rising_scores: maxima that grow in most tiles of some rows
        k[..., 0] = torch.linspace(0, 16, problem.seqlen_kv)
        q[..., 0] = torch.linspace(-8, 8, problem.seqlen_q) * math.sqrt(problem.head_dim)
    if kind == "outliers":
        generator = torch.Generator("cuda").manual_seed(seed + 1)
        for x in (q, k):
            hit = torch.rand(x.shape, device="cuda", generator=generator) < OUTLIERS
            x[hit] = (DEVIATION * torch.randn(x.shape, device="cuda", generator=generator)).to(x.dtype)[hit]
    return q, k, v


def errors(problem: Problem, kind: str, names: list[str]) -> dict[str, Any]:
    """Of each variant the verdict; of it and of each peer the relative rms error of O."""
    q, k, v = inputs_of(problem, kind)
    expected = reference.Expected(q, k, v, problem.causal)
    exact, exact_lse = expected.forward
    found: dict[str, Any] = {}
    _, file = ladder.load(STAGE)
    for name, options in VARIANTS.items():
        tensors = expected.allocate(file, problem)
        file.run_kernel(compile_kernel(STAGE, problem, **options), poison(tensors))
        outputs = dict(tensors.outputs)
        off = ((outputs["lse"].double() - exact_lse).abs() / exact_lse.abs().clamp(min=1.0)).max().item()
        if options.get("sums", "plain") != "plain":
            outputs.pop("lse")  # of rounded terms it is not what the rule asks; `lse` says by how much
        verdict = expected.judge(outputs, k6.lazy_maximum(problem, **options))
        found[name] = {"rms": relative_rms(outputs["o"], exact), "lse": off, "failures": verdict.failures,
                       "rms_ratio": verdict.rms_ratio, "row_rms_ratio": verdict.row_rms_ratio}  # fmt: skip
    return found | peer_errors(problem, (q, k, v), exact, names)


def relative_rms(o: torch.Tensor, exact: torch.Tensor) -> float:
    return ((o.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def peer_errors(problem: Problem, inputs: tuple, exact: torch.Tensor, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        try:
            peer = peers.PEERS[name]
            o = peer.build(problem, *inputs)()
            found[name] = {"rms": relative_rms(o.transpose(1, 2) if peer.rows_first else o, exact)}
        except Exception as error:  # absent, or unable: the others go on
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return found


def times(problem: Problem) -> dict[str, Any]:
    """TFLOP/s of each variant, all writing to the same tensors."""
    q, k, v = random_inputs(problem)
    _, file = ladder.load(STAGE)
    tensors = reference.Expected(q, k, v, problem.causal).allocate(file, problem)
    compiled = {name: compile_kernel(STAGE, problem, **options) for name, options in VARIANTS.items()}
    calls = {name: lambda run=run: file.run_kernel(run, tensors) for name, run in compiled.items()}
    found = timing.interleaved(calls, seconds=0.1)
    base = found["growth 8"].ms_median
    return {
        name: {"tflops": problem.flops / t.ms_median / 1e9, "iqr": t.ms_iqr / t.ms_median,
               "against growth 8": base / t.ms_median}
        for name, t in found.items()
    }  # fmt: skip


def main() -> None:
    begin, limit = time.perf_counter(), float(sys.argv[1]) if len(sys.argv) > 1 else 130.0
    passed = lambda: time.perf_counter() - begin
    path = Path(os.environ.get("OUT", ".")) / "acc.json"
    known: dict[str, Any] = {"errors": {}, "times": {}}

    def keep(kind: str, label: str, found: dict[str, Any]) -> None:
        known[kind][label] = known[kind].get(label, {}) | found
        known["seconds"] = passed()
        path.write_text(json.dumps(known, indent=1))
        for name, values in found.items():
            shown = {k: round(x, 6) if isinstance(x, float) else x for k, x in values.items()}
            print(f"{passed():5.0f} s {label:44} {name:12} {shown}", flush=True)

    print(f"{fill(jobs())} kernels after {passed():.0f} s", flush=True)
    known["gpu"] = torch.cuda.get_device_name()
    shapes = [(d, causal) for d in HEAD_DIMS for causal in MASKS]
    cases = [(square(4096, *shape, 1), kind) for shape in shapes for kind in ("N(0,1)", "outliers")]
    odd = [(Problem(1, 4, 2, 333, 1025, *shape), kind) for shape in shapes for kind in ("N(0,1)", "rising")]
    for problem, kind in (*odd, *cases):
        if passed() < limit:
            names = ["cudnn", "fa2", "fa3"] if problem.seqlen_q == 4096 else []
            keep("errors", f"{problem} {kind}", errors(problem, kind, names))
            torch.cuda.empty_cache()
    for n in LENGTHS:
        for d in HEAD_DIMS:
            for causal in MASKS:
                if passed() < limit:
                    keep("times", str(square(n, d, causal)), times(square(n, d, causal)))
    for problem, kind in cases:  # its compiler takes long: last
        if passed() < limit:
            inputs = inputs_of(problem, kind)
            exact, _ = reference.Expected(*inputs, problem.causal).forward
            keep("errors", f"{problem} {kind}", peer_errors(problem, inputs, exact, ["fa4"]))
    print(f"done after {passed():.0f} s: {path}", flush=True)


if __name__ == "__main__":
    main()
