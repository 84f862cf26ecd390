# SPDX-License-Identifier: Apache-2.0
"""`sluice plan --optimizer`: predicts bytes of an optimizer step by tier, whether they fit, and seconds by k."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from . import command, optimizer_arguments
from .optimizer import ALL_BUCKETS, FAR, FILE, NEAR, TIERS, Prediction, Workload, by_tier, predict
from .planner import size

EXAMPLE = """examples:
  sluice plan --optimizer 1.5e9 --budget near=8GiB --budget far=64GiB
  sluice plan --optimizer 20e9 --tier file --budget near=48GiB --budget file=1TiB --update-rate 40e9 --copy-rate 3e9
  sluice plan --optimizer 128e6 --tier near --ranks 4 --update-rate 20e9 --sum-rate 1e9 --sum-seconds 1e-4

tiers: masters and moments lie near, where updates run; far, in host memory beside a device; or in a file.
rates are bytes a second; `sluice doctor --tiers FOLDER` measures this machine's

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
    optimizer_arguments.add_step(parser)
    parser.add_argument("--tier", choices=TIERS, default=FAR, help="where masters and moments are stored (far)")
    parser.add_argument("--bucket", type=int, default=Workload.bucket, metavar="ELEMENTS", help="(4194304)")
    parser.add_argument(
        "--sum-buckets", metavar="k", help="buckets that are summed at once, or inf; default: the fastest"
    )
    optimizer_arguments.add_rates(parser, update="memory that updates use", copy="copies", sum="the link")
    optimizer_arguments.add_answer(parser)
    options = parser.parse_args(words)
    work = replace(
        optimizer_arguments.step_of(options),
        tier=options.tier,
        bucket=options.bucket,
        sum_buckets=optimizer_arguments.sum_buckets(options.sum_buckets),
        copy_in_rate=options.copy_rate,
        copy_out_rate=options.copy_rate,
    )
    budgets, prediction = optimizer_arguments.budgets(options.budget), predict(work)
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
