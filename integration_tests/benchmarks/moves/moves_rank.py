# SPDX-License-Identifier: Apache-2.0
"""Ranks of moves.py: first one engine trains alone until its experts have moved, then three engines run in turns."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

from integration_tests.benchmarks.layer import routing
from integration_tests.benchmarks.measuring.rank import Rank, seconds_of
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles

INTERVAL, WARM_UP = 4, 3
BEFORE = slice(2, 2 * INTERVAL)  # steps after the warm-up and before the first move
MOST_ALONE = 150
EVEN_ALONE = 60  # number of steps with even loads
SECTION = {"enabled": True}
SIDES = {"stock": None, "unmoved": SECTION, "moved": {**SECTION, "placement": {"interval": INTERVAL}}}


class Layer(nn.Module):
    """One MoE layer whose gate takes its logits from the first E columns, so that the benchmark controls routing."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        M, H, E = (plan[name] for name in "MHE")
        expert = nn.Sequential(nn.Linear(M, H), nn.GELU(), nn.Linear(H, M))
        self.moe = MoE(M, expert, E, ep_size=dist.get_world_size(), k=plan["K"], drop_tokens=False)
        routing.control_gate(self.moe.deepspeed_moe.gate)
        self.moe.deepspeed_moe.gate.wg.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _, _ = self.moe(x)
        return out.float().square().mean()


def tokens_of(plan: dict[str, Any]) -> torch.Tensor:
    """Tokens of which each goes to K drawn experts. `skew` is how often the first rank's experts are drawn."""
    T, M, E, K = (plan[name] for name in "TMEK")
    rank, local, share = dist.get_rank(), E // dist.get_world_size(), plan["skew"] / dist.get_world_size()
    odds = torch.full((E,), (1 - share) / (E - local))
    odds[:local] = share / local
    if plan["skew"] == 1:  # random draws would not be even
        chosen = (torch.arange(T)[:, None] * K + torch.arange(K)) % E
    else:  # without replacement, so that the K experts of a token differ
        generator = torch.Generator().manual_seed(11 + rank)
        chosen = torch.multinomial(odds.expand(T, E), K, generator=generator)
    return routing.tokens(chosen, E, M, 17 + rank)[None]


def engine(plan: dict[str, Any], section: dict[str, Any] | None) -> Any:
    torch.manual_seed(5)
    model = Layer(plan)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    if section is not None:
        config["sluice"] = section
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


class Weights:
    """The messages with which other methods [Symi, FlexMoE] move the weights of an expert in each step, for the experts
    that have moved here: weights are sent to the ranks that run experts, gradients back, and optimizer state stays. A
    step of these methods takes at least a step with moved experts plus these messages."""

    def __init__(self, plan: dict[str, Any], layer: Any) -> None:
        state = layer._sluice
        places = enumerate(zip(state.home.expert_rank, state.placement.expert_rank))
        self.moves = [(e, a, b) for e, (a, b) in places if a != b]
        self.rank, self.rows = dist.get_rank(), torch.zeros(2 * plan["M"] * plan["H"])

    def exchange(self) -> None:
        for there, back in ((1, 2), (2, 1)):
            work = []
            for move in self.moves:
                if move[there] == self.rank:
                    work.append(dist.isend(self.rows, move[back], tag=move[0]))
                elif move[back] == self.rank:
                    work.append(dist.irecv(torch.empty_like(self.rows), move[there], tag=move[0]))
            for each in work:
                each.wait()


def main() -> None:
    deepspeed.init_distributed()
    rank = Rank()
    plan = rank.plan
    x = tokens_of(plan)
    engines = {side: engine(plan, section) for side, section in SIDES.items()}
    decider = engines["moved"].sluice.decider
    watch = decider.watches[0]
    spent, processor = [0.0], [0.0]

    def timed(inner: Any) -> Any:
        def call() -> None:
            began, used = time.perf_counter(), time.thread_time()
            inner()
            spent[0] += time.perf_counter() - began
            processor[0] += time.thread_time() - used

        return call

    decider.before_step, decider.after_step = timed(decider.before_step), timed(decider.after_step)

    def step(side: str) -> None:
        host = engines[side]
        host.backward(host(x))
        host.step()

    # This engine trains alone, so that state moves only during its own steps.
    alone: list[float] = []
    most = EVEN_ALONE if plan["skew"] == 1 else MOST_ALONE
    used = 0.0
    while len(alone) < most and not (watch.migrations and watch.migrations[0].has_ended):
        if len(alone) == BEFORE.start:
            processor[0], used = 0.0, time.process_time()
        alone.append(seconds_of(lambda: step("moved")))
        rank.report(done=len(alone), of=most)
    processor_share = processor[0] / (time.process_time() - used)
    first, report = watch.newest, watch.report()
    usual = quartiles(alone[BEFORE])["median"]
    longer = sum(max(0.0, took - usual) for took in alone[BEFORE.stop :])
    decider.options = dataclasses.replace(decider.options, interval=10**9)  # the remaining steps keep this placement
    weights = Weights(plan, watch.layer)
    seconds: dict[str, list[float]] = {side: [] for side in (*SIDES, "weights")}
    for number in range(WARM_UP + plan["pairs"]):
        sides = list(SIDES)
        for side in sides[number % 3 :] + sides[: number % 3]:
            took = seconds_of(lambda side=side: step(side))
            if number >= WARM_UP:
                seconds[side].append(took)
        took = seconds_of(weights.exchange)
        if number >= WARM_UP:
            seconds["weights"].append(took + seconds["moved"][-1])
        rank.report(done=number + 1, of=WARM_UP + plan["pairs"])
    cost = torch.tensor([spent[0], longer, processor_share], dtype=torch.float64)
    dist.all_reduce(cost, dist.ReduceOp.MAX)
    travel = torch.tensor([report["travel"][name] for name in ("sent_bytes", "hidden_bytes")])
    dist.all_reduce(travel)
    found = {
        "seconds": {side: quartiles(values) for side, values in seconds.items()},
        "of_unmoved": pair_ratios(seconds["moved"], seconds["unmoved"]),
        "of_stock": pair_ratios(seconds["moved"], seconds["stock"]),
        "of_weights": pair_ratios(seconds["moved"], seconds["weights"]),
        "processor_share": float(cost[2]),
        "share": float(cost[:2].max()) / (plan["steps_of_a_run"] * quartiles(seconds["moved"])["median"]),
        "moved_experts": report["moved_experts"],
        "rounds": len(alone) - BEFORE.stop,
        "sent_bytes": int(travel[0]),
        "hidden_bytes": int(travel[1]),
        **{name: getattr(first, name, 1.0) for name in ("imbalance", "planned", "bound")},
    }
    rank.leave(found)


if __name__ == "__main__":
    main()
