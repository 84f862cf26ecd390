"""One budget for all contexts of a rank: a model with two ep_sizes has two, and each gets its share.

A plan takes as many rows as its budget has room for, so that contexts cannot draw on one sum: whoever plans first would
have it all. Each has what it needs at least, and of the rest a share by the bytes of a token's rows in its layers,
which is what budgets are spent on. What a context needs at least depends on its tokens: shares by rows alone stand when
layers are swapped, and `Sharing` corrects them at the first forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from sluice.adapters.deepspeed.probe import Finding
from sluice.adapters.deepspeed.seam import Backend
from sluice.config import Options
from sluice.errors import OverBudget, SluiceError

Place = tuple[tuple[int, ...], Any]  # the ranks of a context, and the device of its memory
Exchange = Callable[[tuple[int, ...], Any], dict[int, Any]]  # (ranks, own value) -> value by rank

_MODULES_HIDDEN = 4  # of experts that run as modules, H over M: nobody says


def row_bytes(finding: Finding) -> int:
    """Of what a layer may keep of one token on balanced routing: T_DI and T_M of its K routes."""
    form = finding.form
    hidden = _MODULES_HIDDEN * finding.model_width if form is None else form.hidden_width * (2 if form.gated else 1)
    return finding.top_k * (finding.model_width + hidden) * finding.dtype.itemsize


def weights(findings: Iterable[Finding]) -> dict[Place, int]:
    """By context: the rows of its layers, and once more of its largest, for the slots that they share."""
    rows: dict[Place, list[int]] = {}
    for finding in findings:
        rows.setdefault((finding.ranks, finding.device), []).append(row_bytes(finding))
    return {place: sum(of_layers) + max(of_layers) for place, of_layers in rows.items()}


def split(total: int, weight: Mapping[Place, int], place: Place) -> int:
    """What of `total` is this context's, among those on its device."""
    of_device = sum(value for (_, device), value in weight.items() if device == place[1])
    return max(1, total * weight[place] // of_device)


def options_of(
    options: Options, weight: Mapping[Place, int], place: Place, least: Callable[[dict[str, int]], dict[str, int]]
) -> Options:
    """The options of one context. least: the smallest of each number over the ranks of the context, since ranks that
    plan together plan alike, and may be in different numbers of other contexts. Collective where there is a budget."""
    names = [name for name in ("memory_budget", "host_memory_budget") if getattr(options, name) is not None]
    if not names:
        return options
    own = least({name: split(getattr(options, name), weight, place) for name in names})
    shared = {f"shared_{name}": getattr(options, name) for name in names if own[name] != getattr(options, name)}
    return dataclasses.replace(options, **own, **shared)


class Sharing:
    """The contexts of a rank that have shares of one memory_budget, until their first tokens say what each needs."""

    def __init__(self, total: int, weight: Mapping[Place, int], exchange: Exchange) -> None:
        self._total, self._weight, self._exchange = total, weight, exchange
        self._members: dict[Place, tuple[Backend, list[Any]]] = {}  # and the states of layers
        self._is_awaited = True  # the other ranks wait for this one at their first forward
        self._is_settled = False

    def add(self, place: Place, backend: Backend, family: list[Any]) -> None:
        """In the order of the model, the same on all ranks of a context."""
        self._members[place] = (backend, family)

    def settle(self, tokens: int, dtype: torch.dtype) -> None:
        """Once, at the first forward of any of the contexts. Collective over all of them; OverBudget on all ranks."""
        if self._is_settled or not self._members:
            return
        self._is_awaited = False
        why, own = "", {}
        try:
            for _, family in self._members.values():
                for state in family:
                    state.prepare(dtype)
            for place, (backend, family) in self._members.items():
                own[place] = max(state.smallest_budget(tokens) for state in family if state.backend is backend)
        except SluiceError as error:
            why = error.message
        self._agree(own, why, tokens)
        self._is_settled = True

    def fail(self, message: str) -> None:
        """This rank does not come to its first forward: the others must not wait."""
        if self._is_awaited and self._members:
            self._is_awaited = False
            with contextlib.suppress(OverBudget):
                self._agree({}, message, 0)

    def _agree(self, own: Mapping[Place, int], why: str, tokens: int) -> None:
        """Two rounds over each context, by all its ranks whatever happens: what it needs, then what it gets."""
        least, first = {}, {}
        for place in self._members:
            first[place] = self._exchange(place[0], {"why": why, "least": own.get(place, 0)})
            least[place] = max(answer["least"] for answer in first[place].values())
        why = _why_of(first)
        shares = {} if why else self._split(least)
        if not why and not shares:
            why = self._shortfall(least, tokens)
        second = {}
        for place in self._members:
            second[place] = self._exchange(place[0], {"why": why, "share": shares.get(place, 0)})
        why = _why_of(second)
        if why:
            raise OverBudget(why)
        for place, (backend, _) in self._members.items():
            backend.set_share(min(answer["share"] for answer in second[place].values()), self._total)

    def _split(self, least: Mapping[Place, int]) -> dict[Place, int]:
        """Its least for each, and the rest by rows; of contexts on one device. {} where the least does not fit."""
        shares = {}
        for place, needed in least.items():
            mine = [other for other in least if other[1] == place[1]]
            rest = self._total - sum(least[other] for other in mine)
            if rest < 0:
                return {}
            shares[place] = needed + rest * self._weight[place] // sum(self._weight[other] for other in mine)
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
