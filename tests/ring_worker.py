"""One rank of `tests/test_context_parallel.py`: `python tests/ring_worker.py RANK RANKS STORE CASE`, over
gloo, with the reference's formulas for kernels."""

import datetime
import functools
import itertools
import os
import sys
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hopper_attention import context_parallel_attention, ops, production
from hopper_attention.integrations import block_gradients, packed_ring
from hopper_attention.integrations import context_parallel as cp
from hopper_attention.kernels.contract import Problem

TIMEOUT = datetime.timedelta(seconds=float(os.environ.get("RING_TIMEOUT", "60")))


# ---- the operators for CPU tensors, in float64 inside ------------------------------------------------------


def scores_of(q, k, scale, causal):
    """A mask is aligned at the bottom right."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q.double() @ k.double().mT * (scale or q.shape[-1] ** -0.5)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1 + s.shape[-1] - s.shape[-2]).bool(), -torch.inf)
    return s


def forward(q, k, v, softmax_scale=None, causal=False, top_left=False, deterministic=False):
    s = scores_of(q, k, softmax_scale, causal)
    lse = s.logsumexp(-1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    o = (s - lse[..., None].nan_to_num(neginf=0.0)).exp() @ v.double()
    return torch.empty_like(q).copy_(o), lse.float()


def products(q, k, v, do, lse, d, scale, causal):
    """dQ and dK without the scale, dV, in float64; lse and d (batch, heads, queries)."""
    p = (scores_of(q, k, scale, causal) - lse[..., None].double()).exp()
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for x in (k, v))
    ds = p * (do.double() @ values.mT - d[..., None])
    shared = lambda x: x.unflatten(1, (k.shape[1], -1)).sum(2)
    return ds @ keys, shared(ds.mT @ q.double()), shared(p.mT @ do.double())


def backward(
    do, q, k, v, o, lse, dlse=None, softmax_scale=None, causal=False, top_left=False, deterministic=False
):
    """As `ops.backward`, but in fp32."""
    assert lse.is_contiguous(), "the kernels refuse others"
    d = (do.double() * o.double()).sum(-1) - (0 if dlse is None else dlse.double())
    dq, dk, dv = products(q, k, v, do, lse, d, softmax_scale, causal)
    scale = softmax_scale or q.shape[-1] ** -0.5
    found = dq * scale, dk * scale, dv
    return tuple(torch.empty_like(x, dtype=torch.float32).copy_(y) for x, y in zip((q, k, v), found))


def each_sequence(cu_q, cu_k):
    """The rows of queries and of keys of each packed sequence."""
    bounds = [list(itertools.pairwise(x.tolist())) for x in (cu_q, cu_k)]
    return [tuple(slice(*x) for x in both) for both in zip(*bounds)]


def attend(q, k, v, sink, cu_q, cu_k, used_q=None, used_k=None, scale=None, causal=False, *_):
    """Of packed sequences only, in float64 inside."""
    o, lse = torch.zeros_like(q), torch.full(q.shape[1::-1], -torch.inf)
    for of_q, of_k in each_sequence(cu_q, cu_k):
        x, y, z = (x[None].transpose(1, 2) for x in (q[of_q], k[of_k], v[of_k]))
        found, found_lse = forward(x, y, z, scale, causal)
        o[of_q], lse[:, of_q] = found[0].transpose(0, 1), found_lse[0]
    return o, lse


def attend_backward(
    do, q, k, v, o, lse, dlse, sink, cu_q, cu_k, used_q=None, used_k=None, scale=None, causal=False, *_
):
    """As `attend`, rounded to 16 bits."""
    assert lse.is_contiguous() and (dlse is None or dlse.is_contiguous())
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for of_q, of_k in each_sequence(cu_q, cu_k):
        rows = do[of_q], q[of_q], k[of_k], v[of_k], o[of_q]
        x = [x[None].transpose(1, 2) for x in rows]
        lses = [x if x is None else x[None, :, of_q].contiguous() for x in (lse, dlse)]
        for into, of, found in zip(gradients, (of_q, of_k, of_k), backward(*x, *lses, scale, causal)):
            into[of] = found[0].transpose(0, 1)
    return *gradients, q.new_empty(0, dtype=torch.float32)


def merge(o, lse, other, other_lse, out):
    """As kernels/merge.py says it."""
    both = torch.logaddexp(lse.double(), other_lse.double())
    weigh = lambda x: (x.double() - both.nan_to_num(neginf=0.0)).exp()[..., None]
    out.copy_(o.double() * weigh(lse) + other.double() * weigh(other_lse))
    lse.copy_(both)


# ---- the pieces of kernels/bwd4_blocks.py: scratch is (row, block, column block, 64 · 64) ------------------


def in_rows(scratch, rows):
    """(row, queries or keys, head_dim) of scratch: a copy."""
    tiles = scratch.unflatten(-1, (64, 64)).permute(0, 1, 3, 2, 4)
    return tiles.flatten(3, 4).flatten(1, 2)[:, :rows]


def write(scratch, x):
    """x (…, rows, head_dim) into scratch; past its rows what nobody may read."""
    x = x.flatten(0, -3)
    held = x.new_full((x.shape[0], 64 * scratch.shape[1], x.shape[2]), torch.nan)
    held[:, : x.shape[1]] = x
    scratch.copy_(held.unflatten(1, (-1, 64)).unflatten(3, (-1, 64)).permute(0, 1, 3, 2, 4).flatten(3, 4))


def own_stats(stats):
    """(row, block, query, LSE or D), in as much of a block as any kernel's statistics have."""
    return stats.flatten(2)[:, :, : 2 * 64].unflatten(2, (64, 2))


def begin(o, do, lse, stats, dq_sum, *given):
    has_scale = bool(given) and isinstance(given[-1], float)  # which comes last, and changes nothing here
    (dlse,) = given[: len(given) - has_scale] or (None,)
    d = (do.double() * o.double()).sum(-1) - (0 if dlse is None else dlse.double())
    both = torch.stack((lse.double(), d), -1).flatten(0, 1)  # (row, queries, 2)
    held = both.new_full((both.shape[0], 64 * stats.shape[1], 2), torch.nan)
    held[:, : both.shape[1]] = both
    own_stats(stats).copy_(held.unflatten(1, (-1, 64)))
    dq_sum.zero_()


def block(q, k, v, do, stats, dq_sum, parts, counter, scale=None, causal=False):
    batch, heads, rows, _ = q.shape
    assert counter.item() == 0, "another launch's"
    counter.fill_(1)
    own = own_stats(stats).flatten(1, 2)[:, :rows].unflatten(0, (batch, heads))
    dq, dk, dv = products(q, k, v, do, *own.unbind(-1), scale, causal)
    write(dq_sum, in_rows(dq_sum, rows) + dq.flatten(0, 1))
    for into, x in zip(parts, (dk, dv)):
        write(into[:, 0], x)


def queries(dq_sum, dq, scale=None):
    found = in_rows(dq_sum, dq.shape[2]).unflatten(0, dq.shape[:2])
    dq.copy_(found * (scale or dq.shape[-1] ** -0.5))


def keys(*given):
    scale = given[-1] if isinstance(given[-1], float) else None
    *parts, dk, dv = given if scale is None else given[:-1]
    for i, (x, factor) in enumerate(((dk, scale or dk.shape[-1] ** -0.5), (dv, 1.0))):
        found = sum(in_rows(both[i][:, 0], x.shape[2]) for both in parts)
        x.copy_(found.unflatten(0, x.shape[:2]) * factor)


def stand_in() -> torch.library.Library:
    library = torch.library.Library("hopper_attention", "IMPL")
    library.impl("forward", forward, "CPU")
    calls = {"backward": backward, "attend": attend, "attend_backward": attend_backward}
    for name, call in calls.items():
        library.impl(name, call, "CPU")
    cp.OURS = cp.Kernels(ops.forward, block_gradients.gradients_of, merge)
    production._check_inputs = lambda *_, **__: None
    blocks = {causal: functools.partial(block, causal=causal) for causal in (False, True)}
    launches = block_gradients.Launches(begin, blocks, queries, dict.fromkeys((False, True), keys))
    block_gradients.launches_of = lambda *_: launches
    return library


# ---- cases -------------------------------------------------------------------------------------------------


def whole(heads=4, kv_heads=2, seqlen=64, head_dim=64, dtype=torch.bfloat16, batch=2):
    generator = torch.Generator().manual_seed(3)
    make = lambda h: torch.randn(batch, h, seqlen, head_dim, generator=generator).to(dtype)
    return make(heads), make(kv_heads), make(kv_heads), make(heads)


def close(name, found, exact, factor=1.0):
    """Within so many roundings to 16 bits, of rows and of the whole."""
    worst = (found.double() - exact).abs().max() / exact.abs().max()
    assert worst < factor * 2.0**-8, f"{name}: {worst:.2e}"


def numbers(
    rank, ranks, causal, kv_heads, scale, seqlen=64, compiled=False, broken=False, wants_dlse=True, **more
):
    """Outputs and gradients against one process' float64; `broken`, of another mask."""
    q, k, v, do = whole(kv_heads=kv_heads, seqlen=seqlen, **more)
    generator = torch.Generator().manual_seed(4)
    dlse = torch.randn(q.shape[:3], generator=generator)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    s = scores_of(*exact[:2], scale, causal)
    lse = s.logsumexp(-1)
    o = (s - lse[..., None]).exp() @ exact[2].repeat_interleave(q.shape[1] // kv_heads, 1)
    dlse = dlse if wants_dlse else torch.zeros_like(dlse)
    torch.autograd.backward((o, lse), (do.double(), dlse.double()))
    mine = lambda x: cp.shard(x, rank, ranks)
    inputs = [mine(x).requires_grad_() for x in (q, k, v)]
    call = context_parallel_attention
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, found_lse = call(*inputs, causal=causal != broken, softmax_scale=scale, return_lse=True)
    outputs = (found, found_lse) if wants_dlse else (found,)
    torch.autograd.backward(outputs, [mine(do), mine(dlse)][: len(outputs)])
    close("o", found, mine(o), 2.0)
    assert (found_lse - mine(lse)).abs().max() < 1e-5
    for name, x, y in zip("qkv", inputs, exact):
        close(f"d{name}", x.grad, mine(y.grad), 1.5)
    gathered = [torch.empty_like(found) for _ in range(ranks)]
    dist.all_gather(gathered, found.detach().contiguous())
    close("o, unsharded", cp.unshard(gathered), o.detach(), 2.0)


def packed(rank, ranks, causal, kv_heads, scale=None, lengths=(64, 0, 16, 48), compiled=False):
    """`numbers` of packed sequences, as many times as long as there are ranks."""
    cu = torch.tensor([0, *itertools.accumulate(ranks * x for x in lengths)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(5)
    make = lambda h: torch.randn(int(cu[-1]), h, 64, generator=generator).bfloat16()
    q, k, v, do = made = make(4), make(kv_heads), make(kv_heads), make(4)
    dlse = torch.randn(4, len(q), generator=generator)
    exact = [x.double().requires_grad_() for x in made[:3]]
    outs = []
    for rows, _ in each_sequence(cu, cu):
        x, y, z = (x[None, rows].transpose(1, 2) for x in exact)
        s = scores_of(x, y, scale, causal)
        found = s.softmax(-1) @ z.repeat_interleave(4 // kv_heads, 1)
        outs.append((found[0].transpose(0, 1), s.logsumexp(-1)[0]))
    o, lse = torch.cat([x for x, _ in outs]), torch.cat([x for _, x in outs], 1)
    torch.autograd.backward((o, lse), (do.double(), dlse.double()))
    mine = lambda x, dim=0: packed_ring.shard(x, cu, rank, ranks, dim)
    inputs = [mine(x).requires_grad_() for x in (q, k, v)]
    call = context_parallel_attention
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, found_lse = call(*inputs, causal=causal, softmax_scale=scale, return_lse=True, cu_seqlens=cu)
    torch.autograd.backward((found, found_lse), (mine(do), mine(dlse, 1)))
    close("o", found, mine(o), 2.0)
    assert (found_lse - mine(lse, 1)).abs().max() < 1e-5
    for name, x, y in zip("qkv", inputs, exact):
        close(f"d{name}", x.grad, mine(y.grad), 2.5)  # rounded block by block


def seen(rank, ranks):
    """Autocast casts; the FLOP counter counts a rank's part of the whole sequence's."""
    q, k, v, _ = (cp.shard(x, rank, ranks).float().requires_grad_() for x in whole())
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        o = context_parallel_attention(q, k, v)
    assert o.dtype == torch.bfloat16
    exact = Problem.square(2, 4, 64, 64, True).flops / ranks
    names = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    assert names == {"hopper_attention.context_forward": exact}, names
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.isfinite().all()
    cu = torch.tensor([0, 16, 64], dtype=torch.int32)
    q, k, v, _ = (packed_ring.shard(x[0].transpose(0, 1), cu, rank, ranks) for x in whole())
    with FlopCounterMode(display=False) as counter:
        context_parallel_attention(q, k, v, cu_seqlens=cu)
    exact = sum(Problem.square(1, 4, n, 64, True).flops for n in (16, 48)) / ranks
    assert counter.get_flop_counts()["Global"][torch.ops.hopper_attention.context_forward] == exact


def refused(rank, ranks, how):
    """What every rank says when rank 1 brings something else."""
    q, k, v, _ = (cp.shard(x, rank, ranks) for x in whole())
    if rank == 1 and how == "shape":
        q = q[:, :, :-2]
        k, v = k[:, :, :-2], v[:, :, :-2]
    if rank == 1 and how == "odd":
        q, k, v = (x[:, :, :-1] for x in (q, k, v))
    if rank == 1 and how == "lengths":
        k, v = k[:, :, :-2], v[:, :, :-2]
    if rank == 1 and how == "packed":
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    if rank == 1 and how == "values":
        v = v[..., :32]
    if rank == 1 and how == "dtype":
        q = q.float()
    if rank == 1 and how == "layout":
        q = torch.cat((q, q[..., :1]), -1)[..., :-1]
    if how == "head_dim":
        q, k, v = (x[..., :63] for x in (q, k, v))
    cu = None
    if how.startswith("lengths of"):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        cu = torch.tensor([0, 64] if rank == 0 else [0, 16, 64], dtype=torch.int32)
        cu = cu.long() if how.endswith("64 bits") else cu
    options = {"mask": {"causal": False}, "determinism": {"deterministic": True}, "margin": {"sm_margin": -1}}
    options = options.get(how, {}) if rank == 1 else {}
    try:
        context_parallel_attention(q, k, v, cu_seqlens=cu, **options)
    except ValueError as error:
        print(f"SAID {error}", flush=True)
    else:
        raise AssertionError("not refused")


def dies(rank, ranks, when):
    """Rank 1 is gone before the first message, or after the ranks have agreed."""
    q, k, v, _ = (cp.shard(x, rank, ranks) for x in whole())
    if when == "later":
        context_parallel_attention(q, k, v)
    if rank == 1:
        os._exit(3)
    try:
        context_parallel_attention(q, k, v)
    except RuntimeError as error:
        print(f"SAID {type(error).__name__}", flush=True)
        os._exit(0)  # what waits for the others at exit must not either
    raise AssertionError("there was an answer")


def trains(rank, ranks):
    """The losses of `examples/train_long.py` on all ranks and on each by itself; how often a layer's
    attention is computed."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples"))
    from train_long import Config, train

    calls = Counter()
    before = cp.OURS
    cp.OURS = replace(before, forward=lambda *x: (calls.update(["forward"]), before.forward(*x))[1])
    alone, _ = dist.new_subgroups(1)
    config, steps = Config(layers=2, hidden=128, heads=2, tokens=0), 4
    together, by_itself = (
        train(config, 256, steps, torch.device("cpu"), x)["losses"] for x in (dist.group.WORLD, alone)
    )
    cp.OURS = before
    assert calls["forward"] == config.layers * steps * (ranks + 1), calls  # a rank's steps; kept, not again
    off = max(abs(x - y) for x, y in zip(together, by_itself))
    assert together[-1] < together[0] and off < 2e-3, (together, by_itself)
    everyone = [by_itself] * ranks
    dist.all_gather_object(everyone, by_itself)
    assert everyone == [by_itself] * ranks, "the same text and weights"


def gathered(rank, ranks, causal, kv_heads):
    """The all-gather that the bench times, against the ring."""
    from harness.context_rings import Gathered, Ring, Size

    inputs = [cp.shard(x, rank, ranks) for x in whole(kv_heads=kv_heads, seqlen=32 * ranks, batch=1)]
    size, ways = (
        Size(32, 4, kv_heads, causal),
        (Ring(cp.Exchange(dist.group.WORLD)), Gathered(dist.group.WORLD)),
    )
    for direction in ("forward", "both"):
        for x, y in zip(*(way.run(direction, size, *inputs) for way in ways)):
            close(direction, x, y.double(), 2.0)


def one_by_one(rank, ranks, *case, **options):
    """`numbers` with an operator for each block."""
    before, cp.OURS = cp.OURS, cp.one_by_one(ops.forward, backward, merge)
    numbers(rank, ranks, *case, **options)
    cp.OURS = before


def main(rank: int, ranks: int, store: str, case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    library = stand_in()
    eval(case, globals() | {"rank": rank, "ranks": ranks})
    dist.destroy_process_group()
    library._destroy()
    sys.stdout.flush()
    # Gloo's thread lets go of a finished message's tensors when it likes; where FSDP still holds the group,
    # after the interpreter, and then the process aborts. Errors leave by the way above.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
