"""DTensors through the operators of windows, sinks and packed sequences, as in test_dtensor."""

import pytest
import torch
from test_dtensor import local, mesh  # noqa: F401
from test_ops_policies import on_cpu  # noqa: F401
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hopper_attention import attention, flash_attn_varlen_func


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_with_a_sink_each_rank_has_its_heads(place: object, mesh: object) -> None:  # noqa: F811
    """A sink is sharded by heads; of batches its gradients are still to be added up."""
    parts = local(4), local(2), local(2)
    by_heads = place == Shard(1)
    rows = [DTensor.from_local(x, mesh, [place]).requires_grad_() for x in parts]
    sink = torch.randn(4)
    of_sink = DTensor.from_local(sink, mesh, [Shard(0) if by_heads else Replicate()]).requires_grad_()
    options = {"softcap": 20.0, "window_size": (3, 0)}
    o = attention(*rows, learnable_sink=of_sink, **options)
    leaves = [x.clone().requires_grad_() for x in (*parts, sink)]
    plain = attention(*leaves[:3], learnable_sink=leaves[3], **options)
    assert o.placements == (place,)
    assert o.to_local().equal(plain)
    do = torch.randn_like(plain)
    *found, dsink = torch.autograd.grad(o, (*rows, of_sink), DTensor.from_local(do, mesh, [place]))
    *expected, expected_dsink = torch.autograd.grad(plain, leaves, do)
    for x, y in zip(found, expected):
        assert x.placements == (place,)
        assert x.to_local().equal(y)
    wanted = {Replicate(): Replicate(), Shard(0): Partial(), Shard(1): Shard(0)}[place]
    assert dsink.placements == (wanted,)
    assert dsink.to_local().equal(expected_dsink)


@pytest.mark.parametrize("place", [Replicate(), Shard(1)], ids=str)
def test_packed_sequences_by_heads(place: object, mesh: object) -> None:  # noqa: F811
    parts = [x[0].transpose(0, 1) for x in (local(4), local(2), local(2))]
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    rows = [DTensor.from_local(x, mesh, [place]) for x in parts]
    everywhere = DTensor.from_local(cu, mesh, [Replicate()])
    o = flash_attn_varlen_func(*rows, everywhere, everywhere, causal=True)
    assert o.placements == (place,)
    assert o.to_local().equal(flash_attn_varlen_func(*parts, cu, cu, causal=True))
