# SPDX-License-Identifier: Apache-2.0
"""Rank-side: experts of AutoEP layers that move between ranks during training, compared with a training in which none
moves."""

from __future__ import annotations

import functools
from typing import Any

import autoep_models as models
import torch
from cases_autoep import one_step
from cases_placement import SECTION, UNCLIPPED, checkpoint_files, still_and_moved
from ds_models import go_home


def moved_training(
    kind: str,
    steps: int,
    every: int,
    size: int = 2,
    shape: dict[str, int] | None = None,
    **how: Any,
) -> list[dict[str, Any]]:
    """Runs `still_and_moved` with AutoEP layers."""
    training = functools.partial(models.train, kind, steps, SECTION, section={"autoep_size": size}, shape=shape)
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


def checkpoints(kind: str, folder: str, config: dict[str, Any]) -> Any:
    """Runs `checkpoint_files` with AutoEP layers."""

    def make(section: dict[str, Any] | None) -> Any:
        return models.engine(models.build(kind), models.expert_parallel(kind), section, **{**UNCLIPPED, **config})

    return checkpoint_files(make, one_step, folder)
