"""Attention of a sequence that lies on several GPUs: `context_parallel_attention`.

Tokens lie, and blocks of scores are computed, as `zigzag` says. A rank is sent only those keys that its
queries see, on a stream of their own while the step before computes. What a step gives is merged into O and
LSE; a step's dK and dV go straight home in fp32, and are added there (`block_gradients`).

Everything here runs on `torch.distributed`: copy engines between GPUs of one host (`copy_engines`), else
NCCL, or in tests gloo.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.library import register_fake
from torch.utils.flop_counter import register_flop_formula

from .. import ops, ops_policies, tuned
from ..checks import (
    check_layouts,
    check_one_device,
    check_packing,
    check_scale,
    check_tensor,
    general_problem_of,
)
from ..kernels import calls
from ..kernels.contract import BYTES_PER_ELEMENT, Problem
from ..policies import as_batch
from . import copy_engines, merging, packed_ring
from .block_gradients import (
    WHOLE_ROWS,
    Gradients,
    Inputs,
    OneByOne,
    gradients_of,
    packed,
    packed_shape,
)
from .exchange import Exchange
from .zigzag import Rows, Step, Turn, arrivals, backward_schedule, first_heads, schedule, shard, unshard

__all__ = ["context_parallel_attention", "shard", "unshard"]
NAME = "context_parallel_attention"


# ---- what travels -----------------------------------------------------------------------------------------


def exchange_for(group: dist.ProcessGroup, k: torch.Tensor, v: torch.Tensor) -> Exchange:
    """By copy engines where they reach every rank, else by the group's communicator; by that also what a CUDA
    graph captures, since copies count their messages. Collective for the first call of a group."""
    if not k.is_cuda or dist.get_world_size(group) == 1 or torch.cuda.is_current_stream_capturing():
        return Exchange(group)
    if not copy_engines.usable(group, k.device):
        return Exchange(group)
    return copy_engines.CopyExchange(group, largest_messages(k, v))


def largest_messages(k: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    """Bytes of the largest message of each kind: K and V, and dK and dV in fp32, of halves in whole tiles."""
    batch, heads, tokens, _ = k.shape
    columns = k.shape[3] + v.shape[3]
    padded = 2 * WHOLE_ROWS * -(-tokens // (2 * WHOLE_ROWS))
    of = lambda rows, element: batch * heads * rows * columns * element + 2 * copy_engines.ALIGNED
    return {"keys": of(tokens, BYTES_PER_ELEMENT), "gradients": of(padded, 4)}


def _fetch_keys(step: Step, i: int, exchange: Exchange, causal: bool, k, v):
    """Post step i's transfer: this rank's keys to the rank i behind it, and its own of that step."""
    to = (exchange.rank + i) % exchange.ranks
    theirs = schedule(to, exchange.ranks, causal)[i].keys
    sent = [packed(theirs.of(x)) for x in (k, v)]
    wait = exchange.post("keys", to, sent, step.source, [packed_shape(x, step.keys) for x in (k, v)])
    return lambda: [x.transpose(1, 2) for x in wait()]


def _send_home(step: Step, i: int, exchange: Exchange, causal: bool, sent, gradients: Gradients):
    """Post step i's dK and dV to the rank whose keys they are of; what arrives, once the result is called, is
    added to this rank's own: it is from the rank i behind it."""
    source = (exchange.rank + i) % exchange.ranks
    mine = schedule(source, exchange.ranks, causal)[i].keys
    wait = exchange.post("gradients", step.source, sent, source, gradients.shapes(mine))
    return lambda: gradients.add_arrived(mine, wait())


# ---- both passes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """What computes a block, with the arguments of the operator, merges two results, and adds gradients."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gradients: Callable[[Inputs, list[Turn], dict[Rows, int]], Gradients]
    merge: Callable[..., None] = merging.merge


OURS = Kernels(ops.forward, gradients_of)


def one_by_one(forward, backward, merge=merging.merge) -> Kernels:
    """Those of a pair of operators."""
    return Kernels(forward, functools.partial(OneByOne, backward=backward), merge)


def ring_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exchange: Exchange,
    softmax_scale: float | None = None,
    causal: bool = True,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of a rank's own queries, over the keys of all."""
    kernels = kernels or OURS
    steps = schedule(exchange.rank, exchange.ranks, causal)
    sums: dict[Rows, MergedRows] = {}
    keys = k, v
    for i, step in enumerate(steps):
        more = i + 1 < len(steps)
        fetched = _fetch_keys(steps[i + 1], i + 1, exchange, causal, k, v) if more else None
        o_, lse_ = kernels.forward(step.queries.of(q), *keys, softmax_scale, step.causal)
        if i == 0:
            o, lse = o_, lse_
            for half in Rows.BOTH.halves:
                terms = sum(half in x.queries.halves for x in steps)
                sums[half] = MergedRows(half.of(o), half.of(lse), terms, kernels.merge)
        else:
            for half in step.queries.halves:
                of = half if step.queries is Rows.BOTH else Rows.BOTH
                sums[half].add(of.of(o_), of.of(lse_))
        if fetched:
            keys = fetched()
    exchange.finish()
    return o, lse


def ring_backward(
    inputs: Inputs, exchange: Exchange, causal: bool = True, kernels: Kernels | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of a rank's own rows, from o and lse as `ring_forward` gave them."""
    rank, ranks, k, v = exchange.rank, exchange.ranks, inputs.k, inputs.v
    batch, kv_heads, tokens, _ = k.shape
    # Heads of one batch are a slice of scratch; of more batches they stay together.
    first = first_heads(kv_heads, tokens * inputs.q.shape[1] // kv_heads) if batch == 1 else kv_heads
    turns = backward_schedule(rank, ranks, causal, kv_heads, first)
    gradients = (kernels or OURS).gradients(inputs, turns, arrivals(rank, ranks, causal))
    keys, homing = (k, v), None
    for i, turn in enumerate(turns):
        more = i + 1 < ranks
        fetched = _fetch_keys(turns[i + 1].step, i + 1, exchange, causal, k, v) if more else None
        arrived, homing = homing, None
        if turn.step.source == rank:
            gradients.add_own(turn)
        else:
            sent = gradients.add_foreign(turn.step, *keys)
            homing = _send_home(turn.step, i, exchange, causal, sent, gradients)
        if arrived:
            arrived()
        if fetched:
            keys = fetched()
    if homing:
        homing()
    exchange.finish()
    return gradients.finish()


class MergedRows:
    """O and LSE of some rows, of which `terms` parts come, the first of them in o and lse already. Between
    the second and the last they are kept in fp32: every part is rounded once, and the result."""

    def __init__(self, o: torch.Tensor, lse: torch.Tensor, terms: int, merge: Callable[..., None]):
        self.o, self.lse, self.left, self.merge = o, lse, terms - 1, merge
        self.running = o

    def add(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        self.left -= 1
        before = self.running
        if self.left == 0:
            self.running = self.o
        elif before is self.o:
            self.running = torch.empty_like(self.o, dtype=torch.float32)
        self.merge(before, self.lse, o, lse, self.running)


# ---- before the first launch ------------------------------------------------------------------------------

_agreed: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[object]]" = weakref.WeakKeyDictionary()


def check_agreement(
    q, k, v, group: dist.ProcessGroup, softmax_scale, causal: bool, deterministic: bool, sm_margin: int,
    cu_seqlens: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ValueError, the same on every rank, unless all ranks bring problems of one kind that the kernels
    take. Ranks ask each other once for each kind. A rank that does not come is an error after the group's
    timeout, and so is one that brings a kind which has been before where others bring a new one."""
    known = _agreed.setdefault(group, set())
    tensors = {"q": q, "k": k, "v": v} | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})
    options = {
        "softmax_scale": softmax_scale, "causal": causal, "deterministic": deterministic,
        "sm_margin": sm_margin,
    }  # fmt: skip
    layout = _reason_against_layouts(q, k, v)
    kind = (*((x.shape, x.dtype, x.device) for x in tensors.values()), *options.values(), layout)
    if kind in known:
        return
    reason = _reason_against(q, k, v, cu_seqlens, softmax_scale, causal, sm_margin) or layout
    shapes = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors.items()]
    mine = ", ".join(shapes + [f"{name} {x}" for name, x in options.items()]), reason
    everyone: list[tuple[str, str | None]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if refused := [(rank, why) for rank, (_, why) in enumerate(everyone) if why]:
        rank, why = refused[0]
        raise ValueError(f"{NAME}, on rank {rank}: {why}")
    if len({what for what, _ in everyone}) > 1:
        said = "; ".join(f"rank {rank}: {what}" for rank, (what, _) in enumerate(everyone))
        raise ValueError(
            f"{NAME}: ranks must bring parts of one shape and type with the same options, not {said}"
        )
    known.add(kind)


def _reason_against(q, k, v, cu_seqlens, softmax_scale, causal: bool, sm_margin: int) -> str | None:
    """Why a rank's parts are refused, or None."""
    is_packed = cu_seqlens is not None
    if q.dim() == 3 and not is_packed:
        return "packed sequences, (total, heads, head_dim), come with their cu_seqlens"
    try:
        problem = general_problem_of(q, k, v, causal, False, packed=is_packed)
        if is_packed:
            check_packing(q, cu_seqlens, cu_seqlens, None, None)
        check_scale(softmax_scale, problem.head_dim)
        tuned.check_margin(sm_margin)
    except (TypeError, ValueError) as error:
        return str(error)
    if problem.seqlen_q != problem.seqlen_kv:
        counts = f"q has {problem.seqlen_q} tokens and k has {problem.seqlen_kv}"
        return f"{counts}: a rank's queries and keys are of the same tokens"
    if problem.value_dim is not None:
        return f"takes values of head_dim {problem.head_dim}, not of {problem.value_dim}"
    if not is_packed and not (problem.batch and problem.heads):
        return f"there is nothing to attend: {problem.batch} batches of {problem.heads} heads"
    if problem.seqlen_q % 2 or not problem.seqlen_q or not problem.heads:
        chunks = "of each sequence" if is_packed else "of one length"
        return f"a rank holds two chunks {chunks}, and {problem.seqlen_q} tokens are not that"
    return calls.refuse_forward(problem)


def _reason_against_layouts(q, k, v) -> str | None:
    """Why a rank's parts are refused for how they lie in memory, or None."""
    try:
        check_layouts(**{name: x for name, x in (("q", q), ("k", k), ("v", v)) if x.dim()})
    except ValueError as error:
        return str(error)
    return None


# ---- the operators and their gradient ---------------------------------------------------------------------

OPTIONS = (
    "str group, float? softmax_scale=None, bool causal=True, bool deterministic=False, int sm_margin=0, "
    "Tensor? cu_seqlens=None"
)
ops.library.define(
    f"context_forward(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor o, Tensor lse)", tags=ops.TAGS
)
ops.library.define(
    "context_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, "
    f"{OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=ops.TAGS,
)
context_forward = torch.ops.hopper_attention.context_forward.default
context_backward = torch.ops.hopper_attention.context_backward.default


def _group_of(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def _device_of(x: torch.Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def run_forward(
    q, k, v, group, softmax_scale=None, causal=True, deterministic=False, sm_margin=0, cu_seqlens=None
):
    found = _group_of(group)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()  # what backward will be
    check_agreement(q, k, v, found, softmax_scale, causal, deterministic, sm_margin, cu_seqlens)
    with tuned.leaving(sm_margin), _device_of(q):
        if cu_seqlens is None:
            return ring_forward(q, k, v, exchange_for(found, k, v), softmax_scale, causal)
        packing = packed_ring.Packing(cu_seqlens, q.shape[0], found.size())
        q, k, v = (as_batch(packing.halves(x)) for x in (q, k, v))
        kernels = packing.kernels(Kernels, OURS.merge)
        o, lse = ring_forward(q, k, v, exchange_for(found, k, v), softmax_scale, causal, kernels)
        return packing.unpacked(o), packing.unpacked_lse(lse)


def run_backward(
    do, q, k, v, o, lse, dlse, group, softmax_scale=None, causal=True, deterministic=False, sm_margin=0,
    cu_seqlens=None,
):  # fmt: skip
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    found = _group_of(group)
    with tuned.leaving(sm_margin), _device_of(q):
        if cu_seqlens is None:
            inputs = Inputs(do, q, k, v, o, lse, dlse, softmax_scale, deterministic)
            return ring_backward(inputs, exchange_for(found, k, v), causal)
        packing = packed_ring.Packing(cu_seqlens, q.shape[0], found.size())
        do, q, k, v, o = (as_batch(packing.halves(x)) for x in (do, q, k, v, o))
        lse, dlse = (x if x is None else packing.repacked_lse(x) for x in (lse, dlse))
        inputs = Inputs(do, q, k, v, o, lse, dlse, softmax_scale, deterministic)
        kernels = packing.kernels(Kernels, OURS.merge)
        return tuple(map(packing.unpacked, ring_backward(inputs, exchange_for(found, k, v), causal, kernels)))


ops.library.impl("context_forward", run_forward, "CompositeExplicitAutograd")
ops.library.impl("context_backward", run_backward, "CompositeExplicitAutograd")


@register_fake("hopper_attention::context_forward", lib=ops.library)
def fake_forward(q, k, v, *options, **named):
    check_one_device(q, k, v, *options, *named.values())
    shape = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)


@register_fake("hopper_attention::context_backward", lib=ops.library)
def fake_backward(do, q, k, v, *rest, **named):
    check_one_device(do, q, k, v, *rest, *named.values())
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _flops(direction: str, q, k, group: str, causal: bool, cu_seqlens: torch.Tensor | None) -> int:
    """Of a rank: its part of the whole sequences'. Lengths are read here."""
    ranks = _group_of(group).size()
    if cu_seqlens is None:
        (batch, heads, tokens, head_dim), kv_heads = q.shape, k.shape[1]
        lengths = [tokens * ranks]
    else:
        (tokens, heads, head_dim), kv_heads, batch = q.shape, k.shape[1], 1
        lengths = ops_policies.lengths_of(tokens * ranks, cu_seqlens)
    flops = (
        Problem(batch, heads, kv_heads, n, n, head_dim, causal, direction=direction).flops for n in lengths
    )
    return int(sum(flops) / ranks)


@register_flop_formula(torch.ops.hopper_attention.context_forward, get_raw=True)
def forward_flops(
    q, k, v, group, softmax_scale=None, causal=True, deterministic=False, sm_margin=0, cu_seqlens=None, *,
    out_val=None,
) -> int:  # fmt: skip
    return _flops("fwd", q, k, group, causal, cu_seqlens)


@register_flop_formula(torch.ops.hopper_attention.context_backward, get_raw=True)
def backward_flops(
    do, q, k, v, o, lse, dlse, group, softmax_scale=None, causal=True, deterministic=False, sm_margin=0,
    cu_seqlens=None, *, out_val=None,
) -> int:  # fmt: skip
    return _flops("bwd", q, k, group, causal, cu_seqlens)


class ContextAttention(torch.autograd.Function):
    """Forward by `context_forward`, gradients of o and lse by `context_backward`."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, *options):
        o, lse = context_forward(q, k, v, *options, cu_seqlens)
        ctx.options = options
        ctx.save_for_backward(q, k, v, o, lse, cu_seqlens)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, o, lse, cu_seqlens = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        found = context_backward(do, q, k, v, o, lse, dlse, *ctx.options, cu_seqlens)
        return *found, None, *(None for _ in ctx.options)


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` of a sequence whose tokens lie on the ranks of a process group, by default all.

    q, k, v: this rank's part of the sequence, as `shard` cuts it: (batch, heads, tokens, head_dim), as
    `attention` takes them; a multiple of 2 tokens, the same on every rank. Returns o like q and, with
    `return_lse`, the LSE of its rows over all keys, fp32 (batch, heads, tokens). Every rank must call it, and
    every rank must call backward or none. k and v travel without a copy where memory holds them (batch,
    tokens, heads, head_dim), of one batch.

    With `cu_seqlens`, int32 (n + 1,) on the GPU, they are of n sequences packed behind one another, as
    `packed_ring.shard` cuts them: (tokens, heads, head_dim), with the LSE (heads, tokens). `cu_seqlens` say
    where each whole sequence begins, and where the last ends; every length is a multiple of 2·ranks, which is
    not looked at, as nothing is of what they hold. Rows behind the last sequence may hold anything.

    Kernels leave `sm_margin` SMs to the communicator. Under autocast q, k and v are cast to its type. The
    rest as in `attention`. Raises ValueError before anything is launched: the same on every rank where any
    rank's input is refused or ranks disagree about a call that is new to all of them.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError(f"{NAME} needs torch.distributed: call init_process_group first")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    options = group.group_name, softmax_scale, causal, deterministic, sm_margin
    o, lse = ContextAttention.apply(q, k, v, cu_seqlens, *options)
    return (o, lse) if return_lse else o
