"""`quantize` and `attention_fp8` on a Hopper GPU.

By itself: python -m pytest tests/test_fp8_on_gpu.py -n 0 -s, which prints errors and host times too.
"""

import functools
import math
import time

import pytest
import torch
from in_fp8 import stood_for

from harness import judging, reference
from harness.inputs import random_inputs
from harness.quantized import codes, of_rows, quantize_reference
from harness.quantizing import steps_apart
from hopper_attention import attention, attention_fp8, flash_attn_func, ops_fp8, production_fp8, quantize
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEAD_DIMS = (64, 128, 256)
MASKS = {"full": {}, "causal": {"causal": True}, "top left": {"causal": True, "top_left": True}}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
LENGTHS = ((1, 1), (64, 128), (257, 389), (1000, 777), (65, 5000))
NAMES = "q_descale", "k_descale", "v_descale"


def inputs(head_dim: int = 64, seqlens=(257, 389), dtype=torch.bfloat16, seed: int = 0, heads=4, kv_heads=2):
    problem = Problem(2, heads, kv_heads, *seqlens, head_dim, False, dtype=str(dtype).removeprefix("torch."))
    return random_inputs(problem, DEVICE, seed)


def in_rows(*shape, **more) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """e4m3 q, k, v and the scales of each (batch, kv_head)."""
    tensors = inputs(*shape, **more)
    generator = torch.Generator(DEVICE).manual_seed(1)
    draw = lambda: torch.rand(tensors[1].shape[:2], device=DEVICE, generator=generator) + 0.5
    return [codes(x.float()) for x in tensors], {name: draw() for name in NAMES}


def meant(rows: list[torch.Tensor], scales: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """q, k, v in fp32 of e4m3 tensors and scales."""
    group = rows[0].shape[1] // rows[1].shape[1]
    spread = [scales[NAMES[0]].repeat_interleave(group, 1), scales[NAMES[1]], scales[NAMES[2]]]
    return [x.float() * scale[..., None, None] for x, scale in zip(rows, spread)]


def failures(
    o, lse, q, k, v, softmax_scale=None, causal=False, top_left=False, exponents=None
) -> tuple[str, ...]:
    """What the pass rule has against o and lse, for the numbers that codes stand for: against float64, beside
    a yardstick that rounds P as k7 does. `exponents` are those of blocks of V."""
    extents = *q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:]
    shape = Problem(*extents, causal, direction="fp8", top_left=top_left)
    lazy = ladder.load("k7")[1].lazy_maximum(shape)
    options = {"top_left": top_left, "scale": softmax_scale}
    exact = reference.reference(q, k, v, causal, **options)
    if exponents is not None:
        options["exponents"] = of_rows(exponents, v)
    yard, yard_lse = reference.yardstick_of(q, k, v, causal, lazy, **options, dtype=o.dtype)
    return judging.judge(o, exact[0], yard, lse, exact[1], yard_lse=yard_lse).failures


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and x.contiguous().view(torch.uint8).equal(y.contiguous().view(torch.uint8))


# ---- quantize ---------------------------------------------------------------------------------------------


@every_head_dim
@every_dtype
@pytest.mark.parametrize("incoherent", [True, False])
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_codes_and_scales(head_dim: int, dtype, incoherent: bool, seqlens) -> None:
    """The reference's, whole and in parts: bit for bit, but for the sign of a zero."""
    q, k, v = inputs(head_dim, seqlens, dtype)
    signs = production_fp8.signs(head_dim, 5).to(DEVICE)
    expected = quantize_reference(q, k, v, incoherent, signs)
    options = {"incoherent": incoherent, "seed": 5}
    parts = quantize(q, **options)[:1] + quantize(k=k, v=v, **options)[1:]
    for found in (quantize(q, k, v, **options), parts):
        for (x8, scale, _), names in zip(
            found, (("q8", "q_scale"), ("k8", "k_scale"), ("vt8", "v_exponent")), strict=True
        ):
            assert not steps_apart(x8, getattr(expected, names[0])).any(), names[0]
            assert same_bits(scale, getattr(expected, names[1])), names[1]


@every_head_dim
def test_rope(head_dim: int) -> None:
    """But for fused multiply-adds the reference's: a code may be its neighbour."""
    q, k, v = inputs(head_dim, (389, 389))
    angles = torch.rand(400, head_dim // 2, device=DEVICE) * 2 * math.pi
    rope = angles.cos(), angles.sin()
    expected = quantize_reference(q, k, v, True, production_fp8.signs(head_dim).to(DEVICE), rope)
    found = quantize(q, k, v, rope=rope)
    for x, y in ((found.q, expected.q8), (found.k, expected.k8)):
        assert (x.codes.float() != y.float()).float().mean() < 1e-3
    assert same_bits(found.v.codes, expected.vt8)
    later = quantize(q[:, :, 100:], rope=tuple(x[100:] for x in rope)).q
    whole = stood_for(*(x[i] for i in (0, 1) for x in found))[0]
    part = stood_for(*(x[i] for i in (0, 1) for x in (later, found.k, found.v)))[0]
    assert (whole[:, :, 100:] - part).square().mean().sqrt() < 0.06 * whole.square().mean().sqrt()


# ---- attention --------------------------------------------------------------------------------------------


@every_mask
@every_head_dim
@every_dtype
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_quantised(mask: dict, head_dim: int, dtype, seqlens) -> None:
    q, k, v = inputs(head_dim, seqlens, dtype)
    for options in ({}, {"incoherent": False}):
        found = quantize(q, k, v, **options)
        tensors = stood_for(*(x[i] for i in (0, 1) for x in found))
        for scale in (None, 0.2):
            o, lse = attention_fp8(*found, **mask, softmax_scale=scale, dtype=dtype, return_lse=True)
            assert o.dtype == dtype
            assert failures(o, lse, *tensors, scale, **mask, exponents=found.v.exponent) == ()


@every_mask
@every_head_dim
@every_dtype
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_in_rows(mask: dict, head_dim: int, dtype, seqlens) -> None:
    rows, scales = in_rows(head_dim, seqlens)
    o, lse = attention_fp8(*rows, **scales, **mask, softmax_scale=0.2, dtype=dtype, return_lse=True)
    assert o.dtype == dtype
    assert failures(o, lse, *meant(rows, scales), 0.2, **mask) == ()
    one = {name: x[0, 0] for name, x in scales.items()}
    of_tensors = attention_fp8(*rows, **one, **mask)
    assert attention_fp8(*rows, **{name: x.item() for name, x in one.items()}, **mask).equal(of_tensors)
    same = {name: x.expand(2, 2) for name, x in one.items()}
    assert attention_fp8(*rows, **same, **mask).equal(of_tensors)
    ones = {name: torch.ones(2, 2, device=DEVICE) for name in NAMES}
    assert attention_fp8(*rows, **mask).equal(attention_fp8(*rows, **ones, **mask))


@every_mask
def test_in_one_call_or_in_two(mask: dict) -> None:
    q, k, v = inputs(128)
    whole = attention_fp8(q, k, v, **mask)
    cache = quantize(k=k, v=v)
    assert attention_fp8(*quantize(q, k, v), **mask).equal(whole)
    assert attention_fp8(q, cache.k, cache.v, **mask).equal(whole)
    assert attention_fp8(quantize(q).q, cache.k, cache.v, **mask).equal(whole)
    exact = attention(q, k, v, **mask).float()
    assert (whole.float() - exact).square().mean().sqrt() < 0.06 * exact.square().mean().sqrt()


def test_outliers_want_a_rotation() -> None:
    """FlashAttention-3's inputs: N(0, 1), and in one of a thousand N(0, 100) besides."""
    draw = lambda: torch.randn(2, 8, 2048, 128, device=DEVICE, generator=generator)
    generator = torch.Generator(DEVICE).manual_seed(0)
    tensors = []
    for _ in range(3):
        rare = torch.rand(2, 8, 2048, 128, device=DEVICE, generator=generator) < 1e-3
        tensors.append((draw() + 10 * draw() * rare).bfloat16())
    exact, _ = reference.reference(*tensors, False)
    rms = lambda o: (o.double() - exact).square().mean().sqrt().item()
    rotated = rms(attention_fp8(*tensors))
    plain = rms(attention_fp8(*quantize(*tensors, incoherent=False)))
    print(f"rms error against float64: {rotated:.2e} rotated, {plain:.2e} plain")
    assert rotated < 0.75 * plain


def test_head_counts_and_layouts_give_the_same_bits() -> None:
    for heads, kv_heads in ((1, 1), (6, 1), (8, 8)):
        q, k, v = inputs(heads=heads, kv_heads=kv_heads)
        rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        o, lse = attention_fp8(q, k, v, causal=True, return_lse=True)
        other = attention_fp8(*rows_first, causal=True, return_lse=True)
        assert other[0].equal(o) and other[1].equal(lse)
        assert other[0].transpose(1, 2).is_contiguous()
        (q, k, v), scales = in_rows(heads=heads, kv_heads=kv_heads)
        o, lse = attention_fp8(q, k, v, **scales, causal=True, return_lse=True)
        flash = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        found = flash_attn_func(*flash, **scales, causal=True, return_attn_probs=True)
        assert found[0].transpose(1, 2).equal(o) and found[1].equal(lse)
        around = torch.zeros(2, 600, 3, kv_heads, 64, device=DEVICE, dtype=torch.uint8)
        around[:, 100:489, 1], around[:, 100:489, 2] = (x.view(torch.uint8) for x in flash[1:])
        k, v = (around[:, 100:489, i].view(torch.float8_e4m3fn).transpose(1, 2) for i in (1, 2))
        assert attention_fp8(q, k, v, **scales, causal=True).equal(o), "of a packed cache"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_scale_makes_its_head_nan(name: str, bad: float) -> None:
    rows, scales = in_rows(128)
    good = attention_fp8(*rows, **scales, causal=True, top_left=True, return_lse=True)
    scales[name] = scales[name].clone()
    scales[name][1, 0] = bad
    o, lse = attention_fp8(*rows, **scales, causal=True, top_left=True, return_lse=True)
    for x, y in ((o, good[0]), (lse, good[1])):
        assert x[1, :2].isnan().all(), "both query heads of the key head"
        assert x[0].equal(y[0]) and x[1, 2:].equal(y[1, 2:])


def test_nan_and_infinity_stay_visible() -> None:
    q, k, v = inputs(128)
    good = attention_fp8(q, k, v)
    for x, rows in ((q, (0, 0, 5)), (v, (0, 0))):
        for value in (math.nan, math.inf):
            changed = x.clone()
            changed[0, 0, 5, 7] = value
            o = attention_fp8(*(changed if y is x else y for y in (q, k, v)))
            assert o[rows].isnan().any()
            assert o[1].equal(good[1])


def test_empty_inputs() -> None:
    q, k, v = inputs()
    for given in ((q[:, :, :0], k, v), (q[:0], k[:0], v[:0])):
        o, lse = attention_fp8(*given, return_lse=True)
        assert o.shape == given[0].shape and lse.shape == given[0].shape[:3]
        assert attention_fp8(*(codes(x.float()) for x in given)).shape == given[0].shape
    with pytest.raises(ValueError, match="k8 takes at least one key"):
        attention_fp8(q, k[:, :, :0], v[:, :, :0])


# ---- PyTorch around it ------------------------------------------------------------------------------------


def calls(head_dim: int = 128, n: int = 1024):
    """A call of each kind, and what it reads: (call, tensors)."""
    qkv = [x.clone() for x in inputs(head_dim, (n, n))]
    rows, scales = in_rows(head_dim, (n, n))
    tensors = [*qkv, *rows, *scales.values()]

    def call(q, k, v, q8, k8, v8, *scales):
        cache = quantize(k=k, v=v, seed=2)
        return (
            attention_fp8(q, k, v, causal=True),
            attention_fp8(q, cache.k, cache.v),
            attention_fp8(q8, k8, v8, **dict(zip(NAMES, scales)), causal=True),
            attention_fp8(q8, k8, v8),
        )

    return call, tensors


def test_graphs() -> None:
    """Captured and replayed on other inputs; two graphs may replay side by side."""
    call, tensors = calls()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(*tensors)
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = call(*tensors)
        graphs.append((graph, outputs))
    others = calls()[1]
    for x, y in zip(tensors, others):
        x.copy_(y.flip(2) if y.dim() == 4 and y.dtype != torch.float8_e4m3fn else y)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, (graph, _) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    expected = call(*tensors)
    for _, outputs in graphs:
        assert all(x.equal(y) for x, y in zip(outputs, expected))


def test_streams() -> None:
    call, tensors = calls(n=4096)
    expected = call(*tensors)
    torch.cuda.synchronize()
    found = []
    for _ in range(8):
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(call(*tensors))
    torch.cuda.synchronize()
    for outputs in found:
        assert all(x.equal(y) for x, y in zip(outputs, expected))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    torch._dynamo.reset()
    call, _ = calls()
    compiled = torch.compile(call, fullgraph=True, dynamic=mode == "default", mode=mode)
    for n in (256, 320, 512):
        _, tensors = calls(n=n)
        for _ in range(3 if mode == "reduce-overhead" else 1):
            torch.compiler.cudagraph_mark_step_begin()
            found = [x.clone() for x in compiled(*tensors)]
        assert all(x.equal(y) for x, y in zip(found, call(*tensors)))


def test_opcheck() -> None:
    q, k, v = inputs()
    utils = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    check = functools.partial(torch.library.opcheck, test_utils=utils)
    check(ops_fp8.quantize, (q, k, v, 0))
    q8, q_scale, k8, k_scale, vt8, v_exponent = ops_fp8.quantize(q, k, v, 0)
    check(ops_fp8.forward_fp8, (q8, k8, vt8, q_scale, k_scale, v_exponent))
    check(ops_fp8.forward_fp8_cast, (q, k, v))
    rows, scales = in_rows()
    check(ops_fp8.forward_fp8_rows, (*rows, *scales.values()))


def test_autocast() -> None:
    q, k, v = inputs()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert attention_fp8(q.float(), k.float(), v.float()).equal(attention_fp8(q, k, v))


def test_nothing_waits_for_the_gpu() -> None:
    """Not even for the scales' values: PyTorch's own watch for it raises."""
    call, tensors = calls()
    call(*tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_thousand_runs_are_one() -> None:
    call, tensors = calls(n=2048)
    first = call(*tensors)
    for _ in range(250):
        assert all(x.equal(y) for x, y in zip(call(*tensors), first))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_in_a_process() -> None:
    call, tensors = calls()
    here = call(*tensors)
    there = call(*(x.to("cuda:1") for x in tensors))  # the current device stays the first
    assert all(x.device.index == 1 and x.cpu().equal(y.cpu()) for x, y in zip(there, here))


def test_host_time() -> None:
    """What a call costs the host: printed, and bounded far above what it should be."""
    q, k, v = inputs(64, (64, 64))
    rows, scales = in_rows(64, (64, 64))
    found, cache = quantize(q, k, v), quantize(k=k, v=v)
    for name, call in {
        "attention": lambda: attention(q, k, v),
        "quantize": lambda: quantize(q, k, v),
        "attention_fp8, quantised": lambda: attention_fp8(*found),
        "attention_fp8, a cache": lambda: attention_fp8(q, cache.k, cache.v),
        "attention_fp8, 16 bits": lambda: attention_fp8(q, k, v),
        "attention_fp8, rows": lambda: attention_fp8(*rows, **scales),
    }.items():
        least = math.inf
        with torch.no_grad():
            for _ in range(30):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(100):
                    call()
                least = min(least, (time.perf_counter() - begin) * 1e4)
        print(f"{name:26} {least:6.1f} µs")
        assert least < 200
