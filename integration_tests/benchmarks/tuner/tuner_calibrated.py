# SPDX-License-Identifier: Apache-2.0
"""Calibrates machines for tuner.py, and checks whether they are still the same after a measurement.

Processors of rented machines run at two speeds, for minutes each, because other guests share them. A prediction from a
calibration at one speed is not valid for steps at the other speed. So every scenario is measured between two
calibrations. If both predict the same for its layer, the machine was steady, and the first prediction is compared with
the measurement. Otherwise the scenario is measured again after the second calibration.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sluice.adapters.torch import Context, ContextOptions, EpGroup
from sluice.config import TunerOptions

from integration_tests.benchmarks.measuring.parts import slowest
from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.tuner.tuner_scenario import OPEN, SIZES, Choice, Scenario, predictions

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
