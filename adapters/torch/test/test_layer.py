# SPDX-License-Identifier: Apache-2.0
"""Compares layers in real processes with a plain loop over experts."""

import functools
import json

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)
from sluice import decision_log, errors

CASES = [
    "plain",
    "one route",
    "four routes",
    "every expert",
    "gated",
    "bias",
    "gated bias",
    "identity",
    "two chunks",
    "five chunks",
    "chunks per_chunk",
    "more chunks than tokens",
    "chosen chunks",
    "uneven",
    "nothing on one rank",
    "nothing anywhere",
    "nothing in chunks",
    "dropped",
    "all dropped",
    "idle expert",
    "hot expert",
    "int32 ids",
    "transposed",
    "padded",
    "double",
    "S1",
    "S2",
    "S3",
    "S4",
    "by chunk",
    "pre-activation by chunk",
    "reuse",
    "reuse gated bf16",
    "deduplicated",
    "deduplicated bf16",
    "deduplicated by node",
    "deduplicated as chosen",
    "bf16",
    "bf16 gated chunks",
    "f16",
    "f16 gated chunks",
    "f16 deduplicated",
]
WORLDS = [1, 2, 3, 4]
SOON = 30  # seconds, on the busiest machine: far below the groups' deadline of 60


@functools.cache
def numbers(world, gemm):
    return ranks.run(world, "layer_jobs:numbers", gemm=gemm)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world,gemm", [(1, "auto"), (1, "host"), (1, "ref"), (2, "auto"), (3, "host"), (4, "auto")])
def test_Layer_AgainstLoopOverExperts_Agrees(world, gemm, case):
    for rank, results in enumerate(numbers(world, gemm)):
        assert case in results, f"rank {rank} did not get so far: {results}"
        assert results[case] is None, f"rank {rank}: {results[case]}"


def test_Cases_AllOfThem_AreListed():
    assert set(numbers(1, "auto")[0]) == {*CASES, "stats"}


def test_Layer_UnderPlans_HasTheSameBitsAndUnlikeOnesAreAMismatch():
    assert ranks.run(1, "layer_jobs:under_plans") == ["nothing"]
    assert ranks.run(2, "layer_jobs:under_plans") == ["Mismatch"] * 2


@pytest.mark.parametrize("world", [1, 3])
def test_Layer_AnyNumberOfChunks_GivesTheSameBits(world):
    for result in ranks.run(world, "layer_jobs:same_for_all_chunks"):
        assert result == [[True] * 3] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_OffloadedRows_TwentySteps_LieInTheBlocksOfTheFirst(world):
    for steps in ranks.run(world, "layer_jobs:blocks_go_from_step_to_step"):
        first = steps[0]
        assert first[0] == 4 and first[1] > 0  # T_DI and T_M of two forwards
        assert all(step == first for step in steps)


def test_Budget_ChunksThatNoLongerFit_AreToldOnceByTheFirstRank():
    for rank, (even, hot) in enumerate(ranks.run(2, "layer_jobs:fallback_is_told")):
        assert even == ([], 0)
        assert len(hot[0]) == (rank == 0) and hot[1] >= 3, hot
        assert rank != 0 or "more rows than memory_budget keeps" in hot[0][0]


def test_Budget_LayersOfTwoShapes_EachHasItsRoom():
    for found in ranks.run(2, "layer_jobs:two_shapes_in_a_budget"):
        assert len(found) == 12
        assert all(peak <= budget for peak, budget in found), found


def test_Deduplicate_ByDefault_IsChosenWithAMachine(tmp_path):
    found = ranks.run(2, "layer_jobs:chosen_copies", folder=str(tmp_path))
    assert found[0] == found[1]
    (predicted, imported, *rows) = found[0]
    assert predicted[0] is True and imported[0] is True and rows == [(False, None)] * 3
    assert (predicted[1]["deduplicate"], predicted[1]["why"], predicted[1]["other_deduplicate"]) == (
        True,
        "predicted",
        False,
    )
    assert 0 < predicted[1]["predicted_seconds"] < 0.99 * predicted[1]["other_predicted_seconds"]
    assert (imported[1]["deduplicate"], imported[1]["why"]) == (True, "imported")
    kept = json.loads((tmp_path / "kept.json").read_text())["machines"]
    assert [answer["deduplicate"] for answers in kept.values() for answer in answers] == ["ranks"]


@pytest.mark.parametrize("mode, calibrate", [("profile", None), ("adaptive", 0.2), ("model", 0.2)])
def test_Tuner_Decides_AndTheNextRunKnows(tmp_path, mode, calibrate):
    found = ranks.run(2, "layer_jobs:tuned", folder=str(tmp_path), mode=mode, calibrate=calibrate)
    for decided, again in found:
        decisions, stats, chunks, fitted = decided
        assert decisions[0]["why"] == ("predicted" if mode == "model" else "raced")
        assert (decisions[0]["predicted_seconds"] > 0) == (calibrate is not None)
        assert stats["timed_passes"] > 80
        # The last decision may be newer than the last pass, but the last pass follows some decision.
        assert chunks in {d["num_chunks"] for d in decisions}
        assert again[0][0]["why"] == "imported" and again[1]["race_passes"] == 0
        assert again[2] == decisions[-1]["num_chunks"]
        if calibrate is not None:
            machine = json.loads(fitted)
            assert machine["provenance"] == "refined" and machine["error"]["count"] > 0
            (measured,) = (path.read_text() for path in tmp_path.glob("machine-*.json"))
            assert json.loads(measured.split("\n", 2)[2])["gemm"] != machine["gemm"]
    assert found[0][0][3] == found[1][0][3]
    assert found[0][0][0][0]["num_chunks"] == found[1][0][0][0]["num_chunks"]
    assert len(list(tmp_path.glob("machine-*.json"))) == (calibrate is not None)
    kept = decision_log.read(str(tmp_path / decision_log.NAME))  # the first rank writes them to the cache folder
    assert [entry["why"] for entry in kept] == [d["why"] for run in found[0] for d in run[0]]
    assert all(entry["ranks"] == 2 and entry["restore_input"] is None for entry in kept)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_Autograd_UsersExpectations_Hold(world):
    ranks.run(world, "autograd_jobs:autograd_manners")


@pytest.mark.parametrize("world", [1, 2])
def test_Gradients_ThatAreThere_AreAddedToInPlace(world):
    assert ranks.run(world, "accumulate_jobs:micro_steps") == [True] * world


def test_Gradients_UnderDdp_AreAddedByAutograd():
    assert ranks.run(2, "accumulate_jobs:data_parallel") == [True] * 2


@pytest.mark.parametrize("callback", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_Checkpointing_BothKindsAndHooks_SameGradients(world, callback):
    ranks.run(world, "autograd_jobs:hooks_and_checkpoints", callback=callback)


def test_Checkpointing_SeveralOutstandingWhileChunksAreTried_EachRepeatsItsOwn():
    assert min(ranks.run(2, "autograd_jobs:checkpoints_outstanding")) > 0


@pytest.mark.parametrize("callback", [False, True])
def test_Checkpointing_WithoutReentry_FreesWhatForwardSaved(callback):
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    job = "autograd_jobs:checkpoint_memory"
    plain, saved, inputs = ranks.run(1, job, callback=callback, extra_environment=malloc)[0]
    print(f"held after forward: {plain / 1e6:.1f} MB plain, {saved / 1e6:.1f} MB checkpointed")
    # A checkpoint keeps each layer's input; the tensors that a layer saves are several times that.
    assert saved < 0.4 * plain, (plain, saved, inputs)


@pytest.mark.parametrize("world", [1, 2])
def test_CallbackExperts_ModulesOfTheHost_AgreeAndReport(world):
    ranks.run(world, "callback_jobs:callback_experts")


@pytest.mark.parametrize("world", [1, 2])
def test_CallbackExperts_RunAgainInBackward_HaveTheBitsOfKeeping(world):
    assert ranks.run(world, "callback_jobs:experts_run_again") == [True] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_Refusal_WrongInputOnOneRank_IsAnErrorOnAll(world):
    ranks.run(world, "layer_jobs:refusals")


@pytest.mark.parametrize("world", [1, 2])
def test_Lifetimes_CloseAndCollect_SayWhatHappened(world):
    ranks.run(world, "lifetime_jobs:lifetimes", finalize=True)


@pytest.mark.parametrize("world", [1, 2])
def test_Fork_DataLoaderWorkers_RunAndExit(world):
    assert ranks.run(world, "lifetime_jobs:forked_workers", finalize=True) == [4] * world


@pytest.mark.parametrize("world", [1, 2])
def test_Exit_StepsOutstanding_NeitherHangsNorCrashes(world):
    assert ranks.run(world, "lifetime_jobs:outstanding_at_exit", finalize=True) == [True] * world


def test_Exit_AThreadStillWaiting_NeitherHangsNorCrashes():
    # Within the deadline of the ranks, only the exit ends the wait.
    ended = ranks.run(2, "lifetime_jobs:exit_during_pass", finalize=True, deadline=150, group_timeout=600)
    assert ended == [True, True]


def test_Host_DestroysItsGroups_SluiceIsMadeAgain():
    assert ranks.run(2, "lifetime_jobs:torn_down", finalize=True) == [True, True]


def test_Groups_RanksInUnequalNumbersOfOthers_Join():
    assert ranks.run(3, "group_jobs:unequal_groups") == [True] * 3


def test_Join_OneRankCannotOrDoesNotCome_IsNamed():
    assert ranks.run(3, "group_jobs:join_fails") == [True] * 3


def test_Groups_OfSeveralSizes_WorkSideBySide():
    assert ranks.run(4, "group_jobs:several_groups") == [True] * 4


@pytest.mark.parametrize("uneven", [False, True], ids=["as many", "any number"])
@pytest.mark.parametrize("W", [2, 3])
def test_ReplaceExperts_BetweenSteps_HasTheBitsOfNone(W, uneven):
    assert ranks.run(W, "group_jobs:moving_experts", uneven=uneven) == [True] * W


def test_ReplaceExperts_WrongPlacements_AreNamed():
    assert ranks.run(2, "group_jobs:placements_that_differ") == [True] * 2


def test_SilentPeer_Forward_IsNamedAtTheDeadline():
    results = ranks.run(3, "peer_jobs:silent_peer")
    for name, _, took, text in results[:-1]:
        # The first rank to reach the deadline closes the connections, which the other may notice.
        assert name in ("TimedOut", "PeerLost") and took < SOON, text
    assert any(name == "TimedOut" and peer == 2 for name, peer, _, _ in results[:-1]), results


def test_OneRankEvaluates_TheOtherComesLater_BothHearWhy():
    first, second = ranks.run(2, "peer_jobs:evaluates_alone")
    assert first[:2] == ("TimedOut", 1) and "in evaluation too" in first[2], first
    assert second[:2] == ("PeerLost", 0), second
    assert "rank 1 entered this call after rank 0 had given up" in second[2], second
    assert "rank 0 runs a forward without a backward (needs_backward 0" in second[2], second
    for _, _, text in (first, second):
        assert errors.HOST_REMEDY in text and "destroy it" not in text, text


@pytest.mark.parametrize(("posted_first", "leaves_child"), [(True, False), (False, False), (True, True)])
def test_KilledPeer_Backward_IsLostByName(posted_first, leaves_child):
    how = {"posted_first": posted_first, "leaves_child": leaves_child}
    ended = ranks.finish(ranks.start(3, "peer_jobs:killed_peer", **how))
    assert ended[-1].code == -9
    found = [end.result for end in ended[:-1]]
    assert all(result and result[0] == "PeerLost" and result[2] < SOON for result in found), found
    assert any(result[1] == 2 for result in found), found


@pytest.mark.alone
def test_CtrlC_DuringForward_RaisesWithinASecond():
    best = None  # of three: the machine may be busy
    for _ in range(3):
        took = ranks.run(2, "peer_jobs:interrupted")[0]
        assert took is not None and took < SOON
        best = took if best is None else min(best, took)
        if best < 1:
            return
    raise AssertionError(best)


@pytest.mark.parametrize("world", [1, 2])
def test_Trace_ForwardAndBackward_IsPlainData(world):
    for events, stats in ranks.run(world, "layer_jobs:traces"):
        assert {"layer", "chunk", "lane", "op", "direction", "begin_ns", "end_ns", "bytes"} == set(events[0])
        assert {event["layer"] for event in events} == {7}
        assert {event["direction"] for event in events} == {"forward", "backward"}
        assert {event["chunk"] for event in events} >= {0, 1}
        assert all(event["begin_ns"] <= event["end_ns"] for event in events)
        assert stats["num_passes"] == 2 and stats["last_num_chunks"] == 2 and stats["gemm"]
        assert (stats["bytes_sent"] > 0) == (world > 1)
