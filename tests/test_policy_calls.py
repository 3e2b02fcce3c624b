"""Calls with policies on a CPU, whose launches are stood in for: what these are handed, what comes back."""

from types import SimpleNamespace

import pytest
import torch
from stand_in_launches import stand_in_for_kernels, tensors
from torch.profiler import ProfilerActivity, profile

from harness import decoding_model
from hopper_attention import (
    attention,
    attention_backward,
    attention_fp8,
    decoding,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    ops_policies,
    policies,
    quantize,
)
from hopper_attention.plans import Plans


@pytest.fixture(autouse=True)
def stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_kernels(monkeypatch)
    monkeypatch.setattr("stand_in_launches.check_as_a_launch", lambda *given: None)
    monkeypatch.setattr(policies, "_plans", Plans())


@pytest.mark.parametrize(("most", "launches"), [(2, 6), (3, 4), (65535, 1)])
def test_a_sinks_gradient_over_several_launches(
    most: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each head over all batches, however these are divided."""
    found = []

    def launch_backward(launch, q, k, v, o, lse, do, dq, dk, dv, scratch, given) -> None:
        found.append(tuple(q.shape[:2]))
        given[-1].copy_(do.float().sum((0, 2, 3)))

    monkeypatch.setattr("hopper_attention.rounds.GRID_YZ_MAX", most)
    monkeypatch.setattr(policies.calls, "launch_backward", launch_backward)
    q, k, v, o = tensors(5, 4, 2, 64, count=4)
    do, lse, sink = torch.randn_like(q), torch.zeros(5, 4, 2), torch.zeros(4)
    options = (None, False, False, (1, 1), 0.0, False)
    *_, dsink = policies.backward(do, q, k, v, o, lse, None, policies.Tensors(sink), *options)
    assert len(found) == launches
    assert torch.allclose(dsink, do.float().sum((0, 2, 3)), atol=1e-4)


def test_an_lse_is_nobodys_sink() -> None:
    """Where there is no key it is the sink, but not its memory."""
    q, k = torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.zeros(0, 4, 64, dtype=torch.bfloat16)
    sink, ends = torch.ones(4), [torch.tensor([0, n], dtype=torch.int32) for n in (1, 0)]
    _, lse = flash_attn_varlen_func(q, k, k, *ends, learnable_sink=sink, return_lse=True)
    assert lse.tolist() == [[1.0]] * 4
    lse.zero_()
    assert sink.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_used_rows_without_sequences_are_refused(name: str) -> None:
    used = {name: torch.tensor([1, 1], dtype=torch.int32)}
    with pytest.raises(ValueError, match="of packed sequences"):
        ops_policies.forward(*tensors(2, 4, 8, 64), **used)


def test_packed_sequences_have_their_masks_at_the_bottom_right() -> None:
    rows, ends = torch.zeros(8, 4, 64, dtype=torch.bfloat16), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="at the bottom right, not top_left"):
        ops_policies.forward(rows, rows, rows, None, ends, ends, causal=True, top_left=True)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What launches of decode are handed."""
    found: list[dict[str, object]] = []

    def launch(q, k_cache, v_cache, o, lse, counted, table, k, v, k_scale, v_scale, pieces, *rest) -> None:
        found.append({"lengths": counted, "pieces": len(pieces), "new": k})

    monkeypatch.setattr(decoding, "kernel_for", lambda *job: SimpleNamespace(launch=launch))
    monkeypatch.setattr(decoding, "check_device", lambda stage_id, q: None)
    monkeypatch.setattr(decoding, "_plans", Plans())
    return found


@pytest.mark.parametrize("added", [0, 40])
@pytest.mark.parametrize("page", [0, 64])
def test_pieces_of_any_length_have_a_place(added: int, page: int, decoded: list[dict[str, object]]) -> None:
    """With pieces of so many keys each, where a length says more than there is room for."""
    room, kv_heads = 1024, 2
    q = torch.zeros(3, 1, 8, 128, dtype=torch.bfloat16)
    cache = torch.zeros(3 * room // (page or room), page or room, kv_heads, 128, dtype=q.dtype)
    options = {"block_table": torch.zeros(3, room // page, dtype=torch.int32)} if page else {}
    if added:
        options |= dict.fromkeys("kv", torch.zeros(3, added, kv_heads, 128, dtype=q.dtype))
    lengths = torch.tensor([room + 1, 10**8, 5], dtype=torch.int32)
    flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=lengths, batch_invariant=True, **options)
    (given,) = decoded
    plan = decoding_model.plan_of(1, 8, kv_heads, 128, unit=1024 // 64)
    counted = [n + added for n in given["lengths"].tolist()]
    assert counted == [room + added, room + added, 5 + added]
    segments = decoding_model.segments(plan, counted, kv_heads)
    assert max(x.piece for x in segments) < given["pieces"]


def test_an_empty_batch_has_no_new_key_to_store(decoded: list[dict[str, object]]) -> None:
    q, cache, new = (torch.zeros(0, n, 2, 128, dtype=torch.bfloat16) for n in (1, 64, 3))
    lengths = torch.zeros(0, dtype=torch.int32)
    assert flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=lengths).shape == q.shape
    assert not decoded


def test_new_keys_that_no_query_sees_are_taken(decoded: list[dict[str, object]]) -> None:
    q, cache = (torch.zeros(2, n, 2, 128, dtype=torch.bfloat16) for n in (2, 64))
    new = [cache[:, :12]] * 2
    flash_attn_with_kvcache(q, cache, cache.clone(), *new, cache_seqlens=3, window_size=(9, 0))
    assert decoded[0]["new"].shape[1] == 12


def test_one_tensor_on_the_meta_device_is_refused() -> None:
    """Also where the dispatcher, which takes such a call for one of shapes alone, is asked."""
    q, k, v = tensors(2, 4, 8, 64)
    rows, ends = q[0].transpose(0, 1), torch.tensor([0, 8], dtype=torch.int32)
    lse, lengths = torch.zeros(2, 4, 8), ends.clone()
    cache, other = torch.zeros(2, 2, 64, 4, 64, dtype=q.dtype)
    meta = lambda x: x.to("meta")
    saved = q, q, k, v, q, lse
    step = q[:, :, :1].transpose(1, 2)
    given = q.to(torch.float8_e4m3fn)
    for call in (
        lambda: attention(q, meta(k), meta(v)),
        lambda: attention(q, k, v, learnable_sink=torch.zeros(4, device="meta")),
        lambda: attention(q, k, v, softcap=9.0, window_size=(3, 0), learnable_sink=meta(lse[0, :, 0])),
        lambda: attention_backward(*saved, dlse=meta(lse)),
        lambda: attention_backward(*saved, dlse=meta(lse), softcap=1.0),
        lambda: flash_attn_varlen_func(rows, rows, rows, ends, meta(ends)),
        lambda: flash_attn_with_kvcache(step, cache, cache, cache_seqlens=meta(lengths)),
        lambda: flash_attn_with_kvcache(step, meta(cache), meta(cache)),
        lambda: flash_attn_with_kvcache(step, cache, other, meta(step), meta(step), cache_seqlens=lengths),
        lambda: attention_fp8(q, meta(k), meta(v)),
        lambda: attention_fp8(given, given, given, k_descale=torch.ones(1, device="meta")),
        lambda: quantize(q, meta(k), meta(v)),
    ):
        refused = pytest.raises(ValueError, match=r"on one device|where q is|on cpu")
        with refused:
            call()
        with profile(activities=[ProfilerActivity.CPU]), refused:
            call()
