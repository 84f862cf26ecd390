# SPDX-License-Identifier: Apache-2.0
"""Tests pipelines of plain torch functions: the tensors that they send, and their errors."""

import gc
import os
import signal
import threading
import weakref

import pytest
import ranks
import torch
import torch.distributed as dist
from layer_cases import raises
from sluice.adapters.torch import Edge, EpGroup, Pipeline, PipelineConfig
from sluice.errors import InvalidArgument, PeerRefused

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
SHAPES = ((), (1,), (3,), (2, 3), (0,), (4, 0, 2), (2, 1, 3, 2, 2))


def _group(transport=None):
    return EpGroup.unshared(range(dist.get_world_size()), transport=transport)


def _pipeline(group, **config):
    return Pipeline(
        PipelineConfig(**{"policy": "1f1b_hint", "partition": "0", "stage": dist.get_rank(), **config}), group
    )


def _tensors(seed):
    """Returns one tensor of every dtype and shape, with bytes that depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, dtype in enumerate(DTYPES):
        shape = SHAPES[(index + seed) % len(SHAPES)]
        source = torch.randint(0, 2, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        made.append(source.view(dtype).reshape(shape))
    made.append(torch.arange(12.0).reshape(3, 4).t())  # not row-major
    return made[: 3 + seed % 20]


def _same(tensors, wanted):
    pairs = list(zip(tensors, wanted))
    assert len(tensors) == len(wanted)
    for found, right in pairs:
        assert found.dtype == right.dtype and found.shape == right.shape, (found, right)
        assert found.is_contiguous()
        assert torch.equal(found.reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8))
    return len(pairs)


class _Carrier:
    """A stage that checks its input, and passes on values that depend on its number and the micro-batch."""

    def __init__(self, stage, stages):
        self.stage, self.stages = stage, stages
        self.loads, self.seen, self.kept = [], 0, []

    def load(self, micro_batch):
        self.loads.append(micro_batch)

    def forward(self, micro_batch, given):
        if self.stage == 0:
            assert given is None
        else:
            assert given.word == 1000 * self.stage + micro_batch
            self.seen += _same(given.tensors, _tensors(10 * self.stage + micro_batch))
            self.kept.append((given.tensors[0], given.tensors[0].clone()))
        if self.stage == self.stages - 1:
            return None
        return Edge(_tensors(10 * (self.stage + 1) + micro_batch), 1000 * (self.stage + 1) + micro_batch)

    def backward(self, micro_batch, given):
        if self.stage == self.stages - 1:
            assert given is None
        else:
            assert given.word == 2**63 + self.stage
            self.seen += _same(given.tensors, _tensors(100 + self.stage)[: micro_batch % 3])
        return Edge(_tensors(99 + self.stage)[: micro_batch % 3], 2**63 + self.stage - 1) if self.stage else None


def carried(transport):
    """Tensors of every dtype and shape, and none, arrive in both directions. Tensors may outlive the pipeline."""
    stages, rank = dist.get_world_size(), dist.get_rank()
    group = _group(transport)
    pipeline = _pipeline(group, in_flight=3)
    stage = _Carrier(rank, stages)
    for forward_only in (False, True, False):
        pipeline.run(stage, 7, forward_only)
    stats = pipeline.stats()
    _check_timelines(pipeline, stages, 7)
    group.close()
    assert not pipeline.alive
    assert stage.loads == (list(range(7)) * 3 if rank in (0, stages - 1) else [])
    for found, copy in stage.kept:
        assert torch.equal(found, copy)
    assert stats["num_batches"] == 3
    assert stats["messages_sent"] == (rank < stages - 1) * 21 + (rank > 0) * 14
    assert stage.seen > 0


def _check_timelines(pipeline, stages, micro_batches):
    """Checks this rank's ops as they ran, and the predicted ops of all stages."""
    rank, computed = dist.get_rank(), ("forward", "backward")
    measured, predicted = pipeline.timeline(), pipeline.timeline(predicted=True)
    assert {event["rank"] for event in measured} == {rank}
    assert sum(event["op"] in computed for event in measured) == 2 * micro_batches
    assert {event["rank"] for event in predicted} == set(range(stages))
    assert sum(event["op"] in computed for event in predicted) == 2 * micro_batches * stages
    assert all(event["begin_ns"] <= event["end_ns"] for event in (*measured, *predicted))


class _Chain:
    """y = x W on each stage, with the gradient of W summed in the order of micro-batches."""

    def __init__(self, stage, stages, fails=None):
        self.stage, self.stages, self.fails = stage, stages, fails
        generator = torch.Generator().manual_seed(stage)
        self.weight = torch.randn(8, 8, generator=generator).requires_grad_()
        self.inputs, self.outputs = {}, {}

    def load(self, micro_batch):
        self._fail("load", micro_batch)

    def forward(self, micro_batch, given):
        self._fail("forward", micro_batch)
        if given is None:
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(100 + micro_batch))
        else:
            x = given.tensors[0].requires_grad_()
        self.inputs[micro_batch], self.outputs[micro_batch] = x, torch.tanh(x @ self.weight)
        return None if self.stage == self.stages - 1 else Edge([self.outputs[micro_batch]])

    def backward(self, micro_batch, given):
        self._fail("backward", micro_batch)
        out = self.outputs.pop(micro_batch)
        out.backward(torch.ones_like(out) if given is None else given.tensors[0])
        return Edge([self.inputs.pop(micro_batch).grad]) if self.stage else None

    def _fail(self, where, micro_batch):
        if self.fails == (where, micro_batch):
            raise ValueError("out of order")


def _in_one_process(stages, micro_batches):
    chain = [_Chain(stage, stages).weight for stage in range(stages)]
    for micro_batch in range(micro_batches):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(100 + micro_batch))
        for weight in chain:
            x = torch.tanh(x @ weight)
        x.backward(torch.ones_like(x))
    return [weight.grad for weight in chain]


def failed(where, at):
    """A callback raises twice, which all ranks are told. Then the batch is right, and the pipeline is freed."""
    stages, rank = dist.get_world_size(), dist.get_rank()
    group = _group()
    pipeline = _pipeline(group)
    for _ in range(2):
        told = f"rank {at}.*ValueError: out of order"
        with pytest.raises(ValueError if rank == at else PeerRefused, match="^out of order$" if rank == at else told):
            pipeline.run(_Chain(rank, stages, (where, 2) if rank == at else None), 5)
    stage = _Chain(rank, stages)
    pipeline.run(stage, 5)
    assert torch.equal(stage.weight.grad, _in_one_process(stages, 5)[rank])
    reference = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    group.close()
    assert reference() is None


def _inside(run):
    """Returns an event that is set when `run` waits for a message and the library first asks whether to end."""
    event = threading.Event()

    class Watched(type(run)):
        @property
        def error(self):
            event.set()
            return self.seen

        @error.setter
        def error(self, value):
            self.seen = value

    run.__class__ = Watched
    return event


def interrupted():
    """Ctrl-C on a rank that waits for a message is raised there, and told to the other, which computes."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    group = _group()
    pipeline = _pipeline(group)
    pipeline.run(_Chain(rank, 2), 2)
    stage = _Chain(rank, 2)
    if rank == 1:
        inside = _inside(pipeline._run)

        def handler(*_):
            store.set("told", "")
            raise KeyboardInterrupt

        def later():
            inside.wait()
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, handler)
        threading.Thread(target=later, daemon=True).start()
    else:
        forward = stage.forward

        def slow(micro_batch, given):
            store.wait(["told"])  # the other rank has been interrupted, and still waits for this
            return forward(micro_batch, given)

        stage.forward = slow
    words = "" if rank == 1 else "rank 1.*(KeyboardInterrupt|interrupted)"  # in a callback, or while it waited
    with pytest.raises(KeyboardInterrupt if rank == 1 else PeerRefused, match=words):
        pipeline.run(stage, 2)
    group.close()


def refused():
    """A policy that does not exist, and a tensor that a pipeline does not carry, are refused by name on all ranks."""
    rank = dist.get_rank()
    stage = _Chain(rank, 2)
    if rank == 0:
        stage.forward = lambda micro_batch, given: Edge([torch.eye(3).to_sparse()])
    for config, kind, words in (
        ({"policy": "fastest"}, InvalidArgument, "fastest"),
        ({}, PeerRefused if rank else InvalidArgument, "sparse"),
    ):
        group = _group()
        with raises(kind, words):
            _pipeline(group, **config).run(stage, 2)
        group.close()


# Jobs, which check and describe a claim: numbers of ranks, and arguments.
JOBS = [
    (carried, 4, {"transport": None}),
    (carried, 2, {"transport": "c10d"}),
    (failed, 3, {"where": "load", "at": 0}),
    (failed, 3, {"where": "backward", "at": 2}),
    (interrupted, 2, {}),
    (refused, 2, {}),
]


@pytest.mark.parametrize("job, world, arguments", JOBS)
def test_Job_OnSoManyRanks_HoldsWhatItChecks(job, world, arguments):
    ranks.run(world, job, **arguments)
