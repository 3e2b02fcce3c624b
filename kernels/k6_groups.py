"""K6 in equal slices, of tiles with the queries of all heads of a group: for few queries to many keys.

The idea          16 queries of 32 heads on 8 are, head by head, 32 tiles of 64 rows, of which 48 are empty,
                  and four of them read the same keys. Here the 4 heads of a group are one full tile, whose
                  keys are read once.
What changes      against k6_slices: the rows of a tile (device/group_rows.py), and with them how Q is loaded
                  and O and LSE are stored, and where a causal mask hides keys.
What does not     the main loops, and how keys are divided.
Supports          as k6_slices.
Where to read     hopper_attention/ways.py has the choice; notes/k6_groups.md what it gains.
"""

import cutlass
import cutlass.cute as cute

from . import k6, k6_slices
from .calls import run_forward
from .calls_slices import OCTET, refuse_groups, rows_of_group, slices_scratch
from .contract import LazyMaximum, Problem, Scratch, Stage, Work
from .device.arithmetic import store_if
from .device.constants import SMS
from .device.group_rows import CausalOfGroup, SlicedGroups, octet_at, query_of
from .device.query_tiles import ROWS, Config
from .device.stores import WARP_ROWS, WARPS, WarpStores
from .device.tma import partition_tma, row_slices

STAGES = (
    Stage(
        "k6_groups",
        "the production forward, in equal slices, heads of a group in a tile",
        "the heads of a group in the rows of a tile: their keys are read once",
        "k6_slices",
        model="flash_attention_lazy",
        rounds_p=True,
    ),
    Stage(
        "k6_groups_r64",
        "the production forward, in equal slices, heads of a group in a tile of 64 rows",
        "the same of 64 rows a CTA",
        "k6_groups",
        model="flash_attention_lazy",
        rounds_p=True,
        options={"rows": 64},
    ),
)

TILE_OCTETS, WARP_OCTETS = ROWS // OCTET, WARP_ROWS // OCTET


class FlashAttentionGroups(k6.FlashAttentionForward):
    """k6's CTA, which see. What a tile belongs to is a key head."""

    q_box = o_box = OCTET
    keys_first = True  # an octet after the other is slow

    def __init__(self, *kind: object, **options: object):
        super().__init__(*kind, sliced=True, **options)
        self.batch = SlicedGroups(self.tile_kv)

    def take_queries(self, queries, group, by=None):
        self.queries, self.group, self.by_group = queries, group, group if by is None else by
        if self.mask.hides:
            self.mask = CausalOfGroup(self.by_group, queries)

    def rows_of(self, queries, heads, kv_heads):
        return rows_of_group(queries, self.group), kv_heads

    def seen_before(self, row, seqlen_q, seqlen_kv):
        # `row` may begin the next head's octet, and see fewer.
        return self.mask.last_key(row - 1, seqlen_q, seqlen_kv) + 1

    def kv_head_of(self, head, group):
        return head

    def octet(self, number, kv_head):
        """(block, head) of the number-th octet of a group: where its queries are in Q and O."""
        block, head = octet_at(number, self.by_group)
        return block, kv_head * self.group + head

    def query_at(self, row, place):
        return query_of(row, self.by_group), self.octet(row // OCTET, place[1])[1]

    @cute.jit
    def next_octet(self, at, kv_head):
        """The one behind that at `at`."""
        block, head = at[0], at[1] + 1
        if head == (kv_head + 1) * self.group:
            block, head = block + 1, kv_head * self.group
        return block, head

    def partition_queries(self, load_Q, mQ, sQ, place):
        return partition_tma(load_Q, self.batch.queries_from(mQ, place[1], place), row_slices(sQ, OCTET))

    @cute.jit
    def put_queries(self, q_ring, q_put, load_Q, tQgQ, tQsQ, place, consumer: cutlass.Constexpr):
        q_ring.producer_acquire(q_put)
        full = q_ring.producer_get_barrier(q_put)
        at = self.octet((place[0] * self.consumers + consumer) * TILE_OCTETS, place[1])
        for i in range(TILE_OCTETS, unroll=1):
            here = q_put.index * TILE_OCTETS + i
            cute.copy(load_Q, tQgQ[(None, *at)], tQsQ[None, here], tma_bar_ptr=full)
            at = self.next_octet(at, place[1])

    def store_o(self, o_stores: WarpStores, rO16, o_place, place) -> None:
        x = o_stores
        cute.copy(x.copy, x.copy.retile(rO16), x.tXsX[None, None, None, o_place])
        cute.arch.fence_view_async_shared()  # written by threads, read by the TMA
        cute.arch.sync_warp()
        mO = self.batch.queries_from(x.mX, place[1], place)
        tOgO, tOsO = partition_tma(x.atom, mO, row_slices(x.sX_warps, OCTET))
        here = (o_place * WARPS + x.warp_idx % WARPS) * WARP_OCTETS
        there = (place[0] * x.warps + x.warp_idx) * WARP_OCTETS
        at = self.octet(there, place[1])
        for i in range(WARP_OCTETS):
            cute.copy(x.atom, tOsO[None, here + i], tOgO[(None, *at)])
            at = self.next_octet(at, place[1])
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_lse(self, mLSE, place, first_row, end, where, lse):
        lane = where[0, 0][1] // 2  # as `stores.store_of_rows`
        row = first_row + (where[0, 0][0] if lane == 0 else where[1, 0][0])
        query, head = self.query_at(row, place)
        there = (lane < 2) & (row < end) & (query < self.queries)
        store_if(there, mLSE[place[2], head, None].iterator + query, lse[0] if lane == 0 else lse[1])


supports = refuse_groups
run_kernel = run_forward


def config_for(problem: Problem, rows: int | None) -> Config:
    return k6_slices.config_for(problem, rows or 128)


def workspace(problem: Problem, rows: int | None = None, sms: int = SMS) -> Scratch:
    config = config_for(problem, rows)
    return slices_scratch(problem, ROWS * config.consumers, sms * config.ctas)


def kernel_for(problem: Problem, rows: int | None = None, sms: int = SMS) -> FlashAttentionGroups:
    kernel = k6.kernel_for(problem, config=config_for(problem, rows), of=FlashAttentionGroups, sms=sms)
    kernel.take_queries(problem.seqlen_q, problem.heads // max(1, problem.kv_heads))
    return kernel


def work(problem: Problem, **options: object) -> list[Work]:
    kernel = kernel_for(problem, **options)
    rows, heads = kernel.rows_of(problem.seqlen_q, problem.heads, max(1, problem.kv_heads))
    return k6_slices.work_of(kernel, problem.with_(seqlen_q=rows, heads=heads))


def lazy_maximum(problem: Problem, rows: int | None = None, **_: object) -> LazyMaximum:
    return k6.lazy_maximum(problem, config=config_for(problem, rows))


def compile_kernel(problem: Problem, **options: object) -> object:
    return k6.compile_forward(kernel_for(problem, **options), problem)
