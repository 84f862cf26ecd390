# SPDX-License-Identifier: Apache-2.0
"""Tests DeepSpeed's pipeline engine with split weight gradients: the bits of the host's schedules."""

from typing import Any

import pytest
from host_release import CHECKPOINTING, old_host_fails
from rank_harness import Ranks
from test_ds_pipe_parity import INTERVAL, ZERO1, compare

STEPS = 5
SPLIT = {"policy": "backward_first", "separate_wgrad": True, "in_flight": 3}
MICRO_BATCHES = 4
POLICIES = ("adaptive", "zero_bubble", "backward_first", "message_driven", "1f1b_hint", "gpipe")

TWO: dict[str, dict[str, Any]] = {
    "zero bubble": {"kind": "plain", "pipeline": {"policy": "zero_bubble"}},
    "bf16": {"kind": "plain", "dtype": "bfloat16", "pipeline": SPLIT},
    "dropout, adaptive": {"kind": "dropout", "config": ZERO1, "pipeline": {"separate_wgrad": True}},
    "varied": {"kind": "dropout", "module": {"dynamic_shape": True}, "varied": True, "pipeline": SPLIT},
}
REPLICAS: dict[str, dict[str, Any]] = {
    "tied bf16 zero 1": {"kind": "tied", "dtype": "bfloat16", "config": ZERO1, "pipeline": SPLIT},
    "tied": {"kind": "tied", "pipeline": {"policy": "zero_bubble"}},
}


def _same(answers: list[Any], steps: int = STEPS) -> None:
    """Checks bits, and that each of two linear layers had a separate weight gradient in each micro-batch but the first,
    whose backward shows how the stage uses its parameters."""
    compare(answers, batches=steps)
    for rank, (_, ours) in enumerate(answers):
        later = ours["stats"]["weights_later"]
        assert later > 0 and later % (2 * (steps * MICRO_BATCHES - 1)) == 0, (rank, later)
        assert ours["stats"]["most_held"] > 0, rank


@pytest.mark.parametrize("case", TWO)
def test_TwoStages_SplitWeights_SameBitsAsStock(pipe2: Ranks, case: str) -> None:
    _same(pipe2.run("cases_pipe:parity", steps=STEPS, stages=2, **TWO[case]))


@pytest.mark.parametrize("case", REPLICAS)
def test_TwoStagesOfTwoReplicas_SplitWeights_SameBitsAsStock(pipe2x2: Ranks, case: str) -> None:
    _same(pipe2x2.run("cases_pipe:parity", steps=STEPS, stages=2, **REPLICAS[case]))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_FourStages_SplitWeights_SameBitsAsStock(pipe4: Ranks, policy: str, dtype: str) -> None:
    pipeline = {"policy": policy, "separate_wgrad": True, "in_flight": 4}
    config = ZERO1 if policy in ("zero_bubble", "1f1b_hint") else {}
    answers = pipe4.run(
        "cases_pipe:parity", steps=20, stages=4, kind="deep", dtype=dtype, config=config, pipeline=pipeline
    )
    _same(answers, 20)


@pytest.mark.parametrize("reentrant", [True, False])
def test_Checkpointing_SplitWeights_SameBitsAsStock(pipe2: Ranks, reentrant: bool) -> None:
    old_host_fails(CHECKPOINTING)
    config = {"pipeline": {**INTERVAL, "use_reentrant": reentrant}}
    answers = pipe2.run("cases_pipe:parity", steps=STEPS, stages=2, kind="dropout", config=config, pipeline=SPLIT)
    _same(answers)


def test_SeveralTensorsHandedOn_SplitWeights_TrainAsInOneProcess(pipe2: Ranks) -> None:
    """A stage walks its graph once for each tensor that it passes on."""
    for found in pipe2.run("cases_pipe:alone", steps=10, stages=2, kind="words", pipeline=SPLIT):
        assert found["losses"] == pytest.approx(found["torch"], rel=1e-6)
        assert found["stats"]["weights_later"] > 0


def test_ExpertsInStages_SplitWeights_LossesAsStock(pipe2x2: Ranks) -> None:
    """Experts compute weight gradients in the backward, and the layers around them later."""
    block = {"ep_size": 2, "k": 2}
    answers = pipe2x2.run("cases_pipeline:parity", blocks=[block, block], stages=2, sluice={"pipeline": SPLIT})
    for rank, (stock, swapped) in enumerate(answers):
        assert swapped["losses"] == pytest.approx(stock["losses"], rel=1e-5), rank
        assert swapped["pipeline"]["weights_later"] > 0, rank
        for name, norm in stock["norms"].items():
            assert swapped["norms"][name] == pytest.approx(norm, rel=1e-4, abs=1e-6), (rank, name)


def test_CallbackRaises_SplitWeights_TheNextBatchesAreAsIfNothingHadBeen() -> None:
    with Ranks(2) as ranks:
        answers = ranks.run("cases_pipe_refused:failing", stage=0, where="backward", stages=2, pipeline=SPLIT)
    for rank, found in enumerate(answers):
        assert [kind for kind, _ in found["errors"]] == ["PeerRefused" if rank else "RuntimeError"] * 2, found["errors"]
        assert found["stats"]["num_failed"] == 2 and found["ours"] == found["stock"], rank
