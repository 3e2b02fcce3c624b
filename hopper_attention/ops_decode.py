"""Operators for attention to a cache: what PyTorch must know of `flash_attn_with_kvcache`.

decode(q, k_cache, v_cache, cache_seqlens, block_table, k_descale, v_descale, softmax_scale, causal,
       window_left, batch_invariant) → o, lse
decode_append(q, k_cache, v_cache, k, v, cache_seqlens, …the same) → o, lse; k and v are stored in the cache

Neither has a gradient. Checks are in their implementation, as `ops`'s are.
"""

import torch
from torch.autograd.graph import increment_version
from torch.library import Library, register_fake
from torch.utils.flop_counter import register_flop_formula

from . import decoding, lengths, ops
from .kernels.contract import Problem

library = Library("hopper_attention", "FRAGMENT")
REST = (
    "Tensor? block_table=None, Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, "
    "bool causal=False, SymInt window_left=-1, bool batch_invariant=False) -> (Tensor o, Tensor lse)"
)
library.define(
    f"decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens=None, {REST}", tags=ops.TAGS
)
library.define(
    "decode_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    f"Tensor cache_seqlens, {REST}",
    tags=ops.TAGS,
)
decode = torch.ops.hopper_attention.decode.default
append = torch.ops.hopper_attention.decode_append.default


# ---- what runs --------------------------------------------------------------------------------------------


def run(tensors: decoding.Tensors, *options: object, made: decoding.Made | None = None):
    """`decoding.decode` of q, both caches, k and v, cache_seqlens, block_table and both descales."""
    found = decoding.decode(*tensors, *options, made=made)
    if tensors[3] is not None:  # who has kept the cache for a backward pass is told that it has changed
        increment_version([x for x in tensors[1:3] if not x.is_inference()])
    return found


def run_decode(
    q, k_cache, v_cache, cache_seqlens=None, block_table=None, k_descale=None, v_descale=None, *options
):
    return run((q, k_cache, v_cache, None, None, cache_seqlens, block_table, k_descale, v_descale), *options)


def run_append(
    q, k_cache, v_cache, k, v, cache_seqlens, block_table=None, k_descale=None, v_descale=None, *options
):
    return run((q, k_cache, v_cache, k, v, cache_seqlens, block_table, k_descale, v_descale), *options)


library.impl("decode", run_decode, "CompositeExplicitAutograd")
library.impl("decode_append", run_append, "CompositeExplicitAutograd")


# ---- shapes, for tracing ----------------------------------------------------------------------------------


@register_fake("hopper_attention::decode", lib=library)
def fake_decode(q, k_cache, v_cache, *options):
    ops.check_traced(q, k_cache, v_cache, *options)
    return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@register_fake("hopper_attention::decode_append", lib=library)
def fake_append(q, k_cache, v_cache, k, v, *options):
    return fake_decode(q, k_cache, v_cache, k, v, *options)


# ---- no gradients -----------------------------------------------------------------------------------------


def directly(tensors: decoding.Tensors, options: tuple[object, ...]):
    """o and lse, or None where something would see the operator. None of the tensors is nested."""
    if not ops.unwatched() or ops.learns(*tensors):
        return None
    made = decoding.recently(tensors, options)
    if made is None and not ops.undispatched(*tensors):
        return None
    return run(tensors, *options, made=made)


def call(q, k_cache, v_cache, k, v, *rest):
    """`decode`, or with k and v `decode_append`, as `ops.call_forward` is `ops.forward`. `rest` is theirs,
    complete, and none of the tensors nested."""
    found = directly((q, k_cache, v_cache, k, v, *rest[:4]), rest[4:])
    if found is not None:
        return found
    return decode(q, k_cache, v_cache, *rest) if k is None else append(q, k_cache, v_cache, k, v, *rest)


# Of the arguments behind the tensors that are always given: four tensors, four options.
DEFAULTS = (*(None,) * 4, None, False, -1, False)


def without_gradient(operator, tensors: decoding.Tensors, options: tuple[object, ...]):
    """The operators' Autograd kernel, whose way to Python is all that a call costs."""
    options = *options, *DEFAULTS[4 + len(options) :]
    # What these operators are on other devices, somebody else may have registered.
    if tensors[0].is_cuda and not any(x is not None and x.is_nested for x in tensors):
        if (found := directly(tensors, options)) is not None:
            return found
    ops.refuse_gradients(operator, *tensors)
    given = tensors if operator is append else tensors[:3] + tensors[5:]
    with ops.below_autograd():
        return operator(*given, *options)


def differentiable_decode(
    q, k_cache, v_cache, cache_seqlens=None, block_table=None, k_descale=None, v_descale=None, *options
):
    of_cache = cache_seqlens, block_table, k_descale, v_descale
    return without_gradient(decode, (q, k_cache, v_cache, None, None, *of_cache), options)


def differentiable_append(
    q, k_cache, v_cache, k, v, cache_seqlens, block_table=None, k_descale=None, v_descale=None, *options
):
    of_cache = cache_seqlens, block_table, k_descale, v_descale
    return without_gradient(append, (q, k_cache, v_cache, k, v, *of_cache), options)


def decode_in_graph(q, k_cache, v_cache, *rest):
    if q.is_cuda:
        return call(q, k_cache, v_cache, None, None, *rest, *DEFAULTS[len(rest) :])
    return decode(q, k_cache, v_cache, *rest)


def append_in_graph(q, k_cache, v_cache, k, v, *rest):
    if q.is_cuda:
        return call(q, k_cache, v_cache, k, v, *rest, *DEFAULTS[len(rest) :])
    return append(q, k_cache, v_cache, k, v, *rest)


ops.IN_GRAPHS |= {decode: decode_in_graph, append: append_in_graph}
library.impl("decode", differentiable_decode, "Autograd")
library.impl("decode_append", differentiable_append, "Autograd")


# ---- FLOPs ------------------------------------------------------------------------------------------------


def _flops(q, k_cache, added: int, cache_seqlens=None, block_table=None, *rest) -> int:
    """Of the pairs that lengths, mask and window show. Lengths are read here; of tensors without values all
    that the cache has room for counts."""
    _, _, _, causal, left, *_ = *rest, *DEFAULTS[2 + len(rest) :]
    batch, queries, heads, head_dim = q.shape
    known = cache_seqlens is not None and ops.has_values(cache_seqlens)
    room = lengths.room_of(k_cache, block_table)
    kept = cache_seqlens.tolist() if known else [room - added * (cache_seqlens is not None)] * batch
    sequences = tuple((queries, n + added) for n in kept)
    total = sum(n for _, n in sequences)
    window = None if left < 0 else (left, 0 if causal else -1)
    mask = {"causal": causal and window is None, "window": window, "sequences": sequences}
    return int(Problem(1, heads, k_cache.shape[2], batch * queries, total, head_dim, **mask).flops)


@register_flop_formula(torch.ops.hopper_attention.decode, get_raw=True)
def decode_flops(q, k_cache, v_cache, *rest, out_val=None, **named) -> int:
    return _flops(q, k_cache, 0, *rest)


@register_flop_formula(torch.ops.hopper_attention.decode_append, get_raw=True)
def append_flops(q, k_cache, v_cache, k, v, *rest, out_val=None, **named) -> int:
    return _flops(q, k_cache, k.shape[1], *rest)
