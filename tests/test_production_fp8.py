"""What happens between an FP8 operator and a launch, on a CPU, where kernels and CUDA are stood in for."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from stand_in_launches import stand_in_for_memory

from harness.quantized import codes
from harness.results import repository
from hopper_attention import cache, launch, memory, precompile, production, production_fp8, tuned
from hopper_attention.kernels import calls_fp8, ladder, quantize
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.fp8 import quantized_shapes

E4M3 = torch.float8_e4m3fn
HEAD_DIMS = (64, 128, 256)


class Launch(NamedTuple):
    """What was compiled, and its arguments."""

    name: str
    least: Problem
    options: dict
    given: tuple


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []

    def kernel_for(name: str, least: Problem, options: dict) -> SimpleNamespace:
        return SimpleNamespace(launch=lambda *given: found.append(Launch(name, least, options, given)))

    monkeypatch.setattr(production_fp8, "kernel_for", kernel_for)
    monkeypatch.setattr(production_fp8, "check_device", lambda stage_id, q: None)
    for name in ("_plans", "_ones"):
        monkeypatch.setattr(production_fp8, name, {})
    monkeypatch.setattr(production, "current_device", lambda: None)
    stand_in_for_memory(monkeypatch)
    production_fp8.signs_on.cache_clear()
    return found


def tensors(seqlen_q=9, seqlen_kv=70, head_dim=64, heads=4, kv_heads=2, dtype=torch.bfloat16):
    shapes = (2, heads, seqlen_q, head_dim), *[(2, kv_heads, seqlen_kv, head_dim)] * 2
    return [torch.randn(shape).to(dtype) for shape in shapes]


def in_rows(**shape) -> list[torch.Tensor]:
    return [codes(x.float()) for x in tensors(**shape)]


def quantized(**shape) -> tuple[torch.Tensor, ...]:
    """q8, k8, vt8 and scales: made up, but of their shapes."""
    q, k, _ = tensors(**shape)
    problem = Problem(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], False, direction="fp8")
    return tuple(
        torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in quantized_shapes(problem).values()
    )


def make(q, k=None, v=None, seed=None, cos=None, sin=None):
    return production_fp8.quantize(q, k, v, seed, cos, sin)


def attend(given, scale=None, causal=False, top_left=False, dtype=torch.bfloat16):
    return production_fp8.forward(*given, scale, causal, top_left, dtype)


def attend_rows(
    rows, descales=(None, None, None), scale=None, causal=False, top_left=False, dtype=torch.bfloat16
):
    return production_fp8.forward_rows(*rows, *descales, scale, causal, top_left, dtype)


def attend_cast(qkv, scale=None, causal=False, top_left=False):
    return production_fp8.forward_cast(*qkv, scale, causal, top_left)


# ---- quantize ---------------------------------------------------------------------------------------------


def test_what_the_quantising_kernel_is_given(launched: list[Launch]) -> None:
    q, k, v = tensors()
    found = make(q, k, v, seed=0)
    (seen,) = launched
    assert (seen.name, seen.options) == ("quantize", {"parts": "qkv", "rotate": True, "rope": False})
    assert seen.least == Problem.square(1, 1, 1, 64, False, direction="fp8_cast")
    names = "q", "k", "v", "q8", "k8", "vt8", "q_scale", "k_scale", "v_exponent", "signs", "cos", "sin"
    given = dict(zip(names, seen.given, strict=True))
    order = "q8", "q_scale", "k8", "k_scale", "vt8", "v_exponent"
    assert [given[name].data_ptr() for name in order] == [x.data_ptr() for x in found]
    assert all(given[name] is x for name, x in zip("qkv", (q, k, v)))
    assert given["signs"].equal(production_fp8.signs(64)) and given["cos"] is given["sin"] is None
    shapes = quantized_shapes(Problem(2, 4, 2, 9, 70, 64, False))
    for name in order:
        assert (tuple(given[name].shape), given[name].dtype) == (
            shapes[name][0],
            getattr(torch, shapes[name][1]),
        )


def test_parts_are_launched_as_parts(launched: list[Launch]) -> None:
    q, k, v = tensors(head_dim=128, dtype=torch.float16)
    cos, sin = torch.ones(70, 64), torch.zeros(70, 64)
    assert len(make(q, seed=3, cos=cos, sin=sin)) == 2
    assert len(make(None, k, v)) == 4
    (of_q, of_kv) = launched
    assert of_q.options == {"parts": "q", "rotate": True, "rope": True}
    assert of_kv.options == {"parts": "kv", "rotate": False, "rope": False}
    assert of_q.least.dtype == "float16" and of_q.least.head_dim == 128
    assert [x is None for x in of_q.given] == [False, True, True] * 3 + [False] * 3
    assert [x is None for x in of_kv.given] == [True, False, False] * 3 + [True] * 3
    assert of_q.given[-3].equal(production_fp8.signs(128, 3)) and of_q.given[-1] is sin


def test_codes_lie_as_what_they_are_of(launched: list[Launch]) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())
    q8, _, k8, _, vt8, _ = make(q, k, v)
    assert q8.stride() == q.stride() and k8.stride() == k.stride() and vt8.is_contiguous()
    one_head = k[:, :1].expand(-1, 2, -1, -1)
    assert make(q, one_head, one_head)[2].is_contiguous()


def test_what_is_empty_is_not_launched(launched: list[Launch]) -> None:
    for shape in ({"seqlen_q": 0}, {"seqlen_kv": 0}):
        q, k, v = tensors(**shape)
        assert [x.dtype for x in make(q, k, v)] == [E4M3, torch.float32] * 3
    q, k, v = tensors()
    assert [x.shape[0] for x in make(q[:0], k[:0], v[:0])] == [0] * 6
    assert [x.options["parts"] for x in launched] == ["kv", "q"]
    assert launched[0].given[0] is launched[0].given[3] is None and launched[1].given[1] is None


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_signs_are_fp32_whatever_the_default(default: torch.dtype) -> None:
    expected = production_fp8.signs(64)
    torch.set_default_dtype(default)
    try:
        assert production_fp8.signs(64).dtype == torch.float32
        assert production_fp8.signs(64).equal(expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_signs_are_copied_once_and_not_in_a_capture(
    launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors()
    make(q, k, v, seed=0)
    make(q[:, :, :3], k, v, seed=0)
    assert launched[0].given[-3] is launched[1].given[-3]
    monkeypatch.setattr(memory, "is_capturing", lambda: True)
    make(q[:, :, :4], k, v, seed=0)
    with pytest.raises(RuntimeError, match="make the first call with this head_dim and seed"):
        make(q, k, v, seed=1)


# ---- attention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_k7_is_given_of_quantised_tensors(head_dim: int, launched: list[Launch]) -> None:
    given = quantized(head_dim=head_dim)
    o, lse = attend(given, causal=True, top_left=True, dtype=torch.float16)
    (seen,) = launched
    assert (seen.name, seen.options) == ("k7", {"block_scales": True})
    assert seen.least in launch.reachable("k7") and (seen.least.dtype, seen.least.top_left) == (
        "float16",
        True,
    )
    q8, k8, vt8, o_, lse_, flushed, counter, *scales, softmax_scale = seen.given
    assert all(x is y for x, y in zip((q8, k8, vt8, *scales), given, strict=True))
    assert (o_ is o, lse_ is lse, softmax_scale) == (True, True, head_dim**-0.5)
    workspace = ladder.load("k7")[1].workspace(Problem(2, 4, 2, 9, 70, head_dim, True, direction="fp8"))
    assert {"flushed": tuple(flushed.shape), "counter": tuple(counter.shape)} == {
        name: shape for name, (shape, _) in workspace.items()
    }
    assert (flushed.dtype, counter.dtype, counter.item()) == (torch.float32, torch.int32, 0)


def test_what_k7_rows_is_given(launched: list[Launch]) -> None:
    q, k, v = in_rows()
    descales = torch.full((2, 2), 2.0), torch.tensor(3.0), None
    o, lse = attend_rows((q, k, v), descales, scale=0.5, causal=True)
    (seen,) = launched
    assert (seen.name, seen.options) == ("k7_rows", {})
    assert seen.least in launch.reachable("k7_rows") and seen.least.causal
    *inputs, o_, lse_, vt8, scales, flushed, counter, of_q, of_k, of_v, softmax_scale = seen.given
    assert all(x is y for x, y in zip((*inputs, o_, lse_), (q, k, v, o, lse), strict=True))
    assert softmax_scale == 0.5
    for x, (shape, dtype) in zip((vt8, scales, flushed, counter), scratch_of("k7_rows")):
        assert (tuple(x.shape), x.dtype) == (shape, getattr(torch, dtype))
    for x, scale in ((of_q, 2.0), (of_k, 3.0), (of_v, 1.0)):
        assert tuple(x.shape) == (2, 2) and x.unique().item() == scale


def scratch_of(stage_id: str, **options: object) -> list[tuple[tuple[int, ...], str]]:
    stage, file = ladder.load(stage_id)
    problem = Problem(2, 4, 2, 9, 70, 64, True, direction=stage.direction)
    return list(file.workspace(problem, **options).values())


def test_what_k8_is_given(launched: list[Launch]) -> None:
    q, k, v = tensors(dtype=torch.float16)
    o, lse = attend_cast((q, k, v), causal=True)
    (seen,) = launched
    assert (seen.name, seen.options, o.dtype) == ("k8", {}, torch.float16)
    assert seen.least in launch.reachable("k8") and seen.least.dtype == "float16"
    *inputs, signs, softmax_scale = seen.given
    assert all(x is y for x, y in zip(inputs[:5], (q, k, v, o, lse), strict=True))
    for x, (shape, dtype) in zip(inputs[5:], scratch_of("k8"), strict=True):
        assert (tuple(x.shape), x.dtype) == (shape, getattr(torch, dtype))
    assert signs.equal(production_fp8.signs(64)) and softmax_scale == 64**-0.5


def test_a_second_call_of_a_kind_plans_nothing(
    launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, rows, given = tensors(), in_rows(), quantized()
    call = lambda: (
        make(*qkv, seed=0), attend(given), attend_rows(rows, (torch.ones(1), None, None)), attend_cast(qkv),
    )  # fmt: skip
    call()
    for name in ("_plan_quantize", "_plan_forward", "_plan_rows", "_plan_cast"):
        monkeypatch.setattr(production_fp8, name, None)
    qkv, rows, given = ([x.clone() for x in inputs] for inputs in (qkv, rows, given))
    call()
    assert [x.name for x in launched] == ["quantize", "k7", "k7_rows", "k8"] * 2
    counters = [x.given[at] for x, at in zip(launched, (None, 6, 8, 12) * 2) if at]
    assert len({x.data_ptr() for x in counters}) == 1 and not counters[0].any()
    assert launched[2].given[-2].data_ptr() == launched[6].given[-2].data_ptr(), "the scale of what has none"


@pytest.mark.parametrize(
    ("change", "count"),
    [("shape", 4), ("strides", 4), ("mask", 3), ("scale", 3), ("output", 2), ("seed", 1), ("descales", 1)],
)
def test_another_kind_is_planned_anew(change: str, count: int, launched: list[Launch]) -> None:
    def call(change: str | None = None) -> None:
        shape = {"seqlen_q": 10} if change == "shape" else {}
        qkv, rows, given = tensors(**shape), in_rows(**shape), list(quantized(**shape))
        if change == "strides":
            flip = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
            qkv[0], rows[0], given[0] = flip(qkv[0]), flip(rows[0]), flip(given[0])
        make(*qkv, seed=1 if change == "seed" else 0)
        options = {"causal": change == "mask", "scale": 0.5 if change == "scale" else None}
        attend_cast(qkv, **options)
        options["dtype"] = torch.float16 if change == "output" else torch.bfloat16
        attend(given, **options)
        attend_rows(rows, (torch.ones(2, 2) if change == "descales" else None, None, None), **options)

    call()
    call()
    assert len(production_fp8._plans) == 4
    call(change)
    assert len(production_fp8._plans) == 4 + count
    assert len(launched) == 12


def test_scratch_is_of_the_stream_and_of_the_capture(
    launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = in_rows()
    attend_rows(rows)
    monkeypatch.setattr(memory, "current_stream", lambda index: 8)
    attend_rows(rows)
    monkeypatch.setattr(memory, "is_capturing", lambda: True)
    attend_rows(rows)
    attend_rows(rows)
    counters = [x.given[8] for x in launched]
    ones = [x.given[-2] for x in launched]
    for kept in (counters, ones):
        assert len({x.data_ptr() for x in kept}) == 4
    assert len(memory._counters) == len(production_fp8._ones) == 2
    assert not any(x.any() for x in counters) and all((x == 1).all() for x in ones)


def test_a_margin_has_its_own_plan(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for fewer SMs serve no call that may have all."""
    monkeypatch.setattr(tuned, "gpu", lambda device=None: tuned.Gpu(132 - tuned.margin.get()))
    qkv, rows, given = tensors(), in_rows(), quantized(head_dim=64)
    for call in (lambda: attend_cast(qkv), lambda: attend(given), lambda: attend_rows(rows)):
        first = len(launched)
        with tuned.leaving(32):
            call()
        call()
        sms = [x.options.get("sms", 132) for x in launched[first:]]
        assert sms == [100, 132]


def test_of_nothing_nothing_is_launched(launched: list[Launch]) -> None:
    for shape in ({"seqlen_q": 0}, {"seqlen_q": 0, "seqlen_kv": 0}, {"heads": 0, "kv_heads": 0}):
        rows = in_rows(**shape)
        for o, lse in (attend_rows(rows), attend(quantized(**shape)), attend_cast(tensors(**shape))):
            assert o.shape == rows[0].shape and o.dtype == torch.bfloat16 and lse.shape == o.shape[:3]
    assert launched == []


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_a_launch_refuses_is_named(
    name: str, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch itself finds another type, device or address: `test_launch.py`."""
    given = dict(zip(("q8", "k8", "vt8", "q_scale", "k_scale", "v_exponent"), quantized()))
    attend(given.values())
    (plan,) = production_fp8._plans.values()

    def refuse(*given: object) -> None:
        raise ValueError("Mismatched Tensor")

    (kind,) = production_fp8._plans
    production_fp8._plans[kind] = plan._replace(part=plan.part._replace(launch=refuse))
    scale = {"q": "q_scale", "k": "k_scale", "v": "v_exponent"}[name]
    with pytest.raises(TypeError, match=f"^{scale} must be float32, not float16"):
        attend((given | {scale: given[scale].half()}).values())
    with pytest.raises(ValueError, match=r"^Mismatched Tensor"):
        attend(given.values())


def test_kernels_are_for_the_sms_of_the_gpu(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "gpu", lambda device: tuned.Gpu(114))
    attend(quantized(head_dim=128))
    attend_rows(in_rows(head_dim=128))
    attend_cast(tensors(head_dim=128))
    assert [x.options.get("sms") for x in launched] == [114] * 3
    for x, at in zip(launched, (5, 7, 11)):
        assert x.given[at].shape == (114 * 2, 64 * 128)


# ---- the closed list --------------------------------------------------------------------------------------


def test_what_can_be_reached() -> None:
    found = launch.reachable_in_fp8()
    assert len(found) == len({repr(x) for x in found}) == 3 * 18 + 72
    assert {name for name, *_ in found} == {"k7", "k7_rows", "k8", "quantize"}


def test_nothing_else_is_compiled(launched: list[Launch]) -> None:
    listed = launch.reachable_in_fp8()
    for head_dim in HEAD_DIMS:
        cos = torch.ones(70, head_dim // 2)
        for dtype in (torch.bfloat16, torch.float16):
            q, k, v = tensors(head_dim=head_dim, dtype=dtype)
            for seed in (None, 4):
                for rope in ((), (cos, cos)):
                    for parts in ((q, k, v), (q, None, None), (None, k, v), (q[:, :, :0], k, v)):
                        make(*parts, seed, *rope)
            for causal, top_left in ((False, False), (True, False), (True, True)):
                for scale in (None, 0.3):
                    attend(quantized(head_dim=head_dim), scale, causal, top_left, dtype)
                    options = {"scale": scale, "causal": causal, "top_left": top_left}
                    attend_rows(in_rows(head_dim=head_dim), **options, dtype=dtype)
                    attend_cast(tensors(head_dim=head_dim, dtype=dtype), **options)
    compiled = {repr(x[:3]) for x in launched}
    assert compiled == {repr(x) for x in listed}


def test_precompiling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = []
    monkeypatch.setattr(precompile, "fill", lambda found, workers: jobs.extend(found) or len(jobs))
    assert precompile.main(["fp8", "--sms", "132"]) == 0
    assert jobs == launch.reachable_in_fp8()
    assert "126 kernels of fp8" in capsys.readouterr().out
    for name, _, options in precompile.jobs_of("fp8", 114):
        assert options.get("sms") == (None if name == "quantize" else 114)


def test_the_quantising_kernel_is_compiled_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "compile_quantize", lambda *what, **options: (what, options))
    least = Problem.square(1, 1, 1, 128, False, dtype="float16", direction="fp8_cast")
    options = calls_fp8.quantize_options("kv", True, False)
    assert ladder.load_file("quantize").compile_kernel(least, **options) == ((128, "float16"), options)


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no linker")
def test_what_is_cached_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the files of the kernels; and the other parts are other entries."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(launch, "_compiled", {})
    least = Problem.square(1, 1, 1, 64, False, direction="fp8_cast")
    kernels = [
        launch.kernel_for("quantize", least, calls_fp8.quantize_options(parts, False, False))
        for parts in ("q", "kv")
    ]
    assert len({x.__cubin__ for x in kernels}) == 2
    code = f"""if True:
        import sys
        sys.modules["cutlass"] = None
        from hopper_attention import launch
        from hopper_attention.kernels.contract import Problem
        launch.kernel_for("quantize", {least!r}, {calls_fp8.quantize_options("kv", False, False)!r})
        assert "hopper_attention.kernels.quantize" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], cwd=repository(), check=True, timeout=300)


def test_what_a_stage_needs_is_stated_once_more_where_no_compiler_is_imported() -> None:
    for head_dim in HEAD_DIMS:
        plain = Problem.square(2, 4, 100, head_dim, False)
        for stage_id, options, more, refuse in (
            ("k7", {}, lambda problem: {}, calls_fp8.refuse_fp8),
            ("k7_rows", {}, calls_fp8.of_rows, calls_fp8.refuse_fp8_rows),
            ("k8", {}, calls_fp8.of_cast, calls_fp8.refuse_fp8_cast),
        ):
            stage, file = ladder.load(stage_id)
            problem = plain.with_(direction=stage.direction)
            for sms in (132, 114):
                scratch = more(problem) | calls_fp8.fp8_scratch(problem, sms)
                assert [*scratch.items()] == [*file.workspace(problem, **options, sms=sms).items()]
            for other in (problem, problem.with_(head_dim=96), problem.with_(batch=70000, seqlen_q=1)):
                assert refuse(other) == file.supports(other)
