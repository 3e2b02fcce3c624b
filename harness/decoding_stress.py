"""What decode must stand on a GPU besides its cases: many launches while memory and SMs are taken from it,
and launches that begin before the one before them has ended."""

import torch

from hopper_attention import flash_attn_with_kvcache

from .decoding_cases import Row
from .decoding_timing import Call, Pool, ours

STRESS = [
    Row(32, 32, 8, 1, 2048, ragged=True), Row(4, 16, 1, 1, 4096), Row(1, 32, 8, 8, 4096),
    Row(8, 32, 8, 1, 1024, page=16),
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
    if not _sees_what_changes((q, last), inputs, lambda: flash_attn_with_kvcache(q, k, v), replays):
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
    return _sees_what_changes((lengths, table), inputs, call, replays)


def _sees_what_changes(
    places: tuple[torch.Tensor, ...], inputs: list[tuple[torch.Tensor, ...]], call: Call, replays: int
) -> bool:
    """Whether a graph that copies `inputs` to `places`, with a call behind each, gives what calls give that
    begin when the copies have ended."""

    def steps() -> list[torch.Tensor]:
        outputs = []
        for values in inputs:
            for place, value in zip(places, values):
                place.copy_(value)
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
