"""What Inductor writes into a compiled graph where an operator stands: a call of a function in its
place, which goes past the dispatcher where nothing would see it. An operator comes to the same Python
code by way of the dispatcher, once for each layer and step.
"""

import functools
from collections.abc import Callable

import torch
from torch._inductor import ir, lowering  # seconds to import: `ops.check_traced` waits until others have
from torch._inductor.virtualized import V

IN_PLACE: dict[torch._ops.OpOverload, Callable] = {}


class Call(ir.FallbackKernel):
    """An operator that Inductor has no code for, called by another name."""

    def codegen(self, wrapper) -> None:
        if not V.graph.cpp_wrapper:  # C++ can only call the operator
            call = IN_PLACE[self.op_overload]
            wrapper.add_import_once(f"import {call.__module__}")
            self.python_kernel_name = f"{call.__module__}.{call.__name__}"
        super().codegen(wrapper)


def call_in_place_of(operator: torch._ops.OpOverload, call: Callable) -> None:
    """Graphs that are lowered from now on call `call`, with all of the operator's arguments in their places.
    Inductor keeps what it has written on disk: its module and name are for good."""
    if operator in IN_PLACE:
        return
    IN_PLACE[operator] = call
    # What Inductor does for an operator that it does not know.
    lowering.fallbacks.add(operator)
    lowering.add_needs_realized_inputs(operator)
    lowering.register_lowering(operator, type_promotion_kind=None)(functools.partial(lower, operator))


def lower(operator: torch._ops.OpOverload, *given, **named):
    """As Inductor lowers it by itself, but for the name, and the places of arguments."""
    rest = operator._schema.arguments[len(given) :]
    given = *given, *(named.get(x.name, x.default_value) for x in rest)
    wrap = lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x
    return torch.utils._pytree.tree_map(wrap, Call.create(operator, *given))
