"""`sluice.decisions` and `sluice.export_decisions`: what the tuner decided, for users of any host."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from sluice import decision_log, kept_decisions
from sluice.errors import InvalidState


def decisions(model: Any) -> list[dict[str, Any]]:
    """What was decided for the MoE layers of a model, or of a DeepSpeed engine, and why; oldest first for each group of
    layers that share a context. Nothing where Sluice has run no layer yet. The fields are in docs/tuning.md.
    """
    return [entry for context in _contexts_of(model) for entry in context.decisions()]


def export_decisions(path: str | os.PathLike[str]) -> int:
    """Writes the answers of all that runs in this process, for "tuner": {"pinned": path}; returns how many there are.

    Not collective: all ranks have the same answers, so one rank's file serves all. Replaces the file whole. OSError
    where it cannot be written.
    """
    context_module = sys.modules.get("sluice.adapters.torch.context")
    alive = [] if context_module is None else context_module.all_alive()
    answers = kept_decisions.latest(answer for context in alive for answer in context.answers())
    decision_log.replace(os.fspath(path), kept_decisions.text_of(answers))
    return len(answers)


def export_machine(model: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes the machine that the model's tuner has, as the steps that ran corrected it (provenance "fitted"), for
    `sluice plan --machine` or "tuner": {"machine": path}; returns it.

    Not collective: all ranks have the same. InvalidState where no tuner of the model has a machine, or too few steps
    have run; OSError where the file cannot be written.
    """
    context = next(_contexts_of(model), None)
    if context is None:
        raise InvalidState("export_machine: Sluice has run no layer of this model yet")
    text = context.machine_json()
    decision_log.replace(os.fspath(path), text)
    return dict(json.loads(text))


def _contexts_of(model: Any) -> Iterator[Any]:
    experts = sys.modules.get("sluice.adapters.transformers.experts")
    seen: set[int] = set()
    for module in model.modules():
        state = vars(module).get("_sluice")
        found = [getattr(state, "context", None)]
        if state is None and experts is not None:
            found = experts.contexts(module)
        for context in found:
            if context is not None and context.alive and id(context) not in seen:
                seen.add(id(context))
                yield context
