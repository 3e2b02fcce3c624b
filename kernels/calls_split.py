"""What a caller of bwd4 must know of tiles of keys that are split (`device.split_tiles`): how many and in how
many parts, and their scratch. Imports no compiler, as `calls`."""

import math

from .calls import backward_scratch
from .contract import Problem, Scratch
from .device.constants import SMS
from .device.limits import BLOCK, TILE_KV, TILE_Q, column_blocks, tile_dim
from .division import TILE_STEPS

# What it costs to put the parts of a tile together, and more for each of them, in steps of a tile of queries;
# as many parts were timed (notes/bwd4.md, "The last round").
TOGETHER_STEPS, PART_STEPS, MOST_PARTS = 7.0, 1.0, 9
MOST_ROUNDS = 4  # of parts: on 132 SMs their dK and dV are 69 MB at most at 128 columns
LEAST_GAIN = 0.005  # of a call's steps


def splits(problem: Problem, deterministic: bool = False) -> bool:
    """Whether bwd4's kernel for such a problem can take tiles of keys in parts: without a mask, and not at
    64 columns, where it has no register for it."""
    hides = problem.causal or problem.window is not None
    dense = not (hides or problem.softcap > 0 or problem.sequences is not None)
    return dense and not deterministic and 64 < tile_dim(problem) <= 128


def split_for(problem: Problem, sms: int = SMS) -> tuple[int, int]:
    """How many tiles of keys are left over when all SMs have had equally many, and in how many parts of their
    queries they are taken: with the least steps, or (1, 1)."""
    tiles, q_tiles = _tiles(problem)
    left_over = tiles % sms
    # Their counters, two for each, lie where bwd4_det counts turns.
    if tiles < sms or not left_over or 2 * left_over > problem.batch * problem.heads * q_tiles:
        return 1, 1
    most = min(q_tiles, MOST_PARTS, MOST_ROUNDS * sms // left_over)
    split = min(((left_over, parts) for parts in range(1, most + 1)), key=lambda x: steps_of(problem, x, sms))
    whole = steps_of(problem, (1, 1), sms)
    return split if whole - steps_of(problem, split, sms) >= LEAST_GAIN * whole else (1, 1)


def steps_of(problem: Problem, split: tuple[int, int], sms: int = SMS) -> float:
    """The time of a pass without a mask whose last tiles are split so, in steps of its main loop."""
    (tiles, q_tiles), (left_over, parts) = _tiles(problem), split
    group, of_tile = problem.heads // max(1, problem.kv_heads), TILE_STEPS[tile_dim(problem)]
    together = TOGETHER_STEPS + PART_STEPS * parts if parts > 1 else 0.0
    whole = (tiles - left_over) // sms * (group * q_tiles + of_tile)
    last = math.ceil(left_over * parts / sms) * (group * math.ceil(q_tiles / parts) + of_tile)
    return whole + last + together


def _tiles(problem: Problem) -> tuple[int, int]:
    """Of keys, of all key heads, and of a head's queries."""
    columns = tile_dim(problem)
    key_tiles = math.ceil(problem.seqlen_kv / TILE_KV[columns])
    return key_tiles * problem.batch * problem.kv_heads, math.ceil(problem.seqlen_q / TILE_Q[columns])


def undivided_scratch(
    problem: Problem, deterministic: bool, sums: int | None = None, sms: int = SMS
) -> Scratch:
    """`backward_scratch` of bwd4 and bwd4_det: where tiles may be split with their parts' dK and dV, behind
    the other floats."""
    scratch = backward_scratch(problem, deterministic, sums=sums)
    if not splits(problem, deterministic):
        return scratch
    columns = tile_dim(problem)
    inner = TILE_KV[columns] // BLOCK, column_blocks(columns), BLOCK * BLOCK
    floats = {name: x for name, x in scratch.items() if x[1] == "float32"}
    return floats | {"split": ((2, *split_for(problem, sms), *inner), "float32")} | scratch
