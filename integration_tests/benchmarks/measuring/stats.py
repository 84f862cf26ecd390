# SPDX-License-Identifier: Apache-2.0
"""The statistics in records."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Count, lower quartile, median, upper quartile."""
    one = len(values) < 2
    q1, median, q3 = values * 3 if one else statistics.quantiles(values, n=4, method="inclusive")
    return {"count": len(values), "q1": q1, "median": median, "q3": q3}


def pair_ratios(top: Sequence[float], bottom: Sequence[float]) -> dict[str, float]:
    """Quartiles of top / bottom over neighbouring pairs, in which slow drift cancels."""
    return quartiles([a / b for a, b in zip(top, bottom, strict=True)])


def median_of_pairs(ratios: list[float]) -> dict[str, float]:
    """The median, and the order statistics that contain the true median with 95 % confidence."""
    ordered = sorted(ratios)
    reach = 0.98 * math.sqrt(len(ordered))  # 1.96 standard deviations of a fair coin's heads
    low, high = math.floor(len(ordered) / 2 - reach), math.ceil(len(ordered) / 2 + reach)
    return {
        "median": statistics.median(ordered),
        "low": ordered[max(0, low)],
        "high": ordered[min(len(ordered) - 1, high)],
    }


def misses(name: str, wanted: Iterable[tuple[str, Any, str, Any]]) -> list[str]:
    """A line for each mark that is missed: what, the value, ">=" or "<=", and the mark. None is not judged."""
    return [
        f"{name}: {value:.3g} {what}, wanted {sign} {mark:.3g}"
        for what, value, sign, mark in wanted
        if None not in (value, mark) and (value < mark if sign == ">=" else value > mark)
    ]
