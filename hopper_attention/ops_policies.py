"""Operators for attention with a window, a soft cap or a sink, and of packed sequences: `attend` and its
backward pass.

attend(q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, causal, top_left,
       window_left, window_right, softcap, deterministic, longest, longest_kv) → o, lse
attend_backward(do, q, k, v, o, lse, dlse, sink, …the same) → dq, dk, dv, dsink

Packed q is (total, heads, head_dim), its lse (heads, total); `longest` is a hint, how many queries a sequence
has at most, 0 where nobody says; `longest_kv` is how many keys, and gradients of a sequence that has more may
be NaN. Without a sink dsink is (0,). Everything else is as in `ops`, whose operators, with fewer arguments,
plain calls keep.
"""

import torch
from torch.library import Library, register_fake, register_vmap
from torch.utils.flop_counter import register_flop_formula

from . import ops, policies
from .checks import check_flags, check_no_flags, check_scale, check_softcap
from .kernels.contract import Problem

library = Library("hopper_attention", "FRAGMENT")
MORE = (
    "Tensor? sink=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, float? softmax_scale=None, bool causal=False, bool top_left=False, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, bool deterministic=False, "
    "SymInt longest=0, SymInt longest_kv=0"
)
library.define(f"attend(Tensor q, Tensor k, Tensor v, {MORE}) -> (Tensor o, Tensor lse)", tags=ops.TAGS)
library.define(
    "attend_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse=None, "
    f"{MORE}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    tags=ops.TAGS,
)
forward = torch.ops.hopper_attention.attend.default
backward = torch.ops.hopper_attention.attend_backward.default

TENSORS = 5  # of MORE
OPTIONS = (None, False, False, -1, -1, 0.0, False, 0, 0)  # the rest of MORE, where they are not given


def _complete(more: tuple[object, ...]) -> tuple[tuple[torch.Tensor | None, ...], tuple[object, ...]]:
    """MORE's tensors, and its options."""
    tensors, options = more[:TENSORS], more[TENSORS:]
    return (*tensors, *(None,) * (TENSORS - len(tensors))), (*options, *OPTIONS[len(options) :])


# ---- what runs --------------------------------------------------------------------------------------------


def run_forward(q, k, v, *more):
    tensors, (scale, causal, top_left, left, right, softcap, _, *longest) = _complete(more)
    options = scale, causal, top_left, (left, right), softcap
    return policies.forward(q, k, v, policies.Tensors(*tensors), *options, *longest)


def run_backward(do, q, k, v, o, lse, dlse=None, *more):
    tensors, (scale, causal, top_left, left, right, softcap, deterministic, _, longest_kv) = _complete(more)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = scale, causal, top_left, (left, right), softcap, deterministic
    saved = do, q, k, v, o, lse, dlse
    return policies.backward(*saved, policies.Tensors(*tensors), *options, longest_kv=longest_kv)


library.impl("attend", run_forward, "CompositeExplicitAutograd")
library.impl("attend_backward", run_backward, "CompositeExplicitAutograd")


# ---- shapes, for tracing ----------------------------------------------------------------------------------


@register_fake("hopper_attention::attend", lib=library)
def fake_forward(q, k, v, *more):
    ops.check_traced(q, k, v, *more)
    shape = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    o = torch.empty_strided((*q.shape[:-1], *v.shape[-1:]), q.stride(), dtype=q.dtype, device=q.device)
    return torch.empty_like(o), q.new_empty(shape, dtype=torch.float32)


@register_fake("hopper_attention::attend_backward", lib=library)
def fake_backward(do, q, k, v, o, lse, dlse=None, sink=None, *more):
    ops.check_traced(do, q, k, v, o, lse, dlse, sink, *more)
    dsink = q.new_empty(0, dtype=torch.float32) if sink is None else torch.empty_like(sink)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsink


# ---- gradients --------------------------------------------------------------------------------------------


class Attention(ops.Function):
    """As `ops.Attention`; `more` is MORE, complete."""

    @staticmethod
    def forward(ctx, direct, q, k, v, *more):
        if direct:
            o, lse = run_forward(q, k, v, *more)
        else:
            with ops.to_the_level_below(), ops.below_autograd():
                o, lse = forward(q, k, v, *more)
        ctx.options = more[TENSORS:]
        ctx.save_for_backward(q, k, v, o, lse, *more[:TENSORS])
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        rest = (None,) * (len(ctx.options) + TENSORS - 1)
        if do is None and dlse is None:
            return None, None, None, None, None, *rest
        do = torch.zeros_like(o) if do is None else do
        direct = ops.unseen(q, k, v, do, o, lse, dlse, *tensors) and not torch.is_grad_enabled()
        run = run_backward if direct else backward
        *gradients, dsink = run(do, q, k, v, o, lse, dlse, *tensors, *ctx.options)
        return None, *gradients, None if tensors[0] is None else dsink, *rest


class Gradients(ops.Gradients):
    """`backward`, which has no gradient."""

    @staticmethod
    def forward(ctx, *inputs):
        with ops.to_the_level_below(), ops.below_autograd():
            return backward(*inputs)


def differentiable_forward(q, k, v, *more):
    tensors, options = _complete(more)
    if type(q) is not torch.Tensor:
        ops.know_subclass(q)
    ops.refuse_tangents(*(x for x in (q, k, v, tensors[0]) if x is not None))
    if ops.learns(q, k, v, tensors[0]):
        with ops.at_this_level():
            return Attention.apply(False, q, k, v, *tensors, *options)
    with ops.below_autograd():
        return forward(q, k, v, *more)


def differentiable_backward(do, q, k, v, o, lse, dlse=None, *more):
    inputs = do, q, k, v, o, lse, dlse, *more
    learning = [x for x in inputs[: 8 if more else 7] if x is not None]
    if type(q) is not torch.Tensor:
        ops.know_subclass(q)
    ops.refuse_tangents(*learning)
    if ops.learns(*learning):
        with ops.at_this_level():
            return Gradients.apply(*inputs)
    with ops.below_autograd():
        return backward(*inputs)


def call_forward(q, k, v, tensors: tuple[torch.Tensor | None, ...], options: tuple[object, ...]):
    """`forward`, but where nothing would see it without the dispatcher, as `ops.call_forward`."""
    booleans = all(type(x) is bool for x in (*options[1:3], options[6]))
    if ops.is_compiling():
        check_no_flags(softmax_scale=options[0], softcap=options[5])
    else:
        check_scale(options[0]), check_softcap(options[5])
    if not booleans:
        check_flags(causal=options[1], top_left=options[2], deterministic=options[6])
    if not (ops.unseen(q, k, v, *tensors) and booleans):
        return forward(q, k, v, *tensors, *options)
    if ops.learns(q, k, v, tensors[0]):
        with ops.at_this_level():
            return Attention.apply(True, q, k, v, *tensors, *options)
    return run_forward(q, k, v, *tensors, *options)


def forward_in_graph(*given):
    direct = given[0].is_cuda and ops.is_direct(*given[: 3 + TENSORS])
    return (run_forward if direct else forward)(*given)


def backward_in_graph(*given):
    direct = given[0].is_cuda and ops.is_direct(*given[: 7 + TENSORS])
    return (run_backward if direct else backward)(*given)


ops.IN_GRAPHS |= {forward: forward_in_graph, backward: backward_in_graph}
library.impl("attend", differentiable_forward, "Autograd")
library.impl("attend_backward", differentiable_backward, "Autograd")


# ---- autocast, vmap, FLOPs --------------------------------------------------------------------------------


library.impl("attend", ops.autocast_on("cuda", forward), "AutocastCUDA")


@register_vmap("hopper_attention::attend", lib=library)
def vmap_forward(info, in_dims, q, k, v, *more):
    rest, batched = in_dims[3:], q.dim() - (in_dims[0] is not None) == 4
    if not batched or any(at is not None for at in rest):  # packed, or a sink of each
        return _one_by_one(forward, info, in_dims, q, k, v, *more)
    return ops.vmap_with(forward, info, in_dims[:3], (q, k, v), more)


@register_vmap("hopper_attention::attend_backward", lib=library)
def vmap_backward(info, in_dims, *given):
    return _one_by_one(backward, info, in_dims, *given)


def _one_by_one(operator, info, in_dims, *given):
    """One call for each; of nothing one with zeros says what none of them looks like."""

    def one(x, at, i):
        if at is None:
            return x
        return x.select(at, i) if info.batch_size else x.new_zeros(x.movedim(at, 0).shape[1:])

    found = [operator(*(one(x, at, i) for x, at in zip(given, in_dims))) for i in range(info.batch_size or 1)]
    outputs = tuple(torch.stack(x)[: info.batch_size] for x in zip(*found))
    return outputs, (0,) * len(outputs)


def _flops(direction: str, q, v, *more) -> int:
    """Of the pairs that a mask or a window shows. Lengths are read here; of tensors without values, sequences
    count as equally long."""
    (_, cu_q, cu_k, used_q, used_k), (_, causal, top_left, left, right, *_) = _complete(more)
    window = None if (left, right) == (-1, -1) else (left, right)
    mask = {"causal": causal, "top_left": top_left, "window": window, "direction": direction}
    mask["value_dim"] = v.shape[-1] if v.shape[-1] != q.shape[-1] else None
    if cu_q is None:
        (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, v.shape
        return int(Problem(batch, heads, kv_heads, queries, keys, head_dim, **mask).flops)
    (queries, heads, head_dim), (keys, kv_heads, _) = q.shape, v.shape
    given = (queries, cu_q, used_q), (keys, cu_k, used_k)
    lengths = tuple(zip(*(lengths_of(*of_side) for of_side in given)))
    extents = (max(rows, sum(x)) for rows, x in zip((queries, keys), zip(*lengths) if lengths else ((), ())))
    return int(Problem(1, heads, kv_heads, *extents, head_dim, **mask, sequences=lengths).flops)


def lengths_of(total: int, cu: torch.Tensor, used: torch.Tensor | None = None) -> list[int]:
    """Those of packed sequences, read on the host."""
    sequences = cu.shape[0] - 1
    if not ops.has_values(cu):
        return [total // max(1, sequences)] * sequences
    return (cu.diff() if used is None else used).tolist()


@register_flop_formula(torch.ops.hopper_attention.attend, get_raw=True)
def forward_flops(q, k, v, *more, out_val=None, **named) -> int:
    return _flops("fwd", q, v, *more)


@register_flop_formula(torch.ops.hopper_attention.attend_backward, get_raw=True)
def backward_flops(do, q, k, v, o, lse, dlse=None, *more, out_val=None, **named) -> int:
    return _flops("bwd", q, v, *more)
