# SPDX-License-Identifier: Apache-2.0
"""Compares layers in real processes with a plain loop over experts, and sums of 16-bit gradients with f32 sums. Tests
choices, errors and traces of layers."""

import concurrent.futures
import contextlib
import functools
import json
import re
import threading
import time
import traceback
import warnings
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from layer_cases import Case, close, compare, group, raises, world
from sluice import decision_log, plan_model
from sluice.adapters.torch import CallbackExperts, Context, ContextOptions, EpGroup, MoeConfig, MoeLayer
from sluice.adapters.torch.layer_plan import LayerPlan, PlanChoice, pareto
from sluice.config import TunerOptions
from sluice.errors import InvalidArgument, Mismatch, OverBudget, PeerRefused

CASES = {
    "plain": {},
    "one route": dict(K=1, seed=1),
    "four routes": dict(per_rank=4, K=4, seed=2),
    "every expert": dict(per_rank=2, seed=3),
    "gated": dict(gated=True, activation="silu", seed=4),
    "bias": dict(bias=True, activation="relu", seed=5),
    "gated bias": dict(gated=True, bias=True, activation="gelu_tanh", seed=6),
    "identity": dict(activation="identity", seed=7),
    "two chunks": dict(n=2, tokens=(130,), seed=8),
    "five chunks": dict(n=5, tokens=(300, 171, 9), bias=True, seed=9),
    "chunks per_chunk": dict(n=3, tokens=(200,), wgrad="per_chunk", gated=True, bias=True, seed=10),
    "more chunks than tokens": dict(n=5, tokens=(2, 3, 1), seed=11),
    "chosen chunks": dict(n=0, tokens=(70,), seed=12),
    "uneven": dict(tokens=(1, 40, 7), seed=13),
    "nothing on one rank": dict(tokens=(0, 11, 5), seed=14),
    "nothing anywhere": dict(tokens=(0,), seed=15),
    "nothing in chunks": dict(tokens=(0, 30), n=2, seed=16),
    "dropped": dict(drop=0.4, bias=True, seed=17),
    "all dropped": dict(drop=1.1, seed=18),
    "idle expert": dict(idle=(1,), K=1, bias=True, seed=19),
    "hot expert": dict(hot=0, tokens=(60, 90), n=2, K=1, seed=20),
    "int32 ids": dict(ids_dtype=torch.int32, seed=21),
    "transposed": dict(strides="transposed", gated=True, bias=True, seed=22),
    "padded": dict(strides="padded", bias=True, seed=23),
    "double": dict(dtype=torch.float64, gated=True, bias=True, n=2, tokens=(40, 13), seed=24),
    "S1": dict(restore=("offload", "offload"), n=3, tokens=(60, 25), bias=True, seed=27),
    "S2": dict(restore=("redispatch", "offload"), n=3, tokens=(60, 25), gated=True, seed=28),
    "S3": dict(restore=("offload", "recompute"), n=3, tokens=(60, 25), bias=True, gated=True, seed=29),
    "S4": dict(restore=("redispatch", "recompute"), n=3, tokens=(60, 25), bias=True, seed=30),
    "by chunk": dict(
        restore=(("keep", "offload", "redispatch"), ("recompute", "keep", "offload")),
        n=3,
        tokens=(60, 25),
        gated=True,
        seed=36,
    ),
    "pre-activation by chunk": dict(
        restore=("keep", ("keep", "recompute", "recompute")), n=3, tokens=(60, 25), dtype=torch.bfloat16, seed=37
    ),
    "reuse": dict(reuse=True, restore=("adaptive", "adaptive"), wgrad="adaptive", n=0, tokens=(60, 25), seed=38),
    "reuse gated bf16": dict(
        reuse=True, restore=("adaptive", "adaptive"), wgrad="adaptive", n=3, gated=True, dtype=torch.bfloat16, seed=39
    ),
    "deduplicated": dict(deduplicate=True, per_rank=4, K=4, n=3, tokens=(60, 25), gated=True, drop=0.1, seed=31),
    "deduplicated bf16": dict(deduplicate=True, per_rank=3, K=3, n=0, tokens=(64, 33), dtype=torch.bfloat16, seed=32),
    "bf16": dict(dtype=torch.bfloat16, tokens=(64, 33), seed=25),
    "bf16 gated chunks": dict(
        dtype=torch.bfloat16, gated=True, bias=True, activation="silu", n=2, tokens=(100,), seed=26
    ),
    "f16": dict(dtype=torch.float16, tokens=(64, 33), seed=33),
    "f16 gated chunks": dict(
        dtype=torch.float16, gated=True, bias=True, activation="silu", n=2, tokens=(100,), seed=34
    ),
    "deduplicated by node": dict(deduplicate="node", per_rank=4, K=4, n=3, tokens=(60, 25), gated=True, seed=36),
    "deduplicated as chosen": dict(deduplicate="rank_or_node", per_rank=4, K=4, n=0, tokens=(60, 25), seed=37),
    "f16 deduplicated": dict(dtype=torch.float16, deduplicate=True, per_rank=3, K=3, n=0, tokens=(64, 33), seed=35),
}


def cases(W):
    every = {"every expert": {"K": 2 * W}}
    return {name: Case(W, **options, **every.get(name, {})) for name, options in CASES.items()}


def numbers(gemm):
    """Runs every case, forward and backward. Returns {case: error text or None}."""
    W, rank = world()
    per_node = 2 if W == 4 else None
    contexts = {name: Context(group(), ContextOptions(gemm=name, ranks_per_node=per_node)) for name in {gemm, "ref"}}
    results = {}
    for name, case in cases(W).items():
        context = contexts["ref" if case.dtype is torch.float64 else gemm]
        try:
            layer = case.layer(context)
            tokens, ids, weights, params = case.inputs(rank)
            out = layer(tokens, ids, weights, params)
            out.backward(case.cotangents[rank])
            compare(case, rank, out, tokens, weights, params)
            with torch.no_grad():
                again = layer(tokens, ids, weights, params)
            if gemm == "auto":  # another library may have been chosen in between
                close("output, once more", again, out.detach(), case.tolerance())
            else:
                assert torch.equal(again, out)
            assert not again.requires_grad
            results[name] = None
        except AssertionError as error:
            results[name] = str(error)
        except Exception:
            results[name] = traceback.format_exc()[-2000:]
            if W > 1:
                break  # the ranks may be out of step
    results["stats"] = contexts[gemm].stats()
    return results


def fallback_is_told():
    """A budget's least plan keeps the rows of even routing. With a hot expert chunks fall back, which the first rank
    says once."""
    W, rank = world()
    for hot in (None, 0):
        case = Case(W, per_rank=4, K=1, tokens=(96,), hot=hot, restore=("keep", "keep"), seed=53)
        budget = 1 << 10
        while True:
            context = Context(group(), ContextOptions(gemm="ref", memory_budget=budget))
            layer = case.layer(context, chunks=0)
            tokens, ids, weights, params = case.inputs(rank)
            if hot is None:
                ids = torch.arange(len(tokens)).view(-1, 1) % case.E
            try:
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    for _ in range(3):
                        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
                break
            except OverBudget as error:
                assert budget == 1 << 10, error
                budget = int(re.search(r"needs (\d+)", str(error))[1])
                context.close()
        texts, chunks = [str(one.message) for one in told], context.stats()["num_fallback_chunks"]
        if hot is None:
            assert texts == [] and chunks == 0, (texts, chunks)
        else:
            assert len(texts) == (rank == 0) and chunks >= 3, (texts, chunks)
            assert all("more rows than memory_budget keeps" in text for text in texts), texts


def tuned(folder, mode, calibrate):
    """A configured context decides and reports its decision, and a second one starts with that decision."""
    W, rank = world()
    results = []
    for _ in range(2):
        options = TunerOptions(mode=mode, calibrate=calibrate, cache=folder, decisions=True)
        context = Context(group(), ContextOptions(gemm="ref", tuner=options))
        case = Case(W, tokens=(60, 60, 60), seed=51)
        layer = case.layer(context, chunks=0)
        for _ in range(60):
            tokens, ids, weights, params = case.inputs(rank)
            layer(tokens, ids, weights, params).backward(case.cotangents[rank])
        fitted = None if calibrate is None else context.machine_json()
        results.append((context.decisions(), context.tuner_stats(), context.stats()["last_num_chunks"], fitted))
        context.close()
        dist.barrier()  # the first rank has left its decisions
    return results


SLOW_LINK = {
    **{"sluice_machine": 2, "name": "slow link", "gemm": {"f32": {"flops_per_second": 1e10, "half_rows": 8}}},
    **{"rows": {"bytes_per_second": 5e9}, "exchange": {"bytes_per_second": 1e6, "startup_seconds": 1e-6}},
    **{"activation_seconds": 1e-10, "activation_grad_seconds": 2e-10, "host_copy": {"bytes_per_second": 4e9}},
}


def chosen_copies(folder):
    """By default a layer deduplicates if its machine predicts that this is faster, and another run starts with that
    decision. Without a machine, or without a choice, the layer sends rows."""
    W, rank = world()
    machine = Path(folder) / f"machine{rank}.json"
    machine.write_text(json.dumps(SLOW_LINK))
    fixed = {"deduplicate": MoeConfig.__dataclass_fields__["deduplicate"].default, "per_rank": 4, "tokens": (60, 25)}
    kept = {"decisions": f"{folder}/kept.json"}
    found = []
    for routes, budget, tuner in [
        (4, None, {"mode": "model", "machine": str(machine), **kept}),
        (4, None, kept),
        (4, None, None),
        (4, 1 << 24, {"machine": str(machine)}),
        (1, None, {"machine": str(machine)}),
    ]:
        options = ContextOptions(
            gemm="ref", memory_budget=budget, tuner=None if tuner is None else TunerOptions(**tuner)
        )
        context = Context(group(), options)
        case = Case(W, K=routes, seed=57, **fixed)
        layer = case.layer(context, chunks=0 if budget else 2)
        for _ in range(3):
            case.check(layer, rank)
        stats = context.stats()
        found.append((stats["last_deduplicate"], stats["deduplication"]))
        context.close()
        dist.barrier()  # the first rank has left its decisions
    return found


def refusals():
    """A wrong input on one rank is an error on all, at once, and the group stays usable."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(8,), seed=70)
    layer = case.layer(context)
    tokens, ids, weights, params = case.inputs(rank)
    wrong = {
        "dtype": lambda: layer(tokens.to(torch.float16), ids, weights, params),
        "complex": lambda: layer(tokens.to(torch.complex64), ids, weights, params),
        "shape": lambda: layer(tokens[:, :-1], ids, weights, params),
        "rank": lambda: layer(tokens[0], ids, weights, params),
        "expert out of range": lambda: layer(tokens, ids + 1000, weights, params),
        "float ids": lambda: layer(tokens, ids.float(), weights, params),
        "half weights": lambda: layer(tokens, ids, weights.half(), params),
        "missing parameter": lambda: layer(tokens, ids, weights, [{"w1": p["w1"]} for p in params]),
        "too few experts": lambda: layer(tokens, ids, weights, params[:-1]),
        "device": lambda: layer(tokens.to("meta"), ids, weights, params),
        "parameter shape": lambda: layer(tokens, ids, weights, [{**p, "w1": p["w2"]} for p in params]),
    }
    culprit = W - 1
    for name, call in wrong.items():
        print(name, flush=True)
        began = time.monotonic()
        with raises(InvalidArgument if rank == culprit else PeerRefused, "" if rank == culprit else str(culprit)):
            call() if rank == culprit else layer(tokens, ids, weights, params)
        assert time.monotonic() - began < 30  # and not the group's 60
    case.check(layer, rank)
    if W > 1:
        with raises(InvalidArgument, f"{2 * W + 1} experts do not divide over {W} ranks; give expert_rank"):
            MoeLayer(context, MoeConfig(model_width=8, num_experts=2 * W + 1, top_k=1))
        other = Case(W, tokens=(8,), seed=71).layer(context, layer_id=1 if rank == 0 else 2)
        with raises(Mismatch):
            other(tokens, ids, weights, params)


def traces():
    """Traces and statistics are plain dicts."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(40,), n=2, seed=86)
    layer = case.layer(context, layer_id=7)
    tokens, ids, weights, params = case.inputs(rank)
    context.trace_start()
    layer(tokens, ids, weights, params).backward(case.cotangents[rank])
    events = context.trace_take()
    assert context.trace_take() == []
    context.trace_stop()
    assert {"layer", "chunk", "lane", "op", "direction", "begin_ns", "end_ns", "bytes"} == set(events[0])
    assert {event["layer"] for event in events} == {7}
    assert {event["direction"] for event in events} == {"forward", "backward"}
    assert {event["chunk"] for event in events} >= {0, 1}
    assert all(event["begin_ns"] <= event["end_ns"] for event in events)
    stats = context.stats(reset_peak=True)
    assert stats["num_passes"] == 2 and stats["last_num_chunks"] == 2 and stats["gemm"] and stats["bytes_sent"] > 0


def under_plans():
    """Equal plans give the bits of a layer with the same n; different plans are a mismatch, and change nothing."""
    W, rank = world()
    context = Context(group(), ContextOptions(gemm="ref"))  # "auto" may choose another library in between
    case = Case(W, tokens=(40, 23), n=2, seed=80)
    tokens, ids, weights, params = case.inputs(rank)
    wanted = case.layer(context)(tokens, ids, weights, params).detach()
    layer = case.layer(context, chunks=0)
    found = pareto(layer, 40, 6)
    assert 1 < len(found) <= 6 and len({plan.choice for plan in found}) == len(found)
    assert [plan.time for plan in found] == sorted(plan.time for plan in found)
    two = LayerPlan(layer, 40, PlanChoice(2, -1, -1, -1))
    assert two.choice.num_chunks == 2 and two.step_bytes > 0 and two.fixed_bytes > 0
    layer.use_plan(two)
    assert layer.plan is two
    out = layer(tokens, ids, weights, params)
    assert torch.equal(out, wanted)
    assert context.stats()["num_outstanding"] == 1 and context.stats()["last_num_chunks"] == 2
    out.backward(case.cotangents[rank])
    compare(case, rank, out, tokens, weights, params)
    peak = context.stats()["peak_bytes"]
    assert peak <= two.base_bytes + two.fixed_bytes + two.step_bytes, (peak, two.fixed_bytes, two.step_bytes)
    layer.use_plan(found[0] if rank == 0 else found[-1])
    with raises(Mismatch) if W > 1 else contextlib.nullcontext():
        layer(tokens, ids, weights, params)
    layer.use_plan(None)
    assert torch.equal(layer(tokens, ids, weights, params), wanted)
    other = Case(W, tokens=(8,), seed=81, widths=(8, 16)).layer(context)
    alone = case.layer(Context(EpGroup.for_ranks([rank])), chunks=0)  # the same layer on one rank
    for one in (other, alone) if W > 1 else (other,):
        with raises(InvalidArgument, "this plan was made for layer"):
            one.use_plan(two)


class _Block(torch.nn.Module):
    """A MoE layer with a gate that routes rows by their index."""

    def __init__(self, context, case, rank, number):
        super().__init__()
        self.layer = case.layer(context, chunks=0, layer_id=number)
        self.experts = torch.nn.ModuleList(
            torch.nn.ParameterDict({name: tensor.clone() for name, tensor in expert.items()})
            for expert in case.params[rank * case.per_rank : (rank + 1) * case.per_rank]
        )
        self.linear = torch.nn.Linear(case.widths[0], case.widths[0])
        self.ids, self.weights = case.ids[rank], case.weights[rank]

    def forward(self, x):
        return self.linear(x) + self.layer(x, self.ids, self.weights, [dict(each) for each in self.experts])


def model_under_a_budget():
    """Returns the choices of each rank. Batches, and therefore bytes, differ between ranks."""
    W, rank = world()
    context = Context(group())
    case = Case(W, tokens=(900, 300), per_rank=2, seed=82, restore=("adaptive", "adaptive"), wgrad="adaptive", n=0,
                widths=(32, 64))  # fmt: skip
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(_Block(context, case, rank, number) for number in range(3))).train()
    given = {"model": model, "batch": (case.tokens[rank],), "loss": lambda out: out.square().sum()}
    free = plan_model(budget="1GiB", **given)
    free.undo()
    with pytest.raises(OverBudget, match="OVER_BUDGET.*give at least") as refused:
        plan_model(budget=1, **given)
    smallest = str(refused.value)
    least = int(smallest.split("give at least ")[1].split(",")[0])
    tight = plan_model(budget=least, **given)
    assert tight.measured_bytes <= least
    model(case.tokens[rank]).sum().backward()
    return *([(block.policy, block.moe) for block in plan.blocks] for plan in (free, tight)), smallest


SOON = 30  # seconds, on the busiest machine: far below the groups' deadline of 60


@functools.cache
def _numbers(world, gemm):
    return ranks.run(world, numbers, gemm=gemm)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world,gemm", [(1, "auto"), (1, "host"), (1, "ref"), (2, "auto"), (3, "host"), (4, "auto")])
def test_Layer_AgainstLoopOverExperts_Agrees(world, gemm, case):
    for rank, results in enumerate(_numbers(world, gemm)):
        assert case in results, f"rank {rank} did not get so far: {results}"
        assert results[case] is None, f"rank {rank}: {results[case]}"


def test_Deduplicate_ByDefault_IsChosenWithAMachine(tmp_path):
    found = ranks.run(2, chosen_copies, folder=str(tmp_path))
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
    found = ranks.run(2, tuned, folder=str(tmp_path), mode=mode, calibrate=calibrate)
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
    "autograd_jobs:checkpoints_outstanding": (2,),
    "test_layer:refusals": (1, 3),
    "test_layer:traces": (2,),
    "test_layer:under_plans": (1, 2),
    "test_layer:fallback_is_told": (2,),
    "group_jobs:lifetimes": (2,),
    "group_jobs:forked_workers": (2,),
    "group_jobs:outstanding_at_exit": (1, 2),
    "group_jobs:torn_down": (2,),
    "group_jobs:unequal_groups": (3,),
    "group_jobs:join_fails": (3,),
    "group_jobs:several_groups": (4,),
    "group_jobs:placements": (2,),
    "group_jobs:evaluates_alone": (2,),
}


@pytest.mark.parametrize("job, world", [(job, world) for job, worlds in JOBS.items() for world in worlds])
def test_Job_OnSoManyRanks_HoldsWhatItChecks(job, world):
    ranks.run(world, job, finalize=job.startswith("group_jobs"))


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
