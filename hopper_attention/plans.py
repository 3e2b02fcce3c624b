"""What was worked out for inputs of one kind, found again in the next call."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards

KINDS_MAX = 4096  # remembered before all are forgotten
RECENT = 4  # of the same options, looked at first

Kept = TypeVar("Kept")
Options = tuple[object, ...]


class Plans(dict[tuple[object, ...], Kept]):
    """Plans by the kind of their inputs: options, which say how many tensors there are, and of each its
    shape, strides, type and device.

    Reading and hashing all that takes longer than anything else Python does in a call. So the last few kinds
    are looked for first, with the check that a compiled graph makes of its inputs, one call for all tensors.
    It asks for more: that each tensor would now be dispatched to what it was dispatched to when the plan was
    made, so that no user's mode, autocast, transform or trace has come between, and that it is no subclass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recent: dict[Options, tuple[tuple[Callable[..., bool], Kept], ...]] = {}

    def recently(self, options: Options, *tensors: torch.Tensor) -> Kept | None:
        """The plan for inputs of this kind if it is one of the last few, dispatched as these are; or None.
        Nested tensors, of which the check aborts the process, must not come here."""
        for check, plan in self.recent.get(options, ()):
            if check(*tensors):
                return plan
        return None

    def find(self, options: Options, *tensors: torch.Tensor) -> Kept | None:
        """The plan for inputs of this kind, or None. Raises TypeError for nested and sparse tensors."""
        for x in tensors:
            if x.is_nested:
                raise TypeError("nested tensors are not taken: flash_attn_varlen_func takes packed sequences")
            if x.layout is not torch.strided:
                raise TypeError(f"tensors must be dense, not {x.layout}")
        plan = self.recently(options, *tensors)
        if plan is not None:
            return plan
        plan = self.get(kind_of(options, tensors))
        if plan is not None:
            self._look_at_first(options, tensors, plan)
        return plan

    def keep(self, options: Options, tensors: tuple[torch.Tensor, ...], plan: Kept) -> Kept:
        """Remember a plan; of too many, none but this one."""
        if len(self) >= KINDS_MAX:
            self.clear()
        self[kind_of(options, tensors)] = plan
        self._look_at_first(options, tensors, plan)
        return plan

    def clear(self) -> None:
        super().clear()
        self.recent.clear()

    def _look_at_first(self, options: Options, tensors: tuple[torch.Tensor, ...], plan: Kept) -> None:
        # The check asks that each is another, and takes a subclass for what it was made with.
        if len(set(map(id, tensors))) < len(tensors) or any(type(x) is not torch.Tensor for x in tensors):
            return
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self.recent[options] = (guards.check, plan), *self.recent.get(options, ())[: RECENT - 1]


def kind_of(options: Options, tensors: tuple[torch.Tensor, ...]) -> tuple[object, ...]:
    return options, *[(x.shape, x.stride(), x.dtype, x.device) for x in tensors]


def plan_of(
    plans: dict[tuple[object, ...], Kept], kind: tuple[object, ...], make: Callable[[], Kept]
) -> Kept:
    """The plan for inputs of a kind, made for the first of them."""
    plan = plans.get(kind)
    return keep(plans, KINDS_MAX, kind, make()) if plan is None else plan


def keep(known: dict[tuple[object, ...], Kept], most: int, key: tuple[object, ...], value: Kept) -> Kept:
    """Remember a value; of too many, none but this one."""
    if len(known) >= most:
        known.clear()
    known[key] = value
    return value
