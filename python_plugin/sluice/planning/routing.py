# SPDX-License-Identifier: Apache-2.0
"""Reads recorded expert loads: how many rows each expert of each layer received in each step.

A file has one JSON object per line: first {"sluice_routing": 1, "layers": L, "experts": E}, then one for each step,
{"step": s, "loads": [[rows of expert 0, ...], ... of layer 0, ...]}, summed over ranks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import command, files
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
    rows = [(number, _row(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    head = rows[0][1] if rows else {}
    if not isinstance(head, dict) or head.get("sluice_routing") != 1:
        raise BadInput(f'routing {path}: line 1 must be {{"sluice_routing": 1, "layers": L, "experts": E}}')
    layers, experts = head.get("layers"), head.get("experts")
    for name, value in (("layers", layers), ("experts", experts)):
        files.count(f"routing {path}: {name}", value)
    steps = [_step(path, number, row, layers, experts) for number, row in rows[1:]]
    if not steps:
        raise BadInput(f"routing {path}: it holds no steps; record some (docs/tools.md)")
    return Routing(layers, experts, tuple(steps))


def _row(name: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"routing {name}: line {number} is not JSON: {error}") from error


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
            if not files.is_whole(value):
                where = f"routing {path}: line {number}: loads[{layer}][{expert}]"
                raise files.refused(where, "0 rows or more", value)
    return tuple(tuple(values) for values in loads)


@lru_cache(maxsize=64)
def zipf_shares(experts: int, exponent: float, top_k: int) -> tuple[float, ...]:
    """Returns the share of rows by expert, largest first: 1 / place ** exponent. An expert gets each token at most
    once, so shares are limited to 1 / K; the excess is distributed over the others in proportion."""
    if not 0 <= exponent <= 4:
        raise BadInput(f"--zipf is {exponent:g}; it must be in [0, 4] (0: balanced)")
    if top_k > experts:
        raise BadInput(f"--top-k is {top_k}, with {experts} experts; it can be at most that")
    weights = [1 / (place + 1) ** exponent for place in range(experts)]
    limit, full = 1 / top_k, 0
    while True:
        rest = sum(weights[full:])
        scale = (1 - full * limit) / rest if rest > 0 else 0.0
        over = sum(weight * scale > limit * (1 + 1e-12) for weight in weights[full:])
        if over == 0:
            return tuple([limit] * full + [weight * scale for weight in weights[full:]])
        full += over


def zipf_skew(experts: int, ranks: int, exponent: float, top_k: int, seed: int) -> float:
    """Returns rows of the most loaded rank divided by the mean, with experts placed at random."""
    shares = list(zipf_shares(experts, exponent, top_k))
    random.Random(seed).shuffle(shares)
    return skew_of(shares, ranks)


# ---- the files of ranks, joined: `sluice routing DIR` ----

EXAMPLE = """examples:
  SLUICE_ROUTING_DIR=loads torchrun --nproc-per-node 2 -m sluice.run train.py
  sluice routing loads --out routing.jsonl
  sluice simulate --routing routing.jsonl ...

exit status: 0 joined; 2 wrong arguments or files, named by file and line
"""


@command.refuses("sluice routing")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    doc = "Joins recorded expert loads of all ranks and says how uneven they are."
    parser = command.parser("sluice routing", doc, EXAMPLE)
    parser.add_argument("folder", help="the folder of SLUICE_ROUTING_DIR")
    parser.add_argument("--out", default="routing.jsonl", metavar="FILE", help="(%(default)s)")
    parser.add_argument("--ranks", type=int, metavar="W", help="only layers whose experts are on this number of ranks")
    options = command.parsed(parser, words)
    files.check("--out", options.out)
    ranks = join(options.folder, options.out, options.ranks)
    trace = read(options.out)
    rows = summary(trace, ranks)
    made = {"form": 1, "file": options.out, "steps": len(trace.loads), "ranks": ranks, "experts": trace.experts}
    found = f"{len(trace.loads)} steps, {trace.layers} layers, {trace.experts} experts, {ranks} ranks -> {options.out}"
    heads = {"layer": ">5", "skew of ranks": ">15", "of experts": ">12", "  (median over steps of max / mean)": ""}
    shown = ((row["layer"], f"{row['rank_skew']:.2f}", f"{row['expert_skew']:.2f}") for row in rows)
    return command.answer(options.json, lambda: {**made, "layers": rows}, lambda: [found, *command.table(heads, shown)])


def summary(trace: Routing, ranks: int) -> list[dict[str, Any]]:
    """Returns, by layer, rows of the most loaded rank and of the most loaded expert, divided by the mean."""
    return [
        {
            "layer": layer,
            "rank_skew": trace.skew(layer, ranks, trace.experts),
            "expert_skew": trace.skew(layer, trace.experts, trace.experts),
        }
        for layer in range(trace.layers)
    ]


def join(folder: str, out: str, world_size: int | None = None) -> int:
    """Writes one line for each step that all ranks have of all layers. Returns the number of ranks of one group.

    Experts are contiguous over the ranks of a group. Groups with copies of the same experts are summed. Layers with
    groups of different sizes are separate traces; if there are several, `world_size` selects one.
    """
    paths = sorted(Path(folder).glob("loads*.jsonl"))
    if not paths:
        raise BadInput(f"routing {folder}: no loads*.jsonl there; train with SLUICE_ROUTING_DIR={folder}")
    groups: dict[tuple[int, ...], dict[int, dict[int, list[list[int]]]]] = {}
    for path in paths:
        rank, ranks, layers = _read_rank(path)
        # A rank without a group has all experts.
        groups.setdefault(ranks if len(ranks) > 1 else (rank,), {})[rank] = layers
    sizes = sorted({len(ranks) for ranks in groups})
    if world_size is None and len(sizes) > 1:
        listed = " and ".join(map(str, sizes))
        raise BadInput(
            f"routing {folder}: layers of groups of {listed} ranks, which are traces of their own: choose by --ranks"
        )
    if world_size is not None and world_size not in sizes:
        raise BadInput(f"--ranks is {world_size}; {folder} has groups of {' and '.join(map(str, sizes))} ranks")
    groups = {ranks: found for ranks, found in groups.items() if world_size in (None, len(ranks))}
    for ranks, found in groups.items():
        missing = [rank for rank in ranks if rank not in found]
        if missing:
            raise BadInput(f"routing {folder}: loads of rank {missing[0]} are missing; did it end by itself?")
    every = [layers for found in groups.values() for layers in found.values()]
    numbers = sorted(every[0])
    if any(sorted(layers) != numbers for layers in every):
        raise BadInput(f"routing {folder}: ranks recorded different layers; join one expert-parallel group at a time")
    steps = min(len(rows) for layers in every for rows in layers.values())
    lines = []
    for step in range(steps):
        loads = []
        for layer in numbers:
            sums: list[int] = []
            for found in groups.values():
                rows = [count for rank in sorted(found) for count in found[rank][layer][step]]
                sums = [a + b for a, b in zip(sums, rows)] if sums else rows
            loads.append(sums)
        lines.append(json.dumps({"step": step, "loads": loads}))
    experts = len(json.loads(lines[0])["loads"][0]) if lines else 0
    head = json.dumps({"sluice_routing": 1, "layers": len(numbers), "experts": experts})
    files.write("--out", out, "\n".join([head, *lines]) + "\n")
    return max(len(ranks) for ranks in groups)


def _read_rank(path: Path) -> tuple[int, tuple[int, ...], dict[int, list[list[int]]]]:
    layers: dict[int, list[list[int]]] = {}
    head: Any = None
    lines = files.read(f"routing {path.name}", path).splitlines()
    for number, line in enumerate(lines, 1):
        row = _row(path.name, number, line)
        if head is None:
            if not isinstance(row, dict) or row.get("sluice_routing_rank") != 1:
                raise BadInput(f"routing {path.name}: line 1 is no head of this version; record again")
            head = row
        elif _is_note(row) and len(row[1]) == len(layers.get(row[0], [row[1]])[0]):
            layers.setdefault(row[0], []).append(row[1])
        else:
            raise BadInput(f"routing {path.name}: line {number} must be [layer, [rows of each local expert]]")
    if not layers:
        raise BadInput(f"routing {path.name}: it holds no steps")
    rank, ranks = head.get("rank"), head.get("ranks")
    if type(rank) is not int or not isinstance(ranks, list) or not all(type(one) is int for one in ranks):
        raise BadInput(f"routing {path.name}: line 1 must have rank and ranks as whole numbers; record again")
    return rank, tuple(ranks), layers


def _is_note(row: Any) -> bool:
    """Returns whether a row has the form of one layer's loads in a step. The caller checks the number of experts."""
    if not isinstance(row, list) or len(row) != 2 or type(row[0]) is not int or not isinstance(row[1], list):
        return False
    return all(type(count) is int and count >= 0 for count in row[1])
