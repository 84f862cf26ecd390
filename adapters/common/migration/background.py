# SPDX-License-Identifier: Apache-2.0
"""Moves experts to other ranks while training runs, by `sluice/migration.h`.

After an update, weights, masters, moments and step counts are copied, and are sent while the host trains. Before the
next update the gradients follow. Then the new placement takes effect on all ranks, or on none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sluice.adapters.common.migration import moving
from sluice.adapters.common.migration.moving import Belongings, Expert, MovingLayer
from sluice.adapters.common.migration.placement import Placement
from sluice.adapters.common.optimizer_state import Content, Keeper
from sluice.adapters.common.vote import Vote
from sluice.adapters.torch import Arriving, EpGroup, Leaving, Migration
from sluice.errors import (
    Aborted,
    InvalidArgument,
    InvalidState,
    Mismatch,
    PeerLost,
    PeerRefused,
    SluiceError,
    TimedOut,
)

_ALL_GO_ON = (InvalidArgument, Mismatch, PeerRefused)  # after these the move has been aborted on all ranks
_A_RANK_IS_LOST = (Aborted, PeerLost, TimedOut)
_REFUSED = Placement((), ())  # every engine layer refuses it, so that the other ranks fail too
_Form = Any  # ("tensor", shape, dtype, device); else a plain value


class _Bundle(NamedTuple):
    """Holds the tensors and values of one expert in host memory, which a leaving and an arriving expert may share."""

    still: Content
    devices: dict[str, str]  # the host's devices of the tensors in `still`
    late: dict[str, torch.Tensor]
    is_there: torch.Tensor  # of each of `late`: whether it exists

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that are sent before the boundary."""
        return [value for value in self.still.values() if isinstance(value, torch.Tensor)]

    def content(self) -> Content:
        """Returns the content for moving.fill."""
        late = {name: value for (name, value), there in zip(self.late.items(), self.is_there.tolist()) if there}
        still = {
            name: value.to(self.devices[name]) if name in self.devices else value for name, value in self.still.items()
        }
        return {**still, **late}


class _ExpertMove(NamedTuple):
    layer: MovingLayer
    belongings: Belongings
    old: Placement
    new: Placement
    leaving: dict[int, _Bundle]
    arriving: dict[int, _Bundle]
    versions: list[tuple[torch.Tensor, int]]
    failure: str  # why the move could not begin on this rank; sent to the others in commit
    refusal: str  # why the move has begun without experts, and will be refused


class BackgroundMove:
    """Moves experts between these ranks, one placement of one layer at a time.

    ranks             global, ascending: of all groups that must move together, those of replicas too
    bytes_per_second  most that each rank sends while the host trains; None: no limit
    """

    def __init__(self, ranks: Sequence[int], bytes_per_second: int | None = None) -> None:
        self.ranks = tuple(ranks)
        self._group = EpGroup.unshared(self.ranks)
        self._migration = Migration(self._group, bytes_per_second)
        self._epoch = 0
        self._trip: _ExpertMove | None = None

    @property
    def is_under_way(self) -> bool:
        """Returns whether a move has begun and not ended."""
        return self._trip is not None

    def begin(self, layer: MovingLayer, belongings: Belongings, new: Placement) -> None:
        """Begins a move, after an update. Collective over all ranks. `commit` reports a failure on one of them."""
        if self._trip is not None:
            raise InvalidState("a move of experts is in progress: commit it first")
        self._epoch += 1
        old, ranks = layer.placement, layer.moving_ranks
        slots, keeper, group = belongings
        vote = Vote(layer.moving_name, group, ranks, wait_s=layer.moving_wait_s)
        own = ranks.index(dist.get_rank())
        moved = [e for e in range(len(old.expert_rank)) if old.expert_rank[e] != new.expert_rank[e]]
        leaving: dict[int, _Bundle] = {}
        arriving: dict[int, _Bundle] = {}
        refusal = layer.torn
        try:
            leaving.update(
                (e, _packed(slots[old.expert_slot[e]], belongings)) for e in moved if old.expert_rank[e] == own
            )
        except Exception as error:
            refusal = refusal or f"{type(error).__name__}: {error}"
        forms, refusal = _forms_of_all(leaving, slots, refusal, vote, ranks, (old, new))
        reused = list(leaving.values())
        try:
            for e in (e for e in moved if new.expert_rank[e] == own and not refusal):
                late = moving.late_forms(slots[new.expert_slot[e]], keeper)
                arriving[e] = _landing(forms[old.expert_rank[e]][e], late, reused.pop(0) if reused else None)
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        peers = [self.ranks.index(rank) for rank in ranks]
        items = [Leaving(e, peers[new.expert_rank[e]], p.tensors(), _late(p)) for e, p in leaving.items()]
        items += [Arriving(e, peers[old.expert_rank[e]], p.tensors(), _late(p)) for e, p in arriving.items()]
        failure = ""
        try:
            self._migration.begin(self._epoch, [] if refusal else items)
        except _A_RANK_IS_LOST:
            raise
        except SluiceError as error:
            failure = str(error)
        self._trip = _ExpertMove(layer, belongings, old, new, leaving, arriving, _versions(slots), failure, refusal)

    def commit(self) -> int:
        """Ends the move, before the next update, when gradients are final. Collective over all ranks. Returns how many
        experts have changed their rank. After InvalidState, InvalidArgument, Mismatch or PeerRefused none has, on any
        rank. After other errors the layer is torn, unless none has moved."""
        if self._trip is None:
            raise InvalidState("no move of experts is in progress")
        trip = self._trip
        layer, old, new = trip.layer, trip.old, trip.new
        if layer.torn and self._migration.progress()["phase"] == "undecided":
            raise SluiceError(layer.torn)
        contents: dict[int, Content] = {}
        refusal, cause = trip.refusal, None
        try:
            contents = {} if refusal else self._load_all(trip)
        except Exception as error:
            refusal, cause = f"{type(error).__name__}: {error}", error
        try:
            layer.replace_experts(old)  # refused while a forward waits for its backward
        except SluiceError as error:  # on all ranks of this group
            self._trip = None
            self._give_up(trip, str(error))
            raise
        try:
            if trip.failure:
                raise InvalidState(trip.failure)
            self._migration.commit(refusal or _changed(trip.versions, layer.moving_name))
        except SluiceError as error:
            if self._migration.progress()["phase"] == "undecided":
                moving.tear(layer, error)
                raise  # the move and its staged bytes are kept
            self._trip = None
            raise error from cause
        self._trip = None
        self._put(trip, contents)
        return sum(a != b for a, b in zip(old.expert_rank, new.expert_rank))

    def _load_all(self, trip: _ExpertMove) -> dict[int, Content]:
        """Reads late tensors of leaving experts. Returns copies of experts that change their slot on this rank."""
        layer, (slots, keeper, _), old, new = trip[:4]
        own = layer.moving_ranks.index(dist.get_rank())
        for e, bundle in trip.leaving.items():
            _load(bundle, slots[old.expert_slot[e]], keeper)
        stay = [e for e in old.experts_of(own) if new.expert_rank[e] == own and old.place(e) != new.place(e)]
        return {e: _all_of(slots[old.expert_slot[e]], trip.belongings) for e in stay}

    def _put(self, trip: _ExpertMove, contents: dict[int, Content]) -> None:
        """Fills the slots, after all has arrived on all ranks. This cannot be undone: after an error the layer is torn
        on all ranks of this group."""
        layer, (slots, keeper, _), _, new = trip[:4]
        try:
            contents.update({e: bundle.content() for e, bundle in trip.arriving.items()})
            for e, content in contents.items():
                moving.fill(slots[new.expert_slot[e]], keeper, content)
        except BaseException as error:
            moving.tear(layer, error)
            with contextlib.suppress(SluiceError):
                layer.replace_experts(_REFUSED)
            if isinstance(error, Exception):
                raise SluiceError(layer.torn) from error
            raise
        try:
            layer.replace_experts(new)
        except BaseException as error:
            moving.tear(layer, error)
            if isinstance(error, SluiceError):
                raise SluiceError(layer.torn) from error
            raise

    def abort(self, reason: str) -> None:
        """Ends the move without effect. Every rank calls it; it is not collective. An undecided move keeps its
        bytes."""
        if self._trip is not None and self._migration.progress()["phase"] != "undecided":
            self._trip = None
            self._migration.abort(reason)

    def progress(self) -> dict[str, Any]:
        """Returns Migration.progress of the newest move."""
        return self._migration.progress()

    def close(self) -> None:
        """Releases everything. A second call has no effect."""
        self._trip = None
        self._migration.close()
        self._group.close()

    def _give_up(self, trip: _ExpertMove, reason: str) -> None:
        """Commits with a refusal, because groups with replicas may have no reason against the move."""
        if not trip.failure:
            with contextlib.suppress(*_ALL_GO_ON):
                self._migration.commit(reason)


def _packed(expert: Expert, belongings: Belongings) -> _Bundle:
    still = moving.still_of(expert, belongings.keeper)
    devices = {name: value.device.type for name, value in still.items() if isinstance(value, torch.Tensor)}
    still.update({name: still[name].contiguous().cpu() for name in devices})
    return _Bundle(still, devices, *_room(moving.late_forms(expert, belongings.keeper)))


def _room(forms: dict[str, tuple[int, torch.dtype]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    late = {name: torch.zeros(count, dtype=dtype) for name, (count, dtype) in forms.items()}
    return late, torch.zeros(len(late), dtype=torch.uint8)


def _late(bundle: _Bundle) -> list[torch.Tensor]:
    return [*bundle.late.values(), bundle.is_there]


def _forms_of_all(
    leaving: dict[int, _Bundle],
    slots: Sequence[Expert],
    refusal: str,
    vote: Vote,
    ranks: Sequence[int],
    way: tuple[Placement, Placement],
) -> tuple[list[dict[int, dict[str, _Form]]], str]:
    """Exchanges the form of each name, by rank and expert, before anything is sent, and a rank's reason against it."""
    own = {
        e: {
            name: ("tensor", tuple(value.shape), value.dtype, bundle.devices[name]) if name in bundle.devices else value
            for name, value in bundle.still.items()
        }
        for e, bundle in leaving.items()
    }
    said = vote.tell((own, moving.trained_of(slots), refusal))
    why = next((f"rank {rank}: {why}" for rank, (_, _, why) in zip(ranks, said) if why), "")
    return [forms for forms, _, _ in said], why or moving.why_unlike([trained for _, trained, _ in said], *way)


def _landing(forms: dict[str, _Form], late: dict[str, tuple[int, torch.dtype]], leaving: _Bundle | None) -> _Bundle:
    """Returns memory for an arriving expert: a leaving one's memory, if shape and dtype are equal."""
    still: Content = {}
    devices: dict[str, str] = {}
    for name, form in forms.items():
        if not (isinstance(form, tuple) and form and form[0] == "tensor"):
            still[name] = form
            continue
        _, shape, dtype, devices[name] = form
        there = None if leaving is None else leaving.still.get(name)
        is_alike = isinstance(there, torch.Tensor) and (tuple(there.shape), there.dtype) == (shape, dtype)
        still[name] = there if is_alike else torch.empty(shape, dtype=dtype)
    if leaving is not None and {n: (t.numel(), t.dtype) for n, t in leaving.late.items()} == late:
        return _Bundle(still, devices, leaving.late, leaving.is_there)
    return _Bundle(still, devices, *_room(late))


def _load(bundle: _Bundle, expert: Expert, keeper: Keeper) -> None:
    """Copies an expert's late tensors, which are final now, into the bundle."""
    numbers = {name: number for number, name in enumerate(bundle.late)}
    bundle.is_there.zero_()

    def take(name: str, value: torch.Tensor) -> None:
        bundle.late[name].copy_(value.reshape(-1))
        bundle.is_there[numbers[name]] = 1

    _each_late(expert, keeper, take)


def _all_of(expert: Expert, belongings: Belongings) -> Content:
    """Copies all contents. Late tensors come first: each exists twice for a moment, and the rest is not copied yet."""
    late: Content = {}
    _each_late(expert, belongings.keeper, lambda name, value: late.update({name: value.clone()}))
    return {**moving.still_of(expert, belongings.keeper), **late}


def _each_late(expert: Expert, keeper: Keeper, take: Callable[[str, torch.Tensor], None]) -> None:
    """Takes late tensors one by one: a keeper may gather each, and memory may not suffice for copies of all."""
    for part in (*(Expert({name: piece}, {}) for name, piece in expert.pieces.items()), Expert({}, expert.buffers)):
        late = moving.late_of(part, keeper)
        for name in list(late):
            take(name, late.pop(name))


def _versions(slots: Sequence[Expert]) -> list[tuple[torch.Tensor, int]]:
    """Returns the parameters with their versions, which torch increments with each write."""
    parameters = {id(p.parameter): p.parameter for expert in slots for p in expert.pieces.values()}
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters.values()]
    return [(tensor, tensor._version) for tensor in local]


def _changed(versions: list[tuple[torch.Tensor, int]], name: str) -> str | None:
    if all(tensor._version == version for tensor, version in versions):
        return None
    return f"{name}: weights of experts were changed outside of the optimizer while these experts were being moved"
