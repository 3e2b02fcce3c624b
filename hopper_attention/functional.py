"""`attention(q, k, v)` and `attention_backward(do, q, k, v, o, lse)`: any stage as a PyTorch call, with every
wrong input refused before a launch. `attention` is differentiable."""

import torch
from torch.autograd.function import once_differentiable

from .checks import check_layout, problem_of, refuse
from .launch import BACKWARD, FORWARD, prepare, prepare_backward


def _attention(q, k, v, causal: bool, top_left: bool, stage: str, out: torch.Tensor | None = None):
    module, compiled, tensors = prepare(q, k, v, causal=causal, top_left=top_left, stage=stage, out=out)
    with torch.cuda.device(q.device):
        module.run_kernel(compiled, tensors)
    return tensors.o, tensors.lse


class _Differentiable(torch.autograd.Function):
    """Forward by a stage, backward by the stage BACKWARD. LSE is a second output without a gradient."""

    @staticmethod
    def forward(ctx, q, k, v, causal: bool, top_left: bool, stage: str):
        o, lse = _attention(q, k, v, causal, top_left, stage)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mark_non_differentiable(lse)
        ctx.mask = {"causal": causal, "top_left": top_left}
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        try:
            check_layout("do", do)
        except ValueError:  # such as the expanded scalar that sum() hands back
            do = do.contiguous()
        grads = attention_backward(do, *ctx.saved_tensors, **ctx.mask, stage=BACKWARD)
        return *grads, None, None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    top_left: bool = False,
    stage: str = FORWARD,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ/√d)·v by the kernel of `stage`, on PyTorch's current stream.

    q, k, v: (batch, heads, seqlen, head_dim), rows 16-byte aligned and contiguous, any other strides; k and v
    may have fewer heads. Returns o like q, with `return_lse` also the natural-log logsumexp of each row's
    scaled scores, fp32 (batch, heads, seqlen), which carries no gradient. `out` receives o instead of a new
    tensor.

    With `causal` query i sees keys up to i + seqlen_kv − seqlen_q, a mask aligned at the bottom right; one
    that sees none has o = 0 and lse = −∞. With `top_left` besides it sees keys up to i, as PyTorch's
    `is_causal` means it. At equal lengths the two are one mask, and every stage takes either.

    Where autograd is on and an input requires a gradient, o has one, computed by the stage BACKWARD; `out` is
    then refused. Raises TypeError, ValueError or MemoryError before anything is launched.
    """
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v)):
        if out is not None:
            raise ValueError("out cannot be given where an input requires a gradient")
        refuse(BACKWARD, problem_of(q, k, v, causal, top_left).with_(direction="bwd"))
        o, lse = _Differentiable.apply(q, k, v, causal, top_left, stage)
    else:
        o, lse = _attention(q, k, v, causal, top_left, stage, out)
    return (o, lse) if return_lse else o


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    top_left: bool = False,
    stage: str = BACKWARD,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attention` by the kernel of `stage`, on PyTorch's current stream: dq, dk, dv.

    do is the gradient of o; q, k, v, o, lse are what `attention` took and, with `return_lse`, gave. Mask and
    layouts as there, lse contiguous. `out`, three tensors like q, k and v, receives the gradients instead of
    new ones. Raises TypeError, ValueError or MemoryError before anything is launched.
    """
    mask = {"causal": causal, "top_left": top_left}
    module, compiled, tensors = prepare_backward(do, q, k, v, o, lse, **mask, stage=stage, out=out)
    with torch.cuda.device(q.device):
        if q.numel() and k.numel():
            module.run_kernel(compiled, tensors)
        else:  # no query or no key: no output that an input could have changed, and nothing to launch
            for x in tensors.outputs.values():
                x.zero_()
    return tuple(tensors.outputs.values())
