"""Who is busy when: the consumers of k5 to k6 at the tensor cores and the MUFU, and a ring's barriers.

No clock of these kernels is committed, so the timelines are drawn from their schedules: the order of
products, waits and turns of a kernel's main loop, its own tile shapes, and the machine's rates. A WGMMA of
64×N×16 takes N/2 cycles (4096 FLOP a cycle), one exponential of a warp 8 cycles (16 results a cycle and SM),
another instruction 1, a maximum or a conversion 2. Loads are always there, and nothing has a latency. Beside
each stands what was measured.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.draw.canvas import Canvas
from harness.results import Results, repository
from harness.sweep import sweep_problem
from harness.untraced import kernels
from hopper_attention.kernels.contract import Problem

TICK = 8  # cycles
IN_FLIGHT = 8  # WGMMAs of a warpgroup; then issuing the next one holds it up (notes/gotchas.md)
WARM_UP = 16384  # cycles that are not drawn: everybody begins at once, which is not how it goes on
HEAD_DIM = 128
GPU = "h200"
Step = tuple  # what a consumer asks for next


@dataclass
class Consumer:
    program: Iterator[Step]
    queue: list[list] = field(default_factory=list)  # commit groups: [kind, WGMMAs left, cycles of one]
    issuing: bool = False
    step: Step | None = None
    left: float = 0.0  # cycles of the step
    doing: list[tuple[str, int, int]] = field(default_factory=list)  # (what, from, to)


@dataclass(frozen=True)
class Timeline:
    consumers: list[list[tuple[str, int, int]]]
    tensor: list[tuple[int, str, int, int]]  # (consumer, kind, from, to)
    mufu: list[tuple[tuple[int, ...], int, int]]  # (consumers, from, to)
    until: int

    @property
    def tensor_share(self) -> float:
        return sum(end - start for _, _, start, end in self.tensor) / (self.until - WARM_UP)

    def behind_warm_up(self) -> "Timeline":
        """What lies behind WARM_UP, in cycles after it."""
        cut = lambda spans: [
            (*what, max(0, start - WARM_UP), end - WARM_UP) for *what, start, end in spans if end > WARM_UP
        ]
        return Timeline(
            [cut(doing) for doing in self.consumers], cut(self.tensor), cut(self.mufu), self.until
        )


def simulate(programs: list[Iterator[Step]], until: int) -> Timeline:
    """Consumers that all start at once. The tensor cores take one WGMMA after the other, of the consumers in
    turn; the MUFU divides itself among those that exponentiate."""
    consumers = [Consumer(program) for program in programs]
    turn, running = 0, None
    tensor: list[tuple[int, str, int, int]] = []
    mufu: list[tuple[tuple[int, ...], int, int]] = []
    turns = {0: 1}  # whose turn it is, and how many it has been given
    for now in range(0, until, TICK):
        for c in consumers:  # what takes no time
            index = consumers.index(c)
            while True:
                if c.step is None:
                    c.step = next(c.program)
                    c.left = c.step[-1] if c.step[0] in ("work", "exp") else 0.0
                kind = c.step[0]
                if kind == "issue":
                    if not c.issuing:
                        c.queue.append(list(c.step[1:]))
                    c.issuing = sum(left for _, left, _ in c.queue) > IN_FLIGHT
                    if c.issuing:
                        break
                elif kind == "pass":
                    other = (index + 1) % len(consumers)
                    turns[other] = turns.get(other, 0) + 1
                elif kind == "turn":
                    if not turns.get(index):
                        break
                    turns[index] -= 1
                elif kind == "wait":
                    if len(c.queue) > c.step[1]:
                        break
                elif c.left > 0:
                    break
                c.step = None
        busy = tuple(i for i, c in enumerate(consumers) if c.step[0] == "exp")
        if busy:
            _extend(mufu, busy, now)
        for c in consumers:
            kind = c.step[0]
            if kind in ("work", "exp"):
                c.left -= TICK / len(busy) if kind == "exp" else TICK
            what = c.step[1] if kind in ("work", "exp") else kind
            if c.doing and c.doing[-1][0] == what and c.doing[-1][2] == now:
                c.doing[-1] = (what, c.doing[-1][1], now + TICK)
            else:
                c.doing.append((what, now, now + TICK))
        if running is None:
            for i in range(len(consumers)):
                at = (turn + i) % len(consumers)
                if consumers[at].queue:
                    running, turn = [at, consumers[at].queue[0][2]], (at + 1) % len(consumers)
                    break
        if running is not None:
            at, group = running[0], consumers[running[0]].queue[0]
            if tensor and tensor[-1][:2] == (at, group[0]) and tensor[-1][3] == now:
                tensor[-1] = (*tensor[-1][:3], now + TICK)
            else:
                tensor.append((at, group[0], now, now + TICK))
            running[1] -= TICK
            if running[1] <= 0:
                group[1] -= 1
                running = None
                if group[1] == 0:
                    consumers[at].queue.pop(0)
    return Timeline([c.doing for c in consumers], tensor, mufu, until)


def _extend(mufu: list, busy: tuple[int, ...], now: int) -> None:
    if mufu and mufu[-1][0] == busy and mufu[-1][2] == now:
        mufu[-1] = (busy, mufu[-1][1], now + TICK)
    else:
        mufu.append((busy, now, now + TICK))


def programs_of(stage: str) -> list[Iterator[Step]]:
    """The main loop of a stage's consumers at HEAD_DIM, from the second tile's point of view: endless."""
    module = kernels(stage)
    if stage == "k6":
        config = module.kernel_for(Problem.square(1, 1, 4096, HEAD_DIM, False)).config
        consumers, tile_kv = config.consumers, config.tile_kv
    else:
        tile_q, tile_kv, _ = module.TILES[HEAD_DIM]
        consumers = tile_q // 64
    qk = ("issue", "QK", HEAD_DIM // 16, tile_kv // 2)
    pv = ("issue", "PV", tile_kv // 16, HEAD_DIM // 2)
    each = tile_kv // 2  # scores of a thread
    maximum, exp = ("work", "max", 2 * each), ("exp", "exp", 8 * each)
    rescale = ("work", "round, O·=", each + HEAD_DIM // 2)  # conversions of pairs, and O's registers
    compare, rounding = ("work", "s·c−m, vote", each + each), ("work", "round", each)

    def serial() -> Iterator[Step]:
        while True:
            yield from (qk, ("wait", 0), maximum, exp, rescale, pv, ("wait", 0))

    def turns() -> Iterator[Step]:
        yield ("turn",)
        while True:
            yield from (qk, ("pass",), ("wait", 0), maximum, exp, rescale, ("turn",), pv, ("wait", 0))

    def overlap() -> Iterator[Step]:
        """As the assembler left it: the wait for P·V stands before the softmax."""
        yield from (qk, ("wait", 0), maximum, exp, rescale)
        while True:
            yield from (("turn",), qk, pv, ("pass",), ("wait", 0), maximum, exp, rescale)

    def production() -> Iterator[Step]:
        yield from (qk, ("wait", 0), maximum, exp, rounding)
        while True:
            yield from (qk, pv, ("wait", 1), compare, ("wait", 0), exp, rounding)

    makes: dict[str, Callable[[], Iterator[Step]]] = {
        "k5": serial, "k6_1": turns, "k6_2": overlap, "k6": production,
    }  # fmt: skip
    return [makes[stage]() for _ in range(consumers)]


def measured(stage: str) -> str:
    folder = repository() / "results" / GPU
    row = Results.load(folder / f"{stage}.json").at(sweep_problem(4096, HEAD_DIM, False))
    words = [f"{row.tflops:.0f} TFLOP/s"] if row is not None and row.tflops else []
    path: Path = folder / "profiles" / f"{stage}.json"
    if path.exists():
        longest = max(json.loads(path.read_text(encoding="utf-8")), key=lambda kernel: kernel["time, µs"])
        words.append(f"tensor cores {longest['tensor pipe, %']:.0f} %")
    return "measured on an H200, N = 4096: " + (", ".join(words) or "not yet")


TITLES = {
    "k5": "k5: everybody multiplies, then everybody exponentiates",
    "k6_1": "k6_1: the consumers take turns",
    "k6_2": "k6_2: both products issued together; the wait came too early",
    "k6": "k6: three consumers, no turns, the vote before the wait",
}
UNTIL, LEFT, SCALE = 5120, 112, 0.13
COUNTED = 65536  # cycles of which the tensor cores' share is given: many tiles
PAINTS = ("a", "b", "c")


def timelines() -> Canvas:
    rows = {stage: 3 if stage == "k6" else 2 for stage in TITLES}
    height = 76 + sum(46 + 17 * n + 2 * 19 + 14 for n in rows.values())
    picture = Canvas(
        height,
        "Consumers, tensor cores and MUFU over time in k5, k6_1, k6_2 and k6",
        "Four timelines of 5120 cycles at head_dim 128. In k5 both consumers multiply and then both "
        "exponentiate, and the tensor cores stand still meanwhile; with turns, and in k6 with three "
        "consumers, "
        "somebody always multiplies. Drawn from the schedules, with the measured rates beside them.",
    )
    picture.text(
        16, 24, "One SM at head_dim 128, from the schedules: no latencies, loads always there", 14, bold=True
    )
    entries = [(paint, f"consumer {i + 1}") for i, paint in enumerate(PAINTS)]
    picture.legend(
        16,
        48,
        [
            *entries,
            ("a", "light: Q·Kᵀ, softmax"),
            ("a2", "strong: P·V, exponentials"),
            ("idle", "waits"),
        ],
    )
    y = 64
    for stage, title in TITLES.items():
        share = simulate(programs_of(stage), WARM_UP + COUNTED).behind_warm_up().tensor_share
        found = simulate(programs_of(stage), WARM_UP + UNTIL).behind_warm_up()
        y += 22
        picture.text(16, y, title, 13, bold=True)
        drawn = f"drawn: tensor cores {100 * share:.0f} %; {measured(stage)}"
        y += 17
        picture.text(16, y, drawn, 12, paint="soft")
        y += 7
        top = y
        for i, doing in enumerate(found.consumers):
            picture.text(LEFT - 8, y + 12, f"consumer {i + 1}", 11, "end")
            for what, start, end in doing:
                paint = (
                    "idle"
                    if what in ("turn", "wait", "issue")
                    else PAINTS[i] + ("2" if what == "exp" else "")
                )
                picture.rect(LEFT + start * SCALE, y, (end - start) * SCALE, 15, paint)
                if what == "exp" and (end - start) * SCALE > 26:
                    picture.text(LEFT + (start + end) / 2 * SCALE, y + 11.5, "exp", 11, "middle")
            y += 17
        picture.text(LEFT - 8, y + 13, "tensor cores", 11, "end", bold=True)
        picture.rect(LEFT, y, UNTIL * SCALE, 17, "idle")
        for i, kind, start, end in found.tensor:
            paint = PAINTS[i] + ("2" if kind == "PV" else "")
            picture.rect(LEFT + start * SCALE, y, (end - start) * SCALE, 17, paint)
            if (end - start) * SCALE > 30:
                picture.text(LEFT + (start + end) / 2 * SCALE, y + 12.5, kind, 11, "middle")
        y += 19
        picture.text(LEFT - 8, y + 13, "MUFU", 11, "end", bold=True)
        picture.rect(LEFT, y, UNTIL * SCALE, 17, "idle")
        for busy, start, end in found.mufu:
            each = 17 / len(busy)
            for k, i in enumerate(busy):
                picture.rect(LEFT + start * SCALE, y + k * each, (end - start) * SCALE, each, PAINTS[i] + "2")
        y += 19
        for cycles in range(0, UNTIL + 1, 1024):
            picture.line([(LEFT + cycles * SCALE, top), (LEFT + cycles * SCALE, y)], "grid", 1, "2 4")
        y += 7
    y += 10
    picture.text(LEFT - 8, y, "cycles", 11, "end", "soft")
    for cycles in range(0, UNTIL + 1, 1024):
        anchor = "end" if cycles == UNTIL else "middle"
        picture.text(LEFT + cycles * SCALE, y, f"{cycles}" if cycles else "0", 11, anchor, "soft")
    return picture


def ring() -> Canvas:
    """k6's ring of K at head_dim 128 over two rounds and a half: its stages, and both barriers' phases."""
    config = kernels("k6").kernel_for(Problem.square(1, 1, 4096, HEAD_DIM, False)).config
    stages, consumers = config.stages, config.consumers
    load, step, tiles = 5, 3, 2 * stages + 2  # a load takes so many units of time, a consumer's step so many
    kv_bytes = config.tile_kv * HEAD_DIM * 2
    started, there, read, left = [], [], [], []  # of each tile
    for tile in range(tiles):
        free = left[tile - stages] if tile >= stages else 0
        started.append(max(free, started[-1] + 1 if started else 0))
        there.append(max(started[-1] + load, there[-1] + 1 if there else 0))
        read.append(max(there[-1], left[-1] if left else 0))
        left.append(read[-1] + step)
    until = left[-1] + 1
    left_edge, scale, pitch = 130, (WIDE - 130 - 20) / until, 84
    picture = Canvas(
        138 + stages * pitch,
        "A ring of stages with its mbarriers and their phases",
        "Each stage of a ring of K goes from empty to travelling to full to being read. Its full barrier "
        "completes a phase when the producer's arrival and all bytes have come, its empty barrier when every "
        "consumer warp has arrived; a wait asks for the phase's parity, which alternates from round "
        "to round.",
    )
    picture.text(
        16, 24, f"k6's ring of K at head_dim 128: {stages} stages of {kv_bytes // 1024} KiB", 14, bold=True
    )
    arrivals = 4 * consumers
    picture.text(
        16, 45, f"full[s]: 1 arrival of the producer + {kv_bytes} bytes, counted by the TMA", 12, paint="soft"
    )
    picture.text(462, 45, f"empty[s]: {arrivals} arrivals, a lane of each consumer warp", 12, paint="soft")
    picture.legend(
        16,
        68,
        [
            ("f", "travels: the producer waited for empty[s]"),
            ("c", "full"),
            ("a2", "the consumers read it"),
            ("idle", "empty"),
        ],
    )
    y = 84
    for stage in range(stages):
        picture.text(left_edge - 8, y + 19, f"stage {stage}", 13, "end", bold=True)
        picture.rect(left_edge, y, until * scale, 28, "idle")
        for name, lane in (("full", 0), ("empty", 1)):
            picture.text(left_edge - 8, y + 43 + 17 * lane, f"{name}[{stage}] phase", 11, "end", "soft")
        full_at, empty_at = [0], [0]
        for tile in range(stage, tiles, stages):
            x = lambda time: left_edge + time * scale
            spans = (
                ("f", started[tile], there[tile]),
                ("c", there[tile], read[tile]),
                ("a2", read[tile], left[tile]),
            )
            for paint, start, end in spans:
                if end > start:
                    picture.rect(x(start), y, (end - start) * scale, 28, paint, "line")
            picture.text(x((started[tile] + there[tile]) / 2), y + 19, f"K{tile}", 12, "middle")
            picture.text(x((read[tile] + left[tile]) / 2), y + 19, f"K{tile}", 12, "middle")
            full_at.append(there[tile])
            empty_at.append(left[tile])
        for lane, times in ((0, full_at), (1, empty_at)):
            for i, start in enumerate(times):
                end = times[i + 1] if i + 1 < len(times) else until
                top = y + 32 + 17 * lane
                picture.rect(left_edge + start * scale, top, (end - start) * scale, 14, "hd"[i % 2], "paper")
                if (end - start) * scale > 12:
                    picture.text(left_edge + (start + end) / 2 * scale, top + 11, str(i % 2), 11, "middle")
        y += pitch
    picture.text(
        16,
        y + 12,
        "A consumer in round r waits until full[s] has left phase r mod 2; the producer, until "
        "empty[s] has left the phase before.",
        12,
    )
    picture.text(
        16,
        y + 32,
        "One bit tells two rounds apart and no more: whoever skips a stage must still wait for it.",
        12,
    )
    return picture


WIDE = 800
