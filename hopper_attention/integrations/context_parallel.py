"""Attention of a sequence that lies on several GPUs: `context_parallel_attention`.

A sequence of N tokens is cut into 2P chunks for P ranks. Rank r holds chunks r and 2P−1−r, its *halves*
(`shard`, `unshard`), so that under a causal mask all ranks have the same work. In step i a rank computes its
queries with the keys of the rank i before it, of which it is sent only the halves that its queries see, on
the communicator's stream while the step before computes (`schedule`). What a step gives is merged into O and
LSE; a step's dK and dV go straight home, in the kernel's type, and are added there in fp32.

Everything here runs on `torch.distributed`: NCCL, or in tests gloo.
"""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.library import register_fake
from torch.utils.flop_counter import register_flop_formula

from .. import ops, tuned
from ..checks import check_scale, check_tensor, problem_of
from ..kernels.contract import Problem
from . import copy_engines, merging, partial
from .exchange import Exchange

NAME = "context_parallel_attention"
SEQUENCE = 2  # the dimension of q, k and v that is cut
ALL = slice(None)


# ---- the schedule: who computes what, when ----------------------------------------------------------------


class Rows(IntEnum):
    """Of a rank's two chunks: the first, the second, or both."""

    FIRST = 0
    SECOND = 1
    BOTH = 2

    def of(self, x: torch.Tensor, dim: int = SEQUENCE) -> torch.Tensor:
        half = x.shape[dim] // 2
        start, length = {0: (0, half), 1: (half, half), 2: (0, 2 * half)}[self]
        return x.narrow(dim, start, length)

    @property
    def halves(self) -> tuple["Rows", ...]:
        return (Rows.FIRST, Rows.SECOND) if self is Rows.BOTH else (self,)


class Step(NamedTuple):
    """One block of scores: a rank's own `queries` with `keys` of rank `source`. `causal` masks inside the
    block, aligned at the top left."""

    source: int
    queries: Rows
    keys: Rows
    causal: bool


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two of 2·ranks chunks of a sequence that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def schedule(rank: int, ranks: int, causal: bool) -> list[Step]:
    """A rank's steps; in step i its keys come from the rank i before it.

    Under a causal mask a rank's own chunks, one behind the other, are masked like one sequence. Of keys from
    a lower rank all queries see the first half and none the second, which lies behind both; those from a
    higher rank lie between the two halves of queries: the second sees all, the first none. Each step is
    2·chunk² scores (the first half of (2·chunk)²), whatever the rank.
    """
    steps = [Step(rank, Rows.BOTH, Rows.BOTH, causal)]
    for i in range(1, ranks):
        source = (rank - i) % ranks
        if not causal:
            steps.append(Step(source, Rows.BOTH, Rows.BOTH, False))
        elif source < rank:
            steps.append(Step(source, Rows.BOTH, Rows.FIRST, False))
        else:
            steps.append(Step(source, Rows.SECOND, Rows.BOTH, False))
    return steps


def backward_schedule(rank: int, ranks: int, causal: bool, tail: bool) -> list[Step]:
    """`schedule`; with `tail` a part of the rank's own block comes last, so that there is something to
    compute while the last dK and dV go home: the keys of its second half."""
    steps = schedule(rank, ranks, causal)
    if not tail or ranks == 1:
        return steps
    first = Step(rank, Rows.BOTH, Rows.FIRST, causal)
    last = Step(rank, Rows.SECOND if causal else Rows.BOTH, Rows.SECOND, causal)
    return [first, *steps[1:], last]


# ---- where a sequence's tokens lie ------------------------------------------------------------------------


def shard(x: torch.Tensor, rank: int, ranks: int, dim: int = SEQUENCE) -> torch.Tensor:
    """A rank's part of a whole sequence along `dim`: its two chunks, one behind the other. Raises ValueError
    unless the length is a multiple of 2·ranks."""
    if x.shape[dim] % (2 * ranks):
        raise ValueError(
            f"{ranks} ranks hold two chunks of a sequence each: its length must be a multiple of "
            f"{2 * ranks}, not {x.shape[dim]}"
        )
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, ranks)], dim)


def unshard(parts: list[torch.Tensor], dim: int = SEQUENCE) -> torch.Tensor:
    """The whole sequence from every rank's part, in the order of ranks: `shard` undone."""
    chunks: list[torch.Tensor | None] = [None] * (2 * len(parts))
    for rank, part in enumerate(parts):
        for i, chunk in zip(chunks_of(rank, len(parts)), part.chunk(2, dim)):
            chunks[i] = chunk
    return torch.cat(chunks, dim)


# ---- what travels -----------------------------------------------------------------------------------------


def exchange_for(group: dist.ProcessGroup, k: torch.Tensor, v: torch.Tensor) -> Exchange:
    """By copy engines where they reach every rank, else by the group's communicator; by that also what a CUDA
    graph captures, since copies count their messages. Collective for the first call of a group."""
    if not k.is_cuda or dist.get_world_size(group) == 1 or torch.cuda.is_current_stream_capturing():
        return Exchange(group)
    return copy_engines.CopyExchange(group, k, v) if copy_engines.usable(group, k.device) else Exchange(group)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, head_dim) as it travels: (batch, rows, heads, head_dim), contiguous. A copy only
    where memory does not hold it so."""
    return x.transpose(1, 2).contiguous()


def _packed_shape(x: torch.Tensor, rows: Rows) -> torch.Size:
    batch, heads, seqlen, head_dim = x.shape
    return torch.Size((batch, seqlen if rows is Rows.BOTH else seqlen // 2, heads, head_dim))


def _fetch_keys(i: int, steps: list[Step], exchange: Exchange, causal: bool, k, v):
    """Post step i's transfer: this rank's keys to the rank i behind it, and its own of that step."""
    to = (exchange.rank + i) % exchange.ranks
    theirs = schedule(to, exchange.ranks, causal)[i].keys
    sent = [_packed(theirs.of(x)) for x in (k, v)]
    shapes = [_packed_shape(x, steps[i].keys) for x in (k, v)]
    wait = exchange.post("keys", to, sent, steps[i].source, shapes)
    return lambda: [x.transpose(1, 2) for x in wait()]


# ---- both passes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """What computes a block, with the arguments of the operators, merges two results, and adds gradients."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    merge: Callable[..., None] = merging.merge
    sums: type["SummedRows"] | None = None  # another way to add gradients
    of_others: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
    """What computes gradients of blocks with keys from elsewhere, if it is not `backward`."""


OURS = Kernels(ops.forward, partial.backward)
# A rank's own block in fp32, others rounded: half the bytes home, and less to convert.
ROUNDED = Kernels(ops.forward, partial.backward, of_others=ops.backward)


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
        fetched = _fetch_keys(i + 1, steps, exchange, causal, k, v) if more else None
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
    return o, lse


def ring_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    exchange: Exchange,
    softmax_scale: float | None = None,
    causal: bool = True,
    deterministic: bool = False,
    kernels: Kernels | None = None,
    tail: bool = False,
    split: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of a rank's own rows, from o and lse as `ring_forward` gave them. The last keys' heads
    are computed in `split` parts. `tail` as in `backward_schedule`: measured, it costs more than it hides
    (notes/context_parallel.md)."""
    kernels, rank, ranks = kernels or OURS, exchange.rank, exchange.ranks
    steps = backward_schedule(rank, ranks, causal, tail)
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    dq_sums, dk_sums, dv_sums = (
        {half: (kernels.sums or SummedRows)(half.of(x), terms[half]) for half in terms}
        for x, terms in zip(gradients, _terms(steps, rank, ranks, causal))
    )
    # Made once: a half's rows of every tensor, and of the LSE, which kernels want contiguous, a copy.
    rows = {
        which: [which.of(x) for x in (do, q, o)]
        + [None if x is None else which.of(x).contiguous() for x in (lse, dlse)]
        for which in {step.queries for step in steps}
    }
    keys, homing = (k, v), []
    for i, step in enumerate(steps):
        own = step.source == rank
        fetched = _fetch_keys(i + 1, steps, exchange, causal, k, v) if i + 1 < ranks else None
        do_, q_, o_, lse_, dlse_ = rows[step.queries]
        k_, v_ = (step.keys.of(x) for x in (k, v)) if own else keys
        top_left = step.causal and q_.shape[SEQUENCE] != k_.shape[SEQUENCE]
        options = softmax_scale, step.causal, top_left, deterministic
        # Of the last keys from elsewhere some heads come first: they go home while the rest is computed.
        parts = heads_in_parts(q.shape[1], k.shape[1], split if not own and i == ranks - 1 else 1)
        for part, (of_q, of_k) in enumerate(parts):
            more = part + 1 < len(parts)
            inputs = do_[:, of_q], q_[:, of_q], k_[:, of_k], v_[:, of_k], o_[:, of_q]
            lses = [x if x is None else x[:, of_q].contiguous() for x in (lse_, dlse_)]
            backward = kernels.backward if own else kernels.of_others or kernels.backward
            dq, dk, dv = backward(*inputs, *lses, *options)
            arrived, homing = homing, []
            if own:
                _add(step.keys, dk_sums, dk)
                _add(step.keys, dv_sums, dv)
            else:
                like = [x[:, of_k] for x in (k, v)]
                homing = [(_send_home(i, step, exchange, causal, dk, dv, like), of_k, more)]
            _add(step.queries, dq_sums, dq, of_q, more)
            _add_arrived(arrived, dk_sums, dv_sums)
        if fetched:
            keys = fetched()
    _add_arrived(homing, dk_sums, dv_sums)
    return gradients


def heads_in_parts(heads: int, kv_heads: int, parts: int) -> list[tuple[slice, slice]]:
    """Query heads and their key heads in as many equal parts, or in one where that cannot be."""
    if kv_heads % parts:
        parts = 1
    part = lambda n, i: slice(n // parts * i, n // parts * (i + 1))
    return [(part(heads, i), part(kv_heads, i)) for i in range(parts)]


def _send_home(i: int, step: Step, exchange: Exchange, causal: bool, dk, dv, like):
    """Post a step's dK and dV to the rank whose keys they are of; what arrives is of this rank's own, from
    the rank i behind it."""
    source = (exchange.rank + i) % exchange.ranks
    mine = schedule(source, exchange.ranks, causal)[i].keys
    shapes = [_packed_shape(x, mine) for x in like]
    return mine, exchange.post("gradients", step.source, [_packed(x) for x in (dk, dv)], source, shapes)


def _add_arrived(homing, dk_sums, dv_sums) -> None:
    for (mine, wait), heads, more in homing:
        for sums, x in zip((dk_sums, dv_sums), wait()):
            _add(mine, sums, x.transpose(1, 2), heads, more)


def _terms(steps: list[Step], rank: int, ranks: int, causal: bool) -> tuple[dict[Rows, int], ...]:
    """Of how many steps, this rank's or another's, each half's dq, dk and dv are sums."""
    others = [schedule(r, ranks, causal)[(r - rank) % ranks] for r in range(ranks) if r != rank]
    own = [step for step in steps if step.source == rank]
    count = lambda name, blocks: {
        half: sum(half in getattr(block, name).halves for block in blocks) for half in Rows.BOTH.halves
    }
    of_keys = count("keys", own + others)
    return count("queries", steps), of_keys, of_keys


def _add(
    rows: Rows, sums: dict[Rows, "SummedRows"], x: torch.Tensor, heads: slice = ALL, more: bool = False
) -> None:
    for half in rows.halves:
        sums[half].add(half.of(x) if rows is Rows.BOTH else x, heads, more)


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


class SummedRows:
    """A gradient of some rows, a sum of `terms` parts into `target`, in fp32 between the first and the
    last."""

    def __init__(self, target: torch.Tensor, terms: int):
        self.target, self.left = target, terms
        self.running: torch.Tensor | None = None

    def add(self, x: torch.Tensor, heads: slice = ALL, more: bool = False) -> None:
        """With `more`, the last part comes in parts of the heads, and this is not the last of them."""
        left = self.left - 1
        self.left -= not more
        if self.running is None:
            if left == 0:
                self.target[:, heads].copy_(x)
            else:
                self.running = x
        elif left == 0:  # computed in fp32, and rounded once
            torch.add(self.running[:, heads], x, out=self.target[:, heads])
        elif self.running.dtype == torch.float32:
            self.running.add_(x)
        else:
            self.running = self.running.to(torch.float32).add_(x)


# ---- before the first launch ------------------------------------------------------------------------------

_agreed: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[object]]" = weakref.WeakKeyDictionary()


def check_agreement(q, k, v, group: dist.ProcessGroup, softmax_scale, causal: bool) -> None:
    """Raise ValueError, the same on every rank, unless all ranks bring problems of one kind that the kernels
    take. Ranks ask each other once for each kind. A rank that does not come is an error after the group's
    timeout."""
    known = _agreed.setdefault(group, set())
    tensors = (q, k, v)
    kind = (*((x.shape, x.dtype, x.device) for x in tensors), softmax_scale, causal)
    if kind in known:
        return
    reason = _reason_against(q, k, v, softmax_scale, causal)
    shapes = ", ".join(f"{n} {tuple(x.shape)} {x.dtype}" for n, x in zip("qkv", tensors))
    mine = f"{shapes}, softmax_scale {softmax_scale}, causal {causal}", reason
    everyone: list[tuple[str, str | None]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if refused := [(rank, why) for rank, (_, why) in enumerate(everyone) if why]:
        rank, why = refused[0]
        raise ValueError(f"{NAME}, on rank {rank}: {why}")
    if len({what for what, _ in everyone}) > 1:
        said = "; ".join(f"rank {rank}: {what}" for rank, (what, _) in enumerate(everyone))
        raise ValueError(f"{NAME}: ranks must bring parts of one shape, type and mask, not {said}")
    known.add(kind)


def _reason_against(q, k, v, softmax_scale, causal: bool) -> str | None:
    try:
        problem = problem_of(q, k, v, causal)
        check_scale(softmax_scale, problem.head_dim)
    except (TypeError, ValueError) as error:
        return str(error)
    if problem.seqlen_q != problem.seqlen_kv:
        counts = f"q has {problem.seqlen_q} tokens and k has {problem.seqlen_kv}"
        return f"{counts}: a rank's queries and keys are of the same tokens"
    if problem.seqlen_q % 2 or not problem.seqlen_q:
        return f"a rank holds two chunks of one length, and {problem.seqlen_q} tokens are not that"
    return None


# ---- the operators and their gradient ---------------------------------------------------------------------

OPTIONS = "str group, float? softmax_scale=None, bool causal=True, bool deterministic=False, int sm_margin=0"
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


def run_forward(q, k, v, group, softmax_scale=None, causal=True, deterministic=False, sm_margin=0):
    found = _group_of(group)
    check_agreement(q, k, v, found, softmax_scale, causal)
    with tuned.leaving(sm_margin), _device_of(q):
        return ring_forward(q, k, v, exchange_for(found, k, v), softmax_scale, causal)


def run_backward(
    do, q, k, v, o, lse, dlse, group, softmax_scale=None, causal=True, deterministic=False, sm_margin=0
):
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    with tuned.leaving(sm_margin), _device_of(q):
        options = exchange_for(_group_of(group), k, v), softmax_scale, causal, deterministic
        return ring_backward(do, q, k, v, o, lse, dlse, *options)


ops.library.impl("context_forward", run_forward, "CompositeExplicitAutograd")
ops.library.impl("context_backward", run_backward, "CompositeExplicitAutograd")


@register_fake("hopper_attention::context_forward", lib=ops.library)
def fake_forward(q, k, v, group, softmax_scale=None, causal=True, deterministic=False, sm_margin=0):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@register_fake("hopper_attention::context_backward", lib=ops.library)
def fake_backward(
    do, q, k, v, o, lse, dlse, group, softmax_scale=None, causal=True, deterministic=False, sm_margin=0
):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _flops(q_shape, k_shape, group: str, causal: bool, direction: str) -> int:
    """Of a rank: its part of the whole sequence's."""
    (batch, heads, tokens, head_dim), kv_heads, ranks = q_shape, k_shape[1], _group_of(group).size()
    shape = batch, heads, kv_heads, tokens * ranks, tokens * ranks, head_dim
    return int(Problem(*shape, causal, direction=direction).flops / ranks)


@register_flop_formula(torch.ops.hopper_attention.context_forward)
def forward_flops(q, k, v, group, softmax_scale=None, causal=True, *_, out_shape=None, **__) -> int:
    return _flops(q, k, group, causal, "fwd")


@register_flop_formula(torch.ops.hopper_attention.context_backward)
def backward_flops(
    do, q, k, v, o, lse, dlse, group, softmax_scale=None, causal=True, *_, out_shape=None, **__
) -> int:
    return _flops(q, k, group, causal, "bwd")


class ContextAttention(torch.autograd.Function):
    """Forward by `context_forward`, gradients of o and lse by `context_backward`."""

    @staticmethod
    def forward(ctx, q, k, v, *options):
        o, lse = context_forward(q, k, v, *options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        return *context_backward(do, q, k, v, o, lse, dlse, *ctx.options), *(None for _ in ctx.options)


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` of a sequence whose tokens lie on the ranks of a process group, by default all.

    q, k, v: this rank's part of the sequence, as `shard` cuts it: (batch, heads, tokens, head_dim), as
    `attention` takes them; a multiple of 2 tokens, the same on every rank. Returns o like q and, with
    `return_lse`, the LSE of its rows over all keys, fp32 (batch, heads, tokens). Every rank must call it, and
    every rank must call backward or none. k and v travel without a copy where memory holds them (batch,
    tokens, heads, head_dim), of one batch.

    Kernels leave `sm_margin` SMs to the communicator. Under autocast q, k and v are cast to its type. The
    rest as in `attention`. Raises, before anything is
    launched, ValueError: the same on every rank where any rank's input is refused or ranks disagree.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError(f"{NAME} needs torch.distributed: call init_process_group first")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    options = group.group_name, softmax_scale, causal, deterministic, sm_margin
    o, lse = ContextAttention.apply(q, k, v, *options)
    return (o, lse) if return_lse else o
