# SPDX-License-Identifier: Apache-2.0
"""Rank-side: trains one row of pipelining_table.py with torch's Schedule1F1B and with Sluice's schedule."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "adapters" / "pipelining" / "test"))
import pipelining_jobs as jobs
import pipelining_table
import sluice.optim
import torch
import torch.distributed as dist
from pair_compare import BITS, Run, Tolerance
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.checkpoint import checkpoint

STEPS, SAVED_AFTER, BLOCKS = 6, 3, 4
EPSILON = 1e-2  # as large as gradients: with a small one Adam's updates do not depend on the scale of gradients
# sluice.optim's updates are within 2 ulp, and it keeps moments of bf16 parameters in f32 (docs/optimizer.md).
F32 = Tolerance(loss=1e-5, gradient=1e-5, norm=1e-4, tensor=1e-4)
ROUNDED = Tolerance(loss=0.02, gradient=0.05, norm=0.02, tensor=None)


def tolerance(row: dict[str, str]) -> Tolerance:
    """Returns the tolerance, which is zero with torch's optimizer."""
    if row["optimizer"] == "torchadam":
        return BITS
    return F32 if row["dtype"] == "f32" else ROUNDED


class Blocks(jobs.Blocks):
    """Blocks with or without activation checkpointing, and with or without a norm at both ends of each block.

    The batch has no gradient, so blocks with reentrant checkpointing have none. If it had one, stock's 1F1B would fail.
    """

    checkpointing, is_twice = "norepeat", False

    def forward(self, rows: torch.Tensor, ids: torch.Tensor) -> Any:
        for block in self.blocks.values():
            if self.checkpointing == "norepeat":
                rows, ids = self._block(block, rows, ids)
            else:
                rows, ids = checkpoint(self._block, block, rows, ids, use_reentrant=self.checkpointing == "reentrant")
        return rows if self.is_last else (rows, ids)

    def _block(self, block: Any, rows: torch.Tensor, ids: torch.Tensor) -> Any:
        rows, ids = block(rows, ids)
        return (block.norm(torch.tanh(rows)) if self.is_twice else rows), ids


def _freeze(row: dict[str, str], blocks: Blocks) -> None:
    for number, block in blocks.blocks.items():
        is_frozen = {
            "trained": False,
            "fzlayer": number == "1",
            "fzpart": False,
            "fzfirst": number in "01",  # the whole first stage of two
            "fzlast": number in "23",
        }[row["frozen"]]
        block.requires_grad_(not is_frozen)
        if row["frozen"] == "fzpart":
            block.up.requires_grad_(False)


def _stages(row: dict[str, str], is_stock: bool) -> list[PipelineStage]:
    ranks = dist.get_world_size()
    stages_of_rank = 1 if is_stock or row["stages"] == "one" else 2
    indices = [dist.get_rank()] if stages_of_rank == 1 else jobs._indices({"inv": "v"}.get(row["stages"], "looped"), 2)
    count = BLOCKS // (ranks * stages_of_rank)
    found = []
    for index in indices:
        numbers = range(index * count, (index + 1) * count)
        dtype = torch.bfloat16 if row["dtype"] == "bf16" else torch.float32
        blocks = Blocks(numbers, BLOCKS - 1, 0.2 if row["dropout"] == "dropout" else 0.0, dtype)
        blocks.checkpointing, blocks.is_twice = row["checkpointing"], row["modules"] == "twice"
        _freeze(row, blocks)
        found.append(PipelineStage(blocks, index, ranks * stages_of_rank, torch.device("cpu")))
    return found


class _Job:
    """Trains by a schedule with its optimizer."""

    def __init__(self, row: dict[str, str], is_stock: bool, folder: str) -> None:
        self.row, self.stages = row, _stages(row, is_stock)
        keywords: dict[str, Any] = {"scale_grads": row["scaling"] == "scaled"}
        if is_stock:
            self.schedule = Schedule1F1B(self.stages[0], jobs.MICRO_BATCHES, jobs.loss_of, **keywords)
        else:
            self.schedule = get_schedule_class(row["name"])(
                self.stages[0] if row["name"] == "SluiceSingle" else self.stages,
                jobs.MICRO_BATCHES,
                jobs.loss_of,
                **pipelining_table.options(row),
                **keywords,
            )
        self.blocks = {n: block for stage in self.stages for n, block in stage.submod.blocks.items()}
        trained = [p for block in self.blocks.values() for p in block.parameters() if p.requires_grad]
        kind: Any = torch.optim.AdamW if is_stock or row["optimizer"] == "torchadam" else sluice.optim.AdamW
        file = {}
        if not is_stock and row["optimizer"] == "statefile":
            file = {"state_file": os.path.join(folder, f"states{dist.get_rank()}-{len(os.listdir(folder))}")}
        self.optimizer = kind(trained, lr=1e-2, eps=EPSILON, **file) if trained else None

    def step(self, number: int, run: Run) -> None:
        """Runs one step of the optimizer."""
        parts = 2 if self.row["accumulation"] == "twobatches" else 1
        torch.manual_seed(77 * number + dist.get_rank())
        for part in range(parts):
            run.losses += self._batch(parts * number + part, self.schedule.step)
        for name, block in self.blocks.items():
            if self.row["clipping"] == "clip" and any(p.grad is not None for p in block.parameters()):
                torch.nn.utils.clip_grad_norm_(block.parameters(), 0.05)
            for key, p in block.named_parameters():
                grad = torch.empty(0) if p.grad is None else p.grad.clone()
                run.parameters[f"gradient {number} {name} {key}"] = grad
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _batch(self, number: int, method: Any) -> list[float]:
        rows, ids, target = jobs._data(number, torch.bfloat16 if self.row["dtype"] == "bf16" else torch.float32)
        is_first, is_last = any(s.is_first for s in self.stages), any(s.is_last for s in self.stages)
        losses: list[torch.Tensor] = []
        is_rounded = self.row["dtype"] == "autocast"
        with torch.autocast("cpu", torch.bfloat16) if is_rounded else contextlib.nullcontext():
            method(
                *((rows, ids) if is_first else ()),
                target=target if is_last else None,
                losses=losses if is_last else None,
            )
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, [float(each.detach()) for each in losses])
        return next(each for each in said if each)

    def evaluate(self, number: int, run: Run) -> None:
        """Runs one batch without gradients."""
        with torch.no_grad():
            run.evaluations += self._batch(number, self.schedule.eval)

    def load(self, path: str, other: _Job) -> None:
        """Loads the parameters of `other` through a file."""
        state = {name: block.state_dict() for name, block in other.blocks.items()}
        torch.save([state, other.optimizer and other.optimizer.state_dict()], path)
        state, kept = torch.load(path, weights_only=False)
        for name, block in self.blocks.items():
            block.load_state_dict(state[name])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(kept)


def train(row: dict[str, str], section: Any, folder: str) -> Run:
    run, job = Run(), _Job(row, section is None, folder)
    for step in range(STEPS):
        job.step(step, run)
        if step == SAVED_AFTER - 1 and row["saving"] == "saved":
            old, job = job, _Job(row, section is None, folder)
            job.load(os.path.join(folder, f"saved{dist.get_rank()}"), old)
    if row["evaluating"] == "evaluated":
        job.evaluate(100, run)
    if section is not None:
        assert job.schedule.sluice.stats()["messages_sent"] > 0
    run.parameters.update(
        {f"{n} {k}": p.detach() for n, block in job.blocks.items() for k, p in block.named_parameters()}
    )
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, run.parameters)  # Sluice's stages are on other ranks than stock's
    found = dict(sorted((name, tensor) for each in said for name, tensor in each.items()))
    if tolerance(row) is ROUNDED:  # with another optimizer, gradients are those of other parameters
        found = {name: tensor for name, tensor in found.items() if not name.startswith("gradient")}
    run.parameters = found
    return run
