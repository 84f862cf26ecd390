# SPDX-License-Identifier: Apache-2.0
"""Compares layers in real processes with a plain loop over experts, and sums of 16-bit gradients with f32 sums."""

import concurrent.futures
import functools
import json
import threading

import pytest
import ranks
import torch
from layer_jobs import CASES
from sluice import decision_log, errors
from sluice.adapters.torch import CallbackExperts, Context, ContextOptions, EpGroup, MoeConfig, MoeLayer

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


def test_Layer_UnderPlans_HasTheSameBitsAndUnlikeOnesAreAMismatch():
    assert ranks.run(1, "layer_jobs:under_plans") == ["nothing"]
    assert ranks.run(2, "layer_jobs:under_plans") == ["Mismatch"] * 2


def test_Budget_ChunksThatNoLongerFit_AreToldOnceByTheFirstRank():
    for rank, (even, hot) in enumerate(ranks.run(2, "layer_jobs:fallback_is_told")):
        assert even == ([], 0)
        assert len(hot[0]) == (rank == 0) and hot[1] >= 3, hot
        assert rank != 0 or "more rows than memory_budget keeps" in hot[0][0]


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


# By job, which checks and describes a claim: numbers of ranks.
JOBS = {
    "autograd_jobs:autograd_manners": (1, 3),
    "autograd_jobs:hooks_and_checkpoints": (2,),
    "autograd_jobs:micro_steps": (1, 2),
    "autograd_jobs:data_parallel": (2,),
    "autograd_jobs:callback_experts": (1, 2),
    "autograd_jobs:experts_run_again": (1, 2),
    "layer_jobs:refusals": (1, 3),
    "group_jobs:lifetimes": (2,),
    "group_jobs:forked_workers": (2,),
    "group_jobs:outstanding_at_exit": (1, 2),
    "group_jobs:torn_down": (2,),
    "group_jobs:unequal_groups": (3,),
    "group_jobs:join_fails": (3,),
    "group_jobs:several_groups": (4,),
    "group_jobs:placements": (2,),
}


@pytest.mark.parametrize("job, world", [(job, world) for job, worlds in JOBS.items() for world in worlds])
def test_Job_OnSoManyRanks_HoldsWhatItChecks(job, world):
    ranks.run(world, job, finalize=job.startswith("group_jobs"))


def test_Checkpointing_SeveralOutstandingWhileChunksAreTried_EachRepeatsItsOwn():
    assert min(ranks.run(2, "autograd_jobs:checkpoints_outstanding")) > 0


def test_Checkpointing_WithoutReentry_FreesWhatForwardSaved():
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    plain, saved, inputs = ranks.run(1, "autograd_jobs:checkpoint_memory", extra_environment=malloc)[0]
    print(f"held after forward: {plain / 1e6:.1f} MB plain, {saved / 1e6:.1f} MB checkpointed")
    # A checkpoint keeps each layer's input; the tensors that a layer saves are several times that.
    assert saved < 0.4 * plain, (plain, saved, inputs)


def test_Exit_AThreadStillWaiting_NeitherHangsNorCrashes():
    # Within the deadline of the ranks, only the exit ends the wait.
    ranks.run(2, "group_jobs:exit_during_pass", finalize=True, deadline=150, group_timeout=600)


def test_KilledPeer_Backward_IsLostByName():
    ended = ranks.finish(ranks.start(3, "group_jobs:killed_peer"))
    assert ended[-1].code == -9
    found = [end.result for end in ended[:-1]]
    assert all(result and result[0] == "PeerLost" and result[2] < SOON for result in found), found
    assert any(result[1] == 2 for result in found), found


def test_OneRankEvaluates_TheOtherComesLater_BothHearWhy():
    first, second = ranks.run(2, "group_jobs:evaluates_alone")
    assert first[:2] == ("TimedOut", 1) and "in evaluation too" in first[2], first
    assert second[:2] == ("PeerLost", 0), second
    assert "rank 1 entered this call after rank 0 had given up" in second[2], second
    assert "rank 0 runs a forward without a backward (needs_backward 0" in second[2], second
    for _, _, text in (first, second):
        assert errors.HOST_REMEDY in text and "destroy it" not in text, text


@pytest.mark.alone
@pytest.mark.parametrize("transport", ["tcp", "c10d"])
def test_CtrlC_DuringForward_RaisesWithinASecond(transport):
    best = None  # of three: the machine may be busy
    for _ in range(3):
        took = ranks.run(2, "group_jobs:interrupted", transport=transport)[0]
        assert took is not None and took < SOON
        best = took if best is None else min(best, took)
        if best < 1:
            return
    raise AssertionError(best)


def test_Trace_ForwardAndBackward_IsPlainData():
    for events, stats in ranks.run(2, "layer_jobs:traces"):
        assert {"layer", "chunk", "lane", "op", "direction", "begin_ns", "end_ns", "bytes"} == set(events[0])
        assert {event["layer"] for event in events} == {7}
        assert {event["direction"] for event in events} == {"forward", "backward"}
        assert {event["chunk"] for event in events} >= {0, 1}
        assert all(event["begin_ns"] <= event["end_ns"] for event in events)
        assert stats["num_passes"] == 2 and stats["last_num_chunks"] == 2 and stats["gemm"]
        assert stats["bytes_sent"] > 0


def test_Create_DuringAForwardOfItsContext_WaitsForIt():
    """Several threads may run one model, whose layers share a context and are made on first use."""
    entered, go = threading.Event(), threading.Event()

    class Waits(torch.nn.Linear):
        def forward(self, rows):
            entered.set()
            assert go.wait(SOON)
            return super().forward(rows)

    context, config = Context(), MoeConfig(model_width=8, num_experts=1, top_k=1)
    layer = MoeLayer(context, config, experts=CallbackExperts([Waits(8, 8)]))

    def forward():
        with context.lock:
            layer(torch.zeros(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = pool.submit(forward)
        assert entered.wait(SOON)
        making = pool.submit(MoeLayer, context, config, experts=CallbackExperts([torch.nn.Linear(8, 8)]))
        concurrent.futures.wait([making], 0.5)  # without the lock it has ended with BUSY by now
        go.set()
        running.result(SOON)
        assert making.result(SOON).num_local_experts == 1


CHUNKS, TOKENS, WIDTH = 32, 128, 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_CallbackGradients_ManyChunks_AreTheF32SumsRoundedOnce(dtype: torch.dtype) -> None:
    """Compares with the same chunks summed by hand. A running sum in 16 bits would differ."""
    torch.manual_seed(0)
    module = torch.nn.Linear(WIDTH, WIDTH).to(dtype)
    tokens, grad = torch.randn(2, TOKENS, WIDTH).to(dtype)
    layer = MoeLayer(
        Context(),
        MoeConfig(model_width=WIDTH, num_experts=1, top_k=1, dtype=dtype, chunks=CHUNKS),
        experts=CallbackExperts([module]),
    )
    ids, weights = torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, 1)
    layer(tokens, ids, weights).backward(grad)
    parameters = list(module.parameters())
    parts = [
        torch.autograd.grad(module(rows), parameters, dy) for rows, dy in zip(tokens.chunk(CHUNKS), grad.chunk(CHUNKS))
    ]
    for parameter, gradients in zip(parameters, zip(*parts)):
        wide, running = gradients[0].float(), gradients[0]
        for part in gradients[1:]:
            wide, running = wide + part, running + part
        assert torch.equal(parameter.grad, wide.to(dtype))
        assert not torch.equal(running, wide.to(dtype)), "this case would not notice a sum in 16 bits"


@pytest.mark.parametrize(
    "hosts, per_node",
    [
        ("aabb", 2),
        ("aaabbb", 3),
        ("abcd", 1),
        ("aaaa", 4),
        ("aab", 0),  # unequal numbers
        ("abab", 0),  # not contiguous
        ("aabbaa", 0),
        ("a", 1),
    ],
)
def test_RanksPerNode_ByHostNames_IsThatOfEqualRuns(hosts: str, per_node: int) -> None:
    group = EpGroup.for_ranks()
    group._host_names = list(hosts)
    assert group.ranks_per_node() == per_node


def test_RanksPerNode_MoreThanTheGroupHas_IsOneNode() -> None:
    context = Context(None, ContextOptions(gemm="ref", ranks_per_node=8))
    assert context.alive
    context.close()
