"""Which kernel computes a problem, what it needs beside its tensors, and how it is launched."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from . import few_queries, rounds, tuned, turns, ways
from .kernels import calls, calls_decode, calls_one, calls_slices, calls_split, division
from .kernels.calls import UNDIVIDED, Parts
from .kernels.contract import Problem, Scratch
from .kernels.device.limits import tile_dim
from .launch import (
    BACKWARD,
    DECODE,
    DETERMINISTIC,
    DETERMINISTIC_IN_PARTS,
    FORWARD,
    FORWARD_IN_ROWS,
    IN_GROUPS,
    IN_GROUPS_OF_ROWS,
    IN_PARTS,
    IN_ROWS,
    IN_SLICES,
    IN_SLICES_OF_ROWS,
    ONE_TILE,
    ONE_TILE_IN_PARTS,
    Job,
    kernel_for,
    least_of,
    sms_option,
)
from .memory import Launch
from .ways import Kind, Way

STAGES = {  # by the kind of a way: for most rows, and for those that have a stage of their own
    Kind.TILES: (FORWARD, FORWARD_IN_ROWS),
    Kind.SLICES: (IN_SLICES, IN_SLICES_OF_ROWS),
    Kind.GROUPS: (IN_GROUPS, IN_GROUPS_OF_ROWS),
}
# Of the stages that have some; known here, so that a call whose kernels are compiled imports no kernel file.
OPTIONS: dict[str, dict[str, object]] = {
    DETERMINISTIC: calls.DETERMINISTIC,
    DETERMINISTIC_IN_PARTS: calls.DETERMINISTIC,
    ONE_TILE_IN_PARTS: calls.DIVIDED,
    **{x: {"rows": rows} for of in IN_ROWS for rows, x in of.items()},
}


def options_of(stage_id: str, gpu: tuned.Gpu) -> dict[str, object]:
    """With which a stage is compiled for a GPU."""
    return OPTIONS.get(stage_id, {}) | sms_option(gpu.sms)


def forward_stage(problem: Problem, way: Way | None = None, gpu: tuned.Gpu = tuned.H200) -> str:
    """The stage that computes O of a problem that FORWARD takes, by default in the way that `ways` chooses.
    Raises ValueError for rows that no tile of this head_dim has, and a mask that the way does not take."""
    way = way or ways.way_of(problem, *gpu)
    if way.kind is not Kind.TILES and problem.top_left:  # of whose keys a piece would hide others
        raise ValueError(f"a mask at the top left is for whole tiles, not for {way.kind.value}")
    if way.kind is Kind.DECODE:
        return DECODE
    own, *others = division.TILES[tile_dim(problem)]
    if way.rows not in (own, *others):
        raise ValueError(f"tiles of head_dim {problem.head_dim} have {own} or {others} rows, not {way.rows}")
    if way.kind is not Kind.TILES and way.rows not in ways.JOIN[way.kind][tile_dim(problem)]:
        raise ValueError(f"there are no {way.kind.value} of {way.rows} rows at head_dim {problem.head_dim}")
    stage_id, in_rows = STAGES[way.kind]
    return stage_id if way.rows == own else in_rows.get(way.rows, stage_id)


def forward_kernel(problem: Problem, way: Way, gpu: tuned.Gpu) -> Job:
    """The kernel of a way, as `kernel_for` takes it."""
    if way.kind is Kind.DECODE:
        least, options = few_queries.kernel_of(problem)
        return DECODE, least, options | sms_option(gpu.sms)
    stage_id = forward_stage(problem, way, gpu)
    return _kernel_of(stage_id, problem, gpu)


def forward_launch(problem: Problem, way: Way, gpu: tuned.Gpu) -> Launch:
    """A way's launch: of q, k, v, o, lse, its scratch, and a scale where the problem has one."""
    kernel = forward_kernel(problem, way, gpu)
    launch = kernel_for(*kernel).launch
    return _decoding(launch, problem, kernel[2], gpu.sms) if way.kind is Kind.DECODE else launch


def forward_scratch(problem: Problem, way: Way, sms: int) -> Scratch:
    """What a launch of a way needs beside its tensors."""
    if way.kind is Kind.DECODE:
        _, options = few_queries.kernel_of(problem)
        return calls_decode.decode_scratch(few_queries.as_decode(problem), options, sms)
    if way.kind is Kind.TILES:
        return calls.forward_scratch(problem, way.rows)
    ctas = division.TILES[tile_dim(problem)][way.rows].ctas
    return calls_slices.slices_scratch(problem, way.rows, sms * ctas)


def _decoding(decode: Launch, problem: Problem, options: dict[str, Any], sms: int) -> Launch:
    """A launch of decode with the arguments of a forward pass."""
    together = calls_decode.together_of(few_queries.as_decode(problem), options, sms)

    def launch(q, k, v, o, lse, pieces, pieces_lse, arrived, scale=problem.head_dim**-0.5) -> None:
        rows_first = (x.transpose(1, 2) for x in (q, k, v, o))
        scratch, absent = (pieces, pieces_lse, arrived), (None, None)
        calls_decode.launch_decode(
            decode, *rows_first, lse, None, None, absent, absent, scratch, together, scale, None
        )

    return launch


def are_short(longest_kv: int) -> bool:
    """Whether packed sequences, the longest of which has so many keys (0: nobody says), are a tile each."""
    return 0 < longest_kv <= division.ONE_TILE_KEYS


class BackwardLaunch(NamedTuple):
    """A launch of a backward pass: of which batches and key heads, and which stage, in which parts."""

    batches: slice
    kv_heads: slice
    problem: Problem
    stage_id: str
    parts: Parts | None


def backward_launches(
    problem: Problem,
    deterministic: bool,
    parts: Parts | None = None,
    gpu: tuned.Gpu = tuned.H200,
    short: bool = False,
) -> Iterator[BackwardLaunch]:
    """The launches of a backward pass, with `backward_stage` of each. With `parts` all is one, if a grid has
    room for it."""
    most = problem.batch, problem.kv_heads
    if parts is None:
        most = rounds.together(problem, deterministic, gpu.sms)
    for batches, kv_heads, part in rounds.in_launches(problem, most):
        stage_id, own = backward_stage(part, deterministic, parts, gpu, short)
        yield BackwardLaunch(batches, kv_heads, part, stage_id, own)


def backward_stage(
    problem: Problem,
    deterministic: bool,
    parts: Parts | None = None,
    gpu: tuned.Gpu = tuned.H200,
    short: bool = False,
) -> tuple[str, Parts | None]:
    """The stage that computes the gradients of a problem that BACKWARD takes, and its parts, if it has any:
    by default those that `division` chooses. `short`: packed sequences `are_short`."""
    if short and division.short_ones_pay(problem):
        return ONE_TILE, None
    # On one tile of keys nobody waits for a turn, and turns spare zeros: for where a sum cannot be spared.
    deterministic |= division.has_one_tile(problem)
    deterministic |= parts is None and division.turns_pay(problem, gpu.sms)
    stages = (DETERMINISTIC, DETERMINISTIC_IN_PARTS) if deterministic else (BACKWARD, IN_PARTS)
    if problem.policies:  # which the stages in parts do not take, nor those of one tile
        return stages[0], None
    if division.one_tile_pays(problem):
        stages = ONE_TILE, ONE_TILE_IN_PARTS
    if parts is None:
        choose = turns.parts_of if deterministic else division.parts_of
        parts = choose(problem, gpu.sms)
    return (stages[0], None) if parts == UNDIVIDED else (stages[1], parts)


def backward_scratch(
    stage_id: str, problem: Problem, parts: Parts | None, gpu: tuned.Gpu = tuned.H200
) -> Scratch:
    """What a launch of the stage that `backward_stage` gave needs beside its tensors."""
    takes_turns = stage_id in (DETERMINISTIC, DETERMINISTIC_IN_PARTS)
    sums = turns.sums_of(problem, parts or UNDIVIDED, gpu.sms) if takes_turns else None
    one_tile = stage_id in (ONE_TILE, ONE_TILE_IN_PARTS)
    if one_tile:
        return calls_one.one_tile_scratch(problem, parts)
    if parts is None:
        return calls_split.undivided_scratch(problem, takes_turns, sums, gpu.sms)
    return calls.backward_scratch(problem, takes_turns, parts, sums=sums)


def launch_of(stage_id: str, problem: Problem, gpu: tuned.Gpu) -> Launch:
    """That of a stage, but decode."""
    return kernel_for(*_kernel_of(stage_id, problem, gpu)).launch


def _kernel_of(stage_id: str, problem: Problem, gpu: tuned.Gpu) -> Job:
    return stage_id, least_of(problem), options_of(stage_id, gpu)
