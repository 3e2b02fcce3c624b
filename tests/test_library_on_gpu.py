"""The public calls on a Hopper GPU."""

import functools
import threading

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harness import judging, logits, reference
from harness.inputs import hopper_gpu, random_inputs
from hopper_attention import (
    attention,
    attention_backward,
    enabled,
    flash_attn_with_kvcache,
    launch,
    production,
    selection,
    ways,
)
from hopper_attention.checks import problem_of
from hopper_attention.integrations import huggingface
from hopper_attention.kernels import division, ladder
from hopper_attention.kernels.calls import Parts
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import ONE_TILE, ONE_TILE_IN_PARTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper_gpu(), reason="no Hopper GPU here: no kernel can be executed"),
]

MASKS = {"full": {}, "causal": {"causal": True}, "top left": {"causal": True, "top_left": True}}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
every_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])


def problem(head_dim: int = 64, **changes) -> Problem:
    plain = Problem(2, 4, 2, 257, 389, head_dim, causal=changes.pop("causal", False), direction="bwd")
    return plain.with_(**changes)


def verdicts(q, k, v, do, dlse=None, softmax_scale=None, **mask) -> list[str]:
    """What is wrong with o, lse and the gradients of the public call, by the pass rule."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = attention(*leaves, **mask, softmax_scale=softmax_scale, return_lse=True)
    outputs, gradients = ((o,), (do,)) if dlse is None else ((o, lse), (do, dlse))
    dq, dk, dv = torch.autograd.grad(outputs, leaves, gradients)
    given = {"causal": mask.get("causal", False), "top_left": mask.get("top_left", False)}
    what = judging.Expected(q, k, v, do=do, **given, softmax_scale=softmax_scale, dlse=dlse)
    shape = problem_of(q, k, v, **given)
    stage_id = selection.forward_stage(shape)
    lazy = reference.rounding_of(*ladder.load(stage_id), shape, **selection.OPTIONS.get(stage_id, {}))
    found = what.judge({"o": o.detach(), "lse": lse.detach()}, lazy).failures
    # gradients are of the O that the kernel gave: the yardstick has the kernel's too
    yard_o = reference.yardstick(
        q, k, v, given["causal"], lazy, top_left=given["top_left"], scale=softmax_scale
    )
    options = {"top_left": given["top_left"], "scale": softmax_scale, "dlse": dlse}
    inputs = q, k, v, yard_o, what.saved[1], do, given["causal"], True
    yard = lambda nudge: reference.yardstick_gradients(*inputs, **options, nudge=nudge)
    floors = judging.cancellation(q, k, v, do, softmax_scale)
    grads = {"dq": dq, "dk": dk, "dv": dv}
    return [*found, *judging.judge_roundings(grads, what.gradients, yard, floors).failures]


@every_mask
@every_head_dim
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_and_gradients(mask: dict, head_dim: int, dtype: str) -> None:
    q, k, v, do = random_inputs(problem(head_dim, dtype=dtype))
    dlse = torch.randn(q.shape[:3], device="cuda")
    assert verdicts(q, k, v, do, **mask) == []
    assert verdicts(q, k, v, do, None, 1.5 * head_dim**-0.5, **mask) == []
    assert verdicts(q, k, v, do, dlse, **mask) == []


@every_mask
@every_head_dim
@pytest.mark.parametrize("heads", [8, 1])
def test_few_tiles_of_keys(mask: dict, head_dim: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sees them in parts: of the query heads, of the queries, or of both."""
    shape = problem(head_dim, batch=1, heads=heads, kv_heads=1, seqlen_q=1000, seqlen_kv=777, **mask)
    assert selection.backward_stage(shape, False)[0] == launch.IN_PARTS
    if heads > 1:  # where turns are taken queries are not divided
        assert selection.backward_stage(shape, True)[0] == launch.DETERMINISTIC_IN_PARTS
    q, k, v, do = random_inputs(shape)
    assert verdicts(q, k, v, do, **mask) == []
    assert verdicts(q, k, v, do, torch.randn(q.shape[:3], device="cuda"), 0.1, **mask) == []
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
    assert verdicts(q, k, v, do, torch.randn(q.shape[:3], device="cuda"), 0.1, **mask) == []
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
def test_few_queries_are_decoded(head_dim: int, queries: int) -> None:
    """In any layout, with a scale, and in CUDA graphs of their own, as from a cache."""
    asked = problem(head_dim, heads=8, seqlen_q=queries, seqlen_kv=3000, causal=queries > 1)
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


@every_head_dim
def test_layouts_give_the_same_bits(head_dim: int) -> None:
    q, k, v, do = random_inputs(problem(head_dim, seqlen_kv=257, kv_heads=4))
    plain = attention(q, k, v, causal=True, return_lse=True)
    rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
    slices = [x.transpose(1, 2) for x in packed.unbind(2)]
    grads = attention_backward(do, q, k, v, *plain, causal=True, deterministic=True)
    for inputs in (rows_first, slices):
        o, lse = attention(*inputs, causal=True, return_lse=True)
        assert o.equal(plain[0])
        assert lse.equal(plain[1])
        assert o.transpose(1, 2).is_contiguous()
        found = attention_backward(do, *inputs, o, lse, causal=True, deterministic=True)
        for x, y in zip(found, grads):
            assert x.equal(y)
            assert x.transpose(1, 2).is_contiguous()


def test_deterministic_gradients_and_the_global_switch() -> None:
    q, k, v, do = random_inputs(problem(128, seqlen_q=2048, seqlen_kv=2048))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    first = attention_backward(do, q, k, v, o, lse, causal=True, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            again = attention_backward(do, q, k, v, o, lse, causal=True)
            assert all(x.equal(y) for x, y in zip(first, again))
    finally:
        torch.use_deterministic_algorithms(False)


def test_more_batches_than_a_grid_has() -> None:
    """Windows of a vision model: batch 70000, as many heads as fit."""
    q, k, v, do = (torch.randn(70000, 3, 49, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, lse = attention(q, k, v, return_lse=True)
    found = attention_backward(do, q, k, v, o, lse, deterministic=True)
    for at in (slice(0, 64), slice(65500, 65600), slice(69900, 70000)):
        part = attention_backward(*(x[at] for x in (do, q, k, v, o, lse)), deterministic=True)
        for x, y in zip(found, part):
            assert x[at].equal(y)


def test_graphs() -> None:
    """Captured and replayed on other inputs, forward and backward; two graphs may replay side by side."""
    q, k, v, do = random_inputs(problem(128, seqlen_q=1024, seqlen_kv=1024))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def step():
        o = attention(*leaves, causal=True, deterministic=True)
        return o, *torch.autograd.grad(o, leaves, do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step()
        graphs.append((graph, outputs))
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, (graph, _) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    expected = step()
    for _, outputs in graphs:
        assert all(x.equal(y) for x, y in zip(outputs, expected))


def test_streams_and_threads() -> None:
    """Eight threads, each on a stream of its own, forward and backward."""
    sets = [random_inputs(problem(64, seqlen_q=1000 + i, seqlen_kv=1000 + i), seed=i) for i in range(8)]

    def both(q, k, v, do):
        o, lse = attention(q, k, v, causal=True, return_lse=True)
        return o, *attention_backward(do, q, k, v, o, lse, causal=True, deterministic=True)

    expected = [both(*inputs) for inputs in sets]
    torch.cuda.synchronize()
    found: list = [None] * 8

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found[i] = both(*sets[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for x, y in zip(found, expected):
        assert all(a.equal(b) for a, b in zip(x, y))


def test_threads_on_one_stream() -> None:
    """They share what a stream keeps: nobody's launch may come between the kernels of a backward pass."""
    sets = [random_inputs(problem(64, seqlen_q=500 + i, seqlen_kv=500 + i), seed=i) for i in range(8)]

    def both(q, k, v, do):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        alone = attention(q, k, v, causal=True)  # its LSE is scratch
        o = attention(*leaves, causal=True, deterministic=True)
        return alone, o.detach(), *torch.autograd.grad(o, leaves, do)

    expected = [both(*inputs) for inputs in sets]
    torch.cuda.synchronize()
    wrong: list = []

    def work(i: int) -> None:
        for _ in range(50):
            found = both(*sets[i])
            torch.cuda.current_stream().synchronize()
            wrong.extend(i for x, y in zip(found, expected[i]) if not x.equal(y))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_in_a_process() -> None:
    q, k, v, do = random_inputs(problem(64))
    here = attention(q, k, v, return_lse=True)
    grads = attention_backward(do, q, k, v, *here, deterministic=True)
    q, k, v, do = (x.to("cuda:1") for x in (q, k, v, do))
    there = attention(q, k, v, return_lse=True)  # the current device stays the first
    assert there[0].device == q.device
    assert there[0].cpu().equal(here[0].cpu())
    for x, y in zip(attention_backward(do, q, k, v, *there, deterministic=True), grads):
        assert x.cpu().equal(y.cpu())


@every_mask
@pytest.mark.parametrize("backend", ["inductor"])
def test_compiled(mask: dict, backend: str) -> None:
    """Whole graphs; other lengths and batches without a recompile; gradients; wrong inputs by name."""
    torch._dynamo.reset()

    def step(q, k, v):
        return attention(q.mul(1.5), k, v, **mask, deterministic=True).sin()

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for batch, n in ((2, 256), (3, 320), (4, 513)):
        q, k, v, do = random_inputs(problem(64, batch=batch, seqlen_q=n, seqlen_kv=n))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.compiler.set_stance("fail_on_recompile" if n == 513 else "default"):
            o = compiled(*leaves)
        outputs = o, step(*leaves)
        assert torch.allclose(*outputs, atol=2**-6)
        for x, y in zip(*(torch.autograd.grad(o, leaves, do) for o in outputs)):
            assert torch.allclose(x, y, atol=2**-5 * y.abs().max().item())
    with pytest.raises(TypeError, match="q, k and v must have one dtype"):
        torch.compile(attention, fullgraph=True)(q, k.half(), v)


def test_autocast_and_opcheck() -> None:
    q, k, v, _ = random_inputs(problem(64))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert attention(q.float(), k.float(), v.float()).equal(attention(q, k, v))
    torch.library.opcheck(torch.ops.hopper_attention.forward.default, (q, k, v), {"causal": True})


def kernels_of(call) -> list[str]:
    """Names of the attention kernels that a call launches."""
    from torch.profiler import ProfilerActivity, profile

    call()  # compiled, and its scratch zeroed
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    words = "attention", "flash", "fmha", "cudnn"
    return [x.name for x in seen.events() if any(word in x.name.lower() for word in words)]


def test_a_plain_sdpa_call_runs_our_kernels() -> None:
    """Forward and backward, with no backend asked for; and PyTorch's again when it is over."""
    q, k, v, do = random_inputs(problem(128, seqlen_q=1024, seqlen_kv=1024, kv_heads=4, batch=8))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step():
        return torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=True), leaves, do)

    plain, theirs = step(), kernels_of(step)
    with enabled():
        found, ours = step(), kernels_of(step)
    assert theirs
    assert not any("hopper_attention" in name for name in (*theirs, *kernels_of(step)))
    assert ours
    assert all("hopper_attention" in name for name in ours)
    for x, y in zip(found, plain):
        assert torch.allclose(x, y, atol=2**-5 * y.abs().max().item())


def test_checkpointing() -> None:
    """Recomputed in the backward pass, or by policy kept: the same gradients."""
    q, k, v, do = random_inputs(problem(64, seqlen_kv=257))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    op = torch.ops.hopper_attention.forward.default
    keep = lambda ctx, which, *x, **y: (
        CheckpointPolicy.MUST_SAVE if which == op else CheckpointPolicy.PREFER_RECOMPUTE
    )
    selective = functools.partial(create_selective_checkpoint_contexts, keep)
    call = lambda *x: attention(*x, causal=True, deterministic=True)
    plain = torch.autograd.grad(call(*leaves), leaves, do)
    for more in ({}, {"context_fn": selective}):
        o = checkpoint(call, *leaves, use_reentrant=False, **more)
        assert all(x.equal(y) for x, y in zip(torch.autograd.grad(o, leaves, do), plain))


def test_beside_sdpa() -> None:
    q, k, v, _ = random_inputs(problem(128, kv_heads=4, seqlen_kv=257))
    o = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(attention(q, k, v, causal=True), o, atol=2**-5)


@pytest.mark.parametrize("name", logits.MODELS)
def test_hugging_face_models_give_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 positions, in one pass and, with a cache, token by token: as far from float32 as SDPA's are; and
    where SDPA is sure of the next token, the same token."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    taken = []
    call = huggingface.attention
    monkeypatch.setattr(huggingface, "attention", lambda *x, **y: taken.append(1) or call(*x, **y))
    rows = logits.measure(name)
    # By each layer: of the pass, and with either cache of the prompt; steps of transformers' are SDPA's.
    assert len(taken) == logits.LAYERS * (1 if name == "BERT" else 3)
    assert len(rows) == (1 if name == "BERT" else 3)
    assert [x for row in rows for x in logits.failures(row)] == []


def test_nothing_is_asked_of_a_gpu_twice() -> None:
    """What makes a call fast: the second of a kind plans nothing."""
    q, k, v, _ = random_inputs(problem(64))
    attention(q, k, v)
    known = len(production.plans)
    attention(q.clone(), k.clone(), v.clone())
    assert len(production.plans) == known
