"""Problems of the planner over layers as JSON files, for `sluice plan --stages`. What is wrong is refused by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..option_values import ConfigError, number_of_bytes
from .errors import BadInput
from .planner import ACTIVATIONS, CHUNKINGS, DTYPES, Workload, priced_activation
from .stages import KINDS, METHODS, SCHEDULES, Layer, Link, Option, Problem

MOST_LAYERS = 65536
_Read = Callable[[str, Any], Any]


@dataclass(frozen=True)
class StagesFile:
    """machine: of MoE layers, None where the file names none."""

    problem: Problem
    machine: str | None


# ---- values ----


def _fail(where: str, wanted: str, value: Any) -> BadInput:
    return BadInput(f"{where} is {value!r}; it must be {wanted}")


def _whole(least: int) -> _Read:
    def read(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise _fail(where, f"a whole number from {least} on", value)
        return value

    return read


def _seconds(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise _fail(where, "a number from 0 on", value)
    return float(value)


def _bytes(where: str, value: Any) -> int:
    if value == 0 and not isinstance(value, bool):
        return 0
    try:
        return number_of_bytes(where, value)
    except ConfigError:
        raise _fail(where, 'bytes, or text such as "20GiB"', value) from None


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _fail(where, "true or false", value)
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _fail(where, "text", value)
    return value


def _one_of(known: tuple[str, ...]) -> _Read:
    def read(where: str, value: Any) -> str:
        if value not in known:
            raise _fail(where, f"one of {', '.join(known)}", value)
        return value

    return read


def _list_of(read: _Read) -> _Read:
    def read_all(where: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _fail(where, "a list", value)
        return tuple(read(f"{where}[{i}]", one) for i, one in enumerate(value))

    return read_all


def _object(where: str, value: Any, fields: dict[str, _Read], needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields that are there, read. An unknown one is refused with the known ones."""
    place = where or "the file"
    if not isinstance(value, dict):
        raise _fail(place, "an object", value)
    for key in value:
        if key not in fields:
            raise BadInput(f"{place}: unknown field {key!r}; known are {', '.join(fields)}")
    for key in needed:
        if key not in value:
            raise BadInput(f"{place}: the field {key!r} is missing")
    return {key: fields[key](f"{where}.{key}" if where else key, one) for key, one in value.items()}


# ---- layers ----

_WORK: dict[str, _Read] = {
    "model_width": _whole(1),
    "hidden_width": _whole(1),
    "num_tokens": _whole(1),
    "num_experts": _whole(1),
    "top_k": _whole(1),
    "world_size": _whole(1),
    "dtype": _one_of(tuple(DTYPES)),
    "gated": _flag,
    "skew": _seconds,
    "deduplicate": _flag,
    "chunking": _one_of(tuple(CHUNKINGS)),
    "activation": _one_of(("identity", *(name for name in ACTIVATIONS if name is not None))),
}


def _workload(where: str, value: Any) -> Workload:
    needed = ("model_width", "hidden_width", "num_tokens", "num_experts", "top_k", "world_size")
    found = _object(where, value, _WORK, needed)
    return Workload(**{**found, "activation": priced_activation(found.get("activation"))})


_OPTION: dict[str, _Read] = {
    "kind": _one_of(KINDS),
    "forward_seconds": _seconds,
    "backward_seconds": _seconds,
    "resident_bytes": _bytes,
    "held_bytes": _bytes,
    "copied_bytes": _bytes,
    "working_bytes": _bytes,
    "arena_bytes": _bytes,
}


def _option(where: str, value: Any) -> Option:
    return Option(**_object(where, value, _OPTION))


_LAYER: dict[str, _Read] = {
    "name": _text,
    "repeat": _whole(1),
    "forward_seconds": _seconds,
    "backward_seconds": _seconds,
    "recompute_seconds": _seconds,
    "activation_bytes": _bytes,
    "checkpoint_bytes": _bytes,
    "workspace_bytes": _bytes,
    "parameter_bytes": _bytes,
    "state_bytes": _bytes,
    "output_bytes": _bytes,
    "may_recompute": _flag,
    "may_offload": _flag,
    "moe": _workload,
    "options": _list_of(_option),
}


def _layers(where: str, value: Any) -> tuple[Layer, ...]:
    """An entry with "repeat" stands for so many, one behind the other; with "layers" it is a list of its own."""
    layers: list[Layer] = []
    for found, count in _list_of(_entry)(where, value):
        if len(layers) + len(found) * count > MOST_LAYERS:
            raise BadInput(f"{where} has more than {MOST_LAYERS} layers")
        layers += found * count
    return tuple(layers)


def _entry(where: str, value: Any) -> tuple[list[Layer], int]:
    """A layer or a list of them, and how often."""
    if isinstance(value, dict) and "layers" in value:
        found = _object(where, value, {"layers": _layers, "repeat": _whole(1)})
        return list(found["layers"]), found.get("repeat", 1)
    found = _object(where, value, _LAYER)
    count = found.pop("repeat", 1)
    return [Layer(**found)], count


# ---- the file ----

_LINK: dict[str, _Read] = {"bytes_per_second": _seconds, "latency_seconds": _seconds, "full_duplex": _flag}


def _link(where: str, value: Any) -> Link:
    return Link(**_object(where, value, _LINK, ("bytes_per_second",)))


def _each_or_list(read: _Read) -> _Read:
    """One for all stages, or a list by stage: what is not a list is the same for all."""

    def read_any(where: str, value: Any) -> Any:
        return _list_of(read)(where, value) if isinstance(value, list) else read(where, value)

    return read_any


def _edge(where: str, value: Any) -> tuple[int, int]:
    found = _list_of(_whole(0))(where, value)
    if len(found) != 2:
        raise _fail(where, "[from, to], two numbers of layers", value)
    return found[0], found[1]


_FILE: dict[str, _Read] = {
    "sluice_stages": _whole(1),
    "machine": _text,
    "layers": _layers,
    "edges": _list_of(_edge),
    "stages": _whole(1),
    "micro_batches": _whole(1),
    "schedule": _one_of(SCHEDULES),
    "in_flight": _each_or_list(_whole(1)),
    "in_flight_limit": _whole(0),
    "links": _each_or_list(_link),
    "budget": _each_or_list(_bytes),
    "base_bytes": _bytes,
    "copy_bytes_per_second": _seconds,
    "weight_versions": _flag,
    "copies_share_links": _flag,
    "method": _one_of(METHODS),
}
_NAMES = {"stages": "num_stages", "micro_batches": "num_micro_batches", "budget": "budget_bytes"}


def parse(text: str) -> StagesFile:
    """Raise BadInput naming the field, what was found and what it may be."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}") from error
    found = _object("", data, _FILE, ("sluice_stages", "layers"))
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
    """The same of a file; messages begin with its name."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--stages {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return parse(text)
    except BadInput as error:
        raise BadInput(f"--stages {path}: {error.message}") from None
