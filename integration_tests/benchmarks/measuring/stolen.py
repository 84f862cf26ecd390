# SPDX-License-Identifier: Apache-2.0
"""Repeats rounds in which the machine's host gave CPU time to other guests. A step can lose half of its time this way.

Linux counts the time in which a virtual core was ready and did not run ("steal" of /proc/stat, in ticks of 10 ms). If
any rank lost more than the given share of a round, all sides of the round run again, as long as the run may wait for a
quiet machine (--quiet-timeout). Only the lost time decides this, never the duration of a step. The record contains the
shares.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from integration_tests.benchmarks.measuring.parts import slowest

STEAL = 8  # index of the word in a core's line
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def stolen_s(text: str, cores: set[int]) -> float:
    """Seconds that these cores lost since the machine started: the maximum over cores. text: of /proc/stat."""
    lines = (line.split() for line in text.splitlines())
    names = {f"cpu{core}" for core in cores}
    return max(
        (int(line[STEAL]) / TICKS_PER_S for line in lines if line[0] in names and len(line) > STEAL), default=0.0
    )


class Stolen:
    """Measures the lost share of rounds. With `most` 1 no round is repeated."""

    def __init__(self, most: float, quiet_timeout_s: float) -> None:
        self.most, self.quiet_timeout_s = most, quiet_timeout_s
        self.shares: list[float] = []  # lost shares of the rounds that count
        self.repeated = 0
        self._lost = self._begin = 0.0

    def begin(self) -> None:
        """Begins a round."""
        self._lost, self._begin = self._now(), time.perf_counter()

    def spoiled(self) -> bool:
        """Whether the round that ends here must be run again. Collective."""
        took = time.perf_counter() - self._begin
        took, share = slowest([took, (self._now() - self._lost) / took])
        if share > self.most and self.quiet_timeout_s > 0:
            self.quiet_timeout_s -= took
            self.repeated += 1
            return True
        self.shares.append(share)
        return False

    @property
    def rounds(self) -> int:
        """The number of rounds, including those that were repeated."""
        return len(self.shares) + self.repeated

    def found(self) -> dict[str, object]:
        """Part of a record."""
        return {
            "share_of_rounds": [round(share, 3) for share in self.shares],
            "most": self.most,
            "rounds_repeated": self.repeated,
        }

    @staticmethod
    def _now() -> float:
        with open("/proc/stat") as file:
            return stolen_s(file.read(), os.sched_getaffinity(0))


def in_turns(
    sides: Mapping[Any, Callable[[], float]], count: int, stolen: Stolen | None = None
) -> dict[Any, list[float]]:
    """Seconds of each side in `count` rounds, in alternating order. Each measured step follows a step of the same side,
    as in training."""
    guard = stolen or Stolen(1.0, 0.0)
    seconds: dict[Any, list[float]] = {key: [] for key in sides}
    while len(guard.shares) < count:
        guard.begin()
        took = {}
        for key in list(sides) if len(guard.shares) % 2 == 0 else list(reversed(sides)):
            sides[key]()
            took[key] = sides[key]()
        if not guard.spoiled():
            for key, value in took.items():
                seconds[key].append(value)
    return seconds
