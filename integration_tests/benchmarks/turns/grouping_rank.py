"""Ranks of grouping.py: four sides of each cell, in turns."""

from __future__ import annotations

import json
import statistics
import tempfile
from typing import Any

from sluice.adapters.torch import Context, ContextOptions
from sluice.config import TunerOptions
from sluice.planning.machines import Machine
from sluice.planning.planner import Choice as Planned
from sluice.planning.planner import Planner

from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.tuner.tuner_calibrated import machine_of
from integration_tests.benchmarks.tuner.tuner_rounds import PIPEMOE, Side
from integration_tests.benchmarks.tuner.tuner_scenario import OPEN, SIZES, Choice, Scenario, workload_of

MOST = 4  # times the steps that the tuner may take where its races are not through


def sides_of(scenario: Scenario, context: Context) -> dict[str, dict[int, Side]]:
    """By name and n."""
    forms: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "single": (SIZES, {"grouping": "off"}),
        "grouped": (tuple(n for n in SIZES if n > 2), {"grouping": "on"}),
        "pipemoe": (PIPEMOE, {"grouping": "off", "chunking": "tokens", "wgrad_mode": "per_chunk"}),
    }
    return {
        name: {n: Side(scenario, scenario.layer(context, Choice(n), **changes)) for n in sizes}
        for name, (sizes, changes) in forms.items()
    }


def screened(sides: dict[int, Side], count: int) -> int:
    """The n with the least median, each step after one of its own kind."""
    for _ in range(count):
        for side in sides.values():
            side.step()
            side.screened.append(side.step())
    return min(sides, key=lambda n: statistics.median(sides[n].screened))


def settle(scenario: Scenario, context: Context, steps: int) -> Side:
    """The layer that the tuner chooses for, once it has."""
    side = Side(scenario, scenario.layer(context, OPEN))
    taken = 0
    while taken < steps or (taken < MOST * steps and not context.stats()["last_is_settled"]):
        side.step()
        taken += 1
    return side


def is_grouped(side: Side) -> bool:
    """Whether a dispatch follows a return before the last dispatch was sent: the order of groups."""
    side.layer.context.trace_start(1 << 14)
    side.step()
    events = [e["op"] for e in side.layer.context.trace_take() if e["op"] in ("dispatch", "combine")]
    side.layer.context.trace_start(0)
    return "combine" in events[: len(events) - 1 - events[::-1].index("dispatch")]


def predicted(machine: bytes, case: dict[str, Any], world_size: int) -> float:
    """Grouped over single by the simulator, each with its best n."""
    planner, work = Planner(Machine(json.loads(machine), {})), workload_of(case, world_size)

    def best(grouped: bool) -> float:
        asked = work.with_(grouped=grouped)
        return min(planner.predict(asked, Planned(n, "keep", "keep", "deferred")).seconds for n in SIZES)

    return best(True) / best(False)


def cell(rank: Rank, case: dict[str, Any], folder: str) -> dict[str, Any]:
    """One scenario: what each side took in the same rounds."""
    plan = rank.plan
    scenario = Scenario(plan, case)
    machine = machine_of(scenario, rank.group, folder)
    tuner = TunerOptions(mode="adaptive", calibrate=plan["calibrate_s"], cache=folder)
    context = Context(rank.group, ContextOptions(gemm=plan["gemm"]))
    choosing = Context(rank.group, ContextOptions(gemm=plan["gemm"], tuner=tuner))
    sides = sides_of(scenario, context)
    best = {name: screened(among, plan["screen"]) for name, among in sides.items()}
    final = {name: sides[name][n] for name, n in best.items()} | {"adaptive": settle(scenario, choosing, plan["steps"])}
    for number in range(plan["pairs"]):
        order = list(final) if number % 2 == 0 else list(reversed(final))
        for name in order:
            final[name].step()
            final[name].seconds.append(final[name].step())
    found = {
        **case,
        "seconds": {name: side.seconds for name, side in final.items()},
        "n": best | {"adaptive": choosing.stats()["last_num_chunks"]},
        "is_grouped": is_grouped(final["adaptive"]),
        "predicted": predicted(machine, case, rank.world_size),
    }
    choosing.close()
    context.close()
    return found


def main() -> None:
    rank = Rank()
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(rank.plan["cases"]):
            cells.append(cell(rank, case, folder))
            rank.report(done=number + 1, of=len(rank.plan["cases"]), name=f"{case['shape']} x{case['skew']:g}")
    rank.leave(cells)


if __name__ == "__main__":
    main()
