# SPDX-License-Identifier: Apache-2.0
"""Tests that Sluice's schedules for torch.distributed.pipelining have the bits of torch's 1F1B."""

import pipelining_jobs as jobs
import pytest
import ranks

CASES = {
    "single": {"name": "SluiceSingle", "dropout": 0.1},
    "message driven, bf16": {"name": "sluice:message_driven", "dtype": "bfloat16", "in_flight": 3, "dropout": 0.1},
    "split weight gradients": {"name": "sluice", "separate_wgrad": True},
    "v": {"name": "sluice:v", "stages_of_rank": 2, "placement": "v"},
    "three stages on each rank": {"name": "sluice", "stages_of_rank": 3, "separate_wgrad": True},
}
SPLIT = ("split weight gradients", "v", "three stages on each rank")


def test_Schedules_LossesOutputsGradients_SameBitsAs1F1B():
    for rank, answers in enumerate(ranks.run(2, jobs.against_1f1b, cases=CASES)):
        for case, found in answers.items():
            assert found["differing"] == [] and found["compared"] > 40, (rank, case, found["differing"])
            assert found["stats"]["num_batches"] == 3
            # All except those of the first micro-batch, whose forward shows how the stage uses its parameters.
            assert found["later"] == (found["linears"] * (2 * 8 - 1) if case in SPLIT else 0), (rank, case)
            assert found["stats"]["messages_sent"] > 0 and found["sent"] == 0, (rank, case)


def test_StageRaises_OthersAreToldAndTheNextBatchIsRight():
    (first, first_good), (second, second_good) = ranks.run(2, jobs.failed)
    assert first.startswith("PeerRefused") and "rank 1" in first and "failed to run forward" in first, first
    assert second.startswith("RuntimeError") and "failed to run forward" in second, second
    assert first_good and second_good


def test_MicroBatches_OfDifferentSizes_SameBitsAsInOneProcess():
    for rank, (is_same, compared) in enumerate(ranks.run(2, jobs.uneven, rows_of_batch=21)):
        assert is_same and compared > 5, rank


REFUSED = {
    "uneven": {"stages": 3, "indices": [[0, 2], [1]]},
    "order": {"stages": 4, "indices": [[0, 1], [2, 3]]},
    "v": {"stages": 4, "indices": [[0, 2], [1, 3]], "name": "sluice:v"},
    "norm": {"stages": 2, "indices": [[0], [1]], "norm": True},
    "micro-batches": {"stages": 2, "indices": [[0], [1]], "micro_batches": [8, 4]},
    "policy": {"stages": 2, "indices": [[0], [1]], "name": "sluice:fastest"},
}


def test_Refused_ByNameOnAllRanks():
    for told in ranks.run(2, jobs.refused, cases=list(REFUSED.values())):
        uneven, order, v, norm, count, policy = told
        assert "Unsupported" in uneven and "holds 2 of 3 stages on 2 ranks" in uneven, uneven
        assert "Unsupported" in order and "holds stages 0, 1" in order, order
        assert "Unsupported" in v and "holds stages 0, 2" in v, v
        assert "Unsupported" in norm and "SyncBatchNorm" in norm and "1f1b" in norm, norm
        assert '"micro-batches" is 8 on rank 0 and 4 on rank 1' in count, count
        assert "ValueError" in policy and "fastest" in policy and "zero_bubble" in policy, policy


def test_Names_OfTorch_StayTorchs():
    from torch.distributed.pipelining import schedules

    assert schedules.get_schedule_class("1f1b") is schedules.Schedule1F1B
    sluice = schedules.get_schedule_class("Sluice")
    assert issubclass(sluice, schedules.PipelineScheduleMulti)
    assert issubclass(schedules.get_schedule_class("sluicesingle:gpipe"), schedules.PipelineScheduleSingle)
    assert schedules.get_schedule_class("sluice:V") is schedules.get_schedule_class("SLUICE:v")
    with pytest.raises(ValueError, match="Unknown schedule name"):
        schedules.get_schedule_class("fastest")
