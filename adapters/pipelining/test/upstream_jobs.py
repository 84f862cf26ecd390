# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: the cases of torch's multi-process tests of schedules, over gloo, with torch's and Sluice's classes.

Torch's tests (test_schedule_multiproc.py, test_stage.py) need several GPUs. The cases are torch's, the code is ours.
Gradients are compared with those of one process within torch's tolerances.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
)
from torch.distributed.pipelining.schedules import _ScheduleForwardOnly, get_schedule_class

WIDTH, ROWS, CHUNKS, STEPS = 32, 32, 4, 2
CPU = torch.device("cpu")
# Torch's class, and the name and options of Sluice's schedule.
SCHEDULES = {
    "forward only": (_ScheduleForwardOnly, "SluiceSingle", {}),
    "1f1b": (Schedule1F1B, "SluiceSingle", {}),
    "gpipe": (ScheduleGPipe, "SluiceSingle:gpipe", {}),
    "interleaved": (ScheduleInterleaved1F1B, "sluice:looped", {}),
    "looped bfs": (ScheduleLoopedBFS, "sluice", {}),
    "zero bubble": (ScheduleInterleavedZeroBubble, "sluice", {"separate_wgrad": True}),
    "v": (ScheduleZBVZeroBubble, "sluice:v", {}),
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.split_spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, count)}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class WithKeyword(nn.Module):
    """A module whose first stage takes a keyword."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        x = torch.relu(self.first(x) + y)
        pipe_split()
        return self.second(x)


def _schedule(name, is_own, stages, loss_fn=None):
    stock, own, options = SCHEDULES[name]
    if len(stages) == 1:  # torch has classes for one stage, and for several
        (stages,) = stages
    if is_own:
        return get_schedule_class(own)(stages, CHUNKS, loss_fn, scale_grads=False, **options)
    return stock(stages, CHUNKS, loss_fn, scale_grads=False)


def _made(count, kind=Chain):
    torch.manual_seed(5)
    module = kind(count) if kind is Chain else kind()
    return module, copy.deepcopy(module), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def _loss(output, target):
    return nn.functional.mse_loss(output, target, reduction="sum")


def _traced(module, *arguments, **keywords):
    rank, spec = dist.get_rank(), getattr(module, "split_spec", None)
    pipe = pipeline(
        module,
        mb_args=tuple(each.chunk(CHUNKS)[0] for each in arguments),
        mb_kwargs={name: each.chunk(CHUNKS)[0] for name, each in keywords.items()},
        split_spec=spec,
    )
    return pipe, build_stage(pipe.get_stage_module(rank), rank, pipe.info(), CPU)


def _reference(module, target, *arguments, **keywords):
    """Returns (output, loss) of one process; gradients stay in `.grad`."""
    module.zero_grad()
    output = module(*arguments, **keywords)
    loss = _loss(output, target)
    loss.backward()
    return output.detach(), loss.detach()


def _check_gradients(owned, reference):
    """Checks gradients. owned: modules by their name in the reference."""
    for prefix, module in owned.items():
        for name, parameter in module.named_parameters():
            wanted = reference.get_parameter(f"{prefix}.{name}" if prefix else name).grad
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=4e-5)


def _check_empty(stages):
    """Checks that only the last stage's outputs remain of a batch, and that the next call clears them."""
    for stage in stages:
        assert not stage.fwd_cache, stage.stage_index
        assert len(stage.output_chunks) == (CHUNKS if stage.is_last else 0), stage.stage_index
        stage.clear_runtime_states()
        assert not stage.output_chunks, stage.stage_index


def _ran(schedule, is_own):
    """Returns the number of batches that Sluice ran."""
    return schedule.sluice.stats()["num_batches"] if is_own else 0


# ---- cases -----------------------------------------------------------------------------------------------------------


def forward_only(name, is_own):
    """The output of one step is the input of the next; the host sends it between the steps."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    module, reference, x, _ = _made(last + 1)
    _, stage = _traced(module, x)
    schedule, fed = _schedule(name, is_own, [stage]), x.clone()
    for _ in range(5):
        output = schedule.step(*((fed,) if rank == 0 else ()))
        if rank == 0:
            dist.recv(fed, src=last)
        elif rank == last:
            dist.send(output, dst=0)
    if rank == last:
        wanted = x
        with torch.no_grad():
            for _ in range(5):
                wanted = reference(wanted)
        torch.testing.assert_close(output, wanted)
    return _ran(schedule, is_own)


def _steps(schedule, stages, owned, reference, x, target, keywords=None):
    """Trains STEPS steps, and checks losses, outputs and gradients against those of one process."""
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    output, loss = _reference(reference, target, x, **(keywords or {}))
    for _ in range(STEPS):
        for module in owned.values():
            module.zero_grad()
        losses = [] if is_last else None
        found = schedule.step(
            *((x,) if is_first else ()),
            **((keywords or {}) if is_first else {}),
            target=target if is_last else None,
            losses=losses,
        )
        if is_last:
            torch.testing.assert_close(found, output)
            torch.testing.assert_close(sum(losses).detach(), loss)
    _check_gradients(owned, reference)
    _check_empty(stages)


def traced(name, is_own):
    module, reference, x, target = _made(dist.get_world_size())
    pipe, stage = _traced(module, x)
    schedule = _schedule(name, is_own, [stage], loss_fn=_loss)
    _steps(schedule, [stage], {"": pipe.get_stage_module(dist.get_rank())}, reference, x, target)
    return _ran(schedule, is_own)


def traced_keywords(name, is_own):
    module, reference, x, target = _made(2, WithKeyword)
    y = torch.randn(ROWS, WIDTH)
    pipe, stage = _traced(module, x, y=y)
    schedule = _schedule(name, is_own, [stage], loss_fn=_loss)
    _steps(schedule, [stage], {"": pipe.get_stage_module(dist.get_rank())}, reference, x, target, {"y": y})
    return _ran(schedule, is_own)


def by_hand(name, is_own, infers_shapes):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module, reference, x, target = _made(ranks)
    own, known = module.layers[rank], {}
    if not infers_shapes:
        row = x.chunk(CHUNKS)[0].detach().requires_grad_(rank > 0)
        known = {"input_args": (row,), "output_args": own(row)}
    stage = PipelineStage(own, rank, ranks, CPU, **known)
    schedule = _schedule(name, is_own, [stage], loss_fn=_loss)
    _steps(schedule, [stage], {f"layers.{rank}": own}, reference, x, target)
    return _ran(schedule, is_own)


def several(name, is_own, indices):
    """Runs several stages on each rank. indices: of these stages."""
    rank, count = dist.get_rank(), sum(map(len, indices))
    module, reference, x, target = _made(count)
    owned = {f"layers.{index}": module.layers[index] for index in indices[rank]}
    stages = [PipelineStage(owned[f"layers.{index}"], index, count, CPU) for index in indices[rank]]
    schedule = _schedule(name, is_own, stages, loss_fn=_loss)
    _steps(schedule, stages, owned, reference, x, target)
    return _ran(schedule, is_own)


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


class Linears(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def put_off(name, is_own, indices):
    """Weight gradients are computed by the host's own functions, one for each stage and micro-batch."""
    rank, count = dist.get_rank(), sum(map(len, indices))
    torch.manual_seed(5)
    reference, x, target = Linears(count), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    owned = {f"layers.{index}": PuttingOff(copy.deepcopy(reference.layers[index])) for index in indices[rank]}
    stages = [
        PipelineStage(owned[f"layers.{index}"], index, count, CPU, dw_builder=owned[f"layers.{index}"].build)
        for index in indices[rank]
    ]
    schedule = _schedule(name, is_own, stages, loss_fn=_loss)
    _steps(schedule, stages, owned, reference, x, target)
    assert {module.calls for module in owned.values()} == {STEPS * CHUNKS}
    return _ran(schedule, is_own)


def cases(which):
    """Returns for each case by name the number of batches that Sluice ran, or the error, for torch's class and ours."""
    told = {}
    for label, (job, name, options) in which.items():
        told[label] = [_outcome(globals()[job], name, is_own, options) for is_own in (False, True)]
    return told


def _outcome(job, name, is_own, options):
    try:
        return job(name, is_own, **options)
    except AssertionError as error:
        return f"{type(error).__name__}: {error}"


def mismatched():
    """Rank 0 gets an input that its stage did not request: the error of each rank, and whether the next step is
    right."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module, reference, x, target = _made(ranks)
    stage = PipelineStage(module.layers[rank], rank, ranks, CPU)
    schedule = _schedule("1f1b", True, [stage], loss_fn=_loss)
    own = {f"layers.{rank}": module.layers[rank]}
    _steps(schedule, [stage], own, reference, x, target)
    told = []
    for bad in (torch.randn(ROWS + CHUNKS, WIDTH), x.to(torch.int32)):
        try:
            schedule.step(*((bad,) if rank == 0 else ()), target=target if rank == ranks - 1 else None)
            told.append("none")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    _steps(schedule, [stage], own, reference, x, target)
    return told
