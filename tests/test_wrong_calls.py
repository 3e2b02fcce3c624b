"""Wrong and unusual calls of the public functions: each works, or is refused by name before a launch; the
same the second time, when there may be a plan, and from a compiled graph as far as that gets."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from stand_in_launches import Launched, check_as_a_launch, stand_in_for_kernels
from test_ops import Modes, Tagged

from hopper_attention import (
    attention,
    attention_backward,
    flash_attn_func,
    flash_attn_varlen_func,
    launch,
    ops,
    policies,
    production,
)
from hopper_attention.plans import Plans

Q, KV, PACKED = (2, 4, 16, 64), (2, 2, 16, 64), (10, 4, 64)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    torch._dynamo.reset()
    found = stand_in_for_kernels(monkeypatch)
    check = lambda least, *given: None if least.policies else check_as_a_launch(least, *given)
    monkeypatch.setattr("stand_in_launches.check_as_a_launch", check)
    monkeypatch.setattr(policies, "_plans", Plans())
    return found


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape or Q, dtype=dtype)


def cu(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def qkv(**changes: object) -> list[object]:
    return list((dict.fromkeys("qkv", t()) | changes).values())


Case = tuple[list[object], dict[str, object], type[Exception] | None, str]


def refusals(call: Callable[..., object], cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("inputs", "options", "error", "words"), cases.values(), ids=cases)


def no(
    words: str, error: type[Exception] = ValueError, inputs: list[object] | None = None, **options
) -> Case:
    return qkv() if inputs is None else inputs, options, error, words


def yes(inputs: list[object] | None = None, **options) -> Case:
    return qkv() if inputs is None else inputs, options, None, ""


def judge(call: Callable[..., object], case: Case, launched: Launched) -> None:
    inputs, options, error, words = case
    for _ in range(2):
        if error is None:
            call(*inputs, **options)
        else:
            with pytest.raises(error, match=words):
                call(*inputs, **options)
    assert error is None or not launched


COMPILED_TOO = {  # what the operator itself refuses, wherever it is called from
    "types differ": no("one dtype", TypeError, qkv(k=t().half())),
    "fp32": no("bfloat16 or float16, not float32", TypeError, qkv(q=t().float(), k=t().float())),
    "e4m3": no("not float8_e4m3fn", TypeError, [t().to(torch.float8_e4m3fn)] * 3),
    "complex": no("not complex64", TypeError, [t().to(torch.complex64)] * 3),
    "3 dimensions": no("4 dimensions .* not 3", inputs=[t(4, 16, 64)] * 3),
    "no dimension": no("4 dimensions .* not 0", inputs=[t()[0, 0, 0, 0]] * 3),
    "head_dim 0": no("head_dim that is not 0", inputs=[t(2, 4, 16, 0)] * 3),
    "head_dim 63": no("multiples of 8 up to 256, not 63", inputs=[t(2, 4, 16, 63)] * 3),
    "head_dim 264": no("multiples of 8 up to 256, not 264", inputs=[t(2, 4, 16, 264)] * 3),
    "head_dims differ": no("agree in batch and head_dim", inputs=qkv(k=t(2, 4, 16, 128), v=t(2, 4, 16, 128))),
    "lengths of k and v": no("one shape but for head_dim", inputs=qkv(v=t(2, 4, 15, 64))),
    "batches": no("agree in batch", inputs=qkv(k=t(1, 4, 16, 64), v=t(1, 4, 16, 64))),
    "3 of 4 heads": no("multiple of the 3 key/value", inputs=qkv(k=t(2, 3, 16, 64), v=t(2, 3, 16, 64))),
    "more key heads": no("multiple of the 4 key/value", inputs=qkv(q=t(*KV))),
    "no key head": no("multiple of the 0 key/value", inputs=qkv(k=t(2, 0, 16, 64), v=t(2, 0, 16, 64))),
    "no key": no("at least one key", inputs=qkv(k=t(2, 4, 0, 64), v=t(2, 4, 0, 64))),
    "columns far apart": no("contiguous in its last dimension", inputs=qkv(q=t(2, 4, 64, 16).mT)),
    "odd strides": no("strides must be multiples of 8", inputs=qkv(q=t(2, 4, 16, 65)[..., :64])),
    "not aligned": no("2 bytes past a 16-byte", inputs=qkv(q=t(2 * 4 * 16 * 64 + 1)[1:].view(Q))),
    "too many rows": no("at most 2147483647 rows", inputs=qkv(q=t(2, 4, 1, 64).expand(2, 4, 2**30, 64))),
    "NaN for a scale": no("positive and finite, not nan", softmax_scale=float("nan")),
    "∞ for a scale": no("positive and finite, not inf", softmax_scale=float("inf")),
    "a negative scale": no("positive and finite, not -1", softmax_scale=-1.0),
    "a scale of 0": no("positive and finite, not 0", softmax_scale=0.0),
    "top_left alone": no("top_left aligns a causal mask", top_left=True),
    "a negative cap": no("softcap must be positive", softcap=-1.0),
    "NaN for a cap": no("softcap must be positive", softcap=float("nan")),
    "3 of 4 sinks": no("learnable_sink must be", learnable_sink=torch.zeros(3)),
    "a scale that is ∞ in fp32": no("positive and finite, not 1e\\+39", softmax_scale=1e39),
    "a scale that is 0 in fp32": no("positive and finite, not 1e-50", softmax_scale=1e-50),
    "a cap whose square is ∞": no("softcap must be positive", softcap=1e20),
    "a cap whose square is 0": no("softcap must be positive", softcap=1e-25),
    "True for a scale": no("softmax_scale must be a number, not bool", TypeError, softmax_scale=True),
    "True for a cap": no("softcap must be a number, not bool", TypeError, softcap=True),
    "None for causal beside a cap": no("causal must be True or False", TypeError, causal=None, softcap=3.0),
}
EAGER = {  # what Python refuses in front of the operator
    "no tensor": no(r"k must be a torch\.Tensor, not NoneType", TypeError, qkv(k=None)),
    "an array": no(r"k must be a torch\.Tensor, not ndarray", TypeError, qkv(k=np.ones(Q))),
    "nested": no("v must not be nested", TypeError, qkv(v=torch.nested.nested_tensor([t()[0], t()[0]]))),
    "another device": no("must be on one device", inputs=qkv(k=t().to("meta"))),
    "causal by position": no("positional", TypeError, [*qkv(), True]),
    "a word for causal": no("causal must be True or False", TypeError, causal="yes"),
    "a word for turns": no("deterministic must be", TypeError, deterministic="yes"),
    "a flag of numpy's": yes(causal=np.True_),
    "None for causal": no("causal must be True or False", TypeError, causal=None),
    "sparse": no(r"must be dense, not torch\.sparse_coo", TypeError, qkv(k=t().to_sparse())),
    "sparse rows": no("must be dense", TypeError, qkv(k=t().flatten(0, 2).to_sparse_csr())),
    "a word for causal beside a window": no("causal must be", TypeError, causal="yes", window_size=(3, 0)),
    "a list for a scale": no("softmax_scale must be a number, not list", TypeError, softmax_scale=[1.0]),
    "a tensor for a scale": no("softmax_scale must be a number", TypeError, softmax_scale=torch.tensor(1.0)),
    "a complex scale": no("softmax_scale must be a number", TypeError, softmax_scale=1j),
    "a list for a cap": no("softcap must be a number, not list", TypeError, softcap=[30.0]),
    "a vector for a cap": no("softcap must be a number, not Tensor", TypeError, softcap=torch.ones(2)),
    "an array for a window": no("must be \\(left, right\\)", TypeError, window_size=np.array([3, 0])),
    "a window before the first": no("from −1", window_size=(-2, 0)),
    "a window of fractions": no("two integers", TypeError, window_size=(1.5, 0)),
    "a window of three": no("must be \\(left, right\\)", TypeError, window_size=(1, 2, 3)),
    "a window that is a number": no("must be \\(left, right\\)", TypeError, window_size=3),
    "a window beside top_left": no(
        "aligned at the bottom right", causal=True, top_left=True, window_size=(3, 0)
    ),
    "a number for a sink": no(r"learnable_sink must be a torch\.Tensor", TypeError, learnable_sink=1.0),
    "integers for sinks": no("float32, bfloat16 or float16", TypeError, learnable_sink=cu(1, 2, 3, 4)),
}
UNUSUAL = {
    "fewer key heads": yes(qkv(k=t(*KV), v=t(*KV))),
    "values of another width": yes(qkv(v=t(2, 4, 16, 128))),
    "heads expanded": yes(qkv(k=t(2, 1, 16, 64).expand(Q))),
    "keys expanded": yes(qkv(k=t(2, 4, 1, 64).expand(Q))),
    "columns of wider rows": yes(qkv(q=t(2, 4, 16, 128)[..., 64:])),
    "one tensor thrice": yes([t()] * 3),
    "no batch": yes([t(0, 4, 16, 64)] * 3),
    "no head": yes([t(2, 0, 16, 64)] * 3),
    "no query": yes(qkv(q=t(2, 4, 0, 64))),
    "all on the meta device": yes([t().to("meta")] * 3),
    "a parameter": yes(qkv(q=torch.nn.Parameter(t()))),
    "a subclass": yes(qkv(q=t().as_subclass(Tagged))),
    "a sign to turn": yes(qkv(q=torch._neg_view(t()))),
    "an integer scale": yes(softmax_scale=1),
    "a fraction for a scale": yes(softmax_scale=Fraction(1, 3)),
    "NumPy's number for a scale": yes(softmax_scale=np.float32(0.3)),
    "a window as a list": yes(window_size=[3, None]),
    "a window beyond 32 bits": yes(window_size=(5, 2**70)),
    "a cap that is an integer": yes(softcap=30),
    "sinks far apart": yes(learnable_sink=torch.zeros(8)[::2]),
    "one sink expanded": yes(learnable_sink=torch.zeros(1).expand(4)),
    "1 for lse": yes(return_lse=1),
}


@refusals(attention, COMPILED_TOO | EAGER | UNUSUAL)
def test_attention(inputs, options, error, words, launched: Launched) -> None:
    judge(attention, (inputs, options, error, words), launched)


@refusals(attention, COMPILED_TOO)
def test_compiled(inputs, options, error, words, launched: Launched) -> None:
    judge(torch.compile(attention, backend="eager"), (inputs, options, error, words), launched)


def rows(**changes: object) -> list[object]:
    return list((dict.fromkeys("qkv", t(2, 16, 4, 64)) | changes).values())


@refusals(
    flash_attn_func,
    {
        "3 dimensions": no("batch, seqlen, heads, head_dim", inputs=[t(16, 4, 64)] * 3),
        "None": no(r"q must be a torch\.Tensor", TypeError, rows(q=None)),
        "dropout": no("dropout_p = 0.1", NotImplementedError, rows(), dropout_p=0.1),
        "NaN of dropout": no("dropout_p = nan", NotImplementedError, rows(), dropout_p=float("nan")),
        "chunks": no("attention_chunk = 5", NotImplementedError, rows(), attention_chunk=5),
        "splits": no("num_splits = 4", NotImplementedError, rows(), num_splits=4),
        "qv": no("qv = 'a tensor'", NotImplementedError, rows(), qv=t()),
        "a margin": no("sm_margin = 8", NotImplementedError, rows(), sm_margin=8),
        "slopes": no("alibi_slopes = 'a tensor'", NotImplementedError, rows(), alibi_slopes=torch.ones(4)),
        "slopes of NumPy's": no("alibi_slopes = ", NotImplementedError, rows(), alibi_slopes=np.ones(4)),
        "a mask of its own": no("mask_mod = ", NotImplementedError, rows(), mask_mod=max),
        "an unknown name": no("unexpected keyword argument 'slopes'", TypeError, rows(), slopes=None),
        "a descale": no("belongs to e4m3 tensors", inputs=rows(), k_descale=torch.ones(1)),
        "by position": no("positional", TypeError, [*rows(), 0.5]),
        "e4m3 q alone": no("k must be float8_e4m3fn", TypeError, rows(q=t().to(torch.float8_e4m3fn))),
        "nested": no("q must not be nested", TypeError, rows(q=torch.nested.nested_tensor([t()[0], t()[0]]))),
    },
)
def test_flash_attn_func(inputs, options, error, words, launched: Launched) -> None:
    judge(flash_attn_func, (inputs, options, error, words), launched)


def packed(first: object = None, second: object = None, **changes: object) -> list[object]:
    ends = (cu(0, 4, 10) if x is None else x for x in (first, second))
    return [*(dict.fromkeys("qkv", t(*PACKED)) | changes).values(), *ends]


@refusals(
    flash_attn_varlen_func,
    {
        "int64": no("cu_seqlens_q must be int32, not int64", TypeError, packed(cu(0, 4, 10).long())),
        "a list": no(r"cu_seqlens_q must be a torch\.Tensor", TypeError, packed([0, 4, 10])),
        "of other sequences": no("cu_seqlens_k must have 3 elements", inputs=packed(None, cu(0, 10))),
        "empty": no("it is empty", inputs=packed(cu(), cu())),
        "2 dimensions": no("one dimension", inputs=packed(cu(0, 4, 10)[None])),
        "far apart": no("contiguous in its last", inputs=packed(cu(0, 9, 4, 9, 10, 9)[::2])),
        "another device": no("one dimension and be on cpu", inputs=packed(cu(0, 4, 10).to("meta"))),
        "used, of others": no("seqused_q must have 2", inputs=packed(), seqused_q=cu(1, 2, 3)),
        "used, a list": no(r"seqused_k must be a torch\.Tensor", TypeError, packed(), seqused_k=[1, 2]),
        "4 dimensions": no("3 dimensions", inputs=packed(q=t(), k=t(), v=t())),
        "tokens of v": no("one shape", inputs=packed(v=t(9, 4, 64))),
        "pages": no(r"4 dimensions \(page", inputs=packed(), block_table=cu(1)),
        "no sequence": yes(packed(cu(0), cu(0))),
        "no token": yes(packed(cu(0, 0, 0), q=t(0, 4, 64))),
        "no token, of 60 columns": no("head_dim", inputs=packed(**dict.fromkeys("qkv", t(0, 4, 60)))),
        "no sequence, of fp32": no(
            "bfloat16", TypeError, packed(cu(0), cu(0), **dict.fromkeys("qkv", t(*PACKED).float()))
        ),
        "no sequence, of 60 columns": no(
            "head_dim", inputs=packed(cu(0), cu(0), **dict.fromkeys("qkv", t(10, 4, 60)))
        ),
        "lengths that nobody reads": yes([*packed(), "x", None]),
        "a longest beyond 64 bits": yes([*packed(), 2**70, 2**70]),
    },
)
def test_flash_attn_varlen_func(inputs, options, error, words, launched: Launched) -> None:
    judge(flash_attn_varlen_func, (inputs, options, error, words), launched)


def gradients(**changes: object) -> list[object]:
    given = dict.fromkeys(("do", "q", "k", "v", "o"), t()) | {"lse": torch.zeros(2, 4, 16)}
    return list((given | changes).values())


@refusals(
    attention_backward,
    {
        "lse in 16 bits": no("lse must be float32", TypeError, gradients(lse=t(2, 4, 16))),
        "lse of fewer rows": no("lse must be \\(batch", inputs=gradients(lse=torch.zeros(2, 4, 3))),
        "lse far apart": no("lse must be contiguous", inputs=gradients(lse=torch.zeros(2, 4, 32)[:, :, ::2])),
        "do of another type": no("do must be like q", inputs=gradients(do=t().half())),
        "do on another device": no("do must be like q", inputs=gradients(do=t().to("meta"))),
        "o of fewer rows": no("o must be like q", inputs=gradients(o=t()[:, :, :3])),
        "dlse in 16 bits": no("dlse must be float32", TypeError, gradients(), dlse=t(2, 4, 16)),
        "a list for a scale": no("must be a number, not list", TypeError, gradients(), softmax_scale=[1.0]),
        "nested": no("must not be nested", TypeError, gradients(v=torch.nested.nested_tensor([t()[0]] * 2))),
        "dlse expanded": yes(gradients(), dlse=torch.zeros(()).expand(2, 4, 16)),
        "do expanded": yes(gradients(do=t(1, 1, 1, 1).expand(Q))),
        "do of zeros that are nowhere": yes(
            gradients(do=torch._efficientzerotensor(Q, dtype=torch.bfloat16))
        ),
    },
)
def test_attention_backward(inputs, options, error, words, launched: Launched) -> None:
    judge(attention_backward, (inputs, options, error, words), launched)


# ---- where calls are made ---------------------------------------------------------------------------------


def test_under_inference_mode_and_outside_again(launched: Launched) -> None:
    """A plan that one of them made serves the other."""
    q, k, v = qkv()
    with torch.inference_mode():
        attention(q, k, v)
        inside = [x.clone() for x in (q, k, v)]
        attention(*inside)
    attention(*inside)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.no_grad():
        assert not attention(*leaves).requires_grad
    assert attention(*leaves).requires_grad
    assert len(launched) == 5
    assert len(production.plans) == 2  # with the lse, and without


def test_the_switch_to_deterministic_algorithms_between_two_steps(launched: Launched) -> None:
    leaves = [t(1, 2, 1024, 128).requires_grad_() for _ in range(3)]
    step = lambda: torch.autograd.grad(attention(*leaves, causal=True).sum(), leaves)
    for on in (False, True, False):
        torch.use_deterministic_algorithms(on)
        try:
            step()
            step()
        finally:
            torch.use_deterministic_algorithms(False)
    stages = [stage_id for stage_id, *_ in launched if stage_id.startswith("bwd")]
    deterministic = (launch.DETERMINISTIC, launch.DETERMINISTIC_IN_PARTS)
    assert [x in deterministic for x in stages] == [False] * 2 + [True] * 2 + [False] * 2


def test_a_launch_that_fails_is_named_with_a_plan_at_hand(launched: Launched) -> None:
    """Inputs of one kind may still begin where no kernel reads them, forward and backward."""
    q, k, v = qkv()
    attention(q, k, v)
    with pytest.raises(ValueError, match="2 bytes past a 16-byte boundary"):
        attention(t(q.numel() + 1)[1:].view(Q), k, v)
    assert len(launched) == 1


def test_saved_tensors_that_hooks_replace(launched: Launched) -> None:
    """They come back elsewhere and otherwise laid out, and serve as well."""
    leaves = [t().requires_grad_() for _ in range(3)]
    moved = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x.clone()
    for pack in (lambda x: x, lambda x: x):
        with torch.autograd.graph.saved_tensors_hooks(pack, moved):
            o = attention(*leaves)
        torch.autograd.grad(o, leaves, torch.ones_like(o))
    *_, given = launched[-1]
    assert given[0].stride() == (4096, 64, 256, 1)


@pytest.mark.parametrize("by", ["Dispatch", "Function", "profiler", "autocast", "tangents", "grad", "vmap"])
def test_what_must_see_the_operator_sees_it_with_a_plan_at_hand(
    by: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, called = ops.forward, []
    monkeypatch.setattr(ops, "forward", lambda *x: called.append(x) or operator(*x))
    q, k, v = qkv()
    attention(q, k, v)
    assert not called
    if by == "grad":
        torch.func.grad(lambda x: attention(x, k, v).sum())(q)
    elif by == "vmap":
        torch.vmap(lambda x: attention(q, k, v) + x)(torch.zeros(3, 1))
    else:
        with getattr(Modes, by)():
            attention(q, k, v)
    assert called
    called.clear()
    attention(q, k, v)
    assert not called


def test_gradients_of_gradients_are_refused_with_a_plan_at_hand(launched: Launched) -> None:
    leaves = [t().requires_grad_() for _ in range(3)]
    torch.autograd.grad(attention(*leaves).sum(), leaves)
    (dq,) = torch.autograd.grad(attention(*leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dq.sum().backward()
