# SPDX-License-Identifier: Apache-2.0
"""Moves experts of transformers' modules between ranks (adapters/common/migration), as rows of stacked tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sluice.adapters.common.migration import away, moving, placement, rounds
from sluice.adapters.common.migration.moving import Belongings, of_stacks
from sluice.adapters.common.optimizer_state import Gradient, Keeper, plain
from sluice.adapters.transformers import contract as contracts
from sluice.adapters.transformers.packed_stack import is_packed
from sluice.errors import Unsupported


def move(state: Any, module: Any, expert_rank: Sequence[int], expert_slot: Sequence[int], optimizer: Any) -> None:
    """Calls common.migration.moving.move. Collective over the expert-parallel group.

    state  the adapter's state of `module`, whose contract it has read
    """
    belongings = _belongings(state, module, optimizer)
    rounds.cancel(optimizer, "experts are moved at once")
    try:
        moving.move(state, belongings, expert_rank, expert_slot)
    finally:
        away.guard_module(module, state)


def start(
    state: Any,
    module: Any,
    expert_rank: Sequence[int],
    expert_slot: Sequence[int],
    optimizer: torch.optim.Optimizer,
    bytes_per_second: int | None,
) -> rounds.ExpertMigration:
    """Starts a move during the optimizer's next steps. Collective as `move`."""
    target = placement.checked(state.moving_name, state.home, expert_rank, expert_slot)
    _belongings(state, module, optimizer)  # refuses what cannot move
    migration = rounds.ExpertMigration(
        state,
        lambda: _belongings(state, module, optimizer),
        target,
        lambda: away.guard_module(module, state),
    )
    rounds.migrations_of(optimizer, state.moving_ranks, bytes_per_second).add(migration)
    return migration


def _belongings(state: Any, module: Any, optimizer: Any) -> Belongings:
    name = state.moving_name
    if state.torch_group is None or len(state.moving_ranks) == 1:
        raise Unsupported(
            f'{name}: its experts are not shared out by ep_implementation="sluice", so none of them can change ranks'
        )
    from sluice.adapters.transformers import own_factors  # needs DTensors, whose import takes long

    count = state.num_experts // len(state.moving_ranks)
    stacks = _stacks(name, module, state.contract.names, count)
    a, b = own_factors.of(module)
    keeper = _keeper_of(name, [*stacks.values(), *a.values(), *b.values()], optimizer)
    away.needs_optimizer(state, optimizer)
    if optimizer is not None:
        away.guard_optimizer(optimizer, state)
    return Belongings(of_stacks({**stacks, **a}, count, interleaved=b), keeper, state.torch_group)


def _stacks(name: str, module: Any, names: Sequence[str], count: int) -> dict[str, Any]:
    """Returns the module's stacked parameters: DTensors that have whole experts on this rank."""
    strangers = contracts.others(module, tuple(names))
    if strangers:
        raise Unsupported(f"{name}: it is unknown which expert {next(iter(strangers))} belongs to: experts stay")
    stacks = {}
    for each in names:
        parameter = getattr(module, each)
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.shape[0] != count or not local.is_contiguous():
            raise Unsupported(
                f"{name}: of {each} this rank holds {list(local.shape)} with strides {list(local.stride())}, and not "
                f"{count} whole experts: share each expert out to one rank (ep_size as many as there are ranks)"
            )
        if is_packed(local):  # frozen: no optimizer has them, and codes and scales are sent as they are
            stacks.update({f"{each} codes": local.codes, f"{each} scales": local.scales})
        else:
            stacks[each] = parameter
    return stacks


def _keeper_of(name: str, parameters: Sequence[Any], optimizer: Any) -> Keeper:
    if optimizer is None:
        return Gradient()
    held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    if isinstance(optimizer, torch.optim.Optimizer) and all(id(p) in held for p in parameters if p.requires_grad):
        return plain(optimizer)
    raise Unsupported(
        f"{name}: experts cannot move under this {type(optimizer).__name__}, which does not have them as parameters: "
        "give the optimizer of torch that trains them"
    )
