"""BWD4 for few key heads: the query heads of a key head divided among CTAs.

The idea          bwd4 keeps dK and dV of a tile of keys in one CTA, over all query heads of the key head. Of
                  8 query heads and one key head at 8k tokens that is 64 tiles for 132 SMs, of unequal length
                  under a causal mask. Here a tile is for some of the query heads, and leaves its part of dK
                  and dV in fp32; two more passes add the parts.
What changes      against bwd4: tiles of keys count key heads times parts; the epilogue stores accumulators
                  as they are (device/key_parts.py), and two postprocesses round their sum.
What does not     the main loop, and everything of dQ.
Supports          as bwd4, head_dim 64 and 128.
Where to read     bwd4.py; `calls.parts_of` has the choice of how many parts.
"""

from .bwd4 import Backward
from .bwd4_operands import CONFIGS
from .bwd4_passes import DividedFlashAttentionBackward, compile_backward
from .calls import backward_scratch, parts_of, refuse_divided, run_backward
from .contract import Problem, Scratch, Stage, Work
from .device.compiling import ELEMENTS
from .device.masks import mask_of

STAGES = (
    Stage(
        "bwd4_gqa",
        "the production backward, for few key heads",
        "query heads of a key head divided among CTAs, dK and dV in fp32 parts",
        "bwd4",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        atomics=True,
    ),
)

supports = refuse_divided
run_kernel = run_backward


def kernel_for(problem: Problem) -> DividedFlashAttentionBackward:
    """The kernels of the problem's head_dim, mask and type."""
    options = problem.head_dim, mask_of(problem), ELEMENTS[problem.dtype]
    return DividedFlashAttentionBackward(Backward(*options, False, CONFIGS[problem.head_dim], divides=True))


def workspace(problem: Problem) -> Scratch:
    """Divided as `parts_of` has it, and where that has bwd4 as faster, in as few parts as there can be."""
    parts, group = parts_of(problem), problem.heads // max(1, problem.kv_heads)
    if parts == 1 and group > 1:
        parts = next(x for x in range(2, group + 1) if group % x == 0)
    return backward_scratch(problem, False, parts)


def work(problem: Problem) -> list[Work]:
    return kernel_for(problem).work(problem)


def compile_kernel(problem: Problem) -> object:
    return compile_backward(kernel_for(problem), problem)
