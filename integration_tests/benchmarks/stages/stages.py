"""DeepSpeed's pipeline engine by its own schedule and by Sluice's key, in turns, over a shaped link.

    .venv/bin/python -m integration_tests.benchmarks.stages [--cases two two-half four bubbles] [--pairs 5] [--check]

Stages do no work: a forward sleeps a third of f + b, a backward the rest, so that ranks which share cores do not slow
each other down. Payloads are real: --megabytes of f32 in each message. f + b is chosen so that a message over the link
takes the case's share c of it. Both engines live in the same processes and train the same batches in turns.

simulated  stock over Sluice in virtual time, with the policy in force, over a network like the one that is measured
           (stages_simulated.py)
wanted     0.95 of that, and at least what the case names

Other work, torch's own schedule and bubbles: stages_more.py. With --check the exit code is 1 where less is reached.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import launch, records  # noqa: E402
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles  # noqa: E402
from integration_tests.benchmarks.stages import stages_more, stages_simulated  # noqa: E402
from integration_tests.net.namespaces import parse_rate  # noqa: E402

SHARE = 0.95
HEADERS = 1.04  # of Ethernet, IP and TCP, which the shaper counts


class Case(NamedTuple):
    """p stages, L micro-batches in flight, a message that takes c of a forward and a backward; the least of stock ÷
    Sluice that is wanted whatever is simulated."""

    stages: int
    in_flight: int
    share: float
    least: float


CASES = {
    "two": Case(2, 4, 0.25, 1.25),
    "two-half": Case(2, 4, 0.5, 1.5),
    "four": Case(4, 4, 0.25, 1.25),
    "four-deep": Case(4, 8, 0.25, 1.55),
}

NAMES = (*CASES, *stages_more.NAMES)
THIS = sys.modules[__name__]


def message_seconds(megabytes: float, link: str) -> float:
    """What the link takes for one payload."""
    return megabytes * 2**20 * 8 * HEADERS / parse_rate(link)


def run_case(name: str, options: argparse.Namespace, progress: launch.Progress) -> dict[str, Any]:
    """One case over the link."""
    case = CASES[name]
    message_s = message_seconds(options.megabytes, options.link)
    unit = message_s / case.share
    plan = {
        **{"in_flight": case.in_flight, "stages": case.stages, "forward_s": unit / 3, "backward_s": 2 * unit / 3},
        **{"elements": int(options.megabytes * 2**18), "micro_batches": options.micro_batches, "pairs": options.pairs},
    }
    found, link = launch.ask(
        HERE / "stages_rank.py",
        plan,
        world_size=case.stages,
        rate=options.link,
        deadline_s=1800,
        progress=progress,
        title=name,
        unit="pairs",
    )
    simulated = stages_simulated.speedup(plan, message_s, found["policy"])
    ideal = (options.micro_batches + case.stages - 1) * unit
    return {
        "case": case._asdict(),
        "link": link,
        "unit_s": unit,
        "ideal_s": ideal,
        "ran_s": found["ran_s"],
        "stock_s": quartiles(found["stock_s"]),
        "sluice_s": quartiles(found["sluice_s"]),
        "speedup": pair_ratios(found["stock_s"], found["sluice_s"]),
        **{name: found[name] for name in ("policy", "most_in_flight", "messages_sent", "largest_loss_difference")},
        "simulated": simulated,
        "wanted": max(case.least, SHARE * simulated["speedup"]),
    }


def show(name: str, found: dict[str, Any]) -> str:
    """A case in one line."""
    case, ratio = found["case"], found["speedup"]
    return (
        f"{name:<10} p {case['stages']}, L {case['in_flight']}, c {case['share']}: "
        f"stock {found['stock_s']['median']:.2f} s, Sluice {found['sluice_s']['median']:.2f} s, "
        f"{ratio['median']:.2f}x [{ratio['q1']:.2f} .. {ratio['q3']:.2f}] "
        f"(simulated {found['simulated']['speedup']:.2f}, wanted {found['wanted']:.2f}; {found['policy']}); without "
        f"messages {found['ideal_s']:.2f} s; ops took {found['ran_s'] / found['unit_s']:.3f} of their plan; losses "
        f"differ by {found['largest_loss_difference']:.0e}"
    )


def is_short(name: str, found: dict[str, Any]) -> bool:
    """Whether less is reached than wanted."""
    return found["speedup"]["median"] < found["wanted"]


def main() -> int:
    """Run the cases, print a line of each and write one record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--link", default="1gbit", help="1gbit, 0.4gbit ...; loopback has no rate to go by")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of one message")
    parser.add_argument("--micro-batches", type=int, default=16, help="the simulated ratios are those of 16")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="fail where less is reached than wanted")
    parser.add_argument("--records", type=Path, help="folder for the record")
    options = parser.parse_args()
    progress = launch.Progress()
    cases = {}
    for name in options.cases:
        room = THIS if name in CASES else stages_more
        cases[name] = room.run_case(name, options, progress)
        progress.line(room.show(name, cases[name]))
    if options.records:
        settings = {name: getattr(options, name) for name in ("link", "megabytes", "micro_batches", "pairs")}
        records.write(options.records / "stages.json", {"settings": settings, "cases": cases})
    short = [name for name, found in cases.items() if (THIS if name in CASES else stages_more).is_short(name, found)]
    if short and options.check:
        print(f"Below what is wanted: {', '.join(short)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
