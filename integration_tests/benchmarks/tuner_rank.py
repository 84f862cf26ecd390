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

from integration_tests.benchmarks import launch

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
MODES = ("adaptive", "profile", "model")


class Scenario:
    """The inputs of a scenario, alike for every layer that runs it."""

    def __init__(self, plan: dict[str, Any], case: dict[str, Any]) -> None:
        rank, W = dist.get_rank(), dist.get_world_size()
        self.plan, self.case = plan, case
        generator = torch.Generator().manual_seed(plan["seed"] + rank)
        T, M, H, E, K = (case[name] for name in "TMHEK")
        self.tokens = torch.randn(T, M, generator=generator).requires_grad_()
        ids = (torch.arange(T * K) % E).view(T, K)
        # Skew: of the routes that go elsewhere, so many go to rank 0's experts that it gets `skew` times its part.
        share = (case["skew"] - 1) / max(W - 1, 1)
        hot = torch.rand(T, generator=generator) < share
        ids[hot, 0] = torch.arange(int(hot.sum())) % (E // W)
        if K > 1:  # a token's routes differ
            ids[hot, 1:] = (ids[hot, :1] + torch.arange(1, K)) % E
        self.ids, self.weights = ids, torch.full((T, K), 1.0 / K)
        self.experts = [
            {"w1": (torch.randn(H, M) / M**0.5).requires_grad_(), "w2": (torch.randn(M, H) / H**0.5).requires_grad_()}
            for _ in range(E // W)
        ]
        self.cotangent = torch.randn(T, M, generator=generator)

    def layer(self, context: Context, chunks: int) -> MoeLayer:
        case = self.case
        return MoeLayer(
            context,
            model_width=case["M"],
            hidden_width=case["H"],
            num_experts=case["E"],
            top_k=case["K"],
            activation="relu",
            num_chunks=chunks,
            wgrad_mode="deferred",  # so that n alone differs between sides
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


def run_modes(scenario: Scenario, group: EpGroup, folder: str) -> dict[str, dict[str, Any]]:
    """What each mode settles on, after so many ordinary steps, and what its races cost."""
    plan, found = scenario.plan, {}
    for mode in MODES:
        calibrate = None if mode == "profile" else plan["calibrate_s"]
        options = TunerOptions(mode, calibrate=calibrate, cache=folder)
        context = Context(group, ContextOptions(gemm=plan["gemm"], tuner=options))
        layer = scenario.layer(context, 0)
        began = time.perf_counter()
        for _ in range(plan["steps"]):
            scenario.step(layer)
        decisions = context.decisions()
        found[mode] = {
            "n": decisions[-1]["num_chunks"] if decisions else 1,
            "decisions": decisions,
            "stats": context.tuner_stats(),
            "seconds": time.perf_counter() - began,
        }
        context.close()
    return found


def measure(scenario: Scenario, group: EpGroup, chosen: set[int]) -> dict[int, list[float]]:
    """Screens every n in turns, then runs the best five and what was chosen in fresh rounds."""
    plan = scenario.plan
    context = Context(group, ContextOptions(gemm=plan["gemm"]))
    layers = {n: scenario.layer(context, n) for n in SIZES}
    screened: dict[int, list[float]] = {n: [] for n in SIZES}
    for count in range(plan["screen"] + 1):
        for n, layer in layers.items():
            seconds = scenario.step(layer)
            if count > 0:
                screened[n].append(seconds)
    best = sorted(SIZES, key=lambda n: statistics.median(screened[n]))[:5]
    final: dict[int, list[float]] = {n: [] for n in sorted({*best, *chosen})}
    for count in range(plan["pairs"]):
        for n in final if count % 2 == 0 else reversed(list(final)):
            final[n].append(scenario.step(layers[n]))
    context.close()
    return final


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
            modes = run_modes(scenario, group, folder)
            files = sorted(Path(folder).glob("machine-*.json"), key=lambda p: p.stat().st_mtime)
            machine = files[-1].read_bytes().split(b"\n", 2)[2]
            predicted = predictions(case, machine, W)
            models = {name: min(SIZES, key=lambda n: predicted[n][name]) for name in ("schedule", "mpmoe", "mpipemoe")}
            final = measure(scenario, group, {*(mode["n"] for mode in modes.values()), *models.values()})
            lines.append({**case, "modes": modes, "models": models, "predicted": predicted, "measured": final})
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
