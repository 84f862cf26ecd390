# SPDX-License-Identifier: Apache-2.0
"""What a pipeline's optimizer keeps of each parameter, taken out, and put into the same optimizer over others.

The object stays: whoever holds it, its groups or its schedulers, goes on with it. There are two kinds. Plain optimizers
of torch keep a state for each parameter. DeepSpeed's own keep masters and moments of a group in one flat buffer, cut
over the replicas, so that one parameter less shifts all others: these are built anew, into the object that is there.
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
    """Of one parameter: its group, and what is kept of it by name."""

    group: int
    content: Content


Parameters = Sequence[nn.Parameter]


class NoOptimizer:
    """Of an engine that trains nothing."""

    needs_all_groups = False  # every stage must have parameters in every group
    counts_copies = True  # and those that it has a copy of, tied to another stage's, will do
    name = "none"

    def why_not(self) -> str:
        """Why nothing can be taken out; "": it can."""
        return ""

    def settings(self) -> list[dict[str, str]]:
        """By group what has to be alike on both ends of a move."""
        return []

    def bytes_of(self, parameters: Parameters) -> float:
        """What they take on their stage with all that the optimizer adds: gradients, and two moments."""
        return 4.0 * sum(p.numel() * p.element_size() for p in parameters)

    def groups_of(self, parameters: Parameters) -> list[int | None]:
        """None: the optimizer does not have it."""
        return [None for _ in parameters]

    def take(self, parameters: Parameters) -> dict[nn.Parameter, Kept]:
        """Of those that the optimizer has."""
        return {}

    def put(self, kept: Mapping[nn.Parameter, Kept]) -> None:
        """From now on it has these and no others, in this order."""


class PlainOptimizer:
    """A torch.optim.Optimizer over the parameters themselves."""

    needs_all_groups = False
    counts_copies = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.name = type(optimizer).__name__

    def why_not(self) -> str:
        """See NoOptimizer."""
        return ""

    def settings(self) -> list[dict[str, str]]:
        """See NoOptimizer."""
        return _settings(self._optimizer)

    def bytes_of(self, parameters: Parameters) -> float:
        """See NoOptimizer."""
        return NoOptimizer().bytes_of(parameters)

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
            # In the order in which a first step puts them there, which is that of the host's files.
            states = {p: kept[p].content for p in group["params"] if kept[p].content}
            state.update(states)
            if isinstance(self._optimizer, FusedAdam):  # it counts the steps of a group in the last one alone
                for one in list(states.values())[:-1]:
                    one["step"] = 0

    def _state_of(self, parameter: nn.Parameter) -> Content:
        state = dict(self._optimizer.state.get(parameter, {}))
        if state and isinstance(self._optimizer, FusedAdam):
            state["step"] = steps_of(self._optimizer, parameter)  # any may become the last of its group
        return state


class _Flat(NamedTuple):
    """Where one of DeepSpeed's optimizers keeps a group, and what builds one like it."""

    listed: str  # parameters in the order of the user's
    build: str  # method of the engine
    counts_copies: bool  # whether its norm of gradients can be over copies alone


_FLAT = {
    BF16_Optimizer: _Flat(
        "bf16_groups",
        "_configure_bf16_optimizer",
        counts_copies=False,
    ),
    DeepSpeedZeroOptimizer: _Flat(
        "bit16_groups",
        "_configure_zero_optimizer",
        counts_copies=True,
    ),
}


class FlatOptimizer:
    """BF16_Optimizer, or ZeRO's of stage 1, whose groups lie in flat buffers."""

    needs_all_groups = True

    def __init__(self, engine: Any, optimizer: Any) -> None:
        self._engine, self._optimizer = engine, optimizer
        self.name = type(optimizer).__name__
        self._form = _FLAT[type(optimizer)]
        self.counts_copies = self._form.counts_copies

    def why_not(self) -> str:
        """See NoOptimizer."""
        optimizer = self._optimizer
        if optimizer.has_moe_layers:
            return "its groups hold experts"
        if getattr(optimizer, "cpu_offload", False):
            return "it is offloaded to host memory"
        if getattr(optimizer, "parameter_alignment", False):
            return '"zero_optimization": "parameter_alignment" pads its flat buffers'
        return ""

    def settings(self) -> list[dict[str, str]]:
        """See NoOptimizer. A step count is one for a whole group."""
        found = _settings(self._optimizer.optimizer)
        for index, group in enumerate(found):
            group.update({name: repr(value) for name, value in self._of_group(index).items() if not _is_cut(value)})
        return found

    def bytes_of(self, parameters: Parameters) -> float:
        """See NoOptimizer. Masters, their gradients and moments are in f32; that replicas share them does not count."""
        return float(sum(p.numel() * (2 * p.element_size() + 16) for p in parameters))

    def groups_of(self, parameters: Parameters) -> list[int | None]:
        """See NoOptimizer."""
        return _found(parameters, getattr(self._optimizer, self._form.listed))

    def take(self, parameters: Parameters) -> dict[nn.Parameter, Kept]:
        """See NoOptimizer. Collective over the replicas of the stage: each has a part of every buffer."""
        wanted, kept, buffers = set(parameters), {}, FlatBuffers(self._optimizer)
        for index, laid in enumerate(buffers.groups):
            of_group = self._of_group(index)
            for p in filter(wanted.__contains__, laid):
                kept[p] = Kept(
                    index,
                    {
                        name: buffers.read(p, name, 0, p.numel()).to(v.dtype) if _is_cut(v) else v
                        for name, v in of_group.items()
                    },
                )
        return kept

    def put(self, kept: Mapping[nn.Parameter, Kept]) -> None:
        """See NoOptimizer. Collective over the replicas of the stage."""
        old, basic = self._optimizer, self._optimizer.optimizer
        old.destroy()
        basic.state.clear()
        for index, group in enumerate(basic.param_groups):
            group["params"] = [p for p, (where, _) in kept.items() if where == index]
        built = getattr(self._engine, self._form.build)(basic)
        if getattr(old, "ready_for_gradients", False):  # in the middle of a batch: its backwards have made the buckets
            built.setup_buckets()
        if hasattr(old, "loss_scaler"):  # whose scale is in the gradients that are there
            built.loss_scaler = old.loss_scaler
        for name, value in vars(old).items():
            vars(built).setdefault(name, value)  # what others have set on the object
        # Both are one from now on: hooks of the new one know it as themselves, everyone else holds the old one.
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
        """The master, and what the optimizer underneath keeps of it, in its order."""
        master = FlatBuffers(self._optimizer).masters[index]
        return {MASTER: master.detach(), **self._optimizer.optimizer.state.get(master, {})}


def _found(parameters: Parameters, groups: Sequence[Parameters]) -> list[int | None]:
    index_of = {p: index for index, group in enumerate(groups) for p in group}
    return [index_of.get(p) for p in parameters]


def _is_cut(value: Any) -> bool:
    """Whether each parameter has a piece of it: not a step count, which is one for a group."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _settings(optimizer: Any) -> list[dict[str, str]]:
    return [{key: repr(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


class OtherOptimizer(NoOptimizer):
    """One that keeps what belongs to a parameter where nobody else knows it."""

    def __init__(self, optimizer: Any) -> None:
        self.name = type(optimizer).__name__

    def why_not(self) -> str:
        """See NoOptimizer."""
        return f"it is a {self.name}"


def of_engine(engine: Any) -> Any:
    """The optimizer that this engine steps, as one of these."""
    optimizer = engine.optimizer
    if optimizer is None:
        return NoOptimizer()
    if type(optimizer) in _FLAT:
        return FlatOptimizer(engine, optimizer) if optimizer.optimizer is not None else OtherOptimizer(optimizer)
    return PlainOptimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else OtherOptimizer(optimizer)
