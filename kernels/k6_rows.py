"""K6 in shorter tiles: for problems whose tiles of 192 or 256 queries are few, or half empty.

The idea          A CTA of k6 takes as many queries as keep its tensor cores busy. Of 8 heads of 1024 queries
                  that is 48 tiles for 132 SMs; of a sequence of 128 queries half of one. With fewer
                  consumers a tile is shorter: each takes longer for a query, and more SMs have one.
What changes      against k6: the `Config`; of the shortest tiles at head_dim 64 an SM has three CTAs at once,
                  whose softmax and products lie beside each other as a tall tile's consumers do.
What does not     k6.py, line for line.
Supports          as k6; of head dims where a height has no tile of its own it has k6's, and is not called.
Where to read     k6.py; `division.rows_of` has the choice.
"""

from dataclasses import replace

from . import k6
from .calls import forward_scratch, refuse_forward
from .contract import LazyMaximum, Problem, Scratch, Stage, Work
from .device.limits import NARROW_VALUES
from .device.query_tiles import ROWS, Config

SHORT = {  # by rows of a tile, then as k6.CONFIGS
    192: k6.CONFIGS | {64: Config(consumers=3, tile_kv=96, stages=4, registers=(32, 160), parts=3)},
    128: k6.CONFIGS
    | {
        64: Config(consumers=2, tile_kv=64, stages=8, registers=(24, 240), parts=2),
        96: Config(consumers=2, tile_kv=128, stages=3, registers=(24, 240)),
        128: Config(consumers=2, tile_kv=128, stages=2, registers=(24, 240)),
    },
    64: {
        64: Config(consumers=1, tile_kv=64, stages=3, registers=(24, 136), parts=2, ctas=3),
        96: Config(consumers=1, tile_kv=128, stages=3, registers=(24, 240), parts=2),
        128: Config(consumers=1, tile_kv=128, stages=3, registers=(24, 240), parts=2),
        192: Config(consumers=1, tile_kv=64, stages=3, registers=(24, 240)),
        256: Config(consumers=1, tile_kv=64, stages=2, registers=(24, 240)),
        NARROW_VALUES: Config(consumers=1, tile_kv=128, stages=2, registers=(24, 240), parts=2),
    },
}

STAGES = tuple(
    Stage(
        f"k6_r{rows}",
        f"the production forward, tiles of {rows} queries",
        f"{rows} queries a CTA: more CTAs, or fuller ones",
        "k6",
        model="flash_attention_lazy",
        rounds_p=True,
        options={"rows": rows},
    )
    for rows in SHORT
)

CAPPED_PARTS = 2  # at most: a capped step of three has 26 accesses to local memory more

supports = refuse_forward
run_kernel = k6.run_kernel


def config_for(problem: Problem, rows: int | None) -> Config:
    """That of tiles of so many queries, or k6's."""
    config = k6.config_of(problem, SHORT[rows] if rows else k6.CONFIGS)
    return replace(config, parts=min(config.parts, CAPPED_PARTS)) if problem.softcap > 0 else config


def workspace(problem: Problem, rows: int | None = None, **options: object) -> Scratch:
    if rows is not None:  # of a head_dim that has no such tile they are others
        rows = ROWS * config_for(problem, rows).consumers
    return forward_scratch(problem, rows)


def kernel_for(problem: Problem, rows: int, **options: object) -> k6.FlashAttentionForward:
    return k6.kernel_for(problem, config=config_for(problem, rows), **options)


def work(problem: Problem, rows: int, **options: object) -> list[Work]:
    return k6.work(problem, config=config_for(problem, rows), **options)


def lazy_maximum(problem: Problem, rows: int, **options: object) -> LazyMaximum:
    return k6.lazy_maximum(problem, config=config_for(problem, rows), **options)


def compile_kernel(problem: Problem, rows: int, **options: object) -> object:
    return k6.compile_kernel(problem, config=config_for(problem, rows), **options)
