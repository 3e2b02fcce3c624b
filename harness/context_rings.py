"""The rings that `bench.py context_parallel` times: ours whole, without messages and without kernels, ours
over FlashAttention-3, PyTorch's own; and one GPU with as much work."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import hopper_attention
from harness import fa3
from hopper_attention import ops, tuned
from hopper_attention.integrations import block_gradients, zigzag
from hopper_attention.integrations import context_parallel as cp
from hopper_attention.kernels.contract import Problem

HEAD_DIM = 128
DIRECTIONS = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # and their FLOPs over a forward pass's
Saved = tuple[torch.Tensor, torch.Tensor]  # o and lse


@dataclass(frozen=True)
class Size:
    tokens: int  # of a GPU
    heads: int
    kv_heads: int
    causal: bool = True

    def problem(self, ranks: int, direction: str = "fwd") -> Problem:
        n = self.tokens * ranks
        return Problem(1, self.heads, self.kv_heads, n, n, HEAD_DIM, self.causal, direction=direction)

    def flops(self, ranks: int, direction: str) -> float:
        """Of a GPU, in one of DIRECTIONS."""
        return self.problem(ranks).flops * DIRECTIONS[direction] / ranks

    def __str__(self) -> str:
        return f"{self.tokens // 1024}k h{self.heads}:{self.kv_heads}{'' if self.causal else ' full'}"


class Unsent(cp.Exchange):
    """Messages that are not sent: what is received is there already, random, kept by shape."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        self.there: dict[tuple[str, int, torch.Size], torch.Tensor] = {}

    def post(self, kind, to, sent, source, shapes):
        kinds = [(f"{kind} {sent[0].dtype}", i, shape) for i, shape in enumerate(shapes)]
        for x in kinds:
            if x not in self.there:
                self.there[x] = torch.randn(x[2], dtype=sent[0].dtype, device=sent[0].device)
        return lambda: [self.there[x] for x in kinds]


class Uncomputed:
    """Kernels that are not launched: their outputs are there already, kept by shape. Nothing is summed."""

    def __init__(self) -> None:
        self.there: dict[tuple[object, ...], torch.Tensor] = {}

    def kept(self, name: str, make: Callable[[], torch.Tensor], *kind: object) -> torch.Tensor:
        what = name, *kind
        if what not in self.there:
            self.there[what] = make()
        return self.there[what]

    def forward(self, q, k, v, *_):
        of = lambda name, x: self.kept(name, lambda: torch.randn_like(x), x.shape, x.stride())
        return of("o", q), of("lse", q[..., 0].float())

    def kernels(self) -> cp.Kernels:
        return cp.Kernels(self.forward, functools.partial(Unsummed, of=self), lambda *_: None)


class Unsummed(block_gradients.OneByOne):
    """Gradients of which only what travels is there, as large as `block_gradients.Sums` sends it."""

    def __init__(self, inputs, turns, arrivals, of: Uncomputed):
        self.inputs, self.of = inputs, of

    def add_own(self, turn):
        pass

    def add_foreign(self, step, k, v):
        make = lambda x: torch.randn(x, dtype=torch.float32, device=k.device)
        return [self.of.kept("gradient", lambda: make(x), i, x) for i, x in enumerate(self.shapes(step.keys))]

    def add_arrived(self, keys, found):
        pass

    def finish(self):
        return tuple(self.inputs[1:4])


def fa3_kernels() -> cp.Kernels:
    """FlashAttention-3's in the operators' place."""
    build = next(x for x in fa3.builds().values() if hasattr(x, "bwd"))
    rows = lambda *tensors: [x.transpose(1, 2) for x in tensors]
    window = {"window_size_left": -1, "window_size_right": -1}

    def forward(q, k, v, scale, causal):
        q, k, v = rows(q, k, v)
        o, lse, *_ = fa3._call(build.fwd, q=q, k=k, v=v, is_causal=causal, num_splits=1, **window)()
        return o.transpose(1, 2), lse

    def backward(do, q, k, v, o, lse, *options):
        *_, causal, _, _ = options
        do, q, k, v, o = rows(do, q, k, v, o)
        out = [torch.empty_like(x) for x in (q, k, v)]
        named = dict(zip(("dq", "dk", "dv"), out))
        inputs = {"dout": do, "q": q, "k": k, "v": v, "out": o, "softmax_lse": lse, **named}
        fa3._call(build.bwd, **inputs, is_causal=causal, **window)()
        return tuple(rows(*out))

    return cp.one_by_one(forward, backward)


class Ring:
    """Forward, backward or both, of this rank's part through `context_parallel`'s two functions."""

    def __init__(self, exchange: cp.Exchange, kernels: cp.Kernels | None = None, margin: int = 0):
        self.exchange, self.kernels, self.margin = exchange, kernels, margin

    def run(self, direction: str, size: Size, q, k, v, do, saved: Saved | None = None):
        """o and lse, unless it is backward from `saved` ones; dq, dk and dv, unless it is forward."""
        found: tuple[torch.Tensor, ...] = ()
        with tuned.leaving(self.margin):
            if direction != "backward":
                saved = found = cp.ring_forward(q, k, v, self.exchange, None, size.causal, self.kernels)
            if direction == "forward":
                return found
            inputs = block_gradients.Inputs(do, q, k, v, *saved)
            return *found, *cp.ring_backward(inputs, self.exchange, size.causal, self.kernels)


class Gathered:
    """The other way: every rank gathers all keys first, then computes each of its chunks of queries in one
    launch. In a backward pass it gathers them again, and dK and dV of all keys are added across ranks."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        mine = block_gradients.packed(x)
        parts = mine.new_empty((self.ranks * mine.shape[0], *mine.shape[1:]))
        dist.all_gather_into_tensor(parts, mine, self.group)
        return zigzag.unshard(list(parts.chunk(self.ranks)), 1).transpose(1, 2)

    def pieces(self, causal: bool, tokens: int) -> list[tuple[zigzag.Rows, int]]:
        """Rows of queries, and how many keys they see."""
        if not causal:
            return [(zigzag.Rows.BOTH, self.ranks * tokens)]
        chunks = zigzag.chunks_of(self.rank, self.ranks)
        return [(half, (chunks[half] + 1) * tokens // 2) for half in zigzag.Rows.BOTH.halves]

    def run(self, direction: str, size: Size, q, k, v, do, saved: Saved | None = None):
        """As `Ring.run`."""
        found: tuple[torch.Tensor, ...] = ()
        keys, values = map(self.whole, (k, v))
        pieces = self.pieces(size.causal, size.tokens)
        if direction != "backward":
            saved = found = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
            for rows, end in pieces:
                seen = keys[:, :, :end], values[:, :, :end]
                for whole, x in zip(saved, ops.forward(rows.of(q), *seen, None, size.causal)):
                    rows.of(whole).copy_(x)
        if direction == "forward":
            return found
        dq = torch.empty_like(q)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (keys, values)]
        for rows, end in pieces:
            mine = [rows.of(x) for x in (do, q)], [rows.of(x) for x in saved]
            seen = keys[:, :, :end], values[:, :, :end]
            inputs = *mine[0], *seen, mine[1][0], mine[1][1].contiguous()
            x, *of_keys = ops.backward(*inputs, None, None, size.causal)
            rows.of(dq).copy_(x)
            for total, part in zip(sums, of_keys):
                total[:, :, :end] += part
        return *found, dq, *map(self.home, sums)

    def home(self, total: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over ranks, rounded."""
        parts = torch.cat([zigzag.shard(total, r, self.ranks).contiguous() for r in range(self.ranks)])
        mine = parts.new_empty((parts.shape[0] // self.ranks, *parts.shape[1:]))
        dist.reduce_scatter_tensor(mine, parts, group=self.group)
        return mine.to(torch.bfloat16)


def alone(direction: str, size: Size, ranks: int, q, k, v, do) -> Callable[[], object]:
    """One GPU with 1/P of the work: all tokens, 1/P of the heads."""
    take = lambda x: x[:, : x.shape[1] // ranks].transpose(1, 2).repeat(1, ranks, 1, 1).transpose(1, 2)
    q, k, v, do = map(take, (q, k, v, do))
    forward = lambda: ops.forward(q, k, v, None, size.causal)
    saved = forward()

    def call():
        o, lse = saved if direction == "backward" else forward()
        if direction != "forward":
            ops.backward(do, q, k, v, o, lse, None, None, size.causal)

    return call


def torch_ring(size: Size, ranks: int, q, k, v, do, both: bool, backend: SDPBackend, ours: bool):
    """A context manager that gives PyTorch's own `context_parallel` on these parts as a call. Key heads are
    repeated where its ring does not take fewer."""
    from torch.distributed.tensor.experimental import context_parallel

    @contextlib.contextmanager
    def entered():
        mesh = init_device_mesh("cuda", (ranks,))
        group = q.shape[1] // k.shape[1]
        dense = lambda x: x.contiguous()
        whole = [
            torch.cat([dense(x)] * ranks, 2) for x in (q, *(y.repeat_interleave(group, 1) for y in (k, v)))
        ]
        parts_do = dense(do)
        with contextlib.ExitStack() as stack:
            if ours:
                stack.enter_context(hopper_attention.enabled())
            stack.enter_context(sdpa_kernel(backend))
            stack.enter_context(
                context_parallel(
                    mesh, buffers=whole, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(whole)
                )
            )
            for x in whole:
                x.requires_grad_(both)

            def call():
                o = F.scaled_dot_product_attention(*whole, is_causal=size.causal)
                if both:
                    torch.autograd.grad(o, whole, parts_do)

            yield call

    return entered()
