"""Products of one warp (mma.sync, 16 rows): Q·Kᵀ and P·V of 16 keys at a time, of 16-bit or of e4m3 keys.

A thread l of a warp has, of an accumulator's 16 rows, rows l/4 and l/4 + 8, and of each 8 columns columns
2·(l mod 4) and the next (PTX ISA, fragments of mma.m16n8k16).

e4m3 keys and values are converted in registers to fp16, which has all their values; Q and P are then fp16
too. `ldmatrix` moves 16-bit units, here two codes each, and instead of shuffling them into the order of an
operand the other side of the product takes theirs:
    Q·Kᵀ    a thread gets four codes of a key, of columns 4t … 4t + 3 of 16 (t = l mod 4). The operand has
            columns 2t, 2t + 1, 2t + 8, 2t + 9 in their place: Q is read in the same order.
    P·V     transposed it gets two columns of two keys, 2n and 2n + 1 of 16 (n = l / 4). One byte permutation
            makes them a word of each column; even columns are one product of 8, odd ones another. A thread
            so ends up with columns 4t … 4t + 3 of O (`columns_of`).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, range_constexpr
from cutlass.cute.nvgpu import warp

from .rows import LANES
from .tma import row_slices, swizzled_tiles

TILE_Q = 16  # rows of a product
GROUP = 16  # keys
HALVES = 2  # rows of a thread


@dataclass(frozen=True)
class WarpProducts:
    """What both products of a warp need; frozen, as `fragments` says."""

    mma: cute.TiledMma
    head_dim: int
    eight_bits: bool
    keep_q: bool  # in registers; otherwise its fragments are read anew for each group of keys
    sQ: cute.Tensor  # (16 rows, head_dim) of this warp
    copies: tuple  # by ldmatrix, of Q, K and V
    sources: tuple  # of these copies: (CPY, CPY_M, CPY_K, group of 16 keys)
    rQ: cute.Tensor  # (MMA, 1, MMA_K)
    rK: cute.Tensor  # (MMA, 2, MMA_K), as it lies in shared memory
    rV: cute.Tensor  # (MMA, columns / 8, 1), the same

    def load_q(self) -> None:
        if self.eight_bits:
            for k in range(self.head_dim // 16):
                self.load_q_column(k)
        else:
            cute.copy(self.copies[0], self.sources[0], self.copies[0].retile(self.rQ))

    def load_q_column(self, k: int) -> None:
        """The k-th 16 columns of Q."""
        if not self.eight_bits:
            rQ = self.copies[0].retile(self.rQ)
            cute.copy(self.copies[0], self.sources[0][None, None, k], rQ[None, None, k])
            return
        lane = cute.arch.lane_idx()
        four = cute.make_rmem_tensor(cute.make_layout(4), self.sQ.element_type)
        for r in range(HALVES):
            row = self.sQ[lane // LANES + r * (TILE_Q // HALVES), None]
            cute.autovec_copy(cute.local_tile(row, (4,), (k * LANES + lane % LANES,)), four)
            x = four.load().to(Float32).to(Float16)
            for i in range(4):
                self.rQ[(i % 2, r, i // 2), 0, k] = x[i]

    def multiply_qk(self, rS: cute.Tensor, group: Int32) -> None:
        """S (16 rows, 16 keys) += Q·Kᵀ of a group of keys."""
        copy, source, words = self.copies[1], self.sources[1], self.copies[1].retile(self.rK)
        if not self.eight_bits:
            for k in range(self.head_dim // 16):
                if not self.keep_q:
                    self.load_q_column(k)
                cute.copy(copy, source[None, None, k, group], words[None, None, k])
                cute.gemm(self.mma, rS, self.rQ[None, None, k], self.rK[None, None, k], rS)
            return
        codes = cute.recast_tensor(self.rK, Int32)
        wide = operand_b()
        for k in range(self.head_dim // 32):
            cute.copy(copy, source[None, None, k, group], words[None, None, k])
            for half in range(2):
                if not self.keep_q:
                    self.load_q_column(2 * k + half)
                for n in range(2):
                    low, high = widened(codes[(0, half), n, k])
                    put_words(wide, n, low, high)
                cute.gemm(self.mma, rS, self.rQ[None, None, 2 * k + half], wide, rS)

    def multiply_pv(self, rO: cute.Tensor, rP: cute.Tensor, group: Int32) -> None:
        """O (16 rows, head_dim) += P·V of a group of keys, 16 columns at a time."""
        copy, source, words = self.copies[2], self.sources[2], self.copies[2].retile(self.rV)
        # Of 16 keys the accumulator's registers are, in their order, operand A's.
        rP = cute.make_tensor(rP.iterator, cute.make_layout(((2, 2, 2), 1)))
        pieces = self.head_dim // 16
        if not self.eight_bits:
            for c in range(pieces):
                cute.copy(copy, source[None, c, 0, group], words[None, c, 0])
                rV = cute.make_tensor(self.rV.iterator + 8 * c, OPERAND_B())
                rO_c = part_of(rO, c, pieces)
                cute.gemm(self.mma, rO_c, rP, rV, rO_c)
            return
        codes = cute.recast_tensor(self.rV, Int32)
        wide = operand_b()
        for c in range(pieces):
            if c % 2 == 0:
                cute.copy(copy, source[None, c // 2, 0, group], words[None, c // 2, 0])
            even, odd = zip(*(widened(by_column(codes[(0, half), c, 0])) for half in range(2)))
            put_words(wide, 0, *even)
            put_words(wide, 1, *odd)
            rO_c = part_of(rO, c, pieces)
            cute.gemm(self.mma, rO_c, rP, wide, rO_c)


def OPERAND_B() -> cute.Layout:
    """Operand B of 16 columns and 16 of what is summed over: ((2, 2), 2), contiguous."""
    return cute.make_layout(((2, 2), 2), stride=((1, 2), 4))


def operand_b() -> cute.Tensor:
    return cute.make_rmem_tensor(OPERAND_B(), Float16)


def put_words(operand: cute.Tensor, n: int, low: Int32, high: Int32) -> None:
    """The two words of the n-th 8 columns of operand B."""
    words = cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Int32), cute.make_layout(4))
    words[2 * n], words[2 * n + 1] = low, high


def widened(codes: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 as two words of two fp16 each, exactly."""
    ptx = """{ .reg .b16 low, high;
        mov.b32 {low, high}, {$r0};
        cvt.rn.f16x2.e4m3x2 {$w0}, low;
        cvt.rn.f16x2.e4m3x2 {$w1}, high; }"""
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32, Int32], read_only_args=[codes])


def by_column(codes: Int32) -> Int32:
    """Two columns of two keys, the keys next to each other: bytes 0, 2, 1, 3."""
    ptx = "prmt.b32 {$w0}, {$r0}, {$r0}, 0x3120;"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[codes])


def warp_products(
    dtype: type, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, eight_bits: bool, keep_q: bool
) -> tuple[WarpProducts, cute.Tensor, cute.Tensor]:
    """The products of a warp on its 16 rows sQ and on tiles sK and sV (key, column, tile); and K and V as
    (key in its group, column, group). Columns of e4m3 are counted in 16-bit pairs."""
    lane = cute.arch.lane_idx()
    head_dim = cute.size(sQ, mode=[1])
    mma = cute.make_tiled_mma(
        warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)), permutation_mnk=(TILE_Q, GROUP, 16)
    )
    thread = mma.get_slice(lane)
    plain, transposed = (cute.make_copy_atom(warp.LdMatrix8x8x16bOp(t, 4), dtype) for t in (False, True))
    copy_q = cute.make_tiled_copy_A(plain, mma).get_slice(lane)
    copy_k, copy_v = (cute.make_tiled_copy_B(atom, mma).get_slice(lane) for atom in (plain, transposed))
    if eight_bits:
        sK, sV = (in_pairs(sX, dtype) for sX in (sK, sV))
    sK, sV = row_slices(sK, GROUP), row_slices(sV, GROUP)
    sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
    x = WarpProducts(
        mma=mma,
        head_dim=head_dim,
        eight_bits=eight_bits,
        keep_q=keep_q,
        sQ=sQ,
        copies=(copy_q, copy_k, copy_v),
        sources=(
            None if eight_bits else copy_q.partition_S(sQ),
            copy_k.partition_S(sK),
            copy_v.partition_S(sVt),
        ),
        rQ=cute.make_rmem_tensor(mma.partition_shape_A((TILE_Q, head_dim)), dtype),
        rK=mma.make_fragment_B(thread.partition_B(sK[None, None, 0])),
        rV=mma.make_fragment_B(thread.partition_B(sVt[None, None, 0])),
    )
    return x, sK, sV


def in_pairs(sX: cute.Tensor, dtype: type) -> cute.Tensor:
    """(row, column, tile) of 8 bits as 16-bit units. `recast_tensor` would lose the swizzle."""
    swizzle = swizzled_tiles(sX.element_type, *(cute.size(sX, mode=[i]) for i in range(3))).inner
    pairs = cute.recast_ptr(sX.iterator, swizzle, dtype)
    return cute.make_tensor(pairs, cute.recast_layout(dtype.width, sX.element_type.width, sX.layout))


def by_half(fragment: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2), 1, N/8) as (half, (2, N/8)): a thread's two rows."""
    ((pair, half), _, groups), ((s_pair, s_half), _, s_groups) = fragment.shape, fragment.layout.stride
    layout = cute.make_layout((half, (pair, groups)), stride=(s_half, (s_pair, s_groups)))
    return cute.make_tensor(fragment.iterator, layout)


def part_of(fragment: cute.Tensor, part: int, parts: int) -> cute.Tensor:
    """An accumulator ((2, 2), 1, N/8) cut along N."""
    own, one, groups = fragment.shape
    layout = cute.make_layout((own, one, groups // parts), stride=fragment.layout.stride)
    return cute.make_tensor(fragment.iterator + part * cute.size(layout), layout)


def columns_of(rO: cute.Tensor, half: int, unit: int, eight_bits: bool) -> list[Float32]:
    """What a thread has of a row of O, of its `unit`-th 16 columns: of e4m3 V columns 4t … 4t + 3; otherwise
    2t, 2t + 1 and 2t + 8, 2t + 9."""
    order = ((0, 0), (0, 1), (1, 0), (1, 1)) if eight_bits else ((0, 0), (1, 0), (0, 1), (1, 1))
    return [rO[(pair, half), 0, 2 * unit + n] for pair, n in order]


@cute.jit
def hide(S, limit, low, key, windowed: cutlass.Constexpr):
    """−∞ for keys that a row does not see: from its `limit` on, and with a window those before `low`. S is of
    keys from `key` on."""
    first = key + cute.arch.lane_idx() % LANES * 2
    for r in range_constexpr(HALVES):
        for c in range_constexpr(cute.size(S, mode=[1])):
            at = first + c // 2 * 8 + c % 2
            seen = at < limit[r]
            if windowed:
                seen = seen & (at >= low[r])
            S[r, c] = S[r, c] if seen else -Float32.inf
