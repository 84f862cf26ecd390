# SPDX-License-Identifier: Apache-2.0
"""Parameters of another dtype than the layer's (autocast) are cast within a pass, in forward and again in backward.

So autograd keeps the parameters themselves, and no copy of them outlives the call. A cast of all experts reads and
writes as much as a large step does; where few of them have rows (generation under autocast) a forward casts only those.
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
    """A layer that takes parameters of any floating dtype; their gradients come back in it."""

    def __init__(self, context: Context, config: MoeConfig, experts: CallbackExperts | None = None) -> None:
        super().__init__(context, config, experts)
        # Alone in its group, a layer may be called from several threads: they wait for each other instead of getting
        # BUSY. Among ranks the order of calls would be left to chance.
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
            if work.num_factors:  # the library reads them in f32 too
                cast = [*cast, *work.factors(flat)]
            return super().forward_pass(work, tokens, ids, weights, cast)

    def _cast_for(self, ids: Any, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What a forward of these routes reads. Ids may be any numbers still: the library refuses wrong ones."""
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
        work.sums = None  # theirs is another dtype
        grads = super().backward_pass(work, tokens, weights, cast, *rest)
        back = [None if grad is None else grad.to(tensor.dtype) for grad, tensor in zip(grads[2:], flat)]
        return [*grads[:2], *back]
