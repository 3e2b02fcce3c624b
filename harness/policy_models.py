"""What the kernels with policies compute, tile by tile in NumPy, and ways of being wrong that the pass rule
must catch: a window's tiles, a cap's slope, a sink at the end of a row, packed sequences and their tiles.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from harness.models import Array
from harness.policies import Given
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.far_scores import LARGEST, TOGETHER
from hopper_attention.kernels.device.softcap import NEAR, OF_NEAR

ROWS = 64  # of a warpgroup, which decides for all of them which tiles of keys it takes
WARP_ROWS, LANES = 16, 4  # of a warp, which decides how scores are capped; that share a row
CLASSES = 128  # of sequences in the list of tiles

# What may be wrong: a window's bounds, by how many keys; the rest as it says.
EDGES = {
    "left edge a key short": (-1, 0),
    "left edge a key too far": (1, 0),
    "right edge a key short": (0, -1),
    "right edge a key too far": (0, 1),
}
NAN_IS_NEAR = "NaN does not count beyond what the near polynomial of a cap is for"
FORWARD = (
    *EDGES,
    "skip the first tile that is seen",
    "keep the maximum at 0",
    "cap after the mask",
    "no cap",
    NAN_IS_NEAR,
    "sink left out of the LSE",
    "sink left out of O",
    "sink of another head",
    "a neighbour's key seen",
    "a row written behind the end",
    "keys of the first head of a shared tile",
    "a head of a shared tile left out",
)
SHARED_HEADS, SHARED_KEYS = 3, 64  # of a tile that heads of a short sequence share, at head_dim 128
BACKWARD = (
    *EDGES,
    "slope of the cap left out",
    "slope of the cap twice",
    "dsink without dLSE",
    "dsink of all rows but one",
    "a neighbour's key seen",
    "a row written behind the end",
)


@dataclass(frozen=True)
class Of:
    """One head of one sequence: what its keys are, and whom it sees."""

    scale: float
    causal: bool = False
    top_left: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sink: float | None = None

    def bounds(self, queries: int, keys: int, wrong: str | None) -> tuple[int, int]:
        """(first, last): query 0 sees the keys from the one to the other, query i those i further on."""
        offset = 0 if self.top_left else keys - queries
        left, right = self.window or (-1, 0 if self.causal else -1)
        more = EDGES.get(wrong, (0, 0))
        far = queries + keys
        return (
            offset - (far if left < 0 else left + more[0]),
            offset + (far if right < 0 else right + more[1]),
        )


def forward(
    q: Array, k: Array, v: Array, of: Of, tile_kv: int = 64, wrong: str | None = None
) -> tuple[Array, Array]:
    """(o (Nq, d), lse (Nq,)) in the type of q.

    A block of rows takes the tiles from the first that its first row sees to the last that its last row
    sees. A row's maximum is that of the scores it has seen; before it has seen any, of none. The sink joins
    the sum when all keys have.
    """
    o, lse = np.zeros_like(q), np.full(len(q), -np.inf, q.dtype)
    first, last = of.bounds(len(q), len(k), wrong)
    for row in range(0, len(q), ROWS):
        rows = np.arange(row, min(row + ROWS, len(q)))
        begin = max(0, rows[0] + first) // tile_kv * tile_kv
        end = min(len(k), rows[-1] + last + 1)
        if wrong == "skip the first tile that is seen":
            begin += tile_kv
        acc = np.zeros((len(rows), v.shape[1]), q.dtype)
        row_max = np.full(len(rows), -np.inf, q.dtype)
        row_sum = np.zeros(len(rows), q.dtype)
        if wrong == "keep the maximum at 0":
            row_max[:] = 0.0
        for key in range(begin, end, tile_kv):
            keys = np.arange(key, min(key + tile_kv, len(k)))
            s = q[rows] @ k[keys].T * np.asarray(of.scale, q.dtype)
            s = masked(s, rows, keys, first, last, of, capped_by_votes, wrong)
            new_max = np.maximum(row_max, s.max(1))
            shift = np.where(new_max == -np.inf, 0.0, new_max)
            p, grown = np.exp(s - shift[:, None]), np.exp(row_max - shift)
            row_sum, acc = row_sum * grown + p.sum(1), acc * grown[:, None] + p @ v[keys]
            row_max = new_max
        o[rows], lse[rows] = with_sink(acc, row_max, row_sum, of.sink, wrong)
    return o, lse


def with_sink(acc: Array, row_max: Array, row_sum: Array, sink: float | None, wrong: str | None = None):
    """Rows' o and lse of what their keys gave."""
    with np.errstate(divide="ignore", invalid="ignore"):
        without = row_max + np.log(row_sum)
        lse = without if sink is None else np.logaddexp(without, np.asarray(sink, acc.dtype))
        share = np.nan_to_num(np.exp(without - lse))
    o = acc / np.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if wrong != "sink left out of O":
        o = o * share[:, None]
    return o, without if wrong == "sink left out of the LSE" else lse


def capped_exactly(s: Array, cap: float, wrong: str | None = None) -> Array:
    return cap * np.tanh(s / cap)


def capped_by_votes(s: Array, cap: float, wrong: str | None = None) -> Array:
    """A warp's rows by a polynomial where all of its lanes say that their scores are near zero. A lane has
    two of the rows, 8 apart, and two of each 8 keys."""
    found, y = capped_exactly(s, cap), s / cap
    near = s * np.polynomial.polynomial.polyval(y * y, OF_NEAR)
    for warp in range(0, len(s), WARP_ROWS):
        own = y[warp : warp + WARP_ROWS] ** 2
        behind = [(0, -n % whole) for n, whole in zip(own.shape, (WARP_ROWS, 2 * LANES))]
        # (row half, row, 8 keys, lane of the row, key); NaN is the largest
        largest = np.pad(own, behind).reshape(2, WARP_ROWS // 2, -1, LANES, 2).max((0, 2, 4))
        if not (largest > NEAR**2).any() if wrong == NAN_IS_NEAR else (largest <= NEAR**2).all():
            found[warp : warp + WARP_ROWS] = near[warp : warp + WARP_ROWS]
    return found


def capped_together(s: Array, cap: float) -> Array:
    """Scores (…, TOGETHER) in fp32, each four with one reciprocal, as tiles taken for far are computed."""
    f = np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        exponents = s.astype(f) * f(2 / (cap * np.log(2)))
        # In fp64, rounded: NumPy's fp32 powers differ from CPU to CPU.
        powers = np.exp2(exponents.astype(np.float64)).astype(f) * f(2.0**-LARGEST)
        # An operation that saturates makes 0 of NaN.
        factors = np.clip(np.nan_to_num(powers + f(2.0**-LARGEST), nan=0.0), f(0), f(1))
        a, b, c, d = (factors[..., i] for i in range(TOGETHER))
        ab, cd = a * b, c * d
        shared = np.divide(f(1), ab * cd, where=ab * cd > 0, out=np.full_like(ab, np.inf))
        shared *= f(-2.0 * 2.0**-LARGEST * cap)
        of_ab, of_cd = shared * cd, shared * ab
        return np.stack((of_ab * b, of_ab * a, of_cd * d, of_cd * c), -1) + f(cap)


def masked(
    s: Array, rows: Array, keys: Array, first: int, last: int, of: Of,
    capped: Callable[[Array, float, str | None], Array] = capped_exactly, wrong: str | None = None,
) -> Array:  # fmt: skip
    """Scaled scores, capped, −∞ where they are hidden."""
    ahead = keys[None] - rows[:, None]
    hidden = (ahead < first) | (ahead > last)
    cap = lambda x: capped(x, of.softcap, wrong) if of.softcap and wrong != "no cap" else x
    if wrong == "cap after the mask":
        return cap(np.where(hidden, -np.inf, s)).astype(s.dtype)
    return np.where(hidden, -np.inf, cap(s)).astype(s.dtype)


def gradients(
    q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, dlse: Array | None, of: Of,
    tile: int = 64, wrong: str | None = None,
) -> tuple[Array, Array, Array, float]:  # fmt: skip
    """(dq, dk, dv, dsink), keys outside, queries inside: a tile of keys takes the queries from the first that
    sees its first key to the last that sees its last."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta = (do * o).sum(1) - (0 if dlse is None else dlse)
    shift = np.where(lse == -np.inf, 0.0, lse)
    first, last = of.bounds(len(q), len(k), wrong)
    for key in range(0, len(k), tile):
        keys = np.arange(key, min(key + tile, len(k)))
        begin, end = max(0, keys[0] - last) // tile * tile, min(len(q), keys[-1] - first + 1)
        for row in range(begin, end, tile):
            rows = np.arange(row, min(row + tile, len(q)))
            s = masked(q[rows] @ k[keys].T * np.asarray(of.scale, q.dtype), rows, keys, first, last, of)
            p = np.exp(s - shift[rows, None])
            ds = p * (do[rows] @ v[keys].T - delta[rows, None])
            if of.softcap and wrong != "slope of the cap left out":
                slope = 1 - (np.maximum(s, -of.softcap) / of.softcap) ** 2
                ds = ds * slope ** (2 if wrong == "slope of the cap twice" else 1)
            dv[keys] += p.T @ do[rows]
            dq[rows] += ds @ k[keys] * of.scale
            dk[keys] += ds.T @ q[rows] * of.scale
    if of.sink is None:
        return dq, dk, dv, 0.0
    if wrong == "dsink without dLSE":
        delta = (do * o).sum(1)
    share = np.exp(np.float64(of.sink) - lse) * delta
    return dq, dk, dv, -float(share[: -1 if wrong == "dsink of all rows but one" else None].sum())


# ---- packed sequences --------------------------------------------------------------------------------------


def class_of(length: int) -> int:
    """0 for the longest loops: a length's logarithm, to a quarter of a power of two."""
    power = max(1, length).bit_length() - 1
    return CLASSES - 1 - (4 * power + ((length << 2) >> power))


def tile_list(
    lengths: tuple[tuple[int, int], ...], rows: int, of_keys: bool = False, shared_keys: int = 0
) -> list[tuple[int, int, int]]:
    """(sequence, first tile of it, tiles of it) for each tile: sequences by the class of the loop over the
    other side, longest first, then as they come; a sequence's tiles together. With `shared_keys` those of up
    to 64 queries and so many keys, whose heads share tiles, come last, as they come."""
    own, other = (1, 0) if of_keys else (0, 1)
    tiles: list[tuple[int, int, int]] = []
    shared = lambda i: shared_keys > 0 and is_shared(lengths[i], shared_keys)
    for i in sorted(range(len(lengths)), key=lambda i: CLASSES if shared(i) else class_of(lengths[i][other])):
        blocks = -(-lengths[i][own] // rows)
        tiles += [(i, len(tiles), blocks)] * blocks
    return tiles


def is_shared(lengths: tuple[int, int], shared_keys: int) -> bool:
    """Whether heads share tiles of a sequence of so many queries and keys."""
    return lengths[0] <= ROWS and lengths[1] <= shared_keys


# ---- being wrong -------------------------------------------------------------------------------------------


@np.errstate(invalid="ignore")  # NaN and Inf among the inputs
def outputs(given: Given, wrong: str | None = None) -> dict[str, torch.Tensor]:
    """A kernel's outputs for the problem, computed by the models in fp32 from what it reads."""
    problem = given.problem
    backward = problem.direction == "bwd"
    o, lse = given.saved
    like = {"dq": given.q, "dk": given.k, "dv": given.v} if backward else {"o": given.q, "lse": lse}
    sums = {name: torch.full(x.shape, math.inf) for name, x in like.items()}
    dsink = torch.zeros(problem.heads, dtype=torch.float64)
    array = lambda x: x.float().numpy()
    group = problem.heads // max(1, problem.kv_heads)
    sinks = [None] * problem.heads if given.sink is None else given.sink.tolist()
    if wrong == "sink of another head":
        sinks = sinks[1:] + sinks[:1]
    scale = given.softmax_scale or problem.head_dim**-0.5
    for b, rows, keys in places(given, wrong):
        for head in range(problem.heads):
            of = Of(scale, problem.causal, problem.top_left, problem.window, problem.softcap, sinks[head])
            at_q, at_kv = (b, head, rows), (b, head // group, keys)
            if is_shared((rows.stop - rows.start, keys.stop - keys.start), SHARED_KEYS):
                if wrong == "keys of the first head of a shared tile":
                    at_kv = b, (head - head % SHARED_HEADS) // group, keys
                if wrong == "a head of a shared tile left out" and head % SHARED_HEADS:
                    continue
            q, k, v = array(given.q[at_q]), array(given.k[at_kv]), array(given.v[at_kv])
            if not backward:
                found = forward(q, k, v, of, wrong=wrong)
                sums["o"][at_q], sums["lse"][at_q] = map(torch.from_numpy, found)
                continue
            dlse = None if given.dlse is None else array(given.dlse[at_q])
            read = array(o[at_q]), array(lse[at_q]), array(given.do[at_q]), dlse
            *found, of_sink = gradients(q, k, v, *read, of, wrong=wrong)
            dsink[head] += of_sink
            for name, at, x in zip(("dq", "dk", "dv"), (at_q, at_kv, at_kv), map(torch.from_numpy, found)):
                shared = name != "dq" and head % group
                sums[name][at] = sums[name][at] + x if shared else x
    if wrong == "a row written behind the end":
        for name, x in sums.items():
            x[:, :, given.outside(name).nonzero()[0]] = 0.0
    found = {name: x.to(like[name].dtype) for name, x in sums.items()}
    return found | ({"dsink": dsink.float()} if backward and given.sink is not None else {})


def places(given: Given, wrong: str | None = None) -> Iterator[tuple[int, slice, slice]]:
    """(batch, queries, keys) of each sequence."""
    problem = given.problem
    if problem.sequences is None:
        for b in range(problem.batch):
            yield b, slice(0, problem.seqlen_q), slice(0, problem.seqlen_kv)
        return
    more = int(wrong == "a neighbour's key seen")
    for (queries, keys), first_q, first_kv in zip(problem.sequences, *given.starts):
        yield 0, slice(first_q, first_q + queries), slice(first_kv, first_kv + keys + more)


def applies(wrong: str, problem: Problem) -> bool:
    """Whether a problem has what is wrong."""
    if wrong in EDGES:
        side = 0 if wrong.startswith("left") else 1
        bounds = problem.window or (-1, 0 if problem.causal else -1)
        return bounds[side] >= 0
    if wrong == NAN_IS_NEAR:
        return False  # inputs have no NaN here: `score_cases.spread_of_nan`
    if "cap" in wrong:
        hides = problem.window is not None or problem.causal
        return bool(problem.softcap) and (hides or wrong != "cap after the mask")
    if "sink" in wrong:
        return problem.sink and (problem.lse_grad or wrong != "dsink without dLSE")
    if "neighbour" in wrong or "behind" in wrong:
        return problem.sequences is not None
    if "shared tile" in wrong:
        short = [n for n in problem.sequences or () if n[0] and is_shared(n, SHARED_KEYS)]
        group = problem.heads // max(1, problem.kv_heads)
        seen = any(keys > 0 for _, keys in short) and SHARED_HEADS > group < problem.heads
        return bool(short) and (problem.heads > 1 if "left out" in wrong else seen)
    return wrong != "skip the first tile that is seen" or problem.seqlen_kv > 0


def survivors(given: Given) -> list[str]:
    """What is wrong and not seen by the rule; None if the model itself is not right."""
    problem = given.problem
    kinds = BACKWARD if problem.direction == "bwd" else FORWARD
    found = []
    if failures := given.judge(outputs(given), rounding=False):
        found.append(f"None: {failures[0]}")
    for wrong in kinds:
        if applies(wrong, problem) and not given.judge(outputs(given, wrong), rounding=False):
            found.append(f"{wrong}: {problem}")
    return found
