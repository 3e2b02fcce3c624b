"""What decode is judged by and timed on: cases and rows, and the kernel that each runs."""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hopper_attention.kernels import calls_decode
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import least_of


@dataclass(frozen=True)
class Row:
    """A batch of sequences with caches, as it is timed."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int = 128
    page: int = 0
    eight_bits: bool = False
    ragged: bool = False  # lengths between 1 and `keys`, at random
    on_device: bool = False  # whether lengths that are all `keys` are given in a tensor nevertheless

    @property
    def reads_lengths(self) -> bool:
        return bool(self.page) or self.ragged or self.on_device

    @property
    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.keys] * self.batch
        return [random.Random(b).randint(1, self.keys) for b in range(self.batch)]

    @property
    def bytes(self) -> int:
        """Of K and V that must be read."""
        return sum(self.lengths) * 2 * self.kv_heads * self.head_dim * (1 if self.eight_bits else 2)

    def __str__(self) -> str:
        more = f" pages of {self.page}" * (self.page > 0) + " e4m3" * self.eight_bits
        more += " ragged" * self.ragged + " lengths" * self.on_device
        shape = f"b{self.batch} h{self.heads}:{self.kv_heads} q{self.queries} n{self.keys} d{self.head_dim}"
        return shape + more


EVEN = [
    Row(1, 32, 8, 1, 2048), Row(1, 32, 8, 1, 8192), Row(1, 64, 8, 1, 8192), Row(4, 16, 1, 1, 16384),
    Row(1, 32, 8, 1, 32768), Row(8, 32, 8, 1, 4096), Row(1, 32, 32, 1, 8192), Row(1, 32, 8, 1, 131072),
    Row(64, 32, 8, 1, 2048), Row(16, 64, 8, 1, 8192), Row(8, 32, 8, 1, 32768), Row(16, 32, 32, 1, 4096),
    Row(64, 32, 8, 1, 8192), Row(8, 32, 8, 4, 8192), Row(1, 32, 8, 8, 32768),
]  # fmt: skip
MORE = [
    *(
        dataclasses.replace(EVEN[i], page=page, on_device=not page)
        for i in (0, 5, 7, 12)
        for page in (0, 16, 64, 256)
    ),
    Row(32, 32, 8, 1, 16384, ragged=True),
    Row(32, 32, 8, 1, 16384, page=16, ragged=True),
    Row(8, 32, 8, 1, 32768, eight_bits=True),
    Row(8, 32, 8, 1, 32768, eight_bits=True, page=64),
    Row(16, 32, 8, 1, 8192, 64),
    Row(8, 32, 8, 1, 8192, 256),
]
ROWS = [*EVEN, *MORE]


# ---- cases ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call to judge. What lies behind a length is NaN, and −1 in the page table."""

    lengths: tuple[int, ...]
    queries: int = 1
    group: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    dtype: str = "bfloat16"
    page: int = 0
    eight_bits: bool = False
    causal: bool = True
    left: int = -1
    appends: int = 0  # new keys
    invariant: bool = False
    whole: bool = False  # all of the cache counts: the call is given no lengths

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads


EDGES = (0, 1, 17, 63, 64, 65, 128, 129, 1000)


def cases() -> Iterator[Case]:
    """Every head_dim, type, number of rows and feature, on lengths 0 and 1, around a chunk, and long."""
    many = tuple(random.Random(1).randint(0, 700) for _ in range(40))
    for head_dim in (64, 128, 256):
        for queries, group in ((1, 1), (1, 8), (4, 4), (8, 4), (16, 4), (16, 8), (9, 16)):
            for lengths in (EDGES, (8199,), many):
                yield Case(lengths, queries, group, head_dim=head_dim)
        for page in (16, 64, 128, 256):
            for eight_bits in (False, True):
                yield Case(EDGES, 1, 4, head_dim=head_dim, page=page, eight_bits=eight_bits)
                yield Case((8199, 300), 4, 4, head_dim=head_dim, page=page, eight_bits=eight_bits)
        yield Case(EDGES, 1, 8, head_dim=head_dim, eight_bits=True)
        yield Case(EDGES, 4, 4, head_dim=head_dim, dtype="float16")
        yield Case(many, 4, 4, head_dim=head_dim, left=100)
        yield Case(EDGES, 4, 4, head_dim=head_dim, left=0, page=16)
        yield Case(EDGES, 1, 4, head_dim=head_dim, appends=1)
        yield Case(EDGES, 4, 4, head_dim=head_dim, appends=4, page=16)
        yield Case(EDGES, 1, 4, head_dim=head_dim, appends=1, page=64, eight_bits=True)
        yield Case((8199, 5000, 1), 4, 4, head_dim=head_dim, invariant=True)
        yield Case((2000,) * 3, 1, 4, head_dim=head_dim, eight_bits=True, whole=True)
        for queries, group in ((1, 4), (4, 4), (8, 4), (16, 4), (16, 8)):
            for lengths in ((1,), (65,) * 5, (2000,) * 3, (8199,)):
                yield Case(lengths, queries, group, head_dim=head_dim, whole=True)
    yield Case((4, 5), 4, 4, causal=False)
    yield Case((4096,) * 4, 1, 16, 1, whole=True)
    yield Case((20001,), 1, 16, 1, whole=True)
    yield Case((4096,) * 8, 1, 4, 8, whole=True)
    yield Case((2000,) * 3, 1, 1, 32, whole=True)
    yield Case((20001,), 8, 4, 1, invariant=True)
    yield Case((8199, 300), 1, 4, page=64, invariant=True)
    yield Case(tuple(n % 200 for n in range(300)), 1, 8, 1)
    yield Case((20001,), 1, 16, 1)
    yield Case((4096,) * 8, 1, 4, 8)
    yield Case((333, 4000), 1, 5, 7)
    # More new keys than a window lets anyone see: they are stored
    for head_dim in (64, 128, 256):
        yield Case(EDGES, 2, 4, head_dim=head_dim, appends=300, page=16, left=20)
    yield Case((1, 500, 8199), 1, 8, appends=300, left=0)
    yield Case((5000,), 1, 4, 1, appends=2000, left=100, page=64, eight_bits=True, invariant=True)
    # Few columns: clusters, of 8 rows too
    yield Case((20001,), 1, 8, 1)
    yield Case((9000, 70, 0), 1, 8, 1, page=64)
    yield Case((5000,), 1, 4, 1, page=16, appends=1)
    yield Case((5000, 1), 1, 4, 1, head_dim=64, page=16, eight_bits=True)


def kernel_of(x: Case | Row) -> tuple[Problem, dict[str, Any]]:
    """The kernel that a case or a row runs, as `launch.kernel_for` takes it."""
    if isinstance(x, Row):
        x = Case(
            (0,) * x.batch, x.queries, x.heads // x.kv_heads, x.kv_heads, x.head_dim, page=x.page,
            eight_bits=x.eight_bits, whole=not x.reads_lengths,
        )  # fmt: skip
    compiled_in = x.head_dim, x.causal and x.queries > 1, x.dtype
    problem = Problem(len(x.lengths), x.heads, x.kv_heads, x.queries, 1, *compiled_in, direction="decode")
    options = calls_decode.options_of(
        problem, not x.whole, x.page, x.eight_bits, x.left >= 0, x.appends > 0, x.invariant
    )
    return least_of(problem), options
