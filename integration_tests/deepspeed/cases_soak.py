"""Rank-side: training that begins with the last checkpoint that there is, for soaks whose ranks are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases_parity  # noqa: F401  (chooses the backend)
import ds_models as models
import torch
import torch.distributed as dist
from ds_models import SLUICE, build, ds_config, engine

EVERY = 4  # steps from one checkpoint to the next
# The same bits in each run: n and the weight gradients' order are fixed.
SECTION = {**SLUICE, "timeout": 20, "wgrad_mode": "deferred", "gemm": "native"}


def train_on(folder: str, steps: int, begin_file: str) -> dict[str, Any]:
    """{"losses": {step: hexadecimal}, "from": step}. Writes `begin_file` with its rank when training begins."""
    layers = [{"k": 2}, {"k": 1, "expert": "gated"}]
    host = engine(build(layers), ds_config(), SECTION)
    first = 0
    if (Path(folder) / "latest").exists():
        path, state = host.load_checkpoint(folder)
        assert path is not None
        first = state["step"]
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
            host.save_checkpoint(folder, tag=f"step{step + 1}", client_state={"step": step + 1})
    host.sluice.unswap()
    host.destroy()
    return {"losses": losses, "from": first}
