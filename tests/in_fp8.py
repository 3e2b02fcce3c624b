"""The numbers that codes and scales stand for."""

import torch
from of_codes import values_of

from harness.quantized import of_rows


def stood_for(q8, k8, vt8, q_scale, k_scale, v_exponent) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in fp32 of what `quantize` gave; q and k rotated, if they were."""
    v = values_of(vt8.cpu(), k8.shape[2]).to(vt8.device)
    q, k = (x8.float() * of_rows(scale, x8)[..., None] for x8, scale in ((q8, q_scale), (k8, k_scale)))
    return q, k, v * of_rows(2.0**v_exponent, v)[..., None]
