"""What a caller of k6 and bwd4 must know to launch them: what they take, the scratch they need, the order of
their arguments. Imports no compiler, so that a call whose kernels are compiled already waits for none."""

import math
from typing import NamedTuple

from .contract import Compiled, Problem, Scratch, Tensors
from .device.constants import SMS
from .device.limits import (
    BLOCK,
    COLUMN_BYTES,
    FORWARD_ROWS,
    POLICIES,
    TILE_KV,
    TILE_Q,
    bounds,
    column_blocks,
    folds,
    has_own_kernel,
    is_own,
    list_shape,
    listed_tiles,
    refuse_heads_on_grid,
    refuse_long_heads,
    refuse_policies,
    refuse_unless_gqa,
    scratch_shapes,
    sums_of_dq,
    tile_dim,
)

DETERMINISTIC = {"deterministic": True}  # bwd4_det's options
DIVIDED = {"divides": True}  # bwd4_one_parts'
# Tiles of keys up to which one sum of dQ is better than two, and tiles of queries of all heads: with half as
# many there is work for two sums (`sums_for`).
ONE_SUM, FEW_QUERIES = {64: 12, 96: 8, 128: 8}, 660


class Parts(NamedTuple):
    """Among how many CTAs the work on a tile of keys is divided: the query heads of a key head among
    `heads`, and the tiles of queries that see it among `queries`."""

    heads: int = 1
    queries: int = 1

    @property
    def count(self) -> int:
        return self.heads * self.queries


UNDIVIDED = Parts()


def refuse_forward(problem: Problem) -> str | None:
    """Why k6 refuses the problem, or None."""
    return refuse_unless_gqa(problem)


def refuse_backward(problem: Problem) -> str | None:
    """Why the stages of bwd4 refuse the problem, or None."""
    return (
        refuse_unless_gqa(problem, "bwd")
        or refuse_policies(problem, takes=tuple(POLICIES))
        or refuse_long_heads(problem, COLUMN_BYTES[tile_dim(problem)])
        or refuse_heads_on_grid(problem)
    )


def forward_scratch(problem: Problem, rows: int | None = None) -> Scratch:
    """For tiles of `rows` queries, by default k6's."""
    counter = {"counter": ((1,), "int32")}  # of tiles taken, 0 again after each launch; not for two at once
    if problem.sequences is None:
        return counter
    rows = rows or FORWARD_ROWS[tile_dim(problem)]
    # Integers, which a launch leaves as they come: as floats they need not be zero.
    return {"tiles": (list_shape(problem.seqlen_q, len(problem.sequences), rows), "float32"), **counter}


def given_names(problem: Problem) -> tuple[str, ...]:
    """What a launch is given beside tensors and scratch: `device.given`."""
    return ("scale",) * (problem.scaled or not has_own_kernel(problem)) + problem.policies


def backward_scratch(
    problem: Problem,
    deterministic: bool,
    parts: Parts | None = None,
    one_tile: bool = False,
    sums: int | None = None,
) -> Scratch:
    """No two launches at once may share any of it. Floats come before counters. With `parts`, that of
    bwd4_parts; of one tile of keys, that of bwd4_one, which has no sums of dQ; of these `sums`, by default
    as `sums_for` has it."""
    columns, of_keys = tile_dim(problem), {}
    folded = folds(columns, problem.softcap > 0)
    tile_q, tile_kv = TILE_Q[columns], TILE_KV[columns]
    key_heads = problem.batch * problem.kv_heads * (parts.heads if parts else 1)
    if parts is not None:  # `key_parts`
        blocks = math.ceil(problem.seqlen_kv / tile_kv) * tile_kv // BLOCK
        shape = 2, key_heads, parts.queries, blocks, column_blocks(columns), BLOCK * BLOCK
        of_keys = {"parts": (shape, "float32")}
    zeroed = key_heads
    lists, tiles = {}, math.ceil(problem.seqlen_q / tile_q)
    if problem.sequences is not None:  # as `forward_scratch`'s
        totals, rows = (problem.seqlen_q, problem.seqlen_kv), (tile_q, tile_kv)
        shapes = [list_shape(total, len(problem.sequences), of) for total, of in zip(totals, rows)]
        lists = {"tiles_q": (shapes[0], "float32"), "tiles_kv": (shapes[1], "float32")}
        tiles = listed_tiles(problem.seqlen_q, len(problem.sequences), tile_q)
        zeroed *= listed_tiles(problem.seqlen_kv, len(problem.sequences), tile_kv)
    kernels = 1 if one_tile or (columns <= 128 and not lists) else 2  # with a counter of tiles taken each
    if columns > 128 or one_tile:
        stats = scratch_shapes(problem, tile_q, folded=folded)["stats"]
        return {"stats": stats, **of_keys, **lists, "counter": ((kernels,), "int32")}
    sums, heads = sums or sums_for(problem, deterministic), problem.batch * problem.heads
    return (
        scratch_shapes(problem, tile_q, sums, folded)
        | of_keys
        | lists
        | {
            "zeroed": ((zeroed,), "int32"),  # how many shares of a key head's dQ_sum are zero
            "order": ((heads, tiles * sums), "int32"),  # whose turn it is to add to dQ_sum; or `split_tiles`
            "counter": ((kernels,), "int32"),
        }
    )


def sums_for(problem: Problem, deterministic: bool) -> int:
    """How many sums of dQ a backward pass up to head_dim 128 has. Tiles of keys add to them in turns, so that
    with more of them fewer wait for each other, and more bytes are written and read. notes/bwd4_det.md,
    "How many sums", has the measured times."""
    if not deterministic or set(problem.policies) - {"sink"}:
        return sums_of_dq(deterministic, problem.causal or problem.window is not None)
    columns, heads = tile_dim(problem), problem.batch * problem.heads
    key_tiles = math.ceil(problem.seqlen_kv / TILE_KV[columns])
    if problem.seqlen_kv > 2 * problem.seqlen_q:
        # All tiles of keys begin with the same few queries: the fewer those are, the more sums.
        tiles = heads * math.ceil(problem.seqlen_q / TILE_Q[columns])
        wanted = 2 ** math.ceil(math.log2(max(1.0, FEW_QUERIES / max(1, tiles))))
        return max(2, min(8, key_tiles // 3, wanted))
    short = key_tiles <= ONE_SUM[columns] and heads * key_tiles >= 2 * SMS
    return 1 if problem.causal or short else 2


def launch_forward(compiled: Compiled, q, k, v, o, lse, scratch, given) -> None:
    """`scratch` as `forward_scratch` lists it; `given` as `given_names` does."""
    compiled(q, k, v, o, lse, *scratch, *given)


def launch_backward(compiled: Compiled, q, k, v, o, lse, do, dq, dk, dv, scratch, given) -> None:
    """`scratch` as `backward_scratch` lists it, or the stage's `workspace`; `given` of a scaled problem: its
    softmax_scale, and of one with lse_grad besides its dlse."""
    compiled(q, k, v, o, do, dq, dk, dv, lse, *scratch, *given)


def run_forward(compiled: Compiled, t: Tensors) -> None:
    if t.o.numel():
        launch_forward(compiled, t.q, t.k, t.v, t.o, t.lse, t.workspace.values(), _given(t))


def run_backward(compiled: Compiled, t: Tensors) -> None:
    gradients = t.do, t.dq, t.dk, t.dv
    if not (t.dq.numel() and t.dk.numel()):  # no pair of a query and a key
        for x in (*gradients[1:], t.dsink):
            if x is not None and x.numel():
                x.zero_()
    else:
        launch_backward(compiled, t.q, t.k, t.v, t.o, t.lse, *gradients, t.workspace.values(), _given(t))


def _given(t: Tensors) -> list[object]:
    scale, head_dim = t.softmax_scale, t.q.shape[3]
    if scale is None and not is_own(head_dim, t.v.shape[3]):
        scale = head_dim**-0.5
    window = bounds(t.window) if t.window is not None else ()
    alone = (scale, *window, t.softcap, t.sink, *_sequences(t), t.dlse, t.dsink)
    return [x for x in alone if x is not None]


def _sequences(t: Tensors) -> tuple[object, ...]:
    """Cumulative lengths, used ones, and a bit for each of these that is there; in the place of one that is
    not, its cumulative lengths."""
    if t.cu_seqlens is None:
        return ()
    used = t.seqused or (None, None)
    which = sum(1 << i for i, x in enumerate(used) if x is not None)
    return (*t.cu_seqlens, *(cu if x is None else x for cu, x in zip(t.cu_seqlens, used)), which)
