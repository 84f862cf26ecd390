# SPDX-License-Identifier: Apache-2.0
"""Reads PEFT's adapters on stacked experts without forming W + BA and without a change to PEFT's classes.

PEFT wraps an experts module once for each target parameter (`ParamWrapper`). A hook on the registration of `base_layer`
finds these wrappers. Before a wrapper runs, a hook notes A, B and the scale of its active adapters for the experts
module, and lets PEFT call its base layer as if the adapters were disabled. The function of the experts takes the notes,
and PEFT's flag is restored at once. Other adapters run as PEFT runs them, with one warning that says why.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sluice.adapters.torch.lora import Factors, joined


class Term(NamedTuple):
    """Describes an active adapter of a stacked parameter: `scale * B[e] @ A[e]` is added to the weight of expert e.

    a      [r * E, in], with the rows of an expert together
    b      [out, r * E], with the columns of all experts for one r together
    count  E; under expert parallelism of all ranks, also if a and b are DTensors (own_factors.py)
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    count: int


Terms = dict[str, list[Term]]  # by the name of the stacked parameter


class _Noted(NamedTuple):
    wrappers: list[Any]
    terms: Terms


class _Local(threading.local):
    """Has the notes of this thread, by experts module."""

    def __init__(self) -> None:
        self.noted: weakref.WeakKeyDictionary[Any, _Noted] = weakref.WeakKeyDictionary()


_here = _Local()
_lock = threading.Lock()
# For each wrapper whose flag is set: the number of forwards that set it, and PEFT's own value of the flag.
_held: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
_warned: set[str] = set()
# (experts module, name of the target parameter, its terms) -> why the library cannot add them, "" if it can.
_why_not: Callable[[Any, str, Sequence[Term]], str] | None = None


def install(why_not: Callable[[Any, str, Sequence[Term]], str]) -> None:
    """Reads wrappers that PEFT makes from now on. Once per process."""
    global _why_not
    if _why_not is None:
        torch.nn.modules.module.register_module_module_registration_hook(_registered)
    _why_not = why_not


def adopt(model: torch.nn.Module) -> None:
    """Reads the wrappers that were made before `install`."""
    for module in model.modules():
        if "base_layer" in module._modules:
            _registered(module, "base_layer", module._modules["base_layer"])


def _wrapper_class() -> Any:
    return getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)


def _registered(parent: torch.nn.Module, name: str, child: Any) -> None:
    if name != "base_layer" or child is None:
        return
    kind = _wrapper_class()
    if kind is None or not isinstance(parent, kind) or _note in parent._forward_pre_hooks.values():
        return
    parent.register_forward_pre_hook(_note, with_kwargs=True)
    parent.register_forward_hook(_put_back, always_call=True)


def is_lora(wrapper: Any) -> bool:
    """Returns whether this is PEFT's wrapper of a parameter, or a subclass of that class by fully_shard."""
    kind = _wrapper_class()
    return kind is not None and isinstance(wrapper, kind)


def _is_plain(wrapper: Any) -> bool:
    """Returns whether a wrapper computes as PEFT's class does. A subclass by fully_shard does."""
    kind = _wrapper_class()
    return (
        type(wrapper).forward is kind.forward
        and type(wrapper)._activate_lora is kind._activate_lora
        and "forward" not in wrapper.__dict__
    )


def _is_disabled(wrapper: Any) -> bool:
    """Returns PEFT's own value of the flag, also while a forward of another thread has set it."""
    held = _held.get(wrapper)
    return wrapper._disable_adapters if held is None else held[1]


def _note(wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs before the wrapper's forward: notes its terms, and disables its adapters."""
    if torch.compiler.is_compiling() or wrapper.merged or kwargs.get("adapter_names") or _why_not is None:
        return
    if _is_disabled(wrapper):  # before why_not: a disabled adapter is no reason to warn or to refuse
        return
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    experts = wrapper.get_base_layer()
    if not active:
        return
    count = wrapper.num_experts
    terms = [Term(wrapper.lora_A[n].weight, wrapper.lora_B[n].weight, wrapper.scaling[n], count) for n in active]
    why_not = _why_not(experts, wrapper.parameter_name, terms)
    if not why_not and wrapper.num_experts == 1:
        why_not = "with one expert PEFT gives A and B other shapes"
    if not why_not and not _is_plain(wrapper):
        why_not = f"{type(wrapper).__name__} is not PEFT's ParamWrapper"
    if not why_not and any(name in wrapper.lora_variant for name in active):
        why_not = "the adapter is a variant of LoRA"
    if why_not:
        warn_once(f"{type(experts).__name__}.{wrapper.parameter_name}", why_not)
        return
    if wrapper in _wrappers_of(experts):
        _put_back(wrapper)  # a KeyboardInterrupt of an earlier forward left the flag set
    with _lock:
        if _is_disabled(wrapper):
            return
        held = _held.setdefault(wrapper, [0, wrapper._disable_adapters])
        held[0] += 1
        wrapper._disable_adapters = True
    noted = _here.noted.setdefault(experts, _Noted([], {}))
    noted.wrappers.append(wrapper)
    noted.terms[wrapper.parameter_name] = terms


def warn_once(what: str, why_not: str) -> None:
    """Warns once that adapters run as PEFT runs them."""
    text = f"sluice: {what}: PEFT adds its adapter by forming W + BA in each forward, since {why_not}"
    if why_not != NOT_OURS and text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)


NOT_OURS = "Sluice does not compute these experts"


def _wrappers_of(experts: Any) -> list[Any]:
    noted = _here.noted.get(experts)
    return [] if noted is None else noted.wrappers


def _put_back(wrapper: Any, *_: Any) -> None:
    """Restores PEFT's flag. Runs in `take`, or after the wrapper's forward (also after an error) if no experts ran."""
    for experts, noted in list(_here.noted.items()):
        if wrapper in noted.wrappers:
            noted.wrappers.remove(wrapper)
            with _lock:
                held = _held[wrapper]
                held[0] -= 1
                if held[0] == 0:
                    wrapper._disable_adapters = held[1]
                    del _held[wrapper]
            if not noted.wrappers:
                del _here.noted[experts]


def take(experts: Any) -> Terms | None:
    """Returns the terms of the current call, and restores PEFT's flags. None: no adapter."""
    if not _here.noted:
        return None
    noted = _here.noted.get(experts)
    if noted is None:
        return None
    for wrapper in list(noted.wrappers):
        _put_back(wrapper)
    return noted.terms


class _Share(torch.autograd.Function):
    """Returns its input, and multiplies the gradient by `share`."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.share, None


def factors(terms: Sequence[Term], dtype: torch.dtype, experts: Sequence[int] | None, share: float) -> Factors:
    """Returns the factors of these experts (None: all), in a dtype that a layer of `dtype` takes.

    share  multiplies gradients of factors that only this rank has, which are sums over ranks. The host averages
           gradients of all other factors
    """
    split = []
    for term in terms:
        a, b, count, wanted = term.a, term.b, term.count, experts
        if hasattr(a, "to_local"):
            assert experts is not None
            a, b, count, wanted = (
                _Share.apply(a.to_local(), share),
                _Share.apply(b.to_local(), share),
                len(experts),
                None,
            )
        a = a.view(count, -1, a.shape[1])
        b = b.view(-1, count).t().view(count, b.shape[0], -1)  # torch transposes a gradient of two dimensions faster
        a, b = (a, b) if wanted is None else (_of(a, wanted), _of(b, wanted))
        split.append(Factors(a, b, term.scale))
    return joined(split, dtype)


def _of(stack: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
    first, count = experts[0], len(experts)
    if list(experts) == list(range(first, first + count)):
        return stack.narrow(0, first, count)
    return stack[list(experts)]
