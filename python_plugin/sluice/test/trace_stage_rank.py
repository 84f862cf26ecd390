# SPDX-License-Identifier: Apache-2.0
"""Runs a rank of a pipeline whose stages sleep, for tests of `sluice trace`. Argument: batches."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from sluice.adapters.torch import Edge, EpGroup, Pipeline, PipelineConfig


class Sleeper:
    """A stage whose forward takes 4 ms, and its backward 8."""

    def load(self, micro_batch: int) -> None:
        """Loads nothing."""

    def forward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        time.sleep(0.004)
        return Edge([torch.zeros(3)]) if dist.get_rank() == 0 else None

    def backward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        time.sleep(0.008)
        return Edge([torch.zeros(3)]) if dist.get_rank() > 0 else None


def main() -> None:
    dist.init_process_group("gloo")
    group = EpGroup.unshared(range(dist.get_world_size()))
    pipeline = Pipeline(PipelineConfig("1f1b", "", dist.get_rank()), group)
    for _ in range(int(sys.argv[1])):
        pipeline.run(Sleeper(), 4)
    pipeline.run(Sleeper(), 2, forward_only=True)
    dist.barrier()
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
