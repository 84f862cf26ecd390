# SPDX-License-Identifier: Apache-2.0
"""Tests that layers which change stages during a batch of DeepSpeed's pipeline keep the bits of one without moves."""

from pathlib import Path
from typing import Any

import pytest
from host_release import CHECKPOINTING, IS_OLD, LAST_STAGE, LOADING, old_host_fails
from rank_harness import Ranks
from shuffles import PROMISES_BITS
from test_ds_moves import CLIPPED, F16, FUSED_ADAM, ZERO1, names
from test_ds_placement import differ

PLAIN: dict[str, Any] = {"kind": "plain"}
# Configurations with different places and dtypes of DeepSpeed's gradient sums.
AT_ONCE = {"bf16": {"enabled": True, "immediate_grad_update": True}}
SUMS: dict[str, dict[str, Any]] = {
    "zero 1": {"config": ZERO1},
    "zero 1 in bf16": {"config": {**ZERO1, "data_types": {"grad_accum_dtype": "bf16"}}},
    "bf16": {"dtype": "bfloat16"},
    "bf16 at once": {"dtype": "bfloat16", "config": AT_ONCE},
    "bf16 zero 1": {"dtype": "bfloat16", "config": ZERO1},
    "bf16 zero 1 in f32": {
        "dtype": "bfloat16",
        "config": {**ZERO1, **AT_ONCE, "data_types": {"grad_accum_dtype": "fp32"}},
    },
    "f16 zero 1": {"dtype": "float16", "config": {**ZERO1, **F16}},
}
NEVER = 1 << 30  # number of receiver ops until arrived state is seen


# Trainings with moves every two batches, and what differs from the defaults of the test. look: the number of the
# receiver's op before which parameters arrive; a later one changes the first micro-batch on the new stage. sums: the
# number of ops until the sum of the gradients may arrive. run: the number of layers that cross a cut together.
MOVED: dict[str, dict[str, Any]] = {
    **{
        f"{kind}, look {look}, run {run}": {"steps": 24, "kind": kind, "look": look, "run": run}
        for kind, look, run in (
            *((kind, look, 1) for kind in ("plain", "dropout") for look in (1, 2, 4)),
            *(("plain", 1, 2), ("plain", 4, 2), ("dropout", 1, 2)),
        )
    },
    "sums at 3": {"sums": 3},
    "late sums": {"sums": NEVER},
    "late sums, run 2": {"sums": NEVER, "run": 2},
    "clipped": {"config": CLIPPED},
    "FusedAdam": {"config": FUSED_ADAM, "section": {"optimizer": True}},
    **{f"{name}, early sums": {"kind": "dropout", "run": 2, **job} for name, job in SUMS.items()},
    **{f"{name}, late sums": {"kind": "dropout", "run": 2, "sums": NEVER, **job} for name, job in SUMS.items()},
    "at the flush": {"look": NEVER},
    "at the flush, run 2": {"look": NEVER, "run": 2},
    "replicas": {"kind": "tied"},
    "replicas, run 2": {"kind": "tied", "run": 2},
    **{f"replicas, {name}": {"run": 2, **job} for name, job in SUMS.items()},
    "replicas, between MoE layers": {
        **{"kind": "between experts", "section": {**PROMISES_BITS, "chunks": 2}},
        "through": [[0, 2, 6], [0, 4, 6]],
    },
    "four stages": {"steps": 16, "stages": 4, "kind": "deep"},
    "four stages, run 2": {"steps": 16, "stages": 4, "kind": "deep", "run": 2},
}
LONG = {"plain, look 1, run 1", *(f"{kind}, look 2, run 1" for kind in ("plain", "dropout")), "dropout, look 4, run 1"}
LONG |= {f"{name}, early sums" for name in ("zero 1", "bf16", "bf16 zero 1 in f32")}
LONG |= {f"{name}, late sums" for name in ("zero 1 in bf16", "bf16 at once", "bf16 zero 1")}
LONG |= {f"replicas, {name}" for name in ("run 2", "zero 1 in bf16", "bf16 at once", "bf16 zero 1 in f32")}


@pytest.mark.parametrize("case", names(MOVED, MOVED.keys() - LONG))
def test_Layers_MoveInBatches_SameBitsAsNone(pipe2: Ranks, pipe2x2: Ranks, pipe4: Ranks, case: str) -> None:
    old_host_fails(LAST_STAGE, "zero 1 in bf16" in case)
    job = {"steps": 12, "stages": 2, "look": 1, "sums": 1, "run": 1, **PLAIN, **MOVED[case]}
    ranks = pipe4 if job["stages"] == 4 else pipe2x2 if "replicas" in case else pipe2
    answers = ranks.run("cases_live:moved", every=2, **job)
    assert differ(answers) == []
    for _, moved in answers:
        live = moved["live"]
        assert moved["same"] and moved["losses"][-1] != moved["losses"][0]
        assert live["in_batch"] + live["at_flush"] == moved["moved"]
        if job["look"] in (1, NEVER) and job["stages"] == 2:
            assert live["at_flush" if job["look"] == NEVER else "in_batch"] == moved["moved"], live
    assert (sum(moved["live"]["in_batch"] for _, moved in answers) > 0) == (job["look"] < NEVER)
    if job["look"] < NEVER:
        assert (sum(moved["live"]["sums_early"] for _, moved in answers) > 0) == (job["sums"] < NEVER)
    least = job["steps"] * ranks.world // 2 * (1 + job["run"]) // 2  # nearly every move is of `run` layers
    assert job["stages"] == 4 or sum(moved["moved"] for _, moved in answers) >= least


def test_Stock_SumsInAnotherDtype_TrainEveryStage(pipe2: Ranks) -> None:
    """Where they train the last stage alone (LAST_STAGE), a move of layers changes what is trained."""
    found = pipe2.run("cases_pipe:is_trained", stages=2, **PLAIN, **SUMS["zero 1 in bf16"])
    assert found == [not IS_OLD, True]


# Stage 1 gives all its layers to one neighbour and gets others from the second one, and back. Layers arrive at the op
# with this number on each stage. If those of stage 1 are late, it runs no layer for some micro-batches.
REFILLED = {"empty": [1, 4, 1, 1], "full": [4, 1, 4, 1], "at once": [1, 1, 1, 1], "at the flush": [NEVER] * 4}


@pytest.mark.parametrize("look", REFILLED)
@pytest.mark.parametrize("case", ["f32", "bf16", "zero 1", "bf16 zero 1"])
def test_FourStages_AllLayersOfAStageAreReplaced_SameBitsAsNone(pipe4: Ranks, case: str, look: str) -> None:
    job = {"stages": 4, "kind": "deep", "through": [[0, 1, 2, 6, 8], [0, 2, 4, 6, 8]], **SUMS.get(case, {})}
    answers = pipe4.run("cases_live:moved", steps=8, every=2, look=REFILLED[look], **job)
    assert differ(answers) == []
    counts = answers[1][1]["counts"]
    assert look == "at the flush" or answers[1][1]["live"]["in_batch"] > 0
    assert {"empty": 0, "full": 3}.get(look, 2) in counts, counts


def test_Adaptive_StepsOfAMove_RunInBatchesThatFollow(pipe2: Ranks) -> None:
    for seen, losses, moves, count, still in pipe2.run(
        "cases_live:stepped", steps=[[0, 2, 6], [0, 1, 6]], stages=2, **PLAIN
    ):
        first = seen.index([0, 2, 6])
        assert seen == [[0, 3, 6]] * first + [[0, 2, 6]] + [[0, 1, 6]] * (9 - first)
        assert losses == still and (moves, count) == (1, 2)


@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.parametrize("mutant", ["holds nothing", "folds backwards"])
def test_AHostThatErrs_IsSeen(pipe2: Ranks, mutant: str, run: int) -> None:
    case = {"steps": 8, "every": 2, "look": 1, "sums": NEVER, "run": run, "stages": 2, "mutant": mutant, **PLAIN}
    answers = pipe2.run("cases_live:moved", **case)
    assert "losses" in differ(answers)


@pytest.mark.parametrize("to", [[0, 4, 6], [0, 5, 6]], ids=["one layer", "a run"])
def test_ABatchThatFails_TheLayersStay(pipe2: Ranks, to: list[int]) -> None:
    for (said, then, parts, losses), (said_still, _, _, losses_still) in pipe2.run(
        "cases_live:failed", parts=to, stages=2, **PLAIN
    ):
        assert "a drawn failure" in said and "a drawn failure" in said_still
        assert then == parts == [0, 3, 6]
        assert losses == losses_still


# Steps of a move: (name, role of the ranks that run it, calls of its function before the fault). "any": all ranks.
_BETWEEN = [
    ("reading the optimizer", "any", 0), ("building", "target", 0), ("taking states", "any", 0),
    ("packing", "source", 0), ("describing", "source", 0), ("making room", "target", 0),
]  # fmt: skip
_SENDING = [("sending", role, calls) for role in ("source", "target") for calls in (0, 1)]
_IN_FORCE = [("replacing", "any", 0), ("putting states", "any", 0)]
_AT_COMMIT = [("taking states", "any", 1), *_IN_FORCE, ("putting sums", "any", 0)]
FAULTS: dict[str, tuple[dict[str, Any], list[tuple[str, str, int]]]] = {
    "between batches": ({"live": False}, [*_BETWEEN, *_SENDING, ("loading", "target", 0), *_IN_FORCE]),
    "early": ({"live": True}, [*_BETWEEN, ("beginning the batch", "source", 0), ("packing gradients", "source", 0)]),
    "at commit": ({"live": True}, [*_AT_COMMIT, ("beginning the batch", "target", 0)]),
    "late sums": ({"live": True, "sums": NEVER}, [("loading gradients", "target", 0), *_AT_COMMIT]),
    "late parameters": ({"live": True, "look": NEVER}, [("packing gradients", "source", 0), *_AT_COMMIT]),
}


def _of_roles(faults: list[tuple[str, str, int]], roles: dict[str, list[int]]) -> list[list[Any]]:
    """Replaces roles by ranks. roles: ranks of each role. A step of "any" fails on one rank of each role in turn."""
    every = [ranks[-1] for ranks in roles.values()]
    return [[what, rank, n] for what, role, n in faults for rank in (every if role == "any" else roles[role][:1])]


def _check_broken(answers: list[Any], faults: list[list[Any]], to: list[int], when: str) -> None:
    layers = {8: "layer 3", 6: "layers 1, 2" if to[1] == 1 else "layer 2"}[to[-1]]
    for said, losses, still, parts in answers:
        assert losses == still and parts == to
        for (what, rank, _), (error, changed, again) in zip(faults, said):
            words = ["a drawn fault"]  # a rank's own error in a batch has no other words
            if what != "beginning the batch" and (what, when) != ("packing gradients", "early"):
                words.append(f"rank {rank}")
                if what not in ("reading the optimizer", "building"):
                    words += [f"{layers} cannot move", "No layer has moved"]
            assert all(each in error for each in words) and not changed and not again, (what, rank, changed, error)


@pytest.mark.parametrize("when", FAULTS)
def test_FourStages_AnErrorInAnyStepOfAMove_IsToldToAllRanksAndNoLayerHasMoved(pipe4: Ranks, when: str) -> None:
    """Layer 3 moves from the second to the third stage; the error is on one of these or on another stage."""
    how, steps = FAULTS[when]
    faults = _of_roles(steps, {"source": [1], "target": [2], "third": [0]})
    answers = pipe4.run("cases_live:broken", faults=faults, parts=[0, 2, 3, 6, 8], stages=4, kind="deep", **how)
    _check_broken(answers, faults, [0, 2, 3, 6, 8], when)


@pytest.mark.parametrize(("case", "when"), [("zero 1", "between batches"), ("bf16", "late sums")])
def test_TwoStagesOfTwoReplicas_AnErrorInAStepOfAMove_IsToldToAllRanks(pipe2x2: Ranks, case: str, when: str) -> None:
    how, steps = FAULTS[when]
    faults = _of_roles(steps, {"source": [0, 1], "target": [2, 3]})
    job = {**PLAIN, **SUMS.get(case, {})}
    answers = pipe2x2.run("cases_live:broken", faults=faults, parts=[0, 1, 6], stages=2, **how, **job)
    _check_broken(answers, faults, [0, 1, 6], when)


def test_TwoStagesOfTwoReplicas_AnErrorInAMoveOfAMoeLayer_IsToldToAllRanks(pipe2x2: Ranks) -> None:
    how, steps = FAULTS["between batches"]
    faults = _of_roles([*steps, ("adopting", "target", 0)], {"source": [0, 1], "target": [2, 3]})
    job = {"kind": "experts", "section": {**PROMISES_BITS, "chunks": 2}}
    answers = pipe2x2.run("cases_live:broken", faults=faults, parts=[0, 2, 6], stages=2, **how, **job)
    _check_broken(answers, faults, [0, 2, 6], "between batches")


@pytest.mark.parametrize("silent", [1, 2], ids=["source", "target"])
def test_FourStages_ARankThatHangsInATransfer_IsNamedByAllWithinTheDeadline(pipe4: Ranks, silent: int) -> None:
    """The rank goes on after the others have an error: nothing has moved, and training has the bits without moves."""
    answers = pipe4.run("cases_live:hung", silent=silent, parts=[0, 2, 3, 6, 8], wait_s=6.0, stages=4, kind="deep")
    for rank, (error, seconds, losses, still, parts) in enumerate(answers):
        assert f"rank {silent}{'' if rank == silent else ' did not answer'}" in error, error
        assert seconds < 60 and parts == [0, 2, 4, 6, 8] and losses == still


@pytest.mark.parametrize("live", [False, True], ids=["between batches", "during a batch"])
def test_AnErrorAlsoWhereLayersArePutBack_EndsTheTrainingOnAllRanks(pipe2: Ranks, live: bool) -> None:
    faults = [["putting states", 1, 0]]
    for ((error, _, again),) in (
        said
        for (said,) in pipe2.run(
            "cases_live:broken", faults=faults, parts=[0, 2, 6], live=live, times=2, stages=2, **PLAIN
        )
    ):
        for each in (error, again):
            assert "a move of layers was interrupted" in each and "from the last checkpoint" in each
            assert "layer 2 cannot move: putting layers back failed on rank 1: RuntimeError: a drawn fault" in each


@pytest.mark.parametrize(("to", "named"), [([0, 2, 6], "layer 2"), ([0, 1, 6], "one of the layers 1 to 2")])
def test_ALayerThatSomebodyWritesInto_StaysAndFailsTheBatchOnAllRanks(pipe2: Ranks, to: list[int], named: str) -> None:
    for said, parts, again in pipe2.run("cases_live:spoilt", parts=to, stages=2, **PLAIN):
        assert f"a tensor of {named} was written while it moved" in said
        assert parts == [0, 3, 6] and again == ""


@pytest.mark.parametrize("to", [[0, 2, 6], [0, 1, 6]], ids=["one layer", "a run"])
def test_ACheckpointThatIsLoaded_CancelsWhatIsOnItsWay(pipe2: Ranks, to: list[int], tmp_path: Path) -> None:
    old_host_fails(LOADING)
    case = {"folder": str(tmp_path), "parts": to, "stages": 2, **PLAIN}
    for parts, first, again, then, losses in pipe2.run("cases_live:loaded", **case):
        assert parts == [0, 3, 6] and first == again
        assert then == to and len(losses) == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tied": ({"kind": "ends tied"}, "tied to others by 'ends'"),
    "MoE layer": ({"kind": "experts alone"}, "layer 2 holds a MoE layer, whose ranks meet in each micro-batch"),
    "under way": ({"twice": True}, "layers are being moved"),
    "unknown buffers": ({"buffers": "unknown"}, "no batch has shown"),
    "written buffers": ({"buffers": "written"}, "a buffer that forwards write"),
    "host's checkpoints": ({"module": {"activation_checkpoint_interval": 1}}, "activation_checkpoint_interval is set"),
    "split weights": ({"pipeline": {"separate_wgrad": True}}, "weight gradients are separate ops"),
    "over a stage": ({"kind": "deep", "parts": [0, 1, 2, 3, 8]}, "a layer would pass over stage 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_Move_WhatCannot_IsRefusedOnAllRanks(pipe2: Ranks, pipe4: Ranks, case: str) -> None:
    old_host_fails(CHECKPOINTING, case == "host's checkpoints")
    how, words = REFUSED[case]
    job = {"parts": [0, 2, 6], **PLAIN, **how, "pipeline": {"in_flight": 2, **how.get("pipeline", {})}}
    for said, changed, _ in (pipe4 if case == "over a stage" else pipe2).run("cases_moves:refused", live=True, **job):
        assert words in said and not changed, said
        assert said.count(words) == (2 if "twice" in how else 1)
