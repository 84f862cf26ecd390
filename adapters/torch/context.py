# SPDX-License-Identifier: Apache-2.0
"""Makes the context that all layers of one model on one rank share: slots, lanes, GEMMs, statistics."""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sluice import decision_log, file_trust
from sluice.options import ContextOptions

import torch

from ... import trace
from ..._library import load
from ...errors import InvalidState
from . import tuner
from ._native import generation, native
from .gradient_pool import give_back
from .group import EpGroup
from .options import fill, values_of
from .placement import placement_of

_LANES = ("compute", "comm", "copy_out", "copy_in")
_DIRECTIONS = ("forward", "backward")
_SEVERAL = -1  # not the number of a thread

_alive: weakref.WeakSet[Context] = weakref.WeakSet()


def all_alive() -> list[Context]:
    """Returns the contexts of this process that are not closed."""
    return [context for context in list(_alive) if context.alive]


def _remember_all() -> None:
    """Runs at exit, before the groups close: writes decisions to the cache for `sluice doctor` and the next run."""
    for context in list(_alive):
        with contextlib.suppress(Exception):
            context.remember()


def release(destroy: Any, handle: Any, made_in: int) -> None:
    """Destroys a handle in the process that made it. In a forked child the library's threads do not exist."""
    if made_in == generation():
        destroy(handle)


def divide_budget(total: int, weights: Sequence[int], needs: Sequence[Sequence[int]] = ()) -> list[int]:
    """Divides one memory budget among contexts, by the rule of sluice/plan.h.

    weights  for each context the bytes of its layers' rows
    needs    for each context the result of `smallest_budgets`; left out while the number of tokens is unknown
    """
    library = load()
    sizes = min(map(len, needs), default=0)
    flat = library.ffi.new("uint64_t[]", [need for of_one in needs for need in of_one[:sizes]])
    out = library.ffi.new("uint64_t[]", len(weights))
    library.check(library.lib.sluice_budget_divide(total, len(weights), list(weights), sizes, flat, out))
    return list(out)


class Context:
    """Exists once per EP group, model and device. It ends with `close`, or when it and its layers are garbage.

    device: where the layers' parameters and tokens are; None: the CPU. On CUDA calls use torch's current stream, and
    the ranks of a group exchange by NCCL.
    """

    def __init__(
        self,
        ep_group: EpGroup | None = None,
        options: ContextOptions | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.placement = placement_of(device)
        self.ep_group = ep_group or EpGroup.for_ranks()
        self.options = options or ContextOptions()
        library = load()
        ffi = library.ffi
        if not self.ep_group.alive:
            raise InvalidState(f"{self.ep_group!r} cannot be used for another context")
        config = library.new("context_config")
        kept = fill(config, self.options, ContextOptions)
        if self.options.gemm_library is not None:
            file_trust.warn(self.options.gemm_library)
        per_node = self.options.ranks_per_node or self.ep_group.ranks_per_node()
        config.ranks_per_node = per_node if per_node < self.ep_group.world_size else 0  # a group within one node
        config.device_type, config.device_id = self.placement.code, self.placement.index
        if not self.placement.is_cuda:
            config.host_gemm = ffi.cast("sluice_host_gemm_fn_t", native().gemm_address)
        out = ffi.new("sluice_context_t **")
        comm = self.ep_group.comm_on(self.placement) or ffi.NULL
        library.check(library.lib.sluice_context_create(config, comm, out))
        del kept  # copied
        self._handle = out[0]
        self._generation = generation()
        self.lock = threading.RLock()  # see CastingLayer
        self._backward_thread: int | None = None
        self.passes_in_place = 0  # backwards that added to existing gradients of parameters, without autograd
        self.calls = 0  # passes running now, in any thread
        self._is_tuned = False
        self._raw_stats = ffi.new("sluice_context_stats_t *")
        self._raw_stats.struct_size = ffi.sizeof(self._raw_stats[0])
        self._fallback_chunks = 0
        self._remembers = True
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.layer_facts: dict[str, dict[str, Any]] = {}  # by layer id, for the record of a trace that is kept
        self._finalizer = weakref.finalize(
            self, release, library.lib.sluice_context_destroy, self._handle, self._generation
        )
        self._finalizer.atexit = False  # the group's exit handler does it in the right order
        self.ep_group.adopt(self)
        atexit.unregister(_remember_all)
        atexit.register(_remember_all)  # registered last: it runs before the group's handler
        _alive.add(self)

    @property
    def alive(self) -> bool:
        return self._finalizer.alive and self._generation == generation()

    @property
    def is_budgeted(self) -> bool:
        return self.options.memory_budget is not None or self.options.host_memory_budget is not None

    @property
    def is_unused(self) -> bool:
        """Returns whether no layer of this context is left."""
        return len(self._layers) == 0

    def set_share(self, share: int, whole: int) -> None:
        """Replaces the options' share of the budget `whole`. Call it before the first plan, equally on all ranks."""
        library = load()
        library.check(library.lib.sluice_context_set_share(self.handle, share, whole))
        self.options = replace(self.options, memory_budget=share, shared_memory_budget=whole)

    def smallest_budgets(self, layers: Sequence[Any], tokens: int, most: int) -> list[int]:
        """Returns the context's smallest budgets for forwards of these layers: with `tokens` tokens, then with larger
        batches. The list ends with the first budget above `most`. `divide_budget` takes it."""
        library = load()
        ffi = library.ffi
        handles = ffi.new("sluice_moe_t *[]", [layer.handle for layer in layers])
        count, out = ffi.new("int32_t *"), ffi.new("uint64_t[]", ffi.integer_const("SLUICE_BUDGET_SIZES"))
        library.check(library.lib.sluice_moe_smallest_budgets(handles, len(handles), tokens, most, count, out))
        return list(out[0 : count[0]])

    @property
    def handle(self) -> Any:
        """Returns the library's pointer, or raises an error that says why there is none."""
        if self._generation != generation():
            raise InvalidState("this context was made before a fork: only the parent process may use it")
        if not self._finalizer.alive:
            raise InvalidState("this context has been closed")
        return self._handle

    def is_of_one_thread(self) -> bool:
        """Returns whether every backward so far ran in one thread. Called by each backward, one at a time.

        Autograd holds a lock while it adds to a `.grad`, and this code cannot take that lock. A pass therefore adds to
        a `.grad` itself only if no other thread's backward could add at the same time.
        """
        thread = threading.get_ident()
        if self._backward_thread is None:
            self._backward_thread = thread
        elif self._backward_thread != thread:
            self._backward_thread = _SEVERAL
        return self._backward_thread == thread

    def adopt(self, layer: Any) -> None:
        """Closes this layer together with the context."""
        self._layers.add(layer)

    def close(self) -> None:
        if self.alive:
            trace.closing(self)
            with contextlib.suppress(Exception):
                self.remember()
        for layer in list(self._layers):
            layer.close()
        self._finalizer()
        if not all_alive():
            give_back()  # no context is left that uses it

    def tune_for(self, model_width: int, hidden_width: int, dtype: int) -> None:
        """Sets up the tuner before the first layer is made. Called before each layer. Collective if the tuner's options
        have calibrate or decisions."""
        if self._is_tuned or self.options.tuner is None:
            return
        tuner.prepare(self, self.options.tuner, (model_width, hidden_width, dtype))
        self._is_tuned = True

    def decisions(self) -> list[dict[str, Any]]:
        """Returns the tuner's decisions and their reasons (docs/tuning.md)."""
        return tuner.decisions(self.handle)

    def remember(self) -> None:
        """Writes decisions to the cache folder and to the file that the options name, once, on the group's first rank.

        Not collective.
        """
        if not self.alive or self.calls or not self._remembers or self.ep_group.rank != 0:
            return
        found = [entry for entry in self.decisions() if entry["why"] != "the only one left"]
        self._remembers = False
        place = None if self.options.tuner is None else self.options.tuner.cache
        if self.options.tuner is not None and self._is_tuned:
            tuner.keep(self, self.options.tuner)
        decision_log.append([{"ranks": len(self.ep_group.ranks), **entry} for entry in found], place)

    def decisions_json(self) -> str:
        """Returns the decisions as JSON, for a file that a later run names as the tuner's "pinned" or "decisions"."""
        return load().text(load().lib.sluice_context_write_decisions, self.handle)

    def learn(self, text: str) -> None:
        """Imports the decisions of another context's `decisions_json` for those kinds of layers and sizes of batches
        for which this context has none. Called on all ranks with the same text."""
        given = json.loads(text)
        known = {(each["layer"], each["rows"]) for each in self.answers()}
        given["answers"] = [each for each in given["answers"] if (each["layer"], each["rows"]) not in known]
        if given["answers"]:
            tuner.read_decisions(self.handle, json.dumps(given).encode())

    def answers(self) -> list[dict[str, Any]]:
        """Returns the decisions as plain values, one for each kind of layer and size of batch."""
        return list(json.loads(self.decisions_json())["answers"])

    def machine_json(self) -> str:
        """Returns the tuner's machine, corrected by steps, for `sluice plan --machine` or "tuner": {"machine": ...}.
        InvalidState if it has none, or too few steps have run."""
        return load().text(load().lib.sluice_context_write_machine, self.handle)

    def tuner_stats(self) -> dict[str, Any]:
        """Returns passes timed and raced, seconds that races cost, how often the papers' hypotheses held."""
        library = load()
        out = library.ffi.new("sluice_tuner_stats_t *")
        out.struct_size = library.ffi.sizeof(out[0])
        library.check(library.lib.sluice_context_tuner_stats(self.handle, out))
        return values_of(out)

    def stats(self, reset_peak: bool = False) -> dict[str, Any]:
        """Returns bytes, times and counts of all passes so far."""
        library = load()
        out = self._raw_stats
        library.check(library.lib.sluice_context_get_stats(self.handle, int(reset_peak), out))
        values = values_of(out)
        values["gemm"] = library.ffi.string(out.gemm).decode()
        values["last_deduplicate"] = tuner.DEDUPLICATIONS[out.last_deduplicate]
        values["deduplication"] = tuner.deduplication(self.handle)
        values["passes_in_place"] = self.passes_in_place
        return values

    def last_deduplicate(self) -> bool | str:
        """Returns the deduplication of the last pass, as a value of the option. Cheaper than `stats`."""
        library = load()
        library.check(library.lib.sluice_context_get_stats(self.handle, 0, self._raw_stats))
        return tuner.DEDUPLICATIONS[self._raw_stats.last_deduplicate]

    def has_fallen_back(self) -> bool:
        """Returns whether chunks have fallen back since the last call. Called after each forward under a budget."""
        library = load()
        library.check(library.lib.sluice_context_get_stats(self.handle, 0, self._raw_stats))
        now = int(self._raw_stats.num_fallback_chunks)
        before, self._fallback_chunks = self._fallback_chunks, now
        return now > before

    def trace_start(self, capacity: int = 1 << 16) -> None:
        """Keeps the newest `capacity` events from now on."""
        library = load()
        library.check(library.lib.sluice_context_trace(self.handle, capacity))

    def trace_stop(self) -> None:
        self.trace_start(0)

    def trace_take(self, capacity: int = 1 << 16) -> list[dict[str, Any]]:
        """Returns and clears the kept events, oldest first. Times are CLOCK_MONOTONIC, as time.monotonic_ns()."""
        library = load()
        ffi = library.ffi
        events = ffi.new("sluice_trace_event_t[]", capacity)
        count = ffi.new("int64_t *")
        library.check(library.lib.sluice_context_take_trace(self.handle, events, capacity, count))
        names: dict[Any, str] = {}
        taken = []
        for index in range(count[0]):
            event = events[index]
            if event.op not in names:
                names[event.op] = ffi.string(event.op).decode()
            taken.append(
                {
                    "layer": event.layer,
                    "chunk": event.chunk,
                    "lane": _LANES[event.lane],
                    "op": names[event.op],
                    "direction": _DIRECTIONS[event.direction],
                    "begin_ns": event.begin_ns,
                    "end_ns": event.end_ns,
                    "bytes": event.bytes,
                }
            )
        return taken
