"""What the front end refuses, with the exception's type and words, and what it lets through."""

from collections.abc import Callable

import pytest
import torch

import kernels
from harness import attention as front
from harness.attention import attention, check_layout, prepare, problem_of, refuse
from harness.inputs import Tensors, allocate, poison, random_inputs, workspace_bytes
from harness.problem import Problem, sweep

STAGES = list(kernels.LADDER)
PLAIN = ("k1", "fa1", "k2")  # no GQA, equal lengths, bfloat16, head_dim 64 and 128


def bf16(*shape: int, **options: object) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, **options)


Q = bf16(2, 4, 64, 64)


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
        r"k and v must have one shape, not \(2, 4, 64, 64\) and \(2, 4, 63, 64\)",
    ),
    "k and v, heads": (lambda: (Q, Q[:, :2], Q), ValueError, r"k and v must have one shape"),
    "k and v, head_dim": (lambda: (Q, Q, Q[..., :32]), ValueError, r"k and v must have one shape"),
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


@pytest.mark.parametrize("call", [problem_of, attention])
@pytest.mark.parametrize(("make", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_tensors(make: Callable[[], tuple], error: type[Exception], words: str, call: Callable) -> None:
    with pytest.raises(error, match=words):
        call(*make())


def test_problem_of() -> None:
    q, k = bf16(2, 6, 33, 128), bf16(2, 3, 65, 128)
    assert problem_of(q, k, k, causal=True) == Problem(2, 6, 3, 33, 65, 128, True)
    assert problem_of(q.half(), k.half(), k.half()).dtype == "float16"
    assert problem_of(q, q, q) == Problem.square(2, 6, 33, 128, False)
    assert problem_of(q.mT.contiguous().mT, q, q) == Problem.square(2, 6, 33, 128, False)
    empty = bf16(0, 6, 0, 64)
    assert problem_of(empty, empty, empty) == Problem.square(0, 6, 0, 64, False)


# What a stage refuses


@pytest.mark.parametrize("head_dim", [4, 59, 96, 288])
@pytest.mark.parametrize("stage_id", STAGES)
def test_other_head_dims_are_refused_by_name(stage_id: str, head_dim: int) -> None:
    words = rf"^{stage_id} takes head_dim .*, not {head_dim}$"
    with pytest.raises(ValueError, match=words):
        refuse(stage_id, Problem.square(1, 1, 16, head_dim, False))
    x = bf16(1, 1, 16, head_dim)
    with pytest.raises(ValueError, match=words):
        attention(x, x, x, stage=stage_id)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stage_id", PLAIN)
def test_first_stages_refuse_what_later_ones_bring(stage_id: str, causal: bool) -> None:
    def refused(k: torch.Tensor, words: str, q: torch.Tensor = Q) -> None:
        with pytest.raises(ValueError, match=f"^{stage_id} {words}$"):
            attention(q, k, k, causal=causal, stage=stage_id)

    refused(Q[:, :2], "takes as many key/value heads as query heads, not 2 for 4")
    refused(Q[:, :, :63], "takes equal query and key lengths, not 64 and 63")
    refused(Q.half(), "takes bfloat16, not float16", Q.half())
    with pytest.raises(ValueError, match=f"^{stage_id} computes the forward pass, not 'bwd'"):
        refuse(stage_id, Problem.square(1, 1, 64, 64, causal, direction="bwd"))
    with pytest.raises(ValueError, match=f"^{stage_id} takes at most 2147483647 rows"):
        refuse(stage_id, Problem.square(2**10, 2**6 - 1, 2**17, 64, causal).with_(seqlen_q=2**17))


@pytest.mark.parametrize("stage_id", PLAIN)
def test_grids_beyond_cuda_are_refused(stage_id: str) -> None:
    with pytest.raises(ValueError, match="takes at most 65535"):
        refuse(stage_id, Problem.square(65536, 1, 16, 64, False))
    with pytest.raises(ValueError, match="takes at most 65535"):
        refuse(stage_id, Problem.square(1, 65536, 16, 64, False))
    refuse(stage_id, Problem.square(65535, 1, 16, 64, False))


def test_k1_refuses_more_blocks_than_a_grid_has() -> None:
    refuse("k1", Problem.square(1, 1, 65535 * 16, 64, False))
    with pytest.raises(ValueError, match="k1 takes sequences of at most 1048560"):
        refuse("k1", Problem.square(1, 1, 65535 * 16 + 1, 64, False))
    with pytest.raises(ValueError, match=r"k1 takes at most 65535 batch·heads"):
        refuse("k1", Problem.square(256, 256, 16, 64, False))


@pytest.mark.parametrize("stage_id", STAGES)
def test_every_stage_takes_the_sweep(stage_id: str) -> None:
    stage, module = kernels.load(stage_id)
    assert [module.supports(problem) for problem in sweep(stage.direction)] == [None] * 24


def test_unknown_stage() -> None:
    with pytest.raises(ValueError, match=r"unknown stage 'k99'; the ladder has k1, "):
        attention(Q, Q, Q, stage="k99")


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
        attention(Q, Q, Q, stage=stage_id)


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
    monkeypatch.setattr(front, "compile_stage", lambda stage_id, problem: "compiled")
    return lambda x: x.as_subclass(OnCuda)


def test_prepare(pretend: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    q = pretend(Q)
    module, compiled, tensors = prepare(q, q, q, stage="k1")
    assert module is kernels.load("k1")[1]
    assert compiled == "compiled"
    assert tensors.o.shape == q.shape
    assert tensors.workspace["S"].shape == (2, 4, 64, 64)
    out = pretend(torch.empty_like(Q))
    assert prepare(q, q, q, stage="k2", out=out)[2].o is out

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
    spec = {stage_id: kernels.load(stage_id)[1].workspace(problem) for stage_id in PLAIN}
    assert spec["k1"] == {"S": ((2, 3, 203, 203), "float32")}
    assert spec["k2"] == {}
    sizes = {stage_id: workspace_bytes(spec[stage_id]) for stage_id in PLAIN}
    assert sizes["k1"] == rows * 203 * 4
    assert sizes["fa1"] == rows * (64 + 2) * 4  # O, a maximum and a sum for each row, in fp32
    assert sizes["k2"] == 0


@pytest.mark.parametrize("stage_id", STAGES)
def test_outputs_are_poisoned(stage_id: str) -> None:
    problem = Problem.square(1, 2, 17, 64, False)
    q, k, v = random_inputs(problem, "cpu")
    tensors = poison(allocate(kernels.load(stage_id)[1], problem, q, k, v))
    assert isinstance(tensors, Tensors)
    assert (tensors.o.shape, tensors.o.dtype) == (q.shape, q.dtype)
    assert (tensors.lse.shape, tensors.lse.dtype) == (q.shape[:3], torch.float32)
    for x in (tensors.o, tensors.lse, *tensors.workspace.values()):
        # Floats are poison; integers are counters, which kernels find and leave at zero.
        assert x.isnan().all() if x.is_floating_point() else not x.any()
    assert not any(x.isnan().any() for x in (tensors.q, tensors.k, tensors.v))


def test_inputs_are_random_and_repeatable() -> None:
    problem = Problem(1, 4, 2, 33, 65, 64, False)
    q, k, v = random_inputs(problem, "cpu")
    assert (q.shape, k.shape, v.shape) == ((1, 4, 33, 64), (1, 2, 65, 64), (1, 2, 65, 64))
    assert not torch.equal(k, v)
    assert 0.9 < q.float().std() < 1.1
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), random_inputs(problem, "cpu")))
    assert not torch.equal(q, random_inputs(problem, "cpu", seed=1)[0])
