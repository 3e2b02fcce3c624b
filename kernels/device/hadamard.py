"""The Walsh–Hadamard transform, in fp32, of rows that neighbouring lanes hold in chunks of 16 columns."""

import cutlass.cute as cute
from cutlass import Float32, Int32


def hadamard(x: list[Float32], lanes: int) -> list[Float32]:
    """√d times the Walsh–Hadamard transform of a row: sums and differences of all that differ in one bit of
    their column, bit after bit: first the bits inside a half of the thread's values, then the one that tells
    its halves apart, then those of the lane.

    Two neighbours differ in a bit of their columns. One keeps its sums and gives its differences, the other
    the reverse: then each has all that one half of the next sums and differences are of, and half as much is
    sent as if each were to have both. What comes out is where `transformed_chunks` says, and of the signs of
    `transformed_signs`.
    """
    half = len(x) // 2
    x = butterflies(x, [1 << i for i in range(half.bit_length() - 1)])
    kept, given = x[:half], x[half:]
    bits = lanes.bit_length() - 1
    for bit in range(bits + 1):
        sign = minus_one_if(1 << bit) if bit < bits else 1.0
        pairs = list(zip(kept, given))
        kept, given = [a + b * sign for a, b in pairs], [a - b * sign for a, b in pairs]
        if bit < bits:
            given = [cute.arch.shuffle_sync_bfly(b, 1 << bit) for b in given]
    return kept + given


def transformed_chunks(lane: Int32, lanes: int, chunks: int) -> tuple[Int32, ...]:
    """Where a thread's `chunks`, those of one half and then of the other, are after `hadamard`: each exchange
    swaps what the halves differ in, at first the highest bit of the chunk, with a bit of the lane."""
    of_half = chunks // 2
    first = (lane & 1) * (lanes * of_half) + (lane >> 1)
    further = [lanes * i + lanes // 2 * half for half in range(2) for i in range(of_half)]
    return tuple(first + places if places else first for places in further)


def transformed_signs(lane: Int32, lanes: int) -> tuple[Float32, Float32]:
    """What a thread's two halves are to be multiplied by after `hadamard`: the difference of two neighbours
    is that of the lower from the higher in the one with the bit, and is kept there if the next bit is set."""
    bits = lanes.bit_length() - 1
    swapped = lane & lane >> 1
    odd = swapped ^ swapped >> 1  # of its bits, which are two at most
    return minus_if(odd), minus_if(odd ^ lane >> bits - 1)


def minus_one_if(bit: int) -> Float32:
    """−1 in lanes with this bit, 1 in others."""
    return minus_if(cute.arch.lane_idx() >> bit.bit_length() - 1)


def minus_if(odd: Int32) -> Float32:
    """−1 for an odd number, 1 for an even one."""
    return (odd << 31 | 0x3F800000).bitcast(Float32)


def butterflies(x: list[Float32], distances: list[int]) -> list[Float32]:
    for distance in distances:
        x = [x[i] + x[i ^ distance] if i & distance == 0 else x[i ^ distance] - x[i] for i in range(len(x))]
    return x
