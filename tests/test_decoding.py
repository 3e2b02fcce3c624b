"""Decoding without a GPU: the model of split and combine, the call's checks, the operators, how cases are
judged, machine code."""

import itertools
import random

import numpy as np
import pytest
import torch

import bench
from harness import decoding as decoding_on_gpu
from harness import decoding_fuzz
from harness import decoding_model as model
from harness.decoding_cases import Case, cases, kernel_of
from harness.judging import Verdict
from harness.machine_code import disassemble
from harness.read_only import compile_read_only
from hopper_attention import decoding, flash_attn_with_kvcache
from hopper_attention.kernels import calls_decode, ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import compile_kernel

E4M3 = torch.float8_e4m3fn


def tensors(queries: int, group: int, kv_heads: int, lengths: list[int], d: int = 64, seed: int = 0):
    """q, k and v; what lies behind a length is NaN."""
    random_ = np.random.default_rng(seed)
    shape = len(lengths), max(1, *lengths) + 3, kv_heads, d
    q = random_.standard_normal((len(lengths), queries, kv_heads * group, d))
    k, v = (random_.standard_normal(shape) for _ in range(2))
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = np.nan
    return q, k, v


LENGTHS = [[0, 1, 17, 64, 129, 700], [1500], [256, 256, 256], [5] * 40]


# ---- the model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("queries, group", [(1, 1), (1, 8), (4, 4), (8, 4), (3, 7), (16, 16)])
@pytest.mark.parametrize("unit", [0, 2])
def test_split_and_combine_is_attention(lengths, queries, group, unit) -> None:
    q, k, v = tensors(queries, group, 2, lengths)
    for causal, left, ctas in itertools.product((False, True), (None, 0, 100), (4, 132)):
        plan = model.plan_of(queries, 2 * group, 2, 64, unit, ctas)
        o, lse = model.decode(plan, q, k, v, lengths, causal=causal, left=left)
        same_o, same_lse = model.attention(q, k, v, lengths, causal=causal, left=left)
        np.testing.assert_allclose(o, same_o, rtol=0, atol=1e-12)
        np.testing.assert_allclose(lse, same_lse, rtol=1e-12)


@pytest.mark.parametrize("unit", [0, 4])
def test_new_keys_that_a_window_hides_are_in_somebodys_slice(unit: int) -> None:
    random_ = random.Random(1)
    for _ in range(200):
        added, left, queries = random_.randint(1, 900), random_.choice((0, 20, 500)), random_.randint(1, 9)
        lengths = [random_.randint(added, 2000) for _ in range(3)]
        plan = model.plan_of(queries, 2, 2, 64, unit)
        found = model.segments(plan, lengths, 2, queries, left, added)
        for batch, n in enumerate(lengths):
            begins = min(x.first for x in found if x.batch == batch) * plan.chunk
            assert begins <= min(n - added, max(0, n - queries - left))


@pytest.mark.parametrize("unit", [0, 4])
def test_slices_are_equal_and_hold_every_chunk_once(unit: int) -> None:
    random_ = random.Random(1)
    for _ in range(50):
        lengths = [random_.choice((0, 1, random_.randint(0, 5000))) for _ in range(random_.randint(1, 70))]
        columns, ctas = random_.randint(1, 9), random_.choice((1, 7, 132))
        cluster = 1 if unit else random_.choice((1, 2, 4))
        ctas *= cluster
        plan = model.Plan(8, 64, unit, ctas, together_of(columns, ctas, cluster), cluster)
        found = model.segments(plan, lengths, columns)
        read = [
            (x.batch, x.column, first + i)
            for x in found
            for first, chunks in x.parts(cluster)
            for i in range(chunks)
        ]
        wanted = [
            (b, c, i) for b, n in enumerate(lengths) for c in range(columns) for i in range(-(-n // 64))
        ]
        assert sorted(read) == wanted
        # No two results share a place, and a sequence's pieces are there.
        places = [x.piece for x in found if x.pieces]
        assert len(set(places)) == len(places)
        whose = lambda x: (x.batch, x.column)
        for _, same in itertools.groupby(sorted(found, key=whose), key=whose):
            same = list(same)
            assert all(x.pieces == (tuple(y.piece for y in same) if len(same) > 1 else ()) for x in same)
        work = [sum(max(1, x.chunks) for x in found if x.cluster == i) for i in range(plan.clusters)]
        entries = sum(max(1, -(-n // 64)) for n in lengths) * columns // plan.together
        if not unit:
            assert max(work) == -(-entries // (plan.clusters // plan.together))


def together_of(
    kv_heads: int, ctas: int = 132, cluster: int = 1, rows: int = 1, head_dim: int = 128, **options: bool
) -> int:
    """Of sequences with so many key heads, each read for so many rows."""
    problem = Problem(1, kv_heads * rows, kv_heads, 1, 64, head_dim, False, direction="decode")
    return calls_decode.together_of(problem, {"cluster": cluster, "eight_bits": False} | options, ctas)


def test_teams_read_a_kilobyte_of_a_key() -> None:
    assert [together_of(n) for n in (1, 2, 4, 5, 8, 12, 14, 32)] == [1, 2, 4, 1, 4, 4, 2, 4]
    assert [together_of(16, head_dim=d) for d in (64, 128, 256)] == [8, 4, 2]
    assert [together_of(16, head_dim=d, eight_bits=True) for d in (64, 128, 256)] == [16, 8, 4]
    assert together_of(4, rows=256) == 8  # two blocks of 128 rows read the same keys


def test_teams_leave_few_sms_without_work() -> None:
    for kv_heads, sms, eight_bits in itertools.product(range(1, 300), (78, 114, 132), (False, True)):
        together = together_of(kv_heads, sms, head_dim=64, eight_bits=eight_bits)
        assert kv_heads % together == 0 and sms // together * together >= 0.93 * sms


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    """With pieces by tokens: the same segments, whatever else is there."""
    plan = model.Plan(8, 64, 16)
    alone = [(x.first, x.chunks) for x in model.segments(plan, [5000], 1)]
    among = [(x.first, x.chunks) for x in model.segments(plan, [77, 5000, 0, 20000], 1) if x.batch == 1]
    assert alone == among and len(alone) == 5


@pytest.mark.parametrize("defect", model.DEFECTS)
def test_every_defect_is_seen(defect: str) -> None:
    """On a ragged batch, against what rounding to bf16 explains."""
    lengths = [700, 40, 1500]
    q, k, v = tensors(4, 4, 2, lengths)
    plan = model.plan_of(4, 8, 2, 64, ctas=14)
    assert plan.cluster == 2
    exact, lse = model.attention(q, k, v, lengths)
    rounding = np.abs(torch.from_numpy(exact).bfloat16().double().numpy() - exact)
    o, own_lse = model.decode(plan, q, k, v, lengths, defect=defect)
    error = np.nan_to_num(np.abs(o - exact), nan=np.inf)
    assert error.max() > 4 * rounding.max() or np.abs(own_lse - lse).max() > 1e-4, defect


def test_a_needle_at_every_edge_of_a_piece() -> None:
    """A key that dominates its row, at the first and the last key of every CTA's piece and every chunk."""
    length, plan = 1500, model.plan_of(1, 8, 2, 64, ctas=11)
    edges = {x.first * plan.chunk for x in model.segments(plan, [length], 2)}
    places = sorted({n for edge in edges for n in (edge - 1, edge, edge + 15, edge + 16) if 0 <= n < length})
    q, k, v = tensors(1, 4, 2, [length])
    for place in [*places, length - 1]:
        needle = k.copy()
        needle[0, place] = 40 * q[0, 0, ::4]
        o, _ = model.decode(plan, q, needle, v, [length])
        np.testing.assert_allclose(o[0, 0, ::4], v[0, place], atol=1e-6)


def test_bench_without_a_gpu(capsys: pytest.CaptureFixture) -> None:
    assert bench.main(["decode"]) == 0
    assert "no kernel was executed" in capsys.readouterr().out
    assert bench.main(["decode", "k6"]) == bench.main(["decode", "--save"]) == 2


def test_a_random_call_follows_from_its_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """And the kernels of the cases are all among them; a wrong one is named."""
    every = [decoding_fuzz.case_of(number) for number in range(decoding_fuzz.COUNT)]
    assert every == [decoding_fuzz.case_of(number) for number in range(decoding_fuzz.COUNT)]
    alone = lambda problem, options: (problem, *sorted((options | {"cluster": 1}).items()))  # any batch's
    compiled_in = lambda some: {alone(*kernel_of(case)) for case in some}
    assert compiled_in(every) == compiled_in(cases())
    assert all(len(set(case.lengths)) == 1 for case in every if case.whole)
    assert {1, 33, 64} <= {len(case.lengths) for case in every}
    assert {0, 1, 64, 128} <= (lengths := {n for case in every for n in case.lengths}) and max(lengths) > 4000

    assert decoding_fuzz.main(["0", "3"]) == 2  # there is no GPU here
    monkeypatch.setattr(decoding_fuzz, "hopper_gpu", lambda: True)
    wrong = decoding_fuzz.case_of(1)
    monkeypatch.setattr(decoding_fuzz, "judge", lambda case: ("off" if case == wrong else None, None))
    assert (decoding_fuzz.main(["0", "3"]), decoding_fuzz.main(["2", "1"])) == (1, 0)
    said = capsys.readouterr()
    assert "no Hopper GPU" in said.err and f"1: {wrong}: off" in said.out and "2 of 3 passed" in said.out


def test_cases_have_a_reference() -> None:
    """Inputs and both references of some cases, on the CPU: the yardstick is near, but not the reference."""
    for case in list(decoding_on_gpu.cases())[::11]:
        arguments, k, v = decoding_on_gpu.inputs_of(case, "cpu")
        exact, lse = decoding_on_gpu.expected(case, arguments["q"], k, v)
        rounded, _ = decoding_on_gpu.expected(case, arguments["q"], k, v, torch.bfloat16)
        assert torch.isfinite(exact).all() and 0 < (exact - rounded).abs().max() < 0.05
        wanted = [
            n >= 1 and (i - case.queries + n >= 0 or not case.causal)
            for n in case.lengths
            for i in range(case.queries)
        ]
        if not case.appends:
            assert torch.isfinite(lse[:, 0]).flatten().tolist() == wanted


# ---- the call ---------------------------------------------------------------------------------------------


def call(queries=1, heads=8, kv_heads=2, d=128, dtype=torch.bfloat16, cache=None, page=0, batch=2, **options):
    q = torch.zeros(batch, queries, heads, d, dtype=dtype)
    shape = (9, page, kv_heads, d) if page else (batch, 96, kv_heads, d)
    k, v = (torch.zeros(shape, dtype=cache or dtype) for _ in range(2))
    if page:
        options.setdefault("block_table", torch.zeros(batch, 3, dtype=torch.int32))
        options.setdefault("cache_seqlens", torch.zeros(batch, dtype=torch.int32))
    return flash_attn_with_kvcache(q, k, v, **options)


new = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype)
inferred = torch.inference_mode()(new)
lengths_of = torch.tensor([3, 4], dtype=torch.int32)
REFUSED = [
    ({"d": 96}, ValueError, "head_dim 64, 128 or 256, not 96"),
    ({"dtype": torch.float32}, TypeError, "q must be bfloat16 or float16, not float32"),
    ({"cache": torch.float16}, TypeError, "k_cache must be bfloat16 as q, or float8_e4m3fn, not float16"),
    ({"heads": 7}, ValueError, "7 query heads must be a multiple of the 2"),
    ({"page": 24}, ValueError, "pages must have 16, 32 or a multiple of 64 keys, not 24"),
    (
        {"page": 384, "d": 64, "cache": E4M3, "k_descale": 1.0, "v_descale": 1.0},
        ValueError,
        "pages must have 16, 32, 64, 128 or a multiple of 256 keys, not 384",
    ),
    ({"page": 16, "cache_seqlens": None}, ValueError, "needs cache_seqlens"),
    ({"page": 16, "block_table": new(2, 3)}, TypeError, "block_table must be int32, not bfloat16"),
    ({"page": 16, "block_table": lengths_of}, ValueError, "block_table must be (2, pages) on cpu"),
    ({"cache_seqlens": lengths_of.long()}, TypeError, "cache_seqlens must be int32, not int64"),
    ({"cache_seqlens": lengths_of[:1]}, ValueError, "cache_seqlens must be (2,) on cpu, not (1,)"),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens = -1: the cache has room for 0 to"),
    ({"cache_seqlens": 10**6}, ValueError, "cache_seqlens = 1000000: the cache has room"),
    ({"page": 16, "cache_seqlens": 49}, ValueError, "cache_seqlens = 49: the cache has room for 0 to 48"),
    (
        {"page": 16, "cache_seqlens": 48, "k": new(2, 1, 2, 128), "v": new(2, 1, 2, 128)},
        ValueError,
        "cache_seqlens = 48 and 1 new ones: the cache has room for 0 to 48 keys",
    ),
    ({"page": 16, "cache_seqlens": 48}, ValueError, "must be on a CUDA device, not cpu"),
    ({"k": new(2, 1, 2, 128)}, TypeError, "v must be a torch.Tensor, not NoneType"),
    ({"k": new(2, 1, 2, 128), "v": new(2, 1, 2, 128)}, TypeError, "cache_seqlens must be a torch.Tensor"),
    (
        {"k": new(2, 1, 2, 128), "v": new(2, 2, 2, 128), "cache_seqlens": 3},
        ValueError,
        "v must be (batch, new keys, kv heads, head_dim) = (2, n, 2, 128)",
    ),
    (
        {"page": 16, "k": new(2, 49, 2, 128), "v": new(2, 49, 2, 128), "cache_seqlens": lengths_of},
        ValueError,
        "a sequence has room for 48 keys: k has 49 new ones",
    ),
    ({"cache_seqlens": True}, TypeError, "cache_seqlens must be an integer or a tensor, not bool"),
    ({"k_descale": 1.0}, ValueError, "k_descale is for caches in float8_e4m3fn"),
    (
        {"cache": E4M3, "k_descale": True, "v_descale": 1.0},
        TypeError,
        "k_descale must be a tensor or a number, not bool",
    ),
    ({"cache": E4M3, "v_descale": 1.0}, ValueError, "needs k_descale"),
    (
        {"cache": E4M3, "k_descale": 0.0, "v_descale": 1.0},
        ValueError,
        "k_descale must be positive and finite",
    ),
    (
        {"cache": E4M3, "k_descale": torch.ones(3), "v_descale": 1.0},
        ValueError,
        "k_descale must be float32 (",
    ),
    ({"softmax_scale": -1.0}, ValueError, "softmax_scale must be positive and finite"),
    ({"window_size": (5, 3)}, NotImplementedError, "window_size = (5, 3)"),
    ({"learnable_sink": torch.ones(8)}, NotImplementedError, "does not take learnable_sink = 'a tensor'"),
    ({"cache_seqlens": np.int64(3)}, TypeError, "cache_seqlens must be a torch.Tensor"),
    (
        {"queries": 0, "k": new(2, 1, 2, 128), "v": new(2, 1, 2, 128), "cache_seqlens": lengths_of},
        ValueError,
        "k and v beside no query",
    ),
    ({"deterministic": True}, ValueError, "must be on a CUDA device"),
    ({"window_size": None}, TypeError, "window_size must be (left, right), not None"),
    ({"window_size": (1.5, 0)}, TypeError, "window_size must be two integers"),
    ({"window_size": (-2, 0)}, ValueError, "window_size must be from −1"),
    ({"window_size": (2**70, 0)}, ValueError, "must be on a CUDA device"),
    ({"out": new(2, 1, 8, 64)}, ValueError, "out must be like q: (2, 1, 8, 128)"),
    ({"out": new(4, 1, 8, 128)}, ValueError, "out must be like q"),
    ({"out": new(2, 1, 8, 128).half()}, ValueError, "out must be like q"),
    ({"out": [1]}, TypeError, "out must be a torch.Tensor"),
    ({"out": new(2, 1, 1, 128).expand(2, 1, 8, 128)}, ValueError, "out is written and must not overlap"),
    ({"out": inferred(2, 1, 8, 128)}, ValueError, "out was made under torch.inference_mode"),
    ({"softmax_scale": torch.tensor(0.3)}, TypeError, "softmax_scale must be a number, not Tensor"),
    ({"qv": new(2, 1, 8, 128)}, NotImplementedError, "does not take qv = 'a tensor'"),
    ({"sm_margin": 3}, NotImplementedError, "does not take sm_margin = 3"),
    ({"pages": None}, TypeError, "unexpected keyword argument 'pages'"),
    ({"sm_margin": 0, "qv": None, "pack_gqa": True}, ValueError, "must be on a CUDA device"),
    ({"page": 16, "page_table": lengths_of}, ValueError, "two names of one argument"),
    ({"softcap": 30.0}, NotImplementedError, "softcap = 30.0"),
    ({"rotary_cos": new(9, 64)}, NotImplementedError, "does not take rotary_cos = 'a tensor'"),
    ({"cache_leftpad": lengths_of}, NotImplementedError, "does not take cache_leftpad = 'a tensor'"),
    ({}, ValueError, "must be on a CUDA device, not cpu"),
    ({"page": 16}, ValueError, "must be on a CUDA device, not cpu"),
    ({"cache": E4M3, "k_descale": 1.0, "v_descale": torch.ones(2)}, ValueError, "must be on a CUDA device"),
]


@pytest.mark.parametrize("options, error, message", REFUSED, ids=[x[2][:40] for x in REFUSED])
def test_wrong_inputs_are_refused(options, error, message) -> None:
    with pytest.raises(error) as raised:
        call(**options)
    assert message in str(raised.value)


def test_a_q_without_dimensions_is_refused_beside_numbers() -> None:
    k = new(2, 32, 2, 128)
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        flash_attn_with_kvcache(torch.zeros((), dtype=torch.bfloat16), k, k, cache_seqlens=5)


def test_new_keys_and_values_in_one_cache_are_refused() -> None:
    """Both would be written to the same rows. Beside each other in one tensor they are apart."""
    q, rows, lengths = new(2, 1, 8, 128), new(2, 1, 2, 128), torch.tensor([3, 5], dtype=torch.int32)
    together = new(2, 32, 2, 2, 128)
    k, v = together.unbind(2)
    for cache in (new(2, 32, 2, 128), k):
        with pytest.raises(ValueError, match="k_cache and v_cache are written, and must not be one tensor"):
            flash_attn_with_kvcache(q, cache, cache.view_as(cache), rows, rows, cache_seqlens=lengths)
        with pytest.raises(
            ValueError, match="must be on a CUDA device"
        ):  # nothing else is wrong: none is written
            flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    with pytest.raises(ValueError, match="must be on a CUDA device"):
        flash_attn_with_kvcache(q, k, v, rows, rows, cache_seqlens=lengths)


def test_there_is_no_gradient() -> None:
    q, k = new(2, 1, 8, 128).requires_grad_(), new(2, 32, 2, 128)
    with pytest.raises(NotImplementedError, match="no gradient"):
        flash_attn_with_kvcache(q, k, k)
    with pytest.raises(NotImplementedError, match="no gradient"):
        flash_attn_with_kvcache(q.detach(), k, k, out=torch.empty_like(q, requires_grad=True))
    descale = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradient"):
        flash_attn_with_kvcache(q.detach(), *[k.to(E4M3)] * 2, k_descale=descale, v_descale=1.0)


# ---- the judge --------------------------------------------------------------------------------------------


def stand_in(
    q, k_cache, v_cache, k, v, cache_seqlens=None, block_table=None, k_descale=None, v_descale=None,
    softmax_scale=None, causal=False, window_left=-1, batch_invariant=False, made=None,
):  # fmt: skip
    """A dense cache's attention, by the model."""
    lengths = [k_cache.shape[1]] * len(q) if cache_seqlens is None else cache_seqlens.tolist()
    for b, length in enumerate(lengths if k is not None else ()):
        k_cache[b, length : length + k.shape[1]], v_cache[b, length : length + k.shape[1]] = k[b], v[b]
        lengths[b] += k.shape[1]
    arrays = [x.double().numpy() for x in (q, k_cache, v_cache)]
    left = window_left if window_left >= 0 else None
    o, lse = model.attention(*arrays, lengths, causal=causal, left=left, scale=softmax_scale)
    return torch.empty_like(q).copy_(torch.from_numpy(o)), torch.from_numpy(lse).float()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "decode", stand_in)


def test_the_largest_errors_are_kept() -> None:
    verdicts = [Verdict((), 0.5, 1.0, 1.0, 1.0, 3.0, 0.0), None, Verdict((), 0.1, 1.5, 0.9, 1.0, 2.0, 0.0)]
    largest = decoding_on_gpu.largest(verdicts)
    assert (largest["max_error"], largest["max_ratio"], largest["row_rms_ratio"]) == (0.5, 1.5, 3.0)
    assert decoding_on_gpu.largest([None]) == {}


def test_a_key_that_a_long_sequence_lacks_is_seen_beside_a_short_one(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are off by less than a short sequence's rounding, which is what the whole tensor shows."""
    case = Case((4, 1000), 1, 8)
    wrong, verdict = decoding_on_gpu.judge(case, "cpu")
    assert wrong is None
    assert verdict.row_rms_ratio < 1.1

    def without_the_last(q, k_cache, v_cache, k, v, cache_seqlens, *options: object, **named: object):
        return stand_in(q, k_cache, v_cache, k, v, cache_seqlens.clamp(max=999), *options, **named)

    monkeypatch.setattr(decoding, "decode", without_the_last)
    wrong, verdict = decoding_on_gpu.judge(case, "cpu")
    assert "of (b, h) = (1, 0)" in wrong and verdict.row_rms_ratio > 10
    assert verdict.max_ratio < 2 and verdict.rms_ratio < 1.25


# ---- launches and machine code ----------------------------------------------------------------------------


def test_scratch_is_of_the_capacity_not_of_the_lengths() -> None:
    problem = Problem(64, 32, 8, 1, 8192, 128, False, direction="decode")
    options = calls_decode.options_of(problem, True, 0, False, False, False, False)
    assert calls_decode.decode_scratch(problem, options, 132) == {
        "pieces": ((264, 8, 128), "float32"),
        "pieces_lse": ((264, 8), "float32"),
        "arrived": ((64 * 8 * 8,), "int32"),
    }
    options |= {"cluster": 2}
    assert calls_decode.decode_scratch(problem, options, 132)["arrived"] == ((64 * 8 * 8 * 2,), "int32")
    options |= {"unit": 16, "cluster": 1}
    assert calls_decode.decode_scratch(problem, options, 132)["pieces"][0] == (64 * 8 * 8, 8, 128)


KERNELS = [
    (128, 8, {}),
    (128, 16, {"page": 16, "causal": True}),
    (64, 32, {"page": 128, "appends": True, "causal": True}),
    (128, 8, {"eight_bits": True, "page": 64}),
    (128, 64, {"causal": True, "window": True}),
    (256, 8, {"lengths": False}),
]


@pytest.mark.parametrize("pdl", [True, False])
def test_a_launch_waits_for_the_one_before_if_it_may_begin_earlier(pdl: bool) -> None:
    """In the producer, on a guess or without, and in the warps that compute, whatever they read first."""
    problem = Problem(1, 1, 1, 1, 1, 128, False, direction="decode")
    options = calls_decode.options_of(problem, True, 16, False, False, True, False)
    code = disassemble(compile_kernel("decode", problem, **options, pdl=pdl).__cubin__)
    counts = [sum(x.count(name) for x in code) for name in ("PREEXIT", "ACQBULK")]
    assert counts == ([1, 3] if pdl else [0, 0])


def test_the_yardstick_reads_what_decode_reads_and_computes_nothing() -> None:
    [code] = disassemble(compile_read_only(128, "bfloat16").__cubin__)
    assert [code.count(name) for name in ("UTMALDG", "HMMA", "LDSM", "STG")] == [4, 0, 0, 0]


@pytest.mark.parametrize("head_dim, rows, more", KERNELS, ids=str)
def test_kernels_compile_without_spills(head_dim: int, rows: int, more: dict) -> None:
    more = {"lengths": True, "page": 0, "eight_bits": False, "window": False, "appends": False} | more
    problem = Problem(1, rows, 1, 1, 1, head_dim, more.pop("causal", False), direction="decode")
    options = calls_decode.options_of(
        problem, more["lengths"], more["page"], more["eight_bits"], more["window"], more["appends"], False
    )
    assert options["rows"] == rows
    assert ladder.load("decode")[1].supports(problem) is None
    kernel = compile_kernel("decode", problem, **options)
    code = disassemble(kernel.__cubin__)
    assert [x.frame_bytes for x in code] == [0] * len(code)
