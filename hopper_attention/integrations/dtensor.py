"""How the operators shard: by batch, or by heads where every rank gets whole groups of them."""

import functools
from collections.abc import Iterator

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

BATCH, HEADS = 0, 1  # of q; packed sequences have no batch
Ways = Iterator[tuple[Placement, Placement, Placement]]
Shardings = list[tuple[list[Placement], list[Placement | None]]]


@functools.cache
def register() -> None:
    """Tell DTensor. Once; the first DTensor that comes to an operator does it."""
    of = torch.ops.hopper_attention
    register_sharding(of.forward.default)(attend_shardings)
    register_sharding(of.backward.default)(backward_shardings)
    register_sharding(of.attend.default)(attend_shardings)
    register_sharding(of.attend_backward.default)(attend_backward_shardings)


def backward_shardings(do, q, k, v, o, lse, dlse=None, *options: object) -> Shardings:
    ways = attend_backward_shardings(do, q, k, v, o, lse, dlse, *options)
    return [(outputs[:3], inputs) for outputs, inputs in ways]


def attend_shardings(q, k, v, *more: object) -> Shardings:
    """Of `forward` too, which is given no more tensors."""
    return [([rows, lse], [rows] * 3 + _placed(more, sink)) for rows, lse, sink in _ways(q, k)]


def attend_backward_shardings(do, q, k, v, o, lse, dlse=None, *more: object) -> Shardings:
    found = []
    learns = bool(more) and _is_tensor(more[0])
    for rows, of_lse, sink in _ways(q, k):
        summed = Partial() if rows == Shard(BATCH) else sink
        outputs = [rows] * 3 + [summed if learns else Replicate()]
        inputs = [rows] * 5 + [of_lse, of_lse if _is_tensor(dlse) else None]
        found.append((outputs, inputs + _placed(more, sink)))
    return found


def _ways(q, k) -> Ways:
    """Placements of rows, of the LSE, and of a sink and its gradient, which have a number for each head. The
    heads of a group stay together only if each rank gets as many key heads as the next."""
    packed = len(q.shape) == 3
    yield Replicate(), Replicate(), Replicate()
    if not packed:
        yield Shard(BATCH), Shard(BATCH), Replicate()
    if k.shape[HEADS] % k.mesh.size() == 0:
        yield Shard(HEADS), Shard(0 if packed else HEADS), Shard(0)


def _placed(more: tuple[object, ...], sink: Placement) -> list[Placement | None]:
    """Of what follows q, k and v: the sink, integers, which all ranks have, and what is no tensor."""
    return [(Replicate() if i else sink) if _is_tensor(x) else None for i, x in enumerate(more)]


def _is_tensor(x: object) -> bool:
    return hasattr(x, "placements")
