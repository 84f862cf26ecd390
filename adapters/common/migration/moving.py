# SPDX-License-Identifier: Apache-2.0
"""Moves experts of a layer between ranks, with their parameters, gradients, and optimizer states. The host's modules
and tensors keep their addresses; only their contents move.

A move copies the contents, exchanges them, fills the new slots, and then puts the placement into force. All ranks vote
after each of these phases. An error on one rank fails the move on all ranks and restores all contents. If they cannot
be restored, the layer is torn: every later call of it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from sluice.adapters.common.migration import placement as placement_module
from sluice.adapters.common.migration import shipments
from sluice.adapters.common.migration.placement import Placement
from sluice.adapters.common.migration.shipments import Shipment
from sluice.adapters.common.optimizer_state import Content, Keeper, Piece, bytes_of, of_prefix
from sluice.adapters.common.vote import Vote
from sluice.errors import InvalidState, Unsupported
from torch import nn


class Expert(NamedTuple):
    """Names the host's tensors in one slot."""

    pieces: Mapping[str, Piece]
    buffers: Mapping[str, torch.Tensor]


class MovingLayer(Protocol):
    """Describes the adapter's state of a layer whose experts may move."""

    home: Placement  # where the host assumes the experts to be
    placement: Placement
    torn: str  # why ranks may have different placements; "": they have the same

    @property
    def moving_name(self) -> str:
        """Returns the name of the layer in errors."""
        ...

    @property
    def moving_ranks(self) -> Sequence[int]:
        """Returns the global ranks of the layer's group."""
        ...

    @property
    def moving_wait_s(self) -> float | None:
        """Returns the seconds to wait for a rank; None: the default."""
        ...

    def replace_experts(self, placement: Placement) -> None:
        """Sets the engine's placement. Collective; an error leaves the placement unchanged."""
        ...


class Belongings(NamedTuple):
    """Names the contents that move with the experts of this rank, and the reader of optimizer states."""

    slots: Sequence[Expert]
    keeper: Keeper
    group: Any  # of torch, over the layer's ranks; None: this rank alone


def of_modules(experts: Sequence[nn.Module]) -> list[Expert]:
    """Returns slots of experts that are separate modules."""
    return [
        Expert({name: Piece(p) for name, p in expert.named_parameters()}, dict(expert.named_buffers()))
        for expert in experts
    ]


def of_stacks(
    stacks: Mapping[str, nn.Parameter], count: int, interleaved: Mapping[str, nn.Parameter] | None = None
) -> list[Expert]:
    """Returns slots of experts that are stacked in parameters. interleaved: parameters in which each expert has every
    count-th column."""
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
    replicas: Any = None,
) -> None:
    """Moves expert e to slot expert_slot[e] of rank expert_rank[e] of the layer's group. Called between steps.

    Collective over the group, and over the ranks that hold replicas of its experts: all ranks give the same lists.
    InvalidState while a forward waits for its backward, or while the keeper has an obstacle. Unsupported if
    an expert would move between two slots that freeze different parameters. PeerLost names a rank that hangs.
    replicas: a group of torch, over the ranks that hold the same experts as this one; None: this rank alone.
    """
    slots, keeper, group = belongings
    ranks, old = layer.moving_ranks, layer.placement
    new = placement_module.checked(layer.moving_name, layer.home, expert_rank, expert_slot)
    own = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
    vote = Vote(layer.moving_name, group, ranks, replicas, layer.moving_wait_s)
    parameters = [piece.parameter for expert in slots for piece in expert.pieces.values()]
    vote.ask(layer.torn or keeper.obstacle(list({id(p): p for p in parameters}.values())))
    trained = vote.tell(trained_of(slots))
    vote.take(lambda: _require_alike(layer.moving_name, trained, old, new))
    vote.take(lambda: layer.replace_experts(old))  # refused while a forward waits for its backward
    leaving = [e for e in old.experts_of(own) if old.place(e) != new.place(e)]
    contents = vote.take(
        lambda: {e: shipments.without_gaps(content_of(slots[old.expert_slot[e]], keeper)) for e in leaving}
    )
    described = vote.tell({e: _describe(content) for e, content in contents.items()})
    arrived = vote.take(lambda: _rooms(contents, described, old, new, own))
    # A third of the wait: ranks that find another one missing say so while the rest still waits for the vote.
    vote.take(lambda: _exchange(contents, arrived, old, new, ranks, vote.wait_s / 3))

    def restore() -> None:
        if layer.placement != old:
            layer.replace_experts(old)
        for e, content in contents.items():
            fill(slots[old.expert_slot[e]], keeper, content)

    with _or_torn(layer, vote, restore):
        vote.take(lambda: [fill(slots[new.expert_slot[e]], keeper, content) for e, content in arrived.items()])
        vote.take(lambda: layer.replace_experts(new))


Trained = Sequence[Mapping[str, bool]]  # for each slot: whether a piece is trained, by its name


def trained_of(slots: Sequence[Expert]) -> Trained:
    """Returns for each slot which pieces are trained."""
    return [{name: piece.parameter.requires_grad for name, piece in expert.pieces.items()} for expert in slots]


def why_unlike(trained: Sequence[Trained], old: Placement, new: Placement) -> str:
    """Returns why experts cannot move, given the trained pieces in the slots of each rank; "": they can. A frozen
    parameter is a property of the host's slot, and stays there, as the slot's optimizer state does."""
    for e in range(len(old.expert_rank)):
        (rank, slot), (to_rank, to_slot) = old.place(e), new.place(e)
        here, there = trained[rank][slot], trained[to_rank][to_slot]
        differing = [name for name, is_trained in here.items() if is_trained != there.get(name)]
        if differing:
            return (
                f"expert {e} would go from slot {slot} of rank {rank} to slot {to_slot} of rank {to_rank}, and "
                f"requires_grad of {', '.join(differing)} differs there. requires_grad belongs to the place: do not "
                "move such experts, or freeze the same parameters in all experts that move"
            )
    return ""


def _require_alike(name: str, trained: Sequence[Trained], old: Placement, new: Placement) -> None:
    why = why_unlike(trained, old, new)
    if why:
        raise Unsupported(f"{name}: {why}")


@contextmanager
def _or_torn(layer: MovingLayer, vote: Vote, restore: Callable[[], None]) -> Iterator[None]:
    """Restores all contents on all ranks after an error in the body, or marks the layer as torn."""
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
        tear(layer, error)  # the state of the other ranks is unknown
        with suppress(Exception):
            restore()
        raise


def tear(layer: MovingLayer, why: object) -> None:
    """Marks the layer: every later call of it is refused with this reason."""
    layer.torn = (
        f"{layer.moving_name}: a move of its experts failed midway, and ranks may have different placements: create "
        f"the model again and load a checkpoint. The cause: {why}"
    )


def refuse_torn(layer: MovingLayer) -> None:
    """Raises InvalidState if a move of this layer has failed half-way."""
    if layer.torn:
        raise InvalidState(layer.torn)


def bytes_of_expert(belongings: Belongings) -> int:
    """Returns the bytes of the contents that move with one expert, taken from the first expert of this rank."""
    expert, keeper = belongings.slots[0], belongings.keeper
    values = [*(piece.of(piece.parameter) for piece in expert.pieces.values()), *expert.buffers.values()]
    return sum(map(bytes_of, values)) + sum(map(keeper.bytes_of, expert.pieces.values()))


def has_moved(layer: MovingLayer) -> bool:
    """Returns whether an expert is in another slot than the host assumes."""
    return bool(layer.placement != layer.home)


@contextmanager
def at_home(
    layers: Sequence[tuple[MovingLayer, Callable[[Placement], None]]],
    and_back: bool,
) -> Iterator[None]:
    """Moves all experts home for code of the host that numbers experts by their place, and then back. Collective.

    layers     each with the function that moves its experts
    and_back   whether the experts move back afterwards
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
    """Copies everything that belongs to an expert."""
    buffers = {f"{name} buffer": buffer.detach().clone() for name, buffer in expert.buffers.items()}
    return {**_with_values(expert, keeper.read), **buffers}


def still_of(expert: Expert, keeper: Keeper) -> Content:
    """Copies the contents that stay the same from one update to the next."""
    return _with_values(expert, keeper.still)


def _with_values(expert: Expert, read: Callable[[Piece], Content]) -> Content:
    content: Content = {}
    for name, piece in expert.pieces.items():
        content[f"{name} value"] = piece.of(piece.parameter).detach().clone()
        content.update((f"{name} {key}", value) for key, value in read(piece).items())
    return content


def late_of(expert: Expert, keeper: Keeper) -> Content:
    """Returns the remaining contents just before an update: gradients, if there are any, and buffers. These may be the
    host's own tensors, not copies."""
    content: Content = {}
    for name, piece in expert.pieces.items():
        content.update((f"{name} {key}", value) for key, value in keeper.late(piece).items())
    return {**content, **{f"{name} buffer": buffer.detach() for name, buffer in expert.buffers.items()}}


def late_forms(expert: Expert, keeper: Keeper) -> dict[str, tuple[int, torch.dtype]]:
    """Returns the number of elements and the dtype of each tensor that `late_of` may return."""
    forms = {
        f"{name} {key}": (piece.of(piece.parameter).numel(), dtype)
        for name, piece in expert.pieces.items()
        for key, dtype in keeper.late_forms(piece).items()
    }
    return {**forms, **{f"{name} buffer": (b.numel(), b.dtype) for name, b in expert.buffers.items()}}


def fill(expert: Expert, keeper: Keeper, content: Content) -> None:
    """Copies contents into the host's tensors, which keep their addresses."""
    with torch.no_grad():
        for name, piece in expert.pieces.items():
            value = piece.of(piece.parameter)
            value.copy_(content[f"{name} value"].view(value.shape))
            keeper.write(piece, of_prefix(content, f"{name} "))
        for name, buffer in expert.buffers.items():
            buffer.copy_(content[f"{name} buffer"].view(buffer.shape))


def _describe(content: Content) -> list[tuple[str, Any]]:
    """Returns the names with shape and dtype of tensors, and other values as they are."""
    return [
        (name, ("tensor", tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else value)
        for name, value in content.items()
    ]


def _rooms(
    contents: dict[int, Content], described: Sequence[Any], old: Placement, new: Placement, own: int
) -> dict[int, Content]:
    """Returns the contents of experts that this rank will own. Tensors from other ranks are allocated, not filled."""
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
    ranks: Sequence[int],
    wait_s: float,
) -> None:
    """Exchanges contents with other ranks, through host memory."""
    moved = [e for e, (source, target) in enumerate(zip(old.expert_rank, new.expert_rank)) if source != target]
    if not moved:
        return
    sent = {e: _in_host_memory(content) for e, content in contents.items()}
    listed = [Shipment(ranks[old.expert_rank[e]], ranks[new.expert_rank[e]], sent.get(e), ()) for e in moved]
    landing = {e: _in_host_memory(arrived[e]) for e in moved if e in arrived}  # in the order of `listed`
    shipments.exchange(listed, list(landing.values()), wait_s)
    for e, content in landing.items():
        for name, value in content.items():
            if isinstance(value, torch.Tensor):
                arrived[e][name].copy_(value)


def _in_host_memory(content: Content) -> Content:
    """Returns the content with tensors in host memory: the same ones, or copies of those on a device."""
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in content.items()}
