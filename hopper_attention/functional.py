"""`attention(q, k, v)`, `attention_backward(do, q, k, v, o, lse)`, and FlashAttention's `flash_attn_func`,
`flash_attn_varlen_func` and `flash_attn_with_kvcache`."""

import torch

from . import lengths, ops, ops_decode, ops_policies, policies
from .checks import (
    E4M3,
    check_flags,
    check_like,
    check_no_flags,
    check_no_overlap,
    check_scale,
    check_softcap,
    check_tensor,
    check_window,
    name_of,
)
from .fp8 import Descale, attention_fp8, descale_of
from .kernels.device.limits import UNBOUNDED
from .pages import rows_of_pages

Window = tuple[int | None, int | None]
NO_WINDOW = (-1, -1)


def mask_of(causal: bool, top_left: bool, window_size: Window) -> tuple[bool, tuple[int, int]]:
    """A causal mask, or a window: with `causal` a window ends at a query's own place, and one without another
    bound is the causal mask. Raises TypeError or ValueError for what is no window."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be (left, right), not {window_size!r}")
    left, right = (-1 if x is None else x for x in window_size)
    if (left, right) == NO_WINDOW:
        return causal, NO_WINDOW
    check_window((left, right), False, False)
    check_flags(causal=causal)
    left, right = min(left, UNBOUNDED), min(right, UNBOUNDED)
    if top_left:
        raise ValueError("window_size is aligned at the bottom right: top_left is for masks without a window")
    right = 0 if causal else right
    return (True, NO_WINDOW) if (left, right) == (-1, 0) else (False, (left, right))


def sink_of(learnable_sink: torch.Tensor | None) -> torch.Tensor | None:
    """A sink as operators take it, in fp32, from fp32 or 16 bits."""
    if learnable_sink is None:
        return None
    check_tensor("learnable_sink", learnable_sink)
    if learnable_sink.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"learnable_sink must be float32, bfloat16 or float16, not {name_of(learnable_sink.dtype)}"
        )
    return learnable_sink.float().contiguous()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    top_left: bool = False,
    softmax_scale: float | None = None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    learnable_sink: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale·q·kᵀ)·v on PyTorch's current stream.

    q, k, v: (batch, heads, seqlen, head_dim), bf16 or fp16, head_dim a multiple of 8 up to 256 and of v
    perhaps another, rows 16-byte aligned and contiguous, any other strides; k and v may have fewer heads.
    Returns o like q with v's head_dim, dense, its dimensions in memory in q's order, and with `return_lse`
    also the natural-log logsumexp of each row's scaled scores, fp32 (batch, heads, seqlen). o and lse can be
    differentiated, once.

    `softmax_scale` is positive, by default 1/√head_dim; all others share a kernel. With `causal` query i sees
    keys up to i + seqlen_kv − seqlen_q, a mask aligned at the bottom right; one that sees none has o = 0 and
    lse = −∞. With `top_left` besides it sees keys up to i, as PyTorch's `is_causal` means it. At equal
    lengths the two are one mask. Hazard: a value that is not finite may reach rows that do not see it.

    With window_size (left, right) query i sees the keys from i + offset − left to i + offset + right, offset
    = seqlen_kv − seqlen_q; −1 or None is no bound, and with `causal` right is 0. With a `softcap` c scaled
    scores s become c·tanh(s/c). `learnable_sink`, (heads,), is a logit of each query head that takes part in
    its rows' denominators, and in their lse, and has no value; it can be differentiated too. A row that sees
    no key then has o = 0 and the sink for its lse.

    With `deterministic`, or under `torch.use_deterministic_algorithms`, gradients have the same bits in every
    run. Under autocast q, k and v are cast to its type. Raises TypeError or ValueError before anything is
    launched, also when called from a compiled graph.
    """
    if not type(q) is type(k) is type(v) is torch.Tensor:
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, x)
        if not torch.compiler.is_compiling():
            ops.know_subclass(q)  # under inference_mode no Autograd kernel does it
    if type(softcap) is not float and not torch.compiler.is_compiling():
        check_softcap(softcap)
    window = NO_WINDOW
    if type(window_size) is not tuple or window_size != NO_WINDOW:
        causal, window = mask_of(causal, top_left, window_size)
    if window == NO_WINDOW and softcap == 0.0 and learnable_sink is None:
        o, lse = ops.call_forward(q, k, v, softmax_scale, causal, top_left, deterministic, bool(return_lse))
    else:
        tensors = sink_of(learnable_sink), None, None, None, None
        options = softmax_scale, causal, top_left, *window, softcap, deterministic
        o, lse = ops_policies.call_forward(q, k, v, tensors, options)
    return (o, lse) if return_lse else o


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    causal: bool = False,
    top_left: bool = False,
    softmax_scale: float | None = None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attention` on PyTorch's current stream: dq, dk, dv, each like its input, dense, its
    dimensions in memory in that input's order.

    do and dlse are the gradients of o and lse; q, k, v, o, lse are what `attention` took and, with
    `return_lse`, gave: those of a larger problem are as good, of which k and v are a part. The rest as there;
    lse must be contiguous. A sink's part in them is in the lse; its own gradient comes with autograd.
    """
    tensors = ("do", do), ("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse)
    for name, x in tensors if dlse is None else (*tensors, ("dlse", dlse)):
        check_tensor(name, x)
    if not torch.compiler.is_compiling():
        ops.know_subclass(q)
    causal, window = mask_of(causal, top_left, window_size)
    if not torch.compiler.is_compiling():
        check_flags(causal=causal, top_left=top_left, deterministic=deterministic)
        check_scale(softmax_scale), check_softcap(softcap)
    if window == NO_WINDOW and softcap == 0.0:
        return ops.call_backward(do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic)
    options = softmax_scale, causal, top_left, *window, softcap, deterministic
    return ops_policies.backward(do, q, k, v, o, lse, dlse, *(None,) * 5, *options)[:3]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    learnable_sink: torch.Tensor | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    return_attn_probs: bool = False,
    **others: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` in FlashAttention's layout: q, k, v and the result are (batch, seqlen, heads, head_dim).

    Takes by name what FlashAttention-2, -3 and -4 have (`others`, where it asks for nothing); by position
    they would mean different things. With `return_lse`, or `return_attn_probs` as FlashAttention-3 calls it,
    also the LSE, fp32 (batch, heads, seqlen). A causal mask is aligned at the bottom right. `pack_gqa`, a
    hint, changes nothing.

    e4m3 tensors go to `attention_fp8`, with the descales, as in FlashAttention-3: fp32 (batch, kv_heads), or
    one number, or None for 1; the result is bf16.

    Raises NotImplementedError, with the argument's name, for chunks, qv, splits, margins, dropout and
    `others`, and of e4m3 tensors for windows, soft caps and sinks; ValueError for a descale beside 16-bit
    tensors.
    """
    refuse_by_name(
        "flash_attn_func",
        ("qv", "a tensor", qv is not None),
        ("attention_chunk", attention_chunk, attention_chunk != 0),
        ("num_splits", num_splits, num_splits not in (None, 0, 1)),
        ("sm_margin", sm_margin, sm_margin != 0),
        ("dropout_p", dropout_p, dropout_p not in (None, 0.0)),
        *asked_of(others, "flash_attn_func"),
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim), not {x.dim()}")
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    with_lse = bool(return_lse or return_attn_probs)
    if q.dtype == E4M3:
        causal, window = mask_of(causal, False, window_size)
        refuse_by_name(
            "flash_attn_func of e4m3 tensors",
            ("window_size", window, window != NO_WINDOW),
            ("softcap", softcap, softcap != 0.0),
            ("learnable_sink", "a tensor", learnable_sink is not None),
        )
        found = attention_fp8(
            *rows, **descales, causal=causal, softmax_scale=softmax_scale, return_lse=with_lse
        )
    else:
        if given := [name for name, x in descales.items() if x is not None]:
            raise ValueError(f"{given[0]} belongs to e4m3 tensors, and q is {name_of(q.dtype)}")
        options = {"causal": causal, "softmax_scale": softmax_scale, "deterministic": deterministic}
        options |= {"window_size": window_size, "softcap": softcap, "learnable_sink": learnable_sink}
        found = attention(*rows, **options, return_lse=with_lse)
    if not with_lse:
        return found.transpose(1, 2)
    o, lse = found
    return o.transpose(1, 2), lse


def refuse_by_name(call: str, *arguments: tuple[str, object, bool]) -> None:
    """Raise NotImplementedError for the first argument (name, value, whether it asks for something) that
    does."""
    for name, given, asked in arguments:
        if asked:
            raise NotImplementedError(f"{call} does not take {name} = {given!r}")


OTHERS = {  # what FlashAttention-2's, -3's and -4's calls have beside, all of which is refused
    "alibi_slopes", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars",
    "block_sparse_tensors", "block_sparse_tensors_bwd", "gather_kv_indices", "gather_bwd_recompute_p",
    "gather_bwd_token_chunk", "q_descale", "k_descale", "v_descale", "min_seqlen_k", "seqlen_k_per_split",
    "scheduler_metadata", "disable_scheduler_metadata", "qv", "attention_chunk", "sm_margin",
    "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens",
}  # fmt: skip


def asked_of(others: dict[str, object], call: str) -> list[tuple[str, object, bool]]:
    """`OTHERS` as `refuse_by_name` takes them: None, False and 0 ask for nothing. Raises TypeError for a name
    that no call has."""
    if unknown := [name for name in others if name not in OTHERS]:
        raise TypeError(f"{call}() got an unexpected keyword argument {unknown[0]!r}")
    shown = lambda x: "a tensor" if isinstance(x, torch.Tensor) else x
    # An array says of each of its elements whether it is one of these.
    asks = lambda x: isinstance(x, torch.Tensor) or getattr(x, "ndim", 0) or x not in (None, False, 0)
    return [(name, shown(x), asks(x)) for name, x in others.items()]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    learnable_sink: torch.Tensor | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    return_attn_probs: bool = False,
    **others: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` of each of n sequences packed behind one another, without padding: q (total queries, heads,
    head_dim), k and v (total keys, kv heads, head_dim); the result is like q, and the LSE fp32 (heads, total
    queries).

    cu_seqlens_q and cu_seqlens_k, int32 (n + 1,) on the GPU, say where each sequence begins, and where the
    last ends; seqused_q and seqused_k, int32 (n,), how many rows of each count, if not all up to the next.
    They are not read on the host: the call does not wait for them. Hazard: so lengths are checked on request
    only (HOPPER_ATTENTION_CHECK_LENGTHS=1, `lengths`). They must not decrease, nor exceed the rows of q and
    of k, and what is used of a sequence not its rows: a call with others may read and write elsewhere, or
    never end. Any length may be 0. Causal masks and windows are aligned at each sequence's bottom right. What
    rows of no sequence hold does not matter, infinities neither; in the result and in gradients they are
    zero where there is a `seqused`, and may hold anything behind the last sequence.

    `max_seqlen_q` and `max_seqlen_k` are used where they are numbers and the call is not in a compiled graph.
    Of the first follows whether sequences are about equally long, or short: then the call may take other
    tiles, which are faster and whose sums round otherwise; nothing else depends on it. With the second up to
    128, gradients take less time and memory. Hazard: those of a sequence with more than 128 keys are then
    NaN; lengths that are checked are checked against it.

    With `block_table` (or `page_table`), int32 (n, pages of a sequence), k and v are the pages of a cache,
    (pages, page_size, kv heads, head_dim): what it names is copied to rows first, as many pages of each
    sequence as the table has room for. Hazard: no more may be used of a sequence than that, and an entry that
    holds keys and is no page reads another one.

    The rest as in `flash_attn_func`. Raises NotImplementedError, with the argument's name, for chunks, qv,
    splits, margins, dropout, descales and `others`, and for `deterministic` where pages require gradients.
    """
    refuse_by_name(
        "flash_attn_varlen_func",
        ("qv", "a tensor", qv is not None),
        ("attention_chunk", attention_chunk, attention_chunk != 0),
        ("num_splits", num_splits, num_splits not in (None, 0, 1)),
        ("sm_margin", sm_margin, sm_margin != 0),
        ("dropout_p", dropout_p, dropout_p not in (None, 0.0)),
        *asked_of(others, "flash_attn_varlen_func"),
    )
    named = ("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)
    used = ("seqused_q", seqused_q), ("seqused_k", seqused_k)
    for name, x in (*named, *(x for x in used if x[1] is not None)):
        check_tensor(name, x)
    if not torch.compiler.is_compiling():
        ops.know_subclass(q)
    table = _table_of(block_table, page_table)
    if table is not None:
        learns = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
        # Gradients of a page that several sequences name are added in any order.
        asked = "deterministic", deterministic, deterministic and learns
        refuse_by_name("flash_attn_varlen_func of pages that require gradients", asked)
        k, v, cu_seqlens_k, seqused_k = rows_of_pages(q, k, v, table, cu_seqlens_q, cu_seqlens_k, seqused_k)
    causal, window = mask_of(causal, False, window_size)
    tensors = sink_of(learnable_sink), cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    longest = policies.told(max_seqlen_q), policies.told(max_seqlen_k)
    options = softmax_scale, causal, False, *window, softcap, deterministic, *longest
    o, lse = ops_policies.call_forward(q, k, v, tensors, options)
    return (o, lse) if return_lse or return_attn_probs else o


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    learnable_sink: torch.Tensor | None = None,
    k_descale: float | torch.Tensor | None = None,
    v_descale: float | torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    **others: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few queries to a cache, on PyTorch's current stream: FlashAttention's call for decoding.

    q: (batch, queries, heads, head_dim), bf16 or fp16, head_dim 64, 128 or 256. k_cache, v_cache: (batch,
    seqlen, kv heads, head_dim), or with `block_table` (or `page_table`), int32 (batch, pages of a sequence),
    (pages, page_size, kv heads, head_dim), pages of 16, 32, 64, 128 or a multiple of 128 keys (of 256 beyond
    128, for e4m3 of head_dim 64). They are of q's type, or float8_e4m3fn; then `k_descale` and `v_descale`
    are what they are to be multiplied by, positive: a number, or fp32 of one element, (kv heads,) or (batch,
    kv heads).

    `cache_seqlens`, int32 (batch,) on the GPU or one number, says how many keys of the cache count; without
    it all do. Hazard: what a tensor holds is read on the GPU alone, and checked on request only
    (HOPPER_ATTENTION_CHECK_LENGTHS=1, `lengths`). Each length must be at least 0, and with the new keys at
    most what the cache, or the sequence's row of `block_table`, has room for; each entry of the table that
    holds keys must be a page of the cache; otherwise that sequence's o means nothing, and new keys are stored
    only inside the cache. With k and v (batch, new keys, kv heads, head_dim), of the cache's type, these are
    stored behind them, in the same launch, and count too; a window hides them as it hides others.
    Nothing behind a length is read, in the page table neither; up to 255 values that a window hides, and new
    ones, are, and must be finite. The last query is at the last key's place: `causal` hides what lies behind
    a query's own, and window_size (left, right) what lies more than `left` before it; right is −1, or 0 for
    `causal`.

    Returns o like q, or `out`, and with `return_softmax_lse` also the LSE, fp32 (batch, heads, queries): 0
    and −∞ for a query that sees no key. Keys are split among all SMs in any case, heads of a group packed,
    and results the same in every run: `num_splits`, `pack_gqa` and `deterministic` are taken and ignored.
    With `batch_invariant` a sequence's bits do not depend on the other sequences either. From some 16 to 64
    queries on, by the number of keys, `attention` is faster: it chooses (notes/decode.md).

    There is no gradient. Keys and queries are not rotated: with `rotary_cos`, as with batch indices, padding
    on the left, slopes, sinks and `others` of `flash_attn_func`, it raises NotImplementedError with the
    argument's name, as TypeError and ValueError before anything is launched.
    """
    refuse_by_name(
        "flash_attn_with_kvcache",
        ("rotary_cos", "a tensor", rotary_cos is not None),
        ("rotary_sin", "a tensor", rotary_sin is not None),
        ("cache_batch_idx", "a tensor", cache_batch_idx is not None),
        ("cache_leftpad", "a tensor", cache_leftpad is not None),
        ("alibi_slopes", "a tensor", alibi_slopes is not None),
        ("softcap", softcap, softcap != 0.0),
        ("learnable_sink", "a tensor", learnable_sink is not None),
        *asked_of(others, "flash_attn_with_kvcache"),
    )
    causal, (left, right) = mask_of(causal, False, window_size)
    if right not in (-1, 0):
        raise NotImplementedError(f"flash_attn_with_kvcache does not take window_size = {(left, right)!r}")
    left = -1 if left >= UNBOUNDED else left
    compiling = torch.compiler.is_compiling()
    (check_no_flags if compiling else check_scale)(softmax_scale=softmax_scale)
    check_flags(causal=causal, batch_invariant=batch_invariant)
    block_table = _table_of(block_table, page_table)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x)
    if block_table is not None:
        check_tensor("block_table", block_table)
    if out is not None:
        check_like("out", out, "q", q)
        if not compiling:  # a graph has PyTorch's refusal, when it copies
            check_no_overlap("out", out)
        if not compiling and out.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("out was made under torch.inference_mode, and can be written there alone")
    tensors = q, k_cache, v_cache, k, v, out, k_descale, v_descale
    if ops.learns(*tensors):
        raise NotImplementedError("flash_attn_with_kvcache has no gradient: call it under torch.no_grad()")
    if q.dim() != 4:
        raise ValueError(f"q must have 4 dimensions (batch, seqlen, heads, head_dim), not {q.dim()}")
    if isinstance(cache_seqlens, bool):
        raise TypeError("cache_seqlens must be an integer or a tensor, not bool")
    if isinstance(cache_seqlens, int):
        _check_number_of_keys(cache_seqlens, k_cache, k, block_table)
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    elif cache_seqlens is not None:
        check_tensor("cache_seqlens", cache_seqlens)
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    heads = k_cache.shape[2] if k_cache.dim() == 4 else -1  # which is refused later
    k_descale, v_descale = (_of_heads(name, x, q, heads) for name, x in descales.items())
    if k is not None or v is not None:
        for name, x in (("k", k), ("v", v), ("cache_seqlens", cache_seqlens)):
            check_tensor(name, x)
    options = softmax_scale, bool(causal) or right == 0, left, bool(batch_invariant)
    rest = cache_seqlens, block_table, k_descale, v_descale, *options
    o, lse = ops_decode.call(q, k_cache, v_cache, k, v, *rest)
    if out is not None:
        o = out.copy_(o)
    return (o, lse) if return_softmax_lse else o


def _table_of(block_table: torch.Tensor | None, page_table: torch.Tensor | None) -> torch.Tensor | None:
    """FlashAttention-2's name of a page table, or -3's. Raises ValueError for both."""
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table are two names of one argument: give one of them")
    return page_table if block_table is None else block_table


def _check_number_of_keys(n: int, k_cache: torch.Tensor, k: object, block_table: object) -> None:
    """Raise ValueError for more keys, the new ones counted, than the cache has room for; Dynamo's error in a
    graph compiled with `fullgraph`. Shapes that are refused later are let pass."""
    of_pages = isinstance(block_table, torch.Tensor) and block_table.dim() == 2
    if k_cache.dim() == 4 and (of_pages or block_table is None):
        added = k.shape[1] if isinstance(k, torch.Tensor) and k.dim() == 4 else 0
        lengths.check_number("cache_seqlens", n, added, lengths.room_of(k_cache, block_table))


def _of_heads(name: str, x: Descale, q: torch.Tensor, kv_heads: int) -> torch.Tensor | None:
    """As the kernel reads it: (batch, kv heads), without copies. Of another size it stays, to be refused."""
    x = descale_of(name, x, q.device)
    if x is None or (x.dim() == 2 and x.shape != (1, 1)) or x.numel() not in (1, kv_heads):
        return x
    return x.reshape(-1).expand(q.shape[0], kv_heads)
