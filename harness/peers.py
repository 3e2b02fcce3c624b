"""The attention implementations every stage is timed beside, through one table."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.problem import Problem


@dataclass(frozen=True)
class Peer:
    """A provider (its label is in `harness.results`): its version, and how to make a call that runs it once
    on given inputs."""

    version: Callable[[], str]
    build: Callable[[Problem, torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], object]]


def _sdpa(backend: SDPBackend):
    def build(problem, q, k, v):
        def call():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=problem.causal, enable_gqa=problem.heads != problem.kv_heads
                )

        return call

    return build


def _flex(problem, q, k, v):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if problem.causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, problem.seqlen_q, problem.seqlen_kv, device=q.device
        )
    torch._dynamo.reset()  # past its limit of recompilations it would run uncompiled, without failing
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=problem.heads != problem.kv_heads)


def _fa4(problem, q, k, v):
    from flash_attn.cute import flash_attn_func

    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # (B, N, H, d), the layout it is made for
    return lambda: flash_attn_func(q, k, v, causal=problem.causal)


def _torch_version() -> str:
    return torch.__version__


def _cudnn_version() -> str:
    v = torch.backends.cudnn.version()
    return f"{v // 10000}.{v // 100 % 100}.{v % 100}" if v else "absent"


def _triton_version() -> str:
    return f"torch {torch.__version__}, Triton {importlib.metadata.version('triton')}"


def _fa4_version() -> str:
    return importlib.metadata.version("flash-attn-4")


PEERS: dict[str, Peer] = {
    "math": Peer(_torch_version, _sdpa(SDPBackend.MATH)),
    "fa2": Peer(_torch_version, _sdpa(SDPBackend.FLASH_ATTENTION)),
    "efficient": Peer(_torch_version, _sdpa(SDPBackend.EFFICIENT_ATTENTION)),
    "cudnn": Peer(_cudnn_version, _sdpa(SDPBackend.CUDNN_ATTENTION)),
    "flex": Peer(_triton_version, _flex),
    "fa4": Peer(_fa4_version, _fa4),
}


def versions(names: list[str]) -> dict[str, str]:
    """Version of each peer of `names` that is installed; the others are left out."""
    found = {}
    for name in names:
        try:
            found[name] = PEERS[name].version()
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
