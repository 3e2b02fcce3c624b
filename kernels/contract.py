"""What a kernel file and its callers say to each other: the problem, the tensors, the stages, the functions.

This module imports nothing of the project, and the kernel files nothing but it and `device/`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch

DTYPES = ("bfloat16", "float16")
BYTES_PER_ELEMENT = 2


@dataclass(frozen=True)
class Problem:
    """One attention problem. Tensors are (batch, heads, seqlen, head_dim) with a unit last stride.

    A causal mask is aligned at the bottom right: query i sees keys up to i + seqlen_kv − seqlen_q. With
    `top_left` it is aligned there: query i sees keys up to i. At equal lengths the two are the same mask.

    A window, a soft cap, a sink, packed sequences: whether a kernel has each is compiled in, and what it is,
    is given at the launch, as the softmax's scale then is too.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"
    # Or "bwd". Or forward in FP8: "fp8" of operands as `device.fp8` has them, "fp8_rows" of e4m3 Q, K and V
    # in rows, "fp8_cast" of 16-bit ones.
    direction: str = "fwd"
    top_left: bool = False
    scaled: bool = False  # scores are multiplied by a factor given at the launch, not by 1/√head_dim
    lse_grad: bool = False  # of a scaled backward problem: the LSE has a gradient too
    # (left, right), aligned at the bottom right: query i sees the keys from i + offset − left to i + offset +
    # right, offset = seqlen_kv − seqlen_q; −1 is no bound on that side. A causal window is (left, 0).
    window: tuple[int, int] | None = None
    softcap: float = 0.0  # scaled scores s become softcap·tanh(s/softcap), before the mask; 0: they stay
    # Each query head has a logit that takes part in its rows' denominators, and so in their LSE, and has no
    # value.
    sink: bool = False
    # (queries, keys) of each sequence, one behind the other in tensors whose batch is 1; the mask is aligned
    # in each. seqlen_q and seqlen_kv are the tensors', where more rows may lie, between sequences or behind.
    sequences: tuple[tuple[int, int], ...] | None = None
    value_dim: int | None = None  # of V and O, where it is not head_dim

    def __post_init__(self) -> None:
        if not isinstance(self.top_left, bool):
            raise TypeError(f"top_left must be True or False, not {self.top_left!r}")
        if self.top_left and not self.causal:
            raise ValueError("top_left aligns a causal mask, and there is none: causal is False")
        if self.lse_grad and not (self.scaled and self.direction == "bwd"):
            raise ValueError("kernels for a gradient of the LSE are backward ones that are given their scale")
        if self.value_dim == self.head_dim:
            raise ValueError(f"a value_dim that is head_dim is none: {self.head_dim}")
        self._check_policies()

    def _check_policies(self) -> None:
        """Of window, softcap, sink and sequences; any of them comes with a scale."""
        if self.window is not None:
            if not _are_integers(self.window, 2, -1):
                raise ValueError(f"window must be two integers (left, right) from −1 on, not {self.window!r}")
            if self.window == (-1, -1):
                raise ValueError("a window without bounds is none: window must be None")
            if self.causal:
                raise ValueError("a causal window is (left, 0): causal must be False beside a window")
        if not isinstance(self.softcap, Real) or not 0.0 <= self.softcap < math.inf:
            raise ValueError(f"softcap must be a finite number, 0 for none, not {self.softcap!r}")
        if not isinstance(self.sink, bool):
            raise TypeError(f"sink must be True or False, not {self.sink!r}")
        if self.sequences is not None:
            if not all(_are_integers(lengths, 2, 0) for lengths in set(self.sequences)):
                raise ValueError("sequences must be pairs (queries, keys) of integers from 0 on")
            if self.batch != 1:
                raise ValueError(f"packed sequences lie in tensors of batch 1, not {self.batch}")
            for name, tensor, own in zip(("queries", "keys"), (self.seqlen_q, self.seqlen_kv), self.totals):
                if own > tensor:
                    raise ValueError(f"the sequences have {own} {name}, more than the {tensor} of the tensor")
        if self.policies:
            object.__setattr__(self, "scaled", True)

    @property
    def policies(self) -> tuple[str, ...]:
        """Which of the fields there are that no plain kernel takes."""
        names = ("window", "softcap", "sink", "sequences")
        return tuple(name for name in names if getattr(self, name) not in (None, False, 0.0))

    @property
    def totals(self) -> tuple[int, int]:
        """Queries and keys of all sequences of a packed problem."""
        return sum(q for q, _ in self.sequences or ()), sum(kv for _, kv in self.sequences or ())

    @property
    def alone(self) -> Iterator[tuple["Problem", int]]:
        """A packed problem's sequences as problems of their own, those of the same lengths once, and how
        often each is there."""
        for (queries, keys), often in Counter(self.sequences).items():
            yield self.with_(seqlen_q=queries, seqlen_kv=keys, sequences=None), often

    @staticmethod
    def square(batch: int, heads: int, seqlen: int, head_dim: int, causal: bool, **rest: Any) -> "Problem":
        """A self-attention problem: as many keys as queries, as many key heads as query heads."""
        return Problem(batch, heads, heads, seqlen, seqlen, head_dim, causal, **rest)

    @property
    def in_fp8(self) -> bool:
        return self.direction.startswith("fp8")

    @property
    def reads_codes(self) -> bool:
        """Whether Q, K and V are given in e4m3."""
        return self.direction in ("fp8", "fp8_rows")

    @property
    def dims(self) -> tuple[int, int]:
        """Columns of Q and K, and of V and O."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def not_blind(self) -> tuple[int, int]:
        """How many queries see a key, and how many keys a query sees: a window, or at unequal lengths a
        causal mask, may leave some out."""
        if self.sequences is not None:
            seen = [(*one.not_blind, often) for one, often in self.alone]
            return sum(q * often for q, _, often in seen), sum(kv * often for _, kv, often in seen)
        q, kv = self.seqlen_q, self.seqlen_kv
        if self.window is not None:
            left, right = self._bounds
            offset = kv - q
            queries = min(q, kv + left - offset) - max(0, -offset - right)
            keys = min(kv, q + offset + right) - max(0, offset - left)
            return (max(0, queries), max(0, keys)) if q and kv else (0, 0)
        both = min(q, kv)
        if not self.causal:
            return q, kv
        return (q, both) if self.top_left else (both, kv)

    @property
    def _bounds(self) -> tuple[int, int]:
        """The window, a bound that is not there so far away that it hides nothing."""
        return tuple(self.seqlen_q + self.seqlen_kv if bound == -1 else bound for bound in self.window)

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, of one head of one batch; of a causal mask, by
        FlashAttention's convention, what lies on its side of the diagonal, which at equal lengths is half."""
        if self.sequences is not None:
            return sum(one.pairs * often for one, often in self.alone)
        if self.window is not None:
            (left, right), offset = self._bounds, self.seqlen_kv - self.seqlen_q
            below = lambda ahead: _pairs_up_to(ahead, self.seqlen_q, self.seqlen_kv)
            return below(offset + right) - below(offset - left - 1)
        queries, keys = self.not_blind
        return queries * keys - (min(queries, keys) ** 2 / 2 if self.causal else 0)

    @property
    def flops(self) -> float:
        """4·B·H·d for each of `pairs`; × 2.5 for the backward pass (FlashAttention's convention). Of a pair
        2·d are Q·Kᵀ's, dK's and dQ's each, and 2·value_dim those of P·V, dP and dV."""
        of_keys, of_values = self.dims
        columns = 3 * of_keys + 2 * of_values if self.direction == "bwd" else of_keys + of_values
        return 2.0 * self.batch * self.heads * self.pairs * columns

    @property
    def min_bytes(self) -> int:
        """Bytes of device memory that must move: every input that counts read once, every output written
        once."""
        queries, keys = self.not_blind
        all_queries, all_keys = self.totals if self.sequences is not None else (self.seqlen_q, self.seqlen_kv)
        element = 1 if self.reads_codes else BYTES_PER_ELEMENT
        of_keys, of_values = (columns * self.batch for columns in self.dims)
        q = self.heads * of_keys * element  # of a position
        kv = self.kv_heads * (of_keys + of_values) * element
        o = self.heads * of_values * BYTES_PER_ELEMENT
        lse = 4 * self.batch * self.heads
        if self.direction == "bwd":  # read q, o, dO, lse, k, v; write dq, dk, dv
            return queries * (q + 2 * o + lse) + keys * kv + all_queries * q + all_keys * kv
        return queries * q + keys * kv + all_queries * (o + lse)

    def with_(self, **changes: Any) -> "Problem":
        return replace(self, **changes)

    def __str__(self) -> str:
        causal = ("causal top-left" if self.top_left else "causal") if self.causal else "full"
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}:{self.kv_heads}"
        n = f"n{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"n{self.seqlen_q}:{self.seqlen_kv}"
        if self.window is not None:
            causal = f"window {self.window[0]}:{self.window[1]}"
        more = " scaled" * (self.scaled and not self.policies) + " lse_grad" * self.lse_grad
        more += f" softcap {self.softcap:g}" * bool(self.softcap) + " sink" * self.sink
        if self.sequences is not None:
            n = f"{len(self.sequences)} sequences {n}"
        d = f"d{self.head_dim}" + (f":{self.value_dim}" if self.value_dim is not None else "")
        return f"b{self.batch} {heads} {n} {d} {causal} {self.dtype}{more}"


def _are_integers(given: object, count: int, least: int) -> bool:
    """Whether `given` is a tuple of so many integers from `least` on."""
    return (
        isinstance(given, tuple) and len(given) == count and all(type(x) is int and x >= least for x in given)
    )


def _pairs_up_to(ahead: int, queries: int, keys: int) -> int:
    """How many pairs (i, j) of so many queries and keys have j ≤ i + ahead."""
    up_to = lambda n: n * (n + 1) // 2 if n > 0 else 0  # 1 + 2 + … + n
    without_end = lambda first: up_to(queries - 1 + first) - up_to(first - 1)  # query 0 has `first` keys
    return without_end(ahead + 1) - without_end(ahead + 1 - keys)


@dataclass
class Tensors:
    """What `run_kernel` reads and writes.

    q, o, do, dq are (B, H, Nq, d), k, v, dk, dv (B, Hkv, Nkv, d), all of one 16-bit type, o, do, v and dv
    with value_dim for d if a problem has one; lse is fp32 (B, H, Nq), natural logarithms. Of a problem that
    reads codes q, k and v are e4m3 instead, of an "fp8" one v as `device.fp8` has Vt8, and `scales` are fp32.
    A forward stage writes o and lse. A backward stage reads them, and do, and writes dq, dk, dv; a row that
    sees no key comes with o = 0 and lse = −∞ and has gradient zero.

    Of packed sequences q, o, do, dq are (1, H, total_q, d), k, v, dk, dv (1, Hkv, total_kv, d), lse (1, H,
    total_q); rows that belong to no sequence are neither read nor written.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    workspace: dict[str, torch.Tensor] = field(default_factory=dict)
    do: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dlse: torch.Tensor | None = None  # fp32 like lse, contiguous: of a problem with lse_grad
    softmax_scale: float | None = None  # of a scaled problem
    scales: tuple[torch.Tensor, ...] = ()  # of q, k and v: (B, heads, 1), or (B, heads, blocks of 64 rows)
    signs: torch.Tensor | None = None  # ±1 in fp32 (d,): of an "fp8_cast" problem
    window: tuple[int, int] | None = None  # of a problem with one, −1 for a bound that is not there
    softcap: float | None = None  # of a problem with one
    sink: torch.Tensor | None = None  # fp32 (H,), in natural logarithms: of a problem with one
    dsink: torch.Tensor | None = None  # fp32 (H,): its gradient, which a backward stage writes
    # Of packed sequences, int32 on the GPU and never read on the host: where each begins among queries and
    # among keys, and the last ends (n + 1,); how many of its rows count, None where all do (n,).
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None
    seqused: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """What the kernel writes, by name: o and lse, or dq, dk, dv, and dsink where there is a sink."""
        names = ("o", "lse") if self.do is None else ("dq", "dk", "dv")
        names += ("dsink",) if self.dsink is not None else ()
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder: identity, what it adds, and what a judge of it must know.

    `options` are the keyword arguments of the kernel file's functions that make this stage; the same file may
    serve several stages, and an ablation is the same call with other options.
    """

    id: str
    title: str
    adds: str
    before: str | None
    direction: str = "fwd"  # as a problem's
    model: str = "flash_attention_2"  # the function of harness.models that follows this kernel's algorithm
    # Whether P, and in a backward stage dS, are rounded to the input type before their products, as the
    # yardstick then does.
    rounds_p: bool = False
    atomics: bool = False  # float atomics: the order of additions, and so the last bits, differ between runs
    most_keys: int | None = None  # that it takes, where the sweep's are more
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """How often one kernel runs its main loop on a problem: the link from machine code to a hardware bound.

    What one pass of the loop costs is read from the disassembly, which does not know how often a loop inside
    the main loop runs: `trips` names that for each innermost loop, in program order. `ffma` is the number of
    products a thread forms on CUDA cores in one pass; the disassembly must show as many, or `trips` is wrong.
    """

    kernel: str  # substring of the kernel's symbol
    unit: str  # what one pass computes, in words
    threads: int  # of a CTA
    ctas: int  # of the launch
    passes: int  # of the main loop, over all CTAs
    trips: tuple[float, ...]  # a mean where passes differ
    ffma: int
    hbm_bytes: float  # least device-memory traffic of one pass
    smem_bytes: int = 0  # dynamic shared memory of a CTA
    tensor_flops: float = 0  # of a CTA on tensor cores in one pass


Compiled = Callable[..., None]
"""A kernel compiled by `device.compiling.compile_for_torch`: called with torch tensors, it enqueues on
PyTorch's current stream; `__cubin__` is its machine code."""

Scratch = dict[str, tuple[tuple[int, ...], str]]
"""Scratch tensors by name: shape, and dtype as torch names it. Integers, which are counters and semaphores,
and names that begin with "zero_", into which a kernel accumulates, start at zero, and every launch leaves
them at zero for the next one. The rest may hold anything."""


class LazyMaximum(NamedTuple):
    """What P is rounded relative to where a row's maximum may be behind. Keys come in tiles of `tile_kv` from
    left to right, a tile in so many `parts`.

    A row's maximum is that of its first tile, until a part has a score further ahead of it, in powers of two,
    than the row has room for: then it is the part's. Room is `growth`. With a `share` it is less where a term
    that far ahead would be more than so many times the sum of the first tile's terms: log₂(share · sum ·
    own / all), at least 0, of `all` tiles of keys `own` that some row of its 64 sees; and 0 as soon as the
    maximum has risen.
    """

    tile_kv: int
    parts: int
    growth: float  # in powers of two
    share: float = 0.0
    # Of a stage that rounds P to e4m3: log₂ of what P is where a score is the maximum. Its sums are then of
    # rounded P.
    e4m3: float | None = None
    quantized: str | None = None  # of a stage that quantises its inputs itself: how, `device.fp8` says

    @property
    def behind(self) -> dict[str, Any]:
        """What says where it is behind; the rest is of what is rounded."""
        return {"tile_kv": self.tile_kv, "parts": self.parts, "growth": self.growth, "share": self.share}


class KernelFile(Protocol):
    """The functions of a kernel file. `options` are a stage's, or those of an ablation's variant."""

    STAGES: tuple[Stage, ...]

    def supports(self, problem: Problem) -> str | None:
        """Why the file's stages refuse the problem, the other direction included, or None.

        Raised after the stage's id as a ValueError before anything is launched. A stage that takes unequal
        lengths computes both alignments of a causal mask (`Problem.top_left`) or refuses one; at equal
        lengths they are one mask, and need no telling apart.
        """

    def workspace(self, problem: Problem, **options: Any) -> Scratch:
        """Scratch that the caller allocates; two launches at once must not share it."""

    def compile_kernel(self, problem: Problem, **options: Any) -> Compiled:
        """Needs no tensors and no GPU. Head_dim, mask and dtype are compiled in, and of a window, a soft cap,
        a sink and packed sequences whether there are any; batch, heads, lengths and the rest stay
        dynamic."""

    def work(self, problem: Problem, **options: Any) -> list[Work]:
        """What the launch does, kernel by kernel."""

    def run_kernel(self, compiled: Compiled, tensors: Tensors) -> None:
        """Enqueue on PyTorch's current stream and write `tensors.outputs` in place.

        No allocation and no synchronisation, so that a CUDA graph can capture it. Nothing is launched for
        empty outputs.
        """


class HasVariants(KernelFile, Protocol):
    """A kernel file with an ablation, `python -m harness.ablation`."""

    VARIANTS: dict[str, dict[str, Any]]
    """Options by label, timed side by side."""

    def variants_for(self, problem: Problem) -> list[str]:
        """The labels that are candidates on a problem. Optional: without it all are."""


class RoundsLazily(KernelFile, Protocol):
    """A forward file whose P is rounded relative to a maximum that may be behind the row's."""

    def lazy_maximum(self, problem: Problem, **options: Any) -> LazyMaximum:
        """By what rule it is behind."""
