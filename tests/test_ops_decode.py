"""The operators of decoding, the model's attention in the kernels' place."""

import pytest
import torch
import torch._dynamo.testing
from test_decoding import stand_in
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from hopper_attention import attention, decoding, flash_attn_with_kvcache, ops_decode


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "decode", stand_in)


def random_inputs(queries: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, queries, 8, 64), (2, 40, 2, 64), (2, 40, 2, 64)
    return [torch.randn(x, generator=generator).bfloat16() for x in shapes]


def test_out_is_written_in_a_compiled_graph_too() -> None:
    q, k, v = random_inputs()
    out = torch.full_like(q, torch.nan)
    step = lambda *given, **named: flash_attn_with_kvcache(*given, **named)
    with torch.no_grad():
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        found = compiled(q, k, v, out=out)
        assert found.equal(flash_attn_with_kvcache(q, k, v)) and out.equal(found)
        for n in (1, 2):  # of any batch
            out = torch.full_like(q[:n], torch.nan)
            assert compiled(q[:n], k[:n], v[:n], out=out).equal(out)


def test_no_derivative_is_silently_zero() -> None:
    """Neither in forward mode nor of the operator itself."""
    q, k, v = random_inputs()
    calls = (lambda x: flash_attn_with_kvcache(x, k, v), q), (lambda x: flash_attn_with_kvcache(q, x, v), k)
    for of, x in calls:
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            torch.func.jvp(of, (x,), (torch.ones_like(x),))
    with pytest.raises(NotImplementedError, match="decode has no gradient"):
        ops_decode.decode(q.clone().requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match="decode_append has no gradient"):
        lengths = torch.tensor([5, 7], dtype=torch.int32)
        ops_decode.append(q, k, v, k[:, :2].clone().requires_grad_(), v[:, :2], lengths)


def test_who_has_kept_a_cache_for_a_gradient_is_told_that_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = random_inputs()
    monkeypatch.setattr(decoding, "decode", lambda q, *rest, **named: (q, None))  # writes behind its back
    weight = torch.ones(2, 40, 2, 64, requires_grad=True)
    kept = (weight * k).sum()
    lengths = torch.tensor([5, 7], dtype=torch.int32)
    with torch.no_grad():
        flash_attn_with_kvcache(q, k, v, k[:, :2] + 1, v[:, :2] + 1, cache_seqlens=lengths)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    with torch.inference_mode():  # whose tensors nobody keeps
        caches = k.clone(), v.clone()
        flash_attn_with_kvcache(q, *caches, k[:, :2] + 1, v[:, :2] + 1, cache_seqlens=lengths)


def test_flops() -> None:
    """Of the keys that count, those that a mask or a window hides left out, by convention."""
    q, k, v = random_inputs(queries=2)  # 8 heads of 64, on caches of 40 keys
    lengths, of_pair = torch.tensor([5, 30], dtype=torch.int32), 4 * 8 * 64
    for options, pairs in (
        ({}, 2 * 2 * 40),
        ({"cache_seqlens": lengths}, 2 * 35),
        ({"cache_seqlens": lengths, "causal": True}, 2 * 35 - 4),
        ({"cache_seqlens": lengths, "window_size": (3, 0)}, 2 * 2 * 4),
        ({"cache_seqlens": lengths, "k": k[:, :2], "v": v[:, :2], "causal": True}, 2 * 39 - 4),
    ):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            flash_attn_with_kvcache(q, k.clone(), v.clone(), **options)
        assert counter.get_total_flops() == of_pair * pairs


def test_a_window_that_follows_the_length_is_one_graph() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    half = lambda q, k, v: flash_attn_with_kvcache(q, k, v, window_size=(k.shape[1] // 2, 0))
    compiled = torch.compile(half, backend=counter, fullgraph=True)
    q, k, v = random_inputs()
    with torch.no_grad():
        for n in range(20, 40, 3):
            assert compiled(q, k[:, :n], v[:, :n]).equal(half(q, k[:, :n], v[:, :n]))
    assert counter.frame_count <= 2


def test_who_looks_sees_the_operator_of_a_call_like_one_before() -> None:
    """Fake tensors and traces, which the check of a recent plan does not see, and kernels of others."""
    q, k, v = random_inputs()
    with torch.no_grad():
        flash_attn_with_kvcache(q, k, v)
        graph = make_fx(lambda *x: flash_attn_with_kvcache(*x))(q, k, v)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(flash_attn_with_kvcache(q, k, v), FakeTensor)
            assert isinstance(attention(*(x.transpose(1, 2) for x in (q, k, v))), FakeTensor)
    assert str(graph.code).count("hopper_attention.decode") == 1
    theirs = torch.library.Library("hopper_attention", "IMPL", "CPU")
    theirs.impl("decode", lambda q, *rest: (q + 1, q.new_zeros(2, 8, 2).float()))
    try:
        assert ops_decode.decode(q, k, v)[0].equal(q + 1)
    finally:
        theirs._destroy()


def test_opcheck() -> None:
    q, k, v = random_inputs()
    lengths = torch.tensor([5, 38], dtype=torch.int32)
    tests = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(ops_decode.decode, (q, k, v, lengths), {"causal": True}, test_utils=tests)
    torch.library.opcheck(ops_decode.append, (q, k, v, k[:, :2], v[:, :2], lengths), test_utils=tests)


def test_a_compiled_step_stores_what_is_new() -> None:
    def step(q, k_cache, v_cache, k, v, lengths):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    q, k, v = random_inputs()
    lengths = torch.tensor([5, 38], dtype=torch.int32)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    results = [
        run(q, *cache, k[:, :2] + 1, v[:, :2] + 1, lengths)
        for run, cache in zip((step, torch.compile(step, backend="aot_eager", fullgraph=True)), caches)
    ]
    assert torch.equal(*results)
    assert all(torch.equal(a, b) for a, b in zip(*caches))
    assert torch.equal(caches[0][0][1, 38:], k[1, :2] + 1)
