"""DTensors through the operators: placements, and what a rank computes; one process plays one of four."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from test_ops import on_cpu  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hopper_attention import attention

RANKS = 4


@pytest.fixture
def mesh() -> Iterator[object]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def local(heads: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, heads, 9, 64).bfloat16()


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_each_rank_computes_its_own(place: object, mesh: object) -> None:
    parts = local(4), local(2), local(2)
    q, k, v = (DTensor.from_local(x, mesh, [place]).requires_grad_() for x in parts)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert o.placements == lse.placements == (place,)
    leaves = [x.clone().requires_grad_() for x in parts]
    plain, plain_lse = attention(*leaves, causal=True, return_lse=True)
    assert o.to_local().equal(plain)
    assert lse.to_local().equal(plain_lse)
    do = torch.randn_like(plain)
    found = torch.autograd.grad(o, (q, k, v), DTensor.from_local(do, mesh, [place]))
    for x, y in zip(found, torch.autograd.grad(plain, leaves, do)):
        assert x.placements == (place,)
        assert x.to_local().equal(y)


def test_groups_of_heads_stay_together(mesh: object) -> None:
    """Six key heads do not divide among four ranks: by heads they would meet other groups' queries."""
    q = DTensor.from_local(local(6), mesh, [Shard(1)], shape=(2, 24, 9, 64), stride=(24 * 576, 576, 64, 1))
    k = DTensor.from_local(local(6), mesh, [Replicate()])
    o = attention(q, k, k)
    assert o.shape == (2, 24, 9, 64)
    assert Shard(1) not in o.placements
    assert not any(isinstance(x, Partial) for x in o.placements)
