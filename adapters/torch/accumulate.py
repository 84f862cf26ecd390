# SPDX-License-Identifier: Apache-2.0
"""Adds gradients of parameters directly to an existing `.grad`, if nothing can observe the difference.

If autograd adds them, each backward makes a second gradient of the whole layer: fresh pages, and an add that reads
both. `accumulate.cpp` lists what could observe the difference. In those cases, and with the option accumulate
"autograd", autograd adds.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._native import native

CHOICES = ("in_place", "autograd")
_BEFORE_PARAMETERS = 3  # expert ids, tokens and route weights are tensors too


class Sums(NamedTuple):
    """Names the gradients to which a backward adds.

    into       for each parameter of the node the memory of its `.grad`, None for a frozen one
    owners     the host's gradient tensors, whose version counters are incremented
    stand_ins  returned to autograd in place of gradients, for hosts whose hooks need one; None: nothing is returned
    """

    into: list[torch.Tensor | None]
    owners: list[torch.Tensor]
    stand_ins: list[torch.Tensor | None] | None = None


def existing_grads(ctx: Any, work: Any, reads: Sequence[torch.Tensor]) -> Sums | None:
    """Returns the gradients to which this node's backward may add directly; None: autograd adds.

    The result has all gradients or none, because the library adds to every gradient of a pass or to none.
    reads  tensors that the pass reads, the parameters last
    """
    layer = work.layer
    if layer.accumulate != "in_place" or work.experts is not None or layer.context.placement.is_cuda:
        return None
    if not layer.context.is_of_one_thread():
        return None
    found = [_sum_behind(node) for node, _ in ctx.next_functions[_BEFORE_PARAMETERS:]]
    into = [local for local, _ in found]
    if not layer.leaves_out_frozen and any(local is None for local in into):
        return None
    if not native().may_accumulate(_BEFORE_PARAMETERS, len(into), _addresses(reads), len(reads), _addresses(into)):
        return None
    return Sums(into, [grad for _, grad in found if grad is not None])


def parameters_behind(ctx: Any) -> list[Any]:
    """Returns the leaves that get a node's gradients of parameters; None if there is no leaf, or no gradient needed."""
    return [getattr(node, "variable", None) for node, _ in ctx.next_functions[_BEFORE_PARAMETERS:]]


def _addresses(tensors: Sequence[torch.Tensor | None]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[None if tensor is None else tensor._cdata for tensor in tensors])


def _sum_behind(node: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the (memory, `.grad`) that autograd would add to at this node. For the local part of a DTensor the memory
    is the local part of the DTensor's `.grad`.

    Saved tensors are not used to find it, because hooks of the host may have copied them.
    """
    distributed = sys.modules.get("torch.distributed.tensor._api")
    if distributed is not None and type(node) is distributed._ToTorchTensor._backward_cls:
        return _local_sum(node, distributed.DTensor)
    grad = getattr(getattr(node, "variable", None), "grad", None)
    return grad, grad


def _local_sum(node: Any, kind: type[Any]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns _sum_behind of a DTensor. (None, None) unless its gradient would have the placements of `.grad`."""
    spec, placements = node.dtensor_spec, node.grad_placements
    grad = getattr(getattr(node.next_functions[0][0], "variable", None), "grad", None)
    if type(grad) is not kind or grad._spec != spec or any(place.is_partial() for place in spec.placements):
        return None, None
    if placements is not None and tuple(placements) != tuple(spec.placements):
        return None, None
    return grad._local_tensor, grad
