"""What moved experts gain: steps of one DeepSpeed layer with skewed loads, stock, Sluice, and Sluice with "placement":
"adaptive", in turns over one link.

The experts of the first rank get `--skew` times the rows that even loads would give it. They are all hot together, so
that swaps can spread them. The adaptive side decides by itself, and its experts travel beside its steps, while it
trains alone. Printed are its bound, and the medians of moved / unmoved and of moved / stock. Beside them are shadowing
and moves of weights in each step: what they would add to a step with moved experts at least, measured over the same
link. Deciding and moving, as a share of a run of 500 steps, is the time in which steps waited for it, or by which steps
were longer than before, whichever is more. `--ranks 8 --E 64 --skew 5 --link 0.2gbit` is the larger form.

With `--skew 1` loads are even, and nothing moves: what is printed and checked is the processor time that deciding
takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import launch, records  # noqa: E402

MOST = {"of_unmoved": 0.65, "of_stock": 0.55}
MOST_SHARE = 0.03  # of 500 steps, for deciding and moving
MOST_EVEN = 0.01  # of processor time, where loads are even
STEPS_OF_A_RUN = 500


def is_good(found: dict[str, Any], is_even: bool) -> bool:
    """Whether all that is wanted is reached."""
    if is_even:
        return found["moved_experts"] == 0 and found["processor_share"] <= MOST_EVEN
    reached = all(found[name]["median"] <= wanted for name, wanted in MOST.items())
    return reached and found["moved_experts"] > 0 and found["share"] <= MOST_SHARE


def show(found: dict[str, Any], is_even: bool) -> list[str]:
    """The result in lines."""
    share = f"{100 * found['processor_share']:.2f} % of processor time"
    if is_even:
        return [
            f"rank loads / mean {found['imbalance']:.2f}: {found['moved_experts']} experts moved; deciding took "
            f"{share} (wanted: at most {100 * MOST_EVEN:.0f} %)"
        ]
    lines = [
        f"rank loads / mean {found['imbalance']:.2f}, planned {found['planned']:.2f}, bound {found['bound']:.2f}; "
        f"{found['moved_experts']} experts moved in {found['rounds']} rounds, {found['sent_bytes'] / 1e6:.1f} MB, "
        f"{100 * found['hidden_bytes'] / max(1, found['sent_bytes']):.0f} % of it beside steps",
    ]
    for name, wanted in MOST.items():
        ratio = found[name]
        lines.append(
            f"moved {name.replace('_', ' ')}: {ratio['median']:.2f} [{ratio['q1']:.2f} .. {ratio['q3']:.2f}] of "
            f"{ratio['count']} (wanted: at most {wanted})"
        )
    for name in ("shadowing", "weights in each step"):
        lines.append(f"moved of {name}, at least: {found[f'of {name}']['median']:.2f}")
    seconds = ", ".join(f"{side} {1000 * s['median']:.1f} ms" for side, s in found["seconds"].items())
    lines.append(
        f"steps: {seconds}; deciding and moving {100 * found['share']:.2f} % of {STEPS_OF_A_RUN} steps "
        f"(wanted: at most {100 * MOST_SHARE:.0f} %)"
    )
    return lines


def main() -> int:
    """Run it, print the result, keep a record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, value in {"T": 512, "M": 256, "H": 256, "E": 16, "K": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--skew", type=float, default=2.5, help="rows of the first rank over the mean (%(default)s)")
    parser.add_argument("--pairs", type=int, default=12, help="rounds that are measured (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="0.4gbit", help="1gbit, 0.2gbit ... (%(default)s)")
    parser.add_argument("--records", type=Path, help="folder for the record")
    parser.add_argument("--check", action="store_true", help="fail where less is reached than wanted")
    options = parser.parse_args()
    if options.E % options.ranks != 0 or not 1 <= options.skew < options.ranks:
        parser.error("E must be a multiple of --ranks, and --skew at least 1 and below --ranks")
    plan = {name: getattr(options, name) for name in ("T", "M", "H", "E", "K", "skew", "pairs")}
    progress = launch.Progress()
    found, link = launch.ask(
        HERE / "moves_rank.py",
        {**plan, "steps_of_a_run": STEPS_OF_A_RUN},
        world_size=options.ranks,
        rate=options.link,
        deadline_s=900,
        progress=progress,
    )
    progress.line(f"{' '.join(f'{k} {v}' for k, v in plan.items())} W {options.ranks}, {link}")
    for line in show(found, options.skew == 1):
        progress.line(line)
    if options.records:
        name = f"moves-{options.ranks}-{options.link}.json"
        records.write(options.records / name, {"plan": plan, "link": link, "found": found})
    return 1 if options.check and not is_good(found, options.skew == 1) else 0


if __name__ == "__main__":
    sys.exit(main())
