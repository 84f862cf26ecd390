# SPDX-License-Identifier: Apache-2.0
"""One engine of a comparison: both sides have the same initial state, data and random draws."""

from __future__ import annotations

import copy
import time

import deepspeed
import torch
import torch.distributed as dist
from data import Batches
from deepspeed.moe.sharded_moe import MOELayer
from model import Shape, TextLM
from torch import nn

EXTRA = 10_000  # unrecorded steps use data of step numbers from here on


class Runner:
    """One engine and how far it has trained."""

    def __init__(self, plan: dict, with_sluice: bool, dtype: torch.dtype = torch.float32) -> None:
        config = copy.deepcopy(plan["config"])
        config.setdefault("sluice", {})["enabled"] = with_sluice
        self.seed, self.rank = plan["seed"], dist.get_rank()
        torch.manual_seed(self.seed)  # the same initial state on both sides
        model = TextLM(Shape(**plan["shape"]))
        _spread_experts(model, self.seed, self.rank)
        model.to(dtype)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.batches = Batches(self.seed, self.rank, config["train_micro_batch_size_per_gpu"], model.shape.length)
        self.extra = 0  # steps that were not recorded
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []

    def layers(self) -> list[nn.Module]:
        """Return the engine's MoE layers."""
        return [m for m in self.engine.module.modules() if isinstance(m, MOELayer)]

    def step(self, record: bool = True) -> float:
        """One training step; returns the seconds of the slowest rank."""
        number = len(self.losses) if record else EXTRA + self.extra
        inputs, targets = self.batches[number]
        self.extra += not record
        torch.manual_seed(self.seed * 7_919 + number * 31 + self.rank)
        dist.barrier()
        cpu, begin = time.process_time(), time.perf_counter()
        total, loss = self.engine(inputs, targets)
        self.engine.backward(total)
        self.engine.step()
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        figures = torch.tensor([wall, loss.item(), cpu], dtype=torch.float64)
        slowest = figures.clone()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(figures)
        if record:
            self.losses.append(figures[1].item() / dist.get_world_size())
            self.step_s.append(slowest[0].item())
            self.cpu_s.append(figures[2].item())
        return slowest[0].item()


def _spread_experts(model: nn.Module, seed: int, rank: int) -> None:
    """Give every expert of the model its own initial values: DeepSpeed copies one expert to all."""
    generator = torch.Generator().manual_seed(seed * 101 + rank)
    for name, parameter in model.named_parameters():
        if ".deepspeed_experts." in name and parameter.dim() == 2:
            bound = parameter.shape[1] ** -0.5
            with torch.no_grad():
                parameter.uniform_(-bound, bound, generator=generator)
