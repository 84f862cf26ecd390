"""Moves experts of a swapped layer between ranks with all that belongs to them: parameters, gradients, and what the
optimizer keeps of each. The host's modules and tensors stay where they are; what is in them goes.

A placement is agreed on first, so that nothing has moved when it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.deepspeed import placement as placement_module
from sluice.adapters.deepspeed.expert_state import Content, Keeper, keeper_of
from sluice.adapters.deepspeed.placement import Placement
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.errors import InvalidState
from torch import nn


def move(
    layer: Any,
    expert_rank: Sequence[int],
    expert_slot: Sequence[int],
    optimizer: Any = None,
    everywhere: Callable[[bool], bool] | None = None,
) -> None:
    """Expert e goes to slot expert_slot[e] of rank expert_rank[e] of the layer's group. Between steps.

    Collective over the group, and over those that hold replicas of its experts: all ranks give the same lists.
    UnsupportedError where nobody knows where the optimizer keeps what belongs to parameters; InvalidState while a
    forward waits for its backward, or while ZeRO holds gradients. everywhere: from whether this group can move to
    whether all groups can that must move alike.
    """
    state = layer._sluice
    name, ranks = state.finding.name, state.finding.ranks
    if not hasattr(layer.experts, "deepspeed_experts"):
        raise UnsupportedError(f"MoE layer '{name}': experts of AutoEP layers stay where DeepSpeed has put them")
    new = placement_module.checked(name, state.home, expert_rank, expert_slot)
    experts = list(layer.experts.deepspeed_experts)
    keeper = keeper_of(name, experts, optimizer)
    group = layer.ep_group if len(ranks) > 1 else None
    obstacle = keeper.obstacle(list(layer.experts.parameters()))
    old, own = state.placement, ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
    _replace(state, new, _obstacles(name, obstacle, group, ranks), everywhere)
    leaving = [e for e in old.experts_of(own) if _place(old, e) != _place(new, e)]
    contents = {e: _content_of(experts[old.expert_slot[e]], keeper) for e in leaving}
    arrived = _exchange(contents, old, new, own, group, ranks)
    for e, content in arrived.items():
        _fill(experts[new.expert_slot[e]], keeper, content)


def bytes_of_expert(layer: Any, optimizer: Any = None) -> int:
    """Of all that moves with one expert, by the first of this rank. UnsupportedError as `move`."""
    experts = list(layer.experts.deepspeed_experts)
    keeper = keeper_of(layer._sluice.finding.name, experts, optimizer)
    own = [*experts[0].parameters(), *experts[0].buffers()]
    return sum(t.numel() * t.element_size() for t in own) + sum(map(keeper.bytes_of, experts[0].parameters()))


def has_moved(layer: Any) -> bool:
    """Whether an expert lies elsewhere than the host believes."""
    return bool(layer._sluice.placement != layer._sluice.home)


@contextmanager
def at_home(layers: Sequence[Any], optimizer: Any, and_back: bool) -> Iterator[None]:
    """Where the host numbers experts by their place: they lie there, and afterwards where they did. Collective."""
    moved = [(layer, layer._sluice.placement) for layer in layers if has_moved(layer)]
    for layer, _ in moved:
        move(layer, *layer._sluice.home, optimizer)
    try:
        yield
    finally:
        for layer, placement in moved if and_back else ():
            move(layer, *placement, optimizer)


def _obstacles(name: str, own: str, group: Any, ranks: Sequence[int]) -> str:
    """What is in the way on any rank, named."""
    said = [own]
    if group is not None:
        said = [""] * len(ranks)
        dist.all_gather_object(said, own, group=group)
    return next((f"MoE layer '{name}', rank {rank}: {one}" for rank, one in zip(ranks, said) if one), "")


def _replace(state: Any, new: Placement, obstacle: str, everywhere: Callable[[bool], bool] | None) -> None:
    old = state.placement
    try:
        if obstacle:
            raise InvalidState(obstacle)
        state.replace_experts(new)
    except Exception:  # on all ranks of this group
        if everywhere is not None:
            everywhere(False)
        raise
    if everywhere is not None and not everywhere(True):
        state.replace_experts(old)
        raise InvalidState("another group of ranks with the same experts cannot move them now")


def _place(placement: Placement, expert: int) -> tuple[int, int]:
    return placement.expert_rank[expert], placement.expert_slot[expert]


def _content_of(expert: nn.Module, keeper: Keeper) -> Content:
    """Copies of all that belongs to an expert."""
    content: Content = {}
    for name, parameter in expert.named_parameters():
        content[f"{name} value"] = parameter.detach().clone()
        content.update((f"{name} {key}", value) for key, value in keeper.read(parameter).items())
    for name, buffer in expert.named_buffers():
        content[f"{name} buffer"] = buffer.detach().clone()
    return content


def _exchange(
    contents: dict[int, Content], old: Placement, new: Placement, own: int, group: Any, ranks: Sequence[int]
) -> dict[int, Content]:
    """What arrives at this rank, by expert. Tensors travel one by one, in an order that both ends know."""
    moving = [e for e in range(len(old.expert_rank)) if _place(old, e) != _place(new, e)]
    arrived = {e: contents[e] for e in moving if old.expert_rank[e] == own == new.expert_rank[e]}
    if group is None:
        return arrived
    described: list[Any] = [None] * len(ranks)
    dist.all_gather_object(described, {e: _describe(contents[e]) for e in contents}, group=group)
    work: list[Any] = []
    for e in moving:
        source, target = old.expert_rank[e], new.expert_rank[e]
        if source == target:
            continue
        if source == own:
            tensors = [value.contiguous() for value in contents[e].values() if isinstance(value, torch.Tensor)]
            work += [(dist.isend(tensor, ranks[target], group=group), tensor) for tensor in tensors]
        elif target == own:
            arrived[e] = {name: _receive(what, work, ranks[source], group) for name, what in described[source][e]}
    for request, _ in work:
        request.wait()
    return arrived


def _describe(content: Content) -> list[tuple[str, Any]]:
    """Names with shape and dtype of tensors, and other values as they are."""
    return [
        (name, ("tensor", tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else value)
        for name, value in content.items()
    ]


def _receive(what: Any, work: list[Any], source: int, group: Any) -> Any:
    if not (isinstance(what, tuple) and what and what[0] == "tensor"):
        return what
    tensor = torch.empty(what[1], dtype=what[2], device=what[3])
    work.append((dist.irecv(tensor, source, group=group), tensor))
    return tensor


def _fill(expert: nn.Module, keeper: Keeper, content: Content) -> None:
    """Into the host's own tensors, whose addresses others know."""
    with torch.no_grad():
        for name, parameter in expert.named_parameters():
            parameter.copy_(content[f"{name} value"])
            prefix = f"{name} "
            keeper.write(parameter, {key[len(prefix) :]: v for key, v in content.items() if key.startswith(prefix)})
        for name, buffer in expert.named_buffers():
            buffer.copy_(content[f"{name} buffer"])
