# SPDX-License-Identifier: Apache-2.0
"""Jobs of the ranks of test_optim_ranks.py: data-parallel training by the optimizer only."""

import copy
import warnings

import sluice.optim
import torch
import torch.distributed as dist
from sluice.errors import InvalidArgument, Mismatch, PeerRefused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

STEPS = 12


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(37, 53), torch.nn.GELU(), torch.nn.Linear(53, 11))


def _backward(model, step, rank, scale=1.0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(16, 37, generator=generator), torch.randn(16, 11, generator=generator)
    (torch.nn.functional.mse_loss(model(x), y) * scale).backward()


def _reduce(model):
    """Sums gradients as a host would."""
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def _bytes(model, optimizer):
    tensors = [p.detach() for p in model.parameters()]
    for p in model.parameters():
        tensors += [value for _, value in sorted(optimizer.state[p].items())]
    return [tensor.clone() for tensor in tensors]


def _same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def trained(max_norm):
    """Returns whether a rank has the bits of one process with the mean gradient. That process is also compared with
    torch's optimizer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, alone, stock = _model(), _model(), _model()
    mine = sluice.optim.AdamW(model.parameters(), lr=1e-2, process_group=dist.group.WORLD, max_norm=max_norm)
    one = sluice.optim.AdamW(alone.parameters(), lr=1e-2, max_norm=max_norm)
    theirs = torch.optim.AdamW(stock.parameters(), lr=1e-2)
    copied = copy.deepcopy(mine)
    for step in range(STEPS):
        for optimizer in (mine, one, theirs):
            optimizer.zero_grad()
        _backward(model, step, rank)
        _backward(stock, step, rank)
        _reduce(stock)
        sums = [torch.zeros_like(p) for p in alone.parameters()]
        for other in range(size):
            other_model = copy.deepcopy(alone)
            _backward(other_model, step, other)
            for total, p in zip(sums, other_model.parameters()):
                total += p.grad
        for p, total in zip(alone.parameters(), sums):
            p.grad = total / size  # by a power of two: no rounding
        if max_norm:
            norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), max_norm).item()
        for optimizer in (mine, one, theirs):
            optimizer.step()
        if max_norm:
            assert abs(mine.norm / norm - 1) < 1e-5 and mine.norm > max_norm
    for a, b in zip(model.parameters(), stock.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return _same(_bytes(model, mine), _bytes(alone, one)), copied.over_ranks


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
    groups = [dist.new_group([r]) for r in range(size)]
    pair = dist.new_group([0, 1])
    pairs = pair if rank < 2 else dist.new_group([2, 3], use_local_synchronization=True)
    shared, in_pair, own = (torch.nn.Parameter(torch.zeros(5)) for _ in range(3))
    options = {"lr": 1.0, "betas": (0.0, 0.0), "weight_decay": 0.0, "eps": 1.0}
    optimizer = sluice.optim.AdamW([shared], process_group=dist.group.WORLD, **options)
    optimizer.add_param_group({"params": [in_pair], "process_group": pairs})
    optimizer.add_param_group({"params": [own], "process_group": groups[rank]})
    for p in (shared, in_pair, own):
        p.grad = torch.full_like(p, 2.0**rank)
    optimizer.step()
    saved = optimizer.state_dict()
    assert all("process_group" not in group for group in saved["param_groups"])
    # With these numbers p = -g / (|g| + 1).
    return [(-p[0] / (1 + p[0])).item() * size for p in (shared, in_pair, own)]


def overflowed(where):
    """A gradient of one rank is infinite: nothing changes on any rank, and the next step runs."""
    rank, model = dist.get_rank(), _model()
    optimizer = sluice.optim.AdamW(model.parameters(), process_group=dist.group.WORLD)
    _backward(model, 0, rank)
    optimizer.step()
    before = _bytes(model, optimizer)
    optimizer.zero_grad()
    _backward(model, 1, rank)
    if rank == where:
        model[2].bias.grad[3] = float("inf")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    same, skipped = _same(before, _bytes(model, optimizer)), optimizer.skipped_steps
    model[2].bias.grad[3] = 0.0
    optimizer.step()
    return same, skipped, len(told), _same(before, _bytes(model, optimizer))


def scaled(kind):
    """Scales and step counts of all steps with a GradScaler, of which the third overflows on rank 1 alone."""
    rank, model, mine = dist.get_rank(), _model(), kind == "sluice"
    warnings.simplefilter("ignore")
    if mine:
        optimizer = sluice.optim.AdamW(model.parameters(), lr=1e-2, process_group=dist.group.WORLD, check_finite=False)
        scaler = sluice.optim.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        scale = scaler.scale(torch.ones(())).item()
        _backward(model, step, rank, float("inf") if (step, rank) == (2, 1) else scale)
        if not mine:
            _reduce(model)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    first = next(iter(model.parameters()))
    return scales, optimizer.state[first]["step"].item(), [p.detach() for p in model.parameters()]


def refused():
    """Returns the errors for a torch scaler, unscaling by hand, gradients that differ, and ranks outside the group."""
    rank, model, said = dist.get_rank(), _model(), []
    optimizer = sluice.optim.AdamW(model.parameters(), process_group=dist.group.WORLD)
    _backward(model, 0, rank)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for action in (lambda: scaler.step(optimizer), lambda: sluice.optim.GradScaler("cpu").unscale_(optimizer)):
        try:
            action()
        except InvalidArgument as error:
            said.append(str(error))
    if rank == 1:
        model[2].bias.grad = None
    try:
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)
        optimizer.step()
    except Mismatch as error:
        said.append(str(error))
    alone = dist.new_group([0])
    if rank == 0:
        try:
            sluice.optim.AdamW([{"params": model.parameters(), "process_group": dist.group.WORLD}], process_group=alone)
        except InvalidArgument as error:
            said.append(str(error))
        try:
            sluice.optim.AdamW([{"params": model.parameters(), "process_group": alone}])
        except InvalidArgument as error:
            said.append(str(error))
    return said


def several(jobs):
    """Returns results of each of [(function, arguments)] in one set of ranks, since importing torch.optim is slow."""
    return [globals()[name](**arguments) for name, arguments in jobs]


def _wrong(path, model):
    """Returns the error on a rank."""
    try:
        _filed(path, model)
    except (Mismatch, PeerRefused) as error:
        return str(error)
    return "nothing"


def _filed(path, model):
    group = dist.group.WORLD
    return sluice.optim.AdamW(model.parameters(), lr=1e-2, process_group=group, state_file=path, resume=True)


def filed(folder):
    """Loads state files: one is a step ahead, as after a kill; both are swapped; one is lost."""
    rank, model = dist.get_rank(), _model()
    own, other = f"{folder}/states{rank}", f"{folder}/states{1 - rank}"
    optimizer = _filed(own, model)
    for step in range(2):
        optimizer.zero_grad()
        _backward(model, step, rank)
        optimizer.step()
    wanted = [p.detach().clone() for p in model.parameters()]
    optimizer._file.close()
    if rank == 1:  # alone: rank 1 of 2, without a peer to sum with
        ahead = sluice.optim.AdamW(model.parameters(), state_file=own, resume=True)
        ahead.step()
        ahead._file.close()
    dist.barrier()
    optimizer = _filed(own, model)
    found = (
        optimizer._file.step,
        int(optimizer.state[model[0].weight]["step"]),
        _same(list(model.parameters()), wanted),
    )
    optimizer._file.close()
    dist.barrier()
    swapped = _wrong(other, model)
    dist.barrier()
    alone = _wrong(own if rank == 0 else own + ".lost", model)
    return found, swapped, alone
