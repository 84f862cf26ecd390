# SPDX-License-Identifier: Apache-2.0
"""Reads recorded expert loads: how many rows each expert of each layer received in each step.

A file has one JSON object per line: first {"sluice_routing": 1, "layers": L, "experts": E}, then one for each step,
{"step": s, "loads": [[rows of expert 0, ...], ... of layer 0, ...]}, summed over ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from . import fields, files
from .errors import BadInput


@dataclass(frozen=True)
class Routing:
    """Has recorded loads, as loads[step][layer][expert]."""

    layers: int
    experts: int
    loads: tuple[tuple[tuple[int, ...], ...], ...]

    def skew(self, layer: int, ranks: int, experts: int) -> float:
        """Returns rows of the most loaded rank divided by the mean, as the median over steps. Layers wrap around."""
        if experts != self.experts:
            raise BadInput(
                f"routing: recorded with {self.experts} experts, asked about {experts}: "
                "record a run of this model, or give --skew"
            )
        if experts % ranks != 0:
            raise BadInput(
                f"routing: {experts} experts do not divide over {ranks} ranks; choose --ranks that divides them"
            )
        values = sorted(skew_of(step[layer % self.layers], ranks) for step in self.loads)
        return values[len(values) // 2]


def skew_of(loads: Sequence[float], ranks: int) -> float:
    """Returns the maximum divided by the mean of the ranks' rows. Each rank has contiguous experts."""
    each = len(loads) // ranks
    rows = [sum(loads[rank * each : rank * each + each]) for rank in range(ranks)]
    total = sum(rows)
    return max(rows) * ranks / total if total else 1.0


def read(path: str) -> Routing:
    """Reads a file. BadInput names the line and the field."""
    lines = files.read(f"routing {path}", path).splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise BadInput(f"routing {path}: line {number} is not JSON: {error}") from error
    head = rows[0][1] if rows else {}
    if not isinstance(head, dict) or head.get("sluice_routing") != 1:
        raise BadInput(f'routing {path}: line 1 must be {{"sluice_routing": 1, "layers": L, "experts": E}}')
    layers, experts = head.get("layers"), head.get("experts")
    for name, value in (("layers", layers), ("experts", experts)):
        fields.count(f"routing {path}: {name}", value)
    steps = [_step(path, number, row, layers, experts) for number, row in rows[1:]]
    if not steps:
        raise BadInput(f"routing {path}: it holds no steps; record some (docs/tools.md)")
    return Routing(layers, experts, tuple(steps))


def _step(path: str, number: int, row: object, layers: int, experts: int) -> tuple[tuple[int, ...], ...]:
    loads = row.get("loads") if isinstance(row, dict) else None
    if not isinstance(loads, list) or len(loads) != layers:
        count = len(loads) if isinstance(loads, list) else "no"
        raise BadInput(f"routing {path}: line {number}: loads has {count} layers, the head says {layers}")
    for layer, values in enumerate(loads):
        if not isinstance(values, list) or len(values) != experts:
            count = len(values) if isinstance(values, list) else "no"
            raise BadInput(
                f"routing {path}: line {number}: loads[{layer}] has {count} experts, the head says {experts}"
            )
        for expert, value in enumerate(values):
            if not fields.is_whole(value):
                where = f"routing {path}: line {number}: loads[{layer}][{expert}]"
                raise fields.refused(where, "0 rows or more", value)
    return tuple(tuple(values) for values in loads)
