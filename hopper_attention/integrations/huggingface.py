"""Hugging Face transformers: `register()`, then `attn_implementation="hopper_attention"`.

A model's masks come as transformers makes them for "sdpa": none where causality says everything, which the
kernels take. A call that they do not take, or would do slower (padding, a window, dropout, other head dims,
decoding), goes to transformers' own "sdpa" with the mask it needs; a soft cap or sinks, which that lacks too,
are refused by name.
"""

import torch

from .. import production
from ..choice import slower
from ..functional import attention
from ..kernels.device.constants import VECTOR
from ..kernels.device.limits import HEAD_DIMS

NAME = "hopper_attention"
DTYPES = torch.bfloat16, torch.float16


def register() -> None:
    """Make the kernels known to transformers as "hopper_attention". Raises ImportError without it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, hopper_attention_forward)
    # Of SDPA: None where causality alone says everything, and else one that its kernels can take.
    AttentionMaskInterface.register(NAME, sdpa_mask)


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
    transformers' "sdpa" means it; one token sees all keys.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"hopper_attention does not take {name}")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = is_causal and attention_mask is None and query.shape[2] > 1
    top_left = causal and query.shape[2] != key.shape[2]
    if attention_mask is None and not dropout and _takes(query, key, value, scaling, causal, top_left):
        o = attention(query, key, value, softmax_scale=scaling, causal=causal, top_left=top_left)
        return o.transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    inputs = query, key, value, attention_mask
    return sdpa_attention_forward(module, *inputs, dropout, scaling, is_causal=is_causal, **kwargs)


def _takes(query, key, value, *options: object) -> bool:
    """Whether `attention` takes the call; while a graph is traced, as far as that can be known."""
    if torch.compiler.is_compiling():
        return (
            query.is_cuda
            and query.dtype in DTYPES
            and query.dtype == key.dtype == value.dtype
            and query.shape[3] % VECTOR == 0
            and query.shape[3] <= HEAD_DIMS[-1]
            and query.shape[3] == key.shape[3] == value.shape[3]
            and query.shape[1] % key.shape[1] == 0
            and torch.cuda.get_device_capability(query.device) == (9, 0)
        )
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    directions = ("fwd", "bwd") if learns else ("fwd",)
    return all(production.reason_against(x, query, key, value, *options, slower) is None for x in directions)
