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
BF16 = {"bf16": {"enabled": True}}
# Frozen layers (of six on two stages), options, and the error.
FROZEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "first, zero 1": ("frozen 0 1 2", ZERO1, "stage 0 (layers 0 to 2) has no trainable parameter, and DeepSpeed's"),
    "last, zero 1": ("frozen 3 4 5", ZERO1, "stage 1 (layers 3 to 5) has no trainable parameter, and DeepSpeed's"),
    "last, bf16": ("frozen 3 4 5", BF16, "stage 1 (layers 3 to 5) has no trainable parameter, and DeepSpeed's"),
    "last, clipped": (
        "frozen 3 4 5",
        {"gradient_clipping": 1.0},
        'parameter, and "gradient_clipping" needs a gradient',
    ),
}


@pytest.mark.parametrize("what", FROZEN)
def test_FrozenStage_IsRefusedByNameOnAllRanksBeforeTraining(fresh2: Ranks, what: str) -> None:
    kind, config, words = FROZEN[what]
    for said, losses, _ in fresh2.run("cases_pipe_refused:frozen", kind=kind, config=config):
        assert said.startswith("UnsupportedError") and words in said and not losses, said


@pytest.mark.parametrize("kind", ["frozen 0 1 2", "frozen 3 4 5"])
def test_FrozenStage_ThatTheHostsOptimizerCanHave_Trains(fresh2: Ranks, kind: str) -> None:
    """The gradients of a frozen first stage's outputs are not needed, and not sent."""
    answers = fresh2.run("cases_pipe_refused:frozen", kind=kind, config={})
    for said, losses, _ in answers:
        assert said == "" and losses[0] > losses[-1], (said, losses)
    assert answers[0][2] > 0 and (answers[1][2] == 0) == (kind == "frozen 0 1 2"), answers


def test_FrozenLastStage_WithoutParametersForTheOptimizer_IsNamedOnAllRanks(fresh2: Ranks) -> None:
    for said, *_ in fresh2.run("cases_pipe_refused:frozen", kind="frozen 3 4 5", config={}, is_filtered=True):
        assert (
            said.startswith("UnsupportedError") and "stage 1 (layers 3 to 5) has no trainable parameter: part" in said
        )


def test_FirstStage_ThatIsFrozenLater_TrainsTheOther(fresh2: Ranks) -> None:
    for said, losses, _ in fresh2.run("cases_pipe_refused:frozen", kind="0 1 2", config={}, later=True):
        assert said == "" and losses[0] > losses[-1], (said, losses)


def test_OneStage_StaysTheHosts(fresh2: Ranks) -> None:
    assert len(fresh2.run("cases_pipe_refused:one_stage")) == 2


def test_RanksThatDiffer_AreNamedWithTheirValues(fresh2: Ranks) -> None:
    sections = [{"policy": "1f1b"}, {"policy": "gpipe"}]
    for answer in fresh2.try_run("cases_pipe_refused:differ", section=sections):
        assert answer["error"]["type"] == "DisagreementError"
        assert "{'policy': '1f1b'} on rank 0 and {'policy': 'gpipe'} on rank 1" in answer["error"]["message"]


@pytest.mark.parametrize("where,stage", [("forward", 1), ("backward", 0), ("load", 3)])
def test_CallbackRaises_AllAreTold_AndTheNextBatchesAreAsIfNothingHadBeen(
    fresh4: Ranks, where: str, stage: int
) -> None:
    config = {"zero_optimization": {"stage": 1}} if where == "backward" else {}
    answers = fresh4.run("cases_pipe_refused:failing", stage=stage, where=where, stages=4, config=config)
    own = "StopIteration" if where == "load" else "RuntimeError"
    for rank, found in enumerate(answers):
        for kind, message in found["errors"]:
            if rank == stage:
                assert kind == own, found["errors"]
            else:
                assert kind == "PeerRefused", found["errors"]
                assert f"rank {stage}" in message and own in message, message
                assert where == "load" or f"the layer is out of order in {where}" in message, message
        assert found["stats"]["num_failed"] == 2
        assert found["ours"] == found["stock"], rank


def test_StageIsKilled_IsNamedOnAllOthers(fresh4: Ranks) -> None:
    for rank, answer in enumerate(fresh4.try_run("cases_pipe_refused:killed", dying=(1,), stage=1)):
        if rank != 1:
            kind, message = answer["result"]
            assert kind == "PeerLost" and "rank 1" in message, answer


def test_UnequalMicroBatches_AreAMismatch_AndTheNextBatchWorks(fresh4: Ranks) -> None:
    answers: list[Any] = fresh4.run("cases_pipe_refused:unequal")
    for kind, message, works in answers:
        assert kind == "Mismatch" and "rank 0" in message and works == "True", answers
