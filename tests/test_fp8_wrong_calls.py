"""What `quantize` and `attention_fp8` refuse, by name and before a launch."""

from collections.abc import Iterator

import pytest
import torch
from fp8_on_cpu import checked_for_real, in_rows, inputs, stood_in

from hopper_attention import attention_fp8, quantize
from hopper_attention.fp8 import QuantizedRows


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield from stood_in(monkeypatch)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from checked_for_real(monkeypatch)


ROWS = {
    "e5m2": (
        lambda q, k, v: (q, k, v.to(torch.float8_e5m2)), TypeError,
        "v must be float8_e4m3fn as q is, not float8_e5m2",
    ),
    "16-bit k": (lambda q, k, v: (q, k.half(), v), TypeError, "k must be float8_e4m3fn as q is, not float16"),
    "k of quantize": (
        lambda q, k, v: (q, quantize(k=k.half(), v=v.half()).k, v), TypeError,
        "k must be float8_e4m3fn as q is, not QuantizedRows",
    ),
    "rank": (lambda q, k, v: (q[0], k, v), ValueError, "q must have 4 dimensions"),
    "shapes": (lambda q, k, v: (q, k, v[:, :, 1:]), ValueError, "k and v must have one shape"),
    "heads": (lambda q, k, v: (q[:, :3], k, v), ValueError, "the 3 query heads must be a multiple of"),
    "head_dim": (
        lambda q, k, v: (q[..., :32], k[..., :32], v[..., :32]), ValueError, "k7_rows takes head_dim 64, 128",
    ),
    "no keys": (
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), ValueError, "k7_rows takes at least one key",
    ),
    "device": (lambda q, k, v: (q, k, v), ValueError, "q, k and v must be on a CUDA device, not cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "words"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_rows(make, kind, words: str, compiled: bool, request: pytest.FixtureRequest) -> None:
    (q, k, v), _ = in_rows()
    given = make(q, k, v)
    request.getfixturevalue("checked")
    call = torch.compile(attention_fp8, fullgraph=True, backend="eager") if compiled else attention_fp8
    with pytest.raises(kind if not compiled else Exception, match=words):
        call(*given)


DESCALES = {
    "zero": (0.0, ValueError, "must be positive and finite, not 0.0"),
    "negative": (-1, ValueError, "must be positive and finite, not -1"),
    "NaN": (float("nan"), ValueError, "must be positive and finite, not nan"),
    "infinite": (float("inf"), ValueError, "must be positive and finite, not inf"),
    "word": ("1", TypeError, "must be a tensor or a number, not str"),
    "type": (torch.ones(2, 2).half(), TypeError, "must be float32, not float16"),
    "heads": (torch.ones(2, 4), ValueError, r"must be one number or \(batch, kv_heads\) = \(2, 2\), not of"),
    "batch": (torch.ones(2), ValueError, r"must be one number or \(batch, kv_heads\) = \(2, 2\), not of"),
    "rank": (torch.ones(1, 1, 1), ValueError, "must have at most 2 dimensions, not 3"),
    "device": (torch.ones(2, 2, device="meta"), ValueError, "must be where q is, on cpu, not meta"),
}


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize(("scale", "kind", "words"), DESCALES.values(), ids=DESCALES)
def test_wrong_descales(name: str, scale, kind, words: str, checked: None) -> None:
    (q, k, v), _ = in_rows()
    with pytest.raises(kind, match=f"^{name} {words}"):
        attention_fp8(q, k, v, **{name: scale})


def test_descales_belong_to_rows() -> None:
    q, k, v = inputs()
    for given in ((q, k, v), quantize(q, k, v), (q, *quantize(k=k, v=v)[1:])):
        with pytest.raises(ValueError, match=r"^k_descale belongs to e4m3 tensors in rows"):
            attention_fp8(*given, k_descale=1.0)


SIXTEEN = {
    "fp32": (lambda q, k, v: (q.float(), k.float(), v.float()), TypeError, "q must be bfloat16 or float16"),
    "dtypes": (lambda q, k, v: (q, k.half(), v), TypeError, "q, k and v must have one dtype"),
    "rank": (lambda q, k, v: (q[0], k, v), ValueError, "q must have 4 dimensions"),
    "batch": (lambda q, k, v: (q[:1], k, v), ValueError, "must agree in batch and head_dim"),
    "lengths": (lambda q, k, v: (q, k, v[:, :, 1:]), ValueError, "k and v must have one shape"),
    "head_dim": (
        lambda q, k, v: (q[..., :32], k[..., :32], v[..., :32]), ValueError,
        "takes head_dim 64, 128 or 256, not 32",
    ),
    "grid": (
        lambda q, k, v: (q.expand(-1, 4, -1, -1)[:, :1].expand(-1, 70000, -1, -1), k[:, :1], v[:, :1]),
        ValueError, "takes at most 65535 batches, and as many heads of q, k, v together",
    ),
    "device": (lambda q, k, v: (q, k, v), ValueError, "q, k and v must be on a CUDA device, not cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "words"), SIXTEEN.values(), ids=SIXTEEN)
@pytest.mark.parametrize("call", [quantize, attention_fp8])
def test_wrong_16_bit_tensors(call, make, kind, words: str, checked: None) -> None:
    with pytest.raises(kind, match=words):
        call(*make(*inputs()))


def test_wrong_parts_and_options(checked: None) -> None:
    q, k, v = inputs()
    for given in ({"k": k}, {"v": v}, {"q": q, "k": k}):
        with pytest.raises(ValueError, match="k and v are quantised together"):
            quantize(**given)
    with pytest.raises(ValueError, match="there is nothing to quantise"):
        quantize()
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor, not list"):
        quantize([1])
    with pytest.raises(TypeError, match="incoherent must be True or False, not 'no'"):
        quantize(q, incoherent="no")
    for seed in (1.0, True, None):
        with pytest.raises(TypeError, match="seed must be an integer"):
            quantize(q, seed=seed)
    cos = torch.ones(70, 32)
    with pytest.raises(TypeError, match="centred must be True or False, not 1"):
        quantize(q, k, v, centred=1)
    with pytest.raises(ValueError, match="centred is of k, which is missing"):
        quantize(q, centred=True)
    with pytest.raises(ValueError, match="centred is of k, and not with rope"):
        quantize(q, k, v, rope=(cos, cos), centred=True)
    with pytest.raises(TypeError, match="bfloat16 or float16"):
        quantize(q, *in_rows()[0][1:], centred=True)
    for rope, kind, words in (
        (cos, TypeError, "rope must be two tensors"),
        ((cos, None), ValueError, "rope is cos and sin: one of them is missing"),
        ((cos, cos.half()), TypeError, "sin must be float32, not float16"),
        ((cos, cos[:60]), ValueError, r"sin must be \(at least 70 rows, head_dim/2 = 32\), not \(60, 32\)"),
        ((torch.ones(70, 64), cos), ValueError, r"cos must be \(at least 70 rows"),
        ((cos.mT.contiguous().mT, cos), ValueError, "cos must be contiguous in its last dimension"),
        ((torch.ones(70, 33)[:, :32], cos), ValueError, "cos has stride 33: strides must be multiples of 4"),
    ):
        with pytest.raises(kind, match=words):
            quantize(q, k, v, rope=rope)
    with pytest.raises(TypeError, match="dtype, the output's, must be bfloat16 or float16, not float32"):
        attention_fp8(*in_rows()[0], dtype=torch.float32)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="softmax_scale must be positive"):
            attention_fp8(*in_rows()[0], softmax_scale=scale)
    with pytest.raises(ValueError, match="top_left aligns a causal mask"):
        attention_fp8(*in_rows()[0], top_left=True)


def test_nothing_is_quantised_before_all_is_checked(on_cpu: list[str]) -> None:
    q, k, v = inputs()
    kept, longer = quantize(k=k, v=v), quantize(k=inputs(seqlen_kv=72)[1], v=inputs(seqlen_kv=72)[2])
    fewer = quantize(k=k[:, :1], v=v[:, :1])
    on_cpu.clear()
    for given, options, kind, words in (
        ((q, k, v), {"dtype": torch.float32}, TypeError, "dtype, the output's, must be"),
        ((q, k, v), {"dtype": "bf16"}, TypeError, "dtype, the output's, must be"),
        ((q, k, v), {"dtype": torch.float16, "softmax_scale": -1.0}, ValueError, "softmax_scale must be"),
        ((q, k, v), {"dtype": torch.float16, "top_left": True}, ValueError, "top_left aligns"),
        ((q, k, v), {"softmax_scale": [1.0]}, TypeError, "softmax_scale must be a number"),
        ((q, kept.k, v), {}, TypeError, "v must be the v of `quantize`"),
        ((q, kept.k, longer.v), {}, ValueError, "k and v must have one length"),
        ((q[:1], kept.k, kept.v), {}, ValueError, "must agree in batch and head_dim"),
        ((q[:, :3], kept.k, kept.v), {}, ValueError, "must be a multiple of the 2 key/value heads"),
        ((q, kept.k, fewer.v), {}, ValueError, r"vt8 must be \(2, 2, 72, 80\)"),
        ((q[0], kept.k, kept.v), {}, ValueError, "q must have 4 dimensions"),
        ((q, kept.k, kept.v), {"dtype": torch.float32}, TypeError, "dtype, the output's, must be"),
        ((q, kept.k, kept.v), {"top_left": True}, ValueError, "top_left aligns"),
    ):
        with pytest.raises(kind, match=words):
            attention_fp8(*given, **options)
    assert on_cpu == []
    attention_fp8(q, kept.k, kept.v)
    assert on_cpu == ["run_quantize", "run_forward"]


def test_numbers_that_fp32_or_the_schema_has_not() -> None:
    (q, k, v), _ = in_rows()
    for scale in (1e-50, 1e39):
        with pytest.raises(ValueError, match="k_descale must be positive and finite, not"):
            attention_fp8(q, k, v, k_descale=scale)
    with pytest.raises(ValueError, match="seed must have 64 bits"):
        quantize(inputs()[0], seed=2**63)


def test_no_gradient_of_angles() -> None:
    q, k, v = inputs()
    cos = torch.ones(70, 32, requires_grad=True)
    with pytest.raises(NotImplementedError, match="quantize has no gradient"):
        quantize(q, k, v, rope=(cos, cos.detach()))


def test_quantised_tensors_that_do_not_belong_together(request: pytest.FixtureRequest) -> None:
    q, k, v = inputs()
    found, other = quantize(q, k, v), quantize(q, k, v, seed=1)
    longer = quantize(*inputs(seqlen_kv=72))
    with pytest.raises(ValueError, match=r"rotated by the same signs, or neither: q's seed is 1, k's 0"):
        attention_fp8(other.q, found.k, found.v)
    with pytest.raises(ValueError, match=r"q's seed is 0, k's None"):
        attention_fp8(found.q, *quantize(k=k, v=v, incoherent=False)[1:])
    with pytest.raises(ValueError, match="k and v must have one length, not 70 and 72"):
        attention_fp8(found.q, found.k, longer.v)  # both are padded to 80
    for given in ((found.q, k, v), (q, found.k, v), (q, k, found.v), (found.q, found.k, None)):
        with pytest.raises(TypeError, match=r"must be the . of `quantize` where another of q, k and v is"):
            attention_fp8(*given)
    request.getfixturevalue("checked")
    changed = {
        "q8 must be float8_e4m3fn": (found.q._replace(codes=q), found.k, found.v),
        r"q_scale must be \(2, 4, 1\), as quantize gives it": (
            found.q._replace(scale=found.q.scale[..., :0]), found.k, found.v,
        ),
        "k_scale must be float32, not float64": (
            found.q, found.k._replace(scale=found.k.scale.double()), found.v,
        ),
        r"vt8 must be \(2, 2, 72, 80\), as quantize gives it": (
            found.q, found.k, found.v._replace(codes=found.v.codes[..., :64]),
        ),
        "v_exponent must be contiguous in its last dimension": (
            found.q, found.k, found.v._replace(exponent=found.v.exponent.mT.contiguous().mT),
        ),
        "k8 must be where q8 is, on cpu, not meta": (
            found.q, found.k._replace(codes=found.k.codes.to("meta")), found.v,
        ),
        "must agree in batch and head_dim": (
            QuantizedRows(found.q.codes[:1], found.q.scale[:1], 0), found.k, found.v,
        ),
    }  # fmt: skip
    for words, given in changed.items():
        with pytest.raises((TypeError, ValueError), match=words):
            attention_fp8(*given)
