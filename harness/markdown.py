"""Markdown, as the generated parts of the documents need it."""

import re
from collections.abc import Iterable, Mapping

MARKER = re.compile(r"^<!-- results:(begin|end) (\S+) -->[ \t]*$", re.MULTILINE)
NOT_MEASURED = "not measured"
NOTHING = "Nothing is measured yet."


def table(header: Iterable[str], lines: Iterable[Iterable[str]], align: str) -> str:
    """A table; `align` has a letter a column, l or r."""
    rules = [{"l": "---", "r": "---:"}[side] for side in align]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *lines))


def cell(text: str) -> str:
    """Text that cannot break out of its table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def replace_blocks(text: str, blocks: Mapping[str, str], where: str) -> str:
    """A document with the content of its marked blocks replaced.

    Raises ValueError, naming the document and the block, for a block that is not in `blocks` and for markers
    that do not pair up.
    """
    pieces, done = [], 0
    for name, start, end in _marked(text, blocks, where):
        pieces += [text[done:start], _framed(blocks[name])]
        done = end
    return "".join(pieces) + text[done:]


def stale_blocks(text: str, blocks: Mapping[str, str], where: str) -> list[str]:
    """The names of a document's blocks whose content `replace_blocks` would change."""
    marked = _marked(text, blocks, where)
    return [name for name, start, end in marked if text[start:end] != _framed(blocks[name])]


def _marked(text: str, known: Iterable[str], where: str) -> list[tuple[str, int, int]]:
    """The blocks of a document: name, and start and end of what stands between the markers."""
    found, opened = [], None
    for marker in MARKER.finditer(text):
        kind, name = marker.groups()
        if name not in known:
            raise ValueError(f"{where}: unknown block {name}; there are {', '.join(known)}")
        if kind == "begin":
            if opened:
                raise ValueError(f"{where}: block {name} begins inside block {opened[0]}")
            opened = name, marker.end()
        elif opened is None or opened[0] != name:
            raise ValueError(f"{where}: block {name} ends without a begin")
        else:
            found.append((*opened, marker.start()))
            opened = None
    if opened:
        raise ValueError(f"{where}: block {opened[0]} has no end")
    return found


def _framed(content: str) -> str:
    return f"\n\n{content}\n\n"  # without the empty lines a table after a comment is not a table
