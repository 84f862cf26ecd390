# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice.optim` with a process group: parameters with groups of their own, DTensors, and what it refuses.

integration_tests/pairs trains data-parallel models with gradient sums inside the step.
"""

import copy
import warnings

import pytest
import ranks
import sluice.optim
import torch
import torch.distributed as dist
from sluice.errors import InvalidArgument, Mismatch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def gradients_of_a_cut_parameter():
    """A parameter is sharded over ranks. Every layout of its gradient trains as in torch's optimizer; a gradient that
    is infinite in one rank's part skips the step on all; clipping is refused."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    generator = torch.Generator().manual_seed(7)
    start, whole = (torch.randn(5, 3, generator=generator) for _ in range(2))
    for tensor, placements in (
        (whole, [Replicate()]),
        (whole.tensor_split([3])[rank], [Shard(0)]),
        (whole * (rank + 1) / 3, [Partial()]),
    ):
        trained = []
        for kind in (sluice.optim.AdamW, torch.optim.AdamW):
            param = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
            param.grad = DTensor.from_local(tensor.clone(), mesh, placements, shape=(5, 3), stride=(3, 1))
            kind([param], lr=1e-2, eps=1e-2).step()
            trained.append(param.detach().full_tensor())
        assert torch.allclose(*trained, rtol=1e-6, atol=1e-7) and not torch.equal(trained[0], start), placements
    before = param.detach().full_tensor()
    param.grad = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    if rank == 0:
        param.grad.to_local()[0, 0] = float("inf")
    optimizer = sluice.optim.AdamW([param])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert optimizer.skipped_steps == 1 and torch.equal(param.detach().full_tensor(), before)
    with pytest.raises(InvalidArgument, match="use torch.nn.utils.clip_grad_norm_"):
        sluice.optim.AdamW([param], max_norm=1.0).step()


def groups_with_ranks_of_their_own():
    """Each rank has an own expert and a shared layer: gradients are summed over each group's ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(size)]
    shared, own = (torch.nn.Parameter(torch.zeros(5)) for _ in range(2))
    options = {"lr": 1.0, "betas": (0.0, 0.0), "weight_decay": 0.0, "eps": 1.0}
    optimizer = sluice.optim.AdamW([shared], process_group=dist.group.WORLD, **options)
    optimizer.add_param_group({"params": [own], "process_group": alone[rank]})
    assert copy.deepcopy(optimizer).over_ranks
    for p in (shared, own):
        p.grad = torch.full_like(p, 2.0**rank)
    optimizer.step()
    assert all("process_group" not in group for group in optimizer.state_dict()["param_groups"])
    # With these numbers p = -g / (|g| + 1).
    sums = [(-p[0] / (1 + p[0])).item() * size for p in (shared, own)]
    assert sums == pytest.approx([3, 2**rank], rel=1e-5)


def what_would_diverge_or_wait():
    """A torch scaler, unscaling by hand, gradients that differ, and ranks outside the group are refused by name."""
    rank = dist.get_rank()
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(3)
    optimizer = sluice.optim.AdamW(params, process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    alone, group = dist.new_group([0]), {"params": params, "process_group": dist.group.WORLD}

    def differ():
        params[1].grad = None if rank == 1 else params[1].grad
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)
        optimizer.step()

    refused = [
        (lambda: scaler.step(optimizer), "use sluice.optim.GradScaler"),
        (lambda: sluice.optim.GradScaler("cpu").unscale_(optimizer), "clip by its max_norm"),
        (differ, "number of elements|counts, dtypes"),
    ]
    if rank == 0:
        refused += [
            (lambda: sluice.optim.AdamW([group], process_group=alone), "not all among those of the optimizer"),
            (lambda: sluice.optim.AdamW([{**group, "process_group": alone}]), "the optimizer has none"),
        ]
    for action, words in refused:
        with pytest.raises((InvalidArgument, Mismatch), match=words):
            action()


def everything():
    """Runs all jobs in one set of ranks, since importing torch.optim is slow."""
    gradients_of_a_cut_parameter()
    groups_with_ranks_of_their_own()
    what_would_diverge_or_wait()


def test_Optimizer_OverTwoRanks_HoldsWhatItChecks():
    ranks.run(2, everything)
