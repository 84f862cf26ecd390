# SPDX-License-Identifier: Apache-2.0
"""Saves the state on which a module's forward depends in addition to its arguments: a second run gives equal bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class RngAndAutocast:
    """Saves autocast and random states in its constructor. A backward runs outside of the forward's autocast."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        kind = device.type
        self._autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        self._random: list[torch.Tensor] | None = self._random_now()

    def _random_now(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _set_random(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)

    def unless_random(self) -> RngAndAutocast:
        """Returns self, without random states if no number was drawn since: few experts draw, and a state has 5 KB."""
        if all(torch.equal(then, now) for then, now in zip(self._random or [], self._random_now())):
            self._random = None
        return self

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores autocast and random states. On exit the random states of the entry are restored."""
        with torch.autocast(**self._autocast):
            if self._random is None:
                yield
                return
            present = self._random_now()
            self._set_random(self._random)
            try:
                yield
            finally:
                self._set_random(present)
