"""Tiles that the TMA moves, with its 128-byte swizzle, and the rings of barriers they arrive through."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from .constants import VECTOR

SWIZZLE_COLUMNS = 64  # 16-bit elements in the 128 bytes that the swizzle permutes
SWIZZLE_BYTES = 1024  # the 128-byte swizzle repeats every 8 rows of 128 bytes: regions start on its period


def swizzled_tiles(
    dtype: object, rows: int, columns: int, stages: int, block: int | None = None
) -> cute.ComposedLayout:
    """(row, column, stage) in shared memory as the TMA's 128-byte swizzle lays it out, 64 columns of 16 bits
    a block; rows that are no multiple of 128 bytes as its 64-byte swizzle does, or whatever rows in blocks of
    so many bytes as the swizzle of those does."""
    kinds = warpgroup.SmemLayoutAtomKind
    block = block or (128 if columns * dtype.width % (128 * 8) == 0 else 64)
    kind = {128: kinds.K_SW128, 64: kinds.K_SW64, 32: kinds.K_SW32}[block]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)  # 8 rows × 128 bytes, 64 or 32
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def swizzled_chunks(rows: int, head_dim: int, stages: int) -> cute.Layout:
    """(row, chunk, element, stage) of `swizzled_tiles`: what `swizzle(row, chunk)` addresses by hand."""
    chunks, blocks = SWIZZLE_COLUMNS // VECTOR, head_dim // SWIZZLE_COLUMNS
    shape = (rows, (chunks, blocks), VECTOR, stages)
    chunk_stride = (VECTOR, rows * SWIZZLE_COLUMNS)
    return cute.make_layout(shape, stride=(SWIZZLE_COLUMNS, chunk_stride, 1, rows * head_dim))


def allocate_tiles(
    smem: object, dtype: object, rows: int, head_dim: int, stages: int, block: int | None = None
) -> cute.Tensor:
    """(row, head_dim, stage): shared memory for `stages` tiles as the TMA writes and WGMMA reads them, laid
    out as `swizzled_tiles`."""
    layout = swizzled_tiles(dtype, rows, head_dim, stages, block)
    return smem.allocate_tensor(dtype, layout.outer, SWIZZLE_BYTES, layout.inner)


def tiles_at(
    place: cute.Pointer, dtype: object, rows: int, head_dim: int, stages: int, block: int | None = None
) -> cute.Tensor:
    """`allocate_tiles`, where shared memory has been allocated for something else."""
    layout = swizzled_tiles(dtype, rows, head_dim, stages, block)
    return cute.make_tensor(cute.recast_ptr(place, layout.inner, dtype), layout.outer)


def row_slices(sX: cute.Tensor, count: int) -> cute.Tensor:
    """(row, column, tile) of shared memory as (row, column, slice), each slice `count` rows of a tile."""
    rows, columns, tiles = (cute.size(sX, mode=[i]) for i in range(3))
    slices = cute.make_layout((rows // count, tiles), stride=(count, rows * columns))
    layout = cute.make_layout((count, columns, slices.shape), stride=(1, rows, slices.stride))
    return cute.composition(sX, layout)


def load_atom(
    mX: cute.Tensor, rows: int, columns: int | None = None, block: int | None = None
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The TMA descriptor that loads tiles of `rows` rows of mX (batch, heads, seqlen, head_dim), whole ones
    unless told how many `columns`, and mX as the descriptor sees it: (seqlen, head_dim, heads, batch).

    The descriptor (CUDA's CUtensorMap) is made on the host and handed to the kernel with its arguments. The
    tensor beside it holds coordinates instead of addresses: a slice of it is where in mX a copy begins, and
    the TMA itself computes the addresses and fills what lies past the end of seqlen, or of head_dim, with
    zeros.
    """
    return _tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, rows, columns, block)


def store_atom(
    mX: cute.Tensor, rows: int, columns: int | None = None, block: int | None = None
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """`load_atom`'s counterpart: the descriptor that stores tiles of `rows` rows; rows and columns past the
    end stay unwritten."""
    return _tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mX, rows, columns, block)


def _tma_atom(
    op: object, mX: cute.Tensor, rows: int, columns: int | None = None, block: int | None = None
) -> tuple[cute.CopyAtom, cute.Tensor]:
    columns = mX.shape[3] if columns is None else columns
    # Selected and not sliced: of 8 rows in three blocks of columns a slice makes the compiler abort.
    one_tile = cute.select(swizzled_tiles(mX.element_type, rows, columns, 1, block), mode=[0, 1])
    mX = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[2, 3, 1, 0]))
    return cpasync.make_tiled_tma_atom(op, mX, one_tile, (rows, columns))


@cute.jit
def partition_tma(atom, mX: cute.Tensor, sX: cute.Tensor, blocks: cutlass.Constexpr = None):
    """(TMA, block) of mX (seqlen, head_dim) in global memory and (TMA, stage) of sX in shared memory: what
    one copy moves.

    Mode TMA is everything of a tile: one instruction of one thread moves it, so there is nothing to share
    out between threads. `tXgX[None, block]` and `tXsX[None, stage]` are then the source and the destination
    of a load, the other way round of a store. In CUDA: the coordinates and the shared address that
    `cp.async.bulk.tensor` takes. Blocks follow each other along the rows of mX, with `blocks` (0, None) along
    its columns; of mX (seqlen, head_dim, heads) they are (block, head).
    """
    rows, columns, _ = sX.shape
    blocks = (None, 0, None)[: cute.rank(mX)] if blocks is None else blocks
    gX = cute.local_tile(mX, (cute.size(rows), cute.size(columns)), blocks)  # (row, column, block)
    # Row and column become one mode, the tile; CTA 0 of a cluster of 1 takes all of it.
    parts = (cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
    tXsX, tXgX = cpasync.tma_partition(atom, 0, cute.make_layout(1), *parts)
    return tXgX, tXsX
