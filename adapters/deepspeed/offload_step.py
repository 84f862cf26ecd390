"""ZeRO-Offload's step (stages 1 and 2) in one pass over a partition: unscale, clip, update, 16-bit parameters out.

The host reads and writes the f32 gradients to unscale and clip them, updates, copies the masters to a 16-bit buffer and
that to the parameters. Here the factor goes into the update, which writes the 16-bit parameters itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sluice.adapters.deepspeed.cpu_adam import CpuAdamOp

_COPY = torch.Tensor.copy_


class _Written(torch.Tensor):
    """16-bit parameters that the update has written. The copies that the host makes next have nothing to do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _COPY and (isinstance(args[0], cls) or args[0].data_ptr() == args[1].data_ptr()):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class OffloadStep:
    """Of one ZeRO optimizer, whose methods `unscale_and_clip_grads` and `_optimizer_step` it stands before."""

    def __init__(self, zero: Any, op: CpuAdamOp) -> None:
        self._zero, self._op = zero, op
        self._unscale: Callable[..., None] = zero.unscale_and_clip_grads
        self._step: Callable[[int], None] = zero._optimizer_step
        self._buffers = list(zero.param_buffer_of_bit16_for_cpu_offload_groups)
        self._factor = 1.0
        zero.unscale_and_clip_grads, zero._optimizer_step = self.unscale, self.step

    def unscale(self, grads: Any, total_norm: Any) -> None:
        """Keeps the factor that the host would multiply gradients by; its own code says which."""
        one = torch.ones(1)
        self._unscale([one], total_norm)
        self._factor = one.item()

    def step(self, group: int) -> None:
        """Updates the partition of a group."""
        zero, op = self._zero, self._op
        partitions = zero.parallel_partitioned_bit16_groups[group]
        mine = partitions[torch.distributed.get_rank(group=zero.real_dp_process_group[group])]
        out = mine.data if mine.device.type == "cpu" else self._buffers[group]
        with op.writing(out, self._factor) as written:
            self._step(group)
        self._factor = 1.0
        buffer = out.as_subclass(_Written) if written.is_done else self._buffers[group]
        zero.param_buffer_of_bit16_for_cpu_offload_groups[group] = buffer


def install(zero: Any, op: CpuAdamOp) -> None:
    """Where this is an optimizer of ZeRO-Offload that updates whole partitions; others stay as they are."""
    names = ("unscale_and_clip_grads", "_optimizer_step", "param_buffer_of_bit16_for_cpu_offload_groups")
    others = ("zenflow", "torch_autocast_gradscaler")
    if all(hasattr(zero, name) for name in names) and not any(getattr(zero, name, None) for name in others):
        OffloadStep(zero, op)
