"""BWD4 for one tile of keys: dQ needs no sum.

The idea          Up to 128 keys, head_dim up to 128, one CTA has all keys that a tile of queries sees. What
                  bwd4 then adds to zeros, and rounds in another launch, is dQ already: it is rounded on its
                  way to shared memory, and stored to the caller's tensor. The sum's write and read, eight
                  bytes an element, are spared, and a launch. Windows of 49 tokens, BERT's 128, a picture
                  that attends to 77 tokens of text. Packed sequences are a tile of keys each, so that
                  nothing need list tiles.
What changes      against bwd4: `leave_dQ` rounds, and the two warps that added store by TMA
                  (`SummedTiles.store_tile`); no zeros, no turns, no postprocess; queries that see no key are
                  visited too, since nobody else writes their zeros. Packed: where tile i lies is read from
                  the lengths of sequence i (device/short_sequences.py).
What does not     the main loop (at head_dim 128 without a mask bwd4_det's). Every run gives the same bits,
                  since nothing is added in any order.
Supports          as bwd4_parts, up to 128 keys and head_dim 128; packed sequences too.
"""

import cutlass.cute as cute

from .bwd4 import Backward
from .bwd4_operands import CONFIGS, TILE_KV
from .bwd4_passes import DividedFlashAttentionBackward, FlashAttentionBackward, compile_backward
from .calls import refuse_backward, run_backward
from .calls_one import one_tile_scratch
from .contract import Problem, Scratch, Stage, Work
from .device.compiling import ELEMENTS
from .device.constants import SMS
from .device.limits import refuse_policies, tile_dim
from .device.masks import mask_of
from .division import parts_to_try

STAGES = (
    Stage(
        "bwd4_one",
        "the production backward, of one tile of keys",
        "dQ stored where it was computed",
        "bwd4",
        direction="bwd",
        model="flash_attention_2_backward",
        rounds_p=True,
        most_keys=TILE_KV,
    ),
)


def supports(problem: Problem) -> str | None:
    if reason := refuse_backward(problem) or refuse_policies(problem, takes=("sequences",)):
        return reason
    if tile_dim(problem) > 128:
        return f"takes heads of up to 128 columns, not {max(problem.dims)}"
    keys = problem.seqlen_kv
    if problem.sequences is not None:
        keys = max((keys for _, keys in problem.sequences), default=0)
    if keys > TILE_KV:
        return f"takes up to {TILE_KV} keys, one tile of them, not {keys}"
    return None


run_kernel = run_backward


class OfShortSequences(Backward):
    """Of packed sequences. One with more keys than it may have, whose gradients are NaN (`Preprocess`), has
    further tiles of keys; their dQ, zero where all pairs are hidden, is not to replace the first one's."""

    def store_tile(self, store, mDQ, sdQ, q_tile, head, place, *barriers):
        behind = place[0] * cute.ceil_div(place[3], self.tile_q)  # the sequence's end: the TMA writes nothing
        super().store_tile(store, mDQ, sdQ, q_tile + behind, head, place, *barriers)


def kernel_for(problem: Problem, divides: bool = False, sms: int = SMS) -> FlashAttentionBackward:
    """The kernels of the problem's head_dim, mask and type; what sees the tile in parts if it `divides`."""
    columns, packed = tile_dim(problem), problem.sequences is not None
    if divides and packed:
        raise ValueError("what sees packed sequences is not divided")
    options = columns, mask_of(problem), ELEMENTS[problem.dtype], False, CONFIGS[columns], divides, sms
    main = (OfShortSequences if packed else Backward)(*options, one_tile=True, packed=packed)
    return (DividedFlashAttentionBackward if divides else FlashAttentionBackward)(main, problem)


def workspace(problem: Problem, divides: bool = False, sms: int = SMS) -> Scratch:
    return one_tile_scratch(problem, parts_to_try(problem, sms) if divides else None)


def work(problem: Problem, **options: object) -> list[Work]:
    return kernel_for(problem, **options).work(problem)


def compile_kernel(problem: Problem, **options: object) -> object:
    return compile_backward(kernel_for(problem, **options))
