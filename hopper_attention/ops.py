"""The operators of `torch.ops.hopper_attention`: what PyTorch must know of the kernels.

forward(q, k, v, softmax_scale, causal, top_left, deterministic) → o, lse
backward(do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic) → dq, dk, dv

`functional.attention` says what they compute. All checks are in their implementation, so that a wrong input
gives the same error called eagerly or from a compiled graph; what tracing sees instead (`register_fake`) only
says what shapes come out.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.library import Library, register_fake, register_vmap
from torch.utils.flop_counter import register_flop_formula

from . import production
from .checks import check_flags, check_no_flags, check_one_device, check_scale, check_tensor
from .kernels.contract import Problem

library = Library("hopper_attention", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
library.define(
    "forward(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False, "
    "bool top_left=False, bool deterministic=False) -> (Tensor o, Tensor lse)",
    tags=TAGS,
)
library.define(
    "backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse=None, "
    "float? softmax_scale=None, bool causal=False, bool top_left=False, bool deterministic=False) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    tags=TAGS,
)
forward = torch.ops.hopper_attention.forward.default
backward = torch.ops.hopper_attention.backward.default
below_autograd = torch._C._AutoDispatchBelowAutograd
are_deterministic, is_grad_enabled = torch._C._get_deterministic_algorithms, torch.is_grad_enabled


# ---- what runs --------------------------------------------------------------------------------------------


def run_forward(
    q, k, v, softmax_scale=None, causal=False, top_left=False, deterministic=False, with_lse=True
):
    return production.forward(q, k, v, softmax_scale, causal, top_left, with_lse)


def run_backward(
    do, q, k, v, o, lse, dlse=None, softmax_scale=None, causal=False, top_left=False, deterministic=False
):
    deterministic = deterministic or are_deterministic()
    return production.backward(do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic)


# For every device: what is not on a Hopper GPU is refused with the device's name.
library.impl("forward", run_forward, "CompositeExplicitAutograd")
library.impl("backward", run_backward, "CompositeExplicitAutograd")


# ---- shapes, for tracing ----------------------------------------------------------------------------------


IN_GRAPHS: dict[OpOverload, Callable] = {}  # what a compiled graph calls in an operator's place


def check_traced(*given: object) -> None:
    """What every shape for tracing begins with: one device, and Inductor, which traces before it lowers, is
    told what to call."""
    check_one_device(*given)
    if "torch._inductor.lowering" in sys.modules:
        with contextlib.suppress(ImportError, AttributeError, TypeError):  # another calls the operators
            from .integrations import inductor

            for operator, call in IN_GRAPHS.items():
                inductor.call_in_place_of(operator, call)


@register_fake("hopper_attention::forward", lib=library)
def fake_forward(q, k, v, softmax_scale=None, causal=False, top_left=False, deterministic=False):
    check_traced(q, k, v)
    o = torch.empty_strided((*q.shape[:-1], *v.shape[-1:]), q.stride(), dtype=q.dtype, device=q.device)
    return torch.empty_like(o), q.new_empty(q.shape[:3], dtype=torch.float32)


@register_fake("hopper_attention::backward", lib=library)
def fake_backward(
    do, q, k, v, o, lse, dlse=None, softmax_scale=None, causal=False, top_left=False, deterministic=False
):
    check_traced(do, q, k, v, o, lse, dlse)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# ---- gradients --------------------------------------------------------------------------------------------


# Not `Function`, whose `apply` goes through functorch's stack, where the dispatcher has been already when it
# comes to an operator's Autograd kernel.
class Function(torch.autograd.function._SingleLevelFunction):
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


at_this_level = torch._functorch.utils.enable_single_level_autograd_function


class Attention(Function):
    """Forward by `forward`, gradients of o and of lse by `backward`, or where nothing would see these
    operators by what they run. The lse is handed out only if it is asked for: an output costs; so does an
    input, therefore `call` is all but the tensors."""

    @staticmethod
    def forward(ctx, call, q, k, v):
        direct, plan, with_lse, options = call
        if plan is not None:
            o, lse = production.forward(q, k, v, *options[:3], True, plan)
        elif direct:
            o, lse = run_forward(q, k, v, *options)
        else:
            with to_the_level_below(), below_autograd():
                o, lse = forward(q, k, v, *options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        return (o, lse) if with_lse else o

    @staticmethod
    def backward(ctx, do, dlse=None):
        q, k, v, o, lse = ctx.saved_tensors
        options = ctx.options
        # What `call_backward` would find, without its frames: in autograd's thread Python is cold.
        if dlse is None and do is not None and unwatched() and not is_grad_enabled():
            if (plan := production.recent_backward(do, q, k, v, o, lse, *options)) is not None:
                dq, dk, dv = production.backward(do, q, k, v, o, lse, None, *options, plan)
                return None, dq, dk, dv
        if do is None and dlse is None:
            return (None,) * 4
        do = torch.zeros_like(o) if do is None else do
        return None, *call_backward(do, q, k, v, o, lse, dlse, *options)


# What the engine calls: PyTorch's own `apply` only looks which of two names the method has.
Attention._backward_cls.apply = Attention.backward


class Gradients(Function):
    """`backward`, which has no gradient."""

    @staticmethod
    def forward(ctx, *inputs):
        with to_the_level_below(), below_autograd():
            return backward(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(
            "hopper_attention has no second derivatives: its gradients cannot be differentiated again"
        )


@contextlib.contextmanager
def to_the_level_below() -> Iterator[None]:
    """Autograd turns gradients off inside a Function. A transform of `torch.func` around this one must see
    them on, or it would take what is computed here for constant."""
    if not torch._C._are_functorch_transforms_active():
        yield
        return
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def refuse_tangents(*tensors: torch.Tensor) -> None:
    """Raise NotImplementedError in forward mode, which has no formula."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("hopper_attention has no forward-mode derivatives")


def know_subclass(x: torch.Tensor) -> None:
    """Only here is `torch.distributed.tensor`, a second to import, known to be imported already."""
    if type(x).__name__ == "DTensor":
        from .integrations import dtensor

        dtensor.register()


def differentiable_forward(q, k, v, softmax_scale=None, causal=False, top_left=False, deterministic=False):
    options = softmax_scale, causal, top_left, deterministic
    # What this operator is on other devices, somebody else may have registered.
    if q.is_cuda and unwatched() and (found := directly(q, k, v, *options, True)) is not None:
        return found
    if type(q) is not torch.Tensor:
        know_subclass(q)
    refuse_tangents(q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        with at_this_level():
            return Attention.apply((False, None, True, options), q, k, v)
    with below_autograd():
        return forward(q, k, v, *options)


def differentiable_backward(
    do, q, k, v, o, lse, dlse=None, softmax_scale=None, causal=False, top_left=False, deterministic=False
):
    inputs = do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic
    nested = any(x is not None and x.is_nested for x in inputs[:7])
    if q.is_cuda and not nested and unwatched() and (found := directly_backward(*inputs)) is not None:
        return found
    if type(q) is not torch.Tensor:
        know_subclass(q)
    refuse_tangents(*(x for x in inputs[:7] if x is not None))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:7]):
        with at_this_level():
            return Gradients.apply(*inputs)
    with below_autograd():
        return backward(*inputs)


# Bound once: each is asked in every call.
is_compiling, autocasts, profiles = (
    torch.compiler.is_dynamo_compiling,
    torch._C._is_any_autocast_enabled,
    torch._C._autograd._profiler_enabled,
)
dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
transforms, tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
is_batched = torch._C._functorch.is_legacy_batchedtensor


def unwatched() -> bool:
    """Whether nothing would see an operator that a plan's check does not show: no compiler, mode, profiler
    or tangent. Of modes it sees a user's, but neither fake tensors nor a trace."""
    if is_compiling() or function_modes() or dispatch_modes() or profiles():
        return False
    return forward_ad._current_level < 0


def undispatched(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing would see an operator on these that does show: no autocast, transform or trace, and
    only tensors that are what they seem, not all on the meta device."""
    return (
        not (autocasts() or transforms())
        and tracing() is None
        and all(map(is_plain, tensors))
        and not all(x is None or x.is_meta for x in tensors)
    )


def unseen(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing there would see an operator called on these."""
    return unwatched() and undispatched(*tensors)


def is_plain(x: torch.Tensor | None) -> bool:
    """Whether a kernel can take x as it is: there are subclasses, nested tensors, views whose sign is still
    to be turned, and from autograd also tensors of zeros that are nowhere, and, for `is_grads_batched`,
    tensors with a hidden dimension."""
    if x is None:
        return True
    special = x.is_nested or is_batched(x) or x._is_zerotensor() or x.is_neg()
    return type(x) is torch.Tensor and not special


def call_forward(q, k, v, softmax_scale, causal, top_left, deterministic, with_lse=True):
    """`forward`, but where nothing would see it without the dispatcher, whose way to Python and back takes as
    long as all the rest. Without `with_lse` there may be None in the place of lse."""
    if softmax_scale is not None and type(softmax_scale) is not float:
        (check_no_flags if is_compiling() else check_scale)(softmax_scale=softmax_scale)
    if type(causal) is type(top_left) is type(deterministic) is bool and unwatched():
        found = directly(q, k, v, softmax_scale, causal, top_left, deterministic, with_lse)
        if found is not None:
            return found
    if not is_compiling():
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, x)
    check_flags(causal=causal, top_left=top_left, deterministic=deterministic)
    return forward(q, k, v, softmax_scale, causal, top_left, deterministic)


def directly(q, k, v, softmax_scale, causal, top_left, deterministic, with_lse):
    """o, and lse or None; or None where something would see the operator. A call like one before, found by
    its plan, would be dispatched as that was."""
    if q.is_nested or k.is_nested or v.is_nested:
        return None
    learns = is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    plan = production.recent_forward(q, k, v, softmax_scale, causal, top_left, with_lse or learns)
    if plan is None and not undispatched(q, k, v):
        return None
    if learns:
        call = True, plan, with_lse, (softmax_scale, causal, top_left, deterministic)
        found = Attention.apply(call, q, k, v)
        return found if with_lse else (found, None)
    if plan is None:
        return run_forward(q, k, v, softmax_scale, causal, top_left, deterministic, with_lse)
    return production.forward(q, k, v, softmax_scale, causal, top_left, with_lse, plan)


def call_backward(do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic):
    """`backward`, as `call_forward` is `forward`. None of the tensors is nested."""
    inputs = do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic
    if type(causal) is type(top_left) is type(deterministic) is bool and unwatched():
        check_scale(softmax_scale)
        found = directly_backward(*inputs)
        if found is not None:
            return found
    return backward(*inputs)


def directly_backward(do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic):
    """dq, dk and dv, or None where something would see the operator, gradients of gradients among it."""
    inputs = do, q, k, v, o, lse
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, dlse)):
        return None
    options = softmax_scale, causal, top_left, deterministic
    plan = production.recent_backward(*inputs, *options) if dlse is None else None
    if plan is not None:
        return production.backward(*inputs, None, *options, plan)
    if not undispatched(*inputs, dlse):
        return None
    return run_backward(*inputs, dlse, *options)


library.impl("forward", differentiable_forward, "Autograd")
library.impl("backward", differentiable_backward, "Autograd")


# ---- what compiled graphs call, by these names, which Inductor keeps on disk (`integrations.inductor`) -----


def forward_in_graph(q, k, v, softmax_scale=None, causal=False, top_left=False, deterministic=False):
    options = softmax_scale, causal, top_left, deterministic
    if q.is_cuda and unwatched() and (found := directly(q, k, v, *options, True)) is not None:
        return found
    return forward(q, k, v, *options)


def backward_in_graph(
    do, q, k, v, o, lse, dlse=None, softmax_scale=None, causal=False, top_left=False, deterministic=False
):
    inputs = do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic
    if q.is_cuda and unwatched() and (found := directly_backward(*inputs)) is not None:
        return found
    return backward(*inputs)


IN_GRAPHS |= {forward: forward_in_graph, backward: backward_in_graph}


# ---- no gradients -----------------------------------------------------------------------------------------


def learns(*given: object) -> bool:
    """Whether autograd would want a gradient of one of these."""
    return is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether an operator on these may be computed past the dispatcher, and gives no gradient."""
    return unseen(*tensors) and not learns(*tensors)


def refuse_gradients(operator: OpOverload, *given: object) -> None:
    """Raise NotImplementedError where autograd would want a gradient of one of these, or a tangent."""
    if learns(*given):
        raise NotImplementedError(
            f"hopper_attention's {operator.__name__.partition('.')[0]} has no gradient: call it under "
            "torch.no_grad() or on detached tensors"
        )
    refuse_tangents(*(x for x in given if isinstance(x, torch.Tensor)))


# ---- autocast, vmap, FLOPs --------------------------------------------------------------------------------


CAST = torch.float32, torch.bfloat16, torch.float16


def autocast_on(device: str, operator: OpOverload) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The operator with q, k and v in autocast's type, as `scaled_dot_product_attention` takes them, of the
    types that autocast is about; float64 and whatever else it is given stay."""

    def cast(q, k, v, *rest):
        to = torch.get_autocast_dtype(device)
        with torch.amp.autocast(device, enabled=False):
            return operator(*(x.to(to) if x.dtype in CAST else x for x in (q, k, v)), *rest)

    return cast


library.impl("forward", autocast_on("cuda", forward), "AutocastCUDA")


def _batched(x, at, size: int):
    """x with the mapped dimension in front of the batch, and merged with it."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if at is None else x.movedim(at, 0)
    return x.flatten(0, 1)


def _unbatched(outputs, size: int, x, at: int | None):
    """Outputs with the mapped dimension apart again: of `size`, beside what is left of x's batch."""
    batch = x.shape[0 if at != 0 else 1]
    return tuple(o.unflatten(0, (size, batch)) for o in outputs)


def vmap_with(operator, info, in_dims, inputs, options):
    """q, k and v with the mapped dimension as a part of the batch."""
    merged = (_batched(x, at, info.batch_size) for x, at in zip(inputs, in_dims))
    return _unbatched(operator(*merged, *options), info.batch_size, inputs[0], in_dims[0]), (0, 0)


@register_vmap("hopper_attention::forward", lib=library)
def vmap_forward(info, in_dims, q, k, v, *options):
    return vmap_with(forward, info, in_dims, (q, k, v), options)


@register_vmap("hopper_attention::backward", lib=library)
def vmap_backward(info, in_dims, do, q, k, v, o, lse, dlse=None, *options, **more):
    inputs = [_batched(x, at, info.batch_size) for x, at in zip((do, q, k, v, o, lse, dlse), in_dims)]
    inputs[5] = inputs[5].contiguous()
    return _unbatched(backward(*inputs, *options, **more), info.batch_size, q, in_dims[1]), (0, 0, 0)


def has_values(x: torch.Tensor) -> bool:
    return not (isinstance(x, torch._subclasses.FakeTensor) or x.is_meta)


def _flops(q_shape, v_shape, causal: bool, top_left: bool, direction: str) -> int:
    (batch, heads, seqlen_q, head_dim), (_, kv_heads, seqlen_kv, of_values) = q_shape, v_shape
    shape = batch, heads, kv_heads, seqlen_q, seqlen_kv, head_dim
    more = {"value_dim": of_values} if of_values != head_dim else {}
    return int(Problem(*shape, causal, top_left=top_left, direction=direction, **more).flops)


@register_flop_formula(torch.ops.hopper_attention.forward)
def forward_flops(
    q, k, v, softmax_scale=None, causal=False, top_left=False, deterministic=False, *, out_shape=None, **_
) -> int:
    """Of what a mask leaves over, half of all for a square causal one (FlashAttention's convention)."""
    return _flops(q, v, causal, top_left, "fwd")


@register_flop_formula(torch.ops.hopper_attention.backward)
def backward_flops(
    do, q, k, v, o, lse, dlse=None, softmax_scale=None, causal=False, top_left=False, deterministic=False,
    *, out_shape=None, **_,
) -> int:  # fmt: skip
    return _flops(q, v, causal, top_left, "bwd")
