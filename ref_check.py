"""The reference, the pass rule, and what proves that the rule can fail.

    python ref_check.py k2            every case for one stage (several stages, or `all`)
    python ref_check.py --mutations   every mutation on every shape of the sweep: each must be caught

A kernel passes when it is no further from float64 attention than the same computation with the kernel's own
roundings and no others (the yardstick) explains. A fixed tolerance cannot do this: at N = 16384 a dropped key
moves the output by less than 1e-3.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from harness.problem import Problem, sweep

MAX_FACTOR = 2.0  # max|kernel − reference| against the yardstick's
RMS_FACTOR = 1.25  # rms(kernel − reference) against the yardstick's, over the whole tensor
BLOCK_RMS_FACTOR = 1.5  # and over every block of 64 rows: one bad block is 1/256 of a tensor at N = 16384
BLOCK_ROWS = 64
ROW_RMS_FACTOR = 3.0  # and over every row, against the larger of the row's and its block's yardstick
LSE_TOLERANCE = 1e-5
CHUNK_ELEMENTS = 2**27  # scores held at once


# ---- the reference and the yardstick -----------------------------------------------------------------------


Rounding = bool | tuple[int, float]
"""How P is rounded before P·V: not at all, relative to its row's maximum, or relative to a lazy one.

A lazy maximum is (tile_kv, growth): keys come in tiles from right to left, and 16 rows' maxima are brought up
to date only when one of them has grown by more than 2^growth.
"""


def _lazy_maximum(scores: torch.Tensor, tile_kv: int, growth: float) -> torch.Tensor:
    """What each score (heads, rows, keys) is taken relative to; rows in whole groups of 16 but the last."""
    rows, keys = scores.shape[1:]
    padded = torch.nn.functional.pad(scores, (0, -keys % tile_kv, 0, -rows % 16), value=-math.inf)
    tile_max = padded.unflatten(-1, (-1, tile_kv)).amax(-1)  # (heads, rows, tiles)
    base = torch.full_like(tile_max[..., 0], -math.inf)
    bases = []
    for tile in reversed(range(tile_max.shape[-1])):
        grown = (tile_max[..., tile] > base + growth * math.log(2)).unflatten(-1, (-1, 16)).any(-1)
        base = torch.where(grown.repeat_interleave(16, -1), base.maximum(tile_max[..., tile]), base)
        bases.append(base)
    bases = torch.stack(bases[::-1], -1)[:, :rows].repeat_interleave(tile_kv, -1)
    return bases[..., :keys]


def _attention(q, k, v, causal: bool, rows: torch.Tensor | None, dtype: torch.dtype, rounds_p: Rounding):
    """(O, LSE) of q, k, v (B, H, N, d) computed in `dtype`; `rows` selects query rows (all by default).

    A query that sees no key has O = 0 and LSE = −∞.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_kv, group = k.shape[2], heads // k.shape[1]
    rows = torch.arange(seqlen_q, device=q.device) if rows is None else rows
    o = torch.empty(batch, heads, len(rows), head_dim, dtype=dtype, device=q.device)
    lse = torch.empty(batch, heads, len(rows), dtype=dtype, device=q.device)
    columns = torch.arange(seqlen_kv, device=q.device)
    heads_at_once = max(1, min(heads, CHUNK_ELEMENTS // max(1, len(rows) * seqlen_kv)))
    rows_at_once = max(1, min(len(rows), CHUNK_ELEMENTS // max(1, heads_at_once * seqlen_kv) // 64 * 64))
    for b in range(batch):
        for h in range(0, heads, heads_at_once):
            some_heads = slice(h, min(h + heads_at_once, heads))
            kv_heads = torch.arange(some_heads.start, some_heads.stop, device=q.device) // group
            keys, values = k[b, kv_heads].to(dtype), v[b, kv_heads].to(dtype)
            for r in range(0, len(rows), rows_at_once):
                some_rows = rows[r : r + rows_at_once]
                scores = (
                    q[b, some_heads][:, some_rows].to(dtype) @ keys.transpose(-1, -2) / math.sqrt(head_dim)
                )
                if causal:  # bottom-right aligned: the last query sees every key
                    scores.masked_fill_(columns > some_rows[:, None] + (seqlen_kv - seqlen_q), -math.inf)
                maximum = scores.amax(-1, keepdim=True)
                maximum.masked_fill_(maximum == -math.inf, 0.0)  # −∞ − (−∞) would be NaN
                if isinstance(rounds_p, tuple):
                    base = _lazy_maximum(scores, *rounds_p)
                    base = base.masked_fill(base == -math.inf, 0.0)
                    p, weight = (scores - base).exp_(), (base - maximum).exp_()
                    total = (p * weight).sum(-1, keepdim=True)
                    p = p.to(q.dtype).to(dtype).mul_(weight)
                else:
                    p = scores.sub_(maximum).exp_()
                    total = p.sum(-1, keepdim=True)
                    if rounds_p:
                        p = p.to(q.dtype).to(dtype)
                seen = total.clamp(min=1e-30)  # at least 1 where the maximum is a score
                o[b, some_heads, r : r + len(some_rows)] = (p @ values) / seen
                lse[b, some_heads, r : r + len(some_rows)] = (maximum + total.log()).squeeze(-1)
    return o, lse


def reference(q, k, v, causal: bool, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 from the rounded inputs, never downcast: O (B, H, rows, d) and LSE (B, H,
    rows)."""
    return _attention(q, k, v, causal, rows, torch.float64, rounds_p=False)


def rounding_of(stage: object, module: object, problem: Problem, **options: object) -> Rounding:
    """How the stage of `module` rounds P on `problem`."""
    if hasattr(module, "lazy_maximum"):
        return module.lazy_maximum(problem, **options)
    return stage.rounds_p


def yardstick(q, k, v, causal: bool, rounds_p: Rounding, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Attention with the kernel's roundings and no others: fp32 scores, softmax and sums, output to q's type,
    and P to q's type where the kernel's P·V multiplies rounded P (`rounding_of`)."""
    return _attention(q, k, v, causal, rows, torch.float32, rounds_p)[0].to(q.dtype)


# ---- the pass rule -----------------------------------------------------------------------------------------


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
) -> Verdict:
    """Apply the pass rule to a kernel's output `o` (and `lse`). All of o, ref, yard are (B, H, N, d)."""
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
    yard_error = torch.where(ref_finite, yard.double() - ref, zero)
    max_error, max_yard = error.abs().max().item(), yard_error.abs().max().item()
    rms, rms_yard = error.square().mean().sqrt().item(), yard_error.square().mean().sqrt().item()
    block, block_yard = _block_rms(error), _block_rms(yard_error)
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
        yard_error.square().mean(-1).sqrt(),
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


def check(q, k, v, causal: bool, o, lse=None, rounds_p: Rounding = False) -> Verdict:
    """Judge a kernel's output for inputs q, k, v against float64 attention."""
    ref, ref_lse = reference(q, k, v, causal)
    return judge(o, ref, yardstick(q, k, v, causal, rounds_p), lse, ref_lse)


# ---- the needle test ---------------------------------------------------------------------------------------


def needle_inputs(problem: Problem, device: str, amplitude: float = 32.0, seed: int = 0):
    """q, k, v and the key index (N,) that each query row must return exactly.

    Keys are random ±1 words and a query is `amplitude` times the word of its target, so that every other
    key's weight underflows. Targets are the first and last keys of every 16-key tile, hence of any tile that
    is a multiple of 16: a tile that is dropped or read in another's place shows in some row, at any length;
    one that is counted twice shows in the LSE.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (problem.batch, problem.heads, problem.seqlen_kv, problem.head_dim)
    k = torch.randint(0, 2, shape, device=device, generator=generator).mul(2).sub(1).to(torch.bfloat16)
    v = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
    index = torch.arange(problem.seqlen_kv, device=device)
    needles = index[(index % 16 == 0) | (index % 16 == 15) | (index == problem.seqlen_kv - 1)]
    rows = torch.arange(problem.seqlen_q, device=device)
    visible = (
        torch.searchsorted(needles, rows, right=True)
        if problem.causal
        else torch.full_like(rows, len(needles))
    )
    # Odd rows and the last one take the latest needle they may see, so that tiles near the diagonal are hit;
    # the others cycle.
    latest = (rows % 2 == 1) | (rows == problem.seqlen_q - 1)
    choice = torch.where(latest, visible - 1, (rows // 2) % visible)
    target = needles[choice]
    return k[:, :, target] * amplitude, k, v, target


# ---- mutations: the rule must catch each -------------------------------------------------------------------


def _drop(keys: Callable[[int], tuple[int, int]]):
    """Hide keys [first, last) from every row."""

    def hide(scores, rows, columns, n, causal):
        first, last = keys(n)
        scores[..., (columns >= first) & (columns < last)] = -math.inf

    return hide


def _mask_gt(scores, rows, columns, n, causal):
    """The mask's `>` written `>=`: the diagonal, or without a causal mask the last key, is hidden."""
    scores.masked_fill_(columns >= rows[:, None] if causal else (columns >= n - 1)[None], -math.inf)


SCORE_MUTATIONS = {
    "drop a key": _drop(lambda n: (n // 2, n // 2 + 1)),
    "drop a late key": _drop(lambda n: (n - 8, n - 7)),  # causal: only the last 8 rows see it
    "drop a tile": _drop(lambda n: (n // 2, n // 2 + 64)),
    "mask > for >=": _mask_gt,
}
STEP_MUTATIONS = ("skip a rescale", "scale twice", "omit the final normalisation")


def _swap_halves(o):
    o.copy_(o.roll(o.shape[-1] // 2, -1))


def _one_nan(o):
    o[..., o.shape[-2] // 2, 5] = math.nan


def _unwritten_row(o):
    o[..., o.shape[-2] // 3, :] = math.nan


def _stale_row(o):
    o[..., -1, :] = o[..., -2, :].clone()


OUTPUT_MUTATIONS = {
    "swap head-dim halves": _swap_halves,
    "one NaN": _one_nan,
    "one unwritten row": _unwritten_row,
    "one row holding its neighbour's result": _stale_row,
}
MUTATIONS = (*SCORE_MUTATIONS, *STEP_MUTATIONS, *OUTPUT_MUTATIONS)


def tiled_model(q, k, v, causal: bool, rows: torch.Tensor, mutation: str | None = None, tile: int = 64):
    """FlashAttention-2's forward in fp32 torch on the query rows `rows`, with one of `MUTATIONS` applied."""
    n, scale = k.shape[2], 1.0 / math.sqrt(q.shape[-1])
    if mutation == "scale twice":
        scale *= scale
    q = q[:, :, rows].float()
    o = torch.zeros_like(q)
    row_max = torch.full((*q.shape[:-1], 1), -math.inf, device=q.device)
    row_sum = torch.zeros_like(row_max)
    for start in range(0, n, tile):
        columns = torch.arange(start, min(start + tile, n), device=q.device)
        scores = q @ k[:, :, columns].float().transpose(-1, -2) * scale
        if causal:
            scores.masked_fill_(columns > rows[:, None], -math.inf)
        if mutation in SCORE_MUTATIONS:
            SCORE_MUTATIONS[mutation](scores, rows, columns, n, causal)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        safe_max = new_max.masked_fill(new_max == -math.inf, 0.0)  # a row that has seen no key yet
        rescale = (row_max - safe_max).exp()
        p = (scores - safe_max).exp()
        row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
        o = (o if mutation == "skip a rescale" and start == tile else o * rescale) + p @ v[
            :, :, columns
        ].float()
        row_max = new_max
    if mutation != "omit the final normalisation":
        o = o / row_sum
    o = o.to(torch.bfloat16)
    if mutation in OUTPUT_MUTATIONS:
        OUTPUT_MUTATIONS[mutation](o)
    return o


def sampled_rows(n: int, device: str, blocks: int = 12) -> torch.Tensor:
    """Query rows that stand for all: whole blocks of 64, evenly spread, the first and the last among them."""
    starts = torch.linspace(0, n // BLOCK_ROWS - 1, min(blocks, n // BLOCK_ROWS)).long() * BLOCK_ROWS
    return (starts[:, None] + torch.arange(BLOCK_ROWS)).flatten().to(device)


def survivors(problem: Problem, device: str, all_rows: bool, seed: int = 0) -> list[str]:
    """The mutations that the rule misses on one head of `problem`'s shape, and "none" if it fails the honest
    model."""
    from harness.inputs import random_inputs

    n = problem.seqlen_q
    one_head = problem.with_(batch=1, heads=1, kv_heads=1)
    q, k, v = random_inputs(one_head, device, seed)
    rows = torch.arange(n, device=device) if all_rows else sampled_rows(n, device)
    ref, _ = reference(q, k, v, problem.causal, rows)
    yard = yardstick(q, k, v, problem.causal, False, rows)
    missed = []
    for mutation in (None, *MUTATIONS):
        verdict = judge(tiled_model(q, k, v, problem.causal, rows, mutation), ref, yard)
        if verdict.passed != (mutation is None):
            missed.append(f"{mutation}: " + ("; ".join(verdict.failures) or "passed the rule"))
    return missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", help="stage ids, or `all`")
    parser.add_argument("--mutations", action="store_true", help="prove that the rule catches every mutation")
    parser.add_argument("--repeats", type=int, default=100, help="launches that must be bit-identical")
    parser.add_argument("--only", help="run only the cases whose name contains this")
    parser.add_argument(
        "--no-sanitizer", action="store_true", help="leave out compute-sanitizer's two runs per stage"
    )
    parser.add_argument(
        "--one-launch", action="store_true", help="launch one small problem and stop (for sanitizers)"
    )
    args = parser.parse_args(arguments)
    if not args.stages and not args.mutations:
        parser.error("name a stage, or --mutations")
    failed = 0
    if args.mutations:
        failed += sum(not ok for ok in _report_mutations())
    if args.stages:
        from harness import cases

        failed += cases.run_stages(args.stages, args)
    return 1 if failed else 0


def _report_mutations() -> Iterator[bool]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for problem in sweep():
        missed = survivors(problem, device, all_rows=device == "cuda")
        print(
            f"{problem}: " + (f"MISSED {missed}" if missed else f"all {len(MUTATIONS)} mutations caught"),
            flush=True,
        )
        yield not missed


if __name__ == "__main__":
    sys.exit(main())
