"""`quantize` and `attention_fp8` on a CPU, where the reference stands in for the kernels."""

import functools
from collections.abc import Iterator

import pytest
import torch
from in_fp8 import stood_for
from torch.utils.flop_counter import FlopCounterMode

from harness.quantized import codes, quantize_reference, turned
from harness.reference import reference
from hopper_attention import attention_fp8, flash_attn_func, fp8, ops_fp8, production_fp8, quantize
from hopper_attention.fp8 import Quantized, QuantizedColumns, QuantizedRows

E4M3 = torch.float8_e4m3fn
REAL = {name: getattr(ops_fp8, name) for name in ("run_quantize", "run_forward", "run_rows", "run_cast")}


def run_quantize(q, k, v, seed=None, cos=None, sin=None):
    first = k if q is None else q
    signs = None if seed is None else production_fp8.signs(first.shape[-1], seed)
    rope = None if cos is None else (cos, sin)
    found = quantize_reference(*(first if x is None else x for x in (q, k, v)), seed is not None, signs, rope)
    as_given = lambda x8, x: torch.empty_like(x, dtype=E4M3).copy_(x8)
    outputs = [] if q is None else [as_given(found.q8, q), found.q_scale]
    return outputs + (
        [] if k is None else [as_given(found.k8, k), found.k_scale, found.vt8, found.v_exponent]
    )


def written(q, o, lse, dtype):
    return torch.empty_like(q, dtype=dtype or torch.bfloat16).copy_(o), lse.float()


def run_forward(
    q8, k8, vt8, q_scale, k_scale, v_exponent, softmax_scale=None, causal=False, top_left=False, dtype=None
):
    tensors = stood_for(q8, k8, vt8, q_scale, k_scale, v_exponent)
    return written(q8, *reference(*tensors, causal, None, top_left, softmax_scale), dtype)


def run_rows(
    q, k, v, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, top_left=False,
    dtype=None,
):  # fmt: skip
    heads = k.shape[:2]
    scales = [torch.ones(heads) if x is None else x.expand(heads) for x in (q_descale, k_descale, v_descale)]
    scales[0] = scales[0].repeat_interleave(q.shape[1] // k.shape[1], 1)
    tensors = (x.float() * scale[..., None, None] for x, scale in zip((q, k, v), scales))
    return written(q, *reference(*tensors, causal, None, top_left, softmax_scale), dtype)


def run_cast(q, k, v, softmax_scale=None, causal=False, top_left=False):
    found = run_quantize(q, k, v, 0)
    return run_forward(*found[::2], *found[1::2], softmax_scale, causal, top_left, q.dtype)


STAND_INS = {"run_quantize": run_quantize, "run_forward": run_forward}
STAND_INS |= {"run_rows": run_rows, "run_cast": run_cast}
OPERATORS = {"run_quantize": "quantize", "run_forward": "forward_fp8"}
OPERATORS |= {"run_rows": "forward_fp8_rows", "run_cast": "forward_fp8_cast"}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels of the operators are the reference's formulas, for CPU tensors. A list of those that were
    called beside the dispatcher."""
    torch._dynamo.reset()
    direct: list[str] = []
    library = torch.library.Library("hopper_attention", "IMPL")
    for name, stand_in in STAND_INS.items():
        call = lambda *x, name=name, stand_in=stand_in: direct.append(name) or stand_in(*x)
        monkeypatch.setattr(ops_fp8, name, call)
        library.impl(OPERATORS[name], stand_in, "CPU")
    for operator in (ops_fp8.quantize, ops_fp8.forward_fp8_cast):
        name = operator.__name__.partition(".")[0]
        library.impl(name, ops_fp8.autocast_on("cpu", operator), "AutocastCPU")
    yield direct
    library._destroy()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real checks, for CPU tensors too."""
    library = torch.library.Library("hopper_attention", "IMPL", "CPU")
    for name, run in REAL.items():
        monkeypatch.setattr(ops_fp8, name, run)
        library.impl(OPERATORS[name], run, allow_override=True)
    yield
    library._destroy()


def inputs(heads=4, kv_heads=2, seqlen_q=9, seqlen_kv=70, dtype=torch.bfloat16) -> list[torch.Tensor]:
    shapes = [(2, heads, seqlen_q, 64), (2, kv_heads, seqlen_kv, 64), (2, kv_heads, seqlen_kv, 64)]
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def in_rows(**shape) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """e4m3 q, k, v, and scales of each (batch, kv_head)."""
    tensors = inputs(**shape)
    names = ("q_descale", "k_descale", "v_descale")
    scales = {name: torch.rand(tensors[1].shape[:2]) + 0.5 for name in names}
    return [codes(x.float()) for x in tensors], scales


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


# ---- what is refused --------------------------------------------------------------------------------------

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


def test_everything_public_is_documented() -> None:
    for x in (quantize, attention_fp8, flash_attn_func, Quantized, QuantizedRows, QuantizedColumns):
        assert x.__doc__ and "namedtuple" not in x.__doc__.lower()
    assert fp8.__doc__
