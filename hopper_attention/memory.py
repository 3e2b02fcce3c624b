"""What launches need beside their tensors: scratch, counters that begin at zero, and who keeps them."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from .kernels.contract import Scratch
from .layouts import Dense, as_argument, dense
from .plans import Kept, keep

COUNTERS_MAX = 256
# A launch's scratch of up to so many bytes its stream keeps, with what was too small before it: allocating
# takes longer than so short a kernel. Of the forward pass it is the LSE that nobody asked for.
KEPT_BYTES = {"fwd": 2**18, "bwd": 2**24}
ZEROS = 2**21  # counters for launches in CUDA graphs, of a device: 8 MiB, as often as half of them are gone
TO_LINE = 32  # numbers of 4 bytes: what is divided is divided at 128 bytes

Launch = Callable[..., None]
Place = tuple[slice, slice]  # of batches and of heads
WHOLE: Place = slice(None), slice(None)

# What PyTorch's own compiler emits for the same: their public forms take two to four times as long.
empty = torch._C._dynamo.guards._empty_strided_cuda  # of shape, strides and type, on the current device
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None: PyTorch without CUDA
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

_counters: dict[tuple[object, ...], list[torch.Tensor]] = {}
_memory: dict[tuple[object, ...], torch.Tensor] = {}  # what streams keep, by stream, device, direction, type
_zeros: dict[int, torch.Tensor] = {}  # by device: those that no graph has yet
_of_graphs: list[torch.Tensor] = []  # all that were ever made: a graph keeps nothing but an address
_handing_out = threading.Lock()


class Part(NamedTuple):
    """A launch: how its kernel is launched; where in q and what is shaped like it, and in k, its batches and
    heads lie; its scratch."""

    launch: Launch
    at_q: Place
    at_kv: Place
    floats: tuple[Dense, ...]
    counters: tuple[Dense, ...]  # int32: after the floats among a launch's arguments
    direction: str = ""  # of what is kept: no forward launch shares it with a backward pass
    kept: dict[int, list[object]] | None = None  # by stream; None of what is not kept


def part_of(launch: Launch, at_q: Place, at_kv: Place, scratch: Scratch, direction: str = "") -> Part:
    """With a direction, its scratch may be kept: that of "bwd" is for launches of one thread at a time."""
    every = [dense(shape, getattr(torch, dtype)) for shape, dtype in scratch.values()]
    floats = tuple(x for x in every if x[2] is not torch.int32)
    small = sum(4 * math.prod(shape) for shape, _ in scratch.values()) <= KEPT_BYTES.get(direction, -1)
    return Part(launch, at_q, at_kv, floats, tuple(every[len(floats) :]), direction, {} if small else None)


def scratch_of(part: Part, device: torch.device) -> list[object]:
    """Scratch for a launch, which may hold anything; but counters start at zero, and every launch leaves them
    there.

    Counters, and what is small, are kept for the current stream, in which launches come one after another.
    What a CUDA graph captures has its own: its replays may run beside anything.
    """
    stream = current_stream(device.index)
    if stream and is_capturing():  # 0 is the default stream, which cannot be captured
        return [empty(*x) for x in part.floats] + _counters_of_a_graph(part, device)
    if part.kept is not None:
        kept = part.kept.get(stream)
        return _of_stream(part, stream, device) if kept is None else kept
    place = stream, device.index, part.direction, part.counters
    counters = _counters.get(place)
    if counters is None:
        _make_zeros_for_graphs(device)
        counters = keep(_counters, COUNTERS_MAX, place, zeros_to_keep(part.counters, device))
    return [empty(*x) for x in part.floats] + counters


def _of_stream(part: Part, stream: int, device: torch.device) -> list[object]:
    """Scratch for launches of one direction on a stream: places in memory that all of them share."""
    _make_zeros_for_graphs(device)
    found = []
    for wanted in (part.floats, part.counters):
        sizes = _sizes_of(wanted)
        place = stream, device.index, part.direction, wanted is part.floats
        memory = _memory.get(place)
        if memory is None or memory.numel() < sum(sizes):  # smaller ones serve whoever has a part of them
            grown = 0 if memory is None else min(2 * memory.numel(), KEPT_BYTES[part.direction] // 4)
            size = max(sum(sizes), grown)
            kind = torch.float32 if wanted is part.floats else torch.int32
            (memory,) = zeros_to_keep((dense((size,), kind),), device)
            keep(_memory, COUNTERS_MAX, place, memory)
        found += [as_argument(x) for x in _divided(memory, sizes, wanted)]
    part.kept[stream] = found
    return found


def _counters_of_a_graph(part: Part, device: torch.device) -> list[torch.Tensor]:
    """Zeros that were made before, of which no graph has these, as far as they go: zeroing some would be a
    kernel in every replay, and take as long as a short kernel does."""
    sizes = _sizes_of(part.counters)
    with _handing_out:  # none to two graphs that two threads capture
        left = _zeros.get(device.index)
        enough = left is not None and left.numel() >= sum(sizes)
        if enough:
            _zeros[device.index] = left[sum(sizes) :]
    return _divided(left, sizes, part.counters) if enough else [empty(*x).zero_() for x in part.counters]


def _make_zeros_for_graphs(device: torch.device) -> None:
    """Outside of graphs, where memory can be had: whoever captures a call has made one like it before."""
    with _handing_out:  # until they are zero, for a graph may run on any stream
        left = _zeros.get(device.index)
        if left is None or left.numel() < ZEROS // 2:
            (zeros,) = zeros_to_keep((dense((ZEROS,), torch.int32),), device)
            torch.cuda.current_stream(device).synchronize()
            _of_graphs.append(zeros)
            _zeros[device.index] = zeros


def _sizes_of(wanted: tuple[Dense, ...]) -> list[int]:
    return [-(-math.prod(shape) // TO_LINE) * TO_LINE for shape, *_ in wanted]


def _divided(memory: torch.Tensor, sizes: list[int], wanted: tuple[Dense, ...]) -> list[torch.Tensor]:
    places = memory[: sum(sizes)].split(sizes)
    return [x[: math.prod(shape)].view(shape) for x, (shape, *_) in zip(places, wanted)]


def zeros_to_keep(wanted: tuple[Dense, ...], device: torch.device) -> list[torch.Tensor]:
    """As `to_keep`."""
    return to_keep(lambda: [empty(*dense).zero_() for dense in wanted], device)


def to_keep(make: Callable[[], Kept], device: torch.device) -> Kept:
    """What `make` allocates on the current stream, from another thread: `torch.compile`, with
    mode="reduce-overhead", has this one allocate in a CUDA graph's memory while it warms up, and nothing that
    stays may lie there."""
    stream = torch.cuda.current_stream(device)

    def run() -> Kept:
        with torch.cuda.stream(stream):  # and its device
            return make()

    with ThreadPoolExecutor(1) as another:
        return another.submit(run).result()
