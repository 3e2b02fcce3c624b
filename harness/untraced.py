"""The kernel files with nothing traced: what they compute of tiles, on Python's integers.

The DSL rewrites a function of theirs when it compiles it, for good: whoever calls it in that process from
then on is traced. So the files are imported a second time, as another package, with decorators that do
nothing.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from unittest import mock

import cutlass.cute as cute

from hopper_attention.cache import KERNELS

PACKAGE = "untraced_kernels"


def kernels(name: str) -> ModuleType:
    """A module of `kernels/`, as in "k6" or "device.masks", of which no function is ever compiled."""
    if PACKAGE not in sys.modules:
        spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
        spec.submodule_search_locations = [str(KERNELS)]
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    with mock.patch.multiple(cute, jit=lambda function: function, kernel=lambda function: function):
        return importlib.import_module(f"{PACKAGE}.{name}")
