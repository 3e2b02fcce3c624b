"""Where bwd4's kernel for head_dim up to 128 keeps things: shared memory, registers, operands.

Two consumers have 64 keys each of a tile of 128. A step takes a tile of queries through five products; keys
are rows, so that P and dS come out as operand A of dV and dK, in registers:

    Sᵀ  = K·Qᵀ       (64, d) · (d, tile_q)         K and Q in shared memory
    dPᵀ = V·dOᵀ      (64, d) · (d, tile_q)         V in shared memory, or (keep_V) in registers
    dV += Pᵀ·dO      (64, tile_q) · (tile_q, d)    Pᵀ in registers
    dK += dSᵀ·Q      (64, tile_q) · (tile_q, d)    dSᵀ in registers
    dQ  = dS·K       (64, 128) · (128, 64)         dS of both consumers, in shared memory

dQ sums over the keys of both, so a consumer computes not what its own keys add but half of the result: 64 of
the columns of 64 queries (d = 128; of 96, 48), or all 64 columns of 64 of the 128 queries (d = 64).

At 128 columns Sᵀ and dPᵀ fold LSE and D in: each has one more product (`device.folded`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .contract import Problem
from .device.constants import WARPGROUP
from .device.folded import ONES, folding_mma, folding_products
from .device.fragments import Coordinates, Product, coordinates
from .device.key_tiles import CONSUMER_WARPS, CONSUMERS, ROWS, Rings
from .device.limits import FOLDED_WORDS, TILE_Q, stats_shape, tile_dim
from .device.rings import tma_rings
from .device.rows import in_parts
from .device.tile_order import message_ring
from .device.tma import SWIZZLE_BYTES, allocate_tiles, row_slices, swizzled_tiles, tiles_at
from .device.wgmma import by_row, exchanged, operand_a

TILE_KV = ROWS * CONSUMERS


@dataclass(frozen=True)
class Config:
    """What a head_dim allows; notes/bwd4.md, "What the assembler takes", tells why these."""

    tile_q: int
    early_dV: bool  # issue dV before dPᵀ is waited for, where registers allow, and not only with dK
    keep_V: bool  # V in registers, operand A of dPᵀ, where dV is not early: fewer reads of shared memory
    stages: int = 2  # of Q and dO
    k_stages: int = 2  # so that the next tile's K is loaded while this one is worked on
    parts: int = 1  # of a step's queries, P and dSᵀ of one after the other, where registers are few

    @property
    def blocks(self) -> int:
        return self.tile_q // ROWS  # of 64 queries


CONFIGS = {
    64: Config(TILE_Q[64], False, True),
    96: Config(TILE_Q[96], True, True),
    128: Config(TILE_Q[128], True, False),
}


def dq_columns(head_dim: int) -> int:
    """Columns of dQ that a consumer computes, of 64 queries: all, or half of them."""
    return 64 if head_dim == 64 else head_dim // CONSUMERS


def k_block(head_dim: int) -> int | None:
    """Bytes that the swizzle of K lays out together: of 96 columns 32, since half of them are no multiple of
    what 64 bytes hold."""
    return 32 if head_dim == 96 else None


def config_of(problem: Problem) -> Config:
    config = CONFIGS[tile_dim(problem)]
    if problem.window is not None or problem.softcap > 0:  # whose registers V has otherwise
        config = replace(config, keep_V=False)
    if problem.softcap > 0 and config.blocks > 1:  # P and P∘(1 − tanh²) are both there while dPᵀ is in flight
        config = replace(config, early_dV=True, parts=config.blocks)
    return config


@dataclass(frozen=True)
class Shared:
    """Shared memory. Tiles of 16-bit elements lie as the TMA's 128-byte swizzle puts them."""

    K: cute.Tensor  # (key, head_dim, consumer + 2 · stage)
    V: cute.Tensor  # (key, head_dim, consumer)
    Q: cute.Tensor  # (query, head_dim, stage)
    dO: cute.Tensor  # (query, head_dim, stage)
    dS: cute.Tensor  # (key, query, consumer + 2 · parity of the step)
    dQ: cute.Tensor  # (register, thread, quad, consumer) fp32: as its accumulator holds it; or `rounded_dQ`
    stats: cute.Tensor  # (query, LSE or D, block of 64 queries, stage) fp32; or (word, query, …) of `folded`
    ones: cute.Tensor | None  # what is on the keys' side of these, bf16
    tile: cute.Tensor  # (1 + words,) int32: valid, and the place of a tile of keys
    places: cute.Tensor | None  # (consumer warp,) int32, where keys are in parts: which part the warp has


def allocate(
    smem: SmemAllocator, config: Config, head_dim: int, dtype: type, has_parts: bool, words: int,
    listeners: int, folds: bool,
) -> "tuple[Shared, RingsAndOwn]":  # fmt: skip
    """Shared memory, and the barriers in it; a tile's place has so many words, which `listeners` threads hear
    of. The tiles come first; where LSE and D are folded in they come last, since compute-sanitizer's memcheck
    stops a kernel whose operands of `folded` lie at the end (notes/bwd4_log.md). That is all that a CTA may
    have: before the tiles, which begin at a multiple of 1 KiB, 432 bytes are left."""
    rings = lambda: make_rings(smem, config, head_dim, listeners, folds)
    tiles = lambda: _allocate_tiles(smem, config, head_dim, dtype)
    small = lambda: _allocate_small(smem, config, has_parts, words, folds)
    if folds:
        barriers, numbers = rings(), small()
        return Shared(**numbers, **tiles()), barriers
    shared = Shared(**tiles(), **small())
    return shared, rings()


def _allocate_tiles(smem: SmemAllocator, config: Config, head_dim: int, dtype: type) -> dict[str, object]:
    quads = cute.make_layout((4, WARPGROUP, dq_columns(head_dim) // 8, CONSUMERS))
    return {
        "K": allocate_tiles(smem, dtype, ROWS, head_dim, CONSUMERS * config.k_stages, k_block(head_dim)),
        "V": allocate_tiles(smem, dtype, ROWS, head_dim, CONSUMERS),
        "Q": allocate_tiles(smem, dtype, config.tile_q, head_dim, config.stages),
        "dO": allocate_tiles(smem, dtype, config.tile_q, head_dim, config.stages),
        "dS": allocate_tiles(smem, dtype, ROWS, config.tile_q, CONSUMERS * 2),
        "dQ": smem.allocate_tensor(Float32, quads, SWIZZLE_BYTES),
    }


def _allocate_small(
    smem: SmemAllocator, config: Config, has_parts: bool, words: int, folds: bool
) -> dict[str, object]:
    of_block = (FOLDED_WORDS, ROWS) if folds else (ROWS, 2)
    stats = cute.make_layout((*of_block, config.blocks, config.stages))
    return {
        "stats": smem.allocate_tensor(Float32, stats, 128),
        "ones": smem.allocate_tensor(BFloat16, cute.make_layout(ONES), 128) if folds else None,
        "tile": smem.allocate_tensor(Int32, cute.make_layout(1 + words), 16),
        "places": smem.allocate_tensor(Int32, cute.make_layout(CONSUMER_WARPS), 16) if has_parts else None,
    }


def shared_bytes(config: Config, head_dim: int, has_parts: bool, words: int, folds: bool) -> int:
    """What `allocate` takes."""
    rows = TILE_KV * (config.k_stages + 1) + 2 * config.stages * config.tile_q  # K, V, Q and dO
    ds = 2 * TILE_KV * config.tile_q * 2
    dq = TILE_KV * dq_columns(head_dim) * 4
    tiles = rows * head_dim * 2 + ds + dq
    stats = config.blocks * config.stages * math.prod(stats_shape(folds)) * 4
    barriers = 2 * (2 * config.stages + config.k_stages + 2) * 8 + CONSUMERS * 8
    aligned = 16 if has_parts else 8  # to so many bytes is what follows a tile's words, places or a barrier
    tile = math.ceil(4 * (1 + words) / aligned) * aligned + 4 * CONSUMER_WARPS * has_parts
    if folds:
        before = math.ceil(barriers / 128) * 128 + stats + ONES * 2 + tile
        return math.ceil(before / SWIZZLE_BYTES) * SWIZZLE_BYTES + tiles
    return tiles + stats + tile + barriers


@dataclass(frozen=True)
class RingsAndOwn(Rings):
    """And the barriers of this kernel alone. `bwd4.Backward` has the table of who comes."""

    own: cute.Pointer  # a barrier for each consumer: its dK and dV are in shared memory


def make_rings(
    smem: SmemAllocator, config: Config, head_dim: int, listeners: int, folds: bool
) -> RingsAndOwn:
    """The barriers, in the order of `RingsAndOwn`. Those of `own` are not initialised."""
    q_bytes, kv_bytes = config.tile_q * head_dim * 2, TILE_KV * head_dim * 2
    stats_bytes = config.blocks * math.prod(stats_shape(folds)) * 4
    loads = tma_rings(
        smem,
        (config.stages, q_bytes + stats_bytes, CONSUMER_WARPS),
        (config.stages, q_bytes, CONSUMER_WARPS),
        (config.k_stages, kv_bytes, CONSUMER_WARPS),
        (1, kv_bytes, CONSUMER_WARPS),
    )
    return RingsAndOwn(*loads, message_ring(smem, listeners), smem.allocate_array(Int64, CONSUMERS))


@dataclass(frozen=True)
class Consumer:
    """What a step needs beside its thread's fragments."""

    index: Int32
    other: Int32  # the other consumer
    thread: Int32  # in the consumer
    shared: Shared
    rings: RingsAndOwn


def tiled_mmas(config: Config, head_dim: int, dtype: type, folds: bool) -> list[cute.TiledMma]:
    """Of Sᵀ, of dPᵀ, of dV and dK, of dQ: a warpgroup's products of 64 rows; and, if LSE and D are
    folded in, of that."""
    source, K, MN = warpgroup.OperandSource, OperandMajorMode.K, OperandMajorMode.MN
    mmas = [
        make_trivial_tiled_mma(dtype, dtype, a, b, Float32, (1, 1, 1), (ROWS, n), place)
        for a, b, n, place in (
            (K, K, config.tile_q, source.SMEM),  # Sᵀ = K·Qᵀ
            (K, K, config.tile_q // config.parts, source.RMEM if config.keep_V else source.SMEM),  # dPᵀ
            (K, MN, head_dim, source.RMEM),  # dV = Pᵀ·dO, dK = dSᵀ·Q
            (MN, MN, dq_columns(head_dim), source.SMEM),  # dQ = dS·K
        )
    ]
    return [*mmas, folding_mma(ROWS, config.tile_q)] if folds else mmas


@dataclass(frozen=True)
class PartOfQueries:
    """Some of a step's queries, whose P and dSᵀ are made at once: all of them, or 64."""

    S: cute.Tensor  # `Fragments.S.acc` of these queries
    dP: Product  # V's last mode has been sliced; of dO: stage, or (part, stage)
    scores: cute.Tensor  # S as (key, query)
    dscores: cute.Tensor  # dP.acc as (key, query)
    words_P: cute.Tensor
    words_dS: cute.Tensor
    tile_q: int  # queries of a step
    index: int = 0
    count: int = 1  # of parts

    def place(self, stage: Int32) -> Int32 | tuple[int, Int32]:
        """The last mode of dP's operand dO."""
        return stage if self.count == 1 else (self.index, stage)

    def first_query(self, q_tile: Int32) -> Int32:
        first = q_tile * self.tile_q
        return first if self.index == 0 else first + ROWS * self.index

    def own(self, sX: cute.Tensor) -> cute.Tensor:
        """Of sX (query, block) this part's blocks."""
        if self.count == 1:
            return sX
        return cute.local_tile(sX, (ROWS, cute.size(sX, mode=[1]) // self.count), (0, self.index))


@dataclass(frozen=True)
class Fragments:
    """What a thread of a consumer holds, and its consumer's operands.

    The scores, (key, query) = (2, tile_q/4): a thread has two rows of Sᵀ and dPᵀ, and the same elements of
    both. P replaces S in its registers, and dS replaces dP. Of fp32 registers at head_dim 128, dK and dV take
    64 each, all the time; S, dP and dQ 32 each: S and dP, then dQ and the next S, are live at once.
    """

    S: Product  # last mode of K: consumer + 2 · stage; of Q: stage
    dP: Product  # V has none; of dO: stage
    LSE: Product | None  # what S ends with, if LSE and D are folded in; last mode of the statistics: stage
    D: Product | None  # what dP begins with
    dV: Product  # P: registers; of dO: stage
    dK: Product  # dS: registers; of Q: stage
    dQ: Product  # of dS: block of 64 queries, fastest, in `Shared.dS`'s; of K: of 64 columns in `Shared.K`'s
    scores: cute.Tensor  # S.acc as (key, query)
    dscores: cute.Tensor  # dP.acc as (key, query)
    places: Coordinates  # of both
    words_P: cute.Tensor  # (tile_q/4,) int32: P rounded, two values a word; dV's operand A is a view of it
    words_dS: cute.Tensor  # the same of dS, for dK
    dS_out: cute.Tensor  # words_dS as 16-bit values in the accumulator's layout, which stmatrix takes
    copy_dS: cute.TiledCopy  # registers to shared memory by stmatrix
    tSsdS: cute.Tensor  # (CPY, CPY_M, CPY_N, consumer + 2 · parity): where copy_dS puts them
    copy_dKV: cute.TiledCopy  # the same for dV and dK
    copy_V: cute.TiledCopy | None  # shared memory to dP's operand A by ldmatrix, where V stays in registers
    parts: list[PartOfQueries]  # `Config.parts`


def cut(words: cute.Tensor, parts: int) -> list[cute.Tensor]:
    """So many equal parts of registers, one behind the other."""
    layout = cute.make_layout(cute.size(words) // parts)
    return [cute.make_tensor(words.iterator + p * cute.size(layout), layout) for p in range(parts)]


def fragments(
    config: Config, mmas: list[cute.TiledMma], shared: Shared, dtype: type, consumer: Int32, thread: Int32
) -> Fragments:
    """A consumer's fragments. In another order the same lines may give other machine code."""
    d, tile_q = cute.size(shared.K, mode=[1]), config.tile_q
    mma_s, mma_p, mma_kv, mma_q, *mma_fold = mmas
    thr_s, thr_p, thr_kv, thr_q = [mma.get_slice(0) for mma in mmas[:4]]
    rS, rdP = [
        cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, tile_q)), Float32) for _ in range(2)
    ]  # ((2, 2, tile_q/8), 1, 1)
    rdK, rdV = [
        cute.make_rmem_tensor(mma_kv.partition_shape_C((ROWS, d)), Float32) for _ in range(2)
    ]  # ((2, 2, d/8), 1, 1)
    rdQ = cute.make_rmem_tensor(
        mma_q.partition_shape_C((ROWS, dq_columns(d))), Float32
    )  # ((2, 2, 8), 1, 1), of 96 columns ((2, 2, 6), 1, 1)
    words_P, words_dS = [
        cute.make_rmem_tensor(cute.make_layout(cute.size(rS) // 2), Int32) for _ in range(2)
    ]  # (tile_q/4,)
    scores, dscores = by_row(rS), by_row(rdP)  # (key, query) = ((2, 1), (2, tile_q/8))
    tP, tdS = [
        cute.make_tensor(cute.recast_ptr(words.iterator, None, dtype), operand_a(rS.layout))
        for words in (words_P, words_dS)
    ]  # (MMA, MMA_M, MMA_K) = ((2, 2, 2), 1, tile_q/16)
    dS_out = cute.make_tensor(tdS.iterator, rS.layout)  # ((2, 2, tile_q/8), 1, 1)
    tSK = mma_s.make_fragment_A(thr_s.partition_A(shared.K))  # (MMA, 1, d/16, consumer + 2 · stage)
    tSQ = mma_s.make_fragment_B(thr_s.partition_B(shared.Q))  # (MMA, 1, d/16, stage)
    dO_of_dP = shared.dO if config.parts == 1 else row_slices(shared.dO, tile_q // config.parts)
    tPdO = mma_p.make_fragment_B(thr_p.partition_B(dO_of_dP))  # (MMA, 1, d/16, stage), or (part, stage) last
    copy_V = None
    if config.keep_V:
        tPV = mma_p.make_fragment_A(mma_p.partition_shape_A((ROWS, d)))  # ((2, 2, 2), 1, d/16)
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype)
        copy_V = cute.make_tiled_copy_A(ldmatrix, mma_p).get_slice(thread)
    else:
        tPV = mma_p.make_fragment_A(thr_p.partition_A(shared.V))[None, None, None, consumer]  # (MMA, 1, d/16)
    tKQ, tVdO = [
        mma_kv.make_fragment_B(thr_kv.partition_B(exchanged(sX))) for sX in (shared.Q, shared.dO)
    ]  # (MMA, 1, tile_q/16, stage)
    # dS and K once more, as tiles of 64 columns, which is how the swizzle lays them out: dQ is divided by
    # those columns between the consumers. Of 96 columns K's come 16 by 16 (`k_block`), and 48 are a tile.
    blocks = config.blocks * CONSUMERS * 2
    sdS = cute.make_tensor(shared.dS.iterator, swizzled_tiles(dtype, ROWS, 64, blocks).outer)
    tQdS = mma_q.make_fragment_A(thr_q.partition_A(exchanged(sdS)))  # (MMA, 1, 64/16, block + …)
    own = dq_columns(d)
    columns = d // own * CONSUMERS * config.k_stages
    sK = cute.make_tensor(shared.K.iterator, swizzled_tiles(dtype, ROWS, own, columns, k_block(d)).outer)
    tQK = mma_q.make_fragment_B(thr_q.partition_B(exchanged(sK)))  # (MMA, 1, 64/16, column block + …)
    places = coordinates(mma_s, (ROWS, tile_q), thread)
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    copy_dS, copy_dKV = [cute.make_tiled_copy_C(stmatrix, mma).get_slice(thread) for mma in (mma_s, mma_kv)]
    dP = Product(mma_p, rdP, tPV, tPdO)
    of_LSE = of_D = None
    if mma_fold:
        assert config.parts == 1, "what is folded in is of all of a step's queries"
        shape = ROWS, tile_q, config.stages
        of_LSE, of_D = folding_products(*mma_fold, shape, rS, rdP, shared.ones, shared.stats)
    parts = [PartOfQueries(rS, dP, scores, dscores, words_P, words_dS, tile_q)]
    if config.parts > 1:
        count = config.parts
        accumulators = [in_parts(rX, count) for rX in (rS, rdP)]
        words = [cut(rX, count) for rX in (words_P, words_dS)]
        parts = []
        for i, (own_S, own_dP, *own_words) in enumerate(zip(*accumulators, *words)):
            of_dP = Product(mma_p, own_dP, tPV, tPdO)
            own = own_S, of_dP, by_row(own_S), by_row(own_dP), *own_words
            parts.append(PartOfQueries(*own, tile_q, i, count))
    return Fragments(
        S=Product(mma_s, rS, tSK, tSQ),
        dP=dP,
        LSE=of_LSE,
        D=of_D,
        dV=Product(mma_kv, rdV, tP, tVdO),
        dK=Product(mma_kv, rdK, tdS, tKQ),
        dQ=Product(mma_q, rdQ, tQdS, tQK),
        scores=scores,
        dscores=dscores,
        places=places,
        words_P=words_P,
        words_dS=words_dS,
        dS_out=dS_out,
        copy_dS=copy_dS,
        tSsdS=copy_dS.partition_D(shared.dS),
        copy_dKV=copy_dKV,
        copy_V=copy_V,
        parts=parts,
    )


def rounded_dQ(sdQ: cute.Tensor, dtype: type, head_dim: int) -> cute.Tensor:
    """`Shared.dQ` as the TMA stores it: (query, column, 2 · consumer), half of a consumer's part."""
    columns, tiles = dq_columns(head_dim), 2 * CONSUMERS
    return tiles_at(sdQ.iterator, dtype, ROWS, columns, tiles, k_block(head_dim))


def leave_dQ(f: Fragments, x: Consumer, scale: Float32 | float | None = None) -> None:
    """dQ of a step to shared memory, for the warps that add it; with a `scale` dQ itself, rounded."""
    if scale is None:
        for quad in range(cute.size(f.dQ.acc) // 4):
            registers = cute.make_tensor(f.dQ.acc.iterator + 4 * quad, cute.make_layout(4))
            cute.autovec_copy(registers, x.shared.dQ[None, x.thread, quad, x.index])
        return
    dtype, head_dim = x.shared.K.element_type, cute.size(x.shared.K, mode=[1])
    rdQ16 = cute.make_rmem_tensor(f.dQ.acc.layout, dtype)
    rdQ16.store((f.dQ.acc.load() * scale).to(dtype))
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    copy = cute.make_tiled_copy_C(stmatrix, f.dQ.mma).get_slice(x.thread)
    tQsQ = copy.partition_D(rounded_dQ(x.shared.dQ, dtype, head_dim))  # (CPY, CPY_M, CPY_N, 2 · consumer)
    cute.copy(copy, copy.retile(rdQ16), tQsQ[None, None, None, 2 * x.index])


def issue_dQ(
    f: Fragments, config: Config, x: Consumer, k_get, parity, wait: Callable[[], None], own_first: bool
) -> None:
    """Issue dQ = dS·K over the keys of both consumers, as one commit group. At head_dim 128: of the one block
    of 64 queries the consumer's 64 columns, at 96 its 48; at 64: all columns of the consumer's block. `wait`
    is for the other's dS; with `own_first` what this consumer's own gives comes before it. That is all there
    behind the turn, at whose barrier each of its threads arrives behind its own fence."""
    d = cute.size(f.dV.acc) * WARPGROUP // ROWS
    columns = d // dq_columns(d)  # tiles beside each other as the product takes K
    if not own_first:
        wait()
    warpgroup.fence()
    atom = cute.make_mma_atom(f.dQ.mma.op)  # its own, as in `multiply`
    own_block, own_column = (x.index, 0) if config.blocks == CONSUMERS else (0, x.index)
    for i, c in enumerate((x.index, x.other) if own_first else range(CONSUMERS)):
        if own_first and i == 1:
            wait()
        part = own_block + config.blocks * (c + CONSUMERS * parity)
        column = own_column + columns * (c + CONSUMERS * k_get.index)
        for k in range(ROWS // 16):
            atom.set(warpgroup.Field.ACCUMULATE, i > 0 or k > 0)
            tA, tB = f.dQ.A[None, None, k, part], f.dQ.B[None, None, k, column]
            cute.gemm(atom, f.dQ.acc, tA, tB, f.dQ.acc)
    warpgroup.commit_group()
