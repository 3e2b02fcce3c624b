"""The cases of `ref_check.py` by name, which the files that hold them fill."""

from collections.abc import Callable, Iterator

import torch

# Of which direction or stage a case is, what it does, and which of `Problem.policies` a stage takes for it.
CASES: dict[str, tuple[str | None, Callable[[str, object], Iterator[str]], str | None]] = {}


def case(direction: str | None = None, policy: str | None = None) -> Callable:
    """Register a case: for stages of one direction, FP8's being forward ones, for those that `attention` and
    its backward pass may run ("library"), for one stage, by its name, or for all; or for those that take a
    policy. Who takes windows takes soft caps, sinks and packed sequences too; some take packed sequences
    alone."""

    def register(function: Callable) -> Callable:
        CASES[function.__name__.replace("_", " ")] = direction, function, policy
        return function

    return register


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit-identical, NaN included."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
