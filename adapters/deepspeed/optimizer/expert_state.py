# SPDX-License-Identifier: Apache-2.0
"""Defines keepers (common/optimizer_state.py) of the states that DeepSpeed's optimizers have for expert parameters:
one for each kind of optimizer, chosen when experts move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sluice.adapters.common.optimizer_state import (
    Content,
    Gradient,
    Keeper,
    Masters,
    Piece,
    State,
    Together,
    mastered,
    plain,
)
from sluice.adapters.deepspeed.optimizer.flat_buffers import GRADIENT, MASTER, FlatBuffers
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from torch import nn

from deepspeed.ops.adam import FusedAdam

_STEP = "step"
_NAMES = {MASTER: MASTER, GRADIENT: GRADIENT}  # names of contents that are not moments


class Partitioned(Keeper):
    """Masters and moments in flat buffers, each of which is partitioned over the ranks with replicas of the expert:
    ZeRO stages 1 and 2, and the bf16 optimizer. Step counts are kept per buffer. They are equal on all ranks, because
    every step updates all buffers. Gradients are in buffers too, which exist from the end of the last backward: `read`
    needs them absent, `late` needs all of them."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._buffers = FlatBuffers(optimizer)
        self._keys = sorted(
            {
                key
                for flat, kept in optimizer.optimizer.state.items()
                for key, value in kept.items()
                if isinstance(value, torch.Tensor) and value.shape == flat.shape
            }
        )
        # The bf16 optimizer has all of a gradient on each rank, and takes its norm over that.
        lists = zip(getattr(optimizer, "bf16_groups", ()), getattr(optimizer, "fp32_groups_gradients", ()))
        self._gradients = {id(p): gradient for ps, gradients in lists for p, gradient in zip(ps, gradients)}

    def obstacle(self, parameters: Sequence[nn.Parameter]) -> str:
        held = [getattr(self._optimizer, buffers, {}) for buffers in ("averaged_gradients", "all_grad_tensors")]
        has_any = any(value is not None for buffers in held for value in buffers.values())
        has_any |= any(any(flags) for flags in getattr(self._optimizer, "fp32_groups_has_gradients", ()))
        if has_any or any(parameter.grad is not None for parameter in parameters):
            return (
                f"{type(self._optimizer).__name__} has gradients: move after engine.step() and before the next backward"
            )
        return ""

    def bytes_of(self, piece: Piece) -> int:
        size = piece.parameter.numel() // piece.count * 4
        return size * (1 + len(self._keys)) if self._buffers.has(piece.parameter) else 0

    def read(self, piece: Piece) -> Content:
        """See Keeper. A parameter that was frozen later still has its states."""
        if not self._buffers.has(piece.parameter):
            return {}
        content = {MASTER: self._gathered(piece, MASTER)}
        for key in self._keys:
            content[f"state {key}"] = self._gathered(piece, key)
        return content

    def late_forms(self, piece: Piece) -> dict[str, torch.dtype]:
        """See Keeper. Gradients of fewer bits are exact in float32."""
        return {GRADIENT: torch.float32} if piece.parameter.requires_grad else {}

    def late(self, piece: Piece) -> Content:
        if not piece.parameter.requires_grad:
            return {}
        if id(piece.parameter) in self._gradients:
            return {GRADIENT: self._whole_gradient(piece).float()}
        return {GRADIENT: self._gathered(piece, GRADIENT)}

    def write(self, piece: Piece, content: Content) -> None:
        if GRADIENT in content and id(piece.parameter) in self._gradients:
            self._whole_gradient(piece).copy_(content[GRADIENT].view(-1))
            content = {name: value for name, value in content.items() if name != GRADIENT}
        if not self._buffers.has(piece.parameter):
            return
        for key in (MASTER, *self._keys, GRADIENT):
            value = content.get(_NAMES.get(key, f"state {key}"))
            if value is not None:
                first = piece.parameter.numel() // piece.count * piece.index
                self._buffers.write(piece.parameter, key, first, value)

    def _whole_gradient(self, piece: Piece) -> torch.Tensor:
        size = piece.parameter.numel() // piece.count
        return self._gradients[id(piece.parameter)].view(-1).narrow(0, size * piece.index, size)

    def _gathered(self, piece: Piece, key: str) -> torch.Tensor:
        size = piece.parameter.numel() // piece.count
        return self._buffers.read(piece.parameter, key, size * piece.index, size)


def _has_parts(parameter: nn.Parameter) -> bool:
    """Returns whether the parameter is in the flat buffers, because it was trained when these were made."""
    return hasattr(parameter, "_hp_mapping")


class FusedState(State):
    """The state of DeepSpeed's FusedAdam, which keeps the step count of a group in the state of its last parameter. So
    the count stays where it is, while moments move."""

    def __init__(self, optimizer: FusedAdam) -> None:
        super().__init__(lambda parameter: (optimizer.state, parameter))
        self._optimizer = optimizer

    def write(self, piece: Piece, content: Content) -> None:
        states, parameter = self._optimizer.state, piece.parameter
        before = states.get(parameter, {})
        super().write(piece, content)
        if states.get(parameter, {}).keys() - {_STEP}:
            states[parameter].setdefault(_STEP, before.get(_STEP, steps_of(self._optimizer, parameter)))
        elif before:  # the content has no moments: they begin as zeros
            states[parameter] = {
                k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for k, v in before.items()
            }

    def _views(self, piece: Piece) -> Content:
        return {name: value for name, value in super()._views(piece).items() if name != _STEP}


def steps_of(optimizer: FusedAdam, parameter: nn.Parameter) -> int:
    """Returns the number of steps of a parameter's group: the greatest count in the group."""
    group = next((g["params"] for g in optimizer.param_groups if any(p is parameter for p in g["params"])), [])
    return max((optimizer.state.get(p, {}).get(_STEP, 0) for p in group), default=0)


def keeper_of(name: str, parameters: Sequence[nn.Parameter], optimizer: Any) -> Keeper:
    """Returns the keeper for an optimizer, or raises UnsupportedError if its states of experts cannot be found."""
    if optimizer is None:
        return Gradient()
    trained = [p for p in parameters if p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if isinstance(optimizer, FusedAdam) and {id(p) for p in trained} <= held:
        return Together(Gradient(), FusedState(optimizer))
    if isinstance(optimizer, torch.optim.Optimizer) and {id(p) for p in trained} <= held:
        return plain(optimizer)
    base = getattr(optimizer, "optimizer", None)
    if (
        isinstance(base, torch.optim.Optimizer)
        and hasattr(optimizer, "fp16_groups")
        and hasattr(optimizer, "fp32_groups")
    ):
        # The unfused optimizer, of 16-bit experts without ZeRO.
        lists = zip(optimizer.fp16_groups, optimizer.fp32_groups)
        masters = Masters([pair for own, copies in lists for pair in zip(own, copies)])
        if masters.holds(trained):
            return mastered(masters, base.state)
    if all(map(_has_parts, trained)) and isinstance(base, torch.optim.Optimizer):
        return Partitioned(optimizer)
    raise UnsupportedError(
        f"MoE layer '{name}': experts cannot move under {type(optimizer).__name__}, whose copies or moments of "
        "parameters Sluice cannot find: use ZeRO stage 0 with float32 parameters, stage 1 or 2, or, for 16-bit "
        'parameters without ZeRO, "torch_adam": true among the "params" of the optimizer'
    )
