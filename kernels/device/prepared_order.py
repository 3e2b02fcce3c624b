"""The orders of tile_order.py in two halves: what tiles are found by, which is the same for all of a launch,
and a tile's place. The host can prepare the first. A division by a number that only the launch knows is some
25 instructions, each waiting for the last; by a `divisor` it is a multiplication and a shift
(notes/k6_log.md, "Where a launch begins").
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import tile_order
from .tile_order import final_section


def as_it_is(number):
    """The number, for who divides by it in the kernel."""
    return number


def divisor(number):
    """On the host: a number as what a kernel divides by."""
    return cute.FastDivmodDivisorV2(Int32(number))


@dataclass(frozen=True)
class ByHead(tile_order.ByHead):
    """As there."""

    def sizes(self, blocks, heads, section=None, final=None, by=as_it_is):
        """What `place` takes of heads of so many blocks. `by` prepares what is divided by."""
        return (by(blocks),)

    def place(self, tile, blocks):
        """(block, head) of the tile-th tile."""
        return tile % blocks, tile // blocks


@dataclass(frozen=True)
class BySection(tile_order.BySection):
    """As there."""

    def sizes(self, blocks, heads, section=None, final=None, by=as_it_is):
        """What `place` takes of heads of so many blocks. `by` prepares what is divided by."""
        section = cutlass.max(1, cutlass.min(heads, section))
        final = final_section(heads, section) if final is None else final
        return blocks, section, final, by(section * blocks), by(section), by(heads - final)

    def place(self, tile, blocks, section, final, *divided_by):
        """(block, head) of the tile-th tile."""
        block, head = in_sections(tile, blocks, section, final, *divided_by)
        return blocks - 1 - block if self.backwards else block, head

    def locate(self, tile, blocks, heads, section, final=None):
        return self.place(tile, *self.sizes(blocks, heads, section, final))


@cute.jit
def in_sections(tile, blocks, section, final, by_tiles, by_section, by_rest):
    """As `tile_order.in_sections`; divided by a section's tiles, its heads, and the heads from `final` on."""
    first, by_heads = tile // by_tiles * section, by_section
    if first >= final:
        first, by_heads = final, by_rest
    inside = tile - first * blocks
    return inside // by_heads, first + inside % by_heads


def prepared(order: tile_order.TileOrder) -> ByHead | BySection:
    """The same order."""
    return BySection(order.backwards) if isinstance(order, tile_order.BySection) else ByHead()


def sizes_of(order: ByHead | BySection, blocks, heads, sequences, section) -> tuple:
    """On the host: what `find` takes of so many sequences of so many heads."""
    return *order.sizes(blocks, heads * sequences, section, by=divisor), divisor(heads)


def find(order: ByHead | BySection, tile, sizes):
    """(block, head, sequence) of the tile-th tile."""
    *sizes, heads = sizes
    block, head = order.place(tile, *sizes)
    return block, head % heads, head // heads
