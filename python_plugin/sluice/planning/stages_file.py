# SPDX-License-Identifier: Apache-2.0
"""Reads problems of the stage planner from JSON files, for `sluice plan --stages`. Errors name the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from . import files
from .errors import BadInput
from .files import Read, each_or_list, flag, list_of, members, one_of, refused, seconds, size, text, whole
from .planner import ACTIVATIONS, CHUNKINGS, DTYPES, FORMATS, Workload, priced_activation
from .stages import KINDS, METHODS, SCHEDULES, Layer, Link, Option, Problem

MOST_LAYERS = 65536


@dataclass(frozen=True)
class StagesFile:
    """Has the content of a file. machine: of MoE layers, None if the file names none."""

    problem: Problem
    machine: str | None


# ---- layers ----

_NEEDED = ("model_width", "hidden_width", "num_tokens", "num_experts", "top_k", "world_size")
_WORK: dict[str, Read] = {
    **dict.fromkeys(_NEEDED, whole(1)),
    "dtype": one_of(tuple(DTYPES)),
    "gated": flag,
    "skew": seconds,
    "deduplicate": flag,
    "chunking": one_of(tuple(CHUNKINGS)),
    "lora_rank": whole(0),
    "weight_format": one_of(tuple(FORMATS)),
    "activation": one_of(("identity", *(name for name in ACTIVATIONS if name is not None))),
}


def _workload(where: str, value: Any) -> Workload:
    found = members(where, value, _WORK, _NEEDED)
    return Workload(**{**found, "activation": priced_activation(found.get("activation"))})


_BY_TYPE: dict[str, Read] = {"float": seconds, "int": size, "bool": flag, "str": text}


def _numbers(kind: type) -> Iterator[tuple[str, Read]]:
    """Yields readers of the fields of a dataclass that are plain values. Its integers are bytes."""
    return ((field.name, _BY_TYPE[str(field.type)]) for field in dataclasses.fields(kind) if field.type in _BY_TYPE)


_OPTION: dict[str, Read] = {**dict(_numbers(Option)), "kind": one_of(KINDS)}


def _option(where: str, value: Any) -> Option:
    return Option(**members(where, value, _OPTION))


_LAYER: dict[str, Read] = {
    "name": text,
    "repeat": whole(1),
    **dict(_numbers(Layer)),
    "moe": _workload,
    "options": list_of(_option),
}


def _layers(where: str, value: Any) -> tuple[Layer, ...]:
    """Reads layers. "repeat" in an entry repeats it in sequence; an entry with "layers" is a nested list."""
    layers: list[Layer] = []
    for found, count in list_of(_entry)(where, value):
        if len(layers) + len(found) * count > MOST_LAYERS:
            raise BadInput(f"{where} has more than {MOST_LAYERS} layers")
        layers += found * count
    return tuple(layers)


def _entry(where: str, value: Any) -> tuple[list[Layer], int]:
    """Reads a layer or a list of layers, and the number of repetitions."""
    if isinstance(value, dict) and "layers" in value:
        found = members(where, value, {"layers": _layers, "repeat": whole(1)})
        return list(found["layers"]), found.get("repeat", 1)
    found = members(where, value, _LAYER)
    count = found.pop("repeat", 1)
    return [Layer(**found)], count


# ---- the file ----

_LINK = dict(_numbers(Link))


def _link(where: str, value: Any) -> Link:
    return Link(**members(where, value, _LINK, ("bytes_per_second",)))


def _edge(where: str, value: Any) -> tuple[int, int]:
    found = list_of(whole(0))(where, value)
    if len(found) != 2:
        raise refused(where, "[from, to], two numbers of layers", value)
    return found[0], found[1]


_FILE: dict[str, Read] = {
    "sluice_stages": whole(1),
    "machine": text,
    "layers": _layers,
    "edges": list_of(_edge),
    "stages": whole(1),
    "micro_batches": whole(1),
    "schedule": one_of(SCHEDULES),
    "in_flight": each_or_list(whole(1)),
    "in_flight_limit": whole(0),
    "links": each_or_list(_link),
    "budget": each_or_list(size),
    "base_bytes": size,
    "copy_bytes_per_second": seconds,
    "weight_versions": flag,
    "copies_share_links": flag,
    "method": one_of(METHODS),
}
_NAMES = {"stages": "num_stages", "micro_batches": "num_micro_batches", "budget": "budget_bytes"}


def parse(words: str) -> StagesFile:
    """Parses a file. BadInput names the field, what was found and what is allowed."""
    data = files.from_json("", words)
    found = members("", data, _FILE, ("sluice_stages", "layers"))
    if found.pop("sluice_stages") != 1:
        raise BadInput(f"sluice_stages is {data['sluice_stages']}; this version reads 1")
    found["layers"] = tuple(replace(layer, name=layer.name or f"layer {i}") for i, layer in enumerate(found["layers"]))
    machine, stages = found.pop("machine", None), found.get("stages", 1)
    for name, count in (("in_flight", stages), ("links", stages - 1), ("budget", stages)):
        if name in found and not isinstance(found[name], tuple):
            found[name] = (found[name],) * count
        if name in found and len(found[name]) != count:
            raise BadInput(f"{name} has {len(found[name])} entries; for {stages} stages it must have {count}")
    return StagesFile(Problem(**{_NAMES.get(name, name): value for name, value in found.items()}), machine)


def read(path: str) -> StagesFile:
    """Reads and parses a file. Messages begin with its name."""
    words = files.read(f"--stages {path}", path)
    try:
        return parse(words)
    except BadInput as error:
        raise BadInput(f"--stages {path}: {error.message}") from None
