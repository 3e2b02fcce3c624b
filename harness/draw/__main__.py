"""python -m harness.draw [--check]"""

import argparse
import sys
from collections.abc import Sequence

from harness.draw import draw_all, stale
from harness.results import repository


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, or with --check compare. Returns 1 when something is stale."""
    parser = argparse.ArgumentParser(prog="python -m harness.draw", description="Draw notes/drawings/*.svg.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is stale")
    check = parser.parse_args(argv).check
    lines = stale(repository()) if check else draw_all(repository())
    print("\n".join(lines) or "every drawing is up to date")
    return 1 if check and lines else 0


if __name__ == "__main__":
    sys.exit(main())
