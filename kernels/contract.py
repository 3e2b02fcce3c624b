"""What a kernel file and its callers say to each other: the problem, the tensors, the stages, the functions.

This module imports nothing of the project, and the kernel files nothing but it and `device/`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

DTYPES = ("bfloat16", "float16")
BYTES_PER_ELEMENT = 2


@dataclass(frozen=True)
class Problem:
    """One attention problem. Tensors are (batch, heads, seqlen, head_dim) with a unit last stride.

    A causal mask is aligned at the bottom right: query i sees keys up to i + seqlen_kv − seqlen_q. With
    `top_left` it is aligned there: query i sees keys up to i. At equal lengths the two are the same mask.
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
        """How many queries see a key, and how many keys a query sees: at unequal lengths a causal mask may
        leave some out."""
        both = min(self.seqlen_q, self.seqlen_kv)
        if not self.causal:
            return self.seqlen_q, self.seqlen_kv
        return (self.seqlen_q, both) if self.top_left else (both, self.seqlen_kv)

    @property
    def flops(self) -> float:
        """4·B·H·Nq·Nkv·d, of a causal mask only what lies on its side of the diagonal, which at equal lengths
        is half; × 2.5 for the backward pass (FlashAttention's convention). With values of other width 2·d of
        a pair are Q·Kᵀ's, dK's and dQ's each, 2·value_dim those of P·V, dP and dV."""
        queries, keys = self.not_blind
        pairs = queries * keys - (min(queries, keys) ** 2 / 2 if self.causal else 0)
        of_keys, of_values = self.dims
        columns = 3 * of_keys + 2 * of_values if self.direction == "bwd" else of_keys + of_values
        return 2.0 * self.batch * self.heads * pairs * columns

    @property
    def min_bytes(self) -> int:
        """Bytes of device memory that must move: every input that counts read once, every output written
        once."""
        queries, keys = self.not_blind
        element = 1 if self.reads_codes else BYTES_PER_ELEMENT
        of_keys, of_values = (columns * self.batch for columns in self.dims)
        q, kv = self.heads * of_keys * element, self.kv_heads * (of_keys + of_values) * element  # of a position
        o = self.heads * of_values * BYTES_PER_ELEMENT
        lse = 4 * self.batch * self.heads
        if self.direction == "bwd":  # read q, o, dO, lse, k, v; write dq, dk, dv
            return queries * (q + 2 * o + lse) + keys * kv + self.seqlen_q * q + self.seqlen_kv * kv
        return queries * q + keys * kv + self.seqlen_q * (o + lse)

    def with_(self, **changes: Any) -> "Problem":
        return replace(self, **changes)

    def __str__(self) -> str:
        causal = ("causal top-left" if self.top_left else "causal") if self.causal else "full"
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}:{self.kv_heads}"
        n = f"n{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"n{self.seqlen_q}:{self.seqlen_kv}"
        more = " scaled" * self.scaled + " lse_grad" * self.lse_grad
        d = f"d{self.head_dim}" + (f":{self.value_dim}" if self.value_dim is not None else "")
        return f"b{self.batch} {heads} {n} {d} {causal} {self.dtype}{more}"


@dataclass
class Tensors:
    """What `run_kernel` reads and writes.

    q, o, do, dq are (B, H, Nq, d), k, v, dk, dv (B, Hkv, Nkv, d), all of one 16-bit type (o, do, v and dv with
    a problem's value_dim, if it has one); lse is fp32 (B, H,
    Nq), natural logarithms. Of a problem that reads codes q, k and v are e4m3 instead, of an "fp8" one v as
    `device.fp8` has Vt8, and `scales` are fp32. A forward stage writes o and lse. A backward stage reads
    them, and do, and writes dq, dk, dv; a row that sees no key comes with o = 0 and lse = −∞ and has gradient
    zero.
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

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """What the kernel writes, by name: o and lse, or dq, dk and dv."""
        names = ("o", "lse") if self.do is None else ("dq", "dk", "dv")
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
        """Needs no tensors and no GPU. Head_dim, mask and dtype are compiled in; batch, heads and lengths
        stay dynamic."""

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
