# SPDX-License-Identifier: Apache-2.0
"""Runs a stage of DeepSpeed's `PipelineEngine` with weight gradients as separate ops.

The engine's backward is not split. Linear layers defer their weight gradients in it (split_backward.py), and a separate
op gives the weight gradients to the engine as another backward would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from sluice.adapters.deepspeed.pipeline.engine_stage import EngineStage
from sluice.adapters.deepspeed.pipeline.live_batch import LiveBatch
from sluice.adapters.torch import Edge
from sluice.adapters.torch.split_backward import SplitBackward, linears_of
from torch import nn

from deepspeed.moe.sharded_moe import MOELayer


class SplitBackwardStage(EngineStage):
    """sluice.adapters.torch.SplitBackwardStage"""

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
