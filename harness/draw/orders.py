"""Which CTA works on what, and when: the causal order of tiles, and decode's flat list."""

import heapq
import itertools
import math

from harness.draw.canvas import Canvas
from harness.untraced import kernels
from hopper_attention.kernels.contract import Problem

SEQLEN, HEADS, HEAD_DIM = 4096, 64, 128  # of the causal order: the sweep's point, all batches' heads
PAINTS = ("a", "b", "c", "d", "e", "g", "f", "a2", "b2", "c2", "d2")


def _schedule(
    order: object, kernel: object, section: int
) -> tuple[list[tuple[int, float, float, int]], float]:
    """(CTA, start, end, head) of each tile of queries as CTAs fetch them, in steps of one tile of keys."""
    problem = Problem.square(HEADS, 1, SEQLEN, HEAD_DIM, True)
    blocks = math.ceil(SEQLEN / kernel.tile_q)
    lengths = problem.seqlen_q, problem.seqlen_kv
    # A tile takes as many steps as its last consumer, and about two for its ends (notes/k6.md).
    steps = [kernel.kv_blocks((block + 1) * kernel.tile_q, *lengths) + 2 for block in range(blocks)]
    free = [(0.0, cta) for cta in range(kernel.sms)]
    heapq.heapify(free)
    spans = []
    for tile in range(blocks * HEADS):
        block, head = order.locate(tile, blocks, HEADS, section)
        start, cta = heapq.heappop(free)
        spans.append((cta, start, start + steps[block], head))
        heapq.heappush(free, (start + steps[block], cta))
    return spans, max(end for _, _, end, _ in spans)


def causal() -> Canvas:
    """k6's causal order beside one that takes head after head, over all SMs."""
    k6, orders = kernels("k6"), kernels("device.tile_order")
    kernel = k6.kernel_for(Problem.square(1, HEADS, SEQLEN, HEAD_DIM, True))
    section = kernel.section_bytes(SEQLEN) // (4 * HEAD_DIM) // SEQLEN
    panels = [
        ("head after head, first rows first", *_schedule(orders.ByHead(), kernel, section)),
        (
            f"k6: sections of {section} heads, in each the longest tiles first",
            *_schedule(kernel.order, kernel, section),
        ),
    ]
    longest = max(end for _, _, end in panels)
    left, wide, high = 60, 720, 2
    rows = kernel.sms
    picture = Canvas(
        60 + len(panels) * (rows * high + 62) + 26,
        "The order of causal tiles over the SMs",
        "Tiles of queries of 64 heads under a causal mask, as 132 CTAs fetch them. Head after head, the last "
        "tiles fetched are long ones and many CTAs wait for a few. In k6's order heads are worked on in "
        "sections, in each the longest tiles come first, and the CTAs end together.",
    )
    picture.text(
        16,
        24,
        f"{HEADS} heads of {SEQLEN} tokens, causal, head_dim {HEAD_DIM}: {rows} CTAs and one counter",
        14,
        bold=True,
    )
    picture.text(
        16,
        44,
        "A row is an SM, a bar a tile of queries, as wide as it takes steps (a model); a colour a section.",
        12,
        paint="soft",
    )
    y = 60
    for title, spans, end in panels:
        work = sum(stop - start for _, start, stop, _ in spans) / rows
        picture.text(16, y + 18, title, 13, bold=True)
        picture.text(780, y + 18, f"busy {100 * work / end:.1f} % of the time", 12, "end", "soft")
        y += 26
        picture.rect(left, y, wide, rows * high, "idle")
        bars: dict[str, list[tuple[float, float, float, float]]] = {}
        for cta, start, stop, head in sorted(spans):
            x, w = left + start / longest * wide, (stop - start) / longest * wide
            paint = PAINTS[head // section % len(PAINTS)]
            bars.setdefault(paint, []).append((x, y + cta * high, max(0.4, w - 0.4), high))
        for paint, of_paint in sorted(bars.items()):
            picture.rects(of_paint, paint)
        picture.text(left - 6, y + 12, "SM 0", 11, "end", "soft")
        picture.text(left - 6, y + rows * high, f"{rows - 1}", 11, "end", "soft")
        y += rows * high + 36
    picture.text(left + wide, y - 6, "time: steps of one tile of keys", 11, "end", "soft")
    return picture


def decode() -> Canvas:
    """The flat list of chunks of a ragged batch, cut into the teams' equal slices."""
    calls, limits = kernels("calls_decode"), kernels("device.constants")
    head_dim = 128
    chunk = calls.chunk_of(head_dim, False)
    together = calls.TEAM_BYTES // (2 * head_dim)
    teams = limits.SMS // together
    lengths = (6900, 300, 15000, 2100, 1, 9800, 4200)
    chunks = [max(1, math.ceil(n / chunk)) for n in lengths]
    total = sum(chunks)
    share = math.ceil(total / teams)
    picture = Canvas(
        300,
        "decode's split of a batch over the SMs",
        "The chunks of keys of all sequences stand in one list, which is cut into equal slices, one for each "
        "team of CTAs, wherever a sequence begins or ends. What several teams have of a sequence is "
        "put together "
        "by the warp that comes last to its rows.",
    )
    picture.text(
        16,
        24,
        f"{total} chunks of {chunk} keys, {teams} teams of {together} CTAs (a key head each): "
        f"{share} chunks a team",
        14,
        bold=True,
    )
    left, wide = 16, 768
    unit = wide / (share * teams)
    y, x = 52, float(left)
    picture.text(left, y, f"{len(lengths)} sequences, their keys:", 12, paint="soft")
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    for i, (n, c) in enumerate(zip(lengths, chunks, strict=True)):
        picture.rect(x, y + 10, c * unit, 36, PAINTS[i], "line")
        if c * unit > 40:
            picture.text(x + c * unit / 2, y + 33, f"{n}", 12, "middle")
        x += c * unit
    y = 140
    picture.text(
        left,
        y,
        "slices: a team's CTAs read the same keys at the same time, each its own key head",
        12,
        paint="soft",
    )
    merges = 0
    for team in range(math.ceil(total / share)):
        begin, end = team * share, min((team + 1) * share, total)
        for i, (start, c) in enumerate(zip(starts, chunks, strict=True)):
            a, b = max(begin, start), min(end, start + c)
            if a < b:
                picture.rect(left + a * unit, y + 10, (b - a) * unit, 36, PAINTS[i])
        picture.rect(left + begin * unit, y + 10, (end - begin) * unit, 36, "", "line")
        picture.text(
            left + (begin + min(begin + share, share * teams)) / 2 * unit, y + 33, str(team), 12, "middle"
        )
    y = 214
    picture.text(
        left,
        y,
        "pieces that meet: the warp that comes last to a row adds them up, in their order; nobody waits",
        12,
        paint="soft",
    )
    for i, (start, c) in enumerate(zip(starts, chunks, strict=True)):
        cut = [t * share for t in range(teams + 1) if start < t * share < start + c]
        edges = [start, *cut, start + c]
        pieces = len(edges) - 1
        merges += pieces > 1
        middle = left + (start + c / 2) * unit
        if pieces > 1:
            for a, b in itertools.pairwise(edges):
                picture.line([(left + (a + b) / 2 * unit, y + 10), (middle, y + 34)], "line")
            picture.rect(middle - 30, y + 34, 60, 20, PAINTS[i], "line", 3)
            picture.text(middle, y + 48, f"{pieces} pieces", 11, "middle")
    picture.text(
        left,
        290,
        "A sequence inside one slice needs no combining. The grid is the same for every batch: CUDA graphs.",
        12,
    )
    return picture
