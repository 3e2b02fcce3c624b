"""How dK and dV of a tile of keys leave the consumers of bwd4, at head_dim up to 128."""

from enum import IntEnum

import cutlass.cute as cute
from cutlass import Int32, const_expr

from .bwd4_loads import LoadingTiles
from .bwd4_operands import Consumer, Fragments, k_block
from .device.constants import WARP, WARPGROUP
from .device.dq_sums import AND_ADDER
from .device.key_parts import leave_part
from .device.key_tiles import BOTH, CONSUMERS, ROWS
from .device.split_tiles import add_parts
from .device.tma import partition_tma, tiles_at


class Barrier(IntEnum):
    """Named barriers: the first number of each kind. `bwd4.Backward` has the table of who comes."""

    CTA = 0
    DS_READY = 1  # + consumer + 2 · parity of the step
    TURN = 5  # + consumer
    DQ_FULL = 7  # + consumer + 2 · parity of the step
    DQ_EMPTY = 11  # + consumer
    SPLIT = 13  # + consumer
    K_READ = 15


class StoringTiles(LoadingTiles):
    """Tiles of keys, and how their gradients leave. The accumulators are without the scale."""

    @cute.jit
    def leave_gradients(self, x: Consumer, f: Fragments, place, part, mDK, mDV):
        """Divided: a consumer's dK and dV to the tile's own place, `Tiles.place_of_part`, among the parts."""
        for rX, mX in ((f.dV.acc, mDV), (f.dK.acc, mDK)):
            leave_part(rX, mX[part, place[0] * CONSUMERS + x.index, None, None], x.thread)

    @cute.jit
    def put_together(self, x: Consumer, f: Fragments, part, mSplit, mOrder):
        """Of a tile that is split: leave the dK and dV of this part, `place_in_split`'s. Whether all others
        are there; then the accumulators have the sums of all, and mOrder is at zero again."""
        parts = mSplit.shape[2]
        tile, of_tile = (part - 1) // parts, (part - 1) % parts
        gK, gV = [mSplit[i, tile, None, x.index, None, None] for i in range(2)]  # (part, column block, 4096)
        for rX, gX in ((f.dK.acc, gK), (f.dV.acc, gV)):
            leave_part(rX, gX[of_tile, None, None], x.thread)
        cute.arch.fence_acq_rel_gpu()
        self.sync(Barrier.SPLIT, x.index, WARPGROUP)  # all have left theirs
        told = x.shared.places.iterator + WARPGROUP // WARP * x.index  # all have read what was there
        if x.thread == 0:
            counter = mOrder.iterator + CONSUMERS * tile + x.index
            there = cute.arch.atomic_add(counter.llvm_ptr, Int32(1), sem="acq_rel", scope="gpu") + 1
            if there == parts:
                counter.store(Int32(0))
            told.store(there)
        self.sync(Barrier.SPLIT, x.index, WARPGROUP)
        complete = cute.arch.make_warp_uniform(told.load()) == parts
        if complete:
            cute.arch.fence_acq_rel_gpu()
            add_parts(f.dK.acc, gK, x.thread)
            add_parts(f.dV.acc, gV, x.thread)
        return complete

    @cute.jit
    def store_gradients(self, x: Consumer, f: Fragments, stores, k_get, place, is_first_warp, own_phase):
        """dV through the consumer's tile of K, dK through its part of dQ, rounded, by the TMA of its first
        warp, which alone has not released K when this ends; it says so when they have left."""
        store_dK, mDK, store_dV, mDV = stores
        shared, own = x.shared, x.rings.own + x.index
        self.sync(Barrier.DQ_EMPTY, x.index, AND_ADDER)
        self.sync(Barrier.K_READ, 0, BOTH)  # the other's dQ is done with this tile
        at = k_get.index * CONSUMERS + x.index
        kind = self.dtype, ROWS, self.head_dim
        sdK = tiles_at(shared.dQ[None, None, None, x.index].iterator, *kind, 1)  # (key, head_dim, 1)
        sdV = shared.K
        if const_expr(k_block(self.head_dim) is not None):  # as the TMA stores it
            sdV = tiles_at(shared.K.iterator, *kind, CONSUMERS * self.config.k_stages)
        for rX, sX, stage, factor in ((f.dV.acc, sdV, at, 1.0), (f.dK.acc, sdK, 0, self.scale)):
            rX16 = cute.make_rmem_tensor(rX.layout, self.dtype)  # ((2, 2, d/8), 1, 1)
            rX16.store((rX.load() * factor).to(self.dtype))
            tRsX = f.copy_dKV.partition_D(sX)  # (CPY, CPY_M, CPY_N, stage)
            cute.copy(f.copy_dKV, f.copy_dKV.retile(rX16), tRsX[None, None, None, stage])
        cute.arch.fence_view_async_shared()  # written by threads, read by the TMA
        cute.arch.mbarrier_arrive(own)
        if is_first_warp:
            cute.arch.mbarrier_wait(own, own_phase)
            for store, mX, sX, stage in ((store_dV, mDV, sdV, at), (store_dK, mDK, sdK, 0)):
                tXgX, tXsX = partition_tma(store, self.batch.keys(mX, place[1], place), sX)
                cute.copy(store, tXsX[None, stage], tXgX[None, place[0] * CONSUMERS + x.index])
            cute.arch.cp_async_bulk_commit_group()
        else:
            x.rings.k.consumer_release(k_get)  # which is not free until the storing warp says so too
