"""The pass rule.

A kernel passes when it is no further from float64 attention, or its gradients, than the same computation with
the kernel's own roundings and no others (the yardstick) explains. A fixed tolerance cannot do this: at N =
16384 a dropped key moves the output by less than 1e-3.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from harness import quantized
from harness.inputs import poison
from harness.reference import (
    BLOCK_ROWS,
    PLAIN,
    Gradients,
    Policies,
    Rounding,
    reference,
    reference_gradients,
    yardstick_gradients,
    yardstick_of,
)
from harness.stages import allocate, allocate_backward
from hopper_attention import production_fp8
from hopper_attention.kernels.contract import LazyMaximum, Problem, Tensors
from hopper_attention.kernels.device.fp8 import ROTATED

MAX_FACTOR = 2.0  # max|kernel − reference| against the yardstick's
RMS_FACTOR = 1.25  # rms(kernel − reference) against the yardstick's, over the whole tensor
BLOCK_RMS_FACTOR = 1.5  # and over every block of 64 rows: one bad block is 1/256 of a tensor at N = 16384
ROW_RMS_FACTOR = 3.0  # and over every row, against the larger of the row's and its block's yardstick
LSE_TOLERANCE = 1e-5
# Of an LSE that is of e4m3 P: a row's is off by at most log(1 + 2⁻⁴), a block's rms by at least what sums of
# 13 bits lose, 2⁻¹⁶ of each of a tile's terms.
LSE_OF_CODES, LSE_OF_SUMS = 0.065, 2e-3
CANCELLATION = 2.0**-18  # of dP against D, relative to what they are sums of: some units of fp32 round-off
SINK_TOLERANCE = 1e-5  # of a sink's gradient, relative to the magnitudes it is a sum of
NUDGE = 2.0**-17  # of P and dS before they are rounded, relative to what they come from (`gradients_of`)


@dataclass(frozen=True)
class Verdict:
    """What the rule says of one output. `failures` is empty exactly when it passes."""

    failures: tuple[str, ...]
    max_error: float
    max_ratio: float  # max|kernel − reference| over the yardstick's
    rms_ratio: float
    block_rms_ratio: float
    row_rms_ratio: float
    lse_error: float  # in units of max(1, |lse|)

    @property
    def passed(self) -> bool:
        return not self.failures


def _ratio(a: float, b: float) -> float:
    return a / b if b else (0.0 if a == 0 else math.inf)


def _block_rms(error: torch.Tensor) -> torch.Tensor:
    """rms over blocks of BLOCK_ROWS rows of each head (B, H, blocks).

    What is left over at the end belongs to the last block: the rms of a row or two scatters as a row's does,
    which the rule for rows allows for and the rule for blocks does not.
    """
    squares = error.square().mean(-1)  # (B, H, rows)
    whole = max(1, squares.shape[-1] // BLOCK_ROWS)
    parts = [*squares.split(BLOCK_ROWS, -1)]
    parts[whole - 1 :] = [torch.cat(parts[whole - 1 :], -1)]
    return torch.stack([part.mean(-1) for part in parts], -1).sqrt()


def judge(
    o: torch.Tensor,
    ref: torch.Tensor,
    yard: torch.Tensor,
    lse: torch.Tensor | None = None,
    ref_lse: torch.Tensor | None = None,
    floor: float = 0.0,
    others: Sequence[torch.Tensor] = (),
    yard_lse: torch.Tensor | None = None,
) -> Verdict:
    """Apply the pass rule to a kernel's output `o` (and `lse`). All of o, ref, yard are (B, H, N, d).

    The yardstick's error counts as at least `floor`, and as that of the worst of `others`, which are
    yardsticks too, in each part of the rule. With `yard_lse`, of a kernel whose LSE is of e4m3 P, a row's LSE
    may be off by LSE_OF_CODES, and the rms of a block's 64 by MAX_FACTOR times the yardstick's.
    """
    if o.numel() == 0:
        return Verdict((), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    failures = []
    out = o.double()
    finite, ref_finite = out.isfinite(), ref.isfinite()
    if not torch.equal(finite, ref_finite):
        where = (finite != ref_finite).nonzero()
        at = tuple(where[0].tolist())
        failures.append(
            f"{len(where)} elements finite in one and not in the other, first at (b, h, row, x) = {at}: "
            f"kernel {out[at]:.6g}, reference {ref[at]:.6g}, yardstick {yard[at]:.6g}"
        )
    zero = torch.zeros((), dtype=torch.float64, device=o.device)
    error = torch.where(finite & ref_finite, out - ref, zero)
    yard_errors = [torch.where(ref_finite, x.double() - ref, zero) for x in (yard, *others)]
    worst_yard = lambda size: torch.stack([size(x) for x in yard_errors]).amax(0)
    max_error, max_yard = error.abs().max().item(), max(worst_yard(lambda x: x.abs().max()).item(), floor)
    total_rms = lambda x: x.square().mean().sqrt()
    rms, rms_yard = total_rms(error).item(), max(worst_yard(total_rms).item(), floor)
    block, block_yard = _block_rms(error), worst_yard(_block_rms).clamp(min=floor)
    block_ratio = torch.where(block == 0, zero, block / block_yard)
    worst = torch.unravel_index(error.abs().argmax(), error.shape)
    at = tuple(int(x) for x in worst)
    values = f"kernel {out[at]:.6g}, reference {ref[at]:.6g}, yardstick {yard[at]:.6g}"
    here = f"worst at (b, h, row, x) = {at}: {values}"
    if not max_error <= MAX_FACTOR * max_yard:
        failures.append(
            f"max error {max_error:.3g} exceeds {MAX_FACTOR} × the yardstick's {max_yard:.3g}; {here}"
        )
    if not rms <= RMS_FACTOR * rms_yard:
        failures.append(f"rms error {rms:.3g} exceeds {RMS_FACTOR} × the yardstick's {rms_yard:.3g}; {here}")
    if not bool((block <= BLOCK_RMS_FACTOR * block_yard).all()):
        b, h, i = (
            int(x) for x in torch.unravel_index(block_ratio.nan_to_num(math.inf).argmax(), block.shape)
        )
        failures.append(
            f"rms error {block[b, h, i]:.3g} in rows {i * BLOCK_ROWS}… of (b, h) = {(b, h)} exceeds "
            f"{BLOCK_RMS_FACTOR} × the yardstick's {block_yard[b, h, i]:.3g}"
        )
    row = error.square().mean(-1).sqrt()
    row_yard = torch.maximum(
        worst_yard(lambda x: x.square().mean(-1).sqrt()),
        block_yard[..., (torch.arange(row.shape[-1]) // BLOCK_ROWS).clamp(max=block_yard.shape[-1] - 1)],
    )
    row_ratio = torch.where(row == 0, zero, row / row_yard)
    if not bool((row <= ROW_RMS_FACTOR * row_yard).all()):
        at = tuple(int(x) for x in torch.unravel_index(row_ratio.nan_to_num(math.inf).argmax(), row.shape))
        failures.append(
            f"rms error {row[at]:.3g} of (b, h, row) = {at} exceeds {ROW_RMS_FACTOR} × the yardstick's "
            f"{row_yard[at]:.3g}"
        )
    lse_error = 0.0
    if lse is not None:
        delta = (lse.double() - ref_lse).abs() / ref_lse.abs().clamp(min=1.0)
        delta = torch.where(lse == ref_lse, zero, delta)  # −∞ in both
        if yard_lse is not None:
            of_row, of_yard = (torch.where(x == ref_lse, zero, x.double() - ref_lse) for x in (lse, yard_lse))
            of_block = _block_rms(of_row[..., None]) / _block_rms(of_yard[..., None]).clamp(min=LSE_OF_SUMS)
            worst_block = of_block.nan_to_num(math.inf).max() / MAX_FACTOR
            delta = LSE_TOLERANCE * torch.maximum(of_row.abs() / LSE_OF_CODES, worst_block)
        lse_error = delta.nan_to_num(math.inf).max().item()
        if not lse_error <= LSE_TOLERANCE:
            at = tuple(int(x) for x in torch.unravel_index(delta.nan_to_num(math.inf).argmax(), delta.shape))
            failures.append(
                f"LSE off by {lse_error:.3g}·max(1, |lse|) at (b, h, row) = {at}: kernel {lse[at]:.6g}, "
                f"reference {ref_lse[at]:.6g}"
            )
    return Verdict(
        tuple(failures),
        max_error,
        _ratio(max_error, max_yard),
        _ratio(rms, rms_yard),
        block_ratio.nan_to_num(math.inf).max().item(),
        row_ratio.nan_to_num(math.inf).max().item(),
        lse_error,
    )


def judge_gradients(
    found: dict[str, torch.Tensor],
    ref: Gradients,
    yard: Gradients,
    floors: dict[str, float],
    *others: Gradients,
) -> Verdict:
    """Apply the pass rule to dq, dk and dv, each by itself; of dk and dv the rows are keys."""
    verdicts = {
        name: judge(found[name], exact, rounded, floor=floors[name], others=more)
        for name, exact, rounded, *more in zip(("dq", "dk", "dv"), ref, yard, *others)
    }
    failures = [f"{name}: {text}" for name, verdict in verdicts.items() for text in verdict.failures]
    worst = {
        field: max(getattr(verdict, field) for verdict in verdicts.values())
        for field in Verdict.__dataclass_fields__
        if field != "failures"
    }
    return Verdict(tuple(failures), **worst)


def judge_roundings(
    found: dict[str, torch.Tensor],
    ref: Gradients,
    yardstick: Callable[[float], Gradients],
    floors: dict[str, float],
) -> Verdict:
    """`judge_gradients` by `yardstick(nudge)`, as `gradients_of` has it: by 0, and if that fails by the worst
    of 0 and NUDGE either way.

    Where a pair dominates its row and the LSE has a gradient, a row of dQ and one of dK hang on how one dS is
    rounded, and on D, whose error by the rounding of O all share. Two honest kernels have that dS a few 10⁻⁶
    apart, as they sum dP in fp32. With a tie between them one rounds it up and one down: the one error is
    what is shared more half a unit, the other what is shared less half a unit, which may be nothing. Such
    luck of a yardstick says nothing of a kernel. Nudged, it rounds that dS the other way; what is not next to
    a tie stays, and so do its errors as a whole.
    """
    plain = yardstick(0.0)
    verdict = judge_gradients(found, ref, plain, floors)
    if verdict.passed:
        return verdict
    return judge_gradients(found, ref, plain, floors, yardstick(NUDGE), yardstick(-NUDGE))


def cancellation(q, k, v, do, scale: float | None = None) -> dict[str, float]:
    """The least error that the rule credits the yardstick with in each gradient.

    Where a row sees one key, dS = dP − D is zero: two sums of d products, each of size √d·|dO|·|V|, whose
    round-off depends on the order of additions. Times scale = 1/√d it reaches dQ with a K, and dK with a Q
    for each query that has the key to itself. Beside the 16-bit results of longer rows it is nothing.
    """
    rms = lambda x: x.float().square().mean().sqrt().item()
    unit = CANCELLATION * rms(do) * rms(v)
    if scale is not None:
        unit *= scale * math.sqrt(q.shape[-1])
    queries = q.shape[1] * q.shape[2] / max(1, k.shape[1] * k.shape[2])  # to a key
    return {"dq": unit * rms(k), "dk": unit * rms(q) * math.sqrt(max(1.0, queries)), "dv": 0.0}


def judge_sink(dsink: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> list[str]:
    """What is wrong with a sink's gradient, held to `sink_gradient` of what the kernel read."""
    error = (dsink.double() - exact).abs() / size.clamp(min=1e-30)
    if bool((error <= SINK_TOLERANCE).all()):
        return []
    head = int(error.nan_to_num(math.inf).argmax())
    return [
        f"dsink off by {error[head]:.3g} of what it is a sum of in head {head}: kernel {dsink[head]:.6g}, "
        f"reference {exact[head]:.6g}"
    ]


# ---- what a kernel is held to ------------------------------------------------------------------------------


class Quantized(NamedTuple):
    """What is multiplied instead of q, k and v: fp32; the exponents of V's blocks, one for each key; and O
    and LSE of those in float64."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    exponents: torch.Tensor
    exact: tuple[torch.Tensor, torch.Tensor]


class Expected:
    """What attention of q, k, v, and for a given dO its backward pass, should give.

    The reference and each yardstick are computed when first asked for, once, whatever the number of kernels
    they judge.
    """

    def __init__(
        self, q, k, v, causal: bool, do: torch.Tensor | None = None, top_left: bool = False,
        softmax_scale: float | None = None, dlse: torch.Tensor | None = None, policies: Policies = PLAIN,
    ):  # fmt: skip
        self.q, self.k, self.v, self.do, self.causal = q, k, v, do, causal
        self.softmax_scale, self.dlse, self.policies = softmax_scale, dlse, policies
        self.options = {"top_left": top_left, "scale": softmax_scale, "policies": policies}
        self._yardsticks: dict[tuple[str, Rounding], torch.Tensor | Gradients] = {}
        self._quantized: dict[str, Quantized] = {}

    @functools.cached_property
    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE in float64."""
        return reference(self.q, self.k, self.v, self.causal, **self.options)

    def quantized(self, how: str) -> "Quantized":
        """What a stage makes of q, k and v that quantises them itself, as `LazyMaximum.quantized` says."""
        if how not in self._quantized:
            signs = production_fp8.signs(self.q.shape[3]).to(self.q.device)
            made = quantized.quantize_reference(self.q, self.k, self.v, rotate=how == ROTATED, signs=signs)
            exponents = quantized.of_rows(made.v_exponent, self.v)
            exact = reference(*made.dequantized, self.causal, **self.options)
            self._quantized[how] = Quantized(made.dequantized, exponents, exact)
        return self._quantized[how]

    @functools.cached_property
    def saved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE as a backward stage reads them: rounded from float64 to q's type and to fp32."""
        o, lse = self.forward
        return o.to(self.q.dtype), lse.float()

    @functools.cached_property
    def gradients(self) -> Gradients:
        """dQ, dK, dV in float64."""
        inputs = self.q, self.k, self.v, *self.forward, self.do
        return reference_gradients(*inputs, self.causal, **self.options, dlse=self.dlse)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What a stage reads: q, k, v, and with dO also o, lse, do."""
        return (self.q, self.k, self.v, *(() if self.do is None else (*self.saved, self.do)))

    def allocate(self, module: object, problem: Problem, **options: object) -> Tensors:
        """What the kernel of `module` with these options reads and writes, of either direction."""
        of_direction = allocate if self.do is None else allocate_backward
        tensors = of_direction(module, problem, *self.inputs, **options)
        tensors.softmax_scale, tensors.dlse = self.softmax_scale, self.dlse
        return tensors

    def run(self, module: object, compiled: object, tensors: Tensors, rounding: Rounding) -> Verdict:
        """Run a kernel into outputs and scratch filled with NaN, and judge what it wrote."""
        module.run_kernel(compiled, poison(tensors))
        return self.judge(tensors.outputs, rounding)

    def judge(self, outputs: dict[str, torch.Tensor], rounding: Rounding) -> Verdict:
        """The rule on a kernel's outputs, named as in `Tensors.outputs`; `rounding` is `rounding_of` it.

        Gradients are held to a yardstick that reads what `saved` gives.
        """
        if "o" in outputs:
            inputs, exact, options = (self.q, self.k, self.v), None, self.options
            if isinstance(rounding, LazyMaximum) and rounding.quantized:
                inputs, exponents, exact = self.quantized(rounding.quantized)
                options = options | {"exponents": exponents, "dtype": self.q.dtype}
            yard, yard_lse = self._yardstick("o", rounding, yardstick_of, *inputs, self.causal, **options)
            ref, ref_lse = exact or self.forward
            codes = isinstance(rounding, LazyMaximum) and rounding.e4m3 is not None
            return judge(
                outputs["o"], ref, yard, outputs.get("lse"), ref_lse, yard_lse=yard_lse if codes else None
            )
        inputs, options = (*self.inputs, self.causal), self.options | {"dlse": self.dlse}
        yard = lambda nudge: self._yardstick(
            f"gradients, {nudge}", rounding, yardstick_gradients, *inputs, **options, nudge=nudge
        )
        floors = cancellation(self.q, self.k, self.v, self.do, self.softmax_scale)
        return judge_roundings(outputs, self.gradients, yard, floors)

    def _yardstick(
        self, kind: str, rounding: Rounding, compute: Callable, *inputs: object, **options: Any
    ) -> object:
        if (kind, rounding) not in self._yardsticks:
            self._yardsticks[kind, rounding] = compute(*inputs, rounding, **options)
        return self._yardsticks[kind, rounding]


def check(q, k, v, causal: bool, o, lse=None, rounds_p: Rounding = False, top_left: bool = False) -> Verdict:
    """Judge a kernel's output for inputs q, k, v against float64 attention."""
    found = {"o": o, **({} if lse is None else {"lse": lse})}
    return Expected(q, k, v, causal, top_left=top_left).judge(found, rounds_p)
