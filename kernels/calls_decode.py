"""What a caller of `decode` must know to launch it: which of its kernels a call takes, the scratch that one
needs, the order of its arguments. Imports no compiler."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from .contract import DTYPES, Compiled, Problem, Scratch
from .device.constants import ROWS_MAX
from .device.limits import HEAD_DIMS, refuse_policies

WARPS = 8  # of a CTA, that compute
CHUNK_BYTES = 16384  # of K, and of V: what one stage of the ring takes
ROWS = (8, 16, 32, 64, 128)  # queries × heads of a group that a CTA takes: a kernel for each
FEW = 4  # columns of all sequences, whose pieces are so many that two CTAs better share a slice
PIECES = 2  # that a CTA leaves of sequences it shares with others: of its first and of its last
UNIT_KEYS = 1024  # of a piece, where the pieces are the same in every batch
TEAM_BYTES = 1024  # of a key: so many of its heads, which lie side by side, are read at the same time


def refuse_decode(problem: Problem) -> str | None:
    """Why the kernel refuses a problem, or None."""
    if problem.direction != "decode":
        return f"computes attention to a cache, not {problem.direction!r}"
    if problem.head_dim not in HEAD_DIMS:
        return f"takes head_dim 64, 128 or 256, not {problem.head_dim}"
    if problem.top_left:
        return "aligns a causal mask at the bottom right"
    if reason := refuse_policies(problem):
        return reason
    if problem.batch * problem.heads * problem.seqlen_q > ROWS_MAX:
        return f"takes at most {ROWS_MAX} rows (batch·heads·queries), its row index being 32-bit"
    chunks = math.ceil(max(1, problem.seqlen_kv) * problem.head_dim / CHUNK_BYTES)  # of the largest, e4m3's
    if problem.batch * columns_of(problem) * (2 * chunks + 1) > ROWS_MAX:
        return "takes fewer keys: the list of all chunks of 16 KiB of K is counted in 32 bits"
    return None


def rows_of(problem: Problem) -> int:
    """The rows of the kernel that takes a problem: the fewest that hold them, or the most there are."""
    wanted = min(problem.seqlen_q * (problem.heads // max(1, problem.kv_heads)), ROWS[-1])
    return next(rows for rows in ROWS if rows >= wanted)


def columns_of(problem: Problem) -> int:
    """How often a sequence's keys are read: by each key head, and by each block of its rows."""
    rows = problem.seqlen_q * (problem.heads // max(1, problem.kv_heads))
    return problem.kv_heads * math.ceil(rows / rows_of(problem))


def cluster_of(problem: Problem) -> int:
    """CTAs that share a slice and put its results together before they go to memory: two where pieces are
    large, or many of a sequence. With more rows shared memory has no room for that."""
    rows = rows_of(problem)
    return 2 if rows in (16, 32) or (rows == 8 and problem.batch * columns_of(problem) <= FEW) else 1


def chunk_of(head_dim: int, eight_bits: bool) -> int:
    """Keys of a chunk."""
    return CHUNK_BYTES // (head_dim * (1 if eight_bits else 2))


def page_sizes(head_dim: int, eight_bits: bool) -> str:
    """The sizes of pages that `takes_pages`, in words."""
    chunk = chunk_of(head_dim, eight_bits)
    parts = [str(size) for size in (16, 32, 64, 128) if size < chunk]
    return f"{', '.join(parts)} or a multiple of {chunk} keys"


def takes_pages(page_size: int, head_dim: int, eight_bits: bool) -> bool:
    chunk = chunk_of(head_dim, eight_bits)
    return page_size >= 16 and (page_size % chunk == 0 or chunk % page_size == 0)


def options_of(
    problem: Problem, lengths: bool, page_size: int, eight_bits: bool, window: bool, appends: bool,
    invariant: bool,
) -> dict[str, Any]:  # fmt: skip
    """Of the kernel that takes a call: options of `decode.Decode`. `page_size` 0: no pages."""
    chunk = chunk_of(problem.head_dim, eight_bits)
    return {
        "rows": rows_of(problem),
        "lengths": lengths or page_size > 0,
        "box": min(page_size, chunk),
        "eight_bits": eight_bits,
        "window": window,
        "appends": appends,
        "unit": max(1, UNIT_KEYS // chunk) if invariant else 0,
        "cluster": 1 if invariant else cluster_of(problem),
    }


def kernels() -> Iterator[tuple[Problem, dict[str, Any]]]:
    """Everything that a call can have compiled, as (least problem of a kernel, options): a closed list."""
    choices = itertools.product(HEAD_DIMS, DTYPES, (False, True), ROWS, (False, True))
    for head_dim, dtype, causal, rows, eight_bits in choices:
        least = Problem(1, 1, 1, 1, 1, head_dim, causal, dtype, direction="decode")
        chunk = chunk_of(head_dim, eight_bits)
        pages = [0] + [page for page in (16, 32, 64, 128, 256) if page <= chunk]
        for page, lengths in ((0, False), *((page, True) for page in pages)):
            for window, appends, invariant in itertools.product((False, True), repeat=3):
                for batch in (1, FEW + 1) if rows == ROWS[0] and not invariant else (1,):
                    problem = least.with_(batch=batch, heads=rows)
                    if lengths or not appends:
                        yield (
                            least,
                            options_of(problem, lengths, page, eight_bits, window, appends, invariant),
                        )


def decode_scratch(problem: Problem, options: dict[str, Any], sms: int) -> Scratch:
    """Pieces of O and of the LSE, and how many of each are there. No two launches at once may share it."""
    rows, unit = options["rows"], options["unit"]
    columns = problem.batch * columns_of(problem) * options["cluster"]
    pieces = PIECES * sms
    if unit:
        keys = unit * chunk_of(problem.head_dim, options["eight_bits"])
        pieces = columns * max(1, math.ceil(problem.seqlen_kv / keys))  # never in clusters
    return {
        "pieces": ((pieces, rows, problem.head_dim), "float32"),
        "pieces_lse": ((pieces, rows), "float32"),
        "arrived": ((columns * WARPS,), "int32"),
    }


def together_of(problem: Problem, options: dict[str, Any], sms: int) -> int:
    """How many CTAs, or clusters, work on the same keys at the same time, each for another column: those of
    TEAM_BYTES of a key, or fewer, so that columns are divided evenly and at most 7 % of the CTAs are without
    work."""
    columns, workers = columns_of(problem), sms // options["cluster"]
    heads = max(1, TEAM_BYTES // (problem.head_dim * (1 if options["eight_bits"] else 2)))
    most = heads * (columns // max(1, problem.kv_heads))  # and of each the blocks of its rows
    counts = range(1, min(columns, workers, most) + 1)
    return max((n for n in counts if columns % n == 0 and workers // n * n >= 0.93 * workers), default=1)


def launch_decode(
    compiled: Compiled, q, k, v, o, lse, lengths, table, new, descales, scratch, together: int, scale: float,
    left: int | None,
) -> None:  # fmt: skip
    """All tensors (batch or page, seqlen, heads, head_dim), lse (batch, heads, queries); `new` and `descales`
    are pairs, for K and V, of tensors or None."""
    compiled(q, k, v, o, lse, lengths, table, *new, *descales, *scratch, together, scale, left)
