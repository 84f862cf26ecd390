# SPDX-License-Identifier: Apache-2.0
"""Tests the names of Sluice's schedules for torch.distributed.pipelining, batches that fail or are
uneven, refusals, and stages with FSDP or DDP replicas.

Rows of integration_tests/pairs compare the schedules with torch's 1F1B.
"""

import pipelining_jobs as jobs
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel


def test_StageRaises_OthersAreToldAndTheNextBatchIsRight():
    (first, first_good), (second, second_good) = ranks.run(2, jobs.failed)
    assert first.startswith("PeerRefused") and "rank 1" in first and "failed to run forward" in first, first
    assert second.startswith("RuntimeError") and "failed to run forward" in second, second
    assert first_good and second_good


def test_MicroBatches_OfDifferentSizes_SameBitsAsInOneProcess():
    assert ranks.run(2, jobs.uneven, rows_of_batch=21) == [True, True]


# The options of each refused case, and words of its error.
TWO = {"stages": 2, "indices": [[0], [1]]}
REFUSED = [
    ({"stages": 3, "indices": [[0, 2], [1]]}, ("Unsupported", "holds 2 of 3 stages on 2 ranks")),
    ({"stages": 4, "indices": [[0, 1], [2, 3]]}, ("Unsupported", "holds stages 0, 1")),
    ({"stages": 4, "indices": [[0, 2], [1, 3]], "name": "sluice:v"}, ("Unsupported", "holds stages 0, 2")),
    ({**TWO, "norm": True}, ("Unsupported", "SyncBatchNorm", "1f1b")),
    ({**TWO, "micro_batches": [8, 4]}, ('"micro-batches" is 8 on rank 0 and 4 on rank 1',)),
    ({**TWO, "name": "sluice:fastest"}, ("ValueError", "fastest", "zero_bubble")),
]


def test_Refused_ByNameOnAllRanks():
    for told in ranks.run(2, jobs.refused, cases=[case for case, _ in REFUSED]):
        for text, (case, words) in zip(told, REFUSED):
            assert all(word in text for word in words), (case, text)


def test_Names_OfTorch_StayTorchs():
    from torch.distributed.pipelining import schedules

    assert schedules.get_schedule_class("1f1b") is schedules.Schedule1F1B
    sluice = schedules.get_schedule_class("Sluice")
    assert issubclass(sluice, schedules.PipelineScheduleMulti)
    assert issubclass(schedules.get_schedule_class("sluicesingle:gpipe"), schedules.PipelineScheduleSingle)
    assert schedules.get_schedule_class("sluice:V") is schedules.get_schedule_class("SLUICE:v")
    with pytest.raises(ValueError, match="Unknown schedule name"):
        schedules.get_schedule_class("fastest")


# ---- stages with FSDP or DDP replicas ----


def _replicated(how, mesh):
    """Returns the stage of this rank. There are two stages with two replicas each."""
    index, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    module = jobs.Blocks(range(2 * index, 2 * index + 2), 3, 0.0, torch.float32)
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
    for step in range(2):
        rows, ids, target = jobs._data(10 * replica + step, torch.float32)
        losses = [] if stage.is_last else None
        schedule.step(*((rows, ids) if stage.is_first else ()), target=target if stage.is_last else None, losses=losses)
        found += [jobs._bytes(loss.detach()) for loss in losses or ()]
        for parameter in stage.submod.parameters():
            grad = parameter.grad
            found.append(jobs._bytes(grad.to_local() if hasattr(grad, "to_local") else grad))
        for parameter in stage.submod.parameters():
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
        stage.submod.zero_grad()
    return found


def replicas(cases):
    """Returns for each (how, schedule) whether the bits are those of torch's 1F1B, or the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica, told = mesh["dp"].get_local_rank(), []
    stock = {}
    for how, name in cases:
        if how not in stock:
            stage = _replicated(how, mesh)
            stock[how] = _train(Schedule1F1B(stage, jobs.MICRO_BATCHES, jobs.loss_of), stage, replica)
        stage = _replicated(how, mesh)
        schedule = get_schedule_class(name)(stage, jobs.MICRO_BATCHES, jobs.loss_of)
        try:
            found = _train(schedule, stage, replica)
            assert schedule.sluice.stats()["messages_sent"] > 0
            told.append("same" if found == stock[how] else "others")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return told


SAME = [("fsdp", "sluice:1f1b"), ("fsdp", "sluice:gpipe"), ("ddp", "sluice"), ("ddp", "sluice:backward_first")]
UNSUPPORTED = {
    ("fsdp", "sluice"): "FSDPBlocks synchronizes its replicas within a pass, but policy adaptive does not",
    ("fsdp", "sluice:zero_bubble"): "FSDP is not supported with separate weight gradients",
    ("ddp", "sluice:zero_bubble"): "DistributedDataParallel reduces gradients in a whole backward",
}


@pytest.fixture(scope="module")
def told():
    cases = [*SAME, *UNSUPPORTED]
    return [dict(zip(cases, each)) for each in ranks.run(4, replicas, cases=cases)]


@pytest.mark.full
@pytest.mark.parametrize("case", SAME, ids=" ".join)
def test_Schedule_OverReplicas_SameBitsAs1F1B(told, case):
    assert [each[case] for each in told] == ["same"] * 4


@pytest.mark.full
@pytest.mark.parametrize("case", UNSUPPORTED, ids=" ".join)
def test_Schedule_OverReplicasThatItCannotRun_IsRefusedOnAllRanks(told, case):
    for each in told:
        assert each[case].startswith("Unsupported") and UNSUPPORTED[case] in each[case], each[case]
