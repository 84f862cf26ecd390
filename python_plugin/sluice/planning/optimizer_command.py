# SPDX-License-Identifier: Apache-2.0
"""`sluice plan --optimizer`: predicts bytes of an optimizer step by tier, whether they fit, and seconds by k.

`sluice simulate --optimizer` is here too: the same for several tiers and buckets.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import arguments, command
from .errors import BadInput
from .optimizer import ALL_BUCKETS, BY_K, FAR, FILE, NEAR, TIERS, Prediction, Workload, by_tier, predict
from .planner import size

EXAMPLE = """examples:
  sluice plan --optimizer 1.5e9 --budget near=8GiB --budget far=64GiB
  sluice plan --optimizer 20e9 --tier file --budget near=48GiB --budget file=1TiB --update-rate 40e9 --copy-rate 3e9
  sluice plan --optimizer 128e6 --tier near --ranks 4 --update-rate 20e9 --sum-rate 1e9 --sum-seconds 1e-4

tiers hold masters and moments: near is where updates run, far is host memory next to a device, file is a file.
Rates are bytes a second; `sluice doctor --tiers FOLDER` measures them on this machine.

exit status: 0 it fits; 1 it does not; 2 wrong arguments
"""
NAMES = {
    NEAR: "near: where updates run",
    FAR: "far: host memory",
    FILE: "file, which holds two steps",
}


@command.refuses("sluice plan")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = command.parser("sluice plan --optimizer", __doc__, EXAMPLE)
    _add_step(parser)
    parser.add_argument("--tier", choices=TIERS, default=FAR, help="where masters and moments are stored (far)")
    parser.add_argument("--bucket", type=int, default=Workload.bucket, metavar="ELEMENTS", help="(4194304)")
    parser.add_argument(
        "--sum-buckets", metavar="k", help="buckets that are summed at once, or inf; default: the fastest"
    )
    _add_rates(parser, update="memory that updates use", copy="copies", sum="the link")
    options = _parsed(parser, words)
    work = replace(
        _step_of(options),
        tier=options.tier,
        bucket=options.bucket,
        sum_buckets=_sum_buckets(options.sum_buckets),
        copy_in_rate=options.copy_rate,
        copy_out_rate=options.copy_rate,
    )
    budgets, prediction = _budgets(options.budget), predict(work)
    used = by_tier(work, prediction)
    fits = all(used[tier] <= budget for tier, budget in budgets.items())
    given = work, prediction, budgets
    return command.answer(options.json, lambda: as_dict(*given, fits), lambda: lines_of(*given), fits)


def lines_of(work: Workload, p: Prediction, budgets: dict[str, int]) -> list[str]:
    """Returns the lines for a terminal."""
    summed = f", summed over {work.world_size} ranks" if work.world_size > 1 else ""
    lines = [f"{work.count:,} parameters in {work.dtype}, buckets of {work.bucket:,}{summed}", ""]
    parts = [("parameters", "param"), ("gradients", "grad"), ("states in slots", "slot")]
    parts += [("gradients staged in f32", "staging")]
    parts += [("masters and moments", "state")] if work.tier == NEAR else []
    lines += [f"  {NAMES[NEAR]}"]
    lines += [f"    {name:<26} {p.bytes[key]:>20,} {size(p.bytes[key]):>11}" for name, key in parts if p.bytes[key]]
    used = by_tier(work, p)
    lines += [_total(NEAR, "together", used, budgets)]
    for tier in (FAR, FILE):
        if used[tier]:
            lines += [f"  {NAMES[tier]}", _total(tier, "masters and moments", used, budgets)]
    share = p.bytes["near"] / work.count, p.bytes["whole"] / work.count
    lines += [f"  near {share[0]:.2f} bytes a parameter, {share[1]:.2f} if all of it lay there", ""]
    over = [tier for tier, budget in budgets.items() if used[tier] > budget]
    if over:
        short = ", ".join(f"{tier} by {size(used[tier] - budgets[tier])}" for tier in over)
        lines += [f"DOES NOT FIT: {short}", ""]
    if not p.seconds:
        return [*lines, "no rates were given, so no seconds (--update-rate, --copy-rate, --sum-rate)"]
    taken = "inf" if p.sum_buckets == ALL_BUCKETS else str(p.sum_buckets)
    lines += [f"a step takes {p.seconds * 1e3:.2f} ms with k = {taken}"]
    alone = ", ".join(f"{name.replace('_', ' ')} {value * 1e3:.2f}" for name, value in p.parts.items() if value)
    lines += [f"  by themselves (ms): {alone}"]
    rows = ((k, command.ms(seconds)) for k, seconds in p.seconds_by_k.items())
    return [*lines, "", *command.table({"k": ">4", "ms": ">10"}, rows)]


def _total(tier: str, what: str, used: dict[str, int], budgets: dict[str, int]) -> str:
    budget = f"  of {size(budgets[tier])}" if tier in budgets else ""
    return f"    {what:<26} {used[tier]:>20,} {size(used[tier]):>11}{budget}"


def as_dict(work: Workload, prediction: Prediction, budgets: dict[str, int], fits: bool) -> dict[str, Any]:
    """Returns what --json prints."""
    return {
        "form": 1,
        "workload": asdict(work),
        "tiers": by_tier(work, prediction),
        "budgets": budgets,
        "fits": fits,
        "prediction": asdict(prediction),
    }


# ---- options of both commands ----


def _add_step(parser: argparse.ArgumentParser) -> None:
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


def _add_rates(parser: argparse.ArgumentParser, **kinds: str) -> None:
    """Adds `--update-rate` and others, each with its help text, and --sum-seconds."""
    for name, what in kinds.items():
        parser.add_argument(f"--{name}-rate", type=float, default=0.0, metavar="BYTES", help=f"per second, of {what}")
    parser.add_argument("--sum-seconds", type=float, default=0.0, metavar="S", help="latency of a sum")


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Adds --budget and --json, and parses the words."""
    parser.add_argument(
        "--budget", action="append", default=[], metavar="TIER=BYTES", help="near=40GiB, may be repeated"
    )
    return command.parsed(parser, words)


def _count(text: str) -> int:
    """Reads the number of parameters."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 1 <= value <= 2**48:
        raise BadInput(f"--optimizer is {text!r}; give a number of parameters from 1 to 2^48, such as 1.5e9")
    return int(value)


def _step_of(options: Any) -> Workload:
    """Returns the step that the options of both commands describe."""
    return Workload(
        count=_count(options.optimizer),
        dtype=options.dtype,
        slots=options.slots,
        world_size=options.ranks,
        decides=options.clips,
        update_rate=options.update_rate,
        sum_rate=options.sum_rate,
        sum_seconds=options.sum_seconds,
    )


def _sum_buckets(text: str | None) -> int:
    """Reads k. 0: the best."""
    if text is None:
        return 0
    if text == "inf":
        return ALL_BUCKETS
    if not text.isdecimal() or not 1 <= int(text) < ALL_BUCKETS:
        raise BadInput(f"--sum-buckets is {text!r}; give a number above 0, or inf")
    return int(text)


def _budgets(given: list[str]) -> dict[str, int]:
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


# ---- `sluice simulate --optimizer` ----

STEPS_DOC = "`sluice simulate --optimizer`: predicts seconds and bytes of an optimizer step by tier, bucket and k."
STEPS_EXAMPLE = """examples:
  sluice simulate --optimizer 1.5e9 --update-rate 20e9 --copy-rate 12e9 --file-rate 2e9
  sluice simulate --optimizer 1.28e8 --tiers near --buckets 1048576,4194304 --ranks 4 --update-rate 20e9 \\
                  --sum-rate 1e9 --sum-seconds 1e-4
  sluice simulate --optimizer 20e9 --tiers far,file --update-rate 2e12 --copy-rate 25e9 --file-rate 6e9 \\
                  --budget near=80GiB --json

tiers hold masters and moments: near is where updates run, far is host memory next to a device, file is a file.
Without --tiers, near and each tier with a rate are simulated. Rates are bytes a second; `sluice doctor --tiers FOLDER`
measures them on this machine.

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
def simulate(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = command.parser("sluice simulate --optimizer", STEPS_DOC, STEPS_EXAMPLE)
    _add_step(parser)
    parser.add_argument("--tiers", metavar="TIER,...", help=f"of {', '.join(TIERS)}")
    parser.add_argument("--buckets", default=BUCKETS, metavar="ELEMENTS,...", help="(%(default)s)")
    _add_rates(
        parser,
        update="memory that updates use",
        copy="copies to host memory and back",
        file="the file, each way",
        sum="the link",
    )
    options = _parsed(parser, words)
    points = points_of(options)
    fits = any(point.fits for point in points)
    return command.answer(options.json, lambda: steps_as_dict(points), lambda: _lines(options, points), fits)


def points_of(options: Any) -> list[Point]:
    """Returns the points, ordered by tier, then by bucket, then by k."""
    if not options.update_rate:
        raise BadInput("--update-rate is missing: without it a step takes no time; `sluice doctor --tiers` measures it")
    rates = {NEAR: 0.0, FAR: options.copy_rate, FILE: options.file_rate}
    budgets = _budgets(options.budget)
    step = _step_of(options)
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
    lines = [f"{_count(options.optimizer):,} parameters in {options.dtype}{summed}", ""]
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


def steps_as_dict(points: list[Point]) -> dict[str, Any]:
    """Returns what --json prints."""
    best = best_of(points)
    return {"form": 1, "best": None if best is None else vars(best), "steps": [vars(point) for point in points]}
