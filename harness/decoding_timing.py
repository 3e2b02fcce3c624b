"""How long decode takes on a GPU, beside cuDNN, FlashAttention-2, FlashAttention-3 and FlashInfer.

A row is timed as a CUDA graph of calls over caches that rotate through more than L2 holds, so that K and V
come from memory in each; and as single calls, which a host that does not capture graphs sees.
"""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hopper_attention import flash_attn_with_kvcache
from hopper_attention.checks import E4M3
from hopper_attention.kernels import calls_decode
from hopper_attention.kernels.contract import Problem

from . import decoding_records, fa3, flashinfer_peer
from .decoding_cases import Row, kernel_of
from .read_only import compile_read_only

ROTATION_BYTES = 1.05e9  # of caches that calls go through: 20 times L2
CALLS = 40  # of a graph, at least
REPEATS = 9
AGREE, AGREE_E4M3 = 0.02, 0.1  # of the largest element: by how much a peer may differ, with e4m3 weights
SHORT = 256  # keys, of which a mask or a page is enough for a peer to be seen to have another
Call = Callable[[], object]


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


def in_pages(row: Row, caches, page: int = 0) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """A page table in random order, the same in every call, and the caches as pages; with `page`, of which a
    row without pages is then made, in the order of its keys."""
    page = row.page or page
    pages = math.ceil(row.keys / page)
    order = torch.arange(row.batch * pages)
    if row.page:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
    shape = -1, page, row.kv_heads, row.head_dim
    table = order.view(row.batch, pages).int().to(caches[0][0].device)
    return table, [[x.reshape(shape) for x in pair] for pair in caches]


def ours(row: Row, q: torch.Tensor, caches) -> list[Call]:
    options: dict[str, object] = {"causal": row.queries > 1}
    if row.reads_lengths:
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
    return launches(decoding_records.compiled(least, options | {"pdl": False}), row, q, caches)


def reads(row: Row, q: torch.Tensor, caches) -> list[Call]:
    """The loads of the same kernel, without what is computed of them."""
    _, options = kernel_of(row)
    if row.head_dim != 128 or options["rows"] != 8 or options["lengths"] or row.eight_bits:
        raise NotImplementedError("is made for whole caches in 16 bits and few rows")
    return launches(compile_read_only(row.head_dim, "bfloat16"), row, q, caches, cluster=1)


def launches(kernel: Callable[..., None], row: Row, q: torch.Tensor, caches, **changes: int) -> list[Call]:
    """A kernel compiled with these `changes` of a row's options, or with more that a launch does not see."""
    least, options = kernel_of(row)
    options |= changes
    problem = Problem(
        row.batch, row.heads, row.kv_heads, row.queries, row.keys, row.head_dim, least.causal,
        direction="decode",
    )  # fmt: skip
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    scratch = [
        torch.zeros(shape, dtype=getattr(torch, kind), device="cuda")
        for shape, kind in calls_decode.decode_scratch(problem, options, sms).values()
    ]
    together = calls_decode.together_of(problem, options, sms)
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
        if row.reads_lengths or row.eight_bits or row.queries > 1:
            raise NotImplementedError("takes neither lengths, pages nor a mask aligned at the bottom right")
        first = lambda x: x.transpose(1, 2)

        def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            options = {"enable_gqa": row.heads != row.kv_heads}
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*map(first, (q, k, v)), **options).transpose(1, 2)

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


def flashinfer(way: Callable[..., list[Call]]) -> Callable[[Row, torch.Tensor, object], list[Call]]:
    def calls(row: Row, q: torch.Tensor, caches) -> list[Call]:
        table, pages = in_pages(row, caches, flashinfer_peer.PAGE)
        return way(q, pages, table, row.lengths)

    return calls


PROVIDERS = {
    "hopper_attention": ours,
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    "fa3": fa3_calls,
    "flashinfer": flashinfer(flashinfer_peer.planned),
    "xqa": flashinfer(flashinfer_peer.xqa),
}


def versions() -> dict[str, str]:
    """Of the peers that are installed, as far as they have one of their own."""
    found = {}
    for name, of in (("fa3", fa3.version), ("flashinfer", flashinfer_peer.version)):
        with contextlib.suppress(ImportError):
            found[name] = of()
    return found


@dataclasses.dataclass(frozen=True)
class Captured:
    """Calls in a CUDA graph, and what they read, which the graph does not keep."""

    graph: torch.cuda.CUDAGraph
    calls: list[Call]


def captured(calls: list[Call]) -> Captured:
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
    return Captured(graph, calls)


def in_turns(graphs: dict[str, Captured]) -> dict[str, float]:
    """Microseconds of a call of each graph, all graphs taking turns: the median of replays behind a first."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(1 + REPEATS):
        for name, x in graphs.items():
            times[name].append(_elapsed(x.graph.replay) / len(x.calls))
    return {name: round(statistics.median(found[1:]), 2) for name, found in times.items()}


def single(calls: list[Call]) -> float:
    """Microseconds of a call where the host launches each: the slower of host and GPU."""

    def run() -> None:
        for call in calls:
            call()

    return _median(run) / len(calls)


def _median(run: Call) -> float:
    run()
    return statistics.median(_elapsed(run) for _ in range(REPEATS))


def _elapsed(run: Call) -> float:
    """Microseconds on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def check_agreement(
    found: torch.Tensor | Sequence[torch.Tensor], expected: torch.Tensor, within: float = AGREE
) -> None:
    """Raise RuntimeError where a call that returns o, or o first, computes something else."""
    o = found if isinstance(found, torch.Tensor) else found[0]
    off = (o - expected).abs().max() / expected.abs().max()
    if not off <= within:
        raise RuntimeError(f"off by {off:.2g} of the largest element")


def plain(row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """o of a row's first caches, by the formula in fp32, sequence by sequence: of pages by their table."""
    table = None
    if row.page:
        table, ((k, v),) = in_pages(row, [(k, v)])
    o = torch.empty(q.shape, device=q.device)
    for b, length in enumerate(row.lengths):
        rows = [x[b] if table is None else x[table[b]].flatten(0, 1) for x in (k, v)]
        keys, values = (x[:length].float().repeat_interleave(row.heads // row.kv_heads, 1) for x in rows)
        scores = torch.einsum("qhd,nhd->hqn", q[b].float(), keys) * row.head_dim**-0.5
        behind = torch.ones(row.queries, length, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(behind.triu(length - row.queries + 1), -torch.inf)
        o[b] = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values)
    return o


def time_row(row: Row, pool: Pool) -> dict[str, object]:
    """One row of the results: µs of each provider, in a graph and, of ours, called one by one; of
    some `reads_us`, what the loads take alone. Raises RuntimeError where ours are wrong, before the timing or
    behind it."""
    caches = pool.caches(row)
    q = torch.randn(row.batch, row.queries, row.heads, row.head_dim, device="cuda", dtype=torch.bfloat16)
    found: dict[str, object] = dataclasses.asdict(row) | {"bytes": row.bytes, "us": {}, "errors": {}}
    found["cubin_sha256"] = decoding_records.identity_of(row)
    graphs = {}
    within = AGREE_E4M3 if row.eight_bits else AGREE
    short = dataclasses.replace(row, keys=SHORT)
    pairs = (short, pool.caches(short)[:2]), (row, caches)
    judged = [(x, of, plain(x, q, *of[0])) for x, of in pairs]

    def judge(make: Callable[..., list[Call]]) -> None:
        for x, of, expected in judged:
            check_agreement(make(x, q, of)[0](), expected, within)

    judge(ours)  # who is wrong has no row
    for name, make in (PROVIDERS | {"without_pdl": plain_launches, "reads": reads}).items():
        try:
            if name in PROVIDERS:
                judge(make)
            graphs[name] = captured(make(row, q, caches))
        except Exception as error:  # a peer that does not take a row must not end the run
            found["errors"][name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    found["us"] = in_turns(graphs)
    judge(ours)
    found["without_pdl_us"] = found["us"].pop("without_pdl", None)
    if "reads" in found["us"]:
        found["reads_us"] = found["us"].pop("reads")
    found["errors"].pop("reads", None)
    found["single_us"] = round(single(ours(row, q, caches)), 2)
    return found
