# SPDX-License-Identifier: Apache-2.0
"""Tests that separate weight gradients have torch's bits, also with frozen layers and parameters with several uses."""

import warnings
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipelining_jobs import _bytes, _indices, loss_of
from sluice.errors import SluiceError
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class

WIDTH, ROWS, MICRO_BATCHES, STEPS, LAYERS = 8, 12, 4, 3, 4


class Plain(nn.Module):
    """The layer that a case uses unless it names another."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return torch.tanh(self.up(self.norm(x)))


class Table(nn.Module):
    """Rows of an embedding, chosen by integers made from the input."""

    def __init__(self):
        super().__init__()
        self.rows, self.up = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.up(self.rows(x[:, 0].abs().mul(7).long() % ROWS))


class WithTable(nn.Module):
    """Has a second output that depends only on parameters."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x):
        return torch.tanh(self.one(x)), self.two(self.table)


class Both(nn.Module):
    """Takes both outputs of WithTable."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, table):
        return torch.tanh(self.up(x) + self.up(table).sum(0))


class Cut(nn.Module):
    """Gives its input no gradient."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.up(x.detach())


class Twice(nn.Module):
    """A norm, linear layers and plain parameters, each with several uses."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)
        self.b, self.a, self.c = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(3))

    def forward(self, x):
        x = self.norm(self.two(torch.tanh(self.norm(self.one(x)))))
        return x @ (self.a + self.c) @ (self.b + self.c)


class Outside(nn.Module):
    """Weights of linear layers that functions use too, before and after the layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = F.linear(self.one(torch.tanh(F.linear(x, self.one.weight))), self.one.weight + self.two.weight)
        return self.two(self.two(x)) + self.two.bias


class Looks(nn.Module):
    """Calls autograd.grad in its forward."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.up(leaf)).sum(), leaf)
        return self.up(x + slope)


class Sometimes(nn.Module):
    """One of its layers is not used in every second step."""

    def __init__(self):
        super().__init__()
        self.always, self.often, self.is_left_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), False

    def forward(self, x):
        x = torch.tanh(self.always(x))
        return x if self.is_left_out else self.often(x)


# (layers that are not plain, frozen layers, names of frozen parameters)
CASES = {
    "all train": ({}, (), ()),
    "first layer": ({}, (0,), ()),
    "first half": ({}, (0, 1), ()),
    "first half, of integers": ({0: Table}, (0, 1), ()),
    "of integers": ({0: Table}, (), ()),
    "last half": ({}, (2, 3), ()),
    "last layer": ({}, (3,), ()),
    "middle": ({}, (1, 2), ()),
    "all but the first": ({}, (1, 2, 3), ()),
    "all but the last": ({}, (0, 1, 2), ()),
    "all but the third": ({}, (0, 1, 3), ()),
    "weights": ({}, (), ("up.weight",)),
    "all but biases": ({}, (), ("up.weight", "norm.weight", "norm.bias")),
    "input without gradient": ({2: Cut}, (), ()),
    "frozen, input without gradient": ({2: Cut}, (2,), ()),
    "output of parameters": ({1: WithTable, 2: Both}, (), ()),
    "output of parameters, frozen before": ({1: WithTable, 2: Both}, (0,), ()),
    "output of parameters, frozen after": ({1: WithTable, 2: Both}, (2, 3), ()),
    "output of frozen parameters": ({1: WithTable, 2: Both}, (1,), ()),
    "several uses": ({1: Twice, 3: Twice}, (), ()),
    "several uses, frozen before": ({1: Twice, 2: Twice}, (0,), ()),
    "uses outside": ({0: Outside, 2: Outside}, (), ()),
    "uses outside, frozen before": ({1: Outside, 3: Outside}, (0, 2), ()),
    "gradients in a forward": ({0: Looks, 3: Looks}, (), ()),
    "sometimes": ({1: Sometimes, 2: Sometimes}, (), ()),
    "sometimes, frozen before": ({1: Sometimes, 2: Sometimes}, (0,), ()),
}


def _layer(case, number):
    torch.manual_seed(10 + number)
    kinds, frozen, names = CASES[case]
    layer = kinds.get(number, Plain)()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(number not in frozen and name not in names)
    return layer


class Chain(nn.Sequential):
    """Layers of a stage, of which some give tuples."""

    def forward(self, *x):
        for layer in self:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
        return x


def _stage(case, index, num_stages):
    each = LAYERS // num_stages
    layers = {str(number): _layer(case, number) for number in range(index * each, (index + 1) * each)}
    chain = Chain()
    for name, layer in layers.items():
        chain.add_module(name, layer)
    return PipelineStage(chain, index, num_stages, torch.device("cpu"))


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)]


def _gradients(schedule, stages):
    """Returns gradients and losses by layer and step: of two batches, added, then of one after an update."""
    found = {}
    parameters = [p for stage in stages for p in stage.submod.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    for step in range(STEPS):
        for stage in stages:
            for layer in stage.submod:
                layer.is_left_out = step % 2 == 1
        x, target = _batch(step)
        is_last, losses = any(stage.is_last for stage in stages), []
        arguments = (x,) if any(stage.is_first for stage in stages) else ()
        schedule.step(*arguments, target=target if is_last else None, losses=losses if is_last else None)
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                found[step, name] = None if parameter.grad is None else parameter.grad.clone()
        found[step, "losses", is_last] = torch.stack(losses).detach() if losses else None
        if step == 1 and optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return {name: value for each in gathered for name, value in each.items()}


def _schedule(name, stages):
    return get_schedule_class(name)(stages, MICRO_BATCHES, loss_of, scale_grads=False)


def against_1f1b(schedules):
    """Returns by case and schedule the differences from torch's 1F1B, the amount compared, the parameters with a
    gradient, and the number of postponed weight gradients on this rank."""
    found, rank, ranks = {}, dist.get_rank(), dist.get_world_size()
    for case in CASES:
        stage = _stage(case, rank, ranks)
        wanted = _gradients(Schedule1F1B(stage, MICRO_BATCHES, loss_of, scale_grads=False), [stage])
        for label, (name, placement, stages_of_rank) in schedules.items():
            own = [_stage(case, index, ranks * stages_of_rank) for index in _indices(placement, stages_of_rank)]
            schedule = _schedule(name, own)
            with mock.patch.object(dist, "isend", wraps=dist.isend) as torchs_send:
                answers = _gradients(schedule, own)
            assert torchs_send.call_count == 0 < schedule.sluice.stats()["messages_sent"]
            assert answers.keys() == wanted.keys()
            differing = [each for each in wanted if _bits(wanted[each]) != _bits(answers[each])]
            there = sum(value is not None for value in wanted.values())
            found[case, label] = differing, there, schedule.weights_later
    return found


def _bits(tensor):
    return None if tensor is None else _bytes(tensor)


class Changes(nn.Module):
    """Uses a weight outside of its layer from the second micro-batch on."""

    def __init__(self):
        super().__init__()
        self.up, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return self.up(x) if self.calls < 3 else self.up(x) + self.up.bias


def changing():
    """One micro-batch uses a weight differently than the first: all ranks are told by name, and keep all parameters."""
    rank = dist.get_rank()
    stage = PipelineStage(Changes(), rank, 2, torch.device("cpu"))
    before = [each.detach().clone() for each in stage.submod.parameters()]
    x, target = _batch(0)
    with pytest.raises(SluiceError, match="up.bias.*separate_wgrad.*zero_bubble"):
        _schedule("sluice:zero_bubble", [stage]).step(*((x,) if rank == 0 else ()), target=target)
    assert all(map(torch.equal, before, stage.submod.parameters()))


def scaled_twice(name):
    """Gradients after two steps with scale_grads are those of torch's 1F1B. Of steps that find no gradients, zeros,
    gradients, and gradients again, the third warns."""
    found, rank = [], dist.get_rank()
    for make in (Schedule1F1B, get_schedule_class(name)):
        stage = _stage("all train", rank, 2)
        schedule = make(stage, MICRO_BATCHES, loss_of)
        told = []
        for step in range(4):
            x, target = _batch(0)
            if step == 1:
                for parameter in stage.submod.parameters():
                    parameter.grad.zero_()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                schedule.step(*((x,) if rank == 0 else ()), target=target)
            told.append([str(each.message) for each in caught if "scale_grads" in str(each.message)])
        found.append([_bytes(each.grad) for each in stage.submod.parameters()])
    assert found[0] == found[1]
    assert list(map(len, told)) == [0, 0, 1, 0] and f"stage {rank}: {2 * rank}.up.weight.grad" in told[2][0], told


# By label: name of the schedule, placement of stages, stages per rank.
SCHEDULES = {
    "zero_bubble": ("sluice:zero_bubble", "looped", 1),
    "v": ("sluice:v", "v", 2),
    "whole": ("sluice", "looped", 1),
}

# Cases in which no linear layer has a weight gradient that can be deferred.
NOTHING_WAITS = ("weights", "all but biases", "uses outside, frozen before")


def test_EveryCaseUnderEverySchedule_GradientsHaveTheBitsOf1F1B():
    later = {}
    for rank, answers in enumerate(ranks.run(2, against_1f1b, schedules=SCHEDULES)):
        assert len(answers) > 25 * len(SCHEDULES)
        for (case, label), (differing, there, weights_later) in answers.items():
            assert differing == [] and there > 4, (rank, case, label, differing)
            later[case, label] = later.get((case, label), 0) + weights_later
    for (case, label), count in later.items():
        assert (count > 0) == (label != "whole" and case not in NOTHING_WAITS), (case, label, count)


def test_AUseOutsideOfItsLayer_InALaterMicroBatch_IsRefusedByName():
    ranks.run(2, changing)


@pytest.mark.parametrize("name", ["sluicesingle:1f1b", "sluicesingle:zero_bubble"])
def test_ScaleGrads_OverTwoSteps_HasTorchsBitsAndWarnsOnce(name):
    ranks.run(2, scaled_twice, name=name)
