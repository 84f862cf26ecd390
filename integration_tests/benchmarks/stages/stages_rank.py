# SPDX-License-Identifier: Apache-2.0
"""Ranks of stages.py: DeepSpeed pipeline engines over the same stages, with stock's schedule and with Sluice's.

The plan's "sides" maps each side to its "pipeline" section; stock has None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.stages.stages_work import Stage, layers_for, loss_of, measure


def engine_of(layers: list[Any], plan: dict[str, Any], key: dict[str, Any] | None, lr: float = 1e-3) -> Any:
    """An engine with the "pipeline" section `key`, or DeepSpeed's own engine."""
    net = PipelineModule(
        layers,
        num_stages=plan["stages"],
        loss_fn=loss_of,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": plan["micro_batches"],
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
    }
    if key is not None:
        values["sluice"] = {"enabled": True, "pipeline": key}
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=net, model_parameters=trained, config=values)[0]


def engine(plan: dict[str, Any], key: dict[str, Any] | None) -> Any:
    torch.manual_seed(3)
    return engine_of([Stage(plan, number) for number in range(plan["stages"])], plan, key)


def data(plan: dict[str, Any], batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one batch, the same for all engines."""
    value = torch.full((1, plan["elements"]), 1.0 + 0.01 * batch)
    for number in range(plan["micro_batches"]):
        yield value, torch.tensor([float(number)])


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

    def train(name: str, batch: int) -> torch.Tensor:
        return engines[name].train_batch(data(plan, batch)).detach()

    modules = {name: each.module for name, each in engines.items()}
    measure(rank, modules, train, lambda: engines["sluice"].sluice.pipeline.stats(), unit_s)


if __name__ == "__main__":
    main()
