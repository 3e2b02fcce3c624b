"""The kernels behind `torch.nn.attention.varlen.varlen_attn`: what `sdpa.enable()` puts under the operators
that it calls, for packed sequences. What the kernels do not take goes to the kernel that was there: dense
tensors, dropout, ALiBi, pages, and whatever later versions add.
"""

import torch

from .. import policies
from ..functional import mask_of

FLASH = "_flash_attention_forward", "_flash_attention_backward"


def _options(is_causal: bool, scale: float | None, left: int | None, right: int | None):
    bounds = (-1 if x is not None and x < 0 else x for x in (left, right))  # FlashAttention-2's: no bound
    causal, window = mask_of(bool(is_causal), False, tuple(bounds))
    return scale, causal, False, window, 0.0


def _against(direction: str, q, k, v, more: policies.Tensors, *options: object) -> str | None:
    nothing = lambda problem: None
    return policies.reason_against(direction, q, k, v, *options, more=more, also=nothing)


def forward_over(original):
    """`_flash_attention_forward`, over the kernel that was there."""

    def forward(
        keys, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
        *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, **rest,
    ):  # fmt: skip
        others = any(x is not None for x in rest.values())
        packed = cum_seq_q is not None and cum_seq_k is not None and query.dim() == 3
        if packed and not (dropout_p or return_debug_mask or others):
            more = policies.Tensors(cu_q=cum_seq_q, cu_kv=cum_seq_k, used_kv=seqused_k)
            options = _options(is_causal, scale, window_size_left, window_size_right)
            if _against("fwd", query, key, value, more, *options) is None:
                o, lse = policies.forward(query, key, value, more, *options, longest=policies.told(max_q))
                state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a generator nobody asks
                return o, lse, state, state.new_empty(()), query.new_empty(0)
        named = {
            "scale": scale,
            "window_size_left": window_size_left,
            "window_size_right": window_size_right,
            "seqused_k": seqused_k,
        }
        inputs = query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal
        return original(keys, *inputs, return_debug_mask, **named, **rest)

    return forward


def backward_over(original):
    """`_flash_attention_backward`, over the kernel that was there."""

    def backward(
        keys, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
        is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None, **rest,
    ):  # fmt: skip
        others = any(x is not None for x in rest.values())
        packed = cum_seq_q is not None and cum_seq_k is not None and query.dim() == 3
        if packed and not (dropout_p or others) and logsumexp.shape == (query.shape[1], query.shape[0]):
            more = policies.Tensors(cu_q=cum_seq_q, cu_kv=cum_seq_k)
            options = _options(is_causal, scale, window_size_left, window_size_right)
            if _against("bwd", query, key, value, more, *options) is None:
                saved = query, key, value, out, logsumexp.contiguous(), None
                deterministic = torch.are_deterministic_algorithms_enabled()
                options = *options, deterministic, policies.told(max_k)
                return policies.backward(grad_out, *saved, more, *options)[:3]
        inputs = grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k
        bounds = {"window_size_left": window_size_left, "window_size_right": window_size_right}
        return original(keys, *inputs, dropout_p, is_causal, rng_state, unused, scale=scale, **bounds, **rest)

    return backward
