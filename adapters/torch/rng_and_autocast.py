# SPDX-License-Identifier: Apache-2.0
"""What a module's forward depends on beside its arguments, so that a second run of it gives the bits of the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class RngAndAutocast:
    """Autocast and random numbers as they are when this is made; a backward runs outside of the forward's autocast."""

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
        """This, without the state of random numbers if none was drawn since: few experts draw, and a state has 5 KB."""
        if all(torch.equal(then, now) for then, now in zip(self._random or [], self._random_now())):
            self._random = None
        return self

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Autocast as it was; the same random numbers, after which the others go on as if none had been drawn."""
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
