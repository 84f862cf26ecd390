# SPDX-License-Identifier: Apache-2.0
"""Helpers of the planning commands: parsers, error messages, tables, text or JSON, exit status."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import SluiceError
from . import files

Main = Callable[[list[str]], int]


def wants(words: list[str], option: str) -> bool:
    """Returns whether the words contain this option, which selects another command."""
    return any(word == option or word.startswith(option + "=") for word in words)


def parser(prog: str, doc: str | None, epilog: str) -> argparse.ArgumentParser:
    """Returns a parser described by the first line of a module's docstring. epilog: the examples."""
    raw = argparse.RawDescriptionHelpFormatter
    text = (doc or "").splitlines()[0]
    return argparse.ArgumentParser(prog=prog, description=text, epilog=epilog, formatter_class=raw)


def parsed(parser: argparse.ArgumentParser, words: list[str], picture: str = "") -> argparse.Namespace:
    """Adds --json, and --picture if its help text is given, and parses the words. Refuses a picture at a wrong path."""
    if picture:
        parser.add_argument("--picture", metavar="FILE.svg", help=picture)
    parser.add_argument("--json", action="store_true", help="all results as JSON")
    options = parser.parse_args(words)
    files.check("--picture", getattr(options, "picture", None))
    return options


def refuses(prog: str) -> Callable[[Main], Main]:
    """Decorates a main: prints a SluiceError as one line and returns status 2."""

    def wrap(main: Main) -> Main:
        @functools.wraps(main)
        def wrapped(words: list[str]) -> int:
            try:
                return main(words)
            except SluiceError as error:
                print(f"{prog}: {error.message}", file=sys.stderr)
                return 2

        return wrapped

    return wrap


def answer(as_json: bool, data: Callable[[], Any], lines: Callable[[], Iterable[str]], fits: bool = True) -> int:
    """Prints the data as JSON, or the lines. Returns the exit status."""
    print(json.dumps(data(), indent=1) if as_json else "\n".join(lines()))
    return 0 if fits else 1


def table(heads: Mapping[str, str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Returns lines of a table, indented by two spaces. heads: {head: format of its column}. A row may end early."""
    formats = list(heads.values())
    return [
        "  " + " ".join(format(str(value), each) for value, each in zip(row, formats)).rstrip()
        for row in (heads, *rows)
    ]


def ms(seconds: float, digits: int = 2) -> str:
    """Formats seconds as milliseconds."""
    return f"{seconds * 1e3:.{digits}f}"


def progress(text: str) -> None:
    """Prints a line that the next call replaces, if stderr is a terminal. The last call has an empty text."""
    if sys.stderr.isatty():
        print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)
