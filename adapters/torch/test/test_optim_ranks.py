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


def cut():
    """For a parameter that is sharded over ranks and a gradient that is not: whether each layout trains like torch's
    optimizer, and the error of clipping."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    generator = torch.Generator().manual_seed(7)
    start, whole = (torch.randn(5, 3, generator=generator) for _ in range(2))
    forms = {
        "whole": (whole, [Replicate()]),
        "cut": (whole, [Shard(0)]),
        "summed": (whole * (rank + 1) / 3, [Partial()]),
    }
    found = {}
    for form, (tensor, placements) in forms.items():
        trained = []
        for kind in (sluice.optim.AdamW, torch.optim.AdamW):
            param = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
            local = tensor.tensor_split([3])[rank] if form == "cut" else tensor
            param.grad = DTensor.from_local(local.clone(), mesh, placements, shape=(5, 3), stride=(3, 1))
            kind([param], lr=1e-2, eps=1e-2).step()
            trained.append(param.detach().full_tensor())
        found[form] = torch.allclose(*trained, rtol=1e-6, atol=1e-7) and not torch.equal(trained[0], start)
    before = param.detach().full_tensor()
    param.grad = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    if rank == 0:
        param.grad.to_local()[0, 0] = float("inf")
    optimizer = sluice.optim.AdamW([param])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    found["skipped"] = optimizer.skipped_steps == 1 and torch.equal(param.detach().full_tensor(), before)
    try:
        sluice.optim.AdamW([param], max_norm=1.0).step()
    except InvalidArgument as error:
        found["clipped"] = str(error)
    return found


def experts():
    """Each rank has an own expert and a shared layer: a step with gradients that are set by hand."""
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
    return [(-p[0] / (1 + p[0])).item() * size for p in (shared, own)]


def refused():
    """Returns the errors for a torch scaler, unscaling by hand, gradients that differ, and ranks outside the group."""
    rank, said = dist.get_rank(), []
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(3)
    optimizer = sluice.optim.AdamW(params, process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    alone = dist.new_group([0])

    def differ():
        params[1].grad = None if rank == 1 else params[1].grad
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)
        optimizer.step()

    def outside():
        sluice.optim.AdamW([{"params": params, "process_group": dist.group.WORLD}], process_group=alone)

    actions = [lambda: scaler.step(optimizer), lambda: sluice.optim.GradScaler("cpu").unscale_(optimizer), differ]
    if rank == 0:
        actions += [outside, lambda: sluice.optim.AdamW([{"params": params, "process_group": alone}])]
    for action in actions:
        try:
            action()
        except (InvalidArgument, Mismatch) as error:
            said.append(str(error))
    return said


def everything():
    """Returns the results of all jobs in one set of ranks, since importing torch.optim is slow."""
    return cut(), experts(), refused()


@pytest.fixture(scope="module")
def found():
    """Returns the results of both ranks, by job."""
    return list(zip(*ranks.run(2, everything)))


def test_GradientOfACutParameter_HoweverItIsLaid_TrainsAsTorchs(found):
    assert all(each[form] for each in found[0] for form in ("whole", "cut", "summed"))


def test_InfiniteGradient_InOneRanksPartOfACutParameter_SkipsTheStepOnAll(found):
    assert all(each["skipped"] for each in found[0])


def test_ParameterGroups_WithRanksOfTheirOwn_AreSummedOverThem(found):
    for got, sums in zip(found[1], [[3, 1], [3, 2]]):
        assert got == pytest.approx(sums, rel=1e-5)


def test_WhatWouldDivergeOrWait_IsRefusedByName(found):
    first, second = found[2]
    for said in (first, second):
        assert "use sluice.optim.GradScaler" in said[0]
        assert "clip by its max_norm" in said[1]
        assert "number of elements" in said[2] or "counts, dtypes" in said[2]
    assert "not all among those of the optimizer" in first[3]
    assert "the optimizer has none" in first[4]
    assert all("use torch.nn.utils.clip_grad_norm_" in each["clipped"] for each in found[0])
