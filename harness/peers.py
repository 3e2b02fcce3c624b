"""The attention implementations every stage is timed beside, through one table."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import cudnn_fp8, fa3, quantized
from hopper_attention.kernels.contract import Problem

Forward = Callable[[Problem, torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Peer:
    """A provider (its label is in `harness.results`): its version, and how to make a call of its forward pass
    on given inputs that returns o."""

    version: Callable[[], str]
    forward: Forward
    rows_first: bool = False  # whether it is made for (B, N, H, d) tensors instead of (B, H, N, d)
    backward: Callable[..., Callable[[], object]] | None = None  # of (problem, q, k, v, dO), if its own
    # Of e4m3 q, k and v and a scale (1, 1) of each in fp32, if it has one. Of 16-bit tensors it is timed
    # behind a kernel of this repository that makes the codes, with scales that are known beforehand.
    fp8: Callable[..., Callable[[], torch.Tensor]] | None = None
    fp8_version: Callable[[], str] | None = None

    def build(
        self,
        problem: Problem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        do: torch.Tensor | None = None,
    ) -> Callable[[], object]:
        """A call that runs the problem's direction once. Of a backward problem the forward pass runs here,
        with what it saves for the backward one kept, and the call is of the backward pass alone."""
        if self.rows_first:
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        if problem.reads_codes:
            return self.fp8(problem, *in_e4m3(q, k, v))
        if problem.in_fp8:
            return behind_a_cast(self, problem, q, k, v)
        if problem.direction == "fwd":
            return self.forward(problem, q, k, v)
        if self.backward is not None:
            return self.backward(problem, q, k, v, do.transpose(1, 2).contiguous() if self.rows_first else do)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            o = self.forward(problem, q, k, v)()
        do = torch.empty_like(o).copy_(do.transpose(1, 2) if self.rows_first else do)  # o's strides: no copy
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def _check_alignment(problem: Problem, top_left: bool) -> None:
    """Raise ValueError unless the problem's mask is that of a peer that aligns a causal one at the top left,
    or at the bottom right: another mask would be timed as if it were the problem's."""
    if problem.causal and problem.seqlen_q != problem.seqlen_kv and problem.top_left != top_left:
        raise ValueError(f"aligns a causal mask at the {'top left' if top_left else 'bottom right'}")


def _sdpa(backend: SDPBackend) -> Forward:
    def forward(problem, q, k, v):
        _check_alignment(problem, top_left=True)

        def call():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=problem.causal, enable_gqa=problem.heads != problem.kv_heads
                )

        return call

    return forward


def _flex(problem, q, k, v):
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _check_alignment(problem, top_left=True)
    mask = None
    if problem.causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, problem.seqlen_q, problem.seqlen_kv, device=q.device
        )
    torch._dynamo.reset()  # past its limit of recompilations it would run uncompiled, without failing
    config.donated_buffer = False  # a backward pass that may overwrite what was saved cannot run twice
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=problem.heads != problem.kv_heads)


def _fa4(problem, q, k, v):
    from flash_attn.cute import flash_attn_func

    _check_alignment(problem, top_left=False)

    def call():
        found = flash_attn_func(q, k, v, causal=problem.causal)
        return found[0] if isinstance(found, tuple) else found  # some versions give the LSE too

    return call


def _fa3(problem, q, k, v):
    _check_alignment(problem, top_left=False)
    call = fa3.forward(q, k, v, problem.causal)
    return lambda: call()[0]


def _fa3_fp8(problem, q, k, v, scales):
    _check_alignment(problem, top_left=False)
    descales = tuple(scale.expand(problem.batch, problem.kv_heads).contiguous() for scale in scales)
    call = fa3.forward_fp8(q, k, v, descales, problem.causal)
    return lambda: call()[0]


def _cudnn_fp8(problem, q, k, v, scales):
    return cudnn_fp8.forward(problem, q, k, v, dict(zip("qkv", scales)))


def in_e4m3(*tensors: torch.Tensor) -> tuple:
    """e4m3 codes of each, and the scales of all, (1, 1)."""
    scales = [quantized.power_of_two(x) for x in tensors]
    codes = [quantized.codes(x.float() / scale) for x, scale in zip(tensors, scales)]
    return *codes, [torch.full((1, 1), scale, device=tensors[0].device) for scale in scales]


def behind_a_cast(peer: Peer, problem: Problem, *tensors: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A peer's call in FP8 behind one launch that casts 16-bit tensors, as the peer has them, to codes. A
    peer wants one scale for a head at least, which no single pass finds: here they are those of the
    largest values, found before."""
    from hopper_attention.kernels.quantize import compile_quantize

    cast = compile_quantize(problem.head_dim, problem.dtype, given_scales=True, in_rows=True)
    codes = [torch.empty_like(x, dtype=quantized.E4M3) for x in tensors]
    scales = [quantized.full_scale(x) for x in tensors]
    call = peer.fp8(problem, *codes, scales)
    heads = (lambda x: x.transpose(1, 2)) if peer.rows_first else (lambda x: x)
    spread = [scale.expand(heads(x).shape[:2]).contiguous() for scale, x in zip(scales, tensors)]
    arguments = *map(heads, tensors), *map(heads, codes), *spread, None, None, None

    def cast_and_call() -> torch.Tensor:
        cast(*arguments)
        return call()

    return cast_and_call


def _fa3_backward(problem, q, k, v, do):
    _check_alignment(problem, top_left=False)
    return fa3.backward(do, q, k, v, problem.causal)


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
    "cudnn": Peer(
        _cudnn_version, _sdpa(SDPBackend.CUDNN_ATTENTION), fp8=_cudnn_fp8, fp8_version=cudnn_fp8.version
    ),
    "flex": Peer(_triton_version, _flex),
    "fa3": Peer(
        fa3.version, _fa3, rows_first=True, backward=_fa3_backward, fp8=_fa3_fp8, fp8_version=fa3.version_fp8
    ),
    "fa4": Peer(_fa4_version, _fa4, rows_first=True),
}


def versions(names: list[str], direction: str = "fwd") -> dict[str, str]:
    """Version of each peer of `names` that is installed, and has this direction; the others are left out."""
    found = {}
    for name in names:
        version = PEERS[name].fp8_version if direction.startswith("fp8") else PEERS[name].version
        try:
            if version:
                found[name] = version()
        except ImportError:
            continue
    return found
