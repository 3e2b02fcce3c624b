"""SDPA's operators with the kernels under them, on a CPU: who is called for what, forward and backward."""

from collections.abc import Iterator

import pytest
import torch
from test_ops import run_backward, run_forward
from torch.nn.attention import bias

import hopper_attention
from hopper_attention import production
from hopper_attention.integrations import sdpa, varlen

Called = list[str]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[Called]:
    """PyTorch's kernels and ours are the reference's formulas, for CPU tensors; who was called, in order.
    Flash's aligns a causal mask at the bottom right, cuDNN's at the top left."""
    found: Called = []
    top_left = lambda q, k, is_causal: {
        "causal": is_causal,
        "top_left": is_causal and q.shape[2] != k.shape[2],
    }

    def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        found.append("flash")
        o, lse = run_forward(q, k, v, scale, causal=is_causal)
        state = torch.empty(2, dtype=torch.uint64)
        return o, lse, None, None, q.shape[2], k.shape[2], state, state.new_empty(()), q.new_empty(0)

    def flash_backward(do, q, k, v, o, lse, a, b, c, d, dropout_p, is_causal, e, f, *, scale=None):
        found.append("flash backward")
        return run_backward(do, q, k, v, o, lse, None, scale, causal=is_causal)

    def cudnn(
        q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
    ):
        found.append("cudnn")
        o, lse = run_forward(q, k, v, scale, **top_left(q, k, is_causal))
        seed = torch.empty((), dtype=torch.int64)
        return o, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], seed, seed.clone(), None

    def cudnn_backward(do, q, k, v, o, lse, e, f, bias, a, b, c, d, dropout_p, is_causal, *, scale=None):
        found.append("cudnn backward")
        assert lse.shape == (*q.shape[:3], 1)
        return run_backward(do, q, k, v, o, lse.flatten(2), None, scale, **top_left(q, k, is_causal))

    library = torch.library.Library("aten", "IMPL")
    for name, call in ((sdpa.FLASH, flash), (sdpa.CUDNN, cudnn)):
        library.impl(name, call, "CPU")
    for name, call in ((sdpa.FLASH, flash_backward), (sdpa.CUDNN, cudnn_backward)):
        library.impl(f"{name}_backward", call, "CPU")
    for name in varlen.FLASH:  # of packed sequences: tests/test_varlen.py
        library.impl(name, lambda *given, **named: None, "CPU")

    def forward(*given):
        found.append("k6")
        return run_forward(*given)

    def backward(*given):
        found.append("bwd4")
        return run_backward(*given)

    monkeypatch.setattr(production, "forward", forward)
    monkeypatch.setattr(production, "backward", backward)
    monkeypatch.setattr(production, "check_device", lambda stage_id, q: None)
    monkeypatch.setattr(production, "_reasons", {})
    monkeypatch.setattr(sdpa, "slower", lambda problem: None)
    monkeypatch.setattr(sdpa, "DEVICE", "CPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    yield found
    sdpa.disable()
    library._destroy()


def flash(q, k, v, **options):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, **options)[0]


def cudnn(q, k, v, **options):
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, **options)[0]


def inputs(seqlen_q: int = 16, seqlen_kv: int = 16, head_dim: int = 64) -> list[torch.Tensor]:
    shapes = (2, 4, seqlen_q, head_dim), (2, 2, seqlen_kv, head_dim), (2, 2, seqlen_kv, head_dim)
    return [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]


def both(call, inputs: list[torch.Tensor], **options) -> list[torch.Tensor]:
    o = call(*inputs, **options)
    return [o, *torch.autograd.grad(o, inputs, torch.ones_like(o))]


@pytest.mark.parametrize("call", [flash, cudnn])
@pytest.mark.parametrize("lengths", [(16, 16), (16, 24), (24, 16)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 64**-0.5}, {"scale": 0.3}], ids=str)
def test_what_is_taken(call, lengths: tuple[int, int], options: dict, called: Called) -> None:
    given = inputs(*lengths)
    plain = both(call, given, **options)
    own = called.copy()
    called.clear()
    with hopper_attention.enabled():
        found = both(call, given, **options)
    blind = call is flash and "is_causal" in options and lengths[0] > lengths[1]  # rows without a key
    assert called == (own if blind else ["k6", "bwd4"])
    assert all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in zip(found, plain))
    called.clear()
    both(call, given, **options)
    assert called == own == [call.__name__, f"{call.__name__} backward"]


@pytest.mark.parametrize("call", [flash, cudnn])
def test_what_is_left_to_pytorch(call, called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [call.__name__, f"{call.__name__} backward"]
    hopper_attention.enable()
    hopper_attention.enable()  # twice is as good as once
    both(call, inputs(), dropout_p=0.1)
    both(call, inputs(head_dim=36))
    assert called == own * 2
    called.clear()
    monkeypatch.setattr(production, "_reasons", {})
    monkeypatch.setattr(sdpa, "slower", lambda p: "slow" if p.direction == "bwd" else None)
    both(call, inputs())
    assert called == ["k6", own[1]]
    called.clear()
    monkeypatch.setattr(production, "_reasons", {})
    monkeypatch.setattr(sdpa, "slower", lambda p: "slow" if p.direction == "fwd" else None)
    both(call, inputs())
    assert called == [own[0], "bwd4"]


@pytest.mark.parametrize("call", [flash, cudnn])
def test_switched_between_forward_and_backward(call, called: Called) -> None:
    given = inputs()
    plain = both(call, given)
    for before, after in ((hopper_attention.enable, hopper_attention.disable),) * 2:
        before()
        o = call(*given)
        after()
        found = torch.autograd.grad(o, given, torch.ones_like(o))
        assert all(x.equal(y) for x, y in zip(found, plain[1:]))
    o = call(*given)
    hopper_attention.enable()
    found = torch.autograd.grad(o, given, torch.ones_like(o))
    assert all(x.equal(y) for x, y in zip(found, plain[1:]))


def test_a_mask_aligned_at_the_bottom_right(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own way to have one: its flash operator's causal mask."""
    monkeypatch.setattr(bias, "can_use_flash_attention", lambda parameters: True)
    q, k, v = inputs(16, 24)
    k, v = (x.repeat_interleave(2, 1).detach().requires_grad_() for x in (k, v))
    mask = bias.causal_lower_right(16, 24)
    sdpa_of = torch.nn.functional.scaled_dot_product_attention
    with hopper_attention.enabled():
        assert hopper_attention.explain(q, k, v, mask).forward == "k6_r64"
        found = both(lambda q, k, v: sdpa_of(q, k, v, attn_mask=mask), [q, k, v])
    assert called == ["k6", "bwd4"]
    seen = torch.ones(16, 24, dtype=torch.bool).tril(8)
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    plain = both(lambda q, k, v: sdpa_of(q, k, v, attn_mask=seen), exact)
    for x, y in zip(found, plain):
        torch.testing.assert_close(x.float(), y, atol=0.05, rtol=0.05)
    upper = bias.causal_upper_left(16, 24)
    assert hopper_attention.explain(q, k, v, upper) == hopper_attention.explain(q, k, v, is_causal=True)
    with pytest.warns(UserWarning, match="seq_len_q > seq_len_kv"):
        blind = hopper_attention.explain(k, q, q, bias.causal_lower_right(24, 16))
    assert "see no key" in blind.forward and "see no key" in blind.backward


def test_a_bias_is_left_to_cudnn(called: Called) -> None:
    q, k, v = (x.detach() for x in inputs())
    with hopper_attention.enabled():
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, torch.zeros(16, 16), True)
    assert called == ["cudnn"]


def test_enabled_inside_enabled(called: Called) -> None:
    given = inputs()
    with hopper_attention.enabled():
        with hopper_attention.enabled():
            pass
        flash(*given)
    with pytest.raises(KeyError), hopper_attention.enabled():
        raise KeyError
    flash(*given)
    assert called == ["k6", "flash"]


def test_blocks_that_overlap(called: Called) -> None:
    """As two threads have them: until the last is left."""
    given = inputs()
    first, second = hopper_attention.enabled(), hopper_attention.enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    flash(*given)
    second.__exit__(None, None, None)
    flash(*given)
    assert called == ["k6", "flash"]


def test_who_enables_inside_a_block_keeps_the_kernels(called: Called) -> None:
    """Until `disable()`, which counts inside a block too."""
    given = inputs()
    with hopper_attention.enabled():
        hopper_attention.enable()
    flash(*given)
    hopper_attention.disable()
    flash(*given)
    with hopper_attention.enabled():
        hopper_attention.disable()
        flash(*given)
        with hopper_attention.enabled():
            flash(*given)
        flash(*given)
    flash(*given)
    assert called == ["k6", "flash", "flash", "k6", "k6", "flash"]


def test_a_block_that_cannot_be_entered_counts_for_nothing(
    called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without_cuda:
        without_cuda.setattr(torch.version, "cuda", None)
        with pytest.raises(RuntimeError, match="built without CUDA"), hopper_attention.enabled():
            pass
    with hopper_attention.enabled():
        pass
    flash(*inputs())
    assert called == ["flash"]


def test_explanations(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in inputs())
    explain = hopper_attention.explain
    assert explain(q, k, v, enable_gqa=True) == sdpa.Explanation("k6_r64", "bwd4_one")
    wide = [x.float() for x in (q, k, v)]
    with torch.autocast(q.device.type, torch.bfloat16):
        assert explain(*wide, enable_gqa=True) == sdpa.Explanation("k6_r64", "bwd4_one")
    with pytest.raises(TypeError, match=r"query must be a torch\.Tensor, not NoneType"):
        explain(None, k, v)
    assert "enable_gqa is not set" in explain(q, k, v).forward
    left_over = [torch.empty(1, 17, 4096, 64, dtype=q.dtype, device=q.device) for _ in range(3)]
    assert explain(*left_over).backward == "bwd4 and bwd4_parts"
    assert explain(q, k, v, dropout_p=0.1, enable_gqa=True).backward == "PyTorch's: dropout"
    assert "mask" in explain(q, k, v, attn_mask=torch.ones(16, 16)).forward
    assert explain(*(x[..., :36] for x in (q, q, q))).forward == "k6_r64"  # SDPA pads them to 40
    assert "takes head_dim" in explain(*(x.repeat(1, 1, 1, 5) for x in (q, q, q))).forward
    assert "dimensions" in explain(q, k[0, 0, 0], v).forward
    monkeypatch.setattr(production, "_reasons", {})
    monkeypatch.setattr(sdpa, "slower", lambda p: "slow" if p.direction == "bwd" else None)
    assert explain(q, k, v, enable_gqa=True) == sdpa.Explanation("k6_r64", "PyTorch's: slow")
    assert called == []


def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="built without CUDA"):
        hopper_attention.enable()
