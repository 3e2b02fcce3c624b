"""The time of a ring, from the time of a step's kernels and of a message: 2 to 1024 GPUs.

A forward step's kernels take what `division` expects of their tiles, a backward one's their FLOPs over a
rate and the share of SMs that its list of tiles keeps busy; merges, and the passes of a gradient that are not
main kernels, their bytes over another. Beside a step travels what the next one needs: it lasts as long as the
longer of the two. The first of a forward pass has the keys of the second beside it. A backward pass begins
with some heads of a rank's own block, beside which the same keys travel, and ends with the others, beside
which the last dK and dV do.
"""

from dataclasses import dataclass

from hopper_attention.integrations import zigzag
from hopper_attention.kernels import division
from hopper_attention.kernels.calls import UNDIVIDED
from hopper_attention.kernels.contract import BYTES_PER_ELEMENT, Problem

BACKWARD = 2.5  # a backward step's FLOPs over a forward one's


@dataclass(frozen=True)
class Network:
    """What a GPU sends while it receives as much: bytes a second, and seconds before the first byte."""

    name: str
    bytes_per_s: float
    latency_s: float


NVLINK = Network("NVLink 4", 376e9, 10e-6)  # copy engines between two H200s of one host, measured
NDR = Network("400 Gb/s a GPU", 45e9, 30e-6)  # InfiniBand or Ethernet NICs, one a GPU, at nine tenths


@dataclass(frozen=True)
class Rates:
    """Of one GPU's main kernels, FLOP/s, forward by default as `division` has its tiles; of the other passes,
    bytes/s."""

    forward: float | None
    backward: float
    memory: float = 3.5e12


H200 = Rates(None, 687e12)  # backward as measured, 16k tokens of 32:8 heads of 128 on each of two


@dataclass(frozen=True)
class Predicted:
    """Seconds of a call on P GPUs, and of its kernels alone."""

    seconds: float
    compute: float

    @property
    def efficiency(self) -> float:
        return self.compute / self.seconds


def predict(
    tokens: int, heads: int, kv_heads: int, head_dim: int, ranks: int, rates: Rates, network: Network,
    both: bool, hosts_of: int = 8, beyond: Network = NDR,
) -> Predicted:  # fmt: skip
    """Of `tokens` of a GPU, causal. Ranks lie `hosts_of` on a host. In step i rank r hears from rank r − i:
    the slowest message of a step is one `beyond` a host as soon as there is one."""
    own = Problem(1, heads, kv_heads, tokens, tokens, head_dim, True)
    half = own.with_(seqlen_kv=tokens // 2, causal=False)  # as many FLOPs, as any step
    o = heads * tokens * head_dim * BYTES_PER_ELEMENT
    kv = 2 * kv_heads * tokens * head_dim * BYTES_PER_ELEMENT
    net = network if ranks <= hosts_of else beyond
    message = lambda n: net.latency_s + n / net.bytes_per_s
    home = 2 * kv  # fp32
    fetches = [message(kv)] * (ranks - 1) + [0.0]  # beside each step, what the next one needs
    forward = [seconds_of(own, rates), *[seconds_of(half, rates) + 3 * o / rates.memory] * (ranks - 1)]
    turns = list(zip(forward, fetches))
    if both:
        first = zigzag.first_heads(kv_heads, tokens * heads // kv_heads) if ranks > 1 else kv_heads
        block, before, rest = (gradients_of(x, rates) for x in (half, *own_parts(own, first)))
        homing = [0.0, 0.0, *[message(home)] * (ranks - 1)]  # beside each turn, what the one before gave
        # Before: o and do are read, zeros written for dQ in fp32; after: that read and dQ written, dK and dV
        # read in fp32, own and what came, and written. What came from the third rank on is added before.
        begin, end = 4 * o / rates.memory, (3 * o + 5 * kv) / rates.memory
        added = [0.0, 0.0, 0.0, *[6 * kv / rates.memory] * (ranks - 2)]
        kernels = [begin + before, *[block] * (ranks - 1), rest + end]
        beside = zip(kernels, added, [*fetches, 0.0], homing)
        turns += [(x + more, fetch + sent) for x, more, fetch, sent in beside]
    compute, seconds = sum(x for x, _ in turns), sum(map(max, turns))
    return Predicted(seconds, compute)


def own_parts(own: Problem, first: int) -> tuple[Problem, Problem]:
    """A rank's own block: of so many key heads, and of the others."""
    group = own.heads // own.kv_heads
    of_heads = lambda n: own.with_(heads=n * group, kv_heads=n)
    return of_heads(first), of_heads(own.kv_heads - first)


def gradients_of(problem: Problem, rates: Rates) -> float:
    """Seconds of a backward pass's main kernel, by the SM that has most to do."""
    if not problem.heads:
        return 0.0
    loads = division.loads_of(problem, UNDIVIDED)
    return BACKWARD * problem.flops / rates.backward * max(loads) * len(loads) / sum(loads)


def seconds_of(problem: Problem, rates: Rates) -> float:
    """Of a forward kernel by itself."""
    if rates.forward is not None:
        return problem.flops / rates.forward
    tiles = division.TILES[problem.head_dim]
    return min(division.forward_us(problem, rows) for rows in tiles) / 1e6


def steps_are_equal(ranks: int) -> bool:
    """What `predict` assumes of the schedule: every rank's every step is as many scores."""
    cells = {
        len(step.queries.halves) * len(step.keys.halves) / (2 if step.causal else 1)
        for rank in range(ranks)
        for step in zigzag.schedule(rank, ranks, True)
    }
    return len(cells) == 1


def least_tokens(heads: int, kv_heads: int, head_dim: int, ranks: int, rates: Rates, network: Network,
                 both: bool, efficiency: float = 0.95) -> int:  # fmt: skip
    """The tokens of a GPU, a power of two, from which on a call is so efficient."""
    for exponent in range(10, 21):
        if (
            predict(2**exponent, heads, kv_heads, head_dim, ranks, rates, network, both).efficiency
            >= efficiency
        ):
            return 2**exponent
    raise ValueError(f"not below {2**20} tokens")
