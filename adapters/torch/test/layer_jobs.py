# SPDX-License-Identifier: Apache-2.0
"""Jobs of the ranks of test_layer.py: numbers, choices, errors and traces of layers."""

import json
import re
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from layer_cases import Case, close, compare, group, raises, world
from sluice import plan_model
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeConfig, MoeLayer
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
    """Warnings and num_fallback_chunks of a budget's least plan: under even routing, and with a hot expert."""
    W, rank = world()
    found = []
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
        found.append(([str(one.message) for one in told], context.stats()["num_fallback_chunks"]))
    return found


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
    """Traces and statistics as plain dicts."""
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
    return events, context.stats(reset_peak=True)


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
    try:
        layer(tokens, ids, weights, params)
        said = "nothing"
    except Mismatch as error:
        said = type(error).__name__
    layer.use_plan(None)
    assert torch.equal(layer(tokens, ids, weights, params), wanted)
    other = Case(W, tokens=(8,), seed=81, widths=(8, 16)).layer(context)
    alone = case.layer(Context(EpGroup.for_ranks([rank])), chunks=0)  # the same layer on one rank
    for one in (other, alone) if W > 1 else (other,):
        with raises(InvalidArgument, "this plan was made for layer"):
            one.use_plan(two)
    return said


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
    given, found = (case.tokens[rank],), []
    free = plan_model(model, "1GiB", given, loss=lambda out: out.square().sum())
    found.append([(block.policy, block.moe) for block in free.blocks])
    free.undo()
    smallest = ""
    try:
        plan_model(model, 1, given, loss=lambda out: out.square().sum())
    except OverBudget as error:
        smallest = str(error)
    least = int(smallest.split("give at least ")[1].split(",")[0])
    tight = plan_model(model, least, given, loss=lambda out: out.square().sum())
    assert tight.measured_bytes <= least
    found.append([(block.policy, block.moe) for block in tight.blocks])
    model(case.tokens[rank]).sum().backward()
    return [*found, smallest]
