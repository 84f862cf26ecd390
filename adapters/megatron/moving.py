"""Moves experts of Megatron's layers between ranks (adapters/host/moving.py), and writes checkpoints as if none had
moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.adapters.host import moving
from sluice.adapters.host.moving import Belongings, Expert, of_modules, of_stacks
from sluice.adapters.megatron.kept import keeper_of
from sluice.errors import InvalidState


def move(layer: Any, expert_rank: Sequence[int], expert_slot: Sequence[int], optimizer: Any = None) -> None:
    """See host.moving.move. Collective over the expert-parallel group, and over the ranks that hold replicas.

    Unsupported under the distributed optimizer, which keeps parts of masters and moments on other ranks.
    """
    replicas = getattr(layer.experts, "dp_group", None)
    is_alone = replicas is None or replicas.size() == 1
    everywhere = moving.unanimous(None if is_alone else replicas, next(layer.experts.parameters()).device)
    moving.move(layer._sluice, _belongings(layer, optimizer), expert_rank, expert_slot, everywhere)


def _belongings(layer: Any, optimizer: Any) -> Belongings:
    state = layer._sluice
    keeper = keeper_of(state.moving_name, list(layer.experts.parameters()), optimizer)
    return Belongings(_slots(layer.experts), keeper, layer.ep_group if len(state.moving_ranks) > 1 else None)


def _slots(experts: Any) -> list[Expert]:
    modules = getattr(experts, "local_experts", None)
    if modules is not None:
        return of_modules(list(modules))
    return of_stacks({"weight1": experts.weight1, "weight2": experts.weight2}, experts.num_local_experts)


# ---- checkpoints ----


def sharded_state_dict(experts: Any, mine: Sequence[int], num_experts: int, prefix: str, *args: Any) -> dict[str, Any]:
    """What the host's container of experts would give if its slots held these experts, `mine`, and not those that
    follow from its rank: each expert stands alone in a container whose rank is the expert's number."""
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
    """The host's container, as its sharded_state_dict sees it: one expert, of as many ranks as there are experts."""

    def __init__(self, experts: Any, expert: Any, number: int, count: int) -> None:
        self._experts = experts
        self.local_experts, self.num_local_experts = [expert], 1
        self.ep_group = _Numbered(number, count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class _Numbered:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


def refuse_plain(layer: Any, *_: Any) -> None:
    """Before a `state_dict` of a layer: its names are slots, in which others would look for other experts."""
    if moving.has_moved(layer._sluice):
        raise InvalidState(
            "experts of this MoE layer have moved, and a state_dict names them by their slots: write a distributed "
            "checkpoint (sharded_state_dict), or do it within sluice.experts_at_home(model, optimizer)"
        )
