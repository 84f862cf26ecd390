"""transformers' expert parallelism: Sluice beside stock `all_to_all` with grouped_mm, in turns, over shaped links.

    .venv/bin/python -m integration_tests.benchmarks.ep [--links 1gbit 0.4gbit none] [--ranks 2] [--pairs 8]
        [--shapes qwen3] [--dtypes bfloat16] [--deduplicate] [--check] [--smoke]

One experts block per cell, forward and backward, fresh gradients. Beside the ratio stands what stock's four exchanges
and its experts take by themselves in the same run: the gain can be largest where the two are equal. --check: the marks
of ep_marks.py; exit code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.ep import ep_marks  # noqa: E402
from integration_tests.benchmarks.measuring import launch, records  # noqa: E402
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles  # noqa: E402

# M, H, E, K, T of the cells; widths scaled so that a cell takes seconds.
SHAPES = {
    "mixtral": (1024, 1792, 8, 2, 1024),
    "qwen3": (1024, 384, 64, 8, 512),
    "deepseek": (1024, 512, 32, 6, 512),
    "tiny": (256, 256, 8, 2, 256),
}
SMOKE = {"smoke": (32, 16, 4, 2, 24)}


def cells(options: argparse.Namespace) -> list[dict]:
    """What every rank runs over one link."""
    found = []
    shapes = SMOKE if options.smoke else {name: SHAPES[name] for name in options.shapes}
    for name, (M, H, E, K, T) in shapes.items():
        for dtype in options.dtypes:
            cell = {"name": name, "M": M, "H": H, "E": E, "K": K, "T": T, "dtype": dtype}
            found.append(cell | {"deduplicate": options.deduplicate})
    return found


def show(line: dict) -> str:
    """A line of the table."""
    stock, ours, gain = line["stock"], line["sluice"], line["speedup"]
    return (
        f"{line['name']:<9} {line['dtype']:<9} {line['link']:>8}  stock {1000 * stock['median']:7.0f} ms "
        f"(comm {1000 * line['comm_s']:5.0f}, experts {1000 * line['compute_s']:5.0f})  "
        f"Sluice {1000 * ours['median']:7.0f} ms with {line['chunks']} chunks  "
        f"{gain['median']:.2f}x [{gain['q1']:.2f} .. {gain['q3']:.2f}]  "
        f"outputs differ by {line['difference']:.1e}"
    )


def run_link(options: argparse.Namespace, link: str, progress: launch.Progress) -> list[dict]:
    """All cells over one link, in one process group."""
    plan = {"cells": cells(options), "pairs": options.pairs, "warm_up": options.warm_up}
    lines, _ = launch.ask(
        HERE / "ep_rank.py",
        plan,
        world_size=options.ranks,
        rate=link,
        deadline_s=1800,
        progress=progress,
        title=link,
    )
    for line in lines:
        line["link"] = link
        line["speedup"] = pair_ratios(line["wall_s"]["stock"], line["wall_s"]["sluice"])
        for side in ("stock", "sluice"):
            line[side] = quartiles(line["wall_s"][side])
        progress.line(show(line))
    return lines


def main() -> int:
    """Run the cells over each link and write one record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--links", nargs="+", default=["none", "4gbit", "1gbit", "0.4gbit"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--deduplicate", action="store_true", help="Sluice sends a token once to each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=16, help="pairs before that, in which Sluice chooses n")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a mark is missed")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run?")
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    progress = launch.Progress()
    lines: list[dict] = []
    for link in options.links:
        lines += run_link(options, link, progress)
        if not options.records:
            continue
        fields = {"ranks": options.ranks, "lines": lines}  # after each link: what is done is kept
        records.write(options.records / "ep.json", fields)
    if not options.check:
        return 0
    said, good = ep_marks.verdicts(lines)
    for text in said:
        progress.line(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
