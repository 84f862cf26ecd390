# SPDX-License-Identifier: Apache-2.0
"""Runs one of torch's stages through callbacks: torch's passes, with the received tensors as its receive buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from sluice.adapters.torch import Edge
from sluice.adapters.torch.split_backward import SplitBackward, linears_of
from sluice.errors import InvalidArgument, SluiceError, Unsupported
from torch.distributed.pipelining._utils import to_local_if_dtensor


class Batch(NamedTuple):
    """Has the arguments of one step, by micro-batch."""

    arguments: Sequence[Any]
    keywords: Sequence[Any]
    targets: Sequence[Any] | None
    loss_keywords: Any
    keeps_outputs: bool
    is_apart: bool  # weight gradients are separate ops
    forward_only: bool


class TorchStage:
    """Runs a stage for one batch. Torch does all computation, and neither sends nor receives."""

    def __init__(self, schedule: Any, stage: Any, batch: Batch, later: SplitBackward) -> None:
        self._schedule, self._stage, self._batch = schedule, stage, batch
        # A stage with a `dw_builder` defers weight gradients itself.
        self._later = later if batch.is_apart and stage.dw_builder is None else None

    # ---- ops: sluice.adapters.torch.SplitBackwardStage ----

    def load(self, micro_batch: int) -> None:
        """Does nothing: the step was given all micro-batches."""

    def forward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        stage, batch = self._stage, self._batch
        if given is not None:
            _put(stage.args_recv_info[micro_batch], given.tensors, f"stage {stage.stage_index}: inputs")
        output = stage.forward_one_chunk(
            micro_batch,
            batch.arguments[micro_batch],
            batch.keywords[micro_batch],
            save_forward_output=batch.keeps_outputs,
        )
        self._schedule._maybe_compute_loss(stage, output, batch.targets, micro_batch, batch.loss_keywords)
        if self._later is not None and not batch.forward_only:
            self._later.learn(self._roots(micro_batch))
        edge = None if stage.is_last else self._handed_on(micro_batch)
        if batch.forward_only:
            stage.fwd_cache.pop(micro_batch)
            self._drop_input(micro_batch)
        return edge

    def backward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        stage, later = self._stage, self._later
        if given is not None:
            _put(stage.grad_recv_info[micro_batch], given.tensors, f"stage {stage.stage_index}: gradients")
        is_whole = later is not None or not self._batch.is_apart
        with _torchs_wrapping_off(), contextlib.nullcontext() if later is None else later.left_behind(micro_batch):
            stage.backward_one_chunk(
                micro_batch,
                loss=self._schedule._maybe_get_loss(stage, micro_batch),
                full_backward=is_whole,
                last_backward=is_whole and self._is_last(micro_batch),
            )
        gradients = stage.bwd_cache.pop(micro_batch)
        edge = None if stage.is_first else self._handed_back(micro_batch, gradients)
        self._drop_input(micro_batch)
        for info in () if stage.is_last else stage.grad_recv_info[micro_batch]:
            info.buffer = None
        return edge

    def weight_grad(self, micro_batch: int) -> None:
        if self._later is None:
            self._stage.backward_weight_one_chunk(micro_batch, last_backward=self._is_last(micro_batch))
        else:
            self._later.run(micro_batch)

    # ---- around a batch ----

    def prepare(self) -> None:
        """Frees torch's receive buffers, as the library has its own. Starts the deferral of weight gradients."""
        self._drop_buffers()
        if self._later is not None and not self._batch.forward_only:
            self._later.take(self._stage.submod, linears_of(self._stage.submod, lambda each: False))

    def end(self) -> None:
        """Ends a batch, also a failed one."""
        if self._later is not None:
            self._later.give_back()

    def abandon(self) -> None:
        """Clears, after a failed batch, everything that could affect the next batch, except the user's gradients."""
        stage = self._stage
        stage.clear_runtime_states()
        stage.bwd_cache.clear()
        stage.backward_state.clear()
        stage.dw_runner.clear()
        self._drop_buffers()
        self.end()

    def _roots(self, micro_batch: int) -> Sequence[Any]:
        """Returns the tensors from which a backward starts."""
        stage = self._stage
        if stage.is_last:
            return (self._schedule._maybe_get_loss(stage, micro_batch),)
        return stage.fwd_cache[micro_batch][0]

    def _drop_buffers(self) -> None:
        infos = [*self._stage.args_recv_info.values(), *self._stage.grad_recv_info.values()]
        for info in (info for each in infos for info in each):
            info.buffer = None

    def _is_last(self, micro_batch: int) -> bool:
        """Returns whether this is the stage's last backward: backwards run in the order of micro-batches."""
        return micro_batch == len(self._batch.arguments) - 1

    def _drop_input(self, micro_batch: int) -> None:
        for info in self._stage.args_recv_info[micro_batch]:
            info.buffer = None

    def _handed_on(self, micro_batch: int) -> Edge:
        stage = self._stage
        readers = {reader for each in stage.act_send_info.values() for reader in each if reader is not None}
        if readers - {stage.stage_index + 1}:
            raise Unsupported(
                f"stage {stage.stage_index} sends tensors to stages {sorted(readers)}: a stage can send only to the "
                "next stage. Split the model so that no tensor skips a stage"
            )
        outputs, _ = stage.fwd_cache[micro_batch]
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                raise InvalidArgument(
                    f"stage {stage.stage_index} gave a {type(output).__name__}: a stage must return a tensor or a "
                    "tuple of tensors"
                )
        return Edge([to_local_if_dtensor(output, detach=True) for output in outputs])

    def _handed_back(self, micro_batch: int, gradients: Sequence[Any]) -> Edge:
        """Returns gradients of the inputs for which the previous stage expects one, as in torch zeros if missing."""
        stage, tensors = self._stage, []
        for index, (gradient, info) in enumerate(zip(gradients, stage.args_recv_info[micro_batch])):
            if stage._get_grad_send_meta(index) is not None:
                tensors.append(torch.zeros_like(info.buffer) if gradient is None else to_local_if_dtensor(gradient))
            elif gradient is not None:
                raise InvalidArgument(
                    f"stage {stage.stage_index} has a gradient of input {index}, but the previous stage does not "
                    "expect one: set input_grads of PipelineStage accordingly"
                )
        return Edge(tensors)


@contextlib.contextmanager
def _torchs_wrapping_off() -> Iterator[None]:
    """Raises errors of Sluice as they are. Torch wraps any error in a backward into one that lists tensors."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, SluiceError):
            raise error.__cause__ from None
        raise


def _put(infos: Sequence[Any], tensors: Sequence[torch.Tensor], what: str) -> None:
    """Uses the tensors as torch's receive buffers. An info without metadata receives nothing."""
    open_infos = [info for info in infos if info.tensor_meta is not None]
    if len(open_infos) != len(tensors):
        raise InvalidArgument(f"{what}: {len(tensors)} arrived, and {len(open_infos)} are expected")
    for info, tensor in zip(open_infos, tensors):
        info.buffer = tensor
