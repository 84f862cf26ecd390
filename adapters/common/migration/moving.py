"""Moves experts of a layer between ranks with all that belongs to them: parameters, gradients, and what the optimizer
keeps of each. The host's modules and tensors stay where they are; what is in them goes.

Copy, agree, exchange, agree, fill, agree, and then the placement is in force. What fails on one rank fails on all, and
everything lies where it lay. Where that cannot be, the layer is torn: every later call of it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from sluice.adapters.common.migration import placement as placement_module
from sluice.adapters.common.migration.placement import Placement
from sluice.adapters.common.optimizer_state import Content, Keeper, Piece, bytes_of, of_prefix
from sluice.adapters.common.vote import Vote
from sluice.errors import InvalidState, Unsupported
from torch import nn


class Expert(NamedTuple):
    """What the host has in one slot."""

    pieces: Mapping[str, Piece]
    buffers: Mapping[str, torch.Tensor]


class MovingLayer(Protocol):
    """What an adapter keeps of a layer whose experts may move."""

    home: Placement  # where the host believes them to be
    placement: Placement
    torn: str  # why ranks may differ about where experts lie; "": they do not

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


def of_stacks(
    stacks: Mapping[str, nn.Parameter], count: int, interleaved: Mapping[str, nn.Parameter] | None = None
) -> list[Expert]:
    """In parameters that hold them one after the other; interleaved: each expert has every count-th column."""
    return [
        Expert(
            {
                **{name: Piece(p, slot, count) for name, p in stacks.items()},
                **{name: Piece(p, slot, count, True) for name, p in (interleaved or {}).items()},
            },
            {},
        )
        for slot in range(count)
    ]


def move(
    layer: MovingLayer,
    belongings: Belongings,
    expert_rank: Sequence[int],
    expert_slot: Sequence[int],
    everywhere: Callable[[bool], bool] | None = None,
) -> None:
    """Expert e goes to slot expert_slot[e] of rank expert_rank[e] of the layer's group. Between steps.

    Collective over the group, and over those that hold replicas of its experts: all ranks give the same lists.
    InvalidState while a forward waits for its backward, or while something is in the keeper's way. Unsupported where
    what is frozen differs between two places that an expert changes. everywhere: from
    whether this group can move to whether all groups can that must move alike.
    """
    slots, keeper, group = belongings
    ranks, old = layer.moving_ranks, layer.placement
    new = placement_module.checked(layer.moving_name, layer.home, expert_rank, expert_slot)
    own = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
    vote = Vote(layer.moving_name, group, ranks, everywhere)
    parameters = [piece.parameter for expert in slots for piece in expert.pieces.values()]
    vote.ask(layer.torn or keeper.obstacle(list({id(p): p for p in parameters}.values())))
    trained = vote.tell(trained_of(slots))
    vote.take(lambda: _require_alike(layer.moving_name, trained, old, new))
    vote.take(lambda: layer.replace_experts(old))  # refused while a forward waits for its backward
    leaving = [e for e in old.experts_of(own) if old.place(e) != new.place(e)]
    contents = vote.take(lambda: {e: _without_gaps(content_of(slots[old.expert_slot[e]], keeper)) for e in leaving})
    described = vote.tell({e: _describe(content) for e, content in contents.items()})
    arrived = vote.take(lambda: _rooms(contents, described, old, new, own))
    vote.take(lambda: _exchange(contents, arrived, old, new, own, group, ranks))

    def restore() -> None:
        if layer.placement != old:
            layer.replace_experts(old)
        for e, content in contents.items():
            fill(slots[old.expert_slot[e]], keeper, content)

    with _or_torn(layer, vote, restore):
        vote.take(lambda: [fill(slots[new.expert_slot[e]], keeper, content) for e, content in arrived.items()])
        vote.take(lambda: layer.replace_experts(new))


Trained = Sequence[Mapping[str, bool]]  # of each slot, by name of a piece


def trained_of(slots: Sequence[Expert]) -> Trained:
    """What of each slot is not frozen."""
    return [{name: piece.parameter.requires_grad for name, piece in expert.pieces.items()} for expert in slots]


def why_unlike(trained: Sequence[Trained], old: Placement, new: Placement) -> str:
    """Why experts cannot go, by what of the slots of each rank is not frozen; "": they can. What is frozen belongs to
    the host's parameter, which stays in its place, and so does what an optimizer has of it."""
    for e in range(len(old.expert_rank)):
        (rank, slot), (to_rank, to_slot) = old.place(e), new.place(e)
        here, there = trained[rank][slot], trained[to_rank][to_slot]
        differing = [name for name, is_trained in here.items() if is_trained != there.get(name)]
        if differing:
            return (
                f"expert {e} would go from slot {slot} of rank {rank} to slot {to_slot} of rank {to_rank}, and "
                f"requires_grad of {', '.join(differing)} differs there. It stays with the place: let such experts "
                "stay, or freeze or train the same parameters of all experts that change places"
            )
    return ""


def _require_alike(name: str, trained: Sequence[Trained], old: Placement, new: Placement) -> None:
    why = why_unlike(trained, old, new)
    if why:
        raise Unsupported(f"{name}: {why}")


@contextmanager
def _or_torn(layer: MovingLayer, vote: Vote, restore: Callable[[], None]) -> Iterator[None]:
    """After an error in it all is as it was, on all ranks; or the layer is torn."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and not vote.is_lost:
            try:
                vote.take(restore)
            except Exception as worse:
                tear(layer, worse)
                raise InvalidState(layer.torn) from error
            raise
        tear(layer, error)  # nobody knows what the others have done
        with suppress(Exception):
            restore()
        raise


def tear(layer: MovingLayer, why: object) -> None:
    """Every later call of the layer is refused, and says so."""
    layer.torn = (
        f"{layer.moving_name}: a move of its experts broke off, and ranks may differ about where they live: make the "
        f"model again and load a checkpoint. What broke it off: {why}"
    )


def refuse_torn(layer: MovingLayer) -> None:
    """InvalidState where a move has broken off."""
    if layer.torn:
        raise InvalidState(layer.torn)


def unanimous(replicas: Any, device: torch.device) -> Callable[[bool], bool] | None:
    """For `everywhere`: asks a group of torch, of the ranks that hold the same experts; None: there is no other."""
    if replicas is None:
        return None

    def ask(can: bool) -> bool:
        answer = torch.tensor([int(can)], device=device)
        dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=replicas)
        return bool(answer.item())

    return ask


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
    for layer, _ in layers:
        refuse_torn(layer)
    moved = [(layer, move_to, layer.placement) for layer, move_to in layers if has_moved(layer)]
    with ExitStack() as back:
        for layer, move_to, placement in moved:
            move_to(layer.home)
            back.callback(move_to, placement)
        if not and_back:
            back.pop_all()
        yield


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


def _without_gaps(content: Content) -> Content:
    """As it travels."""
    return {name: v.contiguous() if isinstance(v, torch.Tensor) else v for name, v in content.items()}


def _describe(content: Content) -> list[tuple[str, Any]]:
    """Names with shape and dtype of tensors, and other values as they are."""
    return [
        (name, ("tensor", tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else value)
        for name, value in content.items()
    ]


def _rooms(
    contents: dict[int, Content], described: Sequence[Any], old: Placement, new: Placement, own: int
) -> dict[int, Content]:
    """By expert what comes to a slot of this rank: that of other ranks with tensors that are not filled yet."""
    arrived: dict[int, Content] = {}
    for e in new.experts_of(own):
        if old.expert_rank[e] != own:
            arrived[e] = {name: _room(what) for name, what in described[old.expert_rank[e]][e]}
        elif e in contents:
            arrived[e] = contents[e]
    return arrived


def _room(what: Any) -> Any:
    is_tensor = isinstance(what, tuple) and what and what[0] == "tensor"
    return torch.empty(what[1], dtype=what[2], device=what[3]) if is_tensor else what


def _exchange(
    contents: dict[int, Content],
    arrived: dict[int, Content],
    old: Placement,
    new: Placement,
    own: int,
    group: Any,
    ranks: Sequence[int],
) -> None:
    """Fills what arrives from other ranks. Tensors travel one by one, in an order that both ends know."""
    work: list[Any] = []
    for e, (source, target) in enumerate(zip(old.expert_rank, new.expert_rank)):
        if source == target or own not in (source, target):
            continue
        for value in (contents if source == own else arrived)[e].values():
            if not isinstance(value, torch.Tensor):
                continue
            transfer, peer = (dist.isend, target) if source == own else (dist.irecv, source)
            work.append(transfer(value, ranks[peer], group=group))
    for request in work:
        request.wait()
