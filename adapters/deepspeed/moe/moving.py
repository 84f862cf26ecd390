# SPDX-License-Identifier: Apache-2.0
"""Moves experts of swapped layers (adapters/common/migration/moving.py), with their states under DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from sluice.adapters.common.migration import away, moving
from sluice.adapters.common.migration.moving import Belongings
from sluice.adapters.deepspeed.optimizer.expert_state import keeper_of

from deepspeed.utils import groups


def belongings_of(layer: Any, optimizer: Any = None) -> Belongings:
    """Returns the contents that move with experts. UnsupportedError if the optimizer's states cannot be found."""
    state = layer._sluice
    slots = state.slots(layer.experts)
    keeper = keeper_of(state.finding.name, list(layer.experts.parameters()), optimizer)
    if optimizer is not None:
        away.guard_optimizer(optimizer, state)
    return Belongings(slots, keeper, layer.ep_group if len(state.finding.ranks) > 1 else None)


def move(
    layer: Any,
    expert_rank: Sequence[int],
    expert_slot: Sequence[int],
    optimizer: Any = None,
) -> None:
    """See migration.moving.move. Collective over the layer's group, and over groups with replicas of its experts."""
    moving.move(layer._sluice, belongings_of(layer, optimizer), expert_rank, expert_slot, replicas_of(layer))


def replicas_of(layer: Any) -> Any:
    """Returns the group of ranks that have the same experts; None: this rank alone."""
    if not dist.is_initialized():
        return None
    group = groups._get_expert_data_parallel_group(layer.ep_group_name)
    return group if dist.get_world_size(group) > 1 else None


def bytes_of_expert(layer: Any, optimizer: Any = None) -> int:
    """Returns the bytes that move with this rank's first expert. UnsupportedError as `belongings_of`."""
    return moving.bytes_of_expert(belongings_of(layer, optimizer))


def has_moved(layer: Any) -> bool:
    """Returns whether an expert is in another slot than the host assumes."""
    return moving.has_moved(layer._sluice)


@contextmanager
def at_home(layers: Sequence[Any], optimizer: Any, and_back: bool) -> Iterator[None]:
    """See migration.moving.at_home."""

    def to(layer: Any) -> Callable[[Any], None]:
        return lambda placement: move(layer, *placement, optimizer)

    with moving.at_home([(layer._sluice, to(layer)) for layer in layers], and_back):
        yield
