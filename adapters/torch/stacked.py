# SPDX-License-Identifier: Apache-2.0
"""Runs a layer whose parameters are stacked over its experts: a few tensors of three dimensions instead of hundreds.

Autograd then sees only the stacks, and a call writes their descriptors again only when one of them has moved. With
MoeConfig.weight_format the stacks are codes and scales, which do not change and have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from ..._library import load
from ...errors import InvalidArgument, SluiceError, Unsupported
from ._native import generation
from .casting import CastingLayer
from .context import Context
from .descriptors import Descriptors
from .experts import CallbackExperts
from .layer_config import MoeConfig
from .lora import Lora
from .passes import Frame, Pass

# Maps the stacked tensors (parameters, or gradients with None for a frozen one) to one view per member of the layer,
# [E_local, ...] each, None if its stacked tensor is None.
Views = Callable[[Sequence[Optional[torch.Tensor]]], Sequence[Optional[torch.Tensor]]]


class StackedLayer(CastingLayer):
    """Takes a list of stacked tensors as `params`; `views` finds the members (see MoeLayer) in them."""

    leaves_out_frozen = True

    def __init__(
        self,
        context: Context,
        config: MoeConfig,
        experts: CallbackExperts | None = None,
        *,
        views: Views,
        num_scales: int = 0,
    ) -> None:
        """num_scales: for packed weights, how many of the last stacked tensors are scales."""
        super().__init__(context, config, experts)
        self._views = views
        self._num_scales = num_scales
        self._made_in = generation()
        self._prepared: _Prepared | None = None

    def _count_experts(self) -> None:
        super()._count_experts()
        self._prepared = None

    def quick(
        self,
        tokens: torch.Tensor,
        expert_ids: torch.Tensor,
        route_weights: torch.Tensor,
        flat: Sequence[torch.Tensor],
        lora: Lora | None = None,
    ) -> torch.Tensor | None:
        """Runs a forward for generation: no autograd, with prepared structs. None: the caller takes the usual way.

        The result is None for every error too, because the usual way raises it with its message. The caller has called
        `watcher` (function.py).
        """
        shape = tokens.shape
        if (
            self._collective
            or self.context.placement.is_cuda
            or tokens.dtype is not self.dtype
            or expert_ids.dtype is not torch.int64
            or route_weights.dtype is not torch.float32
            or not (tokens.is_cpu and expert_ids.is_cpu and route_weights.is_cpu)
            or not (tokens.is_contiguous() and expert_ids.is_contiguous() and route_weights.is_contiguous())
            or len(shape) != 2
            or shape[1] != self.model_width
            or expert_ids.shape != (shape[0], self.top_k)
            or route_weights.shape != expert_ids.shape
        ):
            return None
        if not self._finalizer.alive or self._made_in != generation():
            return None  # the layer or its context is closed, or another process made it
        with self.turn:
            frame = self._prepared
            if frame is None:
                frame = self._prepared = _Prepared(self, tokens, expert_ids, route_weights)
            try:
                self._describe(frame, flat)
            except SluiceError:
                return None
            if frame.factors is not None:
                frame.factors.fill(frame.params_struct, lora, () if lora is None else tuple(lora.factors.values()))
            out = torch.empty_like(tokens)
            frame.place(shape[0], tokens, expert_ids, route_weights, out)
            status = frame.function(self._handle, frame.forward_args, frame.null, frame.null)
        return out if status == 0 else None

    def _cast_for(self, ids: torch.Tensor, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Casts only the experts with a route, if no other rank sends rows; memory of the others is never read."""
        count = self.num_local_experts
        if self.is_packed or self._collective or not ids.is_cpu or all(tensor.dtype == self.dtype for tensor in flat):
            return self._cast(flat)
        routed = ids.unique()
        routed = routed[(routed >= 0) & (routed < count)].long().tolist()
        if len(routed) == count or any(tensor.shape[0] != count for tensor in flat):
            return self._cast(flat)
        cast = [torch.empty_like(tensor, dtype=self.dtype) for tensor in flat]
        with torch.no_grad():
            for expert in routed:
                for tensor, into in zip(flat, cast):
                    into[expert].copy_(tensor[expert])
        return cast

    def _cast(self, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Casts parameters, or only biases if weights are packed."""
        if not self.is_packed:
            return super()._cast(flat)
        end = len(flat) - self._num_scales
        biases = [n for n, tensor in enumerate(flat[:end]) if tensor.is_floating_point() and tensor.dtype != self.dtype]
        return [t.to(self.dtype) if n in biases else t for n, t in enumerate(flat)] if biases else flat

    def _flatten(self, params: Any) -> tuple[list[torch.Tensor], list[int]]:
        if self.experts is not None:
            return super()._flatten(params)
        if any(tensor.requires_grad for tensor in params[len(params) - self._num_scales :]):
            raise Unsupported(
                f"a scale of {self.config.weight_format} weights requires a gradient, but packed weights are frozen: "
                "set its requires_grad to False"
            )
        return params, []

    def _fill_experts(self, frame: Frame, args: Any, work: Pass, flat: Sequence[torch.Tensor]) -> None:
        if work.experts is not None:
            super()._fill_experts(frame, args, work, flat)
            return
        self._describe(frame, flat)
        args.params = frame.params_struct

    def _fill_grads(
        self, frame: Frame, args: Any, work: Pass, flat: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        if work.experts is not None or not any(needs):
            return super()._fill_grads(frame, args, work, flat, needs)
        if work.sums is None:
            grads = [self._empty(tensor) if need else None for tensor, need in zip(flat, needs)]
        else:
            grads = work.sums.into
        given = self._fill_members(frame.grads, grads)
        for number, name in enumerate(self.members):
            place = frame.grads.pointer(number * self.num_local_experts)
            setattr(frame.grads_struct, name, place if name in given else load().ffi.NULL)
        args.grad_params = frame.grads_struct
        return grads

    def _describe(self, frame: Frame, flat: Sequence[torch.Tensor]) -> None:
        """Describes the parameters, if they differ from those of the last call."""
        key = [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device) for tensor in flat]
        if frame.stack_key == key:
            return
        frame.stack_key = None  # while they are described, which may fail half way
        self._fill_members(frame.params, flat)
        frame.stack_key = key

    def _fill_members(self, items: Descriptors, flat: Sequence[torch.Tensor | None]) -> set[str]:
        """Describes the members that lie in these tensors; returns their names."""
        views = {name: view for name, view in zip(self.members, self._views(flat)) if view is not None}
        for name, view in views.items():
            if view.shape[0] != self.num_local_experts:
                raise InvalidArgument(f"{name} holds {view.shape[0]} experts, the layer has {self.num_local_experts}")
            items.fill_stack(self.members.index(name) * self.num_local_experts, view, name)
        return set(views)


class _Prepared(Frame):
    """Has a frame with contiguous rows: only addresses and the number of tokens change from call to call."""

    def __init__(self, layer: StackedLayer, *tensors: torch.Tensor) -> None:
        super().__init__(layer.context.placement, layer.num_local_experts, layer.members, layer.config.lora_rank > 0)
        library = load()
        self.function = library.lib.sluice_moe_forward
        self.null = library.ffi.NULL
        args = self.forward_args
        names = ("tokens", "expert_ids", "route_weights", "out_tokens")
        for place, (name, tensor) in enumerate(zip(names, (*tensors, tensors[0]))):
            setattr(args, name, self.tensors.fill(place, tensor, name))
        args.params = self.params_struct
        self._rows = tensors[0].shape[0]

    def place(self, rows: int, *tensors: torch.Tensor) -> None:
        """Describes the rows of this call."""
        if rows != self._rows:
            self.tensors.set_rows(rows, 4)
            self._rows = rows
        self.tensors.set_addresses(tensors)
