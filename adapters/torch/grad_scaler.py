# SPDX-License-Identifier: Apache-2.0
"""Extends torch's GradScaler to optimizers whose step sums gradients over ranks."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InvalidArgument


class GradScaler(torch.amp.GradScaler):
    """Scales like `torch.amp.GradScaler`. For a `sluice.optim` optimizer with a process_group the step itself checks
    whether gradients and their sums are finite, so that all ranks skip together and have the same scale.

    With such an optimizer `unscale_` raises InvalidArgument: before the step a rank has only its own gradients. Clip
    by the optimizer's `max_norm`.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self.is_enabled() and getattr(optimizer, "over_ranks", False):
            raise InvalidArgument(
                f"unscale_: gradients of sluice.optim.{type(optimizer).__name__} are summed over ranks within its "
                "step; clip by its max_norm"
            )
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled() or not getattr(optimizer, "over_ranks", False):
            return super().step(optimizer, *args, **kwargs)
        skipped = optimizer.skipped_steps
        optimizer.scaler_asks_the_step = True
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            del optimizer.scaler_asks_the_step
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.fill_(float(optimizer.skipped_steps > skipped))
        return result

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        """Checks nothing for a step over ranks; `step` fills in the result of the optimizer's step."""
        if not getattr(optimizer, "over_ranks", False):
            return super()._check_inf_per_device(optimizer)
        found = {self._scale.device: torch.zeros((), device=self._scale.device)}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found
