"""V transposed on its way through shared memory: a block's words, four tokens of a column each, become rows
of Vt8 (batch, head, column, token).

    group         16 tokens of a block
    unit          those of one column, four words; which tokens are a word's, `fp8.TOKEN_ORDER` says
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from .fp8 import BLOCK, ONES_ROWS, TOKENS

QUAD = 4  # tokens of a word, words of 16 bytes, lanes of a warp that share a column's 16 tokens
GROUPS = BLOCK // TOKENS  # of 16 tokens
BYTES = (0xFF, 0xFF00, 0xFF0000, -0x1000000)  # of a word; as Int32, or the word would become 64-bit


def own_words(chunks: int, further: int = 0) -> tuple[Int32, Int32, Int32]:
    """(group of 16 tokens, word in the group, chunk of columns) of this thread, or of one `further` on.

    A warp has all four words and 8 chunks of one group, or 4 chunks of two: 32 banks of `unit_of`'s."""
    tidx, _, _ = cute.arch.thread_idx()
    if further:
        tidx += further
    side = min(chunks, 8)  # chunks of a warp
    both = tidx // (QUAD * side)  # groups come next, then the other chunks
    return both % GROUPS, tidx // side % QUAD, both // GROUPS * side + tidx % side


def token_of(word: Int32, i: int) -> Int32:
    """Where token i of a word of Vt8 is in its group: TOKEN_ORDER[4·word + i]."""
    return 2 * word + i % 2 + TOKENS // 2 * (i // 2)


@cute.jit
def blank_past_end(words: cute.Tensor, group, word, seqlen):
    """Zero what (word, token) holds of tokens past the end; they were read from the last row."""
    block, _, _ = cute.arch.block_idx()
    for i in range_constexpr(QUAD):
        past = block * BLOCK + TOKENS * group + token_of(word, i) >= seqlen
        for j in range_constexpr(cute.size(words, mode=[0])):
            words[j, i] = Int32(0) if past else words[j, i]


def words_layout(head_dim: int) -> cute.Layout:
    """(word, unit) in shared memory; a unit is the 16 tokens of a group in one column."""
    return cute.make_layout((QUAD, head_dim * GROUPS), stride=(1, QUAD))


def unit_of(column: Int32, group: Int32, head_dim: int, columns: int) -> Int32:
    """Where the unit of a column and a group is kept. Who writes has chunks of `columns` columns: in the
    plain order those of a warp would share 4 of 32 banks. Who reads takes 8 units in a row, of one chunk."""
    chunks = head_dim // columns
    swizzle = column // columns % 8 if chunks >= 8 else column // columns * 2
    return (column * GROUPS + group) ^ swizzle


@cute.jit
def put_columns(words: list[Int32], sCodes: cute.Tensor, group, word, chunk):
    """A thread's words, a column each, to shared memory."""
    columns = len(words)
    head_dim = cute.size(sCodes, mode=[1]) // GROUPS
    for j in range_constexpr(columns):
        sCodes[word, unit_of(chunk * columns + j, group, head_dim, columns)] = words[j]


@cute.jit
def store_transposed(
    sCodes: cute.Tensor, mVt8, batch, head, seqlen, weights, columns: cutlass.Constexpr,
    threads: cutlass.Constexpr,
):  # fmt: skip
    """A block's units from shared memory to Vt8, the four of a column next to each other; and the weights of
    one, of which `weights` holds four. Their chunks had `columns` columns."""
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    units = cute.size(sCodes, mode=[1])
    head_dim, tokens = units // GROUPS, mVt8.shape[3]
    group = tidx % GROUPS
    first = block * BLOCK + TOKENS * group  # of this thread's units
    if first < tokens:
        for i in range_constexpr(units // threads):
            column = tidx // GROUPS + threads // GROUPS * i
            rX = cute.make_rmem_tensor(cute.make_layout(QUAD), Int32)
            cute.autovec_copy(sCodes[None, unit_of(column, group, head_dim, columns)], rX)
            store_unit(rX, mVt8[batch, head, column, None], first)
        if tidx < ONES_ROWS * GROUPS:
            rX = cute.make_rmem_tensor(cute.make_layout(QUAD), Int32)
            for word in range_constexpr(QUAD):
                rX[word] = Int32(0)
                for i in range_constexpr(QUAD):
                    real = first + token_of(word, i) < seqlen
                    rX[word] = rX[word] | (weights & BYTES[i] if real else Int32(0))
            store_unit(rX, mVt8[batch, head, head_dim + tidx // GROUPS, None], first)


def store_unit(rX: cute.Tensor, mRow: cute.Tensor, first: Int32) -> None:
    """16 tokens of a row of Vt8, from `first` on, a multiple of 16."""
    gX = cute.local_tile(mRow, (TOKENS,), (first // TOKENS,))
    cute.autovec_copy(rX, cute.recast_tensor(gX, Int32))


def transposed_bytes(rows: list[Int32]) -> list[Int32]:
    """Four words of four bytes, as a matrix, transposed."""
    pick = lambda a, b, selector: cute.arch.prmt(a, b, selector)
    evens = [pick(rows[i], rows[i + 1], 0x6240) for i in (0, 2)]  # bytes 0 and 2 of both, interleaved
    odds = [pick(rows[i], rows[i + 1], 0x7351) for i in (0, 2)]
    return [pick(*pair, selector) for selector in (0x5410, 0x7632) for pair in (evens, odds)]
