"""The numbers that codes and scales stand for."""

import torch
from of_codes import values_of

from hopper_attention.kernels.device.fp8 import BLOCK


def spread(of_blocks: torch.Tensor, rows: int) -> torch.Tensor:
    """A number of each 64 rows as one of each row, (…, rows, 1)."""
    return of_blocks.repeat_interleave(BLOCK, -1)[..., :rows, None]


def stood_for(q8, k8, vt8, q_scale, k_scale, v_exponent) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in fp32 of what `quantize` gave; q and k rotated, if they were."""
    rows, keys = q8.shape[2], k8.shape[2]
    v = values_of(vt8.cpu(), keys).to(vt8.device) * spread(2.0**v_exponent, keys)
    return q8.float() * spread(q_scale, rows), k8.float() * spread(k_scale, keys), v
