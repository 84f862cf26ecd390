# SPDX-License-Identifier: Apache-2.0
"""`sluice routing DIR`: joins the ranks' files of recorded expert loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import command, files
from .errors import BadInput
from .routing import Routing, read

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
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(words)
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
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"routing {path.name}: line {number} is not JSON: {error}") from error
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
