"""What is handed to a stage's kernel: tensors as they lie, outputs and scratch, and what of it is refused."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_stages import BACKWARD_STAGES, LSE, PLAIN, STAGES, Q, backward_inputs, bf16

from harness import stages
from harness.inputs import poison, random_inputs
from harness.stages import (
    allocate,
    allocate_backward,
    backward,
    prepare,
    prepare_backward,
    starts_at_zero,
    workspace_bytes,
)
from hopper_attention import launch
from hopper_attention.checks import check_layout, problem_of
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Tensors

# Layouts


def shifted(x: torch.Tensor) -> torch.Tensor:
    """x, one element past an aligned address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x)


BAD_LAYOUTS: dict[str, tuple[torch.Tensor, str]] = {
    "last stride": (Q.mT.contiguous().mT, r"x must be contiguous in its last .* stride there is 64"),
    "expanded head_dim": (Q[..., :1].expand(2, 4, 64, 64), r"contiguous in its last .* stride there is 0"),
    "odd row stride": (
        bf16(2, 4, 64, 65)[..., :64],
        r"x has stride \d+: strides must be multiples of 8 elements \(16 bytes\)",
    ),
    "odd head stride": (
        torch.empty(9000, dtype=torch.bfloat16).as_strided((2, 2, 32, 64), (4100, 2050, 64, 1)),
        r"x has stride 4100: strides must be multiples of 8",
    ),
    "one element past": (shifted(Q), r"x starts 2 bytes past a 16-byte boundary: align it"),
}


@pytest.mark.parametrize(("x", "words"), BAD_LAYOUTS.values(), ids=BAD_LAYOUTS)
def test_bad_layouts(x: torch.Tensor, words: str) -> None:
    for written in (False, True):
        with pytest.raises(ValueError, match=words):
            check_layout("x", x, written)


def test_good_layouts() -> None:
    packed = bf16(2, 64, 3, 4, 64)
    for x in (
        Q,
        bf16(2, 64, 4, 64).transpose(1, 2),
        packed[:, :, 1].transpose(1, 2),
        bf16(2, 4, 64, 72)[..., :64],
        bf16(2, 4, 64, 72)[..., 8:],
        Q[:, :, 3:],
    ):
        check_layout("x", x)
        check_layout("x", x, written=True)


def test_stride_zero_may_be_read_and_not_written() -> None:
    x = Q[:, :1].expand(2, 4, 64, 64)
    check_layout("k", x)
    with pytest.raises(ValueError, match=r"out is written and must not overlap itself"):
        check_layout("out", x, written=True)
    check_layout("out", Q[:1, :1].expand(1, 1, 64, 64), written=True)  # nothing is repeated


# Tensors of a call


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU, to reach the checks that follow that question."""

    is_cuda = True


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], torch.Tensor]:
    cuda = {
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA X",
        "mem_get_info": (10**9, 10**9),
        "memory_reserved": 0,
        "memory_allocated": 0,
    }
    for name, answer in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
    monkeypatch.setattr(stages, "compile_stage", lambda stage_id, problem: "compiled")
    return lambda x: x.as_subclass(OnCuda)


def test_prepare(pretend: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    q = pretend(Q)
    module, compiled, tensors = prepare(q, q, q, stage="k1")
    assert module is ladder.load("k1")[1]
    assert compiled == "compiled"
    assert tensors.o.shape == q.shape
    assert tensors.workspace["S"].shape == (2, 4, 64, 64)
    out = pretend(torch.empty_like(Q))
    assert prepare(q, q, q, stage="k2", out=out)[2].o is out
    assert not prepare(*[q.detach().requires_grad_()] * 3)[2].q.requires_grad

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ValueError, match=r"k2 is machine code for sm_90a \(Hopper\); NVIDIA X is not"):
        prepare(q, q, q, stage="k2")


@pytest.mark.parametrize(("x", "words"), BAD_LAYOUTS.values(), ids=BAD_LAYOUTS)
def test_prepare_refuses_bad_layouts(x: torch.Tensor, words: str, pretend: Callable) -> None:
    good, bad = pretend(torch.empty(x.shape, dtype=x.dtype)), pretend(x)
    for at, name in enumerate("qkv"):
        inputs = [good] * 3
        inputs[at] = bad
        with pytest.raises(ValueError, match=words.replace("x ", f"{name} ", 1)):
            prepare(*inputs)
    with pytest.raises(ValueError, match=words.replace("x ", "out ", 1)):
        prepare(good, good, good, out=bad)


def test_prepare_in_fp8(pretend: Callable) -> None:
    """16-bit tensors, as of any stage; the kernel reads codes."""
    _, _, tensors = prepare(*[pretend(Q)] * 3, stage="k7")
    assert {x.dtype for x in (tensors.q, tensors.k, tensors.v)} == {torch.float8_e4m3fn}
    assert (tensors.o.shape, tensors.o.dtype) == (Q.shape, Q.dtype)
    with pytest.raises(TypeError, match=r"q must be bfloat16 or float16, not float8_e4m3fn"):
        prepare(*[pretend(Q.to(torch.float8_e4m3fn))] * 3, stage="k7")


def test_prepare_refuses_another_out(pretend: Callable) -> None:
    q = pretend(Q)
    for out in (Q[:, :, 1:], Q.half(), Q.to("meta")):
        with pytest.raises(ValueError, match=r"out must be like q: \(2, 4, 64, 64\) torch\.bfloat16 on cpu"):
            prepare(q, q, q, out=out)
    with pytest.raises(ValueError, match="out is written and must not overlap itself"):
        prepare(q, q, q, out=pretend(Q[:, :1].expand_as(Q)))


def test_scratch_that_does_not_fit_is_refused_before_it_is_allocated(
    pretend: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = pretend(Q)
    needed = 2 * 4 * 64 * 64 * 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (needed - 1000, 10**9))
    with pytest.raises(MemoryError, match=r"k1 needs 0\.0 GB of scratch for b2 h4 n64 d64"):
        prepare(q, q, q, stage="k1")
    prepare(q, q, q, stage="k2")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 1000)  # cached, to be had again
    prepare(q, q, q, stage="k1")


# Scratch and outputs


def test_scratch_is_what_the_stages_say() -> None:
    problem = Problem.square(2, 3, 203, 64, True)
    rows = 2 * 3 * 203
    spec = {stage_id: ladder.load(stage_id)[1].workspace(problem) for stage_id in PLAIN}
    assert spec["k1"] == {"S": ((2, 3, 203, 203), "float32")}
    assert spec["k2"] == {}
    sizes = {stage_id: workspace_bytes(spec[stage_id]) for stage_id in PLAIN}
    assert sizes["k1"] == rows * 203 * 4
    assert sizes["fa1"] == rows * (64 + 2) * 4  # O, a maximum and a sum for each row, in fp32
    assert sizes["k2"] == 0


@pytest.mark.parametrize("stage_id", STAGES)
def test_outputs_are_poisoned(stage_id: str) -> None:
    stage, module = ladder.load(stage_id)
    problem = Problem.square(1, 2, 17, 64, False, direction=stage.direction)
    q, k, v, *do = random_inputs(problem, "cpu")
    if do:
        tensors = poison(allocate_backward(module, problem, q, k, v, q, LSE[:1, :2, :17], *do))
        shapes = {"dq": q, "dk": k, "dv": v}
    else:
        tensors = poison(allocate(module, problem, q, k, v))
        shapes = {"o": q, "lse": torch.empty(q.shape[:3])}
    assert isinstance(tensors, Tensors)
    assert {name: (x.shape, x.dtype) for name, x in tensors.outputs.items()} == {
        name: (x.shape, x.dtype) for name, x in shapes.items()
    }
    assert all(x.isnan().all() for x in tensors.outputs.values())
    assert set(tensors.workspace) == set(module.workspace(problem))
    for name, x in tensors.workspace.items():
        zero = starts_at_zero(name, str(x.dtype).removeprefix("torch."))
        assert not x.any() if zero else x.isnan().all(), name
    inputs = (tensors.q, tensors.k, tensors.v) + ((tensors.o, tensors.lse, tensors.do) if do else ())
    assert not any(x.isnan().any() for x in inputs)


def test_scratch_that_starts_at_zero() -> None:
    class Kernel:
        @staticmethod
        def workspace(problem: Problem) -> dict:
            return {"zero_sum": ((2, 3), "float32"), "sum": ((2, 3), "float32"), "count": ((1,), "int32")}

    for tensors in (
        allocate(Kernel, problem_of(Q, Q, Q), Q, Q, Q),
        allocate_backward(Kernel, None, Q, Q, Q, Q, LSE, Q),
    ):
        scratch = poison(tensors).workspace
        assert not scratch["zero_sum"].any()
        assert not scratch["count"].any()
        assert scratch["sum"].isnan().all()


def test_what_k7_is_launched_with() -> None:
    """Codes, scratch, scales, and what scores are multiplied by: 1/√head_dim unless it is given."""
    _, module = ladder.load("k7")
    problem = Problem(2, 6, 3, 33, 65, 64, True, direction="fp8")
    inputs = random_inputs(problem, "cpu")
    tensors = allocate(module, problem, *inputs)
    launches: list[tuple] = []
    compiled = lambda *given: launches.append(given)
    module.run_kernel(compiled, tensors)
    module.run_kernel(compiled, replace(tensors, softmax_scale=0.3))
    for launch_, expected in zip(launches, (1 / 8, 0.3), strict=True):
        q, k, vt, o, lse, flushed, counter, *scales, scale = launch_
        assert {x.dtype for x in (q, k, vt)} == {torch.float8_e4m3fn}
        assert (q.shape, k.shape, vt.shape) == (inputs[0].shape, inputs[1].shape, (2, 3, 64 + 8, 80))
        assert (o.shape, o.dtype) == (inputs[0].shape, torch.bfloat16)
        assert (lse.dtype, flushed.dtype, counter.dtype) == (torch.float32, torch.float32, torch.int32)
        assert [(x.shape, x.dtype) for x in scales] == [((2, 3, 1), torch.float32)] * 3
        assert scale == expected
    empty = allocate(module, problem.with_(seqlen_q=0), inputs[0][:, :, :0], *inputs[1:])
    module.run_kernel(compiled, empty)
    assert len(launches) == 2


def test_inputs_are_random_and_repeatable() -> None:
    problem = Problem(1, 4, 2, 33, 65, 64, False)
    q, k, v = random_inputs(problem, "cpu")
    assert (q.shape, k.shape, v.shape) == ((1, 4, 33, 64), (1, 2, 65, 64), (1, 2, 65, 64))
    assert not torch.equal(k, v)
    assert 0.9 < q.float().std() < 1.1
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), random_inputs(problem, "cpu")))
    assert not torch.equal(q, random_inputs(problem, "cpu", seed=1)[0])
    *same, do = random_inputs(problem.with_(direction="bwd"), "cpu")
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), same))
    assert do.shape == q.shape
    assert not torch.equal(do, q)


# The backward pass


def pretended(pretend: Callable, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: pretend(x) for name, x in (backward_inputs() | changes).items()}


@pytest.mark.skipif(not BACKWARD_STAGES, reason="the ladder has no backward stage yet")
class TestPrepareBackward:
    def test_allocates(self, pretend: Callable) -> None:
        inputs = pretended(pretend, k=torch.ones_like(Q), v=2 * torch.ones_like(Q))
        module, compiled, tensors = prepare_backward(**inputs)
        assert module is ladder.load(launch.BACKWARD)[1]
        assert compiled == "compiled"
        assert list(tensors.outputs) == ["dq", "dk", "dv"]
        for name in ("q", "k", "v", "o", "lse", "do"):
            assert torch.equal(getattr(tensors, name), inputs[name])
        for x in tensors.outputs.values():
            assert (x.shape, x.dtype, x.is_contiguous()) == (Q.shape, Q.dtype, True)

    def test_writes_where_it_is_told(self, pretend: Callable) -> None:
        out = tuple(pretend(torch.empty_like(Q)) for _ in range(3))
        tensors = prepare_backward(**pretended(pretend), out=out)[2]
        assert all(x is y for x, y in zip(tensors.outputs.values(), out))

    @pytest.mark.parametrize(("x", "words"), BAD_LAYOUTS.values(), ids=BAD_LAYOUTS)
    def test_refuses_bad_layouts(self, x: torch.Tensor, words: str, pretend: Callable) -> None:
        good, bad = pretend(torch.empty(x.shape, dtype=x.dtype)), pretend(x)
        lse = pretend(torch.zeros(x.shape[:3]))
        for at, name in enumerate(("do", "q", "k", "v", "o")):
            inputs = [good] * 5
            inputs[at] = bad
            with pytest.raises(ValueError, match=words.replace("x ", f"{name} ", 1)):
                prepare_backward(*inputs, lse)
        for at, name in enumerate(("dq", "dk", "dv")):
            out = [pretend(torch.empty(x.shape, dtype=x.dtype)) for _ in range(3)]
            out[at] = bad
            with pytest.raises(ValueError, match=words.replace("x ", f"{name} ", 1)):
                prepare_backward(*[good] * 5, lse, out=out)

    def test_refuses_a_strided_lse(self, pretend: Callable) -> None:
        lse = torch.zeros(2, 4, 64, 2)[..., 0]
        with pytest.raises(ValueError, match=r"lse must be contiguous, its strides are \(512, 128, 2\)"):
            prepare_backward(**pretended(pretend, lse=lse))

    def test_refuses_another_out(self, pretend: Callable) -> None:
        new = lambda: pretend(torch.empty_like(Q))
        for out in (new(), (new(), new()), [new()] * 4, "out"):
            with pytest.raises(TypeError, match="out must be a tuple of three tensors: dq, dk and dv"):
                prepare_backward(**pretended(pretend), out=out)
        with pytest.raises(TypeError, match=r"dk must be a torch\.Tensor, not NoneType"):
            prepare_backward(**pretended(pretend), out=(new(), None, new()))
        with pytest.raises(ValueError, match="dv must be like v: "):
            prepare_backward(**pretended(pretend), out=(new(), new(), pretend(Q.half())))
        with pytest.raises(ValueError, match="dk is written and must not overlap itself"):
            prepare_backward(**pretended(pretend), out=(new(), pretend(Q[:, :1].expand_as(Q)), new()))
        twice = new()
        with pytest.raises(ValueError, match="dq, dk and dv must not share memory"):
            prepare_backward(**pretended(pretend), out=(twice, new(), twice))


@pytest.mark.parametrize("shape", [(2, 3, 0, 64), (0, 3, 16, 64), (2, 0, 16, 64)])
def test_gradients_of_nothing(
    shape: tuple[int, ...], pretend: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launches(compiled: object, tensors: Tensors) -> None:
        raise AssertionError("launched")

    toy = SimpleNamespace(supports=lambda problem: None, workspace=lambda problem: {}, run_kernel=launches)
    monkeypatch.setattr(ladder, "load", lambda stage_id: (SimpleNamespace(options={}), toy))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    x = pretend(bf16(*shape))
    for grad in backward(x, x, x, x, x, pretend(torch.zeros(shape[:3]))):
        assert grad.shape == shape
    q, k = pretend(bf16(2, 3, 0, 64)), pretend(bf16(2, 3, 5, 64))
    dq, dk, dv = backward(q, q, k, k, q, pretend(torch.zeros(2, 3, 0)))
    assert dq.numel() == 0
    assert not dk.any()
    assert not dv.any()
