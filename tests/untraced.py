"""`harness.untraced`, by the name that the tests import."""

from harness.untraced import kernels

__all__ = ["Divisor", "kernels"]


class Divisor(int):
    """What `prepared_order.divisor` makes of a number, as a number."""

    divisor = property(int)
