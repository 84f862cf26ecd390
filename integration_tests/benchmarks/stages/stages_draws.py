# SPDX-License-Identifier: Apache-2.0
"""Random draws of the pipeline benchmarks: how long a stage sleeps, and when a link stalls.

A draw depends on the batch, stage, micro-batch and direction. It is the same for every side and for the simulator.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

STALL_S = 0.05
MEAN_GAP_S = 0.4


def seconds(plan: Mapping[str, Any], batch: int, stage: int, direction: str, micro_batch: int) -> float:
    """The seconds that a stage sleeps. plan: forward_s, backward_s; "slow" {stage: factor}; "sigma" of a lognormal
    factor with mean 1."""
    sigma = plan.get("sigma", 0.0)
    draw = random.Random(f"{batch} {stage} {direction} {micro_batch}").lognormvariate(-(sigma**2) / 2, sigma)
    return plan[f"{direction}_s"] * plan.get("slow", {}).get(str(stage), 1.0) * (draw if sigma else 1.0)


def gaps(batch: int) -> Iterator[float]:
    """Seconds between the stalls of a batch."""
    draws = random.Random(f"{batch} stall")
    while True:
        yield draws.expovariate(1 / MEAN_GAP_S)


def delayed(batch: int, begin_s: float, seconds: float) -> float:
    """The duration of a message that begins at begin_s of a batch and would take `seconds` without stalls."""
    now, left, stall_s = begin_s, seconds, 0.0
    for gap in gaps(batch):
        stall_s += gap
        moves = min(left, max(0.0, stall_s - now))
        now, left = now + moves, left - moves
        if left <= 0:
            break
        stall_s += STALL_S
        now = max(now, stall_s)
    return now - begin_s
