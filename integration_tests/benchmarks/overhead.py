"""What tuning costs a run of 10,000 steps, in wall and CPU time, for constant and for changing batches.

    .venv/bin/python -m integration_tests.benchmarks.overhead [--steps 10000] [--link none] [--records FOLDER] [--check]

A layer whose n is open (mode adaptive, no machine) trains so many steps in blocks, in turns with blocks of layers whose
n and mode of weight gradients are configured to what a scout, trained before, settled on for each size. Both run the
same batches. *Cost* is all time of the tuned side over that of the other, minus 1: races, switches, worse choices
included. *Pairs* is the median over blocks of the same ratio: what tuning costs once all is settled. The tuner's own
account (races beyond the best candidate, first passes after switches) stands beside. On a machine whose speed changes,
only the account and the pairs repeat themselves. Nothing is calibrated: that is once per machine and reported apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from integration_tests.benchmarks import launch  # noqa: E402

# T of each step; drawn anew for every step where there are several.
WORKLOADS = {"constant": (64,), "changing": (48, 64, 96, 128)}
PROMISED = 0.005  # of all time


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """Costs of a workload: of wall and CPU time, the slowest rank's of each block; and the tuner's own account."""
    result: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        tuned, fixed = found[clock]["tuned"], found[clock]["fixed"]
        result[clock] = {
            "cost": sum(tuned) / sum(fixed) - 1,
            "pairs": statistics.median(a / b for a, b in zip(tuned, fixed, strict=True)) - 1,
        }
    stats = found["stats"]
    result["account"] = (stats["excess_seconds"] + stats["switch_seconds"]) / stats["total_seconds"]
    return result


def show(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    j, stats = found["judged"], found["stats"]
    clocks = "; ".join(
        f"{clock} {100 * j[clock]['cost']:+.2f} % (pairs {100 * j[clock]['pairs']:+.2f} %)" for clock in ("wall", "cpu")
    )
    return (
        f"{name:<9} {found['steps']} steps: {clocks}; the tuner's account {100 * j['account']:.2f} % in "
        f"{stats['race_passes']} raced passes of {stats['timed_passes']}, {stats['num_switches']} switches; "
        f"n by T {found['chosen']} (scouts: {found['scouted']})"
    )


def run_workload(name: str, options: argparse.Namespace, progress: launch.Progress) -> dict[str, Any]:
    """One workload, in a process group of its own."""
    plan = {
        "sizes": WORKLOADS[name],
        "shape": {"M": options.M, "H": options.H, "E": options.E, "K": options.K},
        **{key: getattr(options, key) for key in ("steps", "block", "scout", "seed", "gemm")},
    }
    found, _ = launch.ask(
        HERE / "overhead_rank.py",
        plan,
        world_size=options.ranks,
        rate=options.link,
        deadline_s=1800,
        progress=progress,
        title=name,
        unit="steps",
    )
    return found | {"steps": options.steps, "judged": judge(found)}


def main() -> int:
    """Run the workloads, print a line of each and write one record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=10000, help="of each side")
    parser.add_argument("--block", type=int, default=50, help="steps of one side before the other's turn")
    parser.add_argument("--scout", type=int, default=100, help="steps of a scout for each size")
    parser.add_argument("--link", default="none")
    parser.add_argument("--ranks", type=int, default=2)
    for name, value in {"M": 32, "H": 64, "E": 4, "K": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gemm", default="native", help="named, so that both sides multiply alike")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--records", type=Path, help="folder for overhead.json")
    parser.add_argument("--check", action="store_true", help="fail where the tuner's account is above 0.5 %%")
    options = parser.parse_args()
    if options.steps < options.block or options.block < 1:
        parser.error("--steps must be at least --block, and --block at least 1")
    progress = launch.Progress()
    found = {}
    for name in options.workloads:
        found[name] = run_workload(name, options, progress)
        progress.line(show(name, found[name]))
    if options.records:
        launch.write_record(options.records / "overhead.json", {"link": options.link, "workloads": found})
    above = [name for name, each in found.items() if each["judged"]["account"] > PROMISED]
    if above and options.check:
        print(f"Above {100 * PROMISED:g} %: {', '.join(above)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
