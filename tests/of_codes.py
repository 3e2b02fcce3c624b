"""What an FP8 launch is given, in 16 bits again."""

import torch

from hopper_attention.kernels.contract import Tensors
from hopper_attention.kernels.device.fp8 import ONES_ROWS, TOKEN_ORDER, TOKENS


def values_of(vt8: torch.Tensor, seqlen: int) -> torch.Tensor:
    """V8 in rows, in fp32, of Vt8 without its ones."""
    place = torch.arange(vt8.shape[-1])
    token = place // TOKENS * TOKENS + torch.tensor(TOKEN_ORDER)[place % TOKENS]
    rows = torch.empty(*vt8.shape[:2], vt8.shape[-1], vt8.shape[2] - ONES_ROWS)
    rows[:, :, token] = vt8[:, :, :-ONES_ROWS].mT.float()
    return rows[:, :, :seqlen]


def read(t: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of any launch's tensors."""
    if not t.scales:
        return t.q, t.k, t.v
    q_scale, k_scale, v_scale = (x[..., None] for x in t.scales)
    q_scale = q_scale.repeat_interleave(t.q.shape[1] // max(1, t.k.shape[1]), 1)
    v = t.v.float() if t.v.shape == t.k.shape else values_of(t.v, t.k.shape[2])
    found = t.q.float() * q_scale, t.k.float() * k_scale, v * v_scale
    return tuple(x.to(t.o.dtype) for x in found)
