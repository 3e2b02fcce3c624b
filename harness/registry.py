"""The cases of `ref_check.py` by name, which the files that hold them fill."""

from collections.abc import Callable, Iterator

import torch

# Of which direction a case is, what it does, whether it is for stages that take `Problem.policies` only.
CASES: dict[str, tuple[str | None, Callable[[str, object], Iterator[str]], bool]] = {}


def case(direction: str | None = None, policies: bool = False) -> Callable:
    """Register a case: for stages of one direction, FP8's being forward ones, for those that `attention` and
    its backward pass may run ("library"), or for all; or for those that take windows, soft caps, sinks and
    packed sequences."""

    def register(function: Callable) -> Callable:
        CASES[function.__name__.replace("_", " ")] = direction, function, policies
        return function

    return register


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit-identical, NaN included."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
