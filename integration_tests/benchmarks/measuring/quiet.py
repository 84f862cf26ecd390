# SPDX-License-Identifier: Apache-2.0
"""Waits for a quiet machine: on shared machines the rate of GEMMs can fall to half for minutes.

Before a round every rank times one GEMM whose weights do not fit in its caches (256 rows, 16 MiB of f32 weights).
The round begins when the slowest rank reaches the wanted rate, or when the time for waiting is over. The check comes
before a round and never after it, so it cannot favour a side. The record contains the rates.
"""

import time

import torch

from integration_tests.benchmarks.measuring.parts import slowest

ROWS, WIDTH, HIDDEN = 256, 1024, 4096
PAUSE_S = 2.0


class Quiet:
    """Waits before rounds. With `wanted_gflops` 0 it only measures."""

    def __init__(self, wanted_gflops: float, quiet_timeout_s: float) -> None:
        self.wanted, self.quiet_timeout_s = wanted_gflops, quiet_timeout_s
        self.rates: list[float] = []
        self.waited_s = 0.0
        self._rows, self._weights = torch.randn(ROWS, WIDTH), torch.randn(HIDDEN, WIDTH)

    def rate(self) -> float:
        """GFLOP/s of the slowest rank, from the faster of two GEMMs. Collective."""
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            torch.mm(self._rows, self._weights.T)
            seconds.append(time.perf_counter() - begin)
        return 2e-9 * ROWS * WIDTH * HIDDEN / slowest([min(seconds)])[0]

    def wait(self) -> float:
        """Waits until the machine is quiet or the time for waiting is over; returns the measured rate. Collective."""
        rate = self.rate()
        while rate < self.wanted and self.waited_s < self.quiet_timeout_s:
            time.sleep(PAUSE_S)
            self.waited_s = slowest([self.waited_s + PAUSE_S])[0]
            rate = self.rate()
        self.rates.append(rate)
        return rate

    def found(self) -> dict[str, object]:
        """Part of a record."""
        return {
            "gflops_before_rounds": [round(rate, 1) for rate in self.rates],
            "wanted_gflops": self.wanted,
            "waited_s": round(self.waited_s, 1),
        }
