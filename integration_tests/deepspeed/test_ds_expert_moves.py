# SPDX-License-Identifier: Apache-2.0
"""Tests that experts which move during training steps keep the bits of a training without moves, for several ep sizes,
experts per token and ZeRO stages, in DeepSpeed's own layers and in AutoEP layers."""

from collections.abc import Iterator
from typing import Any

import pytest
from rank_harness import Ranks
from test_ds_autoep import AUTO_EP
from test_ds_autoep_moves import _differ as _autoep_differ
from test_ds_deciding import _reports
from test_ds_placement import _differ

RANKS, CHOSEN, STAGES = (2, 4, 8), (1, 2, 4), (0, 1, 2)
DAILY = {(4, 4, 1)}


@pytest.fixture(scope="module")
def ranks8() -> Iterator[Ranks]:
    ranks = Ranks(8)
    yield ranks
    ranks.stop()


CASES = [
    pytest.param(*case, id="EP {}, k {}, ZeRO {}".format(*case), marks=[] if case in DAILY else pytest.mark.full)
    for case in ((ranks, chosen, stage) for ranks in RANKS for chosen in CHOSEN for stage in STAGES)
]


def _config(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}} if stage else {}


@pytest.mark.parametrize(("world", "chosen", "stage"), CASES)
def test_Move_DuringTheSteps_HasTheBitsOfNone(
    request: pytest.FixtureRequest, world: int, chosen: int, stage: int
) -> None:
    layer = {"num_experts": max(8, 2 * world), "ep_size": world, "k": chosen, "drop_tokens": False}
    case = {"layers": [{**layer, "expert": "gelu"}], "steps": 12, "config": _config(stage), "shuffle": True}
    answers = request.getfixturevalue(f"ranks{world}").run("cases_deciding:decided_training", **case)
    (report,) = _reports(answers)
    assert report["moved_experts"] >= 4, report
    assert _differ([answer[:2] for answer in answers]) == []


@pytest.mark.skipif(not AUTO_EP.exists(), reason="this DeepSpeed has no AutoEP (0.19.2 brought it)")
@pytest.mark.parametrize(("world", "chosen", "stage"), CASES)
def test_AutoEpMove_EveryFewSteps_HasTheBitsOfNone(
    request: pytest.FixtureRequest, world: int, chosen: int, stage: int
) -> None:
    shape = {"experts": max(8, 2 * world), "chosen": chosen}
    case = {"kind": "stacked", "shape": shape, "steps": 8, "every": 2, "size": world, "config": _config(stage)}
    answers = request.getfixturevalue(f"ranks{world}").run("cases_autoep_moves:moved_training", **case)
    assert _autoep_differ(answers) == []
    assert all(still["losses"][-1] != still["losses"][0] for still, _ in answers)
