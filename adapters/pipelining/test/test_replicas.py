# SPDX-License-Identifier: Apache-2.0
"""Tests stages with FSDP or DDP replicas under Sluice's schedules: torch's bits, or an error with the reason."""

import pytest
import ranks
import torch
import torch.distributed as dist
from pipelining_jobs import MICRO_BATCHES, Blocks, _bytes, _data, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

STEPS = 2


def _replicated(how, mesh):
    """Returns the stage of this rank. There are two stages with two replicas each."""
    index, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    module = Blocks(range(2 * index, 2 * index + 2), 3, 0.0, torch.float32)
    if how == "fsdp":
        for block in module.blocks.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
    else:
        module = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    return PipelineStage(module, index, 2, torch.device("cpu"), group=group)


def _train(schedule, stage, replica):
    """Returns losses, and the gradients of this rank: its shards under FSDP."""
    found = []
    for step in range(STEPS):
        rows, ids, target = _data(10 * replica + step, torch.float32)
        losses = [] if stage.is_last else None
        schedule.step(*((rows, ids) if stage.is_first else ()), target=target if stage.is_last else None, losses=losses)
        found += [_bytes(loss.detach()) for loss in losses or ()]
        for parameter in stage.submod.parameters():
            grad = parameter.grad
            found.append(_bytes(grad.to_local() if hasattr(grad, "to_local") else grad))
        for parameter in stage.submod.parameters():
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
        stage.submod.zero_grad()
    return found


def against_1f1b(cases):
    """Returns for each (how, schedule) whether the bits are those of torch's 1F1B, or the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica, told = mesh["dp"].get_local_rank(), []
    stock = {}
    for how, name in cases:
        if how not in stock:
            stage = _replicated(how, mesh)
            stock[how] = _train(Schedule1F1B(stage, MICRO_BATCHES, loss_of), stage, replica)
        stage = _replicated(how, mesh)
        schedule = get_schedule_class(name)(stage, MICRO_BATCHES, loss_of)
        try:
            found = _train(schedule, stage, replica)
            assert schedule.sluice.stats()["messages_sent"] > 0
            told.append("same" if found == stock[how] else "others")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return told


SAME = [("fsdp", "sluice:1f1b"), ("fsdp", "sluice:gpipe"), ("ddp", "sluice"), ("ddp", "sluice:backward_first")]
REFUSED = {
    ("fsdp", "sluice"): "FSDPBlocks synchronizes its replicas within a pass, but policy adaptive does not",
    ("fsdp", "sluice:zero_bubble"): "FSDP is not supported with separate weight gradients",
    ("ddp", "sluice:zero_bubble"): "DistributedDataParallel reduces gradients in a whole backward",
}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def told():
    cases = [*SAME, *REFUSED]
    return [dict(zip(cases, each)) for each in ranks.run(4, against_1f1b, cases=cases)]


@pytest.mark.parametrize("case", SAME, ids=" ".join)
def test_Schedule_OverReplicas_SameBitsAs1F1B(told, case):
    assert [each[case] for each in told] == ["same"] * 4


@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_Schedule_OverReplicasThatItCannotRun_IsRefusedOnAllRanks(told, case):
    for each in told:
        assert each[case].startswith("Unsupported") and REFUSED[case] in each[case], each[case]
