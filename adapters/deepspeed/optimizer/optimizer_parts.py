# SPDX-License-Identifier: Apache-2.0
"""Reads a pipeline optimizer's states by parameter, and gives the same optimizer other parameters with their states.

The optimizer object stays, so that references to it, its groups and its schedulers stay valid. There are two kinds.
Plain optimizers of torch have a state for each parameter. DeepSpeed's own have masters and moments of a group in one
flat buffer, partitioned over the replicas. A change of parameters shifts all others in the buffer, so these optimizers
are rebuilt inside the existing object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sluice.adapters.common.migration.shipments import Content
from sluice.adapters.deepspeed.optimizer.expert_state import steps_of
from sluice.adapters.deepspeed.optimizer.flat_buffers import MASTER, FlatBuffers
from torch import nn

from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


class Kept(NamedTuple):
    """The group of one parameter, and its states by name."""

    group: int
    content: Content


Parameters = Sequence[nn.Parameter]


class NoOptimizer:
    """The optimizer of an engine that trains nothing."""

    needs_all_groups = False  # every stage must have parameters in every group
    counts_copies = True  # copies of parameters that are tied to another stage's count as well

    def why_not(self) -> str:
        """Returns why states cannot be taken out; "": they can."""
        return ""

    def settings(self) -> list[dict[str, str]]:
        """Returns, for each group, the settings that must be equal on both ends of a move."""
        return []

    def bytes_of(self, parameters: Parameters) -> float:
        """Returns the bytes of parameters on their stage, with gradients and the two moments of the optimizer."""
        return 4.0 * sum(p.numel() * p.element_size() for p in parameters)

    def groups_of(self, parameters: Parameters) -> list[int | None]:
        """Returns the group of each parameter; None: the optimizer does not have the parameter."""
        return [None for _ in parameters]

    def take(self, parameters: Parameters) -> dict[nn.Parameter, Kept]:
        """Returns the states of parameters that the optimizer has: only this rank's parts, until `gather` is called."""
        return {}

    def gather(self, kept: Mapping[nn.Parameter, Kept]) -> None:
        """Fills in the other replicas' parts of a result of `take`. Collective over the replicas of the stage."""

    def put(self, kept: Mapping[nn.Parameter, Kept]) -> None:
        """Replaces the optimizer's parameters by these, in this order."""


class PlainOptimizer(NoOptimizer):
    """A torch.optim.Optimizer over the parameters themselves, whose states are not partitioned."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def settings(self) -> list[dict[str, str]]:
        """See NoOptimizer."""
        return _settings(self._optimizer)

    def groups_of(self, parameters: Parameters) -> list[int | None]:
        """See NoOptimizer."""
        return _found(parameters, [group["params"] for group in self._optimizer.param_groups])

    def take(self, parameters: Parameters) -> dict[nn.Parameter, Kept]:
        """See NoOptimizer."""
        places = zip(parameters, self.groups_of(parameters))
        return {p: Kept(where, self._state_of(p)) for p, where in places if where is not None}

    def put(self, kept: Mapping[nn.Parameter, Kept]) -> None:
        """See NoOptimizer."""
        state = self._optimizer.state
        for index, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                state.pop(p, None)
            group["params"][:] = [p for p, (where, _) in kept.items() if where == index]
            # In the order in which a first step adds them, which is the order of the host's checkpoints.
            states = {p: dict(kept[p].content) for p in group["params"] if kept[p].content}
            state.update(states)
            if isinstance(self._optimizer, FusedAdam):  # only the last state of a group has its step count
                for one in list(states.values())[:-1]:
                    one["step"] = 0

    def _state_of(self, parameter: nn.Parameter) -> Content:
        state = dict(self._optimizer.state.get(parameter, {}))
        if state and isinstance(self._optimizer, FusedAdam):
            state["step"] = steps_of(self._optimizer, parameter)  # any parameter may become the last of its group
        return state


class FlatOptimizer(NoOptimizer):
    """BF16_Optimizer, or the optimizer of ZeRO stage 1, whose groups are in flat buffers."""

    needs_all_groups = True

    def __init__(self, engine: Any, optimizer: Any) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._is_bf16 = type(optimizer) is BF16_Optimizer
        self.counts_copies = not self._is_bf16  # whether its gradient norm works if a group has only copies

    def why_not(self) -> str:
        """See NoOptimizer."""
        optimizer = self._optimizer
        if getattr(optimizer, "cpu_offload", False):
            return "it is offloaded to host memory"
        if getattr(optimizer, "parameter_alignment", False):
            return '"zero_optimization": "parameter_alignment" pads its flat buffers'
        return ""

    def settings(self) -> list[dict[str, str]]:
        """See NoOptimizer. A whole group has one step count."""
        found = _settings(self._optimizer.optimizer)
        for index, group in enumerate(found):
            group.update({name: repr(value) for name, value in self._of_group(index).items() if not _is_cut(value)})
        return found

    def bytes_of(self, parameters: Parameters) -> float:
        """See NoOptimizer. Masters, their gradients and moments are in f32, counted as if no replicas shared them."""
        return float(sum(p.numel() * (2 * p.element_size() + 16) for p in parameters))

    def groups_of(self, parameters: Parameters) -> list[int | None]:
        """See NoOptimizer."""
        return _found(parameters, self._optimizer.bf16_groups if self._is_bf16 else self._optimizer.bit16_groups)

    def take(self, parameters: Parameters) -> dict[nn.Parameter, Kept]:
        """See NoOptimizer. The states are in f32, in which `gather` adds the parts."""
        wanted, kept, buffers = set(parameters), {}, FlatBuffers(self._optimizer)
        for index, laid in enumerate(buffers.groups):
            of_group = self._of_group(index)
            for p in filter(wanted.__contains__, laid):
                content = {n: buffers.own(p, n, 0, p.numel()) if _is_cut(v) else v for n, v in of_group.items()}
                kept[p] = Kept(index, content)
        return kept

    def gather(self, kept: Mapping[nn.Parameter, Kept]) -> None:
        """See NoOptimizer."""
        buffers = FlatBuffers(self._optimizer)
        for p, (index, content) in kept.items():
            for name, value in self._of_group(index).items():
                if _is_cut(value):
                    buffers.gather(p, content[name])
                    content[name] = content[name].to(value.dtype)

    def put(self, kept: Mapping[nn.Parameter, Kept]) -> None:
        """See NoOptimizer."""
        old, basic = self._optimizer, self._optimizer.optimizer
        old.destroy()
        basic.state.clear()
        for index, group in enumerate(basic.param_groups):
            group["params"] = [p for p, (where, _) in kept.items() if where == index]
        engine = self._engine
        built = engine._configure_bf16_optimizer(basic) if self._is_bf16 else engine._configure_zero_optimizer(basic)
        if getattr(old, "ready_for_gradients", False):  # during a batch, in which backwards have made the buckets
            built.setup_buckets()
        if hasattr(old, "loss_scaler"):  # the existing gradients have its scale
            built.loss_scaler = old.loss_scaler
        for name, value in vars(old).items():
            vars(built).setdefault(name, value)  # attributes that other code has set
        # Both objects share their attributes: hooks refer to the new one, and all other code to the old one.
        old.__dict__ = built.__dict__
        buffers = FlatBuffers(old)
        for master, laid in zip(buffers.masters, buffers.groups):
            of_first = {name: value for name, value in kept[laid[0]].content.items() if name != MASTER}
            if of_first:
                basic.state[master] = {
                    name: torch.zeros_like(master.detach(), dtype=value.dtype) if _is_cut(value) else value
                    for name, value in of_first.items()
                }
            for p in laid:
                for name, value in kept[p].content.items():
                    if _is_cut(value):
                        buffers.write(p, name, 0, value)

    def _of_group(self, index: int) -> Content:
        """Returns the master, and its states in the basic optimizer, in that optimizer's order."""
        master = FlatBuffers(self._optimizer).masters[index]
        return {MASTER: master.detach(), **self._optimizer.optimizer.state.get(master, {})}


def _found(parameters: Parameters, groups: Sequence[Parameters]) -> list[int | None]:
    index_of = {p: index for index, group in enumerate(groups) for p in group}
    return [index_of.get(p) for p in parameters]


def _is_cut(value: Any) -> bool:
    """Returns whether each parameter has a part of the value. A step count belongs to the whole group."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _settings(optimizer: Any) -> list[dict[str, str]]:
    return [{key: repr(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


class OtherOptimizer(NoOptimizer):
    """An optimizer whose states cannot be found by parameter."""

    def __init__(self, optimizer: Any) -> None:
        self._name = type(optimizer).__name__

    def why_not(self) -> str:
        """See NoOptimizer."""
        return f"it is a {self._name}"


def of_engine(engine: Any) -> NoOptimizer:
    """Returns the optimizer of this engine, as one of the classes above."""
    optimizer = engine.optimizer
    if optimizer is None:
        return NoOptimizer()
    if type(optimizer) in (BF16_Optimizer, DeepSpeedZeroOptimizer):
        return FlatOptimizer(engine, optimizer) if optimizer.optimizer is not None else OtherOptimizer(optimizer)
    return PlainOptimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else OtherOptimizer(optimizer)
