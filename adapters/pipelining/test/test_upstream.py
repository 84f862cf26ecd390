# SPDX-License-Identifier: Apache-2.0
"""Runs cases of torch's multi-process tests of schedules over gloo with Sluice's schedules.

Torch's test_schedule_multiproc.py and test_stage.py themselves need two GPUs. Their cases with plain stages are rows of
integration_tests/pairs, which have the bits of torch's own schedules.
"""

import copy

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, build_stage, pipe_split, pipeline
from torch.distributed.pipelining.schedules import get_schedule_class

WIDTH, ROWS, CHUNKS, STEPS = 32, 32, 4, 2
CPU = torch.device("cpu")


class WithKeyword(nn.Module):
    """A module that torch divides into two stages, the first of which takes a keyword."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        x = torch.relu(self.first(x) + y)
        pipe_split()
        return self.second(x)


class Linears(nn.Module):
    """Layers of which each is a stage."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _made(module_of):
    """Returns a module, a copy of it, and three tensors of rows."""
    torch.manual_seed(5)
    module = module_of()
    return module, copy.deepcopy(module), *(torch.randn(ROWS, WIDTH) for _ in range(3))


def _schedule(name, stages, loss_fn=None, **options):
    return get_schedule_class(name)(stages, CHUNKS, loss_fn, scale_grads=False, **options)


def _loss(output, target):
    return nn.functional.mse_loss(output, target, reduction="sum")


def _traced(module, x, y):
    """Returns this rank's part of a module that torch has traced, and its stage."""
    rank = dist.get_rank()
    pipe = pipeline(module, mb_args=(x.chunk(CHUNKS)[0],), mb_kwargs={"y": y.chunk(CHUNKS)[0]})
    part = pipe.get_stage_module(rank)
    return part, build_stage(part, rank, pipe.info(), CPU)


def _steps(schedule, stages, owned, reference, target, x, **keywords):
    """Trains STEPS steps, and checks losses, outputs and gradients against those of one process.

    owned: modules by their name in the reference.
    """
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    reference.zero_grad()
    output = reference(x, **keywords)
    loss = _loss(output, target)
    loss.backward()
    for _ in range(STEPS):
        for module in owned.values():
            module.zero_grad()
        losses = [] if is_last else None
        given = keywords if is_first else {}
        found = schedule.step(*((x,) if is_first else ()), **given, target=target if is_last else None, losses=losses)
        if is_last:
            torch.testing.assert_close(found, output)
            torch.testing.assert_close(sum(losses).detach(), loss.detach())
    for prefix, module in owned.items():
        for name, parameter in module.named_parameters():
            wanted = reference.get_parameter(f"{prefix}.{name}" if prefix else name).grad
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=4e-5)
    for stage in stages:  # only the last stage's outputs remain of a batch, and the next call clears them
        assert not stage.fwd_cache, stage.stage_index
        assert len(stage.output_chunks) == (CHUNKS if stage.is_last else 0), stage.stage_index
        stage.clear_runtime_states()
        assert not stage.output_chunks, stage.stage_index


def forward_only():
    """The output of one step is the input of the next; the host sends it between the steps."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    module, reference, x, y, _ = _made(WithKeyword)
    _, stage = _traced(module, x, y)
    schedule, fed = _schedule("SluiceSingle", stage), x.clone()
    for _ in range(5):
        output = schedule.step(fed, y=y) if rank == 0 else schedule.step()
        if rank == 0:
            dist.recv(fed, src=last)
        elif rank == last:
            dist.send(output, dst=0)
    if rank == last:
        with torch.no_grad():
            for _ in range(5):
                x = reference(x, y)
        torch.testing.assert_close(output, x)
    assert schedule.sluice.stats()["num_batches"] == 5


def traced(name):
    module, reference, x, y, target = _made(WithKeyword)
    part, stage = _traced(module, x, y)
    schedule = _schedule(name, stage, _loss)
    _steps(schedule, [stage], {"": part}, reference, target, x, y=y)
    assert schedule.sluice.stats()["num_batches"] == STEPS


class _PutOff(torch.autograd.Function):
    """A linear layer whose backward appends the operands of its weight gradient to a list."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return nn.functional.linear(x, layer.weight.detach(), layer.bias.detach())

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.layer.put_off.append((x, gradient))
        return gradient @ ctx.layer.weight, None


class PuttingOff(nn.Module):
    """A linear layer whose weight gradients are computed by a separate call, for torch's dw_builder."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias, self.put_off, self.calls = linear.weight, linear.bias, [], 0

    def forward(self, x):
        return _PutOff.apply(x if x.requires_grad else x.detach().requires_grad_(), self)

    def build(self):
        """Called directly after the backward of a micro-batch. Torch also calls it once to infer shapes."""
        x, gradient = self.put_off.pop()

        def run():
            self.calls += 1
            for parameter, new in ((self.weight, gradient.t() @ x), (self.bias, gradient.sum(0))):
                parameter.grad = new if parameter.grad is None else parameter.grad + new

        return run


def put_off(name, indices, **options):
    """Weight gradients are computed by the host's own functions, one for each stage and micro-batch."""
    count = sum(map(len, indices))
    module, reference, x, target, _ = _made(lambda: Linears(count))
    mine = indices[dist.get_rank()]
    owned = {f"layers.{index}": PuttingOff(module.layers[index]) for index in mine}
    stages = [
        PipelineStage(each, index, count, CPU, dw_builder=each.build) for index, each in zip(mine, owned.values())
    ]
    schedule = _schedule(name, stages if len(stages) > 1 else stages[0], _loss, **options)
    _steps(schedule, stages, owned, reference, target, x)
    assert {each.calls for each in owned.values()} == {STEPS * CHUNKS}
    assert schedule.sluice.stats()["num_batches"] == STEPS


# By name of torch's test: job and options.
CASES = {
    "test_forward_only": (forward_only, {}),
    "test_kwargs_with_tracer, 1f1b": (traced, {"name": "SluiceSingle"}),
    "test_kwargs_with_tracer, gpipe": (traced, {"name": "SluiceSingle:gpipe"}),
    "test_schedule_with_weight_update_mlp_e2e": (
        put_off,
        {"name": "sluice", "separate_wgrad": True, "indices": [[0, 2, 4], [1, 3, 5]]},
    ),
    "test_custom_dw_with_fb_schedule": (put_off, {"name": "SluiceSingle:gpipe", "indices": [[0], [1]]}),
}


@pytest.mark.parametrize("case", CASES)
def test_Case_OfTorchsTests_TrainsAsOneProcess(case):
    job, options = CASES[case]
    ranks.run(2, job, **options)
