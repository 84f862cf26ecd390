# SPDX-License-Identifier: Apache-2.0
"""Casts parameters of another dtype than the layer's (autocast) within a pass, in forward and again in backward.

Autograd therefore saves the parameters themselves, and no copy of them outlives the call. A cast of all experts reads
and writes as much as a large step. If few experts have rows (generation under autocast), a forward casts only those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .context import Context
from .experts import CallbackExperts
from .layer import MoeLayer
from .layer_config import MoeConfig
from .passes import Frame, Pass


class CastingLayer(MoeLayer):
    """Runs a layer with parameters of any floating dtype, and returns their gradients in that dtype."""

    def __init__(self, context: Context, config: MoeConfig, experts: CallbackExperts | None = None) -> None:
        super().__init__(context, config, experts)
        # In a group of one rank, several threads may call a layer; they wait for each other instead of getting BUSY.
        # Over several ranks the order of their calls would be undefined.
        if not self._collective:
            self.turn = self.context.lock

    def _cast(self, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.experts is not None or all(tensor.dtype == self.dtype for tensor in flat):
            return flat
        return [tensor.to(self.dtype) for tensor in flat]

    def forward_pass(self, work: Any, tokens: Any, ids: Any, weights: Any, flat: Sequence[torch.Tensor]) -> Any:
        """See MoeLayer."""
        with self.turn:
            cast = self._cast_for(ids, work.own(flat))
            if work.num_factors:  # the library reads factors in f32 too
                cast = [*cast, *work.factors(flat)]
            return super().forward_pass(work, tokens, ids, weights, cast)

    def _cast_for(self, ids: Any, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns the parameters for a forward of these routes. Ids are unchecked: the library refuses wrong ones."""
        return self._cast(flat)

    def backward_pass(
        self, work: Any, tokens: Any, weights: Any, flat: Sequence[torch.Tensor], *rest: Any
    ) -> list[torch.Tensor | None]:
        """See MoeLayer."""
        own = work.own(flat)
        cast = self._cast(own)
        if cast is own:
            return super().backward_pass(work, tokens, weights, flat, *rest)
        cast = [*cast, *work.factors(flat)]
        work.sums = None  # existing gradients have the parameters' dtype
        grads = super().backward_pass(work, tokens, weights, cast, *rest)
        back = [None if grad is None else grad.to(tensor.dtype) for grad, tensor in zip(grads[2:], flat)]
        return [*grads[:2], *back]


# Maps the tensors of one expert (parameters, or their gradients) to its members, in the order of MoeLayer.members.
Unpack = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class PackedLayer(CastingLayer):
    """Runs a layer whose experts have several members in one tensor, such as gate and up stacked. Autograd sees the
    host's tensors; a call describes the members as views of them. Takes one list of tensors for each local expert as
    `params`, all of one length.

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
        self._check_count(params)
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
