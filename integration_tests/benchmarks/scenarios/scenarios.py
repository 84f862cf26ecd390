"""Where adaptivity must show: runs whose best (n, S) differ, adaptive beside fixed pairs and the papers' selectors.

    .venv/bin/python -m integration_tests.benchmarks.scenarios [--simulate] [--small] [--records FOLDER]

The list is drawn by a committed seed (scenarios_drawn.py). First all of it is simulated on made-up machines
(scenarios_priced.py): that gives the one fixed pair that is best over the list. Then every scenario is measured on
ranks over its link. Pairs that the calibrated machine predicts within 1.3 of the best are screened, as one pair for all
sizes. The best of them runs again in fresh rounds, in turns with the adaptive tuner, the list's pair and the others:
the least of many noisy medians flatters itself. A round is a step of each size on each side, each after one of its own
kind that does not count.

--check fails where adaptive takes more of the best fixed pair than it may (1.01 in the median over scenarios, 1.04 at
the 90th percentile, 1.08 at worst), or gains less than 0.9 of what is simulated over the list's pair.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import launch, records, stolen  # noqa: E402
from integration_tests.benchmarks.measuring.stats import pair_ratios  # noqa: E402
from integration_tests.benchmarks.scenarios.scenarios_drawn import COUNT, LINKS, SEED, Drawn, draw  # noqa: E402
from integration_tests.benchmarks.scenarios.scenarios_priced import (  # noqa: E402
    Priced,
    best_over_list,
    geometric,
    group_of,
    hypotheses,
    made_up,
    name_of,
)

MARKS = {"median": 1.01, "p90": 1.04, "worst": 1.08}  # adaptive over the best fixed pair of a scenario
LEAST_OF_GAIN = 0.9  # of what is simulated over the pair that is best over the list
SMALL_COUNT, SMALL_TOKENS = 6, 1024


# ---- simulated -----------------------------------------------------------------------------------------------------


def simulate(drawn: list[Drawn], ranks: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A line of each scenario; by group the list's pair, and what adaptive gains over it."""
    priced = [Priced(made_up(LINKS[one.link]), one, ranks) for one in drawn]
    fixed = best_over_list(priced)
    lines = []
    for one in priced:
        totals = one.totals()
        if group_of(one.drawn) in fixed:
            totals["list's pair"] = one.total(one.fixed(fixed[group_of(one.drawn)]))
        lines.append(
            {
                **one.drawn.as_dict(),
                "picks": {str(tokens): name_of(pair) for tokens, pair in one.adaptive.items()},
                "best_fixed": name_of(one.best_fixed),
                "adaptive_s": totals["adaptive"],
                "over_adaptive": {name: took / totals["adaptive"] for name, took in totals.items()},
            }
        )
    held = {name: list(counts) for name, counts in hypotheses(priced).items()}
    pairs = {group: name_of(pair) for group, pair in fixed.items()}
    return lines, {"pairs": pairs, "hypotheses": held, **gains(lines)}


def gains(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind and side, what it takes over adaptive: geometric mean, least and most over scenarios."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(line["kind"] for line in lines):
        sides: dict[str, list[float]] = {}
        for line in lines:
            for name, ratio in line["over_adaptive"].items() if line["kind"] == kind else ():
                sides.setdefault(name, []).append(ratio)
        found[kind] = {
            name: {"mean": geometric(each), "least": min(each), "most": max(each), "count": len(each)}
            for name, each in sides.items()
            if name != "adaptive"
        }
    return found


def show(line: dict[str, Any]) -> str:
    """A scenario in one line."""
    picks = ", ".join(f"{tokens}: {pair}" for tokens, pair in line["picks"].items())
    over = "  ".join(f"{name} {ratio:.3f}" for name, ratio in line["over_adaptive"].items() if name != "adaptive")
    return f"{line['name']:<16} {line['link']:>8} x{line['skew']:<2}  {picks}  (over adaptive: {over})"


# ---- measured ------------------------------------------------------------------------------------------------------


def measure(
    drawn: list[Drawn], link: str, options: argparse.Namespace, progress: launch.Progress, pairs: dict[str, Any]
) -> list[dict[str, Any]]:
    """The scenarios of one link, in one process group. pairs: the list's, by group."""
    names = ("pairs", "screen", "steps", "seed", "gemm", "calibrate_s")
    plan = {
        "cases": [one.as_dict() for one in drawn],
        "list": {group: [pair.num_chunks, pair.restore_input, pair.restore_pre_activation, pair.wgrad]
                 for group, pair in pairs.items()},
        "most_stolen": options.stolen,
        "quiet_timeout_s": options.quiet_timeout,
        **{name: getattr(options, name) for name in names},
    }  # fmt: skip
    found, _ = launch.ask(
        HERE / "scenarios_rank.py",
        plan,
        world_size=options.ranks,
        rate=link,
        deadline_s=7200,
        progress=progress,
        title=link,
    )
    return [judge(line) for line in found]


def judge(line: dict[str, Any]) -> dict[str, Any]:
    """Adds each side's time over adaptive's, over rounds, each weighed as a run: as many tokens in each size."""
    largest = max(line["tokens"])
    steps = {tokens: largest / int(tokens) for tokens in line["seconds"]["adaptive"]}
    rounds = {
        name: [sum(one) for one in zip(*([steps[t] * s for s in each] for t, each in by_size.items()), strict=True)]
        for name, by_size in line["seconds"].items()
    }
    line["quartiles_over_adaptive"] = {
        name: pair_ratios(took, rounds["adaptive"]) for name, took in rounds.items() if name != "adaptive"
    }
    line["over_adaptive"] = {name: found["median"] for name, found in line["quartiles_over_adaptive"].items()}
    return line


def brief(line: dict[str, Any]) -> dict[str, Any]:
    """What the committed record has of a line: ratios, whose seconds and pairs the raw one has."""
    return {
        "name": line["name"],
        "link": line["link"],
        "skew": line["skew"],
        "kind": line["kind"],
        "picks": ", ".join(f"{tokens}: {pair}" for tokens, pair in line["picks"].items()),
        "best_fixed": line["best_fixed"],
        "over_adaptive": line["over_adaptive"],
        "best_fixed_over_adaptive": line["quartiles_over_adaptive"]["best fixed"],
    }


def over_best_fixed(lines: list[dict[str, Any]]) -> dict[str, float]:
    """What adaptive takes of each scenario's best fixed pair, by the names of MARKS."""
    beside = sorted(1 / line["over_adaptive"]["best fixed"] for line in lines)
    return {
        "median": statistics.median(beside),
        "p90": beside[min(len(beside) - 1, int(0.9 * len(beside)))],
        "worst": beside[-1],
    }


def gains_too_little(gain: dict[str, float]) -> bool:
    """Whether what is measured over the list's pair is less than it must be of what is simulated."""
    return gain["measured"] - 1 < LEAST_OF_GAIN * (gain["simulated"] - 1)


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Adaptive over each scenario's best fixed pair; what others take over adaptive; measured gain over simulated."""
    found: dict[str, Any] = {
        "scenarios": len(lines),
        "over_best_fixed": over_best_fixed(lines),
        "over_adaptive": gains(lines),
        "gain": {},
    }
    for kind in dict.fromkeys(line["kind"] for line in lines):
        both = [
            (line["over_adaptive"]["list's pair"], line["predicted_over_adaptive"]["list's pair"])
            for line in lines
            if line["kind"] == kind and "list's pair" in line["over_adaptive"]
        ]
        if both:
            measured, said = (geometric(column) for column in zip(*both))
            found["gain"][kind] = {"measured": measured, "simulated": said}
    return found


def missed(found: dict[str, Any]) -> list[str]:
    """Marks that are not reached."""
    short = [
        f"adaptive over the best fixed pair, {name}: {found['over_best_fixed'][name]:.3f}, at most {most:.2f}"
        for name, most in MARKS.items()
        if found["over_best_fixed"][name] > most
    ]
    for kind, gain in found["gain"].items():
        if gains_too_little(gain):
            short.append(
                f"gain over the list's pair, {kind}: {gain['measured']:.3f}, simulated {gain['simulated']:.3f}"
            )
    return short


def lines_of(found: dict[str, Any], what: str) -> list[str]:
    """Gains as text."""
    return [
        f"{what}, {kind}: {name} over adaptive {each['mean']:.3f} [{each['least']:.3f}, {each['most']:.3f}]"
        for kind, sides in found.items()
        if isinstance(sides, dict)
        for name, each in sides.items()
        if isinstance(each, dict) and "mean" in each
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--simulate", action="store_true", help="the whole list, and nothing is measured")
    parser.add_argument("--small", action="store_true", help=f"{SMALL_COUNT} scenarios, at most {SMALL_TOKENS} tokens")
    parser.add_argument("--smoke", action="store_true", help="one of each kind, tiny: does it run?")
    parser.add_argument("--links", nargs="+", help="of the list, those over these links")
    parser.add_argument("--most-tokens", type=int, default=16384, help="larger batches shrink, with the others")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gemm", default="native")
    parser.add_argument("--seed", type=int, default=7, help="of tokens and weights; that of the list is committed")
    parser.add_argument("--screen", type=int, default=3, help="rounds over the fixed pairs")
    parser.add_argument("--pairs", type=int, default=9, help="rounds of all sides")
    parser.add_argument("--steps", type=int, default=30, help="of each size that the tuner trains at least")
    parser.add_argument("--calibrate-s", type=float, default=4.0)
    parser.add_argument("--quiet-timeout", type=float, default=20.0, metavar="S", help="of rounds that are run again")
    parser.add_argument("--check", action="store_true", help="fail where less is reached than must be")
    parser.add_argument("--records", type=Path)
    stolen.arguments(parser)
    options = parser.parse_args()
    if options.small:
        options.most_tokens, options.pairs, options.screen = SMALL_TOKENS, 6, 2
    if options.smoke:
        options.most_tokens, options.pairs, options.screen, options.steps, options.calibrate_s = 128, 2, 1, 4, 0.2
    return options


def chosen(options: argparse.Namespace) -> list[Drawn]:
    """Of the list what is to be measured."""
    drawn = [one.at_most(options.most_tokens) for one in draw()]
    if options.links:
        drawn = [one for one in drawn if one.link in options.links]
    if options.smoke:
        return [next(one for one in drawn if one.kind == kind) for kind in dict.fromkeys(one.kind for one in drawn)]
    return drawn[:SMALL_COUNT] if options.small else drawn


def keep(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Writes the record, where one was asked for."""
    if options.records:
        records.write(options.records / "scenarios.json", record)


def main() -> int:
    """Simulate the list, measure what was asked for, print a line of each scenario and write one record."""
    options = arguments()
    progress = launch.Progress()
    whole = draw()
    lines, found = simulate(whole, options.ranks)
    for line in lines:
        progress.line(show(line))
    pairs = ", ".join(f"{group} {pair}" for group, pair in found["pairs"].items())
    progress.line(f"{COUNT} scenarios of seed {SEED}; best over the list: {pairs}")
    for text in lines_of(found, "simulated"):
        progress.line(text)
    for name, (held, of) in found["hypotheses"].items():
        progress.line(f"simulated: {name}: in {held} of {of}")
    simulated = {"summary": found, **({"lines": lines} if options.simulate else {})}  # --simulate makes them again
    record: dict[str, Any] = {"seed": SEED, "ranks": options.ranks, "simulated": simulated}
    short: list[str] = []
    if not options.simulate:
        drawn = chosen(options)
        fixed = best_over_list([Priced(made_up(LINKS[one.link]), one, options.ranks) for one in whole])
        measured: list[dict[str, Any]] = []
        for link in dict.fromkeys(one.link for one in drawn):
            among = [one for one in drawn if one.link == link]
            found_here = measure(among, "none" if options.smoke else link, options, progress, fixed)
            for line in found_here:
                progress.line(show(line))
            measured += found_here
            record["summary"], record["lines"] = summary(measured), [brief(line) for line in measured]
            record["in_full"] = measured
            keep(options, record)  # what is done
        over = record["summary"]["over_best_fixed"]
        progress.line("adaptive over the best fixed pair: " + ", ".join(f"{k} {v:.3f}" for k, v in over.items()))
        for text in lines_of(record["summary"]["over_adaptive"], "measured"):
            progress.line(text)
        for kind, gain in record["summary"]["gain"].items():
            progress.line(
                f"gain over the list's pair, {kind}: {gain['measured']:.3f} (simulated {gain['simulated']:.3f})"
            )
        short = missed(record["summary"])
    keep(options, record)
    if short and options.check:
        print("Below what is promised:", *short, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
