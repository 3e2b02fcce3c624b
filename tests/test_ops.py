"""The registered operators and the public calls on a CPU, where the reference stands in for the kernels."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from harness import reference
from hopper_attention import attention, attention_backward, flash_attn_func, ops

OPTIONS = {"softmax_scale": None, "causal": False, "top_left": False, "deterministic": False}


def scores_of(q, k, softmax_scale, causal, top_left) -> torch.Tensor:
    scores = (softmax_scale or q.shape[-1] ** -0.5) * q.double() @ k.double().mT
    if causal:
        offset = reference.diagonal_offset(q.shape[2], k.shape[2], top_left)
        hidden = torch.ones_like(scores, dtype=torch.bool).tril(offset).logical_not()
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def for_each_head(q, *of_kv) -> list[torch.Tensor]:
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in of_kv]


def expected(q, k, v, softmax_scale, causal, top_left) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse in float64, differentiable. Every row sees a key."""
    k, v = for_each_head(q, k, v)
    scores = scores_of(q, k, softmax_scale, causal, top_left)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v.double(), lse


CHECKED = ops.run_forward  # not stood in for


def run_forward(q, k, v, softmax_scale=None, causal=False, top_left=False, deterministic=False, *_):
    o, lse = expected(q, k, v, softmax_scale, causal, top_left)
    return torch.empty_like(q).copy_(o), lse.float()


def run_backward(
    do, q, k, v, o, lse, dlse=None, softmax_scale=None, causal=False, top_left=False, deterministic=False, *_
):
    keys, values = for_each_head(q, k, v)
    p = (scores_of(q, keys, softmax_scale, causal, top_left) - lse[..., None].double()).exp()
    do = do.double()
    d = (do * o.double()).sum(-1) - (0 if dlse is None else dlse.double())
    ds = p * (do @ values.double().mT - d[..., None]) * (softmax_scale or q.shape[-1] ** -0.5)
    of_key_head = lambda x: x.unflatten(1, (k.shape[1], -1)).sum(2)
    grads = ds @ keys.double(), of_key_head(ds.mT @ q.double()), of_key_head(p.mT @ do)
    return tuple(torch.empty_like(x).copy_(grad) for x, grad in zip((q, k, v), grads))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of the operators are the reference's formulas, for CPU tensors."""
    torch._dynamo.reset()
    for name, stand_in in (("run_forward", run_forward), ("run_backward", run_backward)):
        monkeypatch.setattr(ops, name, stand_in)
    library = torch.library.Library("hopper_attention", "IMPL")
    library.impl("forward", run_forward, "CPU")
    library.impl("backward", run_backward, "CPU")
    library.impl("forward", ops.autocast_on("cpu", ops.forward), "AutocastCPU")
    yield
    library._destroy()


def inputs(
    heads: int = 4,
    kv_heads: int = 2,
    seqlen_q: int = 9,
    seqlen_kv: int = 13,
    dtype=torch.bfloat16,
    grad=False,
) -> list[torch.Tensor]:
    shapes = [(2, heads, seqlen_q, 64), (2, kv_heads, seqlen_kv, 64), (2, kv_heads, seqlen_kv, 64)]
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


MASKS = [{}, {"causal": True}, {"causal": True, "top_left": True}]
every_mask = pytest.mark.parametrize("mask", MASKS, ids=str)


# ---- what PyTorch asks of an operator ---------------------------------------------------------------------


@every_mask
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(mask: dict[str, bool], grad: bool) -> None:
    q, k, v = inputs(grad=grad)
    torch.library.opcheck(ops.forward, (q, k, v), mask)
    torch.library.opcheck(
        ops.forward, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)], mask
    )
    o, lse = ops.forward(*(x.detach() for x in (q, k, v)), **OPTIONS)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    for given in (None, dlse):
        torch.library.opcheck(ops.backward, (do, q.detach(), k.detach(), v.detach(), o, lse, given), mask)


@every_mask
def test_gradients_of_o_and_lse(mask: dict[str, bool]) -> None:
    """Of either, of both, and by the numbers of float64 attention."""
    q, k, v = inputs(grad=True)
    scale = 0.2
    o, lse = attention(q, k, v, **mask, softmax_scale=scale, return_lse=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_o, exact_lse = expected(*exact, scale, mask.get("causal", False), mask.get("top_left", False))
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    for outputs, given in (((o,), (do,)), ((lse,), (dlse,)), ((o, lse), (do, dlse))):
        found = torch.autograd.grad(outputs, (q, k, v), given, retain_graph=True)
        known = {id(o): exact_o, id(lse): exact_lse}
        same = torch.autograd.grad(
            [known[id(x)] for x in outputs], exact, [x.double() for x in given], retain_graph=True,
            allow_unused=True,
        )  # fmt: skip
        for x, y in zip(found, same):
            y = torch.zeros_like(x, dtype=torch.float64) if y is None else y
            assert torch.allclose(x.double(), y, rtol=2**-7, atol=2**-7 * y.abs().max().item())


def test_gradients_that_autograd_hands_back_expanded() -> None:
    q, k, v = inputs(grad=True)
    (found,) = torch.autograd.grad(attention(q, k, v).sum(), q)
    (same,) = torch.autograd.grad(attention(q, k, v), q, torch.ones_like(q))
    assert found.equal(same)


def test_only_what_needs_a_gradient_gets_one() -> None:
    q, k, v = inputs()
    assert not attention(q, k, v).requires_grad
    k.requires_grad_()
    o = attention(q, k, v)
    assert o.requires_grad
    o.sum().backward()
    assert q.grad is None
    assert k.grad is not None
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad


def test_second_derivatives_are_refused_by_name() -> None:
    q, k, v = inputs(grad=True)
    (grad,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="hopper_attention has no second derivatives"):
        grad.sum().backward()


def test_second_derivatives_of_functions_are_refused_too() -> None:
    q, k, v = inputs()
    loss = lambda q: attention(q, k, v).float().square().sum()
    of_gradient = lambda q: torch.func.grad(loss)(q).float().square().sum()
    with pytest.raises(NotImplementedError, match="hopper_attention has no second derivatives"):
        torch.func.grad(of_gradient)(q)


def test_forward_mode_is_refused_by_name() -> None:
    q, k, v = inputs()
    call = lambda q: attention(q, k, v).float().sum()
    with pytest.raises(NotImplementedError, match="hopper_attention has no forward-mode derivatives"):
        torch.func.jvp(call, (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="hopper_attention has no forward-mode derivatives"):
            call(dual)
    with pytest.raises(NotImplementedError, match="has no"):
        torch.func.jvp(torch.func.grad(call), (q,), (torch.ones_like(q),))


@every_mask
def test_outputs_and_gradients_lie_as_inputs_do(mask: dict[str, bool]) -> None:
    packed = torch.randn(2, 16, 3, 4, 64).bfloat16().requires_grad_()  # (batch, seqlen, qkv, heads, head_dim)
    for q, k, v in (
        inputs(grad=True),
        [x.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_() for x in inputs()],
        [x.transpose(1, 2) for x in packed.unbind(2)],
    ):
        o = attention(q, k, v, **mask)
        assert o.stride() == torch.empty_like(q).stride()
        grads = torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
        for x, grad in zip((q, k, v), grads):
            assert grad.stride() == torch.empty_like(x).stride()
    assert o.transpose(1, 2).is_contiguous()


# ---- torch.compile ----------------------------------------------------------------------------------------


def test_compiles_whole_and_once_for_every_length() -> None:
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph

    compiled = torch.compile(attention, fullgraph=True, backend=count, dynamic=True)
    for batch, n in ((2, 16), (3, 32), (5, 48)):
        q, k, v = (torch.randn(batch, 4, n, 64).bfloat16() for _ in range(3))
        assert compiled(q, k, v, causal=True).equal(attention(q, k, v, causal=True))
    assert len(graphs) == 1


@every_mask
def test_compiled_gradients_are_the_eager_ones(mask: dict[str, bool]) -> None:
    def step(q, k, v):
        o, lse = attention(q, k, v, **mask, return_lse=True)
        return (o.float().square().sum() + lse.cos().sum()) * 0.5

    q, k, v = inputs(grad=True)
    eager = torch.autograd.grad(step(q, k, v), (q, k, v))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x, y in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), eager):
        assert x.equal(y)


# ---- wrong inputs: the same error eagerly and compiled ----------------------------------------------------

WRONG = {
    "fp32": (lambda q, k, v: (q.float(), k.float(), v.float()), TypeError, "q must be bfloat16 or float16"),
    "dtypes": (lambda q, k, v: (q, k.half(), v), TypeError, "q, k and v must have one dtype"),
    "rank": (lambda q, k, v: (q[0], k, v), ValueError, "q must have 4 dimensions"),
    "shapes": (lambda q, k, v: (q, k, v[:, :, 1:]), ValueError, "k and v must have one shape"),
    "heads": (lambda q, k, v: (q[:, :3], k, v), ValueError, "the 3 query heads must be a multiple of"),
    "head_dim": (
        lambda q, k, v: (q[..., :36], k[..., :36], v[..., :36]), ValueError, "k6 takes head_dim in multiples",
    ),
    "device": (lambda q, k, v: (q, k, v), ValueError, "q, k and v must be on a CUDA device, not cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "words"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_inputs(
    make, error: type[Exception], words: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = torch.library.Library("hopper_attention", "IMPL", "CPU")  # the real checks, for CPU tensors too
    library.impl("forward", CHECKED, allow_override=True)
    monkeypatch.setattr(ops, "run_forward", CHECKED)
    call = torch.compile(attention, fullgraph=True, backend="eager") if compiled else attention
    try:
        with pytest.raises(error, match=words):
            call(*make(*inputs()))
    finally:
        library._destroy()


def test_wrong_options() -> None:
    q, k, v = inputs()
    o = attention(q, k, v)
    with pytest.raises(TypeError, match=r"k must be a torch\.Tensor, not NoneType"):
        attention(q, None, v)
    with pytest.raises(TypeError, match=r"lse must be a torch\.Tensor, not float"):
        attention_backward(o, q, k, v, o, 1.0)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="softmax_scale must be positive and finite"):
            CHECKED(q, k, v, softmax_scale=scale)
    with pytest.raises(TypeError, match="softmax_scale must be a number, not Tensor"):
        CHECKED(q, k, v, softmax_scale=torch.tensor(0.1))
    with pytest.raises(ValueError, match="top_left aligns a causal mask"):
        CHECKED(q, k, v, top_left=True)


# ---- beside the dispatcher --------------------------------------------------------------------------------


class Modes:
    """What must see an operator that is called, each as a context."""

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    profiler = staticmethod(lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
    autocast = staticmethod(lambda: torch.autocast("cpu", torch.bfloat16))
    tangents = staticmethod(torch.autograd.forward_ad.dual_level)


@pytest.mark.parametrize("mode", [name for name in vars(Modes) if not name.startswith("_")])
@pytest.mark.parametrize("grad", [False, True])
def test_what_must_see_the_operators_sees_them(
    mode: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever looks at operators finds them, forward and backward; only where nothing looks are they left
    out."""
    operators = {"forward": ops.forward, "backward": ops.backward}
    called = set()
    for name, operator in operators.items():
        call = lambda *x, name=name, operator=operator: called.add(name) or operator(*x)
        monkeypatch.setattr(ops, name, call)
    leaves = inputs(grad=grad)

    def step() -> set[str]:
        called.clear()
        o = attention(*leaves)
        if grad:
            torch.autograd.grad(o.sum(), leaves)
        return set(called)

    assert step() == set()
    with getattr(Modes, mode)():
        # A function mode sees `torch.autograd.grad` itself, and nothing inside.
        assert step() == set(list(operators)[: 1 + (grad and mode != "Function")])
    assert step() == set()


class Tagged(torch.Tensor):
    """A subclass, as autograd may hand one over as a gradient."""


def test_gradients_that_no_kernel_can_take_go_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subclasses, tensors without memory, and those of `is_grads_batched`."""
    direct = []
    call = lambda *x: direct.append(all(map(ops.is_plain, x[:7]))) or run_backward(*x)
    monkeypatch.setattr(ops, "run_backward", call)
    leaves = inputs(grad=True)
    o, lse = attention(*leaves, return_lse=True)
    do = torch.randn_like(o)
    plain = torch.autograd.grad(o, leaves, do, retain_graph=True)
    assert direct == [True]
    found = torch.autograd.grad(o, leaves, do.as_subclass(Tagged), retain_graph=True)
    assert all(x.equal(y) for x, y in zip(found, plain))
    torch.autograd.grad((o, lse), leaves, (do, torch.ones_like(lse).as_subclass(Tagged)), retain_graph=True)
    torch.autograd.grad(o, leaves, torch._efficientzerotensor(o.shape, dtype=o.dtype), retain_graph=True)
    assert direct == [True]
    both = torch.stack([do, 2 * do])
    batched = torch.autograd.grad(o, leaves, both, is_grads_batched=True, retain_graph=True)
    for x, y in zip(batched, plain):
        assert torch.allclose(x[0], y, atol=0.05)
        assert torch.allclose(x[1], 2 * y, atol=0.1)
    (jacobian,) = torch.autograd.functional.jacobian(
        lambda v: attention(*inputs()[:2], v)[0, 0, 0, :2], (inputs()[2],), vectorize=True
    )
    assert jacobian.shape == (2, *inputs()[2].shape)
    assert direct == [True]


def test_compiled_autograd() -> None:
    leaves = inputs(grad=True)
    attention(*leaves).sum().backward()
    plain = [x.grad.clone() for x in leaves]
    for x in leaves:
        x.grad = None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        attention(*leaves).sum().backward()
    assert all(x.grad.equal(y) for x, y in zip(leaves, plain))


@pytest.mark.parametrize("name", ["causal", "top_left", "deterministic"])
def test_switches_are_true_or_false(name: str) -> None:
    """Not what only counts as true: a tensor's value may change, and the plan that was made with it stays."""
    q, k, v = inputs()
    o, lse = attention(q, k, v, return_lse=True)
    for wrong in ("no", [1]):
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            attention(q, k, v, **{name: wrong})
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            attention_backward(o, q, k, v, o, lse, **{name: wrong})
    seen, switch = [], torch.tensor(True)
    record = lambda *x: seen.append(x[4:]) or run_forward(*x)
    library = torch.library.Library("hopper_attention", "IMPL", "CPU")
    library.impl("forward", record, allow_override=True)
    try:
        for value in (True, False):
            attention(q, k, v, **{"causal": True, name: switch.fill_(value)})
    finally:
        library._destroy()
    at = ("causal", "top_left", "deterministic").index(name)
    assert [(*x, False, False, False)[at] for x in seen] == [True, False]


def test_a_trace_holds_the_operator() -> None:
    q, k, v = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(attention, (q, k, v), check_trace=False)
    assert "hopper_attention::forward" in str(traced.graph)


# ---- the rest of PyTorch ----------------------------------------------------------------------------------


def test_autocast() -> None:
    q, k, v = inputs(dtype=torch.float32, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = attention(q, k, v)
        assert o.dtype == torch.bfloat16
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")(q, k, v)
        assert compiled.equal(o)
    o.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.float64])
def test_autocast_leaves_other_types_to_be_refused(dtype: torch.dtype) -> None:
    """By the kernels, which are stood in for here: e4m3 codes would be attended without their scales."""
    x = torch.zeros(1, 2, 8, 64).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(x, x, x).dtype == dtype


def test_what_other_calls_have_beside_may_ask_for_nothing() -> None:
    q, k, v = (x.transpose(1, 2) for x in inputs())
    o = flash_attn_func(q, k, v, alibi_slopes=None, mask_mod=None, gather_bwd_recompute_p=False)
    assert o.equal(flash_attn_func(q, k, v))


@every_mask
def test_flops(mask: dict[str, bool]) -> None:
    q, k, v = inputs(seqlen_q=32, seqlen_kv=32, grad=True)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, **mask).sum().backward()
    assert counter.get_total_flops() == 3.5 * 4 * 2 * 4 * 32 * 32 * 64 * (0.5 if mask else 1)


def test_selective_checkpointing() -> None:
    """A policy that keeps what `forward` gave: the recomputation does not run it again."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    calls = []
    library = torch.library.Library("hopper_attention", "IMPL", "CPU")
    library.impl("forward", lambda *x, **y: calls.append(1) or run_forward(*x, **y), allow_override=True)

    def policy(context, op, *args, **kwargs):
        keep = op == torch.ops.hopper_attention.forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = inputs(grad=True)
    try:
        plain = torch.autograd.grad(attention(2 * q, k, v).sum(), (q, k, v))
        calls.clear()
        o = checkpoint(
            lambda q, k, v: attention(2 * q, k, v), q, k, v, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
        grads = torch.autograd.grad(o.sum(), (q, k, v))
    finally:
        library._destroy()
    assert len(calls) == 1
    assert all(x.equal(y) for x, y in zip(grads, plain))
