"""Ways of being wrong, applied to models of the kernels: the pass rule must catch each on every shape."""

import functools
import math
from collections.abc import Callable

import torch

from hopper_attention.kernels.contract import LazyMaximum, Problem

from .inputs import random_inputs
from .judging import Expected, cancellation, judge, judge_roundings
from .quantized import codes
from .reference import BLOCK_ROWS, Gradients, Rounding, gradients_of, reference, yardstick_of


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


def tiled_model(
    q, k, v, causal: bool, rows: torch.Tensor, mutation: str | None = None, tile: int = 64,
    e4m3: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention-2's forward in fp32 torch on the query rows `rows`, O and LSE, with one of `MUTATIONS`
    applied; with `e4m3` P is rounded so, as `LazyMaximum` has it."""
    rounded = lambda p: p if e4m3 is None else codes(p * 2.0**e4m3).float() * 2.0**-e4m3
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
        p = rounded((scores - safe_max).exp())
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
    return o, (row_max + row_sum.log()).squeeze(-1)


PAIR_MUTATIONS = (  # of the last tile of queries and a tile of keys in the middle
    "drop a pair of tiles",
    "add a tile of dQ twice",
    "lose a tile of dQ",
    "transpose a tile of dS",
)
FORMULA_MUTATIONS = (
    "forget D",
    "forget the scale on dQ",
    "scale dK twice",
    "LSE of the row before",
    "D of the row before",
)
LSE_MUTATIONS = ("forget dLSE", "dLSE of the row before", "add dLSE to D")  # where the LSE has a gradient
GRADIENT_MUTATIONS = (
    *SCORE_MUTATIONS,
    *PAIR_MUTATIONS,
    *FORMULA_MUTATIONS,
    *(f"{mutation}, {name}" for mutation in OUTPUT_MUTATIONS for name in ("dq", "dk", "dv")),
)


def tiled_gradients(
    q, k, v, o, lse, do, causal: bool, rows, columns, mutation: str | None = None, tile: int = 64,
    rounds_p: bool = False, dlse: torch.Tensor | None = None,
) -> Gradients:  # fmt: skip
    """FlashAttention-2's backward in fp32 torch, with one of `GRADIENT_MUTATIONS` applied but those of
    outputs, or of `LSE_MUTATIONS`; `rows` and `columns` as in `gradients_of`, whole tiles of the latter."""
    n, scale = k.shape[2], 1.0 / math.sqrt(q.shape[-1])
    shifted = lambda x: torch.cat([x[:, :, :1], x[:, :, :-1]], 2)
    if mutation == "LSE of the row before":
        lse = shifted(lse)
    queries, d_out = q[:, :, rows].float(), do[:, :, rows].float()
    delta = (do.float() * o.float()).sum(-1, keepdim=True)
    if mutation == "D of the row before":
        delta = shifted(delta)
    delta = delta.mul_(mutation != "forget D")
    if dlse is not None and mutation != "forget dLSE":
        of_lse = dlse[..., None].float()
        if mutation == "dLSE of the row before":
            of_lse = shifted(of_lse)
        delta += of_lse if mutation == "add dLSE to D" else -of_lse
    delta = delta[:, :, rows]
    rounded = (lambda x: x.to(q.dtype).float()) if rounds_p else (lambda x: x)
    shift = lse[:, :, rows, None].float()
    late = rows >= q.shape[2] - tile
    dq, dk, dv = torch.zeros_like(queries), [], []
    for keys in columns.split(tile):
        key_tile, value_tile = k[:, :, keys].float(), v[:, :, keys].float()
        scores = queries @ key_tile.mT * scale
        if causal:
            scores.masked_fill_(keys > rows[:, None], -math.inf)
        if mutation in SCORE_MUTATIONS:
            SCORE_MUTATIONS[mutation](scores, rows, keys, n, causal)
        in_the_middle = int(keys[0]) == n // 2
        if mutation == "drop a pair of tiles" and in_the_middle:
            scores[:, :, late] = -math.inf
        p = (scores - shift).exp()
        ds = p * (d_out @ value_tile.mT - delta)
        p, ds = rounded(p), rounded(ds)
        dq_tile = ds @ key_tile
        if mutation in ("add a tile of dQ twice", "lose a tile of dQ") and in_the_middle:
            dq_tile[:, :, late] *= 2.0 if mutation.startswith("add") else 0.0
        dq += dq_tile
        if mutation == "transpose a tile of dS" and in_the_middle and late.any():
            ds[:, :, late] = ds[:, :, late].mT
        dk.append(ds.mT @ queries)
        dv.append(p.mT @ d_out)
    dq *= 1.0 if mutation == "forget the scale on dQ" else scale
    dk = torch.cat(dk, 2) * (scale * scale if mutation == "scale dK twice" else scale)
    return tuple(x.to(q.dtype) for x in (dq, dk, torch.cat(dv, 2)))


def sampled_rows(n: int, device: str, blocks: int = 6) -> torch.Tensor:
    """Query rows that stand for all: whole blocks of 64, evenly spread, the first and the last among them."""
    starts = torch.linspace(0, n // BLOCK_ROWS - 1, min(blocks, n // BLOCK_ROWS)).long() * BLOCK_ROWS
    return (starts[:, None] + torch.arange(BLOCK_ROWS)).flatten().to(device)


def survivors(
    problem: Problem, device: str, all_rows: bool, seed: int = 0, rounds_p: Rounding = False
) -> list[str]:
    """The mutations that the rule misses on one head of `problem`'s shape, and "none" if it fails the honest
    model. `rounds_p` of a backward problem: model and yardstick round P and dS; of one in FP8, to e4m3, and
    then the LSE is judged too."""
    n = problem.seqlen_q
    one_head = problem.with_(batch=1, heads=1, kv_heads=1)
    if problem.direction == "bwd":
        return _surviving_gradients(one_head, random_inputs(one_head, device, seed), all_rows, rounds_p)
    q, k, v = random_inputs(one_head, device, seed)
    rows = torch.arange(n, device=device) if all_rows else sampled_rows(n, device)
    ref, ref_lse = reference(q, k, v, problem.causal, rows)
    yard, yard_lse = yardstick_of(q, k, v, problem.causal, rounds_p, rows)
    e4m3 = rounds_p.e4m3 if isinstance(rounds_p, LazyMaximum) else None
    missed = []
    for mutation in (None, *MUTATIONS):
        o, lse = tiled_model(q, k, v, problem.causal, rows, mutation, e4m3=e4m3)
        of_codes = {} if e4m3 is None else {"lse": lse, "ref_lse": ref_lse, "yard_lse": yard_lse}
        verdict = judge(o, ref, yard, **of_codes)
        if verdict.passed != (mutation is None):
            missed.append(f"{mutation}: " + ("; ".join(verdict.failures) or "passed the rule"))
    return missed


def _surviving_gradients(
    problem: Problem, inputs: tuple[torch.Tensor, ...], all_rows: bool, rounds_p: bool
) -> list[str]:
    """`survivors` of a backward problem: dQ of some queries and all keys, dK and dV of some keys and all
    queries."""
    q, k, v, do = inputs
    n, causal = problem.seqlen_q, problem.causal
    every = torch.arange(n, device=q.device)
    some = every
    if not all_rows:  # the tile in the middle is where keys and tiles are dropped
        middle = torch.arange(n // 2, n // 2 + BLOCK_ROWS, device=q.device)
        some = torch.cat([sampled_rows(n, q.device, blocks=2), middle]).unique()
    dlse = None
    if problem.lse_grad:
        dlse = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(1)).to(q.device)
    expected = Expected(q, k, v, causal, do, dlse=dlse)
    floors = cancellation(q, k, v, do)

    def on_sample(compute: Callable[..., Gradients]) -> Gradients:
        if all_rows:
            return compute(every, every)
        return compute(some, every)[0], *compute(every, some)[1:]

    exact = lambda rows, columns: gradients_of(
        q, k, v, *expected.forward, do, causal, torch.float64, False, rows, columns, dlse=dlse
    )
    ref = on_sample(exact)

    @functools.cache
    def yard(nudge: float) -> Gradients:
        rounded = lambda rows, columns: gradients_of(
            q,
            k,
            v,
            *expected.saved,
            do,
            causal,
            torch.float32,
            rounds_p,
            rows,
            columns,
            dlse=dlse,
            nudge=nudge,
        )
        return tuple(x.to(q.dtype) for x in on_sample(rounded))

    def model(mutation: str | None) -> dict[str, torch.Tensor]:
        tiled = lambda rows, columns: tiled_gradients(
            q, k, v, *expected.saved, do, causal, rows, columns, mutation, rounds_p=rounds_p, dlse=dlse
        )
        return dict(zip(("dq", "dk", "dv"), on_sample(tiled)))

    missed, honest = [], model(None)
    for mutation in (None, *GRADIENT_MUTATIONS, *(LSE_MUTATIONS if problem.lse_grad else ())):
        name, _, output = (mutation or "").partition(", ")
        if output or mutation is None:
            found = {key: x.clone() for key, x in honest.items()}
        else:
            found = model(mutation)
        if output:
            OUTPUT_MUTATIONS[name](found[output])
        verdict = judge_roundings(found, ref, yard, floors)
        if verdict.passed != (mutation is None):
            missed.append(f"{mutation}: " + ("; ".join(verdict.failures) or "passed the rule"))
    return missed
