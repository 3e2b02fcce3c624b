"""Head dims without a kernel of their own: which kernel is whose, and what it is told."""

import pytest
import torch

from harness.case_runs import fitted
from hopper_attention import launch, production, selection
from hopper_attention.checks import problem_of
from hopper_attention.choice import slower
from hopper_attention.kernels import bwd4, calls, k6, k6_rows, ladder
from hopper_attention.kernels.bwd4_operands import CONSUMERS, dq_columns, k_block
from hopper_attention.kernels.contract import Problem, Tensors
from hopper_attention.kernels.device import limits
from hopper_attention.kernels.device.constants import SMEM_MAX
from hopper_attention.kernels.ladder import load

EVERY = range(8, 257, 8)
VALUES = (None, 8, 64, 72, 128, 136, 200, 256)
STAGES = ("k6", "k6_r192", "k6_r128", "k6_r64")
STAGES += ("k6_slices", "k6_slices_r192", "k6_slices_r64", "k6_groups", "k6_groups_r64")
STAGES += ("bwd4", "bwd4_det", "bwd4_parts", "bwd4_parts_det", *ladder.FEW_KEYS)


def problem(head_dim: int, value_dim: int | None = None, direction: str = "fwd", **more) -> Problem:
    value_dim = None if value_dim == head_dim else value_dim
    return Problem(2, 4, 2, 65, 129, head_dim, True, direction=direction, value_dim=value_dim, **more)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("value_dim", VALUES)
def test_every_multiple_of_8_has_a_tile(direction: str, value_dim: int | None) -> None:
    for head_dim in EVERY:
        asked = problem(head_dim, value_dim, direction)
        tiles = limits.tile_dims(asked)
        assert all(columns <= tile for columns, tile in zip(asked.dims, tiles))
        own = asked.value_dim is None and head_dim in (64, 128, 256)
        assert limits.has_own_kernel(asked) == own
        standing = asked.with_(**limits.compiled_dims(asked))
        assert limits.tile_dims(standing) == tiles and limits.has_own_kernel(standing) == own
        assert standing.with_(**limits.compiled_dims(standing)) == standing
        assert own or (standing.scaled and limits.compiled_dims(asked) in limits.other_dims(direction))


@pytest.mark.parametrize("stage_id", STAGES)
def test_kernels_are_on_the_closed_list(stage_id: str) -> None:
    stage, module = load(stage_id)
    listed = launch.reachable(stage_id)
    for head_dim in EVERY:
        for value_dim in VALUES:
            asked = fitted(stage, problem(head_dim, value_dim, stage.direction))
            wide = stage_id in ladder.FEW_KEYS and max(asked.dims) > 128
            assert (module.supports(asked) is None) != wide
            if not wide and launch.has_height(stage_id, asked):
                assert launch.compiled_for(stage_id, asked) in listed


@pytest.mark.parametrize("seqlen", [49, 384, 1025, 1500, 4096])
def test_the_height_that_is_chosen_is_one_that_there_is(seqlen: int) -> None:
    for head_dim in EVERY:
        for value_dim in VALUES:
            asked = problem(head_dim, value_dim, "fwd").with_(seqlen_q=seqlen, seqlen_kv=seqlen)
            assert launch.has_height(selection.forward_stage(asked), asked)


@pytest.mark.parametrize("stage_id", STAGES)
@pytest.mark.parametrize("head_dim", [0, 4, 12, 63, 100, 260, 264, 512])
def test_others_are_refused_by_name(stage_id: str, head_dim: int) -> None:
    stage, module = load(stage_id)
    refused = f"takes head_dim in multiples of 8 up to 256, not {head_dim}"
    assert module.supports(problem(head_dim, direction=stage.direction)) == refused
    refused = refused.replace("head_dim", "value_dim")
    assert module.supports(problem(128, head_dim, stage.direction)) == refused


@pytest.mark.parametrize("stage_id", ["k1", "k5", "k6_2", "bwd1", "bwd3", "k7", "k7_rows", "k8"])
def test_stages_without_tiles_for_them_refuse_them(stage_id: str) -> None:
    stage, module = load(stage_id)
    square = Problem.square(1, 2, 65, 96, False, direction=stage.direction)
    assert module.supports(square).startswith("takes head_dim 64")
    values = square.with_(head_dim=128, value_dim=64)
    assert module.supports(values) == "takes values of head_dim, not of 64"


def test_a_value_dim_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a value_dim that is head_dim is none: 96"):
        Problem.square(1, 1, 1, 96, False, value_dim=96)


def test_flops_and_bytes_are_those_of_the_real_columns() -> None:
    for direction in ("fwd", "bwd"):
        of_96, of_128 = (Problem.square(2, 3, 64, d, True, direction=direction) for d in (96, 128))
        assert of_96.flops == of_128.flops * 96 / 128
    forward = Problem.square(1, 1, 64, 192, False, value_dim=128)
    assert forward.flops == 2 * 64 * 64 * (192 + 128)
    assert forward.with_(direction="bwd").flops == 2 * 64 * 64 * (3 * 192 + 2 * 128)
    assert forward.min_bytes == 64 * (2 * (2 * 192 + 2 * 128) + 4)  # Q, K, V, O and the LSE
    gradients = 64 * (2 * (4 * 192 + 4 * 128) + 4)  # Q, K, dQ, dK; V, O, dO, dV; the LSE
    assert forward.with_(direction="bwd").min_bytes == gradients


@pytest.mark.parametrize(("columns", "of_values"), [(96, 96), (192, 192), (192, 128)])
def test_tiles_fit_into_shared_memory(columns: int, of_values: int) -> None:
    asked = problem(columns, of_values)
    for configs in (k6.CONFIGS, *k6_rows.SHORT.values()):
        kernel = k6.kernel_for(asked, config=k6.config_of(asked, configs))
        assert (kernel.head_dim, kernel.value_dim) == (columns, of_values)
        assert kernel.smem_bytes <= SMEM_MAX
        if kernel.o_over_q:
            assert of_values <= columns, "O takes a place of Q"


@pytest.mark.parametrize(("head_dim", "columns"), [(64, 64), (96, 48), (128, 64)])
def test_consumers_share_the_columns_of_dq(head_dim: int, columns: int) -> None:
    """Between them they have all columns of a tile's queries, whole blocks of what K's swizzle permutes."""
    kernel = bwd4.kernel_for(problem(head_dim, direction="bwd")).main
    assert dq_columns(head_dim) == columns and kernel.part == 64 * columns
    assert CONSUMERS * columns == head_dim * kernel.blocks
    assert head_dim % columns == 0
    assert columns * 2 % (k_block(head_dim) or 128) == 0
    assert kernel.smem_bytes <= SMEM_MAX


@pytest.mark.parametrize(
    ("dims", "tiles"),
    [
        ((136, None), (192, 192)), ((192, None), (192, 192)), ((192, 128), (192, 128)),
        ((136, 72), (192, 128)), ((128, 192), (192, 192)), ((200, 64), (256, 256)), ((256, None), (256, 256)),
    ],
)  # fmt: skip
def test_wide_gradients_have_tiles_of_both_widths(dims: tuple, tiles: tuple[int, int]) -> None:
    kernel = bwd4.kernel_for(problem(*dims, direction="bwd"))
    for one in (kernel.main, kernel.queries):
        assert (one.head_dim, one.value_dim) == tiles
        assert one.smem_bytes <= SMEM_MAX


@pytest.mark.parametrize("given", [None, 0.3])
def test_kernels_for_several_head_dims_are_given_their_scale(given: float | None) -> None:
    for head_dim, value_dim, own in ((128, 128, True), (96, 96, False), (128, 64, False)):
        arguments: list[object] = []
        q, k = (torch.zeros(1, 1, 8, head_dim) for _ in range(2))
        v, o = (torch.zeros(1, 1, 8, value_dim) for _ in range(2))
        calls.run_forward(lambda *x: arguments.extend(x), Tensors(q, k, v, o, o, softmax_scale=given))
        scales = [x for x in arguments if isinstance(x, float)]
        assert scales == ([given] if given else [] if own else [head_dim**-0.5])


def test_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values of another width: O has theirs, in the order of q's dimensions."""
    monkeypatch.setattr(production, "check_device", lambda stage_id, q: None)
    asked = []
    monkeypatch.setattr(
        selection, "kernel_for", lambda *what: asked.append(what) or launch.Kernel(len, b"", ())
    )
    q, k = (torch.zeros(2, 65, 4, 192, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    v = torch.zeros(2, 4, 65, 128, dtype=torch.bfloat16)
    plan = production._plan_forward(q, k, v, None, True, False)
    (shape, strides, _), _ = plan.outputs
    assert (shape, strides) == ((2, 4, 65, 128), (65 * 4 * 128, 128, 4 * 128, 1))
    assert plan.given == (192**-0.5,) and asked[0][1].scaled
    o, lse = (torch.zeros(x, dtype=y) for x, y in ((shape, v.dtype), (shape[:3], torch.float32)))
    plan = production._plan_backward(o, q, k, v, o, lse, None, None, True, False, False)
    assert [x[0] for x in plan.outputs] == [q.shape, k.shape, v.shape]
    assert problem_of(q, k, v).dims == (192, 128)


def test_what_is_left_to_others() -> None:
    """Gradients of values of another width, under a causal mask; nothing for its head_dim alone."""
    asked = problem(96, 64, "bwd").with_(seqlen_kv=65)
    assert "cuDNN" in slower(asked)
    assert slower(asked.with_(causal=False)) is None
    in_own_tiles = asked.with_(head_dim=192, value_dim=128)
    assert slower(in_own_tiles) is None
    assert "cuDNN" in slower(in_own_tiles.with_(seqlen_q=16384, seqlen_kv=16384))
    for other in (asked.with_(direction="fwd"), *(asked.with_(head_dim=d, value_dim=None) for d in EVERY)):
        assert slower(other) is None


@pytest.mark.parametrize("stage_id", ["k6", "bwd4"])
def test_policies_are_refused_by_name(stage_id: str) -> None:
    """Between the head dims with kernels of their own they have never been run."""
    stage, module = load(stage_id)
    for more in ({"softcap": 5.0}, {"sink": True}, {"window": (64, 0), "causal": False}):
        asked = problem(96, direction=stage.direction).with_(**more)
        name = next(iter(asked.policies))
        assert module.supports(asked) == f"takes head_dim 64, 128 or 256 with {name}, not 96:96"
        assert module.supports(asked.with_(head_dim=128)) is None
