# SPDX-License-Identifier: Apache-2.0
"""Implements `sluice.decisions`, `sluice.export_decisions` and `sluice.export_machine`, for all hosts."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from sluice import decision_cache, decision_log
from sluice import layer_lookup as resolve
from sluice.errors import InvalidState


def decisions(given: Any) -> list[dict[str, Any]]:
    """Returns the tuner's decisions for MoE layers, and their reasons, oldest first for each context. given: as
    `sluice.stats` takes. Empty if Sluice has run none of the layers yet. docs/tuning.md describes the fields.
    """
    return [entry for context in resolve.contexts(given) for entry in context.decisions()]


def export_decisions(path: str | os.PathLike[str], of: Any = None) -> int:
    """Writes the tuner's answers for "tuner": {"pinned": path}, and returns their number. of: as `sluice.stats` takes;
    None: everything that runs in this process.

    Not collective: all ranks have the same answers, so one rank's file serves all. Replaces the whole file. Raises
    OSError if the file cannot be written.
    """
    alive = _all_alive() if of is None else resolve.contexts(of)
    answers = decision_cache.latest(answer for context in alive for answer in context.answers())
    decision_log.replace(os.fspath(path), decision_cache.text_of(answers))
    return len(answers)


def export_machine(given: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes the tuner's machine, corrected by the steps that ran (provenance "refined"), for `sluice plan --machine`
    or "tuner": {"machine": path}, and returns it. given: as `sluice.stats` takes.

    Not collective: all ranks have the same machine. Raises InvalidState if the tuner has no machine or too few steps
    have run, OSError if the file cannot be written.
    """
    contexts = resolve.contexts(given)
    if not contexts:
        raise InvalidState(f"export_machine: Sluice has run no layer of this {resolve.name_of(given)} yet")
    text = contexts[0].machine_json()
    decision_log.replace(os.fspath(path), text)
    return dict(json.loads(text))


def _all_alive() -> list[Any]:
    module = sys.modules.get("sluice.adapters.torch.context")
    return [] if module is None else list(module.all_alive())
