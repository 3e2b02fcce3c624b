"""FlashAttention-3 and -4 with gradients, as a model calls them: (batch, heads, seqlen, head_dim), causal.
And attention in fp32, to hold all of them against.

None of them is an operator that `torch.compile` leaves in its graph: it would break the graph around each
call, which costs more than compiling gains. So in a compiled model each is wrapped in one; eagerly it is
called as its own front end calls it.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from harness import fa3

Tensors = tuple[Tensor, ...]
FP32_ROWS = 4096  # queries whose scores are there at a time: 1 GiB or less in fp32 of up to 64k keys


class Passes(NamedTuple):
    """On (batch, seqlen, heads, head_dim)."""

    forward: Callable[..., Tensors]  # of q, k, v: o and lse (batch, heads, seqlen)
    backward: Callable[..., Tensors]  # of do, q, k, v, o, lse: dq, dk, dv
    eager: Callable[..., Tensor]  # of q, k, v: o, differentiable


def _differentiable(forward_pass: Callable[..., Tensors], backward_pass: Callable[..., Tensors]):
    """`Passes.eager` of both passes."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            o, lse = forward_pass(q, k, v)
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        def backward(ctx, do):
            return backward_pass(do, *ctx.saved_tensors)

    return Attention.apply


def _fa3() -> Passes:
    passes = fa3.passes(causal=True)
    return Passes(*passes, _differentiable(*passes))


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


def _fp32() -> Passes:
    """Attention in fp32: of 16 bits are only inputs and results. One head and some of its queries at a time,
    whose probabilities the backward pass makes anew."""

    def blocks(q, k):
        """(batch, head), queries, keys up to the last that they see, and the probabilities of both."""
        scale = q.shape[-1] ** -0.5
        for at in itertools.product(range(q.shape[0]), range(q.shape[2])):
            for start in range(0, q.shape[1], FP32_ROWS):
                rows, keys = slice(start, start + FP32_ROWS), slice(min(start + FP32_ROWS, q.shape[1]))
                scores = scale * q[at[0], rows, at[1]].float() @ k[at[0], keys, at[1]].float().T
                hidden = torch.ones_like(scores, dtype=torch.bool).triu_(start + 1)
                yield at, rows, keys, torch.softmax(scores.masked_fill_(hidden, -torch.inf), -1)

    def forward(q, k, v):
        batch, seqlen, heads, _ = q.shape
        o, lse = torch.empty_like(v), q.new_zeros((batch, heads, seqlen), dtype=torch.float32)
        for (b, h), rows, keys, p in blocks(q, k):
            o[b, rows, h] = (p @ v[b, keys, h].float()).to(o.dtype)
        return o, lse  # zeros: the backward pass makes its own

    def backward(do, q, k, v, o, lse):
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        for (b, h), rows, keys, p in blocks(q, k):
            of_rows, of_keys = (b, rows, h), (b, keys, h)
            dv[of_keys] += p.T @ do[of_rows].float()
            dp = do[of_rows].float() @ v[of_keys].float().T
            ds = q.shape[-1] ** -0.5 * p * (dp - (p * dp).sum(-1, keepdim=True))
            dq[of_rows] = ds @ k[of_keys].float()
            dk[of_keys] += ds.T @ q[of_rows].float()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    return Passes(forward, backward, _differentiable(forward, backward))


PASSES: dict[str, Callable[[], Passes]] = {"fa3": _fa3, "fa4": _fa4, "fp32": _fp32}


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
    """A call of "fa3", "fa4" or "fp32". Raises ImportError where the peer is not installed, or has no
    backward pass."""
    passes = PASSES[name]()
    operator = _operator(name, passes)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = operator(q, k, v)[0] if torch.compiler.is_compiling() else passes.eager(q, k, v)
        return o.transpose(1, 2)

    return call
