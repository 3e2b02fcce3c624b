"""Every way that the public call has to the forward pass and the gradients, on a Hopper GPU."""

import pytest
import torch
from public_calls import every_head_dim, every_mask, problem, verdicts, verdicts_with_lse

from harness import judging, reference
from harness.inputs import random_inputs
from hopper_attention import (
    attention,
    attention_backward,
    flash_attn_with_kvcache,
    launch,
    production,
    selection,
    turns,
    ways,
)
from hopper_attention.kernels import division, ladder
from hopper_attention.kernels.calls import Parts
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import ONE_TILE, ONE_TILE_IN_PARTS

pytestmark = pytest.mark.gpu


@every_mask
@every_head_dim
@pytest.mark.parametrize("heads", [8, 1])
def test_few_tiles_of_keys(mask: dict, head_dim: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sees them in parts: of the query heads, of the queries, or of both."""
    shape = problem(head_dim, batch=1, heads=heads, kv_heads=1, seqlen_q=1000, seqlen_kv=777, **mask)
    assert selection.backward_stage(shape, False)[0] == launch.IN_PARTS
    if heads > 1:  # one is divided where the pass is simulated, and not at 256 or at the top left
        assert selection.backward_stage(shape, True)[0] == launch.DETERMINISTIC_IN_PARTS
    q, k, v, do = random_inputs(shape)
    assert verdicts(q, k, v, do, **mask) == []
    assert verdicts_with_lse(q, k, v, do, 0.1, **mask) == []
    for parts in (Parts(heads, 1), Parts(1, 3), Parts(heads, 5), Parts(max(1, heads // 2), 16)):
        monkeypatch.setattr(division, "parts_of", lambda problem, *gpu, parts=parts: parts)
        production.plans.clear()
        assert verdicts(q, k, v, do, **mask) == []
    production.plans.clear()


@every_mask
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("lengths", [(1000, 77, 4), (1, 128, 4), (49, 49, 600), (300, 1, 600)])
def test_one_tile_of_keys(mask: dict, head_dim: int, lengths: tuple[int, int, int]) -> None:
    """dQ without sums, of queries that see no key too, the same in every run; queries in parts or not."""
    queries, keys, heads = lengths
    shape = problem(head_dim, heads=heads, kv_heads=heads // 2, seqlen_q=queries, seqlen_kv=keys, **mask)
    stage_id = selection.backward_stage(shape, False)[0]
    if division.one_tile_pays(shape):
        assert stage_id in ((ONE_TILE_IN_PARTS,) if queries == 1000 else (ONE_TILE, ONE_TILE_IN_PARTS))
    q, k, v, do = random_inputs(shape)
    assert verdicts(q, k, v, do, **mask) == []
    assert verdicts_with_lse(q, k, v, do, 0.1, **mask) == []
    o, lse = attention(q, k, v, **mask, return_lse=True)
    first = attention_backward(do, q, k, v, o, lse, **mask)
    for _ in range(20):
        again = attention_backward(do, q, k, v, o, lse, **mask)
        assert all(x.equal(y) for x, y in zip(again, first))


@every_mask
@every_head_dim
def test_in_parts_and_deterministic(mask: dict, head_dim: int) -> None:
    q, k, v, do = random_inputs(problem(head_dim, batch=1, heads=8, kv_heads=2, seqlen_q=1000, seqlen_kv=777))
    o, lse = attention(q, k, v, **mask, return_lse=True)
    first = attention_backward(do, q, k, v, o, lse, **mask, deterministic=True)
    plain = attention_backward(do, q, k, v, o, lse, **mask)
    for x, y in zip(first, plain):
        assert (x - y).abs().max() <= 0.01 * y.abs().max()
    for _ in range(100):
        again = attention_backward(do, q, k, v, o, lse, **mask, deterministic=True)
        assert all(x.equal(y) for x, y in zip(again, first))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 17, 17, 4096, 64),
        (3, 2, 2, 4172, 128),
        (2, 56, 7, 1200, 64),
        (1, 7, 7, 2756, 96),
        (1, 9, 9, 1920, 128),
    ],
)
def test_heads_that_are_left_over(shape: tuple[int, ...], deterministic: bool) -> None:
    """In a launch of their own; captured, too. With turns they have the same bits every time."""
    batch, heads, kv_heads, seqlen, head_dim = shape
    lengths = {"seqlen_q": seqlen, "seqlen_kv": seqlen}
    whole = problem(head_dim, batch=batch, heads=heads, kv_heads=kv_heads, **lengths).with_(direction="bwd")
    assert len(list(selection.backward_launches(whole, deterministic))) == 2
    q, k, v, do = random_inputs(whole)
    options = {"deterministic": True} if deterministic else {}
    assert verdicts(q, k, v, do, **options) == []
    assert verdicts_with_lse(q, k, v, do, 0.1, **options) == []
    o, lse = attention(q, k, v, return_lse=True)
    first = attention_backward(do, q, k, v, o, lse, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention_backward(do, q, k, v, o, lse, **options)
    for _ in range(20):
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        again = attention_backward(do, q, k, v, o, lse, **options)
        for found in (captured, again):
            if deterministic:
                assert all(x.equal(y) for x, y in zip(found, first))
            assert all((x - y).abs().max() <= 0.01 * y.abs().max() for x, y in zip(found, first))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_parts_and_sums_in_one_order(head_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: more than are on their way at once, and parts that see no query."""
    shape = problem(head_dim, batch=1, heads=8, kv_heads=2, seqlen_q=1000, seqlen_kv=777, causal=causal)
    q, k, v, do = random_inputs(shape)
    for chosen in ((Parts(), 5), (Parts(1, 2), 1), (Parts(1, 3), 2), (Parts(4, 5), 4), (Parts(2, 16), 7)):
        monkeypatch.setattr(turns, "fastest", lambda *_, chosen=chosen: chosen)
        production.plans.clear()
        assert verdicts(q, k, v, do, causal=causal, deterministic=True) == []
    production.plans.clear()


@every_mask
@every_head_dim
@pytest.mark.parametrize("seqlen_q", [1, 65, 1000])
def test_every_way_to_the_forward_pass(
    mask: dict, head_dim: int, seqlen_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, do = random_inputs(problem(head_dim, seqlen_q=seqlen_q))
    for way in ways.ways_of(problem(head_dim, seqlen_q=seqlen_q, **mask)):
        monkeypatch.setattr(ways, "way_of", lambda problem, *gpu, way=way: way)
        production.plans.clear()
        assert verdicts(q, k, v, do, **mask) == []
    production.plans.clear()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 40, 40, 2048, 2048, 128),  # whole tiles beside slices
        (1, 12, 12, 1500, 1500, 64),
        (1, 8, 1, 64, 32768, 128),  # many pieces of a tile
        (1, 4, 4, 1, 70000, 64),
        (2, 16, 8, 300, 4000, 256),
        (3, 32, 8, 16, 5000, 128),
        (2, 6, 2, 128, 700, 256),
        (1, 7, 1, 33, 3000, 128),  # groups that fill no tile, octets that queries do not fill
        (2, 15, 5, 49, 900, 64),
        (1, 64, 2, 20, 9000, 64),
        (1, 10, 2, 131, 2000, 96),
        (1, 12, 4, 300, 200, 128),  # with a causal mask the first queries see no key
    ],
)
def test_slices_are_right_and_always_the_same(
    shape: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Problem(*shape, causal)
    q, k, v = random_inputs(asked)
    expected = judging.Expected(q, k, v, causal)
    for way in (x for x in ways.ways_of(asked) if x.kind is not ways.Kind.TILES):
        monkeypatch.setattr(ways, "way_of", lambda problem, *gpu, way=way: way)
        production.plans.clear()
        first = attention(q, k, v, causal=causal, return_lse=True)
        stage, file = ladder.load(selection.forward_stage(asked, way))
        rounding = reference.rounding_of(stage, file, asked, **stage.options)
        assert expected.judge(dict(zip(("o", "lse"), first)), rounding).failures == ()
        for _ in range(20):
            again = attention(q, k, v, causal=causal, return_lse=True)
            assert all(x.equal(y) for x, y in zip(again, first))
    production.plans.clear()


@pytest.mark.parametrize(
    "shape", [(1, 8, 1, 8, 32768, 128), (1, 8, 8, 300, 20000, 64), (1, 4, 4, 64, 9000, 256)]
)
def test_slices_where_other_work_holds_the_gpu(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CTAs then begin one after the other, the last when the first have ended."""
    asked = Problem(*shape, True)
    q, k, v = random_inputs(asked)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    other = torch.cuda.Stream()
    for way in (x for x in ways.ways_of(asked) if x.kind in (ways.Kind.SLICES, ways.Kind.GROUPS)):
        monkeypatch.setattr(ways, "way_of", lambda problem, *gpu, way=way: way)
        production.plans.clear()
        first = attention(q, k, v, causal=True)
        torch.cuda.synchronize()
        for _ in range(5):
            with torch.cuda.stream(other):
                for _ in range(20):
                    torch.matmul(a, a)
            outputs = [attention(q, k, v, causal=True) for _ in range(20)]
            torch.cuda.synchronize()
            assert all(x.equal(first) for x in outputs)
    production.plans.clear()


@every_head_dim
@pytest.mark.parametrize("queries", [1, 7])
def test_few_queries_are_decoded(head_dim: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any layout, with a scale, and in CUDA graphs of their own, as from a cache."""
    asked = problem(head_dim, heads=8, seqlen_q=queries, seqlen_kv=3000, causal=queries > 1)
    (way,) = (x for x in ways.ways_of(asked.with_(direction="fwd")) if x.kind is ways.Kind.DECODE)
    monkeypatch.setattr(ways, "way_of", lambda problem, *gpu: way)
    production.plans.clear()
    assert selection.forward_stage(asked.with_(direction="fwd")) == launch.DECODE
    q, k, v, _ = random_inputs(asked)
    rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    for softmax_scale in (None, 0.2):
        options = {"causal": asked.causal, "softmax_scale": softmax_scale}
        o, lse = attention(q, k, v, **options, return_lse=True)
        cached, its_lse = flash_attn_with_kvcache(*rows_first, **options, return_softmax_lse=True)
        others = [x.transpose(1, 2) for x in rows_first]
        assert o.equal(cached.transpose(1, 2)) and lse.equal(its_lse)
        assert o.equal(attention(*others, **options)) and o.is_contiguous()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attention(q, k, v, **options)
        graphs.append((graph, found))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(100):  # beside each other: counters that they shared would be wrong
        for stream, (graph, _) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(found.equal(o) for _, found in graphs)
    expanded = attention(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v), **options)
    assert expanded.equal(attention(q, *(x[:, :1].expand_as(x).contiguous() for x in (k, v)), **options))
    production.plans.clear()
