"""What tiles of the forward pass cost on this GPU, measured; the library then chooses their heights by it.

    python -m hopper_attention.tune            measure, print, and keep beside the compiled kernels
    python -m hopper_attention.tune --forget   go back to the built-in costs, an H200's

`division.forward_us` says how a time follows from the costs; here they follow from times. Kernels and the
number of parts of the backward pass stay as they are, and so do the costs of decode and of joining slices,
which few queries are chosen by. Takes about a minute, most of it compiling.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch

from . import production, tuned
from .kernels import division
from .kernels.contract import Problem
from .kernels.division import Tile, Tiles
from .ways import Way

FEW, MANY = 8, 32  # steps of a tile in two launches that differ by nothing else
REPEATS = 30
MEMORY_BYTES = 2**28  # written between launches, so that L2 is as cold as in a model

Timer = Callable[[Problem, int], float]
"""µs of a forward pass in tiles of so many rows."""


def costs(head_dim: int, rows: int, sms: int, time_us: Timer) -> Tile:
    """The costs of a tile shape, from five launches whose tiles are one for each place, or two.

    A tile is a query head of its own and all heads share a key head, so that keys come from L2. Raises
    RuntimeError where the times cannot be: noise is larger than what is measured.
    """
    built_in = division.TILES[head_dim][rows]

    def launch(tiles: int, steps: int) -> float:
        return time_us(Problem(1, tiles, 1, rows, steps * built_in.keys, head_dim, False), rows)

    places, ctas = sms * built_in.ctas, built_in.ctas
    few, many, twice = launch(places, FEW), launch(places, MANY), launch(2 * places, FEW)
    step = (many - few) / (MANY - FEW) / ctas
    alone = (launch(sms, MANY) - launch(sms, FEW)) / (MANY - FEW) if ctas > 1 else step
    tile = (twice - few) / ctas - FEW * step
    call = few - ctas * (FEW * step + tile)
    found = Tile(built_in.keys, ctas, step, max(step, alone), max(0.0, tile), max(0.0, call))
    if step <= 0 or alone > 1.05 * ctas * step:
        raise RuntimeError(
            f"the times of tiles of {rows} queries at head_dim {head_dim} make no sense: {found}"
        )
    return found


def measured(sms: int, time_us: Timer) -> Tiles:
    """The costs of every tile shape."""
    return {
        head_dim: {rows: costs(head_dim, rows, sms, time_us) for rows in tiles}
        for head_dim, tiles in division.TILES.items()
    }


def on_this_gpu(problem: Problem, rows: int) -> float:
    """The median of some launches, each on a cold L2, by CUDA's events."""
    make = lambda *shape: torch.randn(*shape, problem.head_dim, device="cuda", dtype=torch.bfloat16)
    q = make(problem.batch, problem.heads, problem.seqlen_q)
    k, v = (make(problem.batch, problem.kv_heads, problem.seqlen_kv) for _ in range(2))
    plan = production._plan_forward(q, k, v, None, problem.causal, problem.top_left, Way(rows))
    flush = torch.empty(MEMORY_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(200_000)  # cycles: the host is done with the launch before the GPU begins it
        begin.record()
        production.forward(q, k, v, None, problem.causal, problem.top_left, True, plan)
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hopper_attention.tune", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--forget", action="store_true", help="go back to the built-in costs")
    forgets = parser.parse_args(arguments).forget
    if not forgets and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        print("hopper_attention.tune: needs a Hopper GPU", file=sys.stderr)
        return 2
    try:
        if forgets:
            tuned.forget()
            return 0
        tiles = measured(tuned.gpu().sms, on_this_gpu)
        for head_dim, of_rows in tiles.items():
            for rows, tile in of_rows.items():
                print(
                    f"head_dim {head_dim}, {rows} queries: {tile}, built in: {division.TILES[head_dim][rows]}"
                )
        print(f"wrote {tuned.save(torch.cuda.get_device_name(), tiles)}")
    except (RuntimeError, OSError) as error:  # OSError: a full disk, what is no file
        print(f"hopper_attention.tune: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
