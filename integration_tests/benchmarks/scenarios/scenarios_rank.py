# SPDX-License-Identifier: Apache-2.0
"""Ranks of scenarios.py. For each scenario the tuner settles, pairs are screened, and then all sides run in turns."""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from sluice.adapters.torch import Context, ContextOptions
from sluice.config import TunerOptions
from sluice.errors import OverBudget
from sluice.planning.planner import Choice

from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.measuring.stolen import Stolen, in_turns
from integration_tests.benchmarks.scenarios.scenarios_drawn import Drawn
from integration_tests.benchmarks.scenarios.scenarios_priced import Pick, Priced, name_of
from integration_tests.benchmarks.tuner.tuner_rank import machine_of
from integration_tests.benchmarks.tuner.tuner_rounds import ByDestination
from integration_tests.benchmarks.tuner.tuner_scenario import OPEN, Scenario

MOST = 4  # the tuner may take this many times plan["steps"] rounds if its races have not ended
WITHIN = 1.3  # pairs whose prediction is beyond this factor of the best prediction are not screened
SCREENED = 6  # the largest number of screened pairs

Steps = dict[int, tuple[Scenario, Any]]  # by tokens: the inputs, and the layer that runs them


def turns_of(sides: Mapping[Any, Steps]) -> dict[tuple[Any, int], Callable[[], float]]:
    """A step of each side and size."""
    return {
        (s, t): functools.partial(one.step, layer) for s, steps in sides.items() for t, (one, layer) in steps.items()
    }


class Run:
    """One drawn scenario on this rank."""

    def __init__(self, rank: Rank, drawn: Drawn, folder: str) -> None:
        self.rank, self.drawn, self.plan = rank, drawn, rank.plan
        skew = drawn.rank_skew(rank.world_size)
        case = {"M": drawn.M, "H": drawn.H, "E": drawn.E, "K": drawn.K, "skew": skew}
        self.inputs = {tokens: Scenario(self.plan, {**case, "T": tokens}) for tokens in drawn.tokens}
        first = self.inputs[drawn.tokens[0]]
        for one in self.inputs.values():
            one.experts = first.experts  # batches of all sizes train the same layer
        self.folder = folder
        machine = json.loads(machine_of(self.inputs[drawn.tokens[-1]], rank.group, folder))
        self.priced = Priced(machine, drawn, rank.world_size)
        self._contexts: list[Context] = []
        self._shared: Context | None = None

    def context(self, **options: Any) -> Context:
        budget = self.priced.budget or None
        found = Context(self.rank.group, ContextOptions(gemm=self.plan["gemm"], memory_budget=budget, **options))
        self._contexts.append(found)
        return found

    def shared(self) -> Context:
        """The context of layers with a fixed pair. With a budget each layer has its own context, because a budget
        belongs to a context."""
        if self.priced.budget:
            return self.context()
        if self._shared is None:
            self._shared = self.context()
        return self._shared

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    # ---- sides ----

    def of_pick(self, pick: Pick) -> Steps | None:
        """A layer for each different pair, and its inputs. None: a pair does not fit the budget of its context."""
        layers: dict[Choice, Any] = {}
        found: Steps = {}
        for tokens, pair in sorted(pick.items(), reverse=True):  # plans are made for the largest
            scenario = self.inputs[tokens]
            if pair not in layers:
                layers[pair] = scenario.layer(self.shared(), pair)
            found[tokens] = scenario, layers[pair]
            try:
                scenario.step(layers[pair])
            except OverBudget:  # raised on all ranks
                return None
        return found

    def adaptive(self) -> Steps:
        """The layer with the tuner, after it has settled for every size."""
        tuner = TunerOptions(mode="adaptive", calibrate=self.plan["calibrate_s"], cache=self.folder)
        context = self.context(tuner=tuner)
        changes = {"reuse": True, "wgrad_mode": "adaptive"} if self.drawn.kind == "reuse" else {}
        largest = max(self.inputs)
        layer = self.inputs[largest].layer(context, OPEN, **changes)
        rounds = 0
        while True:
            settled = True
            for tokens in sorted(self.inputs, reverse=True):
                self.inputs[tokens].step(layer)
                settled &= bool(context.stats()["last_is_settled"])
            rounds += 1
            if rounds >= self.plan["steps"] and (settled or rounds >= MOST * self.plan["steps"]):
                return {tokens: (one, layer) for tokens, one in self.inputs.items()}

    def best_fixed(self) -> Choice:
        """Screens pairs: returns the one with the shortest run by medians. A step follows a step of the same kind."""
        priced = self.priced
        by_time = sorted(priced.pairs, key=lambda one: priced.total(priced.fixed(one)))
        most = WITHIN * priced.total(priced.fixed(by_time[0]))
        near = [one for one in by_time if priced.total(priced.fixed(one)) <= most][:SCREENED]
        sides = {pair: steps for pair in near if (steps := self.of_pick(priced.fixed(pair))) is not None}
        found = in_turns(turns_of(sides), self.plan["screen"])
        steps = self.drawn.steps
        return min(sides, key=lambda pair: sum(steps(t) * statistics.median(found[pair, t]) for t in self.inputs))

    def baselines(self) -> dict[str, Steps]:
        """Sides that keep everything: PipeMoE, FasterMoE's split, one chunk."""
        context = self.shared()
        tokens_alone: dict[str, Any] = {"chunking": "tokens"}
        split = {tokens: ByDestination(one) for tokens, one in self.inputs.items()}
        pieces = Choice(self.rank.world_size, wgrad="per_chunk")
        return {
            "pipemoe": {
                tokens: (
                    self.inputs[tokens],
                    self.inputs[tokens].layer(context, Choice(n, wgrad="per_chunk"), **tokens_alone),
                )
                for tokens, n in self.priced.pipemoe().items()
            },
            "split": {tokens: (one, one.layer(context, pieces, **tokens_alone)) for tokens, one in split.items()},
            "unsplit": {tokens: (one, one.layer(context, Choice(1))) for tokens, one in self.inputs.items()},
        }

    # ---- rounds ----

    def sides(self) -> tuple[dict[str, Steps], dict[str, Pick]]:
        """The sides that run in turns, and the pairs of the sides with fixed pairs."""
        found = {"adaptive": self.adaptive()}
        picks = {name: pick for name, pick in self.priced.selectors().items() if name != "adaptive"}
        picks["best fixed"] = self.priced.fixed(self.best_fixed())
        fixed = self.plan["list"].get(self.drawn.kind)
        if fixed is not None:
            picks["list's pair"] = self.priced.fixed(Choice(*fixed))
        for name, pick in picks.items():
            same = next((other for other in found if picks.get(other) == pick), None)
            made = found[same] if same is not None else self.of_pick(pick)
            if made is not None:
                found[name] = made
        if self.drawn.kind == "kept":
            found |= self.baselines()
        return found, picks

    def measure(self) -> dict[str, Any]:
        sides, picks = self.sides()
        stolen = Stolen(self.plan["most_stolen"], self.plan["quiet_timeout_s"])
        seconds = in_turns(turns_of(sides), self.plan["pairs"], stolen)
        priced = self.priced
        said = priced.totals()
        if "list's pair" in picks:
            said["list's pair"] = priced.total(picks["list's pair"])
        found = {
            **self.drawn.as_dict(),
            "seconds": {name: {str(tokens): seconds[name, tokens] for tokens in self.inputs} for name in sides},
            "pairs": {name: {str(t): name_of(one) for t, one in pick.items()} for name, pick in picks.items()},
            "predicted_over_adaptive": {name: value / said["adaptive"] for name, value in said.items()},
            "stolen": stolen.found(),
        }
        self.close()
        return found


def main() -> None:
    rank = Rank()
    lines = []
    with tempfile.TemporaryDirectory() as folder:  # a new cache, because every link is a different machine
        for number, case in enumerate(rank.plan["cases"]):
            drawn = Drawn(**{**case, "tokens": tuple(case["tokens"])})
            lines.append(Run(rank, drawn, folder).measure())
            rank.report(done=number + 1, of=len(rank.plan["cases"]), name=drawn.name)
    rank.leave(lines)


if __name__ == "__main__":
    main()
