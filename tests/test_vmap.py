"""torch.vmap and torch.func over the operators, the reference's formulas in the kernels' place."""

import pytest
import torch
from test_ops import inputs
from test_ops import on_cpu as plain_on_cpu  # noqa: F401
from test_ops_policies import HEADS, dense, packed, random
from test_ops_policies import on_cpu as policies_on_cpu  # noqa: F401

from hopper_attention import attention, flash_attn_varlen_func


def test_vmap_over_nothing() -> None:
    x = torch.zeros(0, 2, 4, 9, 16, dtype=torch.bfloat16)
    assert torch.vmap(attention)(x, x, x).shape == x.shape


def test_vmap_and_functional_gradients() -> None:
    q, k, v = (torch.stack([x, 2 * x, 3 * x]) for x in inputs())
    for in_dims, args in (
        (0, (q, k, v)),
        ((0, None, None), (q, k[0], v[0])),
        ((1, 0, 0), (q.movedim(0, 1), k, v)),
    ):
        found = torch.vmap(lambda q, k, v: attention(q, k, v, causal=True), in_dims=in_dims)(*args)
        for i, o in enumerate(found):
            ks, vs = (k[0], v[0]) if in_dims == (0, None, None) else (k[i], v[i])
            assert o.equal(attention(q[i], ks, vs, causal=True))
    loss = lambda q, k, v: attention(q, k, v).float().square().sum()
    leaves = inputs(grad=True)
    for x, y in zip(torch.func.grad(loss, (0, 1, 2))(*inputs()), torch.autograd.grad(loss(*leaves), leaves)):
        assert x.equal(y)


@pytest.mark.filterwarnings("error")  # PyTorch's own loop, where an operator has no rule, warns
@pytest.mark.parametrize("sinks", [None, 0, "of all"])
def test_vmap(sinks: int | str | None) -> None:
    """Of a batch, of packed sequences, and of gradients; a sink for each, or one of all."""
    sink = {None: None, 0: random(3, HEADS), "of all": random(HEADS)}[sinks]
    options = {"window_size": (4, 0), "softcap": 20.0}
    one = lambda q, k, v, sink=None: attention(q, k, v, learnable_sink=sink, **options).float()
    given = [torch.stack([x, 2 * x, 3 * x]) for x in dense()] + ([] if sink is None else [sink])
    in_dims = 0, 0, 0, *([] if sink is None else [sinks if sinks == 0 else None])
    of = lambda i: [x if at is None else x[i] for x, at in zip(given, in_dims)]
    for i, o in enumerate(torch.vmap(one, in_dims)(*given)):
        assert o.equal(one(*of(i)))
    loss = lambda *x: one(*x).square().sum()
    gradients = torch.func.grad(loss, tuple(range(len(given))))
    found = torch.vmap(gradients, in_dims)(*given)
    for i in range(3):
        assert all(x[i].equal(y) for x, y in zip(found, gradients(*of(i))))


@pytest.mark.filterwarnings("error")
def test_vmap_of_packed_sequences() -> None:
    tensors, (cu_q, cu_k) = packed()
    call = lambda q, k, v: flash_attn_varlen_func(q, k, v, cu_q, cu_k, causal=True)
    found = torch.vmap(call)(*(torch.stack([x, 2 * x]) for x in tensors))
    assert found[0].equal(call(*tensors)) and found[1].equal(call(*(2 * x for x in tensors)))
    assert torch.vmap(call)(*(x.new_zeros(0, *x.shape) for x in tensors)).shape == (0, *tensors[0].shape)
