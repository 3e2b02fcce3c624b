"""The vocabulary kernel files share: how a kernel is compiled and fed, never what it computes.

Each helper names the stage that introduced it. Main loop, softmax and schedule stay in the kernel files.
"""

import math
import tempfile

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync, PipelineTmaAsync, PipelineUserType

from harness.problem import Problem
from harness.stage import Work

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
VECTOR = 8  # 16-bit elements in one 16-byte access, the widest a thread can make
GRID_YZ_MAX = 65535  # CUDA's limit on gridDim.y and gridDim.z
WARP = 32
WARPGROUP = 128  # four warps that issue a WGMMA together
PRODUCER, CONSUMER = PRODUCER_CONSUMER = PipelineUserType.Producer, PipelineUserType.Consumer
ROWS_MAX = 2**31 - 1  # row indices are 32-bit; addresses are 64-bit


# ---- introduced by k1: compiling and launching without tensors ---------------------------------------------


def refuse_unless_plain(problem: Problem, direction: str = "fwd") -> str | None:
    """Why a stage without GQA, unequal lengths, other types and other head dims refuses `problem`, or
    None."""
    if problem.direction != direction:
        computes = {"fwd": "forward", "bwd": "backward"}[direction]
        return f"computes the {computes} pass, not {problem.direction!r}"
    if problem.dtype != "bfloat16":
        return f"takes bfloat16, not {problem.dtype}"
    if problem.head_dim not in (64, 128):
        return f"takes head_dim 64 or 128, not {problem.head_dim}"
    if problem.kv_heads != problem.heads:
        return f"takes as many key/value heads as query heads, not {problem.kv_heads} for {problem.heads}"
    if problem.seqlen_q != problem.seqlen_kv:
        return f"takes equal query and key lengths, not {problem.seqlen_q} and {problem.seqlen_kv}"
    if problem.batch * problem.heads * problem.seqlen_q > ROWS_MAX:
        return f"takes at most {ROWS_MAX} rows (batch·heads·seqlen), its row index being 32-bit"
    return None


def fake_qkvo(head_dim: int) -> tuple[object, ...]:
    """Stand-ins for q, k, v, o: (batch, heads, seqlen, head_dim) bf16, 16-byte aligned, any strides but the
    last.

    The launcher checks a real tensor against its stand-in: type, device, extents, the divisibility of the
    strides and the alignment of the pointer. Reusing a symbol makes it check that the extents agree.
    """
    extents = tuple(cute.sym_int() for _ in range(3))
    return tuple(_fake_rows(cutlass.BFloat16, (*extents, head_dim)) for _ in range(4))


def _fake_rows(dtype: type, shape: tuple[object, ...]) -> object:
    strides = tuple(cute.sym_int64(divisibility=VECTOR) for _ in shape[:-1])
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=2 * VECTOR)


def fake_fp32(like: object, *trailing: object, vector: int = 1) -> object:
    """A stand-in for an fp32 tensor (batch, heads, seqlen, *trailing) beside q, k, v, o with a unit last
    stride.

    `vector` elements are read or written at once: strides and address must allow it.
    """
    shape = (*like.shape[:3], *trailing)
    strides = tuple(cute.sym_int64(divisibility=vector) for _ in shape[:-1])
    return make_fake_tensor(Float32, shape, (*strides, 1), assumed_align=4 * vector)


def compile_for_torch(kernel: object, *stand_ins: object) -> object:
    """Compile `kernel(*stand_ins, stream)` for sm_90a. Needs no GPU; the cubin is kept on the result.

    The result is called with torch tensors and enqueues on PyTorch's current stream.
    """
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as scratch:  # the keep flags also write files
        options = f"--enable-tvm-ffi --keep-cubin --dump-dir={scratch}"
        return cute.compile(kernel, *stand_ins, stream, options=options)


# ---- introduced by fa1: heads and batches on the grid, 16-byte tiles in shared memory ----------------------


def refuse_heads_on_grid(problem: Problem) -> str | None:
    """Why a stage whose grid is (row blocks, heads, batch) refuses `problem`, or None."""
    if max(problem.batch, problem.heads) > GRID_YZ_MAX:
        return f"takes at most {GRID_YZ_MAX} batches and heads: they are grid dimensions y and z"
    return None


def tile_layout(rows: int, head_dim: int) -> cute.Layout:
    """(row, chunk, element): a row-major bf16 tile seen as 16-byte chunks."""
    return cute.make_layout((rows, head_dim // VECTOR, VECTOR), stride=(head_dim, VECTOR, 1))


@cute.jit
def swizzle(row: Int32, chunk: Int32):
    """Where chunk `chunk` of row `row` is kept. Without it the rows a warp reads together share 4 of 32
    banks."""
    return chunk ^ (row & 7)


@cute.jit
def load_tile(mX: cute.Tensor, sX: cute.Tensor, block: Int32, threads: cutlass.Constexpr):
    """Copy rows [block·R, block·R + R) of mX (seqlen, head_dim) into sX (R, chunk, 8); rows past the end are
    zero.

    Zeros, not leftovers: what lies past the sequence may be NaN, and 0·NaN in P·V is NaN.
    """
    tidx, _, _ = cute.arch.thread_idx()
    rows, chunks, _ = sX.shape
    rX = cute.make_rmem_tensor(cute.make_layout(VECTOR), mX.element_type)
    for i in range_constexpr(rows * chunks // threads):
        row, chunk = (tidx + i * threads) // chunks, (tidx + i * threads) % chunks
        rX.fill(0)
        if block * rows + row < mX.shape[0]:
            gX = cute.local_tile(mX[block * rows + row, None], (VECTOR,), (chunk,))
            cute.autovec_copy(gX, rX)
        cute.autovec_copy(rX, sX[row, swizzle(row, chunk), None])


@cute.jit
def widen(x: cute.TensorSSA):
    """8 bf16 to 8 fp32 at one integer instruction each: a bf16 is the upper half of an fp32.

    The DSL's `.to(Float32)` takes three for every two elements, and two fifths of what these kernels issue is
    widening.
    """
    words = x.bitcast(Int32)
    # The mask is written as an Int32: 0xFFFF0000 would make the words 64-bit, and bitcast then spreads each
    # over two.
    low, high = (words << 16).bitcast(Float32), (words & -0x10000).bitcast(Float32)
    wide = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
    for i in range_constexpr(VECTOR // 2):
        wide[2 * i] = low[i]
        wide[2 * i + 1] = high[i]
    return wide


# ---- introduced by k3: tiles that the TMA writes with its 128-byte swizzle ---------------------------------

SWIZZLE_COLUMNS = 64  # 16-bit elements in the 128 bytes that the swizzle permutes
SWIZZLE_BYTES = 1024  # the 128-byte swizzle repeats every 8 rows of 128 bytes: regions start on its period


def swizzled_tiles(dtype: object, rows: int, head_dim: int, stages: int) -> cute.ComposedLayout:
    """(row, head_dim, stage) in shared memory as the TMA's 128-byte swizzle lays it out: 64 columns a
    block."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)  # 8 rows × 64
    return cute.tile_to_shape(atom, (rows, head_dim, stages), order=(0, 1, 2))


def swizzled_chunks(rows: int, head_dim: int, stages: int) -> cute.Layout:
    """(row, chunk, element, stage) of `swizzled_tiles`: what `swizzle(row, chunk)` addresses by hand."""
    chunks, blocks = SWIZZLE_COLUMNS // VECTOR, head_dim // SWIZZLE_COLUMNS
    shape = (rows, (chunks, blocks), VECTOR, stages)
    chunk_stride = (VECTOR, rows * SWIZZLE_COLUMNS)
    return cute.make_layout(shape, stride=(SWIZZLE_COLUMNS, chunk_stride, 1, rows * head_dim))


def allocate_tiles(smem: object, dtype: object, rows: int, head_dim: int, stages: int) -> cute.Tensor:
    """(row, head_dim, stage): shared memory for `stages` tiles as the TMA writes and WGMMA reads them."""
    layout = swizzled_tiles(dtype, rows, head_dim, stages)
    return smem.allocate_tensor(dtype, layout.outer, SWIZZLE_BYTES, layout.inner)


def load_atom(mX: cute.Tensor, rows: int) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The TMA descriptor that loads tiles of `rows` rows of mX (batch, heads, seqlen, head_dim), and mX as
    the descriptor sees it: (seqlen, head_dim, heads, batch)."""
    return _tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, rows)


def _tma_atom(op: object, mX: cute.Tensor, rows: int) -> tuple[cute.CopyAtom, cute.Tensor]:
    head_dim = mX.shape[3]
    one_tile = cute.slice_(swizzled_tiles(mX.element_type, rows, head_dim, 1), (None, None, 0))
    mX = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[2, 3, 1, 0]))
    return cpasync.make_tiled_tma_atom(op, mX, one_tile, (rows, head_dim))


@cute.jit
def partition_tma(atom, mX: cute.Tensor, sX: cute.Tensor):
    """(TMA, block) of mX (seqlen, head_dim) in global memory and (TMA, stage) of sX in shared memory: what
    one copy moves."""
    rows, head_dim, _ = sX.shape
    gX = cute.local_tile(mX, (cute.size(rows), cute.size(head_dim)), (None, 0))  # (row, head_dim, block)
    parts = (cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
    tXsX, tXgX = cpasync.tma_partition(atom, 0, cute.make_layout(1), *parts)
    return tXgX, tXsX


# ---- introduced by k4: accumulator fragments ---------------------------------------------------------------


def by_row(fragment: cute.Tensor) -> cute.Tensor:
    """An accumulator fragment ((2, 2, N/8), M/64, 1) as (row, column) = ((2, M/64), (2, N/8))."""
    ((pair, half, group), block, _), ((s_pair, s_half, s_group), s_block, _) = (
        fragment.shape,
        fragment.layout.stride,
    )
    layout = cute.make_layout(((half, block), (pair, group)), stride=((s_half, s_block), (s_pair, s_group)))
    return cute.make_tensor(fragment.iterator, layout)


def operand_a(accumulator: cute.Layout) -> cute.Layout:
    """The accumulator ((2, 2, N/8), M/64, 1) seen as operand A ((2, 2, 2), M/64, N/16).

    Two groups of 8 columns are 16 of K; within them a thread holds the same elements in the same order.
    """
    ((pair, half, group), block, _), (_, s_block, _) = accumulator.shape, accumulator.stride
    return cute.make_layout(((pair, half, 2), block, group // 2), stride=((1, 2, 4), s_block, 8))


def exchanged(sX: cute.Tensor) -> cute.Tensor:
    """(row, column, stage) of shared memory as (column, row, stage): the same bytes, for an operand whose
    contiguous mode is not the one summed over."""
    rows, columns, stages = (cute.size(sX, mode=[i]) for i in range(3))
    return cute.composition(sX, cute.make_ordered_layout((columns, rows, stages), order=(1, 0, 2)))


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


# ---- introduced by k5: one load into a ring ----------------------------------------------------------------


@cute.jit
def put(ring, state, atom, source: cute.Tensor, destination: cute.Tensor):
    """One warp: wait until the consumers have left the stage of `state`, expect its bytes, start the copy of
    `source` (TMA,) into that stage of `destination` (TMA, stage)."""
    ring.producer_acquire(state)
    cute.copy(atom, source, destination[None, state.index], tma_bar_ptr=ring.producer_get_barrier(state))


# ---- introduced by k6_2: a product as one commit group; P converted where it is written --------------------


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


@dsl_user_op
def round_pair(low: Float32, high: Float32, dtype: type, *, loc: object = None, ip: object = None) -> Int32:
    """Two fp32 rounded to a word of two bf16 or fp16, here and nowhere else.

    An ordinary conversion has no side effect, and LLVM moves it to where its result is used: behind the next
    Q·Kᵀ, through which the fp32 values would have to live.
    """
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    ptx = f"cvt.rn.{'bf16x2' if dtype is cutlass.BFloat16 else 'f16x2'}.f32 $0, $1, $2;"
    word = llvm.inline_asm(
        T.i32(), operands, ptx, "=r,f,f", has_side_effects=True, is_align_stack=False, loc=loc, ip=ip
    )
    return Int32(word)


@cute.jit
def round_fragment(rX, words, dtype: cutlass.Constexpr):
    """fp32 registers rX to `words` of two 16-bit values, in the same order."""
    for i in range_constexpr(cute.size(words)):
        words[i] = round_pair(rX[2 * i], rX[2 * i + 1], dtype)


# ---- introduced by k6: what the production kernels take, and O by TMA --------------------------------------


ELEMENTS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def fake_gqa(head_dim: int, dtype: str) -> tuple[object, ...]:
    """Stand-ins for q, k, v, o as `fake_qkvo`'s, bf16 or fp16, with heads and lengths of their own for k and
    v."""
    element = ELEMENTS[dtype]
    batch = cute.sym_int()
    of_q, of_kv = ((batch, cute.sym_int(), cute.sym_int(), head_dim) for _ in range(2))
    return tuple(_fake_rows(element, shape) for shape in (of_q, of_kv, of_kv, of_q))


def store_atom(mX: cute.Tensor, rows: int) -> tuple[cute.CopyAtom, cute.Tensor]:
    """`load_atom`'s counterpart: the descriptor that stores tiles of `rows` rows; rows past the end stay
    unwritten."""
    return _tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mX, rows)


def row_slices(sX: cute.Tensor, count: int) -> cute.Tensor:
    """(row, column, tile) of shared memory as (row, column, slice), each slice `count` rows of a tile."""
    rows, columns, tiles = (cute.size(sX, mode=[i]) for i in range(3))
    slices = cute.make_layout((rows // count, tiles), stride=(count, rows * columns))
    layout = cute.make_layout((count, columns, slices.shape), stride=(1, rows, slices.stride))
    return cute.composition(sX, layout)


@dsl_user_op
def store_if(
    condition: Boolean, place: cute.Pointer, value: Float32, *, loc: object = None, ip: object = None
):
    """Store `value` at `place` in global memory where `condition` holds, without a branch: the compiler would
    put what value and place are computed from into it too, and the warp would wait for each step."""
    operands = [
        Int32(condition).ir_value(loc=loc, ip=ip),
        place.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Float32(value).ir_value(loc=loc, ip=ip),
    ]
    ptx = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.f32 [$1], $2; }"
    llvm.inline_asm(None, operands, ptx, "r,l,f", has_side_effects=True, is_align_stack=False, loc=loc, ip=ip)


@dsl_user_op
def _larger_bits(a: Float32, b: Float32, c: Float32, *, loc: object = None, ip: object = None) -> Float32:
    """Of three fp32 the one whose bits are the largest signed integer: one instruction, VIMNMX3."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    ptx = """{ .reg .b32 x, y, z;
        mov.b32 x, $1; mov.b32 y, $2; mov.b32 z, $3;
        max.s32 x, x, y; max.s32 x, x, z;
        mov.b32 $0, x; }"""
    largest = llvm.inline_asm(
        T.f32(), operands, ptx, "=f,f,f,f", has_side_effects=False, is_align_stack=False, loc=loc, ip=ip
    )
    return Float32(largest)


def largest_positive(values: list[Float32]) -> Float32:
    """The largest of `values` if one of them is positive; if none is, any of them.

    If one is positive, the largest as an integer is the largest as fp32, and Hopper takes three integers in
    one instruction where it takes two fp32.
    """
    while len(values) > 1:
        values = [*values[3:], _larger_bits(values[0], values[1], values[min(2, len(values) - 1)])]
    return values[0]


@cute.jit
def fetch(mCounter, tiles, own_first: cutlass.Constexpr = True):
    """One warp: the next tile nobody has taken. The last fetch of a launch leaves the counter at zero.

    With own_first a CTA's first tile is its own number, which saves the wait for a fetch. Not where CTAs wait
    for what earlier tiles leave: one of those would be held by a CTA that is not dispatched yet.
    """
    grid, _, _ = cute.arch.grid_dim()
    fetches = tiles if const_expr(own_first) else tiles + grid  # the last of each CTA finds no tile
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(mCounter.iterator.llvm_ptr, Int32(1))
        if taken == fetches - 1:
            mCounter[0] = Int32(0)
    taken = cute.arch.shuffle_sync(taken, 0)
    return taken + grid if const_expr(own_first) else taken


def tma_rings(
    smem: object, *rings: tuple[int, int, int], lane: Int32 | None = None
) -> list[PipelineTmaAsync]:
    """A ring for each (stages, bytes of a stage, warps that release it), its barriers in shared memory. They
    wait for `pipeline_init_arrive` and `pipeline_init_wait`. Each release asks for the lane; given `lane`,
    that is not read anew."""
    return [
        PipelineTmaAsync.create(
            num_stages=stages,
            tx_count=tx_count,
            barrier_storage=smem.allocate_array(Int64, 2 * stages),
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, warps),
            tidx=lane,
            defer_sync=True,
        )
        for stages, tx_count, warps in rings
    ]


def message_ring(smem: object, listeners: int) -> PipelineAsync:
    """The ring of `tell` and `hear`: from one warp to `listeners` threads."""
    return PipelineAsync.create(
        num_stages=1,
        barrier_storage=smem.allocate_array(Int64, 2),
        producer_group=CooperativeGroup(Agent.Thread, WARP),
        consumer_group=CooperativeGroup(Agent.Thread, listeners),
        defer_sync=True,
    )


FINAL_SECTIONS = 4  # at the end, worked on as one: what is fetched last is then short


@cute.jit
def final_section(heads, section):
    """The first head of the last section, which is FINAL_SECTIONS long and what was left over."""
    return cutlass.max(0, heads - FINAL_SECTIONS * section) // section * section


@cute.jit
def in_sections(tile, blocks, heads, section, final=None):
    """(block, head) of the tile-th tile, `section` heads at a time: of these first everyone's block 0. From
    the head `final` on, by default `final_section`, the rest are one section."""
    section = cutlass.max(1, cutlass.min(heads, section))
    first = tile // (section * blocks) * section
    final = final_section(heads, section) if const_expr(final is None) else final
    if first >= final:
        first, section = final, heads - final
    inside = tile - first * blocks
    return inside // section, first + inside % section


@cute.jit
def tell(ring, state, sTile, message):
    """The producer warp: hand a tile's place to the others, four numbers, of which the first is 0 at the
    end."""
    ring.producer_acquire(state)
    for i in range_constexpr(4):
        sTile[i] = Int32(message[i])
    ring.producer_commit(state)


@cute.jit
def hear(ring, state, sTile):
    """The four numbers `tell` was given."""
    ring.consumer_wait(state)
    message = [cute.arch.make_warp_uniform(sTile[i]) for i in range(4)]
    ring.consumer_release(state)
    return message[0], message[1], message[2], message[3]


# ---- introduced by bwd1: what a backward stage reads and writes --------------------------------------------


def fake_backward(head_dim: int) -> tuple[object, ...]:
    """Stand-ins for q, k, v, o, do, dq, dk, dv, as `fake_qkvo`'s: one shape, strides of their own."""
    extents = tuple(cute.sym_int() for _ in range(3))
    return tuple(_fake_rows(cutlass.BFloat16, (*extents, head_dim)) for _ in range(8))


# ---- introduced by bwd4: gradients of what the production kernels take -------------------------------------


def fake_gqa_backward(head_dim: int, dtype: str) -> tuple[object, ...]:
    """Stand-ins for q, k, v, o, do, dq, dk, dv: `fake_gqa`'s, and what is shaped like them."""
    q, k, v, o = fake_gqa(head_dim, dtype)
    return q, k, v, o, *(_fake_rows(like.element_type, like.shape) for like in (o, q, k, v))
