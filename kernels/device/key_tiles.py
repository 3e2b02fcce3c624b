"""What the kernels of bwd4 that walk tiles of keys share beside their products: which queries see a tile of
keys, and the order tiles are fetched in. The mask inside a tile, P and dS are in `key_scores`, the way dQ
takes to its sum, up to head_dim 128, in `dq_sums`; the counterpart for tiles of queries is
`query_tiles.QueryTiles`.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from ..contract import Problem, Work
from .constants import LOG2_E, SMS, WARP, WARPGROUP
from .key_counts import ONE_WAY, CountedTiles
from .key_scores import KeyScores
from .limits import COLUMN_BYTES, L2_BYTES, SECTION_BYTES, TILE_Q, folds, stats_shape, sums_of_dq
from .masks import Causal, Mask
from .policies import DenseScratch, PackedScratch, listed
from .short_sequences import ShortSequences
from .split_tiles import place_in_split, queries_of_part
from .tile_order import ByHead, BySection, final_section

ROWS = 64  # of a consumer, queries of a block; at head_dim 256 keys of a tile too: the M of a WGMMA
CONSUMERS = 2  # warpgroups that multiply
CONSUMER_WARPS = WARPGROUP // WARP * CONSUMERS
THREADS = WARPGROUP * (CONSUMERS + 1)
BOTH = WARPGROUP * CONSUMERS  # threads at a named barrier where the consumers meet
REGISTERS = (24, 240)  # of a producer's thread, of a consumer's
TILES_AHEAD = 16  # without a mask zeros are written so many tiles, but at least a head, ahead


@dataclass(frozen=True)
class Rings:
    """Barriers in shared memory. The kernels' classes have the tables of who comes."""

    q: pipeline.PipelineTmaAsync  # Q, and its queries' LSE and D
    do: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    tile: pipeline.PipelineAsync  # which tile of keys is next


class Tiles(KeyScores, CountedTiles):
    """Tiles of `tile_kv` keys, for each those of `tile_q` queries that see some of them."""

    def __init__(
        self,
        head_dim: int,
        mask: Mask,
        dtype: type,
        deterministic: bool,
        tile_q: int,
        tile_kv: int,
        divides: bool = False,
        sms: int = SMS,
        capped: bool = False,
        packed: bool = False,
        one_tile: bool = False,
        left_over: bool = False,
    ):
        self.head_dim, self.mask, self.dtype, self.deterministic = head_dim, mask, dtype, deterministic
        self.divides = divides  # what sees a tile of keys among several CTAs: `key_parts`
        self.one_tile = one_tile  # no head has more than one tile of keys: a step's dQ is final
        self.caps, self.packed = capped, packed  # scores, softly; sequences
        self.folds = folds(head_dim, capped)
        self.batch = PackedScratch() if packed else DenseScratch()  # where rows lie
        # Whether it has the sequences of one tile, which the kernel before it in a call leaves out: it begins
        # as SMs become free, and needs nothing that that one writes (notes/bwd4_policies.md).
        self.left_over = left_over
        self.by_sequence = packed and one_tile and not left_over  # each is a tile
        self.listed = packed and not self.by_sequence  # tiles are
        self.sequences = ShortSequences(tile_q) if self.by_sequence else None
        self.tile_q, self.tile_kv, self.sms = tile_q, tile_kv, sms
        self.blocks = tile_q // ROWS  # of 64 queries
        # Deterministic, as many CTAs as a section has tiles: then each goes from its tile to that of the same
        # keys and a later head, and stays as far behind the CTA it waits for as it was. With one CTA more
        # all of them fall behind. (At 128 queries a step it gained nothing.)
        self.in_waves = deterministic and not mask.hides and self.blocks == 1
        # Tiles that take turns are fetched in the order of their turns: under a mask with the shortest first,
        # which leaves the longest to the end. So the last heads are mirrored: their longest tiles come first,
        # and queries from the last to the first, and long tiles begin where short ones end. (At 128 queries a
        # step packed sequences leave no register for it: with 22 words in memory for each tile it lost.)
        plain = deterministic and not (capped or mask.hides_first)
        self.mirrors = plain and mask.hides and not (packed and self.blocks > 1)
        undivided = head_dim <= 128 and not (capped or packed or divides or one_tile or deterministic)
        # Without turns, every other head's queries come from the last to the first: notes/bwd4_log.md, "The
        # order of a head's queries".
        self.alternates = undivided and mask.hides and not mask.hides_first
        self.reverses = self.mirrors or self.alternates
        self.splits = undivided and not mask.hides and self.blocks == 1  # tiles left over: `split_tiles`
        seen_by_all = mask != Causal(top_left=True)  # at least one tile of keys, where there are many
        self.rotates = plain and seen_by_all and not (packed or divides)
        self.counts_sums = plain and not packed  # `count_sums`; otherwise:
        self.sums = sums_of_dq(deterministic, mask.hides)
        self.column_bytes = COLUMN_BYTES[head_dim]
        # With a mask the tile that is seen by most comes first, or as `turn_of` wants it last; deterministic,
        # heads take turns.
        by_section = mask.hides or deterministic
        self.order = BySection(backwards=mask.hides and deterministic) if by_section else ByHead()
        self.scale = 1.0 / math.sqrt(head_dim)
        self.scale_log2 = self.scale * LOG2_E

    @property
    def in_parts(self) -> bool:
        """Whether tiles of keys may come in parts, so that a warp has to know which it has."""
        return self.divides or self.splits

    @property
    def words(self) -> int:
        """Of a tile's place, as warps hear of it."""
        return self.batch.words + self.in_parts + self.reverses

    def count_parts(self, mK, mTiled, mSplit=None):
        """What tiles of keys are counted of: K, or mTiled (`key_parts`), and then of how many parts of the
        queries a tile is one, as of those that are split (`split_tiles`). Inside a kernel, anew in each: an
        operand of what follows, where one of the tile's own numbers takes a register."""
        if self.splits:
            self.split, self.parts = mSplit, mSplit.shape[2]
        if not self.divides:
            return mK
        self.parts = mTiled.shape[4]
        return mTiled

    # ---- which tiles --------------------------------------------------------------------------------------

    @cute.jit
    def q_tiles(self, kv_block, seqlen_q, seqlen_kv):
        """(first, masked, whole, last): the tiles of queries from first to last − 1 see some of the keys.
        Those before `masked` need the mask, and those from `whole` on, those between see all of them; first
        == last if none sees any. Of one tile of keys they are all tiles, seen or not."""
        last = cute.ceil_div(seqlen_q, self.tile_q)
        first, masked = Int32(0), Int32(0)
        if const_expr(self.mask.hides):
            query = self.mask.first_query(kv_block * self.tile_kv, seqlen_q, seqlen_kv)
            first = cutlass.min(last, cutlass.max(0, query) // self.tile_q)
            all_seen = cutlass.max(0, query + self.tile_kv - 1)  # from this query on
            masked = cutlass.min(last, cute.ceil_div(all_seen, self.tile_q))
        whole = last
        if const_expr(self.mask.hides_first):
            first_key = kv_block * self.tile_kv
            behind = self.mask.last_query(first_key + self.tile_kv - 1, seqlen_q, seqlen_kv) + 1
            last = cutlass.min(last, cute.ceil_div(cutlass.max(0, behind), self.tile_q))
            first = cutlass.min(first, last)
            all_seen = self.mask.last_query(first_key, seqlen_q, seqlen_kv) + 1  # up to this query
            whole = cutlass.min(last, cutlass.max(0, all_seen) // self.tile_q)
        if (kv_block + 1) * self.tile_kv > seqlen_kv:
            masked = last
        if const_expr(self.one_tile):  # nobody else writes dQ of queries that see no key
            first = Int32(0)
        return first, masked, whole, last

    def runs(self, first, masked, whole, last, place=None):
        """The loops over `q_tiles`, one after the other, as (begin, end, whether masked); the last tile is
        apart. A generator, so that each bound is computed where its loop begins. Of a reversed head they
        count steps, from the last tile of queries on (`q_tile_at`), and the first one is apart."""
        split = cutlass.min(masked, last - 1)
        if self.reverses:
            first_masked, unmasked = masked_runs(first, masked, last, place[-1])
            yield first, first_masked, True
            yield first_masked, unmasked, False
            yield unmasked, last - 1, True
            return
        yield first, split, True
        if self.mask.hides_first:
            begin = cutlass.max(first, split)
            end = cutlass.max(begin, cutlass.min(whole, last - 1))
            yield begin, end, False
            yield end, last - 1, True
        else:
            yield cutlass.max(first, split), last - 1, False

    @cute.jit
    def work_on(self, place, seqlen_q, seqlen_kv):
        """`q_tiles` of the tile of keys at a place; of one that is split those of the part. If they are
        divided, how many of its part's come before each: a part's are numbered by themselves (`of_part`)."""
        first, masked, whole, last = self.q_tiles(place[0], seqlen_q, seqlen_kv)
        if const_expr(self.divides):
            before = self.parts - 1 - place[3]
            # Not known to be uniform, they would take registers that the main loop needs.
            first, masked, last = [
                cute.arch.make_warp_uniform((x + before) // self.parts) for x in (first, masked, last)
            ]
        if const_expr(self.splits):
            first, last = queries_of_part(last, place[3], self.parts)
            masked = cutlass.min(masked, last)
        return first, masked, whole, last

    def of_part(self, i, place):
        """The tile of queries that is its part's i-th: of three parts every third one. As neighbours they
        would be of unequal length under a mask, and tiles of keys that begin together would begin with the
        same ones, where undivided ones begin each with its own."""
        return i * self.parts + place[3] if self.divides else i

    def place_of_part(self, place, heads):
        """Where among the parts (`key_parts.halves`) those of a tile lie; `heads` are mTiled's."""
        _, kv_head, batch, part, *_ = place
        return (batch * heads + kv_head) * self.parts + part

    @cute.jit
    def section(self, mQ, mK):
        """How many key heads are worked on together; their dQ sums are zeroed while the section before them
        is."""
        heads, kv_blocks = mK.shape[2] * mK.shape[3], cute.ceil_div(mK.shape[0], self.tile_kv)
        most = self.most_last(heads)
        return self.section_of(most, kv_blocks, mQ.shape[0], mQ.shape[2], mK.shape[2])

    def most_last(self, heads):
        """How many of all heads may be a section, and the last ones that are worked on as one: if those are
        mirrored, half of them."""
        return heads // 2 if self.mirrors else heads

    def section_of(self, most, kv_blocks, seqlen_q, q_heads, kv_heads):
        """How many key heads, `most` at most, of all batches or of a sequence."""
        section, row_bytes = TILES_AHEAD // kv_blocks, self.column_bytes * self.head_dim
        if self.mask.hides and self.packed:
            # Of any length: divided twice, never multiplied up (`limits.refuse_long_heads`).
            least, factor = (self.blocks, 2) if self.deterministic else (1, 1)
            section = factor * SECTION_BYTES // (row_bytes * (q_heads // kv_heads))
            section = cutlass.max(least, section // cutlass.max(1, seqlen_q))
        elif self.mask.hides:
            head_bytes = seqlen_q * row_bytes * (q_heads // kv_heads)
            section = SECTION_BYTES // head_bytes
            if self.deterministic:  # the more CTAs work on a head, the more wait for their turn
                section = cutlass.max(self.blocks, 2 * SECTION_BYTES // head_bytes)
        elif self.deterministic:
            section = self.sms // kv_blocks  # so that CTAs begin in the order of their turns
        return cutlass.max(1, cutlass.min(most, section))

    @cute.jit
    def final(self, heads, section, least):
        """The head from which on the rest are one section; of mirrored ones `least` come before."""
        final = heads // section * section
        if const_expr(self.mask.hides or (self.deterministic and not self.in_waves)):
            final = final_section(heads, section)
        if const_expr(self.mirrors):
            final = cutlass.max(final, least // section * section)
        return final

    @cute.jit
    def is_reversed(self, head, final, seqlen_q, seqlen_kv):
        """1 if this head's queries come from the last to the first, else 0. Without turns they are those of
        every other head, if more than ONE_WAY. With turns those of heads that are mirrored: from `final` on;
        of queries that do not stay in L2 every one, since the longest tiles first read the same ones for
        longest; and none where keys are many more than queries, so that all tiles are about as long."""
        if const_expr(self.alternates):
            return (head + 1) % 2 if seqlen_q > ONE_WAY else 0
        mirrored = Int32(head >= final)
        if seqlen_q * self.column_bytes * self.head_dim > L2_BYTES:
            mirrored = Int32(1)
        if seqlen_kv > 2 * seqlen_q:
            mirrored = Int32(0)
        return mirrored

    @cute.jit
    def ctas(self, tiles, kv_blocks):
        """How many CTAs share the tiles."""
        ctas = Int32(self.sms)
        if const_expr(self.in_waves):
            section = self.sms // kv_blocks * kv_blocks
            if section > self.sms * 9 // 10:
                ctas = section
        return cutlass.min(tiles, ctas)

    @cute.jit
    def locate(self, tile, mQ, mK):
        """(kv_block, kv_head, batch) of the tile-th tile in the order they are fetched; if queries are
        divided, which part, or if tiles are split `place_in_split`'s; and if some heads are reversed, whether
        this one is. mK is mTiled, if there is one, whose tiles are parts."""
        heads, kv_blocks = mK.shape[2], cute.ceil_div(mK.shape[0], self.tile_kv)
        section, final, all_heads = None, None, heads * mK.shape[3]
        if const_expr(self.mask.hides or self.deterministic):
            section = self.section(mQ, mK)
            final = self.final(all_heads, section, (all_heads + 1) // 2)
        if const_expr(self.splits):
            tile, part = place_in_split(tile, kv_blocks * all_heads, self.split)
        kv_block, head = self.order.locate(tile, kv_blocks, all_heads, section, final)
        place = head % heads, head // heads
        if const_expr(self.splits):
            place = *place, part
        if const_expr(self.reverses):
            backwards = self.is_reversed(head, final, mQ.shape[0], mK.shape[0])
        if const_expr(self.mirrors):
            kv_block = kv_blocks - 1 - kv_block if backwards != 0 else kv_block
        if const_expr(self.divides):
            place, kv_block = (*place, kv_block % self.parts), kv_block // self.parts
        if const_expr(self.reverses):
            place = *place, backwards
        return kv_block, *place

    def place_of(self, tile, mQ, mK, mList):
        """The tile-th tile's place, of `self.batch`; mList only of packed ones, of one tile of keys each
        their lengths."""
        if not self.packed:
            return self.locate(tile, mQ, mK)
        locate = self.locate_in_list if self.listed else self.locate_sequence
        return locate(tile, mQ, mK, mList)

    def own_tiles(self, mList):
        """(first, how many) of a list's tiles are this kernel's."""
        if self.left_over:
            return mList[0, 0], mList[0, 1] - mList[0, 0]
        return 0, mList[0, 0]

    def most_tiles(self, mList):
        """How many tiles of keys of a head packed sequences have at most, by `place_of`'s mList."""
        return (mList if self.listed else mList[0]).shape[0] - 1

    @cute.jit
    def locate_sequence(self, tile, mQ, mK, lengths):
        """As `locate_in_list`, of sequences that are a tile each."""
        index, heads = tile // mK.shape[2], mK.shape[2]
        *sequence, place = self.sequences.find(index, lengths)
        return 0, tile % heads, *sequence, place * self.blocks, index

    @cute.jit
    def locate_in_list(self, tile, mQ, mK, mList):
        """(kv_block, kv_head, start_q, …): as `locate`, of the tiles of each sequence alone."""
        heads, before = mK.shape[2], self.own_tiles(mList)[0]
        first, kv_blocks, *sequence, place = listed(mList, before + tile // heads)
        if const_expr(self.left_over):
            return 0, tile % heads, *sequence, place * self.blocks, first
        section, final = self.sections(first, kv_blocks, sequence[1], mQ, mK, mList[0, 0])
        kv_block, head = self.order.locate(tile - first * heads, kv_blocks, heads, section, final)
        place = kv_block, head, *sequence, place * (TILE_Q[self.head_dim] // ROWS), first
        if const_expr(self.mirrors):
            final = final if first + kv_blocks == mList[0, 0] else heads
            backwards = self.is_reversed(head, final, sequence[1], sequence[3])
            place = kv_blocks - 1 - kv_block if backwards != 0 else kv_block, *place[1:], backwards
        return place

    @cute.jit
    def sections(self, first, kv_blocks, seqlen_q, mQ, mK, listed_tiles):
        """Of a sequence whose tiles begin at the first-th of the list: how many of its key heads are worked
        on together, and from which on the rest are. The last sequence is as without a list, and the one of
        which heads are mirrored; all of them, perhaps, if it is not the only one."""
        most = heads = mK.shape[2]
        if kv_blocks == listed_tiles:
            most = self.most_last(heads)
        section = self.section_of(most, kv_blocks, seqlen_q, mQ.shape[2], heads)
        final = heads // section * section
        if first + kv_blocks == listed_tiles:
            final = self.final(heads, section, heads - most)
        return section, final

    @cute.jit
    def section_with(self, head, heads, section, final):
        """(first head, heads) of the section that a head is in."""
        first, together = head // section * section, section
        if first >= final:
            first, together = final, heads - final
        return first, together

    # ---- steps and barriers -------------------------------------------------------------------------------

    @cute.jit
    def sync(
        self, barrier: cutlass.Constexpr, member, threads: cutlass.Constexpr,
        arrive: cutlass.Constexpr = False,
    ):  # fmt: skip
        """Wait at a member's barrier until `threads` have come, or only arrive there."""
        if const_expr(arrive):
            cute.arch.barrier_arrive(barrier_id=int(barrier) + member, number_of_threads=threads)
        else:
            cute.arch.barrier(barrier_id=int(barrier) + member, number_of_threads=threads)

    # ---- loads --------------------------------------------------------------------------------------------

    @cute.jit
    def put_stats(self, ring, state, mStats, sStats, head_index, q_tile):
        """One warp, after Q's `put`: LSE and D of its queries into the same stage, under the same barrier."""
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        with cute.arch.elect_one():
            flat = cute.make_layout(self.blocks * math.prod(stats_shape(self.folds)))
            gStats = mStats[head_index, q_tile * self.blocks, None, None]
            sX = sStats[None, None, None, state.index]
            both = [cute.make_tensor(x.iterator, flat) for x in (gStats, sX)]
            cute.copy(bulk, *both, mbar_ptr=ring.producer_get_barrier(state))


@cute.jit
def masked_runs(first, masked, last, is_reversed):
    """Of tiles of queries of which those before `masked` need the mask, and the last one in their order is
    apart: the steps before which those end that come first and need it, and those that do not. Reversed,
    those that need it come last."""
    masked = cutlass.max(first, cutlass.min(masked, last))
    first_masked, unmasked = cutlass.min(masked, last - 1), last - 1
    if is_reversed != 0:
        first_masked, unmasked = first, cutlass.min(first + last - masked, last - 1)
    return first_masked, unmasked


def work_of(kernel: object, problem: Problem, products: int, unit: str, roles: int = 1) -> Work:
    """The `Work` of a main loop with so many products a step; of `roles` consumers that have code of their
    own and as many products each, one is counted."""
    tiles, masked, unmasked = kernel.trips(problem)
    trips = masked, unmasked
    if isinstance(kernel, Tiles) and kernel.reverses:  # heads whose masked tiles are a loop of their own
        share, apart = kernel.reversed_share(problem), kernel.reversed_masked(problem)
        trips = masked * (1 - share), unmasked + (masked - apart) * share, apart * share
    tile_flops = 2 * products * kernel.tile_kv * kernel.tile_q * problem.head_dim / roles
    return Work(
        kernel=type(kernel).__name__,
        unit=unit,
        threads=WARPGROUP * CONSUMERS // roles,
        ctas=min(kernel.sms, tiles),
        passes=tiles * roles,
        trips=trips,
        ffma=0,
        hbm_bytes=problem.min_bytes / (max(1, tiles) * roles),
        smem_bytes=kernel.smem_bytes,
        tensor_flops=tile_flops * (1 + masked + unmasked),
    )
