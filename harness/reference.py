"""Attention and its gradients in float64, and with a kernel's own roundings and no others: the yardstick."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hopper_attention.kernels.contract import LazyMaximum, Problem

SUM_BITS = 13  # that the tensor cores keep behind the leading one of a sum of 8-bit products, and truncate
BLOCK_ROWS = 64  # that a warpgroup decides for together, and that the rule judges together
CHUNK_ELEMENTS = 2**27  # scores held at once


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
