# SPDX-License-Identifier: Apache-2.0
"""What the planning commands share: parsers, refusals, tables, text or JSON, exit status."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import SluiceError

Main = Callable[[list[str]], int]


def wants(words: list[str], option: str) -> bool:
    """Whether a command has this option, which makes it another command."""
    return any(word == option or word.startswith(option + "=") for word in words)


def parser(prog: str, doc: str | None, epilog: str) -> argparse.ArgumentParser:
    """Described by the first line of a module's documentation; the epilog has the examples."""
    raw = argparse.RawDescriptionHelpFormatter
    text = (doc or "").splitlines()[0]
    return argparse.ArgumentParser(prog=prog, description=text, epilog=epilog, formatter_class=raw)


def refuses(prog: str) -> Callable[[Main], Main]:
    """A main whose SluiceError is a line for people, and status 2."""

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
    """Prints one of both; the exit status."""
    print(json.dumps(data(), indent=1) if as_json else "\n".join(lines()))
    return 0 if fits else 1


def table(heads: Mapping[str, str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Lines of {head: format of its column}, two spaces in. A row may end early."""
    formats = list(heads.values())
    return [
        "  " + " ".join(format(str(value), each) for value, each in zip(row, formats)).rstrip()
        for row in (heads, *rows)
    ]


def ms(seconds: float, digits: int = 2) -> str:
    """Milliseconds."""
    return f"{seconds * 1e3:.{digits}f}"


def progress(text: str) -> None:
    """A line that the next one replaces, where a person looks on; an empty one at the end."""
    if sys.stderr.isatty():
        print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)
