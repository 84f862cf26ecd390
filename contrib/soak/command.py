# SPDX-License-Identifier: Apache-2.0
"""Parses the command line of every soak test (duration, seed, ranks), and prints its summary or its failure."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

TELL_S = 60.0


class Broken(AssertionError):
    """Reports a violated property of a soak test."""


def numbers_for(minutes: float, tell_s: float = TELL_S) -> Iterator[int]:
    """Yields 1, 2, ... until `minutes` have passed, and prints the progress to stderr every `tell_s` seconds."""
    began = told = time.monotonic()
    number = 0
    while (now := time.monotonic()) < began + 60 * minutes:
        if now >= told + tell_s:
            told = now
            print(f"soak: {(now - began) / 60:.0f} of {minutes:g} minutes, {number} ended", file=sys.stderr, flush=True)
        number += 1
        yield number


def main(description: str | None, run: Callable[..., Any], ranks: int | None = None) -> None:
    """Prints the result of `run(minutes, [ranks,] seed)`. ranks: the default of --ranks; None: there is no option."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    if ranks is not None:
        parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--seed", type=int, default=None, help="what happens when; any, unless told")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"soak: seed {seed}", flush=True)
    try:
        print(run(options.minutes, *([] if ranks is None else [options.ranks]), seed))
    except Broken as broken:
        sys.exit(f"soak: BROKEN: {broken}")
