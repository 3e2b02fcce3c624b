"""What a launch is given beside its tensors and scratch, each only if the kernel was compiled for it."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from .limits import LISTED


class Given(NamedTuple):
    """Of what a kernel has not, None."""

    scale: object = None  # what scores are multiplied by
    window: object = None  # (left, right), in keys
    softcap: object = None
    sink: object = None  # fp32 (heads,), natural logarithms
    sequences: object = None  # cumulative lengths of queries and of keys, used ones, which of these count


COUNTS = {"scale": 1, "window": 2, "softcap": 1, "sink": 1, "sequences": 5}  # arguments of a launch


def take_given(arguments: list[object], names: tuple[str, ...]) -> Given:
    """The arguments that `names` takes, in the order of COUNTS, off the beginning of the list."""
    found = {}
    for name, count in COUNTS.items():
        if name in names:
            taken = [arguments.pop(0) for _ in range(count)]
            found[name] = taken[0] if count == 1 else tuple(taken)
    return Given(**found)


def take_apart(arguments: tuple[object, ...], names: tuple[str, ...]) -> tuple[object, object, Given, object]:
    """What a forward kernel is launched with behind its tensors: the list of packed tiles or None, the
    counter, what is given, the stream."""
    *rest, stream = arguments
    tiles = rest.pop(0) if "sequences" in names else None
    return tiles, rest.pop(0), take_given(rest, names), stream


def fake_given(heads: object, names: tuple[str, ...]) -> list[object]:
    """Stand-ins for them, of as many query heads."""
    ints = lambda extent: make_fake_tensor(Int32, (extent,), (1,), assumed_align=4)
    ends = cute.sym_int()
    fakes = {
        "scale": [Float32(1.0)],
        "window": [Int32(0), Int32(0)],
        "softcap": [Float32(1.0)],
        "sink": [fake_heads(heads)],
        "sequences": [ints(ends), ints(ends), *(ints(cute.sym_int()) for _ in range(2)), Int32(0)],
    }
    return [fake for name in COUNTS if name in names for fake in fakes[name]]


def fake_heads(heads: object) -> object:
    """A stand-in for a number of each head, fp32 (heads,)."""
    return make_fake_tensor(Float32, (heads,), (1,), assumed_align=4)


def fake_list() -> object:
    """A stand-in for the scratch in which `tile_list.ListTiles` lists tiles."""
    return make_fake_tensor(Float32, (cute.sym_int(), LISTED), (LISTED, 1), assumed_align=16)
