"""The quantising kernels on a GPU: their codes beside the reference's, bit for bit but for the sign of a
zero, and their speed beside a copy's.

    python -m harness.quantizing            check, time and print
    python -m harness.quantizing --save     and keep the times in results/<gpu>/library/quantizing.json
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness import quantized, results, row_files, timing
from harness.command import Parser, Usage, run
from harness.inputs import hopper_gpu, random_inputs
from harness.sweep import sweep_problem
from hopper_attention import production_fp8
from hopper_attention.kernels.contract import Compiled, Problem
from hopper_attention.kernels.device.fp8 import ONES_ROWS, padded_tokens, quantized_shapes
from hopper_attention.kernels.device.limits import HEAD_DIMS
from hopper_attention.kernels.quantize import compile_relayout
from hopper_attention.launch import QUANTIZE, kernel_for

WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "rotated": {"rotate": True},
    "given scales": {"given_scales": True},
    "rotated, RoPE": {"rotate": True, "rope": True},
}
LENGTHS = ((1, 3), (3, 1), (65, 203), (203, 65), (1025, 1025), (16, 64))
AROUND = 4096  # bytes on either side of an output that must stay as they were
TIMED_AT = 16384
COPY, RELAYOUT = "copy", "relayout"


class Call(NamedTuple):
    """A launch of the quantising kernel, what it writes, and what the reference is given."""

    launch: Callable[[], None]
    outputs: dict[str, torch.Tensor]
    options: dict[str, Any]


@functools.cache
def compiled(head_dim: int, dtype: str, way: str) -> Compiled:
    if way == RELAYOUT:
        return compile_relayout(head_dim)
    least = Problem.square(1, 1, 1, head_dim, False, dtype=dtype, direction="fp8_cast")
    return kernel_for(QUANTIZE, least, WAYS[way])


def prepared(problem: Problem, way: str, q, k, v, outputs: dict[str, torch.Tensor]) -> Call:
    """The call of a way on 16-bit q, k, v, into `outputs`, by the names of `quantized_shapes`."""
    chosen, d = WAYS[way], problem.head_dim
    signs = production_fp8.signs(d).to(q.device) if "rotate" in chosen else None
    rope, given = None, None
    if "rope" in chosen:
        positions = torch.arange(max(problem.seqlen_q, problem.seqlen_kv), device=q.device)
        angles = positions[:, None] * 1e4 ** -torch.linspace(0, 1, d // 2, device=q.device)
        rope = angles.cos(), angles.sin()
    if "given_scales" in chosen:
        given = tuple(torch.full(x.shape[:2], 0.009, device=q.device) for x in (q, k, v))
    kernel = compiled(d, problem.dtype, way)
    codes = [outputs[name] for name in ("q8", "k8", "vt8")]
    scales = given or [outputs[name] for name in ("q_scale", "k_scale", "v_exponent")]
    arguments = q, k, v, *codes, *scales, signs, *(rope or (None, None))
    options = {"rotate": signs is not None, "signs": signs, "rope": rope, "given_scales": given}
    return Call(lambda: kernel(*arguments), outputs, options)


# ---- codes -------------------------------------------------------------------------------------------------


class Guarded:
    """A tensor of NaN codes in the middle of an allocation, of which nothing else may be written."""

    def __init__(self, shape: tuple[int, ...], dtype: str):
        kind = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        self.all = torch.full((size + 2 * AROUND,), 0x7F, dtype=torch.uint8, device="cuda")
        self.inside = self.all[AROUND : AROUND + size].view(kind).view(shape)

    def untouched(self) -> bool:
        return bool((self.all[:AROUND] == 0x7F).all() and (self.all[-AROUND:] == 0x7F).all())


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many codes lie between two of e4m3; the zeros are one, and NaN is far from all but NaN."""
    ordered = []
    for x in (a, b):
        code = x.view(torch.uint8).int()
        size = code & 0x7F
        ordered.append(torch.where(size == 0x7F, 1000, torch.where(code >= 0x80, -size, size)))
    return (ordered[0] - ordered[1]).abs()


def unusual(q, k, v) -> None:
    """A block of zeros, ±∞, NaN, and values no scale reaches, in place."""
    for x in (q, k, v):
        x[0, 0, :64] = 0
        x[-1, -1, x.shape[2] // 2, 3] = math.nan
        x[-1, 0, 0, 5], x[-1, 0, -1, 9] = math.inf, -math.inf
        x[0, -1] *= 1e-6
    if v.dtype == torch.bfloat16:
        q[0, -1] *= 1e-32
        v[0, -1, 0, 0], v[0, -1, -1, 1] = 3e5, 2.2e5


def differences(way: str, problem: Problem, q, k, v) -> Iterator[str]:
    """What is not the reference's. RoPE alone, which the kernel computes with fused multiply-adds, may leave
    a code next to its own, or a scale 10⁻⁶ away."""
    given = "given_scales" in WAYS[way]
    held = {name: Guarded(*about) for name, about in quantized_shapes(problem, given).items()}
    call = prepared(problem, way, q, k, v, {name: x.inside for name, x in held.items()})
    call.launch()
    expected = quantized.quantize_reference(q, k, v, **call.options).outputs
    fused = "rope" in WAYS[way]
    for name, x in call.outputs.items():
        what = f"{way}, {problem}: {name}"
        if x.dtype == quantized.E4M3:
            apart = steps_apart(x, expected[name])
            if apart.max() > fused or (apart > 0).sum() > fused * (2 + 1e-3 * apart.numel()):
                yield f"{what}: {int((apart > 0).sum())} codes of {apart.numel()} are others"
        elif not torch.allclose(x, expected[name], rtol=1e-6 * fused, atol=0):
            yield f"{what} differs"
        if not held[name].untouched():
            yield f"{what}: wrote outside of it"


def relayout_differences(head_dim: int, seqlen: int) -> Iterator[str]:
    v8 = quantized.codes(torch.randn(2, seqlen, 3, head_dim, device="cuda") * 100).transpose(1, 2)
    held = Guarded((2, 3, head_dim + ONES_ROWS, padded_tokens(seqlen)), "float8_e4m3fn")
    compiled(head_dim, "", RELAYOUT)(v8, held.inside)
    ones = quantized.codes(torch.ones(2, 3, seqlen, device="cuda"))
    if steps_apart(held.inside, quantized.transposed(v8.contiguous(), ones)).any() or not held.untouched():
        yield f"relayout, head_dim {head_dim}, {seqlen} keys: not the reference's"


def check() -> Iterator[str]:
    """A message for each thing that is wrong."""
    for d in HEAD_DIMS:
        for dtype in ("bfloat16", "float16"):
            plain = Problem(2, 4, 2, 203, 203, d, False, dtype=dtype)
            for way in WAYS:
                for n, keys in LENGTHS:
                    problem = plain.with_(seqlen_q=n, seqlen_kv=keys)
                    yield from differences(way, problem, *random_inputs(problem))
                mha = plain.with_(kv_heads=4)
                packed = torch.stack(
                    [x.transpose(1, 2) for x in random_inputs(mha)], dim=2
                )  # (B, N, 3, H, d)
                yield from differences(way, mha, *(packed[:, :, i].transpose(1, 2) for i in range(3)))
                inputs = random_inputs(plain)
                unusual(*inputs)
                if not WAYS[way].get("rope"):
                    yield from differences(way, plain, *inputs)
        for seqlen in (1, 3, 65, 203, 1025):
            yield from relayout_differences(d, seqlen)


# ---- speed -------------------------------------------------------------------------------------------------


def times(head_dim: int, seqlen: int = TIMED_AT) -> Iterator[dict[str, Any]]:
    """Each way beside a copy of as many bytes, in turns."""
    problem = sweep_problem(seqlen, head_dim, False)
    q, k, v = random_inputs(problem)
    empty = lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
    outputs = {name: empty(*about) for name, about in quantized_shapes(problem).items()}
    size = lambda *tensors: sum(x.numel() * x.itemsize for x in tensors)
    calls = {way: prepared(problem, way, q, k, v, outputs).launch for way in WAYS}
    moved = dict.fromkeys(WAYS, size(q, k, v, *(outputs[name] for name in ("q8", "k8", "vt8"))))
    relayout = compiled(head_dim, "", RELAYOUT)
    calls[RELAYOUT] = lambda: relayout(outputs["k8"], outputs["vt8"])
    moved[RELAYOUT] = size(outputs["k8"], outputs["vt8"])
    for what in ("plain", RELAYOUT):
        source = torch.randint(-100, 100, (moved[what] // 2,), dtype=torch.int8, device="cuda")
        target = torch.empty_like(source)
        calls[f"{COPY}, {what}"] = lambda target=target, source=source: target.copy_(source)
    found = timing.interleaved(calls)
    for way, nbytes in moved.items():
        copied = found[f"{COPY}, {way if way == RELAYOUT else 'plain'}"].ms_median
        us = 1e3 * found[way].ms_median
        share = copied / found[way].ms_median
        yield {
            "head_dim": head_dim,
            "seqlen": seqlen,
            "way": way,
            "us": us,
            "bytes": nbytes,
            "of_copy": share,
        }


def command(arguments: list[str] | None) -> bool:
    parser = Parser(prog="harness.quantizing", description=__doc__.splitlines()[0])
    parser.add_argument("--save", nargs="?", const=results.results_dir(), type=Path, help="write the times")
    args = parser.parse_args(arguments)
    if not hopper_gpu():
        raise Usage("the kernels need a Hopper GPU")
    failures = list(check())
    print("\n".join(failures) or "every code is the reference's", flush=True)
    rows = [row for d in HEAD_DIMS for row in times(d)]
    for row in rows:
        share = f"{row['of_copy']:.3f} of a copy's rate"
        print(f"d{row['head_dim']:<4}{row['way']:15}{row['us']:8.1f} µs  {share}", flush=True)
    if args.save and not failures:
        row_files.save("quantizing", rows, timing.environment({}), args.save)
    return not failures


def main(arguments: list[str] | None = None) -> int:
    return run("harness.quantizing", lambda: command(arguments))


if __name__ == "__main__":
    sys.exit(main())
