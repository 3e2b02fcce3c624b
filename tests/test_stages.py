"""What a call of a stage refuses, with the exception's type and words, and what it lets through."""

from collections.abc import Callable

import pytest
import torch

from harness.stages import (
    backward,
    forward,
    prepare,
    refuse,
)
from harness.sweep import sweep
from hopper_attention import launch
from hopper_attention.checks import problem_of
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

STAGES = list(ladder.CHECKED)
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


@pytest.mark.parametrize("stage_id", ladder.FEW_KEYS)
def test_what_is_more_than_one_tile_of_keys_is_refused(stage_id: str) -> None:
    stage, _ = ladder.load(stage_id)
    assert stage.most_keys == 128
    plain = Problem.square(1, 2, 128, 64, False, direction="bwd")
    for few in (plain, plain.with_(head_dim=128), plain.with_(seqlen_q=5000), plain.with_(seqlen_kv=1)):
        refuse(stage_id, few)
    for changes, reason in (
        ({"seqlen_kv": 129}, "takes up to 128 keys, one tile of them, not 129"),
        ({"head_dim": 136}, "takes heads of up to 128 columns, not 136"),
        ({"head_dim": 64, "value_dim": 192}, "takes heads of up to 128 columns, not 192"),
        ({"window": (3, 0)}, "does not take a window"),
    ):
        with pytest.raises(ValueError, match=f"^{stage_id} {reason}$"):
            refuse(stage_id, plain.with_(**changes))
    packed = plain.with_(batch=1, sequences=((128, 128),))
    if stage_id == "bwd4_one":
        refuse(stage_id, packed)
    else:
        with pytest.raises(ValueError, match=f"^{stage_id} does not take packed sequences$"):
            refuse(stage_id, packed)


def test_k1_refuses_more_blocks_than_a_grid_has() -> None:
    refuse("k1", Problem.square(1, 1, 65535 * 16, 64, False))
    with pytest.raises(ValueError, match="k1 takes sequences of at most 1048560"):
        refuse("k1", Problem.square(1, 1, 65535 * 16 + 1, 64, False))
    with pytest.raises(ValueError, match=r"k1 takes at most 65535 batch·heads"):
        refuse("k1", Problem.square(256, 256, 16, 64, False))


@pytest.mark.parametrize("stage_id", ladder.LADDER)
def test_every_stage_takes_the_sweep(stage_id: str) -> None:
    stage, module = ladder.load(stage_id)
    assert [module.supports(problem) for problem in sweep(stage.direction)] == [None] * 24


# Where a causal mask is aligned

TAKES_UNEQUAL_LENGTHS = {"k6", "k6_r192", "k6_r128", "k6_r64", "k7", "k7_rows", "k8"}
IN_SLICES = "k6_slices", "k6_slices_r192", "k6_slices_r64", "k6_groups", "k6_groups_r64"
REFUSES_TOP_LEFT = dict.fromkeys(IN_SLICES, "aligns a causal mask at the bottom right")
TAKES_UNEQUAL_LENGTHS |= {"bwd4", "bwd4_det", "bwd4_parts", "bwd4_parts_det", *ladder.FEW_KEYS}


@pytest.mark.parametrize("stage_id", STAGES)
def test_top_left_is_taken_where_it_is_computed(stage_id: str) -> None:
    """At equal lengths it is every stage's mask; at others a stage knows both alignments, or refuses."""
    problem = Problem.square(2, 4, 64, 64, True, direction=direction_of(stage_id), top_left=True)
    refuse(stage_id, problem)
    for unequal in (problem.with_(seqlen_q=63), problem.with_(seqlen_kv=63)):
        if stage_id in TAKES_UNEQUAL_LENGTHS:
            refuse(stage_id, unequal)
            continue
        reason = REFUSES_TOP_LEFT.get(stage_id, "takes equal query and key lengths, not 6")
        with pytest.raises(ValueError, match=f"^{stage_id} {reason}"):
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


# The device


@pytest.mark.parametrize("stage_id", STAGES)
def test_cpu_tensors_are_refused(stage_id: str) -> None:
    with pytest.raises(ValueError, match="q, k and v must be on a CUDA device, not cpu"):
        call(stage_id, Q, Q)


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
