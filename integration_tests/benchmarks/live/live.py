# SPDX-License-Identifier: Apache-2.0
"""Cost and gain of moving layers between stages while a pipeline of DeepSpeed trains.

Layers sleep instead of computing, so that only engine, messages and moves are measured. The functions of live_rank.py
describe the cells.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import LINK, Bench, Option
from integration_tests.benchmarks.measuring.stats import quartiles

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/stages.md"
NAMES = ("stall", "latencies", "decided", "ways")
OPTIONS = {"cells": Option(list(NAMES), choices=NAMES), "link": LINK}
SMOKE = {"link": "none"}
CELLS: dict[str, dict[str, Any]] = {
    "stall": {"stages": 2, "micro_batches": 16, "elements": 1024, "weights": 2 << 20, "forward_s": 0.005, "pairs": 12},
    "latencies": {
        **{"stages": 2, "micro_batches": 24, "elements": 256 << 10, "weights": 4 << 20, "forward_s": 0.012, "pairs": 20}
    },
    "decided": {
        **{"stages": 4, "micro_batches": 8, "elements": 1024, "weights": 64 << 10, "layers": 24, "base_s": 0.003},
        **{"changes": 30, "batches": 15, "static_batches": 3, "noise_batches": 200},
    },
    "ways": {
        **{"stages": 4, "micro_batches": 8, "elements": 1024, "layers": 24, "base_s": 0.003, "changes": 30},
        **{"sizes_mib": [4, 32, 64]},
    },
}
TINY: dict[str, dict[str, Any]] = {
    "stall": {"micro_batches": 4, "weights": 1 << 12, "forward_s": 0.001, "pairs": 2},
    "latencies": {"micro_batches": 4, "weights": 1 << 12, "forward_s": 0.001, "pairs": 1},
    "decided": {"stages": 2, "micro_batches": 2, "layers": 6, "changes": 1, "batches": 7, "noise_batches": 2},
    "ways": {"stages": 2, "micro_batches": 2, "layers": 6, "base_s": 0.001, "changes": 2, "sizes_mib": [1]},
}
LARGE_MIB, LEAST_LIVE = 32, 0.8  # layers of this size and more move during batches in this share of moves
AFTER = 5  # batches after a change until the partition must be close to the best
Verdict = tuple[str, bool]


def judged_stall(cell: dict[str, Any], found: dict[str, Any]) -> list[Verdict]:
    """The step time that a live move and a move with a drain add."""
    seconds = found["seconds"]
    step = statistics.median(seconds["still"])
    added = {side: quartiles([a - b for a, b in zip(seconds[side], seconds["still"])]) for side in ("drained", "live")}
    ratio = added["live"]["median"] / max(added["drained"]["median"], 1e-9)
    moved = found["live"]
    return [
        (
            f"a step takes {1000 * step:.0f} ms, with a layer that moves during it {_ms(added['live'])} ms more "
            f"(wanted: at most {100 * step:.0f})",
            added["live"]["median"] <= 0.1 * step,
        ),
        (
            f"with a drain {_ms(added['drained'])} ms more; live takes {ratio:.2f} of that (wanted: 0.33)",
            ratio <= 1 / 3,
        ),
        (
            f"{moved['in_batch']} layers went over during a batch, {moved['at_flush']} at its end; gradients of "
            f"{moved['sums_early']} had come to this stage before it",
            moved["in_batch"] > 0,
        ),
    ]


def _ms(spread: dict[str, float]) -> str:
    return f"{1000 * spread['median']:.1f} [{1000 * spread['q1']:.1f} .. {1000 * spread['q3']:.1f}]"


def judged_latencies(cell: dict[str, Any], found: dict[str, Any]) -> list[Verdict]:
    """The 99th percentiles of latencies."""
    late = {name: _p99(values) for name, values in found.items()}
    counts = ", ".join(f"{len(values)} {name}" for name, values in found.items())
    giving, sharing = (late[name] / late["still"] for name in ("giving way", "sharing"))
    said = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in late.items())
    return [
        (f"p99 of activations: {said} (of {counts})", True),
        (f"where state gives way {giving:.2f} times as late as alone (wanted: at most 1.1)", giving <= 1.1),
        (f"where it shares the link {sharing:.2f} times as late (wanted: at least 2)", sharing >= 2),
    ]


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))] if ordered else float("nan")


def judged_decided(cell: dict[str, Any], found: dict[str, Any]) -> list[Verdict]:
    """Close to the best partition soon after a change, close to the ideal in total, faster than without moves. Layers
    take a little longer than their set time, so the best partition by set times is not always the fastest. So times are
    compared with the measured time of that partition."""
    late = [statistics.median(each[AFTER:]) / ideal for each, ideal in zip(found["took"], found["ideal"])]
    by_layers = sum(each[AFTER] > 0.05 for each in found["off"])
    own = sum(sum(each) for each in found["took"]) / cell["batches"]
    static, ideal = sum(found["static"]), sum(found["ideal"])
    slow = sum(value > 1.05 for value in late)
    return [
        (
            f"{found['moves']} moves, layers of stage 0 during batches {found['live']['in_batch']}; {AFTER} batches "
            f"after {slow} of {len(late)} changes batches take over 1.05 of those of the best partition, the worst "
            f"{max(late):.2f}; by the layers' times alone {by_layers} are more than 5 % off",
            slow == 0,
        ),
        (f"{ideal / own:.2f} of the ideal over all batches (wanted: 0.90)", ideal / own >= 0.90),
        (f"{static / own:.2f} times as fast as layers that never move (wanted: 1.3)", static / own >= 1.3),
        (
            f"{found['noise_moves']} moves in {found['noise_batches']} batches of noise (wanted: at most 1)",
            found["noise_moves"] <= 1,
        ),
    ]


def judged_ways(cell: dict[str, Any], found: list[dict[str, Any]]) -> list[Verdict]:
    """The share of live moves for each size, and the chosen way against the better one. Times are of the move and its
    batches together."""
    lines = []
    for mib in cell["sizes_mib"]:
        rows = [row for row in found if row["mib"] == mib]
        share = sum(row["is_live"] for row in rows) / len(rows)
        chosen = [row["live" if row["is_live"] else "drained"] for row in rows]
        ratios = [took / min(row["live"], row["drained"]) for took, row in zip(chosen, rows)]
        least = LEAST_LIVE if mib >= LARGE_MIB else 0.0
        totals = ", ".join(f"{way} {sum(row[way] for row in rows):.1f} s" for way in ("live", "drained"))
        middle = statistics.median(ratios)
        lines += [
            (
                f"layers of {mib} MiB: {share:.2f} of {len(rows)} moves are made during batches"
                + (f" (wanted: {least})" if least else "")
                + f", the longest in {max(row['steps'] for row in rows)}",
                share >= least,
            ),
            (
                f"layers of {mib} MiB: the chosen way takes {sum(chosen):.1f} s ({totals}); {middle:.2f} of the better "
                f"one, at most {max(ratios):.2f} (wanted: 1.10)",
                max(ratios) <= 1.10,
            ),
        ]
    return lines


JUDGES: dict[str, Callable[[dict[str, Any], Any], list[Verdict]]] = {
    "stall": judged_stall,
    "latencies": judged_latencies,
    "decided": judged_decided,
    "ways": judged_ways,
}


def run(bench: Bench) -> list[str]:
    options, raw, rows, missed = bench.options, {}, [], []
    cells = {name: {**CELLS[name], **(TINY[name] if options.smoke else {})} for name in options.cells}
    for stages in sorted({cell["stages"] for cell in cells.values()}):
        own = {name: cell for name, cell in cells.items() if cell["stages"] == stages}
        more = {"ranks": stages, "link": options.link, "title": f"{stages} stages"}
        answers = bench.ask(HERE / "live_rank.py", {"cells": own}, **more)
        for name, cell in own.items():
            raw[name] = answers[name]
            for line, good in JUDGES[name](cell, answers[name]):
                bench.line(f"{name}: {line}")
                rows.append({"cell": name, "said": line, "is_missed": None if good else True})
                missed += [] if good or options.smoke else [f"{name}: {line}"]
        bench.keep(rows, raw)
    return missed


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(row: dict[str, Any]) -> list[str]:
        return [row["cell"], pages.bold(row["said"], row.get("is_missed", False))]

    return {"cells": pages.run_tables(runs, ["cell", "found"], cells)}
