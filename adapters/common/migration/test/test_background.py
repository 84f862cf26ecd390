# SPDX-License-Identifier: Apache-2.0
"""Tests copies of an expert's late tensors: each is gathered, copied and freed before the next."""

import weakref
from typing import Any

import torch
from sluice.adapters.common.migration import background, moving
from sluice.adapters.common.optimizer_state import Content, Keeper, Piece
from torch import nn


class _Gathers(Keeper):
    """A keeper whose gradients are copies, as under ZeRO. unfreed: at each call, how many earlier copies are alive."""

    def __init__(self) -> None:
        self._given: list[Any] = []
        self.unfreed: list[int] = []

    def _alive(self) -> int:
        return sum(given() is not None for given in self._given)

    def bytes_of(self, piece: Piece) -> int:
        return 4 * piece.parameter.numel()

    def read(self, piece: Piece) -> Content:
        self.unfreed.append(self._alive())
        return {"master": piece.parameter.detach().clone()}

    def late_forms(self, piece: Piece) -> dict[str, torch.dtype]:
        return {"gradient": torch.float32}

    def late(self, piece: Piece) -> Content:
        self.unfreed.append(self._alive())
        gathered = piece.parameter.detach() + 1
        self._given.append(weakref.ref(gathered))
        return {"gradient": gathered}


def test_GatheredGradients_AreCopiedOneAfterTheOther() -> None:
    module, keeper = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), _Gathers()
    (expert,) = moving.of_modules([module])
    belongings = moving.Belongings([expert], keeper, None)
    content = background._all_of(expert, belongings)
    assert keeper.unfreed == [0] * 8  # four gradients, then four masters
    for name, parameter in module.named_parameters():
        assert torch.equal(content[f"{name} gradient"], parameter + 1)
        assert torch.equal(content[f"{name} master"], parameter)
    bundle = background._packed(expert, belongings)
    keeper.unfreed.clear()
    background._load(bundle, expert, keeper)
    assert keeper.unfreed == [0] * 4 and bundle.is_there.tolist() == [1] * 4
    for name, parameter in module.named_parameters():
        assert torch.equal(bundle.content()[f"{name} gradient"].view(parameter.shape), parameter + 1)
