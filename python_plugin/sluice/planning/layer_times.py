# SPDX-License-Identifier: Apache-2.0
"""Estimates the seconds of each layer of a pipeline from measurements that are noisy and may change abruptly."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 16  # batches that are averaged while nothing changes: reduces noise of 10 % to 2.5 %
JUMP = 0.25  # a layer has changed if two successive samples differ from its mean by this share in the same direction


class LayerTimes:
    """Means over the newest batches. If a layer has changed, its mean restarts with the two samples that showed it. A
    single slow batch is dropped."""

    def __init__(self, num_layers: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(num_layers)]
        self._off = [0] * num_layers  # the newest sample is 1: above, -1: below, 0: near the mean of earlier samples

    def add(self, seconds: Sequence[float]) -> None:
        """Adds a batch: seconds of one micro-batch in each layer, forward and backward."""
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
        """Whether the newest batch differs from earlier ones in a layer. The next batch shows whether that lasts."""
        return any(self._off)

    def means(self) -> list[float]:
        """The mean of each layer; of a layer that may have changed, the newest sample. Empty before the first batch."""
        if not all(self._samples):
            return []
        newest = [s[-1:] if off else s for s, off in zip(self._samples, self._off)]
        return [sum(samples) / len(samples) for samples in newest]


def _side(value: float, samples: Sequence[float]) -> int:
    if not samples:
        return 0
    mean = sum(samples) / len(samples)
    return (value > mean * (1 + JUMP)) - (value < mean * (1 - JUMP))
