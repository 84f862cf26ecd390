# SPDX-License-Identifier: Apache-2.0
"""What each layer of a pipeline takes, from measurements that are noisy and change at once."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 16  # batches that are averaged while nothing changes: noise of one in ten becomes one in forty
JUMP = 0.25  # a layer that is off its mean by so much, twice in a row and to the same side, has changed


class LayerTimes:
    """Means over the newest batches. A layer that has changed begins anew, with the two that showed it; one slow
    batch alone is forgotten."""

    def __init__(self, num_layers: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(num_layers)]
        self._off = [0] * num_layers  # of the newest sample: 1 above, -1 below, 0 near the mean of those before

    def add(self, seconds: Sequence[float]) -> None:
        """One batch: of each layer what one micro-batch takes, forward and backward."""
        for layer, value in enumerate(seconds):
            samples = self._samples[layer]
            unsure = self._off[layer]
            off = _side(value, samples[:-1] if unsure else samples)
            if unsure and off == unsure:
                samples[:-1], off = [], 0
            elif unsure:
                del samples[-1]
            self._off[layer] = off
            samples.append(value)
            del samples[:-LONGEST]

    def is_settling(self) -> bool:
        """Whether the newest batch was unlike those before in a layer: the next one says whether that lasts."""
        return any(self._off)

    def means(self) -> list[float]:
        """Of a layer that may have changed, the newest alone. Empty before the first batch."""
        if not all(self._samples):
            return []
        newest = [s[-1:] if off else s for s, off in zip(self._samples, self._off)]
        return [sum(samples) / len(samples) for samples in newest]


def _side(value: float, samples: Sequence[float]) -> int:
    if not samples:
        return 0
    mean = sum(samples) / len(samples)
    return (value > mean * (1 + JUMP)) - (value < mean * (1 - JUMP))
