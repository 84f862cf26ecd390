# SPDX-License-Identifier: Apache-2.0
"""Makes contexts for hosts: one for all layers with the same ranks, device and options, or one for each model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from sluice import trace
from sluice.adapters.torch import Context, ContextOptions, EpGroup
from sluice.config import Options

_contexts: dict[tuple[Any, ...], Context] = {}
# The number of models with their own context on the group of these ranks. The last one closes the group.
_users: dict[tuple[tuple[int, ...], str | None], int] = {}


def group_of(ranks: Sequence[int] | None, options: Options) -> EpGroup:
    """Returns the group of these global ranks, by the options. Collective over them if the group does not exist yet."""
    timeout = None if options.timeout is None else timedelta(seconds=options.timeout)
    return EpGroup.for_ranks(ranks, timeout, options.transport)


def context_of(
    options: Options,
    group: EpGroup | None,
    num_layers: int | None = None,
    device: torch.device | None = None,
    num_forwards: int | None = None,
) -> Context:
    """Returns the context of layers of this group (None: this rank alone), made for the first of them.

    Not thread-safe: the caller holds a lock. Contexts stay until their group closes.

    num_layers    of the model; a budget needs the number before layers other than the first exist
    device        of the experts; None: the CPU
    num_forwards  most forwards that are outstanding at one time in training; None: one for each layer
    """
    known = _options_of(options)
    key = (known, () if group is None else group.ranks, str(device or "cpu"))
    found = _contexts.get(key)
    if found is not None and group is None and found.is_budgeted and found.is_unused:
        found.close()  # its model is gone, and the new one may have more layers
    if found is None or not found.alive:
        outstanding = known.max_outstanding or num_forwards or num_layers
        known = dataclasses.replace(known, max_outstanding=outstanding, num_layers=num_layers)
        found = _contexts[key] = _made(group, known, device)
    return found


class OwnContext:
    """Owns the context of one model, on the group that all models with these ranks share."""

    def __init__(self, ranks: Sequence[int], options: Options, device: torch.device) -> None:
        """Opens the context. Collective over the ranks."""
        self._group: EpGroup | None = group_of(ranks, options)
        self._place = (tuple(ranks), options.transport)
        _users[self._place] = _users.get(self._place, 0) + 1
        try:
            self.context = _made(self._group, _options_of(options), device)
        except BaseException:
            self._leave()
            raise

    def stats(self) -> dict[str, Any]:
        """Returns statistics of the context."""
        return self.context.stats()

    def close(self) -> None:
        """Releases everything; the layers are closed afterwards. Not collective; the ranks may make another."""
        if self._group is not None:
            self.context.close()
            self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        _users[self._place] -= 1
        if group is not None and (_users[self._place] == 0 or len(self._place[0]) == 1):
            group.close()


def _options_of(options: Options) -> ContextOptions:
    return ContextOptions(**{each.name: getattr(options, each.name) for each in dataclasses.fields(ContextOptions)})


def _made(group: EpGroup | None, options: ContextOptions, device: torch.device | None) -> Context:
    made = Context(group, options, device)
    trace.register(made)
    return made
