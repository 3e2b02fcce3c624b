"""Attention for NVIDIA Hopper GPUs: the production kernels of a worklog in CuTe Python DSL, as PyTorch calls.

from hopper_attention import attention
o = attention(q, k, v, causal=True)     # (batch, heads, seqlen, head_dim)

or behind the calls that a model makes already: `enable()` for scaled_dot_product_attention,
`flash_attn_func`, `flash_attn_varlen_func` for packed sequences, `flash_attn_with_kvcache` for decoding,
`integrations.huggingface.register()`. For inference in FP8: `attention_fp8`, `quantize`. For a sequence on
several GPUs: `context_parallel_attention`.
"""

from .fp8 import attention_fp8, quantize
from .functional import (
    attention,
    attention_backward,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from .integrations.sdpa import disable, enable, enabled, explain

__all__ = [
    "attention",
    "attention_backward",
    "attention_fp8",
    "context_parallel_attention",
    "disable",
    "enable",
    "enabled",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "quantize",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """What needs `torch.distributed`, which not every PyTorch has, is imported when it is asked for."""
    if name == "context_parallel_attention":
        from .integrations.context_parallel import context_parallel_attention

        return context_parallel_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
