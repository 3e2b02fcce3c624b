"""Markdown, as the generated parts of the documents need it."""

from collections.abc import Iterable


def table(header: Iterable[str], lines: Iterable[Iterable[str]], align: str) -> str:
    """A table; `align` has a letter a column, l or r."""
    rules = [{"l": "---", "r": "---:"}[side] for side in align]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *lines))
