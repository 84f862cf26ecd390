# SPDX-License-Identifier: Apache-2.0
"""Searches for the fastest split of N ranks into pipeline stages, data-parallel replicas and expert-parallel groups.

A split is p stages x d replicas = N ranks, experts over e of the d replicas, samples of a micro-batch, the tier of the
optimizer's states, and whether the stages of a replica or the replicas of a stage are adjacent ranks. Ranks of a node
share its port, so this order determines rates. Splits over the budget are rejected; the best others are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import batches, optimizer, stages
from .architecture import Experts
from .errors import BadInput
from .machines import Machine
from .planner import Planner, Workload, priced_activation

MOST_STAGES = 64  # of a simulated batch
MOST_SIMULATED = 256  # micro-batches, or 8 for each stage; longer batches are extrapolated linearly
ALWAYS, NEVER = "always", "never"
SIMULATED = 8  # number of simulated splits, the fastest by the plan's formula
BUCKET = 1 << 22  # elements of an optimizer bucket
STAGES_FIRST, REPLICAS_FIRST = ORDERS = ("stages", "replicas")  # which ranks are adjacent


@dataclass(frozen=True)
class Layer:
    """parameters: elements of each replica, without experts. flops: of the forward of one sample. measured: (samples of
    a micro-batch, forward seconds, backward seconds), instead of flops. Bytes are of one sample."""

    name: str = ""
    parameters: int = 0
    flops: float = 0.0
    measured: tuple[tuple[int, float, float], ...] = ()
    activation_bytes: int = 0
    checkpoint_bytes: int = 0
    workspace_bytes: int = 0
    output_bytes: int = 0
    may_recompute: bool = True
    experts: Experts | None = None


@dataclass(frozen=True)
class Model:
    """Describes a model. batch: samples of a step, over all replicas. tokens: of a sample."""

    layers: tuple[Layer, ...]
    batch: int
    tokens: int = 1
    dtype: str = "bf16"
    gated: bool = True
    activation: str | None = None


@dataclass(frozen=True)
class Split:
    """Describes one way to divide the ranks. p and d are the papers' G_inter and G_data."""

    pipeline: int
    data: int
    experts: int
    micro_batch: int
    tier: str
    order: str

    def __str__(self) -> str:
        return (
            f"pipeline {self.pipeline} x data {self.data}, experts over {self.experts}, micro-batch {self.micro_batch}"
        )


@dataclass(frozen=True)
class Priced:
    """Describes a split with its plan. seconds: of a step; batch_seconds: of its pipeline; sum_seconds: of the
    all-reduce by itself."""

    split: Split
    problem: stages.Problem
    plan: stages.Plan
    batch_seconds: float
    optimizer_seconds: float
    sum_seconds: float
    micro_batches: int
    bubble: float = 0.0

    @property
    def seconds(self) -> float:
        return self.batch_seconds + self.optimizer_seconds

    @property
    def bytes(self) -> int:
        """Returns the bytes of the stage with the most."""
        return max(stage["bytes"] for stage in self.plan.stages)

    @property
    def recomputed(self) -> int:
        """Returns the number of recomputed layers."""
        return sum(choice.kind == stages.RECOMPUTE for choice in self.plan.choices)

    @property
    def message_bytes(self) -> list[int]:
        """Returns the bytes of activations that each stage sends in a step. Gradients sent back have the same size."""
        sent = [0] * self.problem.num_stages
        for layer, choice, after in zip(self.problem.layers, self.plan.choices, self.plan.choices[1:]):
            if after.stage != choice.stage:
                sent[choice.stage] = layer.output_bytes * self.micro_batches
        return sent


@dataclass(frozen=True)
class Found:
    """priced: splits that fit, the fastest first. frontier: the Pareto-optimal simulated ones, by seconds and bytes.
    smallest_budget: the least with which a split fits; 0: not computed. refused: why splits were left out."""

    priced: tuple[Priced, ...]
    frontier: tuple[Priced, ...]
    tried: int
    smallest_budget: int = 0
    smallest_split: Split | None = None
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """Has the parts of a split that the user fixes; 0 or empty: open. recompute: "", ALWAYS or NEVER, for layers that
    can be recomputed. slots, bucket: of the optimizer."""

    pipeline: int = 0
    data: int = 0
    experts: int = 0
    micro_batch: int = 0
    tiers: tuple[str, ...] = (optimizer.NEAR, optimizer.FAR)
    schedule: str = "1f1b"
    recompute: str = ""
    order: str = ""
    bucket: int = BUCKET
    slots: int = 2
    has_optimizer: bool = True


# ---- the ranks of a grid, and their links ----


class Grid:
    """Places a split's ranks on the nodes of a machine. Rates are of a rank that shares its node's port with others."""

    def __init__(self, machine: Machine, split: Split) -> None:
        self.split, data = split, machine.data
        self.node = max(1, int(data.get("ranks_per_node") or 1))
        apart, within = data["exchange"], data.get("node_exchange") or data["exchange"]
        if self.node == 1:
            within = apart
        self.port = float(apart["bytes_per_second"]) * self.node  # of all ranks of a node together
        self.within = float(within["bytes_per_second"])
        self.startup = float(apart.get("startup_seconds", 0.0)), float(within.get("startup_seconds", 0.0))

    def node_of(self, stage: int, replica: int) -> int:
        p, d = self.split.pipeline, self.split.data
        return (replica * p + stage if self.split.order == STAGES_FIRST else stage * d + replica) // self.node

    def rate(self, flows: Sequence[tuple[int, int]]) -> float:
        """Returns the rate of the slowest of concurrent flows between nodes (from, to)."""
        leaving: dict[int, int] = {}
        entering: dict[int, int] = {}
        for source, target in flows:
            if source != target:
                leaving[source] = leaving.get(source, 0) + 1
                entering[target] = entering.get(target, 0) + 1
        shared = max((*leaving.values(), *entering.values()), default=0)
        return min(self.within, self.port / shared) if shared else self.within

    def link(self, cut: int) -> stages.Link:
        """Returns the slowest replica's link between a stage and the next, while all stages of all replicas send."""
        p, d = self.split.pipeline, self.split.data
        flows = [(self.node_of(s, r), self.node_of(s + 1, r)) for s in range(p - 1) for r in range(d)]
        ends = [(self.node_of(cut, r), self.node_of(cut + 1, r)) for r in range(d)]
        crosses = any(a != b for a, b in ends)
        return stages.Link(self.rate(flows) if crosses else self.within, self.startup[not crosses], True)

    def ring_seconds(self, size: float, members: int, step: int = 1) -> float:
        """Returns the seconds of concurrent all-reduces of `size` bytes in all stages, in rings of `members` replicas.
        step: the distance between two replicas of a ring."""
        if members < 2 or size <= 0:
            return 0.0
        p, d = self.split.pipeline, self.split.data
        flows = []
        for stage in range(p):
            for first in range(d // members if step == 1 else step):
                own = range(first * members, (first + 1) * members) if step == 1 else range(first, d, step)
                ring = [self.node_of(stage, replica) for replica in own]
                flows += list(zip(ring, ring[1:] + ring[:1]))
        crosses = any(a != b for a, b in flows)
        hops = 2 * (members - 1)
        return hops / members * size / self.rate(flows) + hops * self.startup[not crosses]


# ---- times and bytes of layers ----


def _measured(points: Sequence[tuple[int, float, float]], at: int) -> tuple[float, float]:
    """Returns seconds for a micro-batch, on the line through the smallest and largest measured size, or scaled."""
    first, last = min(points), max(points)
    if first[0] == last[0]:
        return first[1] * at / first[0], first[2] * at / first[0]
    part = (at - first[0]) / (last[0] - first[0])
    forward, backward = (max(0.0, a + part * (b - a)) for a, b in zip(first[1:], last[1:]))
    return forward, backward


def seconds_of(machine: Machine, model: Model, layer: Layer, micro_batch: int) -> tuple[float, float]:
    """Returns forward and backward seconds of a layer for one micro-batch, without its experts."""
    if layer.measured:
        return _measured(layer.measured, micro_batch)
    if not layer.flops:
        return 0.0, 0.0
    flops, rows = layer.flops * micro_batch, float(model.tokens * micro_batch)
    forward, dx, dw = (machine.gemm_rate(model.dtype, form, rows) for form in ("forward", "input_grad", "weight_grad"))
    return flops / forward, flops / dx + flops / dw


def _held(layer: Layer, split: Split) -> int:
    """Returns the number of the layer's parameters on a rank."""
    return layer.parameters + (layer.experts.parameters // split.experts if layer.experts else 0)


def _problem(machine: Machine, model: Model, split: Split, wanted: Wanted, budget: int) -> stages.Problem:
    element = 4 if model.dtype == "f32" else 2
    states = _states(model.dtype, split.tier, wanted)
    layers = []
    for layer in model.layers:
        forward, backward = seconds_of(machine, model, layer, split.micro_batch)
        own = _held(layer, split)
        size = split.micro_batch
        plain = {
            "name": layer.name,
            "parameter_bytes": own * element,
            "state_bytes": own * states,
            "output_bytes": layer.output_bytes * size,
        }
        if wanted.recompute == ALWAYS and layer.may_recompute and layer.experts is None:
            again = stages.Option(
                stages.RECOMPUTE,
                forward,
                backward + forward,
                held_bytes=layer.checkpoint_bytes * size,
                working_bytes=(layer.activation_bytes - layer.checkpoint_bytes + layer.workspace_bytes) * size,
            )
            layers.append(stages.Layer(**plain, options=(again,)))
            continue
        moe = None if layer.experts is None else _workload(model, layer.experts, split)
        layers.append(
            stages.Layer(
                **plain,
                forward_seconds=forward,
                backward_seconds=backward,
                recompute_seconds=0.0 if moe else forward,
                activation_bytes=layer.activation_bytes * size,
                checkpoint_bytes=0 if moe else layer.checkpoint_bytes * size,
                workspace_bytes=layer.workspace_bytes * size,
                may_recompute=layer.may_recompute and wanted.recompute != NEVER,
                may_offload=False,
                moe=moe,
            )
        )
    grid = Grid(machine, split)
    return stages.Problem(
        tuple(layers),
        links=tuple(grid.link(cut) for cut in range(split.pipeline - 1)),
        budget_bytes=(budget,) * split.pipeline if budget else (),
        base_bytes=_constant(model, split, wanted),
        num_stages=split.pipeline,
        num_micro_batches=model.batch // (split.data * split.micro_batch),
        schedule=wanted.schedule,
    )


def _workload(model: Model, experts: Experts, split: Split) -> Workload:
    tokens = model.tokens * split.micro_batch
    shape = experts.model_width, experts.hidden_width, tokens, experts.count, experts.top_k, split.experts
    return Workload(*shape, model.dtype, model.gated, activation=priced_activation(model.activation))


# ---- the optimizer ----


def _step(model: Model, split: Split, wanted: Wanted, count: int, **rates: float) -> optimizer.Prediction:
    return optimizer.predict(
        optimizer.Workload(
            max(1, count), split.tier, model.dtype, bucket=wanted.bucket, slots=wanted.slots,
            world_size=split.data, **rates,
        )
    )  # fmt: skip


def _states(dtype: str, tier: str, wanted: Wanted) -> int:
    """Returns bytes for each parameter in addition to the parameter: its gradient, and its states if they are near."""
    gradient = 4 if dtype == "f32" else 2
    if tier != optimizer.NEAR or not wanted.has_optimizer:
        return gradient
    return gradient + (8 if dtype == "f32" else 12)


def _constant(model: Model, split: Split, wanted: Wanted) -> int:
    """Returns the bytes of slots and staging, which do not grow with the number of parameters."""
    if not wanted.has_optimizer:
        return 0
    held = sum(_held(layer, split) for layer in model.layers)
    made = _step(model, split, wanted, -(-held // split.pipeline))
    return made.bytes["slot"] + made.bytes["staging"]


def _optimizer_seconds(
    machine: Machine, model: Model, split: Split, wanted: Wanted, plan: stages.Plan
) -> tuple[float, float]:
    """Returns the seconds of the slowest stage: (of the phase after the pipeline, of the all-reduce by itself)."""
    grid, element = Grid(machine, split), 4 if model.dtype == "f32" else 2
    worst = 0.0, 0.0
    for stage in range(split.pipeline):
        own = [layer for layer, choice in zip(model.layers, plan.choices) if choice.stage == stage]
        dense = sum(layer.parameters for layer in own)
        experts = sum(layer.experts.parameters // split.experts for layer in own if layer.experts)
        summed = grid.ring_seconds(dense * element, split.data)
        summed += grid.ring_seconds(experts * element, split.data // split.experts, split.experts)
        if not wanted.has_optimizer or dense + experts == 0:
            worst = max(worst, (summed, summed))
            continue
        rates = {"update_rate": float(machine.data["rows"]["bytes_per_second"])}
        if split.tier == optimizer.FAR:
            copied = float((machine.data.get("host_copy") or {}).get("bytes_per_second", 0.0))
            rates |= {"copy_in_rate": copied, "copy_out_rate": copied}
        if summed > 0:  # the library's sums send more bytes than a ring; with this rate they take the ring's time
            alone = _step(model, split, wanted, dense + experts, sum_rate=1.0).parts["sum"]
            rates["sum_rate"] = alone / summed
        worst = max(worst, (_step(model, split, wanted, dense + experts, **rates).seconds, summed))
    return worst


# ---- enumerating ----


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]


def splits(machine: Machine, model: Model, ranks: int, wanted: Wanted) -> tuple[list[Split], list[str]]:
    """Returns all splits that groups can form, and the reasons why others cannot be formed. Raises BadInput if the
    fixed parts cannot be formed."""
    _check(model, ranks, wanted)
    has_experts = [layer.experts for layer in model.layers if layer.experts is not None]
    found, refused = [], []
    nodes = max(1, int(machine.data.get("ranks_per_node") or 1))
    for p in [wanted.pipeline] if wanted.pipeline else _divisors(ranks):
        d = ranks // p
        if wanted.data and wanted.data != d:
            continue
        if p > min(len(model.layers), MOST_STAGES):
            refused.append(f"pipeline {p}: {_too_many(model)}")
            continue
        if model.batch % d:
            refused.append(f"data {d}: a batch of {model.batch} samples does not divide over {d} replicas")
            continue
        for e in [wanted.experts] if wanted.experts else _divisors(d) if has_experts else [1]:
            if d % e or any(each.count % e for each in has_experts):
                refused.append(f"experts over {e}: they do not divide {d} replicas or the experts of a layer")
                continue
            samples = model.batch // d
            sizes = [wanted.micro_batch] if wanted.micro_batch else [1 << i for i in range(samples.bit_length())]
            for size in sizes:
                if samples % size:
                    refused.append(f"micro-batch {size}: the {samples} samples of a replica do not divide by it")
                    continue
                # Both orders are equivalent if p or d is 1, if a node has one rank, or if there is one node.
                is_same = p == 1 or d == 1 or nodes == 1 or ranks <= nodes
                orders = (wanted.order,) if wanted.order else ORDERS[:1] if is_same else ORDERS
                for order in orders:
                    found += [Split(p, d, e, size, tier, order) for tier in wanted.tiers]
    if not found:
        raise BadInput("no split of the ranks can be formed: " + "; ".join(dict.fromkeys(refused)))
    return found, list(dict.fromkeys(refused))


def _too_many(model: Model) -> str:
    if len(model.layers) < MOST_STAGES:
        return f"the model has {len(model.layers)} layers, and no stage may stay empty"
    return f"a pipeline may have {MOST_STAGES} stages"


def _check(model: Model, ranks: int, wanted: Wanted) -> None:
    """Raises BadInput that names the option if a fixed part is out of range."""
    if ranks < 1 or ranks > 1 << 20:
        raise BadInput(f"--ranks is {ranks}; it must be from 1 to {1 << 20}")
    for name, value in (("--pipeline", wanted.pipeline), ("--data", wanted.data)):
        if value and ranks % value:
            raise BadInput(f"{name} is {value}, which does not divide --ranks {ranks}: pipeline x data is all ranks")
    if wanted.pipeline and wanted.data and wanted.pipeline * wanted.data != ranks:
        raise BadInput(
            f"--pipeline {wanted.pipeline} x --data {wanted.data} is {wanted.pipeline * wanted.data} ranks, and "
            f"--ranks {ranks}: give one of the two"
        )
    if wanted.pipeline > min(len(model.layers), MOST_STAGES):
        raise BadInput(f"--pipeline is {wanted.pipeline}: {_too_many(model)}")
    data = wanted.data or (ranks // wanted.pipeline if wanted.pipeline else 0)
    counts = {layer.experts.count for layer in model.layers if layer.experts is not None}
    if wanted.experts > 1 and not counts:
        raise BadInput(f"--expert-ranks is {wanted.experts}, and no layer of the model has experts")
    for count in counts:
        if wanted.experts and count % wanted.experts:
            raise BadInput(f"--expert-ranks is {wanted.experts}, which does not divide the {count} experts of a layer")
    if wanted.experts and (data or ranks) % wanted.experts:
        what = f"--data {data}" if data else f"--ranks {ranks}"
        raise BadInput(
            f"--expert-ranks is {wanted.experts}, which does not divide {what}: experts are spread over replicas"
        )
    if data and model.batch % data:
        raise BadInput(
            f"a batch of {model.batch} samples does not divide over {data} replicas: give another --batch or --data"
        )
    if data and wanted.micro_batch and model.batch // data % wanted.micro_batch:
        raise BadInput(
            f"--micro-batch is {wanted.micro_batch}, which does not divide the {model.batch // data} samples of a "
            "replica"
        )


class Search:
    """Prices splits of one model on one machine under one budget (0: none) of every rank."""

    def __init__(self, machine: Machine, model: Model, budget: int, wanted: Wanted | None = None) -> None:
        self.machine, self.model, self.budget = machine, model, budget
        self.wanted = wanted or Wanted()
        self._planners: dict[int, Planner | None] = {}

    def run(self, ranks: int, progress: Callable[[str], None] = lambda text: None) -> Found:
        """Prices all splits and simulates the best ones."""
        tried, refused = splits(self.machine, self.model, ranks, self.wanted)
        fits: list[Priced] = []
        smallest: tuple[int, Split] | None = None
        for number, split in enumerate(tried):
            progress(f"split {number + 1} of {len(tried)}")
            problem = _problem(self.machine, self.model, split, self.wanted, self.budget)
            made = stages.plan(problem, self._planner(split))
            if not made.shortfall:
                fits.append(self._priced(split, problem, made))
            elif smallest is None or made.smallest_budget_bytes < smallest[0]:
                smallest = made.smallest_budget_bytes, split
        if not fits:
            assert smallest is not None  # at least one split was tried
            return Found((), (), len(tried), *smallest, refused=tuple(refused))
        chosen = _best(fits)
        for number, each in enumerate(list(chosen)):
            progress(f"fewest bytes of split {number + 1} of {len(chosen)}")
            fits += self._leanest(each)
        chosen = _best(fits)
        simulated = []
        for number, each in enumerate(chosen):
            progress(f"simulating {number + 1} of {len(chosen)}")
            simulated.append(self.simulated(each))
        progress("")
        simulated = _sorted(simulated)
        return Found(tuple(simulated), tuple(_pareto(simulated)), len(tried), refused=tuple(refused))

    def _planner(self, split: Split) -> Planner | None:
        """Returns the planner of MoE layers. ranks_per_node: the members of an expert-parallel group on one node."""
        if all(layer.experts is None for layer in self.model.layers):
            return None
        apart = split.pipeline if split.order == STAGES_FIRST else 1
        node = max(1, int(self.machine.data.get("ranks_per_node") or 1) // apart)
        if node not in self._planners:
            data = {**self.machine.data, "ranks_per_node": node}
            self._planners[node] = Planner(replace(self.machine, data=data))
        return self._planners[node]

    def _leanest(self, priced: Priced) -> list[Priced]:
        """Returns the same split with the plan of fewest bytes, if that plan takes fewer bytes."""
        planner, p = self._planner(priced.split), priced.split.pipeline
        tight = stages.plan(replace(priced.problem, budget_bytes=(1,) * p), planner)
        lean = replace(priced.problem, budget_bytes=(max(1, tight.smallest_budget_bytes),) * p)
        made = stages.plan(lean, planner)
        found = self._priced(priced.split, lean, made)
        return [] if made.shortfall or found.bytes >= priced.bytes else [found]

    def _priced(self, split: Split, problem: stages.Problem, plan: stages.Plan) -> Priced:
        seconds, summed = _optimizer_seconds(self.machine, self.model, split, self.wanted, plan)
        return Priced(split, problem, plan, plan.step_seconds, seconds, summed, problem.num_micro_batches)

    def simulated(self, priced: Priced) -> Priced:
        """Returns the split with its batch simulated in virtual time."""
        batch = batch_of(priced)
        count = batch.num_micro_batches
        most = max(MOST_SIMULATED, 8 * batch.num_stages)
        if count <= most:
            made = batches.predict(batch)
            return replace(priced, batch_seconds=made.seconds, bubble=made.bubble)
        half, whole = (batches.predict(replace(batch, num_micro_batches=number)) for number in (most // 2, most))
        each = (whole.seconds - half.seconds) / (most - most // 2)
        busy = (1 - whole.bubble) * whole.seconds * count / most
        seconds = whole.seconds + (count - most) * each
        return replace(priced, batch_seconds=seconds, bubble=1 - busy / seconds)


def batch_of(priced: Priced) -> batches.Batch:
    """Returns the pipeline of one replica, for the simulator."""
    p = priced.split.pipeline
    forward, backward, messages = [0.0] * p, [0.0] * p, [0.0] * p
    for layer, choice in zip(priced.problem.layers, priced.plan.choices):
        if layer.options:
            option = layer.options[choice.option]
            own = option.forward_seconds, option.backward_seconds
        else:
            again = layer.recompute_seconds if choice.kind == stages.RECOMPUTE else 0.0
            own = layer.forward_seconds, layer.backward_seconds + again
        moe = (choice.moe.forward, choice.moe.backward) if choice.moe else (0.0, 0.0)
        forward[choice.stage] += own[0] + moe[0]
        backward[choice.stage] += own[1] + moe[1]
    for stage, size in enumerate(priced.message_bytes):
        if stage + 1 < p:
            link = priced.problem.links[stage]
            messages[stage] = link.latency_seconds + size / priced.micro_batches / link.bytes_per_second
    policy = priced.problem.schedule
    limit = min(p, priced.micro_batches) if policy == "message_driven" else 0
    return batches.Batch(
        p, priced.micro_batches, forward, backward, message_seconds=messages, policy=policy, in_flight=limit
    )


def _best(priced: Sequence[Priced]) -> list[Priced]:
    """Returns the fastest splits, and the fastest of the Pareto frontier, by the plan's formula."""
    order = _sorted(priced)
    return list({id(each): each for each in [*order[:SIMULATED], *_pareto(order)[:SIMULATED]]}.values())


def _sorted(priced: Sequence[Priced]) -> list[Priced]:
    return sorted(priced, key=lambda each: (each.seconds, each.bytes))


def _pareto(order: Sequence[Priced]) -> list[Priced]:
    """Returns the splits that take fewer bytes than every faster one. order: the fastest first."""
    found: list[Priced] = []
    for each in order:
        if not found or each.bytes < found[-1].bytes:
            found.append(each)
    return found
