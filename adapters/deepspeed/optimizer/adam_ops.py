# SPDX-License-Identifier: Apache-2.0
"""Computes the ops that DeepSpeed's Adams load: "sluice": {"optimizer": true}. `DeepSpeedCPUAdam` is ZeRO-Offload's
optimizer, `FusedAdam` that of "Adam" and "AdamW" if nothing is offloaded.

The optimizer stays DeepSpeed's own class, with its state, checkpoints and type checks. Sluice only replaces the op that
the optimizer calls, and nothing is compiled at run time. The stock op computes what the library does not support
(moments in 16 bits, tensors on a device, rollback, ZenFlow's worker); it is built on its first use.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sluice.adapters.torch.optimizer_step import Entry, OptimizerStep, new_handle

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Writing:
    """Arguments of the next update. out: also receives the parameter, in the dtype of `out`, unless it is None; factor:
    of gradients; spans: the ranges of elements to update."""

    out: torch.Tensor | None
    factor: float
    spans: Sequence[tuple[int, int]]
    is_done: bool = False


def group_of(
    lr: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, decoupled: bool, bias_correction: bool
) -> dict[str, Any]:
    """Returns the numbers of a call of the host's op as a parameter group of torch's Adam."""
    return {
        "lr": lr,
        "betas": (beta1, beta2),
        "eps": epsilon,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": decoupled,
        "bias_correction": bias_correction,
        "maximize": False,
    }


class CpuAdamOp:
    """`create_adam`, `adam_update`, `destroy_adam` of the op; everything else is forwarded to the stock op.

    Gradients are not checked: DeepSpeed has checked them for overflows before the call.
    """

    def __init__(self, load_stock: Callable[[], Any]) -> None:
        self._load_stock, self._stock = load_stock, None
        self._created: dict[int, tuple[Any, ...]] = {}
        self._handle = new_handle()
        self.updates = 0  # computed by the library
        self._writing: Writing | None = None

    @contextlib.contextmanager
    def writing(self, out: torch.Tensor | None, factor: float, spans: Sequence[tuple[int, int]]) -> Iterator[Writing]:
        """Updates in this context multiply gradients by the factor. The update of a parameter of out's size also writes
        `out`, and changes no element outside of the spans."""
        self._writing = Writing(out, factor, spans)
        try:
            yield self._writing
        finally:
            self._writing = None

    def create_adam(self, optimizer_id: int, *settings: Any) -> int:
        self._created[optimizer_id] = settings
        if self._stock is not None:
            self._stock.create_adam(optimizer_id, *settings)
        return 0

    def destroy_adam(self, optimizer_id: int) -> int:
        self._created.pop(optimizer_id, None)
        if self._stock is not None:
            self._stock.destroy_adam(optimizer_id)
        return 0

    def adam_update(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        bias_correction: bool,
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> int:
        tensors = (param, grad, exp_avg, exp_avg_sq)
        numbers = (step, lr, beta1, beta2, epsilon, weight_decay, bias_correction)
        if exp_avg.dtype != torch.float32 or not all(tensor.is_contiguous() for tensor in tensors):
            if self._writing is not None and self._writing.factor != 1.0:
                grad.mul_(self._writing.factor)
            return self._stock_op(optimizer_id).adam_update(optimizer_id, *numbers, *tensors)
        is_decoupled = bool(self._created[optimizer_id][5])
        group = group_of(lr, beta1, beta2, epsilon, weight_decay, is_decoupled, bias_correction)
        one = OptimizerStep(self._handle)
        one.add_group(group, self._entries(step, *tensors))
        one.run(self._loss_scale(grad), check_finite=False)
        self.updates += 1
        return 0

    def _loss_scale(self, grad: torch.Tensor) -> float:
        """Returns the divisor of gradients in the update. If a host ignores overflows, the factor may be 0 or NaN and
        has no reciprocal. Then the gradients are multiplied here, as in stock."""
        factor = 1.0 if self._writing is None else self._writing.factor
        if 0.0 < factor < math.inf and 1.0 / factor < math.inf:
            return 1.0 / factor
        grad.mul_(factor)
        return 1.0

    def _entries(self, step: int, param: torch.Tensor, *others: torch.Tensor) -> list[Entry]:
        writing = self._writing
        if writing is None or param.dtype != torch.float32:
            return [Entry(step, param, *others)]
        if writing.out is None:
            return [Entry(step, *(each[a:b] for each in (param, *others))) for a, b in writing.spans]
        if writing.out.shape != param.shape:
            return [Entry(step, param, *others)]
        writing.is_done = True
        parts = (tuple(each[a:b] for each in (writing.out, param, *others)) for a, b in writing.spans)
        return [Entry(step, out, *states, master=master) for out, master, *states in parts]

    def _stock_op(self, optimizer_id: int) -> Any:
        if self._stock is None:
            self._stock = self._load_stock()
            for each, settings in self._created.items():
                self._stock.create_adam(each, *settings)
        return self._stock

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stock_op(0), name)


class FusedAdamOp:
    """The op, which is called with all parameters of a group; its `multi_tensor_adam` is this object."""

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
