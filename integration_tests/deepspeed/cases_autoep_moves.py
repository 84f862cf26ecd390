# SPDX-License-Identifier: Apache-2.0
"""Rank-side: experts of AutoEP layers that move between ranks during training, compared with a training in which none
moves."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any
from unittest.mock import patch

import autoep_models as models
import torch
import torch.distributed as dist
from cases_placement import UNCLIPPED, differing_files, shuffle, still_and_moved
from ds_models import go_home
from shuffles import PROMISES_BITS
from sluice.adapters.deepspeed.moe.autoep_state import AutoEPState

SECTION = {**models.SLUICE, **PROMISES_BITS}


def moved_training(
    kind: str,
    steps: int,
    every: int,
    size: int = 2,
    shape: dict[str, int] | None = None,
    stale: bool = False,
    **how: Any,
) -> list[dict[str, Any]]:
    """Runs `still_and_moved` with AutoEP layers. stale: the engine does not learn of a move."""
    training = functools.partial(models.train, kind, steps, SECTION, section={"autoep_size": size}, shape=shape)
    only_noted = patch.object(AutoEPState, "replace_experts", lambda state, new: setattr(state, "placement", new))
    with only_noted if stale else contextlib.nullcontext():
        return still_and_moved(training, steps, every, **how)


def decided(kind: str, steps: int, config: dict[str, Any]) -> list[Any]:
    """Returns [unmoved, moved, reports] with the option "placement"."""
    config = {**UNCLIPPED, **config}
    reports: list[Any] = []

    def settle(host: Any, step: int) -> None:
        """Moves experts home before the last step: experts of a partitioned optimizer only move after updates."""
        if step == steps - 1:
            reports.extend(state["placement"] for state in host.sluice.stats()["layers"])
            host.sluice.decider.close()
            host.sluice.decider = None
            go_home(host)

    def favour(model: Any) -> None:
        """Makes the router prefer the first rank's experts."""
        with torch.no_grad():
            for layer in model.layers:
                layer.moe.router.bias[: layer.moe.router.bias.shape[0] // 2] += 4.0

    willing = {"interval": 3, "target": 1.05, "least_gain": 0.01, "horizon": 10**6}
    still = models.train(kind, steps, SECTION, config=config, prepare=favour)
    moved = models.train(kind, steps, {**SECTION, "placement": willing}, config=config, prepare=favour, before=settle)
    return [still, moved, reports]


def checkpoints(kind: str, folder: str, config: dict[str, Any]) -> list[str]:
    """Returns the checkpoint files that differ between a run with moved experts and a run without moves."""
    hosts = {
        name: models.engine(models.build(kind), models.expert_parallel(kind), SECTION, **{**UNCLIPPED, **config})
        for name in ("still", "moved")
    }
    for step in range(4):
        for host in hosts.values():
            ids = models.batch(step)
            host.backward(host(input_ids=ids, labels=ids, use_cache=False).loss)
            host.step()
        shuffle(hosts["moved"], step)
    for name, host in hosts.items():
        host.save_checkpoint(os.path.join(folder, name), tag="x")
    dist.barrier()
    files, differ = differing_files(folder)
    go_home(hosts["moved"])
    for host in hosts.values():
        host.sluice.unswap()
        host.destroy()
    dist.barrier()
    assert files
    return differ
