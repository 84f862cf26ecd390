# SPDX-License-Identifier: Apache-2.0
"""Refuses to read and write state dicts while experts are away from home, because names in a state dict identify
experts by their places at home.

Nothing here is collective: a rank may read its state dict alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from sluice.adapters.common.migration.moving import MovingLayer, has_moved, refuse_torn
from sluice.errors import InvalidState

# For each optimizer, the layers whose experts have moments in it.
_trained: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
_knowing = threading.local()  # see knowing


_HOOKS = "_sluice_refuses_state_dicts"


def refuse(layer: MovingLayer, what: str) -> None:
    """Raises InvalidState if an expert of the layer is away. what: the object with wrong experts: "a state dict"."""
    refuse_torn(layer)
    if has_moved(layer) and not getattr(_knowing, "is_so", False):
        raise InvalidState(
            f"{layer.moving_name}: experts have moved to other ranks, and {what} would name each of them by its "
            f"present place: on all ranks, do this within `with sluice.experts_at_home({_given(layer)}):`"
        )


def _given(layer: MovingLayer) -> str:
    return str(getattr(layer, "given_at_home", "model, optimizer"))


class Guarded:
    """Refuses state dicts of a host's layer whose class has this base before the host's class."""

    _sluice: Any

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._sluice is not None:
            refuse(self._sluice, "a state dict")
        return super()._save_to_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._sluice is not None:
            refuse(self._sluice, "a state dict that is loaded")
        return super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]


def guard_optimizer(optimizer: Any, layer: MovingLayer) -> None:
    """Refuses state dicts of the optimizer, and of an optimizer inside it, while an expert of the layer is away:
    moments are saved by the numbers of parameters, not of experts."""
    for each in (optimizer, getattr(optimizer, "optimizer", None)):
        if each is None:
            continue
        if each not in _trained:
            _trained[each] = WeakSet()
            _watch(each, _trained[each])
        _trained[each].add(layer)


def needs_optimizer(layer: MovingLayer, optimizer: Any) -> None:
    """Raises InvalidState if experts that have moved with their moments would move without them."""
    if optimizer is None and any(layer in layers for layers in _trained.values()):
        raise InvalidState(
            f"{layer.moving_name}: its experts have moved together with their optimizer state: pass that optimizer "
            "to sluice.move_experts and sluice.experts_at_home"
        )


def guard_module(module: Any, layer: MovingLayer) -> None:
    """Guards a module by hooks, without changing its class. The hooks are registered while an expert is away."""
    for handle in module.__dict__.pop(_HOOKS, ()):
        handle.remove()
    if layer.torn or has_moved(layer):
        module.__dict__[_HOOKS] = [
            module.register_state_dict_pre_hook(_Refuses(layer, "a state dict")),
            module.register_load_state_dict_pre_hook(_Refuses(layer, "a state dict that is loaded")),
        ]


class _Refuses:
    """Refuses calls while experts are away, as a hook."""

    def __init__(self, layer: MovingLayer, what: str) -> None:
        self._layer, self._what = layer, what

    def __call__(self, *_: Any) -> None:
        refuse(self._layer, self._what)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse(self._layer, "a copy or a pickle of the module")
        raise InvalidState(f"{self._layer.moving_name}: its module cannot be copied now")


@contextmanager
def knowing() -> Iterator[None]:
    """Allows state dicts inside, for code that names experts by their own numbers on any rank."""
    before, _knowing.is_so = getattr(_knowing, "is_so", False), True
    try:
        yield
    finally:
        _knowing.is_so = before


def _watch(optimizer: Any, layers: WeakSet[Any]) -> None:
    def check(what: str) -> None:
        for layer in layers:
            refuse(layer, what)

    saved, loaded = "a state dict of the optimizer", "a state dict of the optimizer that is loaded"
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.register_state_dict_pre_hook(lambda _: check(saved))
        optimizer.register_load_state_dict_pre_hook(lambda *_: check(loaded))
        return
    for name, what in (("state_dict", saved), ("load_state_dict", loaded)):
        if hasattr(optimizer, name):
            setattr(optimizer, name, _checked(getattr(optimizer, name), functools.partial(check, what)))


def _checked(method: Any, check: Any) -> Any:
    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return method(*args, **kwargs)

    return checked
