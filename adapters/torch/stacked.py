"""A layer whose parameters are stacked over its experts: a few tensors of three dimensions instead of hundreds.

Autograd then sees only these, and a call describes them anew only when one of them has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import InvalidArgument
from .casting import CastingLayer
from .descriptors import Descriptors
from .layer import _Frame
from .passes import Pass

# From the stacked tensors (parameters or gradients) to one view per member of the layer, [E_local, ...] each.
Views = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class StackedLayer(CastingLayer):
    """Called with a list of stacked tensors as `params`; `views` finds the members (see MoeLayer) in them."""

    def __init__(self, *args: Any, views: Views, **config: Any) -> None:
        super().__init__(*args, **config)
        self._views = views

    def _flatten(self, params: Any) -> tuple[list[torch.Tensor], list[int]]:
        if self.experts is not None:
            return super()._flatten(params)
        return params, []

    def _fill_experts(self, frame: _Frame, args: Any, work: Pass, flat: Sequence[torch.Tensor]) -> None:
        if work.experts is not None:
            super()._fill_experts(frame, args, work, flat)
            return
        self._describe(frame.params, flat, frame)
        args.params = frame.params_struct

    def _fill_grads(
        self, frame: _Frame, args: Any, work: Pass, flat: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> list[torch.Tensor]:
        if work.experts is not None or not any(needs):
            return super()._fill_grads(frame, args, work, flat, needs)
        grads = [torch.empty_like(tensor) for tensor in flat]
        self._describe(frame.grads, grads, None)
        args.grad_params = frame.grads_struct
        return grads

    def _describe(self, items: Descriptors, flat: Sequence[torch.Tensor], frame: _Frame | None) -> None:
        """frame: remembers what is described; None for gradients, which are new each time."""
        key = [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device) for tensor in flat]
        if frame is not None and frame.stack_key == key:
            return
        for number, (name, view) in enumerate(zip(self.members, self._views(flat))):
            if view.shape[0] != self.num_local_experts:
                raise InvalidArgument(f"{name} holds {view.shape[0]} experts, the layer has {self.num_local_experts}")
            items.fill_stack(number * self.num_local_experts, view, name)
        if frame is not None:
            frame.stack_key = key
