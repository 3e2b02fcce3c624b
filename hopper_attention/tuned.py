"""What `hopper_attention.tune` has measured of a GPU, kept beside the compiled kernels."""

import contextlib
import functools
import json
import math
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch

from . import cache
from .kernels import division
from .kernels.device.constants import SMS
from .kernels.division import Tile, Tiles

FILE = "tiles.json"
SMS_MIN = 2  # of a cluster, which decode has


class Gpu(NamedTuple):
    """What choices follow from of a GPU; by default an H200."""

    sms: int = SMS
    tiles: Tiles = division.TILES


H200 = Gpu()
margin: ContextVar[int] = ContextVar("margin", default=0)  # SMs that calls leave free: `leaving`


def gpu(device: torch.device | None = None) -> Gpu:
    """That of a device, by default the current one; H200 where there is none."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return H200
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(max(SMS_MIN, sms - margin.get()), known(torch.cuda.get_device_name(device)))


def check_margin(sm_margin: int) -> None:
    """Raises ValueError unless it is a number of SMs that calls can leave free."""
    if type(sm_margin) is not int or not 0 <= sm_margin <= SMS - SMS_MIN:
        raise ValueError(f"sm_margin must be a number of SMs, from 0 to {SMS - SMS_MIN}, not {sm_margin!r}")


@contextlib.contextmanager
def leaving(sm_margin: int) -> Iterator[None]:
    """Calls inside, in this thread, leave so many SMs free, for a communicator's kernels."""
    check_margin(sm_margin)
    before = margin.set(sm_margin)
    try:
        yield
    finally:
        margin.reset(before)


def path() -> Path | None:
    """Where measured costs are kept; None where there is no folder that is the user's own."""
    folder = cache.folder()
    return None if folder is None else folder / FILE


def save(name: str, tiles: Tiles) -> Path:
    """Keep the costs of a GPU of this name; those of other GPUs stay. Raises RuntimeError where nothing can
    be kept."""
    target = path()
    if target is None:
        raise RuntimeError(
            f"there is no folder of the user's own to keep costs in; name one in {cache.VARIABLE}"
        )
    everything = _read(target) | {name: {"sources": cache.sources(), "tiles": tiles}}
    cache.write_atomically(target, json.dumps(everything, indent=1).encode(), cache.OWN)
    known.cache_clear()
    return target


@functools.cache  # once in a process
def known(name: str) -> Tiles:
    """A GPU's costs as they were measured with these kernels; else the built-in ones."""
    target = path()
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # what is no file of ours
        kept = _read(target)[name] if target is not None else {}
        if kept.get("sources") == cache.sources():
            found = {
                int(head_dim): {int(rows): Tile(*tile) for rows, tile in tiles.items()}
                for head_dim, tiles in kept["tiles"].items()
            }
            if _are_costs(found):
                return found
    return division.TILES


def _are_costs(tiles: Tiles) -> bool:
    """Whether `tune` can have measured these: the built-in shapes, and times that are finite."""
    if {d: [*x] for d, x in tiles.items()} != {d: [*x] for d, x in division.TILES.items()}:
        return False
    both = [(x, division.TILES[d][rows]) for d, shapes in tiles.items() for rows, x in shapes.items()]
    shapes = all((x.keys, x.ctas) == (built_in.keys, built_in.ctas) for x, built_in in both)
    times = [time for x, _ in both for time in x[2:]]
    finite = all(type(time) in (int, float) and 0 <= time < math.inf for time in times)
    return shapes and finite and all(min(x.step, x.alone) > 0 for x, _ in both)


def forget() -> None:
    """Go back to the built-in costs, of every GPU."""
    if (target := path()) is not None:
        target.unlink(missing_ok=True)
    known.cache_clear()


def _read(target: Path) -> dict[str, dict]:
    """What is kept; nothing where that is no file of ours."""
    try:
        found = json.loads(target.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
