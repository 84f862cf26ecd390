"""Moves experts of a layer between ranks with all that belongs to them: parameters, gradients, and what the optimizer
keeps of each. The host's modules and tensors stay where they are; what is in them goes.

A placement is agreed on first, so that nothing has moved when it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from sluice.adapters.host import placement as placement_module
from sluice.adapters.host.kept import Content, Keeper, Piece, bytes_of, of_prefix
from sluice.adapters.host.placement import Placement
from sluice.errors import InvalidState
from torch import nn


class Expert(NamedTuple):
    """What the host has in one slot."""

    pieces: Mapping[str, Piece]
    buffers: Mapping[str, torch.Tensor]


class MovingLayer(Protocol):
    """What an adapter keeps of a layer whose experts may move."""

    home: Placement  # where the host believes them to be
    placement: Placement

    @property
    def moving_name(self) -> str:
        """For errors."""
        ...

    @property
    def moving_ranks(self) -> Sequence[int]:
        """The global ranks of its group."""
        ...

    def replace_experts(self, placement: Placement) -> None:
        """Tells the engine; collective, and all is as before after an error."""
        ...


class Belongings(NamedTuple):
    """What moves with the experts of this rank, and how."""

    slots: Sequence[Expert]
    keeper: Keeper
    group: Any  # of torch, over the layer's ranks; None: this rank alone


def of_modules(experts: Sequence[nn.Module]) -> list[Expert]:
    """Each a module of its own."""
    return [
        Expert({name: Piece(p) for name, p in expert.named_parameters()}, dict(expert.named_buffers()))
        for expert in experts
    ]


def of_stacks(stacks: Mapping[str, nn.Parameter], count: int) -> list[Expert]:
    """In parameters that hold them one behind the other."""
    return [Expert({name: Piece(p, slot, count) for name, p in stacks.items()}, {}) for slot in range(count)]


def move(
    layer: MovingLayer,
    belongings: Belongings,
    expert_rank: Sequence[int],
    expert_slot: Sequence[int],
    everywhere: Callable[[bool], bool] | None = None,
) -> None:
    """Expert e goes to slot expert_slot[e] of rank expert_rank[e] of the layer's group. Between steps.

    Collective over the group, and over those that hold replicas of its experts: all ranks give the same lists.
    InvalidState while a forward waits for its backward, or while something is in the keeper's way. everywhere: from
    whether this group can move to whether all groups can that must move alike.
    """
    slots, keeper, group = belongings
    ranks, old = layer.moving_ranks, layer.placement
    new = placement_module.checked(layer.moving_name, layer.home, expert_rank, expert_slot)
    own = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
    parameters = [piece.parameter for expert in slots for piece in expert.pieces.values()]
    obstacle = keeper.obstacle(list({id(p): p for p in parameters}.values()))
    _replace(layer, new, _obstacles(layer.moving_name, obstacle, group, ranks), everywhere)
    leaving = [e for e in old.experts_of(own) if old.place(e) != new.place(e)]
    contents = {e: content_of(slots[old.expert_slot[e]], keeper) for e in leaving}
    arrived = _exchange(contents, old, new, own, group, ranks)
    for e, content in arrived.items():
        fill(slots[new.expert_slot[e]], keeper, content)


def bytes_of_expert(belongings: Belongings) -> int:
    """Of all that moves with one expert, by the first of this rank."""
    expert, keeper = belongings.slots[0], belongings.keeper
    values = [*(piece.of(piece.parameter) for piece in expert.pieces.values()), *expert.buffers.values()]
    return sum(map(bytes_of, values)) + sum(map(keeper.bytes_of, expert.pieces.values()))


def has_moved(layer: MovingLayer) -> bool:
    """Whether an expert lies elsewhere than the host believes."""
    return bool(layer.placement != layer.home)


@contextmanager
def at_home(
    layers: Sequence[tuple[MovingLayer, Callable[[Placement], None]]],
    and_back: bool,
) -> Iterator[None]:
    """Where the host numbers experts by their place: they lie there, and afterwards where they did. Collective.

    layers  each with what moves its experts
    """
    moved = [(layer, move_to, layer.placement) for layer, move_to in layers if has_moved(layer)]
    for layer, move_to, _ in moved:
        move_to(layer.home)
    try:
        yield
    finally:
        for _, move_to, placement in moved if and_back else ():
            move_to(placement)


def content_of(expert: Expert, keeper: Keeper) -> Content:
    """Copies of all that belongs to an expert."""
    content: Content = {}
    for name, piece in expert.pieces.items():
        content[f"{name} value"] = piece.of(piece.parameter).detach().clone()
        content.update((f"{name} {key}", value) for key, value in keeper.read(piece).items())
    for name, buffer in expert.buffers.items():
        content[f"{name} buffer"] = buffer.detach().clone()
    return content


def still_of(expert: Expert, keeper: Keeper) -> Content:
    """Copies of what is alike from one update to the next."""
    content: Content = {}
    for name, piece in expert.pieces.items():
        content[f"{name} value"] = piece.of(piece.parameter).detach().clone()
        content.update((f"{name} {key}", value) for key, value in keeper.still(piece).items())
    return content


def late_of(expert: Expert, keeper: Keeper) -> Content:
    """The rest in front of an update: gradients, as far as there are any, and buffers. Perhaps the host's own."""
    content: Content = {}
    for name, piece in expert.pieces.items():
        content.update((f"{name} {key}", value) for key, value in keeper.late(piece).items())
    return {**content, **{f"{name} buffer": buffer.detach() for name, buffer in expert.buffers.items()}}


def late_forms(expert: Expert, keeper: Keeper) -> dict[str, tuple[int, torch.dtype]]:
    """Of all that `late_of` may give: how many numbers, and which."""
    forms = {
        f"{name} {key}": (piece.of(piece.parameter).numel(), dtype)
        for name, piece in expert.pieces.items()
        for key, dtype in keeper.late_forms(piece).items()
    }
    return {**forms, **{f"{name} buffer": (b.numel(), b.dtype) for name, b in expert.buffers.items()}}


def fill(expert: Expert, keeper: Keeper, content: Content) -> None:
    """Into the host's own tensors, whose addresses others know."""
    with torch.no_grad():
        for name, piece in expert.pieces.items():
            value = piece.of(piece.parameter)
            value.copy_(content[f"{name} value"].view(value.shape))
            keeper.write(piece, of_prefix(content, f"{name} "))
        for name, buffer in expert.buffers.items():
            buffer.copy_(content[f"{name} buffer"].view(buffer.shape))


def _obstacles(name: str, own: str, group: Any, ranks: Sequence[int]) -> str:
    """What is in the way on any rank, named."""
    said = [own]
    if group is not None:
        said = [""] * len(ranks)
        dist.all_gather_object(said, own, group=group)
    return next((f"{name}, rank {rank}: {one}" for rank, one in zip(ranks, said) if one), "")


def _replace(layer: MovingLayer, new: Placement, obstacle: str, everywhere: Callable[[bool], bool] | None) -> None:
    old = layer.placement
    try:
        if obstacle:
            raise InvalidState(obstacle)
        layer.replace_experts(new)
    except Exception:  # on all ranks of this group
        if everywhere is not None:
            everywhere(False)
        raise
    if everywhere is not None and not everywhere(True):
        layer.replace_experts(old)
        raise InvalidState("another group of ranks with the same experts cannot move them now")


def _exchange(
    contents: dict[int, Content], old: Placement, new: Placement, own: int, group: Any, ranks: Sequence[int]
) -> dict[int, Content]:
    """What arrives at this rank, by expert. Tensors travel one by one, in an order that both ends know."""
    moving = [e for e in range(len(old.expert_rank)) if old.place(e) != new.place(e)]
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
