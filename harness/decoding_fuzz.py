"""Random calls of decode, of the kernels that its cases run, against float64 on the GPU.

    python -m harness.decoding_fuzz           calls 0…511
    python -m harness.decoding_fuzz 300 40    40 from the 300th on

A call follows from its number (`case_of`) and from nothing else: how many sequences, about and beyond the 32
whose lengths a warp has in registers, and how long each is, 0, 1 and the ends of chunks among them. It is
judged as the cases are: by the pass rule, three runs with the same bits, and of new keys what the cache then
holds.
"""

import argparse
import dataclasses
import functools
import random
import sys

from harness.fuzz import length_of
from harness.inputs import hopper_gpu

from .decoding import judge
from .decoding_cases import Case, cases, kernel_of

COUNT = 512
KEYS_MAX = 5000  # of a sequence
ELEMENTS_MAX = 20_000_000  # of K, so that float64 takes a fraction of a second


@functools.cache
def one_of_each_kernel() -> tuple[Case, ...]:
    """Of the cases that one kernel computes, the last."""
    return tuple({repr(kernel_of(case)): case for case in cases()}.values())


def case_of(number: int) -> Case:
    """The number-th random call."""
    rng, found = random.Random(f"decode {number}"), one_of_each_kernel()
    case = found[number % len(found)]
    batch, kv_heads = rng.choice((1, 1, 2, 3, 5, 9, 31, 32, 33, 64)), rng.choice((1, 2, 2, 4))
    most = min(KEYS_MAX, ELEMENTS_MAX // (batch * kv_heads * case.head_dim))
    lengths = tuple(length_of(rng, most) for _ in range(batch))
    if case.whole:  # the call is given no lengths
        lengths = (max(1, lengths[0]),) * batch
    return dataclasses.replace(case, lengths=lengths, kv_heads=kv_heads)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.decoding_fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("first", type=int, nargs="?", default=0, help="the first call's number")
    parser.add_argument("count", type=int, nargs="?", default=COUNT, help="how many")
    args = parser.parse_args(arguments)
    if not hopper_gpu():
        print("harness.decoding_fuzz: there is no Hopper GPU here", file=sys.stderr)
        return 2
    failures = 0
    for number in range(args.first, args.first + args.count):
        reason, _ = judge(case_of(number))
        if reason:
            failures += 1
            print(f"{number}: {case_of(number)}: {reason}", flush=True)
    last = args.first + args.count - 1
    print(f"calls {args.first} to {last}: {args.count - failures} of {args.count} passed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
