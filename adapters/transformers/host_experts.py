# SPDX-License-Identifier: Apache-2.0
"""Runs experts that the library cannot compute: calls the module's own functions on the rows of one expert at a time.

Stacked parameters are unbound once per call, so that autograd stacks all gradients of a tensor in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sluice.adapters.torch import CallbackExperts
from sluice.adapters.transformers.contract import Contract, normalises, others
from torch.nn import functional as F


class HostExperts(CallbackExperts):
    """Calls the experts of the current call's module, which `bind` sets.

    inside  the dtype in which they compute; None: their parameters' dtype
    """

    def __init__(self, contract: Contract, count: int, inside: torch.dtype | None = None) -> None:
        super().__init__([self._expert(index) for index in range(count)], self._by_expert)
        self._contract = contract
        self._inside = inside
        self._module: Any = None
        self._own: list[tuple[torch.Tensor, ...]] = []
        self._read: list[tuple[torch.Tensor, ...]] = []
        self._shared: list[torch.Tensor] = []

    def bind(self, module: Any, tensors: list[torch.Tensor] | None) -> None:
        """Sets the module and its stacked tensors for the following calls; (None, None) drops them."""
        self._module = module
        self._own = [] if tensors is None else list(zip(*(tensor.unbind(0) for tensor in tensors)))
        self._read = [] if tensors is None else list(zip(*map(_leaves, tensors)))
        self._shared = [] if module is None else list(others(module, self._contract.names).values())

    def as_bound(self) -> HostExperts:
        """See CallbackExperts: `bind` drops the module before a backward."""
        twin = self._empty(len(self.modules))
        twin._module, twin._own, twin._read, twin._shared = self._module, self._own, self._read, self._shared
        return twin

    def read_for(self, parameters: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """See CallbackExperts: a stacked tensor may be computed from other parameters of the module (pruning)."""
        return [[*mine, *self._shared] for mine in self._read]

    def _empty(self, count: int) -> HostExperts:
        return HostExperts(self._contract, count, self._inside)

    def _by_expert(self) -> list[list[torch.Tensor]]:
        return [[*own, *self._shared] for own in self._own]

    def _expert(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(rows: torch.Tensor) -> torch.Tensor:
            module, own = self._module, self._read[index]
            if self._inside is not None:
                own = tuple(tensor.to(self._inside) for tensor in own)
            up, down, *biases = own
            middle = self._linear(rows.to(up.dtype), up, biases[0] if biases else None)
            middle = module._apply_gate(middle) if self._contract.gated else module.act_fn(middle)
            out = self._linear(middle, down, biases[1] if biases else None)
            return module.post_expert_norm(out) if normalises(module) else out

        return call

    def _linear(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self._contract.transposed:
            return F.linear(rows, weight, bias)
        out = rows @ weight
        return out if bias is None else out + bias


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns a leaf for each expert, in the tensor's memory and without its graph."""
    wants = tensor.requires_grad and torch.is_grad_enabled()
    return [part.requires_grad_(wants) for part in tensor.detach().unbind(0)]


class StockExperts(HostExperts):
    """Computes experts by the implementation in the model's config, on the rows of one expert at a time.

    During a call the module has a single expert, so that its function sees one route per row.
    """

    def __init__(self, contract: Contract, count: int, experts_forward: Any) -> None:
        super().__init__(contract, count)
        self._forward = experts_forward

    def _empty(self, count: int) -> HostExperts:
        return StockExperts(self._contract, count, self._forward)

    def _expert(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(rows: torch.Tensor) -> torch.Tensor:
            module, names = self._module, self._contract.names
            parameters, count = {name: module._parameters[name] for name in names}, module.num_experts
            module._parameters.update(zip(names, (tensor.unsqueeze(0) for tensor in self._read[index])))
            module.num_experts = 1
            try:
                ids = torch.zeros(rows.shape[0], 1, dtype=torch.int64, device=rows.device)
                return self._forward(rows, ids, rows.new_ones(rows.shape[0], 1))
            finally:
                module._parameters.update(parameters)
                module.num_experts = count

        return call
