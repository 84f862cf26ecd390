# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: predicts batches of other policies from the measured batch of one policy."""

import time
from dataclasses import replace

import torch
import torch.distributed as dist
from sluice.adapters.torch import Edge, EpGroup, Pipeline, PipelineConfig
from sluice.planning import batches

MICRO_BATCHES = 8
FORWARD_S, BACKWARD_S = 0.01, 0.02
HELD_OUT = {"gpipe": 0, "message_driven": 2, "backward_first": 3, "1f1b_hint": 1}


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
    rank, stages = dist.get_rank(), dist.get_world_size()
    group = EpGroup.unshared(range(stages))
    pipeline = Pipeline(PipelineConfig(policy, "", rank, in_flight=limit or None), group)
    for _ in range(2):  # the first does not count
        pipeline.run(_Sleeper(rank, stages), MICRO_BATCHES)
        dist.barrier()
    events = [event for event in pipeline.timeline() if event["lane"] == "compute"]
    told = [None] * stages
    dist.all_gather_object(told, events)
    group.close()
    span = max(e["end_ns"] for each in told for e in each) - min(e["begin_ns"] for each in told for e in each)
    means = {
        op: [sum(e["end_ns"] - e["begin_ns"] for e in each if e["op"] == op) / MICRO_BATCHES / 1e9 for each in told]
        for op in ("forward", "backward")
    }
    return span / 1e9, means


def held_out():
    """Returns predicted ÷ measured - 1 of each policy whose batch was not measured before."""
    _, means = _batch("1f1b", 0)
    errors = {}
    for policy, limit in HELD_OUT.items():
        asked = batches.Batch(dist.get_world_size(), MICRO_BATCHES, means["forward"], means["backward"])
        told = batches.predict(replace(asked, policy=policy, in_flight=limit))
        measured, _ = _batch(policy, limit)
        errors[policy] = told.seconds / measured - 1
    return errors
