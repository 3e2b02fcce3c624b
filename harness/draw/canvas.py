"""An SVG of plain shapes and words, readable in light and dark, whose bytes depend on what is drawn alone."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH = 800  # what GitHub shows without scaling
SMALLEST = 11  # of a font, in pixels
FONT = "font-family:'DejaVu Sans',Verdana,system-ui,sans-serif"

# What a class is painted with, in light and in dark. Letters are things, each with a stronger shade; the rest
# are the paper, words, lines and what is idle. A picture in the dark paints its own paper, since a page need
# not have the colours that the reader's system asks for.
PAINT = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9ea7b1"),
    "line": ("#6e7781", "#8b949e"),
    "grid": ("#d0d7de", "#30363d"),
    "idle": ("#eef1f4", "#1b2129"),
    "a": ("#b6d7f5", "#1d4a78"),
    "a2": ("#6facea", "#2f75bb"),
    "b": ("#fbd6ac", "#774414"),
    "b2": ("#f0a456", "#b0671f"),
    "c": ("#bfe5bf", "#22582b"),
    "c2": ("#7cc77f", "#388a45"),
    "d": ("#dccdf2", "#4a3377"),
    "d2": ("#b292e2", "#7350b3"),
    "e": ("#f7c5cb", "#75262f"),
    "f": ("#f5e8a8", "#5d510f"),
    "g": ("#b5e4e1", "#175956"),
    "h": ("#d9dde2", "#3b434d"),
}
STROKES = ("line", "grid", "ink", "paper")


def _style() -> str:
    def rules(shade: int) -> str:
        fills = [f".{name}{{fill:{paints[shade]}}}" for name, paints in PAINT.items()]
        return "".join([*fills, *(f".s-{name}{{stroke:{PAINT[name][shade]};fill:none}}" for name in STROKES)])

    return f"text{{{FONT}}}{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}"


def width_of(text: str, size: float) -> float:
    """About how wide a text is, in pixels: of DejaVu Sans, which is wider than most."""
    narrow = sum(c in "ijl.,:;|!'()[]/ 1tfr·" for c in text)
    return size * (0.42 * narrow + 0.63 * (len(text) - narrow))


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Canvas:
    """What is drawn so far. Coordinates are pixels from the top left; a `paint` is a class of PAINT."""

    def __init__(self, height: int, title: str, description: str):
        self.height, self.title, self.description = height, title, description
        self.parts: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, paint: str, edge: str = "", radius: float = 0
    ) -> None:
        corners = f' rx="{number(radius)}"' if radius else ""
        size = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"'
        if paint:
            self.parts.append(f'<rect {size}{corners} class="{paint}"/>')
        if edge:
            self.parts.append(f'<rect {size}{corners} class="s-{edge}"/>')

    def rects(self, places: Sequence[tuple[float, float, float, float]], paint: str) -> None:
        """Many rectangles (x, y, width, height) of one paint, in fewer bytes."""
        path = "".join(
            f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h-{number(w)}z" for x, y, w, h in places
        )
        self.parts.append(f'<path d="{path}" class="{paint}"/>')

    def text(
        self, x: float, y: float, words: str, size: float = 13, anchor: str = "start", paint: str = "ink",
        bold: bool = False, room: float | None = None,
    ) -> None:  # fmt: skip
        """Words on the base line y. Raises ValueError where they would leave the picture, or their `room`."""
        if size < SMALLEST:
            raise ValueError(f"{words!r} at {size} pixels cannot be read")
        wide = width_of(words, size) * (1.06 if bold else 1)
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        if left < 0 or left + wide > WIDTH + 1 or y > self.height or (room is not None and wide > room):
            raise ValueError(f"{words!r} does not fit: {wide:.0f} pixels from {left:.0f}, room {room}")
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place}{weight} class="{paint}">{escape(words)}</text>')

    def box(
        self, x: float, y: float, w: float, h: float, words: str | Sequence[str], paint: str,
        size: float = 12, bold_first: bool = False,
    ) -> None:  # fmt: skip
        """A rectangle with lines of words in its middle."""
        lines = [words] if isinstance(words, str) else list(words)
        self.rect(x, y, w, h, paint, "line", 3)
        pitch = size * 1.3
        top = y + h / 2 - pitch * (len(lines) - 1) / 2 + size * 0.36
        for i, line in enumerate(lines):
            bold = bold_first and i == 0
            self.text(x + w / 2, top + i * pitch, line, size, "middle", bold=bold, room=w - 4)

    def line(
        self, points: Sequence[tuple[float, float]], stroke: str = "line", wide: float = 1, dash: str = ""
    ) -> None:
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" class="s-{stroke}" stroke-width="{number(wide)}"{dashes}/>'
        )

    def arrow(self, points: Sequence[tuple[float, float]], stroke: str = "line", dash: str = "") -> None:
        """A line with a head at its last point."""
        self.line(points, stroke, 1.4, dash)
        (x0, y0), (x, y) = points[-2:]
        length = max(1e-9, ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5)
        ux, uy = (x - x0) / length, (y - y0) / length
        corners = [(x, y), *((x - 8 * ux + s * 4 * uy, y - 8 * uy - s * 4 * ux) for s in (-1, 1))]
        path = " ".join(f"{number(px)},{number(py)}" for px, py in corners)
        self.parts.append(f'<polygon points="{path}" class="{stroke}"/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]], size: float = 12) -> None:
        """(paint, words) side by side, their base line at y."""
        for paint, words in entries:
            self.rect(x, y - 10, 14, 12, paint, "grid")
            self.text(x + 19, y, words, size)
            x += 19 + width_of(words, size) + 16

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img" aria-labelledby="title desc">'
        )
        words = (
            f'<title id="title">{escape(self.title)}</title><desc id="desc">{escape(self.description)}</desc>'
        )
        paper = f'<rect x="0" y="0" width="{WIDTH}" height="{self.height}" rx="6" class="paper"/>'
        return "\n".join([head, words, f"<style>{_style()}</style>", paper, *self.parts, "</svg>\n"])
