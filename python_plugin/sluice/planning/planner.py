# SPDX-License-Identifier: Apache-2.0
"""Prices choices, and selects the best one with reasons against the others, by `sluice/planner.h`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Union

from .. import restore
from .._library import load
from ..option_values import bytes_text as size
from ..timeline.model import Event
from ..timeline.schedule import LANE_NAMES, WGRAD
from .errors import BadInput
from .machines import Machine

DTYPES = {"f32": 1, "bf16": 2, "f16": 3}
CHUNKINGS = {"adaptive": 0, "tokens": 1}
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "relu2": 5, "swiglu": 6}
DEDUPLICATIONS: dict[bool | str, int] = {False: 0, True: 1, "node": 2}
FASTER = 0.99  # deduplication is chosen if its step takes at most this share of the time without it
FORMATS = {"plain": 0, "mxfp4": 1, "fp8": 2, "int8": 3, "int4": 4}  # of experts' weights; all but plain are frozen
# Numbers of the words in a Workload.
_WORDS: dict[str, Mapping[Any, int]] = {
    "dtype": DTYPES, "deduplicate": DEDUPLICATIONS, "chunking": CHUNKINGS, "activation": ACTIVATIONS,
    "weight_format": FORMATS,
}  # fmt: skip
MOST = 512
BYTES = ("base", "slot", "routing", "schedule", "header", "gemm", "step", "total")

Restore = Union[str, tuple[str, ...], None]  # one policy for all chunks, or one for each chunk


@dataclass(frozen=True)
class Workload:
    """Describes a layer on `world_size` ranks. skew: the most loaded rank's rows, relative to balanced routing."""

    model_width: int
    hidden_width: int
    num_tokens: int
    num_experts: int
    top_k: int
    world_size: int
    dtype: str = "bf16"
    gated: bool = False
    skew: float = 1.0
    memory_budget: int = 0
    max_outstanding: int = 1
    host_memory_budget: int = 0
    deduplicate: bool | str = False  # "node": once to each node; "rank_or_node", "adaptive": see way_by_price
    chunking: str = "adaptive"
    activation: str | None = None  # of the experts; None: unknown, priced as GELU
    may_keep_part: bool = False  # a candidate's policy may apply to only as many of the first chunks as fit
    grouped: bool = False  # predict: combine of a chunk overlaps dispatch of a later one; not under a budget
    lora_rank: int = 0  # of adapters of every matrix; above 0 the weights are frozen
    weight_format: str = "plain"

    @property
    def is_frozen(self) -> bool:
        """Returns whether the experts' own weights have no gradients."""
        return self.lora_rank > 0 or self.weight_format != "plain"

    def with_(self, **changes: Any) -> Workload:
        return replace(self, **changes)


@dataclass(frozen=True)
class Choice:
    """n, the restore policies of T_DI and T_M, and the weight-gradient mode. None (n: 0): open.

    kept_chunks: the policies apply to this many first chunks; the others are sent and computed again. 0: all.
    """

    num_chunks: int = 0
    restore_input: Restore = None
    restore_pre_activation: Restore = None
    wgrad: str | None = None
    kept_chunks: int = 0

    @property
    def policy(self) -> str:
        """Returns the papers' name of the policies, else both words; by chunk: "keep/offload+keep"."""
        pair = (self.restore_input, self.restore_pre_activation)
        words = (one if isinstance(one, str) or one is None else "/".join(one) for one in pair)
        return restore.set_name(pair) or "+".join(map(str, words))

    @property
    def where(self) -> str:
        """Returns the policy and, if the budget limits it to some chunks, their number: "none in 3 of 8"."""
        return f"{self.policy} in {self.kept_chunks} of {self.num_chunks}" if self.kept_chunks else self.policy

    def restores(self, chunks: int, under_plan: bool) -> tuple[list[str], list[str]]:
        """Returns both policies of each chunk. Under a plan, chunks after the kept ones are sent and computed again."""
        kept = self.kept_chunks or self.num_chunks if under_plan else chunks
        pair = []
        for one, least in zip((self.restore_input, self.restore_pre_activation), restore.LEAST):
            named = [str(one)] * kept if isinstance(one, str) or one is None else list(one)[:kept]
            pair.append([*named, *[least] * (chunks - len(named))][:chunks])
        return pair[0], pair[1]

    def __str__(self) -> str:
        return f"n = {self.num_chunks}, {self.where}, weight gradients {str(self.wgrad).replace('_', ' ')}"


@dataclass(frozen=True)
class Prediction:
    """Describes one training step of one layer: seconds by direction and lane, bytes by category."""

    forward: float
    backward: float
    forward_busy: dict[str, float]
    backward_busy: dict[str, float]
    overhead: float
    mpmoe: float
    mpipemoe: float
    error_median: float
    error_p90: float
    bytes: dict[str, int]
    usual_bytes: int  # the total for the rows of this skew instead of the most that any routing gives
    fits: bool
    run_chunks: int
    max_chunks: int
    sent_rows: float
    chunk_rows: int  # rows that the plan allows in one chunk
    events: dict[str, list[Event]]

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def busy(self, lane: str) -> float:
        return self.forward_busy[lane] + self.backward_busy[lane]


@dataclass(frozen=True)
class Candidate:
    """Is a candidate of a decision. verdict: "chosen", "slower", "over budget", "over host budget", "as fast"."""

    choice: Choice
    verdict: str
    forward: float
    backward: float
    slower_by: float
    total_bytes: int
    bytes_over: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def reason(self) -> str:
        """Returns the verdict in words for people."""
        if self.verdict == "slower":
            return f"slower by {100 * self.slower_by:.1f} %"
        if self.verdict.startswith("over"):
            return f"{self.verdict} by {size(self.bytes_over)}"
        return "as fast, but not with fewer chunks" if self.verdict == "as fast" else self.verdict

    def as_dict(self) -> dict[str, Any]:
        """Returns the candidate as plain values. kept_chunks 0: all."""
        return {**asdict(self), "policy": self.choice.policy, "reason": self.reason()}


@dataclass(frozen=True)
class Decision:
    """Has all candidates in order. If none fits, `chosen` is None, and `shortfall` says why and what to do."""

    candidates: tuple[Candidate, ...]
    chosen: Choice | None
    shortfall: str = ""


class Planner:
    """Plans for one machine. Raises InvalidArgument that names a wrong field of it. Immutable; any thread."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._library = load()
        text = json.dumps(machine.data, ensure_ascii=False).encode()  # the library does not read JSON escapes
        out = self._library.ffi.new("sluice_planner_t **")
        self._library.check(self._library.lib.sluice_planner_create(text, len(text), out))
        self._handle = self._library.ffi.gc(out[0], self._library.lib.sluice_planner_destroy)

    @property
    def handle(self) -> Any:
        """Returns the `sluice_planner_t`, which this object owns."""
        return self._handle

    def written(self) -> dict[str, Any]:
        """Returns the machine as the library has read it, with rates as points."""
        return dict(json.loads(self._library.text(self._library.lib.sluice_planner_write_machine, self._handle)))

    def workload(self, work: Workload) -> Any:
        """Returns a `sluice_planner_workload_t` with the same policies for all chunks."""
        return self._workload(work, None)[0]

    def _workload(self, work: Workload, choice: Choice | None) -> tuple[Any, list[Any]]:
        """Returns the struct, and the lists that the struct points to."""
        value = self._library.new("planner_workload")
        for each in fields(work):
            given = getattr(work, each.name)
            setattr(value, each.name, _WORDS[each.name][given] if each.name in _WORDS else given)
        lists: list[Any] = []
        for name, table in (("restore_input", restore.INPUT), ("restore_pre_activation", restore.PRE_ACTIVATION)):
            words = None if choice is None else getattr(choice, name)
            if words is None or isinstance(words, str):
                continue
            if len(words) != choice.num_chunks:
                raise BadInput(f"{name} names {len(words)} chunks, and n is {choice.num_chunks}: give one for each")
            lists.append(self._library.ffi.new("int32_t[]", [table[word] for word in words]))
            setattr(value, f"{name}_of", lists[-1])
        return value, lists

    def _choice(self, choice: Choice) -> Any:
        value = self._library.ffi.new("sluice_planner_choice_t *")
        value.num_chunks = choice.num_chunks
        value.restore_input = _number(restore.INPUT, choice.restore_input)
        value.restore_pre_activation = _number(restore.PRE_ACTIVATION, choice.restore_pre_activation)
        value.wgrad_mode = -1 if choice.wgrad is None else WGRAD[choice.wgrad]
        return value

    def predict(self, work: Workload, choice: Choice, timeline: bool = False) -> Prediction:
        """Prices one choice. timeline: the result also has every op of both passes."""
        library, ffi = self._library, self._library.ffi
        out = ffi.new("sluice_planner_prediction_t *")
        out.struct_size = ffi.sizeof(out[0])
        capacity = 8192 if timeline else 0
        entries = ffi.new("sluice_planner_entry_t[]", capacity) if timeline else ffi.NULL
        asked, _lists = self._workload(work, choice)
        asked.kept_chunks = choice.kept_chunks
        library.check(
            library.lib.sluice_planner_predict(self._handle, asked, self._choice(choice), out, entries, capacity)
        )
        count = min(out.num_entries, capacity)
        events: dict[str, list[Event]] = {"forward": [], "backward": []}
        for index in range(count):
            entry = entries[index]
            direction = "backward" if entry.direction else "forward"
            place = LANE_NAMES[entry.lane], entry.begin_seconds, entry.end_seconds, entry.chunk, direction
            events[direction].append(Event(ffi.string(entry.op).decode(), *place))
        return Prediction(
            forward=out.forward_seconds,
            backward=out.backward_seconds,
            forward_busy=dict(zip(LANE_NAMES, out.forward_busy)),
            backward_busy=dict(zip(LANE_NAMES, out.backward_busy)),
            overhead=2 * out.overhead_seconds,
            mpmoe=out.mpmoe_forward_seconds + out.mpmoe_backward_seconds,
            mpipemoe=out.mpipemoe_forward_seconds + out.mpipemoe_backward_seconds,
            error_median=out.machine_error_median,
            error_p90=out.machine_error_p90,
            bytes={name: getattr(out, f"{name}_bytes") for name in BYTES},
            usual_bytes=out.usual_bytes,
            fits=bool(out.fits),
            run_chunks=out.run_chunks,
            max_chunks=out.max_chunks,
            sent_rows=out.sent_rows,
            chunk_rows=out.chunk_rows,
            events=events,
        )

    def choose(self, work: Workload, wanted: Choice | None = None) -> Decision:
        """Chooses the fastest candidate that fits, and says why each other candidate was not chosen."""
        library, ffi = self._library, self._library.ffi
        listed = ffi.new("sluice_planner_candidate_t[]", MOST)
        count, chosen = ffi.new("int32_t *"), ffi.new("int32_t *")
        want = ffi.NULL if wanted is None else self._choice(wanted)
        asked, _lists = self._workload(work, wanted)
        shortfall = library.shortfall(
            library.lib.sluice_planner_choose(self._handle, asked, want, listed, MOST, count, chosen)
        )
        candidates = tuple(self.candidate(listed[index], wanted) for index in range(min(count[0], MOST)))
        best = None if chosen[0] < 0 else candidates[chosen[0]].choice
        return Decision(candidates, best, shortfall)

    def candidate(self, c: Any, wanted: Choice | None = None) -> Candidate:
        """Converts a `sluice_planner_candidate_t`. wanted: the request, for policies that differ by chunk."""
        names = [
            {number: name for name, number in table.items()} for table in (restore.INPUT, restore.PRE_ACTIVATION, WGRAD)
        ]
        if wanted is not None:
            names[0][restore.BY_CHUNK], names[1][restore.BY_CHUNK] = wanted.restore_input, wanted.restore_pre_activation
        numbers = (c.choice.restore_input, c.choice.restore_pre_activation, c.choice.wgrad_mode)
        kept = c.kept_chunks if c.kept_chunks < c.choice.num_chunks else 0
        words = (table[number] for table, number in zip(names, numbers))
        choice = Choice(c.choice.num_chunks, *words, kept_chunks=kept)
        verdict = self._library.ffi.string(self._library.lib.sluice_planner_verdict_name(c.verdict)).decode()
        times = c.forward_seconds, c.backward_seconds, c.slower_by
        return Candidate(choice, verdict, *times, c.total_bytes, c.bytes_over)


def weight_bytes(weight_format: str, dtype: str, num_out: int, num_in: int) -> tuple[int, int]:
    """Returns the bytes of codes (plain: elements of dtype) and scales of a weight [out, in], by sluice_weights_bytes.
    Raises InvalidArgument if the format does not support these widths."""
    library = load()
    codes, scales = library.ffi.new("uint64_t *"), library.ffi.new("uint64_t *")
    shape = FORMATS[weight_format], 0, DTYPES[dtype], num_out, num_in
    library.check(library.lib.sluice_weights_bytes(*shape, codes, scales))
    return codes[0], scales[0]


def way_by_price(planner: Planner, work: Workload, wanted: Choice | None = None) -> Workload:
    """Returns the workload with the fastest predicted deduplication, if the workload leaves that open, as the tuner
    chooses it with this machine. If several are equal, or if none fits, the first."""
    if work.deduplicate == "rank_or_node":
        ways: tuple[bool | str, ...] = (True, "node")
    elif work.deduplicate == "adaptive":
        ways = (False, True, "node") if _may_be_deduplicated(planner, work) else (False,)
    else:
        return work
    first, *others = (work.with_(deduplicate=way) for way in ways)
    if not others:
        return first
    seconds = {}
    for one in (first, *others):
        chosen = planner.choose(one, wanted).chosen
        seconds[one] = planner.predict(one, chosen).seconds if chosen else float("inf")
    if first.deduplicate is False:  # deduplication must be 1 % faster
        seconds[first] *= FASTER
    return min(seconds, key=lambda one: seconds[one])


def _may_be_deduplicated(planner: Planner, work: Workload) -> bool:
    """Returns whether "adaptive" may deduplicate: not on a device and not under a budget (SLUICE_DEDUPLICATE_ANY)."""
    is_bounded = work.memory_budget > 0 or work.host_memory_budget > 0
    return work.world_size > 1 and work.top_k > 1 and not is_bounded and not planner.machine.memory_bytes


def priced_activation(name: str | None) -> str | None:
    """Returns the activation of a workload: no activation is priced as relu. None: unknown name."""
    return "relu" if name == "identity" else name if name in ACTIVATIONS else None


def _number(table: Mapping[str, int], words: Restore) -> int:
    if words is None:
        return restore.ADAPTIVE
    return table[words] if isinstance(words, str) else restore.BY_CHUNK


def words_of_error(median: float, p90: float) -> str:
    """Returns a phrase for people about a machine's prediction error. 0: not measured."""
    if median == 0:
        return "error not measured: this machine is a profile, not a calibration"
    return f"error on sizes held out of the calibration: median {100 * median:.1f} %, 90th percentile {100 * p90:.1f} %"
