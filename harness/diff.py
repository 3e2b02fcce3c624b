"""What one stage changes against another: the unified diff of their kernel files, and its size.

    python -m harness.diff k2 k3_1

Comments, docstrings and blank lines are left out: what remains is the difference in code.
"""

import argparse
import difflib
import io
import sys
import tokenize

from harness.results import repository
from hopper_attention.kernels import ladder


def code_lines(source: str) -> list[str]:
    """The lines of a Python file that hold code, without trailing comments and docstrings."""
    lines = source.splitlines()
    keep = [True] * len(lines)
    statement_starts = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (row, column), (end, _) = token.start, token.end
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif token.type == tokenize.STRING and statement_starts and token.string.startswith('"""'):
            keep[row - 1 : end] = [False] * (end - row + 1)
        layout = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)
        statement_starts = token.type in layout
    return [line for line, kept in zip(lines, keep) if kept and line.strip()]


def difference(before: str, after: str) -> tuple[list[str], int, int]:
    """Unified diff of two stages' kernel files, lines added and removed. ValueError for an unknown stage."""
    sources = []
    for stage_id in (before, after):
        ladder.load(stage_id)
        path = repository() / "kernels" / f"{ladder.FILES[stage_id]}.py"
        sources.append((str(path.relative_to(repository())), code_lines(path.read_text(encoding="utf-8"))))
    (name, old), (new_name, new) = sources
    lines = list(difflib.unified_diff(old, new, name, new_name, lineterm=""))
    added = sum(line.startswith("+") for line in lines[2:])
    removed = sum(line.startswith("-") for line in lines[2:])
    return lines, added, removed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    args = parser.parse_args(arguments)
    try:
        lines, added, removed = difference(args.before, args.after)
    except ValueError as error:
        print(f"harness.diff: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    if ladder.FILES[args.before] == ladder.FILES[args.after]:
        options = [ladder.load(stage_id)[0].options for stage_id in (args.before, args.after)]
        print(f"one file; the options are {options[0]} and {options[1]}")
    print(f"{args.before} → {args.after}: {added} lines of code added, {removed} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
