# SPDX-License-Identifier: Apache-2.0
"""Sets up the tuner of a context from the "tuner" section of the config, and reports its decisions."""

from __future__ import annotations

import itertools
import json
import sys
import weakref
from pathlib import Path
from typing import Any

from sluice import decision_cache, restore, version
from sluice.cache_folder import NoCacheFolder
from sluice.config import TunerOptions
from sluice.planning import machines

from ..._library import Library, load
from ...errors import InvalidArgument
from .options import fill, values_of

# Values of the option "deduplicate", by SLUICE_DEDUPLICATE_*.
DEDUPLICATIONS: tuple[bool | str, ...] = (False, True, "node")
_CALIBRATED = (1, 2, 3)  # SLUICE_DTYPE_F32, _BF16, _F16


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f'"tuner": {what} {path!r} cannot be read: {error.strerror}') from error


def _machine_text(named: str, device: str) -> bytes:
    """Returns a machine's JSON, from the profile with this name, from this device's profile, or from a file."""
    if named == machines.BY_DEVICE:
        found = machines.for_device(device)
    elif named in machines.names():
        found = machines.load(named)
    else:
        text = _read(named, "machine")
        if b'"sluice_profile"' not in text:
            return text
        found = machines.load(named)
    return json.dumps(found.data, ensure_ascii=False).encode()  # the library's parser has no escapes


def _machine(library: Library, context: Any, options: TunerOptions, sizes: tuple[int, int, int]) -> Any:
    """Returns a planner of the named machine, or of this one; NULL if neither is requested. The caller destroys it."""
    ffi, handle = library.ffi, context.handle
    out = ffi.new("sluice_planner_t **")
    if options.machine is not None:
        text = _machine_text(options.machine, context.placement.name())
        library.check(library.lib.sluice_planner_create(text, len(text), out))
    elif options.calibrate is not None and sizes[2] in _CALIBRATED:
        config = library.new("calibration_config")
        config.model_width, config.hidden_width, config.dtype = sizes
        config.seconds = options.calibrate
        folder = None if options.cache is None else ffi.new("char[]", options.cache.encode())
        config.cache_dir = ffi.NULL if folder is None else folder
        library.check(library.lib.sluice_planner_calibrate(handle, config, out))
    return out[0]


def prepare(context: Any, options: TunerOptions, sizes: tuple[int, int, int]) -> None:
    """Applies the options, before a context's first layer is made; sizes: model width, hidden width, dtype.

    Collective over the context's ranks if it calibrates, or begins with kept decisions.
    """
    handle = context.handle
    library = load()
    planner = _machine(library, context, options, sizes)
    try:
        config = library.new("tuner_config")
        fill(config, options)
        config.machine = planner
        library.check(library.lib.sluice_context_tune(handle, config))
    finally:
        library.lib.sluice_planner_destroy(planner)
    if options.pinned is not None:
        read_decisions(handle, _read(options.pinned, "pinned"))
    if options.decisions is not None:
        _begin_with_kept(context, options)


def read_decisions(handle: Any, text: bytes) -> None:
    """Imports the answers of a text that `Context.decisions_json` has returned."""
    library = load()
    library.check(library.lib.sluice_context_read_decisions(handle, text, len(text)))


# Counts how often the ranks of each group have begun with kept decisions, in the same order on all ranks.
_begun: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _begin_with_kept(context: Any, options: TunerOptions) -> None:
    """Reads the first rank's file on all ranks, because other machines may have another file or none."""
    group = context.ep_group

    def take() -> bytes:
        path = _kept_file(options)
        if path is None:
            return b""
        return decision_cache.take(
            path, _machine_words(context), lambda text: read_decisions(context.handle, text.encode())
        ).encode()

    if group.world_size == 1:
        take()
        return
    meeting = group._joined.meeting
    number = next(_begun.setdefault(meeting, itertools.count()))
    text = meeting.first(f"begin with kept decisions {number}", take)
    if text and group.rank != 0:
        read_decisions(context.handle, text)


def _machine_words(context: Any) -> str:
    placement = context.placement
    link = context.ep_group.carrier(placement)
    device = "cuda" if placement.is_cuda else "cpu"
    group = context.ep_group
    hosts = group._joined.meeting.layout() if group.world_size > 1 else "1 host"
    return decision_cache.machine_words(
        device, link, group.world_size, hosts, context.options.gemm or "auto", version.__version__
    )


def _kept_file(options: TunerOptions) -> str | None:
    """Returns the file's path; None, with a message, if there is no folder for it: training never fails for that."""
    assert options.decisions is not None
    try:
        return decision_cache.place(options.decisions, options.cache)
    except NoCacheFolder as error:
        print(f"sluice: no decisions are kept: {error.message}", file=sys.stderr, flush=True)
        return None


def keep(context: Any, options: TunerOptions) -> None:
    """Writes this run's answers to the file that the options name. Not collective; called on one rank."""
    path = None if options.decisions is None else _kept_file(options)
    if path is not None:
        decision_cache.merge(path, _machine_words(context), context.answers())


def decisions(handle: Any) -> list[dict[str, Any]]:
    """Returns the newest decisions, oldest first; `why` in words. Under a budget, restore_input and
    restore_pre_activation are the plan's policies for the first kept_chunks chunks (the rest are sent and computed
    again), and total_bytes is the most that the plan takes. Without a budget they are None and 0. deduplicate is the
    option's value in force; chose_deduplication: the tuner has chosen it."""
    library = load()
    ffi = library.ffi
    found = ffi.new("sluice_tuner_decision_t[]", 64)
    count = ffi.new("int32_t *")
    library.check(library.lib.sluice_context_decisions(handle, found, 64, count))
    policies = ffi.new("sluice_tuner_policy_t[]", 64)
    library.check(library.lib.sluice_context_decided_policies(handle, policies, 64, count))
    parts = ffi.new("int32_t[]", 64)
    library.check(library.lib.sluice_context_decided_parts(handle, parts, 64, count))
    forms = ffi.new("sluice_tuner_form_t[]", 64)
    library.check(library.lib.sluice_context_decided_forms(handle, forms, 64, count))
    return [
        values_of(found[i])
        | {"why": ffi.string(library.lib.sluice_tuner_why_name(found[i].why)).decode()}
        | {name: restore.name_of(getattr(policies[i], name)) for name in ("restore_input", "restore_pre_activation")}
        | {name: getattr(policies[i], name) for name in ("memory_budget", "total_bytes")}
        | {"kept_chunks": parts[i]}
        | _form(forms[i])
        for i in range(count[0])
    ]


def _form(form: Any) -> dict[str, Any]:
    words = {name: DEDUPLICATIONS[getattr(form, name)] for name in ("deduplicate", "runner_up_deduplicate")}
    flags = {name: bool(getattr(form, name)) for name in ("chose_deduplication", "grouped", "runner_up_grouped")}
    return {**words, **flags, "runner_up_predicted_seconds": form.runner_up_predicted_seconds}


def deduplication(handle: Any) -> dict[str, Any] | None:
    """Returns the newest choice of deduplication, and the alternative that was compared; None: there is none."""
    for entry in reversed(decisions(handle)):
        if entry["chose_deduplication"]:
            own = ("deduplicate", "grouped", "num_chunks", "why", "rows", "seconds", "predicted_seconds")
            other = ("deduplicate", "grouped", "chunks", "seconds", "predicted_seconds")
            beaten = {f"other_{name}": entry[f"runner_up_{name}"] for name in other}
            return {name: entry[name] for name in own} | beaten
    return None
