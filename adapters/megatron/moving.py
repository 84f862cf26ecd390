# SPDX-License-Identifier: Apache-2.0
"""Moves experts of Megatron's layers between ranks (adapters/common/migration), and writes checkpoints as if no expert
had moved."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from sluice.adapters.common.migration import away, moving
from sluice.adapters.common.migration.moving import Belongings, Expert, of_modules, of_stacks
from sluice.adapters.common.optimizer_state import Gradient, Keeper, Masters, State, Together
from sluice.errors import InvalidState, Unsupported
from torch import nn

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject


def move(layer: Any, expert_rank: Sequence[int], expert_slot: Sequence[int], optimizer: Any = None) -> None:
    """Calls migration.moving.move. Collective over the expert-parallel group, and over the ranks that hold replicas.

    Unsupported under the distributed optimizer, which keeps parts of masters and moments on other ranks.
    """
    replicas = getattr(layer.experts, "dp_group", None)
    replicas = None if replicas is None or replicas.size() == 1 else replicas
    moving.move(layer._sluice, _belongings(layer, optimizer), expert_rank, expert_slot, replicas)


def _belongings(layer: Any, optimizer: Any) -> Belongings:
    state = layer._sluice
    keeper = keeper_of(state.moving_name, list(layer.experts.parameters()), optimizer)
    away.needs_optimizer(state, optimizer)
    if optimizer is not None:
        _guard(optimizer, state)
    return Belongings(_slots(layer.experts), keeper, layer.ep_group if len(state.moving_ranks) > 1 else None)


def _slots(experts: Any) -> list[Expert]:
    modules = getattr(experts, "local_experts", None)
    if modules is not None:
        return of_modules(list(modules))
    return of_stacks({"weight1": experts.weight1, "weight2": experts.weight2}, experts.num_local_experts)


# ---- checkpoints ----


def sharded_state_dict(experts: Any, mine: Sequence[int], num_experts: int, prefix: str, *args: Any) -> dict[str, Any]:
    """Returns the sharded state dict of the host's container as if its slots held the experts `mine`, instead of those
    of its rank. For this each expert is alone in a container whose rank is the expert's number."""
    if not hasattr(experts, "local_experts"):
        raise InvalidState(
            f"the experts of a {type(experts).__name__} have moved: write its checkpoints with them at home "
            "(sluice.experts_at_home)"
        )
    found: dict[str, Any] = {}
    for slot, expert in enumerate(mine):
        alone = _Alone(experts, experts.local_experts[slot], expert, num_experts)
        own = f"{prefix}local_experts.0."
        for name, entry in type(experts).sharded_state_dict(alone, prefix, *args).items():
            found[name.replace(own, f"{prefix}local_experts.{slot}.", 1)] = entry
    return found


class _Alone:
    """Imitates the host's container in sharded_state_dict, with one expert, and with one rank for each expert."""

    def __init__(self, experts: Any, expert: Any, number: int, count: int) -> None:
        self._experts = experts
        self.local_experts, self.num_local_experts = [expert], 1
        self.ep_group = _Numbered(number, count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class _Numbered:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


# ---- state dicts that have experts by their own numbers ----

MARK = "sluice_placement"  # a key of state dicts that were made while experts were away; it is never in a file


def marked(found: dict[str, Any], prefix: str, placement: Any) -> dict[str, Any]:
    """Returns a sharded state dict with the placement for which it is valid. A dict that it loads has the same mark."""
    return {**found, f"{prefix}{MARK}": LocalNonpersistentObject(placement)}


def _guard(optimizer: Any, state: Any) -> None:
    """Refuses plain state dicts of the optimizer while experts are away. Sharded ones, and the states that they load,
    follow the model's."""
    for each in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        away.guard_optimizer(getattr(each, "optimizer", each), state)
    if optimizer in _known:
        _known[optimizer].add(state)
        return
    layers = _known[optimizer] = WeakSet([state])
    if not hasattr(optimizer, "sharded_state_dict"):
        return
    shard, load = optimizer.sharded_state_dict, optimizer.load_state_dict

    def places() -> Any:
        return sorted((layer.layer_id, layer.placement) for layer in layers if moving.has_moved(layer))

    @functools.wraps(shard)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        with away.knowing():
            found = shard(*args, **kwargs)
        return marked(found, "", places()) if places() else found

    @functools.wraps(load)
    def load_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        mark = state_dict.get(MARK) if isinstance(state_dict, dict) else None
        if mark is None:
            return load(state_dict, *args, **kwargs)
        if mark != places():
            raise InvalidState(OTHER_PLACES)
        with away.knowing():
            return load({k: value for k, value in state_dict.items() if k != MARK}, *args, **kwargs)

    optimizer.sharded_state_dict, optimizer.load_state_dict = sharded_state_dict, load_state_dict


OTHER_PLACES = (
    "a state dict was made by sharded_state_dict under another placement of experts: make it again, and load the "
    "checkpoint with it"
)
_known: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()


def keeper_of(name: str, parameters: Sequence[nn.Parameter], optimizer: Any) -> Keeper:
    """Returns the keeper of an optimizer's states. Unsupported if it is not known where the optimizer keeps them.

    Gradients are in `main_grad`, a view of a buffer of DDP's, and in `grad` if there is no DDP, or if the optimizer's
    step has put them there.
    """
    gradients = Gradient(), Gradient("main_grad")
    if optimizer is None:
        return Together(*gradients)
    every = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    bases = [base for each in every if _is_plain(base := getattr(each, "optimizer", each))]
    masters = Masters([pair for each in every for pair in _pairs(each)])
    owners = {id(kept): base.state for base in bases for group in base.param_groups for kept in group["params"]}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not all(id(masters.of(parameter)) in owners for parameter in trained):
        kinds = ", ".join(sorted({type(each).__name__ for each in every}))
        raise Unsupported(
            f"{name}: experts cannot move under {kinds}, whose parts of parameters Sluice cannot find: disable "
            "use_distributed_optimizer and CPU offloading, or pass the optimizer that trains the experts"
        )

    def kept_of(parameter: nn.Parameter) -> Any:
        tensor = masters.of(parameter)
        return owners.get(id(tensor), {}), tensor

    return Together(*gradients, masters, State(kept_of))


def _is_plain(base: Any) -> bool:
    """Returns whether its `state` is by the tensors of param_groups; hybrid optimizers have copies elsewhere."""
    return isinstance(base, torch.optim.Optimizer) and not hasattr(base, "sub_optimizers")


def _pairs(optimizer: Any) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Returns 16-bit parameters with their masters."""
    lists = zip(getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()))
    return [pair for own, copies in lists for pair in zip(own, copies)]
