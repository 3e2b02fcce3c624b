"""How 8-bit operands of the FP8 stages lie in memory: plain integers. Imports no compiler.

    Q8, K8        (batch, heads, seqlen, head_dim) e4m3, in rows
    q_scale, k_scale   fp32 (batch, heads, blocks of 64 rows): x ≈ x8 · scale
    Vt8           (batch, kv_heads, head_dim + 8, tokens) e4m3, V transposed, tokens padded to 16 with zeros:
                  Vt8[d, 16·b + i] = V8[16·b + TOKEN_ORDER[i], d]. The last 8 rows hold the weights of one, of
                  which P·V forms the row sums: 2^−e of a token, 0 of padding.
    v_exponent    fp32 (batch, kv_heads, blocks of 64 tokens): e, V ≈ V8 · 2^e

A thread that holds a row of a WGMMA accumulator has columns 2t, 2t + 1 of every 8; as operand A of an 8-bit
product it has columns 4t … 4t + 3 of every 16. The order of tokens makes the one the other, so that P stays
in its registers.
"""

from ..contract import Problem, Scratch

E4M3_MAX = 448.0
# By head_dim the largest code of Q and K of which no sum of products is beyond fp16's 65504: c²·head_dim.
LARGEST_IN_HALF = {64: 30.0, 128: 22.0, 256: 15.0}
# By head_dim how many elements of a row a thread has that rotates it: the order of the transform's sums.
OWN_ROTATED = {64: 32, 128: 32, 256: 64}
# How a stage quantises its inputs: with scales of their blocks, and before that rotated or not.
ROTATED, UNROTATED = "rotated", "unrotated"
BLOCK = 64  # rows that share a scale
TOKENS = 16  # that TOKEN_ORDER permutes; rows of Vt8 are a multiple of them, which is what the TMA asks
TOKEN_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
ONES_ROWS = 8  # the least that a WGMMA takes
EXPONENT_MIN, EXPONENT_MAX = -8, 9  # of V: 2^8 and 2^−9 are e4m3's largest and smallest powers of two
LARGEST_V = E4M3_MAX * 2.0**EXPONENT_MAX  # what V8 · 2^e reaches
# A block's scale is never below that of a maximum of so much: it and its reciprocal stay normal fp32.
SMALLEST_MAXIMUM = 2.0**-100


def padded_tokens(seqlen_kv: int) -> int:
    """The length of Vt8's rows."""
    return (seqlen_kv + TOKENS - 1) // TOKENS * TOKENS


def blocks_of(seqlen: int) -> int:
    """How many scales so many rows have."""
    return (seqlen + BLOCK - 1) // BLOCK


def quantized_shapes(problem: Problem, given_scales: bool = False) -> Scratch:
    """Shapes and dtypes of what the quantising kernels write, by name, in the order of their arguments: the
    codes, and unless scales are given the scales found."""
    b, h, h_kv = problem.batch, problem.heads, problem.kv_heads
    n, n_kv, d = problem.seqlen_q, problem.seqlen_kv, problem.head_dim
    codes = {
        "q8": ((b, h, n, d), "float8_e4m3fn"),
        "k8": ((b, h_kv, n_kv, d), "float8_e4m3fn"),
        "vt8": ((b, h_kv, d + ONES_ROWS, padded_tokens(n_kv)), "float8_e4m3fn"),
    }
    if given_scales:
        return codes
    blocks, blocks_kv = blocks_of(n), blocks_of(n_kv)
    return codes | {
        "q_scale": ((b, h, blocks), "float32"),
        "k_scale": ((b, h_kv, blocks_kv), "float32"),
        "v_exponent": ((b, h_kv, blocks_kv), "float32"),
    }
