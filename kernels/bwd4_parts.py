"""BWD4 for few tiles of keys: what sees a tile divided among CTAs.

The idea          bwd4 keeps dK and dV of a tile of keys in one CTA, over all queries of all query heads of
                  the key head. Of 8 query heads on one key head at 8k tokens that is 64 tiles for 132 SMs, of
                  unequal length under a causal mask; of 4096 queries on 77 keys, one tile for each head. Here
                  a tile is for some of the query heads, or for some of the queries, and leaves its part of dK
                  and dV in fp32; the launch that rounds dQ adds the parts.
What changes      against bwd4: tiles of keys count parts; the epilogue stores accumulators as they are
                  (device/key_parts.py), and `PartSums` rounds their sums beside dQ's.
What does not     the main loops, and everything of dQ, deterministic or not.
Supports          as bwd4, without windows, caps, sinks and packed sequences.
Where to read     bwd4.py, at head_dim 256 bwd4_dkv.py; `division.parts_of` has the choice of parts.
"""

from .bwd4 import Backward
from .bwd4_dkv import KeyGradients
from .bwd4_dq import QueryGradient
from .bwd4_operands import CONFIGS
from .bwd4_passes import (
    DividedFlashAttentionBackward,
    DividedWideFlashAttentionBackward,
    compile_backward,
)
from .calls import DETERMINISTIC, backward_scratch, refuse_backward, run_backward
from .contract import Problem, Scratch, Stage, Work
from .device.compiling import ELEMENTS
from .device.constants import SMS
from .device.limits import refuse_policies, tile_dim
from .device.masks import mask_of
from .division import parts_to_try

STAGES = (
    Stage(
        "bwd4_parts",
        "the production backward, for few tiles of keys",
        "the queries that see a tile of keys divided among CTAs, dK and dV in fp32 parts",
        "bwd4",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        atomics=True,
    ),
    Stage(
        "bwd4_parts_det",
        "the production backward, for few tiles of keys, deterministic",
        "parts and dQ added in one order",
        "bwd4_parts",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        options=DETERMINISTIC,
    ),
)


def supports(problem: Problem) -> str | None:
    return refuse_backward(problem) or refuse_policies(problem)


run_kernel = run_backward


def kernel_for(
    problem: Problem, deterministic: bool = False, sms: int = SMS
) -> DividedFlashAttentionBackward | DividedWideFlashAttentionBackward:
    """The kernels of the problem's head_dim, mask and type."""
    columns = tile_dim(problem)
    options = columns, mask_of(problem), ELEMENTS[problem.dtype]
    if columns > 128:
        main = KeyGradients(*options, divides=True, sms=sms)
        return DividedWideFlashAttentionBackward(main, QueryGradient(*options, sms=sms), problem)
    main = Backward(*options, deterministic, CONFIGS[columns], divides=True, sms=sms)
    return DividedFlashAttentionBackward(main, problem)


def workspace(problem: Problem, deterministic: bool = False, sms: int = SMS) -> Scratch:
    return backward_scratch(problem, deterministic, parts_to_try(problem, sms))


def work(problem: Problem, **options: object) -> list[Work]:
    return kernel_for(problem, **options).work(problem)


def compile_kernel(problem: Problem, **options: object) -> object:
    return compile_backward(kernel_for(problem, **options))
