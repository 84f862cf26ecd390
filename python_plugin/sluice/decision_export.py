# SPDX-License-Identifier: Apache-2.0
"""`sluice.decisions` and `sluice.export_decisions`: what the tuner decided, for users of any host."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from sluice import decision_cache, decision_log
from sluice import layer_lookup as resolve
from sluice.errors import InvalidState


def decisions(given: Any) -> list[dict[str, Any]]:
    """What was decided for the MoE layers of what `sluice.stats` takes, and why; oldest first for each group of layers
    that share a context. Nothing where Sluice has run no layer of it yet. The fields are in docs/tuning.md.
    """
    return [entry for context in resolve.contexts(given) for entry in context.decisions()]


def export_decisions(path: str | os.PathLike[str], of: Any = None) -> int:
    """Writes the answers of what `sluice.stats` takes (None: of all that runs in this process), for "tuner":
    {"pinned": path}; returns how many there are.

    Not collective: all ranks have the same answers, so one rank's file serves all. Replaces the file whole. OSError
    where it cannot be written.
    """
    alive = _all_alive() if of is None else resolve.contexts(of)
    answers = decision_cache.latest(answer for context in alive for answer in context.answers())
    decision_log.replace(os.fspath(path), decision_cache.text_of(answers))
    return len(answers)


def export_machine(given: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes the machine that the tuner of what `sluice.stats` takes has, as the steps that ran corrected it
    (provenance "refined"), for `sluice plan --machine` or "tuner": {"machine": path}; returns it.

    Not collective: all ranks have the same. InvalidState where the tuner has no machine, or too few steps have run;
    OSError where the file cannot be written.
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
