# SPDX-License-Identifier: Apache-2.0
"""Reads the schedule of a pass from the C library, and predicts the time of the pass from the time of each op."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import restore
from .._library import load
from .model import Event, Panel
from .slots import bytes_over_time, occupancy

DIRECTIONS = {"forward": 0, "backward": 1}
WGRAD = {"deferred": 0, "per_chunk": 1}
LANE_NAMES = ("compute", "comm", "copy_out", "copy_in")


@dataclass(frozen=True)
class Prediction:
    """Describes one simulated pass: its seconds, busy seconds by lane, begin and end of each op."""

    schedule: Schedule
    seconds: float
    busy: dict[str, float]
    begin: tuple[float, ...]
    end: tuple[float, ...]

    def events(self, layer: int = 0, rank: int = 0, at: float = 0.0) -> list[Event]:
        """Returns the ops as events, shifted by `at` seconds; ops that take no time are left out."""
        direction = self.schedule.data["direction"]
        return [
            Event(op["kind"], op["lane"], at + begin, at + end, op["chunk"], direction, layer, rank, label_of(op))
            for op, begin, end in zip(self.schedule.data["ops"], self.begin, self.end)
            if end > begin
        ]

    def panel(self, title: str, slot_bytes: Mapping[str, float] | None = None, layer: int = 0, rank: int = 0) -> Panel:
        """Returns a panel with slots, and with bytes if `slot_bytes` has the size of a slot of each tensor."""
        return self.schedule.panel(title, self.events(layer, rank), self.begin, self.end, slot_bytes)


def label_of(op: Mapping[str, Any]) -> str:
    """Returns the kind and the tensor of a copy; "" for other ops, whose kind is their label."""
    if op["kind"] not in ("copy_out", "copy_in"):
        return ""
    host = (op["writes"] if op["kind"] == "copy_out" else op["reads"])[0][0]
    return f"{op['kind']} {host.removeprefix('host ')}"


class Schedule:
    """Has an immutable schedule. `data` is the parsed JSON of sluice_schedule_json."""

    def __init__(self, handle: Any, data: dict[str, Any]) -> None:
        self._handle = handle
        self.data = data

    @staticmethod
    def build(
        direction: str = "forward",
        chunks: int = 1,
        restore_input: str | Sequence[str] = restore.KEPT[0],
        restore_pre_activation: str | Sequence[str] = restore.KEPT[1],
        *,
        wgrad: str = "deferred",
        single_rank: bool = False,
        needs_backward: bool = True,
        callback_experts: bool = False,
        gated: bool = False,
        dgrad: bool = True,
        wgrad_call: int = 1,  # SLUICE_WGRAD_CALL_*
        may_reuse_saved: bool = False,
        under_plan: bool = False,
        deduplicate: bool | int = False,  # 2: by node
        chunks_by_experts: bool = False,
    ) -> Schedule:
        """Builds a schedule. A restore policy is one name for all chunks, or a list by chunk. Raises library errors."""
        inputs = _by_chunk("restore_input", restore_input, restore.INPUT, chunks)
        pre_activations = _by_chunk("restore_pre_activation", restore_pre_activation, restore.PRE_ACTIVATION, chunks)
        number = _number("direction", direction, DIRECTIONS)
        flags = (single_rank, needs_backward, callback_experts, gated, dgrad, may_reuse_saved, under_plan)
        flags += (deduplicate, chunks_by_experts)
        wgrad_number = _number("wgrad", wgrad, WGRAD)
        return _build(
            number, int(chunks), inputs, pre_activations, wgrad_number, int(wgrad_call), tuple(map(int, flags))
        )

    @property
    def num_ops(self) -> int:
        return len(self.data["ops"])

    def panel(
        self,
        title: str,
        events: list[Event],
        begin: Sequence[float],
        end: Sequence[float],
        slot_bytes: Mapping[str, float] | None = None,
    ) -> Panel:
        """Returns a panel of `events` with the slots that the ops hold. begin and end are by op."""
        panel = Panel(title, events, holds=occupancy(self.data, begin, end))
        if slot_bytes is not None:
            panel.bytes = bytes_over_time(panel.holds, slot_bytes)
            panel.reserved_bytes = sum(count * slot_bytes.get(name, 0) for name, count in self.data["rings"].items())
        return panel

    def costs(self, seconds: Mapping[Any, float]) -> list[float]:
        """Returns seconds by op, from {kind: seconds} or {(kind, chunk): seconds}; other kinds take no time."""
        known = {op["kind"] for op in self.data["ops"]}
        listed = []
        for op in self.data["ops"]:
            value = seconds.get((op["kind"], op["chunk"]), seconds.get(op["kind"], 0.0))
            listed.append(float(value))
        if not known & {key[0] if isinstance(key, tuple) else key for key in seconds}:
            raise ValueError(
                f"costs: none of {', '.join(sorted(map(str, seconds)))} is an op here: {', '.join(sorted(known))}"
            )
        return listed

    def predict(self, seconds: Mapping[Any, float] | Sequence[float]) -> Prediction:
        """Predicts a pass. `seconds`: by kind, by (kind, chunk), or by op."""
        library = load()
        ffi = library.ffi
        costs = self.costs(seconds) if isinstance(seconds, Mapping) else [float(value) for value in seconds]
        if len(costs) != self.num_ops:
            raise ValueError(f"predict: {len(costs)} costs; the schedule has {self.num_ops} ops")
        begin, end = ffi.new("double[]", self.num_ops), ffi.new("double[]", self.num_ops)
        out = ffi.new("sluice_schedule_prediction_t *")
        out.struct_size = ffi.sizeof(out[0])
        given = self._handle, ffi.new("double[]", costs), ffi.NULL
        status = library.lib.sluice_schedule_predict(*given, begin, end, out)
        library.check(status)
        busy = dict(zip(LANE_NAMES, out.busy_seconds))
        return Prediction(self, out.seconds, busy, tuple(begin), tuple(end))


def _number(name: str, value: str, known: Mapping[str, int]) -> int:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; known are {', '.join(known)}")
    return known[value]


def _by_chunk(name: str, value: str | Sequence[str], known: Mapping[str, int], chunks: int) -> tuple[int, ...]:
    names = [value] * int(chunks) if isinstance(value, str) else list(value)
    if len(names) != chunks:
        raise ValueError(f"{name} names {len(names)} chunks, there are {chunks}")
    return tuple(_number(name, one, known) for one in names)


@functools.lru_cache(maxsize=512)
def _build(
    direction: int,
    chunks: int,
    inputs: tuple[int, ...],
    pre_activations: tuple[int, ...],
    wgrad_mode: int,
    wgrad_call: int,
    flags: tuple[int, ...],
) -> Schedule:
    library = load()
    ffi, lib = library.ffi, library.lib
    config = library.new("schedule_config")
    config.direction, config.num_chunks = direction, chunks
    config.wgrad_mode, config.wgrad = wgrad_mode, wgrad_call
    (
        config.single_rank,
        config.needs_backward,
        config.callback_experts,
        config.gated,
        config.dgrad,
        config.may_reuse_saved,
        config.under_plan,
        config.deduplicate,
        config.chunks_by_experts,
    ) = flags
    by_chunk = ffi.new("int32_t[]", inputs or (0,)), ffi.new("int32_t[]", pre_activations or (0,))
    config.restore_input_of, config.restore_pre_activation_of = by_chunk
    out = ffi.new("sluice_schedule_t **")
    library.check(lib.sluice_schedule_create(config, out))
    handle = ffi.gc(out[0], lib.sluice_schedule_destroy)
    return Schedule(handle, json.loads(library.text(lib.sluice_schedule_json, handle)))
