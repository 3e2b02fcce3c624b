"""The benchmark's sweep, FlashAttention's own: 16384 tokens and a hidden size of 2048, at every length."""

from hopper_attention.kernels.contract import Problem

HIDDEN_SIZE = 2048
TOTAL_TOKENS = 16384
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
SHORT = (128, 256)  # which the papers leave out
LENGTHS = (*SHORT, *SEQLENS)
HEAD_DIMS = (64, 128)


def sweep_problem(seqlen: int, head_dim: int, causal: bool, direction: str = "fwd") -> Problem:
    """The benchmark's problem of this shape: 16384 tokens and hidden size 2048, at least one sequence and one
    head."""
    batch, heads = max(1, TOTAL_TOKENS // seqlen), max(1, HIDDEN_SIZE // head_dim)
    return Problem.square(batch, heads, seqlen, head_dim, causal, direction=direction)


def sweep(direction: str = "fwd") -> list[Problem]:
    """The papers' 24 problems."""
    return _problems(SEQLENS, direction)


def short_sweep(direction: str = "fwd") -> list[Problem]:
    """The same of short sequences."""
    return _problems(SHORT, direction)


def _problems(seqlens: tuple[int, ...], direction: str) -> list[Problem]:
    return [
        sweep_problem(n, d, causal, direction) for d in HEAD_DIMS for causal in (False, True) for n in seqlens
    ]
