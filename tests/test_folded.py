"""LSE and D as the tensor cores subtract them: what lies in memory, multiplied as WGMMA reads it."""

import math

import pytest
import torch

from hopper_attention.kernels import calls
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device import limits
from hopper_attention.kernels.device.constants import SMEM_MAX
from tests.untraced import kernels

folded, fp32, bf16 = kernels("device.folded"), torch.float32, torch.bfloat16
KEYS, QUERIES, STAGES = 64, 64, 2


def values() -> torch.Tensor:
    """(STAGES, QUERIES, 2): −LSE/τ and −D of all sizes that an fp32 has."""
    generator = torch.Generator().manual_seed(0)
    random = lambda draw: draw(STAGES, QUERIES, 2, generator=generator)
    found = random(torch.randn) * (200 * random(torch.rand) - 100).exp2()
    found[0, :4] = torch.tensor([[0.0, 1.0], [-folded.GREATEST, 0.0], [1.0, -0.0], [math.pi, -1 / 3]])
    return found


def read(memory: torch.Tensor, layout: tuple[object, object]) -> torch.Tensor:
    """(row, column, last) of what lies in memory, by a layout of folded."""
    (rows, columns, last), strides = layout
    index = 0
    for mode, stride in zip((*rows, *columns, last), (*strides[0], *strides[1], strides[2])):
        index = torch.as_tensor(index)[..., None] + stride * torch.arange(mode)
    row, more_rows, column, more_columns, _ = range(5)
    return memory[index.permute(more_rows, row, more_columns, column, 4).flatten(0, 1).flatten(1, 2)]


def statistics(x: torch.Tensor) -> torch.Tensor:
    """As the preprocess leaves them, flat."""
    lines = torch.zeros(STAGES, QUERIES, 2, folded.LINE // 2, dtype=bf16)
    for i, part in enumerate(folded.parts_of(x, bf16, fp32)):
        lines[..., i] = part
    return lines.flatten()


def ones() -> torch.Tensor:
    """As `write_ones` leaves them, flat."""
    lines = torch.tensor(
        [folded.words_of(product) for product in range(folded.FOLDED_PRODUCTS)], dtype=torch.int32
    )
    lines = lines[:, None].expand(-1, folded.LINE, -1)
    return lines.contiguous().view(bf16).flatten()


def test_each_product_gets_its_own_number_of_each_query() -> None:
    x = values()
    a, b = read(ones(), folded.ones_layout(KEYS)), read(statistics(x), folded.stats_layout(QUERIES, STAGES))
    assert a.shape == (KEYS, 16, 2)
    assert b.shape == (QUERIES, 16, STAGES)
    found = torch.einsum("kcp,qcs->skqp", a.double(), b.double())
    torch.testing.assert_close(found, x[:, None].expand(-1, KEYS, -1, -1).double(), rtol=2**-24, atol=0.0)


@pytest.mark.parametrize("parts", [1, 2])
def test_fewer_parts_would_not_do(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "PARTS", parts)
    with pytest.raises(AssertionError, match="not close"):
        test_each_product_gets_its_own_number_of_each_query()


def test_what_stands_for_infinity_hides_a_row_at_any_scale_and_is_no_nan_beside_zeros() -> None:
    greatest = torch.tensor(folded.GREATEST, dtype=bf16)
    assert greatest.isfinite()
    assert greatest.item() == folded.GREATEST
    for scale in (2.0**-126, 1e-30, 0.1, 1e4):
        exponent = -folded.GREATEST * folded.exponent_scale(scale)
        assert exponent < -(2.0**20)
    assert folded.exponent_scale(0.25) == 0.25 * math.log2(math.e)


def test_who_folds_has_scratch_for_it() -> None:
    for head_dim in (64, 96, 104, 120, 128, 192, 256):
        problem = Problem.square(2, 3, 300, head_dim, True, direction="bwd", scaled=True)
        folds = limits.folds(limits.tile_dim(problem), False)
        assert folds == (96 < head_dim <= 128)
        words = math.prod(calls.backward_scratch(problem, False)["stats"][0][2:])
        assert words == 64 * (folded.FOLDED_WORDS if folds else 2)
    capped = Problem.square(2, 3, 300, 128, True, direction="bwd", softcap=20.0)
    assert calls.backward_scratch(capped, False)["stats"][0][2:] == (2, 64)


def test_shared_memory_suffices_whatever_a_tile_is_told_of() -> None:
    bwd4, parts, one = map(kernels, ("bwd4", "bwd4_parts", "bwd4_one"))
    for causal in (False, True):
        problem = Problem.square(1, 2, 1024, 128, causal, direction="bwd")
        packed = problem.with_(sequences=((1000, 1000),))
        found = [bwd4.kernel_for(x, deterministic=y) for x in (problem, packed) for y in (False, True)]
        found += [parts.kernel_for(problem, deterministic=y) for y in (False, True)]
        found += [one.kernel_for(problem.with_(seqlen_kv=100), divides=y) for y in (False, True)]
        for kernel in found:
            assert kernel.main.folds
            assert kernel.main.smem_bytes == SMEM_MAX, "tiles begin at multiples of 1 KiB"
