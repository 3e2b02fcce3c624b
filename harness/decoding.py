"""Decoding on a GPU: cases through the public call, and its time beside the peers'.

    python bench.py decode            every case, then every row of ROWS; --save keeps results/<gpu>/decode/

A row is timed as a CUDA graph of calls over caches that rotate through more than L2 holds, so that K and V
come from memory in each; and as single calls, which a host that does not capture graphs sees.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hopper_attention import flash_attn_with_kvcache
from hopper_attention.cache import write_atomically
from hopper_attention.checks import E4M3
from hopper_attention.kernels import calls_decode
from hopper_attention.kernels.contract import Problem

from . import decoding_model as model
from . import decoding_records, fa3, results, timing
from .decoding_cases import ROWS, Case, Row, cases, kernel_of
from .reference import LSE_TOLERANCE, MAX_FACTOR, RMS_FACTOR

ROTATION_BYTES = 1.05e9  # of caches that calls go through: 20 times L2
CALLS = 40  # of a graph, at least
REPEATS = 9
Call = Callable[[], object]


def inputs_of(case: Case, device: str = "cuda") -> tuple[dict[str, object], torch.Tensor, torch.Tensor]:
    """Arguments of `flash_attn_with_kvcache`, and the keys and values that count as (batch, most keys, kv
    heads, head_dim) in fp64."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    kind = E4M3 if case.eight_bits else dtype
    most, batch = max(1, *case.lengths), len(case.lengths)
    added = min(case.queries, 4) if case.appends else 0
    lengths = [max(n, added) for n in case.lengths]
    most = max(most, added)
    q = torch.randn(batch, case.queries, case.group * case.kv_heads, case.head_dim, device=device).to(dtype)
    k, v = (torch.randn(batch, most, case.kv_heads, case.head_dim, device=device).to(kind) for _ in range(2))
    options: dict[str, object] = {"causal": case.causal, "batch_invariant": case.invariant}
    scales = [torch.ones(batch, case.kv_heads, device=device)] * 2
    if case.eight_bits:
        scales = [torch.rand(batch, case.kv_heads, device=device) + 0.5 for _ in range(2)]
        options |= {"k_descale": scales[0], "v_descale": scales[1]}
    exact = [x.double() * scale.double()[:, None, :, None] for x, scale in zip((k, v), scales)]
    page = case.page or most
    pages = [math.ceil(n / page) for n in lengths]
    table = torch.full((batch, max(1, *pages)), -1, dtype=torch.int32)
    order = torch.randperm(sum(pages) + 2)
    caches = [torch.full((len(order), page, *k.shape[2:]), math.nan, device=device).to(kind) for _ in "kv"]
    new = [torch.zeros(batch, added, *k.shape[2:], device=device).to(kind) for _ in "kv"]
    taken = iter(order.tolist())
    if not case.page:
        caches = [torch.full_like(k.float(), math.nan).to(kind) for _ in "kv"]
    for b, n in enumerate(lengths):
        for x, cache, of_new in zip((k, v), caches, new):
            of_new[b] = x[b, n - added : n]
            if not case.page:
                cache[b, : n - added] = x[b, : n - added]
        for p in range(pages[b]) if case.page else ():
            table[b, p] = next(taken)
            for x, cache in zip((k, v), caches):
                end = max(0, min(page, n - added - p * page))
                cache[table[b, p], :end] = x[b, p * page : p * page + end]
    options |= {"q": q, "k_cache": caches[0], "v_cache": caches[1], "window_size": (case.left, -1)}
    if not case.whole:
        options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device) - added
    if case.page:
        options["block_table"] = table.to(device)
    if added:
        options |= {"k": new[0], "v": new[1]}
    return options, *exact


def expected(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p_dtype: torch.dtype | None = None
):
    """(O, LSE) in float64; with `p_dtype` the yardstick: in fp32, with P and O rounded as the kernel rounds
    them."""
    exact = p_dtype is None
    kind = torch.float64 if exact else torch.float32
    added = min(case.queries, 4) if case.appends else 0
    o = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((len(q), q.shape[2], q.shape[1]), -math.inf, dtype=torch.float64, device=q.device)
    for b, n in enumerate(max(n, added) for n in case.lengths):
        keys, values = (x[b, :n].to(kind).repeat_interleave(case.group, 1) for x in (k, v))
        scores = torch.einsum("qhd,nhd->hqn", q[b].to(kind), keys) * q.shape[-1] ** -0.5
        place = torch.arange(q.shape[1], device=q.device)[:, None] + n - q.shape[1]
        at = torch.arange(n, device=q.device)
        hidden = (at > place) & case.causal
        if case.left >= 0:
            hidden = hidden | (at < place - case.left)
        scores = scores.masked_fill(hidden, -math.inf)
        largest = scores.amax(-1, keepdim=True) if n else scores.new_full((*scores.shape[:2], 1), -math.inf)
        p = (scores - largest.nan_to_num(neginf=0.0)).exp()
        total = p.sum(-1, keepdim=True)
        p = p if exact else p.to(p_dtype).to(kind)
        result = torch.einsum("hqn,nhd->qhd", p, values) / total.clamp(min=1e-30).transpose(0, 1)
        o[b] = (result if exact else result.to(q.dtype)).double()
        lse[b] = (largest + total.log())[..., 0].double()
    return o, lse


def judge(case: Case) -> str | None:
    """What is wrong with the call's results, or None."""
    arguments, k, v = inputs_of(case)
    caches = arguments["k_cache"], arguments["v_cache"]
    before = [x.clone() for x in caches]
    found = []
    for _ in range(3):
        for cache, x in zip(caches, before):
            cache.copy_(x)
        found.append(flash_attn_with_kvcache(**arguments, return_softmax_lse=True))
    (o, lse), q = found[0], arguments["q"]
    bits = lambda x: x.view(torch.int16 if x.element_size() == 2 else torch.int32)
    if not all(torch.equal(bits(a), bits(b)) for again in found[1:] for a, b in zip(again, found[0])):
        return "two runs differ"
    exact, exact_lse = expected(case, q, k, v)
    rounded, _ = expected(case, q, k, v, torch.float16 if case.eight_bits else q.dtype)
    if not torch.isfinite(o).all() or not torch.equal(torch.isfinite(lse), torch.isfinite(exact_lse)):
        return "not finite where it should be, or finite where not"
    error, slack = (o.double() - exact), (rounded - exact)
    rms = lambda x: x.square().mean().sqrt().item()
    if error.abs().max() > MAX_FACTOR * slack.abs().max():
        return f"max {error.abs().max() / slack.abs().max():.2f} × the yardstick's"
    if rms(error) > RMS_FACTOR * rms(slack):
        return f"rms {rms(error) / rms(slack):.2f} × the yardstick's"
    seen = torch.isfinite(exact_lse)
    off = ((lse.double() - exact_lse).abs() / exact_lse.abs().clamp(min=1))[seen]
    if off.numel() and off.max() > LSE_TOLERANCE:
        return f"LSE off by {off.max():.1e}"
    return _cache_is_wrong(case, arguments, before)


def _cache_is_wrong(case: Case, arguments: dict[str, object], before: list[torch.Tensor]) -> str | None:
    """Whether the caches are not what they were with the new keys and values in their places."""
    for name, was in zip("kv", before):
        wanted, new = was.view(torch.uint8), arguments.get(name)
        for b, n in enumerate(arguments["cache_seqlens"].tolist()) if new is not None else ():
            for i in range(new.shape[1]):
                place = b, n + i
                if case.page:
                    place = arguments["block_table"][b, (n + i) // case.page].item(), (n + i) % case.page
                wanted[place] = new.view(torch.uint8)[b, i]
        if not torch.equal(arguments[f"{name}_cache"].view(torch.uint8), wanted):
            return f"{name}_cache is not what it should be"
    return None


# ---- times ------------------------------------------------------------------------------------------------


class Pool:
    """Random memory that all caches are views of: a row may rotate through gigabytes."""

    def __init__(self) -> None:
        self.memory = torch.empty(int(2.2e9), dtype=torch.bfloat16, device="cuda")
        for piece in self.memory.split(2**28):
            piece.normal_()

    def caches(self, row: Row) -> list[tuple[torch.Tensor, torch.Tensor]]:
        memory = self.memory
        if row.eight_bits:  # of which no code is NaN
            memory = (memory.view(torch.uint8)[: int(2.4e9)] & 0xBF).view(E4M3)
        shape = row.batch, row.keys, row.kv_heads, row.head_dim
        size = math.prod(shape)
        count = max(2, math.ceil(ROTATION_BYTES / (2 * size * memory.element_size())))
        views = [memory[i * size : (i + 1) * size].view(shape) for i in range(2 * count)]
        return list(zip(views[::2], views[1::2]))


def in_pages(row: Row, caches) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """A page table in random order, and the caches as pages."""
    pages = math.ceil(row.keys / row.page)
    order = torch.randperm(row.batch * pages, device="cuda").int()
    shape = -1, row.page, row.kv_heads, row.head_dim
    return order.view(row.batch, pages), [[x.reshape(shape) for x in pair] for pair in caches]


def ours(row: Row, q: torch.Tensor, caches) -> list[Call]:
    options: dict[str, object] = {"causal": row.queries > 1}
    if row.page or row.ragged:
        options["cache_seqlens"] = torch.tensor(row.lengths, dtype=torch.int32, device="cuda")
    if row.page:
        options["block_table"], caches = in_pages(row, caches)
    if row.eight_bits:
        one = torch.ones((), device="cuda")
        options |= {"k_descale": one, "v_descale": one}
    return [lambda k=k, v=v: flash_attn_with_kvcache(q, k, v, **options) for k, v in caches]


def plain_launches(row: Row, q: torch.Tensor, caches) -> list[Call]:
    """The same kernel, launched when the one before it has ended: without programmatic dependent launch."""
    least, options = kernel_of(row)
    kernel = decoding_records.compiled(least, options | {"pdl": False})
    problem = Problem(
        row.batch, row.heads, row.kv_heads, row.queries, row.keys, row.head_dim, least.causal,
        direction="decode",
    )  # fmt: skip
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    scratch = [
        torch.zeros(shape, dtype=getattr(torch, kind), device="cuda")
        for shape, kind in calls_decode.decode_scratch(problem, options, sms).values()
    ]
    together = calls_decode.together_of(calls_decode.columns_of(problem), sms)
    lengths = table = None
    if options["lengths"]:
        lengths = torch.tensor(row.lengths, dtype=torch.int32, device="cuda")
    if row.page:
        table, caches = in_pages(row, caches)
    descale = torch.ones(row.batch, row.kv_heads, device="cuda") if row.eight_bits else None
    o, lse = torch.empty_like(q), q.new_empty(row.batch, row.heads, row.queries, dtype=torch.float32)
    rest = lengths, table, (None, None), (descale, descale), scratch, together, row.head_dim**-0.5, None
    return [lambda k=k, v=v: calls_decode.launch_decode(kernel, q, k, v, o, lse, *rest) for k, v in caches]


def sdpa(backend: SDPBackend) -> Callable[[Row, torch.Tensor, object], list[Call]]:
    def calls(row: Row, q: torch.Tensor, caches) -> list[Call]:
        if row.page or row.ragged or row.eight_bits or row.queries > 1:
            raise NotImplementedError("takes neither lengths, pages nor a mask aligned at the bottom right")
        first = lambda x: x.transpose(1, 2)

        def call(k: torch.Tensor, v: torch.Tensor) -> None:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(*map(first, (q, k, v)), enable_gqa=row.heads != row.kv_heads)

        return [lambda k=k, v=v: call(k, v) for k, v in caches]

    return calls


def fa3_calls(row: Row, q: torch.Tensor, caches) -> list[Call]:
    if row.eight_bits:
        raise NotImplementedError("takes e4m3 keys only with e4m3 queries")
    options = {"is_causal": row.queries > 1, "num_splits": 0, "window_size_left": -1, "window_size_right": -1}
    options["seqused_k"] = torch.tensor(row.lengths, dtype=torch.int32, device="cuda")
    if row.page:
        options["page_table"], caches = in_pages(row, caches)
    for build in fa3.builds().values():
        try:
            calls = [fa3._call(build.fwd, q=q, k=k, v=v, **options) for k, v in caches]
            calls[0]()
            return calls
        except Exception:  # built for another PyTorch, or without what is asked
            continue
    raise RuntimeError("no build of FlashAttention-3 runs this")


PROVIDERS = {
    "hopper_attention": ours,
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    "fa3": fa3_calls,
}


def replayed(calls: list[Call]) -> float:
    """Microseconds of a call, in a graph of them all: the median of replays."""
    calls = calls * max(1, CALLS // len(calls))
    calls[0]()
    torch.cuda.synchronize()  # scratch is shared by calls that come one after another: not by two streams
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    return _median(graph.replay) / len(calls)


def single(calls: list[Call]) -> float:
    """Microseconds of a call where the host launches each: the slower of host and GPU."""

    def run() -> None:
        for call in calls:
            call()

    return _median(run) / len(calls)


def _median(run: Call) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def time_row(row: Row, pool: Pool) -> dict[str, object]:
    """One row of the results: µs of each provider, in a graph and, of ours, called one by one."""
    caches = pool.caches(row)
    q = torch.randn(row.batch, row.queries, row.heads, row.head_dim, device="cuda", dtype=torch.bfloat16)
    found: dict[str, object] = dataclasses.asdict(row) | {"bytes": row.bytes, "us": {}, "errors": {}}
    found["cubin_sha256"] = decoding_records.identity_of(row)
    for name, make in PROVIDERS.items():
        try:
            calls = make(row, q, caches)
            found["us"][name] = round(replayed(calls), 2)
            if name == "hopper_attention":
                found["single_us"] = round(single(calls), 2)
                found["without_pdl_us"] = round(replayed(plain_launches(row, q, caches)), 2)
        except Exception as error:  # a peer that does not take a row must not end the run
            found["errors"][name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return found


def stress(pool: Pool, launches: int = 100_000) -> bool:
    """Whether so many launches, beside a stream of copies that takes memory and SMs from them, give the same
    bits as the first. A kernel that waited for another CTA would hang here sooner or later."""
    row = Row(32, 32, 8, 1, 2048, ragged=True)
    q = torch.randn(row.batch, 1, row.heads, row.head_dim, device="cuda", dtype=torch.bfloat16)
    [call] = ours(row, q, pool.caches(row)[:1])
    first, graph, each = call().clone(), torch.cuda.CUDAGraph(), 100
    with torch.cuda.graph(graph):
        outputs = [call() for _ in range(each)]
    beside, source = torch.cuda.Stream(), torch.ones(2**26, device="cuda")
    target = torch.empty_like(source)
    for i in range(launches // each):
        graph.replay()
        if i % 10 == 0:
            with torch.cuda.stream(beside):
                target.copy_(source)
    torch.cuda.synchronize()
    return all(torch.equal(x.view(torch.int16), first.view(torch.int16)) for x in outputs)


def waits_for_the_launch_before(pool: Pool, replays: int = 50) -> bool:
    """Whether calls in a graph see what the kernels right before them wrote: a query, and a cache's last
    values. They begin before those have ended."""
    row = Row(8, 32, 8, 1, 4096)
    k, v = (x.clone() for x in pool.caches(row)[0])
    q = torch.empty(row.batch, 1, row.heads, row.head_dim, device="cuda", dtype=torch.bfloat16)
    inputs = [(torch.randn_like(q), torch.randn_like(v[:, -300:])) for _ in range(24)]

    def steps() -> list[torch.Tensor]:
        outputs = []
        for of_q, of_v in inputs:
            q.copy_(of_q)
            v[:, -300:].copy_(of_v)
            outputs.append(flash_attn_with_kvcache(q, k, v))
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
        return outputs

    wanted, graph = steps(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = steps()
    same = True
    for _ in range(replays):
        for o in outputs:
            o.zero_()
        graph.replay()
        same &= all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(outputs, wanted))
    return same and not torch.equal(wanted[0], wanted[1])


# ---- the command ------------------------------------------------------------------------------------------


def run(save: Path | None = None, console: Console | None = None) -> bool:
    """Judge every case, time every row; whether all cases passed. What is saved are the times, and the record
    of the machine code that passed."""
    console = console or Console()
    passed = judge_all(console)
    environment = timing.environment({})
    pool, rows = Pool(), []
    steady = stress(pool)
    console.print(f"100,000 launches beside copies: {'the same bits' if steady else 'FAIL: other bits'}")
    waits = waits_for_the_launch_before(pool)
    console.print(f"what the launch before wrote is {'seen' if waits else 'FAIL: not always seen'}")
    steady &= waits
    for row in ROWS:
        found = time_row(row, pool)
        rows.append(found)
        console.print(line_of(row, found["us"]), soft_wrap=True, highlight=False)
    if save and steady and passed:
        path = save / results.gpu_folder(environment["gpu"]) / "decode" / "bench.json"
        results.probe(path)
        data = {"environment": environment, "cases": len(list(cases())), "rows": rows}
        write_atomically(path, json.dumps(data, indent=1).encode())
        record = decoding_records.record_of(environment)
        at = save / results.gpu_folder(environment["gpu"]) / "checks" / "decode.json"
        results.probe(at)
        console.print(f"wrote {path} and {record.save(at)}")
    return steady and passed


def judge_all(console: Console) -> bool:
    failures = 0
    every = list(cases())
    for case in every:
        try:
            wrong = judge(case)
        except (TypeError, ValueError) as error:  # refused
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            failures += 1
            console.print(f"FAIL {case}: {wrong}", soft_wrap=True)
    console.print(f"{len(every) - failures} of {len(every)} cases passed")
    return failures == 0


def line_of(row: Row, us: dict[str, float]) -> str:
    own = us.get("hopper_attention")
    best = min((x for name, x in us.items() if name != "hopper_attention"), default=None)
    text = f"{row!s:48} " + "  ".join(f"{name} {x:.1f}" for name, x in us.items())
    if own:
        text += f"   {row.bytes / own / 1e6:.2f} TB/s" + (f"  {best / own:.2f} ×" if best else "")
    return text


def run_model(console: Console) -> bool:
    """Without a GPU: the model of split and combine against the definition."""
    import numpy as np

    random_ = np.random.default_rng(0)
    lengths = [0, 1, 130, 700]
    q = random_.standard_normal((4, 4, 8, 64))
    k, v = (random_.standard_normal((4, 700, 2, 64)) for _ in range(2))
    worst = 0.0
    for unit in (0, 2):
        plan = model.plan_of(4, 8, 2, 64, unit)
        pairs = zip(
            *(f(q, k, v, lengths, causal=True) for f in (partial(model.decode, plan), model.attention))
        )
        finite = (map(partial(np.nan_to_num, neginf=0.0), pair) for pair in pairs)
        worst = max(worst, *(float(np.abs(a - b).max()) for a, b in finite))
    console.print("No Hopper GPU here: no kernel was executed.")
    console.print(f"model of split and combine: off by {worst:.1e} from attention in float64")
    return worst < 1e-12
