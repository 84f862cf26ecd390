# SPDX-License-Identifier: Apache-2.0
"""Divides one budget among all contexts of a rank: layers with groups of different ranks have different contexts.

`sluice_budget_divide` (sluice/plan.h) computes the shares. A context's minimum depends on its tokens. So the budget is
divided by the bytes of rows when layers are made, and `Sharing` divides it again at the first forward.

These shares are final: later, ranks meet only within single contexts, where they cannot agree on the shares of others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from sluice.adapters.torch import Context, divide_budget
from sluice.config import Options
from sluice.errors import OverBudget, SluiceError

Place = tuple[tuple[int, ...], Any]  # the ranks of a context, and the device of its memory
Exchange = Callable[[tuple[int, ...], Any], dict[int, Any]]  # (ranks, own value) -> value by rank


class Sharer(Protocol):
    """Describes a layer of the host before its engine layer exists."""

    ranks: tuple[int, ...]
    device: Any

    def row_bytes(self) -> int:
        """Returns the bytes that the layer may keep of one token."""
        ...


class Member(Protocol):
    """Describes a layer of the host in a context that has a share."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Makes its engine layer, if it has none, because the needs of plans depend on all layers."""
        ...

    def engine_layers(self) -> Iterable[Any]:
        """Returns the engine layers that exist."""
        ...


def weights(findings: Iterable[Sharer], slots: int = 1) -> dict[Place, int]:
    """Returns for each context the row bytes of its layers, plus the largest layer's for the slots that all share.
    slots: 0 for host pools, which have no slots."""
    rows: dict[Place, list[int]] = {}
    for finding in findings:
        rows.setdefault((finding.ranks, finding.device), []).append(finding.row_bytes())
    return {place: sum(of_layers) + slots * max(of_layers) for place, of_layers in rows.items()}


def outstanding_of(of_model: int, layers: int, all_layers: int) -> int:
    """Returns the most forwards that `layers` of a model's layers may have outstanding, if all of them have `of_model`.
    Forwards come in the model's order, so that a layer has at most one more than any other layer."""
    passes, begun = divmod(of_model, all_layers)
    return passes * layers + min(begun, layers)


def split(total: int, weight: Mapping[Place, int], place: Place) -> int:
    """Returns this context's share of `total`, among the contexts on its device."""
    mine = [other for other in weight if other[1] == place[1]]
    return divide_budget(total, [weight[other] for other in mine])[mine.index(place)]


def options_of(
    options: Options,
    findings: Sequence[Sharer],
    place: Place,
    least: Callable[[dict[str, int]], dict[str, int]],
) -> Options:
    """Returns the options of one context of the model's layers. least: returns the minimum of each number over the
    context's ranks, which need equal numbers to plan together, but may be in different numbers of other contexts.
    Collective if there is a budget."""
    names = [name for name in ("memory_budget", "host_memory_budget") if getattr(options, name) is not None]
    if not names:
        return options
    weight = {"memory_budget": weights(findings), "host_memory_budget": weights(findings, slots=0)}
    own = {name: split(getattr(options, name), weight[name], place) for name in names}
    if options.max_outstanding is not None:
        mine = sum((finding.ranks, finding.device) == place for finding in findings)
        own["max_outstanding"] = -outstanding_of(options.max_outstanding, mine, len(findings))  # the most of any rank
    own = least(own)
    if options.max_outstanding is not None:
        own["max_outstanding"] *= -1
    shared = {f"shared_{name}": getattr(options, name) for name in names if own[name] != getattr(options, name)}
    return dataclasses.replace(options, **own, **shared)


class Sharing:
    """Divides one memory_budget among contexts of a rank again, when their first tokens show what each needs."""

    def __init__(self, total: int, weight: Mapping[Place, int], exchange: Exchange) -> None:
        self._total, self._weight, self._exchange = total, weight, exchange
        self._members: dict[Place, tuple[Context, list[Member]]] = {}
        self._is_awaited = True  # the other ranks wait for this one at their first forward
        self._settled_for: int | None = None  # this rank's tokens

    def add(self, place: Place, context: Context, layers: list[Member]) -> None:
        """Adds a context, in the order of the model, which is the same on all its ranks. layers: may grow later."""
        self._members[place] = (context, layers)

    def settle(self, tokens: int, dtype: torch.dtype) -> None:
        """Sets the shares at the first forward of any of the contexts. Collective over all; OverBudget on all ranks."""
        if self._settled_for is not None or not self._members:
            return
        self._is_awaited = False
        why, own = "", {}
        try:
            for _, layers in self._members.values():
                for layer in layers:
                    layer.prepare(dtype)
            for place, (context, layers) in self._members.items():
                engine_layers = [one for layer in layers for one in layer.engine_layers()]
                own[place] = context.smallest_budgets(engine_layers, tokens, self._total)
        except SluiceError as error:
            why = error.message
        self._agree(own, why, tokens)
        self._settled_for = tokens

    def fail(self, message: str) -> None:
        """Tells the others that this rank does not come to its first forward, so that they do not wait."""
        if self._is_awaited and self._members:
            self._is_awaited = False
            with contextlib.suppress(OverBudget):
                self._agree({}, message, 0)

    def explain(self, error: OverBudget, tokens: int) -> OverBudget:
        """Returns the error, explained if the forward has more tokens than the first, for which shares were made."""
        first = self._settled_for
        if first is None or tokens <= first:
            return error
        return OverBudget(
            f"{error.message}. The memory_budget was divided at the first forward, which had {first} tokens on this "
            f"rank (this one has {tokens}): run the largest batch first, so that the division allows for it",
            peer=error.peer,
        )

    def _agree(self, own: Mapping[Place, list[int]], why: str, tokens: int) -> None:
        """Runs two rounds over each context, which all its ranks join in any case: its needs, then its share."""
        needs: dict[Place, list[int]] = {}
        first = {}
        for place in self._members:
            first[place] = self._exchange(place[0], {"why": why, "needs": own.get(place, [])})
            needs[place] = [max(ranks) for ranks in zip(*(answer["needs"] for answer in first[place].values()))]
        why, shares = _why_of(first), {}
        if not why:
            try:
                shares = self._split(needs)
            except OverBudget:
                why = self._shortfall({place: of_place[0] for place, of_place in needs.items()}, tokens)
        second = {}
        for place in self._members:
            second[place] = self._exchange(place[0], {"why": why, "share": shares.get(place, 0)})
        why = _why_of(second)
        if why:
            raise OverBudget(why)
        for place, (context, _) in self._members.items():
            context.set_share(min(answer["share"] for answer in second[place].values()), self._total)

    def _split(self, needs: Mapping[Place, list[int]]) -> dict[Place, int]:
        """Returns the shares. OverBudget if the contexts of a device need more for the first tokens."""
        shares: dict[Place, int] = {}
        for device in {place[1] for place in needs}:
            mine = [place for place in needs if place[1] == device]
            weight = [self._weight[place] for place in mine]
            shares.update(zip(mine, divide_budget(self._total, weight, [needs[place] for place in mine])))
        return shares

    def _shortfall(self, least: Mapping[Place, int], tokens: int) -> str:
        sums: dict[Any, int] = {}
        for (_, device), needed in least.items():
            sums[device] = sums.get(device, 0) + needed
        device = max(sums, key=lambda one: sums[one])
        mine = [(ranks, needed) for (ranks, where), needed in least.items() if where == device]
        words = " and ".join(f"{needed} for the layers of ranks {list(ranks)}" for ranks, needed in mine)
        return (
            f"the memory_budget of {self._total} bytes is shared by {len(mine)} expert-parallel groups, which need at "
            f"least {words}, together {sums[device]}, for {tokens} tokens at a time: raise memory_budget to that, or "
            "pass fewer"
        )


def _why_of(answers: Mapping[Place, Mapping[int, Any]]) -> str:
    """Returns the first rank's reason against the shares."""
    return next((answer["why"] for of_place in answers.values() for answer in of_place.values() if answer["why"]), "")
