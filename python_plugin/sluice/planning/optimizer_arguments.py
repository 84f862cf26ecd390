# SPDX-License-Identifier: Apache-2.0
"""Defines command-line options that `sluice plan --optimizer` and `sluice simulate --optimizer` share."""

from __future__ import annotations

import argparse
from typing import Any

from . import arguments
from .errors import BadInput
from .optimizer import ALL_BUCKETS, TIERS, Workload


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a step that do not depend on where its states are stored."""
    parser.add_argument("--optimizer", required=True, metavar="PARAMETERS", help="of one rank, such as 1.5e9")
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16", help="of parameters and gradients")
    parser.add_argument(
        "--slots", type=int, choices=(1, 2), default=2, help="slots of states; 2 overlaps copies with updates (2)"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="W", help="ranks whose gradients the step sums (1)")
    parser.add_argument(
        "--clips", action="store_true", help="gradients are clipped, so all sums end before the first update"
    )


def add_rates(parser: argparse.ArgumentParser, **kinds: str) -> None:
    """Adds `--update-rate` and others, each with its help text, and --sum-seconds."""
    for name, what in kinds.items():
        parser.add_argument(f"--{name}-rate", type=float, default=0.0, metavar="BYTES", help=f"per second, of {what}")
    parser.add_argument("--sum-seconds", type=float, default=0.0, metavar="S", help="latency of a sum")


def add_answer(parser: argparse.ArgumentParser) -> None:
    """Adds --budget and --json."""
    parser.add_argument(
        "--budget", action="append", default=[], metavar="TIER=BYTES", help="near=40GiB, may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="all results as JSON")


def count(text: str) -> int:
    """Reads the number of parameters."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 1 <= value <= 2**48:
        raise BadInput(f"--optimizer is {text!r}; give a number of parameters from 1 to 2^48, such as 1.5e9")
    return int(value)


def step_of(options: Any) -> Workload:
    """Returns the step that the options of both commands describe."""
    return Workload(
        count=count(options.optimizer),
        dtype=options.dtype,
        slots=options.slots,
        world_size=options.ranks,
        decides=options.clips,
        update_rate=options.update_rate,
        sum_rate=options.sum_rate,
        sum_seconds=options.sum_seconds,
    )


def sum_buckets(text: str | None) -> int:
    """Reads k. 0: the best."""
    if text is None:
        return 0
    if text == "inf":
        return ALL_BUCKETS
    if not text.isdecimal() or not 1 <= int(text) < ALL_BUCKETS:
        raise BadInput(f"--sum-buckets is {text!r}; give a number above 0, or inf")
    return int(text)


def budgets(given: list[str]) -> dict[str, int]:
    """Reads the budgets of tiers, in bytes."""
    found = {}
    for text in given:
        tier, equals, value = text.partition("=")
        if tier not in TIERS or not equals:
            raise BadInput(f"--budget is {text!r}; give {', '.join(TIERS)} with bytes, such as near=40GiB")
        budget = arguments.budget_of(value)
        assert budget is not None
        found[tier] = budget
    return found
