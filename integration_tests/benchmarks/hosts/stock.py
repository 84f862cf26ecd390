# SPDX-License-Identifier: Apache-2.0
"""The model of stock layers (sluice/planning/stock.py) against real stock layers: exact counts in tiny shapes, and the
error of a step's seconds.

The machine's rates are measured in the same run, in turns with the layers, at other sizes. Time is a rank's CPU time,
or wall time if the link's rate is limited.
"""

import statistics
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import Bench, Option

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/tuner.md"
# T, M, H, E, K
SHAPES = {
    "a": (512, 256, 512, 8, 4),
    "b": (1024, 256, 512, 32, 2),
    "c": (4096, 256, 512, 32, 1),
    "d": (1024, 512, 1024, 8, 2),
    "e": (2048, 512, 1024, 32, 1),
    "f": (512, 512, 1024, 32, 4),
    "g": (512, 1024, 1024, 8, 2),
    "h": (1024, 1024, 1024, 32, 1),
    "tiny": (48, 32, 64, 8, 2),
    "one": (48, 32, 64, 8, 1),
    "four": (48, 32, 64, 16, 4),
}
TINY = ["tiny", "one", "four"]
HOSTS = ["DeepSpeed", "Megatron-Core"]
OPTIONS = {
    "hosts": Option(HOSTS, choices=HOSTS),
    "shapes": Option([name for name in SHAPES if name not in TINY], choices=list(SHAPES)),
    "ranks": Option([1, 2], "numbers of ranks, one core each"),
    "link": Option("none", "1gbit, 0.2gbit ...; none: loopback"),
    "skew": Option(1.0, "load of the first expert over the mean"),
    "rounds": Option(9, "turns of the machine's rates and of each layer"),
    "steps": Option(2, "timed steps of a layer in a turn"),
    "most": Option(0.15, "error of a modelled step, at most; 0: only what layers count is judged"),
}
SMOKE = {"shapes": TINY, "rounds": 1, "steps": 1, "most": 0.0}
COUNTS = ("flops", "calls", "sent", "kept")


def modelled(line: dict[str, Any], ranks: int) -> Any:
    """The modelled step, with the rates of this run."""
    from sluice.planning import stock
    from sluice.planning.machines import Machine
    from sluice.planning.planner import Planner, Workload
    from sluice.planning.rates import Rates

    work = Workload(line["M"], line["H"], line["T"], line["E"], line["K"], ranks, "f32")
    more = {"grouped": False} if line["host"] != "DeepSpeed" else {}
    rates = Rates(Planner(Machine(line["machine"], {})))
    return stock.MODELS[line["host"]](work, rates, line["skew"], op_seconds=line["op"], **more)


def row(line: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The record of a cell."""
    step = modelled(line, ranks)
    seconds = sum(step.seconds.values())
    counted = COUNTS if line["name"] in TINY else ()  # in other shapes a tensor of tokens may be as wide as a row
    wrong = [name for name in counted if getattr(step, name) != line["counted"][name]]
    return {
        **{name: line[name] for name in ("host", "name", "T", "M", "H", "E", "K")},
        "ranks": ranks,
        "measured_s": line["seconds"],
        "modelled_s": seconds,
        "error": seconds / line["seconds"] - 1,
        "differs": ", ".join(f"{name} {getattr(step, name):.0f} not {line['counted'][name]:.0f}" for name in wrong),
    }


def run(bench: Bench) -> list[str]:
    options, found, raw = bench.options, [], []
    for host in options.hosts:
        cells = [
            {"host": host, "name": name, "skew": options.skew, **dict(zip("TMHEK", SHAPES[name]))}
            for name in options.shapes
        ]
        for ranks in options.ranks:
            link = options.link if ranks > 1 else "none"
            plan = {"cells": cells, "has_link": link != "none", **bench.picked("rounds", "steps")}
            lines = bench.ask(HERE / "stock_rank.py", plan, ranks=ranks, link=link, title=host)
            raw += lines
            for line in lines:
                found.append(row(line, ranks))
                bench.tell(found[-1])
            bench.keep([{name: value for name, value in each.items() if name != "differs"} for each in found], raw)
    sizes = sorted(abs(each["error"]) for each in found)
    bench.line(f"error of a step: median {100 * statistics.median(sizes):.1f} %, worst {100 * sizes[-1]:.1f} %")
    wrong = [records.told(each) for each in found if each["differs"]]
    return wrong + [records.told(each) for each in found if options.most and abs(each["error"]) > options.most]


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    """For each host and number of ranks the errors over all shapes."""

    def told(rows: list[dict[str, Any]]) -> str:
        lines = []
        for host, ranks in dict.fromkeys((row["host"], row["ranks"]) for row in rows):
            errors = [100 * row["error"] for row in rows if (row["host"], row["ranks"]) == (host, ranks)]
            worst = max(errors, key=abs)
            middle = statistics.median(map(abs, errors))
            told_worst = pages.bold(f"{worst:+.1f} %", abs(worst) > 15)
            lines.append([host, ranks, len(errors), f"{middle:.1f} %", told_worst])
        return pages.table(["stock", "ranks", "shapes", "median error", "largest error"], lines)

    return {"errors": pages.each_run(runs, told)}
