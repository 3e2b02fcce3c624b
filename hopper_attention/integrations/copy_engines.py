"""`context_parallel`'s messages by copy engines: ranks of one host write into each other's memory.

A communicator's kernels take SMs from the attention beside which they run. Copy engines take none, and who
waits for a message is the stream itself, not a kernel. Built on `torch.distributed._symmetric_memory`, which
maps every rank's buffer into all others, and on the driver's stream memory operations.

A channel has two places for what is received; message n of all ranks goes to place n mod 2. Its words, each
written by one rank only and always growing, are in front of them:

    word                        written by        says
    FREE, place, rank           the receiver      into the sender's: message n may be written to me
    THERE, place, rank          the sender        into the receiver's: message n from me is there
"""

import contextlib
import ctypes
import datetime
import functools
import math
import os
import platform
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from .exchange import Exchange

PLACES = 2  # who posts a message has enqueued the last reader of the one two before
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


@dataclass(eq=False)
class Channel:
    """Places for one kind of message in every rank's memory."""

    buffer: torch.Tensor
    handle: object  # of the symmetric memory
    place_bytes: int
    ranks: int
    stream: torch.cuda.Stream
    timeout: float  # seconds
    messages: int = 0
    last: tuple[torch.cuda.Event, float] | None = None  # behind the last wait, and when that was enqueued
    user: torch.cuda.Stream | None = None  # who reads what has come, and makes what is sent

    @classmethod
    def open(cls, group: dist.ProcessGroup, place_bytes: int, device: torch.device) -> "Channel":
        """Collective: every rank opens its channels in one order. Waits for the GPU."""
        import torch.distributed._symmetric_memory as symmetric

        ranks = dist.get_world_size(group)
        size = cls.header(ranks) + PLACES * place_bytes
        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        buffer.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(buffer, group)
        handle.barrier()  # nobody writes a word that is zeroed after
        torch.cuda.synchronize(device)
        stream = torch.cuda.Stream(device, priority=-1)
        return cls(buffer, handle, place_bytes, ranks, stream, timeout_of(group, device))

    @staticmethod
    def header(ranks: int) -> int:
        return ALIGNED * math.ceil(2 * PLACES * ranks * 4 / ALIGNED)

    def word(self, holder: int, what: int, place: int, writer: int) -> int:
        """The address of a word in `holder`'s memory."""
        return self.handle.buffer_ptrs[holder] + 4 * ((what * PLACES + place) * self.ranks + writer)

    def follow(self, user: torch.cuda.Stream) -> None:
        """Messages from here on come behind what the stream that used the channel before holds now, where
        that is another: it may still read a place."""
        if self.user is not None and self.user != user:
            self.stream.wait_stream(self.user)
        self.user = user

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


def usable(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether copy engines reach every rank of a group: all are on one host, and a channel opens. Collective;
    every rank gets the same answer, and it is kept."""
    if group not in _usable:
        everyone: list[object] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, _host(), group=group)
        opened = len(set(everyone)) == 1
        if opened:
            try:
                Channel.open(group, ALIGNED, device)
                driver().cuStreamWaitValue32_v2  # noqa: B018  a driver that has none raises
            except Exception:
                opened = False
            dist.all_gather_object(everyone, opened, group=group)
            opened = all(everyone)
        _usable[group] = opened
    return _usable[group]


def _host() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + platform.node()
    return platform.node()


_usable: "weakref.WeakKeyDictionary[dist.ProcessGroup, bool]" = weakref.WeakKeyDictionary()


# ---- a rank that does not come ----------------------------------------------------------------------------


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Of a process group, in seconds; torch's default where it does not tell."""
    with contextlib.suppress(Exception):
        return group._get_backend(device).options._timeout.total_seconds()
    return datetime.timedelta(minutes=10).total_seconds()


@dataclass
class Watch:
    """A thread that ends the process where a message has not come within the group's timeout, as NCCL's
    watchdog does: the GPU waits for it, and would forever. It looks only at what is that old."""

    channels: "weakref.WeakSet[Channel]" = field(default_factory=weakref.WeakSet)
    thread: threading.Thread | None = None

    def overdue(self, now: float) -> Channel | None:
        for channel in list(self.channels):
            if channel.last and now - channel.last[1] > channel.timeout and not channel.last[0].query():
                return channel
        return None

    def add(self, channel: Channel) -> None:
        self.channels.add(channel)
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="context_parallel watch", daemon=True)
            self.thread.start()

    def run(self) -> None:
        while True:
            time.sleep(max(0.1, min([5.0, *(x.timeout / 4 for x in list(self.channels))])))
            if (late := self.overdue(time.monotonic())) is not None:
                print(
                    f"context_parallel_attention: message {late.messages} has not come within the group's "
                    f"timeout of {late.timeout:g} s; another rank is gone. The GPU waits for it: aborting.",
                    file=sys.stderr,
                    flush=True,
                )
                os.abort()


_watch = Watch()
watch = _watch.add


# ---- the exchange -----------------------------------------------------------------------------------------


class CopyExchange(Exchange):
    """Messages of one call among the ranks of a group, all on one host."""

    def __init__(self, group: dist.ProcessGroup, largest: dict[str, int]):
        """`largest` has the bytes of each kind's largest message, of any rank."""
        super().__init__(group)
        self.channels, self.largest = _channels.setdefault(group, {}), largest
        self.used: dict[str, Channel] = {}

    def channel(self, kind: str, device: torch.device) -> Channel:
        known = self.channels.get(kind)
        most = self.largest[kind]
        if known is None or known.place_bytes < most:
            known = self.channels[kind] = Channel.open(
                self.group, ALIGNED * math.ceil(most / ALIGNED), device
            )
            watch(known)
        return known

    def post(self, kind, to, sent, source, shapes):
        x = sent[0]
        c = self.channel(kind, x.device)
        c.messages += 1
        n, place, stream = c.messages, c.messages % PLACES, c.stream
        # Behind the current stream: the last reader of this place is there already, and who makes `sent`.
        c.follow(torch.cuda.current_stream(x.device))
        stream.wait_stream(c.user)
        self.used[kind] = c
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
            c.follow(current)
            wait_for_word(current, c.word(self.rank, THERE, place, source), n)
            event = torch.cuda.Event()
            event.record(current)
            c.last = event, time.monotonic()
            return received

        return wait

    def finish(self) -> None:
        # A message is copied when its receiver has a place for it, which may be two steps behind: K and V are
        # the caller's until then. `record_stream` keeps their memory from the allocator, but not from who
        # writes to them in place.
        for c in self.used.values():
            torch.cuda.current_stream(c.buffer.device).wait_stream(c.stream)
