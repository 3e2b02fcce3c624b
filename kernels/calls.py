"""What a caller of k6 and bwd4 must know to launch them: what they take, the scratch they need, the order of
their arguments. Imports no compiler, so that a call whose kernels are compiled already waits for none."""

import heapq
import math

from .contract import Compiled, Problem, Scratch, Tensors
from .device.constants import SMS
from .device.limits import (
    BLOCK,
    COLUMN_BYTES,
    FINAL_SECTIONS,
    SECTION_BYTES,
    TILE_Q,
    refuse_heads_on_grid,
    refuse_long_heads,
    refuse_unless_gqa,
    scratch_shapes,
    sums_of_dq,
)

DETERMINISTIC = {"deterministic": True}  # bwd4_det's options
TILE_KV = 128  # keys of a tile, up to head_dim 128

# What `parts_of` reckons with, in steps of bwd4's main loop: a tile of queries on a tile of keys. Fitted to
# the measured times of notes/bwd4_gqa.md, "How many parts".
TILE_STEPS = 1.5  # of a tile of keys beside its steps
ADDING_STEPS = 3.0  # of adding parts, beside their bytes
BYTES_PER_STEP = 12e6  # of parts, most of which stay in L2
UNDIVIDED = 1.13  # how much longer a step takes under a mask where nothing is divided
FEW_TILES = 8  # for each SM: with more of them dividing gains nothing


def refuse_forward(problem: Problem) -> str | None:
    """Why k6 refuses the problem, or None."""
    return refuse_unless_gqa(problem)


def refuse_backward(problem: Problem) -> str | None:
    """Why bwd4 and bwd4_det refuse the problem, or None."""
    return (
        refuse_unless_gqa(problem, "bwd")
        or refuse_long_heads(problem, COLUMN_BYTES[problem.head_dim])
        or refuse_heads_on_grid(problem)
    )


def refuse_divided(problem: Problem) -> str | None:
    """Why bwd4_gqa refuses the problem, or None."""
    if problem.head_dim == 256 and problem.direction == "bwd":
        return "takes head_dim 64 or 128, not 256"
    return refuse_backward(problem)


def forward_scratch(problem: Problem) -> Scratch:
    return {"counter": ((1,), "int32")}  # of tiles taken, 0 again after each launch; not for two at once


def backward_scratch(problem: Problem, deterministic: bool, parts: int | None = None) -> Scratch:
    """No two launches at once may share any of it. Floats come before counters. With `parts`, bwd4_gqa's."""
    tile_q = TILE_Q[problem.head_dim]
    if problem.head_dim == 256:
        # of tiles taken, a kernel each
        return {"stats": scratch_shapes(problem, tile_q)["stats"], "counter": ((2,), "int32")}
    sums = sums_of_dq(deterministic, problem.causal)
    heads, tiles = problem.batch * problem.heads, math.ceil(problem.seqlen_q / tile_q)
    key_heads, of_keys = problem.batch * problem.kv_heads * (parts or 1), {}
    if parts is not None:
        blocks = 2 * math.ceil(problem.seqlen_kv / TILE_KV)
        shape = 2, key_heads, blocks, problem.head_dim // BLOCK, BLOCK * BLOCK
        of_keys = {"parts": (shape, "float32")}  # `key_parts`
    return (
        scratch_shapes(problem, tile_q, sums)
        | of_keys
        | {
            "zeroed": ((key_heads,), "int32"),  # how many shares of a key head's dQ_sum are zero
            "order": ((heads, tiles * sums), "int32"),  # whose turn it is to add to dQ_sum
            "counter": ((1,), "int32"),  # of tiles taken
        }
    )


def parts_of(problem: Problem) -> int:
    """Among how many tiles to divide the query heads of a key head: of a backward pass of head_dim 64 or 128
    the number with the least time, by what the busiest SM has to do and what parts cost."""
    group = problem.heads // max(1, problem.kv_heads)
    tiles = math.ceil(problem.seqlen_kv / TILE_KV) * problem.batch * problem.kv_heads
    if problem.head_dim == 256 or group < 2 or not 0 < tiles < FEW_TILES * SMS:
        return 1

    def steps(parts: int) -> float:
        busiest = max(loads_of(problem, parts))
        if parts == 1:
            return busiest * (UNDIVIDED if problem.causal else 1.0)
        keys = problem.batch * problem.kv_heads * parts * problem.seqlen_kv
        part_bytes = 2 * keys * problem.head_dim * 4  # of dK and dV, which are written, and read again
        return busiest + ADDING_STEPS + 2 * part_bytes / BYTES_PER_STEP

    return min((parts for parts in range(1, group + 1) if group % parts == 0), key=steps)


def loads_of(problem: Problem, parts: int) -> list[float]:
    """The steps of each SM, when tiles of keys go in their order (`Tiles.locate`), one after the other, to
    whoever is free."""
    tile_q = TILE_Q[problem.head_dim]
    heads = problem.batch * problem.kv_heads * parts
    query_heads = problem.heads // problem.kv_heads // parts
    section = heads
    if problem.causal:
        head_bytes = problem.seqlen_q * COLUMN_BYTES[problem.head_dim] * problem.head_dim * query_heads
        section = max(1, min(heads, SECTION_BYTES // max(1, head_bytes)))
    final = max(0, heads - FINAL_SECTIONS * section) // section * section
    offset = 0 if problem.top_left else problem.seqlen_kv - problem.seqlen_q
    steps = []
    for first_key in range(0, problem.seqlen_kv, TILE_KV):
        unseen = max(0, first_key - offset) // tile_q if problem.causal else 0
        seen = max(0, math.ceil(problem.seqlen_q / tile_q) - unseen)
        steps.append(query_heads * seen + TILE_STEPS)
    loads = [0.0] * SMS
    for first in [*range(0, final, section), final]:
        of_section = section if first < final else heads - final
        for tile in steps:
            for _ in range(of_section):
                heapq.heapreplace(loads, loads[0] + tile)
    return loads


def launch_forward(compiled: Compiled, q, k, v, o, lse, scratch, given) -> None:
    """`scratch` as `forward_scratch` lists it; `given` of a scaled problem: its softmax_scale."""
    compiled(q, k, v, o, lse, *scratch, *given)


def launch_backward(compiled: Compiled, q, k, v, o, lse, do, dq, dk, dv, scratch, given) -> None:
    """`scratch` as `backward_scratch` lists it; `given` of a scaled problem: its softmax_scale, and of one
    with lse_grad besides its dlse."""
    compiled(q, k, v, o, do, dq, dk, dv, lse, *scratch, *given)


def run_forward(compiled: Compiled, t: Tensors) -> None:
    if t.o.numel():
        launch_forward(compiled, t.q, t.k, t.v, t.o, t.lse, t.workspace.values(), _given(t))


def run_backward(compiled: Compiled, t: Tensors) -> None:
    if t.dq.numel() or t.dk.numel():
        gradients = t.do, t.dq, t.dk, t.dv
        launch_backward(compiled, t.q, t.k, t.v, t.o, t.lse, *gradients, t.workspace.values(), _given(t))


def _given(t: Tensors) -> list[object]:
    return [x for x in (t.softmax_scale, t.dlse) if x is not None]
