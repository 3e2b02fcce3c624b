"""How the operators shard: by batch, or by heads where every rank gets whole groups of them."""

import functools

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

BATCH, HEADS = 0, 1


@functools.cache
def register() -> None:
    """Tell DTensor. Once; the first DTensor that comes to an operator does it."""
    register_sharding(torch.ops.hopper_attention.forward.default)(forward_shardings)
    register_sharding(torch.ops.hopper_attention.backward.default)(backward_shardings)


def forward_shardings(q, k, v, *options: object):
    return _shardings(k, 2, (q, k, v, *options))


def backward_shardings(do, q, k, v, o, lse, *options: object):
    return _shardings(k, 3, (do, q, k, v, o, lse, *options))


def _shardings(k, outputs: int, inputs: tuple[object, ...]):
    """The placements of outputs and of inputs, of which those that are no tensors have none. The heads of a
    group stay together only if each rank gets as many key heads as the next."""
    ways = [Replicate(), Shard(BATCH), *([Shard(HEADS)] if k.shape[HEADS] % k.mesh.size() == 0 else [])]
    placed = lambda x, way: way if hasattr(x, "placements") else None
    return [([way] * outputs, [placed(x, way) for x in inputs]) for way in ways]
