# SPDX-License-Identifier: Apache-2.0
"""Tests that errors name invalid values of the key "pipeline", and that a failing batch fails on all ranks."""

from typing import Any

import pytest
from host_release import NO_DUALPIPE, old_host_fails
from rank_harness import Ranks

REFUSED = {
    "no pipeline": "the model is not a deepspeed.pipe.PipelineModule",
    "tensor parallelism": "the topology has tensor parallelism (model = 2)",
    "own engine": "_OwnEngine overrides _exec_schedule",
    "two directions": "DualPipeVEngine overrides LoadMicroBatch, ForwardPass",
}


@pytest.mark.parametrize("what", REFUSED)
def test_Refused_ByName_OrLeftToTheHost(fresh2: Ranks, what: str) -> None:
    old_host_fails(NO_DUALPIPE, what == "two directions")
    section = {"on_unsupported": "warn"}
    assert fresh2.run("cases_pipe_refused:refused", what=what, section=section) == ["stays"] * 2
    assert f"WARNING: batches stay with DeepSpeed: {REFUSED[what]}" in fresh2.output(0)
    for answer in fresh2.try_run("cases_pipe_refused:refused", what=what, section={}):
        assert answer["error"]["type"] == "UnsupportedError"
        assert f'"pipeline": {REFUSED[what]}' in answer["error"]["message"]
        assert '"on_unsupported": "warn"' in answer["error"]["message"]


ZERO1 = {"zero_optimization": {"stage": 1}}
NONE = "has no trainable parameter"
# Frozen layers (of six on two stages), how, and the error, or "" for a pipeline that trains.
FROZEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "first, zero 1": ("frozen 0 1 2", {"config": ZERO1}, f"stage 0 (layers 0 to 2) {NONE}, and DeepSpeed's"),
    "last, zero 1": ("frozen 3 4 5", {"config": ZERO1}, f"stage 1 (layers 3 to 5) {NONE}, and DeepSpeed's"),
    "last, bf16": ("frozen 3 4 5", {"dtype": "bfloat16"}, f"stage 1 (layers 3 to 5) {NONE}, and DeepSpeed's"),
    "last, clipped": (
        *("frozen 3 4 5", {"config": {"gradient_clipping": 1.0}}),
        'parameter, and "gradient_clipping" needs a gradient',
    ),
    "last, not in the optimizer": ("frozen 3 4 5", {"is_filtered": True}, f"stage 1 (layers 3 to 5) {NONE}: part"),
    "first": ("frozen 0 1 2", {}, ""),
    "last": ("frozen 3 4 5", {}, ""),
    "first, later": ("0 1 2", {"later": True}, ""),
}


@pytest.mark.parametrize("what", FROZEN)
def test_FrozenStage_TrainsOrIsRefusedByNameOnAllRanksBeforeTraining(fresh2: Ranks, what: str) -> None:
    kind, how, words = FROZEN[what]
    answers = fresh2.run("cases_pipe_refused:frozen", kind=kind, **how)
    for said, losses, _ in answers:
        if words:
            assert said.startswith("UnsupportedError") and words in said and not losses, said
        else:
            assert said == "" and losses[0] > losses[-1], (said, losses)
    if what in ("first", "last"):  # the gradients of a frozen first stage's outputs are not needed, and not sent
        assert answers[0][2] > 0 and (answers[1][2] == 0) == (what == "first"), answers


def test_OneStage_StaysTheHosts(fresh2: Ranks) -> None:
    assert len(fresh2.run("cases_pipe_refused:one_stage")) == 2


def test_RanksThatDiffer_AreNamedWithTheirValues(fresh2: Ranks) -> None:
    sections = [{"policy": "1f1b"}, {"policy": "gpipe"}]
    for answer in fresh2.try_run("cases_pipe_refused:differ", section=sections):
        assert answer["error"]["type"] == "DisagreementError"
        assert "{'policy': '1f1b'} on rank 0 and {'policy': 'gpipe'} on rank 1" in answer["error"]["message"]


SPLIT = {"policy": "backward_first", "separate_wgrad": True, "in_flight": 3}


@pytest.mark.parametrize(
    "where,stage,how",
    [("forward", 1, {}), ("backward", 0, {"config": ZERO1}), ("backward", 0, {"pipeline": SPLIT}), ("load", 3, {})],
)
def test_CallbackRaises_AllAreTold_AndTheNextBatchesAreAsIfNothingHadBeen(
    fresh4: Ranks, where: str, stage: int, how: dict[str, Any]
) -> None:
    answers = fresh4.run("cases_pipe_refused:failing", stage=stage, where=where, stages=4, **how)
    own = "StopIteration" if where == "load" else "RuntimeError"
    for rank, found in enumerate(answers):
        for error in found["errors"]:
            if rank == stage:
                assert error.startswith(own), error
            else:
                assert error.startswith("PeerRefused"), error
                assert f"rank {stage}" in error and own in error, error
                assert where == "load" or f"the layer is out of order in {where}" in error, error
        assert found["stats"]["num_failed"] == 2
        assert found["ours"] == found["stock"], rank


def test_StageIsKilled_IsNamedOnAllOthers(fresh4: Ranks) -> None:
    for rank, answer in enumerate(fresh4.try_run("cases_pipe_refused:killed", dying=(1,), stage=1)):
        if rank != 1:
            assert answer["result"].startswith("PeerLost") and "rank 1" in answer["result"], answer


def test_UnequalMicroBatches_AreAMismatch_AndTheNextBatchWorks(fresh4: Ranks) -> None:
    answers: list[Any] = fresh4.run("cases_pipe_refused:unequal")
    for error, works in answers:
        assert error.startswith("Mismatch") and "rank 0" in error and works == "True", answers
