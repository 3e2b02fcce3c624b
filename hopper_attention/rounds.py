"""The launches of a backward pass. Tiles of keys go to the SMs in rounds, and the last round may have few of
them: where their heads take less in parts, they are a launch of their own. notes/bwd4_parts.md, "Heads that
are left over", has the measured times. Imports no compiler."""

from collections.abc import Iterator

from . import turns
from .kernels import calls_split, division
from .kernels.calls import UNDIVIDED
from .kernels.contract import Problem
from .kernels.device.constants import GRID_YZ_MAX, SMS
from .kernels.device.limits import tile_dim

Heads = tuple[int, int]  # batches, and key heads of each
UNSPLIT = 1, 1  # of `calls_split.split_for`

# In steps of the main loop, fitted to measured times:
LAUNCH_STEPS = 6.0  # of a launch that splits no tile: for splitting more steps are reckoned than it takes
UNSURE = 0.02  # of a pass: so much more must be expected to be gained than nothing
HOST_US = 100  # what two launches take of the host, for which the GPU would wait in a shorter pass


def in_launches(problem: Problem, most: Heads) -> Iterator[tuple[slice, slice, Problem]]:
    """(batches, key heads, their problem) of launches of so many at most: they are dimensions of a grid, as
    query heads are."""
    group = problem.heads // max(1, problem.kv_heads)
    most_batches = max(1, min(most[0], GRID_YZ_MAX))
    most_heads = max(1, min(most[1], GRID_YZ_MAX // max(1, group)))
    for batch in range(0, problem.batch, most_batches):
        batches = slice(batch, min(batch + most_batches, problem.batch))
        for head in range(0, problem.kv_heads, most_heads):
            heads = slice(head, min(head + most_heads, problem.kv_heads))
            yield batches, heads, _part(problem, batches.stop - batch, heads.stop - head)


def together(problem: Problem, deterministic: bool, sms: int = SMS) -> Heads:
    """How many batches and key heads a launch has at most: all, or, without a mask, those whose tiles of keys
    come in whole rounds, if they and then the others are expected to take clearly less."""
    every, columns = (problem.batch, problem.kv_heads), tile_dim(problem)
    key_blocks = turns.key_blocks_of(problem)
    if problem.causal or problem.policies or columns > 128 or key_blocks < 2 or not problem.seqlen_q:
        return every
    tiles = key_blocks * problem.batch * problem.kv_heads
    ctas = turns.ctas_of(problem, key_blocks, sms) if deterministic else sms
    if not ctas < tiles < division.FEW_TILES * sms:  # of many rounds one is as little as a launch
        return every
    us = lambda part: expected_us(part, deterministic, sms)
    one = us(problem)
    if one < HOST_US:
        return every
    times = {every: one * (1 - UNSURE)}
    for first, left in _in_two(problem, tiles // ctas * ctas // key_blocks):
        times[first] = us(_part(problem, *first)) + us(left)
    return min(times, key=times.get)


def expected_us(problem: Problem, deterministic: bool, sms: int = SMS) -> float:
    """How long a launch without a mask is expected to take."""
    if deterministic:
        return turns.expected_us(problem, sms)
    return turns.STEP[tile_dim(problem)][False] * expected_steps(problem, sms)


def expected_steps(problem: Problem, sms: int = SMS) -> float:
    """How long a launch without turns is expected to take, in steps of its main loop."""
    parts = division.parts_of(problem, sms)
    if parts != UNDIVIDED:
        return LAUNCH_STEPS + division.steps_of(problem, parts, sms)
    split = calls_split.split_for(problem, sms) if calls_split.splits(problem) else UNSPLIT
    launch = LAUNCH_STEPS if split == UNSPLIT else 0.0
    return launch + calls_split.steps_of(problem, split, sms)


def _in_two(problem: Problem, most: int) -> Iterator[tuple[Heads, Problem]]:
    """(what a first launch has, the problem that is left for a second one), with `most` key heads of all
    batches in the first: as many heads of each batch, or whole batches."""
    heads, batches = most // problem.batch, most // problem.kv_heads
    if problem.kv_heads <= 2 * heads < 2 * problem.kv_heads:
        yield (problem.batch, heads), _part(problem, problem.batch, problem.kv_heads - heads)
    if problem.batch <= 2 * batches < 2 * problem.batch:
        yield (batches, problem.kv_heads), _part(problem, problem.batch - batches, problem.kv_heads)


def _part(problem: Problem, batches: int, kv_heads: int) -> Problem:
    group = problem.heads // max(1, problem.kv_heads)
    return problem.with_(batch=batches, heads=kv_heads * group, kv_heads=kv_heads)
