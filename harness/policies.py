"""Problems with a window, a soft cap, a sink or packed sequences: their tensors, what a kernel must make of
them, and whether it did. The reference itself is `harness.reference`'s, one sequence at a time: those of the
same lengths are heads of one problem.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from harness import judging, reference
from harness.inputs import random_inputs
from harness.judging import Verdict
from harness.reference import Gradients, Policies, Rounding
from harness.stages import scratch_of
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Tensors
from hopper_attention.launch import compile_stage

OF_QUERIES = ("q", "o", "do", "dq", "lse", "dlse")  # tensors with a row for each query; the others, each key
UNTOUCHED = math.inf  # what outputs hold in rows of no sequence, before and after


class Group(NamedTuple):
    """Sequences of the same lengths: which rows of the packed tensors theirs are (n, length)."""

    queries: torch.Tensor
    keys: torch.Tensor

    def take(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Of a packed tensor (1, heads, total, …) what belongs to them, each head of each a head:
        (1, n·heads, length, …)."""
        rows = self.queries if name in OF_QUERIES else self.keys
        return x[0][:, rows].transpose(0, 1).flatten(0, 1)[None]

    def in_rows(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """What `take` gives, one sequence behind the other: (heads, n·length, …)."""
        count = len(self.queries if name in OF_QUERIES else self.keys)
        return x[0].unflatten(0, (count, x.shape[1] // count)).transpose(0, 1).flatten(1, 2)


def starts_of(spans: Sequence[int]) -> list[int]:
    """cu_seqlens: where each of so many rows begins, and the last ends."""
    starts = [0]
    for span in spans:
        starts.append(starts[-1] + span)
    return starts


@dataclass
class Given:
    """The inputs of a problem. Packed sequences begin at `starts` (of queries, of keys), each n + 1 numbers,
    and have the problem's lengths: as `used`, where they are not what lies between two starts."""

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    softmax_scale: float | None = None
    sink: torch.Tensor | None = None
    starts: tuple[list[int], list[int]] | None = None
    used: bool = False
    each: int = 0  # as how many tiles each sequence counts to a forward stage; 0: they are listed

    @functools.cached_property
    def groups(self) -> list[Group]:
        """Of a dense problem its batch is one, as if its batches lay one behind the other."""
        problem, device = self.problem, self.q.device
        if problem.sequences is None:
            rows = lambda n: torch.arange(problem.batch * n, device=device).view(problem.batch, n)
            if not problem.batch:
                return []
            return [Group(rows(problem.seqlen_q), rows(problem.seqlen_kv))]
        by_lengths: dict[tuple[int, int], list[int]] = {}
        for i, lengths in enumerate(problem.sequences):
            by_lengths.setdefault(lengths, []).append(i)
        found = []
        for lengths, members in by_lengths.items():
            begin = (torch.tensor(starts)[members] for starts in self.starts)
            of = [(b[:, None] + torch.arange(n)).to(device) for b, n in zip(begin, lengths)]
            found.append(Group(*of))
        return found

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """As if batches lay one behind the other: (1, heads, rows, …)."""
        return x if self.problem.sequences is not None else x.transpose(0, 1).flatten(1, 2)[None]

    @functools.cached_property
    def expected(self) -> list[judging.Expected]:
        """Of each group what attention should give."""
        problem, found = self.problem, []
        given = {name: getattr(self, name) for name in ("q", "k", "v", "do", "dlse")}
        for group in self.groups:
            q, k, v, do, dlse = (
                None if x is None else group.take(name, self.packed(x)) for name, x in given.items()
            )
            sink = None if self.sink is None else self.sink.repeat(len(group.queries))
            policies = Policies(problem.window, problem.softcap, sink)
            found.append(
                judging.Expected(
                    q, k, v, problem.causal, do, problem.top_left, self.softmax_scale, dlse, policies
                )
            )
        return found

    def gathered(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the groups have, one group behind the other: (1, heads, rows, …)."""
        return torch.cat([group.in_rows(name, x) for group, x in zip(self.groups, parts)], 1)[None]

    def own_rows(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The rows of an output that belong to sequences, in the order of `gathered`."""
        return self.gathered(name, [group.take(name, self.packed(x)) for group in self.groups])

    def outside(self, name: str) -> torch.Tensor:
        """Which rows belong to no sequence."""
        rows = self.q.shape[2] if name in OF_QUERIES else self.k.shape[2]
        outside = torch.ones(rows, dtype=torch.bool, device=self.q.device)
        if self.problem.sequences is None:
            return ~outside
        for group in self.groups:
            outside[(group.queries if name in OF_QUERIES else group.keys).flatten()] = False
        return outside

    def spread(self, name: str, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """What the groups have, where it lies in a tensor; NaN in rows of no sequence."""
        result = torch.full_like(like, math.nan)
        whole = result if self.problem.sequences is not None else torch.full_like(self.packed(like), math.nan)
        for group, x in zip(self.groups, parts):
            rows = group.queries if name in OF_QUERIES else group.keys
            whole[0][:, rows.flatten()] = group.in_rows(name, x).to(whole.dtype)
        if self.problem.sequences is None:
            shape = self.problem.batch, like.shape[2]
            result.copy_(whole[0].unflatten(1, shape).transpose(0, 1))
        return result

    @functools.cached_property
    def saved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE as a backward stage reads them."""
        o, lse = zip(*(one.saved for one in self.expected)) if self.groups else ((), ())
        like = torch.empty(self.q.shape[:3], device=self.q.device)
        return self.spread("o", o, self.q), self.spread("lse", lse, like)

    def lengths(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, ...]]:
        """cu_seqlens of queries and keys, and seqused of both, on the GPU."""
        device, sequences = self.q.device, self.problem.sequences
        integers = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
        cu = tuple(map(integers, self.starts))
        used = ([q for q, _ in sequences], [kv for _, kv in sequences])
        return cu, tuple(map(integers, used)) if self.used else (None, None)

    def allocate(self, stage_id: str) -> Tensors:
        """What a stage reads and writes: outputs and scratch poisoned."""
        stage, module = ladder.load(stage_id)
        problem, backward = self.problem, stage.direction == "bwd"
        dense = torch.contiguous_format
        o, lse = (
            self.saved
            if backward
            else (torch.empty_like(self.q, memory_format=dense), self.q.new_empty(self.q.shape[:3]).float())
        )
        scratch = scratch_of(module, problem, self.q.device, stage.options)
        t = Tensors(self.q, self.k, self.v, o, lse, scratch)
        if backward:
            t.do = self.do
            t.dq, t.dk, t.dv = (torch.empty_like(x, memory_format=dense) for x in (self.q, self.k, self.v))
            t.dlse = self.dlse
            t.dsink = None if self.sink is None else torch.empty_like(self.sink)
        scale = problem.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale
        t.softmax_scale = scale if problem.scaled else None
        t.window, t.softcap, t.sink = problem.window, problem.softcap or None, self.sink
        if problem.sequences is not None:
            t.cu_seqlens, t.seqused = self.lengths()
        return t

    def poison(self, t: Tensors) -> Tensors:
        """NaN in outputs and float scratch, but UNTOUCHED in the rows of outputs that belong to nobody."""
        from harness.inputs import poison

        poison(t)
        if self.problem.sequences is not None:
            for name, x in t.outputs.items():
                if name != "dsink":
                    x[:, :, self.outside(name)] = UNTOUCHED
        return t

    def run(self, stage_id: str) -> Tensors:
        """The stage's outputs."""
        t = self.poison(self.allocate(stage_id))
        module = ladder.load(stage_id)[1]
        counted = (self.each,) if self.each else ()
        module.run_kernel(compile_stage(stage_id, self.problem), t, *counted)
        return t

    def check(self, stage_id: str) -> list[str]:
        """What is wrong with what a stage computes."""
        stage, module = ladder.load(stage_id)
        rounding = reference.rounding_of(stage, module, self.problem, **stage.options)
        return self.judge(self.run(stage_id).outputs, rounding)

    def judge(self, outputs: dict[str, torch.Tensor], rounding: Rounding, poisoned: bool = True) -> list[str]:
        """What is wrong with a kernel's outputs: rows that belong to nobody, which must be as `poison` left
        them if they were `poisoned`, and the pass rule on the others. Gradients are of `saved`."""
        failures = []
        for name, x in outputs.items() if poisoned else ():
            if name != "dsink" and not bool((x[:, :, self.outside(name)] == UNTOUCHED).all()):
                failures.append(f"{name}: rows that belong to no sequence were written")
        if not self.groups:
            if outputs.get("dsink") is not None and outputs["dsink"].any():
                failures.append("dsink of no sequence is not zero")
            return failures
        if "o" in outputs:
            return failures + list(self._judge_forward(outputs, rounding).failures)
        failures += self._judge_gradients(outputs, rounding, *self.saved).failures
        if "dsink" in outputs:
            failures += self.judge_sink(outputs["dsink"], *self.saved)
        return failures

    def _judge_forward(self, outputs: dict[str, torch.Tensor], rounding: Rounding) -> Verdict:
        yard = []
        for one in self.expected:
            yard.append(reference.yardstick(one.q, one.k, one.v, one.causal, rounding, **one.options))
        ref, ref_lse = zip(*(one.forward for one in self.expected))
        return judging.judge(
            self.own_rows("o", outputs["o"]),
            self.gathered("o", ref),
            self.gathered("o", yard),
            self.own_rows("lse", outputs["lse"]),
            self.gathered("lse", ref_lse),
        )

    def _judge_gradients(self, outputs, rounding: Rounding, o, lse) -> Verdict:
        names = ("dq", "dk", "dv")
        gather = lambda groups: tuple(self.gathered(name, x) for name, x in zip(names, zip(*groups)))

        def yard(nudge: float) -> Gradients:
            found = []
            for group, one in zip(self.groups, self.expected):
                saved = (group.take("o", self.packed(o)), group.take("lse", self.packed(lse)))
                inputs = one.q, one.k, one.v, *saved, one.do, one.causal, bool(rounding)
                options = one.options | {"dlse": one.dlse, "nudge": nudge}
                found.append(reference.yardstick_gradients(*inputs, **options))
            return gather(found)

        floors = [
            judging.cancellation(one.q, one.k, one.v, one.do, self.softmax_scale)
            for one in self.expected
            if one.q.numel() and one.k.numel()
        ]
        floor = {name: max((x[name] for x in floors), default=0.0) for name in names}
        found = {name: self.own_rows(name, outputs[name]) for name in names}
        ref = gather(one.gradients for one in self.expected)
        return judging.judge_roundings(found, ref, yard, floor)

    def judge_sink(self, dsink: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> list[str]:
        """What is wrong with a sink's gradient, of the O and LSE that the kernel read."""
        given = {"o": o, "lse": lse, "do": self.do, "dlse": self.dlse}
        rows = {name: None if x is None else self.own_rows(name, x) for name, x in given.items()}
        exact = reference.sink_gradient(rows["o"], rows["lse"], rows["do"], self.sink, rows["dlse"])
        return judging.judge_sink(dsink, *exact)


def random_given(
    problem: Problem,
    seed: int = 0,
    device: str = "cuda",
    scale: float | None = None,
    padding: Sequence[tuple[int, int]] | None = None,
    outside: float = math.nan,
    sink: torch.Tensor | None = None,
) -> Given:
    """N(0, 1) inputs, and sinks that weigh enough to be missed. Between packed sequences, and behind the
    last, lie `padding` (queries, keys) rows each, with `seqused` then; the rest of the tensors' rows behind
    all. Rows that belong to nobody are `outside`. Raises ValueError for a scale that no kernel would see."""
    if scale not in (None, problem.head_dim**-0.5) and not problem.scaled:
        raise ValueError(f"{problem}: its kernels take no scale, and so not {scale}")
    q, k, v, *do = random_inputs(problem, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    if problem.sink and sink is None:
        sink = 3.0 + torch.randn(problem.heads, generator=generator, device=device)  # of some 20 keys
    dlse = None
    if problem.lse_grad:
        dlse = torch.randn(q.shape[:3], generator=generator, device=device)
    given = Given(problem, q, k, v, *(do or [None]), dlse, scale, sink)
    if problem.sequences is not None:
        spans = problem.sequences
        if padding is not None:
            spans = [(a + x, b + y) for (a, b), (x, y) in zip(spans, padding)]
        given.starts = tuple(starts_of([span[side] for span in spans]) for side in (0, 1))
        given.used = padding is not None
        ends = given.starts[0][-1], given.starts[1][-1]
        if ends[0] > problem.seqlen_q or ends[1] > problem.seqlen_kv:
            raise ValueError(f"{problem}: its tensors are too short for sequences that end at {ends}")
        for name in ("q", "k", "v", "do", "dlse"):
            x = getattr(given, name)
            if x is not None:
                x[:, :, given.outside("q" if name in OF_QUERIES else "k")] = outside
    return given
