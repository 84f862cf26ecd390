# SPDX-License-Identifier: Apache-2.0
"""Tests DeepSpeed's pipeline engine through Sluice: the bits of the host's schedules, without the host's messages.

Features of pipelines with two stages are in integration_tests/pairs."""

from pathlib import Path
from typing import Any

import pytest
from host_release import CHECKPOINTING, old_host_fails
from rank_harness import Ranks

MICRO_BATCHES = 4
ZERO1 = {"zero_optimization": {"stage": 1}}
SPLIT = {"policy": "backward_first", "separate_wgrad": True, "in_flight": 3}


def _compare(answers: list[Any], steps: int, evaluations: int = 0, splits: bool = False) -> None:
    """Compares bits. splits: each of two linear layers had a separate weight gradient in each micro-batch but the
    first, whose backward shows how the stage uses its parameters."""
    for rank, (stock, ours) in enumerate(answers):
        for what in ("losses", "evaluations", "parameters", "optimizer", "random"):
            assert ours[what] == stock[what], (rank, what)
        assert stock["losses"][-1] != stock["losses"][0]
        assert stock["messages"] > 0 and ours["messages"] == 0
        assert ours["stats"]["batches"] == ours["stats"]["num_batches"] == steps + evaluations
        assert ours["stats"]["messages_sent"] > 0
        if splits:
            later = ours["stats"]["weights_later"]
            assert later > 0 and later % (2 * (steps * MICRO_BATCHES - 1)) == 0, (rank, later)
            assert ours["stats"]["most_held"] > 0, rank


POLICIES = ("adaptive", "message_driven", "backward_first", "1f1b_hint", "1f1b", "gpipe")
SPLITTING = ("adaptive", "zero_bubble", "backward_first", "message_driven")  # with separate weight gradients
# On four stages, or on two stages of two replicas. evaluated: the numbers of micro-batches of evaluations.
CASES: dict[str, dict[str, Any]] = {
    "tied bf16 zero 1": {
        **{"stages": 2, "kind": "tied", "dtype": "bfloat16", "config": ZERO1, "pipeline": {"in_flight": 4}},
    },
    "tied f32": {"stages": 2, "kind": "tied", "pipeline": {}},
    "tied zero 1": {"kind": "tied", "config": ZERO1, "pipeline": {}},
    "bf16": {"kind": "dropout", "dtype": "bfloat16", "pipeline": {"policy": "message_driven", "in_flight": 8}},
    "varied zero 1": {
        **{"kind": "plain", "module": {"dynamic_shape": True}, "varied": True, "config": ZERO1},
        **{"pipeline": {"policy": "1f1b"}, "evaluated": [MICRO_BATCHES, 1, 7]},
    },
    **{name: {"steps": 3, "kind": "plain", "pipeline": {"policy": name, "in_flight": 4}} for name in POLICIES},
    "split tied bf16 zero 1": {
        **{"steps": 5, "stages": 2, "kind": "tied", "dtype": "bfloat16", "config": ZERO1, "pipeline": SPLIT},
    },
    "split tied": {"steps": 5, "stages": 2, "kind": "tied", "pipeline": {"policy": "zero_bubble"}},
    **{
        f"split deep {policy} {dtype}": {
            **{"kind": "deep", "dtype": dtype, "config": ZERO1 if policy == "zero_bubble" else {}},
            "pipeline": {"policy": policy, "separate_wgrad": True, "in_flight": 4},
        }
        for policy in SPLITTING
        for dtype in ("float32", "bfloat16")
    },
}


@pytest.mark.parametrize("case", [pytest.param(n, marks=pytest.mark.full if "deep" in n else ()) for n in CASES])
def test_FourRanks_ManySteps_SameBitsAsStock(pipe2x2: Ranks, pipe4: Ranks, case: str) -> None:
    job = {"stages": 4, "steps": 20, "evaluated": [], **CASES[case]}
    answers = (pipe4 if job["stages"] == 4 else pipe2x2).run("cases_pipe:parity", **job)
    _compare(answers, job["steps"], len(job["evaluated"]), splits="split" in case)
    if case in POLICIES:
        assert all(0 < ours["stats"]["most_in_flight"] <= 4 for _, ours in answers), answers


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
    config: dict[str, Any] = {"zero_optimization": {"stage": changes.get("zero", 0)}}
    if "reentrant" in changes:
        old_host_fails(CHECKPOINTING, hangs=True)
        config["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": changes["reentrant"]}
    case = {"kind": "deep dropout tied delays", "dtype": changes.get("dtype", "float32"), "config": config}
    pipeline = {"policy": changes["policy"]}
    with Ranks(stages * replicas) as ranks:  # not shared: the host keeps a topology until the process ends
        job = {"steps": steps, "stages": stages, "evaluated": [], "pipeline": pipeline, **case}
        answers = ranks.run("cases_pipe:parity", deadline=1700, **job)
    _compare(answers, steps)


@pytest.mark.parametrize("pipeline", [{}, SPLIT], ids=["whole", "split weights"])
def test_IdsAndMasks_OverFourStages_TrainAsInOneProcess(pipe4: Ranks, pipeline: dict[str, Any]) -> None:
    """Stock hangs here: it has one receive buffer for all dtypes. With Sluice each message carries its own dtype. A
    stage walks its graph once for each tensor that it passes on."""
    for found in pipe4.run("cases_pipe:alone", steps=10, stages=4, kind="words", pipeline=pipeline):
        assert found["losses"] == pytest.approx(found["torch"], rel=1e-6)
        assert found["messages"] == 0
        assert (found["stats"].get("weights_later", 0) > 0) == bool(pipeline)


def test_Monitor_OfTheHost_IsWrittenTheSame(pipe2: Ranks, tmp_path: Path) -> None:
    stock, ours = pipe2.run("cases_pipe:monitored", folder=str(tmp_path))[0]
    assert ours == stock and any("train_loss" in text for text in stock)
