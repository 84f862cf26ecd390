# SPDX-License-Identifier: Apache-2.0
"""Ranks of tuner.py. Each scenario runs every mode, and measures every n and the choices of the papers' models."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sluice.adapters.torch import Context, ContextOptions, EpGroup
from sluice.config import TunerOptions

from integration_tests.benchmarks.measuring.parts import slowest
from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.measuring.stolen import Stolen
from integration_tests.benchmarks.tuner.tuner_rounds import Rounds
from integration_tests.benchmarks.tuner.tuner_scenario import (
    OPEN,
    SIZES,
    Choice,
    Scenario,
    candidates,
    choices_of_models,
    key_of,
    predictions,
)

# ---- calibration ----

# Processors of rented machines run at two speeds, for minutes each, because other guests share them. A prediction
# from a calibration at one speed is not valid for steps at the other speed. So every scenario is measured between two
# calibrations. If both predict the same for its layer, the machine was steady, and the first prediction is compared
# with the measurement. Otherwise the scenario is measured again after the second calibration.
TINY: dict[str, Any] = {"M": 64, "H": 64, "skew": 1.0}
SAMPLES = 9


def host_seconds(rank: Rank, T: int, E: int, K: int) -> Callable[[], float]:
    """A function that measures the seconds of a step outside of its passes (autograd, Python and the end of the
    barrier), on the slowest rank: of a layer with almost no work, in one chunk, but with as many tokens, routes and
    parameters for Python and autograd. Collective."""
    scenario = Scenario(rank.plan, {**TINY, "T": T, "E": E, "K": K})
    layer = scenario.layer(rank.context(gemm=rank.plan["gemm"]), Choice(1))

    def sample() -> float:
        before = layer.context.stats()["pass_ns"]
        whole = scenario.step(layer)
        whole, passes = slowest([whole, (layer.context.stats()["pass_ns"] - before) / 1e9])
        return max(whole - passes, 0.0)

    for _ in range(2):  # warm-up
        sample()
    return sample


class Calibrated(NamedTuple):
    """A machine, the host's seconds of a step around its calibration, and the function that measured them."""

    text: bytes
    host_s: float
    host: Callable[[], float]


def machine_of(scenario: Scenario, group: EpGroup, folder: str) -> bytes:
    """The machine that all modes of this scenario use, measured now or read from the cache. Collective."""
    options = TunerOptions(mode="adaptive", calibrate=scenario.plan["calibrate_s"], cache=folder)
    context = Context(group, ContextOptions(gemm=scenario.plan["gemm"], tuner=options))
    scenario.layer(context, OPEN)
    context.close()
    files = sorted(Path(folder).glob("machine-*.json"), key=lambda p: p.stat().st_mtime)
    key = f"M {scenario.case['M']}, H {scenario.case['H']}\n".encode()
    texts = [file.read_bytes() for file in files]
    return next(text for text in reversed(texts) if key in text).split(b"\n", 2)[2]


def calibrated(scenario: Scenario, group: EpGroup, host: Callable[[], float], folder: str | None = None) -> Calibrated:
    """Calibrates the machine. With a folder, the modes use this calibration too. Collective."""
    before = [host() for _ in range(SAMPLES)]
    if folder is None:
        with tempfile.TemporaryDirectory() as own:
            text = machine_of(scenario, group, own)
    else:
        text = machine_of(scenario, group, folder)
    return Calibrated(text, statistics.median(before + [host() for _ in range(SAMPLES)]), host)


def difference(a: Calibrated, b: Calibrated, case: dict[str, Any], world_size: int, budget: int | None) -> float:
    """The relative difference of two calibrations' predictions for the scenario's layer, as the median over n."""
    sizes = [Choice(n) for n in SIZES]
    one, other = (predictions(json.loads(each.text), case, world_size, sizes, budget) for each in (a, b))
    return statistics.median(abs(other[n]["schedule"] / one[n]["schedule"] - 1) for n in one)


# ---- modes and rounds ----

MODES = ("adaptive", "profile", "model")
MOST = 4  # a mode may take this many times plan["steps"] steps if its races have not ended


def chosen_by(context: Context) -> Choice:
    """The last decision of the context's tuner."""
    decisions = context.decisions()
    if not decisions:
        return Choice(1)
    last = decisions[-1]
    if last["restore_input"] is None:
        return Choice(last["num_chunks"])
    wgrad = ("deferred", "per_chunk")[last["wgrad_mode"]]
    kept = last["kept_chunks"] if last["kept_chunks"] < last["num_chunks"] else 0
    return Choice(last["num_chunks"], last["restore_input"], last["restore_pre_activation"], wgrad, kept)


def run_modes(
    scenario: Scenario, group: EpGroup, folder: str, budget: int | None
) -> tuple[dict[str, str], set[Choice]]:
    """The settled choice of each mode, after at least plan["steps"] ordinary steps."""
    plan, found, choices = scenario.plan, {}, set()
    for mode in MODES:
        calibrate = None if mode == "profile" else plan["calibrate_s"]
        options = TunerOptions(mode=mode, calibrate=calibrate, cache=folder)
        context = Context(group, ContextOptions(gemm=plan["gemm"], tuner=options, memory_budget=budget))
        layer = scenario.layer(context, OPEN)
        steps = 0
        while steps < plan["steps"] or (steps < MOST * plan["steps"] and not context.stats()["last_is_settled"]):
            scenario.step(layer)  # all ranks settle on the same choice
            steps += 1
        choice = chosen_by(context)
        choices.add(choice)
        found[mode] = key_of(choice)
        context.close()
    return found, choices


def measure(
    rounds: Rounds, scenario: Scenario, machine: Calibrated, budget: int | None, rank: Rank
) -> tuple[dict[str, Any], Calibrated, Calibrated]:
    """The results of rounds between two calibrations, and these calibrations. If the calibrations differ, the rounds
    run again after the later one, for at most steady_s. The times of steps do not decide this."""
    plan, left, repeated = scenario.plan, scenario.plan["steady_s"], 0
    while True:
        began = time.perf_counter()
        stolen = Stolen(plan["most_stolen"], plan["quiet_timeout_s"])
        found = rounds.run(plan["pairs"], stolen)
        later = calibrated(scenario, rank.group, machine.host)
        off = difference(machine, later, scenario.case, rank.world_size, budget)
        left -= slowest([time.perf_counter() - began])[0]
        if off <= plan["steady"] or left <= 0:
            break
        machine, repeated = later, repeated + 1
    rounds.close()
    found |= {"apart": off, "is_steady": off <= plan["steady"], "repeated": repeated, "stolen": stolen.found()}
    return found, machine, later


def main() -> None:
    rank = Rank()
    plan, group, W = rank.plan, rank.group, rank.world_size
    lines = []
    hosted = {tuple(case[name] for name in "TEK") for case in plan["cases"]}
    hosts = {(T, E, K): host_seconds(rank, T, E, K) for T, E, K in sorted(hosted)}
    latest: dict[tuple[int, ...], Calibrated] = {}
    with tempfile.TemporaryDirectory() as folder:  # a new cache, because every link is a different machine
        for number, case in enumerate(plan["cases"]):
            scenario, shape = Scenario(plan, case), tuple(case[name] for name in "MHTEK")
            if shape not in latest:
                latest[shape] = calibrated(scenario, group, hosts[shape[2:]], folder)
            among, budget = candidates(case, latest[shape].text, W)
            models = choices_of_models(case, latest[shape].text, W, among, budget)
            modes, choices = run_modes(scenario, group, folder, budget)
            rounds = Rounds(scenario, group, choices | {*models.values()}, budget)
            final, machine, latest[shape] = measure(rounds, scenario, latest[shape], budget, rank)
            found = json.loads(machine.text)
            final |= {"predicted": predictions(found, case, W, among, budget), "host_s": machine.host_s}
            picks = {name: key_of(choice) for name, choice in models.items()}
            picks = {name: key for name, key in picks.items() if key in final["measured"]}  # choices that fit
            lines.append({**case, "modes": modes, "models": picks, **final, "calibration": found})
            rank.report(done=number + 1, of=len(plan["cases"]), name=case["name"])
    rank.leave(lines)


if __name__ == "__main__":
    main()
