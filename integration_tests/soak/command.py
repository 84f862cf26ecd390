"""The command line of every soak: how long, of what seed; what it found, or what broke."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any


class Broken(AssertionError):
    """What must hold does not."""


def main(description: str | None, run: Callable[..., Any], ranks: int | None = None) -> None:
    """Prints what `run(minutes, [ranks,] seed)` found. ranks: how many unless told; None: the soak has its own."""
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
