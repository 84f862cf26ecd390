# SPDX-License-Identifier: Apache-2.0
"""Tests state dicts of a module and of its optimizer while an expert is away."""

import copy
import pickle
from typing import Any

import pytest
import torch
from sluice.adapters.common.migration import away
from sluice.adapters.common.migration.placement import Placement, contiguous
from sluice.errors import InvalidState
from torch import nn


class _Layer:
    moving_name, moving_ranks, torn = "experts 0", (0, 1), ""

    def __init__(self) -> None:
        self.home = self.placement = contiguous(2, 2)

    def replace_experts(self, placement: Placement) -> None:
        self.placement = placement


def _guarded() -> tuple[_Layer, nn.Module, torch.optim.Optimizer]:
    layer, module = _Layer(), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    away.guard_optimizer(optimizer, layer)
    away.guard_optimizer(optimizer, layer)
    return layer, module, optimizer


def _ways(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = module.state_dict(), optimizer.state_dict()
    return {
        "state_dict": module.state_dict,
        "load_state_dict": lambda: module.load_state_dict(weights),
        "deepcopy": lambda: copy.deepcopy(module),
        "pickle": lambda: pickle.dumps(module),
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict(states),
    }


@pytest.mark.parametrize("name", _ways(nn.Linear(2, 2), torch.optim.AdamW([torch.zeros(1)])))
def test_Way_WhileAnExpertIsAway_IsRefusedAndGoesOnAtHome(name: str) -> None:
    layer, module, optimizer = _guarded()
    way = _ways(module, optimizer)[name]
    way()
    layer.placement = Placement((1, 0), (0, 0))
    away.guard_module(module, layer)
    with pytest.raises(InvalidState, match="experts_at_home"):
        way()
    layer.placement = layer.home
    away.guard_module(module, layer)
    way()


def test_Move_WithoutTheOptimizerThatMovedBefore_IsRefused() -> None:
    layer, _, optimizer = _guarded()
    away.needs_optimizer(layer, optimizer)
    away.needs_optimizer(_Layer(), None)
    with pytest.raises(InvalidState, match="pass that optimizer"):
        away.needs_optimizer(layer, None)
