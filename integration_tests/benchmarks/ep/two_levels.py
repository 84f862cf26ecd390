"""The exchange in two levels beside the one in one level: nodes of two ranks, loopback within, a shaped link between.

    .venv/bin/python -m integration_tests.benchmarks.two_levels [--links 0.2gbit 1gbit] [--nodes 2] [--per-node 2]
        [--top-k 8] [--chunks 0] [--wire bf16] [--pairs 10] [--check] [--records DIR] [--smoke]

One layer, forward and backward, in turns: `deduplicate` by rank, by node, and "adaptive", in the same group over the
same sockets. The ranks of a node share one link to the other nodes. The same random routing for all. --wire: rows of
all travel rounded. --check: at 0.2gbit two levels take at most 1 / 1.25 of the time, at 1gbit at most 1 / 0.98; what is
chosen takes at most 1.03 of the better; exit code 1 where not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import launch, records  # noqa: E402
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles  # noqa: E402

BYTES = ("bytes_sent", "between_bytes")
MARKS = {"0.2gbit": 1.25, "1gbit": 0.98}
MOST_OF_BEST = 1.03


def show(line: dict[str, Any]) -> str:
    """A line of the table."""
    one, two, chosen, gain = (line[name] for name in ("one", "two", "chosen", "speedup"))
    sent, between = ({side: bytes_ / 1e6 for side, bytes_ in line[name].items()} for name in BYTES)
    return (
        f"{line['link']:>8}  K {line['case']['K']}  one level {1e3 * one['median']:7.0f} ms (n {line['n']['one']})  "
        f"two levels {1e3 * two['median']:7.0f} ms (n {line['n']['two']})  chosen {1e3 * chosen['median']:7.0f} ms "
        f"(n {line['n']['chosen']}, {line['of_best']:.2f} of the better)  {gain['median']:.2f}x "
        f"[{gain['q1']:.2f} .. {gain['q3']:.2f}]  a rank sends {sent['one']:.1f} and {sent['two']:.1f} MB, "
        f"between nodes {between['one']:.1f} and {between['two']:.1f} MB  outputs differ by {line['difference']:.1e}"
    )


def run_link(options: argparse.Namespace, link: str, progress: launch.Progress) -> dict[str, Any]:
    """Both sides over one link."""
    case = {name: getattr(options, name) for name in "TMHE"} | {"K": options.top_k}
    if options.smoke:
        case = {"T": 64, "M": 32, "H": 32, "E": 8, "K": 2}
    plan = {"case": case, **{name: getattr(options, name) for name in ("pairs", "warm_up", "seed", "gemm", "chunks")}}
    plan |= {"ranks_per_node": options.per_node, "wire": options.wire}
    line, _ = launch.ask(
        HERE / "two_levels_rank.py",
        plan,
        world_size=options.nodes * options.per_node,
        rate=link,
        deadline_s=1800,
        progress=progress,
        title=link,
        ranks_per_node=options.per_node,
    )
    line |= {"link": link, "case": case, "speedup": pair_ratios(line["wall_s"]["one"], line["wall_s"]["two"])}
    for side in ("one", "two", "chosen"):
        line[side] = quartiles(line["wall_s"][side])
    line["of_best"] = line["chosen"]["median"] / min(line["one"]["median"], line["two"]["median"])
    progress.line(show(line))
    return line


def main() -> int:
    """Run both sides over each link and write one record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--links", nargs="+", default=["0.2gbit", "1gbit"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=2, help="ranks of each node (%(default)s)")
    for name, default in (("T", 1024), ("M", 1024), ("H", 512), ("E", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=0, help="of both; 0: chosen by each")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument(
        "--warm-up", type=int, default=40, help="turns before that, in which each chooses n, and levels"
    )
    parser.add_argument("--wire", choices=("bf16", "int8"), help="rows travel rounded")
    parser.add_argument("--gemm", default="native", help="named, so that both sides multiply alike")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a mark is missed")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer: does it run?")
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    progress = launch.Progress()
    lines = [run_link(options, link, progress) for link in options.links]
    if options.records:
        records.write(options.records / "two_levels.json", {"lines": lines})
    missed = [line["link"] for line in lines if line["speedup"]["median"] < MARKS.get(line["link"], 0)]
    missed += [f"{line['link']}, as chosen" for line in lines if line["of_best"] > MOST_OF_BEST]
    if missed and options.check:
        print(f"Below the mark: {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
