"""Tiles that heads share: what a CTA of several consumers takes of packed sequences that are short.

A tile of the forward pass has 64 queries for each of its C consumers, and a sequence of 64 queries or fewer
would leave all but the first of them with nothing. So of a sequence with at most 64 queries, and one tile of
keys, C heads are one tile: consumer c takes head + c. The keys of these heads go through the rings one after
the other, those of query heads with the same key head once; each consumer leaves what is before its own keys
and behind them, as it leaves keys that a window hides.

```
16 heads on 16   K, V:  head  head + 1  head + 2        32 heads on 8   K, V:  head … head + 2
consumer 0              ██    ░░        ░░                              ██
consumer 1              ░░    ██        ░░              ░ left unread   ██
consumer 2              ░░    ░░        ██                              ██
```

In the list (`tile_list.ListTiles`) these sequences come last, a row each, and take equally long: whatever is
fetched at the end is short. A tile that nobody shares is looked up as without them.

A consumer is told of its own head as of a longer sequence: with 64·c queries more, which begin 64·c rows
earlier, its rows are those from 64·c on, as in any other tile. Both ends of what the TMA clips, rows' LSE and
masks, aligned at the bottom right, are then where they were.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .packed import FAR, Packed
from .tile_list import SHARED_QUERIES, locate_listed

LAST = 16  # from this bit on `sharing` has the last consumer that has a head; below it four bits for each
SHARED = 1 << 18


@dataclass(frozen=True)
class SharedTiles(Packed):
    """`Packed`, of whose short sequences as many heads as there are consumers are one tile. A place has one
    number more, `sharing`: 0 of a tile that one head has for itself; otherwise SHARED, the last consumer with
    a head and, for each consumer, how many tiles of keys come before its own (two bits) and behind (two)."""

    consumers: int = 0
    words = 7
    shares = True

    def queries_at(self, place, consumer: int, consumers: int):
        alone = place[0] * consumers + consumer
        if consumer == 0:
            return None, alone, 0
        # Of a consumer without a head the last head's queries, which nobody looks at.
        return None, if_alone(place[6], alone, 0), cutlass.min(consumer, last_with_head(place[6]))

    def keys_at(self, place, block):
        return None, if_alone(place[6], block, 0), if_alone(place[6], 0, block)

    def tiles_of_keys(self, place, tiles):
        return cutlass.max(tiles, 1 + self.behind(place, 0))

    def queries_from(self, mX, head, place):
        return rows_of_heads(mX, head, place[2], place[3])

    def keys_from(self, mX, head, place):
        return rows_of_heads(mX, head, place[4], place[5])

    def before(self, place, consumer):
        return (place[6] >> (4 * consumer)) & 3

    def behind(self, place, consumer):
        return (place[6] >> (4 * consumer + 2)) & 3

    def of_consumer(self, place, consumer):
        block, head, start_q, seqlen_q, start_kv, seqlen_kv, sharing = place
        # Without a head: as the last one with one, behind whose end its own rows lie.
        own = cutlass.min(consumer, last_with_head(sharing))
        start_q, seqlen_q = start_q - SHARED_QUERIES * own, seqlen_q + SHARED_QUERIES * own
        return block, head + own, start_q, seqlen_q, start_kv, seqlen_kv, sharing

    def among(self, place, consumer, span, begin):
        first_row, kv_blocks, own_blocks, visible = span
        kv_blocks, before = kv_blocks + self.behind(place, consumer), self.before(place, consumer)
        return (first_row, kv_blocks, own_blocks, visible), (begin[0] + before, *begin[1:])

    def ctas_for(self, heads):
        return cute.ceil_div(heads, self.consumers)

    def listed_tiles(self, mList, heads):
        alone = mList[0, 1]
        return alone * heads + (mList[0, 0] - alone) * self.ctas_for(heads), alone

    @cute.jit
    def locate_listed(self, tile, alone, heads, kv_heads, mList, locate):
        # Of a tile that nobody shares the list is read without waiting for what `alone` is.
        block, head, start_q, seqlen_q, start_kv, seqlen_kv = locate_listed(tile, heads, mList, locate)
        inside = tile - alone * heads  # among the shared ones
        if inside >= 0:
            row = cutlass.min(1 + alone + inside // self.ctas_for(heads), mList.shape[0] - 1)
            start_q, seqlen_q, start_kv, seqlen_kv = [mList[row, i] for i in range(3, 7)]
        sequence = start_q, seqlen_q, start_kv, seqlen_kv
        return self.place(block, head, sequence, inside >= 0, inside, heads, kv_heads)

    @cute.jit
    def place(self, block, head, sequence, shared, inside, heads, kv_heads):
        sharing = Int32(0)
        if shared:
            block, head = Int32(0), inside % self.ctas_for(heads) * self.consumers
            sharing = self.sharing(head, heads, heads // kv_heads)
        return block, head, *sequence, sharing

    def sharing(self, head, heads, group):
        """The number `sharing` of a tile with the heads from `head` on, of which `group` have a key head."""
        last = cutlass.min(self.consumers, heads - head) - 1
        rest, before = head % group, [0]
        for _ in range(1, self.consumers):
            rest += 1
            before.append(before[-1] + chosen(rest == group, 1, 0))
            rest = chosen(rest == group, 0, rest)
        behind = before[0]  # the first one's
        for c in range(1, self.consumers):
            behind = chosen(c <= last, before[c], behind)
        sharing = SHARED + (last << LAST)
        for c in range(self.consumers):
            # A consumer without a head leaves all as they come, the first among them.
            own = chosen(c <= last, before[c], 0)
            sharing += (own + 4 * (behind - own)) << (4 * c)
        return sharing


def packed_tiles(consumers: int) -> Packed:
    """How packed sequences lie for a CTA of so many consumers."""
    return SharedTiles(consumers) if consumers > 1 else Packed()


def rows_of_heads(mX: cute.Tensor, head, start, length) -> cute.Tensor:
    """(row, column, head) of a sequence, heads from `head` on: `packed.rows_of_sequence`."""
    return cute.domain_offset((FAR - length, 0, head), mX[None, None, None, (start + length, FAR)])


def last_with_head(sharing):
    """The last consumer of a tile that has a head; 0 of a tile that nobody shares."""
    return (sharing >> LAST) & 3


def if_alone(sharing, value, otherwise):
    """`value` in a tile that nobody shares."""
    return chosen(sharing == 0, value, otherwise)


@cute.jit
def chosen(condition, value, otherwise):
    """`value` if the condition holds."""
    found = Int32(otherwise)
    if condition:
        found = Int32(value)
    return found
