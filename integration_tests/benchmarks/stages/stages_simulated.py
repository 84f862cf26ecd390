# SPDX-License-Identifier: Apache-2.0
"""Simulates the cases of stages.py with the same random draws, over a network like the measured one.

A rank has one network card (net/namespaces.py), which the messages to both its neighbours share. Stock's sends are
rendezvous sends, as with gloo beyond a socket's buffer. Sluice's sends are buffered, as over tcp.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sluice.planning import batches

# ---- random draws: how long a stage sleeps, and when a link stalls ----

# A draw depends on the batch, stage, micro-batch and direction. It is the same for every side and for the simulator.

STALL_S = 0.05
MEAN_GAP_S = 0.4


def drawn_seconds(plan: Mapping[str, Any], batch: int, stage: int, direction: str, micro_batch: int) -> float:
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


# ---- the simulation ----

DIRECTIONS = ("forward", "backward")


def speedup(plan: Mapping[str, Any], message_s: float, policy: str) -> dict[str, float]:
    """Medians over the measured batches (all but batch 0): seconds of stock and of Sluice, and stock ÷ Sluice. plan: of
    the ranks. policy: the active policy."""
    drawn = any(plan.get(name) for name in ("sigma", "stalls"))
    numbers = range(1, plan["pairs"] + 1) if drawn else range(1, 2)
    stock = [_seconds(plan, message_s, "deepspeed", 0, number) for number in numbers]
    own = [_seconds(plan, message_s, policy, plan["in_flight"], number) for number in numbers]
    return {
        "stock_s": round(statistics.median(stock), 4),
        "sluice_s": round(statistics.median(own), 4),
        "speedup": round(statistics.median(a / b for a, b in zip(stock, own)), 4),
    }


def _seconds(plan: Mapping[str, Any], message_s: float, policy: str, in_flight: int, number: int) -> float:
    stages = plan["stages"]
    batch = batches.Batch(
        stages,
        plan["micro_batches"],
        [plan["forward_s"]] * stages,
        [plan["backward_s"]] * stages,
        message_seconds=[message_s] * stages,
        policy=policy,
        in_flight=in_flight,
        rendezvous=policy == "deepspeed",
        shares_cards=True,
        op_seconds=_drawn(plan, number),
    )
    return batches.predict(batch).seconds


def _drawn(plan: Mapping[str, Any], number: int) -> Callable[[str, int, int, float, float], float]:
    stalled = plan["stalls"]["rank"] if plan.get("stalls") else None

    def op_seconds(op: str, stage: int, micro_batch: int, begin_s: float, usual_s: float) -> float:
        if op in DIRECTIONS:
            return drawn_seconds(plan, number, stage, op, micro_batch)
        return delayed(number, begin_s, usual_s) if stage == stalled else usual_s

    return op_seconds
