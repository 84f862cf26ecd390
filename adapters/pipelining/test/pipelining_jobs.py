# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: torch's schedules and Sluice's with the same layers."""

from unittest import mock

import torch
import torch.distributed as dist
from sluice.errors import SluiceError
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class

WIDTH, MICRO_BATCHES, STEPS = 16, 8, 2


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


def _stage(index, blocks_of_stage, num_stages, dropout, dtype):
    last = num_stages * blocks_of_stage - 1
    numbers = range(index * blocks_of_stage, (index + 1) * blocks_of_stage)
    return PipelineStage(Blocks(numbers, last, dropout, dtype), index, num_stages, torch.device("cpu"))


def _train(schedule, stages, dtype):
    """Trains, and returns on all ranks: losses, outputs, an evaluation, and gradients and parameters by block."""
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    found = {}
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        rows, ids, target = _data(step, dtype)
        losses = [] if is_last else None
        arguments = (rows, ids) if is_first else ()
        output = schedule.step(*arguments, target=target if is_last else None, losses=losses)
        if is_last:
            found[f"{step} losses"], found[f"{step} output"] = torch.stack(losses).detach(), output.detach()
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                found[f"{step} gradient {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    rows, ids, target = _data(STEPS, dtype)
    with torch.no_grad():
        output = schedule.eval(*((rows, ids) if is_first else ()), target=target if is_last else None)
    if is_last:
        found["evaluation"] = output
    for stage in stages:
        found.update({f"parameter {name}": each.detach() for name, each in stage.submod.named_parameters()})
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return {name: value for each in gathered for name, value in each.items()}


def _indices(placement, stages_of_rank):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if placement == "looped":
        return [rank + ranks * k for k in range(stages_of_rank)]
    return [ranks * k + (ranks - 1 - rank if k % 2 else rank) for k in range(stages_of_rank)]


def against_1f1b(cases):
    """Returns for each case the differences of Sluice's schedule from torch's 1F1B on equal blocks, and counters."""
    return {name: _against_1f1b(**case) for name, case in cases.items()}


def _against_1f1b(name, stages_of_rank=1, placement="looped", dropout=0.0, dtype="float32", **options):
    dtype, ranks = getattr(torch, dtype), dist.get_world_size()
    stock = [_stage(dist.get_rank(), stages_of_rank, ranks, dropout, dtype)]
    wanted = _train(Schedule1F1B(stock[0], MICRO_BATCHES, loss_of), stock, dtype)
    own = [_stage(index, 1, ranks * stages_of_rank, dropout, dtype) for index in _indices(placement, stages_of_rank)]
    schedule = get_schedule_class(name)(
        own[0] if name.startswith("SluiceSingle") else own, MICRO_BATCHES, loss_of, **options
    )
    with mock.patch.object(dist, "isend", wraps=dist.isend) as torchs_send:
        found = _train(schedule, own, dtype)
    assert wanted.keys() == found.keys()
    differing = [each for each, value in wanted.items() if _bytes(value) != _bytes(found[each])]
    linears = sum(isinstance(each, nn.Linear) for stage in own for each in stage.submod.modules())
    counts = {"sent": torchs_send.call_count, "later": schedule.weights_later, "linears": linears}
    return {"compared": len(wanted), "differing": differing, "stats": schedule.sluice.stats(), **counts}


def _bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def refused(cases):
    """Returns the error of each case on this rank."""
    told = []
    for case in cases:
        stages = [_stage(index, 1, case["stages"], 0.0, torch.float32) for index in case["indices"][dist.get_rank()]]
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
    """Raises in a stage in one batch. Returns each rank's error, and whether the next batch equals torch's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stock = [_stage(rank, 1, ranks, 0.0, torch.float32)]
    wanted = _train(Schedule1F1B(stock[0], MICRO_BATCHES, loss_of), stock, torch.float32)
    own = [_stage(rank, 1, ranks, 0.0, torch.float32)]
    schedule = get_schedule_class("sluice:1f1b")(own, MICRO_BATCHES, loss_of)
    seen = []

    def raises(module, arguments):
        seen.append(1)
        if rank == 1 and len(seen) == 4:  # torch infers metadata in the first
            raise ValueError("a bad row")

    handle = own[0].submod.register_forward_pre_hook(raises)
    rows, ids, target = _data(0, torch.float32)
    try:
        schedule.step(*((rows, ids) if rank == 0 else ()), target=target)
        told = "none"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    handle.remove()
    own[0].submod.zero_grad()
    found = _train(schedule, own, torch.float32)
    return told, all(_bytes(value) == _bytes(found[name]) for name, value in wanted.items())


def uneven(rows_of_batch):
    """Trains with micro-batches of different sizes, as torch splits such a batch. Returns (whether all bits are those
    of one process, losses).

    Torch's own schedules allocate receive buffers with the shape of the first micro-batch.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, ids, target = (each[:rows_of_batch] for each in _data(0, torch.float32))
    stage = _stage(rank, 1, ranks, 0.0, torch.float32)
    schedule = get_schedule_class("sluice")([stage], MICRO_BATCHES, loss_of)
    losses = [] if stage.is_last else None
    schedule.step(*((rows, ids) if stage.is_first else ()), target=target if stage.is_last else None, losses=losses)
    alone = [_stage(index, 1, ranks, 0.0, torch.float32).submod for index in range(ranks)]
    wanted = []
    for row, each, label in zip(*(tensor.tensor_split(MICRO_BATCHES) for tensor in (rows, ids, target))):
        state = (row, each)
        for module in alone:
            state = module(*state)
        wanted.append(loss_of(state, label))
        wanted[-1].backward()
    whole_ones = alone[rank].parameters()
    pairs = [(own.grad, whole.grad / MICRO_BATCHES) for own, whole in zip(stage.submod.parameters(), whole_ones)]
    pairs += list(zip(losses or [], wanted))
    assert len({len(each) for each in rows.tensor_split(MICRO_BATCHES)}) > 1
    return all(_bytes(own.detach()) == _bytes(whole.detach()) for own, whole in pairs), len(pairs)
