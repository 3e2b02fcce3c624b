"""What the commands share: an error of usage is one line and exit status 2."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch


class Usage(Exception):
    """What the user asked for cannot be done."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Usage(message)


@contextlib.contextmanager
def as_usage(*errors: type[Exception]) -> Iterator[None]:
    """What is refused inside, before anything is measured, is an error of usage."""
    try:
        yield
    except errors as error:
        raise Usage(str(error)) from None


def saving(name: str, about: str, arguments: list[str] | None) -> bool:
    """Whether `python -m harness.<name>` shall write the rows it measures. Raises Usage without a GPU."""
    parser = Parser(prog=f"python -m harness.{name}", description=about.splitlines()[0])
    parser.add_argument("--save", action="store_true", help=f"write results/<gpu>/library/{name}.json")
    save = parser.parse_args(arguments).save
    if not torch.cuda.is_available():
        raise Usage("needs a GPU")
    return save


def run(name: str, command: Callable[[], bool]) -> int:
    """The exit status of a command: 0, 1 where it returns False, 2 for an error of usage."""
    try:
        return 0 if command() else 1
    except Usage as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
