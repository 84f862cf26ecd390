# SPDX-License-Identifier: Apache-2.0
"""Ranks of stages.py: DeepSpeed pipeline engines over the same stages, with stock's schedule and with Sluice's.

The plan's "sides" maps each side to its "pipeline" section; stock has None.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from integration_tests.benchmarks.measuring.rank import Rank, seconds_of
from integration_tests.benchmarks.stages.stages_stall import stalling
from integration_tests.benchmarks.stages.stages_work import Stage, begin, layers_for, loss_of, turns


def engine(plan: dict[str, Any], key: dict[str, Any] | None) -> Any:
    """An engine with the "pipeline" section `key`, or DeepSpeed's own engine."""
    torch.manual_seed(3)
    net = PipelineModule(
        [Stage(plan, number) for number in range(plan["stages"])],
        num_stages=plan["stages"],
        loss_fn=loss_of,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": plan["micro_batches"],
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if key is not None:
        values["sluice"] = {"enabled": True, "pipeline": key}
    return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=values)[0]


def data(plan: dict[str, Any], batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one batch, the same for all engines."""
    value = torch.full((1, plan["elements"]), 1.0 + 0.01 * batch)
    for number in range(plan["micro_batches"]):
        yield value, torch.tensor([float(number)])


def train(engines: dict[str, Any], name: str, batches: Any, losses: dict[str, float]) -> None:
    """Trains one batch with one engine."""
    losses[name] = float(engines[name].train_batch(batches))


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    rank = Rank()
    plan = rank.plan
    unit_s = 0.0
    if plan.get("computes"):
        plan["layers"], unit_s = layers_for(plan["forward_s"] + plan["backward_s"], plan["elements"])
        found = torch.tensor([plan["layers"], unit_s], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        plan["layers"], unit_s = int(found[0]), float(found[1])
    engines = {name: engine(plan, key) for name, key in plan["sides"].items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    worst = 0.0
    for number in range(plan["pairs"] + 1):  # the first does not count
        losses: dict[str, float] = {}
        for name in turns(list(engines), number):
            begin(engines[name].module, number)
            with stalling(plan, dist.get_rank(), number):
                took = seconds_of(functools.partial(train, engines, name, data(plan, number), losses))
            if number > 0:
                seconds[name].append(took)
        worst = max(worst, max(abs(losses["stock"] - loss) for loss in losses.values()))
        rank.report(done=number, of=plan["pairs"])
    stats = engines["sluice"].sluice.pipeline.stats()
    found = {
        **{f"{name}_s": each for name, each in seconds.items()},
        **{name: stats[name] for name in ("most_in_flight", "messages_sent", "policy")},
        "largest_loss_difference": worst,
        "unit_s": unit_s,
    }
    rank.leave(found)


if __name__ == "__main__":
    main()
