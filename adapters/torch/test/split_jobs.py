# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: compares splits of the ranks, priced by `sluice plan --split`, with the pipelines that run them.

Layers sleep, as in planned_jobs.py. Their seconds are measured on one rank with two sizes of micro-batch; splits with
another size are held out.
"""

import random

import torch.distributed as dist
from planned_jobs import EDGE, measured_seconds, run_stage, sleeping_layer
from sluice.adapters.torch import EpGroup
from sluice.planning import machines, optimizer, split

BATCH = 16  # samples of a step, over all replicas
SIZES = (1, 4)  # micro-batches at which layers are measured
PARAMETERS = 1 << 20  # of a layer: too many for the whole model on one rank
LOOPBACK = {
    "name": "loopback",
    "gemm": {"f32": {"flops_per_second": 1e12}},
    "rows": {"bytes_per_second": 1e12},
    "exchange": {"bytes_per_second": 1e9, "startup_seconds": 2e-4},
}


def _work(count, unit_s):
    """Returns for each layer the fixed seconds of a forward, and the seconds for each sample."""
    draw = random.Random(count)
    return [(unit_s * draw.uniform(1, 3), unit_s * draw.uniform(1, 3)) for _ in range(count)]


def _layers(work, size):
    return [sleeping_layer(once + each * size) for once, each in work]


def _model(work):
    points = {size: [measured_seconds(layer, size) for layer in _layers(work, size)] for size in SIZES}
    layers = tuple(
        split.Layer(
            f"layer {index}",
            parameters=PARAMETERS,
            measured=tuple((size, *points[size][index]) for size in SIZES),
            output_bytes=4 * EDGE,
            activation_bytes=4 * EDGE,
            checkpoint_bytes=4 * EDGE,
        )
        for index in range(len(work))
    )
    return split.Model(layers, BATCH, 1, "f32")


def _measure(priced, work, batches):
    """Returns (seconds of a step over all ranks, bytes that the ranks of this replica sent in a step, by stage)."""
    rank, own = dist.get_rank(), priced.split
    replica, stage = divmod(rank, own.pipeline)
    group = EpGroup.unshared(range(replica * own.pipeline, (replica + 1) * own.pipeline))
    layers = [
        layer for layer, choice in zip(_layers(work, own.micro_batch), priced.plan.choices) if choice.stage == stage
    ]
    words = " ".join(str(choice.stage) for choice in priced.plan.choices)
    seconds, sent = run_stage(group, layers, words, stage, own.pipeline, own.micro_batch, priced.micro_batches, batches)
    group.close()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (stage, sent))
    return seconds, every


def every_grid(unit_s=0.006, layers_of_a_rank=2, batches=2):
    """By split: (words, predicted and measured seconds, by rank (stage, bytes sent in a step), the predicted bytes of
    each stage's activations, whether the search chooses this split under the budget)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    work = _work(layers_of_a_rank * world, unit_s)
    told = [_model(work) if rank == 0 else None]
    dist.broadcast_object_list(told)
    machine = machines.Machine(LOOPBACK, {})
    wanted = split.Wanted(tiers=(optimizer.NEAR,), recompute=split.NEVER, has_optimizer=False)
    split.SIMULATED = 1000  # simulate all of them
    # Three quarters of all parameters and gradients, so that one rank cannot have the whole model.
    budget = 3 * len(work) * 8 * PARAMETERS // 4
    found = split.Search(machine, told[0], budget, wanted).run(world)
    run = {}
    for priced in found.priced:
        run.setdefault(str(priced.split), priced)
    results = []
    for words, priced in run.items():
        seconds, sent = _measure(priced, work, batches)
        results.append((words, priced.seconds, seconds, sent, priced.message_bytes, priced is found.priced[0]))
    return results
