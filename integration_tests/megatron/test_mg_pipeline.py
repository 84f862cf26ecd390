# SPDX-License-Identifier: Apache-2.0
"""Compares Sluice with stock under Megatron's own 1F1B on gloo, plain and interleaved: 2 stages of 2 EP ranks.

Ranks 0 and 1 are the first stage. A rank's budget is divided by what its schedule leaves outstanding: with four layers
and four micro-batches 1F1B holds two micro-batches of two layers in the first stage and one in the last; interleaved,
with one layer in each of a stage's two parts, five and three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mg_ranks import MegatronRanks
from sluice.planning.stages_command import layout_of
from test_mg_training import check_as_stock

SOON = 60.0  # seconds: far below the timeout of the groups
OUTSTANDING = {None: [4, 4, 2, 2], 2: [5, 5, 3, 3]}


def _trained(ranks: MegatronRanks, **case: Any) -> list[dict[str, Any]]:
    shape = {"ep": 2, "stages": 2, "num_layers": 4, "microbatches": 4}
    return ranks.run("mg_models:train_both", **{**shape, **case})


def _check(found: list[dict[str, Any]], parts: int | None) -> None:
    check_as_stock(found)
    assert [each["layers"] for each in found] == [2] * 4
    assert [each["most_outstanding"] for each in found] == OUTSTANDING[parts]
    for each in found:  # only the last stage has losses
        assert each["passes"] >= 2 * 3 * 4, each  # layers, steps, micro-batches
        assert min(each["stock"]["norms"]) > 0
    assert min(found[3]["stock"]["losses"]) > 1 and max(found[0]["stock"]["losses"]) == 0


@pytest.mark.parametrize("parts, budget", [(None, 0), (2, 0), (None, 16 << 20), (2, 17 << 20)])
def test_TwoStages_GroupOfTwoInEach_AsStock(ranks4: MegatronRanks, parts: int | None, budget: int) -> None:
    """A budget counts what the schedule holds. Each case has another budget, because layers with equal options share a
    context, with the first model's plan."""
    options = {"memory_budget": budget} if budget else {"chunks": 2}
    found = _trained(ranks4, parts=parts, options=options)
    _check(found, parts)
    if budget:
        assert [each["planned_outstanding"] for each in found] == OUTSTANDING[parts]
        assert all(0 < each["peak_bytes"] <= budget for each in found)


def test_TwoStages_UnevenUnderABudget_AsStock(oldest4: MegatronRanks) -> None:
    """The first stage has three layers, of which the last has no experts, and the second has one."""
    case = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}
    case |= {"moe_layer_freq": [1, 1, 0, 1], "options": {"memory_budget": 18 << 20}}
    found = _trained(oldest4, **case)
    check_as_stock(found)
    assert [each["layers"] for each in found] == [2, 2, 1, 1]
    assert [each["most_outstanding"] for each in found] == [4, 4, 1, 1]
    assert [each["planned_outstanding"] for each in found] == [4, 4, 1, 1]


def test_TwoStages_LaidOutByAPlan_AsStock(oldest4: MegatronRanks) -> None:
    layout = layout_of(["embedding", "block", "block", "block", "block", "loss"], [0, 0, 0, 0, 1, 1], 2)
    assert layout == "Ettt|tL"
    found = _trained(oldest4, pipeline_model_parallel_layout=layout)
    check_as_stock(found)
    assert [each["layers"] for each in found] == [3, 3, 1, 1]


def test_TwoStages_NamedSpecInterleaved_EachPartFindsItsLayers(oldest4: MegatronRanks) -> None:
    _check(_trained(oldest4, parts=2, how="named"), 2)


def test_RankOfAStageKilled_ItsGroupIsToldWho_AndTheOtherStageEnds(fresh4: MegatronRanks, tmp_path: Path) -> None:
    """Rank 2 shares experts with rank 3 and gets an error from Sluice; the first stage gets one from the host when its
    peers have ended."""
    *first, _, killed = fresh4.try_run("mg_cases:dies_in_a_stage", dying=(2, 3), folder=str(tmp_path))
    assert killed == {"died": True}
    told = (tmp_path / "told").read_text()
    assert "PeerLost" in told and "rank 0 lost rank 1" in told, told  # by their numbers in the group
    for found in first:
        assert found["result"]["said"] != "" and found["result"]["s"] < SOON, found
