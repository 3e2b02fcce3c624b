"""Packed sequences, windows, soft caps and sinks: the library beside the peers that have them.

    python bench.py k6 --suite packed            forward, of packed sequences: measure and print
    python bench.py k6 bwd4 --suite window --save    both directions: results/<gpu>/window/{fwd,bwd}.json

A row is a problem and µs by provider. Ours is what the library's call runs (`policies.forward` and
`backward`); "dense" is ours at the speed of dense batches, by which packing is judged (`dense_speed`). Each
call of ours is judged by the pass rule before and after the timing, of long problems one key head and its
query heads. Peers: FlashAttention-2 through PyTorch's operators, FlashAttention-3, -4, and, of windows,
FlexAttention, compiled with the mask and the score that the problem has. What a peer refuses it has no time
of.
"""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness import dense_speed, fa3, peers, row_files, timing
from harness.command import Usage
from harness.fuzz import arguments_of
from harness.inputs import returned_to_poisoned_memory
from harness.measuring import chosen_stage, job_of
from harness.policies import Given, random_given
from harness.reference import rounding_of
from hopper_attention import policies
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.limits import has_own_kernel
from hopper_attention.launch import BACKWARD, FORWARD
from hopper_attention.precompile import Job, ahead

PEERS = ("fa2", "fa3", "fa4", "flex")
DIRECTIONS = {FORWARD: "fwd", BACKWARD: "bwd"}
OURS = "hopper_attention"
SECONDS = 0.06  # of each call
JUDGED_WHOLE = 2e11  # FLOPs; of more, one key head
HEADS = ((16, 16, 128), (32, 8, 128), (16, 16, 64))  # query heads, key heads, head_dim


@dataclass(frozen=True)
class Named:
    name: str
    problem: Problem


# ---- the problems -----------------------------------------------------------------------------------------


def zipf(longest: int, shortest: int) -> list[int]:
    """Lengths longest/1, longest/2, longest/3, … down to the shortest."""
    return [longest // i for i in range(1, longest // shortest + 1)]


def random_lengths(count: int, most: int, least: int = 1) -> list[int]:
    rng = random.Random(count)
    return [rng.randint(least, most) for _ in range(count)]


LENGTHS = {
    "16 × 1024": [1024] * 16,
    "4 × 4096": [4096] * 4,
    "16384 alone": [16384],
    "Zipf, 8192 to 8": zipf(8192, 8),
    "16 of 1 to 2048": random_lengths(16, 2048),
    "512 of 1 to 64": random_lengths(512, 64),
    "200 of 65 to 128": random_lengths(200, 128, 65),
    "256 × 64": [64] * 256,
    "8192 and 256 × 32": [8192] + [32] * 256,
    "8 × 2048, empty ones between": [2048, 0] * 8,
}
PACKED = [
    Named(name, Problem(1, heads, kv_heads, sum(n), sum(n), d, True, sequences=tuple((x, x) for x in n)))
    for heads, kv_heads, d in HEADS
    for name, n in LENGTHS.items()
] + [
    Named(
        "4 × 4096, full",
        Problem(1, 16, 16, 16384, 16384, 128, False, sequences=((4096, 4096),) * 4),
    )
]
WINDOW = [
    *(
        Named(f"{window} of {n}", Problem(1, *heads, n, n, d, False, window=(window - 1, 0)))
        for *heads, d in ((16, 16, 128), (32, 8, 128), (16, 16, 64))
        for window, n in (
            (128, 8192), (1024, 8192), (4096, 8192), (128, 32768), (1024, 32768), (4096, 32768),
            (1024, 131072), (4096, 131072),
        )
    ),
    Named("both sides, 512 of 8192", Problem(1, 16, 16, 8192, 8192, 128, False, window=(512, 512))),
    Named("soft cap 50, causal", Problem(4, 16, 16, 4096, 4096, 128, True, softcap=50.0)),
    Named("Gemma 2 9B, window", Problem(1, 16, 8, 8192, 8192, 256, False, window=(4095, 0), softcap=50.0)),
    Named("Gemma 2 9B, full", Problem(1, 16, 8, 8192, 8192, 256, True, softcap=50.0)),
    Named("gpt-oss, window", Problem(1, 64, 8, 8192, 8192, 64, False, window=(127, 0), sink=True)),
    Named("gpt-oss, full", Problem(1, 64, 8, 8192, 8192, 64, True, sink=True)),
    Named("sink, causal", Problem(4, 16, 16, 4096, 4096, 128, True, sink=True)),
    Named(
        "Mistral, packed",
        Problem(1, 32, 8, 16384, 16384, 128, False, window=(1023, 0), sequences=((4096, 4096),) * 4),
    ),
]  # fmt: skip
SUITES = {"packed": PACKED, "window": WINDOW}


# ---- the peers --------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """A problem's tensors as FlashAttention has them: (batch, rows, heads, head_dim), or packed (total,
    heads, head_dim) with cu_seqlens and the longest lengths."""

    given: Given

    def __post_init__(self) -> None:
        given, packed = self.given, self.given.problem.sequences is not None
        flat = lambda x: x[0].transpose(0, 1).contiguous() if packed else x.transpose(1, 2).contiguous()
        self.q, self.k, self.v = map(flat, (given.q, given.k, given.v))
        self.do = None if given.do is None else flat(given.do)
        self.cu = self.most = None
        if packed:
            self.cu, _ = given.lengths()
            self.most = tuple(max(x) for x in zip(*given.problem.sequences))

    @property
    def window(self) -> tuple[int, int]:
        problem = self.given.problem
        return problem.window or (-1, 0 if problem.causal else -1)


def _refuse(problem: Problem, *fields: str) -> None:
    if lacking := [name for name in problem.policies if name in fields]:
        raise NotImplementedError(f"has no {lacking[0]}")


def _fa2(rows: Rows) -> tuple[Callable[[], object], Callable[[], object] | None]:
    problem = rows.given.problem
    _refuse(problem, "softcap", "sink")
    cu, most = rows.cu or (None, None), rows.most or (problem.seqlen_q, problem.seqlen_kv)
    left, right = rows.window
    options = {"window_size_left": left, "window_size_right": right}
    k, v = rows.k, rows.v
    forward = lambda: torch.ops.aten._flash_attention_forward(
        rows.q, k, v, *cu, *most, 0.0, problem.causal, False, **options
    )
    if rows.do is None:
        return forward, None
    o, lse, state, unused, _ = forward()
    return forward, lambda: torch.ops.aten._flash_attention_backward(
        rows.do, rows.q, k, v, o, lse, *cu, *most, 0.0, problem.causal, state, unused, **options
    )


def _fa3(rows: Rows) -> tuple[Callable[[], object], Callable[[], object] | None]:
    problem = rows.given.problem
    _refuse(problem, "sink")
    left, right = rows.window
    options = {"is_causal": problem.causal, "window_size_left": left, "window_size_right": right}
    options |= {"softcap": problem.softcap}
    if rows.cu:
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), rows.cu))
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), rows.most))
    tensors = {"q": rows.q, "k": rows.k, "v": rows.v}
    builds = fa3.builds().values()
    forward = fa3.fastest([fa3._call(x.fwd, **tensors, **options, num_splits=1) for x in builds])
    if rows.do is None:
        return forward, None
    o, lse = forward()[:2]
    gradients = {f"d{name}": torch.empty_like(x) for name, x in tensors.items()}
    saved = tensors | {"dout": rows.do, "out": o, "softmax_lse": lse} | gradients
    able = [x for x in builds if hasattr(x, "bwd")]
    return forward, fa3.fastest([fa3._call(x.bwd, **saved, **options) for x in able])


def _fa4(rows: Rows) -> tuple[Callable[[], object], Callable[[], object] | None]:
    from flash_attn import cute

    given, problem = rows.given, rows.given.problem
    q, k, v = rows.q, rows.k, rows.v
    if rows.do is not None:
        _refuse(problem, "sink")
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    left, right = (None if x < 0 else x for x in problem.window or (-1, -1))
    options: dict[str, Any] = {"causal": problem.causal, "window_size": (left, right)}
    if problem.softcap:
        options["softcap"] = problem.softcap
    if problem.sink:
        options["learnable_sink"] = given.sink.bfloat16()
    function = cute.flash_attn_func
    if rows.cu:
        function = cute.flash_attn_varlen_func
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), rows.cu))
        longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), rows.most))
        options |= {x: n for x, n in longest.items() if x in inspect.signature(function).parameters}

    def forward():
        found = function(q, k, v, **options)
        return found[0] if isinstance(found, tuple) else found

    return _with_autograd(forward, (q, k, v), rows.do)


def _flex(rows: Rows) -> tuple[Callable[[], object], Callable[[], object] | None]:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    given, problem = rows.given, rows.given.problem
    q, k, v = given.q, given.k, given.v
    _refuse(problem, "sequences")  # it could, but compiles half a minute and more for each batch
    if rows.do is not None:
        _refuse(problem, "sink")
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    left, right = rows.window

    def shown(b, h, i, j):
        visible = j >= i - left if left >= 0 else i >= 0
        return visible & (j <= i + right) if right >= 0 else visible

    hides = left >= 0 or right >= 0
    make = torch.compile(create_block_mask)
    mask = make(shown, None, None, problem.seqlen_q, problem.seqlen_kv, device=q.device) if hides else None
    cap = problem.softcap
    score = (lambda s, b, h, i, j: cap * torch.tanh(s / cap)) if cap else None
    torch._dynamo.reset()  # past its limit of recompilations it would run uncompiled, without failing
    config.donated_buffer = False  # a backward pass that may overwrite what was saved cannot run twice
    gqa = problem.heads != problem.kv_heads

    def attend(q, k, v):
        if not problem.sink:
            return flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=gqa)
        o, lse = flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=gqa, return_lse=True)
        return (o * torch.sigmoid(lse - given.sink[:, None])[..., None]).to(o.dtype)

    compiled = torch.compile(attend, dynamic=False)
    return _with_autograd(lambda: compiled(q, k, v), (q, k, v), given.do)


def _with_autograd(forward: Callable[[], torch.Tensor], leaves, do):
    if do is None:
        return forward, None
    with torch.enable_grad():
        o = forward()
    do = torch.empty_like(o).copy_(do)
    return forward, lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


BUILDS = {"fa2": _fa2, "fa3": _fa3, "fa4": _fa4, "flex": _flex}


# ---- ours -------------------------------------------------------------------------------------------------


class _Ours:
    """The library on a problem, and who judges it."""

    def __init__(self, problem: Problem):
        self.given = given = random_given(problem)
        self.packed = problem.sequences is not None
        more, options = arguments_of(given)
        as_call = lambda x: (
            x[0].transpose(0, 1).contiguous() if self.packed else x.transpose(1, 2).contiguous()
        )
        rows_first = lambda x: as_call(x) if self.packed else as_call(x).transpose(1, 2)
        tensors = [rows_first(x) for x in (given.q, given.k, given.v)]
        longest, longest_kv = (longest_of(problem.with_(direction=x)) for x in ("fwd", "bwd"))
        self.call: Callable[[], tuple[torch.Tensor, ...]]
        self.call = lambda: policies.forward(*tensors, more, *options, longest=longest)
        self.names: tuple[str, ...] = ("o", "lse")
        group = problem.heads // problem.kv_heads
        whole = problem.flops <= JUDGED_WHOLE
        self.at_q = slice(None) if whole else slice(-group, None)
        self.at_kv = slice(None) if whole else slice(-1, None)
        part = problem if whole else problem.with_(batch=problem.batch, heads=group, kv_heads=1)
        of = {"q": given.q, "k": given.k, "v": given.v, "do": given.do}
        of = {x: y if y is None else y[:, self.at_kv if x in "kv" else self.at_q] for x, y in of.items()}
        sink = None if given.sink is None else given.sink[self.at_q]
        self.judged = Given(part, **of, sink=sink, softmax_scale=given.softmax_scale, starts=given.starts)
        if problem.direction == "bwd":
            o, lse = self.call()
            exact_o, exact_lse = self.judged.saved
            self.seen(o, "o")[:, self.at_q] = exact_o
            self.seen(lse, "lse")[:, self.at_q] = exact_lse
            do = rows_first(given.do)
            saved = do, *tensors, o, lse, None, more, *options, False
            self.call = lambda: policies.backward(*saved, longest_kv=longest_kv)
            self.names = ("dq", "dk", "dv", "dsink")

    def seen(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """An output of the call as (batch, heads, rows, …)."""
        if not self.packed or name == "dsink":
            return x
        return x[None] if name == "lse" else x.transpose(0, 1)[None]

    def judge(self) -> None:
        """Raise RuntimeError where an output breaks the pass rule."""
        problem, outputs = self.judged.problem, {}
        for name, x in zip(self.names, returned_to_poisoned_memory(self.call)):
            at = self.at_kv if name in ("dk", "dv") else self.at_q
            if name == "dsink":
                if problem.sink:
                    outputs[name] = x[at]
            else:
                outputs[name] = self.seen(x, name)[:, at]
        stage_id = BACKWARD
        if problem.direction == "fwd":
            asked = policies.without_idle_window(self.given.problem)
            stage_id = chosen_stage(asked, longest=longest_of(asked))
        stage, module = ladder.load(stage_id)
        rounding = rounding_of(stage, module, problem, **stage.options)
        if failures := self.judged.judge(outputs, rounding, poisoned=False):
            raise RuntimeError(f"{self.given.problem}: {'; '.join(failures)}")


def longest_of(problem: Problem) -> int:
    """What a call is told, ours as the peers': how many queries the longest packed sequence has, in the
    backward pass how many keys."""
    side = 0 if problem.direction == "fwd" else 1
    return max((lengths[side] for lengths in problem.sequences or ()), default=0)


def kernels(problem: Problem) -> list[Job]:
    """Those of ours that `measure` runs."""
    found = []
    for one in (problem, *dense_speed.batches(problem).values()):
        for direction in {"fwd", problem.direction}:
            asked = policies.without_idle_window(one.with_(direction=direction))
            asked = asked.with_(scaled=bool(asked.policies) or not has_own_kernel(asked))
            found.append(job_of(chosen_stage(asked, longest=longest_of(asked)), asked))
    return found


def measure(problem: Problem, peer_names: list[str]) -> dict[str, float]:
    """µs by provider. Raises RuntimeError where an output is wrong."""
    one = _Ours(problem)
    one.judge()
    calls: dict[str, Callable[[], object]] = {OURS: one.call}
    dense = dense_speed.batches(problem)
    if len(dense) == 1:
        calls["dense"] = _Ours(*dense.values()).call
    rows = Rows(one.given)
    for name in peer_names:
        try:
            call = BUILDS[name](rows)[problem.direction == "bwd"]
            call()
            torch.cuda.synchronize()
        except Exception as error:  # of any library: what it refuses it has no time of
            print(f"{problem}: {name}: {error!s:.100}", flush=True)
        else:
            calls[name] = call
    times = timing.interleaved(calls, SECONDS)
    one.judge()
    us = {name: 1e3 * time.ms_median for name, time in times.items()}
    if len(dense) > 1:  # one by one: the tensors of all of them are many gigabytes
        each = {n: timing.interleaved({n: _Ours(x).call}, SECONDS)[n].ms_median for n, x in dense.items()}
        us["dense"] = dense_speed.together(problem, {n: 1e3 * each[n] / dense[n].batch for n in dense})
    return {name: round(x, 2) for name, x in us.items()}


def run(
    suite: str, stage_ids: list[str], folder: Path | None, peer_names: list[str],
    wanted: Callable[[Problem], bool] = lambda problem: True,
) -> bool:  # fmt: skip
    """Measure the problems of a suite in the directions of the stages, print, and with a folder write after
    each. Returns whether every output was right. Raises Usage where none is wanted, and where rows that are
    kept are of another environment."""
    problems = [named for named in SUITES[suite] if wanted(named.problem)]
    if not problems:
        raise Usage(f"no problem of the suite {suite!r} is of these lengths, head dims and masks")
    found = peers.versions([x for x in peer_names if x in PEERS])
    environment, passed = timing.environment(found), True
    asked = [x.problem.with_(direction=DIRECTIONS[stage_id]) for stage_id in stage_ids for x in problems]
    for stage_id in stage_ids if folder else ():
        row_files.refuse(DIRECTIONS[stage_id], environment, folder, place=suite)
    ahead(job for problem in asked for job in kernels(problem))
    key_of = lambda row: (row["name"], row["problem"])
    for stage_id in stage_ids:
        direction = DIRECTIONS[stage_id]
        every = [(x.name, str(x.problem.with_(direction=direction))) for x in SUITES[suite]]
        for named in sorted(problems, key=lambda named: named.problem.flops):
            problem = named.problem.with_(direction=direction)
            try:
                us = measure(problem, list(found))
                row = {"name": named.name, "problem": str(problem), "flops": problem.flops, "us": us}
                print(line_of(row), flush=True)
                if folder:
                    row_files.add(row, key_of, every, direction, environment, folder, place=suite)
            except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
                print(f"{named.name}: {problem}: {error}", flush=True)
                passed = False
            torch.cuda.empty_cache()
    return passed


def line_of(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    us = row["us"]
    rate = lambda name: row["flops"] / us[name] * 1e-6
    best = min((name for name in us if name in PEERS), key=us.get, default=None)
    ratio = f", {us[best] / us[OURS]:.3f} × {best}" if best else ""
    dense = f", {us['dense'] / us[OURS]:.3f} × dense" if "dense" in us else ""
    return f"{row['name']}: {row['problem']}: {us[OURS]:.1f} µs, {rate(OURS):.0f} TFLOP/s{ratio}{dense}  {us}"
