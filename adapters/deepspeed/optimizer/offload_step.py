# SPDX-License-Identifier: Apache-2.0
"""Runs ZeRO-Offload's step (stages 1 and 2) in one pass over a partition: unscale, clip, update, write 16-bit values.

The host reads and writes the f32 gradients to unscale and clip them, updates, and copies the masters to a 16-bit buffer
and from there to the parameters. Here the update multiplies gradients by the factor, and writes the 16-bit parameters.
DeepSpeed 0.15.4 has no such buffer: there the host still copies the masters to the parameters.

A parameter without a gradient since the last step is not updated. Stock updates such a parameter by its old gradient,
which is still in the host's f32 buffer. The host's buffers for gradient accumulation have old gradients too. Here a
parameter that only some backwards of a window reach gets its full gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sluice.adapters.deepspeed.optimizer.adam_ops import CpuAdamOp

_COPY = torch.Tensor.copy_
_BUFFERS = "param_buffer_of_bit16_for_cpu_offload_groups"
_OF_A_WINDOW = (
    *("async_accumulate_grad_in_cpu_via_gpu", "accumulated_grads_in_cpu", "_offload_accumulated_param_ids"),
    *("_finalize_cpu_offload_gradient_accumulation", "step"),
)


class _Written(torch.Tensor):
    """16-bit parameters that the update has written. The copies that the host makes next are skipped."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _COPY and (isinstance(args[0], cls) or args[0].data_ptr() == args[1].data_ptr()):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class OffloadStep:
    """The step of one ZeRO optimizer. It wraps its methods `unscale_and_clip_grads` and `_optimizer_step`."""

    def __init__(self, zero: Any, op: CpuAdamOp) -> None:
        self._zero, self._op = zero, op
        self._unscale: Callable[..., None] = zero.unscale_and_clip_grads
        self._step: Callable[[int], None] = zero._optimizer_step
        self._buffers = list(getattr(zero, _BUFFERS, ()))
        self._factor = 1.0
        zero.unscale_and_clip_grads, zero._optimizer_step = self.unscale, self.step
        if all(hasattr(zero, name) for name in _OF_A_WINDOW):
            self._accumulate: Callable[[Any], None] = zero.async_accumulate_grad_in_cpu_via_gpu
            self._host_step: Callable[..., Any] = zero.step
            zero.async_accumulate_grad_in_cpu_via_gpu, zero.step = self.accumulate, self.host_step

    def accumulate(self, param: Any) -> None:
        """Zeroes the gradient of the previous window before a parameter's first gradient of a window."""
        zero, number = self._zero, self._zero.get_param_id(param)
        if number not in zero._offload_accumulated_param_ids and number in zero.accumulated_grads_in_cpu:
            zero.accumulated_grads_in_cpu[number].zero_()
        self._accumulate(param)

    def host_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Includes in the step parameters that only earlier backwards of the window have reached."""
        zero = self._zero
        zero._offload_accumulated_param_ids -= zero.norm_for_param_grads.keys()
        zero._finalize_cpu_offload_gradient_accumulation()
        return self._host_step(*arguments, **keywords)

    def unscale(self, grads: Any, total_norm: Any) -> None:
        """Stores the factor by which the host would multiply gradients, computed by the host's code."""
        one = torch.ones(1)
        self._unscale([one], total_norm)
        self._factor = one.item()

    def step(self, group: int) -> None:
        """Updates the partition of a group."""
        zero, op = self._zero, self._op
        partitions = zero.parallel_partitioned_bit16_groups[group]
        mine = partitions[torch.distributed.get_rank(group=zero.real_dp_process_group[group])]
        spans = self._spans(group, mine.numel())
        if not self._buffers:
            with op.writing(None, self._factor, spans):
                self._step(group)
            self._factor = 1.0
            return
        is_here = mine.device.type == "cpu"
        out = mine.data if is_here else self._buffers[group]
        if not is_here and spans != [(0, mine.numel())]:
            out.copy_(mine.data)  # for elements that are not updated
        with op.writing(out, self._factor, spans) as written:
            self._step(group)
        self._factor = 1.0
        buffer = out.as_subclass(_Written) if written.is_done else self._buffers[group]
        getattr(zero, _BUFFERS)[group] = buffer

    def _spans(self, group: int, size: int) -> list[tuple[int, int]]:
        """Returns the ranges of this rank's partition with a gradient of this step; all if every parameter has one."""
        zero = self._zero
        spans: list[tuple[int, int]] = []
        numbers = [zero.get_param_id(param) for param in zero.params_in_partition[group]]
        for number in numbers:
            _, _, begin, count = zero.grad_position[number]
            if number in zero.norm_for_param_grads:
                spans.append((begin, begin + count))
        return [(0, size)] if len(spans) == len(numbers) else sorted(spans)


def install(zero: Any, op: CpuAdamOp) -> None:
    """Installs the step if this is an optimizer of ZeRO-Offload that updates whole partitions; else does nothing."""
    names = (
        *("unscale_and_clip_grads", "_optimizer_step", "params_in_partition"),
        *("grad_position", "norm_for_param_grads"),
    )
    others = ("zenflow", "torch_autocast_gradscaler")
    if all(hasattr(zero, name) for name in names) and not any(getattr(zero, name, None) for name in others):
        OffloadStep(zero, op)
