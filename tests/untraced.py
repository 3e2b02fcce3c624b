"""`harness.untraced`, by the name that the tests import."""

from harness.untraced import kernels

__all__ = ["kernels"]
