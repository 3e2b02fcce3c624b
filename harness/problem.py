"""The attention problem: its shape, its FLOPs, its bytes, and the roofline they imply."""

from dataclasses import dataclass, replace

DTYPES = ("bfloat16", "float16")
BYTES_PER_ELEMENT = 2
HIDDEN_SIZE = 2048
TOTAL_TOKENS = 16384
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU; per-SM figures are per clock."""

    name: str
    sms: int
    clock_ghz: float
    hbm_bytes_per_s: float
    tensor_flops_per_clock: int = 4096  # dense bf16, per SM
    fp32_lanes: int = 128
    alu_lanes: int = 64
    mufu_lanes: int = 16
    issue_slots: int = 4
    smem_bytes_per_clock: int = 128

    @property
    def tensor_flops(self) -> float:
        """Dense bf16 FLOP/s of the whole chip."""
        return self.tensor_flops_per_clock * self.sms * self.clock_ghz * 1e9


# Rates per SM and clock: NVIDIA H100 white paper and the CUDA programming guide's throughput table for cc
# 9.0. 1.98 GHz is the SM clock's maximum, so that no kernel can be faster than its bound. NVIDIA quotes its
# 989 TFLOP/s at 1.83 GHz; a kernel that keeps the tensor cores busy settles below both, at the power cap.
# 3.35 TB/s is HBM3's peak.
H100_SXM = Gpu("NVIDIA H100 SXM", sms=132, clock_ghz=1.98, hbm_bytes_per_s=3.35e12)


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
    direction: str = "fwd"
    top_left: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.top_left, bool):
            raise TypeError(f"top_left must be True or False, not {self.top_left!r}")
        if self.top_left and not self.causal:
            raise ValueError("top_left aligns a causal mask, and there is none: causal is False")

    @staticmethod
    def square(batch: int, heads: int, seqlen: int, head_dim: int, causal: bool, **rest: object) -> "Problem":
        """A self-attention problem: as many keys as queries, as many key heads as query heads."""
        return Problem(batch, heads, heads, seqlen, seqlen, head_dim, causal, **rest)

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
        is half; × 2.5 for the backward pass (FlashAttention's convention)."""
        queries, keys = self.not_blind
        pairs = queries * keys - (min(queries, keys) ** 2 / 2 if self.causal else 0)
        forward = 4.0 * self.batch * self.heads * pairs * self.head_dim
        return forward * (2.5 if self.direction == "bwd" else 1.0)

    @property
    def min_bytes(self) -> int:
        """Bytes of device memory that must move: every input that counts read once, every output written
        once."""
        queries, keys = self.not_blind
        row = self.head_dim * BYTES_PER_ELEMENT
        q, kv = (heads * self.batch * row for heads in (self.heads, 2 * self.kv_heads))  # of one position
        lse = 4 * self.batch * self.heads
        if self.direction == "bwd":  # read q, o, dO, lse, k, v; write dq, dk, dv
            return queries * (3 * q + lse) + keys * kv + self.seqlen_q * q + self.seqlen_kv * kv
        return queries * q + keys * kv + self.seqlen_q * (q + lse)

    def roofline_seconds(self, gpu: Gpu = H100_SXM) -> float:
        """The larger of FLOPs over the tensor-core rate and bytes over the memory rate, in seconds."""
        return max(self.flops / gpu.tensor_flops, self.min_bytes / gpu.hbm_bytes_per_s)

    def with_(self, **changes: object) -> "Problem":
        return replace(self, **changes)

    def __str__(self) -> str:
        causal = ("causal top-left" if self.top_left else "causal") if self.causal else "full"
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}:{self.kv_heads}"
        n = f"n{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"n{self.seqlen_q}:{self.seqlen_kv}"
        return f"b{self.batch} {heads} {n} d{self.head_dim} {causal} {self.dtype}"


def sweep_problem(seqlen: int, head_dim: int, causal: bool, direction: str = "fwd") -> Problem:
    """The benchmark's problem of this shape: 16384 tokens and hidden size 2048, at least one sequence and one
    head."""
    batch, heads = max(1, TOTAL_TOKENS // seqlen), max(1, HIDDEN_SIZE // head_dim)
    return Problem.square(batch, heads, seqlen, head_dim, causal, direction=direction)


def sweep(direction: str = "fwd") -> list[Problem]:
    """The benchmark's 24 problems."""
    return [
        sweep_problem(n, d, causal, direction) for d in HEAD_DIMS for causal in (False, True) for n in SEQLENS
    ]
