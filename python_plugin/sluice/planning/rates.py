# SPDX-License-Identifier: Apache-2.0
"""Computes seconds of single operations on a machine as the library does: GEMMs, moves of rows, exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .planner import Planner

FORMS = ("forward", "input_grad", "weight_grad")
_PLAIN = ("identity", "relu", "relu2")  # activations without an exponential


class Rates:
    """Rates of a planner's machine. The planner has checked the machine and writes its rates as points."""

    def __init__(self, planner: Planner) -> None:
        self._machine: dict[str, Any] = planner.written()

    def gemm(self, dtype: str, form: str, rows: float) -> float:
        """Returns the seconds per flop with this number of rows per expert."""
        forms = self._machine.get("gemm", {}).get(dtype, {})
        points = forms.get(form) or forms.get("forward") or []
        if not points or rows <= 0:
            return 0.0
        if rows >= points[-1][0]:
            return float(points[-1][1])
        return _at([(x, x * y) for x, y in points], rows) / rows

    @property
    def gemm_call(self) -> float:
        """Returns the additional seconds for the GEMM of each expert."""
        return float(self._machine.get("gemm_call_seconds", 0))

    def rows(self, count: float) -> float:
        """Returns the seconds to gather or copy `count` bytes."""
        return _curve(self._machine.get("rows", {}), count)

    def activation(self, name: str | None, backward: bool) -> float:
        """Returns the seconds per element."""
        end = "activation_grad_seconds" if backward else "activation_seconds"
        plain = "relu_grad_seconds" if backward else "relu_seconds"
        has_plain = self._machine.get("relu_seconds", 0) + self._machine.get("relu_grad_seconds", 0) > 0
        return float(self._machine.get(plain if name in _PLAIN and has_plain else end, 0))

    def cache_miss(self, backward: bool, size: float) -> float:
        """Returns the factor on the seconds of all GEMMs and activations of a pass whose rows have `size` bytes."""
        curve = self._machine.get("cache_miss_backward" if backward else "cache_miss_forward", {})
        return _curve(curve, size) if curve.get("points") else 1.0

    def exchange(self, ranks: int, count: float) -> float:
        """Returns the seconds of an all-to-all in which the most loaded rank sends or receives `count` bytes."""
        near = int(self._machine.get("ranks_per_node", 0))
        if ranks <= 1:
            return 0.0
        if near == 0 or near >= ranks:
            return self._link("node_exchange" if near else "exchange", ranks - 1, count)
        outside, peers = ranks - near, ranks - 1
        between = self._link("exchange", outside, count * outside / peers)
        return max(between, self._link("node_exchange", near - 1, count * (near - 1) / peers))

    def _link(self, name: str, peers: int, count: float) -> float:
        link = self._machine.get(name, {})
        startup = link.get("startup_seconds", 0) + link.get("per_peer_seconds", 0) * peers
        return float(startup) + _curve(link, count)


def _curve(curve: Any, x: float) -> float:
    points = curve.get("points", [])
    if not points or x <= 0:
        return 0.0
    if len(points) == 1:
        return float(points[0][1] * x / points[0][0])
    found = _at(points, x)
    return max(found, points[-1][1]) if x > points[-1][0] else found


def _at(points: Sequence[Sequence[float]], x: float) -> float:
    """Interpolates linearly between the two nearest points. Below the first point, its value is returned."""
    if x <= points[0][0]:
        return float(points[0][1])
    i = max(k for k in range(len(points) - 1) if k == 0 or x > points[k][0])
    (x0, y0), (x1, y1) = points[i], points[i + 1]
    return float(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
