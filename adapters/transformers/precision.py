# SPDX-License-Identifier: Apache-2.0
"""Finds whether an experts class computes in f32 inside a 16-bit model, by a run of its own loop on one row.

Some classes multiply in f32 for parameters of any dtype. Others add biases in f32 to the 16-bit products of autocast.
No flag says so. The loop that the decorator of transformers replaces therefore runs once, on stand-ins for the
parameters that take no memory, and a dispatch mode records its operations.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from sluice.adapters.common.activations import call_on_thread
from sluice.adapters.transformers.contract import PLAIN, Contract, numbers_of
from sluice.adapters.transformers.packed_stack import is_packed
from torch.utils._python_dispatch import TorchDispatchMode

_SHORT = (torch.bfloat16, torch.float16)
_GEMM_OPS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "_grouped_mm")
)
_SUMS = frozenset(("aten::add", "aten::add_"))

# Results by class, and by everything that its loop may read of a module.
_known: weakref.WeakKeyDictionary[type, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()


def computes_in_f32(module: Any, contract: Contract, tensors: Sequence[torch.Tensor], cast: torch.dtype | None) -> bool:
    """Returns whether the module's own loop multiplies, or adds its biases, in f32 where 16 bits would be expected.

    tensors  the contract's
    cast     autocast's dtype; None: it is off

    False too if the loop cannot run: a class without transformers' decorator, a loop that fails on one row, or
    submodules with hooks, which would see a call that the host did not make.
    """
    if (cast or tensors[0].dtype) not in _SHORT or not all(type(each) in PLAIN or is_packed(each) for each in tensors):
        return False
    own = _own_loop(module)
    if own is None:
        return False
    cls, loop = own
    what = (cast, *numbers_of(module.__dict__), *[(each.dtype, each.shape, each.device) for each in tensors])
    known = _known.setdefault(cls, {})
    if what not in known:
        if _has_hooks(module):
            return False
        twin = _twin(module, cls, contract.names, tensors)
        try:
            known[what] = call_on_thread(lambda: _watch(twin, loop, contract, tensors, cast), "sluice-asks-a-loop")
        except Exception:  # any class may be here
            known[what] = False
    return known[what]


def _own_loop(module: Any) -> tuple[type, Any] | None:
    """Returns the class that transformers decorated, and the forward that it had before."""
    for cls in type(module).__mro__:  # parametrizations add a class in front
        forward = cls.__dict__.get("forward")
        if forward is not None:
            loop = getattr(forward, "__wrapped__", None)
            return None if loop is None else (cls, loop)
    return None


def _has_hooks(module: Any) -> bool:
    children = [child for child in module.modules() if child is not module]
    return any(child._forward_hooks or child._forward_pre_hooks for child in children)


def _twin(module: Any, cls: type, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
    """Returns the module with zeros of the same shapes, dtypes and devices in place of its stacked tensors."""
    twin = object.__new__(cls)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["training"] = False  # a dropout would draw the host's random numbers
    twin.__dict__["_parameters"] = copy.copy(module.__dict__["_parameters"])
    for name, tensor in zip(names, tensors):
        twin._parameters.pop(name, None)
        twin.__dict__[name] = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return twin


def _watch(twin: Any, loop: Any, contract: Contract, tensors: Sequence[torch.Tensor], cast: torch.dtype | None) -> bool:
    like, model = tensors[0], contract.widths(tensors)[0]
    rows = torch.zeros(1, model, dtype=like.dtype, device=like.device)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
    weights = torch.ones(1, 1, dtype=torch.float32, device=like.device)
    with (
        torch.no_grad(),
        torch.autocast(like.device.type, dtype=cast, enabled=cast is not None),
        _Watcher(contract.bias) as seen,
    ):
        loop(twin, rows, ids, weights)
    return seen.f32


class _Watcher(TorchDispatchMode):
    """Records operations below autocast, with their final dtypes."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.f32 = False
        self._has_bias = has_bias
        self._gemm_results: list[torch.Tensor] = []  # kept, so that no other tensor gets their memory

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function._schema.name
        if name in _GEMM_OPS:
            self.f32 |= out.dtype == torch.float32
            self._gemm_results.append(out)
        elif name in _SUMS and self._has_bias and any(map(self._is_gemm, args)):
            self.f32 |= out.dtype == torch.float32
        return out

    def _is_gemm(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        address = value.untyped_storage().data_ptr()
        return any(address == product.untyped_storage().data_ptr() for product in self._gemm_results)
