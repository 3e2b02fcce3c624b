"""What the commands share: an error of usage is one line and exit status 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class Usage(Exception):
    """What the user asked for cannot be done."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Usage(message)


def run(name: str, command: Callable[[], bool]) -> int:
    """The exit status of a command: 0, 1 where it returns False, 2 for an error of usage."""
    try:
        return 0 if command() else 1
    except Usage as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
