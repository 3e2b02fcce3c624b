"""BWD4_ONE for few heads: the queries that see the one tile of keys divided among CTAs.

The idea          4096 queries on 77 keys of 80 heads are 80 tiles for 132 SMs. As in bwd4_parts a tile is for
                  some of the queries, and leaves its part of dK and dV in fp32; dQ of a tile of queries
                  comes from one CTA all the same.
What changes      against bwd4_one: that; what a second launch rounds are sums of dK and dV alone.
What does not     the main loop. Every run gives the same bits, since parts are added in one order.
Supports          as bwd4_one, without packed sequences.
"""

from . import bwd4_one
from .bwd4_one import compile_kernel, kernel_for, run_kernel, work, workspace
from .calls import DIVIDED
from .contract import Problem, Stage
from .device.limits import refuse_policies

__all__ = ["STAGES", "compile_kernel", "kernel_for", "run_kernel", "supports", "work", "workspace"]

STAGES = (
    Stage(
        "bwd4_one_parts",
        "the production backward, of one tile of keys and few heads",
        "the queries that see the tile divided among CTAs, dK and dV in fp32 parts",
        "bwd4_one",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        options=DIVIDED,
        most_keys=bwd4_one.TILE_KV,
    ),
)


def supports(problem: Problem) -> str | None:
    return refuse_policies(problem) or bwd4_one.supports(problem)
