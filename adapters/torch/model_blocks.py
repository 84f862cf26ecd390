# SPDX-License-Identifier: Apache-2.0
"""Finds the blocks of a model, and lets single blocks run again in its backward (activation checkpointing)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...errors import InvalidArgument

# The class of a host whose layers have a switch for it in each instance. Found by name, so that no host is imported.
_HOST_LAYER = "GradientCheckpointingLayer"
_MARK = "_sluice_recomputed"

# If set, it is called with the seconds of each block that runs again. Set while backwards are measured.
on_recompute: Callable[[float], None] | None = None


def _checkpoint(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(functools.partial(_measured, forward), *args, use_reentrant=False, **kwargs)


def _measured(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a forward, and measures it if torch runs it again in the backward, where torch may stop it early."""
    told = on_recompute
    if told is None or torch._C._current_graph_task_id() == -1:
        return forward(*args, **kwargs)
    begun = time.perf_counter()
    try:
        return forward(*args, **kwargs)
    finally:
        told(time.perf_counter() - begun)


def _is_host_layer(module: nn.Module) -> bool:
    return any(kind.__name__ == _HOST_LAYER for kind in type(module).__mro__)


def find(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> dict[str, nn.Module]:
    """Returns blocks by name: the given ones, else the host's own layers, else the longest list of one class.

    Raises InvalidArgument if there are none, or one is not in the model, or one is inside another.
    """
    names = {id(module): name for name, module in model.named_modules()}
    if blocks is None:
        found = [module for module in model.modules() if _is_host_layer(module)] or _longest_list(model)
    else:
        found = list(blocks)
    for module in found:
        if id(module) not in names:
            raise InvalidArgument(f"plan_model: a {type(module).__name__} of blocks is not a module of the model")
    made = {names[id(module)]: module for module in found}
    for name in made:
        outer = next((other for other in made if other != name and name.startswith(other + ".")), None)
        if outer is not None and blocks is None:
            raise InvalidArgument(f"plan_model: {name} lies in {outer}: name the modules to use with blocks=")
        if outer is not None:
            raise InvalidArgument(f"plan_model: block {name} lies in block {outer}: give one of them")
    if not made:
        raise InvalidArgument(
            f"plan_model: {type(model).__name__} has no list of modules of one class: name its blocks with blocks="
        )
    return made


def _longest_list(model: nn.Module) -> list[nn.Module]:
    lists = [list(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    alike = [found for found in lists if len(found) > 1 and len({type(one) for one in found}) == 1]
    return max(alike, key=len, default=[])


def is_recomputed(module: nn.Module) -> bool:
    """Returns whether the block runs again in the backward already, by Sluice or by its host."""
    return _MARK in module.__dict__ or (_is_host_layer(module) and bool(module.gradient_checkpointing))


class Recomputed:
    """Makes blocks run again in the backward, until `undo`."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []
        for module in modules:
            self._before.append((module, _switch_on(module)))

    def undo(self) -> None:
        """Restores each block. A second call has no effect."""
        while self._before:
            module, before = self._before.pop()
            for name, value in before.items():
                if value is _ABSENT:
                    module.__dict__.pop(name, None)
                else:
                    module.__dict__[name] = value


_ABSENT = object()


def _switch_on(module: nn.Module) -> dict[str, Any]:
    """Makes the block run again in the backward; returns the instance's earlier attributes by name."""
    if _is_host_layer(module):
        wanted = {"gradient_checkpointing": True, "_gradient_checkpointing_func": _checkpoint}
    else:
        wanted = {"forward": functools.partial(_run_again, module.forward)}
    wanted[_MARK] = True
    before = {name: module.__dict__.get(name, _ABSENT) for name in wanted}
    module.__dict__.update(wanted)
    return before


def _run_again(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a forward under checkpoint. Without gradients there is no backward, and nothing to save for it."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return _checkpoint(forward, *args, **kwargs)
