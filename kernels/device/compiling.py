"""How a kernel is compiled without tensors and launched with torch's, and what plain stages refuse."""

import tempfile

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..contract import Problem
from .constants import ROWS_MAX, VECTOR
from .limits import COMPUTES, refuse_options

# The target is an option, not an environment variable that other users of the DSL in the process would see.
OPTIONS = "--gpu-arch sm_90a --enable-tvm-ffi --keep-cubin"
VECTOR_BITS = 128
ELEMENTS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def refuse_unless_plain(problem: Problem, direction: str = "fwd") -> str | None:
    """Why a stage without GQA, unequal lengths, other types and other head dims refuses `problem`, or
    None."""
    if problem.direction != direction:
        return f"computes the {COMPUTES[direction]}, not {problem.direction!r}"
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
    return refuse_options(problem)


def fake_qkvo(head_dim: int) -> tuple[object, ...]:
    """Stand-ins for q, k, v, o: (batch, heads, seqlen, head_dim) bf16, 16-byte aligned, any strides but the
    last.

    The launcher checks a real tensor against its stand-in: type, device, extents, the divisibility of the
    strides and the alignment of the pointer. Reusing a symbol makes it check that the extents agree.
    """
    extents = tuple(cute.sym_int() for _ in range(3))
    return tuple(fake_rows(cutlass.BFloat16, (*extents, head_dim)) for _ in range(4))


def fake_gqa(head_dim: int | None, dtype: str) -> tuple[object, ...]:
    """Stand-ins for q, k, v, o as `fake_qkvo`'s, bf16 or fp16, with heads and lengths of their own for k and
    v. Without a head_dim the tensors say it, v and o one of their own."""
    element = ELEMENTS[dtype]
    batch = cute.sym_int()
    of_q, of_kv = ((batch, cute.sym_int(), cute.sym_int()) for _ in range(2))
    columns = values = head_dim
    if head_dim is None:
        columns, values = cute.sym_int(divisibility=VECTOR), cute.sym_int(divisibility=VECTOR)
    shapes = (*of_q, columns), (*of_kv, columns), (*of_kv, values), (*of_q, values)
    return tuple(fake_rows(element, shape) for shape in shapes)


def fake_backward(head_dim: int) -> tuple[object, ...]:
    """Stand-ins for q, k, v, o, do, dq, dk, dv, as `fake_qkvo`'s: one shape, strides of their own."""
    extents = tuple(cute.sym_int() for _ in range(3))
    return tuple(fake_rows(cutlass.BFloat16, (*extents, head_dim)) for _ in range(8))


def fake_gqa_backward(head_dim: int | None, dtype: str) -> tuple[object, ...]:
    """Stand-ins for q, k, v, o, do, dq, dk, dv: `fake_gqa`'s, and what is shaped like them."""
    q, k, v, o = fake_gqa(head_dim, dtype)
    return q, k, v, o, *(fake_rows(like.element_type, like.shape) for like in (o, q, k, v))


def fake_rows(dtype: type, shape: tuple[object, ...], vector: int | None = None) -> object:
    """A stand-in for a tensor with a unit last stride, along which `vector` elements, or 16 bytes as the TMA
    asks, are read or written at once: address and strides must allow it."""
    vector = vector or VECTOR_BITS // dtype.width
    strides = tuple(cute.sym_int64(divisibility=vector) for _ in shape[:-1])
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=vector * dtype.width // 8)


def fake_fp32(like: object, *trailing: object, vector: int = 1, last: object = None) -> object:
    """A stand-in for an fp32 tensor (batch, heads, seqlen, *trailing) beside q, k, v, o with a unit last
    stride, or for one (batch, heads, last).

    `vector` elements are read or written at once: strides and address must allow it.
    """
    shape = (*like.shape[:3], *trailing) if last is None else (*like.shape[:2], last)
    return fake_rows(Float32, shape, vector)


def compile_for_torch(kernel: object, *stand_ins: object) -> object:
    """Compile `kernel(*stand_ins, stream)` for sm_90a. Needs no GPU; the cubin is kept on the result.

    The result is called with torch tensors and enqueues on PyTorch's current stream.
    """
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as scratch:  # the keep flags also write files
        return cute.compile(kernel, *stand_ins, stream, options=f"{OPTIONS} --dump-dir={scratch}")
