# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the sums of a batch's gradients, which a pipeline's optimizer keeps until the update.

A stage of a pipeline adds the gradients of one micro-batch after the other, and reduces over replicas after the batch.
The sums of a layer that changes its stage during a batch move with the layer (live_layers.py). There is a class for
each place where DeepSpeed has sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


class ParameterSums:
    """Sums in `.grad`, where torch adds: plain optimizers, and ZeRO 1 if it adds in the dtype of the parameters."""

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype of the parameter's sum."""
        return parameter.dtype

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the parameter's sum so far, not copied, with as many elements; None: it has no gradient yet."""
        return parameter.grad

    def add(self, total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
        """Adds the gradient of a micro-batch with the host's bits, and returns the sum. total: may be overwritten."""
        return gradient if total is None else total.add_(gradient)

    def put(self, totals: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Sets the sums of parameters that the optimizer has now."""
        for parameter, total in totals.items():
            parameter.grad = total


class AttributeSums(ParameterSums):
    """Sums in `.grad_accum`: ZeRO 1 if it adds in another dtype than that of the parameters."""

    def __init__(self, optimizer: Any) -> None:
        self._dtype: torch.dtype = optimizer.gradient_accumulation_dtype

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """See ParameterSums."""
        return self._dtype

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """See ParameterSums."""
        return getattr(parameter, "grad_accum", None)

    def add(self, total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
        """See ParameterSums."""
        return super().add(total, gradient.to(self._dtype))

    def put(self, totals: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """See ParameterSums."""
        for parameter, total in totals.items():
            parameter.grad_accum = total  # type: ignore[attr-defined]


class BufferSums(ParameterSums):
    """Sums in flat buffers that begin a batch with zeros: BF16_Optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._places = {p: (i, j) for i, group in enumerate(optimizer.bf16_groups) for j, p in enumerate(group)}

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """See ParameterSums."""
        dtype: torch.dtype = self._optimizer.grad_acc_dtype
        return dtype

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """See ParameterSums."""
        group, index = self._places.get(parameter, (0, 0))
        if parameter not in self._places or not self._optimizer.fp32_groups_has_gradients[group][index]:
            return None
        total: torch.Tensor = self._optimizer.fp32_groups_gradients[group][index]
        return total

    def add(self, total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
        """See ParameterSums. The first gradient is added to zeros, as the host does, since 0.0 + -0.0 is 0.0."""
        total = torch.zeros_like(gradient, dtype=self._optimizer.grad_acc_dtype) if total is None else total
        return total.add_(gradient.to(total.dtype))

    def put(self, totals: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """See ParameterSums."""
        for parameter, total in totals.items():
            if parameter in self._places:
                group, index = self._places[parameter]
                place = self._optimizer.fp32_groups_gradients[group][index]
                place.copy_(total.view(place.shape))
                parameter._hp_grad = place  # type: ignore[attr-defined]
                self._optimizer.fp32_groups_has_gradients[group][index] = True


def of_optimizer(optimizer: Any) -> ParameterSums:
    """Returns the sums of an engine's optimizer with its current groups."""
    if isinstance(optimizer, BF16_Optimizer):
        return BufferSums(optimizer)
    return AttributeSums(optimizer) if getattr(optimizer, "use_grad_accum_attribute", False) else ParameterSums()
