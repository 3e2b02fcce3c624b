"""The queries of all heads of a group as the rows of tiles (k6_groups): which query of which head is a row.

Eight queries of a head, an octet, are eight rows. Octets of the same queries follow each other, head by head:

    rows       0 … 7     8 … 15    16 … 23   24 … 31   32 … 39
    head       0         1         2         0         1         of a group of three
    queries    0 … 7     0 … 7     0 … 7     8 … 15    8 … 15

The TMA moves an octet at a time, which is the period of its swizzle, so that any number of heads fits and
none is padded; queries past the end, of the last octet of a head, it loads as zeros and does not store.
"""

from dataclasses import dataclass

from ..calls_slices import OCTET
from .key_slices import SlicedKeys


def octet_at(octet, group):
    """(which of its head's, which head of the group)."""
    return octet // group, octet % group


def query_of(row, group):
    """The query in a row."""
    return OCTET * (row // OCTET // group) + row % OCTET


@dataclass(frozen=True)
class CausalOfGroup:
    """A causal mask at the bottom right, of rows. Within an octet a row sees a key more than the one before,
    and of the next head's again as many: `last_key` falls there, unlike those of other masks. The last row of
    an octet sees as many as any before it, the first no more than any behind."""

    group: object
    queries: object
    hides = True
    hides_first = False

    def last_key(self, row, seqlen_q, seqlen_kv):
        return query_of(row, self.group) + seqlen_kv - self.queries


@dataclass(frozen=True)
class SlicedGroups(SlicedKeys):
    """`SlicedKeys` of tiles of a group. The head of a place is a key head."""

    def queries_from(self, mX, head, place):
        return mX[None, None, None, place[2]]  # (seqlen, column, head)
