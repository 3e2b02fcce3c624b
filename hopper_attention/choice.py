"""Which problems are better left to PyTorch's own kernels; notes/library.md says what was measured."""

from .kernels.calls import FEW_TILES, TILE_KV, loads_of, parts_of
from .kernels.contract import Problem
from .kernels.device.constants import SMS

KEYS = {64: TILE_KV, 128: TILE_KV, 256: 64}  # of a tile of bwd4, by head_dim
QUERIES = {64: 256, 128: 192, 256: 128}  # of a CTA of k6
FEW = 16  # queries, beside more keys
BUSY = 0.7  # of the SMs' time, in the backward pass of a problem with more queries than keys


def slower(problem: Problem) -> str | None:
    """Why a problem is better left to the kernel that PyTorch has for it, or None."""
    return _slower_backward(problem) if problem.direction == "bwd" else _slower_forward(problem)


def _slower_backward(problem: Problem) -> str | None:
    """dK and dV of a tile of keys are one CTA's work, over all queries of its heads: others divide those."""
    if not problem.kv_heads or problem.head_dim not in KEYS:
        return None
    parts = parts_of(problem)
    tiles = -(-problem.seqlen_kv // KEYS[problem.head_dim]) * problem.kv_heads * parts * problem.batch
    rows = problem.seqlen_q * problem.heads // (problem.kv_heads * parts)  # of queries, for each tile
    if not 0 < tiles < FEW_TILES * SMS or rows < 2 * problem.seqlen_kv:
        return None
    loads = loads_of(problem, parts) if problem.head_dim < 256 else [1.0] * min(tiles, SMS)
    if sum(loads) < BUSY * SMS * max(loads):
        return f"its {tiles} tiles of keys leave SMs idle: other kernels divide the queries of a tile too"
    return None


def _slower_forward(problem: Problem) -> str | None:
    """A CTA takes 128 to 256 queries: with fewer tiles than SMs, or tiles half filled, others are faster."""
    if problem.head_dim not in QUERIES:
        return None
    rows = QUERIES[problem.head_dim]
    tiles = -(-problem.seqlen_q // rows) * problem.heads * problem.batch
    idle = f"its {tiles} tiles of queries leave SMs idle"
    if problem.seqlen_kv > problem.seqlen_q:
        if problem.seqlen_q <= FEW:
            held = f"a tile of {rows} queries holds {problem.seqlen_q}"
            return f"{held}: decoding, for kernels that divide the keys"
        return idle if tiles < SMS else None
    # With no more keys than queries only the tallest tiles lose, and not where a head is one tile.
    tallest = rows == max(QUERIES.values())
    return idle if tallest and problem.seqlen_q > rows and 2 * tiles <= SMS else None
