"""How good the tuner's choices and predictions are: regret against exhaustive search, error, and what tuning costs.

    .venv/bin/python -m integration_tests.benchmarks.tuner [--links none 1gbit 0.2gbit] [--ranks 2] [--smoke]

Per scenario (shape, link, skew) and mode the tuner trains until it has settled. Then every n is screened, and the
best five and all choices run in fresh rounds, in turns. Some scenarios have a memory budget, a share of the way from
the leanest plan to the one that keeps everything: there every n x policy that fits is a candidate, and choices are
plans (offloading, which on a CPU is keeping, and weight gradients per chunk only run where a mode chose them).
Regret is the median over rounds of the choice's time over that of the best candidate, minus 1; beside it stands what
the best says of itself in odd and even rounds. The n, or plan, that MPMoE's phases and MPipeMoE's eq. 10 would take
from the same calibration stand beside, and so do baselines that run in the same rounds: one chunk, a fixed number,
FasterMoE's split by destination and PipeMoE's pipeline (tuner_rounds.py). Predicted times of passes, lanes and overlap
are recorded beside the measured ones. A step also takes what a tiny layer's takes beside its passes, autograd and
Python, measured at calibration (reference.py): predictions of steps have that added. Every scenario is measured between
two calibrations (tuner_calibrated.py): the error that is judged is of those in which both say the same within --steady;
that of all, and that of passes alone, stand beside it. --check fails where less is reached than must be.
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
from integration_tests.benchmarks.tuner import error_plot, reference  # noqa: E402

FIXED = 4  # chunks of the baseline that does not choose (tuner_rounds.py)
# T, M, H, E, K; steps stay near or below 100 ms on one core.
SHAPES = {
    "square": (512, 256, 512, 4, 2),
    "wide": (256, 256, 1024, 4, 1),
    "long": (2048, 128, 256, 8, 2),
    "many": (512, 256, 256, 16, 4),
    "short": (96, 256, 512, 4, 2),
}
SMOKE = {"smoke": (64, 32, 64, 4, 2)}
SKEWS = (1.0, 1.6)
# (shape, share): 0 is the leanest plan's bytes, 1 those of keeping everything at one chunk.
BUDGETS = (("square", 0.5), ("short", 0.2))
# What the summary must reach (issue: "Evidence"): (path, at most).
MARKS = (
    (("regret", "adaptive", "median"), 0.02),
    (("regret", "adaptive", "worst"), 0.10),
    (("error_while_steady", "median"), 0.05),
    (("error_while_steady", "p90"), 0.12),
)
# Predicted over measured steps, by the clock on the wall, but "error_of_passes".
ERRORS = {
    "error_while_steady": "error where the machine stayed as calibrated",
    "error": "error of all",
    "error_without_host": "the same without the host's part of a step",
    "error_of_passes": "error of passes alone",
    "error_without_drift": "error of all, the machine as a reference found it beside the measurement",
}
SMOKE_BUDGETS = (("smoke", 0.5),)


def cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The scenarios of one link: 10 without a budget and 2 with one."""
    shapes, skews = (SMOKE, (1.0,)) if options.smoke else (SHAPES, SKEWS)
    found = [(name, skew, None) for name in shapes for skew in skews]
    found += [(name, 1.0, share) for name, share in (SMOKE_BUDGETS if options.smoke else BUDGETS)]
    return [
        {
            "name": f"{name} x{skew:g}" + ("" if share is None else f" {share:g}"),
            **dict(zip("TMHEK", shapes[name], strict=True)),
            "skew": skew,
            "budget_share": share,
        }
        for name, skew, share in found
    ]


def regret(measured: dict[str, list[float]], chosen: int | str) -> float:
    """Median over rounds of the choice against the candidate with the least median."""
    best = min(measured, key=lambda n: statistics.median(measured[n]))
    return statistics.median(a / b for a, b in zip(measured[str(chosen)], measured[best], strict=True)) - 1


def repeatability(measured: dict[str, list[float]]) -> float:
    """The best n in odd rounds against itself in even ones."""
    best = measured[min(measured, key=lambda n: statistics.median(measured[n]))]
    pairs = [a / b for a, b in zip(best[::2], best[1::2], strict=False)]
    return abs(statistics.median(pairs) - 1)


def judge(line: dict[str, Any]) -> dict[str, Any]:
    """Adds regrets and errors to a scenario's record."""
    measured = line["measured"]
    line["regret"] = {mode: regret(measured, found["key"]) for mode, found in line["modes"].items()}
    line["regret"] |= {name: regret(measured, n) for name, n in line["models"].items()}
    line["repeatability"] = repeatability(measured)
    both = {n: line["predicted"][n]["schedule"] for n in measured if n in line["predicted"]}
    steps = {n: statistics.median(measured[n]) for n in both}
    # What a tiny layer's step takes beside its passes, at calibration; and the machine as the reference found it beside
    # the rounds (reference.py).
    then, now = line["reference_then"], line["reference_now"]
    line["error"] = {n: (seconds + then["host_s"]) / steps[n] - 1 for n, seconds in both.items()}
    line["error_while_steady"] = line["error"] if line["is_steady"] else {}
    line["error_without_host"] = {n: seconds / steps[n] - 1 for n, seconds in both.items()}
    line["error_of_passes"] = {n: seconds / line["lanes"][n]["passes"] - 1 for n, seconds in both.items()}
    line["error_without_drift"] = {n: (line["predicted_now"][n] + now["host_s"]) / steps[n] - 1 for n in both}
    line["drift"] = reference.drift(then, now)
    line["outside_s"] = {n: statistics.median(measured[n]) - line["lanes"][n]["passes"] for n in both}
    line["overlap_error"] = {
        n: line["predicted"][n]["overlap"] - line["lanes"][n]["overlap"] for n in line["error"] if runs_beside(n)
    }
    line["over_adaptive"] = {name: ratio(line, seconds) for name, seconds in sides_of(line).items()}
    return line


def runs_beside(key: str) -> bool:
    """With one chunk nothing does."""
    return key.split("/")[0] != "1"


def sides_of(line: dict[str, Any]) -> dict[str, list[float]]:
    """Baselines by name, whatever their n."""
    found = {" ".join(word for word in name.split() if not word.isdigit()): s for name, s in line["baselines"].items()}
    if line["budget_share"] is None:
        found |= {"unsplit": line["measured"]["1"], "fixed n": line["measured"][str(FIXED)]}
    return found


def ratio(line: dict[str, Any], seconds: list[float]) -> float:
    """Median over rounds of a baseline's time over that of what the adaptive tuner chose."""
    chosen = line["measured"][line["modes"]["adaptive"]["key"]]
    return statistics.median(a / b for a, b in zip(seconds, chosen, strict=True))


def quantile(values: list[float], share: float) -> float:
    """By the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1))]


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all scenarios."""
    names = dict.fromkeys(name for line in lines for name in line["regret"])
    budgets = [line for line in lines if line["budget_share"] is not None]
    errors = {name: [abs(error) for line in lines for error in line[name].values()] for name in ERRORS}
    drifts = {name: [line["drift"][name] for line in lines] for name in ("gemm", "exchange")}
    overlaps = [abs(error) for line in lines for error in line["overlap_error"].values()]
    pairs = [(line["predicted"][n], line["lanes"][n]) for line in lines for n in line["error"]]
    sides = dict.fromkeys(name for line in lines for name in line["over_adaptive"])
    stats = [line["modes"]["adaptive"]["stats"] for line in lines]
    return {
        "scenarios": len(lines),
        "regret": {
            name: {
                "median": statistics.median(line["regret"][name] for line in lines if name in line["regret"]),
                "worst": max(line["regret"][name] for line in lines if name in line["regret"]),
            }
            for name in names
        },
        "under_budget": {
            "scenarios": len(budgets),
            "adaptive_median": statistics.median(line["regret"]["adaptive"] for line in budgets) if budgets else None,
            "adaptive_worst": max((line["regret"]["adaptive"] for line in budgets), default=None),
        },
        "repeatability_median": statistics.median(line["repeatability"] for line in lines),
        **{
            name: {"median": statistics.median(each), "p90": quantile(each, 0.9), "count": len(each)} if each else None
            for name, each in errors.items()
        },
        "steady": sum(line["is_steady"] for line in lines),
        "drift": {name: {"least": min(each), "most": max(each)} for name, each in drifts.items()},
        "host_s_median": statistics.median(line["reference_then"]["host_s"] for line in lines),
        "outside_s_median": statistics.median(s for line in lines for s in line["outside_s"].values()),
        # Of what can run beside what; and the lanes by themselves, predicted over measured.
        "overlap_error": {"median": statistics.median(overlaps), "p90": quantile(overlaps, 0.9)} if overlaps else None,
        "lanes_predicted_over_measured": {
            lane: statistics.median(predicted[lane] / max(measured[lane], 1e-9) for predicted, measured in pairs)
            for lane in ("compute", "comm")
        },
        "over_adaptive": {
            name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
            for name in sides
            for values in [[line["over_adaptive"][name] for line in lines if name in line["over_adaptive"]]]
        },
        "race_passes": sum(s["race_passes"] for s in stats),
        **{
            name: sum(s.get(name, 0) for s in stats)
            for name in (
                "excess_seconds",
                "num_switches",
                "switch_seconds",
                "monotonic",
                "not_monotonic",
                "one_valley",
                "not_one_valley",
            )
        },
    }


def show(line: dict[str, Any]) -> str:
    """A line of the table."""
    picks = "  ".join(
        f"{name} n {line['modes'][name]['key'] if name in line['modes'] else line['models'][name]} {100 * value:+.1f} %"
        for name, value in line["regret"].items()
    )
    worst = max(line["error"].values(), key=abs, default=0.0)
    return (
        f"{line['name']:<12} {line['link']:>8}  {picks}  (repeats within {100 * line['repeatability']:.1f} %)  "
        f"predictions off by up to {100 * worst:+.0f} %"
    )


def lines_of(found: dict[str, Any]) -> list[str]:
    """The summary as text."""
    lines = [
        f"regret {name:<9} median {100 * value['median']:.1f} %  worst {100 * value['worst']:.1f} %"
        for name, value in found["regret"].items()
    ]
    overlaps, lanes, drift = found["overlap_error"], found["lanes_predicted_over_measured"], found["drift"]
    for name, what in ERRORS.items():
        error = found[name]
        if error is None:
            lines.append(f"{what}: in no scenario")
            continue
        lines.append(
            f"{what}: median {100 * error['median']:.1f} %, 90th percentile {100 * error['p90']:.1f} % "
            f"({error['count']} pairs of scenario and choice)"
        )
    lines.append(
        f"{found['steady']} of {found['scenarios']} scenarios while the machine stayed as calibrated; "
        f"a step takes {1e3 * found['outside_s_median']:.1f} ms beside its passes, a tiny layer's "
        f"{1e3 * found['host_s_median']:.1f}; between calibration and measurement the reference's GEMM went by "
        f"{drift['gemm']['least']:.2f} to {drift['gemm']['most']:.2f}, its exchange by "
        f"{drift['exchange']['least']:.2f} to {drift['exchange']['most']:.2f}; "
        f"lanes predicted / measured: compute {lanes['compute']:.2f}, comm {lanes['comm']:.2f}"
    )
    if overlaps:
        lines.append(
            f"predicted overlap (share of the shorter lane beside the longer) off by {overlaps['median']:.2f} in the "
            f"median, {overlaps['p90']:.2f} at the 90th percentile"
        )
    for name, value in found["over_adaptive"].items():
        span = f"{value['least']:.2f} .. {value['most']:.2f}"
        lines.append(f"{name:<15} / adaptive: median {value['median']:.2f} [{span}]")
    lines.append(
        f'hypotheses: "the best n grows with the batch" held in {found["monotonic"]} of '
        f'{found["monotonic"] + found["not_monotonic"]} answers with neighbours, "time over n has one valley" in '
        f"{found['one_valley']} of {found['one_valley'] + found['not_one_valley']} races of three n or more"
    )
    return lines


def missed(found: dict[str, Any]) -> list[str]:
    """Marks of the summary that are not reached."""
    short = []
    for path, most in MARKS:
        value: Any = found
        for name in path:
            value = None if value is None else value[name]
        if value is None:
            short.append(f"{' '.join(path)}: in no scenario")
        elif value > most:
            short.append(f"{' '.join(path)} {100 * value:.1f} %, must be at most {100 * most:.0f} %")
    return short


def run_link(options: argparse.Namespace, link: str, progress: launch.Progress) -> list[dict[str, Any]]:
    """All scenarios over one link, in one process group."""
    plan = {
        "cases": cases(options),
        "calibrate_s": options.calibrate,
        "most_stolen": options.stolen,
        "quiet_timeout_s": options.quiet_timeout,
        "steady_s": options.steady_seconds,
        **{key: getattr(options, key) for key in ("gemm", "seed", "steps", "screen", "pairs", "steady")},
    }
    found, _ = launch.ask(
        HERE / "tuner_rank.py",
        plan,
        world_size=options.ranks,
        rate=link,
        deadline_s=3600,
        progress=progress,
        title=link,
    )
    lines = [judge({**line, "link": link}) for line in found]
    for line in lines:
        progress.line(show(line))
    return lines


def row(line: dict[str, Any]) -> dict[str, Any]:
    """What the record's table has of a scenario: choices, each with its regret; errors of predictions."""
    keys = {mode: found["key"] for mode, found in line["modes"].items()} | line["models"]
    errors = [abs(error) for error in line["error"].values()]
    return {
        "name": line["name"],
        "link": line["link"],
        "choices": {name: [keys[name], round(regret, 4)] for name, regret in line["regret"].items()},
        "over_adaptive": {name: round(ratio, 3) for name, ratio in line["over_adaptive"].items()},
        "error": {"median": round(statistics.median(errors), 4), "most": round(max(errors), 4)} if errors else None,
        "is_steady": None if line["is_steady"] else False,
    }


def write_record(options: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """What has been measured so far, and a picture of the predictions' errors."""
    if not options.records:
        return
    fields = {"ranks": options.ranks, "summary": summary(lines), "lines": lines}
    records.write(options.records / "tuner.json", fields, {"lines": [row(line) for line in lines]})
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for n in line["error"]:
            said = line["predicted"][n]["schedule"] + line["reference_then"]["host_s"]
            points.setdefault(line["link"], []).append((statistics.median(line["measured"][n]), said))
    (options.records / "tuner.svg").write_text(
        error_plot.svg(points, "Times of steps that the calibrated model predicts")
    )


def main() -> int:
    """Run the scenarios over each link, print the summary and write one record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--links", nargs="+", default=["none", "4gbit", "1gbit", "0.2gbit"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gemm", default="native", help="named, so that all sides multiply alike")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60, help="steps that a mode trains at least")
    parser.add_argument("--screen", type=int, default=3, help="rounds over every n")
    parser.add_argument("--pairs", type=int, default=9, help="rounds over the best five and the choices")
    parser.add_argument("--calibrate", type=float, default=6.0, help="seconds")
    parser.add_argument("--smoke", action="store_true", help="one tiny scenario: does it run?")
    parser.add_argument("--check", action="store_true", help="fail where less is reached than must be")
    stolen.arguments(parser)
    parser.add_argument(
        "--quiet-timeout", type=float, default=20.0, metavar="S", help="of rounds run again, per scenario (%(default)s)"
    )
    parser.add_argument(
        "--steady",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="calibrations before and behind a scenario that differ by more: it is measured again",
    )
    parser.add_argument("--steady-seconds", type=float, default=40.0, metavar="S", help="of each scenario, for that")
    parser.add_argument("--records", type=Path, help="folder for tuner.json and tuner.svg (predicted beside measured)")
    options = parser.parse_args()
    if options.smoke:
        options.links, options.steps, options.pairs, options.calibrate = ["none"], 80, 4, 0.3
        options.steady_seconds = 1.0
    progress = launch.Progress()
    lines: list[dict[str, Any]] = []
    for link in options.links:
        lines += run_link(options, link, progress)
        write_record(options, lines)  # after each link: what is done is kept
    found = summary(lines)
    for text in lines_of(found):
        progress.line(text)
    short = missed(found)
    if short and options.check:
        print("Below what is promised:", *short, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
