"""`varlen_attn`'s operators with the kernels under them, on a CPU: who is called for what."""

from collections.abc import Iterator

import pytest
import torch
from test_ops_policies import cu, packed, run_backward, run_forward

import hopper_attention
from hopper_attention import policies, production
from hopper_attention.integrations import sdpa, varlen

LENGTHS = ((9, 13), (5, 5), (20, 20))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """PyTorch's kernels and ours are the reference's formulas, for CPU tensors; who was called, in order."""
    found: list[str] = []

    def options_of(scale, causal, left, right):
        bounds = [-1 if x is None else x for x in (left, right)]
        return (scale, causal, False, *bounds, 0.0, False)

    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
        window_size_right=None, seqused_k=None, **rest,
    ):  # fmt: skip
        found.append("PyTorch's")
        tensors = None, cu_q, cu_k, None, None
        o, lse = run_forward(
            q, k, v, *tensors, *options_of(scale, causal, window_size_left, window_size_right)
        )
        state = torch.empty(2, dtype=torch.uint64)
        return o, lse, state, state.new_empty(()), q.new_empty(0)

    def backward(
        do, q, k, v, o, lse, cu_q, cu_k, a, b, c, causal, d, e, *, scale=None, window_size_left=None,
        window_size_right=None,
    ):  # fmt: skip
        found.append("PyTorch's backward")
        options = options_of(scale, causal, window_size_left, window_size_right)
        return run_backward(do, q, k, v, o, lse, None, None, cu_q, cu_k, None, None, *options)[:3]

    library = torch.library.Library("aten", "IMPL")
    for name, call in zip(varlen.FLASH, (forward, backward)):
        library.impl(name, call, "CPU")
    used = lambda more: (more.sink, more.cu_q, more.cu_kv, more.used_q, more.used_kv)

    def our_forward(q, k, v, more, scale, causal, top_left, window, softcap, longest):
        assert longest == 20
        found.append("k6")
        return run_forward(q, k, v, *used(more), scale, causal, top_left, *window, softcap, False)

    def our_backward(do, q, k, v, o, lse, dlse, more, scale, causal, top_left, window, softcap, det, longest):
        assert longest == 20
        found.append("bwd4")
        options = scale, causal, top_left, *window, softcap, det
        return run_backward(do, q, k, v, o, lse, dlse, *used(more), *options)

    monkeypatch.setattr(policies, "forward", our_forward)
    monkeypatch.setattr(policies, "backward", our_backward)
    monkeypatch.setattr(production, "check_device", lambda stage_id, q: None)
    monkeypatch.setattr(sdpa, "DEVICE", "CPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    names = (sdpa.FLASH, sdpa.CUDNN)
    for name in names:  # that a CPU has not
        for suffix in ("", "_backward"):
            library.impl(name + suffix, lambda *x, **y: None, "CPU")
    yield found
    sdpa.disable()
    library._destroy()


def both(**options: object) -> list[torch.Tensor]:
    (q, k, v), (cu_q, cu_k) = packed(lengths=LENGTHS)
    inputs = cu_q, cu_k, 20, 20, options.pop("dropout_p", 0.0), options.pop("is_causal", False)
    forward, backward = (getattr(torch.ops.aten, name) for name in varlen.FLASH)
    o, lse, state, unused, _ = forward(q, k, v, *inputs, False, **options)
    options.pop("seqused_k", None)
    return [o, lse, *backward(torch.ones_like(o), q, k, v, o, lse, *inputs, state, unused, **options)]


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"window_size_left": 3, "window_size_right": 0}],
    ids=str,
)
def test_what_is_taken(options: dict[str, object], called: list[str]) -> None:
    plain = both(**options)
    assert called == ["PyTorch's", "PyTorch's backward"]
    called.clear()
    with hopper_attention.enabled():
        found = both(**options)
    assert called == ["k6", "bwd4"]
    assert all(x.equal(y) for x, y in zip(found, plain))


def test_used_keys_are_taken(called: list[str]) -> None:
    used = torch.tensor([4, 5, 7], dtype=torch.int32)
    with hopper_attention.enabled():
        found = both(seqused_k=used)
    assert called == ["k6", "bwd4"] and not found[0].equal(both()[0])


def test_what_is_left_to_pytorch(called: list[str]) -> None:
    with hopper_attention.enabled():
        both(dropout_p=0.1)
        assert called == ["PyTorch's", "PyTorch's backward"]
        called.clear()
        torch.ops.aten._flash_attention_forward(
            *packed(lengths=LENGTHS)[0], cu([9, 5, 20]), cu([13, 5, 20]), 20, 20, 0.0, False, False,
            alibi_slopes=torch.zeros(4),
        )  # fmt: skip
        assert called == ["PyTorch's"]
