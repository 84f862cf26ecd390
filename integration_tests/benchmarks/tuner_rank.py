"""Rank-side of tuner.py: one scenario after another: every n by itself, every mode, and the paper models' choices."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sluice._library import load
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeLayer
from sluice.config import TunerOptions
from sluice.errors import OverBudget
from sluice.planning.machines import Machine
from sluice.planning.planner import Planner, Workload

from integration_tests.benchmarks import launch
from integration_tests.benchmarks.stolen import Stolen

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
MODES = ("adaptive", "profile", "model")
# n, T_DI, T_M, weight gradients: what a layer may be told; None: open.
Choice = tuple[int, str | None, str | None, str | None]
OPEN: Choice = (0, None, None, None)


class Scenario:
    """The inputs of a scenario, alike for every layer that runs it."""

    def __init__(self, plan: dict[str, Any], case: dict[str, Any]) -> None:
        rank, W = dist.get_rank(), dist.get_world_size()
        self.plan, self.case = plan, case
        generator = torch.Generator().manual_seed(plan["seed"] + rank)
        T, M, H, E, K = (case[name] for name in "TMHEK")
        self.tokens = torch.randn(T, M, generator=generator).requires_grad_()
        ids = (torch.arange(T * K) % E).view(T, K)
        # Skew: all routes of so many tokens go to different experts of rank 0 that it gets `skew` times its part.
        share = (case["skew"] - 1) / max(W - 1, 1)
        hot = torch.rand(T, generator=generator) < share
        ids[hot] = (torch.arange(int(hot.sum())).view(-1, 1) + torch.arange(K)) % (E // W)
        self.ids, self.weights = ids, torch.full((T, K), 1.0 / K)
        self.experts = [
            {"w1": (torch.randn(H, M) / M**0.5).requires_grad_(), "w2": (torch.randn(M, H) / H**0.5).requires_grad_()}
            for _ in range(E // W)
        ]
        self.cotangent = torch.randn(T, M, generator=generator)

    def layer(self, context: Context, choice: Choice) -> MoeLayer:
        case = self.case
        chunks, restore_input, restore_middle, wgrad = choice
        # Without a budget the mode is fixed, so that n alone differs between sides.
        free = "adaptive" if context.options.memory_budget else "deferred"
        return MoeLayer(
            context,
            model_width=case["M"],
            hidden_width=case["H"],
            num_experts=case["E"],
            top_k=case["K"],
            activation="relu",
            num_chunks=chunks,
            wgrad_mode=wgrad or free,
            restore_input=restore_input or "adaptive",
            restore_middle=restore_middle or "adaptive",
        )

    def step(self, layer: MoeLayer) -> float:
        """One forward and backward; the slowest rank's seconds."""
        for expert in self.experts:
            for parameter in expert.values():
                parameter.grad = None
        dist.barrier()
        began = time.perf_counter()
        layer(self.tokens, self.ids, self.weights, self.experts).backward(self.cotangent)
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took.item())


def predictions(case: dict[str, Any], machine: bytes, world_size: int) -> dict[int, dict[str, float]]:
    """Seconds of forward and backward at every n: by the schedule, MPMoE's phases, MPipeMoE eq. 10."""
    library = load()
    ffi = library.ffi
    out = ffi.new("sluice_planner_t **")
    library.check(library.lib.sluice_planner_create(machine, len(machine), out))
    work = library.new("planner_workload")
    work.model_width, work.hidden_width, work.num_tokens = case["M"], case["H"], case["T"]
    work.num_experts, work.top_k, work.world_size, work.skew = case["E"], case["K"], world_size, case["skew"]
    found = {}
    for n in SIZES:
        choice = ffi.new("sluice_planner_choice_t *", [n, 0, 0, 0])
        p = ffi.new("sluice_planner_prediction_t *")
        p.struct_size = ffi.sizeof(p[0])
        library.check(library.lib.sluice_planner_predict(out[0], work, choice, p, ffi.NULL, 0))
        found[n] = {
            "schedule": p.forward_seconds + p.backward_seconds,
            "mpmoe": p.mpmoe_forward_seconds + p.mpmoe_backward_seconds,
            "mpipemoe": p.mpipemoe_forward_seconds + p.mpipemoe_backward_seconds,
            "machine_error": p.machine_error_median,
        }
    library.lib.sluice_planner_destroy(out[0])
    return found


def key_of(choice: Choice) -> str:
    """As records name it: n alone, or a plan."""
    return str(choice[0]) if choice[1] is None else "/".join(map(str, choice))


def budgeted(case: dict[str, Any], machine: bytes, world_size: int) -> tuple[int, dict[str, float]]:
    """The scenario's budget in bytes, and seconds by plan that the machine predicts under it."""
    planner = Planner(Machine(json.loads(machine), {}))
    T, M, H, E, K = (case[name] for name in "TMHEK")
    work = Workload(M, H, T, E, K, world_size, dtype="f32", skew=case["skew"], memory_budget=1 << 40)
    wide = planner.choose(work).candidates
    least = min(c.total_bytes for c in wide)
    all_kept = (1, "keep", "keep")
    most = next(c for c in wide if (c.choice.num_chunks, c.choice.restore_input, c.choice.restore_middle) == all_kept)
    # The planner's base is a small context's; the torch adapter's products take more.
    budget = int(least + case["budget_share"] * (most.total_bytes - least)) + (4 << 20)
    found = {}
    for c in planner.choose(work.with_(memory_budget=budget)).candidates:
        found[key_of((c.choice.num_chunks, c.choice.restore_input, c.choice.restore_middle, c.choice.wgrad))] = (
            c.seconds
        )
    return budget, found


def chosen_by(context: Context) -> Choice:
    """What its tuner decided last."""
    decisions = context.decisions()
    if not decisions:
        return (1, None, None, None)
    last = decisions[-1]
    if last["restore_input"] is None:
        return (last["num_chunks"], None, None, None)
    wgrad = ("deferred", "per_chunk")[last["wgrad_mode"]]
    return (last["num_chunks"], last["restore_input"], last["restore_middle"], wgrad)


def run_modes(
    scenario: Scenario, group: EpGroup, folder: str, budget: int | None
) -> tuple[dict[str, dict[str, Any]], set[Choice]]:
    """What each mode settles on, after so many ordinary steps, and what its races cost."""
    plan, found, choices = scenario.plan, {}, set()
    for mode in MODES:
        calibrate = None if mode == "profile" else plan["calibrate_s"]
        options = TunerOptions(mode, calibrate=calibrate, cache=folder)
        context = Context(group, ContextOptions(gemm=plan["gemm"], tuner=options, memory_budget=budget))
        layer = scenario.layer(context, OPEN)
        began = time.perf_counter()
        for _ in range(plan["steps"]):
            scenario.step(layer)
        choice = chosen_by(context)
        choices.add(choice)
        found[mode] = {
            "n": choice[0],
            "key": key_of(choice),
            "decisions": context.decisions(),
            "stats": context.tuner_stats(),
            "seconds": time.perf_counter() - began,
        }
        context.close()
    return found, choices


def measure(
    scenario: Scenario, group: EpGroup, chosen: set[Choice], budget: int | None, stolen: Stolen
) -> dict[str, list[float]]:
    """Screens every candidate in turns, then runs the best five and what was chosen in fresh rounds.

    Each of these follows a step of its own kind that does not count, as a step in training does. Under a budget each
    candidate has a context of its own, since a budget is a context's.
    """
    plan = scenario.plan
    candidates: set[Choice] = {(n, None, None, None) for n in SIZES}
    if budget is not None:
        rest = [(di, m) for di in ("keep", "redispatch") for m in ("keep", "recompute")]
        candidates = {(n, di, m, "deferred") for n in SIZES for di, m in rest}
    shared = Context(group, ContextOptions(gemm=plan["gemm"])) if budget is None else None
    contexts, layers, screened = {}, {}, {}
    for choice in sorted(candidates | chosen, key=str):
        context = shared or Context(group, ContextOptions(gemm=plan["gemm"], memory_budget=budget))
        layer = scenario.layer(context, choice)
        try:
            scenario.step(layer)  # its warm-up
        except OverBudget:  # on all ranks alike
            context.close()
            continue
        contexts[choice], layers[choice], screened[choice] = context, layer, []
    for _ in range(plan["screen"]):
        for choice, layer in layers.items():
            screened[choice].append(scenario.step(layer))
    best = sorted(layers, key=lambda choice: statistics.median(screened[choice]))[:5]
    final: dict[Choice, list[float]] = {choice: [] for choice in sorted({*best, *chosen}, key=str)}
    for count in range(plan["pairs"]):
        order = list(final) if count % 2 == 0 else list(reversed(final))
        while True:
            stolen.begin()
            took = {}
            for choice in order:
                scenario.step(layers[choice])
                took[choice] = scenario.step(layers[choice])
            if not stolen.spoiled():
                break
        for choice, seconds in took.items():
            final[choice].append(seconds)
    for context in contexts.values():
        context.close()
    return {key_of(choice): seconds for choice, seconds in final.items()}


def machine_of(scenario: Scenario, group: EpGroup, folder: str) -> bytes:
    """The machine that all modes of this scenario have, measured now or taken from the cache. Collective."""
    options = TunerOptions("adaptive", calibrate=scenario.plan["calibrate_s"], cache=folder)
    context = Context(group, ContextOptions(gemm=scenario.plan["gemm"], tuner=options))
    scenario.layer(context, OPEN)
    context.close()
    files = sorted(Path(folder).glob("machine-*.json"), key=lambda p: p.stat().st_mtime)
    key = f"M {scenario.case['M']}, H {scenario.case['H']}\n".encode()
    texts = [file.read_bytes() for file in files]
    return next(text for text in reversed(texts) if key in text).split(b"\n", 2)[2]


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    W, rank = dist.get_world_size(), dist.get_rank()
    group = EpGroup.for_ranks(list(range(W)))
    lines = []
    with tempfile.TemporaryDirectory() as folder:  # of this rank: every link is another machine
        for number, case in enumerate(plan["cases"]):
            scenario = Scenario(plan, case)
            machine = machine_of(scenario, group, folder)
            budget = None
            predicted: dict[str, dict[str, float]]
            models: dict[str, str] = {}
            if case["budget_share"] is None:
                predicted = {str(n): found for n, found in predictions(case, machine, W).items()}
                for name in ("schedule", "mpmoe", "mpipemoe"):
                    models[name] = min(predicted, key=lambda n: predicted[n][name])
            else:
                budget, seconds = budgeted(case, machine, W)
                predicted = {key: {"schedule": value} for key, value in seconds.items()}
            modes, choices = run_modes(scenario, group, folder, budget)
            choices |= {(int(n), None, None, None) for n in models.values()}
            stolen = Stolen(plan["most_stolen"], plan["patience_s"])
            final = measure(scenario, group, choices, budget, stolen)
            line = {**case, "modes": modes, "models": models, "predicted": predicted, "measured": final}
            lines.append({**line, "stolen": stolen.found()})
            if rank == 0:
                launch.report(done=number + 1, of=len(plan["cases"]), name=case["name"])
    if rank == 0:
        Path(plan["out"]).write_text(json.dumps(lines))
    dist.barrier()
    group.close()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
