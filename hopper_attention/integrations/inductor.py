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
        if V.graph.cpp_wrapper:  # which can only call the operator
            self.set_python_kernel_name(None)
        else:
            call = IN_PLACE[self.op_overload]
            wrapper.add_import_once(f"import {call.__module__}")
            self.python_kernel_name = f"{call.__module__}.{call.__name__}"
        super().codegen(wrapper)


def call_in_place_of(operator: torch._ops.OpOverload, call: Callable) -> None:
    """Graphs that are lowered from now on call `call`, with all of the operator's arguments in their places,
    unless somebody else has a lowering. Inductor keeps what it has written on disk, under a key that knows
    of no other version: `call` stays where it is, by its name, and takes fewer arguments too."""
    known = operator in IN_PLACE or (operator in lowering.lowerings and operator not in lowering.fallbacks)
    if known:
        return
    # What Inductor does for an operator that it does not know.
    lowering.fallbacks.add(operator)
    lowering.add_needs_realized_inputs(operator)
    IN_PLACE[operator] = call
    lowering.register_lowering(operator, type_promotion_kind=None)(functools.partial(lower, operator))


def lower(operator: torch._ops.OpOverload, *given, **named):
    """As Inductor lowers it by itself, but for the name, and the places of arguments."""
    rest = operator._schema.arguments[len(given) :]
    given = *given, *(named.get(x.name, x.default_value) for x in rest)
    wrap = lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x
    return torch.utils._pytree.tree_map(wrap, Call.create(operator, *given))
