# SPDX-License-Identifier: Apache-2.0
"""Computes the op that DeepSpeed's `FusedAdam` loads: "sluice": {"optimizer": true}.

DeepSpeed uses `FusedAdam` for "Adam" and "AdamW" if nothing is offloaded. On a CPU it compiles an op at run time and
calls the op with all parameters of a group. The optimizer stays, with its state, checkpoints and type checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sluice.adapters.deepspeed.optimizer.cpu_adam import group_of
from sluice.adapters.torch.optimizer_step import Entry, OptimizerStep, new_handle

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FusedAdamOp:
    """The op; its `multi_tensor_adam` is this object. The stock op computes what the library does not support (tensors
    on a device, moments in 16 bits); it is built on its first use."""

    def __init__(self, load_stock: Callable[[], Any]) -> None:
        self._load_stock, self._stock = load_stock, None
        self._handle = new_handle()
        self.updates = 0  # of single parameters, computed by the library

    @property
    def multi_tensor_adam(self) -> FusedAdamOp:
        return self

    def __call__(
        self,
        chunk_size: int,
        noop_flag: torch.Tensor,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        """Updates a group. tensor_lists: gradients, parameters, and both moments; mode: 1 is AdamW. Gradients are not
        checked here: the host checks them if it is configured to."""
        if not _all_taken(tensor_lists):
            if self._stock is None:
                self._stock = self._load_stock().multi_tensor_adam
            numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
            self._stock(chunk_size, noop_flag, tensor_lists, *numbers)
            return
        one = OptimizerStep(self._handle)
        entries = [Entry(int(step), param, grad, *moments) for grad, param, *moments in zip(*tensor_lists)]
        group = group_of(lr, beta1, beta2, epsilon, weight_decay, mode == 1, bool(bias_correction))
        one.add_group(group, entries)
        one.run(check_finite=False)
        self.updates += len(entries)


def _all_taken(tensor_lists: Sequence[Sequence[torch.Tensor]]) -> bool:
    grads, params, *moments = tensor_lists
    return (
        all(tensor.device.type == "cpu" for tensors in tensor_lists for tensor in tensors)
        and all(tensor.dtype in _DTYPES for tensor in (*grads, *params))
        and all(tensor.dtype == torch.float32 for tensors in moments for tensor in tensors)
    )
