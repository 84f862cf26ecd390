# SPDX-License-Identifier: Apache-2.0
"""Calls experts that are modules of the host, which each call of a layer passes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sluice.adapters.torch import CallbackExperts
from torch import nn

# (local expert, rows [rows, M]) -> [rows, M]; must be differentiable.
CallExpert = Callable[[int, torch.Tensor], torch.Tensor]


class HostModules(CallbackExperts):
    """Has the modules of the current call of a layer, and none between calls."""

    def __init__(self, count: int) -> None:
        super().__init__([self._module(index) for index in range(count)], self._parameters_now)
        self._experts: Sequence[nn.Module] = ()
        self._call: CallExpert | None = None

    def bind(self, experts: Sequence[nn.Module], call: CallExpert | None) -> None:
        """Sets the modules for the following calls, and how they are called; ((), None) drops them."""
        self._experts, self._call = experts, call

    def as_bound(self) -> HostModules:
        """See CallbackExperts."""
        twin = HostModules(len(self.modules))
        twin.bind(self._experts, self._call)
        return twin

    def _parameters_now(self) -> list[list[torch.Tensor]]:
        return [list(expert.parameters()) for expert in self._experts]

    def _module(self, index: int) -> Any:
        def call(rows: torch.Tensor) -> torch.Tensor:
            assert self._call is not None
            return self._call(index, rows)

        return call
