"""What recording expert loads (SLUICE_ROUTING_DIR) costs a training step, in wall and CPU time.

One layer, forward and backward, on every rank over one link. Steps come in pairs, one with recording and one without,
in changing order, so that drift meets both. Two figures:

    direct   seconds inside the recorder, flushes to the file included, over the seconds of the recorded steps
    pairs    median of (with - without) / without over all pairs, and the range that holds the true one 95 times in 100

The direct figure is what is bounded: pairs of a few milliseconds differ by more than 0.2 % for other reasons, so they
only say whether something was overlooked. What it must show (--check): direct at most 0.2 % in wall and in CPU time on
every rank, and a range of the pairs that does not lie above it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import launch, records  # noqa: E402

MOST = 0.002
CLOCKS = ("wall", "cpu")


def median_range(values: list[float]) -> tuple[float, float, float]:
    """Median, and the two order statistics between which the true one lies 95 times in 100."""
    ordered, count = sorted(values), len(values)
    half = 0.98 * count**0.5  # 1.96 standard deviations of Binomial(count, 1/2)
    low, high = int(max(0, count / 2 - half)), int(min(count - 1, count / 2 + half))
    return statistics.median(ordered), ordered[low], ordered[high]


def judge(ranks: list[dict]) -> tuple[list[str], bool]:
    """In words, and whether it holds. A rank: {clock: {"with": [s], "without": [s], "inside": s}}."""
    text, good = [], True
    for clock in CLOCKS:
        direct = max(rank[clock]["inside"] / sum(rank[clock]["with"]) for rank in ranks)
        # Of the slowest rank in each step: all wait for each other.
        sides = [
            [max(step) for step in zip(*(r[clock][side] for r in ranks), strict=True)] for side in ("with", "without")
        ]
        middle, low, high = median_range([(a - b) / b for a, b in zip(*sides, strict=True)])
        good = good and direct <= MOST and low <= MOST
        text.append(
            f"{clock:<5} direct {100 * direct:.4f} %; pairs {100 * middle:+.3f} % "
            f"[{100 * low:+.3f}, {100 * high:+.3f}] of {len(sides[0])} (wanted: at most {100 * MOST:.1f} %)"
        )
    return text, good


def main() -> int:
    """Run it, print both figures, keep a record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, value in {"T": 512, "M": 256, "H": 1024, "E": 16, "K": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--pairs", type=int, default=1100, help="(%(default)s: the file is written to at least twice)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default="none", help="1gbit, 0.2gbit ..., or none for loopback (%(default)s)")
    parser.add_argument("--records", type=Path)
    parser.add_argument("--check", action="store_true", help="fail if what must be shown is not")
    options = parser.parse_args()
    if options.E % options.ranks != 0:
        parser.error("E must be a multiple of --ranks")
    progress = launch.Progress()
    with tempfile.TemporaryDirectory() as folder:
        plan = {name: getattr(options, name) for name in ("T", "M", "H", "E", "K", "pairs")}
        (Path(folder) / "plan.json").write_text(json.dumps({**plan, "out": folder}))
        outcome = launch.run(
            [sys.executable, str(HERE / "routing_cost_rank.py"), str(Path(folder) / "plan.json")],
            world_size=options.ranks,
            rate=options.link,
            deadline_s=300 + options.pairs,
            on_progress=lambda event: progress.show(
                f"{launch.bar(event['done'] / event['of'])} {event['done']}/{event['of']}"
            ),
            progress=progress,
            env={
                **launch.environment(),
                "PYTHONPATH": str(HERE.parents[2]),
                "SLUICE_ROUTING_DIR": str(Path(folder) / "loads"),
            },
        )
        if outcome.status != 0:
            return outcome.status
        ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(options.ranks)]
    step = statistics.median(ranks[0]["wall"]["without"])
    shape = " ".join(f"{name} {value}" for name, value in plan.items())
    print(f"\n{shape} W {options.ranks}, link {options.link}: {1000 * step:.2f} ms")
    print(f"recorded {ranks[0]['recorded']} backwards of {ranks[0]['backwards']} on each rank")
    text, good = judge(ranks)
    print("\n".join(text))
    if options.records:
        record = {"plan": plan, "link": outcome.link, "ranks": ranks, "verdict": text}
        records.write(options.records / "routing-cost.json", record)
    return 1 if options.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
