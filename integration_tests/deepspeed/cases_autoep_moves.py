# SPDX-License-Identifier: Apache-2.0
"""Rank-side: experts of AutoEP layers that move between ranks during training, compared with a training in which none
moves."""

from __future__ import annotations

import os
from typing import Any

import autoep_models as models
import torch
import torch.distributed as dist
from cases_placement import UNCLIPPED, _same
from shuffles import PROMISES_BITS, forgetting, shuffled
from sluice.adapters.deepspeed.moe.autoep_state import AutoEPState

SECTION = {**models.SLUICE, **PROMISES_BITS}


def shuffle(host: Any, seed: int) -> None:
    """Moves the experts of every layer to random places, the same on all ranks."""
    for number, layer in enumerate(host.sluice.layers):
        host.sluice.move_experts(layer, *shuffled(layer._sluice, 100 * seed + number))


def moved_training(
    kind: str,
    steps: int,
    every: int,
    size: int = 2,
    config: dict[str, Any] | None = None,
    forget: str = "",
    shape: dict[str, int] | None = None,
    stale: bool = False,
) -> list[Any]:
    """Returns [unmoved, moved]: results of `autoep_models.train`. Under ZeRO and bf16 experts move before the forward,
    when there are no gradients. Otherwise experts move before the update, with gradients. At the end they are home.

    forget: state that does not move, as with a faulty host. stale: the engine does not learn of a move."""
    config = {**UNCLIPPED, **(config or {})}
    after_update = config.get("zero_optimization", {}).get("stage", 0) > 0 or "bf16" in config

    def move(host: Any, step: int) -> None:
        if step == steps - 1:
            with host.sluice.at_home(False):
                pass
        elif step % every == every - 1:
            shuffle(host, step)

    when = {"before": move} if after_update else {"check": move}
    common = {"section": {"autoep_size": size}, "config": config, "shape": shape}
    still, replace = models.train(kind, steps, SECTION, **common), AutoEPState.replace_experts
    if stale:
        AutoEPState.replace_experts = lambda state, placement: setattr(state, "placement", placement)
    try:
        with forgetting(forget):
            return [still, models.train(kind, steps, SECTION, **common, **when)]
    finally:
        AutoEPState.replace_experts = replace


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
            with host.sluice.at_home(False):
                pass

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
    files, differ = sorted(os.listdir(os.path.join(folder, "still", "x"))), []
    for file in files:
        one, other = (
            torch.load(os.path.join(folder, name, "x", file), weights_only=False, map_location="cpu") for name in hosts
        )
        if not _same(one, other):
            differ.append(file)
    with hosts["moved"].sluice.at_home(False):
        pass
    for host in hosts.values():
        host.sluice.unswap()
        host.destroy()
    dist.barrier()
    assert files
    return differ
