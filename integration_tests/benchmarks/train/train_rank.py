# SPDX-License-Identifier: Apache-2.0
"""Ranks of train.py: two engines, step by step in turns."""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "text_lm"))

from runner import Runner

from integration_tests.benchmarks.measuring import sluice_side
from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles


def main() -> None:
    deepspeed.init_distributed()
    rank = Rank()
    plan, sides = rank.plan, ("stock", "sluice")
    runners = {side: Runner(plan, side == "sluice", getattr(torch, plan["dtype"])) for side in sides}
    for side, runner in runners.items():
        swapped = [sluice_side.is_swapped(layer) for layer in runner.layers()]
        if set(swapped) != {side == "sluice"}:
            raise SystemExit(f"{side}: layers swapped: {swapped}")
    warm, total = plan["warm_up"], plan["warm_up"] + plan["pairs"]
    for count in range(total):
        for side in sides if count % 2 == 0 else reversed(sides):
            runners[side].step()
        rank.report(done=count + 1, of=total, name=f"loss {runners['sluice'].losses[-1]:.4f}")
    found: dict[str, Any] = {
        side: {
            "wall_s": runner.step_s[warm:],
            "wall": quartiles(runner.step_s[warm:]),
            "cpu": quartiles(runner.cpu_s[warm:]),
            "loss": runner.losses,
        }
        for side, runner in runners.items()
    }
    found["speedup"] = pair_ratios(found["stock"]["wall_s"], found["sluice"]["wall_s"])
    both = zip(*(runners[side].losses for side in sides), strict=True)
    found["max_loss_difference"] = max(abs(a - b) for a, b in both)
    found["sluice_stats"] = [sluice_side.stats(layer) for layer in runners["sluice"].layers()]
    rank.leave(found)


if __name__ == "__main__":
    main()
