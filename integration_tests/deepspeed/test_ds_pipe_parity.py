# SPDX-License-Identifier: Apache-2.0
"""Tests DeepSpeed's pipeline engine through Sluice: the bits of the host's schedules, without the host's messages."""

from pathlib import Path
from typing import Any

import pytest
from host_release import CHECKPOINTING, old_host_fails
from rank_harness import Ranks


def compare(answers: list[Any], batches: int) -> None:
    for rank, (stock, ours) in enumerate(answers):
        for what in ("losses", "evaluations", "parameters", "optimizer", "random"):
            assert ours[what] == stock[what], (rank, what)
        assert stock["losses"][-1] != stock["losses"][0]
        assert stock["messages"] > 0 and ours["messages"] == 0
        assert ours["stats"]["batches"] == ours["stats"]["num_batches"] == batches
        assert ours["stats"]["messages_sent"] > 0


ZERO1 = {"zero_optimization": {"stage": 1}}
INTERVAL = {"activation_checkpoint_interval": 1}

TWO = {
    "f32": {"kind": "plain", "pipeline": {"policy": "message_driven"}},
    "bf16 zero 1": {"kind": "plain", "dtype": "bfloat16", "config": ZERO1, "pipeline": {"in_flight": 4}},
    "dropout zero 1": {"kind": "dropout", "config": ZERO1, "pipeline": {"policy": "backward_first", "in_flight": 3}},
    "varied": {"kind": "dropout", "module": {"dynamic_shape": True}, "varied": True, "pipeline": {}},
}
REPLICAS = {
    "tied bf16 zero 1": {"kind": "tied", "dtype": "bfloat16", "config": ZERO1, "pipeline": {"in_flight": 4}},
    "tied f32": {"kind": "tied", "pipeline": {}},
}
FOUR = {
    "tied zero 1": {"kind": "tied", "config": ZERO1, "pipeline": {}},
    "bf16": {"kind": "dropout", "dtype": "bfloat16", "pipeline": {"policy": "message_driven", "in_flight": 8}},
    "varied zero 1": {
        **{"kind": "plain", "module": {"dynamic_shape": True}, "varied": True, "config": ZERO1},
        "pipeline": {"policy": "1f1b"},
    },
}


@pytest.mark.parametrize("case", TWO)
def test_TwoStages_TwentySteps_SameBitsAsStock(pipe2: Ranks, case: str) -> None:
    compare(pipe2.run("cases_pipe:parity", steps=20, stages=2, evaluates=True, **TWO[case]), batches=24)


@pytest.mark.parametrize("case", REPLICAS)
def test_TwoStagesOfTwoReplicas_TwentySteps_SameBitsAsStock(pipe2x2: Ranks, case: str) -> None:
    compare(pipe2x2.run("cases_pipe:parity", steps=20, stages=2, **REPLICAS[case]), batches=20)


@pytest.mark.parametrize("case", FOUR)
def test_FourStages_TwentySteps_SameBitsAsStock(pipe4: Ranks, case: str) -> None:
    compare(pipe4.run("cases_pipe:parity", steps=20, stages=4, **FOUR[case]), batches=20)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "stages, replicas, steps, changes",
    [
        (8, 1, 200, {"policy": "backward_first"}),
        (4, 2, 200, {"policy": "message_driven", "zero": 1, "reentrant": False}),
        (8, 2, 20, {"policy": "1f1b_hint", "zero": 1, "dtype": "bfloat16", "reentrant": True}),
    ],
)
def test_ManyRanks_WithDelaysDropoutAndTiedLayers_SameBitsAsStock(
    stages: int, replicas: int, steps: int, changes: dict[str, Any]
) -> None:
    """Trains with more ranks. The pairs of features (integration_tests/pairs) only use two stages."""
    config: dict[str, Any] = {"zero_optimization": {"stage": changes.get("zero", 0)}}
    if "reentrant" in changes:
        old_host_fails(CHECKPOINTING)
        config["pipeline"] = {**INTERVAL, "use_reentrant": changes["reentrant"]}
    case = {"kind": "deep dropout tied delays", "dtype": changes.get("dtype", "float32"), "config": config}
    ranks = Ranks(stages * replicas)  # not shared: the host keeps a topology until the process ends
    try:
        pipeline = {"policy": changes["policy"]}
        answers = ranks.run("cases_pipe:parity", deadline=1700, steps=steps, stages=stages, pipeline=pipeline, **case)
    finally:
        ranks.stop()
    compare(answers, batches=steps)


@pytest.mark.parametrize("reentrant", [True, False])
def test_Checkpointing_OfBothKinds_SameBitsAsStock(pipe2: Ranks, reentrant: bool) -> None:
    old_host_fails(CHECKPOINTING)
    config = {"pipeline": {**INTERVAL, "use_reentrant": reentrant}}
    answers = pipe2.run("cases_pipe:parity", steps=10, stages=2, kind="dropout", config=config, pipeline={})
    compare(answers, batches=10)


@pytest.mark.parametrize("policy", ["adaptive", "message_driven", "backward_first", "1f1b_hint", "1f1b", "gpipe"])
def test_Policies_Each_SameBitsAsStock(pipe4: Ranks, policy: str) -> None:
    answers = pipe4.run(
        "cases_pipe:parity", steps=3, stages=4, kind="plain", pipeline={"policy": policy, "in_flight": 4}
    )
    compare(answers, batches=3)
    for rank, (_, ours) in enumerate(answers):
        assert 0 < ours["stats"]["most_in_flight"] <= 4, rank


def test_IdsAndMasks_OverFourStages_TrainAsInOneProcess(pipe4: Ranks) -> None:
    """Stock hangs here: it has one receive buffer for all dtypes. With Sluice each message carries its own dtype."""
    for found in pipe4.run("cases_pipe:alone", steps=10, stages=4, kind="words", pipeline={}):
        assert found["losses"] == pytest.approx(found["torch"], rel=1e-6)
        assert found["messages"] == 0


def test_Monitor_OfTheHost_IsWrittenTheSame(pipe2: Ranks, tmp_path: Path) -> None:
    stock, ours = pipe2.run("cases_pipe:monitored", folder=str(tmp_path))[0]
    assert ours == stock and any("train_loss" in text for text in stock)


def test_ExpertsInStages_OfTwoReplicas_LossesAsStock(pipe2x2: Ranks) -> None:
    """Expert-parallel layers span both replicas, so all replicas of a stage must run them in the same order."""
    block = {"ep_size": 2, "k": 2}
    answers = pipe2x2.run(
        "cases_pipeline:parity",
        blocks=[block, block],
        stages=2,
        sluice={"pipeline": {"policy": "message_driven", "in_flight": 4}},
    )
    for rank, (stock, swapped) in enumerate(answers):
        assert swapped["losses"] == pytest.approx(stock["losses"], rel=1e-5), rank
        for name, norm in stock["norms"].items():
            assert swapped["norms"][name] == pytest.approx(norm, rel=1e-4, abs=1e-6), (rank, name)
