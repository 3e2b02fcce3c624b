"""The kernels behind `torch.nn.functional.scaled_dot_product_attention`.

SDPA chooses a backend and calls that backend's operator. `enable()` puts these kernels under the operators
of two of them, flash and cuDNN, since which of the two a plain call takes differs with cuDNN's version. What
the kernels do not take, or would do slower, goes to the kernel that was there, forward and backward each by
itself: either's backward can read the other's O and LSE. `varlen` does the same for packed sequences.
"""

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.library import Library, get_kernel

from .. import ops, production, selection, tuned
from ..checks import check_tensor, problem_of
from ..choice import slower
from ..kernels.device.constants import VECTOR
from . import varlen

DEVICE = "CUDA"  # the dispatch key of what is overridden
FLASH, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"

_lock = threading.Lock()  # of what follows
_overrides: Library | None = None
_kept = False  # whether `enable()` was called, and `disable()` not since
_blocks = 0  # of `enabled()`, entered and not left
_originals: dict[str, object] = {}


@dataclass(frozen=True)
class Explanation:
    """What would run in each direction: the kernel's name, or why it is left to PyTorch."""

    forward: str
    backward: str


def enable() -> None:
    """Put the kernels behind SDPA, and behind `torch.nn.attention.varlen.varlen_attn`, in this process, on
    every GPU, until `disable()`. Twice is as good as once.

    Graphs that `torch.compile` made before call the operators too, and take part. Raises RuntimeError where
    PyTorch was built without CUDA.
    """
    global _kept
    with _lock:
        _override()
        _kept = True


def disable() -> None:
    """Give SDPA its own kernels back, inside a block of `enabled()` too. What ran forward before can run
    backward after."""
    global _kept
    with _lock:
        _kept = False
        _give_back()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """`enable()` for a block of code, in the whole process, until the last of several blocks is left. Who
    called `enable()`, before or inside, keeps the kernels."""
    global _blocks
    with _lock:
        _override()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not (_blocks or _kept):
                _give_back()


def _override() -> None:
    global _overrides
    if _overrides is not None:
        return
    if torch.version.cuda is None:
        raise RuntimeError("this PyTorch was built without CUDA: SDPA has no kernels to stand in for")
    library = Library("aten", "IMPL", DEVICE)
    try:
        for name, call in (
            (FLASH, flash_forward),
            (f"{FLASH}_backward", flash_backward),
            (CUDNN, cudnn_forward),
            (f"{CUDNN}_backward", cudnn_backward),
            (varlen.FLASH[0], varlen.forward_over(functools.partial(_original, varlen.FLASH[0]))),
            (varlen.FLASH[1], varlen.backward_over(functools.partial(_original, varlen.FLASH[1]))),
        ):
            _originals[name] = get_kernel(f"aten::{name}", DEVICE)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                library.impl(name, call, DEVICE, with_keyset=True, allow_override=True)
    except BaseException:
        library._destroy()
        raise
    _overrides = library


def _give_back() -> None:
    global _overrides
    if _overrides is not None:
        _overrides._destroy()
        _overrides = None


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Explanation:
    """What runs while the kernels are enabled, and why, if SDPA chooses its flash or its cuDNN backend for
    these arguments. Runs nothing."""
    from torch.nn.attention.bias import CausalBias, CausalVariant  # a prototype, which may go

    for name, x in (("query", query), ("key", key), ("value", value)):
        if not (isinstance(x, torch.Tensor) and x.layout is torch.jagged):
            check_tensor(name, x)
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        query, key, value = (_cast(x, torch.get_autocast_dtype(device)) for x in (query, key, value))
    top_left = True
    if isinstance(attn_mask, CausalBias):
        is_causal, top_left = True, attn_mask.variant == CausalVariant.UPPER_LEFT
        attn_mask = None
    if attn_mask is not None:
        against = {"fwd": "there is a mask", "bwd": "there is a mask"}
    elif query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        against = dict.fromkeys(("fwd", "bwd"), "enable_gqa is not set, and SDPA refuses fewer key heads")
    else:
        if query.dim() and query.shape[-1] % VECTOR:
            scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
            query, key, value = map(_padded, (query, key, value))
        mask = _mask(query, key, is_causal, top_left)
        against = {x: _against(x, query, key, value, dropout_p, *mask, scale) for x in ("fwd", "bwd")}
    deterministic = torch.are_deterministic_algorithms_enabled()
    kernels = {}
    if None in against.values():
        problem = problem_of(query, key, value, *mask)
        gpu = tuned.gpu(query.device)
        launches = selection.backward_launches(problem.with_(direction="bwd"), deterministic, gpu=gpu)
        backward = " and ".join(dict.fromkeys(launch.stage_id for launch in launches))
        kernels = {"fwd": selection.forward_stage(problem, gpu=gpu), "bwd": backward}
    answers = [kernels[x] if (why := against[x]) is None else f"PyTorch's: {why}" for x in ("fwd", "bwd")]
    return Explanation(*answers)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as autocast hands it to SDPA, without its values."""
    return (
        torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device) if x.dtype in ops.CAST else x
    )


def _padded(x: torch.Tensor) -> torch.Tensor:
    """A tensor as SDPA pads it for its flash backend: of as many columns as a multiple of 8."""
    return x.new_empty(*x.shape[:-1], -(-x.shape[-1] // VECTOR) * VECTOR) if x.dim() else x


def _mask(q: torch.Tensor, k: torch.Tensor, is_causal: bool, top_left: bool) -> tuple[bool, bool]:
    """`causal` and `top_left` as the library takes them. `top_left`: how the operator aligns a causal mask of
    unequal lengths. SDPA means the top left, and so does cuDNN's operator; flash's means the bottom right,
    and has such lengths from `torch.nn.attention.bias.causal_lower_right` alone."""
    return is_causal, is_causal and top_left and q.dim() == k.dim() == 4 and q.shape[2] != k.shape[2]


def _against(
    direction: str, q, k, v, dropout_p: float, causal: bool, top_left: bool, scale: float | None
) -> str | None:
    """Why a call is left to PyTorch, or None."""
    if dropout_p:
        return "dropout"
    if causal and not top_left and q.dim() == k.dim() == 4 and q.shape[2] > k.shape[2]:
        return "there are queries that see no key, whose LSE its kernels have otherwise"
    return production.reason_against(direction, q, k, v, scale, causal, top_left, slower)


def _backward(do, q, k, v, o, lse, causal: bool, top_left: bool, scale: float | None):
    deterministic = torch.are_deterministic_algorithms_enabled()
    return production.backward(do, q, k, v, o, lse.contiguous(), None, scale, causal, top_left, deterministic)


# ---- the operators, as PyTorch declares them --------------------------------------------------------------


def _original(name: str, keys: object, *arguments: object, **more: object):
    return _originals[name].call_boxed(keys, *arguments, **more)


def flash_forward(
    keys, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    inputs, mask = (query, key, value), _mask(query, key, is_causal, top_left=False)
    if return_debug_mask or _against("fwd", *inputs, dropout_p, *mask, scale) is not None:
        return _original(FLASH, keys, *inputs, dropout_p, is_causal, return_debug_mask, scale=scale)
    o, lse = production.forward(*inputs, scale, *mask)
    state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a random generator that is not asked
    return o, lse, None, None, query.shape[2], key.shape[2], state, state.new_empty(()), query.new_empty(0)


def flash_backward(
    keys, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    mask = _mask(query, key, is_causal, top_left=False)
    if _against("bwd", query, key, value, dropout_p, *mask, scale) is not None:
        lengths = cum_seq_q, cum_seq_k, max_q, max_k
        rest = dropout_p, is_causal, philox_seed, philox_offset
        inputs = grad_out, query, key, value, out, logsumexp
        return _original(f"{FLASH}_backward", keys, *inputs, *lengths, *rest, scale=scale)
    return _backward(grad_out, query, key, value, out, logsumexp, *mask, scale)


def cudnn_forward(
    keys, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    return_debug_mask=False, *, scale=None,
):  # fmt: skip
    mask = _mask(query, key, is_causal, top_left=True)
    refused = attn_bias is not None or return_debug_mask
    if refused or _against("fwd", query, key, value, dropout_p, *mask, scale) is not None:
        inputs = query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask
        return _original(CUDNN, keys, *inputs, scale=scale)
    o, lse = production.forward(query, key, value, scale, *mask)
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    return o, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], seed, torch.empty_like(seed), None


def cudnn_backward(
    keys, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
    cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    mask = _mask(query, key, is_causal, top_left=True)
    biased = attn_bias is not None and attn_bias.numel() > 0
    if biased or _against("bwd", query, key, value, dropout_p, *mask, scale) is not None:
        state, lengths = (philox_seed, philox_offset, attn_bias), (cum_seq_q, cum_seq_k, max_q, max_k)
        inputs = grad_out, query, key, value, out, logsumexp
        return _original(
            f"{CUDNN}_backward", keys, *inputs, *state, *lengths, dropout_p, is_causal, scale=scale
        )
    return _backward(grad_out, query, key, value, out, logsumexp.flatten(2), *mask, scale)
