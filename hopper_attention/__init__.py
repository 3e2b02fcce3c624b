"""Attention for NVIDIA Hopper GPUs: the production kernels of a worklog in CuTe Python DSL, as PyTorch calls.

from hopper_attention import attention
o = attention(q, k, v, causal=True)     # (batch, heads, seqlen, head_dim)
"""

from .functional import attention, attention_backward

__all__ = ["attention", "attention_backward"]
__version__ = "0.1.0"
