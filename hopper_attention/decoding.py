"""Attention to a cache on torch tensors: inputs of one kind are checked and their kernel compiled or loaded
once, as in `production`, whose scratch and counters it shares.

Nothing is read on the host, neither lengths nor page table, unless `lengths` is asked to look: a call does
not wait for the GPU, and a CUDA graph that captured one serves all lengths.
"""

from typing import NamedTuple

import torch

from . import lengths, memory, tuned
from .checks import E4M3, check_device, check_layout, check_scale, check_tensor, name_of
from .kernels import calls_decode
from .kernels.contract import DTYPES, Problem
from .launch import DECODE, kernel_for, least_of, sms_option
from .layouts import dense, dense_like
from .memory import WHOLE, part_of, scratch_of
from .plans import Plans
from .production import Plan, margin, run_on


class Made(NamedTuple):
    """What inputs of a kind are computed with."""

    plan: Plan
    given: tuple[int, float, int | None]  # CTAs that work together, the scale, the window
    room: int | None  # keys, to which lengths are cut where pieces of scratch follow from them


_plans: Plans[Made] = Plans()


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    batch_invariant: bool = False,
    made: Made | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o like q and lse (batch, heads, queries) on PyTorch's current stream; with k and v the cache has them
    too. `made` is what `recently` found.

    Raises TypeError or ValueError before anything is launched.
    """
    # One without elements, or on the meta device, has the address 0.
    if k is not None and 0 != k_cache.data_ptr() == v_cache.data_ptr():
        raise ValueError("k_cache and v_cache are written, and must not be one tensor")
    tensors = q, k_cache, v_cache, k, v, cache_seqlens, block_table, k_descale, v_descale
    options = softmax_scale, causal, window_left, batch_invariant
    plan_anew = lambda: _plan(*tensors, *options)
    if made is None:
        kind, there = _kind_of(tensors, options)
        made = _plans.find(kind, *there)
        made = _plans.keep(kind, there, plan_anew()) if made is None else made
    plan, given, room = made
    if lengths.CHECKED and cache_seqlens is not None:
        lengths.look_at_cache(k_cache, k, cache_seqlens, block_table)
    device = q.device
    if not plan.parts:  # without a query; new keys and values are the kernel's to store
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = (memory.empty(*x) for x in plan.outputs)
        (part,) = plan.parts
        scratch = scratch_of(part, device)
        new, descales = (k, v), (k_descale, v_descale)
        counted = cache_seqlens if room is None else cache_seqlens.clamp(max=room)
        calls_decode.launch_decode(
            part.launch, q, k_cache, v_cache, o, lse, counted, block_table, new, descales, scratch, *given
        )
        return o, lse

    return run_on(device, run, plan_anew)


Tensors = tuple[torch.Tensor | None, ...]


def recently(tensors: Tensors, options: tuple[object, ...]) -> Made | None:
    """What was made for a call like this, if there was one of late and PyTorch would dispatch it alike."""
    kind, there = _kind_of(tensors, options)
    return _plans.recently(kind, *there)


def _kind_of(tensors: Tensors, options: tuple[object, ...]) -> tuple[tuple[object, ...], Tensors]:
    """The options, among them which tensors there are, and those."""
    return (*[x is None for x in tensors], *options, margin()), tuple([x for x in tensors if x is not None])


def problem_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    causal: bool = False,
) -> Problem:
    """The `Problem` of q (batch, queries, heads, head_dim) and caches (batch or page, keys, kv heads,
    head_dim); its seqlen_kv is the most keys that a sequence can have.

    Raises TypeError and ValueError as `checks.problem_of` does.
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x)
        if x.dim() != 4:
            first, length = (
                ("batch", "seqlen") if name == "q" or block_table is None else ("page", "page_size")
            )
            raise ValueError(
                f"{name} must have 4 dimensions ({first}, {length}, heads, head_dim), not {x.dim()}"
            )
    dtype = name_of(q.dtype)
    if dtype not in DTYPES:
        raise TypeError(f"q must be {' or '.join(DTYPES)}, not {dtype}")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype not in (q.dtype, E4M3):
            raise TypeError(f"{name} must be {dtype} as q, or float8_e4m3fn, not {name_of(x.dtype)}")
        if x.device != q.device:
            raise ValueError(f"q and {name} must be on one device, not {q.device} and {x.device}")
    if (k_cache.shape, k_cache.dtype) != (v_cache.shape, v_cache.dtype):
        raise ValueError(
            f"k_cache and v_cache must have one shape and type, not {tuple(k_cache.shape)} {k_cache.dtype} "
            f"and {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    (batch, queries, heads, head_dim), (places, keys, kv_heads, _) = q.shape, k_cache.shape
    if head_dim != k_cache.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must agree in head_dim")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"the {heads} query heads must be a multiple of the {kv_heads} key/value heads")
    if block_table is None and places != batch:
        raise ValueError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must agree in batch; a cache of pages "
            "needs a block_table"
        )
    if block_table is not None:
        _check_integers("block_table", block_table, q, (batch, None))
        keys *= block_table.shape[1]
    causal = bool(causal) and queries > 1  # one query sees every key in any case
    return Problem(batch, heads, kv_heads, queries, keys, head_dim, causal, dtype, direction="decode")


def _plan(
    q, k_cache, v_cache, k, v, cache_seqlens, block_table, k_descale, v_descale, softmax_scale, causal,
    window_left, batch_invariant,
) -> Made:  # fmt: skip
    problem = problem_of(q, k_cache, v_cache, block_table, causal)
    eight_bits, window = k_cache.dtype == E4M3, window_left >= 0
    if reason := calls_decode.refuse_decode(problem):
        raise ValueError(f"{DECODE} {reason}")
    if block_table is not None:
        if cache_seqlens is None:
            raise ValueError("a cache of pages needs cache_seqlens: how many keys each sequence has")
        if not calls_decode.takes_pages(k_cache.shape[1], problem.head_dim, eight_bits):
            wanted = calls_decode.page_sizes(problem.head_dim, eight_bits)
            raise ValueError(f"pages must have {wanted}, not {k_cache.shape[1]}")
    if cache_seqlens is not None:
        _check_integers("cache_seqlens", cache_seqlens, q, (problem.batch,))
    _check_new(q, k_cache, k, v, cache_seqlens)
    added = 0 if k is None else k.shape[1]
    if added > problem.seqlen_kv:
        raise ValueError(f"a sequence has room for {problem.seqlen_kv} keys: k has {added} new ones")
    if not q.numel() and k is not None and k.numel():
        raise ValueError("new keys are stored by who attends to them: k and v beside no query are not")
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        _check_descale(name, x, q, problem, eight_bits)
    scale = check_scale(softmax_scale, problem.head_dim) or problem.head_dim**-0.5
    check_device(DECODE, q)
    check_layout("q", q)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_layout(name, x, written=k is not None)
    for name, x in (("k", k), ("v", v)):
        if x is not None:
            check_layout(name, x)
    page_size = 0 if block_table is None else k_cache.shape[1]
    options = calls_decode.options_of(
        problem, cache_seqlens is not None, page_size, eight_bits, window, k is not None, batch_invariant
    )
    gpu = tuned.gpu(q.device)
    # Hazard: with pieces of so many keys each, one that a length counts beyond the cache's room would be
    # written behind the scratch. So lengths are cut to the room, behind which come the new keys.
    most = problem.with_(seqlen_kv=problem.seqlen_kv + added)
    lse_shape = problem.batch, problem.heads, problem.seqlen_q
    outputs = dense_like(q), dense(lse_shape, torch.float32)
    parts = ()
    if q.numel():
        launch = kernel_for(DECODE, least_of(problem), options | sms_option(gpu.sms)).launch
        parts = (part_of(launch, WHOLE, WHOLE, calls_decode.decode_scratch(most, options, gpu.sms)),)
    together = calls_decode.together_of(problem, options, gpu.sms)
    room = problem.seqlen_kv if batch_invariant and cache_seqlens is not None else None
    return Made(Plan(outputs, parts, ()), (together, scale, window_left if window else None), room)


def _check_integers(name: str, x: object, q: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    check_tensor(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, not {name_of(x.dtype)}")
    fits = len(x.shape) == len(shape) and all(b in (None, a) for a, b in zip(x.shape, shape))
    if not fits or x.device != q.device:
        wanted = ", ".join("pages" if n is None else str(n) for n in shape) + "," * (len(shape) == 1)
        raise ValueError(f"{name} must be ({wanted}) on {q.device}, not {tuple(x.shape)} on {x.device}")
    if x.numel() and x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")


def _check_new(q, k_cache, k, v, cache_seqlens) -> None:
    """Keys and values to append."""
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, or neither")
    if k is None:
        return
    if cache_seqlens is None:
        raise ValueError("k and v are stored behind the first cache_seqlens keys: give them, too")
    wanted = q.shape[0], k.shape[1] if k.dim() == 4 else None, *k_cache.shape[2:]
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dtype != k_cache.dtype:
            raise TypeError(f"{name} must be of the cache's type {k_cache.dtype}, not {x.dtype}")
        if tuple(x.shape) != wanted or x.device != q.device:
            raise ValueError(
                f"{name} must be (batch, new keys, kv heads, head_dim) = ({wanted[0]}, n, {wanted[2]}, "
                f"{wanted[3]}) on {q.device}, not {tuple(x.shape)} on {x.device}"
            )


def _check_descale(name: str, x: object, q: torch.Tensor, problem: Problem, eight_bits: bool) -> None:
    if not eight_bits:
        if x is not None:
            raise ValueError(f"{name} is for caches in float8_e4m3fn, and this one is {problem.dtype}")
        return
    if x is None:
        raise ValueError(f"a cache in float8_e4m3fn needs {name}")
    if (x.shape, x.dtype, x.device) != ((problem.batch, problem.kv_heads), torch.float32, q.device):
        raise ValueError(
            f"{name} must be float32 ({problem.batch}, {problem.kv_heads}) on {q.device}, "
            f"not {x.dtype} {tuple(x.shape)} on {x.device}"
        )
