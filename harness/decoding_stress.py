"""What decode must stand on a GPU besides its cases: many launches while memory and SMs are taken from it,
and launches that begin before the one before them has ended."""

from collections.abc import Callable

import torch

from hopper_attention import flash_attn_with_kvcache

from .decoding_cases import Row
from .decoding_timing import Call, Pool, ours
from .late_writes import compile_late_writes

STRESS = [
    Row(32, 32, 8, 1, 2048, ragged=True), Row(4, 16, 1, 1, 4096), Row(1, 32, 8, 8, 4096),
    Row(8, 32, 8, 1, 1024, page=16),
]  # fmt: skip

LATE = [
    Row(8, 32, 8, 1, 4096, ragged=True), Row(8, 32, 8, 1, 4096, page=64), Row(8, 32, 8, 1, 4096, page=16),
    Row(3, 32, 8, 4, 2048, page=64), Row(8, 32, 8, 1, 4096, 64, page=128),
    Row(2, 32, 8, 4, 2048, ragged=True), Row(2, 32, 8, 4, 2048, 256, page=64),
]  # fmt: skip


def stress(row: Row, pool: Pool, launches: int = 100_000) -> bool:
    """Whether so many launches, beside a stream of copies that takes memory and SMs from them, give the same
    bits as the first. A kernel that waited for a CTA that need not be there would hang here sooner or
    later."""
    q = torch.randn(row.batch, row.queries, row.heads, row.head_dim, device="cuda", dtype=torch.bfloat16)
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
    """Whether calls in a graph see what the kernels right before them wrote: a query and a cache's last
    values; lengths and a page table, which a call has looked at before. They begin before those have ended.
    """
    row = Row(8, 32, 8, 1, 4096)
    k, v = (x.clone() for x in pool.caches(row)[0])
    q = torch.empty(row.batch, 1, row.heads, row.head_dim, device="cuda", dtype=torch.bfloat16)
    last = v[:, -300:]
    inputs = [(torch.randn_like(q), torch.randn_like(last)) for _ in range(24)]
    if not _sees_what_changes(inputs, _copies((q, last)), lambda: flash_attn_with_kvcache(q, k, v), replays):
        return False
    k, v = (x.view(-1, 64, row.kv_heads, row.head_dim) for x in (k, v))
    lengths = torch.empty(row.batch, dtype=torch.int32, device="cuda")
    table = torch.empty(row.batch, row.keys // 64, dtype=torch.int32, device="cuda")
    inputs = [
        (
            torch.randint_like(lengths, 1, row.keys + 1),
            torch.randperm(len(k), device="cuda").int().view_as(table),
        )
        for _ in range(24)
    ]
    call = lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)
    return _sees_what_changes(inputs, _copies((lengths, table)), call, replays)


def drops_wrong_guesses(pool: Pool, replays: int = 50) -> bool:
    """Whether calls in a graph see lengths and page tables that are written when they have begun, and have
    found others there, or what is neither: what they load on those must be dropped. A call whose guess is
    right is between them."""
    write = compile_late_writes()
    for row in LATE:
        q = torch.randn(row.batch, row.queries, row.heads, row.head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = pool.caches(row)[0]
        pages, page = row.batch * row.keys // row.page if row.page else 0, row.page
        place = torch.empty(row.batch + pages, dtype=torch.int32, device="cuda")
        options = {"cache_seqlens": place[: row.batch]}
        if page:
            k, v = (x.view(-1, page, row.kv_heads, row.head_dim) for x in (k, v))
            options["block_table"] = place[row.batch :].view(row.batch, -1)

        def values(row: Row = row, pages: int = pages) -> torch.Tensor:
            found = torch.randint(0, row.keys + 1, (row.batch,), device="cuda", dtype=torch.int32)
            return torch.cat((found, torch.randperm(pages, device="cuda").int()))

        right = [values() for _ in range(24)]
        early = [values() for _ in right]
        for i, x in enumerate(early):
            if i % 6 == 1:  # the same lengths, in other pages
                x[: row.batch] = right[i][: row.batch]
            elif i % 6 == 3:  # the same pages, other lengths
                x[row.batch :] = right[i][row.batch :]
            elif i % 6 == 4:  # anything
                x.copy_(torch.randint_like(x, -(2**31), 2**31 - 1))
            elif i % 6 == 5:  # what is right
                x.copy_(right[i])
        inputs = list(zip(early, right))
        call = lambda: flash_attn_with_kvcache(q, k, v, causal=True, **options)
        if not _sees_what_changes(inputs, lambda early, late: write(place, early, late), call, replays):
            return False
    return True


def _copies(places: tuple[torch.Tensor, ...]) -> Callable[..., None]:
    def write(*values: torch.Tensor) -> None:
        for place, value in zip(places, values):
            place.copy_(value)

    return write


def _sees_what_changes(
    inputs: list[tuple[torch.Tensor, ...]], write: Callable[..., None], call: Call, replays: int
) -> bool:
    """Whether a graph that writes `inputs`, with a call behind each, gives what calls give that begin when
    the writes have ended."""

    def steps() -> list[torch.Tensor]:
        outputs = []
        for values in inputs:
            write(*values)
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
            outputs.append(call())
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
