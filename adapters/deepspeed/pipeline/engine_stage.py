# SPDX-License-Identifier: Apache-2.0
"""Runs a stage of DeepSpeed's `PipelineEngine` through callbacks that execute the engine's own instructions.

The engine does all computation: data iterators, forward and backward passes with their timers, scaling and hooks.
Sluice chooses the next micro-batch and its slot in the engine's buffers, and sends messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from sluice.adapters.deepspeed.pipeline import stage_module
from sluice.adapters.deepspeed.pipeline.live_batch import LiveBatch
from sluice.adapters.deepspeed.pipeline.stage_watch import Measured
from sluice.adapters.torch import Edge
from sluice.adapters.torch.split_backward import SplitBackward, linears_of
from sluice.errors import InvalidArgument
from torch import nn

from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.pipe import schedule

# The word of an edge: bit 0 is the form of the outputs; bit 1 is set if nothing in this stage or before it is trained,
# so that the next stage returns no gradients; the higher bits are for layers that move during the batch.
_TENSOR, _TUPLE = 0, 1
_FORM, _UNTRAINED, _LIVE = 1, 2, 2  # two masks, and the shift of the higher bits


class EngineStage:
    """The stage of one engine. Does not keep the engine alive."""

    def __init__(self, engine: Any) -> None:
        self._engine_ref = weakref.ref(engine)
        self._slots: dict[int, int] = {}  # by micro-batch in flight
        self._free: list[int] = []
        self._losses: dict[int, Any] = {}
        self._untrained: set[int] = set()  # micro-batches in flight whose earlier layers have nothing to train
        self._forward_only = False
        self._live: LiveBatch | None = None  # of the current batch
        self.watch: Measured | None = None  # of the current batch

    @property
    def _engine(self) -> Any:
        engine = self._engine_ref()
        assert engine is not None  # the engine runs the batch
        return engine

    # ---- a batch ----

    def begin(self, forward_only: bool, live: LiveBatch | None = None) -> None:
        """Called before the first op of a batch. live: layers move in this batch."""
        self._forward_only, self._live = forward_only, live
        self._engine.fwd_outputs = []

    def end(self) -> None:
        """Called after the last op of a successful batch. Runs the rest of the host's schedule."""
        if self._forward_only:
            return
        for instruction in (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep):
            self._execute(instruction)

    def abandon(self) -> None:
        """Called after a failed batch. Clears everything that could affect the next batch, such as gradients."""
        engine = self._engine
        offloaded = stage_module.offloaded_of(engine.module)
        if offloaded is not None:
            offloaded.reset()
        for micro_batch in list(self._slots):
            self._leave(micro_batch)
        self._losses.clear()
        self._untrained.clear()
        engine.grad_layer = None
        for timer in getattr(engine.timers, "timers", {}).values():
            if timer.started_:  # the host cannot start a timer that runs
                timer.stop()
        if not self._forward_only:
            engine.zero_grad()
            if hasattr(engine.optimizer, "zero_grad"):
                engine.optimizer.zero_grad()
            elif engine.optimizer is not None:  # BF16_Optimizer of DeepSpeed 0.15.4
                engine.optimizer.clear_hp_grads()

    # ---- ops: sluice.adapters.torch.Stage ----

    def load(self, micro_batch: int) -> None:
        """Loads the next item of the engine's iterator: inputs on the first stage, labels on the last."""
        self._execute(schedule.LoadMicroBatch, buffer_id=self._slot(micro_batch))

    def forward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        """Runs a forward and returns the outputs for the next stage; None on the last stage."""
        engine, slot = self._engine, self._slot(micro_batch)
        word = self._live.before_forward(micro_batch, _live_of(given)) if self._live else 0
        if given is not None:
            engine.pipe_buffers["inputs"][slot] = self._leaves(micro_batch, given)
        with self.watch.forward(micro_batch) if self.watch else nullcontext():
            self._execute(schedule.ForwardPass, buffer_id=slot)
        edge = None
        if engine.is_last_stage():
            self._losses[micro_batch] = engine.loss
        else:
            edge = _saying(word, _handed_on(engine.pipe_buffers["outputs"][slot], engine.stage_id))
        if self._forward_only:
            self._losses.clear()
            self._untrained.clear()
            self._leave(micro_batch)
        return edge

    def backward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        """Runs a backward and returns the gradients of the floating-point inputs: an empty edge if nothing before this
        stage is trained, None on the first stage."""
        engine, slot = self._engine, self._slot(micro_batch)
        offloaded = stage_module.offloaded_of(engine.module)
        if offloaded is not None:
            offloaded.expect()
        if self._live:
            self._live.before_backward(_live_of(given))
        if given is None:
            engine.loss = self._losses.pop(micro_batch)
        else:
            engine.grad_layer = given.tensors[0] if given.tensors and given.word & _FORM == _TENSOR else given.tensors
        if given is None or given.tensors:  # else nothing here or before is trained
            with self.watch.backward(micro_batch) if self.watch else nullcontext():
                self._execute(schedule.BackwardPass, buffer_id=slot)
        engine.grad_layer = None
        word = self._live.after_backward(micro_batch) if self._live else 0
        inputs = engine.pipe_buffers["inputs"][slot]
        self._leave(micro_batch)
        if engine.is_first_stage():
            return None
        if micro_batch in self._untrained:
            self._untrained.remove(micro_batch)
            return _saying(word, Edge([]))
        return _saying(word, _gradients(inputs, engine.stage_id))

    # ---- slots of the engine's buffers ----

    def _slot(self, micro_batch: int) -> int:
        """Returns the slot of a micro-batch. A micro-batch has a slot from its first op to its last."""
        if micro_batch not in self._slots:
            if not self._free:
                engine = self._engine
                used = len(self._slots)
                engine._reserve_pipe_buffers(used + 1)
                self._free = [used]
            self._slots[micro_batch] = self._free.pop()
        return self._slots[micro_batch]

    def _leave(self, micro_batch: int) -> None:
        slot = self._slots.pop(micro_batch)
        for buffer in self._engine.pipe_buffers.values():
            buffer[slot] = None
        self._free.append(slot)

    def _leaves(self, micro_batch: int, given: Edge) -> Any:
        """Returns the received tensors in the sender's form. Floating-point ones require gradients if a layer before is
        trained, and under the host's activation checkpointing, which may train nothing for inputs without gradients."""
        if given.word & _UNTRAINED:
            self._untrained.add(micro_batch)
        wanted = not given.word & _UNTRAINED or self._engine.module.activation_checkpoint_interval > 0
        for tensor in given.tensors:
            tensor.requires_grad_(wanted and tensor.is_floating_point())
        return given.tensors[0] if given.word & _FORM == _TENSOR else tuple(given.tensors)

    def _execute(self, instruction: type, **arguments: Any) -> None:
        """Executes an instruction by the engine's table, as the host's schedule does."""
        self._engine._INSTRUCTION_MAP[instruction](self._engine, **arguments)


class SplitBackwardStage(EngineStage):
    """A stage with weight gradients as separate ops (sluice.adapters.torch.SplitBackwardStage). The engine's backward
    is not split: linear layers defer their weight gradients in it (split_backward.py), and a separate op gives these to
    the engine as another backward would."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._later = SplitBackward()

    @property
    def num_weights_later(self) -> int:
        """Returns the number of weight gradients so far that were separate ops."""
        return self._later.num_left

    def begin(self, forward_only: bool, live: LiveBatch | None = None) -> None:
        super().begin(forward_only, live)
        if not forward_only:
            self._later.take(self._engine.module, _linears(self._engine.module))

    def end(self) -> None:
        self._later.give_back()
        super().end()

    def abandon(self) -> None:
        self._later.give_back()
        super().abandon()

    def forward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        edge = super().forward(micro_batch, given)
        if not self._forward_only:
            self._later.learn((self._losses[micro_batch],) if edge is None else edge.tensors)
        return edge

    def backward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        with self._later.left_behind(micro_batch):
            return super().backward(micro_batch, given)

    def weight_grad(self, micro_batch: int) -> None:
        """Computes the deferred weight gradients. Called after the backward of the micro-batch, in the same order."""
        with self.watch.weight_grad(micro_batch) if self.watch else nullcontext(), _as_a_backward(self._engine):
            self._later.run(micro_batch)


def _linears(module: Any) -> list[nn.Linear]:
    """Returns the linear layers outside experts and outside tied layers, whose functions may use the weights too."""
    tied = set(map(id, getattr(module, "tied_modules", {}).values()))
    return linears_of(module, lambda each: isinstance(each, MOELayer) or id(each) in tied)


@contextmanager
def _as_a_backward(engine: Any) -> Iterator[None]:
    """Runs the engine's steps before and after a backward that does not start from a loss."""
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True  # read by the engine's hooks
    try:
        yield
    finally:
        engine._running_engine_backward = False
    if engine.using_bf16_optimizer:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)


def _live_of(given: Edge | None) -> int:
    return 0 if given is None else given.word >> _LIVE


def _saying(word: int, edge: Edge) -> Edge:
    return edge._replace(word=edge.word | word << _LIVE)


def _handed_on(outputs: Any, stage: int) -> Edge:
    if isinstance(outputs, torch.Tensor):
        return Edge([outputs], _TENSOR | (0 if outputs.requires_grad else _UNTRAINED))
    if isinstance(outputs, tuple) and all(isinstance(each, torch.Tensor) for each in outputs):
        return Edge(list(outputs), _TUPLE | (0 if any(each.requires_grad for each in outputs) else _UNTRAINED))
    raise InvalidArgument(
        f"the last layer of stage {stage} gave {_described(outputs)}: it must return a tensor or a tuple of tensors"
    )


def _described(outputs: Any) -> str:
    if isinstance(outputs, tuple):
        return f"a tuple of {', '.join(type(each).__name__ for each in outputs)}"
    return f"a {type(outputs).__name__}"


def _gradients(inputs: Any, stage: int) -> Edge:
    """Returns the gradients of all floating-point inputs, in order."""
    if isinstance(inputs, torch.Tensor):
        return Edge([_gradient(inputs, 0, stage)], _TENSOR)
    gradients = [_gradient(each, index, stage) for index, each in enumerate(inputs) if each.is_floating_point()]
    return Edge(gradients, _TUPLE)


def _gradient(tensor: torch.Tensor, index: int, stage: int) -> torch.Tensor:
    if tensor.grad is None:
        raise InvalidArgument(
            f"stage {stage} was given {list(tensor.shape)} of {tensor.dtype} as tensor {index} but its output does "
            "not depend on it, so there is no gradient to send back: use the tensor, or send it as integers"
        )
    return tensor.grad
