# SPDX-License-Identifier: Apache-2.0
"""Runs a layer whose experts keep several members in one tensor, such as gate and up stacked.

Autograd sees the host's tensors; a call describes the members as views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import InvalidArgument
from .call_buffers import Frame
from .casting import CastingLayer
from .context import Context
from .experts import CallbackExperts
from .layer_config import MoeConfig
from .passes import Pass

# Maps the tensors of one expert (parameters, or their gradients) to its members, in the order of MoeLayer.members.
Unpack = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class PackedLayer(CastingLayer):
    """Takes one list of tensors for each local expert as `params`, all of one length.

    unpack  views of an expert's members in its tensors: every element of a tensor belongs to one member, since a
            backward writes gradients of members into fresh memory
    """

    def __init__(
        self, context: Context, config: MoeConfig, experts: CallbackExperts | None = None, *, unpack: Unpack
    ) -> None:
        super().__init__(context, config, experts)
        self._unpack = unpack

    def _flatten(self, params: Any) -> tuple[list[torch.Tensor], list[int]]:
        if self.experts is not None:
            return super()._flatten(params)
        if params is None or len(params) != self.num_local_experts:
            count = "no" if params is None else len(params)
            raise InvalidArgument(f"{count} parameter sets for {self.num_local_experts} local experts")
        return [tensor for tensors in params for tensor in tensors], [len(tensors) for tensors in params]

    def _members_of(self, work: Pass, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [member for tensors in work.by_expert(flat) for member in self._unpack(tensors)]

    def _fill_experts(self, frame: Frame, args: Any, work: Pass, flat: Sequence[torch.Tensor]) -> None:
        members = flat if work.experts is not None else self._members_of(work, flat)
        super()._fill_experts(frame, args, work, members)

    def _fill_grads(
        self, frame: Frame, args: Any, work: Pass, flat: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        if work.experts is not None or not any(needs):
            return super()._fill_grads(frame, args, work, flat, needs)
        grads: list[Any] = [self._empty(tensor) for tensor in flat] if work.sums is None else work.sums.into
        frame.grads.fill_all(self._members_of(work, grads), self._places, self._names)
        args.grad_params = frame.grads_struct
        return grads
