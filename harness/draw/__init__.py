"""The notes' drawings, as SVG, from the kernels' own constants and from committed results.

`python -m harness.draw` writes notes/drawings/*.svg; with --check it writes nothing and exits 1 if one is not
what it would write. The bytes follow from the sources alone.
"""

from collections.abc import Callable
from pathlib import Path

from harness.draw import decoding, memory, orders, tiles, timelines, waits
from harness.draw.canvas import Canvas
from hopper_attention.cache import write_atomically

DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "timelines": timelines.timelines,
    "ring": timelines.ring,
    "fragment": tiles.fragment,
    "swizzle": tiles.swizzle,
    "tokens": tiles.tokens,
    "shared_memory": memory.maps,
    "bwd4": memory.bwd4,
    "decode": orders.decode,
    "decode_time": decoding.time,
    "causal_order": orders.causal,
    "waits": waits.waits,
}


def folder(root: Path) -> Path:
    return root / "notes" / "drawings"


def stale(root: Path) -> list[str]:
    """A line for each drawing that is not what would be drawn, or that nothing draws."""
    lines = []
    for name, draw in DRAWINGS.items():
        path = folder(root) / f"{name}.svg"
        if not path.exists() or path.read_text(encoding="utf-8") != draw().svg():
            lines.append(f"{path.relative_to(root)}: not what `python -m harness.draw` draws")
    known = {f"{name}.svg" for name in DRAWINGS}
    others = sorted(path for path in folder(root).glob("*") if path.name not in known)
    return lines + [f"{path.relative_to(root)}: nothing draws it" for path in others]


def draw_all(root: Path) -> list[str]:
    """Write every drawing that changed; a line for each."""
    folder(root).mkdir(parents=True, exist_ok=True)
    lines = []
    for name, draw in DRAWINGS.items():
        path, svg = folder(root) / f"{name}.svg", draw().svg()
        if not path.exists() or path.read_text(encoding="utf-8") != svg:
            write_atomically(path, svg.encode())
            lines.append(f"wrote {path.relative_to(root)}")
    return lines
