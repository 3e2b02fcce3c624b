"""What tensors of lengths, offsets and pages say, looked at on request.

Calls do not read them on the host, where they would have to wait for the GPU, and could not be captured in
a CUDA graph. So a wrong one is not refused: the kernel reads beside the cache, and reads and writes beside
the packed rows. With HOPPER_ATTENTION_CHECK_LENGTHS=1 in the environment when the package is imported, calls
look first and raise ValueError. Those that a CUDA graph captures do not, and in a compiled graph nobody looks
at the pages of packed sequences.
"""

import os
from collections.abc import Sequence
from itertools import pairwise

import torch

VARIABLE = "HOPPER_ATTENTION_CHECK_LENGTHS"
CHECKED = os.environ.get(VARIABLE, "").lower() not in ("", "0", "false", "no", "off")


def can_look(x: torch.Tensor) -> bool:
    """Whether the host may wait for the GPU, and there is something to read in x."""
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def room_of(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Keys that a sequence can have in a cache (batch, keys, kv heads, head_dim), or of pages."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def check_number(name: str, n: int, added: int, room: int) -> None:
    """Raise ValueError unless n keys, and `added` new ones behind them, have room."""
    if not 0 <= n <= room - added:
        behind = f" and {added} new ones" if added else ""
        raise ValueError(f"{name} = {n}{behind}: the cache has room for 0 to {room} keys of a sequence")


def look_at_cache(
    k_cache: torch.Tensor,
    k: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
) -> None:
    """Raise ValueError for a length that the cache has no room for, or a page that it does not have."""
    if not can_look(cache_seqlens):
        return
    room, added = room_of(k_cache, block_table), 0 if k is None else k.shape[1]
    lengths = cache_seqlens.tolist()
    for b, n in enumerate(lengths):
        check_number(f"cache_seqlens[{b}]", n, added, room)
    if block_table is not None:
        look_at_pages(block_table, *k_cache.shape[:2], [n + added for n in lengths])


def look_at_pages(block_table: torch.Tensor, pages: int, page_size: int, lengths: Sequence[int]) -> None:
    """Raise ValueError for an entry of the table that holds keys of a sequence and names none of `pages`."""
    for b, (row, n) in enumerate(zip(block_table.tolist(), lengths, strict=True)):
        for i, page in enumerate(row[: -(-n // max(1, page_size))]):
            if not 0 <= page < pages:
                raise ValueError(
                    f"block_table[{b}, {i}] = {page} holds keys of a sequence of {n}: there are pages 0 to "
                    f"{pages - 1}"
                )


def look_at_used(used: torch.Tensor, given: bool, room: int) -> list[int]:
    """How many keys of each packed sequence are used, as `seqused_k` says if it is `given`. Raises ValueError
    for more than its pages have `room` for, or fewer than none."""
    found = used.tolist()
    for b, n in enumerate(found):
        name = f"seqused_k[{b}]" if given else f"cu_seqlens_k[{b + 1}] - cu_seqlens_k[{b}]"
        check_number(name, n, 0, room)
    return found


def look_at_packing(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_q: torch.Tensor,
    cu_kv: torch.Tensor,
    used_q: torch.Tensor | None,
    used_kv: torch.Tensor | None,
    longest_kv: int = 0,
) -> None:
    """Raise ValueError unless the offsets of packed sequences, int32 (n + 1,), rise from 0 or more to at most
    the rows of q and of k, and no more of a sequence is used than its rows, nor, if that is not 0, more than
    `longest_kv` keys."""
    if not can_look(cu_q):
        return
    for suffix, x, cu, used, longest in (("q", q, cu_q, used_q, 0), ("k", k, cu_kv, used_kv, longest_kv)):
        offsets = cu.tolist()
        sizes = [end - begin for begin, end in pairwise(offsets)]
        for b, size in enumerate(sizes):
            if size < 0:
                raise ValueError(
                    f"cu_seqlens_{suffix} decreases from {offsets[b]} to {offsets[b + 1]} at {b}"
                )
        if offsets[0] < 0 or offsets[-1] > x.shape[0]:
            raise ValueError(
                f"cu_seqlens_{suffix} goes from {offsets[0]} to {offsets[-1]}: {suffix} has {x.shape[0]} rows"
            )
        for b, n in enumerate(sizes if used is None else used.tolist()):
            if not 0 <= n <= sizes[b]:
                raise ValueError(f"seqused_{suffix}[{b}] = {n}: the sequence has {sizes[b]} rows")
            if longest and n > longest:
                raise ValueError(f"max_seqlen_{suffix} is {longest}, and sequence {b} has {n} rows")
