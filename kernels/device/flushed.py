"""O kept in fp32 beside an accumulator that cannot hold long sums.

The tensor cores add products of 8-bit operands with about 13 bits behind the sum's leading one, and truncate:
of n equal terms about 2⁻¹⁶·n is lost, past 2¹⁴ of them nearly everything new. So O is added to fp32 in global
memory after every so many keys, where each thread has 16-byte places of its own; L2 adds, and nobody waits.
"""

import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr

from .constants import WARPGROUP
from .rows import OWN_ROWS

QUAD = 4  # accumulator elements of 16 bytes: of two columns, of the thread's first row and of its second
AT_ONCE = 4  # quads between fences, without which all are loaded at once, into registers that are not there
AHEAD = 32.0  # powers of two by which what is added may be scaled: fp32 has room for it


def own_quads(mFlushed: cute.Tensor, consumer, thread, head_dim: int) -> cute.Tensor:
    """(element, quad) of a thread, in mFlushed (consumer of the launch, 64·head_dim) fp32."""
    quads = cute.make_layout((QUAD, WARPGROUP, head_dim // 8))
    return cute.make_tensor(mFlushed[consumer, None].iterator, quads)[None, thread, None]


@cute.jit
def flush(rO: cute.Tensor, flushed: cute.Tensor, base: cute.Tensor, row_max: cute.Tensor, first):
    """Add this thread's rO, relative to its rows' maxima, to what is relative to `base`, the maxima of the
    `first` time. rO is scaled on the way, to be begun anew."""
    quads = cute.make_tensor(rO.iterator, flushed.shape)
    if first:
        for r in range_constexpr(OWN_ROWS):
            base[r] = row_max[r]
        for i in range_constexpr(cute.size(quads, mode=[1])):
            cute.autovec_copy(quads[None, i], flushed[None, i])
    else:
        ahead = cute.arch.fmax(row_max[0] - base[0], row_max[1] - base[1])
        # Seldom: a row's maximum grows when it sees its first keys.
        if cute.arch.vote_any_sync(ahead > AHEAD):
            factors = [cute.math.exp2(base[r] - row_max[r], fastmath=True) for r in range(OWN_ROWS)]
            for i in range_constexpr(cute.size(quads, mode=[1])):
                if const_expr(i % AT_ONCE == 0):
                    cute.arch.fence_acq_rel_cta()
                before = _load(flushed[None, i].iterator)
                quad = cute.make_rmem_tensor(QUAD, Float32)
                for j in range_constexpr(QUAD):
                    quad[j] = before[j] * factors[j // 2]
                cute.autovec_copy(quad, flushed[None, i])
            for r in range_constexpr(OWN_ROWS):
                base[r] = row_max[r]
        factors = [cute.math.exp2(row_max[r] - base[r], fastmath=True) for r in range(OWN_ROWS)]
        for i in range_constexpr(cute.size(quads, mode=[1])):
            _add(flushed[None, i].iterator, [quads[j, i] * factors[j // 2] for j in range(QUAD)])


def add_flushed(rO: cute.Tensor, flushed: cute.Tensor, base: cute.Tensor, row_max: cute.Tensor) -> None:
    """rO += what was flushed."""
    quads = cute.make_tensor(rO.iterator, flushed.shape)
    factors = [cute.math.exp2(base[r] - row_max[r], fastmath=True) for r in range(OWN_ROWS)]
    for i in range(cute.size(quads, mode=[1])):
        if i % AT_ONCE == 0:
            cute.arch.fence_acq_rel_cta()
        before = _load(flushed[None, i].iterator)
        for j in range(QUAD):
            quads[j, i] += before[j] * factors[j // 2]


def zeroed_here(value: Float32) -> Float32:
    """0, computed from a finite `value`, and so here. A constant the compiler puts where it is used: it would
    write a register of an accumulator while a WGMMA is under way, and WGMMAs are then serialised."""
    ptx = "sub.f32 {$w0}, {$r0}, {$r0};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[value])


def _add(place: cute.Pointer, quad: list[Float32]) -> None:
    ptx = "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(ptx, read_only_args=[place.toint(), *quad])


def _load(place: cute.Pointer) -> tuple[Float32, ...]:
    """From L2, where `_add` adds: a line of L1 may be older."""
    ptx = "ld.relaxed.gpu.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32] * QUAD, read_only_args=[place.toint()])
