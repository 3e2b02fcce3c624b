"""`context_parallel`'s messages by copy engines: ranks of one host write into each other's memory.

A communicator's kernels take SMs from the attention beside which they run. Copy engines take none, and who
waits for a message is the stream itself, not a kernel. Built on `torch.distributed._symmetric_memory`, which
maps every rank's buffer into all others, and on the driver's stream memory operations.

A channel has SLOTS places for what is received. Message n of all ranks goes to place n mod SLOTS. Its words,
each written by one rank only and always growing, are in front of the places:

    word                        written by        says
    FREE, place, rank           the receiver      into the sender's: message n may be written to me
    THERE, place, rank          the sender        into the receiver's: message n from me is there
"""

import ctypes
import functools
import math
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .context_parallel import Exchange

SLOTS = 2
FREE, THERE = 0, 1
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
ALIGNED = 256


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed: CUDA's error {status}")


def write_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Write 32 bits behind everything that the stream holds; what it wrote before is seen before."""
    arguments = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(value), 0
    _checked(driver().cuStreamWriteValue32_v2(*arguments), "cuStreamWriteValue32")


def wait_for_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Have the stream wait until 32 bits are at least `value`."""
    arguments = (
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value),
        AT_LEAST,
    )
    _checked(driver().cuStreamWaitValue32_v2(*arguments), "cuStreamWaitValue32")


@dataclass
class Channel:
    """Places for one kind of message in every rank's memory."""

    buffer: torch.Tensor
    handle: object  # of the symmetric memory
    place_bytes: int
    ranks: int
    stream: torch.cuda.Stream
    messages: int = 0

    @classmethod
    def open(cls, group: dist.ProcessGroup, place_bytes: int, device: torch.device) -> "Channel":
        """Collective: every rank opens its channels in one order. Waits for the GPU."""
        import torch.distributed._symmetric_memory as symmetric

        ranks = dist.get_world_size(group)
        size = cls.header(ranks) + SLOTS * place_bytes
        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        buffer.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(buffer, group)
        handle.barrier()  # nobody writes a word that is zeroed after
        torch.cuda.synchronize(device)
        return cls(buffer, handle, place_bytes, ranks, torch.cuda.Stream(device, priority=-1))

    @staticmethod
    def header(ranks: int) -> int:
        return ALIGNED * math.ceil(2 * SLOTS * ranks * 4 / ALIGNED)

    def word(self, holder: int, what: int, place: int, writer: int) -> int:
        """The address of a word in `holder`'s memory."""
        return self.handle.buffer_ptrs[holder] + 4 * ((what * SLOTS + place) * self.ranks + writer)

    def room(
        self, holder: int, place: int, shapes: list[torch.Size], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Tensors in a place of `holder`'s memory, one behind the other."""
        found, at = [], self.header(self.ranks) + place * self.place_bytes
        for shape in shapes:
            found.append(self.handle.get_buffer(holder, shape, dtype, at // dtype.itemsize))
            at += bytes_of(shape, dtype)
        return found


def bytes_of(shape: torch.Size, dtype: torch.dtype) -> int:
    return ALIGNED * math.ceil(math.prod(shape) * dtype.itemsize / ALIGNED)


_channels: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Channel]]" = weakref.WeakKeyDictionary()


class CopyExchange(Exchange):
    """Messages of one call among the ranks of a group, all on one host."""

    def __init__(self, group: dist.ProcessGroup, *largest: torch.Tensor):
        """`largest` are as large as what any rank sends at once."""
        super().__init__(group)
        self.channels = _channels.setdefault(group, {})
        self.most = sum(bytes_of(x.shape, x.dtype) for x in largest)

    def channel(self, kind: str, device: torch.device) -> Channel:
        known = self.channels.get(kind)
        if known is None or known.place_bytes < self.most:
            known = self.channels[kind] = Channel.open(self.group, self.most, device)
        return known

    def post(self, kind, to, sent, source, shapes):
        x = sent[0]
        c = self.channel(kind, x.device)
        c.messages += 1
        n, place, stream = c.messages, c.messages % SLOTS, c.stream
        # Behind the current stream: the last reader of this place is there already, and who makes `sent`.
        stream.wait_stream(torch.cuda.current_stream(x.device))
        write_word(stream, c.word(source, FREE, place, self.rank), n)
        wait_for_word(stream, c.word(self.rank, FREE, place, to), n)
        with torch.cuda.stream(stream):
            for mine, theirs in zip(sent, c.room(to, place, [s.shape for s in sent], x.dtype)):
                theirs.copy_(mine)
                mine.record_stream(stream)
        write_word(stream, c.word(to, THERE, place, self.rank), n)
        received = c.room(self.rank, place, shapes, x.dtype)

        def wait() -> list[torch.Tensor]:
            current = torch.cuda.current_stream(x.device)
            wait_for_word(current, c.word(self.rank, THERE, place, source), n)
            return received

        return wait
