"""Gradients of parameters added straight to an existing `.grad`, where nothing can see the difference.

Given to autograd, they are a second gradient of the whole layer: fresh pages in every backward, and an add over both.
`accumulate.cpp` says what could see the difference; then, and with the option accumulate "autograd", autograd adds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ._native import native

CHOICES = ("in_place", "autograd")
_BEFORE_PARAMETERS = 3  # expert ids, tokens and route weights are tensors too


def existing_grads(ctx: Any, work: Any, reads: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Of every parameter of the node whose backward this is, its `.grad`; None: autograd shall add.

    All or none of them: the library adds to every gradient of a pass or to none.
    reads  what the pass reads
    """
    layer = work.layer
    if layer.accumulate != "in_place" or work.experts is not None or layer.context.placement.is_cuda:
        return None
    if not layer.context.is_of_one_thread():
        return None
    count = ctx.num_inputs - 2
    addresses = (ctypes.c_void_p * len(reads))(*[tensor._cdata for tensor in reads])
    if not native().may_accumulate(_BEFORE_PARAMETERS, count, addresses, len(reads)):
        return None
    # Not the saved tensors: hooks of the host may have made copies of those.
    return [adder.variable.grad for adder, _ in ctx.next_functions[_BEFORE_PARAMETERS:]]
