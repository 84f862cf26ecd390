"""Rank-side of stages.py: two pipeline engines of DeepSpeed over stages that sleep, by stock's schedule and by key."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

from integration_tests.benchmarks import launch
from integration_tests.benchmarks.rank import seconds_of


class _Work(torch.autograd.Function):
    """Hands on what it gets, after a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, plan: dict[str, Any]) -> torch.Tensor:
        ctx.plan = plan
        ctx.save_for_backward(weight)
        time.sleep(plan["forward_s"])
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        time.sleep(ctx.plan["backward_s"])
        return grad * weight, grad.sum().reshape(1), None


class Stage(nn.Module):
    """One layer, which is one stage."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.plan, self.weight = plan, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Work.apply(x, self.weight, self.plan)


def loss_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.mean() - label.mean()) ** 2


def engine(plan: dict[str, Any], by_key: bool) -> Any:
    """DeepSpeed's own, or with the pipeline's key."""
    torch.manual_seed(3)
    net = PipelineModule(
        [Stage(plan) for _ in range(plan["stages"])],
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
    if by_key:
        values["sluice"] = {"enabled": True, "pipeline": {"in_flight": plan["in_flight"]}}
    return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=values)[0]


def data(plan: dict[str, Any], batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one batch, the same for both engines."""
    value = torch.full((1, plan["elements"]), 1.0 + 0.01 * batch)
    for number in range(plan["micro_batches"]):
        yield value, torch.tensor([float(number)])


def train(engines: dict[str, Any], name: str, batches: Any, losses: dict[str, float]) -> None:
    """One batch of one engine."""
    losses[name] = float(engines[name].train_batch(batches))


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    engines = {"stock": engine(plan, False), "sluice": engine(plan, True)}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    worst = 0.0
    for number in range(plan["pairs"] + 1):  # the first does not count
        losses: dict[str, float] = {}
        for name in sorted(engines, reverse=number % 2 == 0):
            took = seconds_of(functools.partial(train, engines, name, data(plan, number), losses))
            if number > 0:
                seconds[name].append(took)
        worst = max(worst, abs(losses["stock"] - losses["sluice"]))
        if dist.get_rank() == 0:
            launch.report(done=number, of=plan["pairs"])
    stats = engines["sluice"].sluice.pipeline.stats()
    found = {
        **{f"{name}_s": each for name, each in seconds.items()},
        **{name: stats[name] for name in ("most_in_flight", "messages_sent")},
        "largest_loss_difference": worst,
    }
    if dist.get_rank() == 0:
        Path(plan["out"]).write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
