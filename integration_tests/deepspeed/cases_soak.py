# SPDX-License-Identifier: Apache-2.0
"""Rank-side: training that starts from the newest checkpoint, for soak tests that kill ranks."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import ds_models as models
import torch
import torch.distributed as dist
from ds_models import SLUICE, build, ds_config, engine

EVERY = 4  # steps from one checkpoint to the next
HOST_S = 90  # deadline of the host's own collectives, without which they wait forever for a stopped rank
# This file names the newest checkpoint that all ranks have written. The host writes its file `latest` before all ranks
# have written theirs, and the file is empty for a moment.
WHOLE = "whole"
# n and the order of weight gradients are fixed, so that every run has the same bits.
SECTION = {**SLUICE, "timeout": 60, "wgrad_mode": "deferred", "gemm": "native"}


def train_on(folder: str, steps: int, begin_file: str) -> dict[str, Any]:
    """Returns {"losses": {step: hex}, "from": step}. Writes `begin_file` with its rank when training begins."""
    layers = [{"k": 2}, {"k": 1, "expert": "gated"}]
    host = engine(build(layers), ds_config(), SECTION)
    first = 0
    whole = Path(folder) / WHOLE
    if whole.exists():
        path, state = host.load_checkpoint(folder, tag=whole.read_text())
        assert path is not None
        first = state["step"]
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HOST_S), group)
    Path(f"{begin_file}.{dist.get_rank()}").touch()
    losses = {}
    for step in range(first, steps):
        torch.manual_seed(31 * step + dist.get_rank())
        loss = host(*models.batch(step))
        host.backward(loss)
        host.step()
        losses[str(step)] = float(loss.detach()).hex()
        (Path(folder) / f"loss-{dist.get_rank()}-{step}").write_text(losses[str(step)])
        if (step + 1) % EVERY == 0:
            tag = f"step{step + 1}"
            host.save_checkpoint(folder, tag=tag, client_state={"step": step + 1}, save_latest=False)
            if dist.get_rank() == 0:  # the host has waited for all ranks
                (Path(folder) / "new").write_text(tag)
                os.replace(Path(folder) / "new", whole)
    host.sluice.unswap()
    host.destroy()
    return {"losses": losses, "from": first}
