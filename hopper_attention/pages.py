"""Keys and values that lie in pages, as packed sequences of the kernels, which read rows."""

import torch

from . import lengths
from .checks import check_packing, check_tensor, name_of

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def rows_of_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
) -> Rows:
    """(k, v, cu_seqlens_k, seqused_k) of packed sequences, each of which has the rows of its pages, all that
    `block_table` has room for: a copy, since where a sequence ends only the GPU knows.

    k and v (pages, page_size, kv heads, head_dim); block_table int32 (n, pages of a sequence), of which
    those that hold no key of a sequence may be any number. A sequence has as many keys as seqused_k says or
    else lie between two of cu_seqlens_k. Raises TypeError and ValueError before anything is launched.
    """
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (page, page_size, heads, head_dim) beside a block_table, "
                f"not {x.dim()}"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree in pages, page_size and heads"
        )
    check_tensor("block_table", block_table)
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table must be int32, not {name_of(block_table.dtype)}")
    sequences = check_packing(q, cu_seqlens_q, cu_seqlens_k, None, seqused_k)
    if block_table.dim() != 2 or block_table.shape[0] != sequences or block_table.device != q.device:
        raise ValueError(
            f"block_table must be ({sequences}, pages) on {q.device}, not {tuple(block_table.shape)} on "
            f"{block_table.device}"
        )
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise ValueError(f"q and {name} must be on one device, not {q.device} and {x.device}")
    if block_table.numel() and not k.shape[0]:
        raise ValueError("k and v have no page, but block_table names some")
    pages = block_table.clamp(0, max(0, k.shape[0] - 1)).flatten()
    room = block_table.shape[1] * k.shape[1]
    used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    if lengths.CHECKED and lengths.can_look(used):
        found = lengths.look_at_used(used, seqused_k is not None, room)
        lengths.look_at_pages(block_table, *k.shape[:2], found)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=q.device) * room
    return *(x.index_select(0, pages).flatten(0, 1) for x in (k, v)), starts, used
