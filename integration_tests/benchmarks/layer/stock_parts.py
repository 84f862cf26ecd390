# SPDX-License-Identifier: Apache-2.0
"""Times the parts of DeepSpeed's own MoE layer from outside: all-to-alls and experts, forward and backward.

The stock layer is strictly sequential: dispatch, experts, combine, and the reverse in the backward. The forward times
the experts' own call. The backward counts the time from the end of the first all-to-all to the begin of the second as
the experts' time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deepspeed.moe import sharded_moe
from torch import nn


class StockParts:
    """Context manager: records events of the given stock layers, in the form of Sluice's own trace."""

    def __init__(self, layers: list[nn.Module], rank: int) -> None:
        self.layers, self.rank = layers, rank
        self.events: list[dict[str, Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._forward_layer = -1  # the layer whose forward is running; -1 in between
        self._first_end: dict[str, int] = {}  # end of the open pass's first all-to-all
        self._backward_order: list[int] = []

    def __enter__(self) -> StockParts:
        """Wrap the all-to-all function and the experts' call in timers."""
        comm = sharded_moe.dist
        original = comm.all_to_all_single

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic_ns()
            result = original(*args, **kwargs)
            self._exchange(begin, time.monotonic_ns())
            return result

        comm.all_to_all_single = timed
        self._undo.append(lambda: setattr(comm, "all_to_all_single", original))
        for index, layer in enumerate(self.layers):
            self._hook(index, layer)
        return self

    def __exit__(self, *_exc: object) -> None:
        """Remove all timers."""
        while self._undo:
            self._undo.pop()()

    def _hook(self, index: int, layer: nn.Module) -> None:
        begins: list[int] = []

        def enter(*_: object) -> None:
            self._forward_layer = index
            self._first_end.pop("forward", None)

        def leave(*_: object) -> None:
            self._forward_layer = -1
            self._backward_order.append(index)

        def experts_begin(*_: object) -> None:
            begins.append(time.monotonic_ns())

        def experts_end(*_: object) -> None:
            self._add("C", "forward", index, begins.pop(), time.monotonic_ns())

        experts = layer.get_submodule("experts")
        for handle in (
            layer.register_forward_pre_hook(enter),
            layer.register_forward_hook(leave),
            experts.register_forward_pre_hook(experts_begin),
            experts.register_forward_hook(experts_end),
        ):
            self._undo.append(handle.remove)

    def _exchange(self, begin: int, end: int) -> None:
        forward = self._forward_layer >= 0
        direction = "forward" if forward else "backward"
        layer = self._forward_layer if forward else (self._backward_order[-1] if self._backward_order else 0)
        if direction not in self._first_end:
            self._add("S", direction, layer, begin, end)
            self._first_end[direction] = end
            return
        if not forward:
            self._add("C", direction, layer, self._first_end[direction], begin)
            if self._backward_order:
                self._backward_order.pop()
        self._add("R", direction, layer, begin, end)
        del self._first_end[direction]

    def _add(self, op: str, direction: str, layer: int, begin: int, end: int) -> None:
        lane = "compute" if op == "C" else "comm"
        self.events.append(
            {
                "rank": self.rank,
                "lane": lane,
                "op": op,
                "chunk": 0,
                "direction": direction,
                "layer": layer,
                "begin_ns": begin,
                "end_ns": end,
            }
        )
