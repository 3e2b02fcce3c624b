"""The reference, the yardstick and the pass rule.

A kernel passes when it is no further from float64 attention, or its gradients, than the same computation with
the kernel's own roundings and no others (the yardstick) explains. A fixed tolerance cannot do this: at N =
16384 a dropped key moves the output by less than 1e-3.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from harness import quantized
from harness.stages import allocate, allocate_backward
from hopper_attention import production_fp8
from hopper_attention.kernels.contract import LazyMaximum, Problem, Tensors
from hopper_attention.kernels.device.fp8 import ROTATED

from .inputs import poison

MAX_FACTOR = 2.0  # max|kernel − reference| against the yardstick's
RMS_FACTOR = 1.25  # rms(kernel − reference) against the yardstick's, over the whole tensor
BLOCK_RMS_FACTOR = 1.5  # and over every block of 64 rows: one bad block is 1/256 of a tensor at N = 16384
BLOCK_ROWS = 64
ROW_RMS_FACTOR = 3.0  # and over every row, against the larger of the row's and its block's yardstick
LSE_TOLERANCE = 1e-5
# Of an LSE that is of e4m3 P: a row's is off by at most log(1 + 2⁻⁴), a block's rms by at least what sums of
# 13 bits lose, 2⁻¹⁶ of each of a tile's terms.
LSE_OF_CODES, LSE_OF_SUMS = 0.065, 2e-3
SUM_BITS = 13  # that the tensor cores keep behind the leading one of a sum of 8-bit products, and truncate
CANCELLATION = 2.0**-18  # of dP against D, relative to what they are sums of: some units of fp32 round-off
SINK_TOLERANCE = 1e-5  # of a sink's gradient, relative to the magnitudes it is a sum of
NUDGE = 2.0**-17  # of P and dS before they are rounded, relative to what they come from (`gradients_of`)
CHUNK_ELEMENTS = 2**27  # scores held at once


# ---- the reference and the yardstick -----------------------------------------------------------------------


class Policies(NamedTuple):
    """What attention may have beside a mask, as `Problem` has it; the sink is a logit per head (H,)."""

    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sink: torch.Tensor | None = None

    def seen(self, rows: torch.Tensor, keys: int, offset: int, tile: int = 1) -> slice:
        """The keys among which are all that these rows, in order, see, from the first of a `tile` on."""
        left, right = self.window or (-1, -1)
        if not len(rows):
            return slice(0, keys)
        begin = 0 if left < 0 else min(keys, max(0, int(rows[0]) + offset - left) // tile * tile)
        end = keys if right < 0 else max(begin, min(keys, int(rows[-1]) + offset + right + 1))
        return slice(begin, end)


PLAIN = Policies()
Rounding = bool | LazyMaximum
"""How P is rounded before P·V: not at all, relative to its row's maximum, or relative to a lazy one; what a
tile's P is rounded relative to is then the maximum at the tile's end."""


def _lazy_maximum(scores: torch.Tensor, lazy: LazyMaximum, seen: torch.Tensor) -> torch.Tensor:
    """What each score (heads, rows, keys) is taken relative to; `seen` (rows,) as `_seen_together`."""
    tile_kv, parts, growth, share = lazy.behind.values()
    keys = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -keys % tile_kv), value=-math.inf)
    part_max = padded.unflatten(-1, (-1, parts, tile_kv // parts)).amax(-1)  # (heads, rows, tiles, parts)
    base = part_max[..., 0, :].amax(-1)
    bases = [base]
    room = torch.full_like(base, growth * math.log(2))
    if share:
        total = (padded[..., :tile_kv] - base[..., None]).exp().sum(-1)
        own = (seen / tile_kv).ceil().to(scores) / part_max.shape[-2]
        # Of a row that sees no key NaN, as its base is.
        room = torch.minimum(room, (share * total * own).log().nan_to_num(0.0).clamp(min=0.0))
    for tile in range(1, part_max.shape[-2]):
        for part in range(parts):
            ahead = part_max[..., tile, part] - base
            grown = ahead > room
            base = torch.where(grown, part_max[..., tile, part], base)
            if share:
                room = room.masked_fill(grown, 0.0)
        bases.append(base)
    return torch.stack(bases, -1).repeat_interleave(tile_kv, -1)[..., :keys]


def _lazy_maximum_of_window(
    scores: torch.Tensor, lazy: LazyMaximum, rows: torch.Tensor, begin: int, keys: int, offset: int,
    window: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """`_lazy_maximum` of scores of the keys from `begin` on, where a window hides keys on both sides. A block
    of 64 rows begins with the tile that its first row sees first. Up to the tile with its last row's first
    key its maxima are those of the scores so far; the sum and the room are of the tiles up to there."""
    tile_kv, parts, growth, share = lazy.behind.values()
    left, right = (2**30 if x < 0 else x for x in window)
    first_row = rows // BLOCK_ROWS * BLOCK_ROWS
    last_key = first_row + BLOCK_ROWS + offset + right  # behind the last that the block sees
    own = (last_key.clamp(1, keys) / tile_kv).ceil()
    first_tile = lambda row: (row + offset - left).clamp(min=0)
    first = torch.minimum(first_tile(first_row) // tile_kv, own - 1)
    edge = first_tile(first_row + BLOCK_ROWS - 1) // tile_kv + 1
    edge = torch.minimum(torch.maximum(edge, first + 1), own)
    in_the_middle = math.ceil(min(keys, min(left, keys) + min(right, keys) + 1) / tile_kv)
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % tile_kv), value=-math.inf)
    tiles = padded.unflatten(-1, (-1, parts, tile_kv // parts))  # (heads, rows, tiles, parts, keys)
    base = torch.zeros_like(scores[..., 0])
    total, room = torch.zeros_like(base), torch.full_like(base, growth * math.log(2))
    bases = []
    for i in range(tiles.shape[-3]):
        number = begin // tile_kv + i
        exact, starts = (number >= first) & (number < edge), number == edge
        highest = tiles[..., i, :, :].amax((-1, -2))
        known = torch.where(total > 0, torch.maximum(base, highest), highest)
        raised = torch.where(exact & (known > -math.inf), known, base)
        total = torch.where(total > 0, total * (base - raised).exp(), total)
        base = raised
        added = (tiles[..., i, :, :] - base[..., None, None]).exp().sum((-1, -2))
        total = torch.where(exact, total + added, total)
        if share:
            asked = (share * total * (own - first) / in_the_middle).log().clamp(0.0, growth * math.log(2))
            room = torch.where(starts, asked, room)
        for part in range(parts):
            highest = tiles[..., i, part, :].amax(-1)
            grown = (number >= edge) & (highest - base > room)
            base = torch.where(grown, highest, base)
            if share:
                room = room.masked_fill(grown, 0.0)
        bases.append(base)
    return torch.stack(bases, -1).repeat_interleave(tile_kv, -1)[..., : scores.shape[-1]]


def _seen_together(rows: torch.Tensor, keys: int, offset: int, causal: bool) -> torch.Tensor:
    """How many keys some row of each one's block of 64 sees, at least one: a kernel's warpgroup decides for
    all of its rows how many tiles it takes."""
    last = rows // BLOCK_ROWS * BLOCK_ROWS + BLOCK_ROWS
    return (last + offset).clamp(1, keys) if causal else torch.full_like(rows, keys)


def _chunks(batch: int, heads: int, rows: int, keys: int) -> Iterator[tuple[int, slice, slice]]:
    """(batch, heads, rows) of pieces with about CHUNK_ELEMENTS scores: whole heads, or some rows of one."""
    heads_at_once = max(1, min(heads, CHUNK_ELEMENTS // max(1, rows * keys)))
    rows_at_once = max(1, min(rows, CHUNK_ELEMENTS // max(1, heads_at_once * keys) // 64 * 64))
    for b in range(batch):
        for h in range(0, heads, heads_at_once):
            for r in range(0, rows, rows_at_once):
                yield b, slice(h, min(h + heads_at_once, heads)), slice(r, min(r + rows_at_once, rows))


def diagonal_offset(seqlen_q: int, seqlen_kv: int, top_left: bool) -> int:
    """Of a causal mask: query i sees keys up to i + offset. Aligned at the bottom right the last query sees
    every key, with `top_left` the first query sees one."""
    return 0 if top_left else seqlen_kv - seqlen_q


def _scores(
    queries, keys, rows: torch.Tensor, columns: torch.Tensor, offset: int, causal: bool, scale,
    policies: Policies = PLAIN,
):  # fmt: skip
    """scale·Q·Kᵀ (heads, rows, keys), 1/√d without one, capped; −∞ where a causal mask of this
    `diagonal_offset`, or a window, hides."""
    scores = queries @ keys.transpose(-1, -2)
    scores = scores.div_(math.sqrt(queries.shape[-1])) if scale is None else scores.mul_(scale)
    if policies.softcap:
        scores.div_(policies.softcap).tanh_().mul_(policies.softcap)
    own = rows[:, None] + offset  # the key at a row's own place
    left, right = policies.window or (-1, -1)
    if causal or right >= 0:
        scores.masked_fill_(columns > own + max(0, right), -math.inf)
    if left >= 0:
        scores.masked_fill_(columns < own - left, -math.inf)
    return scores


def _attention(
    q, k, v, causal: bool, rows: torch.Tensor | None, dtype: torch.dtype, rounds_p: Rounding, top_left: bool,
    scale: float | None, exponents: torch.Tensor | None = None, policies: Policies = PLAIN,
):  # fmt: skip
    """(O, LSE) of q, k, v (B, H, N, d) computed in `dtype`; `rows` selects query rows (all by default). Of P
    in e4m3 `exponents` (B, Hkv, Nkv) are what P is multiplied by before it is rounded, powers of two.

    A query that sees no key has O = 0 and LSE = −∞, or with a sink its logit.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_kv, group = k.shape[2], heads // max(1, k.shape[1])
    rows = torch.arange(seqlen_q, device=q.device) if rows is None else rows
    offset = diagonal_offset(seqlen_q, seqlen_kv, top_left)
    tile = rounds_p.tile_kv if isinstance(rounds_p, LazyMaximum) else 1
    o = torch.zeros(batch, heads, len(rows), v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, len(rows)), -math.inf, dtype=dtype, device=q.device)
    for b, some_heads, piece in _chunks(batch, heads, len(rows), seqlen_kv):
        kv_heads = torch.arange(some_heads.start, some_heads.stop, device=q.device) // group
        seen = policies.seen(rows[piece], seqlen_kv, offset, tile)
        if seen.start == seen.stop:
            continue
        columns = torch.arange(seen.start, seen.stop, device=q.device)
        keys, values = k[b, kv_heads][:, seen].to(dtype), v[b, kv_heads][:, seen].to(dtype)
        queries = q[b, some_heads][:, rows[piece]].to(dtype)
        scores = _scores(queries, keys, rows[piece], columns, offset, causal, scale, policies)
        if isinstance(rounds_p, LazyMaximum) and rounds_p.e4m3 is not None:
            scores += _truncation(scores, head_dim)
        maximum = scores.amax(-1, keepdim=True)
        maximum.masked_fill_(maximum == -math.inf, 0.0)  # −∞ − (−∞) would be NaN
        weights = None if exponents is None else torch.exp2(-exponents[b, kv_heads][:, None].to(dtype))
        if weights is not None:
            scores -= weights.log()
        if isinstance(rounds_p, tuple):
            if policies.window is None:
                seen_together = _seen_together(rows[piece], seqlen_kv, offset, causal)
                base = _lazy_maximum(scores, rounds_p, seen_together)
            else:
                place = rows[piece], seen.start, seqlen_kv, offset
                base = _lazy_maximum_of_window(scores, rounds_p, *place, policies.window)
                base = torch.where(scores == -math.inf, maximum, base)  # where there is none yet
            base = base.masked_fill(base == -math.inf, 0.0)
            p, weight = (scores - base).exp_(), (base - maximum).exp_()
            if rounds_p.e4m3 is None:
                total = (p * weight).sum(-1, keepdim=True)
                p = p.to(q.dtype).to(dtype).mul_(weight)
            else:
                unit = 2.0**rounds_p.e4m3
                p = p.mul_(unit).to(torch.float8_e4m3fn).to(dtype).mul_(weight / unit)
                p = p if weights is None else p.mul_(weights)
                total = p.sum(-1, keepdim=True)
        else:
            p = scores.sub_(maximum).exp_()
            total = p.sum(-1, keepdim=True)
            if rounds_p:
                p = p.to(q.dtype).to(dtype)
        seen = total.clamp(min=1e-30)  # at least 1 where the maximum is a score
        o[b, some_heads, piece] = (p @ values) / seen
        lse[b, some_heads, piece] = (maximum + total.log()).squeeze(-1)
    if policies.sink is not None:
        without, lse = lse, torch.logaddexp(lse, policies.sink[:, None].to(lse))
        o *= (without - lse).exp().nan_to_num(0.0)[..., None]  # 0 where there is nothing, not even a sink
    return o, lse


def reference(
    q,
    k,
    v,
    causal: bool,
    rows: torch.Tensor | None = None,
    top_left: bool = False,
    scale: float | None = None,
    policies: Policies = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 from the rounded inputs, never downcast: O (B, H, rows, d) and LSE (B, H,
    rows)."""
    return _attention(q, k, v, causal, rows, torch.float64, False, top_left, scale, policies=policies)


def rounding_of(stage: object, module: object, problem: Problem, **options: object) -> Rounding:
    """How the stage of `module` rounds P on `problem`."""
    if hasattr(module, "lazy_maximum"):
        return module.lazy_maximum(problem, **options)
    return stage.rounds_p


def yardstick(
    q, k, v, causal: bool, rounds_p: Rounding, rows: torch.Tensor | None = None, top_left: bool = False,
    scale: float | None = None, policies: Policies = PLAIN,
) -> torch.Tensor:  # fmt: skip
    """Attention with the kernel's roundings and no others: fp32 scores, softmax and sums, output to q's type,
    and P to q's type where the kernel's P·V multiplies rounded P (`rounding_of`)."""
    return yardstick_of(q, k, v, causal, rounds_p, rows, top_left, scale, policies=policies)[0]


def yardstick_of(
    q, k, v, causal: bool, rounds_p: Rounding, rows: torch.Tensor | None = None, top_left: bool = False,
    scale: float | None = None, exponents: torch.Tensor | None = None, dtype: torch.dtype | None = None,
    policies: Policies = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`yardstick`'s O, in `dtype` if that is not q's, and its LSE in fp32; `exponents` as `_attention` has
    them."""
    inputs = q, k, v, causal, rows
    o, lse = _attention(*inputs, torch.float32, rounds_p, top_left, scale, exponents, policies)
    return o.to(dtype or q.dtype), lse


def _truncation(scores: torch.Tensor, head_dim: int) -> torch.Tensor:
    """What a score loses, at random, where the tensor cores add up products of 8 bits: each of them is
    truncated to SUM_BITS behind the leading one of the sum. Nothing beside other roundings, unless a score
    is large."""
    unit = torch.exp2(scores.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=1e-30).log2().floor() - SUM_BITS)
    generator = torch.Generator(scores.device).manual_seed(0)
    noise = torch.rand(scores.shape, generator=generator, device=scores.device, dtype=scores.dtype) - 0.5
    return noise * unit * math.sqrt(head_dim)


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # dQ (B, H, Nq, d), dK and dV (B, Hkv, Nkv, d)


def gradients_of(
    q,
    k,
    v,
    o,
    lse,
    do,
    causal,
    dtype,
    rounds_p,
    rows=None,
    columns=None,
    top_left=False,
    scale=None,
    dlse=None,
    nudge=0.0,
    policies=PLAIN,
) -> Gradients:
    """(dQ, dK, dV) computed in `dtype` by the formulas every kernel uses, from the O and LSE given:

    P = e^(S − LSE), D = rowsum(dO∘O) − dLSE, dS = P∘(dO·Vᵀ − D); dQ = scale·dS·K, dK = scale·dSᵀ·Q,
    dV = Pᵀ·dO. Of a score that a cap has made s, dS is (1 − (s/cap)²) of that.
    `rows` and `columns` select queries and keys (all by default): the gradients are of those selected, and
    what the others add to them is left out.

    Where `rounds_p`, `nudge` moves P and dS before they are rounded: P by so much of itself, dP − D by so
    much of itself and of |dO|·|V|/√d, the usual size of a sum of so many products; away from zero, or if
    negative towards it. What is not that close to a tie is rounded as before.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_kv, group = k.shape[2], heads // max(1, k.shape[1])
    factor = 1.0 / math.sqrt(head_dim) if scale is None else scale
    rows = torch.arange(seqlen_q, device=q.device) if rows is None else rows
    columns = torch.arange(seqlen_kv, device=q.device) if columns is None else columns
    offset = diagonal_offset(seqlen_q, seqlen_kv, top_left)
    rounded = (lambda x: x.to(q.dtype).to(dtype)) if rounds_p else (lambda x: x)
    dq = torch.empty(batch, heads, len(rows), head_dim, dtype=dtype, device=q.device)
    dk, dv = (
        torch.zeros(*x.shape[:2], len(columns), x.shape[3], dtype=dtype, device=q.device) for x in (k, v)
    )
    for b, some_heads, piece in _chunks(batch, heads, len(rows), len(columns)):
        kv_heads = torch.arange(some_heads.start, some_heads.stop, device=q.device) // group
        keys, values = (x[b, kv_heads][:, columns].to(dtype) for x in (k, v))
        queries, out, d_out = (x[b, some_heads][:, rows[piece]].to(dtype) for x in (q, o, do))
        shift = lse[b, some_heads][:, rows[piece], None].to(dtype)
        shift = shift.masked_fill(shift == -math.inf, 0.0)  # a row that sees no key: P = e^(−∞ − 0) = 0
        scores = _scores(queries, keys, rows[piece], columns, offset, causal, scale, policies)
        slope = 1.0
        if policies.softcap:  # of a hidden score any: its P is zero
            slope = 1.0 - (scores / policies.softcap).clamp(min=-1.0).square_()
        p = scores.sub_(shift).exp_()
        ds = d_out @ values.transpose(-1, -2)
        row_dot = (d_out * out).sum(-1, keepdim=True)
        if dlse is not None:
            row_dot -= dlse[b, some_heads][:, rows[piece], None].to(dtype)
        ds.sub_(row_dot)
        if nudge and rounds_p:
            size = d_out.norm(dim=-1, keepdim=True) * values.norm(dim=-1)[..., None, :] / math.sqrt(head_dim)
            ds.add_(ds.sign().mul_(size.add_(ds.abs())), alpha=nudge)
            p *= 1 + nudge
        ds.mul_(p).mul_(slope)
        p, ds = rounded(p), rounded(ds)
        dq[b, some_heads, piece] = ds @ keys * factor
        dk[b].index_add_(0, kv_heads, ds.transpose(-1, -2) @ queries * factor)
        dv[b].index_add_(0, kv_heads, p.transpose(-1, -2) @ d_out)
    return dq, dk, dv


def reference_gradients(q, k, v, o, lse, do, causal: bool, **options: Any) -> Gradients:
    """dQ, dK, dV in float64, never downcast, from `reference`'s O and LSE; options as `gradients_of`'s."""
    return gradients_of(q, k, v, o, lse, do, causal, torch.float64, rounds_p=False, **options)


def yardstick_gradients(q, k, v, o, lse, do, causal: bool, rounds_p: bool, **options: Any) -> Gradients:
    """dQ, dK, dV with a kernel's roundings and no others, from what it reads: O in q's type and LSE in fp32.

    All in fp32 but P and dS, which are rounded to q's type before their products where `rounds_p`, and the
    results, in q's type.
    """
    found = gradients_of(q, k, v, o, lse, do, causal, torch.float32, rounds_p, **options)
    return tuple(x.to(q.dtype) for x in found)


def sink_gradient(o, lse, do, sink, dlse=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each head's sink in float64 the gradient, and what it is a sum of, in magnitudes: (H,) each. From
    the O and LSE given, of which the LSE has the sink in it.

    The sink's share of a row is e^(sink − LSE) and its value is zero, so its gradient is the share times
    0 − D: −Σ e^(sink − LSE)·(rowsum(dO∘O) − dLSE).
    """
    o, lse, do, sink = (x.double() for x in (o, lse, do, sink))
    share = (sink[:, None] - lse).exp()  # (B, H, Nq)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.double()
    gradient = -(share * ((do * o).sum(-1) - dlse)).sum((0, 2))
    return gradient, (share * ((do * o).abs().sum(-1) + dlse.abs())).sum((0, 2))


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


# ---- the needle test ---------------------------------------------------------------------------------------


def needle_inputs(problem: Problem, device: str, amplitude: float = 32.0, seed: int = 0):
    """q, k, v and the key index (N,) that each query row must return exactly.

    Keys are random ±1 words and a query is `amplitude` times the word of its target, so that every other
    key's weight underflows. Targets are the first and last keys of every 16-key tile, hence of any tile that
    is a multiple of 16: a tile that is dropped or read in another's place shows in some row, at any length;
    one that is counted twice shows in the LSE. Raises ValueError where a query sees no key.
    """
    offset = diagonal_offset(problem.seqlen_q, problem.seqlen_kv, problem.top_left)
    if problem.causal and offset < 0:
        raise ValueError(f"{problem}: the first queries see no key, and have no target")
    generator = torch.Generator(device).manual_seed(seed)
    shape = (problem.batch, problem.heads, problem.seqlen_kv, problem.head_dim)
    k = torch.randint(0, 2, shape, device=device, generator=generator).mul(2).sub(1).to(torch.bfloat16)
    v = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
    index = torch.arange(problem.seqlen_kv, device=device)
    needles = index[(index % 16 == 0) | (index % 16 == 15) | (index == problem.seqlen_kv - 1)]
    rows = torch.arange(problem.seqlen_q, device=device)
    visible = (
        torch.searchsorted(needles, rows + offset, right=True)
        if problem.causal
        else torch.full_like(rows, len(needles))
    )
    # Odd rows and the last one take the latest needle they may see, so that tiles near the diagonal are hit;
    # the others cycle.
    latest = (rows % 2 == 1) | (rows == problem.seqlen_q - 1)
    choice = torch.where(latest, visible - 1, (rows // 2) % visible)
    target = needles[choice]
    return k[:, :, target] * amplitude, k, v, target


def needle_gradient_inputs(problem: Problem, device: str, seed: int = 0):
    """q, k, v, o, lse, do for a backward stage whose gradients show every tile, and those gradients.

    As `needle_inputs`, but V and dO are ±1 words, and O is given as zero, which makes D zero: then dS is
    dO·V at a row's target, a whole number, and nothing elsewhere, and every sum is one of whole numbers. A
    tile of queries or keys that is dropped, counted twice or read in another's place moves some of them by at
    least one.
    """
    q, k, v, _ = needle_inputs(problem, device, seed=seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    v, do = (
        torch.randint(0, 2, x.shape, device=device, generator=generator).mul(2).sub(1).to(x.dtype)
        for x in (v, q)
    )
    lse = reference(q, k, v, problem.causal, top_left=problem.top_left)[1]
    o = torch.zeros_like(q)
    exact = reference_gradients(q, k, v, o, lse, do, problem.causal, top_left=problem.top_left)
    return (q, k, v, o, lse.float(), do), exact


def needles_missed(problem: Problem, found: dict[str, torch.Tensor], exact: Gradients) -> Iterator[str]:
    """A message for each gradient of `needle_gradient_inputs` that is not what it must be, but for its last
    roundings: a 16-bit result's, and e^(S − LSE) for 1 to within 2⁻¹³."""
    step = 1.0 / math.sqrt(problem.head_dim)  # dQ and dK are whole numbers times the scale
    for (name, x), ref, unit in zip(found.items(), exact, (step, step, 1.0)):
        wrong = ~((x.double() - ref).abs() <= ref.abs() * 2**-7 + unit / 4)  # also where x is NaN
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            yield (
                f"{problem}: {int(wrong.sum())} elements of {name} are off, first at (b, h, row, x) = {at}: "
                f"kernel {x[at]:.6g}, expected {ref[at]:.6g}"
            )
