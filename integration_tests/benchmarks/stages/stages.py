# SPDX-License-Identifier: Apache-2.0
"""Pipelines with the hosts' own schedules and with Sluice's, in turns, over a shaped link; bubbles of planned policies.

docs/benchmarks/stages.md describes the cases and what is wanted. f + b is chosen so that a message of --megabytes takes
the case's share c of it over the link.
"""

from pathlib import Path
from typing import Any, NamedTuple

from sluice.planning import batches

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import LINK, Bench, Option, pairs
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles
from integration_tests.benchmarks.stages import stages_simulated
from integration_tests.net.namespaces import parse_rate

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/stages.md"
HEADERS = 1.04  # factor for headers of Ethernet, IP and TCP, which the shaper counts
LOOPBACK_UNIT_S = 0.28
MOST_OVER_FIXED = 1.03
POINTS = 1.5  # a bubble may differ from the simulated bubble by this many percentage points
OP_S = 0.05  # F = B = W of each chunk in the case "bubbles"
RANKS = 8  # in the case "bubbles"
VIRTUAL = {"1f1b": 1, "zero_bubble": 1, "looped": 2, "v": 2}
SEPARATE = ("zero_bubble", "v")  # policies with separate weight-gradient ops


class Case(NamedTuple):
    """p stages, L micro-batches in flight, the message's share c of f + b (0: loopback), the least stock ÷ Sluice that
    is wanted, and the wanted share of the simulated stock ÷ Sluice (0: not simulated)."""

    stages: int
    in_flight: int
    share: float
    least: float
    of_simulated: float = 0.95
    program: str = "stages_rank.py"
    work: dict[str, Any] = {}
    has_fixed: bool = False


CASES = {
    "two": Case(2, 4, 0.25, 1.25),
    "two-half": Case(2, 4, 0.5, 1.5),
    "four": Case(4, 4, 0.25, 1.25),
    "four-deep": Case(4, 8, 0.25, 1.55),
    "real": Case(2, 4, 0.25, 1.25, 0.88, work={"computes": True}),
    "loopback": Case(2, 4, 0.0, 0.98, 0.0),
    "jitter": Case(4, 4, 0.25, 1.0, 0.97, work={"sigma": 0.4}, has_fixed=True),
    "slow-stage": Case(4, 4, 0.25, 1.0, 0.97, work={"slow": {"1": 1.5}}, has_fixed=True),
    "stall": Case(4, 4, 0.25, 1.0, 0.97, work={"stalls": {"rank": 1}}, has_fixed=True),
    "torch": Case(2, 4, 0.25, 1.1, 0.0, program="stages_torch_rank.py"),
}
NAMES = (*CASES, "bubbles")
OPTIONS = {
    "cases": Option(list(NAMES), choices=NAMES),
    "link": LINK,
    "megabytes": Option(8.0, "of one message"),
    "micro_batches": Option(16),
    "pairs": pairs(5),
}
SMOKE = {"cases": ["two", "torch"], "megabytes": 0.05, "micro_batches": 4, "pairs": 1}


def compared(bench: Bench, name: str) -> dict[str, Any]:
    """Measures one case in comparison with a host; returns its row."""
    case, options = CASES[name], bench.options
    message_s = options.megabytes * 2**20 * 8 * HEADERS / parse_rate(options.link)
    unit = message_s / case.share if case.share else LOOPBACK_UNIT_S
    sides: dict[str, Any] = {"stock": None, "sluice": {"in_flight": case.in_flight}}
    if case.has_fixed:
        sides["fixed"] = {"policy": "1f1b", "in_flight": case.in_flight}
    work = dict(case.work)
    if "stalls" in work:
        work["stalls"] = {**work["stalls"], "link": options.link}
    plan = {
        **{"in_flight": case.in_flight, "stages": case.stages, "forward_s": unit / 3, "backward_s": 2 * unit / 3},
        **{"elements": int(options.megabytes * 2**18), "sides": sides, **work},
        **bench.picked("micro_batches", "pairs"),
    }
    link = options.link if case.share else "none"
    found = bench.ask(HERE / case.program, plan, ranks=case.stages, link=link, title=name)
    unit = found["unit_s"] or unit
    row: dict[str, Any] = {"case": name, "p": case.stages, "L": case.in_flight, "policy": found["policy"]}
    row |= {f"{side}_s": quartiles(found[f"{side}_s"])["median"] for side in ("stock", "sluice")}
    row |= {"speedup": pair_ratios(found["stock_s"], found["sluice_s"]), "wanted": case.least}
    if case.of_simulated:
        ran = {**plan, "forward_s": unit / 3, "backward_s": 2 * unit / 3}  # with the measured times in the case `real`
        row["simulated"] = stages_simulated.speedup(ran, message_s, found["policy"])["speedup"]
        row["wanted"] = max(case.least, case.of_simulated * row["simulated"])
    if case.has_fixed:
        row["over_fixed"] = pair_ratios(found["sluice_s"], found["fixed_s"])["median"]
    bench.tell({**row, "losses_differ": found["largest_loss_difference"]})
    return row


def bubbles(bench: Bench) -> list[dict[str, Any]]:
    """Measures the case "bubbles"; returns a row for each policy."""
    options = bench.options
    policies = [{"name": name, "num_virtual": v, "split": name in SEPARATE} for name, v in VIRTUAL.items()]
    plan = {"policies": policies, "op_s": OP_S, "micro_batches": options.micro_batches, "batches": options.pairs}
    found = bench.ask(HERE / "stages_bubble_rank.py", plan, ranks=RANKS, link="none", title="bubbles")
    rows = []
    for name, each in found.items():
        rows.append({"case": "bubbles", "policy": name, "bubble": quartiles(each["bubble"])["median"]})
        rows[-1]["simulated"] = simulated(name, options.micro_batches)
        rows[-1] |= {key: each[key] for key in ("predicted", "most_in_flight", "most_held")}
        bench.tell(rows[-1])
    return rows


def simulated(policy: str, micro_batches: int) -> float:
    """The bubble without messages: with 16 micro-batches the published 30.4 % of 1F1B, 12.7 % and 17.9 %."""
    parts = [OP_S] * (RANKS * VIRTUAL[policy])
    batch = batches.Batch(RANKS, micro_batches, parts, parts, parts, policy=policy, num_virtual=VIRTUAL[policy])
    return batches.predict(batch).bubble


def missed(row: dict[str, Any]) -> list[str]:
    """The marks that a row misses."""
    if row["case"] == "bubbles":
        off = 100 * abs(row["bubble"] - row["simulated"])
        return [f"bubble of {row['policy']} is {off:.1f} points off"] if off > POINTS else []
    gain, over = row["speedup"]["median"], row.get("over_fixed", 0.0)
    said = [f"{row['case']}: {gain:.3f} x stock, wanted {row['wanted']:.3f}"] if gain < row["wanted"] else []
    return said + ([f"{row['case']}: {over:.3f} of a fixed order"] if over > MOST_OVER_FIXED else [])


def run(bench: Bench) -> list[str]:
    rows: list[dict[str, Any]] = []
    for name in bench.options.cases:
        rows += bubbles(bench) if name == "bubbles" else [compared(bench, name)]
        bench.keep(rows)
    return [] if bench.options.smoke else [text for row in rows for text in missed(row)]


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    heads = ["case", "p", "L", "stock, s", "Sluice, s", "stock ÷ Sluice", "simulated", "wanted", "over a fixed order"]

    def cells(row: dict[str, Any]) -> list[str]:
        gain, fixed = row["speedup"], row.get("over_fixed")
        return [
            *(str(row[name]) for name in ("case", "p", "L")),
            *(f"{row[f'{side}_s']:.2f}" for side in ("stock", "sluice")),
            pages.bold(pages.spread(gain), gain["median"] < row["wanted"]),
            f"{row['simulated']:.2f}" if "simulated" in row else "",
            f"{row['wanted']:.2f}",
            "" if fixed is None else pages.bold(f"{fixed:.3f}", fixed > MOST_OVER_FIXED),
        ]

    def bubble(row: dict[str, Any]) -> list[str]:
        told = pages.bold(f"{100 * row['bubble']:.1f}", bool(missed(row)))
        shares = (f"{100 * row[name]:.1f}" for name in ("simulated", "predicted"))
        return [f"`{row['policy']}`", told, *shares, str(row["most_in_flight"]), str(row["most_held"])]

    def told(rows: list[dict[str, Any]]) -> str:
        found = [pages.table(heads, (cells(row) for row in rows if row["case"] != "bubbles"))]
        of_policies = [bubble(row) for row in rows if row["case"] == "bubbles"]
        if of_policies:
            names = ["policy", "bubble, %", "simulated, %", "with its times, %", "in flight", "held"]
            found.append(pages.table(names, of_policies))
        return "\n\n".join(found)

    return {"cases": pages.each_run(runs, told)}
