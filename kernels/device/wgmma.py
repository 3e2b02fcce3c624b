"""Accumulator fragments, operands and products of the tensor cores."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

from ..contract import Problem, Work
from .constants import WARPGROUP


def by_row(fragment: cute.Tensor) -> cute.Tensor:
    """An accumulator fragment ((2, 2, N/8), M/64, tiles of N) as (row, column): ((2, M/64), (2, N/8, tiles)),
    without the last mode where there is one tile."""
    ((pair, half, group), block, tiles), ((s_pair, s_half, s_group), s_block, s_tiles) = (
        fragment.shape,
        fragment.layout.stride,
    )
    columns, strides = (pair, group), (s_pair, s_group)
    if tiles != 1:
        columns, strides = (*columns, tiles), (*strides, s_tiles)
    layout = cute.make_layout(((half, block), columns), stride=((s_half, s_block), strides))
    return cute.make_tensor(fragment.iterator, layout)


def operand_a(accumulator: cute.Layout, bits: int = 16) -> cute.Layout:
    """The accumulator ((2, 2, N/8), M/64, 1) seen as operand A of 16 bits, ((2, 2, 2), M/64, N/16), or of 8,
    ((4, 2, 2), M/64, N/32).

    Two groups of 8 columns are 16 of K; within them a thread holds the same elements in the same order. Of 8
    bits four groups are 32, each row's four of two groups neighbours: those of columns 2t, 2t + 1, 2t + 8 and
    2t + 9 become 4t … 4t + 3, so the other operand's K must come in that order.
    """
    ((pair, half, group), block, _), (_, s_block, _) = accumulator.shape, accumulator.stride
    word = 32 // bits  # values of a register
    shape = (pair * word // 2, half, 2), block, group * pair // (2 * word)
    return cute.make_layout(shape, stride=((1, word, 2 * word), s_block, 4 * word))


def exchanged(sX: cute.Tensor) -> cute.Tensor:
    """(row, column, stage) of shared memory as (column, row, stage): the same bytes, for an operand whose
    contiguous mode is not the one summed over."""
    rows, columns, stages = (cute.size(sX, mode=[i]) for i in range(3))
    return cute.composition(sX, cute.make_ordered_layout((columns, rows, stages), order=(1, 0, 2)))


@cute.jit
def multiply(mma, acc, tA, tB, accumulate):
    """Issue acc (+)= A·B as one commit group; tA and tB are (MMA, MMA_M or MMA_N, MMA_K). `accumulate` may be
    dynamic."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)  # its own: `set` on the caller's would escape from the loop
    for k in range_constexpr(cute.size(tB, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate if const_expr(k == 0) else True)
        cute.gemm(atom, acc, tA[None, None, k], tB[None, None, k], acc)
    warpgroup.commit_group()


PAIRS = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}  # PTX's names of a word of two


@dsl_user_op
def _round_here(rX, words, dtype: type, *, loc: object = None, ip: object = None) -> None:
    for i in range(cute.size(words)):
        low, high = (Float32(rX[2 * i + half]).ir_value(loc=loc, ip=ip) for half in range(2))
        ptx = f"cvt.rn.{PAIRS[dtype]}.f32 {{$w0}}, {{$r0}}, {{$r1}};"
        # The upper half comes first, in PTX too. `cute.arch.inline_ptx` would do, but it copies each fp32
        # operand before, and LLVM then puts bwd4's arithmetic at head_dim 256 in another order.
        words[i] = Int32(nvvm.inline_ptx([T.i32()], [high, low], [], ptx, loc=loc, ip=ip))


@cute.jit
def round_fragment(rX, words, dtype: cutlass.Constexpr):
    """fp32 registers rX to `words` of two 16-bit values, in the same order, here and nowhere else.

    An ordinary conversion has no side effect, and LLVM moves it to where its result is used: behind the next
    Q·Kᵀ, through which the fp32 values would have to live.
    """
    _round_here(rX, words, dtype)


def work_on_wgmma(problem: Problem, kernel: object) -> Work:
    """The `Work` of a kernel whose main loop takes one tile of queries and one of keys through both products.

    `kernel` has tile_q, tile_kv, smem_bytes, and consumers if not all its warpgroups multiply.
    """
    q_blocks, heads = math.ceil(problem.seqlen_q / kernel.tile_q), problem.batch * problem.heads
    visible = [
        min((q_block + 1) * kernel.tile_q, problem.seqlen_kv) if problem.causal else problem.seqlen_kv
        for q_block in range(q_blocks)
    ]
    passes = heads * sum(math.ceil(keys / kernel.tile_kv) for keys in visible)
    return Work(
        kernel=type(kernel).__name__,
        unit=f"{kernel.tile_q}×{kernel.tile_kv} tile",
        threads=WARPGROUP * getattr(kernel, "consumers", 1),
        ctas=q_blocks * heads,
        passes=passes,
        trips=(1,),
        ffma=0,
        hbm_bytes=problem.min_bytes / passes,
        smem_bytes=kernel.smem_bytes,
        tensor_flops=4 * kernel.tile_q * kernel.tile_kv * problem.head_dim,
    )
