"""Decoding on a GPU: cases through the public call, and its time beside the peers'.

python bench.py decode            every case, then every row of ROWS; --save keeps results/<gpu>/decode/
"""

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from hopper_attention import flash_attn_with_kvcache
from hopper_attention.cache import write_atomically
from hopper_attention.checks import E4M3
from hopper_attention.launch import DECODE
from hopper_attention.precompile import ahead

from . import decoding_model as model
from . import decoding_records, judging, results, timing
from .command import as_usage
from .decoding_cases import ROWS, Case, Row, cases, kernel_of
from .decoding_stress import STRESS, drops_wrong_guesses, stress, waits_for_the_launch_before
from .decoding_timing import Pool, time_row, versions
from .judging import Verdict


def inputs_of(case: Case, device: str = "cuda") -> tuple[dict[str, object], torch.Tensor, torch.Tensor]:
    """Arguments of `flash_attn_with_kvcache`, and the keys and values that count as (batch, most keys, kv
    heads, head_dim) in fp64."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    kind = E4M3 if case.eight_bits else dtype
    added, batch = case.appends, len(case.lengths)
    lengths = [max(n, added) for n in case.lengths]
    most = max(1, *lengths)
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
    o = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((len(q), q.shape[2], q.shape[1]), -math.inf, dtype=torch.float64, device=q.device)
    for b, n in enumerate(max(n, case.appends) for n in case.lengths):
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


def judge(case: Case, device: str = "cuda") -> tuple[str | None, Verdict | None]:
    """What is wrong with the call's results, or None, and how far they are off. The rule is the forward
    pass's; a sequence's queries and heads are the rows of one head, so that there are blocks of them."""
    arguments, k, v = inputs_of(case, device)
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
        return "two runs differ", None
    exact, exact_lse = expected(case, q, k, v)
    rounded, _ = expected(case, q, k, v, torch.float16 if case.eight_bits else q.dtype)
    rows = lambda x: x.transpose(1, 2).flatten(1, 2)[:, None]
    of_lse = (x.flatten(1)[:, None] for x in (lse, exact_lse))
    verdict = judging.judge(*map(rows, (o, exact, rounded)), *of_lse)
    return next(iter(verdict.failures), _cache_is_wrong(case, arguments, before)), verdict


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


# ---- the command ------------------------------------------------------------------------------------------


def run(save: Path | None = None, console: Console | None = None) -> bool:
    """Judge every case, time every row; whether all cases passed. What is saved are the record of the machine
    code that passed, and when all rows are there the times. Raises RuntimeError where a row is wrong."""
    console = console or Console()
    environment = timing.environment(versions())
    if save:
        folder = save / results.gpu_folder(environment["gpu"])
        record, path = folder / "checks" / "decode.json", folder / "decode" / "bench.json"
        with as_usage(OSError):
            results.probe(record), results.probe(path)
    timed = [kernel_of(row) for row in ROWS]
    kernels = *map(kernel_of, cases()), *timed, *((what, options | {"pdl": False}) for what, options in timed)
    ahead((DECODE, *x) for x in kernels)
    passed, errors = judge_all(console)
    pool, rows = Pool(), []
    for row in STRESS:
        same = stress(row, pool)
        console.print(f"{row}: 100,000 launches beside copies: {'the same bits' if same else 'FAIL'}")
        passed &= same
    waits = waits_for_the_launch_before(pool)
    console.print(f"what the launch before wrote is {'seen' if waits else 'FAIL: not always seen'}")
    passed &= waits
    drops = drops_wrong_guesses(pool)
    found = "seen" if drops else "FAIL: not always seen"
    console.print(f"what is written when a launch has begun is {found}")
    passed &= drops
    if save and passed:
        console.print(f"wrote {decoding_records.record_of(environment).save(record)}")
    data: dict[str, object] = {"environment": environment, "cases": len(list(cases()))}
    data |= {"errors": errors, "same_bits_100000_times": [str(row) for row in STRESS], "rows": rows}
    for row in ROWS:
        rows.append(time_row(row, pool))
        console.print(line_of(row, rows[-1]["us"], rows[-1].get("reads_us")), soft_wrap=True, highlight=False)
    if save and passed:  # all rows or none: those of another run stay
        write_atomically(path, json.dumps(data, indent=1).encode())
        console.print(f"wrote {path}")
    return passed


def judge_all(console: Console) -> tuple[bool, dict[str, float]]:
    """Whether every case passes, and the largest of what `Verdict` has of each."""
    failures, verdicts = 0, []
    every = list(cases())
    for case in every:
        try:
            wrong, verdict = judge(case)
            verdicts.append(verdict)
        except (TypeError, ValueError) as error:  # refused
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            failures += 1
            console.print(f"FAIL {case}: {wrong}", soft_wrap=True)
    console.print(f"{len(every) - failures} of {len(every)} cases passed")
    errors = largest(verdicts)
    console.print("at most " + ", ".join(f"{name} {x:.3g}" for name, x in errors.items()), soft_wrap=True)
    return failures == 0, errors


def largest(verdicts: Iterable[Verdict | None]) -> dict[str, float]:
    """The largest of each number over the verdicts that there are; nothing without one."""
    found = [x for x in verdicts if x]
    names = [field.name for field in fields(Verdict) if field.name != "failures"]
    return {name: max(getattr(x, name) for x in found) for name in names} if found else {}


def line_of(row: Row, us: dict[str, float], reads: float | None = None) -> str:
    own = us.get("hopper_attention")
    best = min((x for name, x in us.items() if name != "hopper_attention"), default=None)
    text = f"{row!s:48} " + "  ".join(f"{name} {x:.1f}" for name, x in us.items())
    if own:
        text += f"   {row.bytes / own / 1e6:.2f} TB/s" + (f"  {best / own:.2f} ×" if best else "")
        text += f"  loads alone {reads / own:.3f} of it" if reads else ""
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
