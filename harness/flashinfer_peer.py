"""FlashInfer, where it is installed: its two ways to decode on Hopper.

One is planned: the host reads the lengths and divides the keys, and a call launches FlashAttention-2's
scheme for tensor cores and a kernel that combines. The other, XQA, reads the lengths on the device and
combines in the same launch. Both read pages alone: a cache of rows is one of pages in their order.
"""

import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType

import torch

PAGE = 64  # of a cache of rows
WORKSPACE_BYTES = 2**28
Pages = list[list[torch.Tensor]]  # of each cache K and V, (pages, page_size, kv heads, head_dim)


def package() -> ModuleType:
    """Raises ImportError where it is not installed."""
    return importlib.import_module("flashinfer")


def version() -> str:
    """Raises ImportError where it is not installed."""
    return package().__version__


@functools.cache
def workspace(way: str) -> torch.Tensor:
    """A way's own scratch, for calls that come one after another. XQA counts in it, and begins at zero."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def planned(
    q: torch.Tensor, pages: Pages, table: torch.Tensor, lengths: list[int]
) -> list[Callable[[], torch.Tensor]]:
    """Calls of the planned way: of q (batch, queries, heads, head_dim), o like it."""
    batch, queries, heads, head_dim = q.shape
    _, page, kv_heads, _ = pages[0][0].shape
    counts = [math.ceil(n / page) for n in lengths]
    wrapper = package().BatchDecodeWithPagedKVCacheWrapper(
        workspace("planned"), "NHD", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.cat([row[:count] for row, count in zip(table, counts)]),
        torch.tensor([n - page * (count - 1) for n, count in zip(lengths, counts)]).int(),
        heads,
        kv_heads,
        head_dim,
        page,
        q_data_type=q.dtype,
        kv_data_type=pages[0][0].dtype,
        q_len_per_req=queries,
    )
    rows, o = q.view(batch * queries, heads, head_dim), torch.empty_like(q)

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        wrapper.run(rows, (k, v), out=o.view(rows.shape))
        return o

    return [lambda k=k, v=v: call(k, v) for k, v in pages]


def xqa(
    q: torch.Tensor, pages: Pages, table: torch.Tensor, lengths: list[int]
) -> list[Callable[[], torch.Tensor]]:
    """Calls of XQA: of q (batch, queries, heads, head_dim), o like it; several queries have a causal mask."""
    batch, queries, heads, head_dim = q.shape
    of_several: dict[str, object] = {"q_len_per_req": queries}
    if queries > 1:  # 32 bits a query, bit j for new key j
        seen = [(1 << (i + 1)) - 1 for i in range(queries)]
        words = torch.tensor([[x & 0xFFFF, x >> 16] for x in seen], dtype=torch.int32)
        of_several["mask"] = words.to(torch.uint16).to(q.device).expand(batch, -1, -1).contiguous()
    on_device = torch.tensor(lengths, dtype=torch.int32, device=q.device).view(torch.uint32)
    rows, o = q.view(batch * queries, heads, head_dim), torch.empty_like(q)
    out = o if queries > 1 else o.view(rows.shape)

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        where = workspace("xqa"), table, on_device, max(lengths)
        options = {"bmm1_scale": head_dim**-0.5, "out": out} | of_several
        package().decode.xqa_batch_decode_with_kv_cache(rows, (k, v), *where, **options)
        return o

    return [lambda k=k, v=v: call(k, v) for k, v in pages]
