"""FlashAttention-3 and -4 with gradients, as a model calls them: (batch, heads, seqlen, head_dim), causal.

Neither is an operator that `torch.compile` leaves in its graph: it would break the graph around each call,
which costs more than compiling gains. So in a compiled model each is wrapped in one; eagerly it is called as
its own front end calls it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from harness import fa3

Tensors = tuple[Tensor, ...]


class Passes(NamedTuple):
    """On (batch, seqlen, heads, head_dim)."""

    forward: Callable[..., Tensors]  # of q, k, v: o and lse (batch, heads, seqlen)
    backward: Callable[..., Tensors]  # of do, q, k, v, o, lse: dq, dk, dv
    eager: Callable[..., Tensor]  # of q, k, v: o, differentiable


def _fa3() -> Passes:
    forward, backward = fa3.passes(causal=True)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            o, lse = forward(q, k, v)
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        def backward(ctx, do):
            return backward(do, *ctx.saved_tensors)

    return Passes(forward, backward, Attention.apply)


def _fa4() -> Passes:
    from flash_attn.cute import flash_attn_func, interface

    def eager(q, k, v):
        found = flash_attn_func(q, k, v, causal=True)
        return found[0] if isinstance(found, tuple) else found  # some versions give the LSE too

    def forward(q, k, v):
        return interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True)[:2]

    def backward(do, q, k, v, o, lse):
        return interface._flash_attn_bwd(q, k, v, o, do, lse, causal=True)[:3]

    return Passes(forward, backward, eager)


PASSES: dict[str, Callable[[], Passes]] = {"fa3": _fa3, "fa4": _fa4}


def _operator(name: str, passes: Passes) -> Callable[..., Tensors]:
    """The passes as an operator with gradients: of q, k, v it gives o and lse."""

    @torch.library.custom_op(f"harness::{name}_forward", mutates_args=())
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = passes.forward(q, k, v)
        return o, lse

    @forward.register_fake
    def _(q, k, v):
        batch, seqlen, heads, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((batch, heads, seqlen), dtype=torch.float32)

    @torch.library.custom_op(f"harness::{name}_backward", mutates_args=())
    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = passes.backward(do, q, k, v, o, lse)
        return dq, dk, dv

    @backward.register_fake
    def _(do, q, k, v, o, lse):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    forward.register_autograd(
        lambda ctx, do, dlse: backward(do, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )
    return forward


@functools.cache
def attention(name: str) -> Callable[..., Tensor]:
    """A call of "fa3" or "fa4". Raises ImportError where the peer is not installed, or has no backward
    pass."""
    passes = PASSES[name]()
    operator = _operator(name, passes)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = operator(q, k, v)[0] if torch.compiler.is_compiling() else passes.eager(q, k, v)
        return o.transpose(1, 2)

    return call
