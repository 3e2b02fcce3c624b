"""Which problems are better left to PyTorch's own kernels; notes/library.md says what was measured."""

from . import few_queries, ways
from .kernels.contract import Problem
from .kernels.device.constants import SMS
from .kernels.device.limits import NARROW_VALUES, tile_dim, tile_dims
from .kernels.division import TILES
from .ways import Kind

FEW = 16  # queries, beside more keys
SHORT = 256  # keys, for so few queries: with fewer PyTorch's kernels are up to a microsecond ahead
LARGE = 2**29  # bytes of K and V, for one query: from there on cuDNN's is ahead by 3 % where nothing overlaps
LONG = 8192  # keys: at 4096 gradients in tiles of `NARROW_VALUES` are ahead of cuDNN's, at 16384 behind


def slower(problem: Problem) -> str | None:
    """Why a problem is better left to the kernel that PyTorch has for it, or None."""
    if problem.direction == "bwd" and problem.causal and problem.value_dim is not None:
        own = tile_dims(problem) == NARROW_VALUES and problem.seqlen_kv <= LONG
        dims = f"{problem.head_dim} and {problem.value_dim} columns"
        return None if own else f"{dims}, in tiles of the wider or long: cuDNN's kernel is faster"
    if problem.direction == "bwd" or problem.seqlen_kv <= problem.seqlen_q:
        return None
    if problem.seqlen_q == 1 and few_queries.kv_bytes(problem) >= LARGE:
        return "half a gigabyte of keys and values for one query: cuDNN's kernel is as fast"
    way = ways.way_of(problem)
    # One query in slices is behind cuDNN.
    divided = way.kind is Kind.DECODE or (way.kind is not Kind.TILES and problem.seqlen_q > 1)
    if divided and (problem.seqlen_q > FEW or problem.seqlen_kv >= SHORT):
        return None
    rows = min(TILES[tile_dim(problem)])
    tiles = -(-problem.seqlen_q // rows) * problem.heads * problem.batch
    if problem.seqlen_q <= FEW:
        return (
            f"a tile of {rows} queries holds {problem.seqlen_q}: decoding, for kernels that divide the keys"
        )
    if 4 * tiles <= SMS and problem.top_left:  # which equal slices do not take (`ways`)
        return f"its {tiles} tiles of queries leave SMs idle: other kernels divide the keys"
    return None
