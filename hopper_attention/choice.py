"""Which problems are better left to PyTorch's own kernels; notes/library.md says what was measured."""

from .kernels.calls import parts_of
from .kernels.contract import Problem
from .kernels.device.constants import SMS

KEYS = 128  # of a tile of bwd4 up to head_dim 128
FEW = 16  # queries, beside more keys


def slower(problem: Problem) -> str | None:
    """Why a problem is better left to the kernel that PyTorch has for it, or None."""
    if problem.direction == "bwd":
        # dK and dV of a tile of keys are one CTA's work, over all query heads of the key head or of a part.
        keys = 64 if problem.head_dim == 256 else KEYS
        heads = max(1, problem.kv_heads) * (parts_of(problem) if problem.kv_heads else 1)
        tiles = -(-problem.seqlen_kv // keys) * heads * problem.batch
        rows = problem.seqlen_q * problem.heads // heads  # of queries, for each tile
        if tiles < 2 * SMS and rows >= 2 * problem.seqlen_kv:
            return f"its {tiles} tiles of keys leave SMs idle: other kernels divide the queries of a tile too"
        return None
    # A CTA takes 128 to 256 queries: fewer tiles than SMs, or tiles half filled, are the others' strength.
    rows = {64: 256, 128: 192, 256: 128}[problem.head_dim]
    tiles = -(-problem.seqlen_q // rows) * problem.heads * problem.batch
    if problem.seqlen_q <= FEW and problem.seqlen_kv > problem.seqlen_q:
        return (
            f"a tile of {rows} queries holds {problem.seqlen_q}: decoding, for kernels that divide the keys"
        )
    if tiles < SMS and problem.seqlen_kv > problem.seqlen_q:
        return f"its {tiles} tiles of queries leave SMs idle"
    return None
