# SPDX-License-Identifier: Apache-2.0
"""Tests MoE layers in pipeline stages with every policy and with the options of a layer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks

IN_FLIGHT, BUDGET = 4, 32 << 20
# Options of the MoE layers. Each stage has one, so its outstanding forwards are the micro-batches in flight.
FEATURES: dict[str, dict[str, Any]] = {
    "chosen n": {"chunks": None, "tuner": {"mode": "profile"}},
    "budget": {"chunks": None, "memory_budget": BUDGET, "max_outstanding": IN_FLIGHT},
    "deduplicated": {"deduplicate": True},
}
POLICIES = ("adaptive", "1f1b_hint", "backward_first", "message_driven", "1f1b", "gpipe")
BLOCK = {"ep_size": 2, "k": 2}
# With the first and the last layer, each stage has two layers, one of them with experts.
BLOCKS = {2: [BLOCK, BLOCK], 4: [BLOCK, BLOCK, None, BLOCK, None, BLOCK]}


def trained(ranks: Ranks, stages: int, policy: str, feature: str) -> None:
    """Checks that losses and norms of parameters are those of stock on all ranks, and that the budget holds."""
    pipeline: dict[str, Any] = {"policy": policy, "in_flight": IN_FLIGHT}
    answers = ranks.run(
        "cases_pipeline:parity",
        blocks=BLOCKS[stages],
        stages=stages,
        steps=4,
        sluice={**FEATURES[feature], "pipeline": pipeline},
    )
    for rank, (stock, swapped) in enumerate(answers):
        assert swapped["kinds"] == ["SluiceMOELayer"] * len(stock["kinds"]) and stock["kinds"], rank
        assert swapped["computed_by"] == ["sluice"], rank
        assert swapped["losses"] == pytest.approx(stock["losses"], rel=1e-5), (rank, policy, feature)
        for name, norm in stock["norms"].items():
            assert swapped["norms"][name] == pytest.approx(norm, rel=1e-4, abs=1e-6), (rank, name)
        assert swapped["pipeline"]["num_batches"] == 4 and swapped["pipeline"]["messages_sent"] > 0
        assert 0 < swapped["most_outstanding"] <= IN_FLIGHT
        if feature == "budget":
            assert 0 < swapped["peak_bytes"] <= BUDGET, rank


@pytest.fixture(scope="module")
def pipe4x2() -> Iterator[Ranks]:
    """Yields the ranks of four stages of two replicas."""
    ranks = Ranks(8)
    yield ranks
    ranks.stop()


MOE = {
    "num_chunks": 3, "restore_input": "redispatch", "restore_pre_activation": "recompute", "wgrad": "per_chunk",
    "tokens": 512,
}  # fmt: skip


def test_TwoStages_PlanWithMoeLayers_EachRunsUnderItsOwn(pipe2x2: Ranks, tmp_path: Path) -> None:
    """The plan has the format of `sluice plan --stages --json`."""
    kept = {**MOE, "num_chunks": 1, "restore_input": "keep", "restore_pre_activation": "keep", "wgrad": "deferred"}
    layers = [{"stage": n // 2, "kind": "keep", "moe": None} for n in range(4)]
    layers[1] |= {"kind": "mixed", "moe": MOE}
    layers[2] |= {"kind": "mixed", "moe": kept}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"form": 1, "fits": True, "stages": [{"bytes": 1}] * 2, "layers": layers}))
    pipeline = {"policy": "1f1b", "plan": str(path)}
    sluice = {"chunks": None, "pipeline": pipeline}
    answers = pipe2x2.run("cases_pipeline:parity", blocks=BLOCKS[2], stages=2, steps=3, sluice=sluice)
    for rank, (stock, swapped) in enumerate(answers):
        assert swapped["losses"] == pytest.approx(stock["losses"], rel=1e-5), rank
        for name, norm in stock["norms"].items():
            assert swapped["norms"][name] == pytest.approx(norm, rel=1e-4, abs=1e-6), (rank, name)
    assert sorted(str(each["plans"]) for _, each in answers) == sorted([str([MOE])] * 2 + [str([kept])] * 2)


AROUND = [BLOCK, None, None, BLOCK]


@pytest.mark.parametrize("live", [False, True], ids=["between batches", "during a batch"])
def test_TwoStages_LayersBetweenMoeLayersMove_AndMoeLayersNotDuringABatch(pipe2x2: Ranks, live: bool) -> None:
    """The plain layers 2 and 3 go to the other stage and back. During a batch a MoE layer stays, and the error names
    it."""
    job: dict[str, Any] = {"moves": {"1": [0, 2, 6], "3": [0, 4, 6], "5": [0, 3, 6]}, "live": live, "stages": 2}
    job |= {
        "refused": [[0, 1, 6], [0, 5, 6]] if live else [],
        "sluice": {"pipeline": {"policy": "1f1b", "in_flight": 2}},
    }
    for still, moved, said in pipe2x2.run("cases_pipeline:moving", blocks=AROUND, **job):
        assert moved["losses"] == pytest.approx(still["losses"], rel=1e-6)
        assert moved["norms"] == pytest.approx(still["norms"], rel=1e-6)
        assert moved["computed_by"] == ["sluice"] and moved["parts"] == [0, 3, 6]
        assert len(said) == (12 if live else 0)
        for text, layer in zip(said, [1, 4] * 6):
            assert f"layer {layer} holds a MoE layer, whose ranks meet in each micro-batch" in text, text
        assert sum(moved["pipeline"]["live"][name] for name in ("in_batch", "at_flush")) == (4 if live else 0)


def test_TwoStages_AdaptivePlan_MovesLayersAroundMoeLayers(pipe2x2: Ranks) -> None:
    """With a slow first layer, the second layer would move to the other stage if its MoE layer had no hooks."""
    job: dict[str, Any] = {"moves": {}, "refused": [], "live": False, "stages": 2, "seconds": [9.0, *[1.0] * 5]}
    job["sluice"] = {"pipeline": {"policy": "1f1b", "plan": "adaptive"}}
    for still, moved, _ in pipe2x2.run("cases_pipeline:moving", blocks=AROUND, **job):
        assert moved["losses"] == pytest.approx(still["losses"], rel=1e-6)
        assert moved["parts"] == [0, 2, 6] and "refused" not in moved["pipeline"]["layers"]


# Each policy and each feature runs every day.
DAILY = [("adaptive", "budget"), ("1f1b_hint", "chosen n"), ("backward_first", "deduplicated"), ("1f1b", "budget")]
REST = [(policy, feature) for policy in POLICIES for feature in FEATURES if (policy, feature) not in DAILY]


@pytest.mark.parametrize("policy,feature", DAILY)
def test_TwoStagesOfTwoReplicas_EachFeature_LossesAsStock(pipe2x2: Ranks, policy: str, feature: str) -> None:
    trained(pipe2x2, 2, policy, feature)


@pytest.mark.full
@pytest.mark.parametrize("policy,feature", REST)
def test_TwoStagesOfTwoReplicas_EveryPolicyAndFeature_LossesAsStock(pipe2x2: Ranks, policy: str, feature: str) -> None:
    trained(pipe2x2, 2, policy, feature)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy,feature", [*DAILY, ("message_driven", "chosen n"), ("gpipe", "deduplicated")])
def test_FourStagesOfTwoReplicas_EachFeature_LossesAsStock(pipe4x2: Ranks, policy: str, feature: str) -> None:
    trained(pipe4x2, 4, policy, feature)
