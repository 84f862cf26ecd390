"""One budget for all contexts of a rank: a model with two ep_sizes has two, and each gets its share.

A plan takes as many rows as its budget has room for, so that contexts cannot draw on one sum: whoever plans first would
have it all. Shares go by the bytes of a token's rows in the layers of each, which is what budgets are spent on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sluice.adapters.deepspeed.probe import Finding
from sluice.config import Options

Place = tuple[tuple[int, ...], Any]  # the ranks of a context, and the device of its memory

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
