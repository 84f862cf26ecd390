"""Rank-side of moves.py: three engines of one layer, in turns."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

from integration_tests.benchmarks import launch
from integration_tests.benchmarks.rank import seconds_of
from integration_tests.benchmarks.stats import pair_ratios, quartiles

INTERVAL, WARM_UP = 4, 13  # the third look is behind the last step of the warm-up
SECTION = {"enabled": True}
SIDES = {
    "stock": None,
    "unmoved": SECTION,
    "moved": {**SECTION, "placement": {"interval": INTERVAL}},
}


class Layer(nn.Module):
    """One MoE layer whose gate reads its logits from the first E columns, so that routes are the benchmark's."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        M, H, E = (plan[name] for name in "MHE")
        expert = nn.Sequential(nn.Linear(M, H), nn.GELU(), nn.Linear(H, M))
        self.moe = MoE(M, expert, E, ep_size=dist.get_world_size(), k=plan["K"], drop_tokens=False)
        gate = self.moe.deepspeed_moe.gate.wg.weight
        with torch.no_grad():
            gate.zero_()
            gate[:, :E] = torch.eye(E)
        gate.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _, _ = self.moe(x)
        return out.float().square().mean()


def tokens_of(plan: dict[str, Any]) -> torch.Tensor:
    """Each token's K experts lead its logits; those of the first rank are drawn the more often the more `skew` is."""
    T, M, E, K = (plan[name] for name in "TMEK")
    generator = torch.Generator().manual_seed(11 + dist.get_rank())
    local = E // dist.get_world_size()
    share = plan["skew"] / dist.get_world_size()
    odds = torch.full((E,), (1 - share) / (E - local))
    odds[:local] = share / local
    x = 0.1 * torch.randn(T, M, generator=generator)
    # With replacement a choice would not be K experts; each of K draws excludes those before.
    chosen = torch.multinomial(odds.expand(T, E), K, generator=generator)
    x[:, :E] = 0
    for k in range(K):
        x.scatter_(1, chosen[:, k : k + 1], 4.0 - k)
    return x[None]


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


def main() -> None:
    """All rounds; rank 0 writes what was found."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    x = tokens_of(plan)
    engines = {side: engine(plan, section) for side, section in SIDES.items()}
    decider = engines["moved"].sluice.decider
    spent, after_step = [0.0], decider.after_step
    reports = []

    def timed() -> None:
        began = time.perf_counter()
        after_step()
        spent[0] += time.perf_counter() - began
        reports.append(decider.watches[0].report())

    decider.after_step = timed

    def step(side: str) -> None:
        host = engines[side]
        host.backward(host(x))
        host.step()

    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(WARM_UP + plan["pairs"]):
        sides = list(SIDES)
        for side in sides[number % 3 :] + sides[: number % 3]:
            took = seconds_of(lambda side=side: step(side))
            if number >= WARM_UP:
                seconds[side].append(took)
        if dist.get_rank() == 0:
            launch.report(done=number + 1, of=WARM_UP + plan["pairs"])
    deciding = torch.tensor(spent[0], dtype=torch.float64)
    dist.all_reduce(deciding, dist.ReduceOp.MAX)
    moves = [report for report in reports if report.get("verdict") == "pays"]
    first = moves[0] if moves else reports[-1]
    found = {
        "seconds": {side: quartiles(values) for side, values in seconds.items()},
        "of_unmoved": pair_ratios(seconds["moved"], seconds["unmoved"]),
        "of_stock": pair_ratios(seconds["moved"], seconds["stock"]),
        "share": float(deciding) / (plan["steps_of_a_run"] * quartiles(seconds["moved"])["median"]),
        "moved_experts": reports[-1]["moved_experts"],
        **{name: first.get(name, 1.0) for name in ("imbalance", "planned", "bound")},
    }
    if dist.get_rank() == 0:
        Path(plan["out"]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
