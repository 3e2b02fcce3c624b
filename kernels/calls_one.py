"""Calls of bwd4_one, for one tile of keys."""

from .calls import Parts, backward_scratch
from .contract import Problem, Scratch


def one_tile_scratch(problem: Problem, parts: Parts | None = None) -> Scratch:
    """As `calls.backward_scratch`, without what there is one sum or one tile of: packed sequences need no
    lists."""
    scratch = backward_scratch(problem, False, parts, one_tile=True)
    return {name: shape for name, shape in scratch.items() if not name.startswith("tiles")}
