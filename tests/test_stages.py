"""What a call of a stage refuses, with the exception's type and words, and what it lets through."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from harness import stages
from harness.inputs import poison, random_inputs
from harness.stages import (
    allocate,
    allocate_backward,
    backward,
    forward,
    prepare,
    prepare_backward,
    refuse,
    starts_at_zero,
    workspace_bytes,
)
from harness.sweep import sweep
from hopper_attention import launch
from hopper_attention.checks import check_layout, problem_of
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Tensors

STAGES = list(ladder.LADDER)
BACKWARD_STAGES = [stage_id for stage_id in STAGES if ladder.load(stage_id)[0].direction == "bwd"]
PLAIN = ("k1", "fa1", "k2")  # no GQA, equal lengths, bfloat16, head_dim 64 and 128


def bf16(*shape: int, **options: object) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, **options)


Q = bf16(2, 4, 64, 64)
LSE = torch.zeros(2, 4, 64)


def direction_of(stage_id: str) -> str:
    return ladder.load(stage_id)[0].direction


def call(stage_id: str, q: torch.Tensor, k: torch.Tensor, causal: bool = False) -> object:
    """`forward` or `backward` of the stage, with v = k and o = dO = q."""
    if direction_of(stage_id) != "bwd":
        return forward(q, k, k, causal=causal, stage=stage_id)
    lse = torch.zeros(q.shape[:3])
    return backward(q, q, k, k, q, lse, causal=causal, stage=stage_id)


# Wrong tensors


WRONG: dict[str, tuple[Callable[[], tuple], type[Exception], str]] = {
    "fp32": (lambda: (Q.float(),) * 3, TypeError, r"q must be bfloat16 or float16, not float32"),
    "fp64 v": (lambda: (Q, Q, Q.double()), TypeError, r"v must be bfloat16 or float16, not float64"),
    "int k": (lambda: (Q, Q.int(), Q), TypeError, r"k must be bfloat16 or float16, not int32"),
    "mixed dtypes": (lambda: (Q, Q.half(), Q), TypeError, r"q, k and v must have one dtype, not .*float16"),
    "mixed dtypes, v": (lambda: (Q, Q, Q.half()), TypeError, r"q, k and v must have one dtype"),
    "mixed devices": (
        lambda: (Q, Q.to("meta"), Q),
        ValueError,
        r"q, k and v must be on one device, not cpu, meta and cpu",
    ),
    "mixed devices, v": (lambda: (Q, Q, Q.to("meta")), ValueError, r"not cpu, cpu and meta"),
    "rank 3": (lambda: (Q[0], Q, Q), ValueError, r"q must have 4 dimensions \(batch, .*\), not 3"),
    "rank 5": (lambda: (Q, Q, Q[None]), ValueError, r"v must have 4 dimensions \(batch, .*\), not 5"),
    "None": (lambda: (Q, None, Q), TypeError, r"k must be a torch\.Tensor, not NoneType"),
    "an array": (lambda: (Q.float().numpy(), Q, Q), TypeError, r"q must be a torch\.Tensor, not ndarray"),
    "k and v, length": (
        lambda: (Q, Q, Q[:, :, 1:]),
        ValueError,
        r"k and v must have one shape but for head_dim, not \(2, 4, 64, 64\) and \(2, 4, 63, 64\)",
    ),
    "k and v, heads": (lambda: (Q, Q[:, :2], Q), ValueError, r"k and v must have one shape"),
    "batch": (lambda: (Q, Q[:1], Q[:1]), ValueError, r"q .* and k .* must agree in batch and head_dim"),
    "head_dim": (lambda: (Q, Q[..., :32], Q[..., :32]), ValueError, r"must agree in batch and head_dim"),
    "heads": (
        lambda: (Q, Q[:, :3], Q[:, :3]),
        ValueError,
        r"the 4 query heads must be a multiple of the 3 key/value heads",
    ),
    "fewer query heads": (lambda: (Q[:, :2], Q, Q), ValueError, r"the 2 query heads must be a multiple of"),
    "no key head": (lambda: (Q, Q[:, :0], Q[:, :0]), ValueError, r"a multiple of the 0 key/value heads"),
}


@pytest.mark.parametrize("call", [problem_of, forward])
@pytest.mark.parametrize(("make", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_tensors(make: Callable[[], tuple], error: type[Exception], words: str, call: Callable) -> None:
    with pytest.raises(error, match=words):
        call(*make())


def test_problem_of() -> None:
    q, k = bf16(2, 6, 33, 128), bf16(2, 3, 65, 128)
    assert problem_of(q, k, k, causal=True) == Problem(2, 6, 3, 33, 65, 128, True)
    top_left = problem_of(q, k, k, causal=True, top_left=True)
    assert top_left == Problem(2, 6, 3, 33, 65, 128, True, top_left=True)
    assert problem_of(q.half(), k.half(), k.half()).dtype == "float16"
    assert problem_of(q, q, q) == Problem.square(2, 6, 33, 128, False)
    assert problem_of(q.mT.contiguous().mT, q, q) == Problem.square(2, 6, 33, 128, False)
    assert problem_of(q, k, k[..., :64]) == Problem(2, 6, 3, 33, 65, 128, False, value_dim=64)
    empty = bf16(0, 6, 0, 64)
    assert problem_of(empty, empty, empty) == Problem.square(0, 6, 0, 64, False)


# What a stage refuses


@pytest.mark.parametrize("head_dim", [4, 59, 100, 288])
@pytest.mark.parametrize("stage_id", STAGES)
def test_other_head_dims_are_refused_by_name(stage_id: str, head_dim: int) -> None:
    words = rf"^{stage_id} takes head_dim .*, not {head_dim}$"
    with pytest.raises(ValueError, match=words):
        refuse(stage_id, Problem.square(1, 1, 16, head_dim, False, direction=direction_of(stage_id)))
    x = bf16(1, 1, 16, head_dim)
    with pytest.raises(ValueError, match=words):
        call(stage_id, x, x)


COMPUTES = {
    "fwd": "forward pass",
    "fp8": "forward pass in FP8",
    "fp8_rows": "forward pass in FP8, of rows",
    "fp8_cast": "forward pass in FP8, of 16 bits",
    "bwd": "backward pass",
}


@pytest.mark.parametrize("stage_id", STAGES)
def test_other_directions_are_refused_by_name(stage_id: str) -> None:
    own = direction_of(stage_id)
    for other in COMPUTES.keys() - {own}:
        words = rf"^{stage_id} computes the {COMPUTES[own]}, not '{other}'$"
        with pytest.raises(ValueError, match=words):
            refuse(stage_id, Problem.square(1, 1, 64, 64, False, direction=other))
    words = rf"^{stage_id} computes the {COMPUTES[own]}, not '{'fwd' if own == 'bwd' else 'bwd'}'$"
    with pytest.raises(ValueError, match=words):
        if own == "bwd":
            forward(Q, Q, Q, stage=stage_id)
        else:
            backward(Q, Q, Q, Q, Q, LSE, stage=stage_id)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stage_id", PLAIN)
def test_first_stages_refuse_what_later_ones_bring(stage_id: str, causal: bool) -> None:
    def refused(k: torch.Tensor, words: str, q: torch.Tensor = Q) -> None:
        with pytest.raises(ValueError, match=f"^{stage_id} {words}$"):
            forward(q, k, k, causal=causal, stage=stage_id)

    refused(Q[:, :2], "takes as many key/value heads as query heads, not 2 for 4")
    refused(Q[:, :, :63], "takes equal query and key lengths, not 64 and 63")
    refused(Q.half(), "takes bfloat16, not float16", Q.half())
    with pytest.raises(ValueError, match=f"^{stage_id} takes at most 2147483647 rows"):
        refuse(stage_id, Problem.square(2**10, 2**6 - 1, 2**17, 64, causal).with_(seqlen_q=2**17))


@pytest.mark.parametrize("stage_id", PLAIN)
def test_grids_beyond_cuda_are_refused(stage_id: str) -> None:
    with pytest.raises(ValueError, match="takes at most 65535"):
        refuse(stage_id, Problem.square(65536, 1, 16, 64, False))
    with pytest.raises(ValueError, match="takes at most 65535"):
        refuse(stage_id, Problem.square(1, 65536, 16, 64, False))
    refuse(stage_id, Problem.square(65535, 1, 16, 64, False))


@pytest.mark.parametrize("stage_id", ["bwd4", "bwd4_det", "bwd4_parts", "bwd4_parts_det"])
def test_bwd4_refuses_heads_it_cannot_count(stage_id: str) -> None:
    long = Problem(1, 4, 1, 2**19 - 1, 2**19, 128, True, direction="bwd")
    refuse(stage_id, long)
    refuse(stage_id, long.with_(seqlen_q=2**19, causal=False))
    with pytest.raises(ValueError, match=rf"^{stage_id} takes at most 2147483647 bytes .*, not 2147483648:"):
        refuse(stage_id, long.with_(seqlen_q=2**19))


def test_k1_refuses_more_blocks_than_a_grid_has() -> None:
    refuse("k1", Problem.square(1, 1, 65535 * 16, 64, False))
    with pytest.raises(ValueError, match="k1 takes sequences of at most 1048560"):
        refuse("k1", Problem.square(1, 1, 65535 * 16 + 1, 64, False))
    with pytest.raises(ValueError, match=r"k1 takes at most 65535 batch·heads"):
        refuse("k1", Problem.square(256, 256, 16, 64, False))


@pytest.mark.parametrize("stage_id", STAGES)
def test_every_stage_takes_the_sweep(stage_id: str) -> None:
    stage, module = ladder.load(stage_id)
    assert [module.supports(problem) for problem in sweep(stage.direction)] == [None] * 24


# Where a causal mask is aligned

TAKES_UNEQUAL_LENGTHS = {"k6", "k6_r192", "k6_r128", "k6_r64", "k7", "k7_rows", "k8"}
TAKES_UNEQUAL_LENGTHS |= {"bwd4", "bwd4_det", "bwd4_parts", "bwd4_parts_det"}


@pytest.mark.parametrize("stage_id", STAGES)
def test_top_left_is_taken_where_it_is_computed(stage_id: str) -> None:
    """At equal lengths it is every stage's mask; at others a stage knows both alignments, or refuses."""
    problem = Problem.square(2, 4, 64, 64, True, direction=direction_of(stage_id), top_left=True)
    refuse(stage_id, problem)
    for unequal in (problem.with_(seqlen_q=63), problem.with_(seqlen_kv=63)):
        if stage_id in TAKES_UNEQUAL_LENGTHS:
            refuse(stage_id, unequal)
            continue
        with pytest.raises(ValueError, match=f"^{stage_id} takes equal query and key lengths, not 6"):
            refuse(stage_id, unequal)


@pytest.mark.parametrize("call", [problem_of, forward, prepare])
def test_wrong_top_left(call: Callable) -> None:
    with pytest.raises(ValueError, match="top_left aligns a causal mask, and there is none: causal is False"):
        call(Q, Q, Q, top_left=True)
    for wrong in ("bottom-right", 1, None):
        with pytest.raises(TypeError, match=f"top_left must be True or False, not {wrong!r}"):
            call(Q, Q, Q, causal=True, top_left=wrong)


def test_wrong_top_left_of_the_backward_pass() -> None:
    with pytest.raises(ValueError, match="top_left aligns a causal mask, and there is none"):
        backward(**backward_inputs(), top_left=True)
    with pytest.raises(TypeError, match="top_left must be True or False, not 'yes'"):
        backward(**backward_inputs(), causal=True, top_left="yes")


def test_what_is_compiled_knows_the_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_compile_or_load", lambda *what: built.append(what) or object())
    problem = Problem.square(2, 4, 64, 64, True)
    first, other = (launch.compile_stage("k6", problem.with_(top_left=x)) for x in (False, True))
    assert first is not other
    assert other is launch.compile_stage("k6", problem.with_(top_left=True, seqlen_q=7))
    assert [problem.top_left for _, problem, _ in built] == [False, True]
    # Of a stage that takes equal lengths alone, the two alignments are one mask.
    one, same = (launch.compile_stage("k2", problem.with_(top_left=x)) for x in (False, True))
    assert one is same


def test_unknown_stage() -> None:
    with pytest.raises(ValueError, match=r"unknown stage 'k99'; the ladder has k1, "):
        forward(Q, Q, Q, stage="k99")


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


# The device


@pytest.mark.parametrize("stage_id", STAGES)
def test_cpu_tensors_are_refused(stage_id: str) -> None:
    with pytest.raises(ValueError, match="q, k and v must be on a CUDA device, not cpu"):
        call(stage_id, Q, Q)


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


WRONG_BACKWARD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "no dO": ({"do": None}, TypeError, r"do must be a torch\.Tensor, not NoneType"),
    "fp32 dO": (
        {"do": Q.float()},
        ValueError,
        r"do must be like q: .* torch.bfloat16 on cpu, not .* torch.float32",
    ),
    "fp16 dO": ({"do": Q.half()}, ValueError, r"do must be like q: .*, not \(2, 4, 64, 64\) torch.float16"),
    "short dO": ({"do": Q[:, :, 1:]}, ValueError, r"do must be like q: .* not \(2, 4, 63, 64\)"),
    "dO elsewhere": ({"do": Q.to("meta")}, ValueError, r"do must be like q: .* on cpu, not .* on meta"),
    "no O": ({"o": None}, TypeError, r"o must be a torch\.Tensor, not NoneType"),
    "rank of O": ({"o": Q[0]}, ValueError, r"o must be like q: "),
    "heads of O": ({"o": Q[:, :2]}, ValueError, r"o must be like q: "),
    "no LSE": ({"lse": None}, TypeError, r"lse must be a torch\.Tensor, not NoneType"),
    "fp64 LSE": ({"lse": LSE.double()}, TypeError, r"lse must be float32, not float64"),
    "bf16 LSE": ({"lse": LSE.bfloat16()}, TypeError, r"lse must be float32, not bfloat16"),
    "LSE with a column": (
        {"lse": LSE[..., None]},
        ValueError,
        r"lse must be \(batch, heads, seqlen_q\) = \(2, 4, 64\) on cpu, not \(2, 4, 64, 1\)",
    ),
    "LSE, rows first": ({"lse": torch.zeros(2, 64, 4)}, ValueError, r"lse must be .*, not \(2, 64, 4\)"),
    "LSE elsewhere": ({"lse": LSE.to("meta")}, ValueError, r"lse must be .* on cpu, not .* on meta"),
    "fp32 q": ({"q": Q.float()}, TypeError, r"q must be bfloat16 or float16, not float32"),
    "short k": ({"k": Q[:, :, 1:]}, ValueError, r"k and v must have one shape"),
    "rank of v": ({"v": Q[0]}, ValueError, r"v must have 4 dimensions"),
    "a forward stage": ({"stage": "k6"}, ValueError, r"k6 computes the forward pass, not 'bwd'"),
    "no such stage": ({"stage": "bwd99"}, ValueError, r"unknown stage 'bwd99'; the ladder has k1, "),
}


def backward_inputs() -> dict[str, torch.Tensor]:
    return {"do": Q, "q": Q, "k": Q, "v": Q, "o": Q, "lse": LSE}


@pytest.mark.parametrize(("changes", "error", "words"), WRONG_BACKWARD.values(), ids=WRONG_BACKWARD)
def test_wrong_tensors_of_the_backward_pass(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        backward(**(backward_inputs() | changes))


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
