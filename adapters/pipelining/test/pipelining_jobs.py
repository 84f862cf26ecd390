# SPDX-License-Identifier: Apache-2.0
"""A model, its stages and batches, and jobs of ranks that train it by Sluice's schedules."""

import torch
import torch.distributed as dist
from sluice.errors import SluiceError
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

WIDTH, MICRO_BATCHES = 16, 8


class Block(nn.Module):
    """Takes and returns rows with their ids. The ids select a bias."""

    def __init__(self, number, dropout, dtype):
        super().__init__()
        torch.manual_seed(100 + number)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.bias, self.norm, self.dropout = nn.Embedding(7, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.to(dtype)

    def forward(self, rows, ids):
        ids_in_range = ids % 7  # torch infers shapes with arbitrary rows and ids
        new = self.down(torch.tanh(self.up(self.norm(rows) + self.bias(ids_in_range))))
        return rows + self.dropout(new), ids


class Blocks(nn.Module):
    """Several blocks in sequence. The last stage returns only rows."""

    def __init__(self, numbers, last, dropout, dtype):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block(number, dropout, dtype) for number in numbers})
        self.is_last = last in numbers

    def forward(self, rows, ids):
        for block in self.blocks.values():
            rows, ids = block(rows, ids)
        return rows if self.is_last else (rows, ids)


def loss_of(output, target):
    return ((output - target) ** 2).mean()


def _data(step, dtype):
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(3 * MICRO_BATCHES, 5, WIDTH, generator=generator).to(dtype)
    ids = torch.randint(7, (3 * MICRO_BATCHES, 5), generator=generator)
    return rows, ids, torch.randn(3 * MICRO_BATCHES, 5, WIDTH, generator=generator).to(dtype)


def _stage(index, num_stages):
    blocks = Blocks([index], num_stages - 1, 0.0, torch.float32)
    return PipelineStage(blocks, index, num_stages, torch.device("cpu"))


def _indices(placement, stages_of_rank):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if placement == "looped":
        return [rank + ranks * k for k in range(stages_of_rank)]
    return [ranks * k + (ranks - 1 - rank if k % 2 else rank) for k in range(stages_of_rank)]


def _bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def refused(cases):
    """Returns the error of each case on this rank."""
    told = []
    for case in cases:
        stages = [_stage(index, case["stages"]) for index in case["indices"][dist.get_rank()]]
        if case.get("norm"):
            stages[0].submod.add_module("norm", nn.SyncBatchNorm(WIDTH))
        rows, ids, target = _data(0, torch.float32)
        name, count = case.get("name", "sluice"), case.get("micro_batches", [MICRO_BATCHES] * 2)[dist.get_rank()]
        try:
            schedule = get_schedule_class(name)(stages, count, loss_of)
            schedule.step(*((rows, ids) if stages[0].is_first else ()), target=target)
            told.append("none")
        except (SluiceError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def failed():
    """Raises in a stage in one batch. Returns each rank's error, and whether the next batch has the bits of one
    process."""
    rank = dist.get_rank()
    stage = _stage(rank, dist.get_world_size())
    schedule = get_schedule_class("sluice:1f1b")([stage], MICRO_BATCHES, loss_of)
    seen = []

    def raises(module, arguments):
        seen.append(1)
        if rank == 1 and len(seen) == 4:  # torch infers metadata in the first
            raise ValueError("a bad row")

    handle = stage.submod.register_forward_pre_hook(raises)
    rows, ids, target = _data(0, torch.float32)
    try:
        schedule.step(*((rows, ids) if rank == 0 else ()), target=target)
        told = "none"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    handle.remove()
    stage.submod.zero_grad()
    return told, _is_as_alone(schedule, stage, len(rows))


def uneven(rows_of_batch):
    """Trains with micro-batches of different sizes, as torch splits such a batch. Returns whether all bits are those of
    one process.

    Torch's own schedules allocate receive buffers with the shape of the first micro-batch.
    """
    stage = _stage(dist.get_rank(), dist.get_world_size())
    return _is_as_alone(get_schedule_class("sluice")([stage], MICRO_BATCHES, loss_of), stage, rows_of_batch)


def _is_as_alone(schedule, stage, rows_of_batch):
    """Runs a batch; returns whether output, losses and gradients have the bits of one process."""
    rows, ids, target = (each[:rows_of_batch] for each in _data(0, torch.float32))
    losses = [] if stage.is_last else None
    output = schedule.step(
        *((rows, ids) if stage.is_first else ()), target=target if stage.is_last else None, losses=losses
    )
    alone = [_stage(index, stage.num_stages).submod for index in range(stage.num_stages)]
    outputs, wanted = [], []
    for row, each, label in zip(*(tensor.tensor_split(MICRO_BATCHES) for tensor in (rows, ids, target))):
        state = (row, each)
        for module in alone:
            state = module(*state)
        outputs.append(state)
        wanted.append(loss_of(state, label))
        wanted[-1].backward()
    whole_ones = alone[stage.stage_index].parameters()
    pairs = [(own.grad, whole.grad / MICRO_BATCHES) for own, whole in zip(stage.submod.parameters(), whole_ones)]
    if stage.is_last:
        assert len(losses) == MICRO_BATCHES
        pairs += [(output, torch.cat(outputs)), *zip(losses, wanted)]
    return all(_bytes(own.detach()) == _bytes(whole.detach()) for own, whole in pairs)
