"""Rank-side of tuner.py: one scenario after another: every n by itself, every mode, and the paper models' choices."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeLayer
from sluice.config import TunerOptions
from sluice.errors import OverBudget
from sluice.planning.machines import Machine
from sluice.planning.planner import Choice as Planned
from sluice.planning.planner import Planner, Prediction, Workload

from integration_tests.benchmarks import reference
from integration_tests.benchmarks.rank import Rank, balanced_ids, forget_gradients, make_experts, seconds_of
from integration_tests.benchmarks.stolen import Stolen

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
MODES = ("adaptive", "profile", "model")
MODELS = ("schedule", "mpmoe", "mpipemoe")
MOST = 4  # times the steps that a mode may take where its races are not through
FIXED = 4  # chunks of a baseline that does not choose
PIPEMOE = (2, 4, 8)  # n that PipeMoE's pipeline may take


class Choice(NamedTuple):
    """What a layer may be told. None: open, as 0 chunks are."""

    chunks: int
    restore_input: str | None = None
    restore_middle: str | None = None
    wgrad: str | None = None
    kept: int = 0  # chunks that the policies speak of, the first ones; 0: all

    def by_chunk(self, policy: str | None, rest: str) -> str | list[str]:
        """As MoeLayer takes a tensor's policy: one for all chunks, or `rest` behind those that are kept."""
        if policy is None or not 0 < self.kept < self.chunks:
            return policy or "adaptive"
        return [policy] * self.kept + [rest] * (self.chunks - self.kept)


OPEN = Choice(0)


class Scenario:
    """The inputs of a scenario, alike for every layer that runs it."""

    def __init__(self, plan: dict[str, Any], case: dict[str, Any]) -> None:
        rank, W = dist.get_rank(), dist.get_world_size()
        self.plan, self.case = plan, case
        generator = torch.Generator().manual_seed(plan["seed"] + rank)
        T, M, H, E, K = (case[name] for name in "TMHEK")
        self.tokens = torch.randn(T, M, generator=generator).requires_grad_()
        ids = balanced_ids(T, E, K)
        # Skew: all routes of so many tokens go to different experts of rank 0 that it gets `skew` times its part.
        share = (case["skew"] - 1) / max(W - 1, 1)
        hot = torch.rand(T, generator=generator) < share
        ids[hot] = (torch.arange(int(hot.sum())).view(-1, 1) + torch.arange(K)) % (E // W)
        self.ids, self.weights = ids, torch.full((T, K), 1.0 / K)
        self.experts = make_experts(M, H, E // W)
        self.cotangent = torch.randn(T, M, generator=generator)

    def layer(self, context: Context, choice: Choice, **changes: Any) -> MoeLayer:
        case = self.case
        # Without a budget the mode is fixed, so that n alone differs between sides.
        free = "adaptive" if context.options.memory_budget else "deferred"
        options = {
            "top_k": case["K"],
            "num_chunks": choice.chunks,
            "wgrad_mode": choice.wgrad or free,
            "restore_input": choice.by_chunk(choice.restore_input, "redispatch"),
            "restore_middle": choice.by_chunk(choice.restore_middle, "recompute"),
            **changes,
        }
        sizes = {"model_width": case["M"], "hidden_width": case["H"], "num_experts": case["E"]}
        return MoeLayer(context, activation="relu", **sizes, **options)

    def step(self, layer: MoeLayer) -> float:
        """One forward and backward; the slowest rank's seconds."""
        forget_gradients(self.experts)
        return seconds_of(lambda: layer(self.tokens, self.ids, self.weights, self.experts).backward(self.cotangent))


def overlap(compute: float, comm: float, whole: float) -> float:
    """How much of the shorter lane ran beside the longer one; 1: all of it, and nothing besides."""
    least = min(compute, comm)
    return (compute + comm - whole) / least if least > 0 else 0.0


def predicted_of(p: Prediction) -> dict[str, float]:
    """Seconds of forward and backward by the schedule, MPMoE's phases and MPipeMoE eq. 10; lanes and their overlap."""
    compute, comm = p.busy("compute"), p.busy("comm")
    return {
        "schedule": p.seconds,
        "mpmoe": p.mpmoe,
        "mpipemoe": p.mpipemoe,
        "compute": compute,
        "comm": comm,
        "overlap": overlap(compute, comm, p.seconds),
    }


def workload_of(case: dict[str, Any], world_size: int) -> Workload:
    T, M, H, E, K = (case[name] for name in "TMHEK")
    return Workload(M, H, T, E, K, world_size, dtype="f32", skew=case["skew"], activation="relu")


def predictions(case: dict[str, Any], machine: bytes, world_size: int) -> dict[str, dict[str, float]]:
    """Of every n."""
    planner = Planner(Machine(json.loads(machine), {}))
    work = workload_of(case, world_size)
    return {str(n): predicted_of(planner.predict(work, Planned(n, "keep", "keep", "deferred"))) for n in SIZES}


def key_of(choice: Choice) -> str:
    """As records name it: n alone, or a plan."""
    if choice.restore_input is None:
        return str(choice.chunks)
    part = f"/first {choice.kept}" if 0 < choice.kept < choice.chunks else ""
    return "/".join(map(str, choice[:4])) + part


def seconds_on(machine: dict[str, Any], work: Workload, choices: Iterable[Choice]) -> dict[str, float]:
    """What a machine says of layers, or plans, that run as these do."""
    planner = Planner(Machine(machine, {}))
    return {
        key_of(c): planner.predict(
            work, Planned(c.chunks, c.restore_input or "keep", c.restore_middle or "keep", c.wgrad or "deferred")
        ).seconds
        for c in choices
    }


def choice_of(planned: Planned) -> Choice:
    return Choice(planned.num_chunks, planned.restore_input, planned.restore_middle, planned.wgrad)


def budgeted(case: dict[str, Any], machine: bytes, world_size: int) -> tuple[int, dict[Choice, dict[str, float]]]:
    """The scenario's budget in bytes, and what the machine predicts of every plan that fits it."""
    planner = Planner(Machine(json.loads(machine), {}))
    work = workload_of(case, world_size).with_(memory_budget=1 << 40)
    wide = planner.choose(work).candidates
    least = min(c.total_bytes for c in wide)
    all_kept = (1, "keep", "keep")
    most = next(c for c in wide if (c.choice.num_chunks, c.choice.restore_input, c.choice.restore_middle) == all_kept)
    # The planner's base is a small context's; the torch adapter's products take more.
    budget = int(least + case["budget_share"] * (most.total_bytes - least)) + (4 << 20)
    work = work.with_(memory_budget=budget)
    fitting = [c.choice for c in planner.choose(work).candidates if not c.verdict.startswith("over")]
    return budget, {choice_of(c): predicted_of(planner.predict(work, c)) for c in fitting}


def chosen_by(context: Context) -> Choice:
    """What its tuner decided last."""
    decisions = context.decisions()
    if not decisions:
        return Choice(1)
    last = decisions[-1]
    if last["restore_input"] is None:
        return Choice(last["num_chunks"])
    wgrad = ("deferred", "per_chunk")[last["wgrad_mode"]]
    kept = last["kept_chunks"] if last["kept_chunks"] < last["num_chunks"] else 0
    return Choice(last["num_chunks"], last["restore_input"], last["restore_middle"], wgrad, kept)


def run_modes(
    scenario: Scenario, group: EpGroup, folder: str, budget: int | None
) -> tuple[dict[str, dict[str, Any]], set[Choice]]:
    """What each mode settles on, after so many ordinary steps or more, and what its races cost."""
    plan, found, choices = scenario.plan, {}, set()
    for mode in MODES:
        calibrate = None if mode == "profile" else plan["calibrate_s"]
        options = TunerOptions(mode, calibrate=calibrate, cache=folder)
        context = Context(group, ContextOptions(gemm=plan["gemm"], tuner=options, memory_budget=budget))
        layer = scenario.layer(context, OPEN)
        began = time.perf_counter()
        steps = 0
        while steps < plan["steps"] or (steps < MOST * plan["steps"] and not context.stats()["last_is_settled"]):
            scenario.step(layer)  # settled alike on all ranks
            steps += 1
        choice = chosen_by(context)
        choices.add(choice)
        found[mode] = {
            "n": choice.chunks,
            "key": key_of(choice),
            "decisions": context.decisions(),
            "stats": context.tuner_stats(),
            "steps": steps,
            "seconds": time.perf_counter() - began,
        }
        context.close()
    return found, choices


# ---- baselines -------------------------------------------------------------------------------------------------


class ByDestination(Scenario):
    """FasterMoE's split: in part j each rank sends to one rank alone, j places behind it, and computes meanwhile.

    On Sluice's own products and transport, so that the split alone differs: every route is a token of its own, tokens
    lie ordered by how far their rank is, and there are W chunks of them, filled up with tokens that go nowhere. A
    token's routes are not added up, in its favour.
    """

    def __init__(self, scenario: Scenario) -> None:
        W, rank = dist.get_world_size(), dist.get_rank()
        self.plan, self.case, self.experts = scenario.plan, scenario.case, scenario.experts
        K, E = self.case["K"], self.case["E"]
        ids = scenario.ids.flatten()
        part = (ids // (E // W) - rank) % W
        most = torch.tensor([int((part == j).sum()) for j in range(W)]).max()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        routes = torch.full((W, int(most)), -1)
        for j in range(W):
            mine = torch.nonzero(part == j).flatten()
            routes[j, : len(mine)] = mine
        routes = routes.flatten()
        there, token = routes >= 0, routes.clamp(min=0) // K
        self.tokens = scenario.tokens.detach()[token].requires_grad_()
        self.ids = torch.where(there, ids[routes.clamp(min=0)], -1).unsqueeze(1)
        self.weights = torch.full((len(routes), 1), 1.0 / K)
        self.cotangent = scenario.cotangent[token]

    def layer(self, context: Context, choice: Choice, **changes: Any) -> MoeLayer:
        """As the scenario's, one route for each token."""
        return super().layer(context, choice, top_k=1, **changes)


def baselines(scenario: Scenario, context: Context) -> dict[str, Side]:
    """What others do, live: neither keeps weight gradients for the end, and both cut chunks out of tokens.

    "pipemoe N" is PipeMoE's pipeline with N chunks, each an all-to-all of all ranks, without reuse of slots.
    """
    alike = {"chunk_cut": "tokens"}
    split = ByDestination(scenario)
    sides = {
        "by destination": Side(split, split.layer(context, Choice(dist.get_world_size(), wgrad="per_chunk"), **alike))
    }
    for n in PIPEMOE:
        sides[f"pipemoe {n}"] = Side(scenario, scenario.layer(context, Choice(n, wgrad="per_chunk"), **alike))
    return sides


# ---- measuring -------------------------------------------------------------------------------------------------


class Side:
    """One layer that runs in turns with others."""

    def __init__(self, scenario: Scenario, layer: MoeLayer) -> None:
        self.scenario, self.layer = scenario, layer
        self.screened: list[float] = []
        self.seconds: list[float] = []
        self.lanes: list[tuple[float, float, float]] = []

    def step(self) -> float:
        return self.scenario.step(self.layer)

    def counted(self) -> tuple[float, tuple[float, float, float]]:
        """A step, and what its lanes and passes took on this rank."""
        before = self.layer.context.stats()
        took = self.step()
        after = self.layer.context.stats()
        return took, tuple((after[name] - before[name]) / 1e9 for name in ("compute_ns", "comm_ns", "pass_ns"))

    def lanes_over_ranks(self) -> dict[str, float]:
        """Medians: of the rank that computes longest; of the one that communicates least, since a rank that waits for
        another counts the wait as communication. Collective."""
        medians = [statistics.median(values) for values in zip(*self.lanes, strict=True)]
        most, least = torch.tensor(medians), torch.tensor(medians)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        compute, comm, whole = float(most[0]), float(least[1]), float(most[2])
        return {"compute": compute, "comm": comm, "passes": whole, "overlap": overlap(compute, comm, whole)}


def candidates_of(
    scenario: Scenario, group: EpGroup, shared: Context | None, wanted: set[Choice], budget: int | None
) -> dict[Choice, Side]:
    """Those that fit, warm. Under a budget each has a context of its own, since a budget is a context's."""
    found = {}
    for choice in sorted(wanted, key=str):
        options = ContextOptions(gemm=scenario.plan["gemm"], memory_budget=budget)
        side = Side(scenario, scenario.layer(shared or Context(group, options), choice))
        try:
            side.step()
        except OverBudget:  # on all ranks alike
            side.layer.context.close()
            continue
        found[choice] = side
    return found


def measure(
    scenario: Scenario,
    group: EpGroup,
    chosen: set[Choice],
    budget: int | None,
    stolen: Stolen,
    beside: reference.Reference,
) -> dict[str, dict[str, Any]]:
    """Screens every candidate in turns, then runs the best five, what was chosen, and the baselines in fresh rounds.

    Each of these follows a step of its own kind that does not count, as a step in training does. The baselines: one
    chunk, FIXED chunks, and those of `baselines`, PipeMoE's with the n that is best for it.
    """
    plan = scenario.plan
    wanted = {Choice(n) for n in SIZES}
    if budget is not None:
        rest = [(di, m) for di in ("keep", "redispatch") for m in ("keep", "recompute")]
        wanted = {Choice(n, di, m, "deferred") for n in SIZES for di, m in rest}
    shared = Context(group, ContextOptions(gemm=plan["gemm"])) if budget is None else None
    sides = candidates_of(scenario, group, shared, wanted | chosen, budget)
    others = {} if shared is None else baselines(scenario, shared)
    for side in others.values():
        side.step()
    for _ in range(plan["screen"]):
        for side in (*sides.values(), *others.values()):
            side.screened.append(side.step())

    def fastest(among: dict[Any, Side]) -> list[Any]:
        return sorted(among, key=lambda key: statistics.median(among[key].screened))

    counted = {*fastest(sides)[:5], *chosen} & sides.keys()
    final: dict[Any, Side] = {choice: sides[choice] for choice in sorted(counted, key=str)}
    if shared is not None:
        pipelines = {name: side for name, side in others.items() if name != "by destination"}
        for name in ("by destination", fastest(pipelines)[0]):
            final[name] = others[name]
        for n in (1, FIXED):
            final[Choice(n)] = sides[Choice(n)]
    references = []
    for count in range(plan["pairs"]):
        order = list(final) if count % 2 == 0 else list(reversed(final))
        while True:
            stolen.begin()
            took, now = {}, [beside.sample()]
            for key in order:
                final[key].step()
                took[key] = final[key].counted()
            now.append(beside.sample())
            if not stolen.spoiled():
                break
        references += now
        for key, (seconds, lanes) in took.items():
            final[key].seconds.append(seconds)
            final[key].lanes.append(lanes)
    names = {key: key if isinstance(key, str) else key_of(key) for key in final}
    found = {
        "measured": {names[key]: side.seconds for key, side in final.items() if not isinstance(key, str)},
        "baselines": {names[key]: side.seconds for key, side in final.items() if isinstance(key, str)},
        "lanes": {names[key]: side.lanes_over_ranks() for key, side in final.items()},
        "reference_now": reference.medians(references),
    }
    for side in sides.values():
        side.layer.context.close()
    return found


TINY: dict[str, Any] = {"T": 32, "M": 64, "H": 64, "E": 2, "K": 1, "skew": 1.0}


def tiny_layer(rank: Rank) -> reference.Reference:
    """A reference whose step is that of a layer with next to no work, in one chunk."""
    scenario = Scenario(rank.plan, {**TINY, "E": 2 * rank.world_size})
    side = Side(scenario, scenario.layer(rank.context(gemm=rank.plan["gemm"]), Choice(1)))

    def step() -> tuple[float, float]:
        seconds, (_, _, passes) = side.counted()
        return seconds, passes

    return reference.Reference(step)


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
    rank = Rank()
    plan, group, W = rank.plan, rank.group, rank.world_size
    lines, beside = [], tiny_layer(rank)
    calibrated: dict[bytes, dict[str, float]] = {}  # what the reference took when the machine was measured
    with tempfile.TemporaryDirectory() as folder:  # of this rank: every link is another machine
        for number, case in enumerate(plan["cases"]):
            scenario = Scenario(plan, case)
            before = beside.samples()
            machine = machine_of(scenario, group, folder)
            if machine not in calibrated:
                calibrated[machine] = reference.medians(before + beside.samples())
            budget, chosen_by_models = None, {}
            by_plan: dict[Choice, dict[str, float]] = {}
            if case["budget_share"] is None:
                predicted = predictions(case, machine, W)
                for name in MODELS:
                    best = min(predicted, key=lambda n: predicted[n][name])
                    chosen_by_models[name] = Choice(int(best))
            else:
                budget, by_plan = budgeted(case, machine, W)
                predicted = {key_of(choice): found for choice, found in by_plan.items()}
                for name in MODELS:
                    chosen_by_models[name] = min(by_plan, key=lambda choice: by_plan[choice][name])
            modes, choices = run_modes(scenario, group, folder, budget)
            stolen = Stolen(plan["most_stolen"], plan["patience_s"])
            final = measure(scenario, group, choices | {*chosen_by_models.values()}, budget, stolen, beside)
            final["reference_then"] = calibrated[machine]
            drift = reference.drift(final["reference_then"], final["reference_now"])
            now = reference.drifted(json.loads(machine), drift)
            ran = [Choice(n) for n in SIZES] if budget is None else by_plan
            final["predicted_now"] = seconds_on(
                now, workload_of(case, W).with_(memory_budget=budget or 0), (c for c in ran if key_of(c) in predicted)
            )
            models = {name: key_of(choice) for name, choice in chosen_by_models.items()}
            models = {name: key for name, key in models.items() if key in final["measured"]}  # the others do not fit
            line = {**case, "modes": modes, "models": models, "predicted": predicted, **final}
            lines.append({**line, "stolen": stolen.found(), "calibration": json.loads(machine)})
            rank.report(done=number + 1, of=len(plan["cases"]), name=case["name"])
    rank.leave(lines)


if __name__ == "__main__":
    main()
