# SPDX-License-Identifier: Apache-2.0
"""Tests MoE layers in DeepSpeed's pipeline engine, with groups per stage and several outstanding forwards."""

import json
from pathlib import Path
from typing import Any

import pytest
from host_release import CHECKPOINTING, old_host_fails
from rank_harness import Ranks

BUDGET = 32 << 20
BLOCK = {"ep_size": 2, "k": 2}
CHOSEN = {"chunks": None, "tuner": {"mode": "profile"}}
PLANNED = {"chunks": None, "memory_budget": BUDGET}
CHECKPOINTED = {
    "zero_optimization": {"stage": 1},
    # With the reentrant form DeepSpeed itself fails if a stage passes on several tensors.
    "pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False},
}


def _policy(policy: str, **more: Any) -> dict[str, Any]:
    return {"pipeline": {"policy": policy, "in_flight": 4, **more}}


# With the first and the last layer, each of two stages has two layers with two blocks. "outstanding": the most forwards
# that wait for their backward, by rank; with a "pipeline", Sluice's schedule decides it.
CASES: dict[str, dict[str, Any]] = {
    "experts that are called": {
        **{"blocks": [{"ep_size": 1, "expert": "tuple"}] * 2, "ranks": "pipe2", "outstanding": [2, 1]},
    },
    "groups of two": {
        "blocks": [{**BLOCK, "expert": "gated"}, {**BLOCK, "expert": "gated", "drop_tokens": False}],
        "outstanding": [2, 2, 1, 1],
    },
    # The host walks a stage's graph once for the rows and once for the gates' losses.
    "several blocks": {"blocks": [BLOCK, {**BLOCK, "expert": "tuple"}, BLOCK, None], "outstanding": [2, 2, 1, 1]},
    # While the tuner tries numbers of chunks, outstanding forwards have different n.
    "checkpointed, chosen chunks": {"steps": 5, "sluice": CHOSEN, "config": CHECKPOINTED},
    "checkpointed, chosen plans": {"steps": 5, "sluice": PLANNED, "config": CHECKPOINTED},
    "four outstanding under a budget": {
        **{"blocks": [{"ep_size": 1, "k": 2}] * 2 + [None, {"ep_size": 1}] * 2, "ranks": "pipe4", "steps": 5},
        **{"sluice": {**PLANNED, "max_outstanding": 4}, "outstanding": [4, 3, 2, 1]},
    },
    "adaptive, budget": {"sluice": {**PLANNED, "max_outstanding": 4, **_policy("adaptive")}},
    "1f1b_hint, chosen n": {"sluice": {**CHOSEN, **_policy("1f1b_hint")}},
    "backward_first, deduplicated": {"sluice": {"deduplicate": True, **_policy("backward_first")}},
    "message_driven": {"sluice": _policy("message_driven")},
    "1f1b, budget": {"sluice": {**PLANNED, "max_outstanding": 4, **_policy("1f1b")}},
    # Experts compute weight gradients in the backward, and the layers around them later.
    "backward_first, split": {"sluice": _policy("backward_first", separate_wgrad=True)},
}


def _compare(answers: list[Any], outstanding: list[int] | None = None) -> None:
    for rank, (stock, swapped) in enumerate(answers):
        assert stock["kinds"] == ["MOELayer"] * len(stock["kinds"])
        assert swapped["kinds"] == ["SluiceMOELayer"] * len(stock["kinds"])
        assert swapped["losses"] == pytest.approx(stock["losses"], rel=1e-5), rank
        assert stock["losses"][-1] != stock["losses"][0]
        for name, norm in stock["norms"].items():
            assert swapped["norms"][name] == pytest.approx(norm, rel=1e-4, abs=1e-6), (rank, name)
        if outstanding is not None:
            assert stock["most_outstanding"] == swapped["most_outstanding"] == outstanding[rank], rank


def _parity(ranks: Ranks, section: Any, blocks: list[Any], stages: int = 2, target: str = "parity_", **job: Any) -> Any:
    return ranks.run(
        f"cases_pipe:{target}with_experts", section=section, module={"blocks": blocks}, stages=stages, **job
    )


@pytest.mark.parametrize("case", CASES)
def test_Experts_InEveryStage_LossesAsStock(request: pytest.FixtureRequest, case: str) -> None:
    job = {"blocks": [BLOCK, BLOCK], "ranks": "pipe2x2", "outstanding": None, "steps": 4, "sluice": {}, **CASES[case]}
    if "config" in job:
        old_host_fails(CHECKPOINTING, hangs=True)
    fixture, outstanding, section = job.pop("ranks"), job.pop("outstanding"), job.pop("sluice")
    answers = _parity(
        request.getfixturevalue(fixture), section, job.pop("blocks"), 4 if fixture == "pipe4" else 2, **job
    )
    _compare(answers, outstanding)
    for rank, (stock, swapped) in enumerate(answers):
        assert stock["kinds"], rank
        if "memory_budget" in section:
            assert 0 < swapped["peak_bytes"] <= BUDGET, rank
        if "pipeline" in section:
            stats = swapped["stats"]
            assert stats["num_batches"] == 4 and stats["messages_sent"] > 0
            assert 0 < swapped["most_outstanding"] <= 4
            assert (stats.get("weights_later", 0) > 0) == ("separate_wgrad" in section["pipeline"]), rank


def test_ExpertsInTheSecondStageAlone_ItsFirstRankSaysTheBannerAndTheOtherHasNoNumbers() -> None:
    sides, banners = [], []
    for section in (None, {}):
        with Ranks(4) as ranks:
            sides.append(_parity(ranks, section, [None, {"ep_size": 2, "k": 1}], target="", steps=3))
            said = [ranks.output(rank).splitlines() for rank in range(4)]
        banners.append([[line for line in lines if "MoE layers run on Sluice" in line] for lines in said])
    _compare(list(zip(*sides)), [0, 0, 1, 1])
    assert [len(found["computed_by"]) for found in sides[1]] == [0, 0, 1, 1]
    assert [found["asked"] for found in sides[1]] == [[True, True]] * 4  # for the engine and for its module
    assert banners[0] == [[]] * 4
    assert [len(lines) for lines in banners[1]] == [1, 0, 1, 0], banners
    assert "stage 0 of 2: 0 of 0 MoE layers" in banners[1][0][0]
    assert "stage 1 of 2: 1 of 1 MoE layers" in banners[1][2][0]


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
    section = {"chunks": None, "pipeline": {"policy": "1f1b", "plan": str(path)}}
    answers = _parity(pipe2x2, section, [BLOCK, BLOCK], steps=3)
    _compare(answers)
    assert sorted(str(each["plans"]) for _, each in answers) == sorted([str([MOE])] * 2 + [str([kept])] * 2)
