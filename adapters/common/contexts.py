"""One context of this process for all layers with the same ranks, device and options: they share its slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sluice import trace
from sluice.adapters.torch import Context, ContextOptions, EpGroup
from sluice.config import Options

_contexts: dict[tuple[Any, ...], Context] = {}


def context_of(
    options: Options,
    group: EpGroup | None,
    num_layers: int | None = None,
    device: torch.device | None = None,
    num_forwards: int | None = None,
) -> Context:
    """The context of layers of this group (None: without other ranks), made for the first of them.

    Not thread-safe: the caller holds a lock. Contexts stay until their group closes.

    num_layers    of the model whose first layer asks: a budget must know before the other layers exist
    device        of the experts; None: the CPU
    num_forwards  that are outstanding at one time in training; None: one for each layer
    """
    known = ContextOptions(**{each.name: getattr(options, each.name) for each in dataclasses.fields(ContextOptions)})
    key = (known, () if group is None else group.ranks, str(device or "cpu"))
    found = _contexts.get(key)
    if found is not None and group is None and found.is_budgeted and found.is_unused:
        found.close()  # of a model that has gone: this one may have more layers
    if found is None or not found.alive:
        outstanding = known.max_outstanding or num_forwards or num_layers
        known = dataclasses.replace(known, max_outstanding=outstanding, num_layers=num_layers)
        found = _contexts[key] = Context(group, known, device)
        trace.register(found)
    return found
