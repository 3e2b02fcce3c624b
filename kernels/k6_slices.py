"""K6 in equal slices: for problems whose tiles of queries do not fill the GPU, or fill it unevenly.

The idea          96 tiles of 192 queries leave 36 of 132 SMs idle; 64 tiles of 8192 keys leave half. Here a
                  tile's keys go to as many CTAs as it takes for all to end together: all steps stand in one
                  list, and each CTA has an equal slice of it.
What changes      against k6: which keys a CTA takes of a tile (device/key_slices.py); where it does not have
                  all of them it leaves O, maxima and sums in fp32 to the CTA that has the last, or, of many
                  pieces, to all (device/piece_sums.py). Some tiles' consumers begin one after the other.
What does not     the main loops.
Supports          as k6, without windows, caps, sinks and packed sequences; a causal mask at unequal lengths
                  aligned at the bottom right only.
Where to read     these two; hopper_attention/ways.py has the choice.
"""

from dataclasses import replace

from . import k6, k6_rows
from .calls import run_forward
from .calls_slices import refuse_slices, slices_scratch
from .contract import LazyMaximum, Problem, Scratch, Stage, Work
from .device.constants import SMS
from .device.limits import tile_dim
from .device.query_tiles import ROWS, Config, work_on_query_tiles

STAGES = (
    Stage(
        "k6_slices",
        "the production forward, in equal slices",
        "the keys of a tile of queries among CTAs, which all end together",
        "k6",
        model="flash_attention_lazy",
        rounds_p=True,
    ),
    Stage(
        "k6_slices_r192",
        "the production forward, in equal slices, tiles of 192 queries",
        "the same of 192 queries a CTA at head_dim 64, whose consumers begin one after the other",
        "k6_slices",
        model="flash_attention_lazy",
        rounds_p=True,
        options={"rows": 192},
    ),
    Stage(
        "k6_slices_r64",
        "the production forward, in equal slices, tiles of 64 queries",
        "the same of 64 queries a CTA: for few queries to many keys",
        "k6_slices",
        model="flash_attention_lazy",
        rounds_p=True,
        options={"rows": 64},
    ),
)

IN_TURN = 192, 64  # queries and columns of the tiles whose consumers begin one after the other

supports = refuse_slices
run_kernel = run_forward


def workspace(problem: Problem, rows: int | None = None, sms: int = SMS) -> Scratch:
    config = config_for(problem, rows)
    return slices_scratch(problem, ROWS * config.consumers, sms * config.ctas)


def config_for(problem: Problem, rows: int | None) -> Config:
    """`k6_rows`'; those of IN_TURN in turn, and with registers enough for a producer that looks for pieces
    where a CTA has some to spare."""
    config = k6_rows.config_for(problem, rows)
    if config.consumers == config.ctas == 1:
        config = replace(config, registers=(40, config.registers[1]))
    return replace(config, in_turn=(rows, tile_dim(problem)) == IN_TURN)


def kernel_for(problem: Problem, rows: int | None = None, sms: int = SMS) -> k6.FlashAttentionForward:
    problem = problem.with_(top_left=False)  # at equal lengths the same mask, but not to a piece
    return k6.kernel_for(problem, config=config_for(problem, rows), sms=sms, sliced=True)


def work(problem: Problem, **options: object) -> list[Work]:
    return work_of(kernel_for(problem, **options), problem)


def work_of(kernel: k6.FlashAttentionForward, problem: Problem) -> list[Work]:
    found = work_on_query_tiles(kernel, problem)
    # A further loop adds pieces, where they are few: a CTA leaves one at most. The words of one or two
    # consumers that one is left take 8 bytes of shared memory, of which `smem_bytes` counts 16.
    pieces, spare = kernel.sms * kernel.config.ctas / max(1, found.passes), 8 * (kernel.consumers <= 2)
    trips = *found.trips, pieces
    return [replace(found, trips=trips, smem_bytes=found.smem_bytes - spare)]


def lazy_maximum(problem: Problem, rows: int | None = None, **_: object) -> LazyMaximum:
    return k6.lazy_maximum(problem, config=config_for(problem, rows))


def compile_kernel(problem: Problem, **options: object) -> object:
    return k6.compile_forward(kernel_for(problem, **options), problem)
