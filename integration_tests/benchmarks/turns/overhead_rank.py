# SPDX-License-Identifier: Apache-2.0
"""Ranks of overhead.py: blocks of the tuned layer and of two sets of configured layers, in turns."""

import gc
import random
import time
from typing import Any

import torch.distributed as dist
from sluice.adapters.torch import Context, MoeLayer

from integration_tests.benchmarks.measuring.parts import slowest
from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.measuring.stolen import Stolen
from integration_tests.benchmarks.tuner.tuner_scenario import Choice, Scenario

MODES = ("deferred", "per_chunk")
SIDES = ("tuned", "fixed", "twin")
Choices = dict[int, tuple[int, str]]  # by T: n and mode of weight gradients


class Run:
    """Batches and layers of one workload. Batches of all sizes train the same experts."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.plan = rank, rank.plan
        case = {**self.plan["shape"], "skew": 1.0}
        self.batches = {T: Scenario(self.plan, {**case, "T": T}) for T in self.plan["sizes"]}
        self.one = self.batches[self.plan["sizes"][0]]
        for each in self.batches.values():
            each.experts = self.one.experts

    def context(self) -> Context:
        return self.rank.context(gemm=self.plan["gemm"])

    def layer(self, context: Context, chunks: int = 0, wgrad: str = "adaptive") -> MoeLayer:
        return self.one.layer(context, Choice(chunks, wgrad=wgrad))

    def step(self, layer: MoeLayer, T: int) -> None:
        self.batches[T].run(layer)

    def chosen(self, context: Context, before: Choices) -> Choices:
        """The last decision for each size; the previous one if there was none."""
        found = dict(before)
        for decision in context.decisions():
            rows = {T: abs(T * self.plan["shape"]["K"] - decision["rows"]) for T in self.batches}
            found[min(rows, key=rows.__getitem__)] = (decision["num_chunks"], MODES[decision["wgrad_mode"]])
        return found


class Fixed:
    """Layers with the tuned layer's latest choices. Each is warmed up before its steps count."""

    def __init__(self, run: Run) -> None:
        self.run, self.context = run, run.context()
        self.layers: dict[tuple[int, str], MoeLayer] = {}
        self.warm: set[tuple[int, tuple[int, str]]] = set()
        self.choices: Choices = {}

    def follow(self, choices: Choices) -> None:
        self.choices = choices
        for T, choice in choices.items():
            if choice not in self.layers:
                self.layers[choice] = self.run.layer(self.context, *choice)
            if (T, choice) not in self.warm:
                self.warm.add((T, choice))
                self.step(T)

    def step(self, T: int) -> None:
        self.run.step(self.layers[self.choices[T]], T)


def main() -> None:
    rank = Rank()
    plan, run = rank.plan, Run(rank)
    tuned_context, fixed = run.context(), {"fixed": Fixed(run), "twin": Fixed(run)}
    tuned = run.layer(tuned_context)
    choices: Choices = dict.fromkeys(run.batches, (1, "deferred"))
    gc.disable()
    draw, stolen = random.Random(plan["seed"]), Stolen(1.0, 0.0)
    clocks: dict[str, dict[str, list[float]]] = {c: {side: [] for side in SIDES} for c in ("wall", "cpu")}
    raced: list[bool] = []
    done, races = 0, 0
    while done < plan["steps"]:
        sizes = [draw.choice(plan["sizes"]) for _ in range(min(plan["block"], plan["steps"] - done))]
        choices = run.chosen(tuned_context, choices)  # the same on all ranks
        for each in fixed.values():
            each.follow(choices)
        stolen.begin()
        for side in draw.sample(SIDES, len(SIDES)):
            gc.collect()  # outside of the timed blocks
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for T in sizes:
                if side == "tuned":
                    run.step(tuned, T)
                else:
                    fixed[side].step(T)
            clocks["cpu"][side].append(time.process_time() - cpu)
            clocks["wall"][side].append(time.perf_counter() - wall)
        stolen.spoiled()  # always False here: it only records the lost share
        before, races = races, tuned_context.tuner_stats()["race_passes"]
        raced.append(races > before)
        done += len(sizes)
        rank.report(done=done, of=plan["steps"], name="steps")
    found: dict[str, Any] = {
        c: {side: slowest(values) for side, values in sides.items()} for c, sides in clocks.items()
    }
    found["stolen"], found["most_stolen"] = stolen.shares, plan["most_stolen"]
    found["stats"], found["raced"] = tuned_context.tuner_stats(), raced
    found["chosen"] = run.chosen(tuned_context, choices)
    rank.leave(found)


if __name__ == "__main__":
    main()
