# SPDX-License-Identifier: Apache-2.0
"""Times short reference work with calibrations and measurements, to show how a machine's speed changes between them.

On a rented machine the time of GEMMs and exchanges changes by a fifth from one minute to the next. A later measurement
then differs from a calibrated model although the model is right. So one fixed GEMM, one fixed exchange and one step of
a fixed tiny layer are timed when the machine is calibrated, and again in every measured round:

  gemm_s, exchange_s   with torch alone; the present time over the time at calibration is the machine's drift
  host_s               the time of the tiny layer's step outside of its passes, with as many tokens: autograd, Python
                       and the end of the barrier, which are part of every step but not of a pass
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

ROWS, WIDTH, HIDDEN, MATRICES = 128, 256, 512, 4  # of the GEMM, which uses weights of 2 MiB in turn
EXCHANGED = 1 << 16  # floats that each rank sends to each other rank
SAMPLES = 9
NAMES = ("gemm_s", "exchange_s", "host_s")

Sample = tuple[float, float, float]


class Reference:
    """The fixed work of one rank; every call is collective."""

    def __init__(self, step: Callable[[], tuple[float, float]]) -> None:
        """step: runs the tiny layer; returns the seconds of the step and of its passes."""
        import torch
        import torch.distributed as dist

        self._torch, self._step = torch, step
        self._rows = torch.randn(ROWS, WIDTH)
        self._weights = [torch.randn(HIDDEN, WIDTH) for _ in range(MATRICES)]
        world, rank = dist.get_world_size(), dist.get_rank()
        self._out = [torch.zeros(EXCHANGED if peer != rank else 0) for peer in range(world)]
        self._back = [torch.zeros_like(tensor) for tensor in self._out]
        for _ in range(2):  # warm-up
            self.sample()

    def sample(self) -> Sample:
        """Seconds of the slowest rank, in the order of NAMES."""
        import torch.distributed as dist

        from integration_tests.benchmarks.measuring.parts import exchange, slowest

        dist.barrier()
        began = time.perf_counter()
        for weights in self._weights:
            self._torch.mm(self._rows, weights.T)
        gemm = time.perf_counter() - began
        dist.barrier()
        began = time.perf_counter()
        exchange(self._out, self._back)
        exchanged = time.perf_counter() - began
        whole, passes = self._step()
        gemm, exchanged, whole, passes = slowest([gemm, exchanged, whole, passes])
        return gemm, exchanged, max(whole - passes, 0.0)

    def samples(self, count: int = SAMPLES) -> list[Sample]:
        return [self.sample() for _ in range(count)]


def medians(samples: Sequence[Sample]) -> dict[str, float]:
    """The median of each of NAMES."""
    return {name: statistics.median(sample[i] for sample in samples) for i, name in enumerate(NAMES)}


def drift(then: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Present times of GEMM and exchange over the times at calibration."""
    return {"gemm": now["gemm_s"] / then["gemm_s"], "exchange": now["exchange_s"] / then["exchange_s"]}
