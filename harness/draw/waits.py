"""Who waits for whose turn at dQ: tiles of keys that all begin with the same queries, or apart."""

from harness.draw.canvas import Canvas
from hopper_attention import turns
from hopper_attention.kernels.calls import Parts
from hopper_attention.kernels.contract import Problem

FEW_QUERIES = Problem(1, 8, 1, 512, 8192, 128, True, direction="bwd")
PARTS = Parts(queries=2)
# An odd number of sums are chains of their own, in which all begin together (notes/bwd4_det.md).
PANELS = ((7, "all begin with the first head"), (8, "each begins with another one"))
PAINTS = ("a", "b", "c", "d", "a2", "b2", "c2", "d2")  # of query heads
LEFT, WIDE, ROW = 58, 344, 4
UNTIL = 100  # µs
TOP = 92


def busy(visits: list[turns.Visit]) -> list[tuple[float, float]]:
    """From when until when a tile of keys computes, in µs: steps with no wait between them are one."""
    spans: list[tuple[float, float]] = []
    for visit in visits:
        if spans and visit.start - spans[-1][1] < 0.01:
            spans[-1] = spans[-1][0], visit.done
        else:
            spans.append((visit.start, visit.done))
    return spans


def waits() -> Canvas:
    """The tiles of keys of one part of the queries, in the order in which they are fetched."""
    steps: dict[int, list[turns.Visit]] = {sums: [] for sums, _ in PANELS}
    ends = {sums: turns.waited(FEW_QUERIES, PARTS, sums, visits=steps[sums]) for sums in steps}
    tiles = range(0, len(turns.schedule(FEW_QUERIES, PARTS, 1)[0]), PARTS.queries)
    bottom = TOP + ROW * len(tiles)
    picture = Canvas(
        bottom + 66,
        "Turns at dQ, of few queries on many keys",
        "Two panels of 64 tiles of keys over time, coloured by the query head that each works on: in the "
        "left one all begin with the same head, and the later one is fetched the longer it waits at first; "
        "in the right one they begin with eight different heads, and hardly wait.",
    )
    picture.text(16, 24, "512 queries of 8 heads on 8192 keys of one", 14, bold=True)
    picture.text(
        16, 45, "A row is a tile of keys, in the order in which they are fetched; a colour is a query head. "
        "By the simulation.", 12, paint="soft",
    )  # fmt: skip
    for panel, (sums, words) in enumerate(PANELS):
        left = LEFT + panel * (WIDE + 40)
        at = lambda us, left=left: left + WIDE * us / UNTIL
        picture.text(left, TOP - 14, f"{sums} sums: {words}", 12)
        picture.rect(left, TOP, WIDE, bottom - TOP, "idle")
        for head, paint in enumerate(PAINTS):
            spans = [
                (at(start), TOP + ROW * row, at(end) - at(start), ROW - 1)
                for row, tile in enumerate(tiles)
                for start, end in busy([x for x in steps[sums] if (x.tile, x.head) == (tile, head)])
            ]
            picture.rects(spans, paint)
        picture.line([(at(ends[sums]), TOP - 4), (at(ends[sums]), bottom)], "ink", 1.2)
        for us in range(0, UNTIL + 1, 20):
            picture.line([(at(us), bottom), (at(us), bottom + 5)])
            picture.text(at(us), bottom + 20, str(us), 11, "middle", "soft")
        picture.text(left + WIDE, bottom + 38, "µs", 11, "end", "soft")
    picture.text(LEFT - 8, TOP + 10, "first", 11, "end", "soft")
    picture.text(LEFT - 8, bottom - 2, "last", 11, "end", "soft")
    picture.text(
        16, bottom + 54, "Grey: waiting for a turn, or done. The line: the last addition has arrived.", 12,
        paint="soft",
    )  # fmt: skip
    return picture
