"""`quantize` and `attention_fp8` on a CPU, where the reference stands in for the kernels."""

import functools
from collections.abc import Iterator

import pytest
import torch
from fp8_on_cpu import in_rows, inputs, run_rows, stood_in
from torch.utils.flop_counter import FlopCounterMode

from harness.quantized import codes, quantize_reference, turned
from harness.reference import reference
from hopper_attention import attention_fp8, flash_attn_func, fp8, ops_fp8, production_fp8, quantize
from hopper_attention.fp8 import Quantized, QuantizedColumns, QuantizedRows


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield from stood_in(monkeypatch)


MASKS = [{}, {"causal": True}, {"causal": True, "top_left": True}]
every_mask = pytest.mark.parametrize("mask", MASKS, ids=str)


# ---- what the calls compute -------------------------------------------------------------------------------


def error(o: torch.Tensor, q, k, v, softmax_scale=None, causal=False, top_left=False) -> float:
    """rms of o against float64 attention of q, k and v, relative to its own."""
    exact, _ = reference(q, k, v, causal, None, top_left, softmax_scale)
    return ((o.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


@every_mask
@pytest.mark.parametrize("incoherent", [True, False])
def test_quantised_in_one_call_or_in_two(mask: dict[str, bool], incoherent: bool) -> None:
    q, k, v = inputs()
    o, lse = attention_fp8(*quantize(q, k, v, incoherent=incoherent), **mask, return_lse=True)
    assert (o.dtype, lse.dtype, lse.shape) == (torch.bfloat16, torch.float32, q.shape[:3])
    assert error(o, q, k, v, **mask) < 0.06
    if incoherent:
        assert attention_fp8(q, k, v, **mask).equal(o)
        assert attention_fp8(q, k, v, **mask, return_lse=True)[1].equal(lse)


@every_mask
def test_a_cache_and_queries_quantised_later(mask: dict[str, bool]) -> None:
    q, k, v = inputs()
    for options in ({}, {"seed": 7}, {"incoherent": False}):
        whole = attention_fp8(*quantize(q, k, v, **options), **mask)
        cache = quantize(k=k, v=v, **options)
        assert cache.q is None
        assert attention_fp8(quantize(q, **options).q, cache.k, cache.v, **mask).equal(whole)
        assert attention_fp8(q, cache.k, cache.v, **mask).equal(whole), "quantised as k was"


def test_what_quantize_gives() -> None:
    q, k, v = inputs()
    found = quantize(q, k, v)
    assert type(found) is Quantized
    assert (type(found.q), type(found.k), type(found.v)) == (QuantizedRows, QuantizedRows, QuantizedColumns)
    reference = quantize_reference(q, k, v, True, production_fp8.signs(64))
    for x, y in (
        (found.q.codes, reference.q8), (found.k.codes, reference.k8), (found.v.codes, reference.vt8),
    ):  # fmt: skip
        assert x.view(torch.uint8).equal(y.view(torch.uint8))
    assert found.q.scale.equal(reference.q_scale) and found.v.exponent.equal(reference.v_exponent)
    assert (found.q.seed, found.k.seed, found.v.seqlen) == (0, 0, 70)
    assert quantize(q, k, v, incoherent=False).q.seed is None
    assert quantize(q)[1:] == (None, None)
    with pytest.raises(AttributeError):
        found.v.seqlen = 3


def test_keys_less_their_mean() -> None:
    """A large vector that all keys share takes their digits, unless it is subtracted before. No weight
    changes by that, and the LSE by what every score of a row loses."""
    q, k, v = inputs()
    shared = torch.randn(*k.shape[:2], 1, 64, generator=torch.Generator().manual_seed(2))
    k = k + 20 * shared.to(k.dtype)
    mean = k.mean(2, keepdim=True, dtype=torch.float32).to(k.dtype)
    found = quantize(q, k, v, centred=True)
    for x, y in zip(found, quantize(q, k - mean, v)):
        assert all(a.equal(b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(x, y, strict=True))
    o, lse = attention_fp8(*found, return_lse=True)
    assert error(o, q, k, v) < 0.06 < 2 * 0.06 < error(attention_fp8(q, k, v), q, k, v)
    group = q.shape[1] // k.shape[1]
    lost = (q.float() @ mean.float().repeat_interleave(group, 1).mT)[..., 0] * 64**-0.5
    exact = reference(q, k, v, False, None, False, None)[1]
    assert (lse + lost - exact).abs().max() < 0.2 < lost.abs().max()
    cache = quantize(k=k, v=v, centred=True)
    assert attention_fp8(q, cache.k, cache.v).equal(o)


def test_signs_are_what_they_were() -> None:
    """Of a kept cache, in whatever version of Python."""
    assert production_fp8.signs(64)[:12].tolist() == [-1, 1, -1, -1, 1, 1, -1, -1, -1, -1, -1, 1]
    for head_dim in (64, 128, 256):
        signs = production_fp8.signs(head_dim, 3)
        assert signs.abs().eq(1).all() and signs.shape == (head_dim,) and signs.dtype == torch.float32
        assert not signs.equal(production_fp8.signs(head_dim, 4))


def test_rope_turns_q_and_k() -> None:
    q, k, v = inputs(seqlen_q=70)
    angles = torch.rand(80, 32) * 6
    rope = angles.cos(), angles.sin()
    turn = lambda x: turned(x.float(), *rope)
    found = quantize(q, k, v, rope=rope)
    assert error(attention_fp8(*found), turn(q), turn(k), v) < 0.06
    later = quantize(q[:, :, 30:], rope=tuple(x[30:] for x in rope))
    assert error(attention_fp8(later.q, found.k, found.v), turn(q)[:, :, 30:], turn(k), v) < 0.06


@every_mask
@pytest.mark.parametrize("given", ["heads", "one", "number", "none"])
def test_in_rows(mask: dict[str, bool], given: str) -> None:
    (q, k, v), scales = in_rows()
    if given == "one":
        scales = {name: x[:1, :1] for name, x in scales.items()}
    elif given == "number":
        scales = dict.fromkeys(scales, 0.5)
    elif given == "none":
        scales = {}
    o, lse = attention_fp8(q, k, v, **scales, **mask, softmax_scale=0.2, return_lse=True)
    as_tensors = {name: torch.as_tensor(x) for name, x in scales.items()}
    same = run_rows(q, k, v, **as_tensors, **mask, softmax_scale=0.2)
    assert o.equal(same[0]) and lse.equal(same[1])
    assert o.dtype == torch.bfloat16


def test_flash_attention_3_call() -> None:
    (q, k, v), scales = in_rows(seqlen_q=70)
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    expected = attention_fp8(q, k, v, **scales, causal=True, softmax_scale=0.2, return_lse=True)
    o, lse = flash_attn_func(
        *rows, softmax_scale=0.2, causal=True, qv=None, **scales, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=True,
    )  # fmt: skip
    assert o.is_contiguous() and o.transpose(1, 2).equal(expected[0]) and lse.equal(expected[1])
    for name, value in {
        "qv": q, "window_size": (128, 0), "attention_chunk": 64, "softcap": 30.0, "num_splits": 4,
        "sm_margin": 8, "learnable_sink": q, "dropout_p": 0.1,
    }.items():  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"flash_attn_func.* does not take {name} = "):
            flash_attn_func(*rows, **{name: value})
    for name, scale in scales.items():
        with pytest.raises(ValueError, match=f"^{name} belongs to e4m3 tensors, and q is bfloat16"):
            flash_attn_func(*(x.to(torch.bfloat16) for x in rows), **{name: scale})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_type_of_the_output(dtype: torch.dtype) -> None:
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    q, k, v = inputs(dtype=dtype)
    assert attention_fp8(q, k, v).dtype == dtype
    assert attention_fp8(q, k, v, dtype=other).dtype == other
    assert attention_fp8(q, *quantize(k=k, v=v)[1:]).dtype == dtype
    assert attention_fp8(*quantize(q, k, v)).dtype == torch.bfloat16
    assert attention_fp8(*quantize(q, k, v), dtype=dtype).dtype == dtype
    (q, k, v), scales = in_rows()
    assert attention_fp8(q, k, v, **scales, dtype=dtype).dtype == dtype


def test_layouts_stay() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    found = quantize(q, k, v)
    assert found.q.codes.stride() == q.stride() and found.k.codes.stride() == k.stride()
    assert attention_fp8(q, k, v).stride() == q.stride()
    assert attention_fp8(*(codes(x.float()) for x in (q, k, v))).stride() == q.stride()


# ---- what PyTorch asks of an operator ---------------------------------------------------------------------


# "test_schema" multiplies what it compares, which PyTorch on a CPU cannot do in e4m3.
CHECKS = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
opcheck = functools.partial(torch.library.opcheck, test_utils=CHECKS)


@every_mask
def test_opcheck(mask: dict[str, bool]) -> None:
    q, k, v = inputs()
    rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for given in ((q, k, v, 0), (*rows_first, 0), (q, None, None, None), (None, k, v, 5)):
        opcheck(ops_fp8.quantize, given)
    q8, q_scale, k8, k_scale, vt8, v_exponent = ops_fp8.quantize(q, k, v, 0)
    opcheck(ops_fp8.forward_fp8, (q8, k8, vt8, q_scale, k_scale, v_exponent), mask)
    opcheck(ops_fp8.forward_fp8_cast, (q, k, v), mask)
    (q, k, v), scales = in_rows()
    opcheck(ops_fp8.forward_fp8_rows, (q, k, v), mask)
    opcheck(ops_fp8.forward_fp8_rows, (q, k, v, *scales.values()), mask | {"dtype": torch.float16})


def dynamic(call, **options):
    """Compiled whole, for every shape; the graphs are counted."""
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph

    return torch.compile(
        functools.partial(call, **options), fullgraph=True, backend=count, dynamic=True
    ), graphs


@pytest.mark.parametrize("way", ["at once", "in two", "a cache", "in rows", "flash"])
def test_compiles_whole_and_once_for_every_length(way: str) -> None:
    def call(q, k, v, causal):
        if way == "in two":
            return attention_fp8(*quantize(q, k, v, seed=3), causal=causal)
        if way == "a cache":
            cache = quantize(k=k, v=v, incoherent=False)
            return attention_fp8(q, cache.k, cache.v, causal=causal)
        if way == "flash":
            rows = (x.transpose(1, 2) for x in (q, k, v))
            return flash_attn_func(*rows, causal=causal, v_descale=torch.full((1,), 0.5))
        if way == "in rows":
            return attention_fp8(q, k, v, causal=causal, q_descale=0.5)
        return attention_fp8(q, k, v, causal=causal)

    compiled, graphs = dynamic(call, causal=True)
    for batch, n in ((2, 96), (3, 160), (5, 224)):
        tensors = [torch.randn(batch, 4, n, 64).bfloat16() for _ in range(3)]
        if way in ("in rows", "flash"):
            tensors = [codes(x.float()) for x in tensors]
        assert compiled(*tensors).equal(call(*tensors, causal=True))
    assert len(graphs) == 1


def test_quantised_tensors_go_in_and_out_of_a_graph() -> None:
    q, k, v = inputs()
    compiled, _ = dynamic(quantize)
    found = compiled(q, k, v)
    for x, y in zip(found, quantize(q, k, v)):
        assert type(x) is type(y) and x[2] == y[2]
        assert x[0].view(torch.uint8).equal(y[0].view(torch.uint8)) and x[1].equal(y[1])
    attend, _ = dynamic(attention_fp8)
    assert attend(*found).equal(attention_fp8(q, k, v))


def test_nothing_has_a_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    (q8, k8, v8), _ = in_rows()
    found = quantize(*(x.detach() for x in (q, k, v)))
    learning = found.q._replace(scale=found.q.scale.clone().requires_grad_())
    one = torch.ones(1, requires_grad=True)
    for call, name in (
        (lambda: attention_fp8(q, k, v), "forward_fp8_cast"),
        (lambda: attention_fp8(q, k, v, dtype=torch.float16), "quantize"),
        (lambda: quantize(q), "quantize"),
        (lambda: attention_fp8(q8.clone().requires_grad_(), k8, v8), "forward_fp8_rows"),
        (lambda: attention_fp8(q8, k8, v8, v_descale=one), "forward_fp8_rows"),
        (lambda: attention_fp8(learning, found.k, found.v), "forward_fp8"),
        (lambda: torch.compile(attention_fp8, backend="eager")(q, k, v), "forward_fp8_cast"),
    ):
        with pytest.raises(Exception, match=f"hopper_attention's {name} has no gradient"):
            call()
        with torch.no_grad():
            assert call() is not None


def test_forward_mode_is_refused_by_name() -> None:
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match="hopper_attention has no forward-mode derivatives"):
        torch.func.jvp(lambda q: attention_fp8(q, k, v).float(), (q,), (torch.ones_like(q),))


def test_autocast() -> None:
    """fp32 is cast to its type, and so is o; codes are left alone."""
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        o = attention_fp8(q, k, v)
        assert o.dtype == torch.float16
        assert torch.compile(attention_fp8, fullgraph=True, backend="aot_eager")(q, k, v).equal(o)
        assert o.equal(attention_fp8(*(x.half() for x in (q, k, v))))
        assert attention_fp8(*(codes(x) for x in (q, k, v))).dtype == torch.bfloat16
        assert attention_fp8(*quantize(q, k, v)).dtype == torch.bfloat16


@every_mask
def test_flops(mask: dict[str, bool]) -> None:
    q, k, v = inputs(seqlen_q=64, seqlen_kv=64)
    with FlopCounterMode(display=False) as counter:
        attention_fp8(q, k, v, **mask)
        attention_fp8(*(codes(x.float()) for x in (q, k, v)), **mask)
    assert counter.get_total_flops() == 2 * 4 * 2 * 4 * 64 * 64 * 64 * (0.5 if mask else 1)


def test_where_nothing_looks_the_dispatcher_is_left_out(on_cpu: list[str]) -> None:
    q, k, v = inputs()
    attention_fp8(q, k, v)
    attention_fp8(*(codes(x.float()) for x in (q, k, v)))
    quantize(k=k, v=v)
    attention_fp8(*quantize(q, k, v))
    assert on_cpu == ["run_cast", "run_rows", "run_quantize", "run_quantize", "run_forward"]
    on_cpu.clear()
    with FlopCounterMode(display=False), torch.no_grad():
        attention_fp8(q, k, v)
        attention_fp8(*(codes(x.float()) for x in (q, k, v)))
    assert on_cpu == []


def test_everything_public_is_documented() -> None:
    for x in (quantize, attention_fp8, flash_attn_func, Quantized, QuantizedRows, QuantizedColumns):
        assert x.__doc__ and "namedtuple" not in x.__doc__.lower()
    assert fp8.__doc__
