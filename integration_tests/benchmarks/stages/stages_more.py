"""Cases of stages.py beside DeepSpeed's over a quiet link: work that is computed, loopback, draws, torch, bubbles.

real        linear layers in place of sleep, one core for each rank
loopback    without a shaped link, where messages cost next to nothing
jitter      what a stage sleeps is drawn (lognormal, sigma 0.4), the same for all sides
slow-stage  one stage takes 1.5 times as long
stall       what stage 1 sends waits for 50 ms now and then, at the same times for all sides
torch       torch's Schedule1F1B on gloo beside get_schedule_class("SluiceSingle")
bubbles     eight ranks, F = B = W slept: the bubble of each policy, from its events

jitter, slow-stage and stall have a third side: "fixed", which runs 1F1B as an order that binds, with messages beside
the computation and as much in flight. Sluice may take at most 1.03 times as long. Of stock over Sluice they want 0.97
of what is simulated with the same draws, real 0.88 of what is simulated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from sluice.planning import batches

from integration_tests.benchmarks.measuring import launch
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles
from integration_tests.benchmarks.stages import stages_simulated
from integration_tests.net.namespaces import parse_rate

HERE = Path(__file__).resolve().parent
HEADERS = 1.04  # of Ethernet, IP and TCP, which the shaper counts
LOOPBACK_UNIT_S = 0.28
MOST_OVER_FIXED = 1.03
POINTS = 1.5
OP_S = 0.05  # F = B = W of the bubbles, of each chunk


class Case(NamedTuple):
    """p stages, L in flight, a message that takes c of f + b (0: loopback); of stock ÷ Sluice the least that is wanted,
    and the share of what is simulated (0: nothing is)."""

    stages: int
    in_flight: int
    share: float
    least: float
    of_simulated: float = 0.0
    program: str = "stages_rank.py"
    work: dict[str, Any] = {}
    has_fixed: bool = False


CASES = {
    "real": Case(2, 4, 0.25, 1.25, 0.88, work={"computes": True}),
    "loopback": Case(2, 4, 0.0, 0.98),
    "jitter": Case(4, 4, 0.25, 1.0, 0.97, work={"sigma": 0.4}, has_fixed=True),
    "slow-stage": Case(4, 4, 0.25, 1.0, 0.97, work={"slow": {"1": 1.5}}, has_fixed=True),
    "stall": Case(4, 4, 0.25, 1.0, 0.97, work={"stalls": {"rank": 1}}, has_fixed=True),
    "torch": Case(2, 4, 0.25, 1.1, program="stages_torch_rank.py"),
}
RANKS = 8  # of the bubbles
VIRTUAL = {"1f1b": 1, "zero_bubble": 1, "looped": 2, "v": 2}
APART = ("zero_bubble", "v")
NAMES = (*CASES, "bubbles")


def run_case(name: str, options: argparse.Namespace, progress: launch.Progress) -> dict[str, Any]:
    """What was measured of one of them."""
    return _bubbles(options, progress) if name == "bubbles" else _compared(name, options, progress)


def _compared(name: str, options: argparse.Namespace, progress: launch.Progress) -> dict[str, Any]:
    case = CASES[name]
    message_s = options.megabytes * 2**20 * 8 * HEADERS / parse_rate(options.link)
    unit = message_s / case.share if case.share else LOOPBACK_UNIT_S
    sides: dict[str, Any] = {"stock": None, "sluice": {"in_flight": case.in_flight}}
    if case.has_fixed:
        sides["fixed"] = {"policy": "1f1b", "in_flight": case.in_flight}
    plan = {
        **{"in_flight": case.in_flight, "stages": case.stages, "forward_s": unit / 3, "backward_s": 2 * unit / 3},
        **{"elements": int(options.megabytes * 2**18), "micro_batches": options.micro_batches, "pairs": options.pairs},
        **{"sides": sides, **_work(case, options)},
    }
    found, link = launch.ask(
        HERE / case.program,
        plan,
        world_size=case.stages,
        rate=options.link if case.share else "none",
        deadline_s=1800,
        progress=progress,
        title=name,
        unit="pairs",
    )
    told: dict[str, Any] = {
        "case": {"stages": case.stages, "in_flight": case.in_flight, "share": case.share, **case.work},
        "link": link,
        "unit_s": found["unit_s"] or unit,
        **{f"{side}_s": quartiles(found[f"{side}_s"]) for side in sides if f"{side}_s" in found},
        "speedup": pair_ratios(found["stock_s"], found["sluice_s"]),
        **{key: found[key] for key in ("policy", "most_in_flight", "messages_sent", "largest_loss_difference")},
        "wanted": case.least,
    }
    if case.of_simulated:
        ran = {**plan, "forward_s": told["unit_s"] / 3, "backward_s": 2 * told["unit_s"] / 3}  # what real measured
        told["simulated"] = stages_simulated.speedup(ran, message_s, found["policy"])
        told["wanted"] = max(case.least, case.of_simulated * told["simulated"]["speedup"])
    if case.has_fixed:
        told["over_fixed"] = pair_ratios(found["sluice_s"], found["fixed_s"])
        told["most_over_fixed"] = MOST_OVER_FIXED
    return told


def _work(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    stalls = case.work.get("stalls")
    return {**case.work, "stalls": {**stalls, "link": options.link}} if stalls else case.work


def _bubbles(options: argparse.Namespace, progress: launch.Progress) -> dict[str, Any]:
    policies = [{"name": name, "num_virtual": v, "apart": name in APART} for name, v in VIRTUAL.items()]
    plan = {"policies": policies, "op_s": OP_S, "micro_batches": options.micro_batches, "batches": options.pairs}
    found, link = launch.ask(
        HERE / "stages_bubble_rank.py",
        plan,
        world_size=RANKS,
        rate="none",
        deadline_s=1800,
        progress=progress,
        title="bubbles",
    )
    told = {
        name: {
            **each,
            "bubble": quartiles(each["bubble"]),
            "simulated": simulated(name, options.micro_batches),
            "points": POINTS,
        }
        for name, each in found.items()
    }
    return {"case": {"stages": RANKS, "op_s": OP_S}, "link": link, "policies": told}


def simulated(policy: str, micro_batches: int) -> float:
    """The bubble without messages: with 16 micro-batches the published 30.4 % of 1F1B, 12.7 % and 17.9 %."""
    parts = [OP_S] * (RANKS * VIRTUAL[policy])
    batch = batches.Batch(RANKS, micro_batches, parts, parts, parts, policy=policy, num_virtual=VIRTUAL[policy])
    return batches.predict(batch).bubble


def show(name: str, found: dict[str, Any]) -> str:
    """A case in one line, the bubbles in several."""
    if name == "bubbles":
        lines = []
        for policy, each in found["policies"].items():
            lines.append(
                f"bubble of {policy:<12} {100 * each['bubble']['median']:.1f} % (simulated "
                f"{100 * each['simulated']:.1f} %, with its times {100 * each['predicted']:.1f} %), "
                f"{each['most_in_flight']} in flight, {each['most_held']} held"
            )
        return "\n".join(lines)
    ratio, fixed, simulated = found["speedup"], "", ""
    if "simulated" in found:
        simulated = f"simulated {found['simulated']['speedup']:.2f}, "
    if "over_fixed" in found:
        fixed = f"; over a fixed order {found['over_fixed']['median']:.3f} (at most {MOST_OVER_FIXED})"
    return (
        f"{name:<10} p {found['case']['stages']}, L {found['case']['in_flight']}: stock "
        f"{found['stock_s']['median']:.2f} s, Sluice {found['sluice_s']['median']:.2f} s, {ratio['median']:.2f}x "
        f"[{ratio['q1']:.2f} .. {ratio['q3']:.2f}] ({simulated}wanted {found['wanted']:.2f}; {found['policy']}){fixed}"
        f"; losses differ by {found['largest_loss_difference']:.0e}"
    )


def is_short(name: str, found: dict[str, Any]) -> bool:
    """Whether less is reached than wanted."""
    if name == "bubbles":
        return any(
            abs(each["bubble"]["median"] - each["simulated"]) * 100 > POINTS for each in found["policies"].values()
        )
    over = found.get("over_fixed", {"median": 0.0})["median"]
    return found["speedup"]["median"] < found["wanted"] or over > MOST_OVER_FIXED
