# SPDX-License-Identifier: Apache-2.0
"""Casts parameters of another dtype than the layer's (autocast) within a pass, in forward and again in backward.

Autograd therefore saves the parameters themselves, and no copy of them outlives the call. A cast of all experts reads
and writes as much as a large step. If few experts have rows (generation under autocast), a forward casts only those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .context import Context
from .experts import CallbackExperts
from .layer import MoeLayer
from .layer_config import MoeConfig


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
