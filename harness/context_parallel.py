"""`python bench.py context_parallel`: attention of a sequence that lies on several GPUs.

Every row is one size on P GPUs, forward, backward and both: our ring with and without messages, the messages
alone, one GPU with 1/P of the work (all tokens, 1/P of the heads), our ring with the communicator's messages
where copy engines would do, PyTorch's own ring, and this ring over FlashAttention-3's kernels. A time is the
median over turns of the slowest rank's. TFLOP/s are of a GPU: 1/P of the whole problem's FLOPs over the time.
"""

import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from harness import context_model, context_reference, fa3, reference, results, row_files, timing
from harness.command import Usage, as_usage
from harness.context_rings import (
    DIRECTIONS,
    HEAD_DIM,
    Gathered,
    Ring,
    Size,
    Uncomputed,
    Unsent,
    alone,
    fa3_kernels,
    torch_ring,
)
from hopper_attention.cache import write_atomically
from hopper_attention.integrations import context_parallel as cp
from hopper_attention.kernels import ladder
from hopper_attention.launch import BACKWARD, FORWARD

MARGINS = (0, 4, 8, 16)
MARGINS_MAX = 16384  # tokens of a GPU for which margins are timed
TIMEOUT = datetime.timedelta(seconds=120)
CHECK_MAX = 32768  # tokens of a whole sequence of which every row is judged


SIZES = [
    Size(16384, 32, 8), Size(4096, 32, 32), Size(8192, 32, 8), Size(65536, 32, 8),
    Size(4096, 32, 8), Size(8192, 32, 8, causal=False),
]  # fmt: skip
JUDGED = [  # and not timed, on one rank and on all
    Size(8192, 32, 8), Size(8192, 32, 8, causal=False), Size(4096, 32, 32), Size(4096, 32, 32, causal=False),
]  # fmt: skip


# ---- timing and judging -----------------------------------------------------------------------------------


def timed(calls: dict[str, Callable[[], object]], seconds: float, device) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, taking turns: of a turn the slowest rank's, of those the median and the
    interquartile range. Every rank starts a turn's call behind one small reduction over all."""
    flush = torch.empty(timing.FLUSH_BYTES, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    rest, repeats = {}, {}
    for name, call in calls.items():  # warm up, and how often
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        rest[name] = max(1.5e-3, min(timing.REST * took.item(), 0.02))
        repeats[name] = max(3, min(20, int(seconds / took.item())))
    for turn in range(max(repeats.values())):
        for name, call in calls.items():
            if turn >= repeats[name]:
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(int(rest[name] * timing.CYCLES_PER_SECOND))
            dist.all_reduce(one)
            start.record()
            call()
            end.record()
            pairs[name].append((start, end))
        torch.cuda.synchronize()
    found = {}
    for name, events in pairs.items():
        ms = torch.tensor([start.elapsed_time(end) for start, end in events], device=device)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        low, _, high = statistics.quantiles(ms.tolist(), n=4, method="inclusive")
        found[name] = {"ms": statistics.median(ms.tolist()), "ms_iqr": high - low}
    return found


def judged(size: Size, ring: Ring, inputs, group: dist.ProcessGroup) -> dict[str, object]:
    """The pass rule on one key head and its query heads of the whole sequence, on rank 0; of a long sequence
    on some of its rows and keys."""
    ranks, of_one = ring.exchange.ranks, size.heads // size.kv_heads
    o, lse, dq, dk, dv = ring.run("both", size, *inputs)
    q, k, v, do = inputs
    head = 1 if size.kv_heads > 1 else 0
    of_q = lambda x: x[:, head * of_one : (head + 1) * of_one]
    of_k = lambda x: x[:, head : head + 1]
    wanted = {"q": of_q(q), "k": of_k(k), "v": of_k(v), "do": of_q(do), "o": of_q(o), "lse": of_q(lse),
              "dq": of_q(dq), "dk": of_k(dk), "dv": of_k(dv)}  # fmt: skip
    whole = {}
    for name, x in wanted.items():
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x, group=group)
        whole[name] = cp.unshard(parts)
    if ring.exchange.rank:
        return {}
    rounding = lambda stage, direction: reference.rounding_of(
        *ladder.load(stage), size.problem(ranks, direction), **ladder.load(stage)[0].options
    )
    roundings = rounding(FORWARD, "fwd"), rounding(BACKWARD, "bwd")
    if size.tokens * ranks <= CHECK_MAX:
        verdicts = context_reference.whole(whole, size.causal, ranks, *roundings)
    else:
        verdicts = context_reference.slices(whole, size.causal, *roundings)
    say = lambda x: {"passed": x.passed, "max_ratio": x.max_ratio, "rms_ratio": x.rms_ratio,
                     "lse_error": x.lse_error, "failures": list(x.failures)[:3]}  # fmt: skip
    return {name: say(verdict) for name, verdict in verdicts.items()}


def made(size: Size, rank: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v and dO of a rank."""
    generator = torch.Generator(device).manual_seed(rank)
    make = lambda h: torch.randn(
        1, size.tokens, h, HEAD_DIM, device=device, dtype=torch.bfloat16, generator=generator
    ).transpose(1, 2)
    return [make(size.heads), make(size.kv_heads), make(size.kv_heads), make(size.heads)]


def row_of(size: Size, inputs: list[torch.Tensor], group: dist.ProcessGroup) -> dict[str, object]:
    """What the pass rule says, on a group's first rank."""
    exchange = cp.exchange_for(group, *inputs[1:3])
    today = datetime.date.today().isoformat()
    row = {"size": asdict(size), "ranks": exchange.ranks, "errors": {}, "date": today}
    row["checks"] = judged(size, Ring(exchange), inputs, group)
    row["messages"] = "copy engines" if type(exchange) is not cp.Exchange else "communicator"
    return row


def measure(
    size: Size, group: dist.ProcessGroup, device: torch.device, options: dict[str, object]
) -> Iterator[dict[str, object]]:
    """A size's row, again with each direction."""
    ranks = dist.get_world_size(group)
    _, k, v, _ = inputs = made(size, dist.get_rank(group), device)
    row = row_of(size, inputs, group)
    yield row
    wrong = torch.tensor([float(not all(x["passed"] for x in row["checks"].values()))], device=device)
    dist.all_reduce(wrong)
    if wrong.item():
        return
    exchange = lambda: cp.exchange_for(group, k, v)
    ours = Ring(exchange())
    margins = [m for m in MARGINS if m] if options.get("margins") and size.tokens <= MARGINS_MAX else []
    saved = ours.run("forward", size, *inputs)
    for direction in DIRECTIONS:
        calls: dict[str, Callable[[], object]] = {}
        of = lambda ring, direction=direction: lambda: ring.run(direction, size, *inputs, saved)
        calls["ours"] = of(ours)
        calls["compute"] = of(Ring(Unsent(group)))
        calls["messages"] = of(Ring(exchange(), Uncomputed().kernels()))
        if size.kv_heads % ranks == 0:
            calls["alone"] = alone(direction, size, ranks, *inputs)
        calls["all-gather"] = of(Gathered(group))
        calls["communicator"] = of(Ring(cp.Exchange(group)))
        for m in margins:
            calls[f"communicator, margin {m}"] = of(Ring(cp.Exchange(group), margin=m))
        if options.get("peers", True):
            try:
                kernels = fa3_kernels()
                calls["fa3 ring"] = of(Ring(exchange(), kernels))
                calls["fa3 ring"]()
            except Exception as error:
                calls.pop("fa3 ring", None)
                row["errors"]["fa3 ring"] = repr(error)[:300]
        row[direction] = timed(calls, 0.1, device)
        del calls
        for name, backend, mine in (
            ("torch, cudnn", SDPBackend.CUDNN_ATTENTION, False),
            ("torch, enable()", SDPBackend.FLASH_ATTENTION, True),
        ):
            if not options.get("peers", True) or not size.causal or direction == "backward":
                continue
            try:
                with torch_ring(size, ranks, *inputs, direction == "both", backend, mine) as call:
                    row[direction] |= timed({name: call}, 0.1, device)
            except Exception as error:
                row["errors"][f"{name}, {direction}"] = repr(error)[:300]
        for time_ in row[direction].values():
            time_["tflops"] = size.flops(ranks, direction) / time_["ms"] / 1e9
        row[direction]["overlap"] = overlap(row[direction])
        torch.cuda.empty_cache()
        yield row


def overlap(times: dict[str, dict[str, float]]) -> float | None:
    """(Tc + Tm − Tboth)/min(Tc, Tm); None where times vary by more than half of what it is a part of."""
    compute, messages, together = (times[x]["ms"] for x in ("compute", "messages", "ours"))
    least = min(compute, messages)
    if times["compute"]["ms_iqr"] + times["ours"]["ms_iqr"] > 0.5 * least:
        return None
    return (compute + messages - together) / least


def show(row: dict[str, object]) -> None:
    size, ranks = Size(**row["size"]), row["ranks"]
    for name, x in row["checks"].items():
        print(f"{size} × {ranks}, {name}: {x}", flush=True)
    for direction in DIRECTIONS:
        if direction not in row:
            continue
        times = {name: x for name, x in row[direction].items() if name != "overlap"}
        rate = lambda name: times[name]["tflops"] if name in times else float("nan")
        known = row[direction]["overlap"]
        share = f"{rate('ours') / rate('alone'):.1%} of one GPU"
        share += "" if known is None else f", overlap {known:.1%}"
        print(f"{size} × {ranks}, {direction}: {rate('ours'):.0f} TFLOP/s a GPU, {share}", flush=True)
        for name, x in times.items():
            print(f"    {name:18} {x['ms']:9.3f} ± {x['ms_iqr']:.3f} ms {x['tflops']:6.0f}", flush=True)
    if row["errors"]:
        print(f"    errors: {row['errors']}", flush=True)


# ---- processes --------------------------------------------------------------------------------------------


def rank_main(rank: int, ranks: int, options: dict[str, object]) -> None:
    """One rank's process."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29513")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not used here, and asks for rights
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, timeout=TIMEOUT, device_id=device)
    group = dist.group.WORLD
    if options.get("priority"):
        of_nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        group = dist.new_group(list(range(ranks)), pg_options=of_nccl)
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, object]) -> None:
        if rank:
            return
        rows[:] = [x for x in rows if x is not row] + [row]
        rows.sort(key=place_of)
        if options.get("save"):
            found = {"environment": about, "rows": rows}
            write_atomically(Path(options["save"]), json.dumps(found, indent=1).encode())

    about = environment(ranks) if rank == 0 else {}
    single = dist.new_group([0])
    for size in options.get("judged", ()):
        inputs = made(size, rank, device)
        for members in (single, group) if rank == 0 else (group,):
            row = row_of(size, inputs, members)
            keep(row)
            if rank == 0:
                show(row)
    for size in options["sizes"]:
        for row in measure(size, group, device, options):
            keep(row)
        if rank == 0:
            show(row)
    dist.destroy_process_group()


def environment(ranks: int) -> dict[str, object]:
    return timing.environment({"fa3": fa3.version()}) | {
        "gpus": ranks,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def spawn(options: dict[str, object], ranks: int | None = None) -> None:
    """Run on the GPUs that are visible, a process each; under torchrun this process is one."""
    if "RANK" in os.environ:
        rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options)
        return
    ranks = ranks or torch.cuda.device_count()
    torch.multiprocessing.spawn(rank_main, (ranks, options), nprocs=ranks)


def run(save: Path | None, tokens: int | None = None) -> bool:
    """All sizes, or those of so many tokens of a GPU, on the GPUs that are visible; whether every check
    passed. Then with `save` into results/<gpu>/context_parallel/bench.json, where rows of other sizes stay.
    Raises Usage before anything is measured."""
    wanted = {
        name: [x for x in sizes if tokens in (None, x.tokens)]
        for name, sizes in (("sizes", SIZES), ("judged", JUDGED))
    }
    if not any(wanted.values()):
        known = sorted({x.tokens for x in SIZES + JUDGED})
        raise Usage(f"context_parallel has no size of {tokens} tokens a GPU: there are {known}")
    path, rows = None, []
    if save:
        here = environment(torch.cuda.device_count())
        place = save, "bench", here, "context_parallel"
        path = row_files.path_of(*place)
        with as_usage(ValueError, OSError):
            results.probe(path)
            if tokens is not None:  # those of other sizes stay
                rows = [x for x in row_files.rows_to_join(*place)[0] if _is_of_another(x, tokens)]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.json"
        spawn({**wanted, "margins": True, "save": str(file)})
        if not file.exists():
            return True  # under torchrun, a rank that is not the first
        found = json.loads(file.read_text())
    passed = all(check["passed"] for row in found["rows"] for check in row["checks"].values())
    if path and passed:
        found["rows"] = sorted(rows + found["rows"], key=place_of)
        write_atomically(path, json.dumps(found, indent=1).encode())
    return passed


def place_of(row: dict[str, Any]) -> int:
    """Where a row stands among all."""
    return (SIZES + JUDGED).index(Size(**row["size"]))


def _is_of_another(row: dict[str, Any], tokens: int) -> bool:
    """Whether it is of a size that there is, but for other tokens."""
    size = Size(**row["size"])
    return size in SIZES + JUDGED and size.tokens != tokens


def run_model(print_: Callable[[str], None] = print) -> bool:
    """Without GPUs: what the model says of 2 to 1024 of them."""
    rates = context_model.H200
    print_("no Hopper GPUs here: predicted efficiency of a causal forward and backward, 32:8 heads of 128")
    for ranks in (2, 8, 64, 1024):
        found = [
            context_model.predict(n, 32, 8, HEAD_DIM, ranks, rates, context_model.NVLINK, True).efficiency
            for n in (4096, 8192, 16384, 65536)
        ]
        print_(f"{ranks:5} GPUs, 4k 8k 16k 64k tokens each: " + " ".join(f"{x:.1%}" for x in found))
    return all(context_model.steps_are_equal(ranks) for ranks in (1, 2, 3, 8))
