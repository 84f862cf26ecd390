# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: compares the predictions of a plan of layers over stages with the pipeline that runs the plan, and
predicted batches of other policies with measured ones.

Layers sleep for their time and keep memory like real layers, so that ranks can share a processor. Each layer is
measured separately on one rank; pipelines of the plan run afterwards.
"""

import random
import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from sluice.adapters.torch import Edge, EpGroup, Pipeline, PipelineConfig, memory_meter
from sluice.planning import batches, stages
from torch.utils.checkpoint import checkpoint

EDGE = 4096  # floats between layers
KIB = 1 << 10
BATCHES = 3


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, forward_s, backward_s, kept):
        time.sleep(forward_s)
        ctx.save_for_backward(torch.empty(kept, dtype=torch.uint8))
        ctx.seconds = backward_s
        return given + 1

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors  # noqa: B018  (as a layer reads them; where it runs again, they come now)
        time.sleep(ctx.seconds)
        return grad + 1, None, None, None


class _Layer:
    def __init__(self, forward_s, kept):
        self.forward_s, self.kept = forward_s, kept

    def __call__(self, given, again=False):
        work = (given, self.forward_s, 2 * self.forward_s, self.kept)
        return checkpoint(_Work.apply, *work, use_reentrant=False) if again else _Work.apply(*work)


def _layers(count):
    draw = random.Random(count)
    return [_Layer(draw.uniform(0.002, 0.008), KIB * draw.randint(256, 2048)) for _ in range(count)]


def sleeping_layer(forward_s):
    """Returns a layer whose forward sleeps for these seconds, and whose backward sleeps for twice as long."""
    return _Layer(forward_s, KIB)


def measured_seconds(layer, samples=1, again=False):
    """Returns forward and backward seconds of a layer that runs alone."""
    given = torch.zeros(samples * EDGE, requires_grad=True)
    forwards, backwards = [], []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        out = layer(given, again)
        middle = time.perf_counter()
        out.backward(torch.ones_like(out))
        forwards.append(middle - begin), backwards.append(time.perf_counter() - middle)
    return statistics.median(forwards), statistics.median(backwards)


def _option(layer, again):
    """Returns one option of a layer, measured while the layer runs alone."""
    given = torch.zeros(EDGE, requires_grad=True)
    forward_s, backward_s = measured_seconds(layer, again=again)

    def both():
        out = layer(given, again)
        memory_meter.mark("middle")
        out.backward(torch.ones_like(out))

    line = memory_meter.measure(both)
    held = line.live("middle")
    return stages.Option(
        kind=stages.RECOMPUTE if again else stages.KEEP,
        forward_seconds=forward_s,
        backward_seconds=backward_s,
        held_bytes=held,
        working_bytes=line.peak("start", "end") - held,
    )


def _measured(layer):
    """Returns the measured layer in the planner's form."""
    return stages.Layer(options=(_option(layer, False), _option(layer, True)), output_bytes=4 * EDGE)


class _Stage:
    def __init__(self, layers, again, is_first, is_last, samples=1):
        self.layers, self.again, self.is_first, self.is_last = layers, again, is_first, is_last
        self.width = samples * EDGE
        self.flight = {}

    def load(self, micro_batch):
        pass

    def forward(self, micro_batch, given):
        first = torch.zeros(self.width) if self.is_first else given.tensors[0].clone()
        out = first.requires_grad_()
        for layer, again in zip(self.layers, self.again):
            out = layer(out, again)
        self.flight[micro_batch] = first, torch.autograd.graph.get_gradient_edge(out)  # the output itself may be freed
        return None if self.is_last else Edge([out.detach()])

    def backward(self, micro_batch, given):
        first, out = self.flight.pop(micro_batch)
        torch.autograd.backward(out, torch.ones(self.width) if self.is_last else given.tensors[0])
        return None if self.is_first else Edge([first.grad])


def _fastest(pipeline, stage, micro_batches, batches):
    """Returns the seconds of all ranks' fastest batch. The first does not count."""
    seconds = []
    for _ in range(1 + batches):
        dist.barrier()
        begin = time.perf_counter()
        pipeline.run(stage, micro_batches)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def run_stage(group, layers, words, stage, stages_of, samples, micro_batches, batches):
    """Returns (seconds of all ranks' fastest batch, bytes that this rank sends in a batch). words: of the partition."""
    own = _Stage(layers, [False] * len(layers), stage == 0, stage == stages_of - 1, samples)
    pipeline = Pipeline(PipelineConfig("1f1b", words[:120], stage), group)
    seconds = _fastest(pipeline, own, micro_batches, batches)
    sent = pipeline.stats()["bytes_sent"]
    pipeline.close()
    assert sent % (1 + batches) == 0
    return seconds, sent // (1 + batches)


def _run(group, plan, layers, micro_batches):
    """Returns (seconds of a batch over all ranks, peak of torch's memory on this rank)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [index for index, choice in enumerate(plan.choices) if choice.stage == rank]
    again = [plan.choices[index].kind == stages.RECOMPUTE for index in mine]
    stage = _Stage([layers[index] for index in mine], again, rank == 0, rank == world - 1)
    partition = " ".join(str(choice.stage) for choice in plan.choices)
    pipeline = Pipeline(PipelineConfig("1f1b", partition[:120], rank), group)
    seconds = _fastest(pipeline, stage, micro_batches, BATCHES - 1)
    line = memory_meter.measure(lambda: pipeline.run(stage, micro_batches))
    pipeline.close()
    return seconds, line.peak("start", "end")


def held_out(per_stage=4, budgets=5):
    """By budget: (recomputed layers, measured ÷ predicted seconds of a step, by stage measured ÷ predicted peak, and
    whether the budget is kept)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = _layers(per_stage * world)
    told = [[_measured(layer) for layer in layers] if rank == 0 else None]
    dist.broadcast_object_list(told)
    micro_batches = 2 * world
    problem = {"layers": tuple(told[0]), "num_stages": world, "num_micro_batches": micro_batches}
    free = stages.plan(stages.Problem(**problem))
    most = max(stage["bytes"] for stage in free.stages)
    least = stages.plan(stages.Problem(**problem, budget_bytes=(1,) * world)).smallest_budget_bytes
    group = EpGroup.unshared(range(world))
    found = []
    for number in range(budgets):
        budget = least + (most - least) * number // (budgets - 1)
        plan = stages.plan(stages.Problem(**problem, budget_bytes=(budget,) * world))
        assert not plan.shortfall, plan.shortfall
        seconds, peak = _run(group, plan, layers, micro_batches)
        peaks = [None] * world
        dist.all_gather_object(peaks, peak)
        again = sum(choice.kind == stages.RECOMPUTE for choice in plan.choices)
        # Received tensors are in the library's memory, and the gradient that returns in torch's.
        shares = [peak / stage["peak_bytes"] for peak, stage in zip(peaks, plan.stages)]
        found.append((again, seconds / plan.step_seconds, shares, max(peaks) <= budget))
    group.close()
    return found


# ---- policies --------------------------------------------------------------------------------------------------------

SLEEPS = 8  # micro-batches
FORWARD_S, BACKWARD_S = 0.01, 0.02
OTHERS = {"gpipe": 0, "message_driven": 2, "backward_first": 3, "1f1b_hint": 1}


class _Sleeper:
    """A stage that sleeps. One stage takes 1.5 times as long as the others."""

    def __init__(self, stage, stages):
        self.stage, self.stages, self.slow = stage, stages, 1.5 if stage == 1 else 1.0

    def load(self, micro_batch):
        pass

    def forward(self, micro_batch, given):
        time.sleep(FORWARD_S * self.slow)
        return None if self.stage == self.stages - 1 else Edge([torch.zeros(64)])

    def backward(self, micro_batch, given):
        time.sleep(BACKWARD_S * self.slow)
        return Edge([torch.zeros(64)]) if self.stage else None


def _batch(policy, limit):
    """Returns (seconds from the first op of all ranks to the last, mean seconds of forwards and backwards by stage)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = EpGroup.unshared(range(world))
    pipeline = Pipeline(PipelineConfig(policy, "", rank, in_flight=limit or None), group)
    for _ in range(2):  # the first does not count
        pipeline.run(_Sleeper(rank, world), SLEEPS)
        dist.barrier()
    events = [event for event in pipeline.timeline() if event["lane"] == "compute"]
    told = [None] * world
    dist.all_gather_object(told, events)
    group.close()
    span = max(e["end_ns"] for each in told for e in each) - min(e["begin_ns"] for each in told for e in each)
    means = {
        op: [sum(e["end_ns"] - e["begin_ns"] for e in each if e["op"] == op) / SLEEPS / 1e9 for each in told]
        for op in ("forward", "backward")
    }
    return span / 1e9, means


def other_policies():
    """Measures a batch of one policy. Returns predicted ÷ measured - 1 of policies never measured before."""
    _, means = _batch("1f1b", 0)
    errors = {}
    for policy, limit in OTHERS.items():
        asked = batches.Batch(dist.get_world_size(), SLEEPS, means["forward"], means["backward"])
        told = batches.predict(replace(asked, policy=policy, in_flight=limit))
        measured, _ = _batch(policy, limit)
        errors[policy] = told.seconds / measured - 1
    return errors
