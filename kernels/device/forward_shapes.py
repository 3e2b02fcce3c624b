"""Tile shapes of k6: those it has, those they were chosen from, and what else ablations vary."""

from dataclasses import replace

from ..contract import Problem
from .limits import NARROW_VALUES, tile_dims
from .query_tiles import Config

CONFIGS = {  # by columns of a tile, `limits.tile_dims`; registers of a producer's thread and of a consumer's
    64: Config(consumers=4, tile_kv=64, stages=8, registers=(24, 112), parts=2),
    96: Config(consumers=3, tile_kv=96, stages=3, registers=(32, 160)),
    128: Config(consumers=3, tile_kv=64, stages=4, registers=(32, 160)),
    192: Config(consumers=2, tile_kv=80, stages=2, registers=(24, 240)),
    256: Config(consumers=2, tile_kv=64, stages=2, registers=(24, 240)),
    NARROW_VALUES: Config(consumers=2, tile_kv=96, stages=2, registers=(24, 240)),
}

CANDIDATES = {  # what CONFIGS were chosen from
    64: [replace(CONFIGS[64], parts=parts) for parts in (2, 1, 4)]
    + [Config(3, 96, 5, (32, 160), parts=2), Config(3, 128, 3, (32, 160), parts=4)],
    128: [replace(CONFIGS[128], parts=parts) for parts in (1, 2)]
    + [Config(3, 80, 3, (32, 160)), Config(2, 128, 2, (24, 240))],
}


def config_of(problem: Problem, configs: dict[object, Config] = CONFIGS) -> Config:
    """That of the problem's tiles, of CONFIGS or others like them."""
    columns, of_values = tile_dims(problem)
    return configs[columns if columns == of_values else (columns, of_values)]


MAXIMA = {"share 0.6": {"share": 0.6}, "growth 8 alone": {"share": 0.0}, "exact": {"exact": True}}
VARIANTS = {str(config): {"config": config} for configs in CANDIDATES.values() for config in configs} | MAXIMA


def variants_for(problem: Problem) -> list[str]:
    """The labels in VARIANTS that are candidates at the problem's head_dim."""
    return [*map(str, CANDIDATES.get(problem.head_dim, ())), *MAXIMA]
