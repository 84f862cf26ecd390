# SPDX-License-Identifier: Apache-2.0
"""Accesses the flat buffers in which DeepSpeed's optimizers of ZeRO 1 and 2 and of bf16 keep masters and moments.

Each group of parameters has one buffer, which is partitioned over the ranks with replicas. The places follow the order
in which the optimizer lays out its buffer. DeepSpeed's own mapping of a parameter (`_hp_mapping`) has the order of the
user's group, which differs if "round_robin_gradients" reorders the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

# Names of a parameter's contents that are not moments.
MASTER = "master"
GRADIENT = "gradient"


class _Place(NamedTuple):
    group: int
    offset: int  # in the buffer of all replicas
    index: int  # among the parameters that overlap this rank's part; not used for others


class FlatBuffers:
    """Reads and writes any part of any parameter. The caller makes a new one after the optimizer's groups change."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        is_zero = hasattr(optimizer, "round_robin_bit16_groups")
        self.groups: Sequence[Sequence[nn.Parameter]] = (  # as they are laid out
            optimizer.round_robin_bit16_groups if is_zero else optimizer.bf16_groups
        )
        self.masters: Sequence[torch.Tensor] = (  # this rank's part of each group
            optimizer.single_partition_of_fp32_groups if is_zero else optimizer.fp32_groups_flat_partition
        )
        self._begins = [
            dist.get_rank(group=group) * master.numel()
            for group, master in zip(optimizer.real_dp_process_group, self.masters)
        ]
        self._places: dict[nn.Parameter, _Place] = {}
        padded = getattr(optimizer, "round_robin_bit16_offsets", None) if is_zero else None
        for group, laid in enumerate(self.groups):
            offsets = accumulate((p.numel() for p in laid), initial=0) if padded is None else padded[group]
            begin, end, index = self._begins[group], self._begins[group] + self.masters[group].numel(), 0
            for parameter, offset in zip(laid, offsets):
                self._places[parameter] = _Place(group, offset, index)
                index += offset < end and offset + parameter.numel() > begin

    def has(self, parameter: nn.Parameter) -> bool:
        """Returns whether the buffers have the parameter, because it was trained when they were made."""
        return parameter in self._places

    def part(self, parameter: nn.Parameter, key: str) -> tuple[int, torch.Tensor] | None:
        """Returns the offset of this rank's part in a parameter, and that part of the parameter's master, gradient or
        moment, as a view. None: this rank has no part of the parameter."""
        place = self._places[parameter]
        master, begin = self.masters[place.group], self._begins[place.group]
        first, last = max(place.offset, begin), min(place.offset + parameter.numel(), begin + master.numel())
        if first >= last:
            return None
        if key == GRADIENT:
            own = self._gradient(parameter, place)
            return None if own is None else (first - place.offset, own.view(-1))
        whole = master.detach() if key == MASTER else self._optimizer.optimizer.state[master][key]
        return first - place.offset, whole.view(-1).narrow(0, first - begin, last - first)

    def read(self, parameter: nn.Parameter, key: str, first: int, count: int) -> torch.Tensor:
        """Returns `count` elements from `first` on, gathered from all replicas. Collective over them."""
        whole = self.own(parameter, key, first, count)
        self.gather(parameter, whole)
        return whole

    def own(self, parameter: nn.Parameter, key: str, first: int, count: int) -> torch.Tensor:
        """Returns `count` elements from `first` on. Elements outside this rank's part are 0."""
        whole = torch.zeros(count, dtype=torch.float32, device=parameter.device)
        part = self._within(parameter, key, first, count)
        if part is not None:
            start, own = part
            whole.narrow(0, start, own.numel()).copy_(own)
        return whole

    def gather(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Fills in the other replicas' parts of a result of `own`. Collective over the replicas."""
        # Summed as integers, for which 0 + x has the bits of x. The float -0 would become 0.
        group = self._optimizer.real_dp_process_group[self._places[parameter].group]
        dist.all_reduce(whole.view(torch.int32), group=group)

    def write(self, parameter: nn.Parameter, key: str, first: int, values: torch.Tensor) -> None:
        """Writes `values` to the elements from `first` on, as far as this rank's part has these elements."""
        part = self._within(parameter, key, first, values.numel())
        if part is not None:
            start, own = part
            own.copy_(values.view(-1).narrow(0, start, own.numel()))

    def _within(self, parameter: nn.Parameter, key: str, first: int, count: int) -> tuple[int, Any] | None:
        part = self.part(parameter, key)
        if part is None:
            return None
        start, own = part
        low, high = max(start, first), min(start + own.numel(), first + count)
        return None if low >= high else (low - first, own.narrow(0, low - start, high - low))

    def _gradient(self, parameter: nn.Parameter, place: _Place) -> torch.Tensor | None:
        optimizer = self._optimizer
        kept = optimizer.offload_gradient_dict if optimizer.cpu_offload else optimizer.averaged_gradients
        parts = kept.get(place.group)
        if parts is None:
            return None
        padding = getattr(optimizer, "round_robin_bit16_padding", None)
        # With padding between parameters, which has its own entries, DeepSpeed's mapping has the index.
        padded = padding is not None and any(padding[place.group])
        return parts[parameter._index_in_param_group if padded else place.index]  # type: ignore[attr-defined]
