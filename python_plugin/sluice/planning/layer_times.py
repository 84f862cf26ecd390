# SPDX-License-Identifier: Apache-2.0
"""Estimates the seconds of each layer of a pipeline from measurements that are noisy and may change abruptly."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 16  # batches that are averaged while nothing changes: reduces noise of 10 % to 2.5 %
JUMP = 0.25  # a layer may have changed if a sample differs from its mean by this share
RARE = 200  # batches in which at most one change may be due to chance
MEMORY = 32  # batches over which the share of dropped samples is estimated


class LayerTimes:
    """Means over the newest batches. If successive samples of a layer differ from its mean in the same direction, the
    layer has changed: its mean restarts with these samples. Samples that differ for fewer batches are dropped.

    Two samples show a change. On a machine that other work loads, many samples are dropped; then as many samples are
    needed as are not a coincidence more than once in RARE batches."""

    def __init__(self, num_layers: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(num_layers)]  # near their mean
        self._off: list[list[float]] = [[] for _ in range(num_layers)]  # newer ones, which differ in one direction
        self._side = [0] * num_layers  # the direction: 1: above, -1: below
        self._seen = self._dropped = 0.0  # samples, with weights that decrease over MEMORY batches
        self._needed = 2  # samples that show a change

    def add(self, seconds: Sequence[float]) -> None:
        """Adds a batch: seconds of one micro-batch in each layer, forward and backward."""
        dropped = 0
        for layer, value in enumerate(seconds):
            samples, off = self._samples[layer], self._off[layer]
            side = _side(value, samples)
            if side != self._side[layer]:
                dropped += len(off)
                off.clear()
            self._side[layer] = side
            (off if side else samples).append(value)
            if len(off) >= self._needed:
                samples[:], self._side[layer] = off, 0
                off.clear()
            del samples[:-LONGEST]
        self._seen = self._seen * (1 - 1 / MEMORY) + len(seconds)
        self._dropped = self._dropped * (1 - 1 / MEMORY) + dropped
        share, self._needed = self._dropped / self._seen, 2
        while self._needed < LONGEST and RARE * len(seconds) * share**self._needed > 1:
            self._needed += 1

    def is_settling(self) -> bool:
        """Returns whether a layer differs in the newest batch, and the next batch shows whether that lasts."""
        return self._needed == 2 and any(self._side)

    def means(self) -> list[float]:
        """Returns each layer's mean, or the newest sample of a settling layer. Empty before the first batch."""
        if not all(self._samples):
            return []
        newest = [off[-1:] if off and self._needed == 2 else s for s, off in zip(self._samples, self._off)]
        return [sum(samples) / len(samples) for samples in newest]


def _side(value: float, samples: Sequence[float]) -> int:
    if not samples:
        return 0
    mean = sum(samples) / len(samples)
    return (value > mean * (1 + JUMP)) - (value < mean * (1 - JUMP))
