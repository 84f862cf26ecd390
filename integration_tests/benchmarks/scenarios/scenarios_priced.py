# SPDX-License-Identifier: Apache-2.0
"""Prices a drawn scenario on a machine: every pair (n, S) that its memory allows, and the choice of each selector.

    adaptive    the fastest pair for each size; under a budget only pairs that fit the slots of the largest size's plan
    best fixed  the one pair that is fastest over the scenario's sizes
    pb          MPMoE's trials: for each size the best pair with n from 2 to 8
    pm          MPMoE's model: the same by Fig. 8
    mpipemoe    MPipeMoE: n of the pipeline without reuse for each size, then S by eq. 10
    pipemoe     chunks of tokens, n of 2, 4 and 8 for each size, everything kept
    split       FasterMoE's split by destination
    unsplit     one chunk

The last three keep everything, and are compared only in scenarios that keep everything. No layer runs, and torch is not
needed.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from typing import Any

from sluice.planning.machines import Machine
from sluice.planning.planner import Choice, Planner, Prediction, Workload
from sluice.restore import SETS

from integration_tests.benchmarks.scenarios.scenarios_drawn import Drawn

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
SCOPE = (2, 3, 4, 6, 8)  # the n of SIZES in the scope of the papers' Algorithm 1
PIPEMOE = (2, 4, 8)
STRATEGIES = ("S1", "S2", "S3", "S4")
PLAN_SIZES = 8  # from backend/plan/plans_by_size.h: each plan is for half the tokens of the previous plan
SHARED = ("slot", "routing", "schedule", "gemm")  # bytes that plans of one context share
HARDLY_MORE = 4 << 20  # bytes that a host's context needs beyond the planner's context

Pick = dict[int, Choice]  # by tokens


def made_up(bytes_per_second: float) -> dict[str, Any]:
    """A machine with one core, and a link with this rate in each direction. Copies run on the same core, so copies and
    computation get half of it each. Exchanges use a small part of the core."""
    core = [
        {"lane": lane, "beside": others, "share": 0.5}
        for copies in ("copy_out", "copy_in")
        for lane, other in (("compute", copies), (copies, "compute"))
        for others in ([other], [other, "comm"])
    ]
    return {
        "sluice_machine": 2,
        "name": "made up",
        "provenance": "profile",
        "world_size": 2,
        "gemm": {"f32": {"flops_per_second": 8e10, "half_rows": 8}},
        "rows": {"bytes_per_second": 4e9},
        "activation_seconds": 5e-10,
        "activation_grad_seconds": 1e-9,
        "exchange": {"bytes_per_second": bytes_per_second, "startup_seconds": 2e-4},
        "host_copy": {"bytes_per_second": 6e9},
        "op_seconds": 5e-6,
        "pass_seconds": 1e-4,
        "share": [
            {"lane": "comm", "beside": ["compute"], "share": 0.9},
            {"lane": "compute", "beside": ["comm"], "share": 0.92},
            *core,
        ],
    }


def _tokens_of_plan(most: int, tokens: int) -> int:
    """The number of tokens that the plan for a batch of `tokens` is made for. most: tokens of the largest batch."""
    sizes = [math.ceil(most / 2**size) for size in range(PLAN_SIZES)]
    return min(one for one in sizes if one >= tokens)


class Priced:
    """A scenario on a machine."""

    def __init__(self, machine: dict[str, Any], drawn: Drawn, world_size: int) -> None:
        self.planner, self.drawn, self.world_size = Planner(Machine(machine, {})), drawn, world_size
        self.predict: Callable[[Workload, Choice], Prediction] = cache(self.planner.predict)

    def load(self, tokens: int, **changes: Any) -> Workload:
        d = self.drawn
        skew = d.rank_skew(self.world_size)
        base = Workload(d.M, d.H, tokens, d.E, d.K, self.world_size, dtype="f32", skew=skew, activation="relu")
        return base.with_(**changes)

    def seconds(self, tokens: int, choice: Choice) -> float:
        return self.predict(self.load(tokens), choice).seconds

    def total(self, pick: Pick) -> float:
        """Seconds of a run."""
        return sum(self.drawn.steps(tokens) * self.seconds(tokens, choice) for tokens, choice in pick.items())

    @cached_property
    def budget(self) -> int:
        """The memory budget in bytes; 0: no budget."""
        share = self.drawn.budget_share
        if share is None:
            return 0
        wide = self.planner.choose(self.load(self.drawn.tokens[-1], memory_budget=1 << 40)).candidates
        least = min(one.total_bytes for one in wide)
        kept = Choice(1, "keep", "keep", "deferred")
        most = next(one for one in wide if one.choice == kept)
        return int(least + share * (most.total_bytes - least)) + HARDLY_MORE

    @cached_property
    def all_pairs(self) -> list[Choice]:
        """All pairs of the scenario's kind, whether they fit a budget or not."""
        kept = [Choice(n, "keep", "keep", "deferred") for n in SIZES]
        if self.drawn.kind == "kept":
            return kept
        lean = [Choice(n, *SETS[name], "per_chunk") for n in SIZES if n > 1 for name in STRATEGIES]
        if self.drawn.kind == "reuse":
            return lean
        again = (("keep", "recompute"), ("redispatch", "keep"), ("keep", "keep"))
        return [*kept, *lean, *(Choice(n, *pair, "per_chunk") for n in SIZES for pair in again)]

    def under_budget(self, tokens: int, choice: Choice) -> Prediction:
        return self.predict(self.load(tokens, memory_budget=self.budget), choice)

    @cached_property
    def pairs(self) -> list[Choice]:
        """The pairs that the scenario's memory allows, for its largest batches."""
        if self.drawn.kind != "budget":
            return self.all_pairs
        return [one for one in self.all_pairs if self.under_budget(self.drawn.tokens[-1], one).fits]

    # ---- choices ----

    def _by_size(self, of: Callable[[int, Choice], float], scope: Iterable[int] = SIZES) -> Pick:
        among = [one for one in self.pairs if one.num_chunks in scope] or self.pairs
        return {tokens: min(among, key=lambda one: of(tokens, one)) for tokens in self.drawn.tokens}

    def fixed(self, choice: Choice) -> Pick:
        return dict.fromkeys(self.drawn.tokens, choice)

    @cached_property
    def best_fixed(self) -> Choice:
        return min(self.pairs, key=lambda one: self.total(self.fixed(one)))

    @cached_property
    def adaptive(self) -> Pick:
        if self.drawn.kind != "budget":
            return self._by_size(self.seconds)
        most = self.drawn.tokens[-1]
        largest = min(self.pairs, key=lambda one: self.seconds(most, one))
        taken = self.under_budget(most, largest).bytes
        found = {}
        for tokens in self.drawn.tokens:
            planned = _tokens_of_plan(most, tokens)
            among = [largest] if planned == most else [one for one in self.all_pairs if self._fits(planned, one, taken)]
            found[tokens] = min(among or [largest], key=lambda one: self.seconds(planned, one))
        return found

    def _fits(self, tokens: int, choice: Choice, taken: dict[str, int]) -> bool:
        """Whether a plan for these batches fits the budget and the slots of the largest batch's plan."""
        one = self.under_budget(tokens, choice)
        lifted = one.bytes["total"] + sum(max(0, taken[part] - one.bytes[part]) for part in SHARED)
        return lifted <= self.budget and one.bytes["slot"] <= taken["slot"]

    def _mpipemoe(self) -> Pick:
        found = {}
        for tokens in self.drawn.tokens:
            kept = {n: self.seconds(tokens, Choice(n, "keep", "keep", "per_chunk")) for n in SCOPE}
            n = min(sorted({one.num_chunks for one in self.pairs} & set(SCOPE)) or SCOPE, key=lambda n: kept[n])
            among = [one for one in self.pairs if one.num_chunks == n] or self.pairs
            found[tokens] = min(among, key=lambda one: self.predict(self.load(tokens), one).mpipemoe)
        return found

    def selectors(self) -> dict[str, Pick]:
        """The choices of all selectors that choose among the scenario's pairs."""
        return {
            "adaptive": self.adaptive,
            "best fixed": self.fixed(self.best_fixed),
            "pb": self._by_size(self.seconds, SCOPE),
            "pm": self._by_size(lambda tokens, one: self.predict(self.load(tokens), one).mpmoe, SCOPE),
            "mpipemoe": self._mpipemoe(),
        }

    def pipemoe(self) -> dict[int, int]:
        """PipeMoE's n by tokens."""
        return {tokens: min(PIPEMOE, key=lambda n: self._of_tokens(tokens, n)) for tokens in self.drawn.tokens}

    def _of_tokens(self, tokens: int, n: int) -> float:
        """Seconds of a step with chunks of tokens and weight gradients per chunk."""
        load = self.load(tokens, chunking="tokens")
        return self.predict(load, Choice(n, "keep", "keep", "per_chunk")).seconds

    def totals(self) -> dict[str, float]:
        """Seconds of a run on each side."""
        found = {name: self.total(pick) for name, pick in self.selectors().items()}
        if self.drawn.kind != "kept":
            return found
        steps, W = self.drawn.steps, self.world_size
        found["pipemoe"] = sum(steps(tokens) * self._of_tokens(tokens, n) for tokens, n in self.pipemoe().items())
        found["split"] = sum(steps(tokens) * self._of_tokens(tokens, W) for tokens in self.drawn.tokens)
        found["unsplit"] = self.total(self.fixed(Choice(1, "keep", "keep", "deferred")))
        return found


def hypotheses(priced: list[Priced]) -> dict[str, tuple[int, int]]:
    """How often the papers' two hypotheses hold in virtual time, and in how many cases: the best n does not fall as
    batches grow (pairs of sizes of one run), and time over n has one minimum (sizes). Only for the kind "kept"."""
    grows, pairs, valleys, sizes = 0, 0, 0, 0
    for one in priced:
        if one.drawn.kind != "kept":
            continue
        best = [one.adaptive[tokens].num_chunks for tokens in one.drawn.tokens]
        grows, pairs = grows + sum(b >= a for a, b in zip(best, best[1:])), pairs + len(best) - 1
        for tokens in one.drawn.tokens:
            times = [one.seconds(tokens, pair) for pair in one.pairs]
            bottom = times.index(min(times))
            falls, rises = times[: bottom + 1], times[bottom:]
            valleys += falls == sorted(falls, reverse=True) and rises == sorted(rises)
            sizes += 1
    return {"the best n grows with B": (grows, pairs), "one valley over n": (valleys, sizes)}


def name_of(choice: Choice) -> str:
    return f"{choice.num_chunks} {choice.policy}"


def best_over_list(priced: list[Priced]) -> dict[str, Choice]:
    """For each kind the pair that fits all its scenarios and is best over them."""
    found = {}
    for kind in dict.fromkeys(one.drawn.kind for one in priced):
        among = [one for one in priced if one.drawn.kind == kind]
        pairs = [pair for pair in among[0].pairs if all(pair in one.pairs for one in among)]

        def cost(pair: Choice, among: list[Priced] = among) -> float:
            return statistics.mean(math.log(one.total(one.fixed(pair)) / one.total(one.adaptive)) for one in among)

        if pairs:
            found[kind] = min(pairs, key=cost)
    return found


def geometric(values: Iterable[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))
