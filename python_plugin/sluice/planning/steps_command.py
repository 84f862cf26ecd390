# SPDX-License-Identifier: Apache-2.0
"""`sluice simulate --optimizer`: predicts seconds and bytes of an optimizer step by tier, bucket and k."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from . import command, optimizer_arguments
from .errors import BadInput
from .optimizer import ALL_BUCKETS, BY_K, FAR, FILE, NEAR, TIERS, by_tier, predict
from .planner import size

EXAMPLE = """examples:
  sluice simulate --optimizer 1.5e9 --update-rate 20e9 --copy-rate 12e9 --file-rate 2e9
  sluice simulate --optimizer 1.28e8 --tiers near --buckets 1048576,4194304 --ranks 4 --update-rate 20e9 \\
                  --sum-rate 1e9 --sum-seconds 1e-4
  sluice simulate --optimizer 20e9 --tiers far,file --update-rate 2e12 --copy-rate 25e9 --file-rate 6e9 \\
                  --budget near=80GiB --json

tiers: masters and moments lie near, where updates run; far, in host memory beside a device; or in a file.
Without --tiers those whose rate is given, and near. Rates are bytes a second; `sluice doctor --tiers FOLDER` measures
this machine's

exit status: 0 some row fits; 1 none does; 2 wrong arguments
"""
BUCKETS = "1048576,4194304,16777216"
ALONE = BY_K[:1]  # one rank sums nothing


@dataclass(frozen=True)
class Point:
    """Describes a step. tier: where its states are stored; parts: seconds by part; tiers: bytes by tier."""

    tier: str
    bucket: int
    k: str
    seconds: float
    parts: dict[str, float]
    tiers: dict[str, int]
    fits: bool


@command.refuses("sluice simulate")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = command.parser("sluice simulate --optimizer", __doc__, EXAMPLE)
    optimizer_arguments.add_step(parser)
    parser.add_argument("--tiers", metavar="TIER,...", help=f"of {', '.join(TIERS)}")
    parser.add_argument("--buckets", default=BUCKETS, metavar="ELEMENTS,...", help="(%(default)s)")
    optimizer_arguments.add_rates(
        parser,
        update="memory that updates use",
        copy="copies to host memory and back",
        file="the file, each way",
        sum="the link",
    )
    optimizer_arguments.add_answer(parser)
    options = parser.parse_args(words)
    points = points_of(options)
    fits = any(point.fits for point in points)
    return command.answer(options.json, lambda: as_dict(points), lambda: _lines(options, points), fits)


def points_of(options: Any) -> list[Point]:
    """Returns the points, ordered by tier, then by bucket, then by k."""
    if not options.update_rate:
        raise BadInput("--update-rate is missing: without it a step takes no time; `sluice doctor --tiers` measures it")
    rates = {NEAR: 0.0, FAR: options.copy_rate, FILE: options.file_rate}
    budgets = optimizer_arguments.budgets(options.budget)
    step = optimizer_arguments.step_of(options)
    points = []
    for tier in _tiers(options.tiers, rates):
        for bucket in _buckets(options.buckets):
            for k in BY_K if options.ranks > 1 else ALONE:
                work = replace(
                    step,
                    tier=tier,
                    bucket=bucket,
                    sum_buckets=ALL_BUCKETS if k == "inf" else int(k),
                    copy_in_rate=rates[tier],
                    copy_out_rate=rates[tier],
                )
                found = predict(work)
                used = by_tier(work, found)
                fits = all(used[each] <= budget for each, budget in budgets.items())
                points.append(Point(tier, bucket, k, found.seconds, found.parts, used, fits))
    return points


def _tiers(text: str | None, rates: dict[str, float]) -> list[str]:
    if text is None:
        return [tier for tier in TIERS if tier == NEAR or rates[tier]]
    tiers = text.split(",")
    for tier in tiers:
        if tier not in TIERS:
            raise BadInput(f"--tiers has {tier!r}; known are {', '.join(TIERS)}")
        if tier != NEAR and not rates[tier]:
            missing = "--copy-rate" if tier == FAR else "--file-rate"
            raise BadInput(f"--tiers has {tier}, and {missing} is missing: without it copies take no time")
    return tiers


def _buckets(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise BadInput(f"--buckets is {text!r}; give numbers of elements with commas between, such as {BUCKETS}")
    return [int(word) for word in words]


def best_of(points: list[Point]) -> Point | None:
    """Returns the fastest point that fits; among equal ones, the one with the fewest bytes near."""
    fitting = [point for point in points if point.fits]
    return min(fitting, key=lambda point: (point.seconds, point.tiers[NEAR]), default=None)


def _lines(options: Any, points: list[Point]) -> list[str]:
    """Returns lines of a table with a row for each tier and bucket. Bytes and parts are of the fastest k."""
    ks = list(dict.fromkeys(point.k for point in points))
    summed = f", summed over {options.ranks} ranks" if options.ranks > 1 else ""
    lines = [f"{optimizer_arguments.count(options.optimizer):,} parameters in {options.dtype}{summed}", ""]
    times = {f"k = {k}": ">9" for k in ks} if len(ks) > 1 else {"ms": ">9"}
    heads = {"tier": "<4", "bucket": ">11", **times, " longest part": "<17", **dict.fromkeys(TIERS, ">11"), "": ""}
    best, rows = best_of(points), []
    for at in range(0, len(points), len(ks)):
        row = points[at : at + len(ks)]
        lead = best_of(row) or min(row, key=lambda point: point.seconds)
        part = max(lead.parts, key=lambda name: lead.parts[name])
        longest = f" {part.replace('_', ' ')} {command.ms(lead.parts[part])}"
        note = "  does not fit" if not lead.fits else f"  best: k = {lead.k}" if lead is best else ""
        taken = (size(lead.tiers[tier]) if lead.tiers[tier] else 0 for tier in TIERS)
        seconds = (command.ms(point.seconds) for point in row)
        rows.append((lead.tier, f"{lead.bucket:,}", *seconds, longest, *taken, note))
    table = command.table(heads, rows)
    return [*lines, *table, "", "milliseconds; the longest part by itself, and bytes, with the row's best k"]


def as_dict(points: list[Point]) -> dict[str, Any]:
    """Returns what --json prints."""
    best = best_of(points)
    return {"form": 1, "best": None if best is None else vars(best), "steps": [vars(point) for point in points]}
