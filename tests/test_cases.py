"""The cases themselves, on stand-ins for kernels: a right kernel passes, and each kind of fault shows.

Everything runs on the CPU: what asks for a CUDA tensor is given another, and the front end is told that it is
one. The cases of refusals by device, streams, graphs and sanitizers need a GPU and are not here.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from of_codes import read as read_back
from torch.overrides import TorchFunctionMode

from harness import (
    call_cases,
    case_runs,
    cases,
    head_dims,
    judging,
    needles,
    quantized,
    reference,
    registry,
    score_cases,
    stages,
)
from harness.inputs import random_inputs
from hopper_attention import ops, production_fp8
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import LazyMaximum, Problem, Stage, Tensors
from hopper_attention.kernels.device.fp8 import ROTATED

NEED_A_GPU = {
    "wrong input",
    "wrong input of the backward pass",
    "side stream with a pending producer",
    "cuda graph",
    "beside memory traffic",
    "sanitizer",
}
STAGES = {
    **{x: Stage(x, "", "", None) for x in ("k6", "k6_r192", "k6_r128", "k6_r64")},
    "k7": Stage("k7", "", "", None, direction="fp8"),
    "k7_rows": Stage("k7_rows", "", "", None, direction="fp8_rows"),
    "k8": Stage("k8", "", "", None, direction="fp8_cast"),
    "bwd": Stage("bwd", "", "", None, direction="bwd"),
    "bwd with atomics": Stage("bwd with atomics", "", "", None, direction="bwd", atomics=True),
    "bwd of few keys": Stage("bwd of few keys", "", "", None, direction="bwd", most_keys=128),
}
ARGS = SimpleNamespace(repeats=3, no_sanitizer=True)
Fault = Callable[[Tensors], None]


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Kernel:
    """The reference rounded to 16 bits; `reading` spoils what it reads, `writing` what it wrote."""

    def __init__(self, reading: Fault | None = None, writing: Fault | None = None):
        self.reading, self.writing = reading, writing

    def supports(self, problem: Problem) -> str | None:
        if problem.head_dim % 8 == 0 and problem.head_dim < 256:
            return None
        return f"takes head_dim in multiples of 8 below 256, not {problem.head_dim}"

    def workspace(self, problem: Problem) -> dict:
        return {"zero_sum": ((3,), "float32")}

    def run_kernel(self, mask: dict[str, bool], t: Tensors) -> None:
        read = t
        if self.reading or t.scales:
            inputs = dict(zip("qkv", (x.clone() for x in read_back(t)), strict=True))
            read = dataclasses.replace(t, **inputs, scales=())
        if self.reading:
            self.reading(read)
        if t.do is None:
            found = self.forward(read.q, read.k, read.v, **mask, scale=read.softmax_scale)
        else:
            inputs = read.q, read.k, read.v, t.o, t.lse, t.do
            found = reference.reference_gradients(*inputs, **mask, scale=read.softmax_scale, dlse=read.dlse)
        for x, result in zip(t.outputs.values(), found):
            x.copy_(result)
        if self.writing:
            self.writing(t)

    def forward(self, *inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.reference(*inputs, **options)


class OfFewKeys(Kernel):
    def supports(self, problem: Problem) -> str | None:
        if problem.seqlen_kv > 128:
            return f"takes up to 128 keys, not {problem.seqlen_kv}"
        return super().supports(problem)


class InCodes(Kernel):
    """The yardstick of a kernel that rounds P to e4m3."""

    ROUNDING = LazyMaximum(128, 2, 2.75, e4m3=6.0)

    def lazy_maximum(self, problem: Problem, **options: object) -> LazyMaximum:
        return self.ROUNDING

    def forward(self, *inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.yardstick_of(*inputs, rounds_p=self.ROUNDING, **options)


class Quantizing(InCodes):
    """The yardstick of a kernel that quantises what it reads."""

    ROUNDING = InCodes.ROUNDING._replace(quantized=ROTATED)

    def forward(self, q, k, v, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        signs = production_fp8.signs(q.shape[3])
        made = quantized.quantize_reference(q, k, v, rotate=True, signs=signs)
        options |= {"exponents": quantized.of_rows(made.v_exponent, v), "dtype": q.dtype}
        return super().forward(*made.dequantized, **options)


KERNELS = {"fwd": Kernel, "bwd": Kernel, "fp8": InCodes, "fp8_rows": InCodes, "fp8_cast": Quantizing}


def stand_in(stage_id: str, **faults: Fault) -> Kernel:
    stage = STAGES[stage_id]
    return (OfFewKeys if stage.most_keys else KERNELS[stage.direction])(**faults)


def cpu_sized(shape: cases.Shape) -> cases.Shape:
    """Fewer heads and shorter lengths in the same relations."""
    heads = {"batch": 3, "heads": 8, "kv_heads": 8}
    return {
        name: min(value, heads[name])
        if name in heads
        else 130 + (value - 130) // 8
        if name.startswith("seqlen") and value > 130
        else value
        for name, value in shape.items()
    }


def kernels_of(stage_id: str) -> list[Problem]:
    """In place of what a user can reach: each head_dim, and each option of the softmax."""
    direction = STAGES[stage_id].direction
    plain = [Problem.square(1, 1, 1, d, True, top_left=d == 64, direction=direction) for d in (64, 128)]
    scaled = plain[0].with_(scaled=True)
    return [*plain, scaled, *([scaled.with_(lse_grad=True)] if direction == "bwd" else [])]


def compile_to(monkeypatch: pytest.MonkeyPatch, compile_stage: Callable[[str, Problem], object]) -> None:
    for module in (cases, score_cases, stages):
        monkeypatch.setattr(module, "compile_stage", compile_stage)


def run_forward(q, k, v, softmax_scale=None, causal=False, top_left=False, deterministic=False, *_):
    """The operator of the public call, by the stand-in for its stage."""
    return stages.forward(q, k, v, causal=causal, top_left=top_left, stage="k6")


def run_backward(
    do, q, k, v, o, lse, dlse=None, softmax_scale=None, causal=False, top_left=False, deterministic=False, *_
):
    mask = {"causal": causal, "top_left": top_left}
    return stages.backward(do.contiguous(), q, k, v, o, lse, **mask, stage="bwd")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Kernel]]:
    """The kernel in each stage's place; a test puts its own there."""
    found = {stage_id: stand_in(stage_id) for stage_id in STAGES}
    monkeypatch.setattr(ladder, "load", lambda stage_id: (STAGES[stage_id], found[stage_id]))
    for module in (cases, case_runs):
        monkeypatch.setattr(module, "HEAD_DIMS", (64,))
    monkeypatch.setattr(cases, "LENGTHS", (1, 3, 65))
    monkeypatch.setattr(cases, "NEEDLE_LENGTHS", (16, 65))
    few = {"HEAD_DIMS": (40, 96), "WITH_VALUES": ((192, 128),), "LENGTHS": ((65, 97),), "NEEDLES": (96, 160)}
    for name, value in few.items():
        monkeypatch.setattr(head_dims, name, value)
    monkeypatch.setattr(cases, "LONG", 1057)
    monkeypatch.setattr(cases, "UNEQUAL", (65, 257))
    for name in ("OTHER_SHAPES", "TOP_LEFT_SHAPES", "TOP_LEFT_WIDE_SHAPES"):
        monkeypatch.setattr(cases, name, [cpu_sized(shape) for shape in getattr(cases, name)])
    monkeypatch.setattr(cases, "FORMS", {name: cpu_sized(shape) for name, shape in cases.FORMS.items()})
    monkeypatch.setattr(cases, "reachable", kernels_of)
    monkeypatch.setattr(cases, "BACKWARD", "bwd")
    mask_of = lambda stage_id, problem: {"causal": problem.causal, "top_left": problem.top_left}
    compile_to(monkeypatch, mask_of)
    for module in (cases, case_runs, head_dims):
        monkeypatch.setattr(module, "random_inputs", functools.partial(random_inputs, device="cpu"))
    for name in ("needle_inputs", "needle_gradient_inputs"):
        make = getattr(needles, name)
        on_cpu = lambda problem, device, *rest, make=make, **options: make(problem, "cpu", *rest, **options)
        monkeypatch.setattr(needles, name, on_cpu)
    cuda = {"get_device_capability": (9, 0), "mem_get_info": (10**9, 10**9), "synchronize": None}
    for name, answer in (cuda | {"memory_reserved": 0, "memory_allocated": 0}).items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    library = torch.library.Library("hopper_attention", "IMPL", "CPU")
    library.impl("forward", run_forward)
    library.impl("backward", run_backward)
    monkeypatch.setattr(ops, "run_forward", run_forward)
    monkeypatch.setattr(ops, "run_backward", run_backward)
    with OnCpu():
        yield found
    library._destroy()


def cases_of(stage_id: str) -> list[str]:
    direction = STAGES[stage_id].direction
    here = (None, "bwd" if direction == "bwd" else "fwd", "library" if direction in ("fwd", "bwd") else None)
    return [
        name
        for name, (only, _, policy) in registry.CASES.items()
        if only in here and policy is None and name not in NEED_A_GPU
    ]


def failures(stage_id: str, name: str) -> list[str]:
    return list(registry.CASES[name][1](stage_id, ARGS))


EVERY = [(stage_id, name) for stage_id in STAGES for name in cases_of(stage_id)]


@pytest.mark.parametrize(("stage_id", "name"), EVERY)
def test_a_right_kernel_passes(stage_id: str, name: str, stand_ins: dict[str, Kernel]) -> None:
    assert failures(stage_id, name) == []


# Faults


def first_output(t: Tensors) -> torch.Tensor:
    return next(iter(t.outputs.values()))


def last_output(t: Tensors) -> torch.Tensor:
    return [x for x in t.outputs.values() if x.dim() == 4][-1]


def forgets_a_key(t: Tensors) -> None:
    t.k[:, :, t.k.shape[2] // 2], t.v[:, :, t.k.shape[2] // 2] = 0, 0


def leaves_a_nan(t: Tensors) -> None:
    first_output(t)[..., 0, 5] = torch.nan


def writes_too_far(t: Tensors) -> None:
    x = last_output(t)
    past = x.storage_offset() + sum(s * (n - 1) for s, n in zip(x.stride(), x.shape)) + 1
    if past < x.untyped_storage().nbytes() // x.element_size():
        x.as_strided((1,), (1,), past).fill_(1.0)


def beside(x: torch.Tensor) -> torch.Tensor:
    """The column behind a tensor's last one."""
    return x.as_strided(x.shape[:3], x.stride()[:3], x.storage_offset() + x.shape[3])


def writes_beside(t: Tensors) -> None:
    beside(last_output(t))[:, :, -1] = 1.0


def reads_beside(t: Tensors) -> None:
    first_output(t)[..., 0] += 0 * beside(t.q)


def leaves_scratch(t: Tensors) -> None:
    t.workspace["zero_sum"][1] = 1.0


def is_random(t: Tensors) -> None:
    """In the last place of one element in a hundred."""
    x = last_output(t)
    x.view(torch.int16).add_((torch.rand(x.shape) < 0.01).short())


def reads_ahead(t: Tensors) -> None:
    """Takes a little of the last row and key into the first ones."""
    first_output(t)[:, :, 0] += 2**-6 * t.k[:, :1, -1].float()


def reads_back(t: Tensors) -> None:
    t.dv[:, :, -1] += 2**-6 * t.do[:, : t.dv.shape[1], 0]


def is_not_quite_zero(t: Tensors) -> None:
    t.dq[:, :, 0] += 1e-20


def is_not_quite_zero_at_the_end(t: Tensors) -> None:
    t.dv[:, :, -1] += 1e-20


def takes_no_options(t: Tensors) -> None:
    t.softmax_scale = t.dlse = None


def is_off_at_the_least_scale(t: Tensors) -> None:
    if t.softmax_scale and t.softmax_scale < 2.0**-125:
        t.dv.mul_(1.1)


def takes_no_gradient_of_the_lse(t: Tensors) -> None:
    t.dlse = None


def overflows(t: Tensors) -> None:
    last_output(t)[t.q.float().abs().amax((-1, -2)) > 100] = torch.inf


FAULTS = {
    "forgets a key": (
        {"reading": forgets_a_key},
        (
            *("lengths", "needle", "gradient needle", "other shapes", "top left mask"),
            *("after the forward stage", "head dims between", "needles of head dims between"),
        ),
    ),
    "leaves a NaN": (
        {"writing": leaves_a_nan},
        ("lengths", "needle", "gradient needle", "gradients that vanish", "extreme logits"),
    ),
    "writes too far": ({"writing": writes_too_far}, ("output inside a larger allocation",)),
    "writes beside": ({"writing": writes_beside}, ("head dims between",)),
    "reads beside": ({"writing": reads_beside}, ("head dims between",)),
    "leaves scratch": ({"writing": leaves_scratch}, ("repeats",)),
    "is random": ({"writing": is_random}, ("repeats", "strided views", "inputs inside nan")),
    "reads ahead": ({"writing": reads_ahead}, ("causality", "causality of gradients")),
    "reads back": ({"writing": reads_back}, ("causality of gradients",)),
    "is not quite zero": ({"writing": is_not_quite_zero}, ("other shapes", "gradients that vanish")),
    "is not quite zero at the end": ({"writing": is_not_quite_zero_at_the_end}, ("top left mask",)),
    "takes no options": ({"reading": takes_no_options}, ("every kernel", "gradients at extreme logits")),
    "is off at the least scale": ({"writing": is_off_at_the_least_scale}, ("gradients at extreme logits",)),
    "takes no gradient of the lse": ({"reading": takes_no_gradient_of_the_lse}, ("every kernel",)),
    "overflows": ({"writing": overflows}, ("extreme logits", "gradients at extreme logits")),
}
OF_GRADIENTS = (
    "reads back",
    "is not quite zero",
    "is not quite zero at the end",
    "takes no gradient of the lse",
)
SHOWS = [
    (stage_id, fault, name)
    for stage_id in ("k6", "k7", "k8", "bwd")
    for fault, (_, names) in FAULTS.items()
    for name in names
    if name in cases_of(stage_id) and not (stage_id != "bwd" and fault in OF_GRADIENTS)
]


@pytest.mark.parametrize(("stage_id", "fault", "name"), SHOWS)
def test_a_fault_shows(stage_id: str, fault: str, name: str, stand_ins: dict[str, Kernel]) -> None:
    stand_ins[stage_id] = stand_in(stage_id, **FAULTS[fault][0])
    assert failures(stage_id, name)


@pytest.mark.parametrize("stage_id", ["k6", "bwd"])
@pytest.mark.parametrize("top_left", [False, True])
def test_a_mask_with_one_alignment_shows(
    stage_id: str, top_left: bool, stand_ins: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    always = lambda stage_id, problem: {"causal": problem.causal, "top_left": problem.causal and top_left}
    compile_to(monkeypatch, always)
    found = failures(stage_id, "other shapes" if top_left else "top left mask")
    shapes = cases.OTHER_SHAPES if top_left else cases.TOP_LEFT_SHAPES
    taken = [shape for shape in shapes if shape.get("head_dim") != 256]
    lengths = [(shape.get("seqlen_q", 203), shape.get("seqlen_kv", 203)) for shape in taken]
    unequal = {f"n{n}:{m} " for n, m in lengths if n != m and min(n, m) > 129}
    assert len(unequal) >= 2
    for words in unequal:
        assert any(words in text for text in found)
    assert not any("full" in text for text in found)


def test_a_stage_that_refuses_unequal_lengths_passes(stand_ins: dict[str, Kernel]) -> None:
    class Square(Kernel):
        def supports(self, problem: Problem) -> str | None:
            equal = problem.seqlen_q == problem.seqlen_kv
            return super().supports(problem) if equal else "takes equal lengths"

    for stage_id in ("k6", "bwd"):
        stand_ins[stage_id] = Square()
        assert failures(stage_id, "top left mask") == []


def test_atomics_may_differ_in_the_last_place(
    stand_ins: dict[str, Kernel], capsys: pytest.CaptureFixture[str]
) -> None:
    """A unit in the last place passes, and its spread is printed; more than that does not pass."""
    stand_ins["bwd with atomics"] = Kernel(writing=is_random)
    assert failures("bwd with atomics", "repeats") == []
    assert "spread of 3 repeats, of the largest: dq 0, dk 0, dv 0.00" in capsys.readouterr().out
    stand_ins["bwd with atomics"] = Kernel(writing=lambda t: t.dv.mul_(1 + 0.1 * torch.rand(())))
    assert failures("bwd with atomics", "repeats")


def test_the_sweep_of_a_stage_is_of_its_direction(stand_ins: dict[str, Kernel]) -> None:
    for stage_id, stage in STAGES.items():
        for problem in case_runs.small(stage_id):
            assert problem.direction == stage.direction
            inputs = case_runs.inputs_for(problem)
            assert len(inputs) == (6 if stage.direction == "bwd" else 3)


def test_ready_gives_a_stage_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prepare", "prepare_backward"):
        monkeypatch.setattr(case_runs, name, lambda *inputs, **options: (inputs, options))
    q, k, v, do = random_inputs(Problem.square(1, 2, 33, 64, True, direction="bwd"), "cpu")
    forward = judging.Expected(q, k, v, True).inputs
    mask = {"causal": True, "top_left": False}
    assert case_runs.ready("k2", forward, True) == ((q, k, v), {**mask, "stage": "k2"})
    expected = judging.Expected(q, k, v, True, do)
    (got_do, *inputs, o, lse), options = case_runs.ready("bwd1", expected.inputs, True)
    assert got_do is do
    assert all(x is y for x, y in zip(inputs, (q, k, v), strict=True))
    assert options == {**mask, "stage": "bwd1"}
    assert case_runs.ready("k6", forward, True, True)[1] == {
        "causal": True,
        "top_left": True,
        "stage": "k6",
    }
    assert (o.dtype, lse.dtype) == (q.dtype, torch.float32)
    assert torch.equal(o, expected.forward[0].to(q.dtype))
    assert torch.equal(lse, expected.forward[1].float())


def test_the_sanitizers_run_every_stage_that_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(call_cases, "one_launch", launched.append)
    for stage_id in ladder.CHECKED:
        call_cases.main([stage_id])
    assert launched == list(ladder.CHECKED)
    for wrong in ([], ["k99"], [*ladder.BESIDE], ["k1", "k2"]):
        with pytest.raises(SystemExit, match="give one of the stages"):
            call_cases.main(wrong)
    assert launched == list(ladder.CHECKED)
