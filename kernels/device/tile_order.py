"""Which tile comes next: the counter CTAs fetch from, the order of heads, and how warps hear of a tile.

Under a mask two things pull apart. Balance wants the longest tiles of all heads first, so that what is
fetched last is short. L2 wants one head after the other, since all tiles of a head read the same K and V.
`BySection` does both: heads are worked on in sections, as many at once as keep their K and V in L2, and in a
section the longest tile of every head comes first. What it is worth: notes/k6.md, "The schedule".
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync

from .constants import WARP
from .limits import FINAL_SECTIONS


@cute.jit
def fetch(mCounter, tiles, own_first: cutlass.Constexpr = True):
    """One warp: the next tile nobody has taken. The last fetch of a launch leaves the counter at zero.

    With own_first a CTA's first tile is its own number, which saves the wait for a fetch. Not where CTAs wait
    for what earlier tiles leave: one of those would be held by a CTA that is not dispatched yet.
    """
    grid, _, _ = cute.arch.grid_dim()
    # A CTA fetches once for each tile it takes, or once more and finds none: so many fetches, numbered from
    # 0, and the one with the last number is the last.
    fetches = tiles if const_expr(own_first) else tiles + grid
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(mCounter.iterator.llvm_ptr, Int32(1))
        if taken == fetches - 1:
            mCounter[0] = Int32(0)
    taken = cute.arch.shuffle_sync(taken, 0)
    return taken + grid if const_expr(own_first) else taken


@cute.jit
def final_section(heads, section):
    """The first head of the last section, which is FINAL_SECTIONS long and what was left over."""
    return cutlass.max(0, heads - FINAL_SECTIONS * section) // section * section


@dataclass(frozen=True)
class ByHead:
    """All blocks of a head, then those of the next."""

    def locate(self, tile, blocks, heads, section=None, final=None):
        """(block, head) of the tile-th tile."""
        return tile % blocks, tile // blocks


@dataclass(frozen=True)
class BySection:
    """`in_sections`: the longest tiles of some heads first, so that no long one is left to the end. Blocks
    come from the first on, or `backwards`."""

    backwards: bool = False

    def locate(self, tile, blocks, heads, section, final=None):
        """(block, head) of the tile-th tile."""
        block, head = in_sections(tile, blocks, heads, section, final)
        return blocks - 1 - block if self.backwards else block, head


TileOrder = ByHead | BySection


@cute.jit
def in_sections(tile, blocks, heads, section, final=None):
    """(block, head) of the tile-th tile, `section` heads at a time: of these first everyone's block 0. From
    the head `final` on, by default `final_section`, the rest are one section."""
    section = cutlass.max(1, cutlass.min(heads, section))
    first = tile // (section * blocks) * section
    final = final_section(heads, section) if const_expr(final is None) else final
    if first >= final:
        first, section = final, heads - final
    inside = tile - first * blocks
    return inside // section, first + inside % section


def message_ring(smem: object, listeners: int) -> PipelineAsync:
    """The ring of `tell` and `hear`: from one warp to `listeners` threads."""
    return PipelineAsync.create(
        num_stages=1,
        barrier_storage=smem.allocate_array(Int64, 2),
        producer_group=CooperativeGroup(Agent.Thread, WARP),
        consumer_group=CooperativeGroup(Agent.Thread, listeners),
        defer_sync=True,
    )


@cute.jit
def tell(ring, state, sTile, message):
    """The producer warp: hand a tile's place to the others, as many numbers as sTile has, four or more, of
    which the first is 0 at the end."""
    ring.producer_acquire(state)
    for i in range_constexpr(len(message)):
        sTile[i] = Int32(message[i])
    ring.producer_commit(state)


@cute.jit
def hear(ring, state, sTile):
    """The numbers `tell` was given."""
    ring.consumer_wait(state)
    message = [cute.arch.make_warp_uniform(sTile[i]) for i in range(cute.size(sTile))]
    ring.consumer_release(state)
    return tuple(message)


def hear_place(ring, state, sTile):
    """The same as the first number and the rest, the place of a tile."""
    valid, *place = hear(ring, state, sTile)
    return valid, tuple(place)
