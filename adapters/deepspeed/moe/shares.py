"""One budget for all contexts of a rank: a model with two ep_sizes has two, and each gets its share.

A plan takes as many rows as its budget has room for, so that contexts cannot draw on one sum: whoever plans first would
have it all. Each has what it needs at least, and of the rest a share by the bytes of a token's rows in its layers,
which is what budgets are spent on. What a context needs at least depends on its tokens: shares by rows alone stand when
layers are swapped, and `Sharing` corrects them at the first forward.

Shares stand from then on: ranks meet again only within single contexts, where they could not agree on those of others.
So that a later batch may be larger, what a context needs at least is asked for up to `_GROWTH[-1]` times the first
tokens, and shares are such that all contexts can grow alike until the whole is spent on the least; what then remains
goes by rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from sluice.adapters.deepspeed.moe.engine_backend import EngineBackend
from sluice.adapters.deepspeed.moe.finding import Finding
from sluice.config import Options
from sluice.errors import OverBudget, SluiceError

Place = tuple[tuple[int, ...], Any]  # the ranks of a context, and the device of its memory
Exchange = Callable[[tuple[int, ...], Any], dict[int, Any]]  # (ranks, own value) -> value by rank

_MODULES_HIDDEN = 4  # of experts that run as modules, H over M: nobody says
_GROWTH = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # tokens of later forwards, over those of the first


def row_bytes(finding: Finding) -> int:
    """Of what a layer may keep of one token on balanced routing: T_DI and T_M of its K routes."""
    form = finding.form
    hidden = _MODULES_HIDDEN * finding.model_width if form is None else form.hidden_width * (2 if form.gated else 1)
    return finding.top_k * (finding.model_width + hidden) * finding.dtype.itemsize


def weights(findings: Iterable[Finding], slots: int = 1) -> dict[Place, int]:
    """By context: the rows of its layers, and once more of its largest, for the slots that they share. slots: 0 of
    host pools, which have none."""
    rows: dict[Place, list[int]] = {}
    for finding in findings:
        rows.setdefault((finding.ranks, finding.device), []).append(row_bytes(finding))
    return {place: sum(of_layers) + slots * max(of_layers) for place, of_layers in rows.items()}


def outstanding_of(of_model: int, layers: int, all_layers: int) -> int:
    """Of so many forwards without their backward over all layers of a model, the most in these: forwards come in the
    model's order, so that each has had one more at most than any other layer."""
    passes, begun = divmod(of_model, all_layers)
    return passes * layers + min(begun, layers)


def split(total: int, weight: Mapping[Place, int], place: Place) -> int:
    """What of `total` is this context's, among those on its device."""
    of_device = sum(value for (_, device), value in weight.items() if device == place[1])
    return max(1, total * weight[place] // of_device)


def options_of(
    options: Options,
    findings: Sequence[Finding],
    place: Place,
    least: Callable[[dict[str, int]], dict[str, int]],
) -> Options:
    """The options of one context of the model's layers. least: the smallest of each number over the ranks of the
    context, since ranks that plan together plan alike, and may be in different numbers of other contexts. Collective
    where there is a budget."""
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
    """The contexts of a rank that have shares of one memory_budget, until their first tokens say what each needs."""

    def __init__(self, total: int, weight: Mapping[Place, int], exchange: Exchange) -> None:
        self._total, self._weight, self._exchange = total, weight, exchange
        self._members: dict[Place, tuple[EngineBackend, list[Any]]] = {}  # and the states of layers
        self._is_awaited = True  # the other ranks wait for this one at their first forward
        self._settled_for: int | None = None  # this rank's tokens

    def add(self, place: Place, backend: EngineBackend, family: list[Any]) -> None:
        """In the order of the model, the same on all ranks of a context."""
        self._members[place] = (backend, family)

    def settle(self, tokens: int, dtype: torch.dtype) -> None:
        """Once, at the first forward of any of the contexts. Collective over all of them; OverBudget on all ranks."""
        if self._settled_for is not None or not self._members:
            return
        self._is_awaited = False
        why, own = "", {}
        try:
            for _, family in self._members.values():
                for state in family:
                    state.prepare(dtype)
            for place, (backend, family) in self._members.items():
                own[place] = self._needs([state for state in family if state.backend is backend], tokens)
        except SluiceError as error:
            why = error.message
        self._agree(own, why, tokens)
        self._settled_for = tokens

    def fail(self, message: str) -> None:
        """This rank does not come to its first forward: the others must not wait."""
        if self._is_awaited and self._members:
            self._is_awaited = False
            with contextlib.suppress(OverBudget):
                self._agree({}, message, 0)

    def explain(self, error: OverBudget, tokens: int) -> OverBudget:
        """A share may be too small for a forward of more tokens than the first had."""
        first = self._settled_for
        if first is None or tokens <= first:
            return error
        return OverBudget(
            f"{error.message}. The memory_budget was shared out at the first forward, which had {first} tokens on this "
            f"rank (this one has {tokens}), with room for {_GROWTH[-1]:.0f} times as many where it has that: where the "
            "largest batch comes first, shares are made for it",
            peer=error.peer,
        )

    def _needs(self, states: list[Any], tokens: int) -> list[int]:
        """The least for these tokens and for more, up to the first that are beyond the budget."""
        needs: list[int] = []
        for growth in _GROWTH:
            try:
                least = max(state.smallest_budget(math.ceil(tokens * growth)) for state in states)
            except SluiceError:
                if not needs:
                    raise
                break  # of so many tokens there is no plan at all
            needs.append(max([least, *needs[-1:]]))
            if least > self._total:
                break
        return needs

    def _agree(self, own: Mapping[Place, list[int]], why: str, tokens: int) -> None:
        """Two rounds over each context, by all its ranks whatever happens: what it needs, then what it gets."""
        needs: dict[Place, list[int]] = {}
        first = {}
        for place in self._members:
            first[place] = self._exchange(place[0], {"why": why, "needs": own.get(place, [])})
            needs[place] = [max(ranks) for ranks in zip(*(answer["needs"] for answer in first[place].values()))]
        why = _why_of(first)
        shares = {} if why else self._split(needs)
        if not why and not shares:
            why = self._shortfall({place: of_place[0] for place, of_place in needs.items()}, tokens)
        second = {}
        for place in self._members:
            second[place] = self._exchange(place[0], {"why": why, "share": shares.get(place, 0)})
        why = _why_of(second)
        if why:
            raise OverBudget(why)
        for place, (backend, _) in self._members.items():
            backend.set_share(min(answer["share"] for answer in second[place].values()), self._total)

    def _split(self, needs: Mapping[Place, list[int]]) -> dict[Place, int]:
        """Its least for each at the largest growth that fits, and the rest by what more growth takes, or, where all of
        it fits, by rows; of contexts on one device. {} where the least of the first tokens does not fit."""
        shares = {}
        for place in needs:
            mine = [other for other in needs if other[1] == place[1]]
            fits = [sum(least) <= self._total for least in zip(*(needs[other] for other in mine))]
            if not fits[0]:
                return {}
            last = sum(fits) - 1
            weight = self._weight
            if last + 1 < len(fits):
                weight = {other: needs[other][last + 1] - needs[other][last] for other in mine}
            rest = self._total - sum(needs[other][last] for other in mine)
            shares[place] = needs[place][last] + rest * weight[place] // sum(weight[other] for other in mine)
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
    """What speaks against it on any rank."""
    return next((answer["why"] for of_place in answers.values() for answer in of_place.values() if answer["why"]), "")
