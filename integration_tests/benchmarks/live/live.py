"""What it costs that layers change stages while a pipeline of DeepSpeed trains, and what it brings.

    .venv/bin/python -m integration_tests.benchmarks.live [--cells stall latencies decided] [--link 1gbit]
        [--records FOLDER] [--check] [--smoke]

Layers are slept: what is measured is engine, messages and moves, not computation. Three cells:

stall      two stages. Steps alone, with a layer that moves between two batches, and with one that moves during a batch,
           in turns in one process. The layer that moves sleeps nothing, so that only its move counts.
latencies  two stages. How long activations of 1 MiB travel while nothing moves, while state that moves shares the link
           with them, and while it gives way to them, as it does where nobody says otherwise.
decided    four stages, "plan": "adaptive". Times of layers change 30 times, as a seed draws them: the time of all
           batches, and of those that come AFTER behind a change, beside one that never moves and one that lies at its
           best at once, moved by hand and without the time of moving. Then noise of 10 %, in which nothing should
           move.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import launch, records  # noqa: E402
from integration_tests.benchmarks.measuring.stats import quartiles  # noqa: E402

CELLS: dict[str, dict[str, Any]] = {
    "stall": {"stages": 2, "micro_batches": 16, "elements": 1024, "weights": 2 << 20, "forward_s": 0.005, "pairs": 12},
    "latencies": {
        **{
            "stages": 2,
            "micro_batches": 24,
            "elements": 256 << 10,
            "weights": 4 << 20,
            "forward_s": 0.012,
            "pairs": 20,
        },
    },
    "decided": {
        **{"stages": 4, "micro_batches": 8, "elements": 1024, "weights": 64 << 10, "layers": 24, "base_s": 0.003},
        **{"changes": 30, "batches": 15, "static_batches": 3, "noise_batches": 200},
    },
}
SMOKE: dict[str, dict[str, Any]] = {
    "stall": {"micro_batches": 4, "weights": 1 << 12, "forward_s": 0.001, "pairs": 2},
    "latencies": {"micro_batches": 4, "weights": 1 << 12, "forward_s": 0.001, "pairs": 1},
    "decided": {"stages": 2, "micro_batches": 2, "layers": 6, "changes": 1, "batches": 7, "noise_batches": 2},
}
AFTER = 5  # batches behind a change from which on it counts
Verdict = tuple[str, bool]


def judged_stall(cell: dict[str, Any], found: dict[str, Any]) -> list[Verdict]:
    """Added step time, and beside a move with a drain."""
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
    """The 99th percentiles."""
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
    """Near the best soon, near the ideal over all, better than never. Layers take a little more than they are given, so
    the best partition by that is not always the fastest: what counts is time beside that partition's own."""
    late = [statistics.median(each[AFTER:]) / ideal for each, ideal in zip(found["took"], found["ideal"])]
    by_layers = sum(each[AFTER] > 0.05 for each in found["off"])
    own = sum(sum(each) for each in found["took"]) / cell["batches"]
    static, ideal = sum(found["static"]), sum(found["ideal"])
    slow = sum(value > 1.05 for value in late)
    return [
        (
            f"{found['moves']} moves, layers of stage 0 during batches {found['live']['in_batch']}; {AFTER} batches "
            f"behind {slow} of {len(late)} changes batches take over 1.05 of those of the best partition, the worst "
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


def flat(found: dict[str, Any]) -> dict[str, Any]:
    """Samples by change, one behind the other: what a record has."""
    joined = {
        name: sum(each, []) for name, each in found.items() if isinstance(each, list) and isinstance(each[0], list)
    }
    return {**found, **joined}


JUDGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], list[Verdict]]] = {
    "stall": judged_stall,
    "latencies": judged_latencies,
    "decided": judged_decided,
}


def main() -> int:
    """Run the cells, print what they came to, keep a record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--link", default="1gbit", help="1gbit, 0.2gbit ..., none for loopback (%(default)s)")
    parser.add_argument("--records", type=Path, help="folder for the record")
    parser.add_argument("--check", action="store_true", help="fail where less is reached than wanted")
    parser.add_argument("--smoke", action="store_true", help="tiny cells on two ranks: do they run?")
    options = parser.parse_args()
    cells = {name: {**CELLS[name], **(SMOKE[name] if options.smoke else {})} for name in options.cells}
    progress, record, is_good = launch.Progress(), {}, True
    for stages in sorted({cell["stages"] for cell in cells.values()}):
        own = {name: cell for name, cell in cells.items() if cell["stages"] == stages}
        plan = {"cells": own}
        program = HERE / "live_rank.py"
        answers, link = launch.ask(
            program, plan, world_size=stages, rate=options.link, deadline_s=1500, progress=progress, title="live"
        )
        progress.line(f"{stages} stages, slept layers, {link}")
        for name, cell in own.items():
            verdicts = JUDGES[name](cell, answers[name])
            for line, good in verdicts:
                progress.line(f"{name}: {line}{'' if good else '  MISSED'}")
                is_good = is_good and good
            said = [line for line, _ in verdicts]
            record[name] = {"cell": cell, "link": link, "found": flat(answers[name]), "said": said}
    if options.records:
        records.write(options.records / "live.json", record)
    return 1 if options.check and not is_good else 0


if __name__ == "__main__":
    sys.exit(main())
