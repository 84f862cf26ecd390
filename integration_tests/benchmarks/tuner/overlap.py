"""How much of the overlap that is possible Sluice gets, where communication takes about as long as computation.

    .venv/bin/python -m integration_tests.benchmarks.overlap [--cases one-expert eight] [--link RATE] [--smoke]

Two layers in one run, in turns: one with one chunk, whose ops show what communication and computation take by
themselves, and one whose n Sluice chooses while training. With both, per pass,

    ideal = sum over forward and backward of max(communication, computation + CPU seconds of the communication lane)

since one core both computes and moves the bytes. Communication is the exchange of the rank that waited least for the
others; of backward, twice the gradients' dispatch, because the return runs beside the weight gradients even with one
chunk. Computation is that of the slowest rank. `reached` is the ideal over what the passes took with the chosen n.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import launch, records  # noqa: E402
from integration_tests.benchmarks.measuring.stats import quartiles  # noqa: E402

# T, M, H, E, K, link, share of the ideal that must be reached. At these links both lanes take about as long on one
# core of 60 to 120 GFLOP/s; the record says what they took.
CASES: dict[str, tuple[int, int, int, int, int, str, float]] = {
    "one-expert": (8192, 512, 2048, 2, 1, "0.25gbit", 0.92),
    "eight": (2048, 1024, 4096, 8, 1, "0.125gbit", 0.82),
}
SMOKE: dict[str, tuple[int, int, int, int, int, str, float]] = {"smoke": (64, 32, 64, 4, 1, "none", 0.0)}


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """Adds what follows from the measured seconds: the ideal, and how much of it was reached in each round."""
    ideal = 0.0
    for part in found["parts"].values():
        ideal += max(part["comm_s"], part["compute_s"] + part["comm_cpu_s"])
    found["ideal_s"] = ideal
    found["reached"] = quartiles([ideal / seconds for seconds in found["chosen_s"]])
    found["one_chunk_over_chosen"] = quartiles(
        [a / b for a, b in zip(found["one_chunk_s"], found["chosen_s"], strict=True)]
    )
    return found


def show(name: str, found: dict[str, Any]) -> str:
    """A case in one line."""
    lanes = ", ".join(
        f"{direction} {part['comm_s']:.3f} | {part['compute_s']:.3f} + {part['comm_cpu_s']:.3f}"
        for direction, part in found["parts"].items()
    )
    return (
        f"{name:<12} {found['link']:>9}  reached {100 * found['reached']['median']:.0f} % "
        f"[{100 * found['reached']['q1']:.0f}, {100 * found['reached']['q3']:.0f}] of {found['ideal_s']:.3f} s "
        f"(must reach {100 * found['must_reach']:.0f} %); n {found['n']}; communication | computation + CPU of "
        f"the lane: {lanes} s; one chunk / chosen {found['one_chunk_over_chosen']['median']:.2f}"
    )


def run_case(name: str, options: argparse.Namespace, progress: launch.Progress) -> dict[str, Any]:
    """One case over its link."""
    T, M, H, E, K, link, must = (SMOKE if options.smoke else CASES)[name]
    link = options.link or link
    case = {"T": T, "M": M, "H": H, "E": E, "K": K, "skew": 1.0}
    plan = {"case": case, **{key: getattr(options, key) for key in ("rounds", "settle", "seed", "gemm")}}
    found, _ = launch.ask(
        HERE / "overlap_rank.py", plan, world_size=2, rate=link, deadline_s=1800, progress=progress, title=name
    )
    found |= {"case": case, "link": link, "must_reach": must}
    return judge(found)


def main() -> int:
    """Run the cases, print a line of each and write one record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--link", help="another link than the cases name")
    parser.add_argument("--gemm", default="native", help="named, so that both layers multiply alike")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--settle", type=int, default=120, help="steps in which Sluice may choose n, at most")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="a tiny layer: does it run?")
    parser.add_argument("--check", action="store_true", help="fail where less is reached than must be")
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    names = list(SMOKE) if options.smoke else options.cases
    progress = launch.Progress()
    cases = {}
    for name in names:
        cases[name] = run_case(name, options, progress)
        progress.line(show(name, cases[name]))
    if options.records:
        records.write(options.records / "overlap.json", {"cases": cases})
    short = [name for name, found in cases.items() if found["reached"]["median"] < found["must_reach"]]
    if short and options.check:
        print(f"Below what is promised: {', '.join(short)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
