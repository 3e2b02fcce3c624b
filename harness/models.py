"""Every algorithm of the ladder at tile level, in NumPy: what a kernel computes, not how a GPU computes it.

One head: q (Nq, d), k (Nk, d), v (Nk, dv), of any one floating-point type, in which all arithmetic is done.
Attention is O = softmax(scale·Q·Kᵀ)·V with scale 1/√d unless given; lse (Nq,) is the natural logarithm of a
row's sum of exponentials. `causal` hides keys j > i and needs as many keys as queries, unless `top_left` says
that a mask of unequal lengths is to be aligned there; only `flash_attention_lazy` also aligns one at the
bottom right. The derivations are in notes/mathematics.md; FA1 is arXiv 2205.14135, FA2 is arXiv 2307.08691.
"""

import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray
CONSUMER_ROWS = 64  # queries for which K6 decides together which tiles of keys to visit, and which to mask


def safe_softmax(x: Array) -> Array:
    """Softmax over the last axis of x (..., n) in three passes: maximum, sum of e^(x − maximum), division."""
    return _three_passes(x)[0]


def online_softmax(x: Array) -> Array:
    """Softmax over the last axis of x (..., n) in two passes; Milakov and Gimelshein, arXiv 1805.02867.

    The first pass carries a maximum and a sum, and rescales the sum whenever the maximum grows.
    """
    row_max = np.full(x.shape[:-1], -np.inf, x.dtype)  # (...,)
    row_sum = np.zeros(x.shape[:-1], x.dtype)  # (...,)
    for j in range(x.shape[-1]):
        new_max = np.maximum(row_max, x[..., j])
        shift = _shift(new_max)
        row_sum = row_sum * np.exp(row_max - shift) + np.exp(x[..., j] - shift)
        row_max = new_max
    return np.exp(x - row_max[..., None]) / row_sum[..., None]


def safe_softmax_attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, top_left: bool = False, scale: float | None = None
) -> tuple[Array, Array]:
    """The definition: all scores, then their softmax, then the output. Returns o (Nq, dv) and lse (Nq,)."""
    scale = _checked_scale(q, k, v, causal, top_left, scale)
    s = _hide(q @ k.T * scale, 0, 0, len(k), causal)  # (Nq, Nk)
    p, lse = _three_passes(s)  # (Nq, Nk), (Nq,)
    return p @ v, lse


def flash_attention_single_pass(
    q: Array, k: Array, v: Array, *, causal: bool = False, top_left: bool = False, scale: float | None = None
) -> tuple[Array, Array]:
    """One key at a time; after key j, o is the attention over keys 0…j. Returns o (Nq, dv) and lse (Nq,).

    The online softmax carried on to the output: with m and l the running maximum and sum,
    o_j = o_(j−1) · l_(j−1)·e^(m_(j−1) − m_j)/l_j + v_j · e^(s_j − m_j)/l_j.
    """
    scale = _checked_scale(q, k, v, causal, top_left, scale)
    o, row_max, row_sum = _empty_state(q, v)
    for j in range(len(k)):
        rows = slice(j if causal else 0, None)  # the queries that see key j
        s = q[rows] @ k[j] * scale  # (rows,)
        new_max = np.maximum(row_max[rows], s)
        old = row_sum[rows] * np.exp(row_max[rows] - new_max)  # the sum so far, relative to the new maximum
        p = np.exp(s - new_max)
        row_sum[rows] = old + p
        o[rows] *= (old / row_sum[rows])[:, None]
        o[rows] += np.outer(p / row_sum[rows], v[j])
        row_max[rows] = new_max
    return o, row_max + np.log(row_sum)


def flash_attention_tiled(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    top_left: bool = False,
    scale: float | None = None,
    tile_kv: int = 64,
) -> tuple[Array, Array]:
    """The single pass, `tile_kv` keys a step, all queries at once. Returns o (Nq, dv) and lse (Nq,)."""
    scale = _checked_scale(q, k, v, causal, top_left, scale)
    o, row_max, row_sum = _empty_state(q, v)
    for key in _starts(len(k), tile_kv):
        s = q @ _load(k, key, tile_kv).T * scale  # (Nq, tile_kv)
        s = _hide(s, 0, key, len(k), causal)
        new_max = np.maximum(row_max, s.max(axis=1))
        old = row_sum * np.exp(row_max - new_max)
        p = np.exp(s - new_max[:, None])
        row_sum = old + p.sum(axis=1)
        o = (old[:, None] * o + p @ _load(v, key, tile_kv)) / row_sum[:, None]
        row_max = new_max
    return o, row_max + np.log(row_sum)


def flash_attention_1(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    top_left: bool = False,
    scale: float | None = None,
    tile_q: int = 64,
    tile_kv: int = 64,
) -> tuple[Array, Array]:
    """FA1's Algorithm 1: keys outside, queries inside. Returns o (Nq, dv) and lse (Nq,).

    o, row_max and row_sum stand for global memory: a step reads a tile of each and writes it back,
    o normalised.
    """
    scale = _checked_scale(q, k, v, causal, top_left, scale)
    o, row_max, row_sum = _empty_state(q, v)
    for key in _starts(len(k), tile_kv):
        k_tile, v_tile = _load(k, key, tile_kv), _load(v, key, tile_kv)
        for row in _starts(len(q), tile_q):
            if causal and key >= row + tile_q:
                continue  # every key of the tile comes after every query
            rows = slice(row, row + tile_q)
            s = _hide(q[rows] @ k_tile.T * scale, row, key, len(k), causal)  # (rows, tile_kv)
            tile_max = s.max(axis=1)  # −∞ for a row that sees none of the tile's keys
            p = np.exp(s - _shift(tile_max)[:, None])
            new_max = np.maximum(row_max[rows], tile_max)
            old = row_sum[rows] * np.exp(row_max[rows] - new_max)
            new = np.exp(tile_max - new_max)
            row_sum[rows] = old + new * p.sum(axis=1)
            o[rows] = (old[:, None] * o[rows] + new[:, None] * (p @ v_tile)) / row_sum[rows, None]
            row_max[rows] = new_max
    return o, row_max + np.log(row_sum)


def flash_attention_2(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    top_left: bool = False,
    scale: float | None = None,
    tile_q: int = 64,
    tile_kv: int = 64,
) -> tuple[Array, Array]:
    """FA2's Algorithm 1, line 10 corrected: queries outside, keys inside. Returns o (Nq, dv) and lse (Nq,).

    The division comes once, after the last tile. Only tiles that meet the diagonal or the end of the keys are
    masked; those past the diagonal are not visited.
    """
    scale = _checked_scale(q, k, v, causal, top_left, scale)
    o, lse = np.empty((len(q), v.shape[1]), q.dtype), np.empty(len(q), q.dtype)
    for row in _starts(len(q), tile_q):
        q_tile = q[row : row + tile_q]  # (rows, d)
        acc, row_max, row_sum = _empty_state(q_tile, v)
        visible = min(row + tile_q, len(k)) if causal else len(k)
        for key in _starts(visible, tile_kv):
            s = q_tile @ _load(k, key, tile_kv).T * scale  # (rows, tile_kv)
            end = key + tile_kv
            if end > len(k) or (causal and end > row + 1):
                s = _hide(s, row, key, len(k), causal)
            new_max = np.maximum(row_max, s.max(axis=1))
            rescale = np.exp(row_max - new_max)  # ≤ 1; 0 at the first tile, where row_max is −∞
            p = np.exp(s - new_max[:, None])
            row_sum = row_sum * rescale + p.sum(axis=1)
            acc = acc * rescale[:, None] + p @ _load(v, key, tile_kv)
            row_max = new_max
        o[row : row + tile_q] = acc / row_sum[:, None]
        lse[row : row + tile_q] = row_max + np.log(row_sum)
    return o, lse


def flash_attention_lazy(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    top_left: bool = False,
    scale: float | None = None,
    tile_kv: int = 64,
    parts: int = 1,
    growth: float = 8.0,
    share: float = 2.0,
    round_p: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """K6: FA2 with a maximum that may be `growth` powers of two behind. Returns o (Nq, dv) and lse (Nq,).

    A row's first tile sets its maximum. Later tiles are asked in `parts`, from left to right; only where one
    exceeds the maximum by more powers of two than the row has room for is it brought up to date, and what is
    relative to it rescaled. Room is `growth`; with a `share` also no more than the log₂ of that many times
    the sum of the first tile's P, of rows that see a part of the tiles of keys times this part; and none once
    the maximum has risen. P·V is one tile behind Q·Kᵀ, as in K6.2. Without `top_left` a causal mask is
    aligned at the bottom right: query i sees keys up to i + Nk − Nq. A row that sees none gives o = 0 and
    lse = −∞. `round_p` is what a tile's P goes through before P·V.
    """
    scale = _checked_scale(q, k, v, causal, top_left, scale, bottom_right=True)
    if parts < 1 or tile_kv % parts:
        raise ValueError(f"parts must divide a tile of {tile_kv} keys, got {parts}")
    diagonal = 0 if top_left else len(k) - len(q)  # the last key that query 0 sees
    o, lse = np.empty((len(q), v.shape[1]), q.dtype), np.empty(len(q), q.dtype)
    for row in _starts(len(q), CONSUMER_ROWS):
        rows = slice(row, row + CONSUMER_ROWS)
        acc, row_max, row_sum = _empty_state(q[rows], v)
        p = None  # of the tile before
        by_first, by_last = len(k), len(k)  # keys that the first and the last row see
        if causal:
            by_first, by_last = (min(len(k), i + diagonal + 1) for i in (row, row + CONSUMER_ROWS - 1))
        tiles = _starts(max(1, by_last), tile_kv)  # at least one, so that there is an o to write
        own = len(tiles) / max(1, len(_starts(len(k), tile_kv)))
        room = np.full(len(row_max), growth, q.dtype)
        for key in tiles:
            s = q[rows] @ _load(k, key, tile_kv).T * (scale * math.log2(math.e))  # in powers of two
            if key + tile_kv > by_first:
                s = _hide(s, row + diagonal, key, len(k), causal)
            if p is None:
                row_max = _shift(s.max(axis=1))
            else:
                acc += p @ _load(v, key - tile_kv, tile_kv)  # relative to row_max as it still is
            pieces = np.split(s, parts, axis=1)  # views: S becomes P in place
            for i, piece in enumerate(pieces):
                piece -= row_max[:, None]
                ahead = piece.max(axis=1)
                # Of each row by itself: what other rows of its warp see must not change its bits.
                raised = ahead > room
                new_max = row_max + np.where(raised, ahead, 0.0)
                grown = new_max - row_max  # as rounded: what the keys to come are relative to
                row_max = new_max
                piece -= grown[:, None]
                rescale = np.exp2(-grown)
                for x in (*pieces[:i], acc):
                    x *= rescale[:, None]
                row_sum *= rescale
                np.exp2(piece, out=piece)
                row_sum += piece.sum(axis=1)
                if share:
                    room[raised] = 0.0
            if share and p is None:
                with np.errstate(divide="ignore"):  # of rows that see no key
                    room = np.clip(np.log2(share * row_sum * own), 0.0, growth)
            p = s if round_p is None else round_p(s)
        acc += p @ _load(v, key, tile_kv)
        o[rows] = acc / np.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        with np.errstate(divide="ignore"):  # log2(0) = −∞ is meant
            lse[rows] = (row_max + np.log2(row_sum)) * math.log(2.0)
    return o, lse


def flash_attention_2_backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    do: Array,
    *,
    causal: bool = False,
    top_left: bool = False,
    scale: float | None = None,
    tile_q: int = 64,
    tile_kv: int = 64,
) -> tuple[Array, Array, Array]:
    """FA2's Algorithm 2: keys outside, queries inside. Returns dq (Nq, d), dk (Nk, d) and dv (Nk, dv).

    P is recomputed from lse; dS = P∘(dP − D) with D = rowsum(dO∘O), of length Nq. dk and dv of a key tile are
    complete after its inner loop; dq gathers from every key tile, which on a GPU takes atomic additions.
    """
    scale = _checked_scale(q, k, v, causal, top_left, scale)
    delta = (do * o).sum(axis=1)  # D (Nq,)
    dq, dk, dv = np.zeros_like(q), np.empty_like(k), np.empty_like(v)
    for key in _starts(len(k), tile_kv):
        k_tile, v_tile = k[key : key + tile_kv], v[key : key + tile_kv]
        dk_tile, dv_tile = np.zeros_like(k_tile), np.zeros_like(v_tile)
        for row in _starts(len(q), tile_q):
            if causal and key >= row + tile_q:
                continue
            rows = slice(row, row + tile_q)
            s = _hide(q[rows] @ k_tile.T * scale, row, key, len(k), causal)  # (rows, keys)
            p = np.exp(s - lse[rows, None])  # already normalised: lse holds the sum
            dv_tile += p.T @ do[rows]
            dp = do[rows] @ v_tile.T
            ds = p * (dp - delta[rows, None])
            dq[rows] += ds @ k_tile * scale
            dk_tile += ds.T @ q[rows] * scale
        dk[key : key + tile_kv], dv[key : key + tile_kv] = dk_tile, dv_tile
    return dq, dk, dv


MODELS: dict[str, Callable[..., tuple[Array, Array]]] = {
    model.__name__: model
    for model in (
        safe_softmax_attention,
        flash_attention_single_pass,
        flash_attention_tiled,
        flash_attention_1,
        flash_attention_2,
        flash_attention_lazy,
    )
}
BACKWARD_MODELS: dict[str, Callable[..., tuple[Array, Array, Array]]] = {
    flash_attention_2_backward.__name__: flash_attention_2_backward
}


def _three_passes(x: Array) -> tuple[Array, Array]:
    """softmax(x) (..., n) and logsumexp(x) (...,)."""
    row_max = x.max(axis=-1, initial=-np.inf, keepdims=True)
    row_sum = np.exp(x - row_max).sum(axis=-1, keepdims=True)
    return np.exp(x - row_max) / row_sum, (row_max + np.log(row_sum))[..., 0]


def _shift(maximum: Array) -> Array:
    """What exp subtracts: the maximum, or 0 while it is −∞, where −∞ − (−∞) would be NaN and not e^−∞ = 0."""
    return np.where(maximum == -np.inf, 0.0, maximum)


def _hide(s: Array, row: int, key: int, keys: int, causal: bool) -> Array:
    """The tile s of S (Nq, keys) that starts at (row, key), −∞ past the last key and past the diagonal."""
    i = np.arange(row, row + s.shape[0])[:, None]
    j = np.arange(key, key + s.shape[1])
    return np.where((j >= keys) | (causal & (j > i)), -np.inf, s)


def _load(x: Array, start: int, tile: int) -> Array:
    """The `tile` rows of x from `start` on, zeros past its end, as a bounds-checked load leaves them."""
    rows = x[start : start + tile]
    return np.pad(rows, ((0, tile - len(rows)), (0, 0)))


def _starts(length: int, tile: int) -> range:
    if tile < 1:
        raise ValueError(f"tile sizes must be at least 1, got {tile}")
    return range(0, length, tile)


def _empty_state(q: Array, v: Array) -> tuple[Array, Array, Array]:
    """o (Nq, dv), row_max (Nq,) and row_sum (Nq,) before any key was seen."""
    n = len(q)
    return np.zeros((n, v.shape[1]), q.dtype), np.full(n, -np.inf, q.dtype), np.zeros(n, q.dtype)


def _checked_scale(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    top_left: bool,
    scale: float | None,
    bottom_right: bool = False,
) -> float:
    """`scale` or its default, of inputs that fit together; `bottom_right` where the model aligns a mask of
    unequal lengths there."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 2 or not np.issubdtype(x.dtype, np.floating):
            raise ValueError(f"{name} must be a floating-point matrix, got {x.dtype} of shape {x.shape}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q and k must have the same head_dim, got {q.shape[1]} and {k.shape[1]}")
    if len(k) != len(v):
        raise ValueError(f"k and v must have the same length, got {len(k)} and {len(v)}")
    if top_left and not causal:
        raise ValueError("top_left aligns a causal mask, and there is none: causal is False")
    if causal and not (top_left or bottom_right) and len(q) != len(k):
        raise ValueError(f"causal needs q and k of the same length or top_left, got {len(q)} and {len(k)}")
    return 1.0 / math.sqrt(q.shape[1]) if scale is None else scale
