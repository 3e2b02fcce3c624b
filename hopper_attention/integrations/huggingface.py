"""Hugging Face transformers: `register()`, then `attn_implementation="hopper_attention"`.

A model's masks come as transformers makes them for "sdpa": none where causality says everything, and here
none either where a sliding window does besides; the kernels take both, as they take soft caps, sinks and
packed sequences (`cu_seq_lens_q` and `cu_seq_lens_k`, of training without padding). A call that they do not
take, or would do slower (padding, dropout, some steps of decoding), goes to transformers' own "sdpa" with
the mask it needs; with a soft cap or sinks, which that lacks, it is refused by name. Generation with
`huggingface_cache.KeyValueCache` is decoding by the kernels as well.

`attn_implementation="hopper_flash_attention_3"` is transformers' own FlashAttention path with this library's
`flash_attn_func` and its kin: padding is taken out and put back, and continuous batching (`generate_batch`)
decodes from its pages. Nothing is left to "sdpa" there. transformers looks for "flash" and a 3 in the name.
"""

from collections.abc import Callable, Iterator

import torch

from .. import policies, production
from ..checks import check_tensor
from ..choice import slower
from ..functional import attention, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from ..kernels.device.constants import VECTOR
from ..kernels.device.limits import HEAD_DIMS

NAME, FLASH = "hopper_attention", "hopper_flash_attention_3"
# What a call hands on beside what `hopper_attention_forward` names: it changes nothing here, or is looked at.
# Whatever else is no flag (a learned bias, chosen keys, a cache of pages) is for transformers' "sdpa".
KNOWN = {
    "softcap", "s_aux", "sliding_window", "deterministic",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx",
    "position_ids", "position_embeddings", "cache_position", "past_key_values", "token_type_ids",
    "hidden_states", "num_items_in_batch", "logits_to_keep", "labels",
}  # fmt: skip
# Mask functions of transformers that are made of others, and those that, with these but for "or", say no more
# than causality, windows, padding and packing do.
COMBINED = {"and_masks", "or_masks", "remap_positions_for_packed_sequence"}
OF_PACKING = COMBINED - {"or_masks"} | {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
    "sliding_window_bidirectional_overlay", "padding_mask_function", "packed_sequence_mask_function",
}  # fmt: skip
CHUNKED = "chunked_attention"  # a layer's kind
HIDES_MORE = "_hopper_attention_hides_more"  # of a mask that says more, True
MARK = "_hopper_attention_layer"  # of what `huggingface_cache` returns for a key it has not stored
DTYPES = torch.bfloat16, torch.float16


def register() -> None:
    """Make the kernels known to transformers as "hopper_attention", and as "hopper_flash_attention_3" to one
    that can be lent functions. Raises ImportError without it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, hopper_attention_forward)
    AttentionMaskInterface.register(NAME, hopper_attention_mask)
    if _lend_functions():
        from transformers.integrations.flash_attention import flash_attention_forward
        from transformers.masking_utils import flash_attention_mask

        AttentionInterface.register(FLASH, flash_attention_forward)
        AttentionMaskInterface.register(FLASH, flash_attention_mask)


def _lend_functions() -> bool:
    """Have transformers find these functions where it looks for a FlashAttention of the name FLASH; False if
    it does not look there. Hazard: that place is not public; what is, takes packages and its hub alone."""
    from transformers import modeling_flash_attention_utils as utils

    found = getattr(utils, "_lazy_imports", None)
    if found is None or not {"_flash_with_kvcache_fn", "_pad_input", "_unpad_input"} <= {*vars(utils)}:
        return False
    if getattr(found, "__module__", None) == __name__:
        return True  # lent before

    def lazy_imports(implementation: str | None, *rest: object, **more: object):
        if implementation != FLASH:
            return found(implementation, *rest, **more)
        calls = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        return *calls, utils._pad_input, utils._unpad_input

    utils._lazy_imports = lazy_imports
    return True


def hopper_attention_mask(
    batch_size: int, q_length: int, kv_length: int, *rest: object, **options: object
) -> torch.Tensor | None:
    """That of "sdpa": None where causality alone says everything; and where a causal sliding window does,
    which a model's call then names (`sliding_window`)."""
    from transformers.masking_utils import sdpa_mask

    window = options.get("local_size") is not None and _is_causal_window(options.get("mask_function"))
    if window and q_length in (1, kv_length):
        options = options | {"local_size": None}
        if sdpa_mask(batch_size, q_length, kv_length, *rest, **options) is None:
            return None
        options["local_size"] = kv_length
    mask = sdpa_mask(batch_size, q_length, kv_length, *rest, **options)
    if mask is not None and not torch.compiler.is_compiling():
        setattr(mask, HIDES_MORE, not {*_made_of(options.get("mask_function"))} <= OF_PACKING)
    return mask


def _is_causal_window(mask_function: Callable | None) -> bool:
    """Whether it is `sliding_window_causal_mask_function`'s, with nothing added."""
    return {*_made_of(mask_function)} == {"and_masks", "sliding_window_overlay", "causal_mask_function"}


def _made_of(mask_function: Callable | None) -> Iterator[str]:
    """The names of the functions that made it, and those that it combines."""
    if mask_function is None:  # causality alone
        return
    name = getattr(mask_function, "__qualname__", "").split(".")[0]
    yield name
    for cell in mask_function.__closure__ if name in COMBINED else ():
        held = cell.cell_contents
        for x in held if isinstance(held, tuple) else (held,):
            if callable(x):
                yield from _made_of(x)


def hopper_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of query (batch, heads, seqlen, head_dim), with fewer heads in key and value if need be:
    (batch, seqlen, heads, head_dim), and no weights.

    Without a mask a query of several tokens is causal if the module is, aligned at the top left, as
    transformers' "sdpa" means it; one token sees all keys, or those in its window. With `cu_seq_lens_q` and
    `cu_seq_lens_k` the batch, of one, is sequences packed behind one another, whose masks are aligned in
    each; `attention_mask` says the same then, and is not looked at. Where it says more, as of chunks or of an
    image's tokens, the call is refused. A module that is not causal sees `sliding_window` to both sides
    there; otherwise its mask says so. `max_length_q` and `max_length_k` are `flash_attn_varlen_func`'s
    longest lengths.
    """
    softcap, sink = kwargs.get("softcap") or 0.0, kwargs.get("s_aux")
    unknown = [x for x in kwargs if x not in KNOWN and not isinstance(kwargs[x], bool | None)]
    plain = attention_mask is None and not dropout and not unknown
    if (layer := getattr(key, MARK, None)) is not None:  # a step by one token, which its cache has not stored
        if plain and not softcap and sink is None:
            return layer.attend(query, scaling), None
        key, value = layer.store(*layer.new)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    window = kwargs.get("sliding_window")
    extras = {"softcap": softcap, "learnable_sink": sink} if softcap or sink is not None else {}
    lengths = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    rest = {"softmax_scale": scaling, "deterministic": bool(kwargs.get("deterministic"))}
    if lengths[0] is not None or lengths[1] is not None:
        if unknown:
            raise NotImplementedError(f"hopper_attention does not take {unknown[0]} beside packed sequences")
        if more := _hides_more(module, attention_mask):
            raise NotImplementedError(f"hopper_attention does not take {more} beside packed sequences")
        longest = {f"max_seqlen_{x}": kwargs.get(f"max_length_{x}") for x in "qk"}
        return _packed(query, key, value, lengths, dropout, is_causal, window, extras | rest | longest), None
    several = query.shape[2] > 1
    causal = is_causal and attention_mask is None and several
    top_left = causal and query.shape[2] != key.shape[2]
    hides = is_causal and attention_mask is None and window is not None and window < key.shape[2]
    if hides:
        causal, top_left, extras = False, False, extras | {"window_size": (window - 1, 0)}
    options = scaling, causal, top_left
    if plain and _takes(query, key, value, *options, extras=extras):
        o = attention(query, key, value, causal=causal, top_left=top_left, **extras, **rest)
        return o.transpose(1, 2), None
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"hopper_attention does not take {name} beside a mask, dropout, a bias, or what its kernels "
                "refuse"
            )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if hides and (several or unknown):
        attention_mask = _window_mask(query.shape[2], key.shape[2], window, query.device)
    elif hides:
        key, value = key[:, :, -window:], value[:, :, -window:]
    inputs = query, key, value, attention_mask
    return sdpa_attention_forward(module, *inputs, dropout, scaling, is_causal=is_causal, **kwargs)


def _window_mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Which keys each query of a causal sliding window sees: (queries, keys)."""
    ahead = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
    return (ahead <= 0) & (ahead > -window)


def _hides_more(module: torch.nn.Module, attention_mask: torch.Tensor | None) -> str | None:
    """What of a layer's mask packed sequences do not have, or None: by its kind, and, outside of a compiled
    graph, by the functions that its mask was made of."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if kinds and isinstance(layer, int) and kinds[layer : layer + 1] == [CHUNKED]:
        return CHUNKED
    return "a mask that says more than they do" if getattr(attention_mask, HIDES_MORE, False) else None


def _packed(query, key, value, lengths, dropout, is_causal, window, extras) -> torch.Tensor:
    """Attention of packed sequences. Raises NotImplementedError for dropout, ValueError for several
    batches, TypeError for lengths that are no tensors; without a mask of each sequence there is no other way
    to compute it."""
    for name, x in zip("qk", lengths):
        check_tensor(f"cu_seq_lens_{name}", x)
    if dropout:
        raise NotImplementedError(f"hopper_attention does not take dropout = {dropout!r}")
    if query.shape[0] != 1:
        raise ValueError(f"packed sequences lie in a batch of 1, not of {query.shape[0]}")
    if window is not None:  # as transformers counts: the token itself, and as many on each side that it sees
        extras = extras | {"window_size": (window - 1, 0 if is_causal else window - 1)}
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    lengths = (x.to(torch.int32) for x in lengths)
    o = flash_attn_varlen_func(*rows, *lengths, causal=is_causal, **extras)
    return o.unsqueeze(0)


def _takes(query, key, value, *options: object, extras: dict[str, object]) -> bool:
    """Whether `attention` takes the call; while a graph is traced, as far as that can be known. What no other
    kernel has (`extras` other than a window), ours need not be faster at."""
    if torch.compiler.is_compiling():
        return (
            query.is_cuda
            and query.dtype in DTYPES
            and query.dtype == key.dtype == value.dtype
            and query.shape[3] % VECTOR == 0
            and (query.shape[3] in HEAD_DIMS if extras else query.shape[3] <= HEAD_DIMS[-1])
            and query.shape[3] == key.shape[3] == value.shape[3]
            and query.shape[1] % key.shape[1] == 0
            and torch.cuda.get_device_capability(query.device) == (9, 0)
        )
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    directions = ("fwd", "bwd") if learns else ("fwd",)
    if extras:
        no_window = {"softcap", "learnable_sink"} & {*extras}
        also = (lambda problem: None) if no_window else slower
        window, softcap = extras.get("window_size", (-1, -1)), extras.get("softcap", 0.0)
        return all(
            policies.reason_against(x, query, key, value, *options, window, softcap, also=also) is None
            for x in directions
        )
    return all(production.reason_against(x, query, key, value, *options, slower) is None for x in directions)
